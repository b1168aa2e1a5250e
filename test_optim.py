"""
Tests of optim.py on a CPU: the update rules against a float64 reference and the paper's identities, Newton-Schulz's precision,
what torch optimizers are expected to do, one rank against several, and compilation.

    python -m pytest -q test_optim.py        # about a minute on 2 cores
"""
import copy
import hashlib
import inspect
import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.flop_counter import FlopCounterMode

import optim
from optim import NS_COEFFICIENTS, VARIANTS, AdamW, Muon, newton_schulz

SHAPES = {"wide": (24, 64), "tall": (64, 24), "square": (32, 32)}

# the matrices inside the blocks of every preset: layers, {(rows, columns): how many a layer}
PRESETS = {
    "demo": (4, {(768, 256): 1, (256, 256): 1, (1024, 256): 1, (256, 1024): 1}),
    "gpt2-small": (12, {(2304, 768): 1, (768, 768): 1, (3072, 768): 1, (768, 3072): 1}),
    "gpt2-medium": (24, {(3072, 1024): 1, (1024, 1024): 1, (4096, 1024): 1, (1024, 4096): 1}),
    "suite-a-130m": (32, {(512, 512): 4, (2048, 512): 2, (512, 2048): 1}),
    "suite-a-300m": (32, {(768, 768): 4, (3072, 768): 2, (768, 3072): 1}),
    "suite-a-1.2b": (32, {(1536, 1536): 4, (6144, 1536): 2, (1536, 6144): 1}),
    "suite-b-210m": (24, {(2304, 768): 1, (768, 768): 1, (2048, 768): 2, (768, 2048): 1}),
    "suite-b-720m": (12, {(6144, 2048): 1, (2048, 2048): 1, (5632, 2048): 2, (2048, 5632): 1}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices wait longer for a second thread than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(*shapes, dtype=torch.float32, seed=0, scale=0.1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter((scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)) for shape in shapes]


def set_gradients(params, step, seed=0):
    """Gradients with a mean, a noise and a few rare large entries, a pure function of (seed, step)."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for i, p in enumerate(params):
        mean = torch.randn(p.shape, generator=torch.Generator().manual_seed(77 + i), dtype=torch.float64)
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        rare = (torch.rand(p.shape, generator=generator, dtype=torch.float64) < 0.01) * 20 * noise
        p.grad = (0.01 * (0.3 * mean + noise + rare)).to(p.dtype)


def run(opt, params, steps, start=0, seed=0):
    for step in range(start, start + steps):
        set_gradients(params, step, seed)
        opt.step()
    return [p.detach().clone() for p in params]


# ----------------------------------------------------------------------------------------------------------------------
# The update rules


class Reference:
    """The update rules in numpy float64, one matrix, written for clarity and apart from optim.py."""

    def __init__(self, W, variant, lr, momentum=0.95, weight_decay=0.1, gamma=10.0, beta2=0.95, eps=1e-8, adjust_lr_fn="original",
                 nesterov=True, polar=None):
        self.W, self.variant, self.lr, self.b, self.wd, self.gamma, self.b2, self.eps = (
            W.copy(), variant, lr, momentum, weight_decay, gamma, beta2, eps)
        self.adjust, self.nesterov, self.t = adjust_lr_fn, nesterov, 0
        self.M, self.V, self.row = np.zeros_like(W), np.zeros_like(W), np.zeros((len(W), 1))
        self.polar = polar or self.newton_schulz

    @staticmethod
    def newton_schulz(X):
        a, b, c = 3.4445, -4.7750, 2.0315
        X = X / (np.sqrt((X**2).sum()) + 1e-3)  # so large that it shows
        flip = X.shape[0] > X.shape[1]
        X = X.T if flip else X
        for _ in range(5):
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        return X.T if flip else X

    def step(self, G):
        b, self.t = self.b, self.t + 1
        if self.variant in ("muon-nsr", "muon-vs", "muon-nsr-post"):
            self.V = b * self.V + b * (1 - b) * (self.M - G) ** 2
            self.M = b * self.M + (1 - b) * G
            correction = 1 - b**self.t
            tilde, var = self.M / correction, self.V / correction
            tilde = G + b / (1 - b) * tilde if self.nesterov else tilde
            if self.variant == "muon-nsr":
                O = self.polar(tilde / (np.sqrt(tilde**2 + self.gamma * var) + self.eps))
            elif self.variant == "muon-vs":
                O = self.polar(tilde / (np.sqrt(var) + self.eps))
            else:
                O = self.polar(tilde) / np.sqrt(1 + self.gamma * var / (tilde**2 + self.eps))
        else:
            self.M = b * self.M + G
            tilde = G + b * self.M if self.nesterov else self.M
            if self.variant == "muon":
                O = self.polar(tilde)
            elif self.variant == "adamuon":
                O = self.polar(np.sign(tilde))
                self.V = b * self.V + (1 - b) * O**2
                O = O / (np.sqrt(self.V) + self.eps)
            elif self.variant == "normuon":
                O = self.polar(tilde)
                norm = np.linalg.norm(O)
                self.row = self.b2 * self.row + (1 - self.b2) * (O**2).mean(1, keepdims=True)
                O = O / (np.sqrt(self.row) + self.eps)
                O = O * norm / np.linalg.norm(O)
            elif self.variant == "muon2":
                self.V = self.b2 * self.V + (1 - self.b2) * G**2
                O = self.polar(tilde / (np.sqrt(self.V) + self.eps))
            else:
                pytest.fail(f"{self.variant} has no float64 form here: write one")
        m, n = self.W.shape
        s = {"original": max(1, m / n) ** 0.5, "match_rms_adamw": 0.2 * max(m, n) ** 0.5,
             "frobenius": 0.2 * (m * n) ** 0.5 / np.linalg.norm(O)}[self.adjust]
        self.W = self.W * (1 - self.lr * self.wd) - self.lr * s * O


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_variant_follows_the_float64_reference(variant, shape):
    """60 steps in float64 throughout, the weights to 1e-9: what remains is the order of float64 operations. Then the defaults,
    fp32 state and bf16 Newton-Schulz: 3 % of the way travelled, a few roundings of 2^-9 that Newton-Schulz amplifies."""
    adjust = {"wide": "original", "tall": "match_rms_adamw", "square": "frobenius"}[shape]
    options = dict(lr=0.02, variant=variant, momentum=0.9, gamma=7.0, beta2=0.8, adjust_lr_fn=adjust, nesterov=shape != "tall")
    start = parameters(SHAPES[shape], dtype=torch.float64)[0].detach().numpy()
    reference = Reference(start, **options)
    for step in range(60):
        params = [torch.nn.Parameter(torch.from_numpy(start).clone())]
        set_gradients(params, step)
        reference.step(params[0].grad.numpy())
    for dtype, ns_dtype, tolerance in ((torch.float64, torch.float64, 1e-9), (torch.float32, torch.bfloat16, 0.03)):
        p = torch.nn.Parameter(torch.from_numpy(start).to(dtype, copy=True))
        run(Muon([p], ns_dtype=ns_dtype, ns_eps=1e-3, compile=False, **options), [p], 60)
        way = np.linalg.norm(reference.W - start)
        assert np.linalg.norm(p.detach().double().numpy() - reference.W) < tolerance * way


def test_interface():
    assert list(VARIANTS) == ["muon", "muon-nsr", "muon-vs", "muon-nsr-post", "adamuon", "normuon", "muon2"]
    p = parameters((8, 4))[0]
    for bad in (dict(variant="moun"), dict(adjust_lr_fn="rms"), dict(lr=-1.0), dict(momentum=1.0), dict(ns_steps=-1)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Muon([p], **bad)
    for bad in (torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)):
        with pytest.raises(ValueError, match="give vectors, embeddings and the output head to AdamW"):
            Muon([bad])
    with pytest.raises(ValueError, match="shape"):
        newton_schulz(torch.zeros(3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_buffer_that_a_variant_declares_is_written(variant):
    params = parameters((8, 4))
    opt = Muon(params, variant=variant, compile=False)
    run(opt, params, 2)
    buffers = {name: t for name, t in opt.state[params[0]].items() if name != "step"}
    assert set(buffers) == set(VARIANTS[variant].state) and all(t.all() for t in buffers.values())


def test_a_proxy_of_another_shape_is_refused(monkeypatch):
    monkeypatch.setitem(VARIANTS, "mean", optim.Variant(lambda G, S, h: (G.mean(-1, keepdim=True), S), ("momentum",)))
    params = parameters((8, 4))
    with pytest.raises(ValueError, match=r"made a proxy of shape \(1, 8, 1\), expected the gradient's \(1, 8, 4\)"):
        run(Muon(params, variant="mean", compile=False), params, 1)


def test_a_compiled_function_may_step():
    """The step itself stays outside of the graph that torch.compile makes around it."""
    results = []
    for compiled in (False, True):
        params = parameters((8, 4), (4, 8), (3,))
        opts = Muon(params[:2], compile=False), AdamW(params[2:], compile=False)
        step = lambda: [opt.step() for opt in opts]
        for i in range(3):
            set_gradients(params, i)
            (torch.compile(step, backend="eager") if compiled else step)()
        results.append(params)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_is_torch_optim_muon(adjust_lr_fn, shape):
    """The same momentum, decay and scales; both run bf16 Newton-Schulz with other roundings, hence 3 % of the way travelled."""
    ours, theirs = parameters(SHAPES[shape]) + parameters(SHAPES[shape])
    start = ours.detach().clone()
    options = dict(lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn)
    a, b = Muon([ours], variant="muon", compile=False, **options), torch.optim.Muon([theirs], **options)
    run(a, [ours], 50)
    run(b, [theirs], 50)
    assert (ours - theirs).norm() < 0.03 * (ours - start).norm()


def proxies(variant, gradients, **options):
    """What a variant hands to Newton-Schulz at each step, in float64."""
    beta = torch.tensor(options.get("momentum", 0.95), dtype=torch.float64)
    S = {name: torch.zeros_like(gradients[0]) for name in VARIANTS[variant].state}
    for t, G in enumerate(gradients, 1):
        bias = 1 - beta**t if options.get("bias_correction", True) else torch.tensor(1.0, dtype=torch.float64)
        h = optim.Hyper(lr=None, weight_decay=None, beta=beta, beta2=beta, gamma=torch.tensor(options.get("gamma", 10.0)), bias=bias,
                        scale=None, eps=options.get("eps", 1e-8), ns_eps=1e-7, nesterov=options.get("nesterov", True))
        X, S = VARIANTS[variant].proxy(G, S, h)
        yield X, S


def noise(steps, shape=(6, 9), seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def test_variance_is_adams_second_moment_less_the_squared_first():
    """Eq. reg-adam-ml: Γ_t = v_t - m_t², 400 steps in float64."""
    gradients, m, v = noise(400), 0, 0
    for G, (_, S) in zip(gradients, proxies("muon-vs", gradients)):
        m, v = 0.95 * m + 0.05 * G, 0.95 * v + 0.05 * G**2
        torch.testing.assert_close(S["variance"], v - m**2, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(S["momentum"], m, rtol=1e-12, atol=1e-14)


def test_nsr_at_gamma_1_is_adams_direction():
    gradients, m, v = noise(100), 0, 0
    for G, (X, _) in zip(gradients, proxies("muon-nsr", gradients, gamma=1.0, eps=0.0, bias_correction=False, nesterov=False)):
        m, v = 0.95 * m + 0.05 * G, 0.95 * v + 0.05 * G**2
        torch.testing.assert_close(X, m / v.sqrt(), rtol=1e-9, atol=1e-12)


def test_nsr_at_gamma_0_is_the_sign_and_at_infinity_vs():
    gradients = noise(30)
    for (X, _), (M_tilde, _) in zip(proxies("muon-nsr", gradients, gamma=0.0, eps=0.0), proxies("muon-nsr-post", gradients)):
        torch.testing.assert_close(X, M_tilde.sign())
    for (X, _), (Y, _) in zip(proxies("muon-nsr", gradients, gamma=1e16, eps=0.0), proxies("muon-vs", gradients, eps=0.0)):
        torch.testing.assert_close(X * 1e8, Y, rtol=1e-6, atol=1e-9)
        O, P = newton_schulz(X, eps=0.0, dtype=torch.float64), newton_schulz(Y, eps=0.0, dtype=torch.float64)
        torch.testing.assert_close(O, P, rtol=1e-5, atol=1e-6)


def test_constant_gradient_leaves_the_variance_of_the_warm_up():
    """Γ_1 = β(1-β)G², and M_{t-1} - G = -β^{t-1} G afterwards: Γ_t = β^t (1 - β^t) G², below any power of β^(t/2)."""
    gradients = noise(1) * 300
    for t, (X, S) in enumerate(proxies("muon-vs", gradients), 1):
        torch.testing.assert_close(S["variance"], 0.95**t * (1 - 0.95**t) * gradients[0]**2, rtol=1e-6, atol=1e-15)
        assert X.isfinite().all()


def test_zero_gradient_gives_a_zero_update():
    for variant in VARIANTS:
        for adjust in ("original", "frobenius"):
            p = parameters((16, 8))[0]
            before = p.detach().clone()
            opt = Muon([p], lr=0.1, variant=variant, weight_decay=0.0, adjust_lr_fn=adjust, compile=False)
            for _ in range(5):
                p.grad = torch.zeros_like(p)
                opt.step()
            assert torch.equal(p, before), variant


def svd_polar(X):
    U, S, Vh = np.linalg.svd(X, full_matrices=False)
    keep = S > 1e-12 * S[0]
    return U[:, keep] @ Vh[keep]


@pytest.mark.parametrize("variant", ["muon", "muon-nsr", "muon-vs", "muon2"])
def test_with_the_exact_polar_factor_all_singular_values_are_s(variant, monkeypatch):
    """Appendix, "Modulation before the polar map": the gate in front leaves an update whose nonzero singular values are all s."""
    monkeypatch.setattr(optim, "_iterate", lambda X, steps: torch.from_numpy(np.stack([svd_polar(x) for x in X.numpy()])))
    for shape in SHAPES.values():
        p = parameters(shape, dtype=torch.float64)[0]
        opt = Muon([p], lr=1.0, variant=variant, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float64, compile=False)
        run(opt, [p], 4)
        before = p.detach().clone()
        run(opt, [p], 1, start=4)
        values = torch.linalg.svdvals(before - p.detach())
        torch.testing.assert_close(values, torch.full_like(values, 0.2 * max(shape) ** 0.5), rtol=1e-8, atol=0)


def test_the_gate_behind_does_not_keep_the_singular_values():
    """The paper's counterexample: O = I and a diagonal gate D leave the singular values of D."""
    G = torch.eye(4, dtype=torch.float64)
    gamma, scalar = torch.tensor(10.0), torch.tensor(0.9, dtype=torch.float64)
    S = {"momentum": G * 0.1, "variance": torch.diag(torch.tensor([0.0, 1.0, 10.0, 100.0], dtype=torch.float64))}
    h = optim.Hyper(lr=None, weight_decay=None, beta=scalar, beta2=scalar, gamma=gamma, bias=1 - scalar, scale=None, eps=1e-8, ns_eps=1e-7,
                    nesterov=True)
    O, _ = VARIANTS["muon-nsr-post"].after(torch.eye(4, dtype=torch.float64), G, S, h)
    values = torch.linalg.svdvals(O)
    assert values.max() > 9 * values.min()


# ----------------------------------------------------------------------------------------------------------------------
# Newton-Schulz


def standard(X, steps=5):
    """The iteration as published, with one rounding a line: in bf16 that is torch.optim.Muon's, the most exact of the usual ones."""
    a, b, c = NS_COEFFICIENTS
    flip = X.size(0) > X.size(1)
    X = X.T if flip else X
    for _ in range(steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if flip else X


def error(O, exact):
    return ((O.double() - exact).norm() / exact.norm()).item()


def spectrum(kind, m, n):
    """A float64 matrix of shape (m, n) with the singular values of `kind`."""
    generator = torch.Generator().manual_seed(m + n)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    if kind == "gaussian":
        return randn(m, n)
    if kind == "low rank and noise":
        return randn(m, 8) @ randn(8, n) + 0.1 * randn(m, n)
    r = min(m, n)
    values = torch.arange(1, r + 1, dtype=torch.float64) ** {"1/i": -1.0, "1/sqrt(i)": -0.5}[kind]
    return torch.linalg.qr(randn(m, r))[0] * values @ torch.linalg.qr(randn(n, r))[0].T


# every preset's shapes; the large ones at a half, third or quarter, so with their aspect ratio, and one in full
PRECISION = {tuple(d // max(1, min(shape) // 256) for d in shape) for _, shapes in PRESETS.values() for shape in shapes}
PRECISION = sorted(PRECISION | {(768, 768), (512, 2048), (768, 3072)})


@pytest.mark.parametrize("shape", PRECISION, ids=str)
def test_precision_of_newton_schulz(shape):
    """|O - O_float64| at most 1.25 times the standard bf16 form's, as the fewer operations may not cost exactness."""
    for kind in ("gaussian", "1/i", "1/sqrt(i)", "low rank and noise") if max(shape) < 3000 else ("1/i",):
        G = spectrum(kind, *shape)
        exact, usual = standard(G / G.norm()), standard((G / G.norm()).bfloat16())
        assert error(newton_schulz(G), exact) <= 1.25 * error(usual, exact), kind


def real_gradients():
    """Gradients of a small transformer block after a few updates on the text of this file."""
    torch.manual_seed(0)
    d, text = 256, torch.tensor(list(Path(__file__).read_bytes()))
    embed = torch.nn.Embedding(256, d)
    block = torch.nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True, bias=False)
    head = torch.nn.Linear(d, 256, bias=False)
    params = [*embed.parameters(), *block.parameters(), *head.parameters()]
    opt = torch.optim.AdamW(params, lr=1e-3)
    for step in range(6):
        x = torch.stack([text[(step * 8 + i) * 100:][:65] for i in range(8)])
        hidden = block(embed(x[:, :-1]), src_mask=torch.nn.Transformer.generate_square_subsequent_mask(64))
        opt.zero_grad()
        torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), x[:, 1:].flatten()).backward()
        opt.step()
    return {name: p.grad for name, p in block.named_parameters() if p.ndim == 2}


def test_precision_on_real_gradients():
    for name, G in real_gradients().items():
        X = G.double() / G.double().norm()
        exact = standard(X)
        assert error(newton_schulz(G), exact) <= 1.25 * error(standard(X.bfloat16()), exact), (name, G.shape)


@pytest.mark.parametrize("steps", range(8))
def test_any_number_of_steps_in_float64(steps):
    """Both forms, all orientations, to float64 rounding as the polynomial amplifies it."""
    for shape in ((10, 40), (40, 10), (16, 16), (16, 24), (1, 7)):
        G = spectrum("gaussian", *shape)
        expected = standard(G / G.norm(), steps)
        torch.testing.assert_close(newton_schulz(G, steps, eps=0.0, dtype=torch.float64), expected, rtol=1e-9, atol=1e-9)


def test_weyl():
    """|σ_i(NS(Y)) - 1| <= |NS(Y) - polar(Y)|₂ for each i."""
    for shape in SHAPES.values():
        Y = spectrum("gaussian", *shape)
        O = newton_schulz(Y).double()
        U, S, Vh = torch.linalg.svd(Y, full_matrices=False)
        assert ((torch.linalg.svdvals(O) - 1).abs() <= torch.linalg.matrix_norm(O - U @ Vh, 2) + 1e-12).all()


def test_newton_schulz_takes_batches_and_leaves_its_input():
    G = torch.randn(2, 3, 24, 64, requires_grad=True)
    before = G.detach().clone()
    O = newton_schulz(G)
    assert O.shape == G.shape and O.dtype == torch.bfloat16 and not O.requires_grad and torch.equal(G, before)
    for i in range(2):
        for j in range(3):
            assert torch.equal(O[i, j], newton_schulz(G[i, j]))


@pytest.mark.parametrize("variant, buffer", [(name, rule.state[-1]) for name, rule in VARIANTS.items()])
def test_batches_as_on_a_gpu(variant, buffer, monkeypatch):
    """One batch of all matrices of a shape, as on a GPU, gives the steps that one at a time give on a CPU, also where a matrix comes
    later, is missing for a step, and the state is loaded in between; Newton-Schulz in fp64 hides the order of bmm's sums, so fp32
    rounding of the passes is left."""
    missing = {0: 1, 1: 2, 3: 1}  # step: parameter

    def steps():
        params = parameters(*[(24, 64)] * 3, (2, 24, 64), (64, 24), (64, 24))
        opt = Muon(params, lr=0.1, variant=variant, compile=False, ns_dtype=torch.float64)
        for step in range(6):
            set_gradients(params, step)
            if step in missing:
                params[missing[step]].grad = None
            if step == 2:
                opt.load_state_dict(opt.state_dict())
            opt.step()
        return params, opt

    (alone, one), _ = steps(), monkeypatch.setattr(Muon, "_portions", staticmethod(lambda params: [[params]]))
    joined, other = steps()
    for a, b in zip(alone, joined):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.state[a][buffer], other.state[b][buffer], rtol=1e-5, atol=1e-8)
    assert [other.state[p]["step"] for p in joined] == [6, 4, 5, 6, 6, 6]
    assert other.state[joined[0]]["momentum"]._base is other.state[joined[1]]["momentum"]._base


def test_a_large_batch_on_a_gpu_goes_in_portions():
    params = [torch.empty(2**13, 2**13, device="meta") for _ in range(5)]
    assert [[len(batch) for batch in portion] for portion in Muon._portions(params)] == [[2], [2], [1]]


def test_stochastic_rounding_with_fp64_state():
    for opt in (lambda p: Muon([p], compile=False, state_dtype=torch.float64, stochastic_rounding=True),
                lambda p: AdamW([p], compile=False, state_dtype=torch.float64, stochastic_rounding=True)):
        p = torch.nn.Parameter(torch.randn(8, 4).bfloat16())
        p.grad, before = torch.randn(8, 4).bfloat16(), p.detach().clone()
        opt(p).step()
        assert p.isfinite().all() and (p != before).any()


def test_a_group_that_was_refused_leaves_nothing():
    opt = Muon([torch.nn.Parameter(torch.zeros(4, 4))])
    for bad in (dict(params=[torch.nn.Parameter(torch.zeros(4))]), dict(params=[torch.nn.Parameter(torch.zeros(0, 4))]),
                dict(params=[torch.nn.Parameter(torch.zeros(3, 4))], ns_steps=2.5)):
        with pytest.raises(ValueError, match="AdamW|whole number"):
            opt.add_param_group(bad)
        assert len(opt.param_groups) == 1
    assert newton_schulz(torch.zeros(4, 6, device="meta")).shape == (4, 6)  # a device that autocast does not know
    with pytest.raises(ValueError, match="not empty"):
        newton_schulz(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="floating-point"):
        newton_schulz(torch.zeros(4, 4, dtype=torch.int32))


def test_hyperparameters_that_make_no_optimizer_are_refused():
    p = torch.nn.Parameter(torch.zeros(4, 3))
    for options, found in ((dict(betas=(0.9, 1.0)), "beta2 is 1.0"), (dict(betas=(95.0, 0.9)), "beta1 is 95.0"),
                           (dict(lr=-0.1), "lr is -0.1"), (dict(eps=-1e-8), "eps is -1e-08"), (dict(eps=0), "eps is 0"),
                           (dict(weight_decay=math.nan), "weight_decay is nan")):
        with pytest.raises(ValueError, match=re.escape(found) + ", expected a number in"):
            AdamW([p], **options)
    for name, value in (("momentum", 1), ("weight_decay", -0.1), ("gamma", -1.0), ("eps", -1e-8), ("beta2", 1.0), ("beta2", -0.1),
                        ("ns_eps", -1e-7), ("ns_eps", math.nan), ("eps", 0.0), ("ns_eps", 0)):
        with pytest.raises(ValueError, match=re.escape(f"{name} is {value}, expected a number in")):
            Muon([p], **{name: value})
    p.placements = ()  # what a DTensor has
    for optimizer in (Muon, AdamW):
        with pytest.raises(ValueError, match="is a DTensor, of FSDP or tensor parallelism"):
            optimizer([p])


def test_a_state_may_name_its_parameters():
    """As torch.distributed.checkpoint does, in place of numbering them; the order of the state's entries says nothing."""
    params = parameters((8, 4), (8, 4), (4, 6))
    opt, other = Muon(params, compile=False), Muon(params, compile=False)
    run(opt, params, 2)
    saved, names = opt.state_dict(), {0: "b", 1: "a", 2: "c"}
    saved["state"] = {names[i]: saved["state"][i] for i in (2, 0, 1)}
    saved["param_groups"] = [{**group, "params": [names[i] for i in group["params"]]} for group in saved["param_groups"]]
    other.load_state_dict(saved)
    for p in params:
        assert all(torch.equal(opt.state[p][name], other.state[p][name]) for name in ("momentum", "variance"))


def test_a_state_through_json_is_read_and_an_unknown_parameter_is_named():
    params = parameters((8, 4))
    opt, other = Muon(params, compile=False), Muon(params, compile=False)
    run(opt, params, 1)
    saved = opt.state_dict()
    other.load_state_dict({**saved, "state": {"0": saved["state"][0]}})
    assert torch.equal(other.state[params[0]]["momentum"], opt.state[params[0]]["momentum"])
    with pytest.raises(ValueError, match="the state has a parameter 9, which none of its groups names"):
        other.load_state_dict({**saved, "state": {9: saved["state"][0]}})


def test_another_number_of_ranks_after_the_first_step_is_refused(monkeypatch):
    """Or a state_dict() behind destroy_process_group would hold this rank's share as if it were all."""
    params = parameters((8, 4), (8, 4))
    opt = Muon(params, compile=False)
    run(opt, params, 1)
    monkeypatch.setattr(optim, "_world", lambda: 2)
    for call in (opt.step, opt.state_dict):
        with pytest.raises(RuntimeError, match="split its state over 1 ranks, now there are 2: call init_process_group before"):
            call()


def test_loaded_buffers_have_the_groups_dtype():
    """It comes with the state as every option does, unless the caller keeps his own groups, as the train scripts do when they resume."""
    first, second = ([torch.nn.Parameter(torch.zeros(6, 4))] for _ in range(2))
    saved = Muon(first, compile=False)
    run(saved, first, 1)
    other = Muon(second, compile=False, state_dtype=torch.bfloat16)
    own = [{**group, "params": [0]} for group in other.param_groups]
    other.load_state_dict({**saved.state_dict(), "param_groups": own})
    assert {b.dtype for name, b in other.state[second[0]].items() if name != "step"} == {torch.bfloat16}
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other.state[second[0]]["variance"], saved.state[first[0]]["variance"])
    assert other.state[second[0]]["variance"].dtype == torch.float32


