"""
Turns training logs into the tables and figures of the paper, and checks records.

    python tools/report.py logs --baseline muon --out report            # all logs below a folder
    python tools/report.py logs --seeds 1..8 --out report               # without the seeds of a search
    python tools/report.py logs --smooth --out report                   # validation curves and speedups as the paper's for GPT-2
    python tools/report.py logs/my-*.txt --check-record                 # are these logs a record? (exit status)
    python tools/report.py --zeroshot muon=a.json muon-vs=b.json        # results of lm-eval-harness

Reads logs of train_gpt.py, train_llama.py and, as they are, of modded-nanogpt's records. Last line: `wrote
report/report.md`; beside it each table as CSV in full precision, each figure as PNG and SVG. Seconds on a laptop.

Runs are one experiment if they share every global but the seed, names, paths and those of the optimizer (OPTIMIZER).
In an experiment each optimizer, and each configuration of one, is a row. Whatever is left out is named on stderr.
"""

import argparse
import csv
import functools
import hashlib
import json
import lzma
import math
import re
import sys
import tarfile
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

# -----------------------------------------------------------------------------
# Definitions

SEPARATOR = "=" * 100
CHECKPOINTS = (20, 40, 60, 80, 100)     # % of the baseline's budget
CONFIDENCE = 0.95                       # of intervals: two-sided, Student-t over seeds
HALF_LIFE = 0.05                        # of the exponential mean over a curve's losses, as a share of the budget
SMOOTHED = f"half-life {100 * HALF_LIFE:g} % of the budget"
TABLES = {"final", "checkpoints", "curves", "speedup", "paired", "train", "repeats", "cost"}    # each a NAME.csv

# globals that say nothing about the experiment, and those in which the rows of an experiment may differ
SPEED = {"micro_batch_size", "activation_checkpointing", "compile"}     # nor do these, but for its times
RUN = SPEED | {"seed", "preset", "run_name", "resume", "allow_change", "log_dir", "checkpoint_dir", "data_dir", "check_shards",
               "log_interval", "checkpoint_interval", "keep_checkpoints", "sample_tokens", "wandb", "tensorboard", "profile",
               "device", "threads", "timeout_minutes", "max_skipped"}
OPTIMIZER = {"optimizer", "learning_rate", "adam_lr", "weight_decay", "momentum", "gamma", "beta2", "muon_eps",
             "ns_steps", "ns_eps", "adjust_lr_fn", "adam_beta1", "adam_beta2", "adam_eps", "param_dtype",
             "stochastic_rounding"}
ORDER = ["adamw", "muon", "adamuon", "normuon", "muon2", "muon-nsr-post", "muon-nsr", "muon-vs"]   # as in the paper
SWEEPS = {"gamma": "variance coefficient γ", "learning_rate": "learning rate", "ns_steps": "Newton–Schulz steps K"}

# a record on the default task: what every log must hold, the numbers, and the rules that --check-record checks
RECORD = {"task": {"script": "train_gpt.py", "dataset": "pysrc", "val_tokens_used": 262144,
                   "data_checksum": "6e662040d5978e96-515203b76c303fe2"},     # of CPython 3.11.7
          "target": 1.15, "min_seeds": 8, "p": 0.01}
MAY_DIFFER = {"seed", "run_name", "resume", "log_dir", "checkpoint_dir", "data_dir"}    # between the runs of a record
RULES = {
    "task": "All are runs of {script} on {dataset} ({data_checksum}) and validate on {val_tokens_used} tokens.",
    "whole": "Every log is whole, of a run that was not resumed, and evaluates after its last step.",
    "source": "Every log begins with the source that made it, the same in all.",
    "settings": "All runs share their device, torch and every global but the seed, names and paths.",
    "seeds": "There are at least {min_seeds} runs, of the seeds 1, 2, 3 ... without a gap, no two of one seed.",
    "target": "Mean final validation loss is below {target} nats per byte: one-sided t-test over the runs, p < {p}.",
}

# lm-eval-harness task: (name in the paper, its metric, version of the task)
ZEROSHOT = {
    "arc_easy": ("ARC-E", "acc_norm", 1), "hellaswag": ("HellaSwag", "acc_norm", 1),
    "lambada_openai": ("LAMBADA", "acc", 1), "piqa": ("PIQA", "acc_norm", 1), "race": ("RACE", "acc", 2),
    "record": ("ReCoRD", "f1", 2), "sglue_rte": ("RTE", "acc", 0), "truthfulqa_mc1": ("TruthfulQA-MC1", "acc", 2),
    "truthfulqa_mc2": ("TruthfulQA-MC2", "acc", 3), "winogrande": ("WinoGrande", "acc", 1),
}


class UserError(Exception):
    """A mistake of the caller: one line on stderr, exit status 1."""


NOTES = []      # what this call left out or found odd; also the end of report.md


def note(text):
    if text not in NOTES:
        NOTES.append(text)
        print(f"report.py: note: {text}", file=sys.stderr)


# -----------------------------------------------------------------------------
# Logs

@dataclass
class Run:
    path: Path
    settings: dict                                  # global -> value as text; {} in logs of others
    env: dict                                       # key of the environment -> value as text
    source: str                                     # everything above the environment
    budget: int = 0                                 # MAX of step:N/MAX
    evals: dict = field(default_factory=dict)       # step -> (val_loss, train_time in s, val_acc)
    train: dict = field(default_factory=dict)       # step -> (train_loss, train_time in s)
    memory: dict = field(default_factory=dict)      # peak_memory_mib, optimizer_state_mib

    @property
    def seed(self):
        return self.settings.get("seed", str(self.path))        # logs of others name none: each run is its own

    @property
    def final_loss(self):
        return self.evals[self.budget][0]


