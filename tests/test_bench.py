"""tools/bench_train.py, tools/bench_optim.py, --profile and the memory estimate, with models of a few thousand parameters on a CPU."""
import contextlib
import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from common import ROOT, fresh, write_shard

SMALL = ["--dataset=tiny", "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=8", "--val_tokens=64",
         "--sample_tokens=0", "--device=cpu"]
NANOGPT = '''  # with the names that bench_train.py uses of karpathy/nanoGPT's model.py
import torch
from dataclasses import dataclass
@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Embedding(config.vocab_size, config.n_embd),
                                        torch.nn.Linear(config.n_embd, config.vocab_size))
    def forward(self, x, y):
        logits = self.body(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
'''


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = fresh("tools/bench_train.py")
    for split in ("train", "val"):
        write_shard(tmp_path / f"data/tiny/tiny_{split}_000001.bin", np.random.default_rng(0).integers(0, 257, 100_000))
    return module


def test_ratio_and_share_of_the_rate_by_hand(bench):
    """1 s an update is twice as fast as 2 s; 100 tokens of 3 MFLOP in 2 s are half of 300 MFLOP/s."""
    rows = [bench.Row(i, title, dict(kind="ours", folder=".")) for i, title in enumerate(("slow", "fast"))]
    for row, seconds in zip(rows, (2.0, 1.0)):
        row.blocks = [dict(seconds=seconds, phases={}, threads=1, flops=3e6, hardware_peak=None)] * 3
    assert bench.ratio(rows[1], rows[0]) == 2
    head, _, slow, fast = [line.strip("| ").split(" | ") for line in bench.table(rows, 100, 300e6).splitlines()]
    shown = [head.index(title) for title in ("tokens/s", "ms/update", "x slow", "of the matmul rate")]
    assert [slow[i] for i in shown] == ["50", "2000.0", "1.00", "50.0 %"]
    assert [fast[i] for i in shown] == ["100", "1000.0", "2.00", "100.0 %"]


def test_medians_over_the_rounds_by_hand(bench):
    """Neither means nor the warm-up; two ranks have twice the peak."""
    rows = [bench.Row(i, title, dict(kind="ours", folder="."), ranks) for i, (title, ranks) in enumerate((("slow", 1), ("fast", 2)))]
    for row, seconds in zip(rows, ((90.0, 1.0, 2.0, 6.0), (1.0, 1.0, 0.5, 6.0))):
        row.blocks = [dict(seconds=s, phases={}, threads=1, flops=3e6, hardware_peak=150e6) for s in seconds]
    assert bench.ratio(rows[1], rows[0]) == 1 and bench.ratio(rows[0], rows[0]) == 1
    rows[1].blocks[3] = rows[1].blocks[1]
    assert bench.ratio(rows[1], rows[0]) == 4 and bench.ratio(rows[0], rows[1]) == 0.25
    head, _, slow, fast = [line.strip("| ").split(" | ") for line in bench.table(rows, 100, None).splitlines()]
    shown = [head.index(title) for title in ("tokens/s", "lowest-highest block", "ms/update", "x slow", "MFU")]
    assert [slow[i] for i in shown] == ["50", "17-100", "2000.0", "1.00", "100.0 %"]
    assert [fast[i] for i in shown] == ["100", "100-200", "1000.0", "4.00", "100.0 %"]


def test_ratio_and_rate_of_optimizers_by_hand(steps, monkeypatch):
    """torch's step takes 2 s, ours 4 s, and one step's products of one of the three matrices 1 s: 3 x 5 of these in 2 s and in 4 s."""
    monkeypatch.setattr(steps, "seconds", lambda device, function: {steps.optim.Muon: 4.0, torch.optim.Muon: 2.0}.get(
        type(getattr(function, "__self__", None)), 1.0))
    text = steps.main([*TINY, "--optimizers=torch,muon"])
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()[-2:]]
    assert [row[1:3] + row[4:5] for row in cells] == [["2000.0", "1.000", "750 %"], ["4000.0", "2.000", "375 %"]]


