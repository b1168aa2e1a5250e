"""Breaks runs of train_gpt.py on purpose: kills at random moments and inside checkpoint writing, signals, dead ranks and nodes,
full disks, damaged checkpoints and shards, a second start, output nobody reads, gradients and losses that are not finite.

    python tests/fault_injection.py            # 50 kills and all the rest, some 3 minutes on 2 cores
    python tests/fault_injection.py --short    # 6 kills and most of the rest, under a minute; the test suite runs this

Every run must end with the weights and the loss of an undisturbed one, bit for bit, or stop with one clear line and then, once
the cause is gone, go on to the same end; and no file that was good may be bad afterwards. The last line counts:
"faults injected N, runs lost 0". Linux. The model is tiny, the data is made here; everything lies in a temporary folder.
"""
import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed.run
import torch._dynamo  # an optimizer's first step imports it: once here, not in every process that is forked

from common import ROOT, fresh, write_shard

SCRIPT = ROOT / "train_gpt.py"
UPDATES = 24
FLAGS = dict(dataset="tiny", n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, micro_batch_size=4, max_iters=UPDATES,
             warmup_iters=2, val_tokens=512, dtype="float32", compile=False, threads=1, device="cpu", sample_tokens=0, log_interval=1,
             eval_interval=12, checkpoint_interval=3, keep_checkpoints=99, resume="auto")
injected, lost = 0, []


def report(fault: str, good: bool, what: str = "") -> None:
    """Counts one fault."""
    global injected
    injected += 1
    if not good:
        lost.append(f"{fault}: {what}")
    print(f"{'survived' if good else 'LOST    '}  {fault}  {what}".replace(f" on {platform.node()} ", " on HOST "), flush=True)


# ---------------------------------------------------------------------------------------------------------------------- runs
def make_data() -> None:
    for file, n in (("train_000001", 2008), ("train_000002", 1000), ("val_000000", 700)):
        write_shard(f"data/tiny/tiny_{file}.bin", np.arange(n) % 61 + np.random.default_rng(n).integers(0, 3, n))
    Path("data/tiny/manifest.json").write_text(json.dumps(dict(shards=[
        dict(file=f"tiny_{file}.bin", split=file.split("_")[0]) for file in ("train_000001", "train_000002", "val_000000")])))


def words(run: str, **changes) -> list[str]:
    return [f"--{name}={value}" for name, value in {**FLAGS, "run_name": run, **changes}.items()]


def start(run: str, meddle=None, **changes) -> int:
    """The script's command line in a process of its own, which has torch already imported; `meddle` gets its module first."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{run}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        module = fresh()
        if meddle:
            meddle(module)
        sys.argv = [SCRIPT.name, *words(run, **changes)]
        code = module.cli()
        for thread in threading.enumerate():  # as Python's own exit does
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def end(pid: int) -> int:
    """The exit status, negative for a signal, as subprocess has it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(name: str, meddle=None, **changes) -> int:
    return end(start(name, meddle, **changes))


def result(name: str) -> str:
    """Final loss, and a digest of the last checkpoint's weights, optimizer state and RNG."""
    found = re.findall(r"^final val_loss:([\d.]+)", Path(f"logs/{name}.txt").read_text(), re.M)
    saved = torch.load(f"checkpoints/{name}/step_{UPDATES:08d}.pt", weights_only=True)
    digest = hashlib.sha256()

    def add(tree):
        if isinstance(tree, torch.Tensor):
            digest.update(tree.numpy().tobytes())
        elif isinstance(tree, (dict, list)):
            for value in tree.values() if isinstance(tree, dict) else tree:
                add(value)
    add([saved["model"], [opt["state"] for opt in saved["optimizers"]], saved["rng"]])
    return f"{found[-1]} {digest.hexdigest()[:12]}"


