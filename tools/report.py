"""
Makes tables and figures from training logs; the last line is "wrote report/report.md".

    python tools/report.py logs --out=report                              # every .txt below a folder
    python tools/report.py records/small/logs.tar.xz --only=/gpt/         # those of an archive with /gpt/ in their path
    python tools/report.py results/muonh results/adamh --baseline=adamh   # modded-nanogpt's: a row for each folder
    python tools/report.py --zeroshot muon=a.json muon-vs=b.json          # results of lm-eval-harness

Runs that share model, data, budget, schedule and precision are an experiment; in it each optimizer, at each setting of
what the script lists under "# optimizer", is a row; of more than ten rows, curves show each optimizer's best. Only
whole runs are averaged; what is left out is named.
"""
import argparse, json, math, re, sys, tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy import stats

SHARES = np.array([0.2, 0.4, 0.6, 0.8, 1.0])  # of the budget: where losses are shown, and the targets of speedups
LOSSES = {"val_loss": "validation loss", "train_loss": "smoothed training loss"}
RUN_SETTINGS = set("""  seed preset run_name resume micro_batch_size activation_checkpointing log_interval eval_interval
    checkpoint_interval keep_checkpoints sample_tokens wandb tensorboard device compile allow_change log_dir data_dir
    checkpoint_dir check_shards profile threads timeout_minutes max_skipped""".split())  # say nothing of the experiment
SWEEPS = {"lr": "peak learning rate of the matrices", "gamma": "variance coefficient γ"}
ZEROSHOT = {"arc_easy": "acc_norm", "hellaswag": "acc_norm", "lambada_openai": "acc", "piqa": "acc_norm", "race": "acc",
            "record": "f1", "sglue_rte": "acc", "truthfulqa_mc1": "acc", "truthfulqa_mc2": "acc", "winogrande": "acc"}

# ---- Logs ------------------------------------------------------------------------------------------------------------

class Run:
    """A log of train_gpt.py, train_llama.py or modded-nanogpt. points: a row for each logged update, with val_loss,
    val_acc, train_loss, train_time (s). final: figures of the final line. shared, own: the settings that make an
    experiment, and those that make a row of it. problem: why the run is not averaged, if it is not."""

    def __init__(self, name: str, text: str):
        self.name, self.final, self.problem = name, {}, ""
        parts = re.split(r"^={100}\n", text, maxsplit=3, flags=re.M)
        self.ours = len(parts) == 4 and "\n--optimizer=" in parts[2]
        self.source = parts[0] + parts[1] * self.ours if len(parts) > 1 else ""
        if self.ours:
            self.settings = dict(re.findall(r"^--(\w+)=(.*?)(?:\.0)?$", parts[2], re.M))
            self.facts = dict(re.findall(r"^(\w+): (.*)$", parts[2], re.M))
            self.settings["dtype"] = self.facts.get("dtype_used", self.settings["dtype"]).split()[0]  # what auto was
        else:
            self.settings = {"optimizer": Path(name).absolute().parent.name}
            self.facts = dict(re.findall(r"(device_name|world_size)=(.+?)(?: with|$)", "".join(parts[1:]), re.M))
        self.title = re.search(r"python train_(gpt|llama)\.py|$", self.source)[1] or "runs"  # its own first command
        self.unit = "nats per byte" if self.settings.get("dataset") == "pysrc" else "nats per token"
        self.read(parts[3] if self.ours else "".join(parts[1:] or parts))
        self.seed = self.settings.get("seed", name)
        section = re.search(r"^# optimizer\n(.*?)^# |\Z", self.source, re.M | re.S)[1] or ""
        own = {"optimizer", "param_dtype", "stochastic_rounding", "resumed", "updates",
               *re.findall(r"^(\w+) = ", section, re.M)}
        self.own = {key.replace("learning_rate", "lr"): x for key, x in self.settings.items() if key in own}
        self.shared = {key: x for key, x in self.settings.items() if key not in own | RUN_SETTINGS}

    def read(self, body: str) -> None:
        points, step = {}, 0
        *lines, torn = body.split("\n")
        for line in lines + [torn] * torn.endswith("ms"):  # whole, but for its newline
            if line.startswith("resumed:step:"):
                step, self.final, self.problem = int(re.match(r"resumed:step:(\d+)", line)[1]), {}, ""
                points = {k: point for k, point in points.items() if k <= step}
                changed = re.findall(r"(\w+)=(.*?)(?:\.0)?(?=,|$)", line.partition(" changed:")[2])
                if changed := {key: x for key, x in changed if key not in RUN_SETTINGS}:
                    self.settings |= changed | {"resumed": str(step)}
            elif self.final:
                continue  # the sample is any text
            elif line.startswith("diverged:") or re.search(" val_loss:(nan|inf)", line):
                self.problem = f"diverged by update {step}"
            elif line.startswith("final "):
                self.final = figures(line)
            elif match := re.match(r"step:(\d+)/\d+ ", line):
                step = int(match[1])
                points.setdefault(step, {}).update(figures(line))
        columns = ["val_loss", "val_acc", "train_loss", "train_time"]
        self.points = pd.DataFrame.from_dict(points, orient="index").reindex(columns=columns).sort_index()
        evaluated = self.points["val_loss"].dropna().index
        if evaluated.empty or self.ours and not self.final:
            self.problem = self.problem or f"cut or unfinished after update {step}"
        elif not self.ours:  # those of track 3 may stop before their schedule ends: each length is a row
            self.settings["updates"] = str(evaluated[-1])

    def last(self, column: str) -> float:
        return self.points.loc[self.points["val_loss"].last_valid_index(), column]