def test_extreme_gradients():
    """Zero, tiny, huge and rank-1 gradients give finite updates of the usual size or less, with any variant."""
    u, v = torch.randn(32, 1), torch.randn(1, 16)
    cases = {"tiny": torch.randn(32, 16) * 1e-30, "huge": torch.randn(32, 16) * 1e30, "rank 1": u @ v, "zero": torch.zeros(32, 16),
             "one entry": torch.zeros(32, 16).index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(1e20))}
    for name, G in cases.items():
        O = newton_schulz(G).float()
        assert O.isfinite().all() and torch.linalg.matrix_norm(O, 2) < 1.3, name
        if name in ("tiny", "huge"):
            assert torch.equal(O, newton_schulz(G.double()).float()) or error(O, newton_schulz(G.double()).double()) < 0.03
        for variant in VARIANTS:
            p = torch.nn.Parameter(torch.zeros(32, 16))
            opt = Muon([p], lr=1.0, variant=variant, adjust_lr_fn="match_rms_adamw", compile=False)
            for _ in range(3):
                p.grad = G.clone()
                opt.step()
            most = 3 * 1.3 * 16**0.5  # three steps of 16 singular values below 1.3
            if variant == "adamuon":  # V_t is (1 - 0.95^t) O² while O stays the same, so all 512 entries are 0 or ±1/√(1 - 0.95^t)
                most = sum(512**0.5 / (1 - 0.95**t) ** 0.5 for t in (1, 2, 3))
            assert p.isfinite().all() and p.norm() < 0.2 * 32**0.5 * most, (name, variant)
            assert all(s.isfinite().all() for s in opt.state[p].values() if isinstance(s, torch.Tensor)), (name, variant)


