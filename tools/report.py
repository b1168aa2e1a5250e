"""
Makes tables and figures from training logs; the last line is "wrote report/report.md".

    python tools/report.py logs a.tar.xz --only=/gpt/ --tuned_on=101      # .txt in /gpt/; seed 101 only chose the rates
    python tools/report.py results/muonh results/adamh --baseline=adamh   # modded-nanogpt's: a row for each folder
    python tools/report.py --zeroshot muon=a.json muon-vs=b.json          # results of lm-eval-harness

Runs that share model, data, budget, schedule and precision are an experiment; in it each optimizer, at each setting of
what the script lists under "# optimizer" or another script lacks, is a row; of more than ten rows, curves show each
optimizer's best. Where no more than batch size and length differ, a map shows what each optimizer at its best gains
over the baseline. Only whole runs are averaged, and the first of the same settings and seed; what is left out is named.
"""
import argparse, io, itertools, json, math, re, sys, tarfile
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

SHARES = np.array([0.2, 0.4, 0.6, 0.8, 1.0])  # of the budget: where losses are shown, and the targets of speedups
ENDS = ["val_loss", "val_acc", "optimizer_state_mib", "peak_memory_mib"]
FACTS = "param_dtype parameters params device hardware device_name world_size torch compile micro_batch_size".split()
CURVES = {"validation loss": "val_loss", "smoothed validation loss": "val_loss", "smoothed training loss": "train_loss",
          "next-token accuracy": "val_acc"}
RUN_SETTINGS = set("""  seed preset run_name resume micro_batch_size activation_checkpointing log_interval eval_interval
    checkpoint_interval keep_checkpoints sample_tokens wandb tensorboard device compile allow_change log_dir data_dir
    checkpoint_dir check_shards profile threads timeout_minutes max_skipped max_skips eval_only vocab_size""".split())
OWN = {"optimizer", "lr", "param_dtype", "stochastic_rounding", "resumed", "updates"}  # of a row, as what is listed
MAPPED = ["batch_size", "max_iters", "warmup_iters"]  # in which the cells of a map differ
SWEEPS = {"lr": "peak rate of the matrices", "adam_lr": "peak rate of AdamW's parameters", "gamma": "γ"}
ZEROSHOT = {"arc_easy": "acc_norm", "hellaswag": "acc_norm", "lambada_openai": "acc", "piqa": "acc_norm", "race": "acc",
            "record": "f1", "sglue_rte": "acc", "truthfulqa_mc1": "acc", "truthfulqa_mc2": "acc", "winogrande": "acc"}

