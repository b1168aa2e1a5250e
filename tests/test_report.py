"""tools/report.py: statistics against hand-computed cases and scipy, and what must never be averaged."""
import json
import math
import tarfile

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from common import train, write_tiny
import report

SOURCE = '"""train_gpt.py\nstep:800/800 val_loss:0.1\n"""\n# optimizer\nlearning_rate = 0.01\ngamma = 10.0\n# schedule\n'
LOSSES = {"muon": (1.00, 1.04, 1.01), "muon-vs": (0.98, 1.01, 0.97)}  # final ones of seeds 1, 2, 3

def log(optimizer="muon", seed=1, final=1.0, ms=10.0, **settings):
    """500 updates of `ms`, validated every 100: 5, 3, 2, 1.5, 1.2 and `final`."""
    settings = dict(optimizer=optimizer, seed=seed, learning_rate=0.01, gamma=10.0, max_iters=500, dtype="float32",
                    param_dtype="float32") | settings
    lines = [f"step:{100 * i}/500 val_loss:{loss:.5f} train_time:{ms * i / 10:.3f}s step_avg:{ms:.2f}ms val_acc:0.5000 "
             f"train_loss:{loss:.5f} mfu:n/a time_left:9s" for i, loss in enumerate([5, 3, 2, 1.5, 1.2, final])]
    lines += [f"final val_loss:{final:.5f} peak_memory_mib:90 optimizer_state_mib:2.5", "sample: any text", "step:9/9 val_loss:9"]
    head = "torch: 2\nhardware: a CPU\n" + "".join(f"--{key}={x}\n" for key, x in settings.items())
    return ("=" * 100 + "\n").join([SOURCE, "# optim\n", head, "\n".join(lines) + "\n"])

@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    for optimizer, finals in LOSSES.items():
        for seed, final in enumerate(finals, 1):
            (tmp_path / f"logs/{optimizer}-{seed}.txt").write_text(log(optimizer, seed, final))
    return tmp_path / "logs"

def make(*argv):
    """The report of ./logs, its tables as {row name: {column: cell}} each."""
    report.main(["logs", *argv])
    tables = []
    for line in open("report/report.md", encoding="utf-8").read().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] == "":
            tables.append({})
            titles = cells
        elif cells and cells[0] != "---":
            tables[-1][cells[0]] = dict(zip(titles, cells))
    return tables

def test_reads_the_scripts_own_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny()
    last = train("a", seed=3, eval_interval=4)
    run = report.Run("logs/a.txt", open("logs/a.txt").read())
    assert run.title == "gpt" and run.seed == "3" and run.problem == "" and run.own["lr"] == "0.01"
    assert {"n_layer", "batch_size", "max_iters", "dtype"} <= run.shared.keys() and "gamma" in run.own
    assert list(run.points["val_loss"].dropna().index) == [0, 4, 8] and run.points["train_loss"].count() == 8
    assert run.last("train_time") == pytest.approx(last["train_time"], abs=5e-4)  # the log's last digit
    assert run.final["optimizer_state_mib"] > 0

def test_interval_and_paired_test_agree_with_scipy_and_by_hand():
    assert report.interval([1.0, 3.0]) == pytest.approx((2, 12.7062047))  # t of one degree of freedom; s/√n is 1
    assert math.isnan(report.interval([1.0])[1])
    base, row = pd.Series(LOSSES["muon"], list("123")), pd.Series(LOSSES["muon-vs"] + (5.0,), list("1234"))
    n, (mean, half), p = report.paired(base, row)  # seed 4 has no partner
    expected = stats.ttest_rel(*LOSSES.values())
    assert n == 3 and p == expected.pvalue
    assert (mean - half, mean + half) == pytest.approx(tuple(expected.confidence_interval(0.95)))

def test_reach_interpolates_the_first_crossing():
    x, loss = [0, 10, 20, 30, 40], [5, 3, 2, 2.5, 1]
    assert [report.reach(x, loss, target) for target in (5, 4, 2.25, 2, 1)] == [0, 5, 17.5, 20, 40]
    assert math.isnan(report.reach(x, loss, 0.9))

