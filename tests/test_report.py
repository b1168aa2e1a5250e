"""
tools/report.py on logs written here: parsing, grouping, statistics by hand and against scipy, figures, records.

    python -m pytest tests/test_report.py        # a few seconds, needs scipy
"""

import csv
import json
import math
import os
import re
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from common import ROOT

stats = pytest.importorskip("scipy.stats")
import report  # noqa: E402

SEPARATOR = "=" * 100
SOURCE = '"""\nstep:800/800 val_loss:0.00001 train_time:1.000s\nfinal val_loss:0.0\n"""\nprint("a train script")\n'


def log_text(optimizer="muon", seed=1, losses=(5.0, 3.0, 2.0, 1.5, 1.2, 1.0), max_iters=500, ms=10.0, acc=0.5,
             sample="", **settings):
    """A finished log in the format of the train scripts, with len(losses) evaluations from step 0 to max_iters; the
    accuracy grows to acc in equal parts."""
    every = max_iters // (len(losses) - 1)
    env = {"python": "3.12", "device": "cpu", "world_size": 1, "started": "2025-01-01T00:00:00",
           "script": "train_gpt.py", "run_name": f"demo-{optimizer}-seed{seed}", "val_tokens_used": 65536,
           "data_checksum": "abcd1234"}
    flags = {"preset": "demo", "run_name": "", "resume": "", "dataset": "pysrc", "optimizer": optimizer, "seed": seed,
             "learning_rate": 0.01, "gamma": 1000.0, "max_iters": max_iters, "batch_size": 8, "block_size": 100}
    env |= {k: settings.pop(k) for k in list(settings) if k in env}
    lines = [f"step:0/{max_iters} val_loss:{losses[0]:.5f} train_time:0.000s val_acc:0.0040"]
    for i, loss in enumerate(losses[1:], 1):
        step = i * every
        clock = f"train_time:{step * ms / 1e3:.3f}s step_avg:{ms:.2f}ms"
        lines.append(f"step:{step}/{max_iters} train_loss:{loss:.5f} {clock} lr:0.0100000 mfu:n/a time_left:97s")
        lines.append(f"step:{step}/{max_iters} val_loss:{loss:.5f} {clock} "
                     f"val_acc:{acc * i / (len(losses) - 1):.4f}")
    lines.append(f"final val_loss:{losses[-1]:.5f} train_time:{max_iters * ms / 1e3:.3f}s step_avg:{ms:.2f}ms "
                 "peak_memory_mib:900 optimizer_state_mib:22.5")
    header = [f"{k}: {v}" for k, v in env.items()] + [f"--{k}={v}" for k, v in (flags | settings).items()]
    return f"\n{SEPARATOR}\n".join([SOURCE[:-1], "# optim", "\n".join(header), "\n".join(lines)]) + "\n" + sample


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Calls report.py in-process on tmp_path/logs -> (exit status, stdout, stderr); the report lies in tmp_path/out."""
    figures = report.figures

    def call(*args, logs=True, draw=False):
        monkeypatch.setattr(report, "figures", figures if draw else lambda *_: None)
        argv = ([str(tmp_path / "logs")] if logs else []) + ["--out", str(tmp_path / "out"), *map(str, args)]
        status = report.main(argv)
        return (status, *capsys.readouterr())
    return call


LOSSES = {  # final losses of three seeds
    "muon": (1.00, 1.04, 1.01), "muon-nsr": (0.97, 1.00, 0.99), "muon-vs": (0.98, 1.01, 0.97),
}


@pytest.fixture
def logs(tmp_path):
    for optimizer, finals in LOSSES.items():
        for seed, final in enumerate(finals, 1):
            losses = (5.0, 3.0, 2.0, 1.5, 1.2, final)
            write(tmp_path / "logs", f"{optimizer}-{seed}.txt", log_text(optimizer, seed, losses))
    return tmp_path / "logs"


# -----------------------------------------------------------------------------
# Reading

def test_reads_a_log(tmp_path, capsys):
    run = report.read_log("a.txt", log_text(sample="step:1/2 val_loss:9 in generated text\n"))
    assert run.budget == 500 and run.settings["gamma"] == "1000" and run.env["data_checksum"] == "abcd1234"
    assert run.source.startswith(SOURCE) and "optim" in run.source
    assert sorted(run.evals) == [0, 100, 200, 300, 400, 500]        # none from the source's docstring or the sample
    assert run.evals[500] == (1.0, 5.0, 0.5) and run.evals[100] == (3.0, 1.0, 0.1)
    assert run.memory == {"peak_memory_mib": 900, "optimizer_state_mib": 22.5}
    assert capsys.readouterr().err == ""


def test_edited_scripts_are_rows_of_their_own_if_asked_for(tmp_path, capsys):
    for seed in (1, 2):
        write(tmp_path / "logs", f"a-{seed}.txt", log_text("muon", seed))
        edited = log_text("muon", seed, started="2025-01-02T00:00:00").replace(SOURCE, SOURCE + "# relu²\n", 1)
        write(tmp_path / "logs", f"b-{seed}.txt", edited)
    runs = report.read_logs([tmp_path / "logs"])
    rows = report.build_experiments(runs, "muon", by_source=True)[0].rows
    assert [len(row.runs) for row in rows] == [2, 2] and len({row.label for row in rows}) == 2
    assert "; --by_source" not in capsys.readouterr().err
    assert [len(row.runs) for row in report.build_experiments(runs, "muon")[0].rows] == [2]
    assert "2 different sources; --by_source makes a row of each" in capsys.readouterr().err


def test_reads_modded_nanogpt(tmp_path):
    env = "Running Python 3.12\nRunning PyTorch 2.7\n| N/A   38C |\n"
    lines = ["step:0/250 val_loss:10.8258 train_time:0ms step_avg:nanms",
             "step:1/250 train_time:155ms step_avg:155.16ms",
             "step:125/250 val_loss:4.5872 train_time:11770ms step_avg:94.16ms",
             "step:250/250 val_loss:3.2760 train_time:23.548s step_avg:94.19ms",
             "peak memory allocated: 34761 MiB reserved: 49140 MiB", ""]
    path = write(tmp_path, "uuid.txt", "\n".join(["import torch", SEPARATOR, env, SEPARATOR, *lines]))
    run = report.read_log(path, path.read_text())
    assert [run.evals[s][:2] for s in (0, 125, 250)] == [(10.8258, 0), (4.5872, 11.77), (3.276, 23.548)]
    assert run.settings == {} and run.source == "import torch\n" and run.memory["peak_memory_mib"] == 34761


def test_modded_nanogpt_folders_are_rows(tmp_path, run):
    for folder, final in ("baseline", 3.28), ("faster", 3.27):
        for i in range(3):
            body = (f"step:0/100 val_loss:10.8 train_time:0ms step_avg:nanms\n"
                    f"step:100/100 val_loss:{final + i / 1000} train_time:9000ms\n")
            write(tmp_path / "logs", f"{folder}/{i}.txt", f"code of {folder}\n{SEPARATOR}\nenv\n{SEPARATOR}\n{body}")
    status, _, err = run("--baseline", "baseline")
    final = rows_of(tmp_path / "out/final.csv")
    assert status == 0 and [(r["optimizer"], r["n"]) for r in final] == [("baseline", "3"), ("faster", "3")]
    assert float(final[1]["Δ"]) == pytest.approx(0.01) and "6 logs without settings" in err
    assert rows_of(tmp_path / "out/paired.csv")[0]["n"] == "0"      # no seeds, nothing to pair


def test_modded_nanogpt_run_that_stopped_at_its_target(tmp_path, run):
    lines = ["step:0/200 val_loss:10.8 train_time:0ms", "step:125/200 val_loss:3.2794 train_time:900ms", ""]
    write(tmp_path / "logs/early", "a.txt", "\n".join(["code", SEPARATOR, "env", SEPARATOR, *lines]))
    _, _, err = run()
    assert "stops at step 125 of 200; counts as a run of so many steps" in err
    assert float(rows_of(tmp_path / "out/final.csv")[0]["val loss"]) == 3.2794


def test_resumed_run_later_line_wins(tmp_path, capsys):
    text = log_text(losses=(5.0, 3.0, 2.0, 1.5, 1.2, 1.0))
    head, tail = text.split("step:400/500 train_loss", 1)
    text = (head + "step:400/500 val_loss:7.00000 train_time:4.000s\nstep:450/500 val_loss:8.00000 train_time:4.500s\n"
            "step:460/500 train_lo\nresumed:step:400\nstep:400/500 train_loss" + tail)
    run = report.read_log("a.txt", text)
    assert run.evals[400][0] == 1.2 and 450 not in run.evals and run.evals[500][0] == 1.0
    assert "a.txt: a resumed run" in capsys.readouterr().err


def test_what_a_resumed_run_did_again_is_forgotten_from_its_first_line_on():
    """Also where it has other lines than before: no loss of the run that was lost stays among them."""
    figures = "train_time:1.000s train_loss:9.00000"
    text = log_text().split("step:0/500")[0] + "\n".join([
        "step:0/500 val_loss:5.00000 train_time:0.000s", f"step:100/500 val_loss:9.00000 {figures}", f"step:110/500 {figures}",
        "resumed:step:90", "step:100/500 train_time:1.000s train_loss:4.00000", "step:120/500 train_time:1.200s train_loss:3.00000\n"])
    run = report.read_log("a.txt", text)
    assert list(run.evals) == [0] and {step: loss for step, (loss, _) in run.train.items()} == {100: 4.0, 120: 3.0}


def test_a_run_that_ended_at_its_target_counts(tmp_path, run):
    write(tmp_path / "logs", "whole.txt", log_text("muon", 1))
    early = log_text("muon-vs", 1).replace("final val_loss:1.00000", "final val_loss:1.50000")
    write(tmp_path / "logs", "early.txt", re.sub(r"step:[45]00/500 .+\n", "", early))
    _, _, err = run("--baseline=muon")
    assert "early.txt: ended at step 300 of 500; counts as a run of so many steps" in err and "left out" not in err
    assert {row["optimizer"]: float(row["val loss"]) for row in rows_of(tmp_path / "out/final.csv")} == {"muon": 1.0, "muon-vs": 1.5}


def test_cost_by_hand(tmp_path, run):
    """Updates of 800 tokens in 10 and in 30 ms: 20 ms on average, and 1600 tokens in 40 ms; muon-vs takes 30 ms."""
    for optimizer, times in (("muon", (10.0, 30.0)), ("muon-vs", (30.0, 30.0))):
        for seed, ms in enumerate(times):
            write(tmp_path / "logs", f"{optimizer}{seed}.txt", log_text(optimizer, seed, ms=ms))
    run("--baseline=muon")
    muon, vs = rows_of(tmp_path / "out/cost.csv")
    assert [float(muon["tokens/s"]), float(vs["tokens/s"]), float(vs["excess %"])] == pytest.approx([40_000, 800 / 0.03, 50])


def test_a_run_resumed_with_other_settings_is_a_row_of_its_own(tmp_path, run, logs):
    for name, told in (("later", "400:dataset=my one,learning_rate=0.5"), ("two", "400:dataset=my two"), ("undone", "400:gamma=1")):
        resumed = f"resumed:step:400 world_size:1 code:changed changed:{told}\n"
        resumed += "resumed:step:400 world_size:1 code:same\n" * (name == "undone")
        text = log_text("muon", 3 if name != "undone" else 9, run_name=name)
        write(logs, f"{name}.txt", text.replace("step:500/500 train_loss", resumed + "step:500/500 train_loss"))
    _, _, err = run()
    assert "later.txt: a resumed run, whose code had changed" in err
    rows = {row["optimizer"]: row["n"] for row in rows_of(tmp_path / "out/final.csv")}
    assert rows["muon"] == "4"  # with the one that was started from its checkpoint again, without the change
    assert rows["muon resumed_with=400:dataset=my one,learning_rate=0.5"] == rows["muon resumed_with=400:dataset=my two"] == "1"


def test_numbers():
    assert [report.number(x) for x in ("18993ms", "1.5s", "1e-05", "n/a", "1.2step")] == [18.993, 1.5, 1e-5, None, None]
    assert math.isnan(report.number("nanms"))


@pytest.mark.parametrize("script", ["train_gpt.py", "train_llama.py"])
def test_the_globals_named_here_exist(script):
    with open(os.path.join(ROOT, script), encoding="utf-8") as f:
        assigned = re.findall(r"^(\w+) = ", f.read(), re.M)
    assert report.RUN | report.OPTIMIZER | set(report.SWEEPS) <= set(assigned)


# -----------------------------------------------------------------------------
# What is wrong with logs is named, never averaged

def test_log_cut_in_the_middle_of_a_line(tmp_path, run, logs):
    text = log_text("muon", 4)
    cut = text[:text.index("step:500/500 val_loss:1.0") + len("step:500/500 val_loss:1.0")]
    write(logs, "cut.txt", cut)
    _, _, err = run()
    assert "cut.txt: cut in the middle of its last line" in err
    assert "cut.txt: unfinished, evaluated up to step 400 of 500" in err
    assert rows_of(tmp_path / "out/final.csv")[0]["n"] == "3"


def test_duplicates_count_once(tmp_path, run, logs):
    write(logs, "copy-of-muon-1.txt", (logs / "muon-1.txt").read_text())
    write(logs, "longer-muon-2.txt", (logs / "muon-2.txt").read_text() + "more of the sample\n")
    _, _, err = run(logs / "muon-3.txt")
    assert err.count("the same run as") == 3
    assert rows_of(tmp_path / "out/final.csv")[0]["n"] == "3"


@pytest.mark.parametrize("cut", ["a.txt", "b.txt"])
def test_of_two_copies_the_longer_counts(tmp_path, run, cut):
    for name in "a.txt", "b.txt":
        text = log_text("muon", 1)
        write(tmp_path / "logs", name, text[:text.index("step:400/500")] if name == cut else text)
    status, _, err = run()
    assert status == 0 and "the longer log counts, once" in err and "unfinished" not in err


@pytest.mark.parametrize("name", ["logs.tar.xz", "logs.tgz"])
def test_an_archive_of_logs_is_a_folder(name, tmp_path, run, logs):
    run("--baseline", "muon")
    folder = (tmp_path / "out/final.csv").read_text()
    with tarfile.open(tmp_path / name, "w:xz" if "xz" in name else "w:gz") as archive:
        for log in logs.iterdir():
            archive.add(log, f"some/{log.name}")
    assert run(tmp_path / name, "--baseline", "muon", logs=False)[0] == 0
    assert (tmp_path / "out/final.csv").read_text() == folder


def test_repeated_seed_is_shown_apart(tmp_path, run, logs):
    again = dict(run_name="demo-muon-seed2-repeat", started="2025-01-02T00:00:00")
    write(logs, "again.txt", log_text("muon", 2, (5.0, 3.0, 2.0, 1.5, 1.2, 1.07), **again))
    _, _, err = run()
    assert "again.txt: repeats seed 2 of muon; only" in err and "muon-2.txt is averaged" in err
    assert float(rows_of(tmp_path / "out/final.csv")[0]["val loss"]) == pytest.approx(np.mean(LOSSES["muon"]))
    [repeat] = rows_of(tmp_path / "out/repeats.csv")
    assert repeat["seed"] == "2" and float(repeat["deviation"]) == pytest.approx(0.03)


def test_mixed_experiments_are_kept_apart(tmp_path, run, logs):
    write(logs, "other.txt", log_text("muon", 1, run_name="other", batch_size=16))
    _, _, err = run()
    assert "2 experiments, never mixed: gpt-demo (9 runs: batch_size=8); gpt-demo-2 (1 runs: batch_size=16)" in err
    assert [r["experiment"] for r in rows_of(tmp_path / "out/final.csv")] == ["gpt-demo"] * 3 + ["gpt-demo-2"]


def test_configurations_of_one_optimizer_are_rows(tmp_path, run, logs):
    for gamma in (1.0, 10.0):
        write(logs, f"g{gamma}.txt", log_text("muon-nsr", 1, run_name=f"g{gamma}", gamma=gamma))
    run(draw=True)
    labels = [r["optimizer"] for r in rows_of(tmp_path / "out/final.csv")]
    assert labels == ["muon", "muon-nsr gamma=1", "muon-nsr gamma=10", "muon-nsr gamma=1000", "muon-vs"]
    assert [p.name for p in (tmp_path / "out").glob("*sweep*.svg")] == ["gpt-demo-sweep-gamma.svg"]


@pytest.mark.parametrize("gamma, expected", [(1000.0, ["muon-nsr-post", "muon-nsr"]),
                                             (10.0, ["muon-nsr-post gamma=10", "muon-nsr gamma=1000"])])
def test_the_ordering_ablation_shows_gammas_that_differ(tmp_path, run, logs, gamma, expected):
    write(logs, "post.txt", log_text("muon-nsr-post", 1, run_name="post", gamma=gamma))
    run()
    assert [r["optimizer"] for r in rows_of(tmp_path / "out/final.csv") if "nsr" in r["optimizer"]] == expected


def test_what_wandb_keeps_is_no_log_and_a_diverged_run_has_no_perplexity(tmp_path, run, logs):
    write(logs, "wandb/run-1/files/output.log", "step:0/500 val_loss:5.0\nstep:500/500 val_loss:1.0\n")
    write(logs, "wandb/run-1/files/requirements.txt", "torch\n")
    write(logs, "far.txt", log_text("adamw", 1, (5.0, 9.0, 99.0, 300.0, 500.0, 812.5), run_name="far"))
    _, _, err = run()
    assert "wandb" not in err
    found = {r["optimizer"]: r for r in rows_of(tmp_path / "out/final.csv")}
    assert found["adamw"]["val ppl"] == "nan" and float(found["muon"]["val ppl"]) < 3 and len(found) == 4


def test_missing_baseline_is_named(tmp_path, run, logs):
    _, _, err = run("--baseline", "mion")
    assert "no run of the baseline 'mion' among muon, muon-nsr, muon-vs" in err
    assert rows_of(tmp_path / "out/final.csv")[0]["Δ"] == "nan"
    assert not (tmp_path / "out/speedup.csv").exists()


def test_mixed_devices_lose_their_times_and_memory(tmp_path, run, logs):
    """And peak memory; not the optimizer's state, which a rank has the same of on any device."""
    write(logs, "gpu.txt", log_text("muon", 4, device="NVIDIA H100"))
    _, _, err = run()
    assert "runs on NVIDIA H100 × 1 and cpu × 1; their times and peak memory are left out" in err
    assert {r["20 %"] for r in rows_of(tmp_path / "out/speedup.csv") if r["axis"] == "time"} == {"nan"}
    assert {(row["peak MiB"], row["state MiB"]) for row in rows_of(tmp_path / "out/cost.csv")} == {("nan", "22.5")}


