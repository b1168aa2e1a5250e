"""
Muon-NSR and Muon-VS of the paper "Variance-Adaptive Muon", and the Muons it compares them with. One file, torch only.

    from optim import Muon
    muon = Muon(matrices, lr=6e-4, variant="muon-vs", weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(embeddings_head_and_vectors, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

A variant is one or two pure functions of gradient and state. Lines and symbols are those of the paper's Algorithm 1: W
weights, G gradient, M momentum, Γ variance, O orthogonalised; η lr, s its scale, λ weight decay, β momentum, γ factor
of Muon-NSR, ε stabiliser; hat: bias-corrected; tilde: with Nesterov's lookahead. m counts outputs, n inputs.
"""
import functools, math, warnings
from collections import namedtuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# ---- Newton-Schulz ---------------------------------------------------------------------------------------------------
JORDAN = (3.4445, -4.7750, 2.0315)  # steep at 0: singular values end near 1, not at 1 (Jordan, 2024)

@torch.no_grad()
def newton_schulz(G, steps=5, eps=1e-7, dtype=torch.bfloat16, coefficients=JORDAN):
    """Approximates the polar factor UVᵀ of G = USVᵀ. G: (..., m, n) of any float dtype; normalised in fp32
    (fp64 for fp64). coefficients: (a, b, c), or one such triple for each step. Returns (..., m, n) in `dtype`."""
    X = wide_with_unit_norm(upcast(G), eps).to(dtype)
    O = newton_schulz_gram(X.reshape(-1, *X.shape[-2:]).contiguous(), steps, coefficients).view(X.shape)
    return O.mT if G.size(-2) > G.size(-1) else O

def wide_with_unit_norm(X, eps):
    """X divided by its Frobenius norm, and transposed if it is tall."""
    X = X / (frobenius_norm(X) + eps)
    return X.mT if X.size(-2) > X.size(-1) else X

# The matrices number·I + rest; rest is (k, m, m). bf16 stores the small rest more precisely than the sum: the error of
# five steps is 0.9 times the standard form's, and 4 times without this.
Shifted = namedtuple("Shifted", "number rest")

def polynomial(R, triple):
    """aI + bR + cR²."""
    (a, b, c), (r, E) = triple, R
    return Shifted(a + b * r + c * r**2, torch.baddbmm(E, E, E, beta=b + 2 * c * r, alpha=c))

def product(A, B):
    """AB = (eI + E)(fI + F) = efI + f(E + e/f F) + EF. Jordan's polynomials have f > 0, as b² < 4ac."""
    (e, E), (f, F) = A, B
    return Shifted(e * f, torch.add(E, F, alpha=e / f).baddbmm_(E, F, beta=f))

def newton_schulz_gram(X, steps=5, coefficients=JORDAN):
    """newton_schulz of k wide matrices of unit norm: X, (k, m, n), m <= n, is overwritten. Returns (k, m, n).

    A step is X <- ZX, where R = XXᵀ and Z = aI + bR + cR². Polynomials in R commute, so the R of the next step is ZRZ:
    products of (m, m) matrices, no dearer than XXᵀ if n >= 2m, and one ZX serves both. Rounding would build up, so a
    pair of steps is followed by one alone: five are 2 + 1 + 2. With coefficients other than Jordan's, all are alone."""
    m, n = X.shape[-2:]
    Y, jordan, pair = torch.empty_like(X), tuple(coefficients) == JORDAN, False
    triples = [coefficients] if isinstance(coefficients[0], (int, float)) else [*coefficients]
    todo = (triples + triples[-1:] * steps)[:steps]  # the last one serves all further steps
    shift = 1 / m  # any is right, the mean of R's diagonal most precise: at first that is |X|_F² / m
    while todo:
        R = Shifted(shift, X @ X.mT)
        R.rest.diagonal(dim1=-2, dim2=-1).sub_(shift)
        Z = polynomial(R, todo.pop(0))
        pair = jordan and n >= 2 * m and bool(todo) and not pair  # with the next step; never two pairs in a row
        if pair:
            next_R = product(product(R, Z), Z)
            Z = product(Z, polynomial(next_R, todo.pop(0)))  # of both steps
        torch.baddbmm(X, Z.rest, X, beta=Z.number, out=Y)  # ZX
        X, Y = Y, X
        shift = 0.2 if jordan else 0.5  # near that mean from now on
    return X

