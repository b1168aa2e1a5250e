"""
Times one step of this project's optimizers and of torch.optim.Muon on the matrices of a model, in turn, in one run.

    python tools/bench_optim.py                # the demo's matrices: seconds, without bf16 units minutes
    python tools/bench_optim.py --shapes=gpt2-small --repeats=10     # a preset: 85 M parameters, a minute on 2 cores
    python tools/bench_optim.py --beside=../before/optim.py --kj=../Muon/muon.py     # and others

A round times one step of each optimizer, in random order. The table has medians over rounds [and quartiles]; a ratio is
taken within a round, whose noise hits both alike.
"""
import argparse, functools, importlib.util, itertools, platform, shlex, sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.benchmark import timer  # synchronises a GPU

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import optim, train_gpt, train_llama

SCRIPTS = {preset: script for script in (train_llama, train_gpt) for preset in script.CHOICES["preset"]}  # demo: a GPT
TORCH = "torch.optim.Muon"

def matrices(preset: str) -> list[tuple[int, int]]:
    """Shapes of the matrices inside the blocks of a preset's model, (outputs, inputs) each."""
    SCRIPTS[preset].configure([f"--preset={preset}"])
    with torch.device("meta"):
        model = SCRIPTS[preset].Model(1)
    return [tuple(p.shape) for p in model.blocks.parameters() if p.ndim == 2]

def load(path: str, name: str):
    """A Python file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def builders(args: argparse.Namespace) -> dict:
    """What makes each optimizer from its parameters, by the optimizer's name."""
    options = dict(lr=1e-4, weight_decay=0.1)
    scaled = options | dict(adjust_lr_fn="match_rms_adamw")
    ours = scaled | dict(ns_dtype=getattr(torch, args.ns_dtype))
    named = {TORCH: functools.partial(torch.optim.Muon, **scaled)}
    if args.kj:
        named["KellerJordan/Muon"] = functools.partial(load(args.kj, "kj").SingleDeviceMuon, momentum=0.95, **options)
    before = load(args.beside, "optim_before") if args.beside else None
    for variant, steps in itertools.product(args.variants, args.ns_steps):
        name, own = variant + f", {steps} steps" * (steps != 5), dict(ours, variant=variant, ns_steps=steps)
        named[name] = functools.partial(optim.Muon, **own)
        if before:
            named[f"{name}, before"] = functools.partial(before.Muon, **own)
    return named

def measure(named: dict, shapes: list[tuple[int, int]], repeats: int, device: str) -> pd.DataFrame:
    """Seconds of a step: a row a round, a column an optimizer."""
    optimizers = {}
    for name, build in named.items():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)  # its own: KellerJordan/Muon writes into gradients
        optimizers[name] = build(params)
        for _ in range(3):  # compile, and find memory
            optimizers[name].step()
    rounds = []
    for i in range(repeats):
        seconds = {}
        for name in np.random.default_rng(i).permutation(list(optimizers)):
            start = timer()
            optimizers[name].step()
            seconds[name] = timer() - start
        rounds.append(seconds)
    return pd.DataFrame(rounds, columns=list(optimizers))

def summary(seconds: pd.DataFrame, base: str) -> str:
    """The table of these columns: against column `base`, and of NAME against "NAME, before" where there is one."""
    table = pd.DataFrame({"ms": with_quartiles(1000 * seconds, 1), "per s": (1 / seconds.median()).round(2),
                          f"ratio to {base}": with_quartiles(seconds.div(seconds[base], axis=0), 3)})
    pairs = {name: seconds[name] / seconds[f"{name}, before"] for name in seconds if f"{name}, before" in seconds}
    if pairs:
        table["ratio to before"] = with_quartiles(pd.DataFrame(pairs), 3)
    return table.to_string(na_rep="")

def with_quartiles(figures: pd.DataFrame, digits: int) -> pd.Series:
    return figures.quantile([0.5, 0.25, 0.75]).round(digits).apply(
        lambda q: "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*q, d=digits))

def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else (
        f"{torch.cpu.get_capabilities().get('cpu_name', 'CPU')}, {torch.get_num_threads()} threads")
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}"

def command() -> str:
    return "command: " + shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]])

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SCRIPTS, default="demo")
    parser.add_argument("--variants", nargs="+", choices=optim.VARIANTS, default=["muon", "muon-vs", "muon-nsr"])
    parser.add_argument("--ns_steps", nargs="+", type=int, default=[5], help="of ours; the others take 5")
    parser.add_argument("--ns_dtype", choices=["bfloat16", "float32"],
                        help="of our Newton-Schulz (what is fast here); the others' is bfloat16")
    parser.add_argument("--repeats", type=int, default=30, help="rounds")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--beside", metavar="PATH", help="another version's optim.py")
    parser.add_argument("--kj", metavar="PATH", help="muon.py of a clone of KellerJordan/Muon")
    args = parser.parse_args()
    args.ns_dtype = args.ns_dtype or str(optim.fast_dtype(args.device)).removeprefix("torch.")

    shapes = matrices(args.shapes)
    seconds = measure(builders(args), shapes, args.repeats, args.device)
    counts = ", ".join(f"{shapes.count(s)} x {s[0]}x{s[1]}" for s in dict.fromkeys(shapes))
    print(f"{command()}\nmachine: {machine(args.device)}\nmatrices: {counts}; fp32, our Newton-Schulz {args.ns_dtype}\n"
          f"medians of {args.repeats} rounds [quartiles]\n\n{summary(seconds, TORCH)}")

if __name__ == "__main__":
    main()
