"""
Runs a grid of settings over a train script; the same command skips what is finished and resumes what is not.

    python tools/sweep.py train_gpt.py --optimizer=muon,muon-vs --learning_rate=0.005,0.01 --seed=1..4 --jobs=2

Every --name=value goes to the script; lists a,b and ranges 1..4 are the axes, (a,b) is one value. A run's name has what
varies and what NAMED lists, in the order given: gpt-muon-vs-lr0.005-seed1; change or drop others in another folder.
--repeat=2 is but a name. Output is in logs/RUN.out until a run succeeds. Jobs share cores and GPUs.
"""
import argparse, itertools, os, re, signal, subprocess, sys, time
from pathlib import Path

NAMED = dict(preset="", dataset="", optimizer="", learning_rate="lr", adam_lr="adam_lr", weight_decay="wd",
             gamma="gamma", power="power", ns_steps="ns", batch_size="batch", max_iters="updates", schedule="",
             seed="seed", repeat="repeat")

def parse(words: list[str], error) -> dict[str, list[str]]:
    """['--seed=1..3', '--optimizer=muon,adamw'] -> {'seed': ['1', '2', '3'], 'optimizer': ['muon', 'adamw']}"""
    axes = {}
    for word in words:
        if not (match := re.fullmatch(r"--(\w+)=(.*)", word)) or match[1] in ("run_name", "resume"):
            error(f"found {word}, expected --name=value; --run_name and --resume are given by sweep.py")
        axes.setdefault(match[1], [])
        for value in re.split(r",(?![^(]*\))", re.sub(", +", ",", match[2])):  # at commas outside parentheses
            ends = re.fullmatch(r"(\d+)\.\.(\d+)", value)
            numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else []
            axes[match[1]] += map(str, numbers or [value])  # 4..1 is for the script to refuse
    return axes

def grid(script: Path, axes: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Run name -> its settings."""
    runs = {}
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values))
        parts = [NAMED.get(name, name) + x for name, x in settings.items() if name in NAMED or len(axes[name]) > 1]
        runs[re.sub(r"[^\w.+-]", "_", "-".join([script.stem.removeprefix("train_"), *parts]))] = settings
    return runs

def finished(log: Path, settings: dict[str, str], script: Path) -> bool:
    """Has the log a final line? Ends the program if it is of other settings."""
    if not log.exists() and Path("checkpoints", log.stem).exists():
        sys.exit(f"checkpoints/{log.stem} has no {log}; move it away too")
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    code, rules, head, body = [*re.split(r"^={100}\n", text, maxsplit=3, flags=re.M), "", "", ""][:4]
    for file, old in (script, code), (script.with_name("optim.py"), rules):
        if old and file.exists() and old != file.read_text(encoding="utf-8"):
            print(f"{log} is of another {file}", file=sys.stderr)
    for name, value in settings.items():
        found = re.search(rf"^--{name}=(.*)$", head, re.M)
        if found and value != "auto" and name != "micro_batch_size" and plain(found[1]) != plain(value):
            sys.exit(f"{log} is of --{name}={found[1]}, not {value}; move it and checkpoints/{log.stem} away")
    return re.search(r"^final ", body, re.M) is not None

def plain(value: str) -> str:  # alike for (.9, 1) and (0.9, 1.0), 1_000 and 1E3, True and true
    return re.sub(r"(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", lambda x: str(float(x[0])), re.sub("[ _]", "", value.lower()))

def start(script: Path, name: str, settings: dict[str, str], job: int, jobs: int) -> subprocess.Popen:
    """Starts a run, in a session of its own: Ctrl-C reaches it through us, once."""
    environment = dict(os.environ)
    if jobs > 1:
        import torch  # to count GPUs
        environment.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // jobs)))
        environment["LOCAL_RANK"] = str(job % max(1, torch.cuda.device_count()))  # the GPU that the script takes
    flags = [f"--{key}={x}" for key, x in settings.items() if key != "repeat"]
    with open(f"logs/{name}.out", "w") as out:
        return subprocess.Popen([sys.executable, script, *flags, f"--run_name={name}", "--resume=auto"], stdout=out,
                                stderr=subprocess.STDOUT, env=environment, start_new_session=True)

def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("script", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args, words = parser.parse_known_args(argv)
    if not args.script.is_file() or args.jobs < 1:
        parser.error(f"found {args.script} --jobs={args.jobs}, expected a train script and at least 1 job")
    runs = grid(args.script, parse(words, parser.error))
    Path("logs").mkdir(exist_ok=True)
    todo = [name for name, settings in runs.items() if not finished(Path(f"logs/{name}.txt"), settings, args.script)]
    signals, running, failed = [], {}, []  # running: job -> name, process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda *_: signals.append(1))
    while running or todo and not signals:
        while todo and not signals and len(running) < args.jobs:
            name, job = todo.pop(0), min(set(range(args.jobs)) - running.keys())
            running[job] = name, start(args.script, name, runs[name], job, args.jobs)
        for _, process in running.values() if signals else ():
            process.terminate()  # to be told again does not matter to it
        time.sleep(0.1)
        for job, (name, process) in [item for item in running.items() if item[1][1].poll() is not None]:
            del running[job]
            out = Path(f"logs/{name}.out")
            if finished(Path(f"logs/{name}.txt"), runs[name], args.script):
                out.unlink()
                print(f"finished: {name}; waiting: {len(todo)}", flush=True)
            elif not signals:
                failed.append(name)
                *_, last = ["no output", *out.read_text(errors="replace").strip().splitlines()]
                print(f"failed: {name}: {last} (see {out})", file=sys.stderr)
    if signals:
        sys.exit("stopped; the same command goes on")
    print(f"{len(runs)} runs: {len(runs) - len(failed)} finished, {len(failed)} failed", *failed, sep="\n  ")
    sys.exit(bool(failed))

if __name__ == "__main__":
    main(sys.argv[1:])