@pytest.mark.parametrize("make", [lambda p: Muon(p, lr=0.1, compile=False), lambda p: AdamW(p, lr=0.1, compile=False)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(make, value):
    bad, good = parameters((16, 8), (16, 8))
    opt = make([bad, good])
    run(opt, [bad, good], 3)
    before = bad.detach().clone(), {k: copy.deepcopy(v) for k, v in opt.state[bad].items() if k != "step"}, good.detach().clone()
    set_gradients([bad, good], 3)
    bad.grad[2, 3] = value
    with pytest.warns(UserWarning, match="1 of the updates"):
        opt.step()
    assert int(opt.skipped) == 1 and torch.equal(bad, before[0]) and not torch.equal(good, before[2])
    assert all(torch.equal(opt.state[bad][k], v) for k, v in before[1].items()) and opt.state[bad]["step"] == 4
    run(opt, [bad, good], 1, start=4)
    assert int(opt.skipped) == 1 and not torch.equal(bad, before[0])


@pytest.mark.filterwarnings("ignore:AdamW")
@pytest.mark.parametrize("state_dtype", [None, torch.float64])
def test_an_update_left_out_counts_as_a_step(state_dtype):
    """Three gradients of 1, a NaN, and one more of 1: after them the moments are 1 - 0.9^4 and 1 - 0.99^4, corrected as of step 5."""
    (p,) = parameters((3, 4))
    opt = AdamW([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, state_dtype=state_dtype, compile=False)
    for value in (1.0, 1.0, 1.0, math.nan, 1.0):
        p.grad, before = torch.full((3, 4), value), p.detach().clone()
        opt.step()
    by_hand = 0.1 * (1 - 0.9**4) / (1 - 0.9**5) / math.sqrt((1 - 0.99**4) / (1 - 0.99**5))
    torch.testing.assert_close(before - p.detach(), torch.full((3, 4), by_hand), rtol=1e-5, atol=0)  # fp32: of 0.09 in values of 0.3


# ----------------------------------------------------------------------------------------------------------------------
# As an optimizer of torch


MIXED = [(24, 16), (16, 24), (16, 16), (24, 16), (3, 16, 24), (2, 2, 16, 16)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_round_trip(variant):
    """Ten steps, saved as torch saves, and ten more: bit-identical to twenty."""
    options = dict(lr=0.02, variant=variant, adjust_lr_fn="frobenius", compile=False)
    straight = parameters(*MIXED)
    expected = run(Muon(straight, **options), straight, 20)
    params = parameters(*MIXED)
    first = Muon(params, **options)
    run(first, params, 10)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = Muon(params, lr=9.0, **{k: v for k, v in options.items() if k != "lr"})
    second.load_state_dict(torch.load(buffer))  # weights_only is torch's default: plain types
    first.load_state_dict({"state": {}, "param_groups": first.state_dict()["param_groups"]})  # shares nothing with `second`
    for mine, other in zip(run(second, params, 10, start=10), expected):
        assert torch.equal(mine, other)
    assert second.param_groups[0]["lr"] == 0.02


def test_state_dict_layout():
    """torch's: indices to a dict of buffers in their parameter's shape."""
    params = parameters((24, 16), (3, 16, 24))
    opt = Muon(params, variant="normuon", compile=False)
    assert opt.state_dict()["state"] == {}
    run(opt, params, 2)
    state = opt.state_dict()["state"]
    assert {i: {k: v if k == "step" else tuple(v.shape) for k, v in s.items()} for i, s in state.items()} == {
        0: {"step": 2, "momentum": (24, 16), "row_moment": (24, 1)}, 1: {"step": 2, "momentum": (3, 16, 24), "row_moment": (3, 16, 1)}}
    other = Muon(parameters((24, 16)), variant="normuon", compile=False)
    with pytest.raises(ValueError, match="same parameters in the same order"):
        other.load_state_dict(opt.state_dict())
    for params, variant, message in ((((24, 16), (3, 16, 8)), "normuon", "shape"), (((24, 16), (3, 16, 24)), "muon-vs", "another")):
        other = Muon(parameters(*params), variant=variant, compile=False)
        saved = opt.state_dict()
        saved["param_groups"][0]["variant"] = variant
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(saved)
        assert not other.state


def test_buffers_keep_their_dtype():
    params = parameters((24, 16), dtype=torch.bfloat16)
    default, half = Muon(params, compile=False), Muon(params, state_dtype=torch.bfloat16, compile=False)
    for opt, dtype in ((default, torch.float32), (half, torch.bfloat16)):
        run(opt, params, 2)
        opt.load_state_dict(opt.state_dict())
        run(opt, params, 2)
        assert {s.dtype for k, s in opt.state[params[0]].items() if k != "step"} == {dtype}


def test_fp32_buffers_are_unbiased_where_bf16_ones_are_not():
    """β = 0.999: bf16 rounds most steps of Γ away and its mean is 20 % off; the default for bf16 parameters is fp32. Noise of variance 1,
    averaged over some 1000 steps of 256 entries, is known to 0.2 %."""
    fine, coarse = parameters((16, 16), (16, 16), dtype=torch.bfloat16)
    opt = Muon([dict(params=[fine]), dict(params=[coarse], state_dtype=torch.bfloat16)], lr=0.0, momentum=0.999, ns_steps=0, compile=False)
    for G in noise(2000, (16, 16)):
        fine.grad = coarse.grad = G.bfloat16()
        opt.step()
    fine, coarse = (opt.state[p]["variance"].double().mean() / (1 - 0.999**2000) for p in (fine, coarse))
    assert abs(fine - 1) < 0.02 < 0.1 < abs(coarse - 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_alike_are_updated_as_each_alone(variant):
    """Batches of one shape, 3-D batches and single matrices give the same; gradients stay as they were."""
    together, apart = parameters(*MIXED), parameters(*MIXED)
    options = dict(lr=0.02, variant=variant, adjust_lr_fn="frobenius", compile=False)
    a, alone = Muon(together, **options), []
    for p in apart:
        units = [torch.nn.Parameter(u.clone()) for u in p.detach().reshape(-1, *p.shape[-2:])]
        alone.append((p, units, Muon(units, **options)))
    for step in range(5):
        set_gradients(together, step)
        gradients = [p.grad.clone() for p in together]
        a.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(together, gradients))
        for (p, units, opt), g in zip(alone, gradients):
            for u, part in zip(units, g.reshape(-1, *p.shape[-2:])):
                u.grad = part.clone()
            opt.step()
    for p, (_, units, _) in zip(together, alone):
        torch.testing.assert_close(p.detach().reshape(-1, *p.shape[-2:]), torch.stack([u.detach() for u in units]), rtol=1e-4, atol=1e-5)


def test_parameters_without_a_gradient_are_left_alone():
    """No decay, no state, and their own step count from the first gradient on; in a GPU's batches too (test_batches_as_on_a_gpu)."""
    params, only = parameters((24, 16), (24, 16)), parameters((24, 16), (24, 16))[1]
    opt, other = Muon(params, lr=0.02, compile=False), Muon([only], lr=0.02, compile=False)
    before = params[1].detach().clone()
    set_gradients(params, 0)
    params[1].grad = None
    opt.step()
    assert torch.equal(params[1], before) and params[1] not in opt.state
    for step in (1, 2):
        set_gradients(params, step)
        only.grad = params[1].grad.clone()
        opt.step()
        other.step()
    assert [opt.state[p]["step"] for p in params] == [3, 2]
    torch.testing.assert_close(params[1], only, rtol=1e-4, atol=1e-5)


def test_forgetting_the_state_starts_anew():
    params, fresh = parameters(*MIXED), parameters(*MIXED)
    opt = Muon(params, lr=0.02, compile=False)
    run(opt, params, 3, seed=5)
    opt.state.clear()
    with torch.no_grad():
        for p, q in zip(params, fresh):
            p.copy_(q)
    for mine, other in zip(run(opt, params, 3), run(Muon(fresh, lr=0.02, compile=False), fresh, 3)):
        assert torch.equal(mine, other)


def test_a_group_that_is_added_later_moves_nothing(monkeypatch):
    """Who owns what of three ranks stays as it was, or the state of the first group would lie on the wrong rank."""
    monkeypatch.setattr(optim, "_world", lambda: 3)
    opt = Muon(parameters((24, 16), (24, 16), (16, 8)))
    opt._layout()
    before = dict(opt._ranges)
    opt.add_param_group(dict(params=parameters((64, 64), (24, 16))))
    opt._layout()
    assert opt._ranges.items() >= before.items() and len(opt._ranges) == 5


def test_schedulers_groups_and_add_param_group():
    """LambdaLR writes the group's lr; a group added later has its own options and moves none of the old state."""
    params = parameters((24, 16), (16, 24))
    opt = Muon(params[:1], lr=0.1, weight_decay=0.0, compile=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.0 if t == 1 else 1.0)
    run(opt, params[:1], 1)
    schedule.step()
    before = params[0].detach().clone()
    run(opt, params[:1], 1, start=1)
    assert torch.equal(params[0], before)
    opt.param_groups[0]["lr"] = 0.1
    opt.add_param_group(dict(params=params[1:], lr=0.3, variant="adamuon"))
    momentum = opt.state[params[0]]["momentum"].clone()
    other = params[1].detach().clone()
    params[0].grad = None
    set_gradients(params[1:], 2)
    opt.step()
    assert torch.equal(opt.state[params[0]]["momentum"], momentum) and not torch.equal(params[1], other)
    assert set(opt.state[params[1]]) == {"step", "momentum", "second_moment"}
    torch.optim.lr_scheduler.OneCycleLR(Muon(parameters((4, 4)), compile=False), max_lr=0.1, total_steps=10, cycle_momentum=False)


def test_an_autocast_around_a_step_changes_no_bit():
    results = []
    for enabled in (False, True):
        (p,) = parameters((48, 24))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            run(Muon([p], lr=0.1, ns_dtype=torch.float32, compile=False), [p], 2)
        results.append(p.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("optimizer", [Muon, AdamW])
def test_a_sparse_gradient_is_refused_before_anything_changes(optimizer):
    (dense,), embedding = parameters((50, 50)), torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    dense.grad, before = torch.ones_like(dense), dense.detach().clone()
    opt = optimizer([dense, embedding.weight])
    with pytest.raises(RuntimeError, match="found a sparse one: build nn.Embedding with sparse=False"):
        opt.step()
    assert torch.equal(dense, before) and not opt.state


@pytest.mark.parametrize("gradient", [torch.arange(12.0).view(4, 3).t(), torch.ones(1, 1).expand(3, 4)])
@pytest.mark.parametrize("state_dtype", [None, torch.float64])
def test_adamw_takes_a_gradient_in_any_layout(gradient, state_dtype):
    results = []
    for g in (gradient, gradient.contiguous()):
        p = torch.nn.Parameter(torch.zeros(3, 4))
        p.grad = g
        AdamW([p], lr=1.0, eps=100.0, state_dtype=state_dtype, compile=False).step()  # so large that the update keeps the gradient's size
        results.append(p.detach().clone())
    assert torch.equal(*results) and results[0].abs().max() > 0.001


@pytest.mark.parametrize("state_dtype", [None, torch.float64])
def test_adamw_recovers_from_a_huge_gradient(state_dtype):
    """1e30 squared is inf in fp32, in which the second moment would stay for ever; as large as that it decays and is forgotten."""
    p, other = parameters((4,), (4,))
    opt = AdamW([p, other], lr=0.1, betas=(0.5, 0.5), weight_decay=0.0, state_dtype=state_dtype, compile=False)
    for scale in [1e30] + [1.0] * 150:
        p.grad, other.grad = torch.full((4,), scale), torch.ones(4)
        before = p.detach().clone()
        opt.step()
        assert all(s.isfinite().all() for s in opt.state[p].values() if isinstance(s, torch.Tensor))
    torch.testing.assert_close(before - p.detach(), torch.full((4,), 0.1), rtol=1e-3, atol=0)  # a step of lr, as for any constant gradient
    assert opt.skipped == 0


def test_adamw_in_batches_is_adamw_alone(monkeypatch):
    """As on a GPU: several tensors in a call, one of which has a gradient that is not finite, one none at all, so that it is a step
    behind; their state is saved and loaded between."""
    rule = optim._together
    assert [rule(*of) for of in ((False, {3}, 768), (True, {3}, 768), (True, {3, 4}, 768), (True, {3}, 2**25))] == [1, 2**24 // 768, 1, 1]

    def train(gpu):
        monkeypatch.setattr(optim, "_together", lambda _, steps, numel: rule(gpu, steps, 2**23))
        params = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters((6,), (6,), (6,), (4, 6), (4, 6))]
        opt = AdamW(params, lr=0.1, compile=False)
        for step in range(4):
            if step == 2:
                state, opt = copy.deepcopy(opt.state_dict()), AdamW(params, compile=False)
                opt.load_state_dict(state)
            set_gradients(params, step)
            if step == 1:
                params[1].grad[2] = params[4].grad[0, 0] = math.nan
            if step == 3:
                params[4].grad = None
            opt.step()
        set_gradients(params, 4)
        opt.step()
        return params, opt.state_dict()["state"]
    with pytest.warns(UserWarning, match="of the updates"):
        (alone, state), (batched, batched_state) = train(False), train(True)
    assert all(map(torch.equal, alone, batched))
    torch.testing.assert_close(batched_state, state, rtol=0, atol=0)


@pytest.mark.parametrize("state_dtype", [None, torch.float64])
def test_a_step_between_forward_and_backward_is_noticed(state_dtype):
    (p,) = parameters((3,))
    p.grad, loss = torch.ones_like(p), (p**3).sum()
    AdamW([p], state_dtype=state_dtype, compile=False).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_adamw_goes_on_whatever_the_types_of_state_and_the_default():
    """State of one type beside state of another in one step, and steps counted exactly where bf16 is the default type."""
    mixed, plain = parameters((4, 3), (4, 3)), parameters((4, 3), (4, 3))
    a, b = AdamW(mixed, lr=0.1, betas=(0.9, 0.9999), compile=False), AdamW(plain, lr=0.1, betas=(0.9, 0.9999), compile=False)
    set_gradients(mixed[:1], 0), set_gradients(plain[:1], 0)
    a.step(), b.step()
    a.param_groups[0]["state_dtype"] = torch.float64  # of the second's state, which comes now
    try:
        torch.set_default_dtype(torch.bfloat16)
        for step in range(300):
            for p, q in zip(mixed, plain):
                p.grad = q.grad = torch.full((4, 3), float(step % 3), dtype=torch.float32)
            a.step(), b.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert a.state[mixed[0]]["exp_avg"].dtype == torch.float32 and a.state[mixed[1]]["exp_avg"].dtype == torch.float64
    for p, q in zip(mixed, plain):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


def test_closure_deepcopy_pickle_and_zero_grad():
    p = parameters((24, 16))[0]
    opt = Muon([p], lr=0.02, compile=False)

    def closure():
        opt.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss
    first, second = opt.step(closure).item(), opt.step(closure).item()
    assert first == pytest.approx((parameters((24, 16))[0] ** 2).sum().item()) and second < first
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        q = other.param_groups[0]["params"][0]
        assert torch.equal(q, p) and q is not p and other.state[q]["step"] == 2
        q.grad = p.grad.clone()
        other.step()
        reference = copy.deepcopy(opt)
        reference.param_groups[0]["params"][0].grad = p.grad.clone()
        reference.step()
        assert torch.equal(q, reference.param_groups[0]["params"][0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_parameters(variant):
    """As fp32 parameters would move, to 5 % of the way: bf16 rounds start and steps by 2^-9 of the value, 2 % of a way of its fifth;
    dtype and finiteness kept."""
    coarse, fine = parameters((24, 16), (24, 16), dtype=torch.bfloat16), parameters((24, 16), (24, 16))
    start = [p.detach().clone() for p in fine]
    options = dict(lr=0.02, variant=variant, compile=False)
    run(Muon(coarse, **options), coarse, 5)
    run(Muon(fine, **options), fine, 5)
    for p, q, before in zip(coarse, fine, start):
        assert p.dtype == torch.bfloat16 and (p.float() - q).norm() < 0.05 * (q - before).norm()


def test_non_contiguous_parameters():
    whole = parameters((16, 24))[0]
    view = torch.nn.Parameter(whole.detach().clone().T.contiguous().T)
    assert not view.is_contiguous()
    for p in (whole, view):
        run(Muon([p], lr=0.02, compile=False), [p], 3)
    torch.testing.assert_close(whole, view, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="not contiguous"):
        Muon([torch.nn.Parameter(torch.zeros(4, 5, 3).transpose(1, 2))])


@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=1e-3, weight_decay=0.0, stochastic_rounding=True, compile=False),
                                  lambda p: Muon(p, lr=1e-3, weight_decay=1.0, stochastic_rounding=True, compile=False)])
def test_stochastic_rounding_is_unbiased(make):
    """One step of 1 -> 0.999 is a quarter of bf16's spacing of 2^-8: exact on average, to five standard errors, and only neighbours."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.ones(512, 512, dtype=torch.bfloat16))
    opt = make([p])
    p.grad = torch.ones_like(p) if isinstance(opt, AdamW) else torch.zeros_like(p)
    opt.step()
    assert set(p.float().unique().tolist()) == {1.0, 1 - 2**-8}
    assert abs(p.float().mean().item() - 0.999) < 5 * 2**-8 * 0.44 / 512


@pytest.mark.parametrize("dtype, state_dtype", [(torch.float32, None), (torch.float64, None), (torch.float32, torch.float64)])
def test_adamw_is_torch_optim_adamw(dtype, state_dtype):
    """50 steps to rounding, state names included; a state of another type keeps to our own formula, without torch's kernel."""
    shapes = [(7, 5), (11,), (), (3, 4, 5)]
    ours, theirs = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    options = dict(lr=0.01, betas=(0.8, 0.98), eps=1e-10, weight_decay=0.1)
    a, b = AdamW(ours, compile=False, state_dtype=state_dtype, **options), torch.optim.AdamW(theirs, **options)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-14)
    for mine, other in zip(run(a, ours, 50), run(b, theirs, 50)):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)
    mine, other = a.state_dict()["state"], b.state_dict()["state"]
    for i in mine:
        assert set(mine[i]) == set(other[i]) and all(mine[i][k].shape == other[i][k].shape for k in ("exp_avg", "exp_avg_sq"))


def test_adamw_state_dict_round_trip():
    shapes = [(7, 5), (11,), (), (3, 4, 5)]
    straight, params = parameters(*shapes), parameters(*shapes)
    expected = run(AdamW(straight, compile=False), straight, 20)
    first, second = AdamW(params, compile=False), AdamW(params, lr=9.0, compile=False)
    run(first, params, 10)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(mine, other) for mine, other in zip(run(second, params, 10, start=10), expected))


def test_defaults_are_the_documented_ones():
    defaults = lambda f: {name: parameter.default for name, parameter in inspect.signature(f).parameters.items()}
    assert defaults(Muon).items() >= dict(
        variant="muon-vs", momentum=0.95, weight_decay=0.1, gamma=10.0, beta2=0.95, eps=1e-8, nesterov=True, ns_steps=5, ns_eps=1e-7,
        ns_dtype=torch.bfloat16, adjust_lr_fn="original", state_dtype=None, stochastic_rounding=False).items()
    assert defaults(newton_schulz).items() >= dict(steps=5, eps=1e-7, dtype=torch.bfloat16).items()
    theirs = defaults(torch.optim.AdamW)
    assert all(defaults(AdamW)[name] == theirs[name] for name in ("lr", "betas", "eps", "weight_decay"))


@pytest.mark.parametrize("bad", [
    torch.zeros(0, 4), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.complex64), torch.zeros(4, 3).T])
