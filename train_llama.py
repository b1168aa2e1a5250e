r"""
Trains a Llama (RMSNorm, RoPE, SwiGLU, no biases) of the paper's Suites A and B with Muon-VS or one of its rivals.

    python prepare.py                                             # once: the demo's data, nothing is downloaded
    python train_llama.py                                         # the demo: 3 M parameters, minutes on 2 CPU cores
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 --shutdown-timeout=300 train_llama.py \
        --preset=suite-a-130m --resume=auto

Every hyperparameter is a global below: edit it where no preset sets it, or pass --name=value. The last line is "final
val_loss:...". Shapes: B sequences of a micro-batch, T tokens, D width, H heads, K head width, V vocabulary, N = B T.
"""
import argparse, copy, datetime, functools, importlib.util, math, os, re, resource, shutil, signal, sys, time, zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import optim

# ---- Globals and presets ---------------------------------------------------------------------------------------------
preset = "demo"               # a key of PRESETS
run_name = ""                 # of log and checkpoints; default: --resume's folder, or SCRIPT-PRESET-OPTIMIZER-seedSEED
resume = ""                   # auto: go on from this run's newest whole checkpoint, if any; or PATH, or a folder
init_from = ""                # begin with the weights alone of this checkpoint
eval_only = False             # print the validation loss of what --resume or --init_from names, and end
# data
dataset = "pysrc"             # data/DATASET, made by prepare.py
val_dataset = ""              # default: dataset
val_tokens = 262_144          # tokens; the prefix of the validation split that is evaluated
# model
n_layer = 4                   # blocks
n_head = 4                    # attention heads
n_embd = 256                  # model width
n_ffn = 704                   # width of the feed-forward network
block_size = 256              # tokens of context
norm_eps = 1e-5               # ε of RMSNorm
tied = False                  # embedding and head are one matrix
fused_qkv = False             # query, key and value are one (3 D, D) matrix, orthogonalised as one
init_truncated = False        # weights begin as a normal distribution cut at two standard deviations
activation_checkpointing = False  # recompute each block in the backward pass instead of keeping its activations
# budget
batch_size = 16               # sequences per update, over all ranks and micro-batches
micro_batch_size = 0          # sequences per forward pass of a rank; 0: batch_size / ranks
max_iters = 600               # updates
# optimizer
optimizer = "muon-vs"         # adamw for all, or a key of optim.VARIANTS for matrices inside blocks, adamw for the rest
learning_rate = 0.005         # peak, for the matrices inside blocks
adam_lr = 0.01                # peak, for embedding, head and gains
weight_decay = 0.1            # not of gains
grad_clip = 1.0               # global norm of the gradient; 0: off
momentum = 0.95               # β of the Muon family
gamma = 1000.0                # γ of muon-nsr and muon-nsr-post
power = 1.0                   # of the denominator of muon-vs: 1 is the paper's rule, 0 muon
beta2 = 0.95                  # β₂ of normuon and muon2
muon_eps = 1e-8               # ε of all but muon
ns_steps = 5                  # Newton-Schulz iterations
qkv_split = 1                 # matrices that Muon cuts a fused q-k-v matrix into: 3, or 3 n_head for one a head
ns_eps = 1e-7                 # added to the norm that Newton-Schulz divides by
adjust_lr_fn = "match_rms_adamw"  # scale of Muon's update: original, match_rms_adamw, frobenius
adam_beta1 = 0.9
adam_beta2 = 0.95
adam_eps = 1e-8
# schedule of both learning rates
schedule = "wsd"              # constant, cosine, wsd (linear decay over the last decay_frac)
warmup_iters = 20             # updates
decay_frac = 0.6              # of max_iters
min_lr_frac = 0.0             # of the peak, where cosine and wsd end
# output
log_interval = 10             # updates
eval_interval = 100           # updates
checkpoint_interval = 500     # updates; the last one is always saved
keep_checkpoints = 2          # newest ones; 0: all
wandb = ""                    # project to log to; needs: pip install wandb
# system
seed = 1                      # of initialisation and data order
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "auto"                # float32 (on a GPU TF32), bfloat16 (autocast); auto: bfloat16 if faster or param_dtype is
param_dtype = "float32"       # bfloat16: parameters and optimizer state are bf16 too
compile = True                # torch.compile of blocks, loss and Muon
fsdp = False                  # shard weights, gradients and state by rows (FSDP2), instead of DDP

