r"""
Trains a GPT-2 (pre-norm, RoPE, no biases, untied head) with Muon-VS or one of its rivals.

    python prepare.py                    # once: the demo's data, nothing is downloaded
    python train_gpt.py                  # the demo: 3 M parameters, minutes on 2 CPU cores
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 --shutdown-timeout=300 \
        train_gpt.py --preset=gpt2-small --resume=auto

Every hyperparameter is a global below: edit it, or pass --name=value. A preset overrides an edit and says so.
The last line is "final val_loss:...". Shapes: B sequences at a time, T tokens, D width, H heads, K width
of a head, V vocabulary.
"""
import argparse, contextlib, datetime, functools, math, os, re, resource, shutil, signal, sys, time, zipfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import optim

# ---- Globals and presets ----
preset = "demo"               # a key of PRESETS
run_name = ""                 # of log and checkpoints; default: SCRIPT-PRESET-OPTIMIZER-seedSEED
resume = ""                   # auto: go on from this run's newest checkpoint; PATH: begin from that one
init_from = ""                # begin with the weights alone of this checkpoint; --max_iters=0 evaluates them
# data
dataset = "pysrc"             # data/DATASET, made by prepare.py
val_dataset = ""              # default: dataset
val_tokens = 65_536           # the prefix of the validation split that is evaluated
# model
n_layer = 4                   # blocks
n_head = 4                    # attention heads
n_embd = 256                  # model width
block_size = 256              # tokens of context
# budget
batch_size = 16               # sequences per update, over all ranks and micro-batches
micro_batch_size = 0          # sequences per forward pass of a rank; 0: batch_size / ranks
max_iters = 380               # updates
# optimizer
optimizer = "muon-vs"         # adamw for all, or a key of optim.VARIANTS for matrices inside blocks
learning_rate = 0.007         # peak, for the matrices inside blocks
adam_lr = 0.02                # peak, for embedding, head and gains
weight_decay = 0.1            # not of gains
grad_clip = 1.0               # global norm of the gradient; 0: off
momentum = 0.95               # beta of the Muon family
gamma = 1000.0                # of muon-nsr and muon-nsr-post
power = 1.0                   # of the denominator of muon-vs: 1 is the paper's rule, 0 bias-corrected muon
beta2 = 0.95                  # of normuon and muon2
muon_eps = 1e-8               # epsilon of all but muon
ns_steps = 5                  # Newton-Schulz iterations
ns_coefficients = (3.4445, -4.7750, 2.0315)  # of its polynomial
ns_eps = 1e-7                 # added to the norm that it divides by
qkv_split = 3                 # Muon cuts a fused q-k-v matrix into so many: 1, 3, or 3 n_head for one a head
adjust_lr_fn = "match_rms_adamw"  # scale of Muon's update: original, match_rms_adamw, frobenius
adam_betas = (0.9, 0.95)
adam_eps = 1e-8
# schedule of both learning rates
schedule = "wsd"              # constant, cosine, wsd (linear decay over the last decay_frac)
warmup_iters = 20             # updates
decay_frac = 0.6              # of max_iters
min_lr_frac = 0.0             # of the peak, where cosine and wsd end
# output
log_interval = 4              # updates
eval_interval = 76            # updates
checkpoint_interval = 76      # updates; the last one is always saved
keep_checkpoints = 2          # newest ones; 0: all
wandb = ""                    # project to log to; needs: pip install wandb
# system
seed = 1                      # of initialisation and data order
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "auto"                # float32 (GPU: TF32), bfloat16 (autocast); auto: bfloat16 where it is faster
param_dtype = "float32"       # bfloat16: parameters and state too, which small changes do not reach
compile = bool(shutil.which(torch._inductor.config.cpp.cxx[-1]))  # torch.compile, where it finds C++
fsdp = False                  # shard weights, gradients and state by rows (FSDP2), instead of DDP

