"""
Times optimizers on the matrices of a model, all in one run, in turn, and prints one table.

    python tools/bench_optim.py                                         # the matrices of gpt2-small
    python tools/bench_optim.py --preset=demo --rounds=50
    python tools/bench_optim.py --shapes=768x3072:12,3072x768:12 --optimizers=torch,muon,muon-vs
    python tools/bench_optim.py --kj=PATH/muon.py --dion=PATH           # peers: clones of KellerJordan/Muon, microsoft/dion
    torchrun --standalone --nproc_per_node=2 tools/bench_optim.py       # sharded: state per rank, communication included
    python tools/bench_optim.py --overhead --preset=demo                # a whole update, as in the paper's overhead table
    python tools/bench_optim.py --overhead --preset=gpt2-small --nproc=8     # the same on eight GPUs

ms: median of the rounds, of one step. ratio: median over the rounds of the time against torch.optim.Muon's (or the first's) in
the same round, so that a noisy machine hurts both; every round begins with another optimizer. rate: operations of the standard
five Newton-Schulz steps per second of the whole step, in TFLOP/s and as a share of the rate of bf16 products of the same shapes
on all ranks here and now; fewer operations give more than 100 %. state: what the optimizer keeps on this rank. extra: the most
memory that a step takes on top of parameters, gradients and state.
"""
import contextlib
import ctypes
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import optim  # noqa: E402
from bench_train import Parser, UserError, cores, forget_peak, load, peak, state_size  # noqa: E402

MIB = 2**20


def script_of(preset: str) -> Path:
    """The first script that has the preset."""
    names = {script: [name for name in load(ROOT / script).PRESETS if "/" not in name] for script in ("train_gpt.py", "train_llama.py")}
    for script, of_script in names.items():
        if preset in of_script:
            return ROOT / script
    raise UserError(f"there is no preset {preset}; expected one of {', '.join(dict.fromkeys(sum(names.values(), [])))}")


def shapes_of(preset: str) -> list[tuple[int, int]]:
    """Shapes of the matrices inside the blocks of a preset's model."""
    script = load(script_of(preset))
    script.configure([f"--preset={preset}"])
    with torch.device("meta"):
        model = script.Model(script.vocab_size or 256)
    return [tuple(p.shape) for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]


def parse_shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for word in text.split(","):
        if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::([1-9]\d*))?", word)):
            raise UserError(f"{word!r} is not a shape; expected ROWSxCOLUMNS or ROWSxCOLUMNS:COUNT, such as 768x3072:12")
        shapes += [(int(match[1]), int(match[2]))] * int(match[3] or 1)
    return shapes


def build(name: str, params: list, args):
    """The optimizer called `name` over `params`, at hyperparameters that change no cost."""
    how = dict(lr=1e-4, weight_decay=0.1)
    if name == "torch":
        return torch.optim.Muon(params, adjust_lr_fn="match_rms_adamw", **how)
    if name == "torch-adamw":
        return torch.optim.AdamW(params, fused=True, **how)
    if name == "adamw":
        return optim.AdamW(params, **how)
    try:
        if name == "kj":
            for p in params:
                p.grad = p.grad.clone()  # it writes into gradients
            return load(Path(args.kj)).SingleDeviceMuon(params, momentum=0.95, **how)
        if name == "dion":
            sys.path.insert(0, args.dion)
            from dion import Muon as DionMuon
            return DionMuon(params, **how)
    except UserError:
        raise
    except Exception as error:  # it is not ours
        raise UserError(f"--{name}={getattr(args, name)}: {type(error).__name__}: {' '.join(str(error).split())[:150]}; expected "
                        f"{'muon.py of a clone of KellerJordan/Muon' if name == 'kj' else 'a clone of microsoft/dion'}") from None
    return optim.Muon(params, variant=name, adjust_lr_fn="match_rms_adamw", **how)


def synchronise(device: str):
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(device: str, function) -> float:
    synchronise(device)
    if dist.is_initialized():
        dist.barrier()  # or a rank would wait within its clock for others that still do what came before
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def standard_flops(shapes) -> int:
    """Of five Newton-Schulz steps as they are written: X Xᵀ, A A and B X."""
    return sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)


def product_seconds(shapes, device: str):
    """A function that computes the products of one standard step for every shape once, on a GPU for all matrices of a shape at
    once, in bf16; and their operations."""
    counts, work, flops = Counter(tuple(sorted(s)) for s in shapes), [], 0
    for (m, n), count in counts.items():
        k = count if device != "cpu" else 1
        X = torch.randn(k, m, n, device=device, dtype=torch.bfloat16).squeeze(0)
        A = torch.randn(k, m, m, device=device, dtype=torch.bfloat16).squeeze(0)
        work += [(X, X.mT), (A, A), (A, X)]
        flops += standard_flops([(m, n)]) / 5 * k

    def multiply():
        for a, b in work:
            a @ b
    return multiply, flops


