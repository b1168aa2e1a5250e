"""tools/report.py: statistics against hand-computed cases and scipy, and what must never be averaged."""
import json, math, re, tarfile
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from common import ROOT, on_ranks, write_tiny
import report

pytestmark = pytest.mark.filterwarnings("ignore:Precision loss")  # where seeds are alike
SOURCE = ('"""python train_gpt.py\nstep:9/9 val_loss:0.1\n"""\n'
          '# optimizer\nlearning_rate = 0.01\ngamma = 10.0\n# schedule\n')
FINAL = {"muon": (1.00, 1.04, 1.01), "muon-vs": (0.98, 1.01, 0.97)}  # losses of seeds 1, 2, 3

def log(optimizer="muon", seed=1, final=1.0, ms=10.0, **settings):
    """500 updates of `ms`, validated every 100: 5, 3, 2, 1.5, 1.2 and `final`."""
    settings = dict(optimizer=optimizer, seed=seed, learning_rate=0.01, gamma=10, n_layer=2, dtype="float32") | settings
    lines = [f"step:{100 * i}/500 val_loss:{loss:.5f} train_time:{ms * i / 10:.3f}s step_avg:{ms:.2f}ms val_acc:0.5000 "
             f"train_loss:{loss:.5f} time_left:9s" for i, loss in enumerate([5, 3, 2, 1.5, 1.2, final])]
    lines += [f"final val_loss:{final:.5f} optimizer_state_mib:2.5", "sample: any text", "step:9/9 val_loss:9\n"]
    head = "hardware: a CPU\n" + "".join(f"--{key}={x}\n" for key, x in settings.items())
    return ("=" * 100 + "\n").join([SOURCE, "# optim\n", head, "\n".join(lines)])

@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    for optimizer, finals in FINAL.items():
        for seed, final in enumerate(finals, 1):
            (tmp_path / f"logs/{optimizer}-{seed}.txt").write_text(log(optimizer, seed, final))
    return tmp_path / "logs"

def make(*argv):
    """The report of ./logs: its tables, {name of a row: {column: cell}} each. Figures are empty files, to be fast."""
    tables, markdown = [], report.markdown
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "markdown", lambda caption, rows: (tables.append(rows), markdown(caption, rows))[1])
        patch.setattr(report.Figure, "savefig", lambda fig, path, dpi: path.touch())
        report.main(["logs", *argv])
    return [{row.get("", i): row for i, row in enumerate(rows)} for rows in tables]

def uneven(module):
    """Rank 1 says that it has much memory, rank 0 that it has none; and rank 1 has more state, by 1 MiB."""
    usage = SimpleNamespace(ru_maxrss=2**20 * module.rank)
    module.resource = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage)
    more = torch.zeros(2**18 * module.rank)
    module.set_schedules = lambda step, opts: next(iter(opts[0].state.values()), {}).update(more=more)

def test_reads_the_scripts_own_log():
    write_tiny()
    on_ranks(2, name="a", seed=3, eval_interval=4, meddle=uneven)
    run = report.Run("logs/a.txt", open("logs/a.txt").read())
    assert (run.title, run.seed, run.problem, run.config["lr"]) == ("gpt", "3", "", "0.01")
    assert report.Run("a", (ROOT / "train_llama.py").read_text() + log().removeprefix(SOURCE)).title == "llama"
    assert run.final["peak_memory_mib"] >= 1 <= run.final["optimizer_state_mib"] and pd.Timestamp(run.facts["started"])
    assert run.unit == "nats per token" and report.Run("a", log(dataset="pysrc")).unit == "nats per byte"
    assert {"n_layer", "batch_size", "max_iters", "dtype"} <= {*run.shared} and "gamma" in {*run.config} - {*run.shared}
    assert list(run.points["val_loss"].dropna().index) == [0, 4, 8] and run.points["train_loss"].count() == 8