gpt2 = dict(dataset="openwebtext", block_size=1024, batch_size=480, max_iters=100_000, learning_rate=6e-4,
            adam_lr=6e-4, gamma=10.0, qkv_split=1, schedule="constant", warmup_iters=2000, log_interval=10,
            eval_interval=1000, checkpoint_interval=1000, val_tokens=4_194_304)
PRESETS = {  # "NAME/OPTIMIZER" is applied after "NAME", the command line after both
    "demo": {},  # the best rates of six pairs for muon-vs: records/README.md
    "demo/adamw": dict(learning_rate=3e-3, adam_lr=3e-3),
    "demo/adamuon": dict(adjust_lr_fn="frobenius"),
    "demo/muon-nsr-post": dict(gamma=10.0),
    "gpt2-small": dict(gpt2, n_layer=12, n_head=12, n_embd=768, micro_batch_size=15),
    "gpt2-medium": dict(gpt2, n_layer=24, n_head=16, n_embd=1024, micro_batch_size=10),
    **{f"gpt2-{size}/{name}": dict(adjust_lr_fn="frobenius") for size in ("small", "medium")
       for name in ("adamuon", "normuon")},
}

# ---- Configuration ----
SOURCES = [Path(file).read_text(encoding="utf-8") for file in (__file__, optim.__file__)]
GLOBALS = [name for name, value in list(globals().items())
           if type(value) in (bool, int, float, str, tuple) and name[0] != "_"]