LEAST = dict(n_layer=1, n_head=1, n_embd=1, block_size=1, batch_size=1, log_interval=1, eval_interval=1,
             checkpoint_interval=1, keep_checkpoints=0, max_iters=0, warmup_iters=0, micro_batch_size=0,
             learning_rate=0, adam_lr=0, weight_decay=0, grad_clip=0, gamma=0, power=0, ns_steps=0,
             qkv_split=1, seed=0)  # smallest legal values

suite_a = dict(dataset="dclm", val_dataset="c4", n_layer=32, block_size=4096, batch_size=128, micro_batch_size=4,
               adam_beta1=0.8, adam_beta2=0.98, adam_eps=1e-15, ns_eps=1e-5, adjust_lr_fn="original", warmup_iters=0,
               norm_eps=1e-6, decay_frac=0.8, log_interval=1, val_tokens=10_000_000)
suite_b = dict(dataset="fineweb", block_size=512, tied=True, fused_qkv=True, init_truncated=True, learning_rate=1e-3,
               adam_lr=1e-3, warmup_iters=2000, schedule="cosine", min_lr_frac=0.01, val_tokens=4_194_304,
               checkpoint_interval=1000)
llama = dict(suite_b, block_size=2048, learning_rate=3e-4, adam_lr=3e-4, batch_size=512, micro_batch_size=2,
             max_iters=50_000, eval_interval=250, activation_checkpointing=True, fsdp=True)
PRESETS = {  # "NAME/OPTIMIZER" is applied after "NAME", the command line after both
    "demo": {},  # both rates, and demo/muon's, are train_gpt.py's
    "demo/muon": dict(adam_lr=0.02),
    "demo/adamw": dict(learning_rate=3e-3, adam_lr=3e-3),
    "demo/adamuon": dict(adjust_lr_fn="frobenius"),
    "demo/muon-nsr-post": dict(gamma=10.0),
    "suite-a-130m": dict(suite_a, n_embd=512, n_head=8, n_ffn=2048, max_iters=5000, learning_rate=0.016,
                         adam_lr=0.0032),
    "suite-a-130m/adamuon": dict(adjust_lr_fn="frobenius", learning_rate=2e-3),
    "suite-a-130m/adamw": dict(learning_rate=0.0032),  # Suite A has no AdamW in the paper: the rate of its embeddings
    "suite-a-300m": dict(suite_a, n_embd=768, n_head=12, n_ffn=3072, max_iters=11_500, learning_rate=0.008,
                         adam_lr=0.0024, momentum=0.98),
    "suite-a-300m/adamuon": dict(adjust_lr_fn="frobenius", learning_rate=1.3e-3),
    "suite-a-300m/adamw": dict(learning_rate=0.0024),
    "suite-a-1.2b": dict(suite_a, n_embd=1536, n_head=24, n_ffn=6144, max_iters=23_000, learning_rate=0.008,
                         adam_lr=0.0012, momentum=0.98, batch_size=256, micro_batch_size=2, decay_frac=1.0,
                         grad_clip=2.0, eval_interval=250),
    "suite-a-1.2b/adamuon": dict(adjust_lr_fn="frobenius", learning_rate=1.3e-3),  # not in the paper: the 300M's rate
    "suite-a-1.2b/adamw": dict(learning_rate=0.0012),
    "suite-b-210m": dict(suite_b, n_layer=24, n_head=12, n_embd=768, n_ffn=2048, batch_size=256, micro_batch_size=32,
                         max_iters=128_000, adam_beta2=0.999, grad_clip=0.5, eval_interval=115,
                         checkpoint_interval=1150),
    "suite-b-720m": dict(suite_b, n_layer=12, n_head=16, n_embd=2048, n_ffn=5632, batch_size=1984, micro_batch_size=8,
                         max_iters=48_000, adam_beta2=0.99, grad_clip=0.1, log_interval=1, eval_interval=200),
    "llama-3b": dict(llama, n_layer=26, n_head=32, n_embd=3200, n_ffn=8640),  # sizes of OpenLLaMA 3B and LLaMA 7B
    "llama-7b": dict(llama, n_layer=32, n_head=32, n_embd=4096, n_ffn=11_008),
    **{f"{name}/adamuon": dict(adjust_lr_fn="frobenius") for name in
       ("suite-b-210m", "suite-b-720m", "llama-3b", "llama-7b")},
}