def number(text):
    """'1.5', '0.2s', '3ms' -> float, in seconds where there is a unit; None for 'n/a' and the like."""
    match = re.fullmatch(r"([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|nan|inf))(ms|s|)", text)
    return float(match[1]) / (1000 if match[2] == "ms" else 1) if match else None


def is_log(name):
    """Not what wandb keeps below log_dir: a copy of all that a run prints."""
    return name.endswith((".txt", ".log")) and "wandb" not in Path(name).parts


def texts(path):
    """A log, a folder of logs or an archive of them (.tar.xz or .tgz, say) -> (path, text) of each."""
    if {".tar", ".tgz"} & {*path.suffixes} and path.is_file():
        try:
            with tarfile.open(path) as archive:
                members = sorted((m for m in archive if m.isfile() and is_log(m.name)),
                                 key=lambda m: m.name)
                return [(path / m.name, archive.extractfile(m).read().decode(errors="replace").replace("\r\n", "\n")) for m in members]
        except (EOFError, OSError, tarfile.TarError, lzma.LZMAError, zlib.error) as e:
            why = str(e).partition(":")[0]
            raise UserError(f"{path} is cut or damaged ({why}); expected a whole archive: copy it again") from None
    files = sorted(f for f in path.rglob("*") if not f.is_dir() and is_log(str(f.relative_to(path)))) if path.is_dir() else [path]
    if files == [path] and not path.is_file():
        raise UserError(f"no log {path}; give files, folders or .tar archives of logs: python tools/report.py logs")
    for link in [f for f in files if not f.is_file()]:
        note(f"{link}: a link to nothing; left out")
    return [(f, f.read_text(encoding="utf-8", errors="replace")) for f in files if f.is_file()]


def read_log(path, text):
    """The text of our log, or of one of modded-nanogpt -> Run; its flaws are named."""
    parts = re.split(rf"^{SEPARATOR}\n", text, flags=re.M)
    ours = len(parts) > 3 and re.search(r"^--optimizer=", parts[2], re.M)
    body, header = "\n".join(parts[3:] if ours else parts[1:] or parts), parts[2] if ours else ""
    run = Run(path, settings=dict(re.findall(r"^--(\w+)=(-?\d+(?=\.0$)|.*)", header, re.M)),   # 0.0 is 0
              env=dict(re.findall(r"^(\w+): (.*)$", header, re.M)), source="".join(parts[:2] if ours else parts[:1]))
    *lines, rest = body.split("\n")
    if not ours and re.search(r" step_avg:[\d.]+ms$", rest):        # whole, but for the end of line
        lines.append(rest)
    elif rest.startswith(("step:", "final ")):
        note(f"{path}: cut in the middle of its last line, which is left out")
    last, done, diverged = 0, False, False      # behind the final line comes free text, until a resumed run goes on
    for line in lines:
        if line.startswith("resumed:"):
            note(f"{path}: a resumed run" + ", whose code had changed" * (" code:changed" in line))
            run.settings.pop("resumed_with", None)
            if changed := re.search(r" changed:(.+)", line):    # since its start: no run of the settings at its head, a row of its own
                run.settings["resumed_with"] = changed[1]
            done = diverged = False
            ranks = re.search(r" world_size:(\d+)", line)
            if ranks and run.env.get("world_size", ranks[1]).split()[-1] != ranks[1]:
                run.env["world_size"] += f" then {ranks[1]}"
        diverged |= line.startswith("diverged:") and not done
        if done or not line.startswith(("step:", "final ")):
            continue
        head, *pairs = line.split(" ")
        fields = {key: number(value) for key, _, value in (pair.partition(":") for pair in pairs)}
        run.memory |= {k: max(v, run.memory.get(k, v)) for k, v in fields.items() if k in ("peak_memory_mib", "optimizer_state_mib")}
        done = head == "final"
        if done and 0 < last < run.budget:      # at a target
            note(f"{path}: ended at step {last} of {run.budget}; counts as a run of so many steps")
            run.budget = last
        step = re.fullmatch(r"step:(\d+)/(\d+)", head)
        if not done and (not step or fields.get("val_loss", 0) is None):
            note(f"{path}: unreadable line '{line[:60]}', which is left out")
        elif not done:
            step, run.budget = int(step[1]), int(step[2])
            if step < last:         # a resumed run repeats steps: the later line wins
                run.evals = {s: e for s, e in run.evals.items() if s < step}
                run.train = {s: e for s, e in run.train.items() if s < step}
            last = step
            if "train_loss" in fields and "train_time" in fields:
                run.train[step] = fields["train_loss"], fields["train_time"]
            if "val_loss" in fields:
                figures = (fields.get(k) for k in ("val_loss", "train_time", "val_acc"))
                run.evals[step] = tuple(math.nan if x is None else x for x in figures)
    if diverged and run.budget:
        run.evals[run.budget], run.train[run.budget] = (math.nan,) * 3, (math.nan,) * 2
    if peak := re.search(r"^peak memory allocated: (\d+) MiB", body, re.M):        # as modded-nanogpt prints it
        run.memory.setdefault("peak_memory_mib", float(peak[1]))
    return run


