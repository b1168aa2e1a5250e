"""Tests of optim.py on a CPU: the update rules against a float64 reference and the paper's identities, Newton-Schulz's
precision, one rank against several, state dicts, and compilation."""
import copy, itertools, math, pickle, time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import optim
from optim import JORDAN, VARIANTS, Muon, newton_schulz

SHAPES = {"wide": (24, 64), "tall": (64, 24), "square": (32, 32)}

def parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return [torch.nn.Parameter(draw(shape).to(dtype)) for shape in shapes]

def set_gradients(params, step):
    """Gradients with a mean, a noise and a few rare large entries, a pure function of step."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        mean = torch.randn(p.shape, generator=torch.Generator().manual_seed(77 + i), dtype=torch.float64)
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        rare = (torch.rand(p.shape, generator=generator, dtype=torch.float64) < 0.01) * 20 * noise
        p.grad = (0.01 * (0.3 * mean + noise + rare)).to(p.dtype)

def run(opt, params, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(params, step)
        opt.step()
    return [p.detach().clone() for p in params]

# ---- The update rules ----
def reference(W, gradients, variant, lr, momentum, gamma, beta2, adjust_lr_fn, nesterov, power):
    """The update rules in numpy float64, one matrix, written for clarity and apart from optim.py. Returns its way."""
    b, eps, (m, n), start = momentum, 1e-8, W.shape, W
    # An ε of the norm so large that it shows.
    ns = lambda X: standard(torch.from_numpy(X / (np.linalg.norm(X) + 1e-3)), 5, [(3.4445, -4.7750, 2.0315)]).numpy()
    M, V, row = np.zeros_like(W), np.zeros_like(W), np.zeros((m, 1))
    for t, G in enumerate(gradients, 1):
        if variant in ("muon-nsr", "muon-vs", "muon-nsr-post"):
            V = b * V + b * (1 - b) * (M - G) ** 2
            M = b * M + (1 - b) * G
            mean, var = M / (1 - b**t), V / (1 - b**t)
            tilde = G + b / (1 - b) * mean if nesterov else mean
        else:
            M = b * M + G
            tilde = G + b * M if nesterov else M
        if variant in ("muon", "normuon"):
            O = ns(tilde)
        if variant == "muon-nsr":
            O = ns(tilde / (np.sqrt(tilde**2 + gamma * var) + eps))
        if variant == "muon-vs":
            O = ns(tilde / (np.sqrt(var) + eps) ** power)
        if variant == "muon-nsr-post":
            O = ns(tilde) / np.sqrt(1 + gamma * var / (tilde**2 + eps))
        if variant == "adamuon":
            O = ns(np.sign(tilde))
            V = b * V + (1 - b) * O**2
            O = O / (np.sqrt(V) + eps)
        if variant == "normuon":
            norm = np.linalg.norm(O)
            row = beta2 * row + (1 - beta2) * (O**2).mean(1, keepdims=True)
            O = O / (np.sqrt(row) + eps)
            O = O * norm / np.linalg.norm(O)
        if variant == "muon2":
            V = beta2 * V + (1 - beta2) * G**2
            O = ns(tilde / (np.sqrt(V) + eps))
        s = {"original": max(1, m / n) ** 0.5, "match_rms_adamw": 0.2 * max(m, n) ** 0.5,
             "frobenius": 0.2 * (m * n) ** 0.5 / np.linalg.norm(O)}[adjust_lr_fn]  # no O: it lacks the variant's rule
        W = W * (1 - lr * 0.1) - lr * s * O
    return W - start

@pytest.mark.parametrize("variant, power", [*zip(VARIANTS, itertools.repeat(1.0)), ("muon-vs", 0.25), ("muon-vs", 0.5)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_variant_follows_the_float64_reference(variant, power, shape):
    """50 steps. In float64 throughout to 1e-9 of the way travelled: what remains is the order of operations. With fp32
    state and bf16 Newton-Schulz to 3 %: a few roundings of 2^-9 that Newton-Schulz amplifies."""
    adjust = {"wide": "original", "tall": "match_rms_adamw", "square": "frobenius"}[shape]
    options = dict(lr=0.02, variant=variant, momentum=0.9, gamma=7.0, beta2=0.8, adjust_lr_fn=adjust, power=power,
                   nesterov=shape != "tall")
    p, = parameters(SHAPES[shape], dtype=torch.float64)
    start, gradients = p.detach().numpy().copy(), []
    for step in range(50):
        set_gradients([p], step)
        gradients.append(p.grad.numpy())
    way = reference(start, gradients, **options)
    for dtype, ns_dtype, tolerance in (torch.float64, torch.float64, 1e-9), (torch.float32, torch.bfloat16, 0.03):
        p = torch.nn.Parameter(torch.from_numpy(start).to(dtype, copy=True))
        run(Muon([p], ns_dtype=ns_dtype, ns_eps=1e-3, compile=False, **options), [p], 50)
        error = p.detach().double().numpy() - start - way
        assert np.linalg.norm(error) < tolerance * np.linalg.norm(way)

@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_is_torch_optim_muon(adjust_lr_fn, shape):
    """The same momentum, decay and scales; bf16 Newton-Schulz with other roundings, hence 3 % of the way travelled."""
    ours, theirs = parameters(SHAPES[shape]) + parameters(SHAPES[shape])
    start = ours.detach().clone()
    options = dict(lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn)
    run(Muon([ours], variant="muon", compile=False, **options), [ours], 50)
    run(torch.optim.Muon([theirs], **options), [theirs], 50)
    assert (ours - theirs).norm() < 0.03 * (ours - start).norm()

def proxies(variant, gradients, bias_correction=True, **options):
    """What a variant hands to Newton-Schulz at each step, and its state, in float64."""
    rule, *buffers = VARIANTS[variant]
    h = dict(momentum=0.95, gamma=10.0, power=1.0, eps=1e-8, nesterov=True) | options
    S = {name: torch.zeros_like(gradients[0]) for name in buffers}
    for t, G in enumerate(gradients, 1):
        handed = []
        _, S = rule(G, S, lambda X: handed.append(X) or X, t=t if bias_correction else math.inf, **h)
        yield handed[0], S

def noise(steps, shape=(6, 9)):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]

def test_adams_moments():
    """Eq. reg-adam-ml: Γ_t = v_t - m_t², 400 steps in float64. At γ = 1, without Nesterov and bias correction (t = ∞),
    the proxy of muon-nsr is Adam's direction, m / √v."""
    gradients, m, v = noise(400), 0, 0
    options = dict(gamma=1.0, eps=0.0, nesterov=False, bias_correction=False)
    both = zip(proxies("muon-vs", gradients), proxies("muon-nsr", gradients, **options))
    for G, ((_, S), (X, _)) in zip(gradients, both):
        m, v = 0.95 * m + 0.05 * G, 0.95 * v + 0.05 * G**2
        torch.testing.assert_close(S["variance"], v - m**2, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(S["momentum"], m, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(X, m / v.sqrt(), rtol=1e-9, atol=1e-12)

def test_nsr_at_gamma_0_is_the_sign_and_at_infinity_vs():
    gradients = noise(30)
    for (X, _), (M_tilde, _) in zip(proxies("muon-nsr", gradients, gamma=0.0, eps=0.0),
                                    proxies("muon-nsr-post", gradients)):
        torch.testing.assert_close(X, M_tilde.sign())
    for (X, _), (Y, _) in zip(proxies("muon-nsr", gradients, gamma=1e16, eps=0.0),
                              proxies("muon-vs", gradients, eps=0.0)):
        O, P = newton_schulz(X, eps=0.0, dtype=torch.float64), newton_schulz(Y, eps=0.0, dtype=torch.float64)
        torch.testing.assert_close(O, P, rtol=1e-5, atol=1e-6)

def test_muon_vs_is_muon_at_power_0():
    """But for bias correction, which Muon lacks: G + β/(1-β) M of the average is G + βM of the sum."""
    G = noise(100)
    for (X, _), (Y, _) in zip(proxies("muon-vs", G, power=0, bias_correction=False), proxies("muon", G)):
        torch.testing.assert_close(X, Y, rtol=1e-9, atol=1e-12)

def test_constant_gradient_leaves_the_variance_of_the_warm_up():
    """Γ_1 = β(1-β)G², and M_{t-1} - G = -β^(t-1) G from then on: Γ_t = βᵗ (1 - βᵗ) G²."""
    gradients = noise(1) * 300
    for t, (X, S) in enumerate(proxies("muon-vs", gradients), 1):
        torch.testing.assert_close(S["variance"], 0.95**t * (1 - 0.95**t) * gradients[0]**2, rtol=1e-6, atol=1e-15)
        assert X.isfinite().all()

@pytest.mark.parametrize("adjust_lr_fn", ["original", "frobenius"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_large_and_nan_gradients(variant, adjust_lr_fn):
    """Zero gives a zero update. From 1e-33, whose square is 0, to 1e12 updates keep their size or shrink. NaN shows."""
    for size in 0, 1e-33, 1e-12, 1e12:
        p, = parameters((16, 40))
        before = p.detach().clone()
        opt = Muon([p], lr=0.01, variant=variant, weight_decay=0.0, adjust_lr_fn=adjust_lr_fn, compile=False)
        for step in range(3):
            set_gradients([p], step)
            p.grad *= size
            opt.step()
        assert p.isfinite().all() and p.norm() < 10 and (torch.equal(p, before) == (size == 0) or size == 1e-33), size
        p.grad[0, 0] = math.nan
        opt.step()
        assert p.isnan().all()

@pytest.mark.parametrize("variant", ["muon", "muon-nsr", "muon-vs", "muon2", "muon-nsr-post"])
def test_with_the_exact_polar_factor_all_singular_values_are_s(variant, monkeypatch):
    """Appendix, "Modulation before the polar map": a gate in front leaves an update whose singular values are all s,
    the gate behind does not."""
    def polar(X, *_):
        U, _, Vh = torch.linalg.svd(X, full_matrices=False)
        return U @ Vh
    monkeypatch.setattr(optim, "newton_schulz", polar)
    for shape in SHAPES.values():
        p, = parameters(shape, dtype=torch.float64)
        opt = Muon([p], 1, variant, 0.95, 0, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float64, compile=False)
        before, after = run(opt, [p], 4)[0], run(opt, [p], 1, start=4)[0]
        values = torch.linalg.svdvals(before - after)
        expected = torch.full_like(values, 0.2 * max(shape) ** 0.5)
        assert torch.allclose(values, expected, rtol=1e-8, atol=0) == (variant != "muon-nsr-post")

# ---- Newton-Schulz ----
def standard(X, steps=5, coefficients=JORDAN):
    """As published, with one rounding a line: in bf16 that is torch.optim.Muon's, the most exact of the usual ones."""
    flip = X.size(0) > X.size(1)
    X = X.T if flip else X
    given = [coefficients] if coefficients == JORDAN else coefficients
    for a, b, c in (given + given[-1:] * steps)[:steps]:
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if flip else X

POLAR_EXPRESS = [(8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),  # with its factors
                 (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585)]     # for safety

def spectrum(kind, m, n):
    """A float64 matrix of Frobenius norm 1 with the singular values of `kind`."""
    generator = torch.Generator().manual_seed(m + n)
    X, r = torch.randn(m, n, generator=generator, dtype=torch.float64), min(m, n)
    if kind != "gaussian":
        U, _, Vh = torch.linalg.svd(X, full_matrices=False)
        X = U * torch.arange(1, r + 1, dtype=torch.float64) ** {"1/i": -1.0, "1/sqrt(i)": -0.5}[kind] @ Vh
    return X / X.norm()

@pytest.mark.parametrize("steps", range(8))
def test_newton_schulz_is_the_published_one_in_float64(steps):
    """To float64 rounding as the polynomial amplifies it."""
    for coefficients in JORDAN, POLAR_EXPRESS:
        for shape in (10, 40), (40, 10), (16, 16), (16, 24), (1, 7):
            X = spectrum("gaussian", *shape)
            O = newton_schulz(X, steps, 0.0, torch.float64, coefficients)
            torch.testing.assert_close(O, standard(X, steps, coefficients), rtol=1e-9, atol=1e-9)

@pytest.mark.parametrize("shape", [(192, 192), (192, 576), (512, 128), (128, 352)], ids=str)
def test_precision_of_newton_schulz(shape):
    """|O - O_float64| in bf16 at most 1.25 times that of the standard form: another order of sums."""
    for kind, c in itertools.product(["gaussian", "1/i", "1/sqrt(i)"], [JORDAN, POLAR_EXPRESS]):
        X = spectrum(kind, *shape)
        ours, usual = newton_schulz(X, 5, 0.0, torch.bfloat16, c), standard(X.bfloat16(), coefficients=c)
        exact = standard(X, coefficients=c)
        assert (ours.double() - exact).norm() <= 1.25 * (usual.double() - exact).norm(), kind

def test_default_dtype_is_what_this_machine_multiplies_fast(monkeypatch):
    """bf16 on AMX and on AMD's AVX512-BF16; fp32 where bf16 is emulated, as with AVX2 alone."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    for capabilities, dtype in ((dict(amx_bf16=True, cpu_name="Xeon"), torch.bfloat16),
                                (dict(avx512_bf16=True, cpu_name="AMD EPYC"), torch.bfloat16),
                                (dict(avx512_bf16=True, cpu_name="Xeon"), torch.float32),
                                (dict(avx2=True, cpu_name="AMD Ryzen"), torch.float32), ({}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        assert newton_schulz(torch.ones(2, 3)).dtype == dtype
    assert optim.fast_dtype("cuda") == torch.float32

def test_newton_schulz_takes_batches_and_leaves_its_input():
    G = torch.randn(2, 3, 64, 24, requires_grad=True)
    before = G.detach().clone()
    O = newton_schulz(G, dtype=torch.bfloat16)
    assert O.shape == G.shape and O.dtype == torch.bfloat16 and not O.requires_grad and torch.equal(G, before)
    torch.testing.assert_close(O[1, 2], newton_schulz(G[1, 2], dtype=torch.bfloat16), rtol=0.05, atol=0.02)  # of bf16

# ---- A torch.optim.Optimizer ----
@pytest.mark.parametrize("variant", VARIANTS)
def test_stacked_and_split_is_one_by_one(variant):
    """Two parameters at once, as on a GPU, rows cut in three or whole, take the steps of matrices one at a time, with
    each scale; in batches too. Newton-Schulz in fp64 hides the order of sums; fp32 rounding is left."""
    shapes = (24, 16), (24, 4), (12, 40), (2, 24, 16)
    for split, scale, shape in itertools.product((1, 2, 3), optim.UPDATE_SCALES, shapes):
        stack = parameters(shape, shape)
        parts = [torch.nn.Parameter(part.detach().clone()) for p in stack for part in p.chunk(split, -2)]
        options = dict(lr=0.02, variant=variant, adjust_lr_fn=scale, ns_dtype=torch.float64, compile=False)
        a, b = Muon(stack, split=split, **options), Muon(parts, **options)
        for step in range(5):
            set_gradients(stack, step)
            for part, gradient in zip(parts, [part for p in stack for part in p.grad.chunk(split, -2)]):
                part.grad = gradient.clone()
            a._update(a.param_groups[0], stack)
            b.step()
        torch.testing.assert_close(torch.cat(stack, -2), torch.cat(parts, -2), rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_round_trip(variant, tmp_path):
    """30 steps are 15, a file, and 15, bit for bit; the buffers keep their dtype beside bf16 parameters."""
    for dtype, state_dtype in (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16):
        make = lambda params: Muon(params, lr=0.02, variant=variant, state_dtype=state_dtype, compile=False)
        whole, halves = (parameters((16, 40), (40, 16), dtype=dtype) for _ in range(2))
        run(make(whole), whole, 30)
        first, second = make(halves), make(halves)
        run(first, halves, 15)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        run(second, halves, 15, start=15)
        assert all(map(torch.equal, whole, halves))
        assert second.state[halves[0]]["momentum"].dtype == (state_dtype or torch.float32)

def test_states_of_older_files_and_other_models():
    """Until 2026-11 a step was (1, 1), dtypes were names, and there was no power and no split."""
    params, twins = (parameters((16, 8), (3, 8, 16)) for _ in range(2))
    opt, twin = Muon(params, compile=False), Muon(twins, compile=False)
    run(opt, params, 3)
    older = copy.deepcopy(opt.state_dict())
    older["param_groups"][0].update(ns_dtype="bfloat16", state_dtype="None", compile=True)
    del older["param_groups"][0]["power"], older["param_groups"][0]["split"]
    older["state"][0]["step"], older["state"][1]["step"] = torch.full((1, 1), 3.0), torch.full((3, 1, 1), 3.0)
    torch._foreach_copy_([p.detach() for p in twins], params)
    twin.load_state_dict(older)
    assert all(map(torch.equal, run(opt, params, 2, start=3), run(twin, twins, 2, start=3)))
    assert not twin.param_groups[0]["compile"]
    pytest.raises(ValueError, Muon([dict(params=[p]) for p in params]).load_state_dict, opt.state_dict())
    for other in (8, 16), (3, 16, 8):
        pytest.raises(RuntimeError, Muon(parameters(other, (3, 8, 16))).load_state_dict, opt.state_dict())
    pytest.raises(KeyError, opt.load_state_dict, torch.optim.AdamW(params).state_dict()).match("variant")

def trained():
    params = parameters((16, 8), (8, 16))
    opt = Muon(params, lr=0.02, ns_dtype=torch.float32, compile=False)
    run(opt, params, 3)
    return opt, params

def test_fake_tensors_step():  # as where memory is planned
    with torch._subclasses.FakeTensorMode():
        trained()

def test_edits_of_state_and_options_count():
    opt, params = trained()
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    opt.state.clear()
    after = run(Muon(fresh, lr=0.02, ns_dtype=torch.float32, compile=False), fresh, 3)
    assert all(map(torch.equal, run(opt, params, 3), after))
    for buffer in opt.state[params[1]].values():
        buffer.zero_()
    opt.param_groups[0]["variant"] = "normuon"
    run(opt, params, 1)
    assert "row_moment" in opt.state[params[0]] and opt.state[params[1]]["step"] == 1

def test_keys_of_others_in_the_state_stay():
    opt, params = trained()
    opt.state[params[0]]["slow_copy"] = params[0].detach().clone()  # as wrappers do
    opt.state[params[1]]["step"] = 3
    run(opt, params, 1)
    saved = opt.full_state_dict()
    opt.load_state_dict(saved)
    assert set(opt.state[params[0]]) == set(saved["state"][0]) == {"slow_copy", "step", "momentum", "variance"}
    assert opt.state[params[1]]["step"] == 4

def test_a_parameter_is_replaced():
    opt, (p, q) = trained()
    pruned = opt.param_groups[0]["params"][0] = torch.nn.Parameter(p.detach()[:8].clone())
    before = [pruned.detach().clone(), p.detach().clone()]
    run(opt, [pruned, q], 1)
    assert not torch.equal(pruned, before[0]) and torch.equal(p, before[1])
    assert opt.state[pruned]["momentum"].shape == (8, 8) and opt.state[q]["step"] == 4

@pytest.mark.parametrize("how", ["deepcopy", "pickling", "autocast"])
def test_copies_pickles_and_autocast(how):
    opt, params = trained()
    ways = dict(deepcopy=copy.deepcopy, pickling=lambda x: pickle.loads(pickle.dumps(x)), autocast=lambda _: trained())
    twin, copies = ways[how]((opt, params))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        after = run(twin, copies, 2, start=3)
    assert all(map(torch.equal, run(opt, params, 2, start=3), after))

def test_groups_schedules_closures_and_missing_gradients():
    params = parameters((16, 8), (16, 8), (8, 16))
    before = [p.detach().clone() for p in params]
    opt = Muon([dict(params=params[:1]), dict(params=params[1:2], lr=0.0)], lr=0.1, compile=False)
    opt.add_param_group(dict(params=params[2:], variant="muon", lr=0.3))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5)
    set_gradients(params, 0)
    params[2].grad = None
    gradients = [p.grad.clone() for p in params[:2]]
    assert opt.step(lambda: (0 * params[0]).sum().backward() or 7.0) == 7.0 and opt.param_groups[0]["lr"] == 0.05
    schedule.step()
    opt.load_state_dict(opt.full_state_dict())
    assert not torch.equal(params[0], before[0]) and all(map(torch.equal, params[1:], before[1:]))
    assert params[2] not in opt.state and all(torch.equal(p.grad, g) for p, g in zip(params, gradients))

@pytest.mark.parametrize("message, shape, options", [
    ("AdamW", (4,), {}), ("muon-vs", (4, 4), dict(variant="vs")), ("frobenius", (4, 4), dict(adjust_lr_fn="rms")),
    ("split", (4, 6), dict(split=3))])
def test_what_is_no_matrix_or_no_variant_is_refused(message, shape, options):
    """When it is made, and by a step, which then has changed nothing."""
    pytest.raises(ValueError, Muon, parameters(shape), **options).match(message)
    opt = Muon(parameters((4, 4)))
    set_gradients(opt.param_groups[0]["params"], 0)
    opt.add_param_group(dict(params=parameters(shape), **options))
    pytest.raises(ValueError, opt.step).match(message)
    assert not opt.state

# ---- Ranks ----
def on_groups(function, *args):
    """function(rank, world, *args) in process groups of 4, 3 and 2 ranks, one after the other."""
    mp.start_processes(_on_groups, (function, *args), nprocs=4, start_method="forkserver")

def _on_groups(rank, function, folder, *args):
    torch.set_num_threads(1)
    for world in 4, 3, 2:
        if rank < world:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
            function(rank, world, folder, *args)
            dist.barrier()
            dist.destroy_process_group()
    Path(folder, f"done-{rank}").touch()
    while not all(Path(folder, f"done-{r}").exists() for r in range(4)):
        time.sleep(0.05)

def build(variant, half=None):
    """half: weights and state to go on from."""
    params = parameters(*[(24, 16)] * 3 + [(16, 16)] * 4 + [(5, 16, 24), (16, 40)])
    params[0].data = torch.zeros(24, 20)[:, :16].copy_(params[0].data)  # memory with gaps
    opt = Muon(params, lr=0.02, variant=variant, power=0.5, compile=False, ns_dtype=torch.float32,
               adjust_lr_fn="frobenius" if variant == "adamuon" else "match_rms_adamw")
    if half:
        torch._foreach_copy_([p.detach() for p in params], half[0])
        opt.load_state_dict(half[1])
    return params, opt

def runs_like(alone, params, opt, start):
    """To step 16: fp32 sums in another order, through 16 steps of fp32 Newton-Schulz."""
    torch.testing.assert_close(run(opt, params, 16 - start, start), alone, rtol=1e-4, atol=1e-5)

def ranks_worker(rank, world, folder):
    """All ranks end with the same bits, near those of one process; what one, and what four ranks saved, goes on."""
    for variant in "muon-vs", "normuon", "adamuon":
        half, alone = torch.load(f"{folder}/{variant}.pt", weights_only=True)
        runs_like(alone, *copy.deepcopy(build(variant, half)), start=8)  # a copy knows its rank and share
        params, opt = build(variant)
        assert not opt.state_dict()["state"]  # as wrappers ask before the first step
        opt.step()  # from now on, though all are frozen
        pytest.raises(RuntimeError, opt.state_dict).match("full_state_dict")
        half, saved = run(opt, params, 8), opt.full_state_dict()
        runs_like(alone, params, opt, start=8)
        everyone = [None] * world
        dist.all_gather_object(everyone, [p.tolist() for p in params])
        assert all(each == everyone[0] for each in everyone)  # bit for bit
        if world == 4 and rank == 0:
            torch.save((half, saved), f"{folder}/{variant}-4.pt")
        dist.barrier()
        params, opt = build(variant, torch.load(f"{folder}/{variant}-4.pt", weights_only=True))
        opt.add_param_group(dict(params=[opt.param_groups[0]["params"].pop()]))  # it keeps its state
        runs_like(alone, params, opt, start=8)
        kept, whole = sum(p.numel() for p in opt.state), sum(p.numel() for p in params)
        assert kept <= whole / world + 5 * 16 * 24  # the largest: matrices are not divided
        params[0].grad = None if rank else params[0].grad  # a gradient that a rank lacks hangs nobody
        left = opt.param_groups[0]["params"].pop()  # what is in no group stays as it is
        left.data.fill_(rank)
        opt.step()
        assert (left == rank).all()

def test_ranks(tmp_path):
    for variant in "muon-vs", "normuon", "adamuon":
        params, opt = build(variant)
        half = run(opt, params, 8), copy.deepcopy(opt.state_dict())
        torch.save((half, run(opt, params, 8, start=8)), tmp_path / f"{variant}.pt")
    on_groups(ranks_worker, str(tmp_path))
    for variant in "muon-vs", "normuon", "adamuon":
        (_, alone), saved = (torch.load(tmp_path / f"{variant}{ranks}.pt") for ranks in ("", "-4"))
        runs_like(alone, *build(variant, saved), start=8)

# ---- Compilation ----
@pytest.mark.parametrize("variant, scale, ns_dtype", [
    ("muon-vs", "original", None), ("normuon", "original", torch.float32), ("adamuon", "frobenius", torch.float32)])
@pytest.mark.filterwarnings("error::UserWarning", "ignore:.*Online softmax|.*deprecated:UserWarning")
@torch._dynamo.config.patch(recompile_limit=1)  # a thread has torch's own limit, not what another has set
def test_compiled_is_eager_and_nothing_that_changes_recompiles(variant, scale, ns_dtype):
    """New lr, weight decay, momentum, γ, power, β₂, steps: no new graph. The same numbers to rounding (None: bf16)."""
    results, graphs = [], lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for compile in (False, True, None):
        params = parameters((24, 16), (24, 16), (4, 64, 128))
        opt = Muon(params, 0.02, variant, power=0.9, compile=bool(compile), ns_dtype=ns_dtype, adjust_lr_fn=scale)
        if compile is None:  # within a compiled training step it is as it is
            opt.step = torch.compile(opt.step, backend="aot_eager")
        opt.state[params[0]]["age"] = 0  # of a wrapper
        counts = [graphs()]
        for step in range(8):
            run(opt, params, 1, start=step)
            opt.state[params[0]]["age"] += 1
            counts.append(graphs())
            opt.param_groups[0].update(lr=np.float64(0.02 - 0.001 * step), weight_decay=step, gamma=10 + step,
                                       power=0.9 - 0.1 * step, momentum=0.9 + 0.005 * step, beta2=0.9 + 0.005 * step,
                                       weights=f"of a wrapper, {step}", split=np.int64(1))
        assert counts[1:] == [counts[0] + 2 * bool(compile)] * 8, "a graph for each shape"
        results.append(params)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5 if ns_dtype else 2e-3)
    assert all(map(torch.equal, results[0], results[2]))

def test_coefficients_of_numpy_are_not_those_of_before():
    for factor in 1, 0.5:
        a, b = parameters((4, 4)), parameters((4, 4))
        for params, compile in (a, True), (b, False):
            run(Muon(params, ns_coefficients=factor * np.array(JORDAN), compile=compile), params, 1)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # of 1e-3, with bf16 Newton-Schulz
