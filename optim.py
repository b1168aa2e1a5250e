"""
Muon-NSR and Muon-VS of the paper "Variance-Adaptive Muon", and the Muons it compares them with.

    muon = Muon(matrices, lr=6e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(embeddings_head_and_vectors, lr=6e-4, weight_decay=0.1)

Lines and symbols are those of the paper's Algorithm 1: W weights, G gradient, M momentum,
Γ variance, O orthogonalised; _hat bias-corrected, _tilde with Nesterov's lookahead.
"""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

# ---- Newton-Schulz ----
JORDAN = (3.4445, -4.7750, 2.0315)  # steep at 0; its price: singular values end only near 1

@torch.no_grad()
def newton_schulz(G, steps=5, eps=1e-7, dtype=None, coefficients=JORDAN, split=1):
    """Approximates the polar factor UVᵀ of G = USVᵀ, (..., m, n); a DTensor is (k, ..., m, n).

    dtype: of products and result; None for fast_dtype. coefficients: (a, b, c), or a triple for
    each step, the last one repeated. split: rows are cut into so many matrices."""
    dtype = dtype or fast_dtype(G.device.type)
    if isinstance(G, DTensor):
        # Products need whole matrices: ranks with parts of all k trade them for a few whole ones.
        # "dim": a _StridedShard is no Shard.
        parts = any(getattr(place, "dim", -1) >= G.ndim - 2 for place in G.placements)
        places = [Shard(0)] * G.device_mesh.ndim if parts else G.placements
        travels = torch.promote_types(dtype, torch.bfloat16)  # not fp16: G may overflow it
        own = G.to(travels).redistribute(placements=places).to_local()
        O = newton_schulz(own, steps, eps, dtype, coefficients, split)
        O = DTensor.from_local(O, G.device_mesh, places, shape=G.shape, stride=G.stride())
        return O.redistribute(placements=G.placements)

    triples = coefficients if isinstance(coefficients[0], tuple | list) else [coefficients]
    X = upcast(G).reshape(-1, G.size(-2) // split, G.size(-1))  # (matrices, m / split, n)
    X = (X / (norm(X, 1) + eps)).to(dtype)
    # On a CPU a matrix alone is faster than a batch of one.
    X, addmm = (X[0], torch.addmm) if len(X) == 1 else (X, torch.baddbmm)
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X
    for i in range(steps):
        a, b, c = triples[min(i, len(triples) - 1)]  # X <- aX + (bA + cA²)X
        A = X @ X.mT
        B = addmm(A, A, A, beta=b, alpha=c)
        X = addmm(X, B, X, beta=a)
    return (X.mT if tall else X).reshape(G.shape)

def norm(X, split):
    """For each row the Frobenius norm of its matrix, one of `split`: (..., m, 1)."""
    parts = X.square().sum(-1, keepdim=True).chunk(split, -2)  # a DTensor gathers shared-out rows
    norms = torch.cat([part.sum(-2, keepdim=True).expand_as(part) for part in parts], -2)
    return norms.sqrt().clamp_min(1e-15)  # squares of less are 0

def upcast(t):
    """t in the precision that rules compute in: fp32, or fp64 for fp64."""
    return t.to(torch.promote_types(t.dtype, torch.float32))

@torch.compiler.assume_constant_result
def fast_dtype(device):
    """bf16 where products are faster in it: Ampere or newer, AMX, AMD's AVX512-BF16; else fp32."""
    if device == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        cpu = torch.cpu.get_capabilities()
        fast = cpu.get("amx_bf16") or (cpu.get("avx512_bf16") and "AMD" in cpu["cpu_name"])
    return torch.bfloat16 if fast else torch.float32

# ---- The variants ----
# rule(G, S, ns, options it uses) -> (O, new state). G, O and the buffers of the state S are
# (..., m, n); ns is Newton-Schulz. A new option is an argument of Muon; numbers come as tensors.

def momentum_sum(G, S, beta, nesterov):
    """M̃ and the new state. Muon's momentum is a sum, that of Algorithm 1 an average."""
    M = beta * S["momentum"] + G
    return (G + beta * M if nesterov else M), {"momentum": M}

def averages(G, S, t, beta, nesterov):
    """M̃, Γ̂ and the new state."""
    M = beta * S["momentum"] + (1 - beta) * G  # line 4
    variance = beta * S["variance"] + beta * (1 - beta) * (S["momentum"] - G) ** 2  # line 5
    M_hat = M / (1 - beta**t)  # line 6
    variance_hat = variance / (1 - beta**t)
    M_tilde = G + beta / (1 - beta) * M_hat if nesterov else M_hat  # line 7
    return M_tilde, variance_hat, {"momentum": M, "variance": variance}

def muon(G, S, ns, momentum, nesterov, **_):
    """Muon (Jordan et al., 2024)."""
    M_tilde, S_new = momentum_sum(G, S, momentum, nesterov)
    return ns(M_tilde), S_new

def muon_nsr(G, S, ns, t, momentum, nesterov, gamma, eps, **_):
    """Muon-NSR: Algorithm 1 with τ = NSR."""
    M_tilde, variance, S_new = averages(G, S, t, momentum, nesterov)
    return ns(M_tilde / ((M_tilde**2 + gamma * variance).sqrt() + eps)), S_new  # lines 9 and 13

def muon_vs(G, S, ns, t, momentum, nesterov, power, eps, **_):
    """Muon-VS: Algorithm 1 with τ = VS, where power is 1; 0 gives Muon, bias-corrected."""
    M_tilde, variance, S_new = averages(G, S, t, momentum, nesterov)
    return ns(M_tilde / (variance.sqrt() + eps) ** power), S_new  # lines 11 and 13

def muon_nsr_post(G, S, ns, t, momentum, nesterov, gamma, eps, **_):
    """Muon-NSR-Reshuffled, the paper's Algorithm 2: Muon-NSR's gate behind Newton-Schulz."""
    M_tilde, variance, S_new = averages(G, S, t, momentum, nesterov)
    return ns(M_tilde) / (1 + gamma * variance / (M_tilde**2 + eps)).sqrt(), S_new

def adamuon(G, S, ns, momentum, nesterov, eps, **_):
    """AdaMuon (Si et al., 2025): Newton-Schulz of the sign, then a second moment of the result."""
    M_tilde, S_new = momentum_sum(G, S, momentum, nesterov)
    O = ns(M_tilde / M_tilde.abs().clamp_min(1e-30))  # torch's sign() of NaN is 0
    V = momentum * S["second_moment"] + (1 - momentum) * O**2
    return O / (V.sqrt() + eps), S_new | {"second_moment": V}

def normuon(G, S, ns, momentum, nesterov, beta2, eps, split, **_):
    """NorMuon (Li et al., 2025): a second moment of each row of O, whose norm is then restored."""
    M_tilde, S_new = momentum_sum(G, S, momentum, nesterov)
    O = ns(M_tilde)
    v = beta2 * S["row_moment"] + (1 - beta2) * O.square().mean(-1, keepdim=True)
    P = O / (v.sqrt() + eps)
    return P * (norm(O, split) / norm(P, split)), S_new | {"row_moment": v}

def muon2(G, S, ns, momentum, nesterov, beta2, eps, **_):
    """Muon² (Liu et al., 2026): a second moment of G, not bias-corrected, before Newton-Schulz."""
    M_tilde, S_new = momentum_sum(G, S, momentum, nesterov)
    V = beta2 * S["second_moment"] + (1 - beta2) * G**2
    return ns(M_tilde / (V.sqrt() + eps)), S_new | {"second_moment": V}

VARIANTS = {  # rule, and the buffers of its state; "row_..." are (..., m, 1)
    "muon": (muon, "momentum"),
    "muon-nsr": (muon_nsr, "momentum", "variance"),
    "muon-vs": (muon_vs, "momentum", "variance"),
    "muon-nsr-post": (muon_nsr_post, "momentum", "variance"),
    "adamuon": (adamuon, "momentum", "second_moment"),
    "normuon": (normuon, "momentum", "row_moment"),
    "muon2": (muon2, "momentum", "second_moment"),
}

UPDATE_SCALES = {  # s of (m, n) matrices O, by adjust_lr_fn
    "original": lambda O, m, n, split: max(1, m / n) ** 0.5,
    "match_rms_adamw": lambda O, m, n, split: 0.2 * max(m, n) ** 0.5,
    "frobenius": lambda O, m, n, split: 0.2 * (m * n) ** 0.5 / norm(O, split),
}

def update(gradients, states, variant, lr, weight_decay, adjust_lr_fn, split, ns_steps, ns_eps,
           ns_dtype, ns_coefficients, **options):
    """Algorithm 1 for k like parameters: what states holds changes in place, the weights W too."""
    rule = VARIANTS[variant][0]
    S = {name: upcast(torch.stack(tensors)) for name, tensors in states.items()}  # (k, ..., m, n)
    W = S.pop("W")
    G = placed_like(upcast(torch.stack(gradients)), W)
    ns = lambda X: upcast(newton_schulz(X, ns_steps, ns_eps, ns_dtype, ns_coefficients, split))
    O, S_new = rule(G, S, ns, split=split, **options)
    scale = UPDATE_SCALES[adjust_lr_fn](O, O.size(-2) // split, O.size(-1), split)
    S_new["W"] = W * (1 - lr * weight_decay) - lr * scale * O  # line 14
    for name, tensors in states.items():
        for old, new in zip(tensors, S_new[name]):
            old.copy_(placed_like(new, old))

def placed_like(value, other):
    """value, a DTensor or whole on each rank, put where other is; of another shape, as it is."""
    if getattr(value, "shape", None) != other.shape:  # such as a step
        return value
    value = value.to(other.device)
    if not isinstance(other, DTensor):
        return value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, other.device_mesh)  # a copy on each rank
    return value.redistribute(placements=other.placements)

compiled_update = torch.compile(update, fullgraph=True, dynamic=False)

# ---- The optimizer ----
class Muon(torch.optim.Optimizer):
    """Muon and its variants, for the matrices inside a network, (m, n) or batches (..., m, n).
    Embeddings, output head, vectors and convolutions are for torch.optim.AdamW.

    lr: η. adjust_lr_fn: its factor s, as in torch.optim.Muon. weight_decay: λ, times lr alone.
    momentum, gamma, beta2, eps: β, γ, β₂ and ε of the rule that variant names. Clear the state
    when variant changes: rules differ in what they keep under one name.
    split: rows are cut into so many equal matrices: 3 for fused queries, keys and values.
    state_dtype: None for fp32, or fp64 for fp64; in bf16 averages with β above 0.996 stall.
    compile: False does without a compiler, as DTensors always do.

    The ranks of process_group, None for all, must list the same matrices in the same order, have
    the same gradients and step together. Each keeps the state of its share of the matrices, updates
    and broadcasts them: all end with the same bits. Of 12 like matrices on 8 ranks, ranks 0 to 3
    own two each, the others one; a step takes the time of two.
    DTensors and their state stay as placed; matrices move for Newton-Schulz alone, in ns_dtype."""

    def __init__(self, params, lr=1e-3, variant="muon-vs", momentum=0.95, weight_decay=0.1,
                 gamma=10.0, power=1.0, beta2=0.95, eps=1e-8, nesterov=True, ns_steps=5,
                 ns_eps=1e-7, ns_dtype=None, ns_coefficients=JORDAN, adjust_lr_fn="original",
                 split=1, state_dtype=None, compile=True, process_group=None):
        defaults = dict(locals())  # __class__ is among them, as super() needs it
        del defaults["self"], defaults["params"], defaults["process_group"], defaults["__class__"]
        self.process_group = process_group
        self.owners = {}  # parameter -> rank that updates it; no DTensors: each rank has a part
        super().__init__(params, defaults)
        self._check()

    @property
    def rank(self):
        return dist.get_rank(self.process_group) if dist.is_initialized() else 0

    def _check(self):
        for group in self.param_groups:
            known = group["variant"] in VARIANTS and group["adjust_lr_fn"] in UPDATE_SCALES
            if not known or any(p.ndim < 2 or p.size(-2) % group["split"] for p in group["params"]):
                raise ValueError("expected matrices (vectors are AdamW's; FSDP1 makes some, so use "
                                 "FSDP2), a split that divides rows, and names of "
                                 f"{[*VARIANTS, *UPDATE_SCALES]}")

    def _share(self):
        """Gives new parameters an owner. Late, as wrappers may replace what they were made with."""
        ranks = dist.get_world_size(self.process_group) if dist.is_initialized() else 1
        for group in self.param_groups:
            for p in sorted(group["params"], key=lambda p: -p.numel()):
                if ranks > 1 and not isinstance(p, DTensor):
                    self.owners.setdefault(p, len(self.owners) % ranks)

    @torch.compiler.disable  # compiled as a part of a training step it went wrong
    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient. Returns closure()'s loss."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self._check()  # what was edited or wrapped since
        self._share()
        for group in self.param_groups:
            alike = {}  # this rank's parameters, in lists of those that can be stacked
            for p in group["params"]:
                if p.grad is not None and self.owners.get(p, self.rank) == self.rank:
                    step = int(self._state(group, p)["step"])
                    layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
                    alike.setdefault((step, p.shape, p.dtype, p.device, layout), []).append(p)
            for (_, shape, _, device, layout), params in alike.items():
                # One matrix for each rank that has parts. More at once are fewer calls, but the
                # stacked copies cost memory, and on a CPU time.
                ranks = layout[0].size() if layout else 1
                at_once = max(ranks, 1 if device.type == "cpu" else 2**27 // shape.numel())
                for i in range(0, len(params), at_once):
                    self._update(group, params[i:i + at_once])
        for p in [p for group in self.param_groups for p in group["params"] if p in self.owners]:
            dense = p.contiguous()  # p itself, or a copy if it is not contiguous
            dist.broadcast(dense, group_src=self.owners[p], group=self.process_group)
            p.copy_(dense)
        return loss

    def _update(self, group, params):
        own = [self._state(group, p) for p in params]
        states = {name: [state[name] for state in own] for name in VARIANTS[group["variant"]][1:]}
        states["W"] = [p.detach() for p in params]
        options = {name: value for name, value in group.items() if name in self.defaults}
        options["t"] = own[0]["step"] + 1
        for name, value in options.items():  # numbers as tensors, which recompile nothing
            if name in ("nesterov", "ns_steps", "split") or (name, value) == ("power", 1):
                options[name] = int(value)  # but for these, which a graph is made for
            elif isinstance(value, int | float):
                options[name] = torch.tensor(value, dtype=torch.float64, device="cpu")
            elif name == "ns_coefficients":  # graphs do not tell NumPy's floats apart
                triples = value if hasattr(value[0], "__len__") else [value]
                options[name] = [tuple(map(float, triple)) for triple in triples]
        eager = not group["compile"] or isinstance(params[0], DTensor)
        run = update if eager else compiled_update
        try:
            with (torch.autocast(params[0].device.type, enabled=False),
                  torch._dynamo.config.patch(recompile_limit=256)):  # a graph for each shape
                run([p.grad for p in params], states, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise RuntimeError("torch.compile failed; try Muon(..., compile=False)") from error
        for state in own:
            state["step"] += 1

    def _state(self, group, p):
        """The state of p; what is missing is made, zero."""
        state = self.state[p]
        state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        for name in VARIANTS[group["variant"]][1:]:
            if name not in state:
                like = upcast(p[..., :1] if name.startswith("row_") else p)
                state[name] = torch.zeros_like(like, dtype=group["state_dtype"])
        return state

    def state_dict(self):
        """As torch's. RuntimeError on one rank of several, which has only its share."""
        if self.owners:
            raise RuntimeError("a rank has its share of the state: call full_state_dict() on all")
        result = super().state_dict()
        for group in result["param_groups"]:  # dtypes, which some savers refuse, are each start's
            group.update(ns_dtype=None, state_dtype=None)
        return result

    def full_state_dict(self):
        """The whole state, on the CPU, to rank 0; {} to the others. All ranks must call it."""
        result = super().state_dict()
        for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
            box = [{name: whole_on_cpu(value) for name, value in self.state.get(p, {}).items()}]
            if p in self.owners:
                dist.broadcast_object_list(box, group_src=self.owners[p], device=p.device,
                                           group=self.process_group)
            if self.rank == 0:
                result["state"][i] = box[0]
        return result if self.rank == 0 else {}

    def load_state_dict(self, state_dict):
        """Takes the options, but for dtypes and compile, and this rank's part of a whole state."""
        groups = []
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            kept = {name: own[name] for name in ("compile", "ns_dtype", "state_dtype")}
            kept["variant"] = saved["variant"]  # KeyError: of another optimizer
            groups.append(own | saved | kept)  # older files lack some options
        super().load_state_dict({"state": {}, "param_groups": groups})  # it would cast the state
        if state_dict["state"]:  # wrappers load an empty one before they replace parameters
            self._share()
        for group, saved in zip(self.param_groups, groups):
            for p, i in zip(group["params"], saved["params"]):
                if self.owners.get(p, self.rank) != self.rank:
                    continue
                for name, value in state_dict["state"].get(i, {}).items():
                    state = self._state(group, p)
                    if name == "step":
                        state[name].fill_(torch.as_tensor(value).max())  # older files: (1, 1)
                    elif name not in state:  # a wrapper's
                        state[name] = placed_like(value, p)
                    elif value.shape == state[name].shape:
                        state[name].copy_(placed_like(value, state[name]))
                    else:
                        raise RuntimeError(f"{name} of parameter {i} has another shape")

    def __getstate__(self):  # torch's keeps only its own three attributes
        return super().__getstate__() | dict(process_group=self.process_group, owners=self.owners)

def whole_on_cpu(value):
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.to("cpu", copy=True) if torch.is_tensor(value) else value
