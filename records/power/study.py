"""
How much variance adaptation? All runs of the study in records/power, in order. From the project's root, with data/pysrc
and data/english prepared (README.md beside this file) and earlier logs unpacked into logs/:

    OMP_NUM_THREADS=1 python records/power/study.py          # goes on where it was; two runs at a time, one thread each

In a cell (corpus, batch, updates) the rates of each power are searched on seed 101, learning_rate in steps of √2 and
adam_lr in steps of 2, from a starting point until its four neighbours are worse. Power 0 is optimizer=muon.
"""
import math, re, signal, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, "tools")
import sweep

MODEL = "--n_layer=2 --n_embd=128 --n_head=2 --block_size=128 --val_tokens=131072 --log_interval=100 --dtype=float32"
RATES = [0.0003, 0.00043, 0.0006, 0.0009, 0.0012, 0.0018, 0.0025, 0.0035, 0.005, 0.007, 0.01, 0.014, 0.02, 0.028, 0.04]
children, stopped = set(), threading.Event()

def loss(settings: str) -> float:
    """The final validation loss of a run, which is made or finished if need be; infinite where it diverged."""
    if stopped.is_set():
        raise SystemExit
    command = [sys.executable, "tools/sweep.py", "train_gpt.py", *settings.split()]
    name, = sweep.grid(Path("train_gpt.py"), sweep.parse(settings.split(), sys.exit))
    log = Path("logs", f"{name}.txt")
    found = re.findall(r"^final val_loss:(\S+)", log.read_text() if log.exists() else "", re.M)
    if not found:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        children.add(child)
        child.wait()
        children.remove(child)
        found = re.findall(r"^final val_loss:(\S+)", log.read_text() if log.exists() else "", re.M)
        if stopped.is_set():
            raise SystemExit
        print(f"{found[0] if found else 'inf'} {settings}", flush=True)
    return float(found[0]) if found else math.inf

def rule(power: float) -> str:
    return "--optimizer=muon" if power == 0 else f"--optimizer=muon-vs --power={power:g}"

def run(cell: str, power: float, rates: tuple[int, float], seed: int) -> float:
    """rates: index of learning_rate in RATES, adam_lr."""
    learning_rate, adam_lr = RATES[rates[0]], rates[1]
    return loss(f"{MODEL} {cell} {rule(power)} --adam_lr={adam_lr:g} --learning_rate={learning_rate:g} --seed={seed}")

def tuned(cell: str, power: float, start: tuple[float, float]) -> tuple[int, float]:
    """The best rates on seed 101: (index of learning_rate, adam_lr)."""
    best = RATES.index(start[0]), start[1]
    while True:
        i, adam_lr = best
        points = [best, (i - 1, adam_lr), (i + 1, adam_lr), (i, adam_lr / 2), (i, adam_lr * 2)]
        best = min(points, key=lambda rates: run(cell, power, rates, 101))
        if best == points[0]:
            return best

CELLS = {  # flags of a cell: where the searches start, by power
    "--dataset={} --batch_size=64 --max_iters=1600 --eval_interval=160": {0: (0.005, 0.01), 0.5: (0.005, 0.01),
                                                                          1: (0.005, 0.01)},
    "--dataset={} --batch_size=16 --max_iters=6400 --eval_interval=640": {0: (0.0018, 0.01), 0.5: (0.0018, 0.01),
                                                                          1: (0.0018, 0.005)},
    "--dataset={} --batch_size=16 --max_iters=1600 --eval_interval=160": {0: (0.005, 0.02), 0.5: (0.005, 0.02),
                                                                          1: (0.007, 0.01)},
}

def the_line(pool: ThreadPoolExecutor) -> None:
    """Part 3: tuned powers 0, 0.5 and 1; 0.25 and 0.75 at the rates of either neighbour; then seeds 1 to 8."""
    for flags, starts in CELLS.items():
        for dataset in "english", "pysrc":
            cell = flags.format(dataset)
            rates = dict(zip(starts, pool.map(lambda power: tuned(cell, power, starts[power]), starts)))
            between = [(power, rates[near]) for power, nears in ((0.25, (0, 0.5)), (0.75, (0.5, 1))) for near in nears]
            losses = list(pool.map(lambda point: run(cell, *point, 101), between))
            for (power, at), _ in sorted(zip(between, losses), key=lambda item: -item[1]):
                rates[power] = at
            best = min(set(rates) - {0, 1}, key=lambda power: run(cell, power, rates[power], 101))
            print(f"{cell}: best rates {rates}, best power {best}", flush=True)
            list(pool.map(lambda arm: run(cell, arm[1], rates[arm[1]], arm[0]),
                          [(seed, power) for seed in range(1, 9) for power in (0, best, 1)]))

def stop(*_) -> None:
    stopped.set()
    for child in list(children):
        child.send_signal(signal.SIGTERM)

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ThreadPoolExecutor(2) as pool:
        the_line(pool)
