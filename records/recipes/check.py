"""
Is a step of our Muon that of theirs? In a folder with train_gpt_simple.py of modded-nanogpt and our optim.py:

    python check.py

Ten updates from the same weights and gradients, then the last update D of ours against E of theirs, without weight
decay: |D - E| / |E| and |D| / |E|. Theirs is their own muon_update, and torch.optim.Muon. In fp32 their .bfloat16() is
replaced.
"""
import sys

import torch

sys.path.insert(0, ".")
import optim

TRACK_3 = (2, -1.5, 0.5), 12
OURS = optim.JORDAN, 5
source = open("train_gpt_simple.py").read()
source = source[source.index("def zeropower"):source.index("class Muon(")].replace("@torch.compile", "")

def last_updates(variant, adjust_lr_fn, coefficients, ns_steps, dtype, shape):
    """The last update of ours and of theirs; a gradient is a decaying spectrum and noise of about its size."""
    torch.manual_seed(0)
    weights, momentum, peer = torch.nn.Parameter(0.02 * torch.randn(shape)), torch.zeros(shape), None
    theirs = torch.nn.Parameter(weights.detach().clone())
    options = dict(lr=0.025, weight_decay=0.05, adjust_lr_fn=adjust_lr_fn)
    muon = optim.Muon([weights], variant=variant, ns_steps=ns_steps, ns_dtype=dtype, ns_coefficients=coefficients,
                      compile=False, **options)
    if adjust_lr_fn == "match_rms_adamw":
        peer = torch.optim.Muon([theirs], **options)
    namespace = {"torch": torch, "Tensor": torch.Tensor}
    exec(source.replace("G.bfloat16()", f"G.to({dtype})"), namespace)
    rank = min(shape)
    signal = torch.randn(shape[0], rank) / torch.arange(1, rank + 1) @ torch.randn(rank, shape[1])
    for _ in range(10):
        gradient = signal + torch.randn(shape)
        old, their_old = weights.detach().clone(), theirs.detach().clone()
        weights.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        if peer:
            peer.step()
        else:
            with torch.no_grad():
                theirs.mul_(1 - 0.025 * 0.05).sub_(0.025 * namespace["muon_update"](theirs.grad, momentum))
    return [new.detach() - (1 - 0.025 * 0.05) * old for new, old in ((weights, old), (theirs, their_old))]

print(f"{'theirs':16} {'ours':8} {'Newton-Schulz':26} {'dtype':9} {'shape':10} {'difference':>10} {'norm':>6}")
for scale, variant, schulz, dtype in [
        ("original", "muon", TRACK_3, torch.float32), ("original", "muon", TRACK_3, torch.bfloat16),
        ("original", "muon", OURS, torch.bfloat16), ("original", "muon-vs", TRACK_3, torch.bfloat16),
        ("original", "muon-vs", OURS, torch.bfloat16), ("match_rms_adamw", "muon", OURS, torch.bfloat16),
        ("match_rms_adamw", "muon-vs", OURS, torch.bfloat16)]:
    for shape in (768, 768), (3072, 768), (768, 3072):
        D, E = last_updates(variant, scale, *schulz, dtype, shape)
        peer, kind = "torch.optim.Muon" if scale == "match_rms_adamw" else "track 3", str(dtype).removeprefix("torch.")
        print(f"{peer:16} {variant:8} {schulz[1]:2} x {str(schulz[0]):21} {kind:9} {'x'.join(map(str, shape)):10} "
              f"{(D - E).norm() / E.norm():10.5f} {D.norm() / E.norm():6.3f}", flush=True)