# ---- Configuration ---------------------------------------------------------------------------------------------------
SOURCES = [Path(file).read_text(encoding="utf-8") for file in (__file__, optim.__file__)]  # for --help and the log
GLOBALS = [name for name, value in list(globals().items()) if type(value) in (bool, int, float, str) and name[0] != "_"]
CHOICES = dict(preset=[name for name in PRESETS if "/" not in name], optimizer=["adamw", *optim.VARIANTS],
               adjust_lr_fn=list(optim.UPDATE_SCALES), schedule=["constant", "cosine", "wsd"],
               dtype=["auto", "float32", "bfloat16"], param_dtype=["float32", "bfloat16"], device={"cpu", device})
rank, local_rank, world = (int(os.environ.get(name, default)) for name, default in
                           [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)])  # below GLOBALS, so no flags

def configure(argv: list[str]) -> None:
    """Sets the globals: preset, then preset/optimizer, then --name=value. --dataset alone drops val_dataset."""
    global micro_batch_size
    parser = argparse.ArgumentParser(usage="%(prog)s [--name=value ...]", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    for name in GLOBALS:
        kind = type(globals()[name])
        parser.add_argument(f"--{name}", type=boolean if kind is bool else kind, choices=CHOICES.get(name),
                            default=argparse.SUPPRESS)
    flags = vars(parser.parse_args(argv))
    wants_help = flags.pop("help")
    edited = {name: globals()[name] for name in GLOBALS}
    globals().update(PRESETS[flags.get("preset", preset)] | ({"val_dataset": ""} if "dataset" in flags else {}) | flags)
    globals().update(PRESETS.get(f"{preset}/{optimizer}", {}) | flags)
    by_preset = [f"--{name}={globals()[name]}" for name in GLOBALS
                 if name not in flags and globals()[name] != edited[name]]
    if wants_help:
        comments = dict(re.findall(r"^(\w+) = .*?# (.+)$", SOURCES[0], re.M))
        lines = (f"--{name}={globals()[name]!r}".ljust(34) + comments.get(name, "") for name in GLOBALS)
        print(__doc__, *lines, f"presets: {', '.join(CHOICES['preset'])}", sep="\n")
        sys.exit()
    for name, least in LEAST.items():
        if not least <= globals()[name] < math.inf:
            parser.error(f"argument --{name}: found {globals()[name]}, expected a number of at least {least}")
    if wandb and not importlib.util.find_spec("wandb"):
        parser.error("argument --wandb needs a package; run: pip install wandb")
    if n_embd % (2 * n_head):
        parser.error(f"argument --n_embd: found {n_embd}, expected a multiple of 2 x n_head = {2 * n_head}, for RoPE")
    micro_batch_size = micro_batch_size or max(1, batch_size // world)
    if batch_size % (micro_batch_size * world):
        parser.error(f"--batch_size={batch_size}: no multiple of --micro_batch_size={micro_batch_size} x {world} ranks")
    if by_preset and rank == 0:
        print("set by PRESETS:", *by_preset, file=sys.stderr)

def boolean(text: str) -> bool:
    return ["false", "true"].index(text.lower()) == 1

# ---- Data loader -----------------------------------------------------------------------------------------------------
class Shards:
    """The token shards of a split (.bin of llm.c and modded-nanogpt: 256 int32, then uint16), cut into windows of
    block_size + 1 tokens, neighbours sharing one; a shard's remainder is left out. An epoch reads each window once."""

    def __init__(self, name: str, split: str):
        self.folder = folder = Path("data", name)
        self.tokens = []  # of each shard, in a file that stays open
        files = sorted(folder.glob(f"*_{split}*.bin"))
        if not files:
            sys.exit(f"{folder} has no {split} shards; how to make them: python prepare.py --help")
        for file in files:
            header = np.fromfile(file, np.int32, 256).tolist()
            if header[:1] == [20240801]:
                sys.exit(f"{file} has ids of 32 bits, for Llama 3; ours have 16: tokenize the text with prepare.py")
            if len(header) < 256 or header[:2] != [20240520, 1] or file.stat().st_size != 1024 + 2 * header[2]:
                sys.exit(f"{file} is damaged or no token shard; run: python prepare.py verify {name}")
            self.tokens.append(np.memmap(file, np.uint16, "r", 1024) if header[2] else np.empty(0, np.uint16))
        self.vocab, self.eot = header[3:5] if header[3] else (50257, 50256)  # of the last shard; 0: GPT-2's
        counts = [max(0, len(tokens) - 1) // block_size for tokens in self.tokens]  # windows of each shard
        self.starts = np.cumsum([0, *counts])  # number of the first window of each shard, and of all windows
        self.n_windows = int(self.starts[-1])
        if not self.n_windows:
            sys.exit(f"--block_size={block_size} is longer than any {split} shard of {folder}")

    def read(self, windows) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the windows with these numbers, (B, T) int64 each."""
        rows = np.empty((len(windows), block_size + 1), np.int64)
        for row, window in zip(rows, map(int, windows)):
            shard = int(np.searchsorted(self.starts, window, "right")) - 1
            start = (window - int(self.starts[shard])) * block_size
            row[:] = self.tokens[shard][start:start + block_size + 1]
        if rows.max(initial=0) >= self.vocab:
            sys.exit(f"{self.folder} has the id {rows.max()}, beyond its tokenizer's {self.vocab}; prepare it again")
        tokens = torch.from_numpy(rows)
        if device == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, step: int, rows: range) -> tuple[Tensor, Tensor]:
        """These rows of the batch of update `step`: a pure function of seed, step, sizes of batch and block, data."""
        epochs_and_places = (divmod(step * batch_size + row, self.n_windows) for row in rows)
        return self.read([permutation(self.n_windows, seed, epoch)[place] for epoch, place in epochs_and_places])

@functools.lru_cache(2)
def permutation(n: int, *key: int) -> np.ndarray:
    return np.random.default_rng(key).permutation(n)

# ---- Model -----------------------------------------------------------------------------------------------------------
def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turns the pairs (k, k + K/2) of each head; cos and sin are (T, K/2)."""
    a, b = x_BHTK.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x_BHTK)

def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, (B, H, T, K) each. On a CPU the fused kernel is slower in bf16."""
    if device == "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    future_TT = torch.full((q.size(2), q.size(2)), -math.inf, dtype=q.dtype).triu(1)
    return torch.softmax(q @ k.mT * q.size(3) ** -0.5 + future_TT, -1) @ v

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
        q, k, v = (part.view(B, T, n_head, D // n_head).transpose(1, 2) for part in parts)  # (B, H, T, K) each
        y_BHTK = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D))

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
        width = n_embd // n_head
        angles = np.outer(np.arange(block_size), 10_000 ** -(np.arange(0, width, 2) / width))
        self.register_buffer("cos", torch.tensor(np.cos(angles), dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.tensor(np.sin(angles), dtype=torch.float32), persistent=False)
        draw = functools.partial(nn.init.trunc_normal_, a=-0.04, b=0.04) if init_truncated else nn.init.normal_
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                draw(module.weight, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats, a scalar; without targets the logits, (B, T, V)."""
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            x_BTD, T = self.embed(tokens_BT), tokens_BT.size(1)
            for block in self.blocks:
                run = functools.partial(checkpoint, block, use_reentrant=False) if activation_checkpointing else block
                x_BTD = run(x_BTD, self.cos[:T], self.sin[:T])
            return self.head(self.norm(x_BTD)) if targets_BT is None else self.loss(x_BTD, targets_BT)

    def loss(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Compiled as one graph, so that bf16 logits get no copy in fp32."""
        return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1).float(), targets_BT.flatten())

# ---- Optimizers and schedule -----------------------------------------------------------------------------------------
def build_optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks and AdamW for the rest, or AdamW for all."""
    fused = [p for name, p in model.blocks.named_parameters() if name.endswith("qkv.weight")]
    matrices = [p for p in model.blocks.parameters() if p.ndim >= 2 and p not in {*fused}]
    tables = list(dict.fromkeys([model.embed.weight, model.head.weight]))  # one if they are tied
    others = [p for p in model.parameters() if p not in {*fused, *matrices, *tables}]  # gains, and what you add
    adam = [dict(params=tables, lr=adam_lr, weight_decay=weight_decay), dict(params=others, lr=adam_lr, weight_decay=0)]
    optimizers = []
    if optimizer == "adamw":
        adam.append(dict(params=fused + matrices, lr=learning_rate, weight_decay=weight_decay))
    else:
        optimizers.append(optim.Muon(
            [dict(params=fused, split=qkv_split), dict(params=matrices)],
            lr=learning_rate,
            variant=optimizer,
            momentum=momentum,
            weight_decay=weight_decay,
            gamma=gamma,
            power=power,
            beta2=beta2,
            eps=muon_eps,
            ns_steps=ns_steps,
            ns_eps=ns_eps,
            adjust_lr_fn=adjust_lr_fn,
            state_dtype=torch.bfloat16 if param_dtype == "bfloat16" else None,
            compile=compile,
        ))
    optimizers.append(torch.optim.AdamW(adam, betas=(adam_beta1, adam_beta2), eps=adam_eps, fused=True))
    placed = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    assert Counter(placed) == Counter(model.parameters()), "a parameter is in no group, or in two"
    return optimizers

def parameter_table(model: Model, optimizers: list[torch.optim.Optimizer]) -> str:
    """What each parameter gets; layers share a line."""
    names = {p: re.sub(r"\.\d+\.", ".*.", name) for name, p in model.named_parameters()}
    rows = Counter()
    for group in (group for opt in optimizers for group in opt.param_groups):
        how = f"{group.get('variant', 'adamw'):14} lr {group['lr']:<8g} weight_decay {group['weight_decay']:g}"
        rows.update(f"{names[p]:26} {str(tuple(p.shape)):16} {how}" for p in group["params"])
    return "\n".join(f"{count:3} x {row}" for row, count in rows.items())

def set_schedules(step: int, optimizers: list[torch.optim.Optimizer]) -> None:
    """Sets the learning rates; the place to schedule weight_decay, or momentum of Muon's groups, too."""
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor(step)

def lr_factor(step: int) -> float:
    """Both learning rates as a fraction of their peaks, at updates 0 to max_iters - 1."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    if schedule == "cosine":
        done = (step - warmup_iters) / max(1, max_iters - warmup_iters)
        return min_lr_frac + (1 - min_lr_frac) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "wsd":
        return min_lr_frac + (1 - min_lr_frac) * min(1.0, (max_iters - step) / max(1.0, decay_frac * max_iters))
    return 1.0

# ---- Evaluation ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(model: Model, shards: Shards) -> tuple[float, float]:
    """Mean cross-entropy (nats per token) and accuracy over the first val_tokens, whatever the batch and world size."""
    model.eval()
    total = min(max(1, val_tokens // block_size), shards.n_windows)
    mine, sums = range(rank, total, world), torch.zeros(2, dtype=torch.float64, device=device)
    for i in range(0, -(-total // world), micro_batch_size):  # as many on all ranks, for FSDP; the last may be empty
        x_BT, y_BT = shards.read(mine[i:i + micro_batch_size])
        logits_NV = model(x_BT).flatten(0, 1)
        for logits, y in zip(logits_NV.split(2048), y_BT.flatten().split(2048)):  # in parts: fp32 copies stay small
            sums[0] += F.cross_entropy(logits.float(), y, reduction="sum")
            sums[1] += (logits.argmax(-1) == y).sum()
    if world > 1:
        dist.all_reduce(sums)
    model.train()
    return tuple((sums / (total * block_size)).tolist())

def mfu(model: Model, tokens_per_s: float) -> str:
    """Model FLOPs utilisation, where the GPU's dense bf16 peak is known. Forward and backward, a token costs 6 FLOPs a
    matrix parameter, and 12 n_layer D T for attention (PaLM, appendix B)."""
    peak = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}.get(hardware())
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2) + model.head.weight.numel()
    flops = 6 * matrices + 12 * n_layer * n_embd * block_size
    return f"{tokens_per_s * flops / (peak * world):.3f}" if peak else "n/a"

def hardware() -> str:
    cpu = f"{torch.cpu.get_capabilities().get('cpu_name', 'CPU')}, {torch.get_num_threads()} threads a rank"
    return torch.cuda.get_device_name() if device == "cuda" else cpu

# ---- Checkpoints -----------------------------------------------------------------------------------------------------
def save_checkpoint(folder: Path, content: dict) -> None:
    """Writes step_N.pt whole or not at all, then removes all but the newest keep_checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{content['step']:08d}.pt"
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    for old in newest_first(folder)[keep_checkpoints or sys.maxsize:]:
        old.unlink()

def newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"step_{8 * '[0-9]'}.pt"), reverse=True)

def find_checkpoint(folder: Path) -> tuple[Path | None, bool]:
    """Returns (path, weights alone?) of the newest checkpoint that is whole, by its checksums, in the first place with
    files: this run's `folder`, if --resume=auto or torchrun restarted a --resume=PATH; --resume's; --init_from."""
    restarted = not eval_only and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    own = newest_first(folder) if resume == "auto" or (resume and restarted) else []
    named = (newest_first(Path(resume)) or [Path(resume)]) if resume not in ("", "auto") else []
    paths = own or named or ([Path(init_from)] if init_from else [])
    for path in paths:
        try:
            problem = zipfile.ZipFile(path).testzip()
            if not problem:
                return path, eval_only or not (own or named)
        except Exception as error:  # a damaged file may raise nearly any
            problem = error
        print(f"passing over {path}, which cannot be read: {problem}", file=sys.stderr)
    if paths or eval_only:
        sys.exit(f"found no checkpoint in {[*map(str, paths)]}; give another --resume=PATH, --init_from or --run_name")
    return None, False

def load_checkpoint(path: Path, weights_alone: bool, model: Model, optimizers: list[torch.optim.Optimizer]) -> dict:
    """Loads weights and, by the parameters' names, optimizer state. Returns where to go on; {} if weights alone."""
    saved, own = torch.load(path, map_location="cpu", weights_only=True, mmap=True), model.state_dict()
    different = {(name, t.shape) for name, t in saved["model"].items()} ^ {(name, p.shape) for name, p in own.items()}
    if different:
        sys.exit(f"{path} is of another model, which differs in {', '.join(sorted({name for name, _ in different}))}")
    model.load_state_dict({name: optim.placed_like(saved["model"][name], p) for name, p in own.items()})
    if weights_alone:
        return {}
    if saved["globals"]["optimizer"] != optimizer:
        sys.exit(f"{path} is of --optimizer={saved['globals']['optimizer']}; pass that")
    for opt in optimizers:
        state = {}  # whole, of which Muon takes what is this rank's
        for i, (name, p) in enumerate(named_parameters(model, opt)):
            entry, of_muon = saved["optimizer"][name], isinstance(opt, optim.Muon)
            state[i] = {key: t if of_muon or key == "step" else optim.placed_like(t, p) for key, t in entry.items()}
        opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})  # lr … of this run
    return {name: saved[name] for name in ("step", "train_time", "globals")}

