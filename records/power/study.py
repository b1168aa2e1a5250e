"""
How much variance adaptation? All runs of the study in records/power, in order. From the project's root, with data/pysrc
and data/english prepared (README.md beside this file) and earlier logs unpacked into logs/:

    OMP_NUM_THREADS=1 python records/power/study.py          # goes on where it was; two runs at a time, one thread each

In a cell (corpus, batch, updates) the rates of each power are searched on seed 101, learning_rate in steps of √2 and
adam_lr in steps of 2, from a starting point until its four neighbours are worse. One seed may choose badly, so the two
best are also run on seeds 102 and 103, and the better sum of three counts. Power 0 is optimizer=muon.
"""
import math, re, signal, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, "tools")
import sweep

MODEL = "--n_layer=2 --n_embd=128 --n_head=2 --block_size=128 --val_tokens=131072 --log_interval=100 --dtype=float32"
RATES = [0.0003, 0.00043, 0.0006, 0.0009, 0.0012, 0.0018, 0.0025, 0.0035, 0.005, 0.007, 0.01, 0.014, 0.02, 0.028, 0.04]
children, stopped = set(), threading.Event()

def loss(settings: str, script: str = "train_gpt.py") -> float:
    """The final validation loss of a run, which is made or finished if need be; infinite where it diverged."""
    if stopped.is_set():
        raise SystemExit
    command = [sys.executable, "tools/sweep.py", script, *settings.split()]
    name, = sweep.grid(Path(script), sweep.parse(settings.split(), sys.exit))
    log = Path("logs", f"{name}.txt")
    found = re.findall(r"^final val_loss:(\S+)", log.read_text() if log.exists() else "", re.M)
    if not found:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        children.add(child)
        child.wait()
        children.remove(child)
        text = log.read_text() if log.exists() else ""
        found = re.findall(r"^final val_loss:(\S+)", text, re.M)
        if stopped.is_set() or not found and "\ndiverged:" not in text:
            raise SystemExit  # it was stopped
        print(f"{found[0] if found else 'inf'} {settings}", flush=True)
    return float(found[0]) if found else math.inf

def rule(power: float) -> str:
    return "--optimizer=muon" if power == 0 else f"--optimizer=muon-vs --power={power:g}"

def run(cell: str, power: float, rates: tuple[int, float], seed: int, script: str = "train_gpt.py") -> float:
    """rates: index of learning_rate in RATES, adam_lr. What the cell says comes after the model's flags."""
    learning_rate, adam_lr = RATES[rates[0]], rates[1]
    named = [word.partition("=")[0] for word in cell.split()]
    model = " ".join(word for word in MODEL.split() if word.partition("=")[0] not in named)
    rest = f"{rule(power)} --adam_lr={adam_lr:g} --learning_rate={learning_rate:g} --seed={seed}"
    return loss(f"{model} {cell} {rest}", script)

def all_tuned(pool: ThreadPoolExecutor, cell: str, starts: dict) -> dict:
    """The best rates of each power in starts, searched side by side."""
    with ThreadPoolExecutor(len(starts)) as searches:
        return dict(zip(starts, searches.map(lambda power: tuned(pool, cell, power, starts[power]), starts)))

def tuned(pool: ThreadPoolExecutor, cell: str, power: float, start: tuple[float, float]) -> tuple[int, float]:
    """The best rates, (index of learning_rate, adam_lr): the two best of the search, on two more seeds."""
    best, losses = (RATES.index(start[0]), start[1]), {}
    while True:
        i, adam_lr = best
        points = [best, (i - 1, adam_lr), (i + 1, adam_lr), (i, adam_lr / 2), (i, adam_lr * 2)]
        losses |= zip(points, pool.map(lambda rates: run(cell, power, rates, 101), points))
        best = min(points, key=losses.get)
        if best == points[0]:
            break
    pairs = [(rates, seed) for rates in sorted(losses, key=losses.get)[:2] for seed in (102, 103)]
    for (rates, _), more in zip(pairs, pool.map(lambda pair: run(cell, power, *pair), pairs)):
        losses[rates] += more
    return min({rates for rates, _ in pairs}, key=losses.get)

CELLS = {  # flags of a cell: where the searches start, by power; last the one that many.py ran on a GPU
    "--dataset={} --batch_size=64 --max_iters=1600 --eval_interval=160": {0: (0.005, 0.01), 0.5: (0.005, 0.01),
                                                                          1: (0.005, 0.01)},
    "--dataset={} --batch_size=16 --max_iters=6400 --eval_interval=640": {0: (0.0018, 0.01), 0.5: (0.0018, 0.005),
                                                                          1: (0.0018, 0.005)},
    "--dataset={} --batch_size=16 --max_iters=1600 --eval_interval=160": {0: (0.005, 0.02), 0.5: (0.005, 0.02),
                                                                          1: (0.007, 0.01)},
}
LARGE, LONG, SHORT = CELLS