CHOICES = dict(preset=[name for name in PRESETS if "/" not in name], optimizer=["adamw", *optim.VARIANTS],
               adjust_lr_fn=list(optim.UPDATE_SCALES), schedule=["constant", "cosine", "wsd"],
               dtype=["auto", "float32", "bfloat16"], param_dtype=["float32", "bfloat16", "float64"],
               device=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
AT_LEAST_1 = ["n_layer", "n_head", "n_embd", "block_size", "batch_size", "qkv_split", "log_interval",
              "eval_interval", "checkpoint_interval"]  # other numbers may be 0
AT_MOST_1 = ["momentum", "beta2", "decay_frac", "min_lr_frac"]
world = int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets it
rank = int(os.environ.get("RANK", 0)) % world  # a job script may set RANK alone
local_rank = int(os.environ.get("LOCAL_RANK", rank)) % max(1, torch.cuda.device_count())  # of GPUs it sees

def settings():
    return {name: globals()[name] for name in GLOBALS}

def boolean(text):
    return ["false", "true"].index(text.lower()) == 1

def numbers(text):
    return tuple(map(float, text.strip("()").split(",")))

def configure(argv):
    """Sets the globals: PRESETS[preset], then PRESETS["preset/optimizer"], then --name=value."""
    global micro_batch_size, run_name
    parser = argparse.ArgumentParser(usage="%(prog)s --name=value ...", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS, allow_abbrev=False)
    comments = dict(re.findall(r"^(\w+) = .*?# (.+)$", SOURCES[0].replace("%", "%%"), re.M))
    for name, value in settings().items():
        kind = {bool: boolean, tuple: numbers}.get(type(value), type(value))
        parser.add_argument(f"--{name}", type=kind, choices=CHOICES.get(name), metavar=f"{value}",
                            help=comments.get(name))
    edited = [f"--{name}={globals()[name]}" for name in CHOICES]  # which are checked as flags are
    args = parser.parse_args(edited + argv)
    overrides = PRESETS[args.preset] | PRESETS.get(f"{args.preset}/{args.optimizer}", {})
    words = [f"--{name}={x}" for name, x in overrides.items()]
    globals().update(vars(parser.parse_args(edited + words + argv)))  # of two flags the last counts
    if words and rank == 0:
        print("set by PRESETS, unless by a flag:", *words, file=sys.stderr)

    for name, value in settings().items():
        least = 1 if name in AT_LEAST_1 else 0
        most = 1 if name in AT_MOST_1 else sys.float_info.max  # which is finite
        if type(value) in (int, float) and not least <= value <= most:
            parser.error(f"--{name}={value}: no number from {least} to {most}")
    if n_embd % (2 * n_head):
        parser.error(f"--n_embd={n_embd}: no multiple of 2 x n_head = {2 * n_head}")
    if 3 * n_embd % qkv_split:
        parser.error(f"--qkv_split={qkv_split}: no divisor of 3 x n_embd = {3 * n_embd}")
    micro_batch_size = micro_batch_size or max(1, batch_size // world)
    if batch_size % (micro_batch_size * world):
        parser.error(f"--batch_size={batch_size}: no multiple of {world} x {micro_batch_size=}")
    run_name = os.path.normpath(run_name or f"{Path(__file__).stem}-{preset}-{optimizer}-seed{seed}")

# ---- Data loader ----
@functools.lru_cache(2)  # a batch may span two epochs
def permutation(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n)

class Shards:
    """A split's token shards (256 int32, then uint16 tokens, as llm.c and modded-nanogpt have them), cut into
    windows of block_size + 1 tokens, neighbours sharing one. What remains of a shard is left out."""

    def __init__(self, name, split):
        self.folder = Path("data", name)
        match = re.compile(rf"(.+)_{split}[_\d]*\.bin").fullmatch
        self.files = sorted(file for file in self.folder.glob("*.bin") if match(file.name))
        datasets = {match(file.name)[1] for file in self.files}
        if len(datasets) != 1:
            sys.exit(f"{self.folder} has {sorted(datasets) or 'no'} {split} shards, expected one dataset's; "
                     "how to make them: python prepare.py --help")
        self.contents, self.starts = [], [0]  # starts: each shard's first window
        for file in self.files:
            header = np.fromfile(file, np.int32, 256).tolist()
            if header[:3] != [20240520, 1, (file.stat().st_size - 1024) / 2]:
                sys.exit(f"{file} is damaged or no shard of 16-bit ids; run: python prepare.py verify {name}")
            tokens, self.vocab, self.eot, checksum = header[2:6]
            if not self.vocab:  # llm.c's and modded-nanogpt's: GPT-2's ids, no checksum
                self.vocab, self.eot = 50257, 50256
                checksum = int(np.fromfile(file, np.uint16, 2**16, offset=1024).sum())
            self.contents.append([tokens, self.vocab, self.eot, checksum])
            self.starts.append(self.starts[-1] + max(0, tokens - 1) // block_size)
        self.n_windows = self.starts[-1]
        if not self.n_windows:
            sys.exit(f"--block_size={block_size} is longer than any {split} shard of {self.folder}")

    def read(self, windows):
        """Inputs and targets of the windows with these numbers, (B, T) int64 each."""
        rows = np.empty((len(windows), block_size + 1), np.int64)
        for row, window in zip(rows, windows):
            shard = np.searchsorted(self.starts, window, "right") - 1
            first = (window - self.starts[shard]) * block_size
            row[:] = np.fromfile(self.files[shard], np.uint16, block_size + 1, offset=1024 + 2 * first)
        if rows.max(initial=0) >= self.vocab:
            sys.exit(f"{self.folder} has the id {rows.max()}, beyond its tokenizer's {self.vocab}")
        tokens = torch.from_numpy(rows)
        if device == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, first, count):
        """Sequences first, first + 1, ... of the run, a pure function of seed, block_size and data. An epoch
        has each window once, in an order of its own."""
        n = self.n_windows
        return self.read([permutation(n, seed, i // n)[i % n] for i in range(first, first + count)])

# ---- Model ----
def rotate(x_BHTK, cos, sin):
    """RoPE: turns the pairs (k, k + K/2) of each head; cos and sin are (T, K/2)."""
    a, b = x_BHTK.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x_BHTK)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x_BTD, cos, sin):
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, n_head, D // n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, K)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D))

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x_BTD):
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(n_embd, bias=False)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(n_embd, bias=False)
        self.mlp = MLP()

    def forward(self, x_BTD, cos, sin):
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD), cos, sin)
        return x_BTD + self.mlp(self.norm2(x_BTD))

