"""
Tables and figure of this folder from its runs, on a GPU (many.jsonl.xz) and on a CPU (../logs.tar.xz):

    python records/power/line.py > records/power/line.txt         # and line.png
"""
import json, lzma, re, tarfile
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

HERE = Path(__file__).resolve().parent
CELLS = {("16", "1600"): "short", ("64", "1600"): "large", ("16", "6400"): "long", ("16", "600"): "demo",
         ("16", "2400"): "demo-long"}
TOKENS = {"short": "3.28 M tokens", "large": "13.1 M", "long": "13.1 M, batch 16", "demo": "2.46 M, the demo"}
USUAL = dict(schedule="wsd", weight_decay="0.1", ns_steps="5", n_ffn="", dtype="float32")  # n_ffn: a Llama
FALLS = dict(cut="power 0 from 40 % on", fall="power falls with the rate")  # by script: train_cut.py, train_fall.py
RUN = ["cell", "dataset", "power", "learning_rate", "adam_lr", "seed"]
SHARES = {"10 %": 0, "20 %": 1, "40 %": 3, "60 %": 5, "80 %": 7, "100 %": 9}  # of the run: which tenth

def gpu_runs():
    for line in lzma.open(HERE / "many.jsonl.xz", "rt"):
        run = json.loads(line)
        yield [run[name] for name in RUN] + [run["val_loss"]]