def extra_memory(device: str, function) -> float:
    """MiB that `function` takes at its peak on top of what there was; on a CPU Linux counts them."""
    gpu = device != "cpu"
    if not gpu:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what it takes would already be there
    synchronise(device)
    forget_peak(gpu)  # the peak is then what there is now
    before = peak(gpu)
    function()
    synchronise(device)
    return math.nan if before is None else (peak(gpu) - before) / MIB


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] + ["---:"] * (len(header) - 1), *rows])


def bench(args) -> str:
    """The table of optimizer steps."""
    shapes = parse_shapes(args.shapes) if args.shapes else shapes_of(args.preset)
    torch.manual_seed(0)
    load(ROOT / "train_gpt.py").keep_memory()  # or glibc's page faults would be in every optimizer's time
    device = args.device
    grads = [torch.randn(s, device=device) for s in shapes]
    start = [torch.randn(s, device=device) * 0.02 for s in shapes]
    optimizers, states, extras = {}, {}, {}
    for name in args.optimizers:
        params = [w.clone().requires_grad_() for w in start]
        for p, g in zip(params, grads):
            p.grad = g
        optimizers[name] = opt = build(name, params, args)
        for _ in range(args.warmup):
            opt.step()
        states[name] = state_size([opt]) / MIB
        extras[name] = extra_memory(device, opt.step)
        opt.step()
    products, product_flops = product_seconds(shapes, device)
    times, product_times = {name: [] for name in optimizers}, []
    names = list(optimizers)
    for i in range(args.rounds):
        product_times.append(seconds(device, products))
        for name in names[i % len(names):] + names[:i % len(names)]:  # nobody always comes first, or after the same one
            times[name].append(seconds(device, optimizers[name].step))
    rate = optim._world() * product_flops / statistics.median(product_times)
    base = "torch" if "torch" in times else args.optimizers[0]
    rows = []
    for name, t in times.items():
        ratio = statistics.median(a / b for a, b in zip(t, times[base]))
        mine = standard_flops(shapes) / statistics.median(t)
        rows.append([NAMES.get(name, name), f"{1000 * statistics.median(t):.1f}", f"{ratio:.3f}"]
                    + (["", ""] if "adamw" in name else [f"{mine / 1e12:.3f}", f"{100 * mine / rate:.0f} %"])
                    + [f"{states[name]:.1f}", f"{extras[name]:.0f}"])
    count = ", ".join(f"{shapes.count(s)} × {s[0]}×{s[1]}" for s in dict.fromkeys(shapes))
    return (f"matrices: {count} ({sum(a * b for a, b in shapes) / 1e6:.1f} M parameters, fp32)\n"
            f"bf16 products of these shapes: {rate / 1e12:.3f} TFLOP/s\n"
            f"median of {args.rounds} rounds after {args.warmup} steps; ratio to {NAMES.get(base, base)}"
            + ("; ours uncompiled, for want of a compiler" if None in optim._compiled else "") + "\n\n"
            + table(["optimizer", "ms", "ratio", "TFLOP/s", "rate", "state MiB", "extra MiB"], rows))


NAMES = {"torch": "torch.optim.Muon", "torch-adamw": "torch.optim.AdamW (fused)", "kj": "KellerJordan SingleDeviceMuon",
         "dion": "dion Muon"}