class Model(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, tokens_BT, targets_BT=None):
        """Mean cross-entropy in nats, a scalar; without targets the logits, (B, T, V)."""
        on, K = tokens_BT.device, n_embd // n_head
        rates = 10_000 ** -(torch.arange(0, K, 2, dtype=torch.float64, device=on) / K)
        angles = torch.arange(tokens_BT.size(1), device=on)[:, None] * rates  # (T, K/2)
        cos, sin = angles.cos().float(), angles.sin().float()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            x_BTD = self.embed(tokens_BT)
            for block in self.blocks:
                x_BTD = block(x_BTD, cos, sin)
            return self.logits(x_BTD) if targets_BT is None else self.loss(x_BTD, targets_BT)

    def logits(self, x_BTD):
        return self.head(self.norm(x_BTD))

    def loss(self, x_BTD, targets_BT):
        """Compiled as one graph, so that bf16 logits get no copy in fp32. Validation reads logits() alone."""
        return F.cross_entropy(self.logits(x_BTD).flatten(0, 1).float(), targets_BT.flatten())

# ---- Initialisation, optimizers, schedule ----
def init_weights(model):
    """Redraws: N(0, 0.02), into the residual stream N(0, 0.02 / √(2 n_layer)); gains stay 1."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            into_stream = name.endswith((".proj", ".down"))
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * n_layer) if into_stream else 0.02)

def build_optimizers(model):
    """Muon for matrices inside blocks, AdamW for the rest, or for all. The first group's rate is logged."""
    inside = {p: name for name, p in model.blocks.named_parameters() if p.ndim >= 2}
    fused = [p for p, name in inside.items() if name.endswith("qkv.weight") and len(p) == 3 * n_embd]
    matrices = [p for p in inside if p not in set(fused)]
    rest = [p for p in model.parameters() if p not in inside]  # embedding, head, gains
    adam = [dict(params=[p for p in rest if p.ndim >= 2]),
            dict(params=[p for p in rest if p.ndim < 2], weight_decay=0)]
    optimizers = []
    if optimizer == "adamw":
        adam.insert(0, dict(params=fused + matrices, lr=learning_rate))
    else:
        optimizers.append(optim.Muon(
            [dict(params=fused, split=qkv_split), dict(params=matrices)], lr=learning_rate, variant=optimizer,
            momentum=momentum, weight_decay=weight_decay, gamma=gamma, power=power, beta2=beta2, eps=muon_eps,
            ns_steps=ns_steps, ns_coefficients=ns_coefficients, ns_eps=ns_eps, adjust_lr_fn=adjust_lr_fn,
            state_dtype=torch.bfloat16 if param_dtype == "bfloat16" else None, compile=compile))
    optimizers.append(torch.optim.AdamW(adam, adam_lr, adam_betas, adam_eps, weight_decay, fused=True))
    placed = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    assert sorted(map(id, placed)) == sorted(map(id, model.parameters())), "some in no group, or in two"
    return optimizers