def figures(line: str) -> dict[str, float]:
    """The numbers of a line; times in seconds."""
    found = re.findall(r"(\w+):(-?\d[\d.]*(?:e[-+]?\d+)?)(ms|s|)(?= |$)", line)
    return {name: float(x) / (1000 if unit == "ms" else 1) for name, x, unit in found}

def texts(paths: list[str]):
    """Path and text of each .txt in these files, folders and archives."""
    for path in map(Path, paths):
        if not path.exists():
            sys.exit(f"there is no {path}; give logs, folders or .tar.xz archives of them")
        if path.is_file() and tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                for member in (m for m in archive if m.name.endswith(".txt")):
                    yield f"{path}/{member.name}", archive.extractfile(member).read().decode(errors="replace")
        else:
            for file in path.rglob("*.txt") if path.is_dir() else [path]:
                yield str(file), file.read_text(encoding="utf-8", errors="replace")

def read_logs(paths: list[str], only: str = "", by_code: bool = False) -> tuple[list[Run], list[str]]:
    """The whole runs, by name, and a note on each log that is none."""
    runs, notes, seen, codes = [], [], {}, {}
    for name, text in sorted({name: text for name, text in texts(paths) if re.search(only, name)}.items()):
        run, first = Run(name, text), seen.setdefault(text, name)
        if by_code or not run.ours:
            run.own["code"] = str(codes.setdefault(run.source, len(codes) + 1))
        if problem := run.problem if first == name else f"the same log as {first}":
            notes.append(f"{name}: {problem}; left out")
        else:
            runs.append(run)
    return runs, notes

# ---- Experiments and their rows --------------------------------------------------------------------------------------