def read_logs(paths, seeds=()):
    """Files and folders -> finished runs, each once; whatever else was there is named."""
    runs, others = {}, set()
    for path in map(Path, paths):
        for file, text in texts(path):
            run = read_log(file, text)
            if not run.evals:
                note(f"{file}: no validation loss in it; left out")
            elif not seeds or run.seed in seeds:
                key = (*run.settings.items(), run.env.get("started")) if run.settings else text
                twin = runs.setdefault(key, run)
                if twin is not run:
                    note(f"{file}: the same run as {twin.path}; the longer log counts, once")
                    runs[key] = max(twin, run, key=lambda r: max((s for s, e in r.evals.items() if math.isfinite(e[0])), default=-1))
            elif run.settings:
                others.add(run.seed)
            else:
                note(f"{file}: names no seed, so that --seeds leaves it out")
    if not runs and seeds:
        found = f"seeds {', '.join(sorted(others, key=in_order))}" if others else "no seed in them"
        raise UserError(f"--seeds selects none of the logs; found {found}")
    for run in runs.values():
        if run.budget not in run.evals and run.settings:
            note(f"{run.path}: unfinished, evaluated up to step {max(run.evals)} of {run.budget}; left out")
        elif run.budget not in run.evals:       # records on modded-nanogpt's track 3 stop where they meet the target
            note(f"{run.path}: stops at step {max(run.evals)} of {run.budget}; counts as a run of so many steps")
            run.budget = max(run.evals)
        elif not math.isfinite(run.final_loss):
            note(f"{run.path}: diverged, so that it has no final loss; means with it are '–'")
    finished = [run for run in runs.values() if run.budget in run.evals]
    if not finished:
        raise UserError(f"no finished run in {', '.join(map(str, paths))}; expected a val_loss at the last step")
    return finished


# -----------------------------------------------------------------------------
# Experiments

@dataclass
class Row:
    """One configuration of one optimizer: N seeds, evaluated at T common steps: those of its runs that did not diverge."""
    optimizer: str
    config: dict        # hyperparameter -> value as text
    runs: dict          # seed -> Run, the first of that seed
    repeats: list       # further runs of these seeds: shown, never averaged
    label: str = ""
    smoothed: bool = False      # its validation curve, for speedups and figures; the final loss never is

    def __post_init__(self):
        whole = [r for r in self.runs.values() if math.isfinite(r.final_loss)] or [*self.runs.values()]
        self.steps = np.array(sorted(set.intersection(*(set(r.evals) for r in whole))))                 # (T,)
        evals = np.array([[r.evals.get(s, (math.nan,) * 3) for s in self.steps] for r in self.runs.values()])   # (N, T, 3)
        self.loss, self.times, self.acc = np.moveaxis(evals, 2, 0)                                      # each (N, T)
        self.time = self.times.mean(0)                                                                  # (T,)
        self.final, _, self.final_acc = np.array([r.evals[r.budget] for r in self.runs.values()]).T     # (N,) each
        self.curve = smooth(self.steps, self.loss) if self.smoothed else self.loss                      # (N, T)
        steps = np.array(sorted(set.intersection(*(set(r.train) for r in whole))))                      # (S,) log lines
        train = [[r.train.get(s, (math.nan,) * 2) for s in steps] for r in self.runs.values()]
        loss, times = np.array(train, float).reshape(len(self.runs), -1, 2).T
        self.train = SimpleNamespace(steps=steps, time=times.mean(1), loss=smooth(steps, loss.T))       # (S,), (S,), (N, S)

    def memory(self, key):
        return np.mean([run.memory.get(key, math.nan) for run in self.runs.values()])


@dataclass
class Experiment:
    name: str
    settings: dict      # what all its runs share
    rows: list
    baseline: Row = None
    differs: str = ""   # settings in which the experiments of one report differ


@functools.cache
def optimizer_globals(source):
    """OPTIMIZER, and those that a fork has added to that section of its script, which a log begins with; and what a resumed run changed."""
    section = re.search(r"^# optimizer\n(.*?)^# ", source, re.M | re.S)
    return OPTIMIZER | {"resumed_with"} | (set(re.findall(r"^(\w+) = ", section[1], re.M)) - {"grad_clip"} if section else set())


def in_order(text):
    """Sort key: numbers by value, then words."""
    value = number(text)
    return (value is None, value or 0.0, text)


def main_row(rows):
    """The configuration with most seeds; among equals the best. One that diverged, or was changed on the way, only where all were."""
    return max(rows, key=lambda r: (math.isfinite(r.final.mean()), "resumed_with" not in r.config, len(r.runs), -r.final.mean()),
               default=None)


