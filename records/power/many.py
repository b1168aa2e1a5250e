"""
The study on one GPU: many runs of a train script side by side, as one model whose parameters have a first dimension R,
a run each. Initial weights, order of data, schedule and optimizers of a run are those that the script has by itself;
Newton-Schulz is in fp32 too. On a GPU the products of fp32 are in TF32.

    python records/power/many.py --power=0.5 --dataset=english --cells short:27 --out=english-0.5.jsonl

In a cell, rates are searched on seeds 101 to 103, learning_rate in steps of √2 and adam_lr in steps of 2, R / 3 pairs
at a time, a pair's neighbours first, until the best mean has a worse one on each of its four sides; then come seeds 1
to R with the best. A line of JSON a run: its settings and val_loss at each tenth of it. Power 0 is muon.
"""
import argparse, copy, importlib, itertools, json, math, sys, time
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import optim

RATES = [0.0003, 0.00043, 0.0006, 0.0009, 0.0012, 0.0018, 0.0025, 0.0035, 0.005, 0.007, 0.01, 0.014, 0.02, 0.028, 0.04]
MODEL = "--n_layer=2 --n_embd=128 --n_head=2 --block_size=128 --val_tokens=131072 --dtype=float32 --qkv_split=1"
CELLS = {  # flags, and where searches start: learning_rate, adam_lr
    "short": ("--batch_size=16 --max_iters=1600 --eval_interval=160", 0.005, 0.01),
    "large": ("--batch_size=64 --max_iters=1600 --eval_interval=160", 0.007, 0.01),
    "long": ("--batch_size=16 --max_iters=6400 --eval_interval=640", 0.0025, 0.005),
}

class Linear(nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([module.weight.detach() for module in modules]))  # (R, out, in)

    def forward(self, x):
        y = x.reshape(len(self.weight), -1, x.size(-1)) @ self.weight.mT
        return y.view(*x.shape[:-1], -1)

class Embedding(Linear):
    def forward(self, tokens_BT):  # B: of all runs
        R, V, D = self.weight.shape
        first = V * torch.arange(R, device=tokens_BT.device).repeat_interleave(len(tokens_BT) // R)
        return nn.functional.embedding(tokens_BT + first[:, None], self.weight.flatten(0, 1))

class Norm(Linear):
    def __init__(self, modules):
        super().__init__(modules)
        self.bare = copy.deepcopy(modules[0])
        self.bare.weight = None

    def forward(self, x):
        y = self.bare(x).view(len(self.weight), -1, x.size(-1)) * self.weight[:, None]
        return y.view_as(x)

KINDS = {nn.Linear: Linear, nn.Embedding: Embedding, nn.LayerNorm: Norm, nn.RMSNorm: Norm}

def together(modules):
    """The first module, made that of all runs."""
    for name, child in list(modules[0].named_children()):
        children = [module.get_submodule(name) for module in modules]
        setattr(modules[0], name, KINDS[type(child)](children) if type(child) in KINDS else together(children))
    return modules[0]

def on_device(shards, device):
    """A split's tokens, and the place of each window in them."""
    parts = [np.fromfile(file, np.uint16, offset=1024) for file in shards.files]
    first = np.cumsum([0, *map(len, parts)])
    counts = np.diff(shards.starts)
    places = np.concatenate([start + train.block_size * np.arange(n) for start, n in zip(first, counts)])
    return torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device), torch.from_numpy(places).to(device)

def windows(tokens, starts):
    """Inputs and targets, (B, T) each, of the windows that start there."""
    rows = tokens[starts[:, None] + torch.arange(train.block_size + 1, device=starts.device)].long()
    return rows[:, :-1], rows[:, 1:]

def order(n_windows, seed):
    """The windows of a run, in its order."""
    needed = train.first_sequence(train.max_iters)
    epochs = math.ceil(needed / n_windows)
    return np.concatenate([train.permutation(n_windows, seed, epoch) for epoch in range(epochs)])[:needed]

def clip(grads):
    """Scales the gradients of each run to a global norm of at most grad_clip."""
    norms = sum(grad.square().flatten(1).sum(1) for grad in grads).sqrt()
    factors = ((train.grad_clip or math.inf) / (norms + 1e-6)).clamp(max=1)
    for grad in grads:
        grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))

@torch.no_grad()
def evaluate(model, R, tokens, places):
    sums, B = torch.zeros(R, dtype=torch.float64, device=train.device), train.batch_size
    total = min(train.val_tokens // train.block_size, len(places))
    for i in range(0, total, B):
        x_BT, y_BT = windows(tokens, places[i:min(i + B, total)])
        logits_BTV = model(x_BT.repeat(R, 1))
        targets = y_BT.repeat(R, 1).flatten()
        losses = nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets, reduction="none")
        sums += losses.view(R, -1).sum(1)
    return (sums / (total * train.block_size)).tolist()

