"""
Times the training step of a script, and other codebases' beside it, in one interleaved run.

    python tools/bench_train.py                                                     # the demo: adamw, muon-vs
    python tools/bench_train.py --nanogpt=../nanoGPT                                # beside a clone of karpathy/nanoGPT
    python tools/bench_train.py --optimizers=adamw --ranks=1,2,4                    # 1, 2 and 4 processes, the same batch
    python tools/bench_train.py --preset=gpt2-small --nanogpt=../nanoGPT            # one GPU
    python tools/bench_train.py --script=train_llama.py --preset=suite-a-130m       # one GPU
    python tools/bench_train.py --preset=gpt2-small --optimizers=muon --n_head=6 --batch_size=512 --micro_batch_size=64 \
        --modded=../modded-nanogpt                                                  # the shape that its script has

Every other --name=value goes to the script. A row is a process that runs the script's own main(); hooks around data,
backward, optimizers and collectives stamp the time (events on a GPU) and, between blocks of updates, wait for the row's
turn: A B C A B C ... A block's first update is not counted. A row's figure is the median of its blocks, a ratio the median
over rounds of the two blocks of a round. nanoGPT is its GPT and configure_optimizers in a loop like its train.py's, on the
same shape and batch. modded-nanogpt's train_gpt_simple.py trains when imported, so it runs unchanged, last and alone, and
its own clock is read. Random tokens stand for a dataset that is not prepared. "communication" is what is waited for: after
the last gradient, inside the optimizer, for the statistics. Peak memory: allocated on a GPU; on a CPU resident, so with
some 500 MiB of libraries. Ends with a Markdown table under its environment; the demo takes 2 minutes on 2 cores.
"""
import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
PHASES = ["data", "forward", "backward", "clip", "optimizer", "communication", "other"]
VOCABULARY = {"pysrc": 257, "dclm": 32000, "c4": 32000}  # of a dataset's tokenizer; the others' is GPT-2's


class UserError(Exception):
    """A mistake of the user: one line on stderr, exit status 1."""


class Parser(argparse.ArgumentParser):
    """With its mistakes in one line."""

    def __init__(self, prog: str, doc: str):
        super().__init__(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message):
        raise UserError(f"{message}; see: python tools/{self.prog} --help")


class Done(BaseException):
    """Leaves a training loop after the last block."""


