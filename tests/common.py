"""What several test files need: the scripts and tools as modules, and a shard."""
import importlib.util
import sys
import zlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


def fresh(script: str = "train_gpt.py"):
    """A fresh copy of the script's module: its globals are the defaults."""
    spec = importlib.util.spec_from_file_location(Path(script).stem + "_fresh", ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_shard(path, tokens, vocab: int = 257, eot: int = 256, ours: bool = True) -> None:
    """ours: with the header words that prepare.py fills in and llm.c leaves 0."""
    tokens, header = np.asarray(tokens, np.uint16), np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    if ours:
        header[3:7] = vocab, eot, np.array(zlib.crc32(tokens.tobytes()), np.uint32).view(np.int32), 1
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(header.tobytes() + tokens.tobytes())