def build_rows(runs, by_source=False, smoothed=False):
    """Runs of one experiment -> rows: optimizers in the paper's order, then configurations; by_source: a row for each source."""
    groups = defaultdict(list)
    for run in runs:
        config = {k: v for k, v in run.settings.items() if k in optimizer_globals(run.source) - {"optimizer"}}
        source = {"source": hashlib.sha256(run.source.encode()).hexdigest()[:7]}
        if not run.settings:
            config = source | {"steps": str(run.budget)}
        elif by_source:
            config |= source
        optimizer = run.settings.get("optimizer", run.path.resolve().parent.name)
        groups[optimizer, tuple(sorted(config.items()))].append(run)
    rows = []
    for (optimizer, config), group in groups.items():
        first = {}
        for run in sorted(group, key=lambda r: (in_order(r.seed), r.env.get("started", ""), str(r.path))):
            first.setdefault(run.seed, run)
        rows.append(Row(optimizer, dict(config), first, [run for run in group if run is not first[run.seed]], smoothed=smoothed))
    for row in rows:
        varied = [k for k, v in row.config.items() if any(
            other.config.get(k) != v for other in rows
            if other.optimizer == row.optimizer or k == "gamma" and {row.optimizer, other.optimizer} == {"muon-nsr", "muon-nsr-post"})]
        row.label = " ".join([row.optimizer, *(f"{k}={row.config[k]}" for k in varied)])
        if len(budgets := sorted({run.budget for run in row.runs.values()})) > 1:
            note(f"{row.label}: its runs end at different steps, {budgets[0]} to {budgets[-1]}; their final losses are averaged, all else "
                 f"goes up to step {row.steps[-1]}")
        for run in row.repeats:
            note(f"{run.path}: repeats seed {run.seed} of {row.label}; only {row.runs[run.seed].path} is averaged")
    rank = {optimizer: i for i, optimizer in enumerate(ORDER)}
    rows.sort(key=lambda r: (rank.get(r.optimizer, 99), r.optimizer, [in_order(v) for v in r.config.values()]))
    return rows


def build_experiments(runs, baseline, by_source=False, smoothed=False):
    groups, experiments, names = defaultdict(list), [], Counter()
    for run in runs:
        shared = {k: v for k, v in run.settings.items() if k not in RUN | optimizer_globals(run.source)}
        shared |= {k: v for k, v in run.env.items() if k in ("script", "data_checksum")}
        shared |= {"dtype": run.env["dtype_used"]} if "dtype_used" in run.env else {}      # what --dtype=auto was
        groups[tuple(sorted(shared.items()))].append(run)
    for key, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        settings = dict(key)
        name = Path(settings.get("script", "logs")).stem.removeprefix("train_")
        name = "-".join([name, *sorted({run.settings["preset"] for run in group if "preset" in run.settings})])
        names[name] += 1
        name += f"-{names[name]}" if names[name] > 1 else ""
        if not settings:
            note(f"{name}: {len(group)} logs without settings (modded-nanogpt's format), grouped by folder, source and "
                 "steps; whether their data and models agree is for you to know")
        elif len(sources := {run.source for run in group}) > 1:
            note(f"{name}: its logs begin with {len(sources)} different sources" + "; --by_source makes a row of each" * (not by_source))
        devices = {f"{run.env.get('device')} × {run.env.get('world_size')}" for run in group}
        worlds = {run.env.get("world_size") for run in group}
        unlike = [k for k in sorted(SPEED) if len({run.settings.get(k) for run in group}) > 1]
        if len(devices) > 1 or unlike or any(" then " in str(ranks) for ranks in worlds):
            note(f"{name}: runs on {' and '.join(sorted(devices))}{', of unlike ' + ', '.join(unlike) if unlike else ''}; their times and "
                 f"{'memory' if len(worlds) > 1 else 'peak memory'} are left out")
            for run in group:
                run.evals = {step: (loss, math.nan, acc) for step, (loss, _, acc) in run.evals.items()}
                run.train = {step: (loss, math.nan) for step, (loss, _) in run.train.items()}
                run.memory = {k: v for k, v in run.memory.items() if k == "optimizer_state_mib" and len(worlds) == 1}  # of one rank
        if len(intervals := {run.settings.get("log_interval") for run in group if run.train}) > 1:
            note(f"{name}: log_interval is {' and '.join(sorted(map(str, intervals)))}; training losses smoothed over unlike lines do not "
                 "compare")
        e = Experiment(name, settings, build_rows(group, by_source, smoothed))
        if settings and len({frozenset(r.runs) for r in e.rows}) > 1:
            note(f"{name}: not all rows have the same seeds; only the paired table compares over common ones")
        candidates = [r for r in e.rows if baseline in (r.label, r.optimizer)]
        e.baseline = main_row(candidates)
        if not candidates:
            labels = ", ".join(r.label for r in e.rows)
            note(f"{name}: no run of the baseline '{baseline}' among {labels}; no comparison")
        elif len(candidates) > 1:
            note(f"{name}: {len(candidates)} configurations of {baseline}; the baseline is '{e.baseline.label}' "
                 "(most seeds, then lowest loss; --baseline takes a whole label)")
        experiments.append(e)
    for e in experiments:
        e.differs = ", ".join(f"{k}={v}" for k, v in e.settings.items()
                              if any(other.settings.get(k) != v for other in experiments))
    if len(experiments) > 1:
        note(f"{len(experiments)} experiments, never mixed: " + "; ".join(
            f"{e.name} ({sum(len(r.runs) for r in e.rows)} runs: {e.differs})" for e in experiments))
    return experiments


# -----------------------------------------------------------------------------
# Statistics

def interval(x):
    """x (N, ...) -> mean over N and half-width of its two-sided Student-t interval, nan for N = 1."""
    from scipy import stats
    if len(x) < 2:
        return x.mean(0), np.full(x.shape[1:], math.nan)
    return x.mean(0), stats.t.ppf(0.5 + CONFIDENCE / 2, len(x) - 1) * x.std(0, ddof=1) / math.sqrt(len(x))