def upcast(t):
    """t in the precision that rules compute in: fp32, or fp64 for fp64."""
    return t.to(torch.promote_types(t.dtype, torch.float32))

def frobenius_norm(X, mesh=None):
    """The norm of each matrix, (..., 1, 1); with a mesh, X has this rank's rows and the norm is that of all rows."""
    squares = X.square().sum((-2, -1), keepdim=True)
    return (squares if mesh is None else sum_over(mesh, squares)).sqrt()

# ---- The variants ----------------------------------------------------------------------------------------------------
# proxy(G, S, h) -> (what Newton-Schulz gets, new state), and for some after(O, G, S, h) -> (O, new state)
#
# G and O are (k, ..., m, n), k parameters at once, and so are S's buffers, or (k, ..., m, 1); S["step"] is t = 1, 2 ...
# h has the group's options. With an h["mesh"] the rows are those of this rank: sums over all go through frobenius_norm.

def muon(G, S, h):
    """Muon (Jordan et al., 2024): its momentum is a sum; the variance-adaptive rules use an average."""
    beta = h["momentum"]
    M = beta * S["momentum"] + G
    M_tilde = G + beta * M if h["nesterov"] else M
    return M_tilde, {"momentum": M}

def muon_nsr(G, S, h):
    """Muon-NSR: Algorithm 1 with τ = NSR."""
    beta, t, M_old = h["momentum"], S["step"], S["momentum"]
    M = beta * M_old + (1 - beta) * G                                           # line 4
    variance = beta * S["variance"] + beta * (1 - beta) * (M_old - G) ** 2      # line 5
    M_hat, variance_hat = M / (1 - beta**t), variance / (1 - beta**t)           # line 6
    M_tilde = G + beta / (1 - beta) * M_hat if h["nesterov"] else M_hat         # line 7
    proxy = M_tilde / ((M_tilde**2 + h["gamma"] * variance_hat).sqrt() + h["eps"])  # line 9
    return proxy, {"momentum": M, "variance": variance}

def muon_vs(G, S, h):
    """Muon-VS: Algorithm 1 with τ = VS, where power is 1. In between 0, where it is Muon, and 1, less of it."""
    beta, t, M_old = h["momentum"], S["step"], S["momentum"]
    M = beta * M_old + (1 - beta) * G                                           # line 4
    variance = beta * S["variance"] + beta * (1 - beta) * (M_old - G) ** 2      # line 5
    M_hat, variance_hat = M / (1 - beta**t), variance / (1 - beta**t)           # line 6
    M_tilde = G + beta / (1 - beta) * M_hat if h["nesterov"] else M_hat         # line 7
    proxy = M_tilde / (variance_hat.sqrt() + h["eps"]) ** h["power"]            # line 11
    return proxy, {"momentum": M, "variance": variance}

def muon_nsr_post(G, S, h):
    """Muon-NSR-Reshuffled, the paper's Algorithm 2: Muon-NSR's gate moved behind Newton-Schulz."""
    _, S_new = muon_nsr(G, S, h)
    beta = h["momentum"]
    M_hat = S_new["momentum"] / (1 - beta ** S["step"])
    M_tilde = G + beta / (1 - beta) * M_hat if h["nesterov"] else M_hat
    return M_tilde, S_new