def cpu_runs():
    archive = tarfile.open(HERE.parent / "logs.tar.xz")
    for member in archive:
        if not member.name.startswith("power/"):
            continue
        head, body = archive.extractfile(member).read().decode().rsplit("=" * 100, 1)
        of = dict(re.findall(r"^--(\w+)=(.*)$", head, re.M))
        evaluated = dict(re.findall(rf"^step:(\d+)/{of['max_iters']} val_loss:(\S+)", body, re.M))
        curve = [float(evaluated[str(int(of["max_iters"]) * tenth // 10)]) for tenth in range(1, 11)]
        power = 0.0 if of["optimizer"] == "muon" else float(of["power"])
        others = [f"{name} {of[name]}" for name, usual in USUAL.items() if of.get(name, usual) != usual]
        others += [how for script, how in FALLS.items() if member.name.startswith(f"power/{script}-")]
        cell = ", ".join([CELLS[of["batch_size"], of["max_iters"]], *others])
        yield [cell, of["dataset"], power, float(of["learning_rate"]), float(of["adam_lr"]), int(of["seed"]), curve]

def mean_and_interval(values):
    """Mean and half of its 95 % interval, over the first dimension."""
    values = np.asarray(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(0, ddof=1) / len(values)**0.5
    return values.mean(0), half

def saved(own, other, i):
    """By what share of the updates up to tenth i the better of two curves was sooner at the other's loss there; below
    0 where that is the other curve. Linear between tenths; at 60 % and later rather too little, for in a shorter run
    the rate has decayed by then."""
    better, worse = sorted((own, other), key=lambda curve: curve[i])
    sooner = 1 - np.interp(-worse[i], -np.minimum.accumulate(better), np.arange(1, 11)) / (i + 1)
    return sooner if better is own else -sooner

def print_gain(curves, others, over):
    """Losses of others less those of curves, both by seed, of the seeds that both have. Returns mean and half of the
    interval at each tenth."""
    both = curves.to_frame("own").join(others.rename("other"), how="inner")
    gain = np.array(both.other.tolist()) - np.array(both.own.tolist())
    mean, half = mean_and_interval(gain)
    shares = ", ".join(f"{n} {mean[i]:+.4f} ± {half[i]:.4f}" for n, i in SHARES.items())
    print(f"  gain over {over}: {shares}; ahead in {(gain[:, -1] > 0).sum()} of {len(gain)}")
    if over == "power 0":
        shares = {name: i for name, i in SHARES.items() if i > 0}
        sooner = [[100 * saved(own, other, i) for i in shares.values()] for own, other in zip(both.own, both.other)]
        print("  updates saved:", ", ".join(f"{name} {mean:+.1f} ± {half:.1f} %"
                                            for name, mean, half in zip(shares, *mean_and_interval(sooner))))
    return mean, half

gpu, cpu = (pd.DataFrame(runs, columns=RUN + ["curve"]) for runs in (gpu_runs(), cpu_runs()))
of_seeds = gpu[(gpu.power == 0) & (gpu.seed < 100)]
spread = of_seeds.curve.str[-1].groupby(of_seeds.dataset).std()
same = gpu.merge(cpu, on=RUN, suffixes=("", "_cpu"))
apart = np.array(same.curve.tolist())[:, -1] - np.array(same.curve_cpu.tolist())[:, -1]
print(f"{len(same)} runs were made on both: final losses differ by {apart.mean():.4f} in the mean, "
      f"standard deviation {apart.std(ddof=1):.4f}, at most {abs(apart).max():.4f}; of runs of muon by seed, "
      f"pysrc {spread['pysrc']:.4f}, english {spread['english']:.4f}")

runs = pd.concat([gpu, cpu]).drop_duplicates(RUN)
figure = Figure((10, 3.4), layout="constrained")
panels = dict(zip(("20 %", "100 %"), figure.subplots(1, 2)))
shift = iter(np.arange(-0.035, 0.04, 0.01))  # of a cell's marks, so that none hides another
usual = {}  # of each cell and dataset, the runs by power and seed
for (cell, dataset), group in runs.groupby(["cell", "dataset"]):
    print(f"\n## {cell}, {dataset}")
    if "schedule" in cell or len(group) < 4:  # few seeds: each is shown
        for (power, *rates), few in group.sort_values("seed").groupby(RUN[2:5]):
            ends = (f"seed {seed} {curve[-1]:.4f}" for seed, curve in few[["seed", "curve"]].values)
            print(f"power {power:g}, rates {rates}:", ", ".join(ends))
    searched = group[group.seed > 100].assign(final=lambda g: g.curve.str[-1])
    finals = searched.groupby(["power", "learning_rate", "adam_lr"]).final.agg(["mean", "count"])
    for power, means in finals[finals["count"] == 3]["mean"].groupby("power"):
        best = means.droplevel("power").sort_values().head(3)
        print(f"power {power:g}, best mean of seeds 101 to 103:",
              "; ".join(f"{lr:g}, {adam_lr:g}: {loss:.4f}" for (lr, adam_lr), loss in best.items()))

    later = group[group.seed <= 100]
    sizes = later.groupby(["power", "learning_rate", "adam_lr"])["seed"].transform("size")
    most = sizes == sizes.groupby(later.power).transform("max")
    chosen = later[most].set_index(["power", "seed"]).curve
    assert chosen.index.is_unique
    usual[cell, dataset] = chosen
    line = {0.0: np.zeros((2, 10))}
    for power, curves in chosen.groupby("power"):
        if len(curves) < 2:
            continue
        mean, half = mean_and_interval(curves.tolist())
        print(f"\npower {power:g}, {len(curves)} seeds:", ", ".join(f"{n} {mean[i]:.4f}" for n, i in SHARES.items()),
              f"± {half[-1]:.4f}")
        for other in [other for other in (0.0, 0.25, 0.5) if other < power and other in chosen]:
            gain = print_gain(curves.droplevel("power"), chosen[other], f"power {other:g}")
            line.setdefault(power, gain)  # over power 0, which comes first
        size, *rest = cell.split(", ")
        if rest and "schedule" not in cell and "n_ffn" not in cell:
            for other in sorted({0.0, power}):
                over = f"power {other:g} of {size}, {dataset}"
                print_gain(curves.droplevel("power"), usual[size, dataset][other], over)
    for rates, others in later[~most & (sizes > 3)].groupby(["learning_rate", "adam_lr"]):
        others = others.set_index(["power", "seed"]).curve
        for power, curves in others.groupby("power"):
            print(f"\npower {power:g}, {len(curves)} seeds, rates {rates}:",
                  "100 % {:.4f} ± {:.4f}".format(*(x[-1] for x in mean_and_interval(curves.tolist()))))
            print_gain(curves.droplevel("power"), chosen[0.0], "power 0, at its own")
            if power > 0 and 0.0 in others:
                print_gain(curves.droplevel("power"), others[0.0], "power 0, at the same")
    # Not plotted: those that are in a table alone, and english-gpt2, whose losses are per token.
    if len(line) > 1 and len(chosen[0]) > 3 and not re.search("weight_decay|schedule|gpt2", cell + dataset):
        at = np.array(list(line)) + next(shift)
        name = ", ".join([TOKENS[size], *rest]).replace("n_ffn 352", "Llama")
        for share, axes in panels.items():
            means, halves = np.array(list(line.values()))[:, :, SHARES[share]].T
            axes.errorbar(at, means, halves, marker="o", capsize=3, label=f"{dataset}, {name}")
for share, axes in panels.items():
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="power", title=f"at {share} of the run")
panels["20 %"].set_ylabel("gain over muon, nats per byte")
figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
figure.savefig(HERE / "line.png", dpi=70)