def test_the_table_has_every_row_and_its_figures_agree(bench, tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    text = bench.main([*SMALL, "--compile=false", "--dtype=bfloat16", "--optimizers=muon-vs", "--ranks=1,2", "--nanogpt=.",
                       "--rounds=2", "--updates=2", "--warmup=1"])
    environment, markdown = text.split("\n\n")
    for key in ("command", "cpu", "matmul", "versions", "model", "update", "blocks"):
        assert re.search(rf"^    {key}: \S", environment, re.M), environment
    head, line, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in markdown.splitlines()]
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(table) == ["muon-vs x1", "muon-vs x2", "nanoGPT fp32", "nanoGPT bf16"] and len(line) == len(head)
    for name, row in table.items():
        rate, ms = float(row["tokens/s"].replace(",", "")), float(row["ms/update"])
        assert rate == pytest.approx(8 * 32 / ms * 1000, rel=0.05) and 0 < float(row["peak MiB"])  # ms has one decimal
        low, high = (float(end.replace(",", "")) for end in row["lowest-highest block"].split("-"))
        assert low <= rate * 1.001 and rate <= high * 1.001
        shares = {phase: float(row[f"{phase} %"]) for phase in bench.PHASES}
        assert sum(shares.values()) == pytest.approx(100, abs=10)  # medians of parts need not sum to the whole
        assert (shares["communication"] > 0) == name.endswith("x2")
        assert all(shares[phase] > 0 for phase in ("data", "forward", "backward", "clip", "optimizer"))
    assert table["nanoGPT fp32"]["x nanoGPT fp32"] == "1.00" and float(table["muon-vs x1"]["first validation s"]) > 0
    assert float(table["muon-vs x2"]["state MiB"]) < float(table["muon-vs x1"]["state MiB"])


def test_in_fp32_it_is_compared_with_products_in_fp32(bench, tmp_path, monkeypatch):
    """The rows are stubbed: the test above and those below run all kinds."""
    (tmp_path / "model.py").write_text(NANOGPT)
    jobs = {}

    def turn(row, round):
        jobs[row.title] = row.job
        row.blocks.append(dict(seconds=1.0, phases={}, threads=1, flops=3e9, hardware_peak=None, parameters=1))
    monkeypatch.setattr(bench.Row, "turn", turn)
    text = bench.main([*SMALL, "--dtype=float32", "--optimizers=adamw", "--nanogpt=.", "--rounds=1"])
    assert "matmul: 3 GFLOP/s in fp32 on" in text and list(jobs) == ["adamw", "nanoGPT fp32", "matmul"]
    assert "--dtype=float32" in jobs["adamw"]["flags"] and not jobs["nanoGPT fp32"]["bf16"] and not jobs["matmul"]["bf16"]


def test_a_block_is_its_updates_but_the_first(bench, tmp_path):
    clock = bench.Clock(dict(folder=str(tmp_path)), torch.device("cpu"))
    clock.stamps = [("other", 1.0), ("forward", 2.0), ("update", 9.0),  # does not count
                    ("data", 10.0), ("forward", 12.0), ("backward", 15.0), ("data", 19.0), ("forward", 20.0), ("backward", 21.0),
                    ("update", 29.0),
                    ("data", 29.5), ("forward", 30.0), ("update", 39.0)]
    block = clock.block()
    assert block["seconds"] == 15 and sum(block["phases"].values()) == 15
    assert block["phases"] == {"other": 0.75, "data": 1.75, "forward": 6.5, "backward": 6.0}


def test_a_block_has_its_updates_and_products_their_operations(bench, tmp_path):
    job = dict(row="r", folder=str(tmp_path), bench=os.getpid(), updates=3, warmup=7, rounds=1, bf16=False)
    clock = bench.Clock(job, torch.device("cpu"))
    for clock.round, left in ((0, 8), (1, 4)):
        (tmp_path / "turn").write_text(f"r {clock.round}")
        clock.wait()
        assert clock.left == left
    t = fresh()
    t.configure([*SMALL, "--micro_batch_size=4"])

    def update():
        raise bench.Done
    clock.update = update
    with pytest.raises(bench.Done):
        bench.multiply(t, job, torch.device("cpu"), clock)
    weights = 4 * 32 * 32 + 2 * 4 * 32 * 32 + 320 * 32  # attention, MLP, head
    assert clock.facts() == {"flops": 6 * 4 * 32 * weights}