def test_adamw_refuses_what_it_cannot_train(bad):
    with pytest.raises(ValueError, match="AdamW takes contiguous"):
        AdamW([torch.nn.Parameter(bad, requires_grad=False)])


@pytest.mark.parametrize("make", [Muon, AdamW])
def test_param_groups_may_be_changed_between_steps(make):
    """As with torch.optim.AdamW: what is removed stands still, what is put in is trained, a group's new dict holds."""
    removed, kept, new = parameters((8, 4), (8, 4), (8, 4))
    opt = make([dict(params=[kept]), dict(params=[removed])], lr=0.1, compile=False)

    def moved():
        before = [p.detach().clone() for p in (removed, kept, new)]
        run(opt, [removed, kept, new], 1)
        return [not torch.equal(p, q) for p, q in zip((removed, kept, new), before)]
    assert moved() == [True, True, False]
    del opt.param_groups[1]
    assert moved() == [False, True, False]
    opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.0}
    assert moved() == [False, False, False]
    opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.1}
    opt.param_groups[0]["params"][0] = new
    assert moved() == [False, False, True]


def test_a_rule_may_have_its_buffers_in_any_order_or_none(monkeypatch):
    """Of a state that was loaded, shapes are compared with the parameters'."""
    monkeypatch.setitem(VARIANTS, "reversed", VARIANTS["normuon"]._replace(state=("row_moment", "momentum")))
    monkeypatch.setitem(VARIANTS, "without", optim.Variant(lambda G, S, h: (G, {}), ()))
    for variant in ("reversed", "without"):
        params = parameters((8, 4))
        opt = Muon(params, variant=variant, compile=False)
        run(opt, params, 1)
        other = Muon(params, variant=variant, compile=False)
        other.load_state_dict(opt.state_dict())
        run(other, params, 1)
        assert other.state[params[0]]["step"] == 2


