"""Breaks runs of train_gpt.py: kill -9, inside saving too, a closed terminal, a full disk, killed and stopped ranks.

    python tests/fault_injection.py            # 60 kills and the rest, some minutes on 2 cores
    python tests/fault_injection.py --short    # 6 kills and no torchrun; the test suite runs this

After each fault the same command goes on, and must end with the weights, bit for bit, of an undisturbed run. Linux.
"""
import collections, contextlib, io, multiprocessing, os, pty, random, resource, signal, subprocess, sys, tempfile, time
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which an optimizer's first step imports: once here, not in every process that is forked
from torch.distributed.elastic.utils.distributed import get_free_port

from common import ROOT, TINY, assert_equal, checkpoint, train, write_tiny

UPDATES, SHORT = 24, "--short" in sys.argv
SETTINGS = TINY | dict(max_iters=UPDATES, checkpoint_interval=2, eval_interval=12, resume="auto")
counts = collections.Counter()

def run(name, meddle):
    sys.stdout = sys.stderr = open(f"{name}.out", "a")
    train(name, meddle=meddle, **SETTINGS)

def start(name, meddle=id):
    """A run in a process of its own, forked from this one, which has imported torch; meddle gets its module."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(name, meddle))
    process.start()
    return process

def end(process):
    process.join()
    return process.exitcode

def goes_on(name, undisturbed="undisturbed"):
    """Starts the run again: does it end as an undisturbed one?"""
    code = end(start(name))
    with contextlib.suppress(AssertionError):
        assert_equal(checkpoint(name), checkpoint(undisturbed))
        return code == 0

def report(fault, survived, count=1):
    counts.update(injected=count, lost=not survived)
    print(f"{'survived' if survived else 'LOST    '}  {fault}", flush=True)

def slow_saving(module):
    """Most of the time goes into writing checkpoints, in two halves."""
    save = torch.save
    def slowly(content, file):
        save(content, buffer := io.BytesIO())
        for part in np.array_split(np.frombuffer(buffer.getvalue(), np.uint8), 2):
            file.write(part), file.flush(), time.sleep(0.03)
    torch.save = slowly

def full_disk(module):
    """From update 10 on no file may grow beyond 300 kB: a checkpoint would, the log does not."""
    save = module.save_checkpoint
    def fails(*args, step, **facts):
        if step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        save(*args, step=step, **facts)
    module.save_checkpoint = fails

def kills(count, duration, rng):
    """Two to five in each run, which then has to end."""
    while counts["injected"] < count:
        name, killed, inside = f"kill{time.time_ns()}", 0, 0
        for _ in range(rng.randint(2, 5)):
            process, wait = start(name, slow_saving), rng.uniform(0.3, 1.0) * duration
            time.sleep(wait)
            process.kill()
            if end(process) != -signal.SIGKILL:  # it was over
                duration = duration if killed else wait  # it was measured beside other work
                break
            killed, inside = killed + 1, inside + bool(list(Path("checkpoints", name).glob("*.tmp")))
        report(f"{killed} x kill -9, {inside} of them inside saving", goes_on(name), killed)

def terminal_closed(name):
    """As when ssh ends: the run gets SIGHUP, and can print nothing more."""
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started this
        train(name, meddle=slow_saving, **SETTINGS)
        os._exit(0)
    at_update_4(name)
    os.close(terminal)
    return os.waitpid(pid, 0)[1] == 0 and "\nstopped; " in text(name)

def torchrun(name, *nodes, **settings):
    """Starts two ranks under torchrun --max-restarts=3, which after a failure starts all ranks again. Under nohup."""
    words = [f"--{key}={value}" for key, value in (SETTINGS | dict(run_name=name) | settings).items()]
    nodes = nodes or ["--standalone", "--nproc_per_node=2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *nodes, "--max-restarts=3", "--shutdown-timeout=2"]
    command = ["nohup", *launcher, str(ROOT / "train_gpt.py"), *words]
    env = os.environ | dict(OMP_NUM_THREADS="1")  # which it sets for two ranks, not for two nodes of one
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)

def text(name):
    log = Path(f"logs/{name}.txt")
    return log.read_text() if log.exists() else ""

def at_update_4(name):
    while "step:4/" not in text(name):
        time.sleep(0.005)

def ranks(launcher):
    """LOCAL_RANK -> process."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return {int(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0LOCAL_RANK=")[1][:1]): int(pid) for pid in children}

def rank_killed(rank, name, **settings):
    launcher = torchrun(name, **settings)
    at_update_4(name)
    os.kill(ranks(launcher)[rank], signal.SIGKILL)
    return launcher.wait() == 0 and "resumed:step:" in text(name)

def late_rank_killed(name):
    """Before it has joined rank 0, which waits for it."""
    launcher, found = torchrun(name), {}
    while 1 not in found:
        with contextlib.suppress(IndexError):  # of a process that is not yet a rank
            found = ranks(launcher)
    os.kill(found[1], signal.SIGSTOP)
    time.sleep(10)
    os.kill(found[1], signal.SIGKILL)
    return launcher.wait() == 0

def node_killed(name):
    """The other node's rank waits for it, as NCCL's do, so that its torchrun counts no failure."""
    rendezvous = "--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{get_free_port()}"
    killed, waits = torchrun(name, *rendezvous), torchrun(name, *rendezvous)
    at_update_4(name)
    os.kill(ranks(waits)[0], signal.SIGSTOP)
    os.kill(ranks(killed)[0], signal.SIGKILL)
    return killed.wait() == waits.wait() == 0 and "resumed:step:" in text(name)

def torchrun_stopped(which, name):
    launcher = torchrun(name)
    at_update_4(name)
    launcher.send_signal(which)
    launcher.wait()
    return "\nstopped; " in text(name) and torchrun(name).wait() == 0

if __name__ == "__main__":
    began, rng = time.time(), random.Random(1)
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    write_tiny()
    assert end(start("undisturbed", slow_saving)) == 0
    kills(6 if SHORT else 60, time.time() - began, rng)
    report("terminal closed", terminal_closed("terminal") and goes_on("terminal"))
    code, kept = end(start("disk", full_disk)), sorted(os.listdir("checkpoints/disk"))
    kept_whole = kept == ["step_00000006.pt", "step_00000008.pt"]
    report("disk full while saving", code == 1 and kept_whole and goes_on("disk"))
    if not SHORT:
        assert torchrun("ranks").wait() == 0
        for name, rank in dict(a=0, b=1, c=0, d=1).items():
            report(f"rank {rank} killed, --max-restarts=3", rank_killed(rank, name) and goes_on(name, "ranks"))
        report("rank 1 killed at its start", late_rank_killed("late") and goes_on("late", "ranks"))
        report("a rank of one of two nodes killed", node_killed("nodes") and goes_on("nodes", "ranks"))
        for which in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
            name = f"torchrun-{which.name}"
            report(f"{which.name} to torchrun", torchrun_stopped(which, name) and goes_on(name, "ranks"))
        assert torchrun("fsdp", fsdp=True).wait() == 0
        for name, rank in dict(e=0, f=1).items():
            report(f"rank {rank} killed under FSDP", rank_killed(rank, name, fsdp=True) and goes_on(name, "fsdp"))
    print(f"{time.time() - began:.0f} s\nfaults injected {counts['injected']}, runs lost {counts['lost']}")
    sys.exit(bool(counts["lost"]))
