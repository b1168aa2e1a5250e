"""train_llama.py, and every preset against the paper, from shapes alone. test_export.py holds the model against
transformers; .ci/same_sections.py holds its shared sections against train_gpt.py's."""
import math, re
from pathlib import Path

import pytest
import torch

from optim import VARIANTS
from common import ROOT, fresh, train, write_tiny

# By hand, of the paper or, where it is silent, of records/paper.md: layers, width, heads, FFN, vocabulary,
# tables of it, context, batch, updates, lr, AdamW's lr, clip, β, AdamW's betas, updates between evaluations
PAPER = {
    "gpt2-small": (12, 768, 12, None, 50304, 2, 1024, 480, 100_000, 6e-4, 6e-4, 1.0, 0.95, 0.9, 0.95, 1000),
    "gpt2-medium": (24, 1024, 16, None, 50304, 2, 1024, 480, 100_000, 6e-4, 6e-4, 1.0, 0.95, 0.9, 0.95, 1000),
    "suite-a-130m": (32, 512, 8, 2048, 32000, 2, 4096, 128, 5000, 0.016, 0.0032, 1.0, 0.95, 0.8, 0.98, 100),
    "suite-a-300m": (32, 768, 12, 3072, 32000, 2, 4096, 128, 11_500, 0.008, 0.0024, 1.0, 0.98, 0.8, 0.98, 100),
    "suite-a-1.2b": (32, 1536, 24, 6144, 32000, 2, 4096, 256, 23_000, 0.008, 0.0012, 2.0, 0.98, 0.8, 0.98, 250),
    "suite-b-210m": (24, 768, 12, 2048, 50304, 1, 512, 256, 128_000, 1e-3, 1e-3, 0.5, 0.95, 0.9, 0.999, 115),
    "suite-b-720m": (12, 2048, 16, 5632, 50304, 1, 512, 1984, 48_000, 1e-3, 1e-3, 0.1, 0.95, 0.9, 0.99, 200),
    "llama-3b": (26, 3200, 32, 8640, 50304, 1, 2048, 512, 50_000, 3e-4, 3e-4, 1.0, 0.95, 0.9, 0.95, 250),
    "llama-7b": (32, 4096, 32, 11_008, 50304, 1, 2048, 512, 50_000, 3e-4, 3e-4, 1.0, 0.95, 0.9, 0.95, 250)}
# γ, ε of AdamW, ε of Newton-Schulz, s, schedule, warm-up, its end, data
FAMILIES = {"gpt2": (10, 1e-8, 1e-7, "match_rms_adamw", "constant", 2000, 0, "openwebtext", ""),
            "suite-a": (1000, 1e-15, 1e-5, "original", "wsd", 0, 0, "dclm", "c4"),
            "suite-b": (1000, 1e-8, 1e-7, "match_rms_adamw", "cosine", 2000, 0.01, "fineweb", "")}
FAMILIES["llama"] = FAMILIES["suite-b"]
ADAMUON_LR = {"suite-a-130m": 2e-3, "suite-a-300m": 1.3e-3, "suite-a-1.2b": 1.3e-3}

def configured(preset, *words):
    t = fresh("train_gpt.py" if preset.startswith("gpt2") else "train_llama.py")
    t.configure([f"--preset={preset}", *words])
    return t

@pytest.mark.parametrize("preset", PAPER)
def test_presets_are_the_papers(preset):
    layers, width, heads, ffn, vocab, tables, *rest = PAPER[preset]
    family = preset.rpartition("-")[0]
    t = configured(preset, "--optimizer=muon-nsr")
    assert rest == [t.block_size, t.batch_size, t.max_iters, t.learning_rate, t.adam_lr, t.grad_clip, t.momentum,
                    *t.adam_betas, t.eval_interval]
    assert FAMILIES[family] == (t.gamma, t.adam_eps, t.ns_eps, t.adjust_lr_fn, t.schedule, t.warmup_iters,
                                t.min_lr_frac, t.dataset, t.val_dataset)
    assert (t.n_layer, t.n_embd, t.n_head, t.weight_decay, t.beta2) == (layers, width, heads, 0.1, 0.95)
    assert t.schedule != "wsd" or t.decay_frac == (1.0 if preset == "suite-a-1.2b" else 0.8)
    if ffn:
        assert (t.tied, t.fused_qkv, t.init_truncated) == 3 * (family in ("suite-b", "llama"),)
        assert t.fsdp == t.activation_checkpointing == (family == "llama")
    matrices = layers * (12 * width**2 if ffn is None else 4 * width**2 + 3 * width * ffn)
    with torch.device("meta"):
        model = t.Model(vocab)
    assert sum(p.numel() for p in model.parameters()) == matrices + tables * vocab * width + (2 * layers + 1) * width
    t = configured(preset, "--optimizer=adamuon")
    assert (t.adjust_lr_fn, t.learning_rate) == ("frobenius", ADAMUON_LR.get(preset, rest[3]))
    t = configured(preset, "--optimizer=normuon")
    assert t.adjust_lr_fn == ("frobenius" if family == "gpt2" else FAMILIES[family][3])
    t = configured(preset, "--optimizer=adamw")  # where the paper has none, the rate of its embeddings
    assert t.learning_rate == t.adam_lr == rest[4]