def whole_state(model: Model, optimizers: list[torch.optim.Optimizer]) -> dict:
    """Weights, and the optimizers' buffers by their parameter's name, on rank 0; all ranks have to call it."""
    state = {"model": {name: whole_on_cpu(p) for name, p in model.state_dict().items()}, "optimizer": {}}
    for opt in optimizers:
        is_muon = isinstance(opt, optim.Muon)  # its full_state_dict gathers to rank 0, and is {} elsewhere
        buffers = opt.full_state_dict().get("state", {}) if is_muon else opt.state_dict()["state"]
        for i, (name, _) in enumerate(named_parameters(model, opt)):
            entry = buffers.get(i, {})
            state["optimizer"][name] = entry if is_muon else {key: whole_on_cpu(t) for key, t in entry.items()}
    return state

def whole_on_cpu(t: Tensor) -> Tensor | None:
    """A copy on rank 0 of t, of which ranks may hold parts; all ranks have to call it."""
    t = t.full_tensor() if isinstance(t, DTensor) else t
    return t.to("cpu", copy=True) if rank == 0 else None

def named_parameters(model: Model, opt: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    names = {p: name for name, p in model.named_parameters()}
    return [(names[p], p) for group in opt.param_groups for p in group["params"]]

# ---- Main ------------------------------------------------------------------------------------------------------------
def init_ranks() -> None:
    """Takes this rank's GPU or share of the cores, settles `compile` and `dtype`, and joins the other ranks."""
    global compile, dtype
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        torch.backends.cuda.matmul.allow_tf32 = True
    if compile and device == "cpu" and not shutil.which(torch._inductor.config.cpp.cxx[-1]):
        print("runs uncompiled, so slower, as there is no C++ compiler", file=sys.stderr)
        compile = False
    if dtype == "auto":
        dtype = "bfloat16" if param_dtype == "bfloat16" or optim.fast_dtype(device) == torch.bfloat16 else "float32"
    if world > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world))))
        store = next(dist.rendezvous("env://"))[0]  # torchrun's, which outlives a restart, with dead ranks' keys:
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)  # pytorch issue 135712
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                                timeout=datetime.timedelta(hours=4))  # for what one rank does while others wait: saving