@pytest.mark.filterwarnings("ignore:Precision loss")  # all seeds are alike
def test_speedups_by_hand(logs):
    """muon's targets are 3, 2, 1.5, 1.2 and 1; muon-vs passes them at 100, 200, 300, 400 and, from 1.2 to 0.9, 467."""
    for path in logs.iterdir():
        optimizer, seed = path.stem.rsplit("-", 1)
        final, ms = (0.9, 20) if optimizer == "muon-vs" else (1.0, 10)
        path.write_text(log(optimizer, seed, final, ms))
    tables = make("--clock")
    assert [list(table["muon-vs lr=0.01"].values())[1:] for table in tables[2:4]] == [
        ["1.00 (1.00 ± 0.00)"] * 4 + ["1.07 (1.07 ± 0.00)"], ["0.50 (0.50 ± 0.00)"] * 4 + ["0.54 (0.54 ± 0.00)"]]
    assert tables[-1]["muon-vs lr=0.01"]["ms an update, 11 to 210"] == "20.00 ± 0.00"
    assert "ms an update" not in str(make())  # clocks are shown only if asked for

def test_tables(logs):
    losses, pairs, *_ = make()
    mean, half = report.interval(LOSSES["muon-vs"])
    assert losses["muon-vs lr=0.01"]["100%"] == f"{mean:.4f} ± {half:.4f}" and losses["muon-vs lr=0.01"]["20%"] == "3.0000 ± 0.0000"
    assert losses["muon lr=0.01"]["PPL"] == f"{math.exp(np.mean(LOSSES['muon'])):.3f}"
    assert pairs["muon-vs lr=0.01"]["Δ"] == "+0.0300" and pairs["muon-vs lr=0.01"]["common seeds"] == "3"

def test_the_cost_is_that_of_updates_11_to_210():
    run = report.Run("a", log())
    run.points["train_time"] = pd.Series({0: 0, 100: 2, 200: 4, 300: 50, 400: 60, 500: 70})  # 0.2 s at 10, 8.6 s at 210
    assert report.update_ms(run) == pytest.approx(1000 * 8.4 / 200)

def test_smoothing_halves_a_weight_in_five_per_cent_of_the_budget():
    run = report.Run("a", log())
    run.points = pd.DataFrame({"train_loss": {50: 8.0, 75: 4.0, 500: 1.0}})
    _, loss = report.Row([run]).curve("train_loss")
    weights = 0.5 ** (np.array([450, 425, 0]) / 25)
    expected = [8, (4 + 0.5 * 8) / 1.5, weights @ [8, 4, 1] / weights.sum()]
    np.testing.assert_allclose(loss.iloc[:, 0], expected, rtol=1e-12)

@pytest.mark.parametrize("name, text, told", [
    ("cut", log(seed=4, final=9).split("step:500")[0], "cut or unfinished after update 400"),
    ("torn", log(seed=4, final=9).split("final ")[0] + "final val_lo", "cut or unfinished"),
    ("diverged", log(seed=4).split("step:400")[0] + "diverged: a loss up to update 350 is not finite\n", "diverged by update 300"),
    ("nan", log(seed=4, final=math.nan), "diverged"),
    ("twice", log(seed=2, final=9), "repeats seed 2 of muon lr=0.01: 9.00000, the first 1.04000; not averaged"),
    ("x-copy", log("muon-vs", 3, 0.97), "the same log as"),
    ("none", "pip install torch\n", "cut or unfinished")])
def test_what_is_not_whole_is_named_and_never_averaged(logs, name, text, told):
    expected = make()
    (logs / f"{name}.txt").write_text(text)
    assert make() == expected
    assert f"logs/{name}.txt: " in (found := open("report/report.md").read()) and told in found

def test_what_a_resumed_run_does_again_counts(logs):
    head, tail = log("muon-vs", 4).split("step:400")
    again = "step:400/500 val_loss:7.00000 train_time:4.0s\nstep:450/500 val_loss:8.00000 train_time:4.5s\n"
    run = report.Run("a", head + again + "resumed:step:300 world_size:1 changed:\nstep:400" + tail)
    assert run.problem == "" and run.points["val_loss"].to_dict() == {0: 5, 100: 3, 200: 2, 300: 1.5, 400: 1.2, 500: 1}
    (logs / "other.txt").write_text(head + "resumed:step:300 world_size:1 changed:learning_rate=0.5,wandb=x\nstep:400" + tail)
    assert list(make()[0]) == ["muon lr=0.01", "muon-vs lr=0.01", "muon-vs lr=0.5 resumed=300"]