def test_micro_batches_tell_times_apart_and_nothing_else(tmp_path, run, logs):
    """An update is the same whatever ranks and micro-batches compute it; memory is a rank's: of two each has half of the state."""
    write(logs, "two.txt", log_text("muon", 4, micro_batch_size=4, world_size="2"))
    _, _, err = run()
    assert "runs on cpu × 1 and cpu × 2, of unlike micro_batch_size; their times and memory are left out" in err
    assert "never mixed" not in err
    assert {row[key] for row in rows_of(tmp_path / "out/cost.csv") for key in ("peak MiB", "state MiB")} == {"nan"}
    assert [r["n"] for r in rows_of(tmp_path / "out/final.csv")][0] == "4"


def test_a_hyperparameter_that_a_fork_adds_makes_rows(tmp_path, run):
    """Of the section "optimizer" in the source that the log begins with; one that it adds elsewhere makes an experiment."""
    source = "# optimizer\nbeta3 = 0.9  # mine\ngrad_clip = 1.0\n# schedule\nwindow = 3\n"
    for i, (beta3, window) in enumerate([(0.9, 3), (0.5, 3), (0.9, 4)]):
        write(tmp_path / "logs", f"{i}.txt", log_text("muon", 1, beta3=beta3, window=window).replace(SOURCE, source))
    _, _, err = run()
    assert "2 experiments, never mixed: gpt-demo (2 runs: window=3); gpt-demo-2 (1 runs: window=4)" in err
    assert [r["optimizer"] for r in rows_of(tmp_path / "out/final.csv")][:2] == ["muon beta3=0.5", "muon beta3=0.9"]


