"""
The Muon family with variance adaptation: Muon-NSR and Muon-VS (the paper's Algorithm 1), and what they are compared with.
One file, torch only: copy it next to your script.

    from optim import Muon, AdamW
    opt = Muon(matrices, lr=6e-4, variant="muon-vs", momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    aux = AdamW([dict(params=embeddings_and_head, weight_decay=0.1), dict(params=vectors, weight_decay=0)], lr=6e-4, betas=(0.9, 0.95))

A variant is a pure function from gradient and state to the proxy that Newton-Schulz orthogonalises; a few also act on what
comes out. Everything element-wise is one compiled function before Newton-Schulz and one after it.

Shapes: W, G, M, Γ are (..., m, n), m the output and n the input dimension; in rules (k, m, n), k matrices at once. Symbols are
the paper's: β momentum, η lr, λ weight decay, γ the coefficient of Muon-NSR, ε what stabilises a division, hat bias-corrected,
tilde with Nesterov's lookahead. In rules S is the state, buffers by name; h the hyperparameters; X goes into Newton-Schulz, O comes
out; ok: which G are finite.
"""
import contextlib
import copy
import itertools
import math
import threading
import types
import warnings
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

# MKL 2024.2 may stay imprecise if a function's first call uses several threads (pytorch issue 188792); for one number it uses one
for precision in (torch.float32, torch.float64):
    torch.ones(1, dtype=precision, device="cpu").sqrt()

# ----------------------------------------------------------------------------------------------------------------------
# Newton-Schulz

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at 0: singular values end around 1, not at it (Keller Jordan, 2024)