def smooth(steps, loss):
    """loss (N, S) at steps (S,) -> exponential means over what came before, of half-life HALF_LIFE of the last step."""
    out, total, weight = loss.copy(), 0.0, 0.0
    for i, gap in enumerate(np.diff(steps, prepend=steps[:1])):
        keep = 0.5 ** (gap / (HALF_LIFE * max(1, steps[-1])))
        total, weight = keep * total + loss[:, i], keep * weight + 1
        out[:, i] = total / weight
    return out


def first_crossing(x, loss, target):
    """First x, linear between evaluations, at which loss (T,) reaches the target; nan if it never does."""
    below = np.flatnonzero(loss <= target)
    if not len(below) or below[0] == 0:
        return float(x[0]) if len(below) else math.nan
    i = below[0]
    return float(x[i - 1] + (x[i] - x[i - 1]) * (loss[i - 1] - target) / (loss[i - 1] - loss[i]))


def paired(baseline, row):
    """Final loss of baseline − row over the seeds of both: n, (mean, half-width), two-sided p of the paired t-test."""
    from scipy import stats
    d = np.array([baseline.runs[s].final_loss - run.final_loss for s, run in row.runs.items() if s in baseline.runs])
    if not len(d):
        return 0, (math.nan, math.nan), math.nan
    return len(d), interval(d), stats.ttest_1samp(d, 0.0).pvalue if len(d) > 1 and d.std() > 0 else math.nan


# -----------------------------------------------------------------------------
# Tables

class Report:
    """Collects Markdown and the rows of CSV files; write() makes the files."""

    def __init__(self, out):
        self.out, self.text, self.csv = Path(out), [], {}
        if not next(path for path in (self.out, *self.out.absolute().parents) if path.exists()).is_dir():
            raise UserError(f"--out={out} is, or is in, a file; expected a folder, such as --out=report")

    def table(self, name, experiment, caption, columns, rows, lowest=()):
        """columns: title -> format; (mean, half-width) is one value; bold: the least of a column in lowest."""
        pairs = [[v if isinstance(v, tuple) else (v, math.nan) for v in row] for row in rows]

        def cell(mean, half, spec):
            if isinstance(mean, str) or not math.isfinite(mean):
                return mean if isinstance(mean, str) else "–"
            return f"{mean:{spec}}" + (f" ± {half:{spec.lstrip('+')}}" if math.isfinite(half) else "")

        cells = [[cell(*pair, spec) for pair, spec in zip(row, columns.values())] for row in pairs]
        for j in (list(columns).index(title) for title in lowest):
            means = [row[j][0] for row in pairs]
            if np.isfinite(means).sum() > 1:
                best = np.nanargmin(means)
                cells[best][j] = f"**{cells[best][j]}**"
        align = ["---" if spec == "s" else "---:" for spec in columns.values()]
        self.text += [caption, "", *("| " + " | ".join(line) + " |" for line in [list(columns), align, *cells]), ""]
        wide = [any(isinstance(row[j], tuple) for row in rows) for j in range(len(columns))]
        titles = [t for title, w in zip(columns, wide) for t in (title, f"{title} ±")[:1 + w]]
        self.csv.setdefault(name, [["experiment", *titles]])
        self.csv[name] += [[experiment, *(x for pair, w in zip(row, wide) for x in pair[:1 + w])] for row in pairs]

    def figure(self, experiment, name, fig):
        self.text += [f"![{experiment}: {name}]({experiment}-{name}.svg)", ""]
        self.out.mkdir(parents=True, exist_ok=True)
        fig.savefig(self.out / f"{experiment}-{name}.png", dpi=160, metadata={"Software": None})
        fig.savefig(self.out / f"{experiment}-{name}.svg", metadata={"Date": None})

    def write(self):
        self.out.mkdir(parents=True, exist_ok=True)
        earlier = TABLES - self.csv.keys() if "final" in self.csv and (self.out / "report.md").exists() else ()
        for name in earlier:    # tables that this report does not have
            (self.out / f"{name}.csv").unlink(missing_ok=True)
        for name, rows in self.csv.items():
            with open(self.out / f"{name}.csv", "w", newline="", encoding="utf-8") as f:
                csv.writer(f).writerows(rows)
        notes = ["## Notes", "", *(f"- {text}" for text in NOTES), ""] if NOTES else []
        (self.out / "report.md").write_text("\n".join(self.text + notes), encoding="utf-8")
        print(f"wrote {self.out / 'report.md'}")