def test_statistics_agree_with_scipy_and_by_hand():
    assert report.interval([1.0, 1.0, 4.0]) == pytest.approx((2, 4.3026527))  # t of two degrees of freedom; s/√n is 1
    base, row = pd.Series(FINAL["muon"], list("123")), pd.Series((*FINAL["muon-vs"], 5.0), list("1234"))
    n, (mean, half), p = report.paired(base, row)  # seed 4 has no partner
    expected = stats.ttest_rel(*FINAL.values())
    assert (n, p) == (3, expected.pvalue)
    assert (mean - half, mean + half) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    reached = [report.reach([0, 10, 20, 30, 40], [5, 3, 2, 2.5, 1], target) for target in (5, 4, 2.25, 2, 1, 0.9)]
    np.testing.assert_equal(reached, [0, 5, 17.5, 20, 40, math.nan])

def test_speedups_by_hand(logs):
    """muon's targets are 3, 2, 1.5, 1.2 and 1; muon-vs passes them at 100, 200, 300, 400 and, from 1.2 to 0.9, 467."""
    for path in logs.iterdir():
        optimizer, seed = path.stem.rsplit("-", 1)
        path.write_text(log(optimizer, seed, *{"muon": (1, 10)}.get(optimizer, (0.9, 20)), batch_size=8, block_size=5))
    tables = make("--clock")
    assert [list(table["muon-vs lr=0.01"].values())[1:] for table in tables[2:4]] == [
        ["1.00 (1.00 ± 0.00)"] * 4 + ["1.07 (1.07 ± 0.00)"],
        ["0.50 (0.50 ± 0.00)"] * 4 + ["0.54 (0.54 ± 0.00)", "1.7500 (1.7500 ± 0.0000)", "-0.7500 (-0.7500 ± 0.0000)"]]
    assert [*tables[-1]["muon-vs lr=0.01"].values()][1:] == ["2.5", "–", "20.00 ± 0.00", "+100.0 ± 0.0", "2.0 ± 0.0"]
    assert "ms an update" not in str(make())  # clocks are shown only if asked for

def test_loss_at_the_time_of_the_baselines_run_by_hand(logs):
    """It ends after 5 s. Seed 1 of muon-vs has then done 400 updates, seed 2 is over since 4 s; their mean, at 10.25 ms
    an update, is at 487.8: 1.2 − 0.878 · 0.4. The first update is not timed."""
    for name in "muon-3", "muon-vs-3":
        (logs / f"{name}.txt").unlink()
    for seed, ms in (1, 12.5), (2, 8):
        (logs / f"muon-{seed}.txt").write_text(log("muon", seed, 1))
        first = "step:1/500 train_time:0.000s step_avg:0.00ms\nstep:100/"
        (logs / f"muon-vs-{seed}.txt").write_text(log("muon-vs", seed, 0.8, ms).replace("step:100/", first))
    row = make("--clock", "--tables")[3]["muon-vs lr=0.01"]
    assert (row["loss then"], row["Δ then"]) == ("0.8488 (1.0000 ± 2.5412)", "+0.1512 (+0.0000 ± 2.5412)")
    text = (logs / "muon-2.txt").read_text()
    for old, key in ("hardware: a CPU", "hardware"), ("--optimizer", "compile"), ("--optimizer", "micro_batch_size"):
        new = "hardware: another" if key == "hardware" else f"--{key}=1\n--optimizer"
        (logs / "muon-2.txt").write_text(text.replace(old, new))
        assert "loss then" not in str(tables := make("--clock", "--tables")) and "ms an update" not in str(tables)
        assert f"- gpt: no times, as {key} differs" in open("report/report.md").read()

