"""
Trains a Llama (RMSNorm, RoPE, SwiGLU, no biases) with Muon-VS or any optimizer it is compared with: Suites A and B of the
paper as presets. Needs only optim.py:

    python prepare.py                                             # once: the data of the demo, nothing is downloaded
    python train_llama.py                                         # the demo: 3 M parameters, Muon-VS, CPU or GPU
    torchrun --standalone --nproc_per_node=8 train_llama.py --preset=suite-a-130m --optimizer=muon-nsr
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 train_llama.py --preset=suite-b-720m --resume=auto
    python train_llama.py --preset=suite-a-1.2b --param_dtype=bfloat16 --activation_checkpointing=true

Every hyperparameter is a global below; --name=value overrides it. --help lists them. The demo ends with a line
"final val_loss:..." (in nats per byte), a sample, and where log and checkpoint are; on 2 CPU cores with bf16 it trains for under 4 minutes.
Sections that train_gpt.py has too are the same text: change both.
Shapes: B sequences of a micro-batch, T tokens, N = B T, Q queries that attend() takes, D model width, H heads, K head width, V vocabulary.
`where` is the torch.device in use; the global `device` is what was asked for.
"""
import contextlib
import ctypes
import difflib
import errno
import functools
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import types
import warnings
import zlib
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import optim
from optim import VARIANTS, AdamW, Muon

# ======================================================================================================================
# globals: PRESETS below override them, then --name=value on the command line
# ----------------------------------------------------------------------------------------------------------------------
preset = "demo"               # a key of PRESETS that has no slash
run_name = ""                 # logs/RUN.txt, checkpoints/RUN/; default: preset, optimizer, seed, start time (not with --resume=auto)
resume = ""                   # "auto": the newest good checkpoint of this run_name, else start; or a path; "": start
allow_change = False          # resume although a global that changes the mathematics differs
log_dir = "logs"              # RUN.txt, traces, event files
checkpoint_dir = "checkpoints"  # RUN/step_N.pt
# data
data_dir = "data"             # datasets are folders below it, made by prepare.py
dataset = "pysrc"             # the folder with the training shards
val_dataset = ""              # the folder with the validation shards; "" = dataset; another --dataset undoes a preset's
check_shards = True           # verify every shard's checksum and ids at each start; false: sizes and headers only
val_tokens = 262_144          # tokens of the fixed prefix of the validation split
# model
n_layer = 4                   # blocks
n_head = 4                    # heads of attention; a head is n_embd / n_head wide
n_embd = 256                  # model width
n_ffn = 704                   # width of the feed-forward network
block_size = 256              # tokens of context
vocab_size = 0                # rows of embedding and head; 0 = the dataset's, padded up to a multiple of 64
rope_base = 10_000.0          # RoPE turns pair i of a head by position / rope_base^(2i / K)
norm_eps = 1e-5               # of RMSNorm
tied = False                  # embedding and head are one matrix
fused_qkv = False             # query, key and value in one (3 D, D) matrix, orthogonalised as one
init_std = 0.02               # standard deviation of the weights at the start
init_truncated = False        # normal cut at 2 standard deviations
init_residual = False         # projections into the residual stream (attention out, feed-forward down) with init_std / √(2 layers)
activation_checkpointing = False  # recompute every block in the backward pass instead of keeping its activations
# budget
batch_size = 16               # sequences per update, all ranks and micro-batches together
micro_batch_size = 0          # sequences per forward pass of one rank; 0 = batch_size / ranks
max_iters = 600               # updates
# optimizer
optimizer = "muon-vs"         # adamw, or a key of optim.VARIANTS for the matrices inside blocks (adamw for the rest)
learning_rate = 0.01          # peak, matrices inside blocks
adam_lr = 0.01                # peak, embedding, head and vectors
weight_decay = 0.1            # vectors: 0
grad_clip = 1.0               # global norm of the raw gradient over all parameters; 0 = off
momentum = 0.95               # β of the Muon family
gamma = 1000.0                # γ of muon-nsr and muon-nsr-post
beta2 = 0.95                  # β₂ of normuon and muon2
muon_eps = 1e-8               # ε of every variant but muon
ns_steps = 5                  # Newton-Schulz iterations
ns_eps = 1e-7                 # added to the norm that Newton-Schulz divides by
adjust_lr_fn = "match_rms_adamw"  # update scale: original, match_rms_adamw, frobenius
adam_beta1 = 0.9              # β₁ of AdamW
adam_beta2 = 0.95             # β₂ of AdamW
adam_eps = 1e-8               # ε of AdamW
# schedule, of both learning rates
schedule = "wsd"              # constant, cosine (to min_lr_frac), wsd (linear to min_lr_frac over the last decay_frac)
warmup_iters = 20             # updates of linear warm-up
decay_frac = 0.6              # wsd: fraction of max_iters
min_lr_frac = 0.0             # of the peak
# output
log_interval = 10             # updates between progress lines
eval_interval = 100           # updates between validations
checkpoint_interval = 500     # updates between checkpoints; the last update is always saved
keep_checkpoints = 2          # newest ones kept, besides the best of those saved right after a validation
sample_tokens = 300           # generated at the end; 0 = none
wandb = ""                    # project that the figures of log lines are sent to; "" = off; WANDB_MODE=offline needs no account
tensorboard = ""              # true: event files in log_dir/tensorboard/RUN; FOLDER: in FOLDER/RUN; "" = off
# system
seed = 1                      # initialisation, order of the training data, rounding, the sample
data_seed = 0                 # order of the training data alone; 0 = seed
device = ""                   # cpu, cuda, mps; "" = the best there is
dtype = "auto"                # of the model: float32 (a GPU: TF32), bfloat16 (autocast); auto = bfloat16 where the hardware is fast at it
param_dtype = "float32"       # bfloat16: parameters and optimizer state are kept in bf16, and the model runs under autocast
stochastic_rounding = False   # of bf16 parameters
compile = True                # torch.compile; falls back to eager with a warning
threads = 0                   # of a rank on a CPU; 0 = OMP_NUM_THREADS for one rank alone, else cores / ranks on this machine
profile = False               # write a torch profiler trace of a few updates to log_dir/RUN.trace.json
timeout_minutes = 10.0        # a rank that is silent for longer ends the run
max_skipped = 10              # updates in a row left out for a non-finite gradient before the run stops

_suite_a = dict(dataset="dclm", val_dataset="c4", n_layer=32, block_size=4096, batch_size=128, micro_batch_size=4,
                adam_beta1=0.8, adam_beta2=0.98, adam_eps=1e-15, ns_eps=1e-5, adjust_lr_fn="original", warmup_iters=0,
                norm_eps=1e-6, schedule="wsd", decay_frac=0.8, log_interval=1, eval_interval=100, val_tokens=10_000_000)
_suite_b = dict(dataset="fineweb", block_size=512, tied=True, fused_qkv=True, init_truncated=True, learning_rate=1e-3,
                adam_lr=1e-3, warmup_iters=2000, schedule="cosine", min_lr_frac=0.01, adam_eps=1e-8, val_tokens=4_194_304,
                checkpoint_interval=1000)
PRESETS = {  # "NAME/OPTIMIZER" is applied after "NAME"
    "demo": {},
    "demo/adamw": dict(learning_rate=3e-3, adam_lr=3e-3),
    "demo/adamuon": dict(adjust_lr_fn="frobenius"),
    "demo/muon-nsr-post": dict(gamma=10.0),  # a gate behind Newton-Schulz shrinks the update; 1000 leaves too little of it
    "suite-a-130m": dict(_suite_a, n_embd=512, n_head=8, n_ffn=2048, max_iters=5000, learning_rate=0.016, adam_lr=0.0032),
    "suite-a-130m/adamuon": dict(adjust_lr_fn="frobenius", learning_rate=2e-3),
    "suite-a-300m": dict(_suite_a, n_embd=768, n_head=12, n_ffn=3072, max_iters=11_500, learning_rate=0.008, adam_lr=0.0024,
                         momentum=0.98),
    "suite-a-300m/adamuon": dict(adjust_lr_fn="frobenius", learning_rate=1.3e-3),
    "suite-a-1.2b": dict(_suite_a, n_embd=1536, n_head=24, n_ffn=6144, max_iters=23_000, learning_rate=0.008, adam_lr=0.0012,
                         momentum=0.98, batch_size=256, micro_batch_size=2, decay_frac=1.0, grad_clip=2.0, eval_interval=250),
    "suite-a-1.2b/adamuon": dict(adjust_lr_fn="frobenius", learning_rate=1.3e-3),  # the paper has none: the 300M's
    "suite-a-130m/adamw": dict(learning_rate=0.0032),  # nor has it AdamW in Suite A: adam_lr for the matrices too
    "suite-a-300m/adamw": dict(learning_rate=0.0024),
    "suite-a-1.2b/adamw": dict(learning_rate=0.0012),
    "suite-b-210m": dict(_suite_b, n_layer=24, n_head=12, n_embd=768, n_ffn=2048, batch_size=256, micro_batch_size=32,
                         max_iters=128_000, adam_beta2=0.999, grad_clip=0.5, eval_interval=115, checkpoint_interval=1150),
    "suite-b-210m/adamuon": dict(adjust_lr_fn="frobenius"),
    "suite-b-720m": dict(_suite_b, n_layer=12, n_head=16, n_embd=2048, n_ffn=5632, batch_size=1984, micro_batch_size=8,
                         max_iters=48_000, adam_beta2=0.99, grad_clip=0.1, log_interval=1, eval_interval=200),
    "suite-b-720m/adamuon": dict(adjust_lr_fn="frobenius"),
}


# ======================================================================================================================
# configuration
# ----------------------------------------------------------------------------------------------------------------------
class UserError(Exception):
    """A mistake of the user: one line with what was found, what was expected and the command that mends it."""


GLOBALS = [name for name, value in list(globals().items())
           if not name.startswith("_") and type(value) in (bool, int, float, str)]


def configure(argv: list[str]) -> None:
    """Sets this module's globals: preset, then preset/optimizer, then the command line's --name=value."""
    flags = dict(map(parse, argv))
    presets, optimizers = [key for key in PRESETS if "/" not in key], ["adamw", *VARIANTS]
    if unused := set(PRESETS) - {*presets, *(f"{base}/{kind}" for base in presets for kind in optimizers)}:
        raise UserError(f"PRESETS has {min(unused)!r}, which is never applied; expected PRESET/OPTIMIZER, an optimizer being one of "
                        f"{', '.join(optimizers)}")
    chosen = flags.get("preset", preset)
    check_choice("preset", chosen, presets)
    overrides = dict(PRESETS[chosen])
    wanted = flags.get("optimizer", overrides.get("optimizer", optimizer))
    check_choice("optimizer", wanted, optimizers)
    overrides.update(PRESETS.get(f"{chosen}/{wanted}", {}))
    if "dataset" in flags and flags["dataset"] != overrides.get("dataset", dataset):
        overrides["val_dataset"] = ""  # a preset's validation data go with its training data
    try:
        if wrong := [name for name, value in overrides.items() if not isinstance(value, (str, int, float))]:
            raise UserError(f"{wrong[0]} is {overrides[wrong[0]]!r}, expected a text or a number")
        overrides = dict(parse(f"--{name}={value}") for name, value in overrides.items())
    except UserError as error:
        raise UserError(f"the preset {chosen}: {error}") from None
    globals().update(overrides | flags)
    check_globals()