def tables(report, e):
    """All tables of one experiment."""
    base, rows, others = e.baseline, e.rows, [r for r in e.rows if r is not e.baseline]
    report.table(
        "final", e.name,
        "Final validation loss, mean ± half-width of the 95 % Student-t interval over n seeds; perplexity exp(mean); "
        f"next-token top-1 accuracy; Δ = loss of {base.label if base else 'the baseline'} − loss, positive is better.",
        {"optimizer": "s", "n": "d", "val loss": ".4f", "val ppl": ".3f", "top-1 acc": ".4f", "Δ": "+.4f"},
        [(r.label, len(r.runs), interval(r.final), math.exp(loss) if (loss := r.final.mean()) < 700 else math.nan,
          interval(r.final_acc),
          base.final.mean() - r.final.mean() if base and r is not base else math.nan) for r in rows],
        lowest=["val loss", "val ppl"])

    budget = (base or rows[0]).steps[-1]
    marks = {f"{share} %": share / 100 * budget for share in CHECKPOINTS}
    at = {r.label: [np.array([np.interp(step, r.steps, loss, left=math.nan, right=math.nan) for loss in r.loss])    # (N,) each
                    for step in marks.values()] for r in rows}
    report.table("checkpoints", e.name, f"Validation loss at shares of {budget} updates, mean ± half-width over seeds.",
                 {"optimizer": "s"} | dict.fromkeys(marks, ".4f"),
                 [(r.label, *map(interval, at[r.label])) for r in rows], lowest=marks)
    titles = ["experiment", "optimizer", "step", "train time", "val loss", "val loss ±", "top-1 acc"]
    report.csv.setdefault("curves", [titles])
    report.csv["curves"] += [[e.name, r.label, *values] for r in rows
                             for values in zip(r.steps, r.time, *interval(r.loss), r.acc.mean(0))]

    if base and others:
        targets, speedups = [np.interp(step, base.steps, base.curve.mean(0), left=math.nan) for step in marks.values()], []
        for axis in ("steps", "time"):
            reach = {r.label: np.array([first_crossing(getattr(r, axis), r.curve.mean(0), t) for t in targets])
                     for r in rows}
            speedups += [(r.label, axis, *(reach[base.label] / np.where(reach[r.label] > 0, reach[r.label], math.nan)))
                         for r in others]
        report.table(
            "speedup", e.name,
            f"Speedup: updates (training time) of {base.label} to a target over those of the optimizer; first crossing "
            f"of the mean curves{f' (exponential mean over evaluations, {SMOOTHED})' * base.smoothed} by linear interpolation. Targets: "
            f"{'smoothed ' * base.smoothed}losses of {base.label} at shares of its budget.",
            {"optimizer": "s", "axis": "s"} | dict.fromkeys(marks, ".2f"),
            [("target loss", "", *(f"{target:.4f}" if math.isfinite(target) else "–" for target in targets)), *speedups])
        report.table(
            "paired", e.name,
            f"Final loss of {base.label} − that of the optimizer over n common seeds, positive is better: mean ± half-"
            "width of the 95 % Student-t interval, two-sided p of the paired t-test, not corrected for many rows.",
            {"optimizer": "s", "n": "d", "difference": "+.4f", "p": ".2g"},
            [(r.label, *paired(base, r)) for r in others])

    if base and others and all(len(r.train.steps) for r in rows):
        target = base.train.loss.mean(0)[-1]     # of the curve itself: another order of summing may lie below it
        reach = {r.label: [first_crossing(x, r.train.loss.mean(0), target) for x in (r.train.steps, r.train.time)] for r in rows}
        report.table(
            "train", e.name,
            f"Training loss, smoothed: exponential mean over log lines, {SMOOTHED}; mean ± half-width over seeds; speedup to the last of "
            f"{base.label}, as above but on this curve.",
            {"optimizer": "s", "train loss": ".4f", "in steps": ".2f", "in time": ".2f"},
            [(r.label, interval(r.train.loss[:, -1]), *(a / b if r is not base and b else math.nan
                                                        for a, b in zip(reach[base.label], reach[r.label]))) for r in rows],
            lowest=["train loss"])

    repeats = [(r.label, run.seed, r.runs[run.seed].final_loss, run.final_loss) for r in rows for run in r.repeats]
    if repeats:
        report.table("repeats", e.name, "Repeated runs of one seed: final validation loss and absolute deviation.",
                     {"optimizer": "s", "seed": "s", "main run": ".5f", "repeated run": ".5f", "deviation": ".5f"},
                     [(*repeat, abs(repeat[2] - repeat[3])) for repeat in repeats])

    tokens = math.prod(float(e.settings.get(k, "nan")) for k in ("batch_size", "block_size"))      # of an update
    ms = {r.label: 1e3 * r.times[:, -1] / (r.steps[-1] or math.nan) for r in rows}                  # (N,) each
    report.table(
        "cost", e.name,
        "Cost over the whole run: tokens per second, milliseconds per update and their excess over the baseline, peak "
        "memory and optimizer state of the rank that has most.",
        {"optimizer": "s", "tokens/s": ".0f", "ms/update": ".2f", "excess %": "+.1f", "peak MiB": ".0f",
         "state MiB": ".1f"},
        [(r.label, 1e3 * tokens / ms[r.label].mean(), interval(ms[r.label]),
          100 * (ms[r.label].mean() / ms[base.label].mean() - 1) if base and r is not base else math.nan,
          r.memory("peak_memory_mib"), r.memory("optimizer_state_mib")) for r in rows])


# -----------------------------------------------------------------------------
# Figures

