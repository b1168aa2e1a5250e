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
CELLS = {("16", "1600"): "short", ("64", "1600"): "large", ("16", "6400"): "long"}
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
        yield [CELLS[of["batch_size"], of["max_iters"]], of["dataset"], power, float(of["learning_rate"]),
               float(of["adam_lr"]), int(of["seed"]), curve]

def mean_and_interval(values):
    """Mean and half of its 95 % interval, over the first dimension."""
    values = np.asarray(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(0, ddof=1) / len(values)**0.5
    return values.mean(0), half

def gains(runs, power):
    """Losses of muon less those of this power, of runs that share all but the power; a row a run."""
    both = runs.loc[[0.0]].droplevel("power").to_frame("muon").join(
        runs.loc[[power]].droplevel("power").rename("other"), how="inner")
    return np.array(both.muon.tolist()) - np.array(both.other.tolist())

columns = RUN + ["curve"]
gpu, cpu = (pd.DataFrame(runs, columns=columns) for runs in (gpu_runs(), cpu_runs()))
same = gpu.merge(cpu, on=RUN, suffixes=("", "_cpu"))
apart = np.array(same.curve.tolist())[:, -1] - np.array(same.curve_cpu.tolist())[:, -1]
print(f"{len(same)} runs were made on both: final losses differ by {apart.mean():.4f} in the mean, "
      f"standard deviation {apart.std(ddof=1):.4f}")
print(f"largest difference {abs(apart).max():.4f}")

runs = pd.concat([gpu, cpu]).drop_duplicates(RUN)
figure = Figure((6, 3.2), layout="constrained")
axes = figure.subplots()
for (cell, dataset), group in runs.groupby(["cell", "dataset"]):
    print(f"\n## {cell}, {dataset}\n\nmean final loss of seeds 101 to 103 at the best pairs of learning_rate, adam_lr\n")
    search = group[group.seed > 100].assign(final=lambda g: [curve[-1] for curve in g.curve])
    means = search.groupby(["power", "learning_rate", "adam_lr"]).final.agg(["mean", "count"])
    means = means[means["count"] == 3]["mean"]
    for power, losses in means.groupby("power"):
        best = losses.droplevel("power").sort_values().head(3)
        print(f"power {power:g}:", "; ".join(f"{lr:g}, {adam:g}: {loss:.4f}" for (lr, adam), loss in best.items()))

    print("\ngain over muon at the same rates and seed, of all these runs\n")
    by_rates = search.set_index(["power", "learning_rate", "adam_lr", "seed"]).curve
    for power in sorted(set(search.power) - {0.0}) if cell == "short" else ():
        gain = gains(by_rates, power)
        print(f"power {power:g}:", ", ".join(f"{name} {gain[:, i].mean():+.4f}" for name, i in SHARES.items()),
              f"; ahead at the end in {(gain[:, -1] > 0).sum()} of {len(gain)}")

    print("\nseeds from 1 at the chosen rates; gain over muon, paired\n")
    later = group[group.seed <= 100]
    sizes = later.groupby(["power", "learning_rate", "adam_lr"])["seed"].transform("size")
    later = later[sizes == sizes.groupby(later.power).transform("max")]  # a CPU's and a GPU's search chose others
    chosen = later.set_index(["power", "seed"]).curve
    line = {0.0: (0.0, 0.0)}
    for power in sorted(set(later.power)):
        mean, half = mean_and_interval(chosen.loc[power].tolist())
        print(f"power {power:g}, {len(chosen.loc[power])} seeds:", ", ".join(f"{n} {mean[i]:.4f}" for n, i in SHARES.items()),
              f"± {half[-1]:.4f}")
        if power:
            gain = gains(chosen, power)
            mean, half = mean_and_interval(gain)
            line[power] = mean[-1], half[-1]
            print("  gain:", ", ".join(f"{name} {mean[i]:+.4f} ± {half[i]:.4f}" for name, i in SHARES.items()),
                  f"; ahead at the end in {(gain[:, -1] > 0).sum()} of {len(gain)}")
    if cell == "short":
        means, halves = zip(*line.values())
        axes.errorbar(list(line), means, halves, marker="o", capsize=3, label=dataset)
axes.axhline(0, color="black", linewidth=0.8)
axes.set(xlabel="power", ylabel="gain over muon, nats per byte")
axes.legend()
figure.savefig(HERE / "line.png", dpi=90)