def test_the_cost_is_that_of_updates_11_to_210_and_smoothing_halves_in_five_per_cent_of_the_budget():
    row = report.Row([run := report.Run("a", log())])
    time, loss = {0: 0, 100: 2, 200: 4, 300: 50}, {50: 8.0, 75: 4.0, 500: 1.0}  # 0.2 s at 10, 8.6 s at 210
    run.points = pd.DataFrame({"train_time": time, "train_loss": loss})
    assert report.update_ms(row)["1"] == pytest.approx(1000 * (8.6 - 0.2) / 200)
    expected = [8, (4 + 0.5 * 8) / 1.5, (1 + 0.5**17 * 4 + 0.5**18 * 8) / (1 + 0.5**17 + 0.5**18)]
    np.testing.assert_allclose(row.curve("smoothed training loss")[1].iloc[:, 0], expected, rtol=1e-12)
    run.points = run.points.drop(0)  # begun by --resume=PATH
    assert math.isnan(report.update_ms(row)["1"])

def test_tables(logs):
    losses, pairs, *_ = make()
    assert list(losses) == ["muon lr=0.01", "muon-vs lr=0.01"]
    for row, finals in zip(losses.values(), FINAL.values()):
        assert (row["20%"], row["100%"]) == ("3.0000 ± 0.0000", report.number(report.interval(finals)))
        assert row["PPL"] == f"{math.exp(np.mean(finals)):.3f}"
    assert pairs["muon-vs lr=0.01"]["Δ"] == "+0.0300" and pairs["muon-vs lr=0.01"]["common seeds"] == 3

@pytest.mark.parametrize("name, text, told", [
    ("cut", log(seed=4, final=9).split("step:500")[0], "cut or unfinished after update 400"),
    ("longer", log(seed=4, final=9).replace("/500 ", "/400 "), "after update 500 of 400"),  # resumed with another end
    ("diverged", log(seed=4).split("step:400")[0] + "diverged: a loss is not finite\n", "diverged by update 300"),
    ("nan", log(seed=4, final=math.nan), "diverged"),
    ("again", log(seed=2, final=9).replace("hard", "started: Mon Nov 23 08:57:12 2026\nhard"), "1.04 . 9.0 . 7.9600"),
    ("x-copy", log("muon-vs", 3, 0.97), "a copy of another; left out")])
def test_what_is_not_whole_is_named_and_never_averaged(logs, name, text, told):
    (logs / f"{name}.txt").write_text(text)
    test_tables(logs)
    text = open("report/report.md").read()
    assert re.search(f"logs/{name}.txt.*{told}", text) and (r"second | \|Δ\| |" in text) == (name == "again")

def test_accuracy_and_on_request_smoothed_validation_loss(logs, monkeypatch):
    panels = []
    monkeypatch.setattr(report, "plot", lambda path, drawn, columns: panels.extend(drawn) or [])
    losses, _, speedups, *_ = make("--smooth")
    target = np.average([5, 3, 2, 1.5, 1.2, np.mean(FINAL["muon"])], weights=16.0 ** np.arange(6))  # 25 halve it
    assert f"100%: {target:.4f}" in speedups["muon-vs lr=0.01"] and losses["muon lr=0.01"]["20%"] == "3.0000 ± 0.0000"
    test_tables(logs)
    shown = [axes["ylabel"].partition(" (")[0] for axes, _ in panels]
    assert shown[1:] == ["smoothed training loss", "next-token accuracy", "validation loss", *shown[1:3]]
    assert shown[0] == "smoothed validation loss" and panels[2][1]["muon lr=0.01 (n=3)"][-1] == (500, 0.5, 0)