def figures(report, e):
    """Curves over steps and time, the last third, top-1 accuracy, and a figure for each hyperparameter swept."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update({"svg.hashsalt": "report", "axes.spines.top": False, "axes.spines.right": False,
                         "axes.grid": True, "grid.alpha": 0.3, "figure.figsize": (6.4, 4.2),
                         "figure.constrained_layout.use": True, "legend.frameon": False, "legend.fontsize": 8})
    peers = {r.optimizer: [peer for peer in e.rows if peer.optimizer == r.optimizer] for r in e.rows}
    color = {optimizer: f"C{i}" for i, optimizer in enumerate(dict.fromkeys(ORDER + list(peers)))}
    rows = e.rows if len(e.rows) <= 10 else [main_row(group) for group in peers.values()]
    if len(rows) < len(e.rows):
        report.text += ["Curves: of each optimizer the configuration with most seeds, among equals the best.", ""]

    def curves(name, axis, values, ylabel, first, of=lambda r: r):
        """What lies before the share `first` of the budget may leave the figure at the top."""
        fig, ax = plt.subplots()
        seen = []
        for r in rows:
            c = of(r)
            x, (mean, half) = getattr(c, axis), interval(getattr(c, values))
            show = (c.steps >= first * r.steps[-1]) & np.isfinite(x) & np.isfinite(mean)
            seen += mean[show].tolist()
            show |= (c.steps > 0) & (first < 0.5)
            style = ("-", "--", ":", "-.")[[s for s in rows if s.optimizer == r.optimizer].index(r) % 4]
            ax.plot(x[show], mean[show], style, lw=1.4, color=color[r.optimizer], label=f"{r.label} (n={len(r.runs)})")
            low, high = (mean - half)[show], (mean + half)[show]
            ax.fill_between(x[show], low, high, color=color[r.optimizer], alpha=0.2, lw=0)
        if seen:
            pad = 0.05 * (max(seen) - min(seen)) or 0.01
            ax.set(xlabel="updates" if axis == "steps" else "training time (s)", ylabel=ylabel,
                   ylim=(min(seen) - pad, max(seen) + pad))
            ax.legend()
            report.figure(e.name, name, fig)
        plt.close(fig)

    title = "validation loss" + ", smoothed" * rows[0].smoothed
    curves("loss-steps", "steps", "curve", title, 0.1)
    curves("loss-time", "time", "curve", title, 0.1)
    curves("loss-last-third", "steps", "curve", title, 2 / 3)
    curves("accuracy-steps", "steps", "acc", "top-1 accuracy", 0.1)
    curves("train-loss-time", "time", "loss", "training loss, smoothed", 0.1, lambda r: r.train)

    for key, title in SWEEPS.items():
        lines = defaultdict(list)       # one for each optimizer and setting of everything else
        for r in e.rows:
            if number(r.config.get(key, "")) is not None:
                rest = tuple((k, v) for k, v in r.config.items() if k != key)
                lines[r.optimizer, rest].append((number(r.config[key]), *interval(r.final)))
        lines = {k: np.array(sorted(points)).T for k, points in lines.items() if len(points) > 1}
        if not lines:
            continue
        fig, ax = plt.subplots()
        for (optimizer, rest), (x, mean, half) in lines.items():
            alike = [dict(k[1]) for k in lines if k[0] == optimizer]
            varied = [f"{k}={v}" for k, v in rest if any(other.get(k) != v for other in alike)]
            ax.errorbar(x, mean, np.nan_to_num(half), fmt="o-", ms=4, capsize=3, lw=1.2,
                        label=" ".join([optimizer, *varied]), color=color[optimizer] if len(alike) == 1 else None)
        for optimizer, group in peers.items():      # for comparison, those that have one configuration only
            if len(group) == 1:
                ax.axhline(group[0].final.mean(), color=color[optimizer], ls="--", lw=1, label=optimizer)
        ticks = sorted({value for x, _, _ in lines.values() for value in x})
        if key != "ns_steps" and ticks[0] > 0:
            ax.set_xscale("log")
        elif key != "ns_steps":     # from 0 on
            ax.set_xscale("symlog", linthresh=ticks[1])
        ax.set(xlabel=title, ylabel="final validation loss")
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.legend()
        report.figure(e.name, f"sweep-{key}", fig)
        plt.close(fig)


# -----------------------------------------------------------------------------
# Records

def check_record(paths):
    """Prints each rule with what the logs hold against it; True if all hold."""
    from scipy import stats
    runs = read_logs(paths)
    wrong = {f"{k}={found}" for run in runs for k, v in RECORD["task"].items()
             if (found := run.env.get(k, run.settings.get(k))) != str(v)}
    flags = [{k: v for k, v in run.settings.items() if k not in MAY_DIFFER} | {
        k: run.env.get(k) for k in ("device", "world_size", "torch")} for run in runs]
    unequal = {k for f in flags for k in f.keys() | flags[0].keys() if f.get(k) != flags[0].get(k)}
    seeds, sources = {run.seed for run in runs}, {run.source for run in runs}
    loss = np.array([run.final_loss for run in runs])
    p = stats.ttest_1samp(loss, RECORD["target"], alternative="less").pvalue if len(runs) > 1 else math.nan
    checks = {  # rule -> whether it holds, what was found
        "task": (not wrong, ", ".join(sorted(wrong)) or "the reference's"),
        "whole": (not NOTES, "; ".join(NOTES) or "all"),
        "source": (len(sources) == 1 and "" not in sources, f"{len(sources)} source(s)"),
        "settings": (not unequal, ", ".join(sorted(unequal)) + " differ" if unequal else "all"),
        "seeds": (seeds == {f"{i}" for i in range(1, len(runs) + 1)} and len(runs) >= RECORD["min_seeds"],
                  f"{len(runs)} runs of the seeds {', '.join(sorted(seeds, key=in_order))}"),
        "target": (p < RECORD["p"], f"mean {loss.mean():.5f}, p = {p:.2g}"),
    }
    for name, rule in RULES.items():
        holds, found = checks[name]
        print(f"{'pass' if holds else 'FAIL'}  {rule.format(**RECORD, **RECORD['task'])}  [{found}]")
    passed = all(holds for holds, _ in checks.values())
    mean, half = interval(np.array([run.evals[run.budget][1] for run in runs]))
    spread = f" ± {half:.1f}" if len(runs) > 1 else ""
    print(f"{'a record' if passed else 'no record'}: train_time {mean:.1f}{spread} s over {len(runs)} runs")
    return passed


# -----------------------------------------------------------------------------
# Zero-shot table

def zeroshot(report, specs):
    """[NAME=]FILE of lm-eval-harness -> the paper's table: a row for each task, in %, and the macro-average."""
    models = {}     # name -> task -> %
    for spec in specs:
        name, _, file = ("", "", spec) if Path(spec).exists() else spec.rpartition("=")
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
            results, versions, shots, samples = (data[k] for k in ("results", "versions", "n-shot", "n-samples"))
            if not all(isinstance(x, dict) for x in (versions, shots, *results.values(), *samples.values())):
                raise TypeError
        except OSError as e:
            raise UserError(f"cannot read '{file}': {e.strerror}; expected [NAME=]FILE of lm-eval-harness") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{file} holds no results; expected what lm_eval --output_path wrote") from None
        scores = models.setdefault(name or Path(data.get("model_name") or file).name, {})
        for task, (_, metric, version) in ZEROSHOT.items():
            if f"{metric},none" not in results.get(task, {}):
                continue
            if task in scores:
                raise UserError(f"{file}: {task} of this model was in an earlier file; tell models apart: NAME={file}")
            if not isinstance(score := results[task][f"{metric},none"], (int, float)):
                raise UserError(f"{file}: {metric} of {task} is {score!r}; expected a number: run that task again")
            scores[task] = 100 * score
            count = samples.get(task, {})
            for what, found, expected in (("version", versions.get(task), version), ("shots", shots.get(task), 0),
                                          ("samples", count.get("effective"), count.get("original"))):
                if found != expected:
                    note(f"{file}: {task} has {what} {found}, the paper's has {expected}")
    for name, scores in models.items():
        if missing := [task for task in ZEROSHOT if task not in scores]:
            note(f"{name}: no result of {', '.join(missing)}, so no average")
    columns = [[scores.get(task, math.nan) for task in ZEROSHOT] for scores in models.values()]
    rows = [(f"{title} ({metric})", *(c[i] for c in columns)) for i, (title, metric, _) in enumerate(ZEROSHOT.values())]
    report.text += ["## Zero-shot", ""]
    report.table("zeroshot", "zeroshot",
                 "Zero-shot results of lm-eval-harness in %; Average is the unweighted macro-average over the tasks.",
                 {"task": "s"} | dict.fromkeys(models, ".2f"), [*rows, ("Average", *map(np.mean, columns))])