def lr_factor(step):
    """Both learning rates as a fraction of their peaks, at updates 0 to max_iters - 1."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    left = 1.0  # constant
    if schedule == "cosine":
        done = (step - warmup_iters) / (max_iters - warmup_iters)
        left = 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "wsd":
        left = min(1.0, (max_iters - step) / max(1.0, decay_frac * max_iters))
    return min_lr_frac + (1 - min_lr_frac) * left

def set_schedules(step, optimizers):
    """Sets what changes from update to update, here learning rates, by step alone: it is not saved."""
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor(step)

def first_sequence(step):
    """Update `step` takes the sequences first_sequence(step) to first_sequence(step + 1) - 1 of the run."""
    return step * batch_size

def update(step, parallel, optimizers, shards):
    """One update of the model, which on several ranks is in DDP's wrapper. Returns the loss of this rank's
    sequences and the norm of the whole gradient, as tensors, since reading them would wait for a GPU."""
    torch.manual_seed(hash((seed, step, rank)))  # for a fork's dropout
    set_schedules(step, optimizers)
    first, end = first_sequence(step), first_sequence(step + 1)
    if end <= first or (end - first) % (world * micro_batch_size):
        raise ValueError("the batch must be a multiple of micro_batch_size x ranks")
    micro_batches = range(first + rank * micro_batch_size, end, world * micro_batch_size)
    loss = 0.0
    for start in micro_batches:
        parallel.require_backward_grad_sync = start == micro_batches[-1]  # for DDP alone
        x_BT, y_BT = shards.batch(start, micro_batch_size)
        part = parallel(x_BT, y_BT) / len(micro_batches)
        part.backward()
        loss += part.detach()
    norm = nn.utils.clip_grad_norm_(parallel.parameters(), grad_clip or math.inf)
    torch.manual_seed(hash((seed, step)))  # for an optimizer that rounds at random: alike on all ranks
    for opt in optimizers:
        opt.step()
        opt.zero_grad()
    return loss, norm

# ---- Evaluation ----
def over_ranks(value, op=dist.ReduceOp.SUM):
    value = torch.as_tensor(value, device=device)
    if world > 1:
        dist.all_reduce(value, op)
    return value

@torch.no_grad()
def evaluate(model, shards):
    """Mean cross-entropy (nats per token) and accuracy over the first val_tokens, whatever the batch."""
    model.eval()
    total = min(max(1, val_tokens // block_size), shards.n_windows)
    mine = range(rank, total, world)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, hits, tokens
    for i in range(0, math.ceil(total / world), micro_batch_size):  # as many on each rank, for FSDP
        x_BT, y_BT = shards.read(mine[i:i + micro_batch_size])
        for logits_TV, y_T in zip(model(x_BT), y_BT):
            sums[0] += F.cross_entropy(logits_TV.float(), y_T, reduction="sum")
            sums[1] += (logits_TV.argmax(-1) == y_T).sum()
            sums[2] += (y_T != -100).sum()  # which a fork masks
    model.train()
    loss, hits, tokens = over_ranks(sums).tolist()
    return loss / tokens, hits / tokens

def hardware():
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.cpu.get_capabilities().get('cpu_name', 'CPU')}, {torch.get_num_threads()} threads a rank"

def mfu(model, tokens_per_s):
    """Model FLOPs utilisation, where the GPU's bf16 peak is known. A token costs 6 FLOPs a parameter of
    blocks and head (as embed's) and 12 n_layer D T for attention, forward and backward (PaLM, appendix B)."""
    peaks = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim >= 2) + model.embed.weight.numel()
    flops = 6 * matrices + 12 * n_layer * n_embd * block_size
    return tokens_per_s * flops / (peaks[hardware()] * world) if hardware() in peaks else None

# ---- Checkpoints ----
def newest_first():
    return sorted(Path("checkpoints", run_name).glob("step_" + 8 * "[0-9]" + ".pt"), reverse=True)

def parameters_of(opt, model):
    """(name, parameter), in the order in which opt numbers its state."""
    names = {p: name for name, p in model.named_parameters()}
    return [(names[p], p) for group in opt.param_groups for p in group["params"]]

def whole(t):
    """t on rank 0's CPU, None elsewhere. All ranks must call it: of a DTensor each has a part."""
    t = t.full_tensor() if isinstance(t, DTensor) else t
    return optim.whole_on_cpu(t) if rank == 0 else None