def load(path: Path):
    """A module by its path; the imports beside it are found."""
    if not path.is_file():
        raise UserError(f"{path} is not there; give the path of a Python file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem + "_under_test", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------------------
# a row's process: trains, and waits for its turn between blocks

class Clock:
    def __init__(self, job: dict, where: torch.device):
        self.job, self.gpu, self.folder, self.facts = job, where.type == "cuda", Path(job["folder"]), lambda: {}
        self.round, self.stamps, self.on = 0, [], False

    def tick(self, phase: str) -> None:
        """What comes now is `phase`."""
        if self.on:
            now = torch.cuda.Event(enable_timing=True) if self.gpu else time.perf_counter()
            if self.gpu:
                now.record()
            self.stamps.append((phase, now))

    def wait(self) -> None:
        """For this row's turn; round 0 is the warm-up."""
        self.on = False
        self.synchronize()
        if self.gpu:
            torch.cuda.empty_cache()  # of what rows on the same GPU need meanwhile
        if self.round == 1:
            forget_peak(self.gpu)
        try:
            while (self.folder / "turn").read_text() != f"{self.job['row']} {self.round}":
                os.kill(self.job["bench"], 0)
                time.sleep(0.01)
        except OSError:
            os._exit(1)  # the bench is gone, or its folder
        self.left, self.stamps, self.on = 1 + (self.job["updates"] if self.round else self.job["warmup"]), [], True
        self.tick("other")

    def update(self) -> None:
        """An update has ended."""
        if not self.on:
            return
        self.tick("update")
        self.left -= 1
        if self.left:
            return
        self.synchronize()
        if os.environ.get("RANK", "0") == "0":
            with open(self.folder / f"{self.job['row']}.jsonl", "a") as f:
                f.write(json.dumps({**self.block(), **self.facts(), "peak": peak(self.gpu)}) + "\n")
        self.round += 1
        if self.round > self.job["rounds"]:
            raise Done
        self.wait()

    def block(self) -> dict:
        """Seconds of an update, whole and by phase, without the first one."""
        begin = self.stamps[0][1]
        at = [begin.elapsed_time(stamp) / 1000 if self.gpu else stamp - begin for _, stamp in self.stamps]
        ends = [i for i, (phase, _) in enumerate(self.stamps) if phase == "update"]
        phases: Counter = Counter()
        for i in range(ends[0], ends[-1]):
            phases[self.stamps[i][0].replace("update", "other")] += (at[i + 1] - at[i]) / (len(ends) - 1)
        return {"seconds": (at[ends[-1]] - at[ends[0]]) / (len(ends) - 1), "phases": phases}

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


def cores() -> int:
    """How many this process may use, where that can be told."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forget_peak(gpu: bool) -> None:
    """So that what compilation took does not count."""
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak(gpu: bool) -> int | None:
    if gpu:
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, TypeError):
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    return None


def state_size(optimizers) -> int:
    return sum(b.numel() * b.element_size() for opt in optimizers for state in opt.state.values()
               for b in state.values() if torch.is_tensor(b) and b.ndim)


def work(job: dict) -> None:
    """Of one row's process (of each of its ranks)."""
    t = load(Path(job["script"]))
    t.configure(job["flags"])
    kind = t.device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # whose events and memory are read
    try:
        {"script": train_script, "nanogpt": train_nanogpt, "matmul": multiply}[job["kind"]](t, job, where, Clock(job, where))
    except Done:
        sys.stdout.flush()
        os._exit(0)  # a process group is not worth the wait


def train_script(t, job: dict, where: torch.device, clock: Clock) -> None:
    """The script's main() with hooks; what they replace is looked up in its module, in Tensor and in torch.distributed."""
    build, evaluate, batch, to_device, backward = t.build_optimizers, t.evaluate, t.Shards.batch, t.to_device, torch.Tensor.backward
    built, facts = {}, {}

    def build_optimizers(model, *args):
        if not built and dist.is_initialized():
            model.embed.weight.register_hook(lambda gradient: clock.tick("communication"))  # the last gradient of all
        built.update(model=model, optimizers=build(model, *args))
        for opt in built["optimizers"]:
            opt.step = stepping(opt.step, opt is built["optimizers"][-1])
        return built["optimizers"]

    def stepping(step, last):
        def stamped():
            clock.tick("optimizer")
            step()
            if last:
                clock.update()
        return stamped

    def evaluating(*args):
        result = evaluate(*args)
        facts.setdefault("first_validation", time.time() - job["began"])
        return result

    def reading(shards, *args):
        clock.tick("data")
        return batch(shards, *args)

    def moved(*args):
        result = to_device(*args)
        clock.tick("forward")
        return result

    def going_back(*args, **kwargs):
        clock.tick("backward")
        backward(*args, **kwargs)
        clock.tick("clip")

    def begin():  # called when all is compiled and the loop begins
        model = built["model"]
        facts.update(start=time.time() - job["began"], threads=torch.get_num_threads(), flops=t.flops_per_token(model),
                     parameters=sum(p.numel() for p in model.parameters()), hardware_peak=t.peak_flops(where),
                     estimate=sum(t.memory_estimate(model, dist.get_world_size() if dist.is_initialized() else 1,
                                                    where.type == "cuda", t.uses_bf16(where)).values()))
        clock.facts = lambda: {**facts, "state": state_size(built["optimizers"])}
        clock.wait()
        return {"signal": None, "time": 0.0}

    t.build_optimizers, t.evaluate, t.Shards.batch, t.to_device, t.listen = build_optimizers, evaluating, reading, moved, begin
    torch.Tensor.backward = going_back
    for name in {"all_reduce", "all_gather_into_tensor", "all_gather_single"} & set(dir(dist)):
        setattr(dist, name, waiting(getattr(dist, name), clock))
    t.main(job["flags"])


def waiting(collective, clock: Clock):
    """A collective whose own time, and that of wait() on what it returns, is communication."""
    def timed(call):
        def timed_call(*args, **kwargs):
            before = clock.stamps[-1][0].replace("update", "other") if clock.stamps else "other"  # an update ends but once
            clock.tick("communication")
            result = call(*args, **kwargs)
            clock.tick(before)
            return result
        return timed_call

    class Waited:
        def __init__(self, work):
            self.wait = timed(work.wait)

    def called(*args, **kwargs):
        work = timed(collective)(*args, **kwargs)
        return Waited(work) if kwargs.get("async_op") else work
    return called


def train_nanogpt(t, job: dict, where: torch.device, clock: Clock) -> None:
    """nanoGPT's model and optimizer, with the defaults and in the order of its train.py; random crops like its get_batch."""
    module = load(Path(job["nanogpt"]) / "model.py")
    shards = t.Shards(t.dataset, "train")
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = module.GPT(module.GPTConfig(block_size=t.block_size, vocab_size=t.vocab_size or -(-shards.vocab // 64) * 64,
                                        n_layer=t.n_layer, n_head=t.n_head, n_embd=t.n_embd, dropout=0.0, bias=False)).to(where)
    optimizer = model.configure_optimizers(1e-1, 6e-4, (0.9, 0.95), where.type)
    compiled = torch.compile(model) if t.compile else model
    autocast = torch.autocast(where.type, torch.bfloat16) if job["bf16"] else contextlib.nullcontext()
    rows = t.micro_batch_size or t.batch_size
    accumulate = t.batch_size // rows

    def batch():
        tokens = np.memmap(shards.files[0], np.uint16, "r", 1024)
        at = torch.randint(len(tokens) - t.block_size, (rows,)).tolist()
        crops = [torch.from_numpy(np.stack([tokens[i + shift:i + shift + t.block_size] for i in at]).astype(np.int64)) for shift in (0, 1)]
        return [crop.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else crop for crop in crops]

    clock.facts = lambda: {"state": state_size([optimizer]), "threads": torch.get_num_threads()}
    clock.wait()
    x, y = batch()
    step = 0
    while True:
        for _ in range(accumulate):
            clock.tick("forward")
            with autocast:
                loss = compiled(x, y)[1] / accumulate
            clock.tick("data")
            x, y = batch()
            clock.tick("backward")
            loss.backward()
        clock.tick("clip")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clock.tick("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()
        step += 1
        clock.update()


def multiply(t, job: dict, where: torch.device, clock: Clock) -> None:
    """The products of one micro-batch with every weight, forward and backward, and nothing else."""
    with torch.device("meta"):
        model = t.Model(t.vocab_size or -(-t.Shards(t.dataset, "train").vocab // 64) * 64)
    shapes = Counter(tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear))
    tokens = (t.micro_batch_size or t.batch_size) * t.block_size
    dtype = torch.bfloat16 if job["bf16"] else torch.float32
    factors = {shape: [torch.randn(size, device=where).to(dtype) for size in (shape, (tokens, shape[1]), (tokens, shape[0]))]
               for shape in shapes}
    clock.facts = lambda: {"flops": 6 * tokens * sum(n * rows * columns for (rows, columns), n in shapes.items())}
    clock.wait()
    while True:
        for shape, n in shapes.items():
            weight, x, gradient = factors[shape]
            for _ in range(n):
                F.linear(x, weight), gradient @ weight, gradient.mT @ x
        clock.update()


# ----------------------------------------------------------------------------------------------------------------------
# all rows: turns and the table

class Row:
    def __init__(self, number: int, title: str, job: dict, ranks: int = 1):
        self.title, self.ranks, self.blocks, self.process = title, ranks, [], None
        self.job, self.folder = {**job, "row": f"row{number}"}, Path(job["folder"])

    def turn(self, round: int) -> None:
        """One block; the warm-up starts the process."""
        path, log = self.folder / f"{self.job['row']}.jsonl", self.folder / f"{self.job['row']}.out"
        (self.folder / "next").write_text(f"{self.job['row']} {round}")
        os.replace(self.folder / "next", self.folder / "turn")
        if not self.process:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"] if self.ranks > 1 else []
            with open(log, "w") as out:
                self.process = subprocess.Popen(
                    [sys.executable, *launch, __file__, "--worker", json.dumps({**self.job, "began": time.time()})],
                    stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        begin, written = time.monotonic(), lambda: path.exists() and path.read_text().count("\n") > round
        while not written():
            ended = self.process.poll() is not None
            if (ended or time.monotonic() - begin > 60 * self.job["timeout"]) and not written():
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                if not ended:
                    raise UserError(too_late(self.title, self.job["timeout"], lines[-1] if lines else "none"))
                told = [line for line in lines if ": error: " in line] or lines or [f"exit status {self.process.returncode}"]
                raise UserError(f"{self.title} ended early: {told[-1].strip()[:300]}")
            time.sleep(0.02)
        self.blocks.append(json.loads(path.read_text().splitlines()[round]))

    def end(self) -> None:
        if self.process:
            kill(self.process, launched=self.ranks > 1)

    @property
    def seconds(self) -> list[float]:
        return [block["seconds"] for block in self.blocks[1:]]


def too_late(title: str, timeout: float, line: str) -> str:
    return f"{title} took longer than --timeout={timeout:g} minutes, give it more if it needs them; its last line: {line.strip()[:300]}"


def kill(process: subprocess.Popen, launched: bool) -> None:
    """launched: by torchrun, whose workers have sessions of their own, so that it has to end them; a stopped one after 30 s."""
    if launched and process.poll() is None:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ratio(row: Row, to: Row) -> float:
    """How many times as fast: the median over rounds."""
    return statistics.median(b / a for a, b in zip(row.seconds, to.seconds))


def table(rows: list[Row], tokens: int, rate: float | None) -> str:
    """Markdown. tokens: of an update. rate: matrix multiplications' FLOP/s where the device has no known peak."""
    flops, hardware_peak = rows[0].blocks[-1]["flops"], rows[0].blocks[-1]["hardware_peak"]
    bases = [row for row in rows if row.job["kind"] == "nanogpt"] or rows[:1]
    head = ["step", "ranks x threads", "tokens/s", "lowest-highest block", "ms/update", *(f"x {base.title}" for base in bases),
            "of the matmul rate" if rate else "MFU", "peak MiB", "estimate MiB", "state MiB",
            *(f"{phase} %" for phase in PHASES), "first validation s", "loop begins s"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        last, middle = row.blocks[-1], statistics.median(row.seconds)
        speeds = sorted(tokens / seconds for seconds in row.seconds)
        best = rate or hardware_peak and hardware_peak * row.ranks
        mib = [f"{last[key] / 2**20:.{digits}f}" if last.get(key) else "" for key, digits in (("peak", 0), ("estimate", 0), ("state", 1))]
        shares = [statistics.median(100 * block["phases"].get(phase, 0) / block["seconds"] for block in row.blocks[1:]) for phase in PHASES]
        lines.append("| " + " | ".join([
            row.title, f"{row.ranks} x {last['threads']}", f"{tokens / middle:,.0f}", f"{speeds[0]:,.0f}-{speeds[-1]:,.0f}",
            f"{1000 * middle:.1f}", *(f"{ratio(row, base):.2f}" for base in bases),
            f"{100 * flops * tokens / middle / best:.1f} %" if best else "n/a", *mib, *(f"{share:.1f}" for share in shares),
            *(f"{last[key]:.1f}" if key in last else "" for key in ("first_validation", "start"))]) + " |")
    return "\n".join(lines)


def random_shard(path: Path, tokens: int, vocab: int) -> None:
    payload = np.random.default_rng(0).integers(0, vocab, tokens, np.uint16).tobytes()
    header = np.zeros(256, np.int32)
    header[:7] = 20240520, 1, tokens, vocab, vocab - 1, np.array(zlib.crc32(payload), np.uint32).view(np.int32), 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + payload)


def modded(path: Path, folder: Path, updates: int = 40, tokens: int = 8 * 64 * 1024, timeout: float = 30) -> str:
    """Runs modded-nanogpt's train_gpt_simple.py on one GPU until its clock has shown `updates`, the first 10 apart; what it did."""
    script = path / "records/track_3_optimization/train_gpt_simple.py"
    if not script.exists():
        raise UserError(f"--modded={path}: {script} does not exist; expected a clone of KellerJordan/modded-nanogpt")
    random_shard(folder / "data/fineweb10B/fineweb_train_000001.bin", (updates + 2) * tokens, 50257)
    random_shard(folder / "data/fineweb10B/fineweb_val_000000.bin", 21 * 524288, 50257)
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(script.resolve())],
                               cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    clock, line, late = {}, "", threading.Event()
    timer = threading.Timer(60 * timeout, lambda: (late.set(), kill(process, launched=True)))
    timer.start()
    try:
        for line in process.stdout:
            if (found := re.match(r"step:(\d+)/\d+ train_time:([\d.]+)s", line)):
                clock[int(found[1])] = float(found[2])
            if updates in clock:
                seconds = (clock[updates] - clock[10]) / (updates - 10)
                return (f"modded-nanogpt's train_gpt_simple.py: {tokens / seconds:,.0f} tokens/s, {1000 * seconds:.1f} ms/update of "
                        f"{tokens:,} tokens")
        raise UserError(too_late("modded-nanogpt's train_gpt_simple.py", timeout, line) if late.is_set() else
                        f"modded-nanogpt's train_gpt_simple.py ended early: {line.strip()[:300]}")
    finally:
        timer.cancel()
        kill(process, launched=True)


def main(argv: list[str]) -> str:
    parser = Parser("bench_train.py", __doc__)
    parser.add_argument("--script", default="train_gpt.py")
    parser.add_argument("--optimizers", default="adamw,muon-vs")
    parser.add_argument("--ranks", default="1", help="for instance 1,2,4")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of a row")
    parser.add_argument("--updates", type=int, default=4, help="that count, of a block")
    parser.add_argument("--warmup", type=int, default=5, help="updates")
    parser.add_argument("--timeout", type=float, default=30.0, help="minutes of a block, of the warm-up with its compilation, of --modded")
    parser.add_argument("--nanogpt", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--modded", help="a clone of KellerJordan/modded-nanogpt")
    args, flags = parser.parse_known_args(argv)
    script = ROOT / args.script
    if not script.exists():
        raise UserError(f"--script={args.script}: {script} does not exist; expected train_gpt.py or train_llama.py")
    if min(args.rounds, args.updates, args.warmup) < 1 or not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.ranks):
        raise UserError("--rounds, --updates and --warmup are at least 1, --ranks is a list such as 1,2,4")
    if not 0 < args.timeout < 1e6:
        raise UserError(f"--timeout={args.timeout:g}: expected minutes above 0, such as --timeout=30")
    t = load(script)
    if not hasattr(t, "build_optimizers"):
        raise UserError(f"--script={args.script} is not a training script; expected train_gpt.py, train_llama.py or a copy of one")
    try:
        for optimizer in args.optimizers.split(","):
            t.configure([*flags, f"--optimizer={optimizer}"])
    except t.UserError as error:
        raise UserError(error) from None
    gpu = t.device != "cpu" and torch.cuda.is_available()
    if args.nanogpt and (hasattr(t, "n_ffn") or not Path(args.nanogpt, "model.py").exists()):
        raise UserError(f"--nanogpt={args.nanogpt}: expected a clone of karpathy/nanoGPT, with its model.py, and --script=train_gpt.py")
    shape = dict(n_layer=12, n_head=6, n_embd=768, block_size=1024, batch_size=512, micro_batch_size=64)
    if args.modded and (not gpu or hasattr(t, "n_ffn") or any(getattr(t, name) != value for name, value in shape.items())):
        raise UserError("--modded needs a GPU and the shape that train_gpt_simple.py has: --script=train_gpt.py --preset=gpt2-small "
                        "--n_head=6 --batch_size=512 --micro_batch_size=64")
    with tempfile.TemporaryDirectory() as temporary:
        folder, data = Path(temporary), Path(t.data_dir).resolve()
        needed = (t.dataset, "train"), (t.val_dataset or t.dataset, "val")
        prepared = all(t.shard_files(data / name, split) for name, split in needed)
        if not prepared:
            data = folder / "data"
            for name, split in needed:
                random_shard(data / name / f"{name}_{split}_000001.bin", 2_000_000, VOCABULARY.get(name, 50257))
        quiet = ["log_interval", "eval_interval", "checkpoint_interval", "max_iters"]
        flags += [*(f"--{name}=1000000000" for name in quiet), f"--val_tokens={t.block_size}", "--check_shards=false", f"--data_dir={data}",
                  f"--log_dir={folder}", f"--checkpoint_dir={folder}"]
        autocast = bool(gpu or "bfloat16" in (t.dtype, t.param_dtype) or t.dtype == "auto" and t.fast_bf16(torch.device("cpu")))
        job = dict(script=str(script), folder=temporary, rounds=args.rounds, updates=args.updates, warmup=args.warmup, timeout=args.timeout,
                   bench=os.getpid())
        several = len(args.ranks.split(",")) > 1
        jobs = [(f"{optimizer} x{ranks}" if several else optimizer, int(ranks), dict(kind="script", flags=[
                *flags, f"--optimizer={optimizer}", f"--run_name={optimizer}-{ranks}"]))
                for ranks in args.ranks.split(",") for optimizer in args.optimizers.split(",")]
        if args.nanogpt:
            clone = str(Path(args.nanogpt).resolve())
            jobs += [(f"nanoGPT {'bf16' if bf16 else 'fp32'}", 1, dict(kind="nanogpt", nanogpt=clone, bf16=bf16, flags=flags))
                     for bf16 in [False] * (not gpu) + [True] * autocast]
        if not gpu:
            jobs += [("matmul", 1, dict(kind="matmul", bf16=autocast, flags=flags))]
        rows = [Row(i, title, {**job, **own}, ranks) for i, (title, ranks, own) in enumerate(jobs)]
        load_before = os.getloadavg()[0]
        try:
            for round in range(args.rounds + 1):
                for row in rows:
                    row.turn(round)
                    print(f"round {round}/{args.rounds} {row.title}: " + ("warm" if round == 0 else f"{1000 * row.seconds[-1]:.1f} ms"),
                          file=sys.stderr, flush=True)
        finally:
            for row in rows:
                row.end()
        first = rows[0].blocks[-1]
        matmul = rows.pop() if not gpu else None
        rate = matmul.blocks[-1]["flops"] / statistics.median(matmul.seconds) if matmul else None
        facts = {
            "command": shlex.join(["python", "tools/bench_train.py", *argv]),
            "cpu": f"{t.cpu_name()}, {cores()} cores, "
                   f"load average {load_before:.2f} before and {os.getloadavg()[0]:.2f} after",
            **({"gpu": torch.cuda.get_device_name()} if gpu else
               {"matmul": f"{rate / 1e9:,.0f} GFLOP/s in {'bf16' if autocast else 'fp32'} on the shapes of the weights and a micro-batch, "
                          "forward and backward"}),
            "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
                        + (f"cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}, " if gpu else "") + platform.platform(),
            "model": f"{args.script}, {first['parameters']:,} parameters, {t.n_layer} layers, {t.n_head} heads, {t.n_embd} wide, "
                     f"{first['flops'] / 1e6:.2f} MFLOP a token",
            "update": f"{t.batch_size} x {t.block_size} tokens, micro-batches of {t.micro_batch_size or 'batch / ranks'}; data: "
                      f"{t.dataset if prepared else 'random tokens'}",
            "blocks": f"{args.rounds} of {args.updates} updates after one that does not count, interleaved; {args.warmup} updates of "
                      "warm-up"}
        lines = [*(f"    {key}: {fact}" for key, fact in facts.items()), "", table(rows, t.batch_size * t.block_size, rate)]
        if args.modded:
            lines += ["", modded(Path(args.modded), folder / "modded", timeout=args.timeout)]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the rows end too
        try:
            print(main(sys.argv[1:]))
        except UserError as error:
            print(f"bench_train.py: error: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            print("bench_train.py: interrupted", file=sys.stderr)
            sys.exit(130)