def test_the_map_by_hand_with_rates_that_seed_9_chose(logs):
    """Of muon-vs, 100 · 4^(5/6) updates end where 400 of muon do by seed 1, 100 · 4^(1/2) by seed 2."""
    for optimizer, updates, *finals in [("muon", 100, 2.0, 2.2), ("muon", 400, 1.0, 1.2), ("muon-vs", 100, 2.0, 2.0),
                                        ("muon-vs", 400, 0.8, 0.4), ("muon2", 400)]:
        settings = dict(batch_size=8, max_iters=updates, warmup_iters=updates // 10, block_size=1250)
        for rate, losses in (0.01, [3.0, *finals]), (0.02, [3.1, *np.multiply(finals, 0.7)]), (0.005, [3.2]):
            for seed, loss in zip((9, 1, 2), losses):
                text = log(optimizer, seed, loss, learning_rate=rate, **settings)
                (logs / f"map-{optimizer}-{updates}-{rate}-{seed}.txt").write_text(text)
    cells, rates, losses, *_ = make("--only=map", "--tuned_on=9")
    assert list(cells[1].values()) == ["gpt-2", 8, 400, 4.0, "muon lr=0.01", "1.1000 ± 1.2706", "muon-vs lr=0.01",
                                       "0.6000 ± 2.5412", "+0.5000 ± 3.8119", 2, "+35.3 ± 186.6"]
    assert cells[0]["updates saved (%)"] == "–" and rates["muon"][0.005] == "3.2000"
    assert list(losses) == ["muon lr=0.01", "muon lr=0.02", "muon-vs lr=0.01", "muon-vs lr=0.02"]
    assert {"gpt-map.png", "gpt-sweep-lr.png"} < {path.name for path in logs.parent.glob("report/*")}
    mirrored = make("--only=map.*0.0[12]", "--tuned_on=9", "--baseline=muon-vs")[0][1]  # 0.01 is now the lowest rate
    assert (mirrored["gain"], mirrored["updates saved (%)"]) == ("-0.5000 ± 3.8119", "-35.3 ± 186.6")
    notes = open("report/report.md").read()
    assert "gpt: muon lr=0.01, best at seed 9, is at an end of its" in notes
    assert "gpt-2: muon2 lr=0.01, best at" in notes

def test_what_a_resumed_run_does_again_counts(logs):
    head, tail = log("muon-vs", 4).split("step:400")
    again = "step:400/500 val_loss:7.0\nstep:450/500 val_loss:8.0\n"
    changed = "changed:adam_betas=(0.9, 0.95),wandb=,seed=2.0"
    for what in "", ",the data", ",data,val_data", ",val_data":
        run = report.Run("a", f"{head}{again}resumed:step:300 world_size:1 {changed}{what}\nstep:400{tail}")
        assert [run.settings[key] for key in ("adam_betas", "wandb", "seed")] == ["(0.9, 0.95)", "", "2"]
    assert run.problem == "" and list(run.points["val_loss"]) == [5, 3, 2, 1.5, 1.2, 1]
    other = head + "step:400/500 train_time:0.resumed:step:300 ranks:1 changed:learning_rate=0.5,wandb=x\nstep:400"
    killed = report.Run("a", f"{other}/500 val_loss:9.0\nresumed:step:300 changed:nothing\nstep:400{tail}")
    assert killed.settings["lr"] == "0.01" and "resumed" not in killed.settings  # it saved nothing with 0.5
    (logs / "other.txt").write_text(other + tail)
    assert list(make()[0]) == ["muon lr=0.01", "muon-vs lr=0.01", "muon-vs lr=0.5 resumed=300"]
    assert list(make("--only=muon-1|other")[0]) == ["muon lr=0.01", "muon-vs lr=0.5 resumed=300"]
    assert " gamma=10 " in open("report/report.md").read()  # an option of optimizers that all share
    whats = "the code", "code,wandb=x", "val_data", "seed=2", "wandb=x"
    for what, row in zip(whats, [*["300"] * 4, None], strict=True):
        run = report.Run("a", f"{head}resumed:step:300 changed:{what}\nstep:400{tail}")
        assert run.config.get("resumed") == row

def test_experiments_are_kept_apart_and_rows_named_by_what_differs(logs):
    (logs / "longer.txt").write_text(log(n_layer=64))
    for gamma in 1.0, 1000.0:
        (logs / f"{gamma}.txt").write_text(log("muon-nsr", gamma=gamma))
    (logs / "fork.txt").write_text("#" + log(k=8))  # a global that the others do not have
    (logs / "data.txt").write_text(log().replace("a CPU", "a CPU\ndata: 7"))
    losses, *_, data, other, cost = make("--by_code")
    assert list(data) == ["muon lr=0.01"]
    rows = ["muon lr=0.01 k=8 code=2", "muon lr=0.01 code=1", "muon-nsr lr=0.01 gamma=1", "muon-nsr lr=0.01 gamma=1000"]
    assert list(losses) == [*rows, "muon-vs lr=0.01"] and list(other) == list(cost) == ["muon lr=0.01"]
    assert "code=2: 1 logs, as logs/fork.txt" in open("report/report.md").read()
    found = [path.name for path in logs.parent.glob("report/*")]
    assert {"gpt-curves.png", "gpt-sweep-gamma.png", "gpt-2-curves.png"} < set(found)

def test_what_would_mislead_is_told(logs):
    (logs / "fewer.txt").write_text(log(seed=4, final=0.5, learning_rate=0.02))
    (logs / "begun-late.txt").write_text("#" + re.sub("step:[01]0?0?/.*\n", "", log("muon2")))
    (logs / "coarse.txt").write_text(re.sub("step:[24]00/.*\n", "", log("muon-nsr", 2)))
    (logs / "fine.txt").write_text(log("muon-nsr").replace("step_avg", "c4/val_loss:9 step_avg"))
    losses = make("--tuned_on=7")[0]
    assert [losses["muon2 lr=0.01"][share] for share in ("20%", "40%")] == ["–", "2.0000"]
    nsr = losses["muon-nsr lr=0.01 gamma=10"]
    assert nsr["40%"].startswith("2.1250") and nsr["100%"].startswith("1.0000")  # linear between 3 and 1.5
    text = open("report/report.md").read()
    assert "muon-vs lr=0.01 was chosen without seed 7" in text
    assert "muon lr=0.02 has a lower mean than muon lr=0.01, but fewer seeds" in text and "code=2: 9 logs" in text

def test_modded_nanogpt_and_archives(logs):
    for i, (folder, end) in enumerate([("base", 200), ("base", 200), ("early", 125)]):
        (logs / folder).mkdir(exist_ok=True)
        lines = [f"step:{step}/200 val_loss:{loss} train_time:{step * 90}ms step_avg:90.00ms" for step, loss in
                 [(0, 10.8), (125, 4.5), (200, 3.3 + i / 100)] if step <= end]  # the last one without a newline
        (logs / f"{folder}/{i}.txt").write_text(f"{'=' * 100}\n".join(["code\n", "machine\n", "\n".join(lines)]))
    losses, pairs, *_, in_time, _ = make("--only=base|early", "--baseline=base", "--clock")
    assert list(losses) == ["base updates=200", "early updates=125"] and losses["base updates=200"]["seeds"] == 2
    assert pairs["early updates=125"]["Δ"] == in_time["early updates=125"]["Δ then"] == "-1.1950"
    for path in logs.glob("*.txt"):
        path.write_text(path.read_text(), newline="\r\n")
    with tarfile.open("logs.tar.xz", "w:xz") as archive:
        archive.add("logs")
    assert {run.config["optimizer"] for run in report.read_logs(["logs.tar.xz"], only="muon")[0]} == {*FINAL}
    (run, *_), *_ = report.read_logs(["logs.tar.xz"], only="base")
    assert run.name == "logs.tar.xz/logs/base/0.txt" and run.last["train_time"] == 18

def test_zeroshot(logs):
    scores = {task: {f"{metric},none": 0.5 + 0.01 * i} for i, (task, metric) in enumerate(report.ZEROSHOT.items())}
    for file, results, shots in ("a.json", scores, 0), ("b.json", {"piqa": scores["piqa"]}, 0), ("c.json", scores, 5):
        open(file, "w").write(json.dumps({"results": results, "n-shot": dict.fromkeys(results, shots)}))
    table = make("--zeroshot", "muon=a.json", "b.json")[-1]
    assert table["piqa (acc_norm)"]["b.json"] == "53.00"
    assert table["average"] == {"": "average", "muon": "54.50", "b.json": "–"}  # of all ten tasks or of none
    with pytest.raises(SystemExit, match="c.json: n-shot of piqa is 5, of a file before it 0"):
        report.main(["--zeroshot", "b.json", "c.json"])