def muon_nsr_post_after(O, G, S, h):
    """S is what muon_nsr_post left; M̃ is computed again, which is cheaper than to keep it."""
    beta, t = h["momentum"], S["step"]
    M_hat, variance_hat = S["momentum"] / (1 - beta**t), S["variance"] / (1 - beta**t)
    M_tilde = G + beta / (1 - beta) * M_hat if h["nesterov"] else M_hat
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
    return P * (frobenius_norm(O, h["mesh"]) / frobenius_norm(P, h["mesh"]).clamp_min(1e-30)), {"row_moment": v}

def muon2(G, S, h):
    """Muon² (Liu et al., 2026): a second moment of the gradient, not bias-corrected, before Newton-Schulz."""
    M_tilde, S_new = muon(G, S, h)
    V = h["beta2"] * S["second_moment"] + (1 - h["beta2"]) * G**2
    return M_tilde / (V.sqrt() + h["eps"]), S_new | {"second_moment": V}

# A new variant: a rule above and a line here. A new hyperparameter: an argument of Muon, which rules find in h.
Variant = namedtuple("Variant", "proxy state after", defaults=[None])  # state: a buffer's name -> its shape
VARIANTS = {
    "muon": Variant(muon, {"momentum": "mn"}),
    "muon-nsr": Variant(muon_nsr, {"momentum": "mn", "variance": "mn"}),
    "muon-vs": Variant(muon_vs, {"momentum": "mn", "variance": "mn"}),
    "muon-nsr-post": Variant(muon_nsr_post, {"momentum": "mn", "variance": "mn"}, muon_nsr_post_after),
    "adamuon": Variant(adamuon, {"momentum": "mn", "second_moment": "mn"}, adamuon_after),
    "normuon": Variant(muon, {"momentum": "mn", "row_moment": "m1"}, normuon_after),
    "muon2": Variant(muon2, {"momentum": "mn", "second_moment": "mn"}),
}