def save_checkpoint(model, optimizers, facts, step, train_time):
    """Writes step_N.pt whole or not at all, and removes old ones. All ranks call it; each may hold parts."""
    content = dict(facts, step=step, train_time=train_time, optimizer={})
    content["model"] = {name: whole(p) for name, p in model.state_dict().items()}
    for opt in optimizers:
        saved = opt.full_state_dict() if isinstance(opt, optim.Muon) else opt.state_dict()
        state = saved.get("state", {})  # other ranks get none of Muon's, and of AdamW's only their parts
        for i, (name, _) in enumerate(parameters_of(opt, model)):
            content["optimizer"][name] = {key: whole(t) for key, t in state.get(i, {}).items()}
    if rank > 0:
        return
    path = Path("checkpoints", run_name, f"step_{step:08d}.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name("saving.tmp")  # always this, so that the next save replaces a killed one's
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # A newer file is a damaged one, which first_whole() passed over.
    written = [old for old in newest_first() if old <= path]
    for old in written[keep_checkpoints or len(written):]:
        old.unlink()

def read_checkpoint(path):
    if zipfile.ZipFile(path).testzip():  # torch.save writes checksums
        raise ValueError("a part is damaged")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

def first_whole(paths):
    """The first of these checkpoints that is whole, and its content."""
    for path in paths:
        try:
            return path, read_checkpoint(path)
        except Exception as error:  # it may be any file
            print(f"passing over {path}: {error!r:.300}", file=sys.stderr)
    sys.exit("found no checkpoint that is whole; give another, or, to begin anew, another --run_name")

def load_checkpoint(paths, model, optimizers, facts):
    """Loads weights and, by name, optimizers' state, but not what is in their groups, of the first of paths
    that is whole. Returns its step and time, and what differs from facts."""
    path, saved = first_whole(paths)
    own = model.state_dict()
    try:
        old, ids = saved["globals"], saved["vocab"]
        assert ids == facts["vocab"], f"it is of a tokenizer of {ids} ids, not {facts['vocab']}"
        assert not optimizers or old["optimizer"] == optimizer, f"pass --optimizer={old['optimizer']}"
        assert saved["optimizer"].keys() == dict(model.named_parameters()).keys(), "its parameters are others"
        model.load_state_dict({name: optim.placed_like(t, own[name]) for name, t in saved["model"].items()})
    except Exception as error:  # it may be of any model
        sys.exit(f"found no checkpoint of this model in {path}: {error!r:.300}")
    for opt in optimizers:
        fresh = opt.state_dict()  # options of this start, and no state yet
        for i, (name, p) in enumerate(parameters_of(opt, model)):
            fresh["state"][i] = {k: optim.placed_like(t, p) for k, t in saved["optimizer"][name].items()}
        opt.load_state_dict(fresh)
    changed = [name for name in ("code", "data", "val_data") if saved[name] != facts[name]]
    changed += [f"{name}={value}" for name, value in facts["globals"].items()
                if old.get(name) != value and name not in ("resume", "init_from")]
    return saved["step"], saved["train_time"], ",".join(changed) or "nothing"

# ---- Main ----
def init_ranks():
    """Joins the other ranks, which may wait hours while one saves, and settles `dtype`."""
    global dtype
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        torch.backends.cuda.matmul.allow_tf32 = True
    if world > 1:
        # A store of this start's own: torchrun's outlives a restart, with keys of dead ranks.
        hours = datetime.timedelta(hours=4)
        port = int(os.environ["MASTER_PORT"]) + 100
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world, is_master=rank == 0, timeout=hours)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=hours, store=store, rank=rank, world_size=world)
    if dtype == "auto":
        dtype = str(optim.fast_dtype(device)).removeprefix("torch.")