def test_seeds_option_leaves_out_the_others(tmp_path, run, logs):
    run("--seeds", "1..2")
    assert {r["n"] for r in rows_of(tmp_path / "out/final.csv")} == {"2"}


@pytest.mark.parametrize("args, message", [
    ([], "no logs given"), (["nowhere"], "no log nowhere"), (["x", "--seeds=1-8"], "found --seeds=1-8; expected"),
    (["--frobnicate"], "unrecognized arguments"), (["--zeroshot", "nothing.json"], "cannot read 'nothing.json'")])
def test_mistakes_are_one_line(tmp_path, args, message):
    command = [sys.executable, os.path.join(ROOT, "tools/report.py"), *args]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("report.py: error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_missing_package_is_one_line(tmp_path, logs):
    write(tmp_path, "block/scipy.py", "raise ModuleNotFoundError(name='scipy')")
    command = [sys.executable, os.path.join(ROOT, "tools/report.py"), str(logs)]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "block")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and not (tmp_path / "report").exists()
    assert done.stderr == "report.py: error: package scipy is missing; tables and figures need it: pip install scipy\n"


# -----------------------------------------------------------------------------
# Statistics

def test_first_crossing_by_hand():
    x, loss = np.array([0.0, 100, 200, 300]), np.array([4.0, 2.0, 1.0, 1.5])
    assert report.first_crossing(x, loss, 3.0) == 50        # halfway from 4 to 2
    assert report.first_crossing(x, loss, 2.0) == 100       # an evaluation that meets it
    assert report.first_crossing(x, loss, 1.5) == 150       # the first crossing, not the last
    assert math.isnan(report.first_crossing(x, loss, 0.9))
    assert report.first_crossing(x, loss, 4.5) == 0


def test_interval_against_scipy_and_by_hand():
    x = np.array([1.0, 2.0, 4.0])
    mean, half = report.interval(x)
    low, high = stats.t.interval(0.95, 2, loc=x.mean(), scale=stats.sem(x))
    assert mean == pytest.approx(7 / 3) and (mean - half, mean + half) == pytest.approx((low, high), rel=1e-12)
    assert half == pytest.approx(4.302652729911275 * math.sqrt(7 / 3) / math.sqrt(3), rel=1e-9)     # t(0.975, 2)
    assert math.isnan(report.interval(x[:1])[1])


def test_paired_against_scipy(tmp_path, run, logs):
    run()
    for row in rows_of(tmp_path / "out/paired.csv"):
        a, b = np.array(LOSSES["muon"]), np.array(LOSSES[row["optimizer"]])
        result = stats.ttest_rel(a, b)
        interval = result.confidence_interval(0.95)
        assert row["n"] == "3" and float(row["p"]) == pytest.approx(result.pvalue, rel=1e-9)
        assert float(row["difference"]) == pytest.approx((a - b).mean())
        assert float(row["difference ±"]) == pytest.approx((interval.high - interval.low) / 2, rel=1e-9)


def test_pairs_only_common_seeds(tmp_path, run, logs):
    (logs / "muon-vs-2.txt").unlink()
    write(logs, "muon-vs-9.txt", log_text("muon-vs", 9))
    run()
    row = next(r for r in rows_of(tmp_path / "out/paired.csv") if r["optimizer"] == "muon-vs")
    assert row["n"] == "2" and float(row["difference"]) == pytest.approx(((1.00 - 0.98) + (1.01 - 0.97)) / 2)