# ---- Logs ----
class Run:
    """A log of train_gpt.py, train_llama.py or modded-nanogpt. points: a row for each logged update, with val_loss,
    val_acc, train_loss, train_time (s); last: the last with val_loss. final: figures of the final line. config: the
    settings that count; shared: those that make an experiment, not a row of it. problem: why it is left out, if so."""

    def __init__(self, name: str, text: str):
        self.name, self.final, self.problem = name, {}, ""
        parts = re.split(r"^={100}\n", re.sub(r"\blearning_rate=", "lr=", text), maxsplit=3, flags=re.M)
        self.ours = len(parts) == 4 and "\n--optimizer=" in parts[2]
        self.source = parts[0] + parts[1] * self.ours if len(parts) > 1 else ""
        head = parts[2] if self.ours else f"--optimizer={Path(name).absolute().parent.name}"
        self.facts = dict(re.findall(r"^(\w+): (.*)$", head, re.M))
        self.settings = dict(re.findall(r"^--(\w+)=(.*?)(?:\.0)?$", head, re.M)) | {"data": self.facts.get("data")}
        self.title = re.search(r"python train_(gpt|llama)\.py|$", self.source)[1] or "runs"  # its own first command
        self.unit = "nats per byte" if self.settings.get("dataset") == "pysrc" else "nats per token"
        self.read(parts[3] if self.ours else "".join(parts[1:] or parts))
        self.seed = self.settings.get("seed", name)
        listed = re.search(r"^# optimizer\n(.*?)^# |\Z", self.source, re.M | re.S)[1] or ""
        own = OWN.union(re.findall(r"^(\w+) = ", listed, re.M))
        self.shared = {key: x for key, x in self.settings.items() if key not in own | RUN_SETTINGS}
        self.config = {key: x for key, x in self.settings.items() if x and key not in RUN_SETTINGS}

    def read(self, body: str) -> None:
        points, step, end, settings = {}, 0, 0, {-1: self.settings}  # from which step on they held
        for line in re.findall(r"(.+)(?:\n|(?<=ms)\Z)", body):  # none that is torn
            if match := re.search(r"resumed:step:(\d+) ", line):  # also behind a torn line
                step, self.final, self.problem = int(match[1]), {}, ""
                points = {k: point for k, point in points.items() if k <= step}
                settings = {k: held for k, held in settings.items() if k < step}  # what the checkpoint was made with
                changed = dict(re.findall(r"(\w+)=(.*?)(?:\.0)?(?=,\w+=|,[\w ]*data|$)", line))
                other = re.search(r"[:,](the )?(code|(val_)?data|seed=[^,]*)(,|$)", line)
                changed = changed | {"resumed": str(step)} if other or changed.keys() - RUN_SETTINGS else {}
                settings[step] = self.settings = settings[max(settings)] | changed
            elif self.final:
                continue  # the sample is any text
            elif line.startswith("diverged:") or re.search(" val_loss:(nan|inf)", line):
                self.problem = f"diverged by update {step}"
            elif line.startswith("final "):
                self.final = figures(line)
            elif match := re.match(r"step:(\d+)/(\d+) ", line):
                step, end = map(int, match.groups())
                points.setdefault(step, {}).update(figures(line))
        self.points = pd.DataFrame([*points.values()], [*points], "val_loss val_acc train_loss train_time".split())
        self.last = self.points.dropna(subset="val_loss").tail(1).squeeze()
        if self.last.empty or self.ours and not self.final or step > end:
            self.problem = self.problem or f"cut or unfinished after update {step} of {end}"
        elif not self.ours:  # those of track 3 may stop before their schedule ends: each length is a row
            self.settings["updates"] = str(self.last.name)

def figures(line: str) -> dict[str, float]:  # times in seconds
    found = re.findall(r"(?<!\S)(\w+):(-?\d[\d.]*(?:e[-+]?\d+)?)(ms|s|)(?= |$)", line)
    return {name: float(x) / (1000 if unit == "ms" else 1) for name, x, unit in found}

def texts(paths: list[str]):
    """Path and text of each .txt in these files, folders and archives."""
    for path in map(Path, paths):
        if path.is_file() and tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                for m in (m for m in archive if m.name.endswith(".txt") and not m.isdir()):
                    yield f"{path}/{m.name}", io.TextIOWrapper(archive.extractfile(m), "utf-8", "replace").read()
        else:
            for file in path.rglob("*.txt") if path.is_dir() else [path]:
                yield str(file), file.read_text(encoding="utf-8", errors="replace")

def read_logs(paths: list[str], only: str = "", by_code: bool = False) -> tuple[list[Run], list[dict], list[str]]:
    """The whole runs; rows of a table of those that repeat one of these; a note on each log that is left out."""
    found = pd.Series({name: text for name, text in sorted(texts(paths)) if re.search(only, name)}, dtype=object)
    notes = [f"{name}: a copy of another; left out" for name in found.index[found.duplicated()]]
    runs, repeats, codes = {}, [], {}
    logs = [Run(name, text) for name, text in found.drop_duplicates().items()]
    for run in sorted(logs, key=lambda run: pd.Timestamp(run.facts.get("started", 0))):  # where alike, by name
        codes.setdefault(run.source, []).append(run.name)
        if by_code or not run.ours:
            run.config["code"] = str(list(codes).index(run.source) + 1)
        same = str([sorted(run.config.items()), run.seed])
        if run.problem:
            notes.append(f"{run.name}: {run.problem}; left out")
        elif (first := runs.setdefault(same, run)) is not run:
            a, b = first.last["val_loss"], run.last["val_loss"]
            repeats.append({"": f"{first.name}, {run.name}", "first": a, "second": b, r"\|Δ\|": number(abs(a - b))})
    notes += [f"code={i}: {len(x)} logs, as {x[0]}" for i, x in enumerate(codes.values(), 1) if len(codes) > 1]
    return sorted(runs.values(), key=lambda run: run.name), repeats, notes

