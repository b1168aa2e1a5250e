"""What several test files need: the scripts as modules, a tiny data set, runs in this process and on ranks."""
import contextlib, importlib.util, os, signal, sys, zlib
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
TINY = dict(dataset="tiny", n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, micro_batch_size=4,
            max_iters=8, learning_rate=0.01, warmup_iters=2, val_tokens=512, log_interval=1, checkpoint_interval=4,
            optimizer="muon-vs", val_dataset="", dtype="float32", compile=False, device="cpu")

def fresh(script="train_gpt.py", **settings):
    """A fresh copy of the script's module, with these globals or functions."""
    spec = importlib.util.spec_from_file_location(Path(script).stem + "_fresh", ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in settings.items():
        assert hasattr(module, name)
        setattr(module, name, value)
    return module

def train(name, argv=(), script="train_gpt.py", meddle=lambda module: None, **settings):
    """A tiny run in this process; meddle gets the module first. Returns the last checkpoint."""
    module = fresh(script, **TINY | settings, run_name=name)
    meddle(module)
    with contextlib.ExitStack() as afterwards:
        for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
            afterwards.callback(signal.signal, number, signal.getsignal(number))
        module.main(list(argv))
    return checkpoint(name)

def checkpoint(name):
    """The last one."""
    paths = sorted(Path("checkpoints", name).glob("step_0*.pt"))
    return torch.load(paths[-1], weights_only=True) if paths else None

def assert_equal(a, b):
    """Two checkpoints' weights and optimizer states, bit for bit."""
    for part in "model", "optimizer":
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)

def on_ranks(world, **run):
    """train() on `world` ranks, told no more than srun can tell them. What a rank exits with is in exit-RANK."""
    mp.start_processes(_rank, (world, get_free_port(), run, os.getcwd()), world, start_method="forkserver")
    return checkpoint(run["name"])

def _rank(rank, world, port, run, folder):
    os.chdir(folder)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(Path(run.get("script", "")).parent))  # a fork's optim.py, if it has one
    sys.modules.pop("optim", None)
    try:
        train(**run)
    except SystemExit as end:
        Path(folder, f"exit-{rank}").write_text(str(end.code))
        raise

def write_shard(path, tokens, vocab=257, eot=256, ours=True):
    """ours: with the header words that prepare.py fills in and llm.c leaves 0."""
    tokens, header = np.asarray(tokens, np.uint16), np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    if ours:
        header[3:7] = vocab, eot, np.array(zlib.crc32(tokens.tobytes()), np.uint32).view(np.int32), 1
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(header.tobytes() + tokens.tobytes())

def write_tiny(folder="data"):
    """Tokens that a model can learn to predict in part: 125 and 62 windows of 16, 43 for validation."""
    for file, n in ("train_000001", 2008), ("train_000002", 1000), ("val_000000", 700):
        write_shard(f"{folder}/tiny/tiny_{file}.bin", np.arange(n) % 61 + np.random.default_rng(n).integers(0, 3, n))