@pytest.mark.parametrize("make, shapes", [(Muon, ((2, 8, 4), (4, 8, 4))), (Muon, ((4, 6), (6, 4))), (AdamW, ((4, 6), (6, 6))),
                                          (AdamW, ((4, 6), (6, 4)))])
def test_a_parameter_that_has_another_shape_needs_another_state(make, shapes):
    """As where somebody grows a vocabulary by a new .data: torch's fused kernel would write beside the state."""
    p, = params = parameters(shapes[0])
    opt = make(params, lr=0.1, compile=False)
    run(opt, params, 1)
    p.grad, p.data = None, torch.ones(shapes[1])
    q, other = copy.deepcopy((p, opt))
    with pytest.raises(RuntimeError, match="its state has not"):
        run(other, [q], 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape(f"parameter 0 of {make.__name__} has become one of shape {shapes[1]}, its st")):
            run(opt, params, 1)
        assert torch.equal(p, torch.ones(shapes[1]))
    del opt.state[p]
    run(opt, params, 1)
    assert (p != 1).all() and opt.state[p]["step"] == 1


def test_one_matrix_of_a_batch_that_is_not_finite_stops_no_other():
    p, = parameters((3, 8, 4))
    opt = Muon([p], compile=False)
    set_gradients([p], 0)
    p.grad[1, 0, 0] = math.nan
    before = p.detach().clone()
    with pytest.warns(UserWarning, match="1 of the updates"):
        opt.step()
    assert [torch.equal(a, b) for a, b in zip(before, p.detach())] == [False, True, False]


