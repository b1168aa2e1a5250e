"""
Where is the norm of Muon-VS's input to Newton-Schulz? From the project's root, with flags of a run of train_gpt.py:

    python records/map/inside.py --batch_size=64 --max_iters=1600 --learning_rate=0.005 --adam_lr=0.02 ...

Entries are called quiet where the variance is below a hundredth of the matrix's mean. For each kind of matrix, mean
over layers, at some updates: the share of entries that are quiet, and the share of the proxy's squared norm in them;
and the share of the squared norm in the hundredth of entries that has most.
"""
import re, sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import optim, train_gpt

AT = (100, 800, 1590)
step_of_muon, build = optim.Muon.step, train_gpt.build_optimizers
names = {}

def build_and_name(model):
    names.update({p: re.sub(r"blocks\.\d+\.|\.weight", "", name) for name, p in model.named_parameters()})
    return build(model)

def step(self, closure=None):
    self.seen = getattr(self, "seen", -1) + 1
    if self.seen in AT:
        shares = defaultdict(list)
        for p, S in self.state.items():
            M_tilde, variance, _ = optim.averages(p.grad, S, S["step"] + 1, train_gpt.momentum, True)
            proxy = M_tilde / (variance.sqrt() + train_gpt.muon_eps) ** train_gpt.power
            square = proxy.square()
            quiet = variance < 0.01 * variance.mean()
            largest = square.flatten().topk(square.numel() // 100).values
            shares[names[p]].append([x.item() for x in (quiet.float().mean(), square[quiet].sum() / square.sum(),
                                                       largest.sum() / square.sum())])
        for name, rows in shares.items():
            quiet, norm, largest = torch.tensor(rows).mean(0).tolist()
            print(f"update {self.seen:5} {name:10} quiet entries {quiet:.3f}, share of norm² {norm:.3f}; "
                  f"largest 1 % of entries {largest:.3f}", flush=True)
    return step_of_muon(self, closure)

optim.Muon.step, train_gpt.build_optimizers = step, build_and_name
train_gpt.main(sys.argv[1:])