# ---- Experiments and their rows ----
class Row:
    """An optimizer at one setting. `runs`: seed -> run; `end`: seed -> figures; `final`: -> validation loss."""

    def __init__(self, runs: list[Run]):
        self.config, self.optimizer, self.unit = runs[0].config, runs[0].config["optimizer"], runs[0].unit
        self.runs = {run.seed: run for run in runs}
        self.end = pd.DataFrame([run.final | run.last.to_dict() for run in runs], [*self.runs], ENDS)
        self.final = self.end["val_loss"]

    def curve(self, name: str, clock: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Updates (or seconds) and one of CURVES, (updates, seeds) each, linear where a seed has none."""
        points = {s: run.points for s, run in self.runs.items()}
        y = pd.concat({s: p[CURVES[name]].dropna() for s, p in points.items()}, axis=1,
                      join="inner" if "training" in name else "outer").sort_index()
        y = y.interpolate("index", limit_area="inside").dropna()
        if name.startswith("smoothed") and len(y):
            half_life = pd.Timedelta(seconds=0.05 * y.index[-1])  # of an exponential mean; a second is an update
            y = y.ewm(halflife=half_life, times=pd.to_datetime(y.index, unit="s")).mean()
        x = {s: np.interp(y.index, p.index, p["train_time"]) if clock else y.index for s, p in points.items()}
        return pd.DataFrame(x, index=y.index, dtype=float), y

def group(items: list, key) -> list[list]:
    return [list(peers) for _, peers in pd.Series(items).groupby([str(key(item)) for item in items], sort=False)]

def without(row: Row, key: str) -> str:
    return re.sub(rf" {key}=\S+", "", row.label)

class Experiment:
    """Runs that share all but what makes a row. `tuning`: rows of the seed that only chooses among them; `rows`: of the
    others. `best`: optimizer -> its row with the lowest loss at that seed or, without one, with the most seeds and the
    lowest mean. `tried`: of a rate -> rows of `tuning` that differ from it in that alone. `base`: to compare with."""

    def __init__(self, number: int, runs: list[Run], baseline: str, tuned_on: str):
        self.title = runs[0].title + f"-{number}" * (number > 1)
        self.runs, self.best, self.tried, self.notes = runs, {}, {}, []
        self.batch, self.updates, _, self.context = (int(runs[0].config.get(key, 0)) for key in [*MAPPED, "block_size"])
        self.tokens = float(f"{self.batch * self.updates * self.context / 1e6:.3g}")  # millions
        rows = [Row(peers) for peers in group(runs, lambda run: (run.seed == tuned_on, sorted(run.config.items())))]
        self.tuning = [row for row in rows if tuned_on in row.runs]
        self.rows = [row for row in rows if tuned_on not in row.runs]
        facts = [run.settings | run.facts for row in self.rows for run in row.runs.values()]  # whose clocks may differ
        self.doubts = [f"no times, as {key} differs" for key in FACTS[3:] if len({x.get(key) for x in facts}) > 1]
        for peers in group(rows, lambda row: row.optimizer):
            for row in peers:  # its name has what sets it apart
                shown = [f"{key}={x}" for key, x in row.config.items() if key in ("lr", "updates", "resumed")
                         or key == "gamma" and "nsr" in row.optimizer or any(p.config.get(key) != x for p in peers)]
                row.label = " ".join([row.optimizer, *shown])
            tuned = [row for row in peers if row in self.tuning]
            best = min(tuned or peers, key=lambda row: (-len(row.final), row.final.mean()))
            fewer = [row.label for row in peers if not tuned and row.final.mean() < best.final.mean()]
            self.notes += [f"{label} has a lower mean than {best.label}, but fewer seeds" for label in fewer]
            self.best |= {row.optimizer: row for row in peers if row.label == best.label and row not in tuned}
            self.notes += [f"{best.label} was chosen without seed {tuned_on}"] * bool(tuned_on and not tuned)
            chosen = f"{best.label}, best at seed {tuned_on}, "
            self.notes += [chosen + "has no other seed"] * (best.optimizer not in self.best)
            for key in [key for key in ("lr", "adam_lr") if f" {key}=" in best.label]:
                line = [row for row in tuned if without(row, key) == without(best, key)]
                self.tried.setdefault(key, []).extend(line)
                self.notes += [chosen + f"is at an end of its values of {key}"] * (best in line[:1] + line[-1:])
        self.base = next((row for row in self.rows if row.label == baseline), self.best.get(baseline))
        self.notes += [f"no row of --baseline={baseline}, so no differences"] * bool(self.rows and not self.base)

def experiments(runs: list[Run], baseline: str, tuned_on: str) -> list[list[Experiment]]:
    """Those that differ in nothing but MAPPED together, by batch size and updates; most runs first."""
    common, numbers = {}, itertools.count(1)  # title -> settings of all its logs, so not what a fork has added
    for run in runs:
        common[run.title] = common.get(run.title, set(run.shared) - set(MAPPED)) & run.shared.keys()
    runs = sorted(runs, key=lambda run: ([float(run.config.get(key, 0)) for key in MAPPED], run.config["optimizer"],
                                         [float(run.config.get(key, 0)) for key in [*SWEEPS, "updates"]]))
    families = group(runs, lambda run: [run.title, *(run.shared[key] for key in sorted(common[run.title]))])
    return [[Experiment(next(numbers), same, baseline, tuned_on)
             for same in group(family, lambda run: [run.shared.get(key) for key in MAPPED])]
            for family in sorted(families, key=len, reverse=True)]

def describe(runs: list[Run]) -> str:
    """All settings that the runs share, of model, data, budget, schedule, optimizers; then the machines."""
    facts = pd.DataFrame([run.settings | run.facts for run in runs])
    lines = [f"- {name}: {' and '.join(sorted(set(facts[name].dropna())))}" for name in FACTS[:-2] if name in facts]
    shared = [f"{key}={x}" for key, x in runs[0].config.items() if all(run.config.get(key) == x for run in runs)]
    return "\n".join(["", "- " + (" ".join(shared) or "settings: those of the logs' sources"), *lines, ""])

# ---- Statistics and tables ----
def interval(x) -> tuple[float, float]:
    """Mean and half-width of its two-sided 95 % Student-t interval, nan for fewer than two values."""
    x = pd.Series(x, dtype=float)
    return x.mean(skipna=False), stats.t.ppf(0.975, len(x) - 1) * x.sem(skipna=False)

def reach(x, loss, target: float) -> float:
    """First x, linear between points, where loss has come down to the target; nan if it starts lower or never does."""
    x, loss = np.asarray(x, float), np.asarray(loss, float)
    i = int(np.argmax(loss <= target))
    ends = [i, max(i - 1, 0)]
    return math.nan if loss[i] > target or loss[0] < target else float(np.interp(target, loss[ends], x[ends]))

def saved(lengths, base, row) -> float:
    """From final losses of runs of these lengths what `gains` calls updates saved, as a share; nan for its –."""
    if row[-1] > base[-1]:
        return -saved(lengths, row, base)
    return 1 - math.exp(reach(np.log(lengths), row, base[-1])) / lengths[-1]

def paired(base: pd.Series, row: pd.Series) -> tuple[int, tuple[float, float], float]:
    """Number of common seeds, mean and half-width of base − row over them, two-sided p of the paired t-test."""
    gain = (base - row).dropna()
    return len(gain), interval(gain), stats.ttest_1samp(gain, 0).pvalue if len(gain) > 1 else math.nan

def update_ms(row: Row) -> pd.Series:
    """Of each seed the mean milliseconds of the 200 updates after the first 10, as in the paper; nan if fewer."""
    times = {s: run.points["train_time"].dropna() for s, run in row.runs.items()}
    return pd.Series({s: 5 * np.interp([10, 210], x.index, x, math.nan, math.nan) @ [-1, 1] for s, x in times.items()})

def number(x, digits: int = 4, sign: str = "") -> str:
    """A number, or mean and half-width, given or of a list; – for nan."""
    mean, half = x if isinstance(x, tuple) else interval(x)
    return (f"{mean:{sign}.{digits}f}" if math.isfinite(mean) else "–") + f" ± {half:.{digits}f}" * math.isfinite(half)

def markdown(caption: str, rows: list[dict[str, str]]) -> str:
    lines = [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *(row.values() for row in rows)]
    return f"{caption}\n\n" + "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)

def tables(e: Experiment, names: list[str], clock: bool) -> list[str]:
    losses, pairs, costs, base = [], [], [], e.base
    for row in e.rows:
        label, (_, loss) = {"": row.label}, row.curve("validation loss")
        at = np.transpose([np.interp(SHARES * loss.index[-1], loss.index, loss[seed], math.nan) for seed in loss])
        losses.append(label | {"seeds": len(row.final)} | {f"{s:.0%}": number(x) for s, x in zip(SHARES, at)})
        losses[-1] |= {"PPL": number(np.exp(row.final.mean()), 3), "accuracy": number(row.end["val_acc"])}
        if base and row is not base:
            n, difference, p = paired(base.final, row.final)
            pairs.append(label | {"Δ": number(base.final.mean() - row.final.mean(), sign="+"), "common seeds": n,
                                 "paired Δ": number(difference, sign="+"), "p": f"{p:.2g}" if n > 1 else "–"})
        costs.append(label | {key: number(row.end[key].mean(), 1) for key in ENDS[2:]})
        if clock:
            ms = update_ms(row)
            excess = 100 * (ms / update_ms(base) - 1).dropna() if base else []
            costs[-1] |= {"ms an update, 11 to 210": number(ms, 2), "excess time (%)": number(excess, 1, "+"),
                          "thousand tokens/s": number((e.batch * e.context or math.nan) / ms, 1)}
    out = [markdown("Validation loss at shares of the updates, linear between evaluations, mean ± half-width of the "
                    "95 % Student-t interval over seeds; perplexity, exp of the last mean, and next-token accuracy "
                    "at the end.", losses)]
    if pairs:
        out.append(markdown(f"Δ: final loss of {base.label} less the row's; p: two-sided t-test, uncorrected.", pairs))
        out += [speedups(e, name, axis) for name in names if "loss" in name for axis in [False, True][:1 + clock]]
    return out + [markdown("Cost; memory and state of the rank that has most.", costs)]

def rates(rows: list[Row]) -> str:
    losses = {(without(row, "lr"), float(row.config["lr"])): number(row.final.mean()) for row in rows}
    losses = pd.Series(losses).unstack(fill_value="–").reset_index(names="")
    return markdown(f"Final loss at seed {min(rows[0].runs)}, which chose the rates.", losses.to_dict("records"))

def speedups(e: Experiment, name: str, clock: bool) -> str:
    """How many times sooner the rows are at the losses that the baseline has at SHARES of its updates."""
    base_x, base_loss = (part.assign(mean=part.mean(axis=1)) for part in e.base.curve(name, clock))
    lines, targets = [], {s: np.interp(SHARES * y.index[-1], y.index, y, math.nan) for s, y in base_loss.items()}
    for row in [row for row in e.rows if row is not e.base]:
        x, loss = (part.assign(mean=part.mean(axis=1)) for part in row.curve(name, clock))
        times = [[reach(base_x[s], base_loss[s], y) / (reach(x[s], loss[s], y) or math.nan) for y in targets[s]]
                 for s in loss if s in targets]  # of each seed, then of the mean curves
        lines.append({"": row.label} | {
            f"{share:.0%}: {target:.4f}": number(mean, 2) + f" ({number(seeds, 2)})" * (len(seeds) > 1)
            for share, target, (*seeds, mean) in zip(SHARES, targets["mean"], np.transpose(times))})
        if clock:
            then = pd.Series({s: np.interp(base_x[s].iloc[-1], x[s], loss[s]) for s in loss if s in targets})
            for key, y, sign in ("loss then", then, ""), ("Δ then", base_loss.iloc[-1][then.index] - then, "+"):
                lines[-1][key] = number(y["mean"], 4, sign) + f" ({number(y[:-1], 4, sign)})" * (len(y) > 2)
    return markdown(f"Speedup over {e.base.label} in {'training time' if clock else 'updates'}, to its {name} "
                    "at shares of its updates: of mean curves (by common seed). –: not reached (by one at least)." +
                    " Then: when the baseline's run ended, linear between points; one that ended sooner has its last "
                    "loss. A curve read before its end is not what a run of that length gives, for its rate is high: "
                    "Δ is rather too low. Clocks compare only if each run had the machine to itself." * clock, lines)

def gains(family: list[Experiment], baseline: str, path: Path) -> list[str]:
    """The map: a row of a table for each cell and optimizer, and a panel for each optimizer that has several cells."""
    table, finals, panels = [], {}, {}
    pairs = [(e, row) for e in family if e.base for row in e.best.values() if row is not e.base]
    if not pairs or len({(e.batch, e.updates) for e in family}) < 2:
        return []
    for e, row in pairs:
        upto = finals.setdefault((row.optimizer, e.batch), {})  # updates -> losses, of the lengths up to this one
        upto[e.updates] = e.base.final, row.final
        losses = pd.concat(sum(upto.values(), ()), axis=1, join="inner").to_numpy()
        shares = [100 * saved([*upto], seed[::2], seed[1::2]) for seed in losses]
        n, gain, _ = paired(e.base.final, row.final)
        table.append({"section": e.title, "batch": e.batch, "updates": e.updates, "tokens (M)": e.tokens,
                      "baseline": e.base.label, "its loss": number(e.base.final), "optimizer": row.label,
                      "loss": number(row.final), "gain": number(gain, sign="+"), "seeds": n,
                      "updates saved (%)": number(shares, 1, "+")})
        lines = panels.setdefault(row.optimizer, {baseline: []} | {f"batch {x.batch}": [] for x, _ in pairs})
        lines[baseline].append((e.tokens, 0, 0))
        lines[f"batch {e.batch}"].append((e.tokens, *gain))
    ticks = sorted({e.tokens for e, _ in pairs})
    axes = dict(xscale="log", xticks=ticks, xticklabels=ticks, xlabel="training tokens (M)",
                ylabel=f"gain over {baseline} ({family[0].runs[0].unit})")
    panels = [(axes | {"title": name}, lines) for name, lines in panels.items() if len(lines[baseline]) > 1]
    caption = ("Gain: the baseline's final loss less the optimizer's, each at its best, paired by seed, with the 95 % "
               "Student-t interval. Updates saved: how much shorter its run could be to end at the baseline's loss "
               "(if below 0, the baseline's to end at its), by seed, linear in log(length); –: below the shortest run.")
    report = [f"## {family[0].title}: the map", describe(sum((e.runs for e in family), [])), markdown(caption, table)]
    return report + (plot(path, panels, len(panels), "o") if panels else [])

def zeroshot(specs: list[str]) -> str:
    """[NAME=]FILE of lm-eval-harness -> a row for each task, a column for each model."""
    models, seen = {}, {}
    for name, _, file in (spec.rpartition("=") for spec in specs):
        data = json.loads(Path(file).read_text(encoding="utf-8"))
        models.setdefault(name or Path(data.get("model_name", file)).name, {}).update(data["results"])
        for key, task in itertools.product(["versions", "n-shot", "n-samples"], ZEROSHOT.keys() & data["results"]):
            if (found := data.get(key, {}).get(task)) != (expected := seen.setdefault((key, task), found)):
                sys.exit(f"{file}: {key} of {task} is {found}, of a file before it {expected}; compare like with like")
    scores = pd.DataFrame({name: {f"{task} ({metric})": 100 * results.get(task, {}).get(f"{metric},none", math.nan)
                                  for task, metric in ZEROSHOT.items()} for name, results in models.items()})
    scores.loc["average"] = scores.mean(skipna=False)
    return markdown("Zero-shot scores, %", scores.map(lambda x: number(x, 2)).reset_index(names="").to_dict("records"))

# ---- Figures ----
def plot(path: Path, panels: list[tuple[dict, dict]], columns: int, marker: str = "") -> list[str]:
    """A figure; its line of the report. panels: settings of axes; name of a line -> points (x, mean, half-width)."""
    rows = len(panels) // columns
    fig = Figure(figsize=(1 + 5 * columns, 1 + 3.5 * rows + 0.1 * len(panels[0][1])), layout="constrained")
    for ax, (axes, lines) in zip(fig.subplots(rows, columns, squeeze=False, sharey=bool(marker)).flat, panels):
        for i, (name, line) in enumerate(lines.items()):
            x, mean, half = np.reshape(line, (-1, 3)).T
            look = dict(color=f"C{i % 10}", linestyle=["-", "--", ":", "-."][i // 10 % 4], label=name)
            ax.errorbar(x, mean, np.nan_to_num(half) if marker else None, marker=marker, capsize=3, **look)
            ax.fill_between(x, mean - half, mean + half, color=look["color"], alpha=0.1, linewidth=0)
        ax.set(**axes)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1 + columns, fontsize=8)
    fig.savefig(path, dpi=90)
    return [f"![{path.stem}]({path.name})\n"]

def curves(path: Path, rows: list[Row], names: list[str], clock: bool) -> list[str]:
    """These of CURVES over updates and, below, time, but for the first fifth; bands are 95 % intervals."""
    panels = []
    for over_time, name in itertools.product([False, True][:1 + clock], names):
        lines = {}
        for row in rows:
            x, loss = (part[part.index >= 0.2 * part.index[-1]] for part in row.curve(name, over_time))
            lines[f"{row.label} (n={len(row.runs)})"] = [(t, *interval(y)) for t, y in zip(x.mean(axis=1), loss.values)]
        ylabel = name + f" ({rows[0].unit})" * ("loss" in name)
        panels.append((dict(xlabel="training time (s)" if over_time else "updates", ylabel=ylabel), lines))
    return plot(path, panels, len(names))

def sweep(path: Path, rows: list[Row], key: str) -> list[str]:
    """Final loss over a hyperparameter, a line for each optimizer that has several values; nothing if none has."""
    lines = {without(peers[0], key): [(float(row.config[key]), *interval(row.final)) for row in peers]
             for peers in group(rows, lambda row: without(row, key)) if len(peers) > 1}
    ticks = sorted({x for line in lines.values() for x, *_ in line})
    lines |= {row.label: [(x, *interval(row.final)) for x in ticks]
              for row in rows if key == "gamma" and "nsr" not in row.optimizer}
    seeds = {seed for row in rows for seed in row.runs}
    axes = dict(title=f"seed {' '.join(seeds)}" * (len(seeds) == 1), xlabel=SWEEPS[key], xscale="log", xticks=ticks,
                xticklabels=ticks, ylabel=f"final validation loss ({' '.join({row.unit for row in rows})})")
    return plot(path, [(axes, lines)], 1, "o") if ticks else []

def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", help="logs, folders with *.txt, archives of them")
    parser.add_argument("--out", type=Path, default="report", help="folder for report.md and PNGs")
    parser.add_argument("--only", type=re.compile, default="", metavar="REGEX", help="use logs whose path it matches")
    parser.add_argument("--baseline", default="muon", help="an optimizer, or the name of a row")
    parser.add_argument("--tuned_on", default="", metavar="SEED", help="a seed that only chooses each optimizer's row")
    parser.add_argument("--tables", action="store_true", help="no figures but the map")
    parser.add_argument("--clock", action="store_true", help="show times: each run had the same machine to itself")
    parser.add_argument("--smooth", action="store_true", help="smooth validation loss in curves and speedups")
    parser.add_argument("--by_code", action="store_true", help="a row for each version of the code that made the logs")
    parser.add_argument("--zeroshot", nargs="+", default=[], metavar="[NAME=]JSON", help="results of lm-eval-harness")
    args = parser.parse_args(argv)
    if missing := [path for path in args.logs if not Path(path).exists()]:
        parser.error(f"{missing[0]} does not exist")
    runs, repeats, notes = read_logs(args.logs, args.only, args.by_code)
    if not runs and not args.zeroshot:
        parser.error("no whole run among these logs. " + "; ".join(notes))
    args.out.mkdir(parents=True, exist_ok=True)
    families = experiments(runs, args.baseline, args.tuned_on)
    report = sum((gains(family, args.baseline, args.out / f"{family[0].title}-map.png") for family in families), [])
    for e in sum(families, []):
        notes += [f"{e.title}: {text}" for text in e.notes + e.doubts * args.clock]
        report += [f"## {e.title}" + f": batch {e.batch}, {e.updates} updates" * (e.updates > 0), describe(e.runs)]
        report += [rates(e.tuning)] if e.tuning else []
        if e.rows:
            hidden = "validation loss" if args.smooth else "smoothed validation loss"
            names = [name for name in CURVES if name != hidden and all(len(row.curve(name)[1]) for row in e.rows)]
            clock = args.clock and not e.doubts
            report += tables(e, names, clock)
            drawn = e.rows if len(e.rows) <= 10 else [*e.best.values()]
            report += [] if args.tables else curves(args.out / f"{e.title}-curves.png", drawn, names, clock)
        for key in [] if args.tables else SWEEPS:
            report += sweep(args.out / f"{e.title}-sweep-{key}.png", e.tried.get(key) or e.rows, key)
    report += [zeroshot(args.zeroshot)] if args.zeroshot else []
    report += [markdown("Final loss of runs of the same settings and seed.", repeats)] if repeats else []
    report += ["## Notes\n", *(f"- {text}" for text in notes)] if notes else []
    (args.out / "report.md").write_text("\n".join(report) + "\n", encoding="utf-8")
    print(*notes, f"wrote {args.out / 'report.md'}", sep="\n")

if __name__ == "__main__":
    main(sys.argv[1:])