def test_frobenius_makes_small_results_as_large_as_any():
    p, = parameters((24, 16))
    opt = Muon([p], lr=1.0, variant="muon-nsr-post", gamma=1e8, weight_decay=0.0, adjust_lr_fn="frobenius", compile=False)
    run(opt, [p], 3)
    before = p.detach().clone()
    run(opt, [p], 1, start=3)
    assert (p - before).norm().item() == pytest.approx(0.2 * (24 * 16) ** 0.5, rel=1e-4)


def test_a_gradient_of_1e14_is_not_clamped():
    ways = []
    for size in (1.0, 1e14):
        p, = parameters((24, 16))
        set_gradients([p], 0)
        p.grad.mul_(size / p.grad.abs().max())
        before = p.detach().clone()
        Muon([p], lr=0.1, variant="muon", weight_decay=0.0, compile=False).step()
        ways.append(before - p.detach())
    torch.testing.assert_close(*ways, rtol=0, atol=1e-3)  # bf16 rounds X of about 0.1 elsewhere


@pytest.mark.parametrize("make", [Muon, AdamW])
def test_a_schedule_of_torch_that_ends_a_rounding_below_0_goes_on(make):
    params = parameters((8, 4))
    opt = make(params, lr=0.1, compile=False)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, end_factor=0.0, total_iters=10)
    for step in range(12):
        run(opt, params, 1, start=step)
        schedule.step()
    assert -1e-9 < opt.param_groups[0]["lr"] < 0


def test_what_a_schedule_writes_into_a_group_is_checked():
    params = parameters((8, 4))
    opt = Muon(params, lr=0.1, compile=False)
    run(opt, params, 1)
    before = params[0].detach().clone()
    for changed, found in ((dict(momentum=1.0), "momentum is 1.0"), (dict(lr="6e-4"), "lr is '6e-4'"), (dict(lr=None), "lr is None"),
                           (dict(adjust_lr_fn="rms"), "adjust_lr_fn is 'rms'"), (dict(ns_dtype="bf16"), "ns_dtype is 'bf16', expected"),
                           (dict(state_dtype=torch.int8), "state_dtype is torch.int8, expected a floating-point dtype")):
        group = dict(opt.param_groups[0])
        opt.param_groups[0].update(changed)
        with pytest.raises(ValueError, match=re.escape(found)):
            run(opt, params, 1)
        opt.param_groups[0].update(group)
    opt.param_groups[0]["variant"] = "muon"
    with pytest.raises(RuntimeError, match="the state is of another variant than muon: build a new optimizer"):
        run(opt, params, 1)
    assert torch.equal(params[0], before)
    with pytest.raises(ValueError, match="a group has use_muon=False, which Muon does not read: give its parameters to AdamW"):
        Muon([dict(params=params, use_muon=False)])


def test_groups_of_a_state_go_through_json():
    """And so through torch.distributed.checkpoint with full_state_dict. What is not Muon's own comes back as it was."""
    params = parameters((8, 4))
    opt = Muon([dict(params=params, name="torch.", amp_dtype="bf16")], ns_dtype=torch.float64, state_dtype=torch.bfloat16)
    groups = json.loads(json.dumps(opt.state_dict()["param_groups"]))
    opt = Muon(params)
    opt.load_state_dict(dict(state={}, param_groups=groups))
    assert (opt.param_groups[0]["name"], opt.param_groups[0]["amp_dtype"]) == ("torch.", "bf16")
    assert opt.param_groups[0]["ns_dtype"] is torch.float64 and opt.param_groups[0]["state_dtype"] is torch.bfloat16