def overhead(args) -> str:
    """The paper's overhead table: a whole update of the training script, updates 10 to 10 + --updates."""
    script, last, figures = ROOT / args.script if args.script else script_of(args.preset), 10 + args.updates, {}
    base = "muon" if "muon" in args.optimizers else args.optimizers[0]
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder --out={args.out}: {error.strerror}; give one that can be written") from None
    for name in args.optimizers:
        run = f"overhead-{args.preset}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        with tempfile.TemporaryDirectory(dir=args.out) as checkpoints:  # nobody needs them
            flags = dict(preset=args.preset, optimizer=name, max_iters=last, log_interval=10, eval_interval=last,
                         checkpoint_interval=last, keep_checkpoints=1, sample_tokens=0, run_name=run, log_dir=f"{args.out}/logs",
                         checkpoint_dir=checkpoints)
            ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"] if args.nproc > 1 else []
            command = [sys.executable, *ranks, str(script), *args.rest, *(f"--{k}={v}" for k, v in flags.items())]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]  # torchrun's own come last
            told = next((line for line in lines if line.startswith(f"{script.name}: error:")), lines[-1])
            raise UserError(f"{script.name} ended with status {done.returncode}: {told}")
        log = Path(f"{args.out}/logs/{run}.txt").read_text(encoding="utf-8")
        start, end = (float(re.search(rf"^step:{step}/{last} .*?train_time:([\d.]+)s", log, re.M)[1]) for step in (10, last))
        final = dict(re.findall(r"(\w+):([\d.]+)", re.findall(r"^final .*$", log, re.M)[-1]))
        tokens = math.prod(int(re.search(rf"^--{k}=(\d+)", log, re.M)[1]) for k in ("batch_size", "block_size"))
        figures[name] = (tokens * args.updates / (end - start), 1000 * (end - start) / args.updates,
                         float(final["peak_memory_mib"]), float(final["optimizer_state_mib"]))
    forms = (",.0f", ".1f", ",.0f", ",.1f")
    rows = [[name, *(f"{value:{form}} ({100 * (value / ref - 1):+.1f} %)" for value, ref, form in zip(of_name, figures[base], forms))]
            for name, of_name in figures.items()]
    return (f"preset {args.preset} of {script.name} {' '.join(args.rest)}: updates 10 to {last}; in brackets the difference to {base}\n\n"
            + table(["optimizer", "tokens/s", "ms per update", "peak MiB", "state MiB"], rows))


def main(argv: list[str]) -> str:
    parser = Parser("bench_optim.py", __doc__)
    parser.add_argument("--preset", default="gpt2-small", help="of train_gpt.py or train_llama.py: its matrices")
    parser.add_argument("--shapes", default="", help="instead of a preset: ROWSxCOLUMNS:COUNT,...")
    parser.add_argument("--optimizers", type=lambda s: s.split(","), default=None, help="torch, torch-adamw, adamw, kj, dion, and variants")
    parser.add_argument("--kj", default="", help="muon.py of a clone of KellerJordan/Muon")
    parser.add_argument("--dion", default="", help="a clone of microsoft/dion")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--device", default="", choices=["cpu", "cuda"])
    parser.add_argument("--overhead", action="store_true", help="time whole updates of the training script")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of --overhead, which it starts itself")
    parser.add_argument("--updates", type=int, default=200, help="of --overhead, after the first 10")
    parser.add_argument("--script", default="", help="of --overhead, where both scripts have the preset")
    parser.add_argument("--out", default="bench", help="folder for the logs of --overhead")
    args, args.rest = parser.parse_known_args(argv)
    if args.rest and not args.overhead:
        raise UserError(f"{args.rest[0]} is not an option here; --overhead passes what it does not know to the training script")
    if min(args.rounds, args.warmup, args.updates, args.nproc) < 1:
        raise UserError("--rounds, --warmup, --updates and --nproc are at least 1")
    if args.overhead and "RANK" in os.environ or args.nproc > 1 and not args.overhead:
        raise UserError("--overhead starts its ranks itself, with --nproc=N; without --overhead it is torchrun that starts them")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda: this torch finds no GPU; leave the flag out, or give --device=cpu")
    if args.overhead and args.device:
        args.rest.append(f"--device={args.device}")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.optimizers is None:
        args.optimizers = ["muon", "muon-nsr", "muon-vs"] if args.overhead else (
            ["torch"] + ["kj"] * bool(args.kj) + ["dion"] * bool(args.dion) + ["muon", "muon-nsr", "muon-vs"])
    known = [*NAMES, "adamw", *optim.VARIANTS]
    for name in args.optimizers:
        if name not in known:
            raise UserError(f"there is no optimizer {name}; expected one of {', '.join(known)}")
        if name in ("kj", "dion") and not getattr(args, name):
            raise UserError(f"--optimizers={name} needs --{name}=PATH of a clone")
    if "RANK" in os.environ:
        torch.set_num_threads(max(1, cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    where = torch.cuda.get_device_name() if args.device == "cuda" else load(ROOT / "train_gpt.py").cpu_name()
    ranks = f"{args.nproc} ranks" if args.overhead else f"{torch.get_num_threads()} threads a rank, {optim._world()} ranks"
    head = (f"command: {shlex.join(['python', 'tools/bench_optim.py', *argv])}\n"
            f"{where}, {ranks}; torch {torch.__version__}, Python {platform.python_version()}\n")
    return head + (overhead(args) if args.overhead else bench(args))


if __name__ == "__main__":
    try:
        text = main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"bench_optim.py: error: {error}")
    if optim._rank() == 0:
        print(text)
    if dist.is_initialized():
        dist.destroy_process_group()