def train_all(runs, data, val_data, vocab):
    """runs: (learning_rate, adam_lr, seed) each. Returns the validation losses of each at every eval_interval."""
    R, device = len(runs), train.device
    models = []
    for _, _, seed in runs:
        torch.manual_seed(seed)
        models.append(train.Model(64 * math.ceil(vocab / 64)))
        train.init_weights(models[-1])
    model = together(models).to(device)
    if train.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
        model.loss = torch.compile(model.loss, dynamic=False)

    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 3]
    rates = torch.tensor([run[0] for run in runs], device=device).view(R, 1, 1)
    muon = optim.Muon(matrices, lr=rates, variant=train.optimizer, momentum=train.momentum, power=train.power,
                      weight_decay=train.weight_decay, eps=train.muon_eps, ns_steps=train.ns_steps,
                      ns_dtype=torch.float32, adjust_lr_fn=train.adjust_lr_fn, compile=train.compile)
    groups = {}  # views of the others, a parameter a run
    for p, (r, (_, adam_lr, _)) in itertools.product(parameters, enumerate(runs)):
        if not any(p is matrix for matrix in matrices):
            view = nn.Parameter(p.detach()[r])
            view.grad = p.grad[r]
            groups.setdefault((adam_lr, train.weight_decay if p.ndim == 3 else 0), []).append(view)
    groups = [dict(params=views, lr=lr, weight_decay=decay) for (lr, decay), views in groups.items()]
    adamw = torch.optim.AdamW(groups, betas=train.adam_betas, eps=train.adam_eps, fused=True)

    tokens, places = data
    orders = {seed: order(len(places), seed) for seed in {run[2] for run in runs}}
    starts = places[torch.from_numpy(np.stack([orders[run[2]] for run in runs])).to(device)]
    compiled_clip = torch.compile(clip, dynamic=False) if train.compile else clip
    curve = []
    for step in range(train.max_iters + 1):
        if step and step % train.eval_interval == 0:
            curve.append(evaluate(model, R, *val_data))
        if step == train.max_iters:
            break
        x_BT, y_BT = windows(tokens, starts[:, train.first_sequence(step):train.first_sequence(step + 1)].flatten())
        (R * model(x_BT, y_BT)).backward()  # the sum of the runs' means
        compiled_clip([p.grad for p in parameters])
        train.set_schedules(step, [muon, adamw])
        muon.step()
        adamw.step()
        torch._foreach_zero_([p.grad for p in parameters])
    return np.array(curve).T.tolist()

def search(measure, start, R):
    """The best (index of learning_rate, adam_lr) by mean final loss on three seeds."""
    losses, best = {}, start
    side = lambda point: [(point[0] + i, point[1] * 2.0**j) for i, j in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))]
    while True:
        missing = [point for point in side(best) if point not in losses]
        if not missing:
            return best
        corners = [(best[0] + i, best[1] * 2.0**j) for i, j in itertools.product((-1, 1, -2, 2, 0), (-1, 1, -2, 2, 0))]
        points = (missing + [p for p in corners if p not in losses and p not in missing])[:R // 3]
        finals = measure([(point, seed) for point in points for seed in (101, 102, 103)])
        for i, point in enumerate(points):
            mean = float(np.mean(finals[3 * i:3 * i + 3]))
            losses[point] = mean if math.isfinite(mean) else math.inf
        best = min(losses, key=losses.get)

def main():
    global train
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=["train_gpt", "train_llama"], default="train_gpt")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--power", type=float, required=True)
    parser.add_argument("--cells", nargs="+", metavar="CELL:R", required=True)
    parser.add_argument("--flags", default="", help="further ones of the script")
    parser.add_argument("--runs", nargs="+", metavar="LR,ADAM_LR,SEED", help="these alone, without a search")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    train = importlib.import_module(args.script)
    rule = ["--optimizer=muon"] if args.power == 0 else ["--optimizer=muon-vs", f"--power={args.power}"]
    torch.backends.cuda.matmul.allow_tf32 = True
    for cell, R in (cell.split(":") for cell in args.cells):
        flags, *start = CELLS[cell]
        train.configure([f"--dataset={args.dataset}", *MODEL.split(), *flags.split(), *rule, *args.flags.split()])
        shards, val_shards = train.Shards(args.dataset, "train"), train.Shards(args.dataset, "val")
        data, val_data = on_device(shards, train.device), on_device(val_shards, train.device)

        def measure(runs):
            """runs: ((index of learning_rate or itself, adam_lr), seed) each."""
            runs = [(lr if isinstance(lr, float) else RATES[lr], adam_lr, seed) for (lr, adam_lr), seed in runs]
            begin = time.perf_counter()
            curves = train_all(runs, data, val_data, shards.vocab)
            seconds = time.perf_counter() - begin
            with open(args.out, "a") as file:
                for (lr, adam_lr, seed), curve in zip(runs, curves):
                    print(json.dumps(dict(
                        script=args.script, cell=cell, dataset=args.dataset, flags=args.flags, power=args.power,
                        learning_rate=lr, adam_lr=adam_lr, seed=seed, val_loss=[round(x, 5) for x in curve],
                        torch=torch.__version__, hardware=train.hardware())), file=file)
            print(f"{cell} {args.dataset} power {args.power:g}: {len(runs)} runs in {seconds:.1f} s, "
                  f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
            return [curve[-1] for curve in curves]

        if args.runs:
            named = [run.split(",") for run in args.runs]
            measure([((float(lr), float(adam_lr)), int(seed)) for lr, adam_lr, seed in named])
            continue
        best = search(measure, (RATES.index(start[0]), start[1]), int(R))
        print(f"{cell} {args.dataset} power {args.power:g}: best {RATES[best[0]]:g}, {best[1]:g}", flush=True)
        measure([(best, seed) for seed in range(1, int(R) + 1)])

if __name__ == "__main__":
    main()