@pytest.mark.parametrize("flags, message", [
    (["--n_layr=3"], "did you mean --n_layer"), (["--optimizers=sgd"], "--optimizer=sgd is unknown"),
    (["--script=x.py"], "x.py does not exist"), (["--script=optim.py"], "is not a training script"),
    (["--nanogpt=nowhere"], "expected a clone of karpathy/nanoGPT"),
    (["--rounds=0"], "at least 1"), (["--ranks=1;2"], "a list such as 1,2,4"), (["--modded=nowhere", "--device=cpu"], "needs a GPU"),
    (["--n_layer=1", "--n_head=3", "--device=cpu"], "divisible by 2 x --n_head, as RoPE turns pairs: --n_embd=258")])
def test_mistakes_get_one_line(bench, flags, message):
    with pytest.raises(bench.UserError, match=re.escape(message)) as error:
        bench.main(flags)
    assert "\n" not in str(error.value)


def test_a_row_that_dies_is_told_with_its_reason(bench):
    with pytest.raises(bench.UserError, match="adamw ended early: .*--block_size=200000 is longer than the data"):
        bench.main([*SMALL, "--optimizers=adamw", "--block_size=200000", "--batch_size=1", "--val_tokens=200000"])


def test_the_clock_of_modded_nanogpt_is_read(bench, tmp_path):
    script = tmp_path / "modded/records/track_3_optimization/train_gpt_simple.py"
    script.parent.mkdir(parents=True)
    script.write_text("import time\nfor i in range(60):\n    print(f'step:{i}/3250 train_time:{5 * (i > 0) + i / 4:.3f}s "
                      "step_avg:1.00ms', flush=True)\ntime.sleep(60)\n")
    assert "4,000 tokens/s, 250.0 ms/update of 1,000 tokens" in bench.modded(tmp_path / "modded", tmp_path / "run", updates=20, tokens=1000)


@pytest.mark.parametrize("script", ["train_gpt.py", "train_llama.py"])
def test_profile_writes_a_trace_of_three_updates(bench, script, capsys):
    fresh(script).main([*SMALL, "--compile=false", "--max_iters=8", "--threads=1", "--profile=true", "--run_name=a.b"])
    assert "profile: logs/a.b.trace.json has updates 4 to 6" in capsys.readouterr().out
    names = {event.get("name") for event in json.loads(Path("logs/a.b.trace.json").read_text())["traceEvents"]}
    assert {f"ProfilerStep#{i}" for i in (3, 4, 5)} <= names and "ProfilerStep#6" not in names and "aten::embedding" in names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.set_sync_debug_mode sees nothing without a GPU")
@pytest.mark.parametrize("optimizer, changes", [
    ("adamw", []), ("muon", []), ("muon-vs", []), ("muon-nsr", []), ("normuon", []),
    ("muon-vs", ["--activation_checkpointing=true", "--param_dtype=bfloat16", "--stochastic_rounding=true"])])
def test_no_host_synchronisation_inside_a_step(bench, optimizer, changes):
    t = fresh("train_gpt.py")
    evaluate, listen = t.evaluate, t.listen

    def evaluating(*args):
        torch.cuda.set_sync_debug_mode("default")
        return evaluate(*args)
    t.evaluate, t.listen = evaluating, lambda: torch.cuda.set_sync_debug_mode("error") or listen()  # the loop comes next
    try:
        t.main([*SMALL, "--device=cuda", "--compile=false", "--micro_batch_size=4", "--max_iters=6", "--log_interval=99",
                "--eval_interval=99", f"--optimizer={optimizer}", "--run_name=sync", *changes])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["adamw", "muon-vs"])
def test_suite_a_1_2b_fits_32_gb_on_each_of_8(optimizer):
    t = fresh("train_llama.py")
    t.configure(["--preset=suite-a-1.2b", f"--optimizer={optimizer}", "--activation_checkpointing=true", "--micro_batch_size=1"])
    with torch.device("meta"):
        model = t.Model(32000)
    assert sum(t.memory_estimate(model, world=8, gpu=True, bf16=True).values()) < 32e9