def good_files(name: str) -> set[str]:
    """Checkpoints that match their checksums, and the log's complete lines."""
    found = set()
    for path in Path(f"checkpoints/{name}").glob("step_*.pt"):
        try:
            if json.loads(path.with_suffix(".json").read_text())["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest():
                found.add(path.name)
        except (OSError, ValueError):
            pass
    log = Path(f"logs/{name}.txt")
    return found | set(log.read_text().splitlines(keepends=True) if log.exists() else ())


def kept(before: set[str], name: str) -> str:
    """What was good before and is not any more; "" if nothing. The log of a run that left no checkpoint begins anew."""
    if not any(line.endswith(".pt") for line in before):
        return ""
    return ", ".join(sorted(line[:60].strip() for line in before - good_files(name) if line.endswith(("\n", ".pt"))))


def one_line(name: str) -> str:
    """The single error line of stderr, beside which there may be lines on checkpoints that could not be saved; or a complaint."""
    lines = Path(f"{name}.err").read_text().splitlines()
    errors = [line for line in lines if line.startswith(f"{SCRIPT.name}: error: ")]
    if len(errors) == 1 and all(line in errors or line.startswith("could not save a checkpoint") for line in lines):
        return errors[0]
    return f"NOT ONE CLEAR LINE: {lines[-5:]}"


def stops_then_goes_on(fault: str, name: str, expected: str, phrase: str, meddle=None, mend=None, **changes) -> None:
    """A run that must stop with one line that has `phrase`, and after `mend` must go on to the expected end."""
    before = good_files(name)
    code = run(name, meddle, **changes)
    line, spoilt = one_line(name), kept(before, name)
    if mend:
        mend()
    again = run(name)
    ok = code == 1 and phrase in line and not spoilt and again == 0 and result(name) == expected
    report(fault, ok, line if ok else f"status {code}, {line}, spoilt: {spoilt or 'nothing'}, then status {again}")


# ---------------------------------------------------------------------------------------------------------------------- faults
def kills(count: int, expected: str, duration: float, rng: random.Random) -> None:
    """kill -9 at random moments, several in each run; saving is slowed down, so that many hit it."""
    def slow(module):
        save = torch.save

        def slowly(content, f):
            save(content, f)
            f.flush()
            data = Path(f.name).read_bytes()
            f.seek(0), f.truncate()
            for at in range(0, len(data), len(data) // 8 + 1):
                f.write(data[at:at + len(data) // 8 + 1]), f.flush()
                time.sleep(duration / 200)
        module.torch.save = slowly

    done = inside = 0
    for number in itertools.count():
        if done >= count:
            break
        name = f"kill{number}"
        for _ in range(min(rng.randint(3, 8), count - done)):
            before, pid = good_files(name), start(name, slow)
            time.sleep(rng.uniform(0.02, duration))
            if os.waitpid(pid, os.WNOHANG)[0]:
                break  # it was over already
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            done += 1
            writing = bool(list(Path(f"checkpoints/{name}").glob("*.tmp")))
            inside += writing
            spoilt = kept(before, name)
            report(f"kill -9 {done}{' while a checkpoint was written' if writing else ''}", not spoilt, spoilt and f"spoilt: {spoilt}")
        code = run(name)
        if code or result(name) != expected:
            lost.append(f"run {name} after its kills: status {code}")
            print(f"LOST      run {name}: status {code}")
    print(f"          {inside} of {done} random kills were inside checkpoint writing")


def kill_at_every_stage_of_saving(expected: str) -> None:
    def at(stage):
        def meddle(module):
            me, calls = os.getpid(), itertools.count()
            die = lambda *_: os.kill(me, signal.SIGKILL)
            save, replace, unlink = torch.save, os.replace, Path.unlink

            def half(content, f):
                save(content, f)
                f.flush()
                os.truncate(f.name, f.tell() // 2)
                die()
            if stage == "half written":
                module.torch.save = lambda content, f: half(content, f) if next(calls) == 3 else save(content, f)
            elif stage == "written, not synced":
                module.os.fsync = lambda fd: die() if next(calls) == 12 else None
            elif stage == "synced, not renamed":
                module.os.replace = lambda a, b: die() if Path(b).name == "step_00000012.pt" else replace(a, b)
            elif stage == "renamed, json missing":
                module.os.replace = lambda a, b: die() if Path(b).name == "step_00000012.json" else replace(a, b)
            elif stage == "old checkpoint removed, its json not":
                Path.unlink = lambda path, **how: die() if path.name == "step_00000003.json" else unlink(path, **how)
        return meddle
    for number, stage in enumerate(("half written", "written, not synced", "synced, not renamed", "renamed, json missing",
                                    "old checkpoint removed, its json not")):
        name = f"stage{number}"
        code = run(name, at(stage), keep_checkpoints=1)
        files = good_files(name)
        again = run(name)
        report(f"kill -9 with a checkpoint {stage}", code == -9 and again == 0 and result(name) == expected and any(
            f.endswith(".pt") for f in files), f"status {code}, then {again}" if code != -9 or again else "")


def signals(count: int, expected: str, duration: float, rng: random.Random) -> None:
    for number in range(count):
        name, which = f"signal{number}", rng.choice([signal.SIGTERM, signal.SIGINT])
        pid = start(name)
        until(name, f"step:{rng.randint(1, UPDATES // 3)}/")
        os.kill(pid, which)
        code = end(pid)
        log = Path(f"logs/{name}.txt").read_text()
        told = re.search(r"stopped after update (\d+) by SIG\w+; go on with the same command and --run_name", log)
        again = run(name)
        report(which.name, code == 0 and bool(told) and again == 0 and result(name) == expected, told[0] if told else f"status {code}")


def until(name: str, text: str, patience: float = 120) -> None:
    """Waits for a line of a log to begin so."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        log = Path(f"logs/{name}.txt")
        if log.exists() and f"\n{text}" in log.read_text():
            return
        time.sleep(0.01)
    raise TimeoutError(f"{name} did not come to {text}")


def reader_gone(expected: str) -> None:
    """Ctrl-C ends `tee` first: then nothing can be printed any more, on stdout or stderr, when the run saves and ends."""
    def meddle(module):
        read, write = os.pipe()
        os.dup2(write, 1), os.dup2(write, 2)
        sys.stdout = open(1, "w", closefd=False)  # the old one may think that it can seek
        stop_after(module, UPDATES // 3, first=lambda: os.close(read))
    code = run("tee", meddle)
    told = re.search(r"stopped after update \d+ .*", Path("logs/tee.txt").read_text())
    again = run("tee")
    report("SIGTERM while nobody reads the output", code == 0 and bool(told) and again == 0 and result("tee") == expected,
           told[0] if told else f"status {code}")


def second_start(expected: str) -> None:
    """Of a run that goes on: it stops with one line, and the run is none the worse."""
    pid = start("twice")
    until("twice", f"step:{UPDATES // 3}/")
    os.kill(pid, signal.SIGSTOP)
    before = good_files("twice")
    code = run("twice", timeout_minutes=0.001)
    line, spoilt = one_line("twice"), kept(before, "twice")
    os.kill(pid, signal.SIGCONT)
    ok = code == 1 and "another process writes to checkpoints/twice" in line and not spoilt
    ok = ok & (end(pid) == 0) and result("twice") == expected
    report("a second start of the same run", ok, line if ok else f"status {code}, {line}, spoilt: {spoilt or 'nothing'}")


def damaged_checkpoints(expected: str, rng: random.Random) -> None:
    newest, json_ = f"step_{UPDATES:08d}.pt", f"step_{UPDATES:08d}.json"
    faults = {
        "truncated": lambda folder: os.truncate(folder / newest, rng.randrange(os.path.getsize(folder / newest))),
        "bit-flipped": lambda folder: flip(folder / newest, rng),
        "missing": lambda folder: (folder / newest).unlink(),
        "without its json": lambda folder: (folder / json_).unlink(),
        "with a damaged json": lambda folder: (folder / json_).write_text('{"size": 1'),
        "damaged, the one before it too": lambda folder: (flip(folder / newest, rng), flip(folder / f"step_{UPDATES - 3:08d}.pt", rng)),
    }
    for what, fault in faults.items():
        name = what.replace(" ", "_").replace(",", "")
        run(name)
        fault(Path(f"checkpoints/{name}"))
        before = good_files(name)
        code = run(name)
        spoilt = kept(before, name)
        report(f"newest checkpoint {what}", code == 0 and not spoilt and result(name) == expected, spoilt)


def flip(path: Path, rng: random.Random, first: int = 0) -> None:
    with open(path, "r+b") as f:
        at = rng.randrange(first, os.path.getsize(path))
        f.seek(at)
        byte = f.read(1)[0] ^ 1 << rng.randrange(8)
        f.seek(at)
        f.write(bytes([byte]))


def damaged_shards(expected: str, rng: random.Random) -> None:
    shutil.copytree("data", "whole")
    shards = [Path(f"data/tiny/tiny_{part}.bin") for part in ("train_000001", "train_000002", "val_000000")]

    def mend():
        shutil.rmtree("data")
        shutil.copytree("whole", "data")
    for what, fault, phrase in (
            ("truncated", lambda path: os.truncate(path, rng.randrange(8, os.path.getsize(path))), "is truncated or damaged: "),
            ("bit-flipped", lambda path: flip(path, rng, 1024), "is damaged: its checksum is "),  # behind the header
            ("missing", os.remove, "run `python prepare.py text --input PATH --name tiny`")):
        name, shard = f"shard_{what}", rng.choice(shards)
        pid = start(name)
        until(name, f"step:{UPDATES // 3}/")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        fault(shard)
        stops_then_goes_on(f"shard {what}", name, expected, phrase, mend=mend)
    shutil.rmtree("whole")


def full_disks(expected: str) -> None:
    def no_file_above(size):
        return lambda module: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # Python ignores the signal: write() fails
    begun = lambda name: run(name, lambda module: stop_after(module, UPDATES // 3))
    begun("disk1")
    stops_then_goes_on("disk full at every checkpoint", "disk1", expected, "could not save a checkpoint", no_file_above(300_000))
    begun("disk2")
    log = os.path.getsize("logs/disk2.txt")
    stops_then_goes_on("disk full for the log too", "disk2", expected, "cannot write logs", no_file_above(log + 1500))
    mount = Path("small")
    mount.mkdir()
    size = 12 << 20
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], capture_output=True).returncode:
        return print("          no right to mount a tmpfs: the full disk was a limit on file size only")
    try:
        pid = start("disk3", checkpoint_dir="small", keep_checkpoints=2)
        until("disk3", f"step:{UPDATES // 4}/")
        try:
            with open(mount / "junk", "wb") as junk:
                while True:
                    junk.write(bytes(1 << 16)), junk.flush()
        except OSError:
            pass
        until("disk3", f"step:{UPDATES * 3 // 4}/")
        (mount / "junk").unlink()
        code = end(pid)
        shutil.copytree(mount / "disk3", "checkpoints/disk3")
        told = Path("disk3.err").read_text()
        report("disk full for a while", code == 0 and result("disk3") == expected and not told.count("Traceback"),
               told.splitlines()[0] if told else "it was never noticed")
    finally:
        subprocess.run(["umount", mount])


def stop_after(module, step: int, first=lambda: None) -> None:
    """SIGTERM to itself in update `step`, after first()."""
    batch = module.Shards.batch

    def reading(self, at, rows):
        if at == step and rows.start == 0:
            first()
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, at, rows)
    module.Shards.batch = reading


def not_finite(expected: str) -> None:
    def gradients(bad):
        def meddle(module):
            initialise, count = module.initialise, itertools.count(-2)  # 2 micro-batches an update, the first update warms up

            def with_hook(model):
                initialise(model)
                model.head.weight.register_hook(lambda g: g * math.nan if next(count) // 2 in bad else g)
            module.initialise = with_hook
        return meddle

    def loss(module):
        forward, count = module.Model.forward, itertools.count(-2)
        module.Model.forward = lambda self, *batch: forward(self, *batch) * (math.inf if next(count) // 2 == UPDATES // 2 else 1)
    code = run("skipped", gradients({10}))
    log = Path("logs/skipped.txt").read_text()
    final = float(re.findall(r"^final val_loss:([\d.]+)", log, re.M)[-1])
    report("a gradient that is not finite", code == 0 and "skipped:1 " in log and abs(final - float(expected.split()[0])) < 0.3,
           "left out, counted")
    stops_then_goes_on("ten of them in a row", "ten", expected, "10 updates in a row", gradients(set(range(UPDATES // 2, 99))))
    stops_then_goes_on("a loss that is not finite", "loss", expected, f"the loss of update {UPDATES // 2 + 1} is inf", loss)


# ---------------------------------------------------------------------------------------------------------------------- ranks, nodes
def torchrun(name: str, *how: str, **changes) -> multiprocessing.Process:
    """In a process of its own, which has torch already imported; its workers import it themselves."""
    def agent():
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(os.open(f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.environ["OMP_NUM_THREADS"] = "1"
        if "--nnodes=2" in how:
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as README says
        torch.distributed.run.main(["--nproc_per_node=1", *how, str(SCRIPT), *words(name, **changes)])
    process = multiprocessing.get_context("fork").Process(target=agent, daemon=True)
    process.start()
    return process


def workers(agent: int) -> list[int]:
    """Processes whose parent is this torchrun."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == agent:
                found.append(int(stat.parent.name))
        except (OSError, ValueError):
            pass
    return sorted(found)


def finish(name: str, *agents: multiprocessing.Process, patience: float = 180) -> list:
    for agent in agents:
        agent.join(patience)
    late = [agent for agent in agents if agent.is_alive()]
    for agent in late:
        for pid in [*workers(agent.pid), agent.pid]:
            os.kill(pid, signal.SIGKILL)
    return [None] if late else [agent.exitcode for agent in agents]


def killed_ranks(count: int, expected: str, rng: random.Random) -> None:
    """A rank dies under torchrun --max-restarts=3: the group goes on by itself. expected: of two ranks that nothing disturbs."""
    group = ("--standalone", "--nproc_per_node=2", "--max-restarts=3")
    for number in range(count):
        name = f"rank{number}"
        agent = torchrun(name, *group)
        until(name, f"step:{rng.randint(5, UPDATES // 2)}/")
        rank = rng.randrange(2)
        os.kill(workers(agent.pid)[rank], signal.SIGKILL)
        codes = finish(name, agent)
        report(f"rank {rank} killed, --max-restarts=3", codes == [0] and result(name) == expected and "resumed:step:" in Path(
            f"logs/{name}.txt").read_text(), "" if codes == [0] else f"status {codes}: {Path(f'{name}.err').read_text()[-300:]}")


def stopped_rank() -> None:
    """A rank that hangs: the other names it and ends, and nobody waits for ever."""
    agent = torchrun("hang", "--standalone", "--nproc_per_node=2", timeout_minutes=0.1, max_iters=100_000, checkpoint_interval=100_000)
    until("hang", "step:5/")
    pid = workers(agent.pid)[1]
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    while "rank 0 stops: rank 1" not in (text := Path("hang.err").read_text()) and time.monotonic() < begin + 90:
        time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    finish("hang", agent)
    line = re.search(r"rank 0 stops: rank 1 .*", text)
    report("rank 1 stopped (SIGSTOP)", bool(line), line[0] if line else text[-300:])


def two_nodes(rng: random.Random, break_it: bool) -> str:
    """Two torchruns on loopback as two nodes: the same losses as one process; a worker and a whole node are lost and come back.
    Returns what two ranks that nothing disturbs come to."""
    def node(name, port):
        return torchrun(name, "--nnodes=2", "--max-restarts=3", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}",
                        f"--rdzv_id={name}")

    def free_port():
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return s.getsockname()[1]

    def curve(name):
        log = Path(f"logs/{name}.txt").read_text()
        return {step: float(loss) for step, loss in re.findall(r"^step:(\d+)/.*?train_loss:([\d.]+)", log, re.M)}
    port = free_port()
    codes = finish("nodes", node("nodes", port), node("nodes", port))
    one, two = curve("whole"), curve("nodes")
    gap = max(abs(one[step] - two[step]) for step in one) if one.keys() == two.keys() else math.inf
    print(f"{'as one  ' if codes == [0, 0] and gap < 1e-3 else 'LOST    '}  two nodes train as one process does: losses differ by at "
          f"most {gap:.1e}")
    if codes != [0, 0] or gap >= 1e-3:
        lost.append(f"two nodes: status {codes}, gap {gap}")
    expected = result("nodes") if codes == [0, 0] else "none"
    for what in ("worker", "node") if break_it else ():
        port, name = free_port(), f"nodes_{what}"
        agents = [node(name, port), node(name, port)]
        until(name, f"step:{rng.randint(5, UPDATES // 2)}/")
        second = agents[1] if listens(agents[0].pid, port) else agents[0]  # not the one that holds the rendezvous
        victims = workers(second.pid)
        if what == "node":
            victims.insert(0, second.pid)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if what == "node":
            second.join()
            agents[agents.index(second)] = node(name, port)  # the machine is back
        codes = finish(name, *agents)
        report(f"a {what} of two lost", codes == [0, 0] and result(name) == expected,
               "" if codes == [0, 0] else f"status {codes}: {Path(f'{name}.err').read_text()[-400:]}")
    return expected


def listens(pid: int, port: int) -> bool:
    """Does this process hold the listening socket of this port?"""
    inodes = {line.split()[9] for table in ("/proc/net/tcp", "/proc/net/tcp6") if os.path.exists(table)
              for line in Path(table).read_text().splitlines()[1:] if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"}
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kills", type=int, help="random kills; default 50, with --short 6")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    args = parser.parse_args()
    rng, begin = random.Random(args.seed), time.monotonic()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="faults-")
    os.chdir(folder)
    try:
        make_data()
        clock = time.monotonic()
        assert run("whole") == 0, Path("whole.err").read_text()
        duration, expected = time.monotonic() - clock, result("whole")
        print(f"undisturbed: {UPDATES} updates in {duration:.1f} s, final loss and digest {expected}")
        assert run("again") == 0 and result("again") == expected, "two undisturbed runs differ"
        kills(args.kills or (6 if args.short else 50), expected, duration, rng)
        kill_at_every_stage_of_saving(expected)
        signals(2 if args.short else 6, expected, duration, rng)
        reader_gone(expected)
        second_start(expected)
        damaged_checkpoints(expected, rng)
        damaged_shards(expected, rng)
        full_disks(expected)
        not_finite(expected)
        killed_ranks(1 if args.short else 4, two_nodes(rng, not args.short), rng)
        if not args.short:
            stopped_rank()
        print(f"{time.monotonic() - begin:.0f} s\n" + "".join(f"lost: {what}\n" for what in lost) +
              f"faults injected {injected}, runs lost {len(lost)}")
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