def build_model(vocab):
    torch.manual_seed(seed)
    model = Model(64 * math.ceil(vocab / 64))  # rows of embedding and head
    init_weights(model)
    model.to(getattr(torch, param_dtype))
    if fsdp and world > 1:  # a rank keeps its rows; a block's are gathered while it computes
        mesh = dist.init_device_mesh(device, (world,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    model.to(device)
    if compile:
        torch._dynamo.config.optimize_ddp = False  # which would cut the one graph that all blocks share
        torch._dynamo.config.recompile_limit = 256  # where a fork's blocks differ, each has its own
        for block in model.blocks:
            block.compile(dynamic=False)
        Model.loss = torch.compile(Model.loss, dynamic=False)  # on the class: copies of the model share it
        if rank == 0:
            print("compiling, a minute or two, within the first validation and the first update", flush=True)
    return model

FORMATS = dict(train_time="{:.3f}s", step_avg="{:.2f}ms", time_left="{:.0f}s", lr="{:.6g}",
               tokens_per_s="{:.0f}", peak_memory_mib="{:.0f}", optimizer_state_mib="{:.1f}")

def open_log(path, model, facts):
    """Begins a log, or goes on with it. Returns log(line, figures, step), for screen, file and wandb."""
    if wandb:
        import wandb as client  # the name wandb is the flag
        tracker = client.init(project=wandb, name=path.stem, config=settings())
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a" if resume == "auto" else "x", encoding="utf-8", buffering=1)  # line by line
    if file.tell() == 0:
        environment = dict(torch=torch.__version__, hardware=hardware(), world_size=world,
                           started=time.ctime(), parameters=sum(p.numel() for p in model.parameters()),
                           data=sum(map(sum, facts["data"] + facts["val_data"])))  # other data, another sum
        head = [f"{name}: {value}\n" for name, value in environment.items()]
        head += [f"--{name}={value}\n" for name, value in settings().items()]
        file.write(("=" * 100 + "\n").join([*SOURCES, "".join(head), ""]))

    def log(line, figures={}, step=0):
        for name, x in figures.items():
            line += f" {name}:" + FORMATS.get(name, "{:.5f}").format(x)
        if not os.path.samefile(path, file.fileno()) or path.stat().st_size != file.tell():
            sys.exit(f"{path} was changed, as by another start of its name; this run ends")
        print(line, file=file)
        with contextlib.suppress(OSError):  # of a terminal that is gone
            print(line, flush=True)
        if wandb and figures:
            tracker.log(figures, step=step)
    return log

def memory(optimizers):
    """All of it and the optimizers' state, in MiB, of the rank that has most."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    buffers = [t for opt in optimizers for entry in opt.state.values() for t in entry.values()]
    state = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in buffers if torch.is_tensor(t))
    peak = torch.cuda.max_memory_allocated() or rss
    peak, state = (over_ranks([peak, state], dist.ReduceOp.MAX) / 2**20).tolist()
    return dict(peak_memory_mib=peak, optimizer_state_mib=state)

def train(model, optimizers, shards, val_shards, facts, step, train_time, log):
    """Evaluates and saves, where due, and logs; then updates until one of these is due. The first update of a
    start compiles: it stands alone, and the clock, which counts updates, leaves it out."""
    first_step, first_time = step, train_time
    signals = []  # after one the run saves and stops at its next log line
    def on_signal(number, frame):
        if number == signal.SIGINT and (number in signals or step == first_step):
            raise KeyboardInterrupt  # a second Ctrl-C, or one before the first update is done: it may compile
        signals.append(number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which nohup sets
            signal.signal(number, on_signal)
    def due(*intervals):
        return step >= max_iters or any(step % interval == 0 for interval in intervals)

    parallel = nn.parallel.DistributedDataParallel(model) if world > 1 and not fsdp else model
    recent = {}  # measured since the last line of the log
    while True:
        val_loss, val_acc = evaluate(model, val_shards) if due(eval_interval) else (None, None)
        step_avg = 1000 * (train_time - first_time) / max(1, step - first_step - 1)
        figures = dict(val_loss=val_loss, train_time=train_time, step_avg=step_avg, val_acc=val_acc)
        figures = {name: x for name, x in (figures | recent).items() if x is not None}
        log(f"step:{step}/{max_iters}", figures, step)
        weights = optim.whole_on_cpu(nn.utils.get_total_norm(model.parameters())).item()
        if not all(map(math.isfinite, [weights, *figures.values()])):
            log(f"diverged: no finite loss, gradient or weights at update {step}; lower --learning_rate")
            sys.exit(1)

        stop = over_ranks(len(signals)) > 0
        if stop or step > first_step and due(checkpoint_interval):
            save_checkpoint(model, optimizers, facts, step=step, train_time=train_time)
        if step >= max_iters:
            final = dict(val_loss=val_loss, val_acc=val_acc, train_time=train_time)
            return log("final", final | memory(optimizers), step)
        if stop:
            return log("stopped; the same command with --resume=auto goes on")

        last_step, last_time = step, time.perf_counter()
        while True:
            loss, norm = update(step, parallel, optimizers, shards)
            step += 1
            if last_step == first_step or due(log_interval, eval_interval, checkpoint_interval):
                break
        loss, norm = over_ranks(loss).item() / world, optim.whole_on_cpu(norm).item()
        recent = dict(train_loss=loss, grad_norm=norm, lr=optimizers[0].param_groups[0]["lr"])
        if last_step > first_step:
            seconds = time.perf_counter() - last_time  # after item(), which waits for a GPU
            train_time += seconds
            tokens_per_s = (first_sequence(step) - first_sequence(last_step)) * block_size / seconds
            recent |= dict(tokens_per_s=tokens_per_s, mfu=mfu(model, tokens_per_s),
                           time_left=seconds / (step - last_step) * (max_iters - step))

def main(argv):
    configure(argv)
    shards, val_shards = Shards(dataset, "train"), Shards(val_dataset or dataset, "val")
    if shards.vocab != val_shards.vocab:
        sys.exit(f"found {shards.vocab} ids to train on, {val_shards.vocab} to validate; use one tokenizer")
    log_file = Path("logs", f"{run_name}.txt")
    found = [file for file in [log_file, *newest_first()] if file.exists()]
    if found and resume != "auto":
        sys.exit(f"{found[0]} exists; give another --run_name, or, if it has ended and saved, --resume=auto")
    init_ranks()
    facts = dict(script=Path(__file__).name, code=SOURCES, globals=settings(), data=shards.contents,
                 val_data=val_shards.contents, vocab=shards.vocab, eot=shards.eot)
    model = build_model(shards.vocab)
    optimizers = build_optimizers(model)
    step, train_time = 0, 0.0
    paths = newest_first() if resume == "auto" else [resume] if resume else []
    if paths:
        step, train_time, changed = load_checkpoint(paths, model, optimizers, facts)
    elif init_from:
        *_, changed = load_checkpoint([init_from], model, [], facts)
    if world > 1:
        dist.broadcast_object_list(of_rank_0 := [facts, step])
        if over_ranks(int(of_rank_0 != [facts, step])):
            sys.exit("ranks have other settings, data, code or checkpoints than rank 0; nodes share them")

    if rank == 0 and resume == "auto" and not paths and log_file.exists():
        print("an earlier start of this run saved nothing; it begins anew", file=sys.stderr)
        log_file.rename(f"{log_file}.{time.time_ns()}")
    log = open_log(log_file, model, facts) if rank == 0 else lambda *_: None
    if paths or init_from:
        log(f"{'resumed' if paths else 'begun'}:step:{step} world_size:{world} changed:{changed}")
    train(model, optimizers, shards, val_shards, facts, step, train_time, log)
    if world > 1 and device == "cuda":
        dist.destroy_process_group()  # gloo's ends with the process; destroying it may hang

if __name__ == "__main__":
    main(sys.argv[1:])
