"""train_llama.py: the model against transformers, every preset's counts from shapes alone, bf16 parameters, checkpointing, and
that the sections it shares with train_gpt.py are the same text."""
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from common import ROOT, fresh, write_shard
from optim import VARIANTS

SUITES = ["suite-a-130m", "suite-a-300m", "suite-a-1.2b", "suite-b-210m", "suite-b-720m"]
OPTIMIZERS = ["adamw", *VARIANTS]
VOCAB = {"suite-a": 32000, "suite-b": 50304}


def script(*flags: str, name: str = "train_llama"):
    """A fresh copy of the script's module with these flags set."""
    module = fresh(f"{name}.py")
    module.configure(list(flags))
    return module


def on_meta(preset: str, optimizer: str = "muon", *flags: str):
    t = script(f"--preset={preset}", f"--optimizer={optimizer}", *flags)
    with torch.device("meta"):
        return t, t.Model(VOCAB[preset[:7]])


@pytest.mark.parametrize("flags", [("--tied=true", "--fused_qkv=true"), ("--tied=false", "--fused_qkv=false")])
def test_logits_equal_transformers_llama(flags):
    transformers = pytest.importorskip("transformers")
    t = script("--n_layer=2", "--n_head=4", "--n_embd=64", "--n_ffn=176", "--block_size=48", *flags)
    torch.manual_seed(0)
    ours = t.Model(100)
    t.initialise(ours)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p) * 0.05)  # gains that are not 1, a head that matters
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=48, rms_norm_eps=t.norm_eps, rope_theta=t.rope_base, tie_word_embeddings=t.tied, attention_bias=False,
        mlp_bias=False, attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": ours.embed.weight, "model.norm.weight": ours.norm.weight, "lm_head.weight": ours.head.weight}
    for i, block in enumerate(ours.blocks):
        q, k, v = (block.attn.qkv.weight.chunk(3) if t.fused_qkv else
                   (block.attn.q.weight, block.attn.k.weight, block.attn.v.weight))
        at = f"model.layers.{i}."
        state |= {at + "self_attn.q_proj.weight": q, at + "self_attn.k_proj.weight": k, at + "self_attn.v_proj.weight": v,
                  at + "self_attn.o_proj.weight": block.attn.proj.weight, at + "mlp.gate_proj.weight": block.mlp.gate.weight,
                  at + "mlp.up_proj.weight": block.mlp.up.weight, at + "mlp.down_proj.weight": block.mlp.down.weight,
                  at + "input_layernorm.weight": block.norm1.weight, at + "post_attention_layernorm.weight": block.norm2.weight}
    theirs.load_state_dict(state)
    ids = torch.randint(0, 100, (3, 48))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ids), theirs(ids).logits, atol=1e-4, rtol=0)  # fp32 rounding over 2 layers


# By hand from experiments.md: blocks are 4 D² + 3 D F, the rest V D once (tied) or twice, and (2 L + 1) D gains.
COUNTS = {"suite-a-130m": (32, 512, 2048, 32000, 2), "suite-a-300m": (32, 768, 3072, 32000, 2), "suite-a-1.2b": (32, 1536, 6144, 32000, 2),
          "suite-b-210m": (24, 768, 2048, 50304, 1), "suite-b-720m": (12, 2048, 5632, 50304, 1)}
CONTEXT = {"suite-a": 4096, "suite-b": 512}


@pytest.mark.parametrize("preset", SUITES)
def test_parameters_and_flops_of_every_preset(preset):
    L, D, F, V, tables = COUNTS[preset]
    t, model = on_meta(preset)
    matrices = L * (4 * D * D + 3 * D * F)
    assert sum(p.numel() for p in model.parameters()) == matrices + tables * V * D + (2 * L + 1) * D
    groups = {kind: sum(p.numel() for p in group.values()) for kind, group in t.parameter_groups(model).items()}
    assert groups == {"matrices": matrices, "embeddings": tables * V * D, "vectors": (2 * L + 1) * D}
    assert t.flops_per_token(model) == 6 * (matrices + V * D) + 12 * L * D * CONTEXT[preset[:7]]  # the lookup is free, the head is not
    assert (t.n_embd % t.n_head, t.batch_size % t.micro_batch_size) == (0, 0)
    assert len(model.blocks[0].attn._modules) == (2 if preset.startswith("suite-b") else 4)  # fused qkv or q, k, v; and proj


