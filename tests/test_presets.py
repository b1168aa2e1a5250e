"""The presets are the paper's tables, and every global reaches what it names."""
import re

import pytest
import torch

from common import ROOT
from test_llama import script

# the paper's tables by hand: lr, AdamW's lr, clip, β, AdamW's betas, batch, updates, updates between evaluations
ROWS = {
    "gpt2-small": (6e-4, 6e-4, 1.0, 0.95, 0.9, 0.95, 480, 100_000, 1000),
    "gpt2-medium": (6e-4, 6e-4, 1.0, 0.95, 0.9, 0.95, 480, 100_000, 1000),
    "suite-a-130m": (0.016, 0.0032, 1.0, 0.95, 0.8, 0.98, 128, 5000, 100),
    "suite-a-300m": (0.008, 0.0024, 1.0, 0.98, 0.8, 0.98, 128, 11_500, 100),
    "suite-a-1.2b": (0.008, 0.0012, 2.0, 0.98, 0.8, 0.98, 256, 23_000, 250),
    "suite-b-210m": (1e-3, 1e-3, 0.5, 0.95, 0.9, 0.999, 256, 128_000, 115),
    "suite-b-720m": (1e-3, 1e-3, 0.1, 0.95, 0.9, 0.99, 1984, 48_000, 200)}
# and γ, ε of AdamW, ε of Newton-Schulz, s, schedule, warm-up, its end, data
FAMILIES = {"gpt2": (10, 1e-8, 1e-7, "match_rms_adamw", "constant", 2000, 0, "openwebtext", ""),
            "suite-a": (1000, 1e-15, 1e-5, "original", "wsd", 0, 0, "dclm", "c4"),
            "suite-b": (1000, 1e-8, 1e-7, "match_rms_adamw", "cosine", 2000, 0.01, "fineweb", "")}
ADAMUON = {"suite-a-130m": 2e-3, "suite-a-300m": 1.3e-3, "suite-a-1.2b": 1.3e-3}


@pytest.mark.parametrize("preset", ROWS)
def test_presets_are_the_papers(preset):
    name = "train_gpt" if preset.startswith("gpt2") else "train_llama"
    t = script(f"--preset={preset}", "--optimizer=muon-nsr", name=name)
    assert ROWS[preset] == (t.learning_rate, t.adam_lr, t.grad_clip, t.momentum, t.adam_beta1, t.adam_beta2, t.batch_size, t.max_iters,
                            t.eval_interval)
    assert FAMILIES[preset.rpartition("-")[0]] == (t.gamma, t.adam_eps, t.ns_eps, t.adjust_lr_fn, t.schedule, t.warmup_iters, t.min_lr_frac,
                                                   t.dataset, t.val_dataset)
    assert t.weight_decay == 0.1 and t.beta2 == 0.95 and t.ns_steps == 5 and t.muon_eps == 1e-8
    if preset.startswith("suite"):
        assert (t.tied, t.fused_qkv, t.init_truncated) == 3 * (preset.startswith("suite-b"),)
        assert t.schedule != "wsd" or t.decay_frac == (1.0 if preset == "suite-a-1.2b" else 0.8)
        assert t.norm_eps == (1e-6 if preset.startswith("suite-a") else 1e-5)
    t = script(f"--preset={preset}", "--optimizer=adamuon", name=name)
    assert (t.adjust_lr_fn, t.learning_rate) == ("frobenius", ADAMUON.get(preset, ROWS[preset][0]))
    assert script(f"--preset={preset}", "--optimizer=normuon", name=name).adjust_lr_fn == (
        "frobenius" if preset.startswith("gpt2") else FAMILIES[preset.rpartition("-")[0]][3])
    t = script(f"--preset={preset}", "--optimizer=adamw", name=name)  # the paper's tables, or where they have no AdamW one rate for all
    assert t.learning_rate == t.adam_lr == ROWS[preset][1]


def test_every_hyperparameter_reaches_its_optimizer():
    t = script("--momentum=0.91", "--gamma=7", "--beta2=0.92", "--muon_eps=1e-3", "--ns_steps=3", "--ns_eps=1e-4", "--adam_beta1=0.81",
               "--adam_beta2=0.82", "--adam_eps=1e-5", "--weight_decay=0.2", "--adjust_lr_fn=frobenius", "--stochastic_rounding=true",
               "--param_dtype=bfloat16")
    with torch.device("meta"):
        model = t.Model(64)
    muon, adam = t.build_optimizers(model, False, torch.float64)
    assert muon.param_groups[0].items() >= dict(
        variant="muon-vs", momentum=0.91, gamma=7.0, beta2=0.92, eps=1e-3, ns_steps=3, ns_eps=1e-4, weight_decay=0.2,
        ns_dtype=torch.float64, adjust_lr_fn="frobenius", state_dtype=torch.bfloat16, stochastic_rounding=True, compile=False).items()
    for group in adam.param_groups:
        assert group.items() >= dict(betas=(0.81, 0.82), eps=1e-5, state_dtype=torch.bfloat16, stochastic_rounding=True).items()


@pytest.mark.parametrize("name", ["train_gpt", "train_llama"])
def test_every_global_of_the_optimizer_changes_one(name):
    """Those of the section "optimizer", one that you add included."""
    def groups(*words):
        t = script(*words, name=name)
        with torch.device("meta"):
            model = t.Model(64)
        return str([{k: v for k, v in group.items() if k != "params"}
                    for opt in t.build_optimizers(model, False, torch.float64) for group in opt.param_groups])
    section = re.search(r"^# optimizer\n(.*?)^# schedule", (ROOT / f"{name}.py").read_text(encoding="utf-8"), re.M | re.S)[1]
    values = {key: getattr(script(name=name), key) for key in re.findall(r"^(\w+) = ", section, re.M)}
    assert {"gamma", "momentum", "beta2"} < set(values)
    other = {key: value / 2 if type(value) is float else value + 1 for key, value in values.items() if not isinstance(value, (str, bool))}
    other |= {"optimizer": "adamw", "adjust_lr_fn": "frobenius"}
    assert [key for key in other if groups(f"--{key}={other[key]}") == groups()] == ["grad_clip"]


@pytest.mark.parametrize("truncated", [False, True])
def test_truncated_initialisation_ends_at_two_deviations(truncated):
    t = script(f"--init_truncated={truncated}")
    model = t.Model(320)
    t.initialise(model)
    assert (model.head.weight.abs().max() <= 0.04) == truncated and model.head.weight.abs().max() > 0.039