def build_model(vocab: int) -> Model:
    torch.manual_seed(seed)
    model = Model(vocab)
    for p in model.parameters():  # not RoPE's cos and sin
        p.data = p.data.to(getattr(torch, param_dtype))
    if fsdp and world > 1:  # a rank keeps its rows; a block's are gathered while it computes, in bf16 under autocast
        mesh, gathered = dist.init_device_mesh(device, (world,)), torch.bfloat16 if dtype == "bfloat16" else None
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=Policy(gathered, torch.float32, cast_forward_inputs=False))
        fully_shard(model, mesh=mesh, mp_policy=Policy(reduce_dtype=torch.float32))
    model.to(device)
    if compile:  # a block at a time: all share one graph
        torch._dynamo.config.optimize_ddp = False  # it would cut that graph; gradients leave block by block anyway
        for block in model.blocks:
            block.compile(dynamic=False)
        model.loss = torch.compile(model.loss, dynamic=False)
    return model

def open_log(path: Path, facts: str, settings: dict):
    """Prints `facts`; a new file begins with the sources, `facts` and all globals. Returns log(line), which prints,
    appends to the file, and sends figures to --wandb."""
    if wandb:
        import wandb as client  # the name wandb is the flag
        tracker = client.init(project=wandb, id=path.stem, resume="allow", config=settings)
    print(facts, end="")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        flags = "".join(f"--{name}={value}\n" for name, value in settings.items())
        path.write_text(("=" * 100 + "\n").join([*SOURCES, facts + flags, ""]), encoding="utf-8")
    file = open(path, "a", encoding="utf-8", buffering=1)  # a line at a time

    def log(line: str) -> None:
        print(line, flush=True)
        print(line, file=file)
        if wandb and line.startswith(("step:", "final ")):
            figures = {name: float(x) for name, x in re.findall(r"(\w+):(-?\d[\d.]*(?:e[-+]\d+)?)", line)}
            tracker.log(figures, step=int(figures.get("step", max_iters)))
    return log

