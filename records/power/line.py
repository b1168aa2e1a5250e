"""
Tables and figure of this folder from its runs, on a GPU (many.jsonl.xz) and on a CPU (logs.tar.xz):

    python records/power/line.py > records/power/line.txt         # and line.png
"""
import json, lzma, re, tarfile
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

HERE = Path(__file__).resolve().parent
CELLS = {("16", "1600"): "short", ("64", "1600"): "large", ("16", "6400"): "long"}  # "constant": large, at that rate
RUN = ["cell", "dataset", "power", "learning_rate", "adam_lr", "seed"]
SHARES = {"10 %": 0, "20 %": 1, "40 %": 3, "60 %": 5, "80 %": 7, "100 %": 9}  # of the run: which tenth

def gpu_runs():
    for line in lzma.open(HERE / "many.jsonl.xz", "rt"):
        run = json.loads(line)
        yield [run[name] for name in RUN] + [run["val_loss"]]

def cpu_runs():
    archive = tarfile.open(HERE / "logs.tar.xz")
    for member in archive:
        head, body = archive.extractfile(member).read().decode().rsplit("=" * 100, 1)
        of = dict(re.findall(r"^--(\w+)=(.*)$", head, re.M))
        evaluated = dict(re.findall(rf"^step:(\d+)/{of['max_iters']} val_loss:(\S+)", body, re.M))
        curve = [float(evaluated[str(int(of["max_iters"]) * tenth // 10)]) for tenth in range(1, 11)]
        power = 0.0 if of["optimizer"] == "muon" else float(of["power"])
        cell = CELLS[of["batch_size"], of["max_iters"]] if of["schedule"] == "wsd" else "constant"
        yield [cell, of["dataset"], power, float(of["learning_rate"]), float(of["adam_lr"]), int(of["seed"]), curve]

def mean_and_interval(values):
    """Mean and half of its 95 % interval, over the first dimension."""
    values = np.asarray(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(0, ddof=1) / len(values)**0.5
    return values.mean(0), half

def gains(curves, power, other):
    """Losses of power less those of other, of the seeds that both have; a row a seed."""
    both = curves.loc[[power]].droplevel("power").to_frame("a").join(
        curves.loc[[other]].droplevel("power").rename("b"), how="inner")
    return np.array(both.a.tolist()) - np.array(both.b.tolist())

gpu, cpu = (pd.DataFrame(runs, columns=RUN + ["curve"]) for runs in (gpu_runs(), cpu_runs()))
of_seeds = gpu[(gpu.power == 0) & (gpu.seed < 100)]
spread = of_seeds.curve.str[-1].groupby(of_seeds.dataset).std()
same = gpu.merge(cpu, on=RUN, suffixes=("", "_cpu"))
apart = np.array(same.curve.tolist())[:, -1] - np.array(same.curve_cpu.tolist())[:, -1]
print(f"{len(same)} runs were made on both: final losses differ by {apart.mean():.4f} in the mean, "
      f"standard deviation {apart.std(ddof=1):.4f}, at most {abs(apart).max():.4f}; of runs of muon by seed, "
      f"pysrc {spread['pysrc']:.4f}, english {spread['english']:.4f}")

runs = pd.concat([gpu, cpu]).drop_duplicates(RUN)
figure = Figure((6, 3.2), layout="constrained")
axes = figure.subplots()
for (cell, dataset), group in runs.groupby(["cell", "dataset"]):
    print(f"\n## {cell}, {dataset}")
    if cell == "constant":  # few runs: each is shown
        for (power, *rates), few in group.sort_values("seed").groupby(RUN[2:5]):
            ends = (f"seed {seed} {curve[-1]:.4f}" for seed, curve in few[["seed", "curve"]].values)
            print(f"power {power:g}, learning_rate and adam_lr {rates}:", ", ".join(ends))
    searched = group[group.seed > 100].assign(final=lambda g: g.curve.str[-1])
    finals = searched.groupby(["power", "learning_rate", "adam_lr"]).final.agg(["mean", "count"])
    for power, means in finals[finals["count"] == 3]["mean"].groupby("power"):
        best = means.droplevel("power").sort_values().head(3)
        print(f"power {power:g}, best rates, mean of seeds 101 to 103:",
              "; ".join(f"{lr:g}, {adam_lr:g}: {loss:.4f}" for (lr, adam_lr), loss in best.items()))

    later = group[group.seed <= 100]
    sizes = later.groupby(["power", "learning_rate", "adam_lr"])["seed"].transform("size")
    chosen = later[sizes == sizes.groupby(later.power).transform("max")]  # the CPU's search chose others
    chosen = chosen.set_index(["power", "seed"]).curve
    assert chosen.index.is_unique
    line = {0.0: (0.0, 0.0)}
    for power, curves in chosen.groupby("power"):
        if len(curves) < 4:
            continue
        mean, half = mean_and_interval(curves.tolist())
        print(f"\npower {power:g}, {len(curves)} seeds:", ", ".join(f"{n} {mean[i]:.4f}" for n, i in SHARES.items()),
              f"± {half[-1]:.4f}\n  finals:", *(f"{final:.3f}" for final in sorted(curve[-1] for curve in curves)))
        for other in [other for other in (0.0, 0.5) if other < power]:
            gain = gains(chosen, other, power)
            mean, half = mean_and_interval(gain)
            if other == 0:
                line[power] = mean[-1], half[-1]
            shares = ", ".join(f"{n} {mean[i]:+.4f} ± {half[i]:.4f}" for n, i in SHARES.items())
            print(f"  gain over power {other:g}: {shares}; at the end median {np.median(gain[:, -1]):+.4f}, "
                  f"ahead in {(gain[:, -1] > 0).sum()} of {len(gain)}")
    if cell == "short":
        means, halves = zip(*line.values())
        axes.errorbar(list(line), means, halves, marker="o", capsize=3, label=dataset)
axes.axhline(0, color="black", linewidth=0.8)
axes.set(xlabel="power", ylabel="gain over muon, nats per byte")
axes.legend()
figure.savefig(HERE / "line.png", dpi=70)
