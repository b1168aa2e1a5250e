"""
Has a run learnt to copy? Loss on the second of two copies of a text, less that on the first, of each checkpoint of
study.py's English runs in bytes. From the root of the checkout in which they ran:

    python records/power/copying.py
"""
import re, sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, ".")
import train_gpt as script

torch.set_num_threads(1)
print("| final loss | loss at 40 % | second copy less first | run |\n|---:|---:|---:|---|")
rows = []
for log in Path("logs").glob("gpt-english-batch*-updates*-*.txt"):
    text = log.read_text()
    final = re.search(r"^final val_loss:(\S+)", text, re.M)
    paths = sorted(Path("checkpoints", log.stem).glob("step_*.pt"))
    if not final or not paths:
        continue
    saved = torch.load(paths[-1], weights_only=True)
    vars(script).update(saved["globals"] | dict(compile=False))
    model = script.Model(len(saved["model"]["embed.weight"]))
    model.load_state_dict(saved["model"])
    half, _ = script.Shards("english", "val").read(range(256))
    half = half[:, :64]
    twice = torch.cat([half, half], 1)
    with torch.no_grad():
        logits = model(twice[:, :-1]).float()
    losses = F.cross_entropy(logits.mT, twice[:, 1:], reduction="none")  # (256, 127)
    gain = losses[:, 71:].mean() - losses[:, 7:63].mean()  # of the characters 9 to 64 of either copy
    middle = re.search(r"^step:(?:640/1600|2560/6400) val_loss:(\S+)", text, re.M)
    rows.append((float(final[1]), float(middle[1]), gain.item(), re.sub("gpt-english-|muon-vs-", "", log.stem)))
for final, middle, gain, name in sorted(rows):
    print(f"| {final:.4f} | {middle:.4f} | {gain:+.3f} | {name} |")