def test_parameters_that_change_places_keep_their_state(monkeypatch):
    """In portions as on a GPU, where several parameters share a buffer: the same as one by one."""
    def train():
        params = parameters((24, 64), (24, 64))
        opt = Muon(params, lr=0.1, ns_dtype=torch.float64, compile=False)
        for step in range(3):
            if step == 1:
                opt.param_groups[0]["params"].reverse()
            run(opt, params, 1, start=step)
        return params
    alone = train()
    monkeypatch.setattr(Muon, "_portions", staticmethod(lambda params: [[params]]))
    torch.testing.assert_close(alone, train(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [Muon, AdamW])
def test_a_memory_format_that_changes_after_construction_is_refused(make):
    conv = torch.nn.Conv2d(3, 4, 3, bias=False)
    opt = make(conv.parameters(), lr=0.1, compile=False)
    conv.to(memory_format=torch.channels_last)
    set_gradients([conv.weight], 0)
    with pytest.raises(ValueError, match="contiguous"):
        opt.step()


def test_state_may_be_read_before_the_first_step():
    params = parameters((8, 4))
    for opt in (Muon(params, compile=False), AdamW(params, compile=False)):
        assert opt.state[params[0]] == {} and opt.state_dict()["state"] == {}
        run(opt, params, 1)
        assert opt.state_dict()["state"][0]["step"] == 1


def test_hooks_of_state_dict_and_load_state_dict():
    params, seen = parameters((8, 4)), []
    opt = Muon(params, compile=False)
    run(opt, params, 1)
    opt.register_state_dict_post_hook(lambda _, packed: seen.append(packed["state"][0]["momentum"].shape) or {**packed, "mine": 1})
    opt.register_load_state_dict_pre_hook(lambda _, packed: seen.append(packed["mine"]))
    opt.register_load_state_dict_post_hook(lambda mine: seen.append(mine is opt))
    opt.load_state_dict(opt.state_dict())
    assert seen == [(8, 4), 1, True]


def test_a_loaded_learning_rate_that_is_a_tensor_is_a_copy():
    a, b = (AdamW(parameters((8, 4)), lr=torch.tensor(0.1), compile=False) for _ in range(2))
    b.load_state_dict(a.state_dict())
    a.param_groups[0]["lr"].fill_(9.0)
    assert b.param_groups[0]["lr"] == torch.tensor(0.1)


@pytest.mark.parametrize("options, message", [(dict(variant="mine"), "variant is 'mine'"), (dict(momentum=5.0), "momentum is 5")])
def test_options_are_checked_where_a_state_is_loaded(options, message):
    saved, opt = Muon(parameters((8, 4))).state_dict(), Muon(parameters((8, 4)))
    saved["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)


def test_a_loaded_state_is_a_copy_and_the_whole_of_it():
    a, b = parameters((24, 16)), parameters((24, 16))
    one, two = Muon(a, compile=False), Muon(b, compile=False)
    nothing = copy.deepcopy(two.state_dict())
    run(one, a, 1)
    two.load_state_dict(one.state_dict())
    before = one.state[a[0]]["momentum"].clone()
    run(two, b, 1, start=1)
    assert torch.equal(one.state[a[0]]["momentum"], before)
    two.load_state_dict(nothing)
    assert not two.state


def test_a_state_of_other_shapes_or_of_another_variant_is_refused():
    params = parameters((24, 16))
    opt = Muon(params, variant="muon", compile=False)
    run(opt, params, 1)
    with pytest.raises(ValueError, match="shape"):
        Muon(parameters((16, 24)), variant="muon").load_state_dict(opt.state_dict())
    for one, other in (("muon", "muon-nsr"), ("muon-nsr", "muon")):
        opt = Muon(params, variant=one, compile=False)
        run(opt, params, 1)
        saved = opt.state_dict()
        saved["param_groups"][0]["variant"] = other
        with pytest.raises(ValueError, match="another optimizer or variant"):
            Muon(parameters((24, 16)), variant=other).load_state_dict(saved)


def test_a_state_in_another_memory_order_is_loaded():
    a, b = parameters((24, 16)), parameters((24, 16))
    one, two = AdamW(a, compile=False), AdamW(b, compile=False)
    run(one, a, 2)
    saved = copy.deepcopy(one.state_dict())
    saved["state"][0] = {name: value if name == "step" else value.T.contiguous().T for name, value in saved["state"][0].items()}
    two.load_state_dict(saved)
    with torch.no_grad():
        b[0].copy_(a[0])
    assert torch.equal(*run(one, a, 1, start=2), *run(two, b, 1, start=2))


def test_a_state_of_torchs_adamw_is_continued():
    theirs, ours = parameters((8, 4)), parameters((8, 4))
    a, b = torch.optim.AdamW(theirs), AdamW(ours, compile=False)
    run(a, theirs, 3)
    b.load_state_dict(a.state_dict())
    assert type(b.state[ours[0]]["step"]) is int  # theirs is a tensor that counts in place
    with torch.no_grad():
        ours[0].copy_(theirs[0])
    torch.testing.assert_close(run(a, theirs, 3, start=3), run(b, ours, 3, start=3), rtol=1e-5, atol=1e-7)  # sums in another order


def test_compile_does_not_come_with_a_state():
    opt = Muon(parameters((8, 4)), compile=False)
    opt.load_state_dict(Muon(parameters((8, 4))).state_dict())
    assert opt.param_groups[0]["compile"] is False


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_ns_steps_reach_newton_schulz(steps):
    (p,) = parameters((24, 64), dtype=torch.float64)
    before = p.detach().clone()
    set_gradients([p], 0)
    Muon([p], lr=1.0, variant="muon", weight_decay=0.0, ns_steps=steps, ns_dtype=torch.float64, compile=False).step()
    expected = newton_schulz(p.grad, steps, dtype=torch.float64)  # of the first momentum, which the gradient's norm divides out, but for ε
    torch.testing.assert_close(before - p.detach(), expected, rtol=1e-3, atol=1e-5)


def test_every_gradient_that_is_not_finite_is_counted():
    params = parameters((8, 4), (8, 4), (8, 4))
    opt = Muon(params, compile=False)
    set_gradients(params, 0)
    params[1].grad[0, 0] = params[2].grad[0, 0] = math.nan
    with pytest.warns(UserWarning, match="2 of the updates"):
        opt.step()


def test_a_large_finite_gradient_is_not_left_out():
    params = parameters((8, 4))
    opt = Muon(params, compile=False)
    params[0].grad = torch.full((8, 4), 3e38)  # whose sum is not finite
    before = params[0].detach().clone()
    opt.step()
    assert opt.skipped == 0 and not torch.equal(params[0], before)


def test_buffers_in_bf16_are_updated_in_fp32():
    (p,) = parameters((8, 4))
    opt, M = Muon([p], variant="muon", state_dtype=torch.bfloat16, compile=False), torch.zeros(8, 4)
    for step in range(4):
        set_gradients([p], step)
        opt.step()
        M = (0.95 * M + p.grad).bfloat16().float()
    assert torch.equal(opt.state[p]["momentum"][0].float(), M)


def test_stochastic_rounding_leaves_fp32_alone():
    for make in (Muon, lambda params, **rest: AdamW(params, state_dtype=torch.float64, **rest)):
        a, b = parameters((8, 4)), parameters((8, 4))
        assert torch.equal(*run(make(a, stochastic_rounding=True, compile=False), a, 2), *run(make(b, compile=False), b, 2))


def test_batched_matrices_of_unlike_age_keep_their_bias_correction(monkeypatch):
    """Portions as on a GPU, where several parameters share a batch: the same as one by one."""
    def train():
        params = parameters((2, 24, 64), (2, 24, 64))
        opt = Muon(params, ns_dtype=torch.float64, compile=False)
        for step in range(3):
            set_gradients(params, step)
            if step == 0:
                params[1].grad = None
            opt.step()
        return params
    alone = train()
    monkeypatch.setattr(Muon, "_portions", staticmethod(lambda params: [[params]]))
    torch.testing.assert_close(alone, train(), rtol=1e-6, atol=1e-6)


def test_a_step_records_no_graph():
    (p,) = parameters((8, 4))
    opt = Muon([p], compile=False)
    (p.grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    opt.step()
    assert not any(t.requires_grad for t in opt.state[p].values() if isinstance(t, torch.Tensor))


def test_newton_schulz_of_bf16_is_normalised_as_exactly_as_of_fp32():
    G = spectrum("gaussian", 24, 64).bfloat16()
    torch.testing.assert_close(newton_schulz(G, dtype=torch.float64), newton_schulz(G.float(), dtype=torch.float64), rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_state_and_work_are_shared_evenly(preset, ranks, monkeypatch):
    """Each rank's buffers at most 1.05 of the average and its Newton-Schulz operations 1.05; the demo's 16 matrices only up to 4 ranks."""
    if (preset, ranks) == ("demo", 8):
        pytest.skip("16 matrices cannot be shared evenly by 8 ranks")
    monkeypatch.setattr(optim, "_world", lambda: ranks)
    layers, shapes = PRESETS[preset]
    shapes = [shape for _ in range(layers) for shape, k in shapes.items() for _ in range(k)]
    matrices = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    table = torch.nn.Parameter(torch.empty(50304, 768, device="meta"))
    elements, work, rows = [0] * ranks, [0] * ranks, [0] * ranks
    for rank in range(ranks):
        monkeypatch.setattr(optim, "_rank", lambda: rank)
        muon, adam = Muon(matrices), AdamW([table])
        muon._layout(), adam._layout()
        for p in matrices:
            own = muon._new_state(muon.param_groups[0], p)["variance"]
            elements[rank] += own.numel()
            m, n = sorted(p.shape)
            work[rank] += len(own) * (2 * m * m * n + m**3)
        rows[rank] = adam._new_state(adam.param_groups[0], table)["exp_avg"].numel()
    assert sum(elements) == sum(p.numel() for p in matrices) and sum(rows) == table.numel()
    assert max(elements) <= 1.05 * sum(elements) / ranks and max(work) <= 1.05 * sum(work) / ranks and max(rows) <= 1.05 * sum(rows) / ranks


SHARDED = [(24, 16)] * 3 + [(16, 16)] * 4 + [(5, 16, 24), (16, 40)]
AUXILIARY = [(13, 6), (7,), (5, 6)]


def build(variant):
    matrices, others = parameters(*SHARDED), parameters(*AUXILIARY, seed=1)
    options = dict(adjust_lr_fn="frobenius" if variant == "adamuon" else "match_rms_adamw", ns_dtype=torch.float32)
    groups = [dict(params=others[:2]), dict(params=others[2:], state_dtype=torch.float64)]  # with torch's kernel and without
    return matrices + others, [Muon(matrices, lr=0.02, variant=variant, compile=False, **options), AdamW(groups, lr=0.01, compile=False)]


def train(params, optimizers, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(params, step)
        if step == 7:
            params[-3].grad[-1, 0] = params[-1].grad[0, 0] = math.nan  # in one rank's rows: none of the parameter is updated
        for opt in optimizers:
            opt.step()
        if dist.is_initialized():
            digests = [None] * dist.get_world_size()
            dist.all_gather_object(digests, hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in params)).hexdigest())
            assert len(set(digests)) == 1, f"ranks differ after step {step}"
    return [p.detach().clone() for p in params]


RANKS = {"muon-vs": (2, 3, 4), "normuon": (3,), "adamuon": (3,)}


def ranks_worker(rank, folder):
    """One process of four: groups of 2, 3 and 4 ranks, one after the other."""
    torch.set_num_threads(1)
    for variant in RANKS:
        alone = torch.load(f"{folder}/alone-{variant}")
        for ranks in RANKS[variant]:
            if rank < ranks:
                dist.init_process_group("gloo", init_method=f"file://{folder}/{variant}-{ranks}", rank=rank, world_size=ranks)
                params, optimizers = build(variant)
                half = train(params, optimizers, 25)
                saved = copy.deepcopy([opt.state_dict() for opt in optimizers])
                sharded = train(params, optimizers, 25, start=25)
                close(sharded, alone)
                if ranks == 2:
                    torch.save((half, saved), f"{folder}/saved-{rank}")
                    missing_gradient(rank)
                    unlike_parameters(rank)
                    state_dict_of_one_rank(rank, folder)
                    stochastic_rounding(rank)
                    changed_groups()
                dist.destroy_process_group()
    wait_for = Path(folder, "saved-0"), Path(folder, "saved-1")
    (half, saved), (_, of_rank_1) = (torch.load(path) for path in wait_for)
    assert str(saved) == str(of_rank_1)  # the whole state on every rank
    for mine, other in zip(saved, of_rank_1):
        torch.testing.assert_close(mine["state"], other["state"], rtol=0, atol=0)
    alone = torch.load(f"{folder}/alone-muon-vs")
    for ranks in (1, 3, 4):
        if rank < ranks:
            if ranks > 1:
                dist.init_process_group("gloo", init_method=f"file://{folder}/resumed-{ranks}", rank=rank, world_size=ranks)
            params, optimizers = build("muon-vs")
            with torch.no_grad():
                for p, value in zip(params, half):
                    p.copy_(value)
            for opt, state in zip(optimizers, saved):
                opt.load_state_dict(state)
            close(train(params, optimizers, 25, start=25), alone)
            if ranks > 1:
                dist.destroy_process_group()


def close(mine, other):
    for p, q in zip(mine, other):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)  # fp32 sums in another order, through 50 steps of fp32 Newton-Schulz


def missing_gradient(rank):
    """A gradient that is missing on one rank only, or on all, hangs nobody; the owner's gradient decides."""
    params, optimizers = build("muon-vs")
    train(params, optimizers, 1)
    for absent in (params[0], params[2], params[-3], params[-2]):  # the last is a vector
        set_gradients(params, 1)
        if rank == 1:
            absent.grad = None
        params[4].grad = None
        for opt in optimizers:
            opt.step()
            opt.state_dict()
    train(params, optimizers, 1, start=2)


def changed_groups():
    """A group that is removed from the end is gone; one whose absence would move the others' state is refused on every rank."""
    params = parameters((8, 4), (16, 8), (8, 6), seed=3)
    opt = Muon([dict(params=[p]) for p in params], compile=False)
    run(opt, params, 1)
    last = params[2].detach().clone()
    del opt.param_groups[2]
    run(opt, params, 1)
    assert torch.equal(params[2], last)
    opt.add_param_group(dict(params=parameters((32, 32), seed=4)))
    run(opt, params + opt.param_groups[-1]["params"], 1)
    opt.param_groups.append({**opt.param_groups[0], "params": [params[2]]})  # put back where another rank's turn is
    with pytest.raises(RuntimeError, match="state would have to move between ranks"):
        run(opt, params, 1)
    del opt.param_groups[2:]
    run(opt, params, 1)
    del opt.param_groups[0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="state would have to move between ranks"):
            run(opt, params, 1)


def unlike_parameters(rank):
    """Other values or shapes on one rank are refused on all, before anything is overwritten."""
    for params in (parameters((8, 4), (6, 6), seed=rank), parameters((8, 4 + rank))):
        for make in (Muon, AdamW):
            before = [p.detach().clone() for p in params]
            with pytest.raises(RuntimeError, match="parameter 0 of (Muon|AdamW) is not the same on ranks 0 and 1"):
                run(make(params, compile=False), params, 1)
            assert all(map(torch.equal, params, before))


def state_dict_of_one_rank(rank, folder):
    """The rank that calls it is told what it waits for; here after 0.6 s instead of a minute, and the other one comes when it is."""
    params = parameters((8, 4))
    opt = Muon(params, compile=False)
    run(opt, params, 1)
    timer, told = optim.threading.Timer, []
    with pytest.MonkeyPatch.context() as patch:
        tell = lambda text: told.append(text) or Path(folder, f"told-{rank}").touch()
        patch.setattr(optim.threading, "Timer", lambda seconds, warn, texts: timer(seconds / 100, tell, texts))
        while rank and not Path(folder, "told-0").exists():
            time.sleep(0.05)
        opt.state_dict()
    assert rank or told == ["Muon.state_dict() has waited for a minute: all ranks must call it, not only the one that saves"]


def stochastic_rounding(rank):
    """Ranks that draw different noise still end with the same vectors and matrices."""
    torch.manual_seed(rank)
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((64,), (8, 8))]
    opt = AdamW(params, lr=1e-3, stochastic_rounding=True, compile=False)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    both = [None, None]
    dist.all_gather_object(both, [p.float().tolist() for p in params])
    assert both[0] == both[1]


@pytest.mark.filterwarnings("ignore:AdamW. a gradient is not finite")
def test_ranks(tmp_path):
    """2, 3 and 4 gloo ranks: bit-identical parameters after each of 50 steps, the same as one rank's, saved at 2, resumed at 1, 3, 4."""
    for variant in RANKS:
        torch.save(train(*build(variant), 50), tmp_path / f"alone-{variant}")  # no group: one rank
    mp.start_processes(ranks_worker, (str(tmp_path),), nprocs=4, start_method="forkserver")


# ----------------------------------------------------------------------------------------------------------------------
# Compilation


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_is_eager_and_nothing_that_changes_recompiles():
    """New lr, weight decay, momentum, γ, step, shapes and batch sizes: no new graph. The same numbers to fp32 rounding, which
    bf16 Newton-Schulz may turn into a rounding of 2^-9 here and there."""
    shapes = [(24, 16), (24, 16), (16, 24), (16, 24)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before, results = graphs(), []
        for compile in (False, True):
            params, others = parameters(*shapes), parameters((9, 5), (8, 3))
            opt = Muon(params, lr=0.02, compile=compile, ns_dtype=torch.float32)
            adam = AdamW(others, lr=0.02, compile=compile, state_dtype=torch.float64)  # of fp32 parameters: not torch's kernel
            schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 10)
            for step in range(12):
                set_gradients(params + others, step)
                opt.step(), adam.step(), schedule.step()
                if step == 1:
                    warm = graphs()
                for group in opt.param_groups:
                    group.update(weight_decay=0.1 + 0.01 * step, momentum=0.9 + 0.005 * step, gamma=10.0 + step, beta2=0.9 + 0.005 * step)
                adam.param_groups[0].update(lr=0.01 + 0.001 * step, betas=(0.9, 0.95 + 0.001 * step))
            more = parameters((40, 24), (40, 24), (40, 24))
            run(Muon(more, lr=0.1, compile=compile, ns_dtype=torch.float32), more, 2)
            results.append(params + others + more)
            assert graphs() == warm
    assert before < warm <= before + 6, "one before and one after Newton-Schulz, each for wide and for tall matrices; one or two of AdamW"
    assert not [w for w in caught if "torch.compile failed" in str(w.message)]
    for eager, compiled in zip(*results):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


def test_groups_of_different_options_share_no_graph_limit(monkeypatch):
    """Dynamo gives up after a few graphs of one code object: each set of constants has a code object of its own, numbers need none."""
    codes = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: codes.append(function.__code__) or function)
    monkeypatch.setattr(optim, "_compiled", {})
    params = parameters((8, 4), (8, 4), (8, 4), (8, 4))
    options = [dict(), dict(lr=0.02, momentum=0.8, gamma=3.0, weight_decay=0.0), dict(nesterov=False), dict(eps=1e-6)]
    opt = Muon([dict(params=[p], **option) for p, option in zip(params, options)])
    run(opt, params, 2)
    assert len(codes) == len(set(map(id, codes))) == 2 * 3  # before and after Newton-Schulz; the first two groups differ in numbers