def update(step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer], shards: Shards):
    """One update. Returns, as scalars on the device so that nobody waits for a GPU, the loss of this rank's sequences
    and the norm of the whole gradient."""
    loss, accumulate = 0.0, batch_size // (micro_batch_size * world)
    for k in range(accumulate):
        first = (k * world + rank) * micro_batch_size
        x_BT, y_BT = shards.batch(step, range(first, first + micro_batch_size))
        if world > 1:  # reduce gradients once
            reduce = k == accumulate - 1
            model.set_requires_gradient_sync(reduce) if fsdp else setattr(model, "require_backward_grad_sync", reduce)
        part = model(x_BT, y_BT) / accumulate
        part.backward()
        loss += part.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    norm = norm.full_tensor() if fsdp and world > 1 else norm
    set_schedules(step, optimizers)
    for opt in optimizers:
        opt.step()
        opt.zero_grad()
    return loss, norm

@torch.no_grad()
def warm_up(model: nn.Module, optimizers: list[torch.optim.Optimizer], shards: Shards) -> None:
    """Compiles, outside the clock, by an update that is undone."""
    weights = [p.detach().clone() for p in model.parameters()]
    states = [{p: copy.deepcopy(state) for p, state in opt.state.items()} for opt in optimizers]
    with torch.enable_grad():
        update(0, model, optimizers, shards)
    for p, weight in zip(model.parameters(), weights):
        p.copy_(weight)
    for opt, state in zip(optimizers, states):
        opt.state.clear()
        opt.state.update(state)