def test_where_no_seed_is_common_the_columns_stay_in_place(tmp_path, run, logs):
    """The second experiment has nothing to pair, and its rows are below those of the first."""
    for optimizer, seed in ("muon", 1), ("muon-vs", 2):
        write(logs, f"other-{optimizer}.txt", log_text(optimizer, seed, run_name=f"other-{optimizer}", batch_size=16))
    run()
    with open(tmp_path / "out/paired.csv", newline="", encoding="utf-8") as f:
        assert {len(row) for row in csv.reader(f)} == {6}
    assert rows_of(tmp_path / "out/paired.csv")[-1] == {
        "experiment": "gpt-demo-2", "optimizer": "muon-vs", "n": "0", "difference": "nan", "difference ±": "nan", "p": "nan"}


def test_speedups_by_hand(tmp_path, run):
    """Of the mean curves over two seeds, one above and one below, and of their mean times."""
    for optimizer, ms, apart, curve in (("muon", 14.0, 0.5, (3.0, 2.0, 1.5, 1.2, 1.0)),
                                        ("muon-vs", 28.0, -0.4, (2.0, 1.2, 1.1, 1.1, 1.1))):
        for seed, sign in (1, 1), (2, -1):
            losses = (5.0, *(loss + sign * apart for loss in curve))
            text = log_text(optimizer, seed, losses, ms=ms + 10 * sign * apart, acc=0.55 + 0.05 * sign)
            write(tmp_path / "logs", f"{optimizer}-{seed}.txt", text)
    run()
    target, steps, time = rows_of(tmp_path / "out/speedup.csv")
    assert [target[f"{p} %"] for p in report.CHECKPOINTS] == ["3.0000", "2.0000", "1.5000", "1.2000", "1.0000"]
    by_hand = [100 / (200 / 3), 200 / 100, 300 / 162.5, 400 / 200, math.nan]
    assert [float(steps[f"{p} %"]) for p in report.CHECKPOINTS] == pytest.approx(by_hand, nan_ok=True)
    assert [float(time[f"{p} %"]) for p in report.CHECKPOINTS] == pytest.approx([x / 2 for x in by_hand], nan_ok=True)
    assert "| muon-vs | steps | 1.50 | 2.00 | 1.85 | 2.00 | – |" in (tmp_path / "out/report.md").read_text()
    baseline, other = rows_of(tmp_path / "out/cost.csv")
    assert baseline["excess %"] == "nan" and float(other["excess %"]) == pytest.approx(100)     # twice the time
    assert [float(r["top-1 acc"]) for r in rows_of(tmp_path / "out/final.csv")] == pytest.approx([0.55, 0.55])
    assert float(rows_of(tmp_path / "out/curves.csv")[1]["top-1 acc"]) == pytest.approx(0.11)   # a fifth of it at 20 %


def test_training_loss_is_smoothed_and_reaches_the_last_of_the_baseline(tmp_path, run, monkeypatch):
    """At steps 0, 100 and 300 with a half-life of 100 updates a loss weighs a half after 100 and an eighth after 300."""
    monkeypatch.setattr(report, "HALF_LIFE", 1 / 3)
    loss = np.array([[8.0, 4.0, 1.0]])
    by_hand = [8, (8 / 2 + 4) / (1 / 2 + 1), (8 / 8 + 4 / 4 + 1) / (1 / 8 + 1 / 4 + 1)]
    np.testing.assert_allclose(report.smooth(np.array([0, 100, 300]), loss), [by_hand], rtol=1e-14)
    monkeypatch.setattr(report, "HALF_LIFE", 1e-9)
    for optimizer, ms, losses in ("muon", 14.0, (5, 3, 2, 1.5, 1.2, 1)), ("muon-vs", 28.0, (5, 2, 1.2, 1.1, 1, 0.9)):
        write(tmp_path / "logs", f"{optimizer}.txt", log_text(optimizer, 1, losses, ms=ms))
    run()
    baseline, other = rows_of(tmp_path / "out/train.csv")
    assert (float(baseline["train loss"]), baseline["in steps"]) == (1, "nan")
    assert [float(other[k]) for k in ("train loss", "in steps", "in time")] == pytest.approx([0.9, 500 / 400, 500 / 400 / 2])


def test_the_training_target_is_the_baselines_last_loss_not_its_lowest(tmp_path, run, monkeypatch):
    monkeypatch.setattr(report, "HALF_LIFE", 1e-9)
    for optimizer, losses in ("muon", (5, 3, 2, 0.5, 1.2, 1)), ("muon-vs", (5, 2, 1.2, 1.1, 1, 0.9)):
        write(tmp_path / "logs", f"{optimizer}.txt", log_text(optimizer, 1, losses))
    run()
    muon_vs = rows_of(tmp_path / "out/train.csv")[1]
    assert float(muon_vs["in steps"]) == pytest.approx((200 + 100 / 1.5) / 400)  # muon is at 1 for the first time there, between 2 and 0.5


def test_seeds_that_were_evaluated_at_other_steps_share_the_common_ones(tmp_path, run):
    for seed, losses in (1, range(12, 1, -1)), (2, range(12, 1, -2)):  # every 50 and every 100 updates
        write(tmp_path / "logs", f"{seed}.txt", log_text("muon", seed, tuple(map(float, losses))))
    row = report.build_rows(report.read_logs([tmp_path / "logs"]))[0]
    assert row.steps.tolist() == [0, 100, 200, 300, 400, 500] and row.train.steps.tolist() == row.steps.tolist()[1:]
    assert row.loss.tolist() == [[12, 10, 8, 6, 4, 2]] * 2


def test_validation_curves_are_smoothed_on_request(tmp_path, run, monkeypatch):
    """By hand, with a half-life of 100 updates: at 0, 100 and 200 muon's curve is 8, 16/3, 20/7 and muon-vs's 8, 4, 16/7, which is at
    20/7 after 500/3. Tables of losses hold what was measured."""
    monkeypatch.setattr(report, "HALF_LIFE", 1 / 2)
    for optimizer, losses in ("muon", (8, 4, 1)), ("muon-vs", (8, 2, 1)):
        write(tmp_path / "logs", f"{optimizer}.txt", log_text(optimizer, 1, losses, max_iters=200))
    run("--smooth", draw=True)
    target, steps, _ = rows_of(tmp_path / "out/speedup.csv")
    assert [float(row["100 %"]) for row in (target, steps)] == pytest.approx([20 / 7, 1.2], rel=1e-4)  # the target is of 4 digits
    assert float(rows_of(tmp_path / "out/final.csv")[0]["val loss"]) == float(rows_of(tmp_path / "out/checkpoints.csv")[0]["100 %"]) == 1
    assert "validation loss, smoothed" in (tmp_path / "out/gpt-demo-loss-steps.svg").read_text()
    assert "of the mean curves (exponential mean over evaluations, half-life 5 %" in (tmp_path / "out/report.md").read_text()
    run()
    assert float(rows_of(tmp_path / "out/speedup.csv")[0]["100 %"]) == 1


def test_the_baseline_reaches_its_own_targets(tmp_path, run, monkeypatch):
    """Of eight seeds, whose mean numpy sums pairwise where they are alone and one by one where they are a curve: here that is more."""
    monkeypatch.setattr(report, "HALF_LIFE", 1e-9)
    finals = next(x for x in (1 + np.random.default_rng(1).random((1000, 8))).round(5) if x.mean() < sum(x) / 8)
    for optimizer, gain in ("muon", 0), ("muon-vs", 1):
        for i, final in enumerate(finals, 1):
            write(tmp_path / "logs", f"{optimizer}-{i}.txt", log_text(optimizer, i, (9, 8, 7, 6, 5, final - gain)))
    run()
    assert math.isfinite(float(rows_of(tmp_path / "out/train.csv")[1]["in steps"]))
    assert math.isfinite(float(rows_of(tmp_path / "out/speedup.csv")[1]["100 %"]))


def test_smoothing_over_unlike_lines_is_told(tmp_path, run, logs):
    write(logs, "rare.txt", log_text("muon", 4, log_interval=20))
    assert "log_interval is 20 and None; training losses smoothed over unlike lines do not compare" in run()[2]


def test_logs_without_training_losses_have_no_table_of_them(tmp_path, run, logs):
    for path in logs.iterdir():
        path.write_text("".join(line for line in path.open() if "train_loss" not in line))
    run(draw=True)
    assert not (tmp_path / "out/train.csv").exists() and (tmp_path / "out/speedup.csv").exists()
    assert not (tmp_path / "out/gpt-demo-train-loss-time.svg").exists()