@pytest.mark.parametrize("preset", SUITES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_preset_with_every_optimizer_builds_and_reports_its_table(preset, optimizer):
    t, model = on_meta(preset, optimizer)
    optimizers = t.build_optimizers(model, False, torch.bfloat16)
    placed = [id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]]
    assert sorted(placed) == sorted(id(p) for p in model.parameters())
    rows = t.parameter_table(model, optimizers).splitlines()
    assert sum(int(re.search(r"x(\d+)", row)[1]) for row in rows) == len(placed)
    assert {row.split()[0] for row in rows if optimizer in row.split()} >= {"blocks.*.mlp.gate.weight", "blocks.*.attn.proj.weight"}
    assert all("adamw" in row.split() for row in rows if re.match(r"embed|head|.*norm\d?\.weight", row.split()[0]))
    assert all(group["lr"] == (t.learning_rate if i == 0 else t.adam_lr) for i, group in
               enumerate(group for opt in optimizers for group in opt.param_groups))


@pytest.mark.parametrize("preset, dtype, muon, adaptive", [  # GiB of optimizer state: the paper's overhead table
    ("suite-a-130m", "bfloat16", 0.37, 0.62), ("suite-a-300m", "bfloat16", 0.75, 1.31), ("suite-a-1.2b", "bfloat16", 2.62, 4.87),
    ("suite-b-210m", "float32", 0.92, 1.55), ("suite-b-720m", "float32", 3.06, 5.36)])
def test_optimizer_state_is_the_papers(preset, dtype, muon, adaptive):
    for optimizer, gib in (("muon", muon), ("muon-nsr", adaptive), ("muon-vs", adaptive)):
        t, model = on_meta(preset, optimizer, f"--param_dtype={dtype}")
        size = t.memory_estimate(model, world=1, gpu=False, bf16=True)["optimizer"]
        assert round(size / 2**30, 2) == pytest.approx(gib, abs=0.0101)  # both figures are rounded to 0.01
        if dtype == "bfloat16":
            model = model.to(torch.bfloat16)
        built = t.build_optimizers(model, False, torch.bfloat16)  # and it is what the optimizers really allocate
        state = 0
        for opt in built:
            for group, bucket in opt._layout():
                state += sum(s.numel() * s.element_size() for p in bucket for s in opt._new_state(group, p).values() if torch.is_tensor(s))
        assert state == size


def test_schedules_at_their_corners():
    t = script("--schedule=constant", "--warmup_iters=10", "--max_iters=100")
    assert [t.lr_factor(s) for s in (0, 4, 9, 10, 99)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    t = script("--schedule=cosine", "--warmup_iters=10", "--max_iters=110", "--min_lr_frac=0.01")
    assert [t.lr_factor(s) for s in (0, 9, 10)] == [0.1, 1.0, 1.0]
    assert t.lr_factor(60) == pytest.approx(0.505) and t.lr_factor(110) == pytest.approx(0.01)  # half way; the end
    assert 0.01 < t.lr_factor(109) < 0.011
    t = script("--schedule=wsd", "--warmup_iters=0", "--max_iters=100", "--decay_frac=0.8")
    assert [t.lr_factor(s) for s in (0, 19, 20)] == [1.0, 1.0, 1.0]
    assert [t.lr_factor(s) for s in (21, 60, 99)] == pytest.approx([79 / 80, 0.5, 1 / 80])
    t = script("--preset=suite-a-1.2b")
    assert [t.lr_factor(s) for s in (0, 11_500, 22_999)] == pytest.approx([1, 0.5, 1 / 23_000])


def test_two_learning_rates_each_with_its_own_base():
    t = script("--schedule=wsd", "--warmup_iters=0", "--max_iters=10", "--decay_frac=1.0", "--learning_rate=0.5", "--adam_lr=0.25")
    with torch.device("meta"):
        model = t.Model(64)
    bases = [group["initial_lr"] for opt in t.build_optimizers(model, False, torch.bfloat16) for group in opt.param_groups]
    assert bases == [0.5, 0.25, 0.25]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Tiny byte shards and an empty folder for logs and checkpoints."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "tiny"
    rng = np.random.default_rng(0)
    for split, number, length in (("train", 1, 20_000), ("val", 0, 2_000)):
        tokens = np.resize(np.frombuffer(b"the quick brown fox jumps over the lazy dog. ", np.uint8).astype("<u2"), length)
        tokens[rng.random(length) < 0.1] = 32
        write_shard(folder / f"tiny_{split}_{number:06d}.bin", tokens)
    return ["--dataset=tiny", "--n_layer=2", "--n_head=2", "--n_embd=32", "--n_ffn=64", "--block_size=32", "--batch_size=8",
            "--micro_batch_size=4", "--max_iters=30", "--warmup_iters=2", "--eval_interval=30", "--val_tokens=1024", "--compile=false",
            "--device=cpu", "--sample_tokens=4", "--threads=1"]


@pytest.mark.parametrize("optimizer", ["muon-vs", "adamw"])
def test_bf16_parameters_train_like_fp32(data, optimizer):
    losses = {}
    for how in ("float32", "bfloat16", "bfloat16 --stochastic_rounding=true"):
        t = script()
        flags = f"--optimizer={optimizer} --param_dtype={how} --run_name={how.replace('=', '').replace(' ', '')}".split()
        losses[how] = t.main([*data, *flags])["val_loss"]
    assert losses["float32"] < 4.5  # it learned something: ln 320 = 5.8 at the start
    # bf16 weights carry 8 bits: rounded to the nearest, AdamW's small updates get lost, for a tenth of a nat; at random, for a hundredth
    for how, apart in (("bfloat16", 0.15 if optimizer == "adamw" else 0.03), ("bfloat16 --stochastic_rounding=true", 0.03)):
        assert losses[how] == pytest.approx(losses["float32"], abs=apart), how


def test_checkpointing_changes_no_gradient(data):
    gradients = []
    for flag in ("false", "true"):
        t = script(*data, f"--activation_checkpointing={flag}")
        torch.manual_seed(0)
        model = t.Model(64)
        t.initialise(model)
        x = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
        model(x, x).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients):
        assert torch.equal(a, b)