def test_experiments_are_kept_apart_and_rows_named_by_what_differs(logs):
    (logs / "longer.txt").write_text(log(batch_size=64))
    for gamma in 1.0, 1000.0:
        (logs / f"{gamma}.txt").write_text(log("muon-nsr", gamma=gamma))
    rows, other = report.experiments(report.read_logs(["logs"])[0])
    assert [row.label for row in rows] == ["muon lr=0.01", "muon-nsr lr=0.01 gamma=1", "muon-nsr lr=0.01 gamma=1000", "muon-vs lr=0.01"]
    assert [row.label for row in other] == ["muon lr=0.01"] and len(rows[0].runs) == 3

def test_an_archive_is_a_folder_and_only_selects(logs):
    with tarfile.open("logs.tar.xz", "w:xz") as archive:
        archive.add("logs")
    runs, _ = report.read_logs(["logs.tar.xz"], only="vs-[12]")
    assert [run.name for run in runs] == ["logs.tar.xz/logs/muon-vs-1.txt", "logs.tar.xz/logs/muon-vs-2.txt"]

def test_modded_nanogpt(logs):
    for i, (folder, end) in enumerate([("base", 200), ("base", 200), ("early", 125)]):
        lines = [f"step:{step}/200 val_loss:{loss} train_time:{step * 90}ms step_avg:90.00ms\n" for step, loss in
                 [(0, 10.8), (125, 4.5), (200, 3.3 + i / 100)] if step <= end]
        text = ("=" * 100 + "\n").join([f"code of {folder}\n", "device_name=H100 with world_size=8\n", "".join(lines)[:-1]])
        (logs / folder).mkdir(exist_ok=True)
        (logs / folder / f"{i}.txt").write_text(text)
    losses, pairs, *_ = make("--only=base|early", "--baseline=base")
    assert list(losses) == ["base updates=200", "early updates=125"] and losses["base updates=200"]["seeds"] == "2"
    assert pairs["early updates=125"]["Δ"] == "-1.1950" and (logs.parent / "report/runs-curves.png").stat().st_size > 10_000
    assert report.read_logs(["logs/base"])[0][0].last("train_time") == 18

def test_no_two_rows_look_alike(logs):
    def rows(*configs):
        made = [report.Row([report.Run("a", log(optimizer, gamma=gamma))]) for optimizer, gamma in configs]
        return [str(look) for look in report.styles(made).values()]

    gammas = [("muon-nsr", gamma) for gamma in (1, 10, 100, 1000, 10000)]
    for configs in (gammas + [("muon", 1), ("muon-vs", 1)], [(f"optimizer{i}", 1) for i in range(25)]):
        assert len(set(rows(*configs))) == len(configs)

def test_sweep_figure_and_svg(logs):
    for gamma in 1.0, 100.0:
        (logs / f"{gamma}.txt").write_text(log("muon-nsr", gamma=gamma))
    make("--svg")
    assert {path.name for path in (logs.parent / "report").iterdir()} == {
        "report.md", "gpt-curves.png", "gpt-curves.svg", "gpt-sweep-gamma.png", "gpt-sweep-gamma.svg"}

def test_zeroshot(logs):
    scores = {task: {f"{metric},none": 0.5 + 0.01 * i} for i, (task, metric) in enumerate(report.ZEROSHOT.items())}
    open("a.json", "w").write(json.dumps({"results": scores}))
    open("b.json", "w").write(json.dumps({"results": {"piqa": scores["piqa"]}}))
    table = make("--zeroshot", "muon=a.json", "b.json")[-1]
    assert table["piqa"] == {"": "piqa", "muon": "53.00", "b.json": "53.00"}
    assert table["average"] == {"": "average", "muon": "54.50", "b.json": "–"}  # of all ten tasks or of none