signals = []  # SIGTERM and SIGINT that came

def on_signal(number: int, frame) -> None:
    """The run saves and stops at its next log line; a second Ctrl-C ends it at once."""
    signals.append(number)
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)

def main(argv: list[str]) -> None:
    # data, and the checkpoint to go on from
    configure(argv)
    init_ranks()
    train_shards, val_shards = Shards(dataset, "train"), Shards(val_dataset or dataset, "val")
    if train_shards.vocab != val_shards.vocab:
        sys.exit(f"found {train_shards.vocab} token ids to train on, {val_shards.vocab} to validate: use one tokenizer")
    resume_folder = Path(resume) if Path(resume).is_dir() else Path(resume).parent  # name "" without a PATH
    run = run_name or resume_folder.name or f"{Path(__file__).stem}-{preset}-{optimizer}-seed{seed}"
    log_path, checkpoint_folder = Path("logs", f"{run}.txt"), Path("checkpoints", run)
    if log_path.exists() and not resume and not eval_only and rank == 0:
        sys.exit(f"{log_path} exists; give another --run_name, or go on with --resume=auto")
    found = [find_checkpoint(checkpoint_folder) if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(found)
    path, weights_alone = found[0]

    # model and optimizers
    model = build_model(-(-train_shards.vocab // 64) * 64)  # rows of embedding and head
    optimizers = build_optimizers(model)
    settings = {name: globals()[name] for name in GLOBALS}
    start = dict(step=0, train_time=0.0, globals=settings)
    if path:
        start |= load_checkpoint(path, weights_alone, model, optimizers)
    if eval_only:
        val_loss, val_acc = evaluate(model, val_shards)
        if rank == 0:
            print(f"val_loss:{val_loss:.5f} val_acc:{val_acc:.4f}")
        return
    for path in newest_first(checkpoint_folder) if rank == 0 else ():
        if int(path.stem[5:]) > start["step"]:  # the run goes back to before it, or begins anew
            path.rename(path.with_suffix(".abandoned"))
    facts = (f"torch: {torch.__version__}\nhardware: {hardware()}\nworld_size: {world}\nstarted: {time.ctime()}\n"
             f"parameters: {sum(p.numel() for p in model.parameters())}\n{parameter_table(model, optimizers)}\n")
    parallel = model
    if world > 1 and not fsdp:
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    warm_up(parallel, optimizers, train_shards)

    # log
    log = open_log(log_path, facts, settings) if rank == 0 else lambda line: None
    first_step, train_time = start["step"], start["train_time"]
    if resume:
        old = start["globals"] | {"resume": resume}
        changed = ",".join(f"{name}={value}" for name, value in settings.items() if old.get(name) != value)
        log(f"resumed:step:{first_step} world_size:{world} changed:{changed}")

    # training: updates, and pauses between them, in which the clock stops
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    step, finite = first_step, True
    report = ""  # loss, norm, lr of the last update; speeds since the last pause
    while True:
        last = step >= max_iters
        validating = last or step % eval_interval == 0
        val_loss, val_acc = evaluate(model, val_shards) if validating else (0.0, 0.0)
        log(f"step:{step}/{max_iters}" + f" val_loss:{val_loss:.5f}" * validating + f" train_time:{train_time:.3f}s"
            f" step_avg:{1000 * train_time / max(1, step):.2f}ms" + f" val_acc:{val_acc:.4f}" * validating + report)
        stop = torch.tensor(float(bool(signals)), device=device)  # in effect if any rank got one
        if world > 1:
            dist.all_reduce(stop)
        if not finite or not math.isfinite(val_loss):
            log(f"diverged: no finite loss or gradient at update {step}; try --resume=PATH and a lower --learning_rate")
            sys.exit(1)
        if stop or step > first_step and (last or step % checkpoint_interval == 0):
            content = dict(whole_state(model, optimizers), step=step, train_time=train_time, globals=settings,
                           script=Path(__file__).name, vocab=train_shards.vocab, eot=train_shards.eot)
            if rank == 0:
                save_checkpoint(checkpoint_folder, content)
        if last or stop:
            break
        next_pause = min(max_iters, *((step // n + 1) * n for n in (log_interval, eval_interval, checkpoint_interval)))
        tokens, clock = (next_pause - step) * batch_size * block_size, time.perf_counter()
        while step < next_pause:
            loss, norm = update(step, parallel, optimizers, train_shards)
            step += 1
        torch.get_device_module(device).synchronize()
        seconds = time.perf_counter() - clock
        train_time, tokens_per_s = train_time + seconds, tokens / seconds
        if world > 1:
            dist.all_reduce(loss)
        finite = math.isfinite(loss + norm)
        report = (f" train_loss:{loss / world:.5f} grad_norm:{norm:.4f} lr:{learning_rate * lr_factor(step - 1):.6g}"
                  f" tokens_per_s:{tokens_per_s:.0f} mfu:{mfu(model, tokens_per_s)}"
                  f" time_left:{(max_iters - step) * batch_size * block_size / tokens_per_s:.0f}s")

    # the end
    if last:
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        buffers = [t for opt in optimizers for entry in opt.state.values() for t in entry.values()]
        state = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in buffers)
        most = torch.tensor([torch.cuda.max_memory_allocated() or rss, state], device=device)  # of any rank
        if world > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        log(f"final val_loss:{val_loss:.5f} val_ppl:{math.exp(min(val_loss, 700)):.4f} val_acc:{val_acc:.4f}"
            f" train_time:{train_time:.3f}s peak_memory_mib:{most[0] / 2**20:.0f}"
            f" optimizer_state_mib:{most[1] / 2**20:.1f}")
    else:
        log(f"stopped at update {step}; the same command with --resume={checkpoint_folder} goes on")
    if world > 1 and device == "cuda":
        dist.destroy_process_group()  # gloo's ends with the process: destroying it can wait for the GIL for ever

if __name__ == "__main__":
    main(sys.argv[1:])
