"""
Muon-NSR and Muon-VS of the paper "Variance-Adaptive Muon", and the Muons it compares them with. One file, torch only.

    from optim import Muon
    muon = Muon(matrices, lr=6e-4, variant="muon-vs", weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(embeddings_head_and_vectors, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

A variant is a pure function from gradient and state to the proxy that Newton-Schulz orthogonalises; some have a second
one, for what Newton-Schulz returns. Lines and symbols are those of the paper's Algorithm 1: W weights, G gradient,
M momentum, Γ variance, O orthogonalised; η lr, λ weight decay, β momentum, γ Muon-NSR's coefficient, ε stabiliser;
hat: bias-corrected; tilde: with Nesterov's lookahead. m is the number of outputs, n of inputs.
"""
import functools
import warnings
from collections import namedtuple

import torch
import torch.distributed as dist
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------------
# Newton-Schulz

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at 0: singular values end around 1, not at it (Jordan, 2024)

@torch.no_grad()
def newton_schulz(G: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """About the polar factor UVᵀ of G = USVᵀ, in its plain form.

    G: (..., m, n) of any float dtype; normalised in fp32 (fp64 for fp64). Returns (..., m, n), computed in `dtype`."""
    a, b, c = NS_COEFFICIENTS
    tall = G.size(-2) > G.size(-1)
    X = normalise(upcast(G.mT if tall else G), eps).to(dtype)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X

def newton_schulz_gram(X: Tensor, steps: int) -> Tensor:
    """The same with fewer operations and less rounding: what Muon runs.

    X: (k, m, n), normalised, m <= n; overwritten. Returns (k, m, n).
    A step is X <- ZX, where Z = aI + bR + cR² and R = XXᵀ. All of these are polynomials in R: symmetric, and they
    commute. So the R of the next step is ZRZ, a product of (m, m) matrices, cheaper than XXᵀ where n is large. Rounding
    would build up if every R came that way; every other one does: five steps are 2 + 1 + 2.
    bf16 keeps small numbers more exactly, so an (m, m) matrix is held as a number times I and a rest: R = μI + E. The
    rest is smallest at μ = tr(R)/m: 1/m for the first R, since |X|_F = 1, and about 0.2 for the later ones."""
    m, n = X.shape[-2:]
    Y = torch.empty_like(X)
    mu, pair = 1 / m, False
    while steps > 0:
        E = X @ X.mT
        E.diagonal(dim1=-2, dim2=-1).sub_(mu)                           # R = μI + E
        z, F = _polynomial(mu, E)                                       # Z = zI + F
        pair = n >= 2 * m and steps > 1 and not pair               # does this R serve two steps?
        if pair:
            zmu, ZR = _product(mu, E, z, F)
            mu_next, E_next = _product(zmu, ZR, z, F)                   # ZRZ, the next R
            z, F = _product(z, F, *_polynomial(mu_next, E_next))        # the Z of both steps, as one
        torch.baddbmm(X, F, X, beta=z, out=Y)                           # ZX
        X, Y, mu = Y, X, 0.2
        steps -= 2 if pair else 1
    return X

def _polynomial(mu, E):
    """aI + bR + cR² of R = μI + E, as a number times I and a rest."""
    a, b, c = NS_COEFFICIENTS
    return a + b * mu + c * mu**2, torch.baddbmm(E, E, E, beta=b + 2 * c * mu, alpha=c)

def _product(x, A, y, B):
    """(xI + A)(yI + B), as a number times I and a rest; y is not 0."""
    return x * y, torch.add(A, B, alpha=x / y).baddbmm_(A, B, beta=y)

def upcast(t):
    """To the precision that rules compute in: fp32, or fp64 for fp64."""
    return t.to(torch.promote_types(t.dtype, torch.float32))

def frobenius_norm(X):
    """Of each matrix: (..., m, n) to (..., 1, 1)."""
    return X.square().sum((-2, -1), keepdim=True).sqrt()

def normalise(X, eps):
    return X / (frobenius_norm(X) + eps)

# ----------------------------------------------------------------------------------------------------------------------
# The variants: proxy(G, S, h) -> (what Newton-Schulz gets, new state), and for some after(O, G, S, h) -> (O, new state)
#
# G, O and the buffers of S are (k, m, n), k matrices at once; S["step"] is t, (k, 1, 1), 1 at the first step. h has the
# parameter group's options, numbers as tensors (), so that new values recompile nothing.

def muon(G, S, h):
    """Muon (Jordan et al., 2024): its momentum is a sum, where that of the variance-adaptive rules is an average."""
    beta = h["momentum"]
    M = beta * S["momentum"] + G
    M_tilde = G + beta * M if h["nesterov"] else M
    return M_tilde, {"momentum": M}

def mean_and_variance(G, S, h):
    """Lines 4 to 7, in place of Muon's momentum: M̃, Γ̂ and the new state."""
    beta, M_old = h["momentum"], S["momentum"]
    M = beta * M_old + (1 - beta) * G                                                 # line 4
    variance = beta * S["variance"] + beta * (1 - beta) * (M_old - G) ** 2            # line 5
    S_new = {"momentum": M, "variance": variance}
    M_tilde, variance_hat = corrected(G, S | S_new, h)
    return M_tilde, variance_hat, S_new

def corrected(G, S, h):
    beta, t = h["momentum"], S["step"]
    M_hat, variance_hat = S["momentum"] / (1 - beta**t), S["variance"] / (1 - beta**t)  # line 6
    M_tilde = G + beta / (1 - beta) * M_hat if h["nesterov"] else M_hat               # line 7
    return M_tilde, variance_hat

def muon_nsr(G, S, h):
    """Muon-NSR: Algorithm 1 with τ = NSR."""
    M_tilde, variance_hat, S_new = mean_and_variance(G, S, h)
    return M_tilde / ((M_tilde**2 + h["gamma"] * variance_hat).sqrt() + h["eps"]), S_new  # line 9

def muon_vs(G, S, h):
    """Muon-VS: Algorithm 1 with τ = VS."""
    M_tilde, variance_hat, S_new = mean_and_variance(G, S, h)
    return M_tilde / (variance_hat.sqrt() + h["eps"]), S_new                          # line 11

def muon_nsr_post(G, S, h):
    """Muon-NSR-Reshuffled, the paper's Algorithm 2: Muon-NSR's gate moved behind Newton-Schulz."""
    M_tilde, _, S_new = mean_and_variance(G, S, h)
    return M_tilde, S_new

def muon_nsr_post_after(O, G, S, h):
    M_tilde, variance_hat = corrected(G, S, h)                                        # S is what the proxy has left
    return O / (1 + h["gamma"] * variance_hat / (M_tilde**2 + h["eps"])).sqrt(), {}   # Algorithm 2, lines 9 and 10

def adamuon(G, S, h):
    """AdaMuon (Si et al., 2025): Newton-Schulz of the sign, then a second moment of the result."""
    M_tilde, S_new = muon(G, S, h)
    return M_tilde.sign(), S_new

def adamuon_after(O, G, S, h):
    beta = h["momentum"]
    V = beta * S["second_moment"] + (1 - beta) * O**2
    return O / (V.sqrt() + h["eps"]), {"second_moment": V}

def normuon_after(O, G, S, h):
    """NorMuon (Li et al., 2025): a second moment of each row of the result, whose Frobenius norm is then restored."""
    v = h["beta2"] * S["row_moment"] + (1 - h["beta2"]) * O.square().mean(-1, keepdim=True)
    P = O / (v.sqrt() + h["eps"])
    return P * (frobenius_norm(O) / frobenius_norm(P).clamp_min(1e-30)), {"row_moment": v}

def muon2(G, S, h):
    """Muon² (Liu et al., 2026): a second moment of the gradient, not corrected for its start, before Newton-Schulz."""
    M_tilde, S_new = muon(G, S, h)
    V = h["beta2"] * S["second_moment"] + (1 - h["beta2"]) * G**2
    return M_tilde / (V.sqrt() + h["eps"]), S_new | {"second_moment": V}

# A rule above and a line here make a new variant: it is compiled, sharded, saved, and a choice of the train scripts.
# Buffers are (m, n), but "row_moment" is (m, 1). Rules find a new hyperparameter in h once Muon has it as an argument
# and among its defaults; in the train scripts it is a global that build_optimizers passes on.
Variant = namedtuple("Variant", "proxy state after", defaults=[None])
VARIANTS = {
    "muon": Variant(muon, ["momentum"]),
    "muon-nsr": Variant(muon_nsr, ["momentum", "variance"]),
    "muon-vs": Variant(muon_vs, ["momentum", "variance"]),
    "muon-nsr-post": Variant(muon_nsr_post, ["momentum", "variance"], muon_nsr_post_after),
    "adamuon": Variant(adamuon, ["momentum", "second_moment"], adamuon_after),
    "normuon": Variant(muon, ["momentum", "row_moment"], normuon_after),
    "muon2": Variant(muon2, ["momentum", "second_moment"]),
}

UPDATE_SCALES = {  # s of an (m, n) matrix, by adjust_lr_fn
    "original": lambda m, n: max(1, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "frobenius": lambda m, n: 0.2 * (m * n) ** 0.5,  # over |O|_F
}

# ----------------------------------------------------------------------------------------------------------------------
# The passes before and behind Newton-Schulz: compiled, in place; nothing changes where skip, () or None, is 1

def _before(proxy, G, S, h, skip, X):
    """Updates S; writes the normalised proxy to X, transposed if it is tall."""
    S["step"].add_(1 if skip is None else 1 - skip)
    Y, S_new = proxy(upcast(G), {name: upcast(s) for name, s in S.items()}, h)
    _store(S, S_new, skip)
    Y = normalise(Y, h["ns_eps"])
    X.copy_(Y.mT if Y.size(-2) > Y.size(-1) else Y)

def _after(after, G, S, h, skip, O, W):
    """Updates W, and S where the variant acts on O."""
    O = upcast(O.mT if W.size(-2) > W.size(-1) else O)
    if after is not None:
        O, S_new = after(O, upcast(G), {name: upcast(s) for name, s in S.items()}, h)
        _store(S, S_new, skip)
    scale = h["scale"]
    if h["adjust_lr_fn"] == "frobenius":
        scale = scale / frobenius_norm(O).clamp_min(1e-30)
    W_new = upcast(W) * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * scale * O        # line 14
    _store({"W": W}, {"W": W_new}, skip)

def _store(old, new, skip):
    for name, value in new.items():
        old[name].copy_(value if skip is None else torch.where(skip > 0, old[name], value))

@functools.cache
def _compiled(function, gpu):
    """A GPU gets a graph for each shape, whose kernels are faster, a CPU one for all shapes."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=not gpu)

def _run(group, function, rule, G, *args):
    """function(rule, G, *args), compiled where that works."""
    if group["compile"]:
        try:
            return _compiled(function, G.is_cuda)(rule, G, *args)
        except torch._dynamo.exc.TorchDynamoException as error:  # nothing has been computed yet
            group["compile"] = False
            warnings.warn(f"Muon runs uncompiled, as torch.compile failed; is there a C++ compiler? ({error!r:.150})")
    return function(rule, G, *args)

# ----------------------------------------------------------------------------------------------------------------------
# The optimizer

class Muon(torch.optim.Optimizer):
    """Muon and its variants for the matrices inside a network, (m, n) or, as batches of matrices, (..., m, n). Not for
    embeddings, output head and vectors, which are AdamW's; hold a convolution's kernels as (out, in·h·w).

    lr: η, in units of adjust_lr_fn, named as in torch.optim.Muon: "original" s = √max(1, m/n); "match_rms_adamw"
        s = 0.2 √max(m, n), for learning rates tuned for AdamW; and "frobenius" s = 0.2 √(mn) / |O|_F, AdaMuon's own.
    variant: a key of VARIANTS. momentum: β. gamma: γ of muon-nsr and muon-nsr-post. beta2: β₂ of normuon and muon2.
    weight_decay: λ, times η but not s. eps: ε of all but muon. ns_steps, ns_eps, ns_dtype: see newton_schulz.
    state_dtype: of the buffers, None for fp32 (fp64 for fp64 parameters); in bf16 averages with β above 0.996 stall.
    compile: the passes around Newton-Schulz; they run eagerly, after one warning, where no compiler works.
    found_inf, an attribute: as GradScaler gives it to torch's fused AdamW; where this tensor () is 1, nothing changes.

    With a process group each rank keeps the state of, and orthogonalises, its share of the parameters; all end step()
    with the same bits. They need the same gradients, as under DistributedDataParallel, and all must call state_dict().
    Raises ValueError for an unknown variant or adjust_lr_fn, and for what is no floating-point matrix."""

    def __init__(self, params, lr=1e-3, variant="muon-vs", momentum=0.95, weight_decay=0.1, gamma=10.0, beta2=0.95,
                 eps=1e-8, nesterov=True, ns_steps=5, ns_eps=1e-7, ns_dtype=torch.bfloat16, adjust_lr_fn="original",
                 state_dtype=None, compile=True):
        super().__init__(params, dict(
            lr=lr, variant=variant, momentum=momentum, weight_decay=weight_decay, gamma=gamma, beta2=beta2, eps=eps,
            nesterov=nesterov, ns_steps=ns_steps, ns_eps=ns_eps, ns_dtype=ns_dtype, adjust_lr_fn=adjust_lr_fn,
            state_dtype=state_dtype, compile=compile))

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, choices in ("variant", VARIANTS), ("adjust_lr_fn", UPDATE_SCALES):
            if group[name] not in choices:
                raise ValueError(f"{name} is {group[name]!r}, expected one of {', '.join(choices)}")
        for p in group["params"]:
            if p.ndim < 2 or not p.numel() or not p.is_floating_point():
                raise ValueError(f"found a parameter of shape {tuple(p.shape)} and {p.dtype}, expected floating-point "
                                 "matrices: give vectors, embeddings and the output head to torch.optim.AdamW")

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient; the others keep value and state. Returns closure()'s loss."""
        with torch.enable_grad():
            loss = closure() if closure else None
        updates = [self._update(group, shares) for group, shares in self._buckets()]
        for _ in "compute and send", "receive":
            for update in updates:
                next(update, None)
        return loss

    def _buckets(self):
        """(group, shares) for parameters that are alike; shares[r] are those of rank r. Each goes to the rank that has
        the least work so far. Gradients have no say, so that all ranks take part in the same exchanges."""
        load = [0] * _rank_and_world()[1]
        for group in self.param_groups:
            alike = {}
            for p in group["params"]:
                alike.setdefault((p.shape, p.dtype, p.device), []).append(p)
            for params in sorted(alike.values(), key=lambda params: -_work(params[0])):
                shares = [[] for _ in load]
                for p in params:
                    r = load.index(min(load))
                    shares[r].append(p)
                    load[r] += _work(p)
                yield group, shares

    def _update(self, group, shares):
        """A generator: computes this rank's share of a bucket and sends it to all; pauses while that is on its way and
        the next buckets are computed; receives all shares."""
        rank, world = _rank_and_world()
        p = next(p for share in shares for p in share)
        for params in _portions([p for p in shares[rank] if p.grad is not None], p):
            self._update_share(group, params)
        if world > 1:
            most = max(map(len, shares))
            sent = torch.stack(shares[rank] + [p] * (most - len(shares[rank])))  # filled up: all ranks send as much
            received = sent.new_empty(world * most, *p.shape)
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # name until torch 2.12
            work = gather(received.view(torch.uint8), sent.view(torch.uint8), async_op=True)  # bytes: gloo lacks bf16
            yield
            work.wait()
            for share, values in zip(shares, received.split(most)):
                if share:
                    torch._foreach_copy_(share, list(values[:len(share)]))

    def _update_share(self, group, params):
        """Parameters of one shape. Newton-Schulz takes all of them at once, and on a GPU, where launches cost, so do
        the passes around it; on a CPU, where copies cost, they take one at a time."""
        p, rule, skip = params[0], VARIANTS[group["variant"]], getattr(self, "found_inf", None)
        h = _hyperparameters(group, p)
        batches = [params] if p.is_cuda else [[q] for q in params]
        stacks = [self._stack(group, batch) for batch in batches]
        X = p.new_empty(len(params), *p.shape[:-2], *sorted(p.shape[-2:]), dtype=group["ns_dtype"])
        for (W, G, S), x in zip(stacks, X.split(len(batches[0]))):
            _run(group, _before, rule.proxy, G, S, h, skip, x)
        O = newton_schulz_gram(X.flatten(0, -3), group["ns_steps"]).view(X.shape)
        for (W, G, S), o, batch in zip(stacks, O.split(len(batches[0])), batches):
            _run(group, _after, rule.after, G, S, h, skip, o, W)
            if len(batch) > 1:
                torch._foreach_copy_(batch, list(W))

    def _stack(self, group, batch):
        """Weights, gradients and state of a batch of parameters, (k, ..., m, n) each."""
        for p in batch:
            self.state[p] = self.state[p] or _zeros(group, p)
        S = {}
        for name in self.state[batch[0]]:
            S[name] = _stacked([self.state[p][name] for p in batch])
            for p, buffer in zip(batch, S[name]):
                self.state[p][name] = buffer  # neighbours from now on, so that the next step copies none
        S["step"] = S["step"].view(-1, *[1] * batch[0].ndim)
        return _stacked([p.detach() for p in batch]), _stacked([p.grad for p in batch]), S

    def state_dict(self):
        """torch's. Of several ranks, which must all call it, rank 0 gets the whole state, on the CPU; others none."""
        whole = super().state_dict()
        rank, world = _rank_and_world()
        if world > 1:
            whole["state"] = {}
            index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
            for group, shares in self._buckets():
                for owner, p in ((r, p) for r, share in enumerate(shares) for p in share):
                    buffers = self.state.get(p) or _zeros(group, p)
                    for buffer in buffers.values():
                        dist.broadcast(buffer, owner)
                    if rank == 0:
                        whole["state"][index[p]] = {name: b.to("cpu", copy=True) for name, b in buffers.items()}
        return whole

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Takes the hyperparameters, and this rank's share of a whole state that was saved at any number of ranks.
        Raises ValueError for a state with other buffers: of another model or variant."""
        super().load_state_dict({**state_dict, "state": {}})  # torch would cast buffers to their parameter's dtype
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        saved = {p: state_dict["state"].get(i) for p, i in zip(params, indices)}
        for group, shares in self._buckets():
            for p in filter(saved.get, shares[_rank_and_world()[0]]):
                self.state[p] = _zeros(group, p)
                expected = {name: tuple(buffer.shape) for name, buffer in self.state[p].items()}
                found = {name: tuple(buffer.shape) for name, buffer in saved[p].items()}
                if found != expected:
                    raise ValueError(f"the state has {found}, expected {expected}: it is of another model or variant")
                for name, buffer in saved[p].items():
                    self.state[p][name].copy_(buffer)

def _rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)

def _work(p):
    """Newton-Schulz's operations, but for a factor."""
    m, n = sorted(p.shape[-2:])
    return p.numel() // n * m * (2 * n + m)

def _portions(params, p):
    """What Newton-Schulz takes at once: on a GPU up to 2**27 numbers, on a CPU enough for all cores and the cache."""
    most = max(1, 2**27 // p.numel()) if p.is_cuda else max(torch.get_num_threads(), 2**20 // p.numel())
    return [params[i:i + most] for i in range(0, len(params), most)]

def _hyperparameters(group, p):
    """The group's options, numbers as tensors () on the CPU, from where graphs for a GPU take them too."""
    options = group | {"params": None, "scale": UPDATE_SCALES[group["adjust_lr_fn"]](*p.shape[-2:])}
    dtype = torch.promote_types(p.dtype, torch.float32)
    return {name: torch.as_tensor(value, dtype=dtype, device="cpu") if type(value) in (int, float, Tensor) else value
            for name, value in options.items()}

def _zeros(group, p):
    """The state of p before its first step."""
    full = torch.promote_types(p.dtype, torch.float32)
    state = {"step": p.new_zeros((), dtype=full)}
    for name in VARIANTS[group["variant"]].state:
        shape = (*p.shape[:-1], 1) if name == "row_moment" else p.shape
        state[name] = p.new_zeros(shape, dtype=group["state_dtype"] or full)
    return state

def _stacked(tensors):
    """k tensors as one, (k, ...): a view of the only one or of neighbours in memory, else a copy."""
    first, k = tensors[0], len(tensors)
    storage, distance = first.untyped_storage().data_ptr(), first.numel() * first.element_size()
    neighbours = all(t.is_contiguous() and t.untyped_storage().data_ptr() == storage and
                     t.data_ptr() == first.data_ptr() + i * distance for i, t in enumerate(tensors))
    if k == 1 or neighbours:
        return first.as_strided((k, *first.shape), (first.numel(), *first.stride()))
    return torch.stack(tensors)