@torch.no_grad()
def newton_schulz(G: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximate polar factor U Vᵀ of G = U S Vᵀ: `steps` times X <- aX + (bA + cA²)X with A = XXᵀ, from X = G / (|G|_F + eps).

    G: (..., m, n), any float dtype; normalised in fp32 (fp64 for fp64), iterated in `dtype`. Returns (..., m, n) in `dtype`.
    A zero matrix gives zero, if eps is above 0. Raises ValueError for fewer than two dimensions, no elements, or integers.
    """
    if G.ndim < 2 or not G.numel() or not G.is_floating_point():
        raise ValueError(f"newton_schulz takes (..., m, n), floating-point and not empty; found shape {tuple(G.shape)} and {G.dtype}; "
                         "give vectors to AdamW")
    X = _wide(_normalise(G.to(_compute_dtype(G)), eps)).to(dtype)
    O = _iterate(X.reshape(-1, *X.shape[-2:]).contiguous(), steps).view(X.shape)
    return O.mT if G.size(-2) > G.size(-1) else O


def _compute_dtype(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _normalise(X: Tensor, eps: float) -> Tensor:
    squares = (X if X.device.type == "mps" else X.double()).square()  # in fp64 none over- or underflows; MPS has no fp64
    return X / (squares.sum((-2, -1), keepdim=True).sqrt() + eps).to(X.dtype)


def _wide(X: Tensor) -> Tensor:
    return X.mT if X.size(-2) > X.size(-1) else X


def _iterate(X: Tensor, steps: int) -> Tensor:
    """Newton-Schulz on a normalised batch X (k, m, n) with m <= n, in fewer operations. Overwrites X.

    An iteration is X <- ZX with Z = aI + bR + cR² and R = XXᵀ. Two of them need one R only: the second's is ZRZ, and products
    of m x m matrices are cheaper than those with X where n is large. All are polynomials in R, so they commute and are
    symmetric. Every other R serves one iteration only, or rounding would build up: five are made as 2 + 1 + 2. Each m x m matrix
    is held as a multiple of I and a rest, R = μI + E, since bf16 keeps a small rest more exactly than the whole; μ affects rounding only.
    E is smallest at tr(R)/m, which is 1/m at first; later it varies, and 0.2 stands for all.
    """
    m, n = X.shape[-2:]
    Y = torch.empty_like(X)
    mu, pair = 1 / m, False
    known = torch.amp.is_autocast_available(X.device.type)
    with torch.autocast(X.device.type, enabled=False) if known else contextlib.nullcontext():  # the precision is X's own
        while steps > 0:
            E = X @ X.mT
            E.diagonal(dim1=-2, dim2=-1).sub_(mu)           # R = μI + E
            z, F = _polynomial(mu, E)                       # Z = zI + F
            pair = n >= 2 * m and steps > 1 and not pair    # does this R serve two iterations?
            if pair:
                zrz = _product(*_product(mu, E, z, F), z, F)
                z, F = _product(z, F, *_polynomial(*zrz))   # both Z in one
            torch.baddbmm(X, F, X, beta=z, out=Y)           # ZX
            X, Y, mu, steps = Y, X, 0.2, steps - 1 - pair
    return X


def _polynomial(mu: float, E: Tensor) -> tuple[float, Tensor]:
    """aI + bR + cR² of R = μI + E, as a multiple of I and a rest."""
    a, b, c = NS_COEFFICIENTS
    return a + b * mu + c * mu**2, torch.baddbmm(E, E, E, beta=b + 2 * c * mu, alpha=c)


def _product(x: float, A: Tensor, y: float, B: Tensor) -> tuple[float, Tensor]:
    """(xI + A)(yI + B) of matrices that commute, as a multiple of I and a rest; y is not 0."""
    return x * y, torch.add(A, B, alpha=x / y).baddbmm_(A, B, beta=y)


# ----------------------------------------------------------------------------------------------------------------------
# The variants: proxy(G, S, h) -> (X for Newton-Schulz, new S), and for some after(O, G, S, h) -> (O, new S)


class Hyper(NamedTuple):
    """What an update reads besides gradient and state: tensors, so that a new value recompiles nothing, and constants."""
    lr: Tensor            # η, () as all but bias
    weight_decay: Tensor  # λ
    beta: Tensor          # β, the momentum
    beta2: Tensor         # β₂, decay of a second moment that is not tied to the momentum
    gamma: Tensor         # γ
    bias: Tensor          # 1 - βᵗ, the bias correction of this step: () or (k, 1, 1)
    scale: Tensor | None  # s; None is AdaMuon's s = 0.2 √(mn) / |O|_F
    eps: float            # ε
    ns_eps: float
    nesterov: bool


def muon(G, S, h):
    """Muon (Jordan et al., 2024), as in the paper's "Muon's Spectral Sign Update"."""
    M = h.beta * S["momentum"] + G                                            # M_t = β M_{t-1} + G_t
    M_tilde = G + h.beta * M if h.nesterov else M
    return M_tilde, {"momentum": M}


def mean_and_variance(G, S, h):
    """Algorithm 1, lines 4 to 7: M̃, the corrected mean with lookahead; Γ̂, the corrected variance; the new state."""
    M_old = S["momentum"]
    M = h.beta * M_old + (1 - h.beta) * G                                     # line 4
    var = h.beta * S["variance"] + h.beta * (1 - h.beta) * (M_old - G) ** 2   # line 5, Γ
    M_hat, var_hat = M / h.bias, var / h.bias                                 # line 6
    M_tilde = G + h.beta / (1 - h.beta) * M_hat if h.nesterov else M_hat      # line 7
    return M_tilde, var_hat, {"momentum": M, "variance": var}


def muon_nsr(G, S, h):
    """Muon-NSR: Algorithm 1 with τ = NSR."""
    M_tilde, var_hat, S = mean_and_variance(G, S, h)
    return M_tilde / ((M_tilde**2 + h.gamma * var_hat).sqrt() + h.eps), S     # line 9


def muon_vs(G, S, h):
    """Muon-VS: Algorithm 1 with τ = VS."""
    M_tilde, var_hat, S = mean_and_variance(G, S, h)
    return M_tilde / (var_hat.sqrt() + h.eps), S                              # line 11


def muon_nsr_post(G, S, h):
    """Muon-NSR-Reshuffled: Algorithm 2, the gate of Muon-NSR moved behind Newton-Schulz (lines 4 to 7)."""
    M_tilde, _, S = mean_and_variance(G, S, h)
    return M_tilde, S


def muon_nsr_post_after(O, G, S, h):
    M_hat, var_hat = S["momentum"] / h.bias, S["variance"] / h.bias           # line 6, of the state that the proxy left
    M_tilde = G + h.beta / (1 - h.beta) * M_hat if h.nesterov else M_hat      # line 7
    return O / (1 + h.gamma * var_hat / (M_tilde**2 + h.eps)).sqrt(), {}      # lines 9 and 10


def adamuon(G, S, h):
    """AdaMuon (Si et al., 2025): Newton-Schulz of the sign, then Adam's second moment of the result."""
    M_tilde, S = muon(G, S, h)
    return M_tilde.sign(), S


def adamuon_after(O, G, S, h):
    V = h.beta * S["second_moment"] + (1 - h.beta) * O**2
    return O / (V.sqrt() + h.eps), {"second_moment": V}


def normuon_after(O, G, S, h):
    """NorMuon (Li et al., 2025): one second moment a row (neuron) of the result, whose Frobenius norm is then restored."""
    v = h.beta2 * S["row_moment"] + (1 - h.beta2) * O.square().mean(-1, keepdim=True)
    P = O / (v.sqrt() + h.eps)
    return P * _frobenius(O) / _frobenius(P).clamp_min(1e-30), {"row_moment": v}


def muon2(G, S, h):
    """Muon² (Liu et al., 2026): Adam's uncentred second moment before Newton-Schulz."""
    M_tilde, new = muon(G, S, h)
    V = h.beta2 * S["second_moment"] + (1 - h.beta2) * G**2
    return M_tilde / (V.sqrt() + h.eps), {**new, "second_moment": V}


def _frobenius(X: Tensor) -> Tensor:
    return X.square().sum((-2, -1), keepdim=True).sqrt()


class Variant(NamedTuple):
    proxy: Callable
    state: tuple[str, ...]            # names of a matrix's buffers; "row_moment" is (m, 1), the others are (m, n)
    after: Callable | None = None


# To add a variant, write a function above and a line here: both train scripts then take it as --optimizer, it is sharded, saved, compiled,
# and trained by the tests; test_optim.py needs its float64 form in Reference and its name in test_interface. Sums and norms are over
# (-2, -1): k is 1 on a CPU and may be all matrices of a shape on a GPU. A new hyperparameter is a last field of Hyper with a default,
# which _hyper fills in, an argument of Muon, also in its dict of defaults and in _check_options, and a global of the scripts that
# build_optimizers passes on.
VARIANTS = {
    "muon": Variant(muon, ("momentum",)),
    "muon-nsr": Variant(muon_nsr, ("momentum", "variance")),
    "muon-vs": Variant(muon_vs, ("momentum", "variance")),
    "muon-nsr-post": Variant(muon_nsr_post, ("momentum", "variance"), muon_nsr_post_after),
    "adamuon": Variant(adamuon, ("momentum", "second_moment"), adamuon_after),
    "normuon": Variant(muon, ("momentum", "row_moment"), normuon_after),
    "muon2": Variant(muon2, ("momentum", "second_moment")),
}


# ----------------------------------------------------------------------------------------------------------------------
# The passes over memory around Newton-Schulz, and AdamW: compiled, in place; where G is not finite, weights and state stay

LARGEST = 1e15  # gradients are clamped here, so that the squares and sums that follow stay finite in fp32


def _before(proxy, G, S, h, X):
    """Updates S and writes the normalised proxy to X, transposed if it is tall. Returns which G are finite, (k, 1, 1)."""
    ok = torch.isfinite(G.abs().amax((-2, -1), keepdim=True))
    proxied, new = proxy(_clean(G, ok), _upcast(S), h)
    if proxied.shape != G.shape:
        raise ValueError(f"{getattr(proxy, '__name__', proxy)} made a proxy of shape {tuple(proxied.shape)}, expected the gradient's "
                         f"{tuple(G.shape)}")
    _store(S, new, ok)
    X.copy_(_wide(_normalise(proxied, h.ns_eps)))
    return ok


def _after(after, W, O, G, S, h, noise, ok):
    """Algorithm 1, line 14: W <- W (1 - ηλ) - η s O."""
    O = (O.mT if W.size(-2) > W.size(-1) else O).to(_compute_dtype(W))
    if after is not None:
        O, new = after(O, _clean(G, ok), _upcast(S), h)
        _store(S, new, ok)
    scale = h.scale if h.scale is not None else 0.2 * math.sqrt(O.size(-2) * O.size(-1)) / _frobenius(O).clamp_min(1e-30)
    _write(W, W.to(O.dtype) * (1 - h.lr * h.weight_decay) - h.lr * scale * O, noise, ok)


def _adamw(W, G, S, lr, weight_decay, beta1, beta2, bias1, bias2, eps, noise, largest):
    """AdamW (Loshchilov & Hutter, 2019) for rows (k, n); largest: max |gradient| of a row's whole tensor, of all ranks, () or (k, 1)."""
    ok = largest.isfinite()
    G, old = _clean(G, ok), _upcast(S)
    M = beta1 * old["exp_avg"] + (1 - beta1) * G
    V = beta2 * old["exp_avg_sq"] + (1 - beta2) * G**2
    _store(S, {"exp_avg": M, "exp_avg_sq": V}, ok)
    _write(W, W.to(M.dtype) * (1 - lr * weight_decay) - lr * (M / bias1) / ((V / bias2).sqrt() + eps), noise, ok)


def _clean(G, ok):
    return torch.where(ok, G, 0).to(_compute_dtype(G)).clamp(-LARGEST, LARGEST)


def _upcast(S):
    return {name: s.to(_compute_dtype(s)) for name, s in S.items()}


def _store(S, new, ok):
    for name, value in new.items():
        S[name].copy_(torch.where(ok, value, S[name]))


def _write(W, new, noise, ok):
    """W <- new. noise (int32 in [0, 65536), W's shape) rounds it stochastically to bf16: added to the fp32 bits, the low 16 then cut."""
    if noise is not None:
        new = ((new.float().view(torch.int32) + noise) & -65536).view(torch.float32)
    W.copy_(torch.where(ok, new.to(W.dtype), W))


# options that are constants of a compiled graph; lr, weight_decay, momentum, gamma and the betas reach it as tensors
CONSTANT = ("variant", "nesterov", "adjust_lr_fn", "eps", "ns_eps", "state_dtype", "stochastic_rounding")
_compiled = {}  # (function, constants) -> its compiled form; None -> torch.compile failed


def _run(group: dict, function: Callable, *args):
    """function(*args) through torch.compile: on a CPU a few graphs for all shapes (wide or tall, one matrix or several), on a GPU one
    or two for each shape of units, whose kernels read 16 bytes at once and divide no indices; eagerly, after one warning, where no
    compiler works."""
    if not group["compile"] or None in _compiled:
        return function(*args)
    tensors = [a for a in args[:2] if isinstance(a, Tensor)]  # G, W or both
    gpu = tensors[0].is_cuda
    key = (function, *(group.get(option) for option in CONSTANT), *((t.dtype, gpu and t.shape[1:]) for t in tensors))
    try:
        if key not in _compiled:  # a code object each, because Dynamo limits the graphs of one
            own_code = types.FunctionType(function.__code__.replace(), function.__globals__)
            # without fullgraph: with it, torch 2.13 may fail after it has run the function
            _compiled[key] = torch.compile(own_code, dynamic=None if gpu else True)
        return _compiled[key](*args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        result = function(*args)  # an error that is not the compiler's comes again here
        _compiled[None] = None  # not the error: it holds these tensors
        warnings.warn(f"the optimizer runs uncompiled, so slower: torch.compile failed ({type(error).__name__}: "
                      f"{' '.join(str(error).split())[:150]}); install a C++ compiler, mend a rule that you "
                      "changed, or pass compile=False")
        return result


# ----------------------------------------------------------------------------------------------------------------------
# Ranks: who owns what, one asynchronous gather a bucket, whole state dicts


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _checksum(p: Tensor) -> int:
    """Sum of the bits as integers: exact in any order; in parts, because they are widened."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = p.detach().contiguous().view(-1).view(integers[p.element_size()])
    return sum(part.sum(dtype=torch.int64).item() for part in bits.split(2**24))


class _Sharded(torch.optim.Optimizer):
    """An optimizer that splits its state and its work over the ranks of the default process group, where there is one.
    Parameters and gradients must be the same on all ranks, as under DistributedDataParallel; not for FSDP or tensor parallelism.

    A parameter is seen as units along a leading dimension (`_units`): matrices for Muon, rows for AdamW. Each rank owns a range
    of every parameter's units, updates it, and gets the others by an all-gather before step() returns, so all ranks end with
    the same bits. `state[p]` holds this rank's range; state_dict() holds everything. Who owns what never depends on gradients.

    A subclass says what it takes (_check_options, _check), what a unit is (_units, and _whole_shape back), what it costs (_cost),
    which rank gets which (_assign), what state this rank's begin with (_new_state) and how they change (_update).
    """

    _buckets, _ranges, _ranks, _seen, _agreed = None, {}, None, None, None  # of _layout: pickle and deepcopy leave them behind
    skipped = 0  # updates of this rank left out so far because a gradient was not finite; a tensor after a step

    def add_param_group(self, param_group: dict):
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for i, p in enumerate(self.param_groups[-1]["params"]):
                if hasattr(p, "placements"):
                    raise ValueError(f"parameter {i} is a DTensor, of FSDP or tensor parallelism, expected a whole tensor, the same on "
                                     f"all ranks: wrap the model in DistributedDataParallel, {type(self).__name__} shards its own state")
                self._check(i, p)
        except ValueError:
            self.param_groups.pop()
            raise

    def _layout(self) -> list[tuple[dict, list[Tensor]]]:
        """[(group, its parameters of one shape, dtype and device)]; sets _ranges: parameter -> (first, last + 1) unit of each rank."""
        if any(self.state.values()) and self._ranks not in (None, _world()):
            raise RuntimeError(f"{type(self).__name__} has split its state over {self._ranks} ranks, now there are {_world()}: call "
                               "init_process_group before the first step, and destroy_process_group after the last state_dict")
        seen = [(id(group), *((id(p), p.shape) for p in group["params"])) for group in self.param_groups]
        if self._ranks == _world() and self._seen == seen:
            return self._buckets
        old = self._ranges if self._ranks == _world() else {}
        self._buckets, self._ranges, self._ranks, self._seen, load = [], dict(old), _world(), seen, [0] * _world()
        for group in self.param_groups:  # in this order, so that a group that is added later moves nothing
            alike: dict = {}
            for p in group["params"]:
                alike.setdefault((p.shape, p.dtype, p.device), []).append(p)
            for bucket in sorted(alike.values(), key=lambda bucket: -self._cost(bucket[0])):
                self._assign(bucket, load)
                self._buckets.append((group, bucket))
        if _world() > 1 and any(self._ranges[p] != ranges for p, ranges in old.items()):
            self._seen, self._ranges = None, old  # the next call finds the change again
            raise RuntimeError("param_groups were changed so that state would have to move between ranks: build a new optimizer, or "
                               "add groups only")
        return self._buckets

    def _own(self, p: Tensor, t: Tensor) -> Tensor:
        """This rank's units (k, ...) of a tensor of p's shape."""
        start, stop = self._ranges[p][_rank()]
        return self._units(t)[start:stop]

    @torch._disable_dynamo  # what can be compiled is; the rest does not survive a graph around it
    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """One update of every parameter with a gradient; the others keep value and state: no weight decay either.

        Returns closure()'s loss. A matrix (for AdamW a parameter) whose gradient has a NaN or inf keeps its value and buffers
        too, though its step counts. `self.skipped` has the number of these, a tensor that nobody waits for until you read it; on a
        CPU a warning tells.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise RuntimeError(f"{type(self).__name__} takes dense gradients, found a sparse one: build nn.Embedding with sparse=False")
        for group in self.param_groups:  # again: schedules change options, and a .to(memory_format=...) would make units copies
            self._check_options(group)
            for i, p in enumerate(group["params"]):
                self._check(i, p)
        finite, exchanges, buckets = [], [], self._layout()
        if self._agreed != self._seen:
            self._agree()
        for group, bucket in buckets:
            mine = [p for p in bucket if p.grad is not None and len(self._own(p, p))]
            for p in mine:
                if not self.state.get(p):  # or a reader of state[p] has made an empty one
                    self.state[p] = self._new_state(group, p)
                self.state[p]["step"] += 1
            if mine:
                finite += self._update(group, mine)
            if _world() > 1:
                exchanges.append(self._exchange(bucket, [self._own(p, p.detach()) for p in bucket]))
        for received in exchanges:
            if pairs := received():
                torch._foreach_copy_(*zip(*pairs))
        if finite:
            bad = sum((~ok).sum().to(finite[0].device) for ok in finite)
            self.skipped = self.skipped + bad
            if bad.device.type == "cpu" and bad:
                warnings.warn(f"{type(self).__name__}: a gradient is not finite; {int(bad)} of the updates were left out")
        return loss

    def _joined_state(self, params, name):
        """This buffer of all `params` as one tensor, of which each state[p][name] is a view from the first step on."""
        parts = [self.state[p][name] for p in params]
        whole, places = parts[0]._base, [part.storage_offset() for part in parts]
        alone = whole is None or len(whole) != sum(map(len, parts)) or any(part._base is not whole for part in parts)
        if alone or places != sorted(places):  # who changes param_groups may change the order
            whole = _joined(parts)
            for p, part in zip(params, whole.split([len(part) for part in parts])):
                self.state[p][name] = part
        return whole

    def _from_all(self, thing) -> list:
        """`thing` of every rank; NCCL takes it through the current GPU, which is made the parameters'."""
        everyone, devices = [thing] * _world(), [p.device for group in self.param_groups for p in group["params"] if p.is_cuda]
        if _world() > 1:
            with torch.cuda.device(devices[0]) if devices else contextlib.nullcontext():
                dist.all_gather_object(everyone, thing)
        return everyone

    def _agree(self) -> None:
        """Once for a layout: RuntimeError, on all ranks, where a parameter has another shape than its state (no buffer has that
        of this rank's units), or other values than on rank 0, as the first exchange would overwrite it."""
        params, name = [p for group in self.param_groups for p in group["params"]], type(self).__name__
        shapes = [[t.shape for t in self.state.get(p, {}).values() if isinstance(t, Tensor)] for p in params]
        outgrown = [i for i, p in enumerate(params) if shapes[i] and self._own(p, p).shape not in shapes[i]]
        everyone = self._from_all(([(p.shape, p.dtype, _checksum(p)) for p in params if _world() > 1], outgrown))
        for r, (theirs, outgrown) in enumerate(everyone):
            for i in outgrown:
                raise RuntimeError(f"parameter {i} of {name} has become one of shape {tuple(params[i].shape)}, its state has not: build a "
                                   "new optimizer, or del optimizer.state[parameter]")
            for i, (mine, other) in enumerate(itertools.zip_longest(theirs, everyone[0][0])):
                if mine != other:
                    raise RuntimeError(f"parameter {i} of {name} is not the same on ranks 0 and {r}: wrap the model in Distributed"
                                       "DataParallel, load checkpoints on all ranks; not for FSDP, tensor or pipeline parallelism")
        self._agreed = self._seen

    def _exchange(self, params: list[Tensor], own: list[Tensor]) -> Callable:
        """Starts to send `own`, this rank's units of each of `params`, to all. Returns a function that waits for it and gives
        [(where they go, units)] of the other ranks; it holds the tensors and the Work until then."""
        ranges = [[self._ranges[p][r] for p in params] for r in range(_world())]
        most = max(sum(stop - start for start, stop in of_rank) for of_rank in ranges)
        mine = torch.cat([*own, own[0].new_zeros(most - sum(map(len, own)), *own[0].shape[1:])])  # equal sizes on all ranks
        everyone = mine.new_empty(_world(), *mine.shape)
        as_bytes = lambda t: t.view(-1).view(torch.uint8)  # any dtype
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name until torch 2.12
        work = gather(as_bytes(everyone), as_bytes(mine), async_op=True)

        def received(held=mine):
            work.wait()
            pairs = []
            for r, of_rank in enumerate(ranges):
                at = 0
                for p, (start, stop) in zip(params, of_rank):
                    if r != _rank() and stop > start:
                        pairs.append((self._units(p.detach())[start:stop], everyone[r, at:at + stop - start]))
                    at += stop - start
            return pairs
        return received

    def state_dict(self) -> dict:
        """The whole state in torch's format, every buffer in its parameter's shape (row_moment: (..., m, 1)): the buffers themselves, as
        torch gives them, but with several ranks gathered copies; all ranks must call it then. Hooks find the whole state in self.state
        meanwhile."""
        self._layout()
        members = [(group, p) for group in self.param_groups for p in group["params"]]
        steps = [self.state[p]["step"] if self.state.get(p) else 0 for _, p in members]
        if _world() > 1:  # a parameter's owner knows
            alone = threading.Timer(60, warnings.warn, [f"{type(self).__name__}.state_dict() has waited for a minute: all ranks must call "
                                                        "it, not only the one that saves"])
            alone.start()
            try:
                steps = [max(of_p) for of_p in zip(*self._from_all(steps))]
            finally:
                alone.cancel()
        own, self.state = self.state, {}  # the whole state for a moment: torch packs it, and its hooks see it
        try:
            for (group, p), step in zip(members, steps):
                if step:
                    parts = own.get(p) or self._new_state(group, p)
                    self.state[p] = {name: step if name == "step" else self._gathered(p, mine) for name, mine in parts.items()}
            whole = super().state_dict()
        finally:
            self.state = own
        for group in whole.get("param_groups", ()):  # dtypes by name, for JSON and for StateDictOptions(full_state_dict=True)
            group.update({name: str(value) for name, value in group.items() if isinstance(value, torch.dtype)})
        return whole

    def _gathered(self, p: Tensor, mine: Tensor) -> Tensor:
        """A buffer of all of p's units, in its whole shape; mine: this rank's part, which with one rank is all of it."""
        whole = mine
        if _world() > 1:
            whole = mine.new_empty(len(self._units(p)), *mine.shape[1:])
            for r, (start, stop) in enumerate(self._ranges[p]):
                if r == _rank():
                    whole[start:stop] = mine
                if stop > start:  # a matrix has one owner: an all-gather would send as many times its size as there are ranks
                    dist.broadcast(whole[start:stop].view(-1).view(torch.uint8), r)
        return whole.view(self._whole_shape(p, mine))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Takes this rank's part of a whole state_dict, saved at any world size; hyperparameters but compile are loaded too.

        Raises ValueError where groups, parameters, shapes or buffers are not this optimizer's; nothing is changed then.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            if (changed := hook(self, state_dict)) is not None:
                state_dict = changed
        params = [p for group in self.param_groups for p in group["params"]]
        found, expected = ([len(g["params"]) for g in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if found != expected:
            raise ValueError(f"the state is of parameter groups of {found} tensors, this optimizer has {expected}: "
                             "build it with the same parameters in the same order")
        dtypes = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
        value = lambda v: dtypes.get(v, v) if isinstance(v, str) else copy.deepcopy(v)
        hyper = [{k: value(v) for k, v in saved.items() if k not in ("params", "compile")} for saved in state_dict["param_groups"]]
        group_of = {p: {**group, **saved} for group, saved in zip(self.param_groups, hyper) for p in group["params"]}
        for group, saved in zip(self.param_groups, hyper):
            self._check_options({**group, **saved})
        self._layout()
        state, of_id = {}, {}  # ids are numbers, as text where a state went through JSON, or names
        for i, p in zip((i for saved in state_dict["param_groups"] for i in saved["params"]), params):
            of_id[i] = of_id[str(i)] = p
        for i, entry in state_dict["state"].items():
            if i not in of_id:
                raise ValueError(f"the state has a parameter {i!r}, which none of its groups names")
            p = of_id[i]
            new = self._new_state(group_of[p], p)
            if set(entry) != set(new):
                raise ValueError(f"the state of parameter {i} has {sorted(entry)}, expected {sorted(new)}: "
                                 "it is of another optimizer or variant")
            start, stop = self._ranges[p][_rank()]
            for name, mine in new.items():
                if name == "step":
                    new[name] = int(entry[name])
                elif entry[name].shape != self._whole_shape(p, mine):
                    raise ValueError(f"{name} of parameter {i} has shape {tuple(entry[name].shape)}, "
                                     f"expected {tuple(self._whole_shape(p, mine))}")
                else:
                    new[name] = entry[name].reshape(-1, *mine.shape[1:])[start:stop].to(p.device, mine.dtype, copy=True).contiguous()
            if stop > start:
                state[p] = new
        for group, saved in zip(self.param_groups, hyper):
            group.update(saved)
        self.state.clear()
        self.state.update(state)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)


def _in_range(high: float, **values: float) -> None:
    for name, value in values.items():
        positive = name in ("eps", "ns_eps")
        above = 0 if positive else -1e-9  # torch's LinearLR to 0 ends at -1e-19
        if isinstance(value, (str, tuple, list, type(None))) or not above < value < high:
            raise ValueError(f"{name} is {value!r}, expected a number in {'(' if positive else '['}0, {high})")


def _floating(**dtypes: torch.dtype) -> None:
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"{name} is {dtype!r}, expected a floating-point dtype such as torch.bfloat16")


def _noise(group: dict, W: Tensor) -> Tensor | None:
    if not group["stochastic_rounding"] or W.dtype != torch.bfloat16:
        return None
    return torch.randint(0, 65536, W.shape, dtype=torch.int32, device=W.device)


def _scalar(value, p: Tensor) -> Tensor:
    """On the CPU whatever p's device: a graph takes a 0-d tensor from there, and it changes no dtype of what it multiplies."""
    return torch.as_tensor(value, dtype=torch.float32 if p.device.type == "mps" else torch.float64, device="cpu")


def _together(gpu: bool, steps: set[int], numel: int) -> int:
    """How many tensors of a shape AdamW takes in one call: on a GPU, where calls cost, as many as have 2**24 numbers, such as all gains."""
    return max(1, 2**24 // numel) if gpu and len(steps) == 1 else 1


def _joined(tensors):
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


class Muon(_Sharded):
    """Muon and its variants for matrices inside a network: (m, n), or (..., m, n) as a batch of matrices.

    Not for embeddings, the output head and vectors: give those to AdamW. Nor for convolution kernels (out, in, h, w) or (out, in, w),
    whose windows would be the matrices: hold them as (out, in·h·w).

    lr: η, in units of `adjust_lr_fn`, as in torch.optim.Muon: "original" s = √max(1, m/n); "match_rms_adamw" s = 0.2 √max(m, n),
        for learning rates tuned for AdamW; and "frobenius" s = 0.2 √(mn) / |O|_F, AdaMuon's own.
    variant: a key of VARIANTS. gamma (γ) is read by muon-nsr and muon-nsr-post, beta2 (β₂) by normuon and muon2.
    nesterov: without it M̃ is about 1 - β as large, so a γ tuned with it acts (1 - β)⁻² times as strongly: 400 times for 0.95.
    momentum: β, in [0, 1). weight_decay: λ, decoupled, multiplied by η but not by s. eps: ε of every variant but muon.
    ns_steps, ns_eps, ns_dtype: as in newton_schulz. state_dtype: of all buffers; default fp32 (fp64 for fp64 parameters). In bf16 an
        average whose β is above 0.996 stalls, because β times it is rounded back to it.
    stochastic_rounding: for bf16 parameters, so that updates below their resolution count on average.
    Every argument may differ between parameter groups. Raises ValueError for what it cannot optimize.
    """

    def __init__(self, params, lr: float = 1e-3, variant: str = "muon-vs", momentum: float = 0.95, weight_decay: float = 0.1,
                 gamma: float = 10.0, beta2: float = 0.95, eps: float = 1e-8, nesterov: bool = True, ns_steps: int = 5,
                 ns_eps: float = 1e-7, ns_dtype: torch.dtype = torch.bfloat16, adjust_lr_fn: str = "original",
                 state_dtype: torch.dtype | None = None, stochastic_rounding: bool = False, compile: bool = True):
        super().__init__(params, dict(
            lr=lr, variant=variant, momentum=momentum, weight_decay=weight_decay, gamma=gamma, beta2=beta2, eps=eps,
            nesterov=nesterov, ns_steps=ns_steps, ns_eps=ns_eps, ns_dtype=ns_dtype, adjust_lr_fn=adjust_lr_fn,
            state_dtype=state_dtype, stochastic_rounding=stochastic_rounding, compile=compile))

    def _check_options(self, group):
        for name, choices in (("variant", tuple(VARIANTS)), ("adjust_lr_fn", ("original", "match_rms_adamw", "frobenius"))):
            if group[name] not in choices:
                raise ValueError(f"{name} is {group[name]!r}, expected one of {', '.join(choices)}")
        _in_range(1, momentum=group["momentum"], beta2=group["beta2"])
        _in_range(math.inf, **{name: group[name] for name in ("lr", "weight_decay", "gamma", "eps", "ns_eps", "ns_steps")})
        if group["ns_steps"] != int(group["ns_steps"]):
            raise ValueError(f"ns_steps is {group['ns_steps']}, expected a whole number")
        _floating(ns_dtype=group["ns_dtype"], state_dtype=group["state_dtype"] or torch.float32)
        if group.get("use_muon") is False:
            raise ValueError("a group has use_muon=False, which Muon does not read: give its parameters to AdamW")

    def _check(self, i, p):
        if p.ndim < 2 or not p.numel() or not p.is_floating_point():
            raise ValueError(f"Muon takes floating-point matrices (..., m, n), found parameter {i} of shape {tuple(p.shape)} and "
                             f"{p.dtype}: give vectors, embeddings and the output head to AdamW")
        if p.ndim > 2 and not p.is_contiguous():
            raise ValueError(f"parameter {i} of shape {tuple(p.shape)} is not contiguous: call .contiguous() before building Muon")

    def _units(self, t):
        return t.reshape(-1, *t.shape[-2:])

    def _whole_shape(self, p, mine):
        return p.shape[:-2] + mine.shape[1:]

    def _cost(self, p):  # of one unit, in the operations of Newton-Schulz
        m, n = min(p.shape[-2:]), max(p.shape[-2:])
        return m * m * (2 * n + m)

    def _assign(self, params, load):
        """Each matrix of this shape to the rank with the least work so far; a rank's matrices are neighbours."""
        count = [0] * len(load)
        for _ in range(sum(len(self._units(p)) for p in params)):
            r = load.index(min(load))
            count[r] += 1
            load[r] += self._cost(params[0])
        bounds = list(itertools.accumulate(count, initial=0))  # rank r has bounds[r] to bounds[r + 1] of all these matrices in a row
        at = 0                                                 # where p's begin in that row
        for p in params:
            units = len(self._units(p))
            cuts = [min(max(bound - at, 0), units) for bound in bounds]  # the bounds as p's units count
            self._ranges[p] = list(itertools.pairwise(cuts))
            at += units

    def _new_state(self, group, p):
        own = self._own(p, p)
        dtype = group["state_dtype"] or _compute_dtype(p)
        shape = {"row_moment": (*own.shape[:-1], 1)}
        return {"step": 0, **{name: torch.zeros(shape.get(name, own.shape), dtype=dtype, device=p.device)
                              for name in VARIANTS[group["variant"]].state}}

    def _update(self, group, params):
        """One step of this rank's matrices of `params`, of one shape. Returns which gradients are finite, each (k, 1, 1)."""
        known = {name for rule in VARIANTS.values() for name in rule.state}  # other entries are their writers'
        if any(known & set(self.state[p]) != set(VARIANTS[group["variant"]].state) for p in params):
            raise RuntimeError(f"the state is of another variant than {group['variant']}: build a new optimizer, or clear optimizer.state")
        constants = self._hyper(group, params[0])
        return [ok for batches in self._portions(params) for ok in self._update_portion(group, batches, constants)]

    def _update_portion(self, group, batches, constants):
        """_update of one portion, apart, so that a GPU's copies of it are gone before the next one's are made."""
        rule = VARIANTS[group["variant"]]
        W = [_joined([self._own(p, p.detach()) for p in batch]) for batch in batches]
        G = [_joined([self._own(p, p.grad) for p in batch]) for batch in batches]
        S = [{name: self._joined_state(batch, name) for name in rule.state} for batch in batches]
        h = [constants._replace(bias=self._bias(group, batch)) for batch in batches]
        sizes = [len(w) for w in W]
        X = W[0].new_empty(sum(sizes), *sorted(W[0].shape[-2:]), dtype=group["ns_dtype"])
        ok = [_run(group, _before, rule.proxy, *args) for args in zip(G, S, h, X.split(sizes))]
        O = _iterate(X, group["ns_steps"]).split(sizes)
        for batch, w, o, g, s, hyper, fine in zip(batches, W, O, G, S, h, ok):
            _run(group, _after, rule.after, w, o, g, s, hyper, _noise(group, w), fine)
            if len(batch) > 1:
                own = [self._own(p, p.detach()) for p in batch]
                torch._foreach_copy_(own, w.split([len(part) for part in own]))
        return ok

    @staticmethod
    def _portions(params) -> list[list[list[Tensor]]]:
        """Portions, each a list of batches: Newton-Schulz takes a portion at once, the passes around it a batch. On a GPU a portion is
        one batch of up to 2**27 numbers, because launches cost; on a CPU, where copies cost, a batch is a single parameter, and a
        portion enough of them for all cores and for the cache."""
        cpu, numel = params[0].device.type == "cpu", params[0].numel()
        size = max(torch.get_num_threads(), 2**20 // numel) if cpu else max(1, 2**27 // numel)
        chunks = [params[i:i + size] for i in range(0, len(params), size)]
        return [[[p] for p in chunk] if cpu else [chunk] for chunk in chunks]

    def _hyper(self, group, p):
        m, n = p.shape[-2:]
        scale = {"original": max(1, m / n) ** 0.5, "match_rms_adamw": 0.2 * max(m, n) ** 0.5, "frobenius": None}[group["adjust_lr_fn"]]
        scalar = lambda name: _scalar(group[name], p)
        return Hyper(lr=scalar("lr"), weight_decay=scalar("weight_decay"), beta=scalar("momentum"), beta2=scalar("beta2"),
                     gamma=scalar("gamma"), bias=None, scale=None if scale is None else _scalar(scale, p),
                     eps=group["eps"], ns_eps=group["ns_eps"], nesterov=group["nesterov"])

    def _bias(self, group, params):
        """1 - βᵗ: () where all parameters have made equally many steps, else (k, 1, 1)."""
        bias = [1 - group["momentum"] ** self.state[p]["step"] for p in params for _ in range(len(self._own(p, p)))]
        if len(set(bias)) == 1:
            return _scalar(bias[0], params[0])
        return _scalar(bias, params[0]).to(params[0].device, _compute_dtype(params[0]), non_blocking=True)[:, None, None]


class AdamW(_Sharded):
    """AdamW for everything that is not a matrix inside the network, with the sharding, the state dicts, the bf16 options and
    the treatment of non-finite gradients that Muon has. Tensors are split over the ranks by rows; a vector is one row. Defaults and
    state names as in torch.optim.AdamW; with state_dtype bf16 give a β₂ of at most 0.996, as for Muon. On a CPU fp32 and fp64 go
    through torch's fused kernel, whatever `compile` says."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01, state_dtype: torch.dtype | None = None, stochastic_rounding: bool = False,
                 compile: bool = True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, state_dtype=state_dtype,
                                      stochastic_rounding=stochastic_rounding, compile=compile))

    def _check_options(self, group):
        _in_range(1, beta1=group["betas"][0], beta2=group["betas"][1])
        _in_range(math.inf, lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"])
        _floating(state_dtype=group["state_dtype"] or torch.float32)

    def _check(self, i, p):
        if not p.is_floating_point() or not p.is_contiguous() or not p.numel():
            raise ValueError(f"AdamW takes contiguous floating-point tensors, found parameter {i} of shape {tuple(p.shape)}, {p.dtype} "
                             f"and strides {p.stride()}")

    def _units(self, t):
        return t.reshape(len(t), -1) if t.ndim > 1 else t.reshape(1, -1)

    def _whole_shape(self, p, mine):
        return p.shape

    def _cost(self, p):
        return self._units(p)[0].numel()

    def _assign(self, params, load):
        for p in params:
            rows, ranks = len(self._units(p)), len(load)
            self._ranges[p] = [(rows * r // ranks, rows * (r + 1) // ranks) for r in range(ranks)]

    def _new_state(self, group, p):
        own = self._own(p, p)
        return {"step": 0, **{name: torch.zeros(own.shape, dtype=group["state_dtype"] or _compute_dtype(p), device=p.device)
                              for name in ("exp_avg", "exp_avg_sq")}}

    def _update(self, group, params):
        W, G = [self._own(p, p.detach()) for p in params], [self._own(p, p.grad) for p in params]
        M, V = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        dtype = W[0].dtype
        if W[0].device.type == "cpu" and dtype in (torch.float32, torch.float64) and all(t.dtype == dtype for t in (*G, *M, *V)):
            return self._fused(group, params, W, G, M, V)
        grads = [p.grad for p in params]  # all rows, so that all ranks agree
        largest = [g.abs().amax() for g in grads] if W[0].device.type == "mps" else torch._foreach_norm(grads, math.inf)  # MPS's drops NaN
        most = _together(W[0].is_cuda, {self.state[p]["step"] for p in params}, W[0].numel())
        for i in range(0, len(params), most):
            some = slice(i, i + most)
            w, g, size = _joined(W[some]), _joined(G[some]), largest[i]
            if len(W[some]) > 1:
                size = torch.stack(largest[some]).repeat_interleave(len(W[i]))[:, None]
            state = {name: self._joined_state(params[some], name) for name in ("exp_avg", "exp_avg_sq")}
            corrections = (1 - beta ** self.state[params[i]]["step"] for beta in group["betas"])
            hyper = (_scalar(x, w) for x in (group["lr"], group["weight_decay"], *group["betas"], *corrections))
            _run(group, _adamw, w, g, state, *hyper, group["eps"], _noise(group, w), size)
            if len(W[some]) > 1:
                torch._foreach_copy_(W[some], w.split(len(W[i])))
        return [torch.stack(largest).isfinite()]

    def _fused(self, group, params, W, G, M, V):
        """_update in torch's kernel for a CPU, where calling a compiled graph takes longer than updating a small tensor."""
        ok = [True] * len(params)
        if not torch.nn.utils.get_total_norm([p.grad for p in params]) <= LARGEST:  # or NaN; else no entry is larger
            ok = [bool(p.grad.isfinite().all()) for p in params]  # of all rows, so that all ranks agree
            G = [g.clamp(-LARGEST, LARGEST) for g in G]
        G = [g.contiguous() for g in G]  # the kernel reads memory in order
        steps = [torch.tensor(self.state[p]["step"] - 1, dtype=torch.float32, device="cpu") for p in params]  # it counts up itself
        W, G, M, V, steps = ([t for t, fine in zip(ts, ok) if fine] for ts in (W, G, M, V, steps))
        if W:
            adamw(W, G, M, V, [], steps, fused=True, amsgrad=False, maximize=False, beta1=group["betas"][0],
                  beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"])
            torch.autograd.graph.increment_version(W)  # which the kernel leaves as it was
        return [torch.tensor(ok, device="cpu")]