@pytest.mark.parametrize("script, changes", [
    ("train_gpt.py", ["--optimizer=adamw", "--vocab_size=4096"]),
    ("train_gpt.py", ["--optimizer=adamw", "--activation_checkpointing=true"]),
    ("train_llama.py", ["--optimizer=adamw", "--block_size=1024", "--batch_size=2", "--val_tokens=1024",
                        "--activation_checkpointing=true"]),
    ("train_gpt.py", ["--batch_size=1", "--n_embd=256", "--compile=false"]),
    ("train_gpt.py", ["--optimizer=adamw", "--block_size=64", "--batch_size=1", "--n_embd=384", "--compile=false"]),
    ("train_gpt.py", ["--optimizer=adamw", "--block_size=1024", "--batch_size=2", "--val_tokens=1024", "--vocab_size=4096",
                      "--compile=false"]),
    ("train_llama.py", ["--optimizer=adamw", "--batch_size=4", "--compile=false"]),
    ("train_llama.py", ["--optimizer=adamw", "--batch_size=4", "--dtype=float32", "--compile=false"]),
    ("train_llama.py", ["--optimizer=adamw", "--activation_checkpointing=true", "--batch_size=4", "--n_embd=256", "--compile=false"]),
    ("train_llama.py", ["--optimizer=adamw", "--activation_checkpointing=true", "--vocab_size=4096", "--compile=false"])])
