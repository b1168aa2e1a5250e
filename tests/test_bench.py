"""The benchmarks: clocks, medians and ratios against figures worked out by hand, and each tool once at a tiny size."""
import re, sys

import pandas as pd
import pytest
import torch

from common import ROOT, TINY, write_tiny

import bench_optim, bench_train

def test_each_codebases_clock():
    """20 updates: 5 s for the first ten, where scripts compile; then 100 ms each, but for one of 190."""
    ms = [500] * 10 + [100] * 5 + [190] + [100] * 4
    logs = {"ours": [f"step:{n}/600 train_time:{sum(ms[:n]) / 1000:.3f}s step_avg:1.0ms" for n in (0, 10, 20)],
            "modded": [f"step:{n}/50 train_time:{sum(ms[:n])}ms step_avg:1.0ms" for n in range(21)],
            "nanoGPT": [f"iter {n}: loss 5.5, time {ms[n]:.2f}ms, mfu 1.00%" for n in range(20)]}
    for name in logs:
        clock = bench_train.Clock()
        for line in ["compiling ...", *logs[name], "step 20: val loss 5.5"]:
            clock.read(line)
        assert clock.per_update(20) == pytest.approx(0.109), name

def test_ratios_are_taken_within_a_round():
    """The third round is ten times slower for all: no ratio changes."""
    seconds = pd.DataFrame({"base": [1, 1, 10, 2, 2], "muon": [2, 2, 20, 4, 4], "muon, before": [1, 1, 10, 2, 4]})
    lines = [re.split(r" {2,}", line.strip()) for line in bench_optim.summary(seconds, "base").splitlines()]
    assert lines[2] == ["muon", "4000.0 [2000.0, 4000.0]", "0.25", "2.000 [2.000, 2.000]", "2.000 [2.000, 2.000]"]
    assert lines[3][1:] == ["2000.0 [1000.0, 4000.0]", "0.50", "1.000 [1.000, 1.000]"]

def test_optimizers_of_two_versions(monkeypatch, capsys):
    monkeypatch.setattr(bench_optim, "matrices", lambda preset: [(48, 16), (16, 16)])
    flags = "--device=cpu --repeats=2 --variants muon-vs --ns_steps 5 3".split()
    monkeypatch.setattr(sys, "argv", ["bench_optim.py", *flags, f"--beside={ROOT}/optim.py"])
    with torch.compiler.set_stance("force_eager"):
        bench_optim.main()
    table = capsys.readouterr().out
    for name in "torch.optim.Muon", "muon-vs", "muon-vs, before", "muon-vs, 3 steps, before":
        assert re.search(rf"^{name} +\d", table, re.M), table

def test_presets_of_both_scripts():
    """The shapes are those of the paper's configuration, and each preset is timed with its own script."""
    assert bench_optim.matrices("gpt2-small") == 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    for flags, ranks, file in ("--preset=suite-b-210m", 8, "train_llama.py"), ("--n_layer=1", 1, "train_gpt.py"):
        row = bench_train.ours(ROOT, flags, ranks)
        assert (str(ROOT / file) in row, flags in row, "--nproc_per_node=8" in row) == (True, True, ranks == 8), row

PEER = '''
import numpy as np, pickle, signal, sys, time
flags, tokens = dict(flag[2:].split("=") for flag in sys.argv[1:]), np.fromfile("data/ours/train.bin", np.uint16)
assert len(tokens) == 2008 and tokens.max() < 63
assert pickle.load(open("data/ours/meta.pkl", "rb")) == {"vocab_size": 320}
assert [flags[name] for name in ("n_embd", "batch_size", "gradient_accumulation_steps")] == ["32", "4", "2"]
signals, n = [], 0
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
while not signals or n < 60:  # a second one would part torchrun from its ranks
    print(f"iter {n}: loss 5.5, time 250.00ms, mfu 1.00%")
    n, _ = n + 1, time.sleep(0.01)
open("HERE/signals", "w").write(str(len(signals)))
'''

def test_scripts_as_processes(tmp_path, monkeypatch, capsys):
    """Ours for real; the peer's stand-in checks that it got our model, batch and tokens."""
    write_tiny()
    (tmp_path / "train.py").write_text(PEER.replace("HERE", str(tmp_path)))
    flags = " ".join(f"--{name}={value}" for name, value in TINY.items() if name != "max_iters")
    monkeypatch.setattr(sys, "argv", ["bench_train.py", f"--ours={flags}", "--nanogpt=.", "--rounds=1", "--updates=10"])
    bench_train.main()
    assert re.search(r"^ours --dataset=tiny.* \d+\.\d \[.*\nnanoGPT +250\.0 \[", capsys.readouterr().out, re.M)
    assert (tmp_path / "signals").read_text() == "1"