UPDATE_SCALES = {  # s of an (m, n) matrix, by adjust_lr_fn
    "original": lambda m, n: max(1, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "frobenius": lambda m, n: 0.2 * (m * n) ** 0.5,  # over |O|_F
}

# ---- The passes before and behind Newton-Schulz ----------------------------------------------------------------------
# Compiled and in place, on k parameters; where skip, (k, 1, ..., 1), is 1, weights and state stay.

def before_pass(proxy, h, G, S, skip, X):
    """Updates S; writes the proxy to X, normalised and wide; with a mesh as it is, as step_sharded normalises later."""
    S["step"].add_(1 - skip)
    Y, S_new = proxy(upcast(G), {name: upcast(s) for name, s in S.items()}, h)
    store(S_new, S, skip)
    X.copy_(wide_with_unit_norm(Y, h["ns_eps"]) if h["mesh"] is None else Y)

def after_pass(after, h, G, S, skip, O, W):
    """Updates W, and S where the variant acts on O."""
    O = upcast(O.mT if O.shape != W.shape else O)  # O is wide where W is tall
    if after is not None:
        O, S_new = after(O, upcast(G), {name: upcast(s) for name, s in S.items()}, h)
        store(S_new, S, skip)
    scale = h["scale"]
    if h["adjust_lr_fn"] == "frobenius":
        scale = scale / frobenius_norm(O, h["mesh"]).clamp_min(1e-30)
    W_new = upcast(W) * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * scale * O        # line 14
    store({"W": W_new}, {"W": W}, skip)

def store(new, old, skip):
    for name, value in new.items():
        old[name].copy_(torch.where(skip > 0, old[name], value))

@functools.cache
def compiled(function, gpu):
    """On a GPU one graph per shape, whose kernels are faster; on a CPU one for all."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=not gpu)

def run_compiled(function, group, rule, h, G, *args):
    """function(rule, h, G, *args), compiled if the group says so and a compiler works."""
    if group["compile"]:
        try:
            return compiled(function, G.is_cuda)(rule, h, G, *args)
        except torch._dynamo.exc.TorchDynamoException as error:  # usually before anything is computed
            group["compile"] = False
            warnings.warn(f"Muon runs uncompiled, as torch.compile failed; is there a C++ compiler? ({error!r:.150})")
    return function(rule, h, G, *args)

# ---- The optimizer ---------------------------------------------------------------------------------------------------
def rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def mesh_of(p):
    return getattr(p, "device_mesh", None)

def local(t):
    return t.to_local() if isinstance(t, DTensor) else t

# Parameters of one group that are alike. shares[r]: those that rank r orthogonalises. kept: those with state here, in
# the order of state's buffers, (kept, ..., m, n): this rank's share or, with a mesh, all, as it has rows of each.
Bucket = namedtuple("Bucket", "group mesh rank shares kept state")

class Muon(torch.optim.Optimizer):
    """Muon and its variants for the matrices inside a network, (m, n) or, as batches of matrices, (..., m, n). Not for
    embeddings, output head and vectors, which are AdamW's; hold a convolution's kernels as (out, in·h·w).

    lr: η, in units of adjust_lr_fn, named as in torch.optim.Muon: "original" s = √max(1, m/n); "match_rms_adamw"
        s = 0.2 √max(m, n), for learning rates tuned for AdamW; and "frobenius" s = 0.2 √(mn) / |O|_F, AdaMuon's own.
    variant: a key of VARIANTS. momentum: β. gamma: γ of muon-nsr and muon-nsr-post. beta2: β₂ of normuon and muon2.
    power: of muon-vs's denominator; 1 is the paper's rule, 0 Muon.
    weight_decay: λ, times η but not s. eps: ε of all but muon. ns_...: see newton_schulz.
    state_dtype: of the buffers, None for fp32 (fp64 for fp64 parameters); in bf16 averages with β above 0.996 stall.
    compile: the passes around Newton-Schulz; they run eagerly, after a warning, where no compiler works.
    found_inf, an attribute that may be set, as torch's fused AdamW has it: where this tensor () is 1, nothing changes.

    With a process group each rank keeps the state of, and updates, its share of the parameters; then all have the same
    bits. Gradients must be the same on all ranks, as under DistributedDataParallel. To save, call full_state_dict() on
    all ranks; to resume, at any number of ranks, give what it returned on rank 0 to load_state_dict() on each. Matrices
    may be DTensors sharded by rows, as by FSDP2's fully_shard; so is then their state. Other DTensors: ValueError."""

    def __init__(self, params, lr=1e-3, variant="muon-vs", momentum=0.95, weight_decay=0.1, gamma=10.0, beta2=0.95,
                 power=1.0, eps=1e-8, nesterov=True, ns_steps=5, ns_eps=1e-7, ns_dtype=torch.bfloat16, ns_coefficients=JORDAN,
                 adjust_lr_fn="original", state_dtype=None, compile=True):
        defaults = {name: x for name, x in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, defaults)

    _plan = None  # the buckets, once made; pickles and copies, which drop it, find this None

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # added again once it is found right
        for name in "ns_dtype", "state_dtype":  # as a name, for torch's functions for checkpoints
            group[name] = str(group[name]).removeprefix("torch.")
        for name, choices in ("variant", VARIANTS), ("adjust_lr_fn", UPDATE_SCALES):
            if group[name] not in choices:
                raise ValueError(f"{name} is {group[name]!r}, expected one of {', '.join(choices)}")
        for name in "lr", "momentum", "weight_decay", "gamma", "beta2", "power", "eps", "ns_steps", "ns_eps":
            if not group[name] >= 0 or name in ("momentum", "beta2") and group[name] >= 1:
                raise ValueError(f"{name} is {group[name]}, expected at least 0, momentum and beta2 below 1")
        for p in group["params"]:
            if p.ndim < 2 or not p.numel() or not p.is_floating_point():
                raise ValueError(f"found {p.dtype} of shape {tuple(p.shape)}, expected floating-point matrices; "
                                 "vectors, embeddings and the output head are for torch.optim.AdamW")
            if isinstance(p, DTensor) and (p.ndim, p.device_mesh.ndim, p.placements) != (2, 1, (Shard(0),)):
                raise ValueError(f"found {p.placements} on {p.device_mesh}, expected a matrix with Shard(0) on a mesh "
                                 "of one dimension, as fully_shard makes it")
        self.param_groups.append(group)
        self._plan = None

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient; the others keep value and state. Returns closure()'s loss."""
        with torch.enable_grad():
            loss = closure() if closure else None
        buckets, found_inf = self._buckets(), getattr(self, "found_inf", 0)
        step_shares([bucket for bucket in buckets if bucket.mesh is None], found_inf)
        step_sharded([bucket for bucket in buckets if bucket.mesh is not None], found_inf)
        return loss

    def _buckets(self):
        """The buckets, made anew after add_param_group and load_state_dict. From then on they hold the state, and
        self.state[p] has views of it. They do not depend on gradients: all ranks take part in the same exchanges."""
        if self._plan is None:
            load = [0] * rank_and_world()[1]  # work of each rank
            self._plan = [self._bucket(group, params, load) for group in self.param_groups
                          for params in alike(group["params"], len(load))]
        return self._plan

    def _bucket(self, group, params, load):
        """Shares the parameters out, each to the rank with the least load, and moves their state into the bucket's."""
        mesh = mesh_of(params[0])
        rank, world = rank_and_world() if mesh is None else (mesh.get_local_rank(), mesh.size())
        shares = [[] for _ in range(world)]
        for p in params:
            r = load.index(min(load[:world]))  # a mesh may have fewer ranks
            shares[r].append(p)
            load[r] += work(p)
        kept = shares[rank] if mesh is None else sum(shares, [])
        state = zero_state(group, local(params[0]), len(kept))
        old = {p: self.state.pop(p, {}) for p in params}
        for name, buffer in state.items():
            for p, own in zip(kept, buffer):
                own.copy_(local(old[p].get(name, own)))  # without an old one it stays 0
                if mesh is not None and name != "step":
                    own = DTensor.from_local(own, mesh, p.placements, shape=(len(p), own.size(1)), stride=own.stride())
                self.state[p][name] = own
        return Bucket(group, mesh, rank, shares, kept, state)

    def state_dict(self):
        """torch's. With several ranks it has only this rank's share, marked "share": save full_state_dict() instead."""
        unsharded = any(mesh_of(p) is None for group in self.param_groups for p in group["params"])
        return super().state_dict() | ({"share": rank_and_world()} if unsharded and rank_and_world() != (0, 1) else {})

    def full_state_dict(self):
        """The whole state, on the CPU, to rank 0; {} to the others. All ranks must call it."""
        (rank, world), result = rank_and_world(), super().state_dict()
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for bucket in self._buckets():
            for owner, share in enumerate(bucket.shares):
                for p in share:
                    state = self.state.get(p) or zero_state(bucket.group, p)  # its owner's, or room for it
                    if bucket.mesh is None and world > 1:
                        for buffer in state.values():
                            dist.broadcast(buffer, owner)
                    result["state"][index[p]] = {name: whole_on_cpu(buffer) for name, buffer in state.items()}
        return result if rank == 0 else {}

    def load_state_dict(self, state_dict):
        """Takes the hyperparameters, and this rank's share of a whole state that was saved at any number of ranks.
        Raises ValueError for a state of another model or variant, or another rank's share."""
        if tuple(state_dict.get("share", rank_and_world())) != rank_and_world():
            raise ValueError("the state is one rank's share: save what full_state_dict() returns on rank 0")
        groups, state = [], {}
        for own, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            groups.append(own | other | {"compile": own["compile"]})  # own: for options that an older state lacks
            for p, i in zip(own["params"], other["params"]):
                saved = state_dict["state"].get(i, {})
                state[p] = {name: t if name == "step" else sharded_like(t, p) for name, t in saved.items()}
                found = {name: tuple(t.shape) for name, t in state[p].items()}
                expected = {name: tuple(t.shape) for name, t in zero_state(own, p, device="meta").items()}
                if other.get("variant") != own["variant"] or found and found != expected:
                    raise ValueError(f"a state of another model or variant: {other.get('variant')} with {found}, "
                                     f"here {own['variant']} has {expected}")
        super().load_state_dict({"state": {}, "param_groups": groups})  # torch would cast buffers
        self.state.update(state)
        self._plan = None
        self._buckets()  # copies what this rank keeps

def alike(params, world):
    """Lists of like parameters, most work first, of about 2**27 numbers on a GPU, on a CPU 2**20 or two a rank."""
    kinds = {}
    for p in params:
        kinds.setdefault((p.shape, p.dtype, p.device, mesh_of(p)), []).append(p)
    for same in sorted(kinds.values(), key=lambda same: -work(same[0])):
        most = max(1, 2**27 // world // same[0].numel()) if same[0].is_cuda else max(2, 2**20 // same[0].numel())
        yield from (same[i:i + most * world] for i in range(0, len(same), most * world))

def work(p):
    """Cost of Newton-Schulz, up to a factor."""
    return p.numel() * min(p.shape[-2:])

def zero_state(group, p, *leading, device=None):
    """The state of p before its first step; `leading` are sizes before its own, as of k parameters like it."""
    full, size = torch.promote_types(p.dtype, torch.float32), {"m": p.size(-2), "n": p.size(-1), "1": 1}
    state = {}
    for name, dims in {"step": "11", **VARIANTS[group["variant"]].state}.items():
        dtype = full if name == "step" or group["state_dtype"] == "None" else getattr(torch, group["state_dtype"])
        shape = *leading, *p.shape[:-2], *(size[d] for d in dims)
        state[name] = torch.zeros(shape, dtype=dtype, device=device or p.device)
    return state

def step_shares(buckets, found_inf):
    """Each rank updates its share of the matrices; those of a bucket are on their way while the next is computed."""
    handles = []
    for bucket in buckets:
        if any(p.grad is not None for p in bucket.kept):
            X, inputs = run_before(bucket, found_inf)
            O = newton_schulz_gram(X.flatten(0, -3), bucket.group["ns_steps"], bucket.group["ns_coefficients"])
            run_after(bucket, inputs, O.view(X.shape))
        if len(bucket.shares) > 1:
            handles += [dist.broadcast(p, owner, async_op=True)
                        for owner, share in enumerate(bucket.shares) for p in share]
    for handle in handles:
        handle.wait()

def run_before(bucket, found_inf):
    """Returns X for Newton-Schulz, wide or rows of this rank, and the inputs of each pass, for run_after too. On a CPU,
    where copies cost, a pass takes one parameter; on a GPU, where launches cost, or if they are sharded, all."""
    group, mesh, params, like = bucket.group, bucket.mesh, bucket.kept, local(bucket.kept[0])
    k = len(params) if like.is_cuda or mesh is not None else 1
    h = hyperparameters(group, params[0])
    gradients = [local(torch.zeros_like(p) if p.grad is None else p.grad) for p in params]
    G = [torch.stack(gradients)] if k > 1 else [g[None] for g in gradients]
    S = [{name: buffer[i:i + k] for name, buffer in bucket.state.items()} for i in range(0, len(params), k)]
    found = torch.zeros([1] * like.ndim, device=like.device) + found_inf
    skip = torch.stack([torch.ones_like(found) if p.grad is None else found for p in params])
    inputs = [(h, *each) for each in zip(G, S, skip.split(k))]  # h, G, S and skip of each pass

    shape = like.shape if mesh is not None else (*like.shape[:-2], *sorted(like.shape[-2:]))  # rows here; or wide
    X = like.new_empty(len(params), *shape, dtype=getattr(torch, group["ns_dtype"]))
    for args, x in zip(inputs, X.split(k)):
        run_compiled(before_pass, group, VARIANTS[group["variant"]].proxy, *args, x)
    return X, inputs

def run_after(bucket, inputs, O):
    """Updates the parameters from O, as wide as X of run_before or rows of this rank."""
    weights, k = [local(p) for p in bucket.kept], len(bucket.kept) // len(inputs)
    W = [torch.stack(weights)] if k > 1 else [w[None] for w in weights]
    for args, o, w in zip(inputs, O.split(k), W):
        run_compiled(after_pass, bucket.group, VARIANTS[bucket.group["variant"]].after, *args, o, w)
    if k > 1:
        torch._foreach_copy_(weights, list(W[0]))

def hyperparameters(group, p):
    """h of the rules. Numbers are tensors () on the CPU, which a GPU takes too, so that new ones do not recompile."""
    dtype, scale = torch.promote_types(p.dtype, torch.float32), UPDATE_SCALES[group["adjust_lr_fn"]](*p.shape[-2:])
    return {name: torch.as_tensor(x, dtype=dtype, device="cpu")
            if isinstance(x, (int, float, Tensor)) and not isinstance(x, bool) else x
            for name, x in (group | {"params": None, "mesh": mesh_of(p), "scale": scale}).items()}

# ---- Matrices sharded by rows, as FSDP2's fully_shard makes them -----------------------------------------------------
# State is of entries or rows, so it lives, and changes, where its rows are. Newton-Schulz takes a whole
# matrix: the rows of its proxy travel to the rank whose share it is in, and those of the result back.

def step_sharded(buckets, found_inf):
    """In three loops: what a bucket sends is on its way while the next one is computed."""
    sent, sent_back = [], []
    for bucket in buckets:
        X, inputs = run_before(bucket, found_inf)  # (all matrices, rows here, n)
        counts, (m, n) = [len(share) for share in bucket.shares], bucket.kept[0].shape
        most = -(-m // len(counts))  # rows of a rank, as FSDP2 cuts them; the last may have fewer or none
        heights = [min(most, max(0, m - r * most)) for r in range(len(counts))]
        shapes = [(counts[bucket.rank], height, n) for height in heights]  # what comes: each rank's rows of this share
        sent.append((bucket, inputs, heights, exchange(bucket.mesh, X.split(counts), shapes)))
    for bucket, inputs, heights, (parts, handle) in sent:
        handle.wait()
        X, group = torch.cat(parts, 1), bucket.group  # (matrices of this rank's share, m, n)
        O = newton_schulz(X, group["ns_steps"], group["ns_eps"], X.dtype, group["ns_coefficients"])
        shapes = [(len(share), heights[bucket.rank], O.size(2)) for share in bucket.shares]  # rows here of each share
        sent_back.append((bucket, inputs, exchange(bucket.mesh, O.split(heights, 1), shapes)))
    for bucket, inputs, (parts, handle) in sent_back:
        handle.wait()
        run_after(bucket, inputs, torch.cat(parts))

def exchange(mesh, parts, shapes):
    """Begins to send parts[r] to rank r. Returns the tensors that come, of shapes[r] from rank r, and a handle."""
    flat, counts = torch.cat([part.flatten() for part in parts]), [part.numel() for part in parts]
    sizes = [math.prod(shape) for shape in shapes]
    into = flat.new_empty(sum(sizes))
    handle = dist.all_to_all_single(into, flat, sizes, counts, mesh.get_group(), async_op=True)
    return [t.view(shape) for t, shape in zip(into.split(sizes), shapes)], handle

@torch._dynamo.disable
def sum_over(mesh, t):
    dist.all_reduce(t, group=mesh.get_group())
    return t

def whole_on_cpu(t):
    """A copy of t, which may be sharded, to rank 0, and None to the others; all ranks must call it."""
    t = t.full_tensor() if isinstance(t, DTensor) else t
    return t.to("cpu", copy=True) if rank_and_world()[0] == 0 else None

def sharded_like(t, p):
    """The whole tensor t as the DTensor that p is, without communication."""
    if isinstance(t, DTensor) or not isinstance(p, DTensor):
        return t
    return distribute_tensor(t, p.device_mesh, p.placements, src_data_rank=None)