def test_the_memory_estimate_is_within_a_tenth_of_the_measured_peak(bench, script, changes):
    """Of all tensors during three updates, by the profiler's allocator events; the case of one sequence is dominated by the
    optimizer, those of 4096 ids by the logits."""
    t, models = fresh(script), []
    build = t.build_optimizers

    t.build_optimizers = lambda model, *args: models.append(model) or build(model, *args)
    flags = ["--dataset=tiny", "--n_layer=4", "--n_embd=128", "--block_size=256", "--batch_size=16", "--dtype=bfloat16", "--device=cpu",
             "--max_iters=3", "--val_tokens=256", "--sample_tokens=0", "--run_name=memory"]
    t.Checkpoints.save = lambda *args: None  # copies of the state for a checkpoint come on top
    t.evaluate = lambda *args: (5.0, 0.0)  # it needs less than an update, and a graph of its own that takes long to compile
    gc.collect()  # tensors of an earlier test that are freed later would be subtracted
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        t.main([*flags, *changes])
    now = peak = 0
    for event in sorted((e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert "\ncompiled:" not in Path("logs/memory.txt").read_text()
    assert sum(t.memory_estimate(models[-1], world=1, gpu=False, bf16="--dtype=float32" not in changes).values()) == pytest.approx(
        peak, rel=0.1)


# ----------------------------------------------------------------------------------------------------------------------
# tools/bench_optim.py: no compiler is waited for, because the figures are not looked at

@pytest.fixture
def steps(monkeypatch):
    module = fresh("tools/bench_optim.py")
    monkeypatch.setitem(module.optim._compiled, None, "not in a test")
    return module


TINY = ["--shapes=16x32:2,32x16", "--rounds=2", "--warmup=1", "--device=cpu"]


def test_optimizers_are_timed_beside_each_other(steps):
    head, text = steps.main([*TINY, "--optimizers=torch,muon,muon-vs,normuon,adamw,torch-adamw"]).split("\n\n")
    assert "matrices: 2 × 16×32, 1 × 32×16 (0.0 M parameters, fp32)" in head
    assert "median of 2 rounds after 1 steps; ratio to torch.optim.Muon" in head
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(table) == ["torch.optim.Muon", "muon", "muon-vs", "normuon", "adamw", "torch.optim.AdamW (fused)"]
    assert table["torch.optim.Muon"]["ratio"] == "1.000"
    assert all(0 < float(row["ratio"]) < 1000 and float(row["ms"]) >= 0 for row in table.values())
    assert all(float(row["state MiB"]) == 0 for row in table.values())  # 1536 floats


def test_state_rate_and_order_of_the_rounds(steps, monkeypatch):
    calls, build = [], steps.build

    def building(name, *args):
        opt = build(name, *args)
        step = opt.step
        opt.step = lambda: (calls.append(name), step())
        return opt
    monkeypatch.setattr(steps, "build", building)
    text = steps.main(["--shapes=256x512", "--rounds=3", "--warmup=1", "--device=cpu", "--optimizers=muon,muon-vs,normuon"])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n\n")[1].splitlines()[2:]]
    assert [row[5] for row in cells] == ["0.5", "1.0", "0.5"]  # MiB of one buffer, two, one and a row's
    assert calls[-9:] == ["muon", "muon-vs", "normuon", "muon-vs", "normuon", "muon", "normuon", "muon", "muon-vs"]
    assert steps.standard_flops([(2, 3), (3, 2)]) == 2 * 5 * (2 * 2 * 2 * 3 + 2 * 2**3 + 2 * 2 * 2 * 3)
    multiply, flops = steps.product_seconds([(2, 3), (3, 2), (4, 4)], "cpu")
    assert multiply() is None and flops == (4 * 12 + 2 * 8) + (4 * 64 + 2 * 64)


def test_medians_of_optimizers_by_hand(steps, monkeypatch):
    """torch takes 1, 2, 6 ms in three rounds, ours 2, 8, 6 ms, the products 1, 1, 9 ms; two ranks have twice their rate."""
    times = {torch.optim.Muon: [1, 2, 6], steps.optim.Muon: [2, 8, 6], type(None): [1, 1, 9]}

    def seconds(device, function):
        monkeypatch.setattr(steps.optim, "_world", lambda: 2)
        return times[type(getattr(function, "__self__", None))].pop(0) / 1000
    monkeypatch.setattr(steps, "seconds", seconds)
    text = steps.main(["--shapes=256x512", "--rounds=3", "--warmup=1", "--device=cpu", "--optimizers=muon,torch"])
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()[-2:]]
    assert [row[1:5] for row in cells] == [["6.0", "2.000", "0.140", "42 %"], ["2.0", "1.000", "0.419", "125 %"]]
    assert "products of these shapes: 0.336 TFLOP/s" in text and "ratio to torch.optim.Muon" in text


def test_the_shapes_of_a_preset(steps):
    assert steps.parse_shapes("3x4:2,5x6") == [(3, 4), (3, 4), (5, 6)]
    assert steps.shapes_of("demo") == [(768, 256), (256, 256), (1024, 256), (256, 1024)] * 4
    assert steps.script_of("suite-a-130m").name == "train_llama.py"


@pytest.mark.parametrize("flags, message", [
    (["--optimizers=muon,moun"], "there is no optimizer moun"), (["--shapes=16x"], "is not a shape"), (["--shapes=16x0"], "is not a shape"),
    (["--shapes=16x16:0"], "is not a shape"), (["--preset=gtp2"], "there is no preset gtp2"), (["--preset=demo/adamw"], "no preset"),
    (["--round=3"], "--round=3 is not an option here"), (["--rounds=0"], "at least 1"), (["--warmup=0"], "at least 1"),
    (["--rounds=x"], "invalid int"), (["--device=tpu"], "invalid choice"), (["--optimizers=kj"], "needs --kj=PATH"),
    ([*TINY, "--kj=nowhere/muon.py"], "is not there"), ([*TINY, "--dion=nowhere"], "expected a clone of microsoft/dion"),
    ([*TINY, f"--kj={__file__}"], "has no attribute 'SingleDeviceMuon'; expected muon.py"),
    (["--overhead", "--preset=nothing"], "there is no preset nothing"), (["--nproc=2"], "torchrun that starts them"),
    (["--overhead", "--nproc=0"], "at least 1")])
def test_mistakes_with_optimizers_get_one_line(steps, monkeypatch, flags, message):
    monkeypatch.setitem(sys.modules, "dion", None)
    with pytest.raises(steps.UserError, match=re.escape(message)) as error:
        steps.main(flags)
    assert "\n" not in str(error.value)


def test_overhead_is_of_the_updates_after_the_first_ten(steps, tmp_path, monkeypatch):
    """The script is stubbed: it takes 1 s for the first ten updates and then 10 ms an update, muon-vs 11 ms."""
    ranks = []

    def run(command, **how):
        script = next(i for i, word in enumerate(command) if word.endswith(".py"))
        ranks.append(command[1:script])
        flags = dict(word[2:].split("=", 1) for word in command[script + 1:])
        ms, last = {"muon": 10, "muon-vs": 11}[flags["optimizer"]], int(flags["max_iters"])
        assert command[script].endswith("train_gpt.py") and last == 60 and flags["dataset"] == "tiny"
        assert Path(flags["checkpoint_dir"]).is_dir()
        log = Path(flags["log_dir"], flags["run_name"] + ".txt")
        log.parent.mkdir(exist_ok=True)
        log.write_text("--batch_size=4\n--block_size=25\n" + "".join(
            f"step:{step}/{last} val_loss:2.00000 train_time:{1 + (step - 10) * ms / 1000:.3f}s\n" for step in range(10, last + 1, 10))
            + "final val_loss:2.00000 peak_memory_mib:200 optimizer_state_mib:4.0 compile_time:1.0s\n")
        return steps.subprocess.CompletedProcess(command, 0)
    monkeypatch.setattr(steps.subprocess, "run", run)
    text = steps.main(["--overhead", "--preset=demo", "--updates=50", f"--out={tmp_path}", "--optimizers=muon,muon-vs", "--dataset=tiny"])
    assert text.splitlines()[-2:] == ["| muon | 10,000 (+0.0 %) | 10.0 (+0.0 %) | 200 (+0.0 %) | 4.0 (+0.0 %) |",
                                      "| muon-vs | 9,091 (-9.1 %) | 11.0 (+10.0 %) | 200 (+0.0 %) | 4.0 (+0.0 %) |"]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert steps.main(["--overhead", "--preset=demo", "--updates=50", f"--out={tmp_path}", "--optimizers=muon", "--dataset=tiny",
                       "--nproc=2"])
    assert ranks == [[], [], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]]
    failed = steps.subprocess.CompletedProcess([], 1, "", "warning\ntrain_gpt.py: no\n")
    monkeypatch.setattr(steps.subprocess, "run", lambda command, **how: failed)
    with pytest.raises(steps.UserError, match="train_gpt.py ended with status 1: train_gpt.py: no$"):
        steps.main(["--overhead", "--preset=demo", f"--out={tmp_path}"])
    failed.stderr = "train_gpt.py: error: too long\ntorchrun\n=====\n"
    with pytest.raises(steps.UserError, match="too long$"):
        steps.main(["--overhead", "--preset=demo", f"--out={tmp_path}"])