class Row:
    """An optimizer at one setting. `runs`: seed -> the run that counts; `repeats`: further runs of these seeds."""

    def __init__(self, runs: list[Run]):
        self.config, self.optimizer, self.unit, self.runs = runs[0].own, runs[0].own["optimizer"], runs[0].unit, {}
        self.repeats = [run for run in runs if self.runs.setdefault(run.seed, run) is not run]

    def curve(self, column: str, clock: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Updates (or seconds) and losses, (updates, seeds) each, at the updates that all seeds have."""
        y = pd.concat({s: run.points[column].dropna() for s, run in self.runs.items()}, axis=1, join="inner")
        if column == "train_loss" and len(y):
            half_life = pd.Timedelta(seconds=0.05 * y.index[-1])  # of an exponential mean; a second is an update
            y = y.ewm(halflife=half_life, times=pd.to_datetime(y.index, unit="s")).mean()
        x = {s: run.points["train_time"][y.index] if clock else y.index for s, run in self.runs.items()}
        return pd.DataFrame(x, index=y.index, dtype=float), y

    def last(self, column: str) -> pd.Series:
        return pd.Series({seed: run.last(column) for seed, run in self.runs.items()})

def group(items: list, key) -> list[list]:
    return [list(peers) for _, peers in pd.Series(items).groupby([str(key(item)) for item in items], sort=False)]

def experiments(runs: list[Run]) -> list[list[Row]]:
    """The rows of each experiment, the largest one first. A row's name has what sets it apart."""
    found = sorted(group(runs, lambda run: sorted(run.shared.items())), key=len, reverse=True)
    found = [[Row(peers) for peers in group(runs, lambda run: sorted(run.own.items()))] for runs in found]
    for rows in found:
        for row in rows:
            peers = [peer.config for peer in rows if peer.optimizer == row.optimizer]
            always = ["lr", "updates"] + ["gamma"] * ("nsr" in row.optimizer)
            shown = [f"{name}={x}" for name, x in row.config.items()
                     if name in always or any(peer.get(name) != x for peer in peers)]
            row.label = " ".join([row.optimizer, *shown])
        rows.sort(key=lambda row: [float(x) if i % 2 else x for i, x in enumerate(  # numbers by value
            re.split(r"(?<==)(-?\d[\d.]*(?:e[-+]?\d+)?)", row.label))])
    return found

def describe(runs: list[Run]) -> str:
    """Model, data, budget, schedule and precision: all settings that the runs share; then the machines."""
    facts = pd.DataFrame([run.settings | run.facts for run in runs])
    names = "param_dtype parameters params device hardware device_name world_size torch".split()
    lines = [f"- {name}: {' and '.join(sorted(set(facts[name].dropna())))}" for name in names if name in facts]
    shared = " ".join(f"{key}={x}" for key, x in runs[0].shared.items() if x) or "settings: those of the logs' sources"
    return "\n".join([f"- {shared}", *lines, ""])

# ---- Statistics and tables -------------------------------------------------------------------------------------------

def interval(x) -> tuple[float, float]:
    """Mean and half-width of its two-sided 95 % Student-t interval, nan for fewer than two values."""
    return np.mean(x), stats.t.ppf(0.975, len(x) - 1) * stats.sem(x) if len(x) > 1 else math.nan

def reach(x, loss, target: float) -> float:
    """First x, linear between points, at which loss has come down to the target; nan if it never does."""
    x, loss = np.asarray(x, float), np.asarray(loss, float)
    i = int(np.argmax(loss <= target))
    if loss[i] > target:
        return math.nan
    return float(np.interp(target, loss[[i, i - 1]], x[[i, i - 1]])) if i else float(x[0])

def speedup(base_x, base_loss: pd.Series, x, loss) -> list[float]:
    """How many times sooner `loss` is at the losses that `base_loss` has at SHARES of its updates."""
    targets = np.interp(SHARES * base_loss.index[-1], base_loss.index, base_loss)
    return [reach(base_x, base_loss, target) / reach(x, loss, target) for target in targets]

def paired(base: pd.Series, row: pd.Series) -> tuple[int, tuple[float, float], float]:
    """Number of common seeds, mean and half-width of base − row over them, two-sided p of the paired t-test."""
    base, row = base.align(row, join="inner")
    if len(base) < 2:
        return len(base), (math.nan, math.nan), math.nan
    return len(base), interval(base - row), float(stats.ttest_rel(base, row).pvalue)

def update_ms(run: Run) -> float:
    """Mean milliseconds of the 200 updates after the first 10, as in the paper; nan if there are not so many."""
    time = run.points["train_time"].dropna()
    return 5 * np.diff(np.interp([10, 210], time.index, time, right=math.nan))[0]

def number(x, digits: int = 4, sign: str = "") -> str:
    """A number, or mean and half-width; – for nan."""
    mean, half = x if isinstance(x, tuple) else (x, math.nan)
    text = f"{mean:{sign}.{digits}f}" if math.isfinite(mean) else "–"
    return text + f" ± {half:.{digits}f}" * math.isfinite(half)

def markdown(caption: str, rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *(map(str, row.values()) for row in rows)]
    return f"{caption}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)

def tables(rows: list[Row], base: Row | None, columns: list[str], clock: bool) -> list[str]:
    losses, pairs, costs, others = [], [], [], [row for row in rows if base and row is not base]
    for row in rows:
        name, final, (_, loss) = {"": row.label}, row.last("val_loss"), row.curve("val_loss")
        at = np.transpose([np.interp(SHARES * loss.index[-1], loss.index, loss[seed]) for seed in loss])
        losses.append(name | {"seeds": len(final)})
        losses[-1] |= {f"{share:.0%}": number(interval(x)) for share, x in zip(SHARES, at)}
        losses[-1] |= {"PPL": number(np.exp(final.mean()), 3), "accuracy": number(interval(row.last("val_acc")))}
        if row in others:
            n, difference, p = paired(base.last("val_loss"), final)
            pairs.append(name | {"Δ": number(base.last("val_loss").mean() - final.mean(), sign="+"), "common seeds": n,
                                 "paired Δ": number(difference, sign="+"), "p": f"{p:.2g}" if n > 1 else "–"})
        memory = ["optimizer_state_mib", "peak_memory_mib"]
        memory = pd.DataFrame([run.final for run in row.runs.values()], columns=memory).mean()
        costs.append(name | {key: number(x, 1) for key, x in memory.items()})
        if clock:
            costs[-1]["ms an update, 11 to 210"] = number(interval([update_ms(run) for run in row.runs.values()]), 2)
    out = [markdown("Validation loss at shares of the updates, mean ± half-width of the 95 % Student-t interval over "
                    "seeds; perplexity, exp of the last mean, and next-token accuracy at the end.", losses)]
    if pairs:
        out.append(markdown(f"Δ: final loss of {base.label} less the row's, positive is better; paired over the common "
                            "seeds, with the two-sided p of a t-test, not corrected for the number of rows.", pairs))
        out += [speedups(others, base, column, axis) for column in columns for axis in [False, True][:1 + clock]]
    return out + [markdown("Cost, of the rank that writes the log.", costs)]

def speedups(rows: list[Row], base: Row, column: str, clock: bool) -> str:
    (base_x, base_loss), lines = base.curve(column, clock), []
    targets = np.interp(SHARES * base_loss.index[-1], base_loss.index, base_loss.mean(axis=1))
    titles = [f"{share:.0%}: {target:.4f}" for share, target in zip(SHARES, targets)]
    for row in rows:
        x, loss = row.curve(column, clock)
        means = speedup(base_x.mean(axis=1), base_loss.mean(axis=1), x.mean(axis=1), loss.mean(axis=1))
        seeds = [speedup(base_x[s], base_loss[s], x[s], loss[s]) for s in loss if s in base_loss]
        each = [f" ({number(interval(x), 2)})" for x in np.transpose(seeds)] if len(seeds) > 1 else [""] * len(SHARES)
        cells = [number(mean, 2) + by_seed for mean, by_seed in zip(means, each)]
        lines.append({"": row.label, **dict(zip(titles, cells))})
    return markdown(f"Speedup over {base.label} in {'training time' if clock else 'updates'}, to the {LOSSES[column]} "
                    "at shares of its updates: by the mean curves, in brackets seed by seed. –: not reached (there: by "
                    "one seed at least).", lines)

def zeroshot(specs: list[str]) -> str:
    """[NAME=]FILE of lm-eval-harness -> a row for each task, a column for each model."""
    models = {}
    for name, _, file in (spec.rpartition("=") for spec in specs):
        data = json.loads(Path(file).read_text(encoding="utf-8"))
        models.setdefault(name or Path(data.get("model_name", file)).name, {}).update({
            f"{task} ({metric})": 100 * data["results"][task][f"{metric},none"]
            for task, metric in ZEROSHOT.items() if task in data["results"]})
    scores = pd.DataFrame(models, index=[f"{task} ({metric})" for task, metric in ZEROSHOT.items()])
    scores.loc["average"] = scores.mean(skipna=False)
    return markdown("Zero-shot scores, %", scores.map(lambda x: number(x, 2)).reset_index(names="").to_dict("records"))

# ---- Figures ---------------------------------------------------------------------------------------------------------

def styles(rows: list[Row]) -> dict[Row, dict]:
    """A look for each row, no two alike: an optimizer with more than two rows runs through a colour map."""
    looks = {}
    swept = [peers for peers in group(rows, lambda row: row.optimizer) if len(peers) > 2]
    for name, peers in zip(["viridis", "autumn", "cool", "copper"] * len(swept), swept):
        for share, row in zip(np.linspace(0, 0.9, len(peers)), peers):
            looks[row] = dict(color=colormaps[name](share), linestyle="-")
    for i, row in enumerate(row for row in rows if row not in looks):
        looks[row] = dict(color=f"C{i % 10}", linestyle=["-", "--", ":", "-."][(i // 10 + bool(swept)) % 4])
    return looks

def curves(rows: list[Row], columns: list[str], clock: bool):
    """Losses over updates and, below, time, without the first fifth of the updates; bands are 95 % intervals."""
    fig = Figure(figsize=(1 + 5 * len(columns), 4 + 3 * clock + 0.1 * len(rows)), layout="constrained")
    for (i, j), ax in np.ndenumerate(fig.subplots(1 + clock, len(columns), squeeze=False)):
        for row, look in styles(rows).items():
            x, loss = (part[part.index >= 0.2 * part.index[-1]] for part in row.curve(columns[j], bool(i)))
            x, (mean, half) = x.mean(axis=1), np.transpose([interval(values) for values in loss.to_numpy()])
            ax.plot(x, mean, label=f"{row.label} (n={len(row.runs)})", **look)
            ax.fill_between(x, mean - half, mean + half, color=look["color"], alpha=0.1, linewidth=0)
        ax.set(xlabel=["updates", "training time (s)"][i], ylabel=f"{LOSSES[columns[j]]} ({rows[0].unit})")
        ax.grid(alpha=0.3)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(columns), fontsize=8)
    return fig

def sweep(rows: list[Row], key: str):
    """Final loss over a hyperparameter, a line for each optimizer that has several values; None if none has."""
    def name(row):
        return re.sub(rf" {key}=\S+", "", row.label)
    lines = [peers for peers in group(rows, name) if len(peers) > 1]
    if not lines:
        return None
    ax = (fig := Figure(figsize=(6, 4.5), layout="constrained")).subplots()
    flat = [row for row in rows if key == "gamma" and "nsr" not in row.optimizer]
    looks = styles([peers[0] for peers in lines] + flat)
    for peers in lines:
        mean, half = np.transpose([interval(row.last("val_loss")) for row in peers])
        x = [float(row.config[key]) for row in peers]
        ax.errorbar(x, mean, np.nan_to_num(half), marker="o", capsize=3, label=name(peers[0]), **looks[peers[0]])
    for row in flat:
        ax.axhline(row.last("val_loss").mean(), label=row.label, **looks[row])
    ax.set(xscale="log", xlabel=SWEEPS[key], ylabel=f"final validation loss ({rows[0].unit})")
    ax.grid(alpha=0.3)
    fig.legend(loc="outside lower center", ncols=2, fontsize=8)
    return fig

# ---- Main ------------------------------------------------------------------------------------------------------------

def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", help="logs, folders with *.txt, archives of them")
    parser.add_argument("--out", default="report", help="folder for report.md and PNGs")
    parser.add_argument("--only", default="", metavar="REGEX", help="leave out logs whose path it does not match")
    parser.add_argument("--baseline", default="muon", help="an optimizer, or the name of a row")
    parser.add_argument("--clock", action="store_true", help="show times: each run had the same machine to itself")
    parser.add_argument("--by_code", action="store_true", help="a row for each version of the code that made the logs")
    parser.add_argument("--svg", action="store_true", help="figures as SVG too")
    parser.add_argument("--zeroshot", nargs="+", default=[], metavar="[NAME=]JSON", help="results of lm-eval-harness")
    args = parser.parse_args(argv)
    runs, notes = read_logs(args.logs, args.only, args.by_code)
    if not runs and not args.zeroshot:
        parser.error("no whole run among these logs. " + "; ".join(notes))
    out, report = Path(args.out), []
    out.mkdir(parents=True, exist_ok=True)
    for i, rows in enumerate(experiments(runs) if runs else []):
        everyone = [run for row in rows for run in [*row.runs.values(), *row.repeats]]
        title = everyone[0].title + f"-{i + 1}" * (i > 0)
        candidates = [row for row in rows if args.baseline in (row.label, row.optimizer)]
        base = max(candidates, key=lambda row: (len(row.runs), -row.last("val_loss").mean()), default=None)
        notes += [f"{title}: no row of the baseline {args.baseline}; choose another --baseline"] * (base is None)
        columns = ["val_loss"] + ["train_loss"] * all(len(row.curve("train_loss")[1]) for row in rows)
        report += [f"## {title}\n", describe(everyone), *tables(rows, base, columns, args.clock)]
        notes += [f"{run.name}: repeats seed {run.seed} of {row.label}: {run.last('val_loss'):.5f}, the first "
                  f"{row.runs[run.seed].last('val_loss'):.5f}; not averaged" for row in rows for run in row.repeats]
        drawn = rows if len(rows) <= 10 else [min(peers, key=lambda row: row.last("val_loss").mean())
                                              for peers in group(rows, lambda row: row.optimizer)]
        plots = {"curves": curves(drawn, columns, args.clock)} | {f"sweep-{key}": sweep(rows, key) for key in SWEEPS}
        for kind, fig in plots.items():
            for suffix in ["png", "svg"][:1 + args.svg] if fig else []:
                fig.savefig(out / f"{title}-{kind}.{suffix}", dpi=90)
            report += [f"![{title}: {kind}]({title}-{kind}.png)\n"] * bool(fig)
    report += [zeroshot(args.zeroshot)] if args.zeroshot else []
    report += ["## Notes\n", *(f"- {text}" for text in notes)] if notes else []
    (out / "report.md").write_text("\n".join(report) + "\n", encoding="utf-8")
    print(*notes, f"wrote {out / 'report.md'}", sep="\n")

if __name__ == "__main__":
    main(sys.argv[1:])