def test_losses_at_checkpoints_lie_on_the_line_between_evaluations(tmp_path, run):
    write(tmp_path / "logs", "a.txt", log_text("muon", 1, (5.0, 3.0, 2.0)))     # at steps 0, 250 and 500
    run()
    [row] = rows_of(tmp_path / "out/checkpoints.csv")
    assert [float(row[f"{p} %"]) for p in report.CHECKPOINTS] == pytest.approx([4.2, 3.4, 2.8, 2.4, 2.0])


def test_the_baseline_is_the_configuration_with_most_seeds_then_the_best(tmp_path, run):
    for lr, finals in (0.01, (1.3, 1.3)), (0.02, (1.1, 1.1)), (0.03, (0.9,)):
        for seed, final in enumerate(finals, 1):
            name = f"lr{lr}-seed{seed}"
            write(tmp_path / "logs", f"{name}.txt", log_text("muon", seed, (5.0, final), run_name=name, learning_rate=lr))
    _, _, err = run()
    assert "3 configurations of muon; the baseline is 'muon learning_rate=0.02'" in err
    assert [float(r["Δ"]) for r in rows_of(tmp_path / "out/final.csv")] == pytest.approx([-0.2, math.nan, 0.2], nan_ok=True)


def test_a_configuration_that_diverged_is_not_the_baseline(tmp_path, run):
    for lr, finals in (0.01, (1.1,)), (0.02, (1.0, math.nan)), (0.03, (math.nan,)):
        for seed, final in enumerate(finals, 1):
            name = f"lr{lr}-seed{seed}"
            write(tmp_path / "logs", f"{name}.txt", log_text("muon", seed, (5.0, final), run_name=name, learning_rate=lr))
    write(tmp_path / "logs", "vs.txt", log_text("muon-vs", 1, (5.0, 1.0)))
    assert "3 configurations of muon; the baseline is 'muon learning_rate=0.01'" in run()[2]
    assert float(rows_of(tmp_path / "out/final.csv")[-1]["Δ"]) == pytest.approx(0.1)


def test_before_the_first_evaluation_there_is_no_loss(tmp_path, run):
    for optimizer in "muon", "muon-vs":     # evaluated at steps 250 and 500 only
        lines = log_text(optimizer, 1, (5.0, 3.0, 2.0)).splitlines(keepends=True)
        write(tmp_path / "logs", f"{optimizer}.txt", "".join(line for line in lines if not line.startswith("step:0/")))
    run()
    losses, targets = rows_of(tmp_path / "out/checkpoints.csv")[0], rows_of(tmp_path / "out/speedup.csv")[0]
    assert [losses[f"{p} %"] for p in report.CHECKPOINTS[:3]] == ["nan", "nan", "2.8"]
    assert [targets[f"{p} %"] for p in report.CHECKPOINTS[:3]] == ["–", "–", "2.8000"]
    assert "| target loss |  | – | – | 2.8000 |" in (tmp_path / "out/report.md").read_text()


def test_tables_and_figures(tmp_path, run, logs, monkeypatch):
    bands, axes = [], pytest.importorskip("matplotlib.axes").Axes
    monkeypatch.setattr(axes, "fill_between", lambda ax, x, low, high, **how: bands.append(high - low))
    _, out, _ = run(draw=True)
    assert out.startswith("wrote ") and out.endswith("report.md\n")
    first, second, _ = rows_of(tmp_path / "out/final.csv")
    assert float(first["val ppl"]) == pytest.approx(math.exp(np.mean(LOSSES["muon"])))
    assert float(second["Δ"]) == pytest.approx(np.mean(LOSSES["muon"]) - np.mean(LOSSES["muon-nsr"]))
    cost = rows_of(tmp_path / "out/cost.csv")[0]
    assert [float(cost[k]) for k in ("tokens/s", "ms/update", "peak MiB", "state MiB")] == pytest.approx(
        [8 * 100 / 0.010, 10, 900, 22.5])
    checkpoints = rows_of(tmp_path / "out/checkpoints.csv")[0]
    half = stats.t.ppf(0.975, 2) * np.std(LOSSES["muon"], ddof=1) / math.sqrt(3)
    assert float(checkpoints["40 %"]) == 2.0 and float(checkpoints["100 % ±"]) == pytest.approx(half)
    assert bands[0] == pytest.approx([0, 0, 0, 0, 2 * half])        # muon's losses over steps: the seeds differ in the last
    assert len(rows_of(tmp_path / "out/curves.csv")) == 3 * 6
    markdown = (tmp_path / "out/report.md").read_text()
    assert "| muon-nsr | 3 | **0.9867 ± 0.0379** |" in markdown         # the lowest mean is bold
    for figure in "loss-steps", "loss-time", "loss-last-third", "accuracy-steps", "train-loss-time":
        assert (tmp_path / f"out/gpt-demo-{figure}.png").stat().st_size > 5000
        assert "<svg" in (tmp_path / f"out/gpt-demo-{figure}.svg").read_text()
        assert f"(gpt-demo-{figure}.svg)" in markdown


def test_a_report_without_a_baseline_leaves_no_table_of_the_one_before(tmp_path, run, logs):
    write(tmp_path / "out", "mine.csv", "not of report.py")
    run()
    made = {path.stem for path in (tmp_path / "out").glob("*.csv")}
    assert made - {"mine"} <= report.TABLES and {"speedup", "paired", "train"} <= made
    run("--baseline", "none")
    assert made - {path.stem for path in (tmp_path / "out").glob("*.csv")} == {"speedup", "paired", "train"}


def test_a_report_removes_no_tables_but_those_of_a_report_before(tmp_path, run, logs):
    write(tmp_path / "out", "train.csv", "mine")  # no report.md beside it
    run("--baseline", "none")
    assert (tmp_path / "out/train.csv").read_text() == "mine"
    run()
    before = {path.name for path in (tmp_path / "out").glob("*.csv")}
    run("--zeroshot", write(tmp_path, "a.json", harness({"piqa": 0.6})), logs=False)
    assert before | {"zeroshot.csv"} == {path.name for path in (tmp_path / "out").glob("*.csv")}


def test_same_logs_make_the_same_report(tmp_path, run, logs):
    run(draw=True)
    first = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    run(draw=True)
    assert first == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}


def test_diverged_run_is_not_hidden(tmp_path, run, logs):
    write(logs, "muon-vs-1.txt", log_text("muon-vs", 1, (5.0, 3.0, 2.0, 1.5, 1.2, math.nan)))
    _, _, err = run()
    assert "diverged" in err and "| muon-vs | 3 | – |" in (tmp_path / "out/report.md").read_text()


# -----------------------------------------------------------------------------
# Records

def record_logs(folder, n=8, losses=(1.10, 1.12), **settings):
    target_env = {k: v for k, v in report.RECORD["task"].items() if k != "script"}
    for seed in range(1, n + 1):
        final = losses[seed % 2]
        write(folder, f"r{seed}.txt", log_text("muon-vs", seed, (5.0, 3.0, final), **(target_env | settings)))


def test_record_passes(tmp_path, run):
    record_logs(tmp_path / "logs")
    status, out, _ = run("--check-record")
    p = stats.ttest_1samp([1.10, 1.12] * 4, report.RECORD["target"], alternative="less").pvalue
    assert status == 0 and "FAIL" not in out and f"p = {p:.2g}" in out and "a record: train_time 5.0" in out


@pytest.mark.parametrize("more", [["--seeds=1..8"], ["--zeroshot", "a.json"]])
def test_a_record_is_checked_alone(tmp_path, run, more):
    record_logs(tmp_path / "logs")
    with pytest.raises(report.UserError, match="--check-record checks all of LOGS"):
        run("--check-record", *more)


@pytest.mark.parametrize("change, rule", [
    (dict(n=7), "seeds"), (dict(losses=(1.10, 1.22)), "target"), (dict(dataset="other"), "task"),
    (dict(data_checksum="0-0"), "task"), (dict(world_size=2), "settings"), (dict(gamma=1.0), "settings")])
