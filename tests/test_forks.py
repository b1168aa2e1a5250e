"""README's table "Fork it": each change is of so many lines in one place, trains, resumes and runs on two ranks."""
import re, sys
from pathlib import Path

import pytest
import torch

from common import ROOT, on_ranks, train, write_tiny

MUON = re.search(r"(?s) +optimizers.append\(optim.Muon\(.*?=compile\)\)\n", (ROOT / "train_gpt.py").read_text())[0]
FORKS = {  # file, what is there, what comes instead (... between places); the run's flags
    "a batch-size schedule": ("train_gpt.py", """
    return step * batch_size
""", """
    return step * batch_size + 8 * max(0, step - 4)  # 8 sequences an update, 16 from update 4 on
""", {}),
    "a sequence-length schedule": ("train_gpt.py", """
        part = parallel(x_BT, y_BT) / len(micro_batches)
""", """
        T = block_size // 2 if step < 4 else block_size
        part = parallel(x_BT[:, :T], y_BT[:, :T]) / len(micro_batches)
""", {}),
    "torch.optim.Muon": ("train_gpt.py", "\n" + MUON, """
        optimizers.append(torch.optim.Muon(fused + matrices, lr=learning_rate, weight_decay=weight_decay))
""", {}),
    "a merged q-k-v-o parameter": ("train_gpt.py", """
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)
...
        q, k, v = self.qkv(x_BTD).view(B, T, 3, n_head, D // n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, K)
...
        return self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D))
""", """
        self.qkvo = nn.Parameter(0.02 * torch.randn(4, n_embd, n_embd))
...
        q, k, v = (F.linear(x_BTD, w).view(B, T, n_head, -1).transpose(1, 2) for w in self.qkvo[:3])
...
        return F.linear(y_BHTK.transpose(1, 2).reshape(B, T, D), self.qkvo[3])
""", {}),
    "stacked experts, under FSDP": ("train_gpt.py", """
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)
...
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))
""", """
        self.up = nn.Parameter(0.02 * torch.randn(2, 2 * n_embd, n_embd))
        self.down = nn.Parameter(0.02 * torch.randn(2, n_embd, 2 * n_embd))
...
        h_EBTF = F.gelu(torch.einsum("btd,efd->ebtf", x_BTD, self.up))
        return torch.einsum("ebtf,edf->btd", h_EBTF, self.down)
""", dict(fsdp=True)),
    "ns_steps by schedule": ("train_gpt.py", """
            group["lr"] = group.""", """
            group["ns_steps"] = 3 if step < 4 else 5
            group["lr"] = group.""", {}),
    "a rule of one's own": ("optim.py", """
VARIANTS = {""", """
def sign_muon(G, S, ns, momentum, nesterov, **_):
    M_tilde, S_new = momentum_sum(G, S, momentum, nesterov)
    return ns(M_tilde.sign()), S_new

VARIANTS = {
    "sign-muon": (sign_muon, "momentum"),""", dict(optimizer="sign-muon")),
}

@pytest.mark.parametrize("fork", FORKS)
def test_fork(fork, place, monkeypatch):
    file, old, new, flags = FORKS[fork]
    for name in "train_gpt.py", "optim.py":
        text = (ROOT / name).read_text()
        for before, after in zip(old.split("...\n"), new.split("...\n")) if name == file else ():
            assert text.count(before) == 1
            text = text.replace(before, after)
        Path(name).write_text(text)
    changed = {*old.splitlines()} ^ {*new.splitlines()}
    assert max(len(changed - {*lines}) for lines in (old.splitlines(), new.splitlines())) <= 5
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "optim", raising=False)
    write_tiny()
    run = dict(script=str(Path("train_gpt.py").absolute()), optimizer="muon-vs", max_iters=24) | flags
    run["schedule"] = "constant"  # the last updates move weights as far as the first
    whole = train("whole", **run)
    losses = [float(x) for x in re.findall(r"^step:.* train_loss:(\S+)", Path("logs/whole.txt").read_text(), re.M)]
    assert losses[-1] < losses[0] - 0.8
    run["resume"] = "checkpoints/whole/step_00000020.pt"
    torch.testing.assert_close(train("resumed", **run)["model"], whole["model"], rtol=0, atol=0)
    two = on_ranks(2, name="two", **run)
    # sums in another order, through Newton-Schulz in bf16; weights move by 6e-2
    torch.testing.assert_close(two["model"], whole["model"], rtol=0, atol=1e-3)