def test_a_preset_that_cannot_fit_says_so_before_allocating(data):
    t = script()
    with pytest.raises(t.UserError, match=r"about [\d.]+ GiB are needed on cpu .*parameters.*free; use --param_dtype"):
        t.main(["--dataset=tiny", "--n_layer=100", "--n_embd=65536", "--n_head=512", "--n_ffn=262144", "--compile=false", "--device=cpu"])


def test_residual_projections_are_attention_out_and_feed_forward_down():
    t = script("--init_residual=true", "--n_embd=256", "--n_layer=8", "--init_std=0.04")
    model = t.Model(64)
    t.initialise(model)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            expected = 0.01 if name.endswith(("attn.proj.weight", "mlp.down.weight")) else 0.04  # 0.04 / sqrt(16)
            assert p.std().item() == pytest.approx(expected, rel=0.05), name


def test_the_llamas_own_globals_are_checked():
    with pytest.raises(Exception, match="--init_std=-1.0: expected a number above 0"):
        script("--init_std=-1")


def test_a_feed_forward_three_times_as_wide_as_the_model_is_not_taken_for_a_fused_qkv():
    """By the memory estimate: it would count what attention's kernel keeps of one."""
    kept = []
    for n_ffn in (384, 385):
        t = script("--n_embd=128", "--block_size=1024", f"--n_ffn={n_ffn}", "--micro_batch_size=1")
        with torch.device("meta"):
            kept.append(t.memory_estimate(t.Model(64), world=1, gpu=False, bf16=True)["activations"])
    assert kept[0] < kept[1]


SHARED = ["configuration", "data loader", "optimizers", "schedule", "evaluation", "memory", "checkpoint", "log", "ranks", "main"]


def sections(name: str) -> dict[str, str]:
    parts = re.split(r"^# ={118}\n# ([^\n]+)\n# -{118}\n", (ROOT / name).read_text(), flags=re.M)
    return {title.split(":")[0]: body for title, body in zip(parts[1::2], parts[2::2])}


@pytest.mark.parametrize("title", SHARED)
def test_shared_sections_are_the_same_text(title):
    gpt, llama = sections("train_gpt.py"), sections("train_llama.py")
    assert list(gpt) == list(llama)
    assert gpt[title] == llama[title], f"section {title!r} was changed in one of train_gpt.py and train_llama.py: change the other too"


def test_attention_is_the_same_text():
    """And its table; the rest of the section "model" differs."""
    gpt, llama = (re.search(r"^def rotate.*?(?=^class Attention)", (ROOT / name).read_text(), re.M | re.S)[0]
                  for name in ("train_gpt.py", "train_llama.py"))
    assert gpt == llama and "def attend" in gpt and "FUTURE_TT =" in gpt


def test_two_ranks_train_the_same_as_one(data, tmp_path):
    t = script()
    alone = t.main([*data, "--run_name=alone", "--max_iters=6", "--warmup_iters=0"])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train_llama.py"), *data,
         "--run_name=pair", "--max_iters=6", "--warmup_iters=0"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    final = float(re.search(r"^final val_loss:([\d.]+)", (tmp_path / "logs/pair.txt").read_text(), re.M)[1])
    assert final == pytest.approx(alone["val_loss"], abs=2e-2)  # bf16 autocast: the sums of 2 ranks round in another order


def test_residual_projections_are_smaller_when_truncated_too():
    t = script("--init_residual=true", "--init_truncated=true", "--n_layer=8")
    model = t.Model(64)
    t.initialise(model)
    assert model.blocks[0].attn.proj.weight.abs().max() <= 0.01 < model.blocks[0].attn.q.weight.abs().max()  # 2 x 0.02 / √16