def test_record_fails(tmp_path, run, change, rule):
    record_logs(tmp_path / "logs", **({} if rule == "settings" else change))
    if rule == "settings":      # of one log only
        record_logs(tmp_path / "logs", n=1, **change)
    status, out, _ = run("--check-record")
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    sentence = report.RULES[rule].format(**report.RECORD, **report.RECORD["task"])
    assert status == 1 and len(failed) == 1 and sentence in failed[0] and out.count("pass  ") == len(report.RULES) - 1


def test_record_wants_whole_equal_logs(tmp_path, run):
    record_logs(tmp_path / "logs")
    path = tmp_path / "logs/r1.txt"
    path.write_text(path.read_text().replace("# optim", "# another optim").replace("device: cpu", "device: H200")
                    .replace("step:500/500 train_loss", "resumed:step:250\nstep:500/500 train_loss"))
    (tmp_path / "logs/r2.txt").write_text((tmp_path / "logs/r2.txt").read_text()[:-300])
    status, out, _ = run("--check-record")
    failed = [name for name, rule in report.RULES.items() if f"FAIL  {rule[:14]}" in out]
    assert status == 1 and failed == ["whole", "source", "settings", "seeds"]


# -----------------------------------------------------------------------------
# Zero-shot

def harness(scores, model="checkpoints/hf/muon", shots=0):
    """A results file as lm-eval-harness 0.4.11 writes it: every task with all its metrics."""
    results = {t: {"alias": t, "acc,none": s, "acc_stderr,none": 0.01} for t, s in scores.items()}
    for task in set(results) & {"arc_easy", "hellaswag", "piqa"}:
        results[task] |= {"acc,none": 0.0, "acc_norm,none": scores[task]}
    if "record" in results:
        results["record"] = {"alias": "record", "f1,none": scores["record"], "em,none": 0.0}
    return json.dumps({"results": results, "model_name": model, "n-shot": dict.fromkeys(scores, shots),
                       "versions": {t: float(report.ZEROSHOT[t][2]) for t in scores},
                       "n-samples": {t: {"original": 100, "effective": 100} for t in scores}})


PAPER = dict(zip(report.ZEROSHOT, (0.3695, 0.2808, 0.2486, 0.5985, 0.2565, 0.5290, 0.5018, 0.2277, 0.4099, 0.5130)))


def test_zeroshot_table_reproduces_the_papers_average(tmp_path, run):
    a = write(tmp_path, "a.json", harness(PAPER))       # Llama-130M, Muon
    b = write(tmp_path, "b.json", harness({"race": 0.5}, shots=5))
    _, _, err = run("--zeroshot", a, f"vs={b}", logs=False)
    rows = rows_of(tmp_path / "out/zeroshot.csv")
    assert [r["task"] for r in rows] == [f"{t} ({m})" for t, m, _ in report.ZEROSHOT.values()] + ["Average"]
    assert round(float(rows[-1]["muon"]), 2) == 39.35 and rows[-1]["vs"] == "nan"
    assert "vs: no result of arc_easy" in err and "race has shots 5, the paper's has 0" in err
    assert "| ReCoRD (f1) | 52.90 | – |" in (tmp_path / "out/report.md").read_text()


def test_zeroshot_tasks_of_two_files_add_up_and_never_overwrite(tmp_path, run):
    a = write(tmp_path, "a.json", harness({"race": 0.2}))
    b = write(tmp_path, "b.json", harness({"piqa": 0.4}))
    run("--zeroshot", a, b, logs=False)
    assert [r["muon"] for r in rows_of(tmp_path / "out/zeroshot.csv") if r["muon"] != "nan"] == ["40.0", "20.0"]
    with pytest.raises(report.UserError, match="was in an earlier file"):
        run("--zeroshot", a, a, logs=False)
    with pytest.raises(report.UserError, match="holds no results"):
        run("--zeroshot", write(tmp_path, "c.json", "{}"), logs=False)


# -----------------------------------------------------------------------------
# Findings of a review

def test_parameters_in_bf16_are_configurations_that_are_compared_over_common_seeds(tmp_path, run):
    finals = {("float32", False): (1.00, 1.04, 1.01), ("bfloat16", False): (1.02, 1.07, 1.05), ("bfloat16", True): (1.01, 1.06)}
    for (dtype, rounding), losses in finals.items():
        for seed, final in enumerate(losses, 1):
            write(tmp_path / "logs", f"{dtype}-{rounding}-{seed}.txt", log_text(
                "muon-vs", seed, (5.0, 2.0, final), run_name=f"{dtype}{rounding}{seed}", param_dtype=dtype, stochastic_rounding=rounding))
    run("--baseline", "muon-vs param_dtype=float32 stochastic_rounding=False")
    found = {row["optimizer"]: (row["n"], float(row["difference"])) for row in rows_of(tmp_path / "out/paired.csv")}
    assert found == {"muon-vs param_dtype=bfloat16 stochastic_rounding=False": ("3", pytest.approx(-0.03)),
                     "muon-vs param_dtype=bfloat16 stochastic_rounding=True": ("2", pytest.approx(-0.015))}


@pytest.mark.parametrize("seeds, message", [
    ("8..1", "found --seeds=8..1; expected"), ("1,3..2", "found --seeds=1,3..2; expected"),
    ("7..9", "--seeds selects none of the logs; found seeds 1, 2, 3")])
def test_seeds_that_select_nothing_are_a_mistake(tmp_path, run, logs, seeds, message):
    with pytest.raises(report.UserError, match=re.escape(message)):
        run("--seeds", seeds)
    lines = "step:0/9 val_loss:9.0 train_time:0ms\nstep:9/9 val_loss:2.0 train_time:900ms\n"
    modded = write(tmp_path, "modded.txt", "\n".join(["code", SEPARATOR, "env", SEPARATOR, lines]))
    with pytest.raises(report.UserError, match="--seeds selects none of the logs; found no seed in them"):
        report.main([str(modded), "--seeds=1"])


@pytest.mark.parametrize("args, message", [
    (["logs", "--out=file"], "--out=file is, or is in, a file; expected a folder"),
    (["logs", "--out=file/x"], "--out=file/x is, or is in, a file"),
    (["cut.tar.xz"], "cut.tar.xz is cut or damaged (Compressed file ended"), (["bad.tar.xz"], "bad.tar.xz is cut or damaged"),
    (["--zeroshot", "list.json"], "list.json holds no results; expected what lm_eval"),
    (["--zeroshot", "other.json"], "other.json holds no results"),
    (["--zeroshot", "score.json"], "score.json: acc of race is 'N/A'; expected a number")])
def test_files_that_cannot_be_read_or_written_get_one_line(tmp_path, monkeypatch, logs, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    with tarfile.open("whole.tar.xz", "w:xz") as archive:
        archive.add("logs")
    whole, scores = (tmp_path / "whole.tar.xz").read_bytes(), harness({"race": 0.2})
    (tmp_path / "cut.tar.xz").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "bad.tar.xz").write_bytes(whole[:500] + bytes(200) + whole[700:])
    for name, text in {"file": "", "list.json": '{"results": [], "versions": {}, "n-shot": {}, "n-samples": {}}', "other.json": "[1]",
                       "score.json": scores.replace("0.2", '"N/A"')}.items():
        write(tmp_path, name, text)
    monkeypatch.setattr(sys, "argv", ["report.py", *args])
    assert report.cli() == 1
    err = capsys.readouterr().err
    assert err.startswith("report.py: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("change, found", [
    (dict(seed=9), "8 runs of the seeds 1, 2, 3, 4, 5, 6, 7, 9"), (dict(threads=2), "threads differ"),
    (dict(profile=True), "profile differ"),
    (dict(log_interval=99), "log_interval differ"), (dict(wandb="x"), "wandb differ"), (dict(torch="2.9.1"), "torch differ")])