@pytest.mark.parametrize("preset, dtype, muon, adaptive", [  # GiB of optimizer state: the paper's overhead table
    ("suite-a-130m", "bfloat16", 0.37, 0.62), ("suite-a-300m", "bfloat16", 0.75, 1.31),
    ("suite-a-1.2b", "bfloat16", 2.62, 4.87), ("suite-b-210m", "float32", 0.92, 1.55),
    ("suite-b-720m", "float32", 3.06, 5.36)])
def test_optimizer_state_is_the_papers(preset, dtype, muon, adaptive):
    for optimizer, gib in ("muon", muon), ("muon-nsr", adaptive), ("muon-vs", adaptive):
        t = configured(preset, f"--optimizer={optimizer}", f"--param_dtype={dtype}")
        with torch.device("meta"):
            model = t.Model(PAPER[preset][4]).to(getattr(torch, dtype))
        own, adam = t.build_optimizers(model)
        size = sum(2 * p.nbytes for group in adam.param_groups for p in group["params"])  # two moments
        for group in own.param_groups:
            size += sum(own._state(group, p)[name].nbytes for p in group["params"] for name in VARIANTS[optimizer][1:])
        assert size / 2**30 == pytest.approx(gib, abs=0.0151)  # which is rounded to 0.01 and may be cut

@pytest.mark.parametrize("script", ["train_gpt.py", "train_llama.py"])
def test_every_hyperparameter_reaches_its_optimizer(script):
    """Each global of the section "optimizer" changes a group of an optimizer, but for the clipping."""
    def groups(**settings):
        t = fresh(script, **dict(optimizer="muon-vs") | settings)
        with torch.device("meta"):
            model = t.Model(64)
        return str([{name: value for name, value in group.items() if name != "params"}
                    for opt in t.build_optimizers(model) for group in opt.param_groups])
    section = re.search(r"^# optimizer\n(.*?)^# schedule", (ROOT / script).read_text(), re.M | re.S)[1]
    values = {name: getattr(fresh(script), name) for name in re.findall(r"^(\w+) = ", section, re.M)}
    other = {name: value / 2 if type(value) is float else "frobenius" for name, value in values.items()}
    other |= dict(optimizer="adamw", ns_steps=6, qkv_split=6, ns_coefficients=(2, -1.5, 0.5), adam_betas=(0.8, 0.9))
    assert [name for name in other if groups(**{name: other[name]}) == groups()] == ["grad_clip"]

@pytest.mark.parametrize("truncated", [False, True])
def test_initialisation(truncated):
    t = fresh("train_llama.py", init_truncated=truncated)
    model = t.Model(320)
    t.init_weights(model)
    assert (model.head.weight.abs().max() <= 0.04) == truncated and model.head.weight.abs().max() > 0.039
    deviation = 0.02 * (math.sqrt(1 - 4 * 0.05399 / 0.9545) if truncated else 1)  # of a normal cut at 2
    assert all(p.std().item() == pytest.approx(deviation, rel=0.03) for p in model.parameters() if p.ndim == 2)

@pytest.mark.parametrize("tied", [False, True])
def test_the_llama_trains_and_activation_checkpointing_changes_no_gradient(tied):
    write_tiny()
    run = dict(script="train_llama.py", tied=tied, n_ffn=64, max_iters=30)
    saved, recomputed = train("run", **run), train("recomputed", **run, activation_checkpointing=True)
    torch.testing.assert_close(recomputed["model"], saved["model"], rtol=0, atol=0)
    assert torch.equal(saved["model"]["embed.weight"], saved["model"]["head.weight"]) == tied
    with pytest.raises(SystemExit, match="no checkpoint of this model"):
        train("other", **run | dict(tied=not tied), init_from="checkpoints/run/step_00000030.pt")
    losses = re.findall(r"^step:.* val_loss:([\d.]+)", Path("logs/run.txt").read_text(), re.M)
    assert float(losses[-1]) < float(losses[0]) - 0.5