def the_line(pool: ThreadPoolExecutor) -> dict:
    """Part 3. In each cell, first what matters most, on both corpora: powers 0 and 0.5, tuned, seeds 1 to 8. Then power
    1, tuned, and its seeds; 0.25 and 0.75 at the rates of either neighbour; the seeds of the best one between. Returns
    the rates of each power, and the best one between 0 and 1, by cell and corpus."""
    found = {}
    for flags, starts in CELLS.items():
        cells = {dataset: flags.format(dataset) for dataset in ("english", "pysrc")}
        tuned_rates = {}
        for dataset, cell in cells.items():
            tuned_rates[dataset] = all_tuned(pool, cell, {power: starts[power] for power in (0, 0.5)})
            seeds(pool, cell, tuned_rates[dataset], 8)
        for dataset, cell in cells.items():
            tuned_rates[dataset] |= all_tuned(pool, cell, {1: starts[1]})
            seeds(pool, cell, {1: tuned_rates[dataset][1]}, 8)
        for dataset, cell in cells.items():
            rates = tuned_rates[dataset]
            between = [(power, rates[near]) for power, nears in ((0.25, (0, 0.5)), (0.75, (0.5, 1))) for near in nears]
            between = list(dict.fromkeys(between))  # neighbours may have the same
            losses = list(pool.map(lambda point: run(cell, *point, 101), between))
            for (power, at), _ in sorted(zip(between, losses), key=lambda item: -item[1]):
                rates[power] = at
            best = min(set(rates) - {0, 1}, key=lambda power: run(cell, power, rates[power], 101))
            print(f"{cell}: best rates {rates}, best power {best}", flush=True)
            seeds(pool, cell, {best: rates[best]}, 8)
            found[flags, dataset] = rates, best
    return found

def seeds(pool: ThreadPoolExecutor, cell: str, arms: dict, count: int, script: str = "train_gpt.py") -> None:
    """arms: power -> rates. The arms of a seed are neighbours in time."""
    list(pool.map(lambda arm: run(cell, arm[1], arms[arm[1]], arm[0], script),
                  [(seed, power) for seed in range(1, count + 1) for power in arms]))

def doubts(pool: ThreadPoolExecutor, found: dict) -> None:
    """Part 4, at batch 64: a constant rate, which wants lower ones; weight decay; fewer Newton-Schulz steps."""
    cell = LARGE
    for dataset in "english", "pysrc":
        rates, best = found[cell, dataset]
        constant = cell.format(dataset) + " --schedule=constant"
        seeds(pool, constant, all_tuned(pool, constant, dict.fromkeys((0, best, 1), (0.0025, 0.005))), 4)
        for steps in 3, 2:
            seeds(pool, f"{cell.format(dataset)} --ns_steps={steps}", {best: rates[best]}, 4)
    for decay in 0, 0.3:
        arms = {power: rates[power] for power in (0, best)}
        seeds(pool, f"{cell.format('pysrc')} --weight_decay={decay}", arms, 4)

def others(pool: ThreadPoolExecutor, found: dict) -> None:
    """Parts 5 and 6: the demo's model; English in GPT-2's vocabulary (data/english-gpt2); the Llama of records/map."""
    cell = SHORT
    best = found[cell, "pysrc"][1]
    demo = "--preset=demo --n_layer=4 --n_embd=256 --n_head=4 --block_size=256 --val_tokens=262144"
    demo_rates = {0: (RATES.index(0.005), 0.02), best: (RATES.index(0.005), 0.01), 1: (RATES.index(0.005), 0.01)}
    seeds(pool, f"{demo} --max_iters=600 --eval_interval=60", demo_rates, 4)
    seeds(pool, f"{demo} --max_iters=2400 --eval_interval=240", {power: demo_rates[power] for power in (0, best)}, 2)

    english = cell.format("english-gpt2")
    arms = all_tuned(pool, english, dict.fromkeys((0, best, 1), (0.005, 0.01)))
    seeds(pool, english, arms, 4)

    llama = cell.format("pysrc") + " --n_ffn=352"
    rates = {0: (RATES.index(0.007), 0.02), best: (RATES.index(0.005), 0.01), 1: (RATES.index(0.0035), 0.01)}
    seeds(pool, llama, rates, 8, "train_llama.py")

def stop(*_) -> None:
    stopped.set()
    for child in list(children):
        child.send_signal(signal.SIGTERM)

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ThreadPoolExecutor(2) as pool:
        found = the_line(pool)
        doubts(pool, found)
        others(pool, found)