def test_a_record_leaves_out_no_seed_and_shares_all_settings(tmp_path, run, change, found):
    record_logs(tmp_path / "logs", n=7)
    record = {k: v for k, v in report.RECORD["task"].items() if k != "script"}
    text = log_text("muon-vs", **{"seed": 8, "losses": (5.0, 3.0, 1.10), **record, **change}, log_dir="x", data_dir="y")
    write(tmp_path / "logs", "r8.txt", text.replace("--torch=", "torch: "))
    status, out, _ = run("--check-record")
    failed = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert status == 1 and len(failed) == 1 and failed[0].endswith(f"[{found}]")


def test_a_mean_below_the_target_may_be_luck(tmp_path, run):
    record_logs(tmp_path / "logs", losses=(1.084, 1.156))       # p = 0.03
    status, out, _ = run("--check-record")
    assert status == 1 and [line[:30] for line in out.splitlines() if line.startswith("FAIL")] == ["FAIL  Mean final validation lo"]


def test_zeroshot_of_another_version_or_of_a_part_is_told(tmp_path, run):
    data = json.loads(harness({"race": 0.5, "piqa": 0.5}))
    data["versions"]["race"], data["n-samples"]["piqa"]["effective"] = 1.0, 10
    _, _, err = run("--zeroshot", write(tmp_path, "a.json", json.dumps(data)), logs=False)
    assert "race has version 1.0, the paper's has 2" in err and "piqa has samples 10, the paper's has 100" in err


def test_what_the_figures_and_the_curves_hold(tmp_path, run, logs, monkeypatch):
    drawn, bars, axes = [], [], pytest.importorskip("matplotlib.axes").Axes
    plot, errorbar = axes.plot, axes.errorbar
    monkeypatch.setattr(axes, "plot", lambda ax, x, y, *more, **how: drawn.append((x, y)) or plot(ax, x, y, *more, **how))
    monkeypatch.setattr(axes, "errorbar", lambda ax, x, y, *more, **how: bars.append((x, y)) or errorbar(ax, x, y, *more, **how))
    write(logs, "g.txt", log_text("muon-nsr", 1, (5.0, 3.0, 2.0, 1.5, 1.2, 1.3), run_name="g", gamma=1.0))
    run(draw=True)
    mean, half = np.mean(LOSSES["muon"]), stats.t.ppf(0.975, 2) * np.std(LOSSES["muon"], ddof=1) / math.sqrt(3)
    steps, time, last, accuracy, train = drawn[:20:4]        # five figures of four rows, muon's the first
    for (x, y), a, b in ((steps, [100, 200, 300, 400, 500], [3, 2, 1.5, 1.2, mean]), (time, [1, 2, 3, 4, 5], [3, 2, 1.5, 1.2, mean]),
                         (last, [400, 500], [1.2, mean]), (accuracy, [100, 200, 300, 400, 500], [0.1, 0.2, 0.3, 0.4, 0.5])):
        assert (list(x), list(y)) == (pytest.approx(a), pytest.approx(b))
    assert list(train[0]) == pytest.approx([1, 2, 3, 4, 5]) and train[1][1] == pytest.approx((3 / 16 + 2) / (1 / 16 + 1))  # four half-lives
    assert [list(x) for x in bars[0]] == [[1, 1000], pytest.approx([1.3, np.mean(LOSSES["muon-nsr"])])]
    row = rows_of(tmp_path / "out/curves.csv")[5]
    assert [float(row[k]) for k in ("step", "train time", "val loss", "val loss ±")] == pytest.approx([500, 5, mean, half])


def test_a_finished_run_that_was_prolonged_is_read_to_its_end(capsys):
    text = log_text(sample="a sample\n") + ("resumed:step:500\nstep:600/600 val_loss:0.90000 train_time:6.000s val_acc:0.6000\n"
                                            "final val_loss:0.90000 peak_memory_mib:950\n")
    run = report.read_log("a.txt", text)
    assert (run.budget, run.final_loss, run.memory["peak_memory_mib"]) == (600, 0.9, 950)


def test_compiled_or_not_tells_times_apart(tmp_path, run, logs):
    write(logs, "eager.txt", log_text("muon", 4, compile=False))
    assert "of unlike compile; their times and peak memory are left out" in run()[2]
    cost = rows_of(tmp_path / "out/cost.csv")[0]
    assert cost["ms/update"] == cost["peak MiB"] == "nan" and float(cost["state MiB"]) == 22.5


def test_shares_are_of_the_baselines_budget_and_no_curve_goes_on_behind_its_end(tmp_path, run):
    for folder, steps in ("a", 100), ("b", 200), ("c", 300):
        lines = [f"step:0/{steps} val_loss:10.0 train_time:0ms", f"step:{steps}/{steps} val_loss:2.0 train_time:900ms", ""]
        write(tmp_path / f"logs/{folder}", "1.log", "\n".join([f"code {folder}", SEPARATOR, "env", SEPARATOR, *lines]))
    run("--baseline", "b")
    found = [[float(row[f"{p} %"]) for p in report.CHECKPOINTS] for row in rows_of(tmp_path / "out/checkpoints.csv")]
    assert found[0] == pytest.approx([6.8, 3.6, *[math.nan] * 3], nan_ok=True) and found[1] == pytest.approx([8.4, 6.8, 5.2, 3.6, 2])
    assert rows_of(tmp_path / "out/final.csv")[0]["top-1 acc"] == "nan"


def test_differences_that_are_all_the_same_have_no_p(tmp_path, run):
    for optimizer, finals in ("muon", (1.0, 1.5)), ("muon-vs", (0.5, 1.0)):
        for seed, final in enumerate(finals, 1):
            write(tmp_path / "logs", f"{optimizer}-{seed}.txt", log_text(optimizer, seed, (5.0, 2.0, final)))
    run()
    row, = rows_of(tmp_path / "out/paired.csv")
    assert (row["n"], row["difference"], row["p"]) == ("2", "0.5", "nan")


# -----------------------------------------------------------------------------
# Runs of one row that are not alike

def test_runs_that_end_at_their_targets_keep_their_own_final_losses(tmp_path, run):
    """The steps that they share end before: of the steps 500 and 300, the losses at 300 are 1.5 both."""
    write(tmp_path / "logs", "muon1.txt", log_text("muon", 1))
    write(tmp_path / "logs", "muon2.txt", log_text("muon", 2))
    write(tmp_path / "logs", "vs1.txt", log_text("muon-vs", 1, (5.0, 3.0, 2.0, 1.5, 1.2, 0.8)))
    early = log_text("muon-vs", 2).replace("final val_loss:1.00000", "final val_loss:1.50000")
    write(tmp_path / "logs", "vs2.txt", re.sub(r"step:[45]00/500 .+\n", "", early))
    _, _, err = run()
    assert "muon-vs: its runs end at different steps, 300 to 500; their final losses are averaged, all else goes up to step 300" in err
    row = rows_of(tmp_path / "out/final.csv")[1]
    assert float(row["val loss"]) == pytest.approx((0.8 + 1.5) / 2) and float(row["top-1 acc"]) == pytest.approx((0.5 + 0.3) / 2)
    assert float(row["Δ"]) == pytest.approx(float(rows_of(tmp_path / "out/paired.csv")[0]["difference"])) == pytest.approx(-0.15)
    assert float(rows_of(tmp_path / "out/checkpoints.csv")[1]["60 %"]) == 1.5


def diverged(text):
    """A log as the scripts leave it where the loss stops being finite behind update 400."""
    return text[:text.index("step:500/500 train_loss")] + "diverged: the loss of update 450 is nan, the last finite one was 1.2\n"


def test_a_run_that_diverged_is_averaged_as_such_unless_it_was_mended(tmp_path, run, logs):
    end = log_text()[log_text().index("step:500/500 train_loss"):]
    write(logs, "bad.txt", diverged(log_text("muon-vs", 4)))
    resumed = "resumed:step:400 world_size:1 code:same changed:400:learning_rate=0.1\n"
    write(logs, "mended.txt", diverged(log_text("muon-nsr", 4)) + resumed + end)
    write(logs, "quoted.txt", log_text("muon", 4, sample="diverged: in generated text\n"))
    _, _, err = run(draw=True)
    assert "bad.txt: diverged, so that it has no final loss" in err and err.count(": diverged") == 1
    found = {row["optimizer"]: (row["n"], row["val loss"]) for row in rows_of(tmp_path / "out/final.csv")}
    assert found["muon-vs"] == ("4", "nan") and found["muon"][0] == "4"
    assert found["muon-nsr resumed_with=400:learning_rate=0.1"] == ("1", "1.0")
    by_row = {row["optimizer"]: row for row in rows_of(tmp_path / "out/checkpoints.csv")}
    assert float(by_row["muon-vs"]["80 %"]) == 1.2 and by_row["muon-vs"]["100 %"] == "nan"
    assert {row["optimizer"]: row["train loss"] for row in rows_of(tmp_path / "out/train.csv")}["muon-vs"] == "nan"


