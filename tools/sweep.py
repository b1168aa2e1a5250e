"""
Runs a grid of settings over a train script; skips what is finished, resumes what is not.

    python tools/sweep.py train_gpt.py --optimizer=muon,muon-nsr,muon-vs --seed=1..8      # 24 runs, one by one
    python tools/sweep.py train_gpt.py --study=lr --jobs=2                                # two at a time, on own cores
    python tools/sweep.py train_llama.py --study=seeds --preset=suite-a-130m --jobs=8     # the paper's, one GPU a run
    python tools/sweep.py train_llama.py --study=subset --preset=suite-a-1.2b --nproc=8   # each run on eight GPUs
    python tools/sweep.py train_gpt.py --study=gamma --preset=demo --seed=1..8 --dry_run  # only shows the commands

Every --name=value goes to the script; a list 'a,b' or a range '1..8' makes an axis of the grid (--study, --jobs,
--nproc and --dry_run are sweep's own). A run is named by its settings, so the same command goes on where it stopped.
What a run prints is in logs/RUN.out until it succeeds. Ctrl-C stops the runs and waits for them, a second one kills
them. Last line: `24 runs: 24 finished, 0 failed`; exit status 1 if any failed.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# The paper's studies, then two of ours. Settings of the command line replace those here; seed is 1 if not given.
STUDIES = {
    "main": ["--optimizer=adamw,muon,adamuon,normuon,muon2,muon-nsr,muon-vs"],
    "seeds": ["--optimizer=muon,adamuon,normuon,muon2,muon-nsr,muon-vs --seed=1..8"],
    "gamma": ["--optimizer=muon-nsr --gamma=1,10,100,1000,10000", "--optimizer=muon,adamuon,muon-vs"],
    "ordering": ["--optimizer=muon,muon-nsr,muon-nsr-post"],
    "adamuon": ["--optimizer=adamuon --adjust_lr_fn=frobenius --learning_rate=1e-3,2e-3,3e-3,4e-3",
                "--optimizer=adamuon --adjust_lr_fn=original --learning_rate=2e-4,3e-4,4e-4,5e-4"],
    "repeat": ["--optimizer=muon-nsr,muon-vs --repeat=1,2"],    # one seed twice: repeat is not passed on, only named
    "subset": ["--optimizer=muon,muon-nsr,muon-vs --data_seed=201"],    # another draw: of other documents where many more are prepared
    "ns_steps": ["--optimizer=muon,muon-vs --ns_steps=3,4,5"],
    "lr": ["--optimizer=adamw,muon,adamuon,normuon,muon2,muon-nsr,muon-vs --seed=101,102 "  # seeds of no other study
           "--learning_rate=1.25e-3,2.5e-3,5e-3,1e-2,2e-2,4e-2"],
}
SEPARATOR = "\n" + "=" * 100 + "\n"     # between the sections of a log


class UserError(Exception):
    """A mistake of the caller: one line on stderr, exit status 1."""


# -----------------------------------------------------------------------------
# The grid

def parse(words):
    """['--seed=1..3', '--optimizer=muon,adamw'] -> {'seed': ['1', '2', '3'], 'optimizer': ['muon', 'adamw']}"""
    axes = {}
    for word in words:
        name, _, text = word.partition("=")
        values = []
        for value in re.split(r",(?![^(\[]*[)\]])", text):      # a comma within brackets belongs to the value
            ends = re.fullmatch(r"(\d+)\.\.(\d+)", value)
            values += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [value]
        if not re.fullmatch(r"--\w+", name) or not all(values) or not values:
            raise UserError(f"found '{word}'; expected --name=value or a list: --seed=1..8 --optimizer=muon,adamw")
        if axes.setdefault(name[2:], values) is not values:
            raise UserError(f"found {name} twice; expected one list: {name}={','.join(axes[name[2:]] + values)}")
    return axes


def grid(script, study, given):
    """-> {run_name: {setting: value}}, seed by seed, so that a sweep cut short still compares equals."""
    blocks = [parse(line.split()) for line in STUDIES[study]] if study else [{}]
    known = {name for block in blocks for name in block}
    runs = {}
    for block in blocks:
        axes = {"seed": ["1"]} if study else {}
        axes |= block | {k: v for k, v in given.items() if k in block or k not in known}
        axes = dict(sorted(axes.items(), key=lambda axis: axis[0] != "seed"))
        for values in itertools.product(*axes.values()):
            settings = dict(zip(axes, values))
            name, passed = run_name(script, settings), {k: v for k, v in settings.items() if k != "repeat"}
            if (before := runs.setdefault(name, passed)) != passed:
                unlike = [" ".join(f"--{k}={v}" for k, v in a.items() if b.get(k) != v) for a, b in ((before, passed), (passed, before))]
                raise UserError(f"{' and '.join(unlike)} would both be the run {name}; give each a command, --log_dir and "
                                "--checkpoint_dir of its own")
    return runs


def check(script, runs):
    """Has the script's own configure() read every run's flags, before the first one starts; one without it and GLOBALS is not asked."""
    text = script.read_text(errors="replace")
    if "\ndef configure(" not in text or "\nGLOBALS = " not in text:
        return
    sys.path.insert(0, str(script.resolve().parent))
    spec = importlib.util.spec_from_file_location("script", script)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{script} cannot be imported: {type(error).__name__}: {error}; mend it, or install what it needs") from None
    defaults = {name: getattr(module, name) for name in module.GLOBALS}
    for settings in runs.values():
        vars(module).update(defaults)
        try:
            module.configure([f"--{k}={v}" for k, v in settings.items()])
        except module.UserError as error:
            raise UserError(error) from None


def run_name(script, settings):
    """train_gpt.py, {seed: 3, preset: demo, optimizer: muon-nsr, gamma: 10} -> gpt-demo-muon-nsr-gamma10-seed3"""
    s = {k: v for k, v in settings.items() if k not in ("log_dir", "checkpoint_dir") and (k, v) != ("repeat", "1")}
    first = [s.pop(k) for k in ("preset", "optimizer") if k in s]
    last = [k + s.pop(k) for k in ("seed", "repeat") if k in s]
    rest = "-".join(k + v for k, v in sorted(s.items()))      # in whatever order they were given
    if len(rest) > 100:     # a file name has at most 255 bytes
        rest = hashlib.sha256(rest.encode()).hexdigest()[:8]
    parts = [Path(script).stem.removeprefix("train_"), *first, *([rest] if rest else []), *last]
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))


# -----------------------------------------------------------------------------
# Runs, and the cores and GPUs they get

@dataclass
class Run:
    name: str
    log: Path
    command: list
    process = None                              # until it starts

    def start(self, place):
        self.place, (cores, env) = place, place
        self.out = self.log.with_suffix(".out")
        with open(self.out, "w") as out:        # a session of its own: Ctrl-C reaches it through us, and once
            if cores:                           # of this thread, from which the run has them
                everywhere = os.sched_getaffinity(0)
                os.sched_setaffinity(0, cores)
            self.process = subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env,
                                            start_new_session=True)
            if cores:
                os.sched_setaffinity(0, everywhere)

    def finished(self):
        """The log's last section has a final line. (The first two are source code, which may quote one.)"""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return any(part.startswith("final ") or "\nfinal " in part for part in text.split(SEPARATOR)[3:])

    def share(self):
        """Share of its steps that the run has behind it, from the last lines of its log."""
        tail = self.log.read_bytes()[-4096:] if self.log.exists() else b""
        steps = re.findall(rb"^step:(\d+)/(\d+) ", tail, re.M)
        return int(steps[-1][0]) / max(1, int(steps[-1][1])) if steps else 0.0


def gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [g for g in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if g not in ("", "-1")]
    smi = shutil.which("nvidia-smi")
    listing = subprocess.run([smi, "-L"], capture_output=True, text=True).stdout if smi else ""
    return [str(i) for i, _ in enumerate(re.findall(r"^GPU \d", listing, re.M))]


def places(jobs, nproc, devices):
    """-> for each job its cores (None where the system cannot pin) and the environment that keeps it on its GPUs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None] * os.cpu_count()
    what, units = ("GPUs", devices) if devices else ("cores", cores)
    if jobs * nproc > len(units):
        raise UserError(f"--jobs={jobs} with --nproc={nproc} needs {jobs * nproc} {what}, found {len(units)}; give at most "
                        + (f"--jobs={len(units) // nproc}" if nproc <= len(units) else f"--nproc={len(units)}"))
    each, found = max(1, len(cores) // jobs), []
    for j in range(jobs):
        env = {"OMP_NUM_THREADS": str(max(1, each // nproc))}
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[j * nproc:(j + 1) * nproc])
        found.append(([c for c in cores[j * each:(j + 1) * each] if c is not None], env))
    return found


def sweep(todo, free):
    """Runs all, as many at a time as there are free places -> names of those that failed."""
    queue, running, failed, began = list(todo), [], [], time.time()

    def progress():
        done = len(todo) - len(queue) - sum(1 - run.share() for run in running)
        left = f", {(time.time() - began) * (len(todo) / done - 1) / 60:.0f} min left" if done > 0 else ""
        return f"[{len(todo) - len(queue) - len(running)}/{len(todo)}{left}]"

    try:
        while queue or running:
            while queue and free:
                if queue[0].finished():     # by another sweep, meanwhile
                    print(f"finished  {queue.pop(0).name}  {progress()}", flush=True)
                    continue
                running.append(queue.pop(0))
                running[-1].start(free.pop(0))
                print(f"start     {running[-1].name}  {progress()}", flush=True)
            time.sleep(0.2)
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                free.append(run.place)
                if run.process.returncode == 0 and run.finished():
                    run.out.unlink(missing_ok=True)     # two sweeps may share a run
                    print(f"finished  {run.name}  {progress()}", flush=True)
                else:
                    failed.append(run.name)
                    told = run.out.read_text(errors="replace").split("\n") if run.out.exists() else []
                    told = [s for s in told if s.strip()]
                    told = [s for s in told if ": error: " in s] or told or [f"exit status {run.process.returncode}"]
                    print(f"failed    {run.name}  {progress()}: {told[-1]}  (see {run.out})", file=sys.stderr, flush=True)
            if sys.stdout.isatty():
                print(progress(), end="\r", flush=True)
    except (KeyboardInterrupt, OSError):        # a run that went on would write beside the next sweep's
        running = [run for run in running if run.process]
        try:
            for run in running:
                run.process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # of a terminal that is gone
                print(f"interrupted, waiting for {len(running)} runs; the same command goes on", file=sys.stderr, flush=True)
            for run in running:
                run.process.wait()
        finally:        # none is left, or a second Ctrl-C
            for run in running:
                if run.process.poll() is None:  # torchrun's ranks have sessions of their own
                    pids = []
                    for task in Path(f"/proc/{run.process.pid}/task").glob("*/children"):
                        with contextlib.suppress(OSError):  # of a thread that has ended
                            pids += map(int, task.read_text().split())
                    for pid in [*pids, run.process.pid]:
                        with contextlib.suppress(OSError):
                            os.killpg(pid, signal.SIGKILL)
        raise
    return failed


# -----------------------------------------------------------------------------
# main

def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if not words or {"-h", "--help"} & set(words):
        print(__doc__.strip(), "\nstudies:", *(f"{k}: {' and '.join(grids)}" for k, grids in STUDIES.items()), sep="\n")
        return 0
    script = Path(words[0])
    if not script.is_file():
        raise UserError(f"no script '{script}'; expected it first: python tools/sweep.py train_gpt.py --seed=1..8")
    given = parse(word for word in words[1:] if word != "--dry_run")
    if own := given.keys() & {"run_name", "resume"}:
        raise UserError(f"found --{min(own)}; sweep.py names its runs by their settings and resumes them: leave it out")
    study, jobs, nproc = (",".join(given.pop(k, [default])) for k, default in (("study", ""), ("jobs", "1"), ("nproc", "1")))
    if study and study not in STUDIES:
        raise UserError(f"unknown study '{study}'; expected one of {', '.join(STUDIES)}")
    if not re.fullmatch(r"[1-9]\d* [1-9]\d*", f"{jobs} {nproc}"):
        raise UserError(f"found --jobs={jobs} --nproc={nproc}; expected numbers from 1, such as --jobs=2")
    jobs, nproc = int(jobs), int(nproc)
    free = places(jobs, nproc, [] if given.get("device") == ["cpu"] else gpus())
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else []

    logs, todo = Path(given.get("log_dir", ["logs"])[0]), []
    runs = grid(script, study, given)
    check(script, runs)
    sources = [path for path in (script, script.with_name("optim.py")) if path.exists()]
    made = SEPARATOR[1:].join(path.read_text(errors="replace") for path in sources)     # what a log of theirs begins with
    for name, settings in runs.items():
        flags = [f"--{k}={v}" for k, v in settings.items()] + [f"--run_name={name}", "--resume=auto"]
        run = Run(name, logs / f"{name}.txt", [sys.executable, *launcher, str(script), *flags])
        state = "finished" if run.finished() else "resume" if run.log.exists() else "new"
        if state != "finished":
            todo.append(run)
        elif not run.log.read_text(errors="replace").startswith(made):
            print(f"{name} was finished by another version of {' or '.join(map(str, sources))}; to run it anew remove {run.log} and its "
                  "checkpoints")
        if "--dry_run" in words:
            print(f"{state:9} {shlex.join(run.command)}")
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them finished before")
    if "--dry_run" in words:
        return 0
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make the folder --log_dir={logs}: {e.strerror}; give one that can be written") from None
    failed = sweep(todo, free)
    print(f"{len(runs)} runs: {len(runs) - len(failed)} finished, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


def cli():
    def hang_up(number, frame):
        signal.signal(number, signal.SIG_IGN)   # a terminal that closes may send several
        raise KeyboardInterrupt

    for name, handler in (("SIGTERM", signal.default_int_handler), ("SIGHUP", hang_up)):    # nohup's stays ignored
        if signal.getsignal(number := getattr(signal, name, signal.SIGTERM)) == signal.SIG_DFL:
            signal.signal(number, handler)
    try:
        status = main()
        sys.stdout.flush()
        return status
    except UserError as e:
        print(f"sweep.py: error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would fail too
        if "--dry_run" in sys.argv:     # `| head` has read enough
            return 0
        print("sweep.py: error: nobody reads the output; expected a terminal, a file or a reader; the same command goes on",
              file=sys.stderr)
        return 1
    except OSError as e:
        print(f"sweep.py: error: {e}; expected a --log_dir that can be written; the same command goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(cli())