def test_where_dynamo_does_not_compile_a_step_is_taken_once(monkeypatch):
    """Torch's FLOP counter keeps it off, as TORCH_COMPILE_DISABLE=1 does; in place, so that a second run of the rule would show."""
    results = []
    for compile in (False, True):
        monkeypatch.setattr(optim, "_compiled", {})
        params, others = parameters((8, 4)), parameters((6, 5))
        opts = Muon(params, lr=0.1, ns_dtype=torch.float32, compile=compile), AdamW(others, state_dtype=torch.float64, compile=compile)
        with FlopCounterMode(display=False):
            for opt, own in zip(opts, (params, others)):
                optim._compiled.pop(None, None)  # of the one before
                run(opt, own, 1)
        results.append([*params, *others, *opts[0].state[params[0]].values(), *opts[1].state[others[0]].values()])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-8)


def test_compiled_is_eager_behind_newton_schulz_too():
    """What NorMuon does to the result, the scale from its norm, and stochastic rounding with noise of the same seed, of which sums in
    another order turn one entry of thousands the other way."""
    results = []
    for compile in (False, True):
        torch.manual_seed(0)
        params = parameters((24, 16), dtype=torch.bfloat16)
        opt = Muon(params, lr=0.02, variant="normuon", adjust_lr_fn="frobenius", stochastic_rounding=True, ns_dtype=torch.float32,
                   compile=compile)
        results += run(opt, params, 3)
    assert (results[0] != results[1]).float().mean() < 0.01 and None not in optim._compiled


def test_without_a_compiler_it_runs_eagerly_after_one_warning(tmp_path):
    script = textwrap.dedent("""
        import torch, optim
        params = [torch.nn.Parameter(torch.randn(8, 4)) for _ in range(2)]
        opts = [optim.Muon(params), optim.AdamW(params, state_dtype=torch.float64)]
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            for opt in opts:
                opt.step()
        print("finite:", all(p.isfinite().all().item() for p in params), opts[0].state[params[0]]["step"])
    """)
    env = {**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=Path(optim.__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "finite: True 2\n", done.stderr
    assert done.stderr.count("UserWarning: the optimizer runs uncompiled") == 1 and "install a C++ compiler" in done.stderr


def test_a_device_without_memory_is_not_tried_again(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("full")
    monkeypatch.setattr(optim, "_compiled", {})
    monkeypatch.setattr(torch, "compile", lambda *args, **options: full)
    params = parameters((8, 4))
    with pytest.raises(torch.OutOfMemoryError):
        run(Muon(params), params, 1)
    assert None not in optim._compiled