def parse(word: str) -> tuple[str, bool | int | float | str]:
    """--name=value, or the bare --name of a switch, to the global's name and value."""
    name, equals, text = word.removeprefix("--").partition("=")
    kind = type(globals()[name]) if name in GLOBALS else None
    if kind is bool and not equals:
        equals, text = "=", "true"
    if not word.startswith("--") or not equals:
        raise UserError(f"found {word!r}; expected {f'--{name}' if kind else '--name'}=value; see --help")
    if not kind and isinstance(globals().get(name, 0), (tuple, list, dict, type(None))):
        raise UserError(f"--{name} is no flag, because it is {str(globals()[name])[:80]}: edit it in the script")
    if not kind:
        near = difflib.get_close_matches(name, GLOBALS, 1)
        raise UserError(f"there is no --{name}; " + (f"did you mean --{near[0]}={text}?" if near else "--help lists the names"))
    try:
        if kind is bool:
            return name, {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
        return name, value
    except (ValueError, KeyError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"--{name}={text}: expected {expected}, for instance --{name}={globals()[name]}") from None


def check_choice(name: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, 1, 0.3)
        raise UserError(f"--{name}={value} is unknown; expected one of {', '.join(choices)}"
                        + (f"; did you mean --{name}={near[0]}?" if near else ""))


def check_globals() -> None:
    def expect(what: str, good, names: str) -> None:
        for name in names.split():
            if name in GLOBALS and not good(globals()[name]):  # n_ffn, norm_eps and init_std are the Llama's
                raise UserError(f"--{name}={globals()[name]}: expected a number {what}")

    expect("above 0", lambda x: x > 0, "n_layer n_head n_embd n_ffn block_size batch_size max_skipped rope_base init_std log_interval "
           "eval_interval checkpoint_interval val_tokens keep_checkpoints timeout_minutes muon_eps ns_eps adam_eps")
    expect("of at least 0", lambda x: x >= 0, "max_iters micro_batch_size vocab_size learning_rate adam_lr weight_decay grad_clip gamma "
           "ns_steps norm_eps warmup_iters sample_tokens seed data_seed")
    expect("from 0 to 1024", lambda x: 0 <= x <= 1024, "threads")  # OpenMP ends a process that asks for more than it can get
    expect("in [0, 1)", lambda x: 0 <= x < 1, "momentum beta2 adam_beta1 adam_beta2")
    if param_dtype == "bfloat16":
        expect("of at most 0.996 beside --param_dtype=bfloat16, whose 8 bits let no slower average decay", lambda x: x <= 0.996,
               "adam_beta1 adam_beta2" + " momentum" * (optimizer in VARIANTS) + " beta2" * (optimizer in ("normuon", "muon2")))
    expect("in [0, 1]", lambda x: 0 <= x <= 1, "decay_frac min_lr_frac")
    pairs = 2 * n_head
    expect(f"divisible by 2 x --n_head, as RoPE turns pairs: --n_embd={max(1, round(n_embd / pairs)) * pairs}",
           lambda x: x % pairs == 0, "n_embd")
    expect(f"of at least one window of --block_size: --val_tokens={block_size}", lambda x: x >= block_size, "val_tokens")
    check_choice("schedule", schedule, ["constant", "cosine", "wsd"])
    check_choice("adjust_lr_fn", adjust_lr_fn, ["original", "match_rms_adamw", "frobenius"])
    check_choice("dtype", dtype, ["auto", "float32", "bfloat16"])
    check_choice("param_dtype", param_dtype, ["float32", "bfloat16"])
    if device:
        check_choice("device", re.sub(r":\d+$", "", device), ["cpu", "cuda", "mps"])
    if run_name and not re.fullmatch(r"[\w=+-][\w.=+-]*", run_name):
        raise UserError(f"--run_name={run_name}: it names files, so use letters, digits and any of . _ = + -, and no dot at first")


def usage() -> str:
    """The docstring, and every global with its comment."""
    comments = dict(re.findall(r"^(\w+) = .*?  # (.+)$", sources()[0], re.M))
    return __doc__.strip() + "\n\n" + "\n".join(f"  {f'--{name}={globals()[name]}':32}  {comments.get(name, '')}".rstrip()
                                                for name in GLOBALS)


# ======================================================================================================================
# data loader
# ----------------------------------------------------------------------------------------------------------------------
MAGIC, VERSION, HEADER = 20240520, 1, 256  # of llm.c's and modded-nanogpt's .bin: 256 int32, then uint16 tokens
SOURCES = ("openwebtext", "fineweb", "fineweb10b", "fineweb10b-gpt2", "dclm", "c4")  # what `python prepare.py SOURCE` downloads


def padded(ids: int) -> int:
    """Up to a multiple of 64, so that the products with the head are fast."""
    return -(-ids // 64) * 64


def data_flag() -> str:
    """What a command of prepare.py needs where data_dir is not its own default."""
    return f" --data_dir={shlex.quote(data_dir)}" if data_dir != "data" else ""


class Shards:
    """The shards of one split: windows of block_size + 1 tokens, the next one starting at the last token of the one before.
    What is behind a shard's last full window is not read. Reads with pread: nothing stays mapped.
    vocab: number of ids; eot: id of the end of text; tokens: of all shards; checksum: of their headers, which in
    prepare.py's shards hold the payloads'. Of `parts` processes that open the same shards, each verifies its `part`."""

    def __init__(self, name: str, split: str, part: int = 0, parts: int = 1):
        folder = Path(data_dir) / name
        self.files = shard_files(folder, split)
        source = "" if name == "pysrc" else f" {name}" if name in SOURCES else f" text --input PATH --name {name}"
        mend = f"python prepare.py{source}{data_flag()}"
        if not self.files:
            if any(folder.glob("*.bin")) and not (folder / "manifest.json").exists():  # another project's files
                flag = "--val_dataset" if split == "val" else "--dataset"
                mend = (f"python prepare.py import {shlex.quote(str(folder))} --name {name}-shards{data_flag()}` and give "
                        f"`{flag}={name}-shards")
            elif split == "val" and name not in SOURCES and manifest_shards(folder, "train") and not manifest_shards(folder, "val"):
                raise UserError(f"{folder} was prepared without val shards; give --val_dataset=NAME, another dataset of its tokenizer, or "
                                f"run `rm -r {shlex.quote(str(folder))}` and prepare it again with something to validate on")
            elif name in ("fineweb", "dclm") and split == "train":  # far more than a run reads
                mend += f" --tokens {math.ceil(1.02 * max_iters * batch_size * block_size / 1e6)}M"
            raise UserError(f"no {split} shards in {folder} (*_{split}_NUMBER.bin): dataset {name!r} is not prepared; run `{mend}`")
        if missing := manifest_shards(folder, split) - {path.name for path in self.files}:
            raise UserError(f"{folder} lacks {', '.join(sorted(missing))}, which its manifest.json lists; run `{mend}` again")
        self.fds, self.vocab, self.eot, digest, sizes = [], 0, -1, hashlib.sha256(), []
        for i, path in enumerate(self.files):
            try:
                fd = os.open(path, os.O_RDONLY)
                header = np.frombuffer(os.pread(fd, HEADER * 4, 0).ljust(HEADER * 4, b"\0"), np.uint32)
                length = os.fstat(fd).st_size
            except OSError as error:
                mend = "raise the limit that `ulimit -Hn` shows" if error.errno == errno.EMFILE else (
                    f"run `python prepare.py verify {name}{data_flag()}`")
                raise UserError(f"cannot read {path}: {error.strerror}; {mend}") from None
            if header[0] != MAGIC or header[1] != VERSION:
                raise UserError(f"{path} is not a token shard: its first words are {header[:2].tolist()}, expected "
                                f"[{MAGIC}, {VERSION}]; for a nanoGPT .bin run `python prepare.py import {shlex.quote(str(path))} "
                                f"--name {name}-shards{data_flag()}` and give `--dataset={name}-shards`")
            size, vocab, eot, checksum, ours = map(int, header[2:7])
            if length != (expected := HEADER * 4 + 2 * size):
                raise UserError(f"{path} is truncated or damaged: {length} bytes, expected {expected} for the {size} tokens of its "
                                f"header; delete it and run `{mend}` again")
            limit = vocab  # all ids are below it
            if not ours:  # others leave these words 0; their shards are GPT-2's
                vocab, eot, checksum, limit = 50257, 50256, None, vocab_size or 50257
                if check_shards and 0 < vocab_size < vocab:  # then another tokenizer's, whose end of text is not known
                    vocab, eot = vocab_size, 0
            if self.vocab not in (0, vocab):
                raise UserError(f"{path} is of a vocabulary of {vocab} ids, the shards before it of {self.vocab}: "
                                f"another tokenizer's; delete {folder} and run `{mend}` again")
            self.vocab, self.eot = vocab, eot
            if vocab_size and vocab > vocab_size:
                raise UserError(f"{path} is of a vocabulary of {vocab} ids, the model has --vocab_size={vocab_size}; "
                                f"use --vocab_size={padded(vocab)} or a dataset of the model's tokenizer")
            if check_shards and i % parts == part:
                self._check(path, fd, checksum, limit, mend)
            self.fds.append(fd)
            sizes.append(size)
            digest.update(header.tobytes())
        self.tokens, self.checksum = sum(sizes), digest.hexdigest()[:16]
        self.ends = np.cumsum([max(0, (size - 1) // block_size) for size in sizes])  # windows up to and with each shard
        if len(self) == 0:
            raise UserError(f"--block_size={block_size} is longer than the data: {folder} has {self.tokens} {split} tokens in "
                            f"{len(sizes)} shards; lower --block_size or prepare more text")

    @staticmethod
    def _check(path, fd, checksum, limit, mend):
        crc, most, at = 0, 0, HEADER * 4
        while piece := os.pread(fd, 1 << 24, at):
            crc, at = zlib.crc32(piece, crc), at + len(piece)
            most = max(most, int(np.frombuffer(piece, np.uint16).max()))
        if checksum not in (None, crc):
            raise UserError(f"{path} is damaged: its checksum is {crc:08x}, expected {checksum:08x}; delete it and run `{mend}` again")
        if most >= limit:
            raise UserError(f"{path} has token id {most}, expected ids below {limit}; " + (
                f"use --vocab_size={padded(most + 1)} or more" if checksum is None else f"delete it and run `{mend}` again"))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, windows: np.ndarray) -> np.ndarray:
        """The tokens of these windows: (len(windows), block_size + 1) uint16."""
        out = np.empty((len(windows), block_size + 1), np.uint16)
        shards = np.searchsorted(self.ends, windows, "right")
        first = windows - np.concatenate([[0], self.ends])[shards]
        for row, shard, window in zip(out, shards, first):
            if os.preadv(self.fds[shard], [row], HEADER * 4 + 2 * block_size * int(window)) != row.nbytes:
                path = self.files[shard]
                raise UserError(f"{path} became shorter while it was read; run `python prepare.py verify "
                                f"{path.parent.name}{data_flag()}`")
        return out

    def batch(self, step: int, rows: range) -> np.ndarray:
        """These rows of update `step`'s batch, (len(rows), block_size + 1) uint16. The order is a pure function of (seed, step): every
        window once an epoch, in an order of its own for each epoch; a batch that reaches the end of one is filled from the next.
        batch_size and block_size are those of the whole run: with one that changes, windows come twice or never."""
        at = step * batch_size + np.arange(rows.start, rows.stop)
        epochs, places = np.divmod(at, len(self))
        return self.read(np.concatenate([shuffle(places[epochs == e], len(self), data_seed or seed, int(e)) for e in np.unique(epochs)]))


def shard_files(folder: Path, split: str) -> list[Path]:
    """A split's shards, by their names NAME_SPLIT_NUMBER.bin; NAME itself may end in _val or _train."""
    return sorted(path for path in folder.glob("*.bin") if re.search(rf"_{split}_\d+\.bin$", path.name))


def manifest_shards(folder: Path, split: str) -> set[str]:
    """The files of a split that prepare.py's manifest.json lists; none where there is no such file."""
    try:
        return {shard["file"] for shard in json.loads((folder / "manifest.json").read_text())["shards"] if shard["split"] == split}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'manifest.json'} cannot be read ({type(error).__name__}); run `python prepare.py verify "
                        f"{folder.name}{data_flag()}`") from None


def shuffle(i: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(n), chosen by `key`, puts each of i: a Feistel network on the next power of 4, walked
    until below n. Unlike numpy's permutation it needs no table, which would take 8 bytes a window on every rank."""
    half = (max(n - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    rounds = np.random.SeedSequence(key).generate_state(6, np.uint64)
    i = i.astype(np.uint64)
    walking = np.ones(len(i), bool)
    while walking.any():
        left, right = i[walking] >> half, i[walking] & mask
        for r in rounds:
            x = (right + r) * 0x9E3779B97F4A7C15
            x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9
            left, right = right, left ^ ((x ^ (x >> 32)) & mask)
        i[walking] = left << half | right
        walking = i >= n
    return i.astype(np.int64)


def to_device(tokens: np.ndarray, where: torch.device) -> tuple[Tensor, Tensor]:
    """uint16 (B, T + 1) to inputs and targets (B, T), int64."""
    t = torch.from_numpy(tokens.astype(np.int64))
    t = t.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else t.to(where)
    return t[:, :-1], t[:, 1:]


# ======================================================================================================================
# model
# ----------------------------------------------------------------------------------------------------------------------
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: the pairs (k, k + K/2) turned by an angle that grows with t; x is (..., K), cos and sin (..., K/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


def rope_tables(length: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, (length, width / 2) in fp32; width is K."""
    frequency = rope_base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)  # (T, K/2)
    return angle.cos(), angle.sin()


# MKL 2024.2 may stay imprecise if a function's first call uses several threads (pytorch issue 188792); for one number it uses one
for first_call in (torch.cos, torch.sin, torch.exp):
    first_call(torch.zeros(1, device="cpu"))

FUTURE_TT = torch.full((512, 512), -math.inf, dtype=torch.bfloat16).triu(1)  # -inf where the key comes after the query


def attend(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention with RoPE; q, k, v and the result are (B, T, H, K). In two forms: change both. On a CPU, up to 512 tokens, plain
    products, whose backward is faster than the fused kernel's: 128 queries at a time meet only the keys up to their last one, and
    softmax divides after the product with v, (T, K) instead of (T, T). Else the fused kernel."""
    T = q.size(1)
    if q.device.type != "cpu" or T > len(FUTURE_TT):  # rotated before the transpose, as the kernel's result lies in memory like q
        q, k = (rotate(x, cos[:, None], sin[:, None]) for x in (q, k))
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, K)
    q, k = (rotate(x, cos, sin) for x in (q, k))
    parts = []
    for i in range(0, T, 128):
        j = min(i + 128, T)
        scores_BHQT = (q[:, :, i:j] * q.size(3) ** -0.5) @ k[:, :, :j].mT + FUTURE_TT[i:j, :j].to(q.dtype)
        weights_BHQT = torch.exp(scores_BHQT - scores_BHQT.amax(-1, keepdim=True).detach())
        sums_BHQ1 = weights_BHQT.sum(-1, keepdim=True, dtype=torch.promote_types(q.dtype, torch.float32))
        parts.append((weights_BHQT @ v[:, :, :j] / sums_BHQ1).type_as(v))
    return torch.cat(parts, 2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        if fused_qkv:
            self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(n_embd, n_embd, bias=False) for _ in range(3))
        self.proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x_BTD, cos, sin):
        B, T, D = x_BTD.shape
        parts = self.qkv(x_BTD).chunk(3, -1) if fused_qkv else (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        q, k, v = (part.view(B, T, n_head, D // n_head) for part in parts)
        return self.proj(attend(q, k, v, cos, sin).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(n_embd, n_ffn, bias=False)
        self.up = nn.Linear(n_embd, n_ffn, bias=False)
        self.down = nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, x_BTD):
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(n_embd, eps=norm_eps)
        self.attn = Attention()
        self.norm2 = nn.RMSNorm(n_embd, eps=norm_eps)
        self.mlp = MLP()

    def forward(self, x_BTD, cos, sin):
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD), cos, sin)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Model(nn.Module):
    def __init__(self, vocab: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.norm = nn.RMSNorm(n_embd, eps=norm_eps)
        self.head = nn.Linear(n_embd, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        cos, sin = rope_tables(block_size, n_embd // n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def trunk(self, tokens_BT: Tensor) -> Tensor:
        """(B, T) ids to (B, T, D), what the last norm and the head read."""
        x_BTD, T = self.embed(tokens_BT), tokens_BT.size(1)
        for block in self.blocks:
            if activation_checkpointing and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, self.cos[:T], self.sin[:T], use_reentrant=False)
            else:
                x_BTD = block(x_BTD, self.cos[:T], self.sin[:T])
        return x_BTD

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """(B, T) ids to (B, T, V)."""
        return self.unembed(self.trunk(tokens_BT))

    def unembed(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, V), for training, validation and samples alike."""
        return self.head(self.norm(x_BTD))

    def loss(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """forward() from the trunk's output on: a method, so that it is compiled as one."""
        return F.cross_entropy(self.unembed(x_BTD).flatten(0, 1).float(), targets_BT.flatten())

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats, a scalar."""
        return self.loss(self.trunk(tokens_BT), targets_BT)

    def compile_parts(self) -> None:
        """torch.compile of a block and of the loss: all blocks share one graph, so a deep model compiles as fast as a shallow one."""
        if torch._inductor.config.cpp.vec_isa_ok is None:  # TORCHINDUCTOR_VEC_ISA_OK=0 turns vectors off
            torch._inductor.config.cpp.vec_isa_ok = True  # else 10 s of compiling go into learning what /proc/cpuinfo says
        if not torch.compiler.config.cache_key_tag:  # torch's cache does not tell vector sets apart; code for another one gives NaN
            torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
        limit = torch._dynamo.config.recompile_limit  # of graphs a function may have: an edited block may have one a layer and mode
        torch._dynamo.config.recompile_limit = max(limit, 2 * len(self.blocks) + 8)
        torch._dynamo.config.optimize_ddp = False  # it would cut that graph at DDP's buckets; gradients leave block by block anyway
        for block in self.blocks:
            block.compile(dynamic=False)
        self.loss = types.MethodType(torch.compile(type(self).loss, dynamic=False), self)  # a method, which deepcopy binds to the copy


# ======================================================================================================================
# initialisation
# ----------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def initialise(model: Model) -> None:
    """Normal, plain or truncated, with init_std, smaller with init_residual; gains 1. What a module has set itself is overwritten."""
    for name, p in model.named_parameters():
        layer, std = re.sub(r"^blocks\.\d+\.|\.weight$", "", name), init_std
        if init_residual and layer in ("attn.proj", "mlp.down"):
            std /= math.sqrt(2 * n_layer)
        if layer in ("norm1", "norm2", "norm"):
            nn.init.ones_(p)
        elif layer not in ("embed", "head", "attn.qkv", "attn.q", "attn.k", "attn.v", "attn.proj", "mlp.gate", "mlp.up", "mlp.down"):
            raise UserError(f"initialise() says nothing of the parameter {name}; add a line for it")
        elif init_truncated:
            nn.init.trunc_normal_(p, std=std, a=-2 * std, b=2 * std)
        else:
            nn.init.normal_(p, std=std)


# ======================================================================================================================
# optimizers
# ----------------------------------------------------------------------------------------------------------------------
def parameter_groups(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Which parameter gets what, by module: matrices inside blocks, what else has two dimensions or more (embeddings, head, kernels of
    convolutions), vectors (gains, and what is 1 wide in its last or last but one dimension)."""
    groups = {"matrices": {}, "embeddings": {}, "vectors": {}}
    others = [module for module in model.blocks.modules() if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd))]
    matrices = set(model.blocks.parameters()) - {p for module in others for p in module.parameters()}
    for name, p in model.named_parameters():  # a tied parameter comes once; (n, 1) is a vector too
        groups["vectors" if p.ndim < 2 or 1 in p.shape[-2:] else "matrices" if p in matrices else "embeddings"][name] = p
    return groups


def build_optimizers(model: nn.Module, compiled: bool, ns_dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and AdamW for the rest, or AdamW for all; ns_dtype: Newton-Schulz's. RuntimeError if one is left out."""
    groups = parameter_groups(model)
    shared = dict(state_dtype=torch.bfloat16 if param_dtype == "bfloat16" else None, stochastic_rounding=stochastic_rounding,
                  compile=compiled)
    adam = [dict(params=list(groups["embeddings"].values()), lr=adam_lr, weight_decay=weight_decay),
            dict(params=list(groups["vectors"].values()), lr=adam_lr, weight_decay=0.0)]
    matrices = dict(params=list(groups["matrices"].values()), lr=learning_rate, weight_decay=weight_decay)
    optimizers = []
    if optimizer == "adamw":
        adam.insert(0, matrices)
    else:
        optimizers.append(Muon([matrices], variant=optimizer, momentum=momentum, gamma=gamma, beta2=beta2, eps=muon_eps,
                               ns_steps=ns_steps, ns_eps=ns_eps, ns_dtype=ns_dtype, adjust_lr_fn=adjust_lr_fn, **shared))
    optimizers.append(AdamW(adam, betas=(adam_beta1, adam_beta2), eps=adam_eps, **shared))
    all_groups = [group for opt in optimizers for group in opt.param_groups]
    held = [p for group in all_groups for p in group["params"]]
    if Counter(held) != Counter(model.parameters()):
        raise RuntimeError(f"the optimizers hold {len(held)} parameters, {len(set(held))} different ones, expected each of the model's "
                           f"{len(set(model.parameters()))} once: mend parameter_groups() or build_optimizers()")
    names = {p: name for name, p in model.named_parameters()}
    for group in all_groups:
        group.update(initial_lr=group["lr"], param_names=[names[p] for p in group["params"]])
    return optimizers


def parameter_table(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """Name, shape, count, optimizer, peak learning rate and weight decay of every parameter; equal layers share a line."""
    rows, names = Counter(), {p: name for name, p in model.named_parameters()}
    for opt in optimizers:
        for group in opt.param_groups:
            for p in group["params"]:
                layers = re.sub(r"\.\d+\.", ".*.", names[p])
                how = group.get("variant", type(opt).__name__.lower()) if p.requires_grad else "frozen"
                rows[layers, tuple(p.shape), how, group["initial_lr"], group.get("weight_decay", 0.0)] += 1
    return "\n".join(f"{name:28} {str(shape):>16} x{n:<3} {how:14} lr {lr:<8g} weight_decay {decay:g}"
                     for (name, shape, how, lr, decay), n in rows.items())


# ======================================================================================================================
# schedule
# ----------------------------------------------------------------------------------------------------------------------
def lr_factor(step: int) -> float:
    """What both peak learning rates are multiplied by at update `step`, 0 to max_iters - 1."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    if schedule == "cosine":
        done = (step - warmup_iters) / max(1, max_iters - warmup_iters)
        return min_lr_frac + (1 - min_lr_frac) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "wsd" and (left := (max_iters - step) / max(1.0, decay_frac * max_iters)) < 1:
        return min_lr_frac + (1 - min_lr_frac) * left
    return 1.0


# ======================================================================================================================
# evaluation
# ----------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(logits, shards: Shards, where: torch.device, autocast, rank: int, world: int) -> tuple[float, float]:
    """Mean cross-entropy (nats a token) and next-token accuracy on the first val_tokens tokens, all of them and always the same
    ones, whatever the batch and the world size: each rank takes a part. logits: (B, T) ids to (B, T, V)."""
    total = min(val_tokens // block_size, len(shards))
    windows = np.arange(rank, total, world)
    sums = torch.zeros(2, dtype=torch.float64, device="cpu" if where.type == "mps" else where)  # loss, hits
    for i in range(0, len(windows), micro_batch_size):
        tokens = shards.read(windows[i:i + micro_batch_size])
        x_BT, y_BT = to_device(np.resize(tokens, (micro_batch_size, block_size + 1)), where)  # one shape: one compiled graph
        with autocast():
            logits_NV = logits(x_BT).flatten(0, 1)[:len(tokens) * block_size]
        y_N = y_BT.flatten()[:len(tokens) * block_size]
        for part, y in zip(logits_NV.split(2048), y_N.split(2048)):  # in parts, so that fp32 copies are small
            loss = F.cross_entropy(part.float(), y, reduction="sum")
            sums += torch.stack([loss, (part.argmax(-1) == y).sum().to(loss)]).to(sums.device)
    if world > 1:
        Watch.waits += 1
        dist.all_reduce(sums)
    return tuple((sums / (total * block_size)).tolist())


def flops_per_token(model: nn.Module) -> float:
    """Of forward and backward, as in the PaLM paper's appendix B: 6 a matrix parameter, 12 n_layer D T for attention."""
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {model.head.weight}
    return 6 * (matrices - sum(table.numel() for table in tables)) + 12 * n_layer * n_embd * block_size


PEAK_FLOPS = {  # dense bf16, one device, from the makers' data sheets; the first that stands in the device's name counts
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "H800 PCIe": 756e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12,
    "L4": 121e12, "A10G": 70e12, "A10": 125e12, "A40": 150e12, "A6000": 155e12, "RTX 6000 Ada": 364e12, "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12, "RTX 3090": 71e12, "MI300X": 1307e12,
}


def peak_flops(where: torch.device) -> float | None:
    """Of one device, per second; None where it is not known, as for CPUs."""
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else ""
    if re.search(r" (MIG|D|Ti|Laptop)\b", name):  # a part of a card, or a relative of the one that the name begins with
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


@torch.no_grad()
def sample(model: nn.Module, tokenizer: str, eot: int, where: torch.device, autocast) -> str:
    """sample_tokens tokens, or what half a minute gives, after an end of text, at temperature 0.8, decoded."""
    generator = torch.Generator().manual_seed(seed)
    ids, until = [eot], time.monotonic() + 30
    while len(ids) <= sample_tokens and time.monotonic() < until:
        window = ids[-block_size:]
        x_1T = torch.tensor([window + [0] * (min(block_size, sample_tokens) - len(window))], device=where)  # one shape
        with autocast():
            logits = model.logits(x_1T)[0, len(window) - 1].float().cpu()
        ids.append(int(torch.multinomial(F.softmax(logits / 0.8, -1), 1, generator=generator)))
    ids = [i for i in ids[1:] if i != eot]
    if tokenizer == "bytes":
        return bytes(i for i in ids if i < 256).decode(errors="replace")
    if tokenizer == "gpt2":
        try:
            import tiktoken
            return tiktoken.get_encoding("gpt2").decode([i for i in ids if i < 50257])
        except Exception as error:  # not installed, or its vocabulary neither cached nor downloadable
            print(f"the sample stays in token ids: {type(error).__name__} from tiktoken; pip install tiktoken, or without a "
                  "network set TIKTOKEN_CACHE_DIR", file=sys.stderr)
    return " ".join(map(str, ids))


# ======================================================================================================================
# memory
# ----------------------------------------------------------------------------------------------------------------------
def fast_bf16(where: torch.device) -> bool:
    """Are products faster in bf16? On Ampere or newer, AMX, and AMD's AVX512-BF16, by its specification; on a Xeon with AVX512-BF16 but
    no AMX they were slower than in fp32."""
    if where.type == "cuda":
        return torch.cuda.get_device_capability(where) >= (8, 0)
    with contextlib.suppress(OSError):
        words = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
        return where.type == "cpu" and ("amx_bf16" in words or {"AuthenticAMD", "avx512_bf16"} <= words)
    return False


def uses_bf16(where: torch.device) -> bool:
    """Does the model run under bf16 autocast?"""
    return "bfloat16" in (dtype, param_dtype) or dtype == "auto" and fast_bf16(where)


def memory_estimate(model: nn.Module, world: int, gpu: bool, bf16: bool) -> dict[str, float]:
    """Bytes on one rank, from shapes alone (the model may be on the meta device)."""
    width = 2 if param_dtype == "bfloat16" else 4
    numbers, matrices = sum(p.numel() for p in model.parameters()), parameter_groups(model)["matrices"].values()
    state, beside = 2 * numbers, 0
    if optimizer in VARIANTS:
        beside = 2 * (numbers - sum(p.numel() for p in matrices))  # AdamW's, beside Muon's
        state = beside + sum(p.numel() // p.size(-1) if name == "row_moment" else p.numel()
                             for p in matrices for name in VARIANTS[optimizer].state)
    tokens, act = micro_batch_size * block_size, 2 if bf16 else 4
    mlp, attn = (getattr(model.blocks[0], part, nn.Module()) for part in ("mlp", "attn"))  # an edited block may have other names
    wide = (p for m in mlp.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False) if p.ndim > 1)
    inner = [max(p.shape) for p in wide] or [4 * n_embd]
    block = tokens * (n_embd * (7 * act + 4) + sum(inner) * act)  # both norms, q k v y, attention's output; the residual in fp32
    if block_size <= 512 and not gpu:
        block += tokens * n_head * block_size * act          # the attention weights, see attend
    elif any(p.shape == (3 * n_embd, n_embd) for p in attn.parameters()):
        block += tokens * n_embd * 2 * act                   # the fused kernel keeps v, a view, and so all of qkv
    if not compile and len(inner) == 3:  # the Llama: silu's result, autocast's copies for each product, what RMSNorm keeps on a CPU
        block += tokens * (inner[0] * act + n_embd * ((4 * act if bf16 else 0) + (0 if gpu else 8)))
    loss = tokens * (n_embd * (act + 4) + model.embed.weight.size(0) * (act if compile else 12))  # logits; uncompiled, 3 times in fp32
    if activation_checkpointing:  # a block's activations are there in its own backward pass, with the gradients before and behind it
        kept = tokens * n_embd * 4 * n_layer + max(loss, block + tokens * n_embd * 8)
    else:
        kept = block * n_layer + loss
    if act < width:  # autocast keeps a copy of each weight until its backward pass
        copied = [model.head, model.blocks[0]] if activation_checkpointing and compile else [model]
        kept += act * sum(p.numel() for part in copied for p in part.parameters() if p.ndim > 1)
    # of the optimizer, when no activations are left: Newton-Schulz's copies take 16 bytes a number of a portion; uncompiled, the rule's
    # results may take more, 28 a number of what it takes at a time (on a CPU a matrix), beside 4 a number of the portion
    least, most = (1, 2**27) if gpu else (torch.get_num_threads(), 2**20)  # matrices and numbers of a portion
    update = 0
    for shape, n in Counter(p.shape for p in matrices).items() if optimizer in VARIANTS else ():
        portion = min(n * shape.numel() / world, max(most, least * shape.numel()))
        update = max(update, 16 * portion, 0 if compile else 4 * portion + 28 * (portion if gpu else shape.numel()))
    # on a CPU the weights that the warm-up puts back; AdamW's state beside Muon's, counted in full, is made after Muon's step only
    update += 0 if gpu else max(0, numbers - beside) * width
    update += numbers * width * ((1 if gpu else 2) + 1 / world) if world > 1 else 0  # what is received, by gloo in a copy, and sent
    accumulating = batch_size > micro_batch_size * world or world > 1  # else no gradient is there yet when the most is kept
    whole = state * width if world > 1 else 0  # Optimizer.state_dict gathers it, once no activations are left
    return {"parameters": numbers * width, "gradients": numbers * width, "optimizer": state * width / world,
            "activations": max(kept - (0 if accumulating else numbers * width), update, whole)}


def check_memory(model: nn.Module, where: torch.device, world: int, local_world: int) -> None:
    """Before anything large is allocated: does the estimate fit what is free?"""
    if where.type == "cuda":
        free = torch.cuda.mem_get_info(where)[0]
    else:
        try:
            free = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024 / local_world
        except (OSError, TypeError):
            return
        for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's, by cgroups 2 and 1
            with contextlib.suppress(OSError, ValueError):
                free = min(free, int(Path("/sys/fs/cgroup", limit).read_text()) / local_world)
    parts = memory_estimate(model, world, where.type == "cuda", uses_bf16(where))
    if (need := sum(parts.values())) > free:
        gib = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
        if parts["activations"] <= need / 2:
            mend = "use " + "--param_dtype=bfloat16, " * (param_dtype != "bfloat16") + "more ranks, or a smaller --n_layer or --n_embd"
        elif micro_batch_size > 1:
            mend = "lower --micro_batch_size"
        else:
            mend = "use " + "--activation_checkpointing=true or " * (not activation_checkpointing) + "a smaller --block_size"
        raise UserError(f"about {need / 2**30:.1f} GiB are needed on {where} ({gib} GiB), {free / 2**30:.1f} GiB are free; {mend}")


def check_disk(model: nn.Module, folder: Path) -> None:
    """Before anything is written: can checkpoints be, and do all that are kept (newest, best, the one being written) fit?"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "probe", lambda f: f.write(b"\0"))
        (folder / "probe").unlink()
        free = shutil.disk_usage(folder).free + sum(path.stat().st_size for path in folder.glob("step_*.pt"))
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; expected a writable folder; set --checkpoint_dir") from None
    parts = memory_estimate(model, world=1, gpu=False, bf16=False)
    if (need := (parts["parameters"] + parts["optimizer"]) * (keep_checkpoints + 2)) > free:
        raise UserError(f"about {need / 2**30:.1f} GiB are needed for checkpoints in {folder}, {free / 2**30:.1f} GiB are free; "
                        "set --checkpoint_dir to another disk, or lower --keep_checkpoints")


# ======================================================================================================================
# checkpoint
# ----------------------------------------------------------------------------------------------------------------------
MAY_CHANGE = {  # globals that a resumed run may set anew: they leave the mathematics as it is, but for rounding
    "run_name", "resume", "allow_change", "log_dir", "checkpoint_dir", "data_dir", "check_shards", "micro_batch_size",
    "activation_checkpointing", "log_interval", "eval_interval", "checkpoint_interval", "keep_checkpoints", "sample_tokens",
    "wandb", "tensorboard", "profile", "device", "compile", "threads", "timeout_minutes", "max_skipped",
}


class Checkpoints:
    """checkpoints/RUN/step_N.pt, and beside it step_N.json with its size and sha256, written after it: a checkpoint without a
    matching json is unfinished or damaged. Both get a temporary name, fsync, rename. A thread writes while training goes on."""
    held = writer = None  # descriptor of the folder that lock() locks, and the thread that must have ended before it is given back

    def __init__(self, run: str, rank: int):
        self.folder, self.rank, self.failure = Path(checkpoint_dir) / run, rank, None

    def lock(self, patience: float = 0) -> None:
        """Only one process of a machine writes a run, until main() ends. One that is started before the last one has ended waits
        `patience` seconds for it."""
        if Checkpoints.held is not None:
            return
        import fcntl
        until = time.monotonic() + patience
        with contextlib.suppress(OSError):  # a file system without locks; what else is wrong with the folder is told later
            Checkpoints.held = os.open(self.folder, os.O_RDONLY)
            while True:
                try:
                    return fcntl.flock(Checkpoints.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise UserError(f"another process writes to {self.folder}; wait for its end, then go on with --run_name="
                                        f"{self.folder.name} --resume=auto, or choose another --run_name") from None
                    time.sleep(0.5)

    def save(self, content: dict, val_loss: float | None) -> None:
        """content: tensors, of which copies are written, and plain types."""
        self.wait()
        content = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), content)  # training changes them next
        Checkpoints.writer = threading.Thread(target=self._write, args=(content, val_loss))
        self.writer.start()

    def wait(self, last: bool = False) -> None:
        """Until the newest save is on disk. One that failed is told here: training goes on, unless it was the last one."""
        if self.writer:
            self.writer.join()
        failure, self.failure = self.failure, None
        if failure:
            message = (f"could not save a checkpoint in {self.folder}: {failure}; free some space or set --checkpoint_dir; "
                       "the ones before are intact")
            if last:
                raise UserError(f"{message}: go on from there with --run_name={self.folder.name} --resume=auto")
            print(f"{message}; training goes on", file=sys.stderr, flush=True)

    def _write(self, content, val_loss):
        path = self.folder / f"step_{content['step']:08d}.pt"
        try:
            for left_over in self.folder.glob("*.tmp"):
                left_over.unlink()
            digest = write_whole(path, lambda f: torch.save(content, f))
            write_whole(path.with_suffix(".json"), lambda f: f.write(json.dumps(
                dict(step=content["step"], val_loss=val_loss, size=path.stat().st_size, sha256=digest)).encode()))
            self._remove_old()
        except Exception as error:  # an edited script may save what torch.save cannot
            while not isinstance(error, OSError) and error.__context__:  # torch.save hides a full disk behind an error of its own
                error = error.__context__
            self.failure = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"

    def _remove_old(self):
        """Keeps the newest ones, the best of those that were validated, and files that are not checkpoints."""
        notes = {path: note for path in sorted(self.folder.glob("step_*.pt")) if (note := read_note(path))}
        losses = {path: loss for path, note in notes.items() if (loss := note["val_loss"]) is not None and math.isfinite(loss)}
        best = min(losses, key=losses.get, default=None)
        for path in set(notes) - {best, *list(notes)[-keep_checkpoints:]}:
            path.unlink()
            path.with_suffix(".json").unlink()

    def load(self, which: str) -> dict | None:
        """The checkpoint at a path, or for "auto" the newest good one of this run; None if there is none yet."""
        if which == "auto":
            for path in sorted(self.folder.glob("step_*.pt"), reverse=True):
                if not (problem := damage(path)):
                    return read_checkpoint(path)
                if self.rank == 0:
                    print(f"passing over {path}: it {problem}", file=sys.stderr)
            return None
        path = Path(which)
        if path.is_dir():
            path = max(path.glob("step_*.pt"), default=path / "step_*.pt")
        if not path.exists():
            raise UserError(f"--resume={which}: there is no {path}; expected a file checkpoints/RUN/step_N.pt or such a folder")
        if problem := damage(path):
            folder = path.resolve().parent
            flag = "" if folder.parent == self.folder.resolve().parent else f"--checkpoint_dir={shlex.quote(str(folder.parent))} "
            raise UserError(f"--resume={which}: {path} {problem}; take an earlier one, or {flag}--run_name={folder.name} "
                            "--resume=auto to do so by itself")
        return read_checkpoint(path)

    def check(self, saved: dict, data: str) -> str:
        """May this run go on from a checkpoint that was loaded? data: checksum of what this run reads. Returns what --allow_change has
        let pass, now and before, as STEP:name=value,name=value;STEP:..."""
        then, now = {**saved["globals"], "data": saved["data"]}, {**{name: globals()[name] for name in GLOBALS}, "data": data}
        changed = [name for name in now if name not in MAY_CHANGE and then.get(name) != now[name]]
        if changed and not allow_change:
            told = ", ".join(f"{name} ({then.get(name)} then, {now[name]} now)" for name in changed)
            mend = f" (`python prepare.py verify {dataset}{data_flag()}` tells whether a shard is damaged)" * ("data" in changed)
            raise UserError(f"--resume: the checkpoint was made with other values of {told}{mend}; give the same, or --allow_change=true")
        this, run = f"step_{saved['step']:08d}.pt", self.folder.name
        if self.rank == 0 and (newer := [path for path in self.folder.glob("step_*.pt") if path.name > this and not damage(path)]):
            raise UserError(f"--resume={resume}: run {run} has newer checkpoints ({max(newer)}); go on from there with "
                            f"--run_name={run} --resume=auto, or branch off with another --run_name")
        news = ",".join(f"{name}={now[name]}" for name in changed)
        return ";".join(filter(None, [saved.get("changed"), news and f"{saved['step']}:{news}"]))


def read_note(path: Path) -> dict | None:
    """The .json beside a checkpoint; None if it is missing or not ours."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        note = json.loads(path.with_suffix(".json").read_text())
        return note if {"val_loss", "size", "sha256"} <= set(note) else None


def read_checkpoint(path: Path) -> dict:
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)  # tensors and plain types: nothing is executed
        if saved["script"] != Path(__file__).name:
            raise ValueError(f"it is of {saved['script']}")
        return saved
    except Exception as error:  # it may be any file
        raise UserError(f"{path} is not a checkpoint of {Path(__file__).name} ({type(error).__name__}: "
                        f"{' '.join(str(error).split())[:100]}); give one that it saved") from None


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, or "" if nothing is."""
    if not (note := read_note(path)):
        return "has no readable .json beside it: it is not a checkpoint, or saving it was interrupted"
    if path.stat().st_size != note["size"]:
        return f"has {path.stat().st_size} bytes, expected {note['size']}: it is truncated"
    return "" if sha256(path) == note["sha256"] else "does not match its checksum: it is damaged"


def write_whole(path: Path, write) -> str:
    """Writes a file whole or not at all; returns its sha256."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        digest = sha256(temporary)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(folder)
        os.close(folder)
        return digest
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def load_into(target: nn.Module | torch.optim.Optimizer, state: dict) -> None:
    """target.load_state_dict(state); raises UserError where the checkpoint is of another model or optimizer."""
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise of_another(" ".join(str(error).split())[:200]) from None


def of_another(why: str) -> UserError:
    return UserError(f"--resume: the checkpoint is of another model or optimizer ({why}); give the flags of the run that made it, or the "
                     "script that its log begins with")


# ======================================================================================================================
# log
# ----------------------------------------------------------------------------------------------------------------------
class Log:
    """Prints, and appends to logs/RUN.txt, a line at a time; figures also go to --wandb and --tensorboard. head: what a new log begins
    with; None goes on with the old one."""

    def __init__(self, path: Path, head: str | None, step: int):
        self.path, self.step = path, step
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.trackers = trackers(path.stem, step)
            if head is not None:
                if path.exists():  # of a run that left no checkpoint
                    os.replace(path, path.with_suffix(".old"))
                write_whole(path, lambda f: f.write(head.encode(errors="surrogateescape")))  # a folder's name may be no text
            torn = not path.read_bytes().endswith(b"\n")  # a line that a full disk or a kill cut short
            self.file = open(path, "ab", buffering=0)
            self.file.write(b"\n" * torn)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; expected a writable folder; set --log_dir") from None

    def __call__(self, line: str) -> None:
        say(line)
        data = (line + "\n").encode(errors="surrogateescape")
        try:
            while data:  # a disk that gets full takes a part first
                data = data[self.file.write(data):]
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; free some space, then go on with "
                            f"--run_name={self.path.stem} --resume=auto") from None
        if self.trackers and line.startswith(("step:", "final ")):
            pairs = re.findall(r"(?<!\S)([^\s:]+):([-+.\de]+)(s|ms|min|h|)(?:/\d+)?(?= |$)", line)
            figures = {key: float(value) * {"min": 60, "h": 3600}.get(unit, 1) for key, value, unit in pairs}
            self.step = int(figures.pop("step", self.step))
            try:
                for track in self.trackers:
                    track(figures, self.step)
            except Exception as error:  # a full disk or a lost network is no reason to end a run
                self.trackers = []
                print(f"--wandb and --tensorboard end at step {self.step}: {type(error).__name__}: {error}", file=sys.stderr)


def say(line: str) -> None:
    """Prints. Where that fails, as tee or the terminal is gone, nothing is printed any more, nor on stderr if that is the same."""
    try:
        print(line, flush=True)
    except OSError:
        for fd in (1, 2) if sys.stderr and os.path.sameopenfile(1, 2) else (1,):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def trackers(run: str, step: int) -> list:
    """What --wandb and --tensorboard ask for: functions of a log line's figures and its step. The run begins or goes on at `step`."""
    track = []
    try:
        if wandb:
            import wandb as client
            session = client.init(project=wandb, id=run, name=run, resume="allow", dir=log_dir,
                                  config={name: globals()[name] for name in GLOBALS})
            session.define_metric("*", step_metric="step")  # a resumed run logs some steps twice
            track.append(lambda figures, step: session.log({**figures, "step": step}))
        if tensorboard.lower() not in ("", "0", "false"):
            from torch.utils.tensorboard import SummaryWriter
            folder = Path(log_dir) / "tensorboard" if tensorboard.lower() in ("true", "1") else Path(tensorboard)
            writer = SummaryWriter(str(folder / run), purge_step=step + 1 if step else None)

            def write(figures, step):
                for key, value in figures.items():
                    writer.add_scalar(key, value, step)
                writer.flush()
            track.append(write)
    except ImportError as error:
        raise UserError(f"--wandb or --tensorboard needs a package that is not installed ({error.name or error}); run `pip install "
                        f"{'wandb' if wandb and not track else 'tensorboard'}`, or leave the flag out") from None
    except Exception as error:  # of wandb: no account, no network, a bad name
        raise UserError(f"--wandb={wandb} --tensorboard={tensorboard}: {' '.join(str(error).split())[:200]}; wandb needs `wandb login` "
                        "or WANDB_MODE=offline, tensorboard a writable folder") from None
    return track


@functools.cache  # read once: editing the files during a run changes neither its log nor its checkpoints
def sources() -> tuple[str, str]:
    """Of this script and of optim.py."""
    return tuple(Path(file).read_text(encoding="utf-8") for file in (__file__, optim.__file__))


def source_hash() -> str:
    """sha256 of both sources: do ranks, and a run and its checkpoint, have the same code?"""
    return hashlib.sha256("".join(sources()).encode()).hexdigest()


def log_head(run: str, environment: dict) -> str:
    """The source of this script and of optim.py, the environment, every global as the flag that repeats it; lines of = between."""
    bar = "=" * 100 + "\n"
    facts = "".join(f"{key}: {value}\n" for key, value in {"script": Path(__file__).name, "run_name": run, **environment}.items())
    flags = "".join(f"--{name}={globals()[name]}\n" for name in GLOBALS)
    return bar.join([*sources(), facts + flags, ""])


# ======================================================================================================================
# ranks
# ----------------------------------------------------------------------------------------------------------------------
def rendezvous(rank: int) -> dist.TCPStore:
    """A key-value store of this start alone, held by rank 0. torchrun's own store may outlive a restart with all its keys, and a rank
    that reads one too early waits for a dead process; here it only says where the new store is."""
    host, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(minutes=timeout_minutes)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # no torchrun, or one that does not share its store: a new port
        return dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    agents = dist.TCPStore(host, port, timeout=limit)
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        agents.set("store", str(store.port))
        return store
    deadline = time.monotonic() + 60 * timeout_minutes
    while time.monotonic() < deadline:
        port = int(agents.get("store"))
        try:
            socket.create_connection((host, port), timeout=5).close()
            return dist.TCPStore(host, port, timeout=limit)
        except OSError:  # the port of the store before a restart
            time.sleep(0.1)
    raise UserError(f"rank {rank} waited {timeout_minutes:g} minutes for rank 0 on {host}, port {port}; see what it says, then start "
                    "all ranks again with --resume=auto")


class Watch(threading.Thread):
    """Ends this process, naming the rank, when one is dead or keeps the others waiting for longer than timeout_minutes: a backend's
    own timeout does not tell whom it waited for. Every rank counts in Watch.waits how often it was about to wait for all others;
    a thread posts that with a heartbeat to the rendezvous store, and reads what the others post."""
    waits, done = 0, threading.Event()

    def __init__(self, rank: int, world: int, store: dist.TCPStore):
        super().__init__(daemon=True)
        self.store = dist.PrefixStore("watch", dist.TCPStore(store.host, store.port))  # its own connection: nobody blocks it
        self.rank, self.keys = rank, [str(r) for r in range(world)]
        self.start()

    def run(self):
        limit, beat, posts, waits = 60 * timeout_minutes, 0, {}, 0
        since = time.monotonic()                     # when this rank was last seen to go on
        heard = dict.fromkeys(self.keys, since)      # when a rank last posted something new
        while not self.done.wait(min(5, limit / 10)):
            beat += 1
            try:
                self.store.set(str(self.rank), f"{Watch.waits} {beat} {platform.node()}")
                present = [key for key in self.keys if self.store.check([key])]
                new = dict(zip(present, self.store.multi_get(present)))
            except RuntimeError:
                if not self.done.is_set():
                    self.end("rank 0, which holds the store, is gone")
                return
            now = time.monotonic()
            heard.update({key: now for key in new if new[key] != posts.get(key)})
            posts = new
            if waits != Watch.waits:
                waits, since = Watch.waits, now
            names = {key: f"rank {key}" + (f" on {posts[key].split()[2].decode()}" if key in posts else "") for key in self.keys}
            if silent := [names[key] for key in self.keys if now - heard[key] > limit]:
                return self.end(f"{', '.join(silent)} gave no sign of life for {timeout_minutes:g} minutes")
            if now - since > limit and (late := [names[key] for key in posts if int(posts[key].split()[0]) < waits]):
                return self.end(f"{', '.join(late)} kept the others waiting for {timeout_minutes:g} minutes (--timeout_minutes)")

    def end(self, what: str):
        complain(f"rank {self.rank} stops: {what}; go on with --resume=auto")
        os._exit(1)


def agree(facts: dict[str, str], world: int) -> None:
    """All ranks must have the same globals, code, data and torch; else every rank names the first that differs, and in what."""
    everyone = [None] * world
    dist.all_gather_object(everyone, facts)
    for r, other in enumerate(everyone):
        if differing := [name for name in facts if other[name] != everyone[0][name]]:
            raise UserError(f"rank {r} differs from rank 0 in its {', '.join(differing)}; start all ranks from the same files, "
                            "data and command")


# ======================================================================================================================
# main
# ----------------------------------------------------------------------------------------------------------------------
def duration(value: float) -> str:
    """Seconds as 95s, 12min or 11.5h."""
    return f"{value:.0f}s" if value < 600 else f"{value / 60:.0f}min" if value < 36000 else f"{value / 3600:.1f}h"


def keep_memory() -> None:
    """Makes glibc keep freed memory: by default large blocks go back to the system, and mapping their pages again takes much of a step."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)


def clip(parameters: list[Tensor]) -> Tensor:
    """Scales the gradient to a global norm of at most grad_clip, or makes it NaN, which optimizers skip, where the norm is not finite.
    Returns the norm before, a scalar."""
    grads = [p.grad for p in parameters if p.grad is not None]
    cpu = grads[0].device.type == "cpu"  # there in parts: summed in one piece, the norm of many numbers is too small
    norm = torch.nn.utils.get_total_norm([part for g in grads for part in g.flatten().split(2**20)] if cpu else grads)
    scale = (grad_clip / (norm + 1e-6)).clamp(max=1) if grad_clip else torch.ones_like(norm)
    scale = torch.where(norm.isfinite(), scale, math.nan)
    if not cpu or scale != 1:  # on a CPU this saves a pass over memory; on a GPU asking would wait for it
        torch._foreach_mul_(grads, scale)
    return norm


class Monitor:
    """The figures of the newest update that was looked at: on a CPU at once, on a GPU while the next update runs. Stops a run that has
    gone wrong."""

    def __init__(self, skipped: int, log):
        self.log, self.loss, self.norm = log, math.nan, math.nan
        self.stop, self.skipped, self.in_a_row, self.unread = False, skipped, 0, None

    def add(self, step: int, stats: Tensor) -> None:
        """stats of update `step`, counted from 1 as in the log, (4,): loss, norm of the gradient, votes to stop, the norm's square, each
        the mean over ranks but for the votes."""
        if stats.is_cuda:
            self.look()  # at the update before
            host, event = torch.empty_like(stats, device="cpu", pin_memory=True).copy_(stats, non_blocking=True), torch.cuda.Event()
            event.record()
            self.unread = step, host, event
        else:
            self.read(step, stats)

    def look(self) -> None:
        if self.unread:
            (step, stats, event), self.unread = self.unread, None
            event.synchronize()
            self.read(step, stats)

    def read(self, step: int, stats: Tensor) -> None:
        loss, self.norm, stop_votes, square = stats.tolist()
        if not math.isfinite(loss):
            self.give_up(f"the loss of update {step} is {loss}, the last finite one was "
                         + (f"{self.loss:.4f}" if math.isfinite(self.loss) else "none"))
        differing = square - self.norm**2  # the mean of squares is the square of the mean only where all are equal, but for rounding
        if dist.is_initialized() and differing > (1e-5 if param_dtype == "bfloat16" else 1e-11) * square:
            raise UserError(f"the norm of the gradient of update {step} is not the same on all ranks: every trained parameter must be in "
                            "DistributedDataParallel from the start, or its gradient be averaged by other means")
        self.loss, self.stop = loss, self.stop or stop_votes > 0
        bad = not math.isfinite(self.norm)
        self.skipped += bad
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if self.in_a_row >= max_skipped:
            self.give_up(f"the gradient was not finite in {self.in_a_row} updates in a row, up to update {step}")

    def give_up(self, what: str) -> None:
        self.log(f"diverged: {what}")
        raise UserError(f"{what}; go on from the last checkpoint with --resume=auto or =PATH, --allow_change=true and a lower "
                        "--learning_rate and --adam_lr, more --warmup_iters or --dtype=float32")


def choose_device(local_rank: int, local_world: int) -> torch.device:
    """--device or the best there is, set up."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    where = torch.device(device or next(kind for kind in found if found[kind]))
    if not found[where.type]:
        raise UserError(f"--device={device}: this torch ({torch.__version__}) finds no such device; use --device=cpu")
    if where.type == "cuda":
        where = torch.device("cuda", local_rank if where.index is None else where.index)
        if where.index >= torch.cuda.device_count():
            raise UserError(f"there is no GPU {where.index}, this machine has {torch.cuda.device_count()}; lower --nproc_per_node or "
                            "change --device")
        torch.cuda.set_device(where)
        torch.backends.cuda.matmul.allow_tf32 = True
    elif where.type == "mps" and local_world > 1:
        raise UserError(f"{local_world} ranks cannot share an Apple GPU; start one, or use --device=cpu")
    elif where.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # a container's share, by cgroups 2 and 1
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join(Path("/sys/fs/cgroup", file).read_text() for file in files).split()
                cores = min(cores, int(quota) // int(period)) if int(quota) > 0 else cores  # "max" and -1 are no limit
        if threads or local_world > 1 or "OMP_NUM_THREADS" not in os.environ:  # torchrun sets that to 1 where it starts several ranks
            torch.set_num_threads(threads or max(1, cores // local_world))
        keep_memory()
    return where


def micro_batches(world: int) -> int:
    """How many of them each rank accumulates to an update; settles micro_batch_size."""
    global micro_batch_size
    micro_batch_size = micro_batch_size or max(1, batch_size // world)
    together = micro_batch_size * world
    if batch_size % together:
        fits = [micro for micro in range(1, micro_batch_size) if batch_size % (micro * world) == 0]
        mend = f"--micro_batch_size={fits[-1]}" if fits else f"--batch_size={-(-batch_size // together) * together}"
        raise UserError(f"--batch_size={batch_size} is not a multiple of --micro_batch_size={micro_batch_size} x {world} ranks; use {mend}")
    return batch_size // together


def train() -> dict:
    """One run, from globals to checkpoint; returns its last figures."""
    with contextlib.suppress(ValueError, OSError):  # each shard is an open file; many systems allow 1024 unless asked
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 10_240 if hard == resource.RLIM_INFINITY else min(hard, 10_240)), hard))
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if resume != "auto" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise UserError("torchrun --max-restarts needs --resume=auto, or a restarted group would not go on from its checkpoint")
    where, accumulate = choose_device(local_rank, local_world), micro_batches(world)

    # ---- data and model: everything that can be wrong is found before anything is written
    if world > 1:
        store = rendezvous(rank)
        Watch(rank, world, store)
        if rank == 0:
            store.set("device", where.type)
        if (first := store.get("device").decode()) != where.type:
            raise UserError(f"rank {rank} on {platform.node()} found {where.type}, rank 0 {first}: mend one of them, or give --device")
    train_shards = Shards(dataset, "train", local_rank, local_world)  # not rank, world: each machine checks all of its copy
    val_shards = Shards(val_dataset or dataset, "val", local_rank, local_world)
    if val_shards.vocab != train_shards.vocab:
        raise UserError(f"--val_dataset={val_dataset} has a vocabulary of {val_shards.vocab} ids, {dataset} one of "
                        f"{train_shards.vocab}: prepare both with the same tokenizer")
    vocab = vocab_size or padded(train_shards.vocab)
    tokenizer = {(257, 256): "bytes", (50257, 50256): "gpt2", (32000, 2): "llama2"}.get((train_shards.vocab, train_shards.eot), "")
    with torch.device("meta"):
        check_memory(Model(vocab), where, world, local_world)
    if world > 1:
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed what 2.9 has under these names only
        Watch.waits += 1
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                                timeout=timedelta(minutes=2 * timeout_minutes))
        local = {"resume", "run_name", "device", "threads", "data_dir", "log_dir", "checkpoint_dir"}  # may differ between ranks
        agree({**{f"--{name}": str(globals()[name]) for name in GLOBALS if name not in local}, "code": source_hash(),
               "data": train_shards.checksum + val_shards.checksum, "torch version": torch.__version__,
               "hardware (bf16 or not; say --dtype)": str(uses_bf16(where))}, world)

    def rank_0_has(what: str) -> None:
        """Waits on all ranks until rank 0 is here: it may take longer than any timeout, still watched."""
        if world > 1:
            if rank == 0:
                store.set(what, "")
            store.wait([what], timedelta(days=30))

    # ---- run name, checkpoint
    started = datetime.now()
    stem = f"{preset}-{optimizer}-seed{seed}"
    if run_name or resume == "auto":
        run = run_name or stem
    elif resume:
        path = Path(os.path.abspath(resume))
        run = path.parent.name if path.is_file() else path.name
    else:
        run = f"{stem}-{started:%Y%m%d-%H%M%S}"
    log_path, checkpoints = Path(log_dir) / f"{run}.txt", Checkpoints(run, rank)
    if rank == 0 and resume and checkpoints.folder.exists():
        checkpoints.lock(patience=min(120, 30 * timeout_minutes))
    rank_0_has("locked")
    saved = checkpoints.load(resume) if resume else None
    if world > 1:
        agree({"checkpoint (is --checkpoint_dir on a shared file system?)": str(saved and saved["step"])}, world)
    if rank == 0 and not resume and (log_path.exists() or any(checkpoints.folder.glob("*"))):
        raise UserError(f"a run {run} exists already ({log_path}, {checkpoints.folder}); choose another --run_name, or go on with "
                        "--resume=auto")

    # ---- model and log
    torch.manual_seed(seed)
    raw = Model(vocab)
    if not saved:
        initialise(raw)
    raw.to(where)
    if param_dtype == "bfloat16":
        for p in raw.parameters():  # not buffers: angles stay in fp32
            p.data = p.data.bfloat16()
    autocast = (lambda: torch.autocast(where.type, torch.bfloat16)) if uses_bf16(where) else contextlib.nullcontext
    ns_dtype = torch.bfloat16 if fast_bf16(where) else torch.float32  # whatever --dtype is
    optimizers = build_optimizers(raw, compile, ns_dtype)
    facts = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__, platform=platform.platform(),
                 **({"cuda": f"{torch.version.cuda}, cudnn {torch.backends.cudnn.version()}"} if where.type == "cuda" else {}),
                 device=(torch.cuda.get_device_name(where) if where.type == "cuda" else
                         f"{where.type} {cpu_name()}, {torch.get_num_threads()} threads"),
                 world_size=world, dtype_used="bfloat16 autocast" if uses_bf16(where) else "float32",
                 started=started.isoformat(timespec="seconds"), train_tokens=train_shards.tokens,
                 val_tokens_used=min(val_tokens // block_size, len(val_shards)) * block_size,
                 data_checksum=f"{train_shards.checksum}-{val_shards.checksum}", vocab=vocab,
                 params=sum(p.numel() for p in raw.parameters()), flops_per_token=f"{flops_per_token(raw):.0f}")
    changed = ""
    if saved:
        changed = checkpoints.check(saved, facts["data_checksum"])
        load_into(raw, saved["model"])
        for opt, state in zip(optimizers, saved["optimizers"]):
            held, wanted = ([name for group in groups for name in group.get("param_names", ())]
                            for groups in (state["param_groups"], opt.param_groups))
            if held and wanted and held != wanted:  # of one shape, each would silently get another's state
                now, then = next((a, b) for a, b in zip([*wanted, "nothing"], [*held, "nothing"]) if a != b)
                raise of_another(f"{then} where this script has {now}")
    step, train_time, skipped = (saved[key] for key in ("step", "train_time", "skipped")) if saved else (0, 0.0, 0)
    log = lambda line: None  # on all ranks but 0
    if rank == 0:
        check_disk(raw, checkpoints.folder)
        checkpoints.lock()
        log = Log(log_path, None if saved and log_path.exists() else log_head(run, facts), step)
        epochs = max_iters * batch_size * block_size / train_shards.tokens
        say(f"{run}: {facts['params'] / 1e6:.2f} M parameters, {facts['device']}, {facts['dtype_used']}, {world} ranks x "
            f"{accumulate} micro-batches x {micro_batch_size} x {block_size} tokens an update; {epochs:.2f} epochs of {dataset}\n"
            f"{parameter_table(raw, optimizers)}")
        if len(val_shards) < val_tokens // block_size:
            say(f"validation is on {facts['val_tokens_used']} tokens, all that {val_dataset or dataset} has, not --val_tokens={val_tokens}")
        if resume == "auto" and not (saved or run_name) and (others := sorted(Path(checkpoint_dir).glob(f"{stem}-*/step_*.pt"))):
            name = others[-1].parent.name
            print(f"{run} begins: it has no checkpoint. If you meant {name}, give --run_name={name}", file=sys.stderr, flush=True)

    # ---- compilation, outside the clock: of an update at learning rate 0 nothing is kept
    untouched = saved["model"] if saved else tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), raw.state_dict())
    if compile:
        raw.compile_parts()
        if rank == 0:
            say("compiling; later runs find the graphs in the cache of torch")
    synchronize = torch.cuda.synchronize if where.type == "cuda" else lambda: None
    compile_start = time.perf_counter()
    validate = lambda: evaluate(raw.eval().logits, val_shards, where, autocast, rank, world)

    def compiling(function):
        """function(), which compiles; if that fails, warns and goes on uncompiled."""
        try:
            return function()
        except torch._dynamo.exc.TorchDynamoException as error:
            if rank == 0:
                print(f"runs uncompiled, so slower: torch.compile failed ({type(error).__name__}: {' '.join(str(error).split())[:150]}); "
                      "install a C++ compiler, give TORCHINDUCTOR_CACHE_DIR a folder with room, or pass --compile=false", file=sys.stderr)
        torch.compiler.set_stance("force_eager")  # outside of except: the error keeps the activations alive
        raw.zero_grad()
        return function()

    val_loss, val_acc = compiling(validate)
    if step == 0:
        log(f"step:0/{max_iters} val_loss:{val_loss:.5f} train_time:0.000s val_acc:{val_acc:.4f}")
    parallel, parameters = raw, list(raw.parameters())

    def gradient(step: int, start: int = 0) -> Tensor:
        """Leaves the mean gradient of update `step`'s batch, from micro-batch `start` on, in .grad; returns this rank's mean loss."""
        if not raw.training:
            raw.train()
        total = torch.zeros((), device=where)
        for k in range(start, accumulate):
            first = (k * world + rank) * micro_batch_size
            x_BT, y_BT = to_device(train_shards.batch(step, range(first, first + micro_batch_size)), where)
            last = k == accumulate - 1
            with contextlib.nullcontext() if last or world == 1 else parallel.no_sync():  # forward included
                with autocast():
                    loss = parallel(x_BT, y_BT) / accumulate
                Watch.waits += last
                loss.backward()
            total += loss.detach()
        return total

    def optimize(norm: Tensor, factor: float) -> None:
        for opt in optimizers:
            for group in opt.param_groups:
                group["lr"] = group["initial_lr"] * factor
            if isinstance(opt, (Muon, AdamW)) or norm.isfinite():  # ours leave weights alone where a gradient is not finite
                opt.step()
            opt.zero_grad(set_to_none=world == 1 or accumulate == 1)  # else they stay views of DDP's buckets

    compiling(lambda: gradient(step, accumulate - 1))  # one micro-batch, before DDP, whose forward cannot be tried twice
    devices = [where.index] if where.type == "cuda" else None
    if world > 1:
        if unused := [name for name, p in raw.named_parameters() if p.requires_grad and p.grad is None]:
            raise UserError(f"the loss does not use {', '.join(unused)}, which DistributedDataParallel would wait for: remove them")
        parallel = DDP(raw, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False)
        for _ in range(2):  # DDP makes its buckets anew at the second forward pass
            raw.zero_grad()  # gradients are views of buckets: none may hold the old ones
            gradient(step, accumulate - 1)
    optimize(clip(parameters), 0.0)
    raw.load_state_dict(untouched)  # undoes what forward (buffers) or an edited rule has changed even at rate 0
    optimizers = build_optimizers(raw, compile, ns_dtype)
    warnings.filterwarnings("ignore", "(Muon|AdamW): a gradient is not finite")  # the log counts them
    if saved:
        for opt, state in zip(optimizers, saved["optimizers"], strict=True):  # the state; hyperparameters are this run's
            groups = [{**ours, "params": theirs["params"]} for ours, theirs in zip(opt.param_groups, state["param_groups"])]
            load_into(opt, {**state, "param_groups": groups})
        torch.set_rng_state(saved["rng"])
        log(f"resumed:step:{step} world_size:{world} code:{'same' if saved['source'] == source_hash() else 'changed'}"
            + f" changed:{changed}" * bool(changed))
    else:
        torch.manual_seed(seed)
    del saved, untouched
    synchronize()
    compile_time = time.perf_counter() - compile_start

    # ---- the loop
    monitor = Monitor(skipped, log)
    session = mark = (step, train_time)  # where this process, and the figures of the next line, begin
    graphs = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]  # compiled so far
    outside = graphs()  # what was compiled while the clock stood still
    stop = listen()
    peak, clock = peak_flops(where), time.perf_counter()
    profiler = tracing(log_path.with_suffix(".trace.json")) if profile and rank == 0 else None

    def tokens_per_s(since: tuple[int, float]) -> float:
        return (step - since[0]) * batch_size * block_size / max(1e-9, train_time - since[1])

    def progress() -> str:
        rate, left = tokens_per_s(mark), (max_iters - step) * batch_size * block_size / tokens_per_s(session)
        mfu = f"{rate * flops_per_token(raw) / (peak * world):.3f}" if peak else "n/a"
        norm = f"grad_norm:{monitor.norm:.4f} " if math.isfinite(monitor.norm) else ""
        skipped = f" skipped:{monitor.skipped}" if monitor.skipped else ""
        return (f"train_loss:{monitor.loss:.5f} lr:{learning_rate * lr_factor(step - 1):.6g} {norm}tokens_per_s:{rate:.0f} mfu:{mfu}"
                f"{skipped} time_left:{duration(left)}")

    def on_disk(what: str) -> None:
        """The checkpoint before, on all ranks: they wait here for rank 0's disk, not in a collective."""
        if rank == 0:
            checkpoints.wait(last=what == "last")
        rank_0_has(f"on disk: {what}")

    def save(score: float | None) -> None:
        on_disk(f"before {step}")
        states = [opt.state_dict() for opt in optimizers]  # every rank takes part
        if rank == 0:
            checkpoints.save(dict(
                script=Path(__file__).name, model=raw.state_dict(), optimizers=states, step=step, train_time=train_time,
                skipped=monitor.skipped, sequences=step * batch_size, rng=torch.get_rng_state(),
                globals={name: globals()[name] for name in GLOBALS}, data=facts["data_checksum"], vocab=vocab, tokenizer=tokenizer,
                eot=train_shards.eot, torch=str(torch.__version__), source=source_hash(), changed=changed), score)

    def times() -> str:
        return f"train_time:{train_time:.3f}s" + (f" step_avg:{1000 * train_time / step:.2f}ms" if step else "")

    last = step >= max_iters  # of a run to a target: or step > 0 and val_loss <= TARGET
    while not last:
        torch.manual_seed(hash((seed, step, rank)) & 0x7FFFFFFF)  # of this update and rank, so that a resumed run draws the same
        wide = torch.float64 if world > 1 else torch.float32  # fp64 shows small differences between ranks; MPS has none, and one rank
        loss = gradient(step).to(wide)
        norm = clip(parameters).to(wide)  # of what gradient() has left in .grad
        vote = torch.full_like(loss, stop["signal"] is not None)
        stats = torch.stack([loss / world, norm / world, vote, norm**2 / world])
        if world > 1:
            dist.all_reduce(stats)
        optimize(norm, lr_factor(step))
        monitor.add(step + 1, stats)
        step += 1
        if profiler:
            profiler.step()
        last = step == max_iters
        validating, logging, saving = (last or step % every == 0 for every in (eval_interval, log_interval, checkpoint_interval))
        if not (validating or logging or saving or monitor.stop):
            continue
        monitor.look()
        synchronize()
        train_time += time.perf_counter() - clock
        if graphs() > outside:
            log(f"compiled:{graphs() - outside} more graphs by update {step}, inside train_time; TORCH_LOGS=recompiles tells why")
        if validating:
            val_loss, val_acc = validate()  # of a run to a target: last = last or val_loss <= TARGET
            log(f"step:{step}/{max_iters} val_loss:{val_loss:.5f} {times()} val_acc:{val_acc:.4f} {progress()}")
        elif logging:
            log(f"step:{step}/{max_iters} {times()} {progress()}")
        mark = (step, train_time)
        if last or monitor.stop or saving and not monitor.in_a_row:  # a run that resumes repeats updates that were left out
            save(val_loss if validating else None)
        if monitor.stop and not last:
            on_disk("last")
            log(f"stopped after update {step} by {stop['signal'] or 'a signal to another rank'}; go on with the same command and "
                f"--run_name={run} --resume=auto")
            break
        synchronize()
        clock, outside = time.perf_counter(), graphs()
    else:
        memory = torch.cuda.max_memory_allocated(where) if where.type == "cuda" else peak_rss()
        state = sum(t.nbytes for opt in optimizers for entry in opt.state.values() for t in entry.values() if isinstance(t, Tensor))
        if world > 1:  # of the rank that has most
            most = torch.tensor([memory, state], dtype=torch.float64, device=where)
            Watch.waits += 1
            dist.all_reduce(most, dist.ReduceOp.MAX)
            memory, state = most.tolist()
        log(f"final val_loss:{val_loss:.5f} val_ppl:{math.exp(min(val_loss, 700)):.4f} val_acc:{val_acc:.4f} {times()} "
            f"tokens_per_s:{tokens_per_s(session):.0f} peak_memory_mib:{memory / 2**20:.0f} optimizer_state_mib:{state / 2**20:.1f} "
            f"compile_time:{compile_time:.1f}s")
        if rank == 0 and sample_tokens:
            with torch.compiler.set_stance("force_eager"):
                log("sample: " + sample(raw.eval(), tokenizer, train_shards.eot, where, autocast))
        on_disk("last")
        if rank == 0:
            say(f"log: {log_path}\ncheckpoint: {checkpoints.folder}")
    if profiler:
        profiler.stop()
    if world > 1:
        Watch.done.set()
        dist.barrier(device_ids=devices)  # rank 0 holds the store: it waits until all are here
        if where.type == "cuda":
            dist.destroy_process_group()  # gloo's ends with the process: destroying it can wait for a thread that waits for the GIL
    return dict(run=run, log=log_path, step=step, val_loss=val_loss, val_acc=val_acc, train_time=train_time, loss=monitor.loss)


def tracing(path: Path) -> torch.profiler.profile:
    """Records the 4th to 6th update after the start."""
    def write(recorded):
        try:
            recorded.export_chrome_trace(str(path))
            print(f"profile: {path} has updates 4 to 6 of this start, if it made so many; open it at https://ui.perfetto.dev", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"profile: cannot write {path}: {error}", file=sys.stderr, flush=True)
    profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1), on_trace_ready=write)
    profiler.start()
    return profiler


def peak_rss() -> int:
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cpu_name() -> str:
    """With the instruction set that sets the speed of products: clouds give very different CPUs one name."""
    with contextlib.suppress(OSError, TypeError):
        text = Path("/proc/cpuinfo").read_text()
        name = re.search(r"model name\s*: (.+)", text)[1]
        return name + next((f" with {unit}" for unit in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if unit in text.split()), "")
    return platform.processor()


SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


def listen() -> dict:
    """From now on SIGNALS do not end the process but are noted: the update is finished and a checkpoint saved."""
    stop = {"signal": None, "time": 0.0}

    def remember(number, frame):
        if not stop["signal"]:
            stop.update(signal=signal.Signals(number).name, time=time.monotonic())
        elif time.monotonic() > stop["time"] + 3:  # launchers and terminals may both send the first one
            raise KeyboardInterrupt  # a second one does not wait for the update

    for number in SIGNALS:  # main() sets the old handlers again
        if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has SIGHUP
            signal.signal(number, remember)
    return stop


def main(argv: list[str]) -> dict:
    configure(argv)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return train()
    finally:
        Watch.done.set()
        for thread in threading.enumerate():
            if isinstance(thread, Watch):  # inside a call of the store it would abort the process as that ends
                thread.join(5)
        for number, handler in before.items():
            signal.signal(number, handler)
        if Checkpoints.writer:
            Checkpoints.writer.join()
        if Checkpoints.held is not None:
            os.close(Checkpoints.held)
        Checkpoints.held = Checkpoints.writer = None


def complain(what) -> None:
    print(f"{Path(__file__).name}: error: {what}", file=sys.stderr, flush=True)


def cli() -> int:
    if os.name == "nt":
        complain("found Windows, expected Linux or macOS; run it in WSL2, which `wsl --install` installs")
        return 1
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="replace")  # a sample or a comment may have letters that the terminal has not
    if {"-h", "--help"} & set(sys.argv[1:]):
        say(usage())
        return 0
    try:
        main(sys.argv[1:])
        return 0
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(3)  # most mistakes are found on every rank: the first tells it, and torchrun ends the others
        complain(error)
        return 1
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            what = str(error).split("] . ")[-1].split(". GPU ")[0]
            complain(f"rank {os.environ.get('RANK', 0)}: {what}; lower --micro_batch_size or set --activation_checkpointing=true; the last "
                     "checkpoint is intact")
            return 1
        if "RANK" not in os.environ or not re.search("gloo|nccl|connection|store", str(error), re.IGNORECASE):
            raise
        reason = re.search(r"Last error:\s*(.+)", str(error))  # of NCCL; what stands before it is torch's
        what = reason[1][:200] if reason else str(error).split("] ", 1)[-1].split(". ")[0][:120]
        complain(f"rank {os.environ['RANK']} cannot go on with the others ({what}); torchrun's report names the first that failed; go on "
                 "with --resume=auto")
        return 1
    except KeyboardInterrupt:
        print(f"{Path(__file__).name}: interrupted; the last checkpoint is intact", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(cli())