# -----------------------------------------------------------------------------
# main

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see: python tools/report.py --help")


def main(argv=None):
    parser = Parser(prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", metavar="LOGS", help="log files, or folders with *.txt and *.log")
    parser.add_argument("--baseline", default="muon", help="optimizer, or the label of one of its rows (default: muon)")
    parser.add_argument("--out", default="report", help="folder for tables and figures (default: report)")
    parser.add_argument("--seeds", default="", help="only runs with these seeds, such as 1..8 or 1,2,5")
    parser.add_argument("--smooth", action="store_true", help="validation curves, and the speedups on them, are exponential means")
    parser.add_argument("--by_source", action="store_true", help="a row for each version of the script, where you edited it")
    parser.add_argument("--check-record", action="store_true", help="check LOGS against the rules of a record")
    parser.add_argument("--zeroshot", nargs="+", default=[], metavar="[NAME=]JSON", help="results of lm-eval-harness")
    args = parser.parse_intermixed_args(argv)
    NOTES.clear()
    if not args.logs and not args.zeroshot:
        raise UserError("no logs given; expected files or folders: python tools/report.py logs")
    ranges = [part.split("..") for part in args.seeds.split(",") if part]
    if not re.fullmatch(r"(\d+(\.\.\d+)?(,(?=\d)|$))*", args.seeds) or any(int(r[0]) > int(r[-1]) for r in ranges):
        raise UserError(f"found --seeds={args.seeds}; expected numbers and ranges, such as --seeds=1..8 or --seeds=1,2")
    if args.check_record and (args.seeds or args.zeroshot or args.by_source or args.smooth):
        raise UserError("--check-record checks all of LOGS and makes no table; leave --seeds, --by_source, --smooth and --zeroshot out")
    if args.check_record:
        return 0 if check_record(args.logs) else 1
    seeds = {str(seed) for ends in ranges for seed in range(int(ends[0]), int(ends[-1]) + 1)}
    report = Report(args.out)
    for e in build_experiments(read_logs(args.logs, seeds), args.baseline, args.by_source, args.smooth) if args.logs else []:
        report.text += [f"## {e.name}", "", *([e.differs, ""] if e.differs else [])]
        tables(report, e)
        figures(report, e)
    if args.zeroshot:
        zeroshot(report, args.zeroshot)
    report.write()
    return 0


def cli():
    try:
        return main()
    except UserError as e:
        message = str(e)
    except ModuleNotFoundError as e:
        message = f"package {e.name} is missing; tables and figures need it: pip install {e.name}"
    except OSError as e:
        message = f"{e}; expected logs that can be read and a folder --out that can be written"
    print(f"report.py: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(cli())