def test_cores_are_those_of_this_process(steps, monkeypatch):
    """Under taskset a rank has its share of what that leaves; macOS has no such call."""
    threads = []
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(steps.dist, "init_process_group", lambda backend: None)
    for variable, value in dict(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2").items():
        monkeypatch.setenv(variable, value)
    steps.main([*TINY, "--optimizers=muon"])
    assert threads == [3]
    monkeypatch.delattr(os, "sched_getaffinity")
    prepare = fresh("tools/bench_prepare.py")
    assert prepare.machine().startswith("64 cores of ")
    with pytest.raises(SystemExit) as end:
        prepare.main(["--help"])
    assert not end.value.code


# ----------------------------------------------------------------------------------------------------------------------
# the three as commands: mistakes, rows that hang, signals

@pytest.mark.parametrize("name, flags, message", [
    ("train", ["--rounds=x"], "--rounds: invalid int value: 'x'; see: python tools/bench_train.py --help"),
    ("train", ["--timeout=0"], "--timeout=0: expected minutes above 0"), ("train", ["--ranks"], "expected one argument; see: "),
    ("optim", ["--rounds=x"], "--rounds: invalid int value: 'x'; see: python tools/bench_optim.py --help"),
    ("optim", ["--overhead", "--preset=demo", f"--out={__file__}/x"], "/x: Not a directory; give one that can be written"),
    ("prepare", ["--mb=x"], "--mb: invalid int value: 'x'; see: python tools/bench_prepare.py --help"),
    ("prepare", ["--mb=0"], "found --mb=0 "), ("prepare", ["--repeat=0"], "--repeat=0 --workers="),
    ("prepare", ["--loader", "--log=nolog"], "--log=nolog is not a log with a step_avg"),
    ("prepare", ["--loader", f"--log={ROOT / 'conftest.py'}"], "is not a log with a step_avg"),
    ("prepare", ["--mb=1"], "the gpt2 vocabulary is neither cached nor downloadable")])
def test_mistakes_in_a_command_get_one_line(tmp_path, monkeypatch, capsys, name, flags, message):
    """As python runs it, but in this process: importing torch takes longer than all of these."""
    for variable, value in dict(TIKTOKEN_CACHE_DIR=str(tmp_path / "none"), HTTPS_PROXY="http://127.0.0.1:9",
                                https_proxy="http://127.0.0.1:9").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.delitem(sys.modules, "prepare", raising=False)  # it remembers tokenizers too
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"tools/bench_{name}.py", *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / f"tools/bench_{name}.py"), run_name="__main__")
    told = capsys.readouterr().err + ("" if end.value.code == 1 else f"{end.value.code}\n")  # a text is printed by python, with status 1
    assert told.startswith(f"bench_{name}.py: error: ") and message in told
    assert told.count("\n") == 1 and not list(tmp_path.iterdir())


