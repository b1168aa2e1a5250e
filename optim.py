"""
The Muon family with variance adaptation: Muon-NSR and Muon-VS (the paper's Algorithm 1), and what they are compared with.
One file, torch only: copy it next to your script.

    from optim import Muon, AdamW
    opt = Muon(matrices, lr=6e-4, variant="muon-vs", momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    aux = AdamW(embeddings_head_and_vectors, lr=6e-4)

A Muon variant is a pure function from gradient and state to the proxy that Newton-Schulz orthogonalises; a few also act
on what comes out. Everything element-wise is one compiled pass over memory before Newton-Schulz and one after it.

Shapes: W, G, M, Γ are (..., m, n), m the output and n the input dimension. Symbols are the paper's: β momentum, η lr,
λ weight decay, γ the coefficient of Muon-NSR, ε the gates' stabiliser, ^ bias-corrected, ~ with Nesterov's lookahead.
"""
import math
import warnings
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------------
# Newton-Schulz

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic with the steepest slope at 0 (Keller Jordan, 2024)


def newton_schulz(G: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximate polar factor U Vᵀ of G = U S Vᵀ: `steps` times X <- aX + (bA + cA²)X with A = XXᵀ, from X = G / (|G|_F + eps).

    G: (..., m, n), any float dtype; normalised in fp32 (fp64 for fp64), iterated in `dtype`. Returns (..., m, n) in `dtype`.
    A zero matrix gives zero. On a CPU each matrix is iterated on its m x m Gram matrix, on a GPU the whole batch directly.
    Raises ValueError for fewer than two dimensions.
    """
    if G.ndim < 2:
        raise ValueError(f"newton_schulz takes (..., m, n), found shape {tuple(G.shape)}; give vectors to AdamW")
    return _iterate(_normalise(G, eps).to(dtype), steps)


def _normalise(X: Tensor, eps: float) -> Tensor:
    X = X if X.dtype == torch.float64 else X.float()
    norm = X.double().square().sum((-2, -1), keepdim=True).sqrt().to(X.dtype)  # in fp64 no square over- or underflows
    return X / (norm + eps)


def _iterate(X: Tensor, steps: int) -> Tensor:
    if X.device.type != "cpu":
        return _iterate_batch(X, steps)
    if X.ndim == 2:
        return _iterate_gram(X, steps)
    return torch.stack([_iterate_gram(x, steps) for x in X.flatten(0, -3)]).view_as(X)  # bmm is slower than mm on a CPU


def _iterate_batch(X: Tensor, steps: int) -> Tensor:
    """The iteration as it is written, for a whole batch (..., m, n)."""
    a, b, c = NS_COEFFICIENTS
    shape, tall = X.shape, X.size(-2) > X.size(-1)
    X = (X.mT if tall else X).reshape(-1, min(shape[-2:]), max(shape[-2:]))
    for _ in range(steps):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if tall else X).reshape(shape)


def _iterate_gram(X: Tensor, steps: int) -> Tensor:
    """The same polynomial with fewer operations, for one matrix (m, n); m <= n is described, m > n is its mirror image.

    Two iterations share one Gram matrix R = XXᵀ: R is carried through the first by m x m products alone, as all of them
    are polynomials in R, so symmetric and commuting. R is computed afresh after the first, third, fifth... iteration, or
    rounding would build up; and it is held as R = μI + E, μ = tr(R)/m, because bf16 keeps the small E more exactly than R.
    """
    a, b, c = NS_COEFFICIENTS
    tall = X.size(0) > X.size(1)
    m, n = min(X.shape), max(X.shape)
    done = 0
    while done < steps:
        together = 2 if done > 0 and done + 2 <= steps and n >= 2 * m else 1
        done += together
        mu = torch.linalg.vector_norm(X).item() ** 2 / m
        E = torch.zeros(m, m, dtype=X.dtype)
        E.diagonal().fill_(mu)
        E = _symmetric(E, X.mT if tall else X, X if tall else X.mT, beta=-1)      # R - μI
        z, F = a + b * mu + c * mu**2, _symmetric(E, E, E, b + 2 * c * mu, c)    # Z = aI + bR + cR² = zI + F
        if together == 2:
            R = _add_diagonal(E, mu)
            T = _symmetric(E, F, R, z)                                           # ZR - zμI
            mu2 = z * z * mu
            E = _symmetric(T, _add_diagonal(T, z * mu), F, z)                    # the next R = ZRZ, less z²μI
            z2, F2 = a + b * mu2 + c * mu2**2, _symmetric(E, E, E, b + 2 * c * mu2, c)
            z, F = z * z2, _symmetric(F, _add_diagonal(F, z), F2, z2)            # the product of both Z, less z z2 I
        X = torch.addmm(X, X, F, beta=z) if tall else torch.addmm(X, F, X, beta=z)
    return X


def _add_diagonal(A: Tensor, value: float) -> Tensor:
    A = A.clone()
    A.diagonal().add_(value)
    return A


def _symmetric(C: Tensor, A: Tensor, B: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """beta C + alpha A @ B, known to be symmetric (m, m): from 512 rows on the lower left quarter is copied, not computed."""
    m = C.size(0)
    if m < 512 or m % 2:
        return torch.addmm(C, A, B, beta=beta, alpha=alpha)
    h, out = m // 2, torch.empty_like(C)
    torch.addmm(C[:h], A[:h], B, beta=beta, alpha=alpha, out=out[:h])
    torch.addmm(C[h:, h:], A[h:], B[:, h:], beta=beta, alpha=alpha, out=out[h:, h:])
    out[h:, :h] = out[:h, h:].mT
    return out


# ----------------------------------------------------------------------------------------------------------------------
# The variants: proxy(G, S, h) -> (X for Newton-Schulz, new S), and for some after(O, G, S, h) -> (O, new S)


class Hyper(NamedTuple):
    """What a variant reads besides gradient and state: 0-d tensors, so that a new value recompiles nothing, and constants."""
    beta: Tensor      # β, the momentum
    beta2: Tensor     # β₂, decay of a second moment that is not tied to the momentum
    gamma: Tensor     # γ
    bias: Tensor      # 1 - βᵗ, the bias correction of this step: () or (k, 1, 1)
    eps: float        # ε
    nesterov: bool


def _momentum(G, S, h):
    M = h.beta * S["momentum"] + G                                   # M_t = β M_{t-1} + G_t
    M_tilde = G + h.beta * M if h.nesterov else M
    return M_tilde, {**S, "momentum": M}


def _mean_and_variance(G, S, h):
    """Algorithm 1, lines 4 to 7: EMAs of the gradient and of its squared distance to the mean so far."""
    M_old = S["momentum"]
    M = h.beta * M_old + (1 - h.beta) * G                            # line 4
    var = h.beta * S["variance"] + h.beta * (1 - h.beta) * (M_old - G) ** 2  # line 5, Γ
    M_hat, var_hat = M / h.bias, var / h.bias                        # line 6
    M_tilde = G + h.beta / (1 - h.beta) * M_hat if h.nesterov else M_hat  # line 7
    return M_tilde, var_hat, {"momentum": M, "variance": var}


def muon(G, S, h):
    """Muon (Jordan et al., 2024), the paper's eq. muon_direction_revised."""
    return _momentum(G, S, h)


def muon_nsr(G, S, h):
    """Muon-NSR: Algorithm 1 with τ = NSR, eq. method_nsr."""
    M_tilde, var_hat, S = _mean_and_variance(G, S, h)
    return M_tilde / ((M_tilde**2 + h.gamma * var_hat).sqrt() + h.eps), S     # line 9


def muon_vs(G, S, h):
    """Muon-VS: Algorithm 1 with τ = VS."""
    M_tilde, var_hat, S = _mean_and_variance(G, S, h)
    return M_tilde / (var_hat.sqrt() + h.eps), S                              # line 11


def muon_nsr_post(G, S, h):
    """Muon-NSR-Reshuffled: Algorithm 2, the gate of Muon-NSR moved behind Newton-Schulz (lines 4 to 7)."""
    M_tilde, _, S = _mean_and_variance(G, S, h)
    return M_tilde, S


def muon_nsr_post_after(O, G, S, h):
    M_hat, var_hat = S["momentum"] / h.bias, S["variance"] / h.bias
    M_tilde = G + h.beta / (1 - h.beta) * M_hat if h.nesterov else M_hat
    return O / (1 + h.gamma * var_hat / (M_tilde**2 + h.eps)).sqrt(), S       # Algorithm 2, lines 9 and 10


def adamuon(G, S, h):
    """AdaMuon (Si et al., 2025): Newton-Schulz of the sign, then Adam's second moment of the result."""
    M_tilde, S = _momentum(G, S, h)
    return M_tilde.sign(), S


def adamuon_after(O, G, S, h):
    V = h.beta * S["second_moment"] + (1 - h.beta) * O**2
    return O / (V.sqrt() + h.eps), {**S, "second_moment": V}


def normuon_after(O, G, S, h):
    """NorMuon (Li et al., 2025): one second moment a row (neuron) of the result, whose Frobenius norm is then restored."""
    v = h.beta2 * S["row_moment"] + (1 - h.beta2) * O.square().mean(-1, keepdim=True)
    P = O / (v.sqrt() + h.eps)
    return P * _frobenius(O) / _frobenius(P).clamp_min(1e-30), {**S, "row_moment": v}


def muon2(G, S, h):
    """Muon² (Liu et al., 2026): Adam's uncentred second moment before Newton-Schulz."""
    M_tilde, S = _momentum(G, S, h)
    V = h.beta2 * S["second_moment"] + (1 - h.beta2) * G**2
    return M_tilde / (V.sqrt() + h.eps), {**S, "second_moment": V}


def _frobenius(X: Tensor) -> Tensor:
    return X.square().sum((-2, -1), keepdim=True).sqrt()


class Variant(NamedTuple):
    proxy: Callable
    state: tuple[str, ...]            # names of the buffers a matrix has; "row_moment" is (m, 1), the others are (m, n)
    after: Callable | None = None


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
# The two passes over memory around Newton-Schulz, and AdamW: compiled, in place; where G is not finite nothing is written

LARGEST = 1e15  # gradients are clamped here, so that the squares and sums that follow stay finite in fp32


def _before(proxy, G, S, h, ns_eps, ns_dtype, compute):
    """Gradient and state to the normalised proxy (..., m, n) in Newton-Schulz's dtype, and which matrices of G are finite."""
    ok = torch.isfinite(G).flatten(-2).all(-1)[..., None, None]
    X, new = proxy(_clean(G, ok, compute), {name: s.to(compute) for name, s in S.items()}, h)
    _store(S, new, ok)
    return _normalise(X, ns_eps).to(ns_dtype), ok


def _after(after, W, O, G, S, h, lr, weight_decay, scale, noise, ok, compute):
    """Line 14: W <- W (1 - ηλ) - η s O. scale is s, or None for AdaMuon's s = 0.2 √(mn) / |O|_F."""
    O = O.to(compute)
    if after is not None:
        O, new = after(O, _clean(G, ok, compute), {name: s.to(compute) for name, s in S.items()}, h)
        _store(S, new, ok)
    if scale is None:
        scale = 0.2 * math.sqrt(O.size(-2) * O.size(-1)) / _frobenius(O).clamp_min(1e-30)
    new = W.to(compute) * (1 - lr * weight_decay) - lr * scale * O
    W.copy_(torch.where(ok, _round(new, W, noise), W))


def _adamw(W, G, S, ok, lr, weight_decay, beta1, beta2, bias1, bias2, eps, noise, compute):
    """AdamW (Loshchilov & Hutter, 2019) for one tensor of any shape."""
    G = _clean(G, ok, compute)
    M = beta1 * S["exp_avg"].to(compute) + (1 - beta1) * G
    V = beta2 * S["exp_avg_sq"].to(compute) + (1 - beta2) * G**2
    _store(S, {"exp_avg": M, "exp_avg_sq": V}, ok)
    new = W.to(compute) * (1 - lr * weight_decay) - lr * (M / bias1) / ((V / bias2).sqrt() + eps)
    W.copy_(torch.where(ok, _round(new, W, noise), W))


def _clean(G, ok, compute):
    return torch.where(ok, G, 0).to(compute).clamp(-LARGEST, LARGEST)


def _store(S, new, ok):
    for name, old in S.items():
        if name in new:
            old.copy_(torch.where(ok, new[name], old))


def _round(new, W, noise):
    """To W's dtype; with noise (int32 in [0, 65536), W's shape) stochastically from fp32 to bf16: add to the bits, then cut."""
    if noise is None:
        return new.to(W.dtype)
    return ((new.view(torch.int32) + noise) & -65536).view(torch.float32).to(W.dtype)


_compiled: dict = {}  # function -> its compiled form, or itself where torch.compile failed


def _run(compile: bool, function: Callable, *args):
    """function(*args) through torch.compile, one graph for all shapes; where no compiler works eagerly, after one warning."""
    if not compile:
        return function(*args)
    try:
        if function not in _compiled:
            _compiled[function] = torch.compile(function, dynamic=True, fullgraph=True)
        return _compiled[function](*args)
    except torch._dynamo.exc.TorchDynamoException as error:
        _compiled.update({f: f for f in (_before, _after, _adamw)})
        warnings.warn(f"the optimizer runs uncompiled, so slower: torch.compile failed ({type(error).__name__}: "
                      f"{str(error).strip().splitlines()[0][:150]}); install a C++ compiler, or pass compile=False")
        return function(*args)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks: who owns what, one asynchronous gather a bucket, whole state dicts


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Sharded(torch.optim.Optimizer):
    """An optimizer that splits its state and its work over the ranks of the default process group, where there is one.

    A parameter is seen as units along a leading dimension (`_units`): matrices for Muon, rows for AdamW. Each rank owns a range
    of every parameter's units, updates it, and gets the others by an all-gather before step() returns, so all ranks end with
    the same bits. `state[p]` holds this rank's range; state_dict() holds everything. Who owns what never depends on gradients.
    """

    def __init__(self, params, defaults: dict):
        self._forget_layout()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict):  # pickle and deepcopy pass here
        super().__setstate__(state)
        self._forget_layout()

    def add_param_group(self, param_group: dict):
        super().add_param_group(param_group)
        for i, p in enumerate(self.param_groups[-1]["params"]):
            self._check(i, p)
        self._buckets = None

    def _forget_layout(self):
        self._buckets = None    # [(group, its parameters of one shape, dtype and device)]
        self._ranges = {}       # parameter -> (first unit, last unit + 1) for each rank
        self._batches = {}      # a GPU's buckets: state of all units of all parameters in one tensor a name
        self.skipped = 0        # units not updated so far because their gradient was not finite; a tensor after a step

    def _layout(self) -> list[tuple[dict, list[Tensor]]]:
        if self._buckets is None:
            buckets: dict = {}
            for i, group in enumerate(self.param_groups):
                for p in group["params"]:
                    buckets.setdefault((i, p.shape, p.dtype, p.device), []).append(p)
            self._buckets, self._batches = [(self.param_groups[key[0]], bucket) for key, bucket in buckets.items()], {}
            load = [0] * _world()
            for p, ranges in self._ranges.items():  # of an earlier layout: their state stays where it is
                load = [have + (stop - start) * self._cost(p) for have, (start, stop) in zip(load, ranges)]
            for _, bucket in sorted(self._buckets, key=lambda b: -self._cost(b[1][0])):
                self._assign([p for p in bucket if p not in self._ranges], load)
        return self._buckets

    def _own(self, p: Tensor, t: Tensor) -> Tensor:
        """This rank's units (k, ...) of a tensor of p's shape."""
        start, stop = self._ranges[p][_rank()]
        return self._units(t)[start:stop]

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """One update of every parameter with a gradient; the others keep value and state, weight decay included.

        Returns closure()'s loss. A matrix (for AdamW a parameter) whose gradient has a NaN or inf keeps its value and buffers
        too: counted in `self.skipped`, a tensor that nobody waits for until you read it, and on a CPU told by a warning.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        finite, exchanges = [], []
        for group, bucket in self._layout():
            for p in bucket:
                if p.grad is not None:
                    if p not in self.state:
                        self.state[p] = self._new_state(group, p)
                    self.state[p]["step"] += 1
            mine = [p for p in bucket if p.grad is not None and len(self._own(p, p))]
            if mine:
                finite += self._update(group, mine)
            exchanges.append(self._exchange(bucket, [self._own(p, p.detach()) for p in bucket]))
        for received in exchanges:
            for p, start, stop, units in received():
                self._units(p.detach())[start:stop].copy_(units)
        if finite:
            bad = torch.cat([~ok.flatten() for ok in finite]).sum()
            self.skipped = self.skipped + bad
            if bad.device.type == "cpu" and bad:
                warnings.warn(f"{type(self).__name__}: a gradient is not finite; {int(bad)} of the updates were left out")
        return loss

    def _exchange(self, params: list[Tensor], own: list[Tensor]) -> Callable:
        """Starts to send `own`, this rank's units of each of `params`, to all. Returns a function that waits for it and gives
        [(parameter, start, stop, units)] of the other ranks; it holds the tensors and the Work until then."""
        ranges = [[self._ranges[p][r] for p in params] for r in range(_world())]
        if all(of_rank == ranges[0] for of_rank in ranges):  # one rank, or every rank does it all
            return lambda: []
        most = max(sum(stop - start for start, stop in of_rank) for of_rank in ranges)
        mine = torch.cat(own)
        mine = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])  # equal sizes on all ranks
        everyone = mine.new_empty(_world(), *mine.shape)
        as_bytes = lambda t: t.view(-1).view(torch.uint8)  # any dtype
        work = dist.all_gather_into_tensor(as_bytes(everyone), as_bytes(mine), async_op=True)

        def received(held=mine):
            work.wait()
            found = []
            for r, of_rank in enumerate(ranges):
                at = 0
                for p, (start, stop) in zip(params, of_rank):
                    if r != _rank() and stop > start:
                        found.append((p, start, stop, everyone[r, at:at + stop - start]))
                    at += stop - start
            return found
        return received

    def state_dict(self) -> dict:
        """The whole state in torch's format, every buffer in its parameter's shape. With several ranks all must call it."""
        packed = super().state_dict()
        packed["state"] = {}
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for group, bucket in self._layout():
            for p in bucket:
                if p not in self.state and _world() == 1:
                    continue
                entry = packed["state"][index[p]] = dict(self.state.get(p) or self._new_state(group, p))
                for name, mine in entry.items():
                    if name != "step":
                        whole = mine.new_empty(len(self._units(p)), *mine.shape[1:])
                        start, stop = self._ranges[p][_rank()]
                        whole[start:stop] = mine
                        for _, start, stop, units in self._exchange([p], [mine])():
                            whole[start:stop] = units
                        entry[name] = whole.view(self._whole_shape(p, mine))
        packed["state"] = dict(sorted(packed["state"].items()))
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Takes this rank's part of a whole state_dict, saved at any world size; buffers keep the dtype they were saved in.

        Raises ValueError where groups, parameters, shapes or buffers are not this optimizer's; nothing is changed then.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        found, expected = ([len(g["params"]) for g in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if found != expected:
            raise ValueError(f"the state is of parameter groups of {found} tensors, this optimizer has {expected}: "
                             "build it with the same parameters in the same order")
        saved_groups = [{**{k: v for k, v in saved.items() if k not in ("params", "compile")}} for saved in state_dict["param_groups"]]
        group_of = {p: {**group, **saved} for group, saved in zip(self.param_groups, saved_groups) for p in group["params"]}
        self._layout()
        state = {}
        for i, entry in state_dict["state"].items():
            p = params[int(i)]
            state[p] = self._new_state(group_of[p], p)
            if set(entry) != set(state[p]):
                raise ValueError(f"the state of parameter {i} has {sorted(entry)}, expected {sorted(state[p])}: "
                                 "it is of another optimizer or variant")
            for name, mine in state[p].items():
                if name == "step":
                    state[p][name] = int(entry[name])
                    continue
                if entry[name].shape != self._whole_shape(p, mine):
                    raise ValueError(f"{name} of parameter {i} has shape {tuple(entry[name].shape)}, "
                                     f"expected {tuple(self._whole_shape(p, mine))}")
                start, stop = self._ranges[p][_rank()]
                units = entry[name].reshape(-1, *mine.shape[1:])[start:stop]
                state[p][name] = units.to(p.device, copy=True).contiguous()
        for group, saved in zip(self.param_groups, saved_groups):
            group.update(saved)
        self.state.clear()
        self.state.update(state)
        self._batches = {}


def _noise(group: dict, W: Tensor) -> Tensor | None:
    if not group["stochastic_rounding"] or W.dtype != torch.bfloat16:
        return None
    return torch.randint(0, 65536, W.shape, dtype=torch.int32, device=W.device)


def _compute_dtype(W: Tensor) -> torch.dtype:
    return torch.promote_types(W.dtype, torch.float32)


def _scalar(value) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)  # 0-d, so it never changes the dtype of what it multiplies


class Muon(_Sharded):
    """Muon and its variants for matrices inside a network: (m, n), or (..., m, n) as a batch of matrices.

    Not for embeddings, the output head and vectors: give those to AdamW.

    lr: η, in units of `adjust_lr_fn`, as in torch.optim.Muon: "original" s = √max(1, m/n); "match_rms_adamw" s = 0.2 √max(m, n),
        for learning rates tuned for AdamW; and "frobenius" s = 0.2 √(mn) / |O|_F, AdaMuon's own.
    variant: a key of VARIANTS. gamma (γ) is read by muon-nsr and muon-nsr-post, beta2 (β₂) by normuon and muon2.
    momentum: β, in [0, 1). weight_decay: λ, decoupled, multiplied by η but not by s. eps: ε of the gates.
    ns_steps, ns_eps, ns_dtype: as in newton_schulz. state_dtype: of all buffers; default fp32 (fp64 for fp64 parameters).
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

    def add_param_group(self, param_group: dict):
        group = {**self.defaults, **param_group}
        for name, choices in (("variant", tuple(VARIANTS)), ("adjust_lr_fn", ("original", "match_rms_adamw", "frobenius"))):
            if group[name] not in choices:
                raise ValueError(f"{name} is {group[name]!r}, expected one of {', '.join(choices)}")
        for name, low, high in (("lr", 0, math.inf), ("momentum", 0, 1), ("beta2", 0, 1), ("weight_decay", 0, math.inf),
                                ("gamma", 0, math.inf), ("eps", 0, math.inf), ("ns_steps", 0, math.inf)):
            if not low <= group[name] < high:
                raise ValueError(f"{name} is {group[name]}, expected a number in [{low}, {high})")
        super().add_param_group(param_group)

    def _check(self, i, p):
        if p.ndim < 2 or not p.is_floating_point():
            raise ValueError(f"Muon takes floating-point matrices (..., m, n), found parameter {i} of shape {tuple(p.shape)} and "
                             f"{p.dtype}: give vectors, embeddings and the output head to AdamW")
        if p.ndim > 2 and not p.is_contiguous():
            raise ValueError(f"parameter {i} of shape {tuple(p.shape)} is not contiguous: call .contiguous() before building Muon")

    def _units(self, t):
        return t.unsqueeze(0) if t.ndim == 2 else t.reshape(-1, *t.shape[-2:])

    def _whole_shape(self, p, mine):
        return p.shape[:-2] + mine.shape[1:]

    def _cost(self, p):  # of one unit, in the operations of Newton-Schulz
        m, n = min(p.shape[-2:]), max(p.shape[-2:])
        return m * m * (2 * n + m)

    def _assign(self, params, load):
        """An equal number of this shape's matrices to each rank, what is left over to those with the least work so far."""
        total = sum(len(self._units(p)) for p in params)
        quota = [total // len(load)] * len(load)
        for r in sorted(range(len(load)), key=load.__getitem__)[:total % len(load)]:
            quota[r] += 1
        for r, q in enumerate(quota):
            load[r] += q * self._cost(params[0]) if q else 0
        ends = [sum(quota[:r + 1]) for r in range(len(quota))]
        at = 0
        for p in params:
            units = len(self._units(p))
            self._ranges[p] = [(min(max(end - q - at, 0), units), min(max(end - at, 0), units)) for q, end in zip(quota, ends)]
            at += units

    def _new_state(self, group, p):
        own = self._own(p, p)
        dtype = group["state_dtype"] or _compute_dtype(p)
        shape = {"row_moment": (*own.shape[:-1], 1)}
        return {"step": 0, **{name: torch.zeros(shape.get(name, own.shape), dtype=dtype, device=p.device)
                              for name in VARIANTS[group["variant"]].state}}

    def _update(self, group, params):
        if params[0].device.type == "cpu" or len({self.state[p]["step"] for p in params}) > 1:
            return [self._update_units(group, W, G, {name: s[i] for name, s in self.state[p].items() if name != "step"},
                                       self.state[p]["step"])
                    for p in params for i, (W, G) in enumerate(zip(self._own(p, p.detach()), self._own(p, p.grad)))]
        own = [self._own(p, p.detach()) for p in params]
        W = torch.cat(own)
        ok = self._update_units(group, W, torch.cat([self._own(p, p.grad) for p in params]), self._batch(params),
                                self.state[params[0]]["step"])
        torch._foreach_copy_(own, W.split([len(w) for w in own]))
        return [ok]

    def _batch(self, params):
        """The state of these parameters as one tensor a name, of which each state[p][name] is a view."""
        key = tuple(map(id, params))
        if key not in self._batches:
            self._batches[key] = {name: torch.cat([self.state[p][name] for p in params])
                                  for name in self.state[params[0]] if name != "step"}
            for name, batch in self._batches[key].items():
                for p, part in zip(params, batch.split([len(self.state[p][name]) for p in params])):
                    self.state[p][name] = part
        return self._batches[key]

    def _update_units(self, group, W, G, S, t):
        """One step of one matrix (m, n) or of a batch (k, m, n), in place. Returns which gradients are finite."""
        rule, m, n = VARIANTS[group["variant"]], W.size(-2), W.size(-1)
        scale = {"original": max(1, m / n) ** 0.5, "match_rms_adamw": 0.2 * max(m, n) ** 0.5, "frobenius": None}[group["adjust_lr_fn"]]
        h = Hyper(_scalar(group["momentum"]), _scalar(group["beta2"]), _scalar(group["gamma"]),
                  _scalar(1 - group["momentum"] ** t), group["eps"], group["nesterov"])
        run, dtype = group["compile"], _compute_dtype(W)
        X, ok = _run(run, _before, rule.proxy, G, S, h, group["ns_eps"], group["ns_dtype"], dtype)
        O = _iterate(X, group["ns_steps"])
        _run(run, _after, rule.after, W, O, G, S, h, _scalar(group["lr"]), _scalar(group["weight_decay"]),
             None if scale is None else _scalar(scale), _noise(group, W), ok, dtype)
        return ok


class AdamW(_Sharded):
    """AdamW for everything that is not a matrix inside the network, with the sharding, the state dicts, the bf16 options and
    the treatment of non-finite gradients that Muon has. Tensors of two or more dimensions are split over the ranks by rows;
    vectors are updated on every rank. Defaults as in torch.optim.AdamW, state names too."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01, state_dtype: torch.dtype | None = None, stochastic_rounding: bool = False,
                 compile: bool = True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, state_dtype=state_dtype,
                                      stochastic_rounding=stochastic_rounding, compile=compile))

    def _check(self, i, p):
        if not p.is_floating_point() or not p.is_contiguous():
            raise ValueError(f"AdamW takes contiguous floating-point tensors, found parameter {i} of {p.dtype} and strides {p.stride()}")

    def _units(self, t):
        return t.reshape(len(t), -1) if t.ndim > 1 else t.reshape(1, -1)

    def _whole_shape(self, p, mine):
        return p.shape

    def _cost(self, p):
        return self._units(p)[0].numel()

    def _assign(self, params, load):
        for p in params:
            rows, ranks = len(self._units(p)), len(load)
            self._ranges[p] = [(rows * r // ranks, rows * (r + 1) // ranks) for r in range(ranks)] if p.ndim > 1 else [(0, 1)] * ranks

    def _new_state(self, group, p):
        own = self._own(p, p)
        return {"step": 0, **{name: torch.zeros(own.shape, dtype=group["state_dtype"] or _compute_dtype(p), device=p.device)
                              for name in ("exp_avg", "exp_avg_sq")}}

    def _update(self, group, params):
        finite = []
        (beta1, beta2), dtype = group["betas"], _compute_dtype(params[0])
        for p in params:
            S = dict(self.state[p])
            t, W = S.pop("step"), self._own(p, p.detach())
            ok = torch.isfinite(torch.linalg.vector_norm(p.grad, math.inf))  # of all rows, so that all ranks agree
            _run(group["compile"], _adamw, W, self._own(p, p.grad), S, ok, _scalar(group["lr"]), _scalar(group["weight_decay"]),
                 _scalar(beta1), _scalar(beta2), _scalar(1 - beta1**t), _scalar(1 - beta2**t), group["eps"], _noise(group, W), dtype)
            finite.append(ok)
        return finite