def test_a_number_is_the_same_however_it_is_written(tmp_path, run):
    """An edited default may be `1`, a flag's is 1.0."""
    for i, (decay, clip) in enumerate([("0", "1.0"), ("0.0", "1"), ("0.05", "1.0")]):
        write(tmp_path / "logs", f"{i}.txt", log_text("muon", i, weight_decay=decay, grad_clip=clip))
    _, _, err = run()
    assert "never mixed" not in err
    found = [(row["optimizer"], row["n"]) for row in rows_of(tmp_path / "out/final.csv")]
    assert found == [("muon weight_decay=0", "2"), ("muon weight_decay=0.05", "1")]


def test_what_auto_was_tells_experiments_apart(tmp_path, run):
    for i, (dtype, used) in enumerate([("auto", "float32"), ("auto", "bfloat16 autocast"), ("float32", "float32")]):
        text = log_text("muon", i, dtype=dtype).replace("\nworld_size: 1\n", f"\nworld_size: 1\ndtype_used: {used}\n")
        write(tmp_path / "logs", f"{i}.txt", text)
    assert "never mixed: gpt-demo (2 runs: dtype=float32); gpt-demo-2 (1 runs: dtype=bfloat16 autocast)" in run()[2]


def test_rows_of_unlike_seeds_are_told(tmp_path, run, logs):
    told = "gpt-demo: not all rows have the same seeds; only the paired table compares over common ones"
    assert told not in run()[2]
    write(logs, "more.txt", log_text("muon", 4))
    assert told in run()[2]


def test_modded_nanogpts_last_line_may_lack_its_end(tmp_path, run):
    """Some of its published logs do. Cut within the line it is left out."""
    head = "\n".join(["code", SEPARATOR, "env", SEPARATOR, "step:100/200 val_loss:3.9 train_time:900ms step_avg:9.00ms\n"])
    last = "step:200/200 val_loss:3.2 train_time:1800ms step_avg:9.00ms"
    write(tmp_path / "logs/whole", "a.txt", head + last)
    write(tmp_path / "logs/cut", "a.txt", head + last[:-8])
    _, _, err = run("--baseline=whole")
    assert {r["optimizer"]: r["val loss"] for r in rows_of(tmp_path / "out/final.csv")} == {"whole": "3.2", "cut": "3.9"}
    assert err.count("cut in the middle") == 1
    ours = write(tmp_path / "ours", "a.txt", log_text())
    assert report.main([str(tmp_path / "logs"), str(ours), "--seeds=1", f"--out={tmp_path / 'out'}"]) == 0
    assert "whole/a.txt: names no seed, so that --seeds leaves it out" in "\n".join(report.NOTES)


def test_a_run_that_went_on_with_other_ranks_has_no_time(tmp_path, run):
    for optimizer in "muon", "muon-vs":
        resumed = "resumed:step:400 world_size:2 code:same\n" * 2 + "resumed:step:400 world_size:1 code:same\n" * (optimizer == "muon")
        text = log_text(optimizer).replace("step:500/500 train_loss", f"{resumed}step:500/500 train_loss")
        write(tmp_path / "logs", f"{optimizer}.txt", text)
    assert "runs on cpu × 1 then 2 and cpu × 1 then 2 then 1; their times and memory are left out" in run()[2]
    os.remove(tmp_path / "logs/muon.txt")
    assert "runs on cpu × 1 then 2; their times and peak memory are left out" in run()[2]
    assert rows_of(tmp_path / "out/cost.csv")[0]["ms/update"] == "nan"


def test_a_run_that_was_changed_on_its_way_is_no_baseline(tmp_path, run, logs):
    changed = "resumed:step:400 world_size:1 code:same changed:400:max_iters=500\nstep:500/500 train_loss"
    for seed in (1, 2, 3, 4):
        text = log_text("muon", seed, (5.0, 3.0, 2.0, 1.5, 1.2, 0.1), started=f"2026-0{seed}")
        write(logs, f"changed{seed}.txt", text.replace("step:500/500 train_loss", changed))
    assert "2 configurations of muon; the baseline is 'muon'" in run()[2]


def test_a_sweep_from_zero_on_spreads_its_points(tmp_path, run, monkeypatch):
    seen, gammas, pyplot = [], (0, 1, 10, 1000), pytest.importorskip("matplotlib.pyplot")
    close = pyplot.close

    def closing(fig):  # the last one is the sweep's
        seen.append(fig.axes[0].transData.transform([(gamma, 1) for gamma in gammas])[:, 0])
        close(fig)
    monkeypatch.setattr(pyplot, "close", closing)
    for gamma in gammas:
        write(tmp_path / "logs", f"{gamma}.txt", log_text("muon-nsr", gamma=float(gamma)))
    run("--baseline=muon-nsr", draw=True)
    gaps = np.diff(seen[-1])
    assert (gaps > 0.1 * gaps.sum()).all()


def test_memory_is_the_most_of_all_sessions():
    text = log_text() + "resumed:step:500 world_size:1 code:same\nfinal val_loss:1.00000 peak_memory_mib:300 optimizer_state_mib:22.5\n"
    assert report.read_log("a.txt", text).memory["peak_memory_mib"] == 900


def test_a_log_in_an_archive_may_have_the_line_ends_of_windows(tmp_path, run):
    (tmp_path / "a.txt").write_bytes(log_text().replace("\n", "\r\n").encode())
    os.makedirs(tmp_path / "logs/folder.log")
    os.symlink(tmp_path / "nothing", tmp_path / "logs/link.txt")
    with tarfile.open(tmp_path / "logs.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    write(tmp_path / "logs", "b.txt", log_text("muon-vs"))
    assert report.main([str(tmp_path / "logs.tar"), str(tmp_path / "logs"), f"--out={tmp_path / 'out'}"]) == 0
    assert [r["optimizer"] for r in rows_of(tmp_path / "out/final.csv")] == ["muon", "muon-vs"]


def test_a_run_that_diverged_early_takes_nothing_from_the_others(tmp_path, run, logs):
    """Their common steps, their training losses; a log without any step is left out, as is a link to nothing; of two copies the mended
    one counts."""
    text = log_text("muon-vs", 4)
    bad = "diverged: the loss of update 5 is inf, the last finite one was none\n"
    write(logs, "bad.txt", text[:text.index("step:100/500 train_loss")] + bad)
    write(logs, "empty.txt", log_text("muon-vs", 5)[:text.index("step:0/500")] + bad)
    write(logs, "a-copy.txt", diverged(log_text("muon", 3, (5.0, 3.0, 2.0, 1.5, 1.2, 1.01))))
    os.symlink(tmp_path / "nothing", logs / "link.txt")
    _, _, err = run()
    assert "empty.txt: no validation loss in it; left out" in err and "link.txt: a link to nothing; left out" in err
    found = {name: {row["optimizer"]: row for row in rows_of(tmp_path / f"out/{name}.csv")} for name in ("final", "train", "cost")}
    assert float(found["final"]["muon"]["val loss"]) == pytest.approx(np.mean(LOSSES["muon"]))
    assert float(found["train"]["muon"]["train loss"]) > 0 and "end at different steps" not in err
    vs = found["final"]["muon-vs"]["val loss"], found["train"]["muon-vs"]["train loss"], found["cost"]["muon-vs"]["ms/update"]
    assert vs == ("nan",) * 3 and found["final"]["muon-vs"]["n"] == "4"
    assert {row["step"] for row in rows_of(tmp_path / "out/curves.csv") if row["optimizer"] == "muon-vs"} >= {"0", "100", "500"}