def test_what_the_data_cost(tmp_path, monkeypatch, capsys):
    module = fresh("tools/bench_prepare.py")
    monkeypatch.setattr(module, "TOKENS", 1_000_000)
    module.main(["--loader"])
    lines = capsys.readouterr().out.splitlines()
    assert "training step of gpt-demo-muon-vs-seed1.txt: " in lines[0] and len(lines) == 10
    assert all(re.fullmatch(r"train_(gpt|llama)\.py \S+ +\d+ x +\d+ tokens: +[\d.]+ ms, [\d.]+ % of \d+ ms", line) for line in lines[1:])
    failed = module.subprocess.CompletedProcess([], 1, "", "progress\nprepare.py: no\n")
    monkeypatch.setattr(module.subprocess, "run", lambda command, **how: failed)
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(__version__="0", get_encoding=lambda name: types.SimpleNamespace(
        encode_ordinary=str.split, decode=None)))
    with pytest.raises(module.UserError, match="prepare.py ended with status 1: prepare.py: no$"):
        module.main(["--mb=1", "--repeat=1"])


def test_the_command_is_in_the_head(steps):
    flags = [*TINY, "--optimizers=muon", "--kj=a b"]
    assert steps.main(flags).splitlines()[0] == f"command: python tools/bench_optim.py {' '.join(flags[:-1])} '--kj=a b'"


def test_a_row_that_hangs_is_told(bench):
    with pytest.raises(bench.UserError, match="^adamw took longer than --timeout=0.002 minutes, give it more .*its last line: none$"):
        bench.main([*SMALL, "--optimizers=adamw", "--timeout=0.002"])


def test_modded_nanogpt_that_hangs_is_told_and_ended(bench, tmp_path):
    script = tmp_path / "modded/records/track_3_optimization/train_gpt_simple.py"
    script.parent.mkdir(parents=True)
    script.write_text("import time\nprint('compiling', flush=True)\ntime.sleep(600)\n")
    with pytest.raises(bench.UserError, match="train_gpt_simple.py took longer than --timeout=0.1 minutes"):
        bench.modded(tmp_path / "modded", tmp_path / "run", updates=20, tokens=1000, timeout=0.1)
    assert not with_word(tmp_path)


def with_word(word: Path) -> list[str]:
    """Ids of the processes whose command line has it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(word).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_bench_that_is_ended_leaves_no_rows(bench, tmp_path, number, status):
    """Of one rank, which waits for its turn when the signal comes, and of two ranks."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, str(ROOT / "tools/bench_train.py"), *SMALL, "--compile=false", "--optimizers=adamw", "--ranks=1,2"]
    process = subprocess.Popen([*command, "--rounds=999"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": str(folder)})
    lines = [process.stderr.readline() for _ in range(2)]
    assert "adamw x1: warm" in lines[0] and "adamw x2: warm" in lines[1] and len(with_word(folder)) >= 4
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    begin = time.monotonic()
    while with_word(folder) and time.monotonic() < begin + 30:
        time.sleep(0.1)
    assert process.returncode == status and not with_word(folder) and "Traceback" not in err
    assert number == signal.SIGKILL or not list(folder.glob("tmp*"))
