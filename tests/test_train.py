"""train_gpt.py: gradients, data order, validation, logs, bad input, checkpoints and ranks; all on a CPU with a model of 30 k parameters.

What needs several ranks runs in processes of their own (see `work`), a whole list of trainings in each."""
import copy
import errno
import fcntl
import io
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from common import ROOT, fresh, write_shard
from optim import VARIANTS, Variant

OPTIMIZERS = ["adamw", *VARIANTS]
TINY = dict(dataset="tiny", n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=8, micro_batch_size=2, max_iters=4, warmup_iters=2,
            val_tokens=512, seed=1, data_seed=1, dtype="float32", compile=False, threads=1, device="cpu", sample_tokens=0, log_interval=1)


# ---------------------------------------------------------------------------------------------------------------------- tools
def flags(**changes) -> list[str]:
    return [f"--{name}={value}" for name, value in {**TINY, **changes}.items()]


def configured(**changes):
    module = fresh()
    module.configure(flags(**changes))
    return module


def train(**changes) -> dict:
    return fresh().main(flags(**changes))


def text(n, seed=0):
    """Tokens that a model can learn to predict in part."""
    return np.arange(n) % 61 + np.random.default_rng(seed).integers(0, 3, n)


def write_data(folder):
    """2 train shards of 125 and 62 windows of 16 tokens, the first with 7 tokens to spare; 43 windows for validation."""
    write_shard(folder / "tiny/tiny_train_000001.bin", text(2008, 1))
    write_shard(folder / "tiny/tiny_train_000002.bin", text(1000, 2))
    write_shard(folder / "tiny/tiny_val_000000.bin", text(700, 3))


def read_log(path) -> list[dict]:
    """The lines after the header, as dictionaries of their key:value pairs."""
    body = re.split("^={100}\n", Path(path).read_text(), flags=re.M)[3]
    return [dict(pair.split(":", 1) for pair in line.split() if ":" in pair) for line in body.splitlines()]


def losses(path) -> dict[str, float]:
    """Training and validation losses by step; of a step that was repeated, the later ones."""
    found = {}
    for line in read_log(path):
        found.update({f"{key} {line['step']}": float(line[key]) for key in ("train_loss", "val_loss") if key in line and "step" in line})
    return found


def checkpoint(run, step) -> dict:
    return torch.load(f"checkpoints/{run}/step_{step:08d}.pt", weights_only=True)


def certify(path: Path):
    """Writes beside a checkpoint that it is as it should be."""
    path.with_suffix(".json").write_text(json.dumps(dict(val_loss=None, size=path.stat().st_size, sha256=fresh().sha256(path))))


def tensors(tree) -> list:
    """All tensors and numbers of nested dictionaries and lists, in order."""
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in tensors(tree[key])]
    return [leaf for value in tree for leaf in tensors(value)] if isinstance(tree, (list, tuple)) else [tree]


def assert_same_bits(a: dict, b: dict):
    for part in ("model", "optimizers", "step", "rng", "sequences"):
        left, right = tensors(a[part]), tensors(b[part])
        assert len(left) == len(right) > 0
        for x, y in zip(left, right):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


class Recorder(torch.optim.SGD):
    """Stands for the optimizer, and keeps the gradients that it is given."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.01)
        self.param_groups[0]["initial_lr"], self.seen, self.places = 0.01, [], []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        self.places.append([p.grad.untyped_storage().data_ptr() for group in self.param_groups for p in group["params"]])
        super().step(closure)


def record(module, job: dict) -> tuple[list, list]:
    """Makes a module keep its gradients and the batches it reads."""
    optimizers, batches, batch = [], [], module.Shards.batch
    module.build_optimizers = lambda model, *_: optimizers.append(Recorder(model)) or optimizers[-1:]

    def reading(self, step, rows):
        tokens = batch(self, step, rows)
        batches.extend((step, row, tuple(tokens[i].tolist())) for i, row in enumerate(rows))
        return tokens
    module.Shards.batch = reading
    return optimizers, batches


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Every test in a folder of its own, with the tiny data set."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    write_data(tmp_path / "data")
    return tmp_path


# ---------------------------------------------------------------------------------------------------------------------- faults
def test_faults():
    """The short form of fault_injection.py, of which the long one kills 50 times. First here: nothing else takes as long."""
    done = subprocess.run([sys.executable, ROOT / "tests/fault_injection.py", "--short"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"faults injected \d\d, runs lost 0\n$", done.stdout), done.stdout[-3000:]


# ---------------------------------------------------------------------------------------------------------------------- attention
def attention_in_float64(q, k, v):
    """Row by row: each query sees the keys up to its own place."""
    y = torch.empty_like(q, dtype=torch.float64)
    for t in range(q.size(2)):
        scores = torch.einsum("bhk,bhsk->bhs", q[:, :, t].double(), k[:, :, :t + 1].double()) / q.size(3) ** 0.5
        y[:, :, t] = torch.einsum("bhs,bhsk->bhk", torch.softmax(scores, -1), v[:, :, :t + 1].double())
    return y


def unturned(attend):
    """Without RoPE, by angles of 0, and of (B, H, T, K)."""
    def attention(q, k, v):
        angle = torch.zeros(q.size(2), q.size(3) // 2)
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), angle.cos(), angle.sin()).transpose(1, 2)
    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300, 512, 520])  # parts are 128 long; above 512 torch's kernel takes over
def test_attention_is_causal_softmax(length, dtype):
    """Errors measured in fp32: up to 6e-7 in y and 3e-6 in gradients; the bounds are about four times that. Least in fp64."""
    torch.manual_seed(length)
    q, k, v, gradient = (torch.randn(2, 2, length, 8, dtype=dtype, requires_grad=i < 3) for i in range(4))
    ours, expected = unturned(fresh().attend)(q, k, v), attention_in_float64(q, k, v)
    least = 1e-9 if dtype == torch.float64 else 1
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2.5e-6 * least)
    gradients = torch.autograd.grad(ours, (q, k, v), gradient), torch.autograd.grad(expected, (q, k, v), gradient.double())
    for name, a, b in zip("qkv", *gradients):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * least, msg=lambda m: f"gradient of {name}: {m}")


@pytest.mark.parametrize("length", [300, 520])
def test_attention_turns_by_rope(length):
    """In both ways to compute it, against products of complex numbers. Errors measured: up to 6e-7; without RoPE 1."""
    torch.manual_seed(0)
    t = fresh()
    q, k, v = (torch.randn(1, length, 2, 8) for _ in range(3))  # (B, T, H, K)
    angle = torch.outer(torch.arange(length).double(), t.rope_base ** (-torch.arange(4).double() / 4))[:, None]

    def turned(x):
        z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    expected = attention_in_float64(*(x.transpose(1, 2) for x in (turned(q), turned(k), v))).transpose(1, 2)
    torch.testing.assert_close(t.attend(q, k, v, *t.rope_tables(length, 8)).double(), expected, rtol=0, atol=5e-6)


def test_the_norm_of_a_large_tensor():
    """In one piece it is 0.2 % too small."""
    grads = torch.randn(2**25), torch.randn(9)
    expected = float(torch.cat(grads).double().norm())
    assert float(fresh().clip([SimpleNamespace(grad=g) for g in grads])) == pytest.approx(expected, rel=1e-4)


def test_attention_survives_huge_scores_and_a_future_above_the_past():
    """Scores of 1e4 overflow e^x, and a later key's score far above all earlier ones must not push those to 0 / 0."""
    q, k, v = torch.ones(1, 1, 200, 4), torch.ones(1, 1, 200, 4), torch.randn(1, 1, 200, 4)
    k[:, :, 150] = 1e4
    y = unturned(fresh().attend)(q, k, v)
    torch.testing.assert_close(y.double(), attention_in_float64(q, k, v), rtol=0, atol=5e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_in_bf16_is_as_exact_as_the_textbooks(compiled):
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 4, 256, 64).bfloat16().requires_grad_(i < 3) for i in range(4))
    ours = fresh().attend
    theirs = lambda q, k, v: torch.softmax(q / 8 @ k.mT + torch.full((256, 256), -math.inf).bfloat16().triu(1), -1) @ v
    expected = attention_in_float64(q, k, v)
    exact = [expected, *torch.autograd.grad(expected, (q, k, v), gradient.double())]

    def errors(attend):
        y = attend(q, k, v)
        return [(a.double() - b).norm() / b.norm() for a, b in zip((y, *torch.autograd.grad(y, (q, k, v), gradient)), exact)]

    for name, a, b in zip("yqkv", errors(unturned(torch.compile(ours, dynamic=False) if compiled else ours)), errors(theirs)):
        assert a < 1.3 * b, (name, a, b)  # both round scores and weights to bf16; uncompiled ours also scores less their maximum


def test_gelu_is_the_same_when_it_is_compiled(monkeypatch):
    """atol: rounding of values up to 8 in fp32."""
    gelu, x = fresh().gelu, torch.linspace(-8, 8, 1001)
    expected = gelu(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(gelu(x), expected, rtol=0, atol=2e-6)


# ---------------------------------------------------------------------------------------------------------------------- ranks
def answers(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def work(rank: int, world: int, jobs: list[dict], folder: str) -> None:
    """One rank: trains with each job's flags; leaves gradients, batches and error messages in NAME.rankR.pt."""
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                       OMP_NUM_THREADS="1")
    for job in jobs:
        os.environ["MASTER_PORT"] = str(job["port"])
        while rank and not answers(job["port"]):
            time.sleep(0.01)  # torch's store would try again after a second or so
        module, kept = fresh(), {}
        ended = kept["ended"] = []
        module.Watch.end = lambda self, what: ended.append(what)  # a job that fails on purpose must not end the process
        module.peak_rss, module.peak_flops = lambda: rank + 1 << 30, lambda where: 1e6
        if job.get("record"):
            kept["optimizers"], kept["batches"] = record(module, job)
        if job.get("unused"):
            make = module.Model.__init__
            module.Model.__init__ = lambda self, vocab: make(self, vocab) or setattr(self, "spare_norm", torch.nn.LayerNorm(4, bias=False))
        clip, seeds = module.clip, kept.setdefault("seeds", [])
        module.clip = lambda parameters: seeds.append(torch.initial_seed()) or clip(parameters)
        if job.get("apart") == "all":
            module.DDP = lambda model, **_: model
        elif job.get("apart"):
            DDP = module.DDP
            ignore = DDP._set_params_and_buffers_to_ignore_for_model
            module.DDP = lambda model, **options: ignore(model, [job["apart"]]) or DDP(model, **options)
        if "slow" in job:
            write = module.write_whole
            module.write_whole = lambda path, *args: time.sleep(job["slow"] * (path.suffix == ".pt")) or write(path, *args)
        try:
            module.main(flags(**job["flags"], **job.get(f"rank{rank}", {})))
        except module.UserError as error:
            kept["error"] = str(error)
        kept["watching"] = any(isinstance(thread, module.Watch) for thread in threading.enumerate())
        if dist.is_initialized():
            time.sleep(0.2)  # for gloo's threads to let go of their tensors: its destructor would wait for them for ever
            dist.destroy_process_group()
        recorder = kept.pop("optimizers", [])
        kept["warm"] = [opt.places for opt in recorder[:-1]]
        recorder = recorder[-1:]
        kept["gradients"] = [step for opt in recorder for step in opt.seen]
        kept["places"] = [step for opt in recorder for step in opt.places]
        kept["held"] = [p.grad is not None for opt in recorder for p in opt.param_groups[0]["params"]]
        torch.save(kept, f"{job['name']}.rank{rank}.pt")


def start(world: int, jobs: list[dict]) -> None:
    """All jobs, one after the other, on `world` ranks."""
    sockets = [socket.socket() for _ in jobs]
    for job, s in zip(jobs, sockets):
        s.bind(("127.0.0.1", 0))
        job["port"] = s.getsockname()[1]
    for s in sockets:
        s.close()
    ranks = mp.start_processes(work, (world, jobs, os.getcwd()), world, join=False, start_method="forkserver")
    try:
        end = time.monotonic() + 120
        while not ranks.join(timeout=5):  # which raises what a rank raises, and ends the others
            assert time.monotonic() < end, "a rank has not ended in 120 s"
    finally:
        for process in ranks.processes:
            process.kill()


HALF = 3  # updates before a resumption
ON_RANKS = list(zip(OPTIMIZERS, itertools.cycle(["bfloat16", "float32", "bfloat16", "float32"])))  # muon-vs in float32


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A folder with what 2 and 4 ranks have left."""
    folder = tmp_path_factory.mktemp("ranks")
    before = os.getcwd()
    os.chdir(folder)
    write_data(folder / "data")
    write_shard(folder / "other/tiny/tiny_train_000001.bin", text(2008, 7))
    write_shard(folder / "other/tiny/tiny_train_000002.bin", text(1000, 2))
    write_shard(folder / "other/tiny/tiny_val_000000.bin", text(700, 3))
    jobs = [dict(name="gradient", record=True, flags=dict(run_name="gradient", max_iters=3, grad_clip=0)),
            dict(name="globals", flags=dict(run_name="x"), rank1=dict(learning_rate=0.02)),
            dict(name="data", flags=dict(run_name="x"), rank1=dict(data_dir="other")),
            dict(name="lonely", flags=dict(run_name="gradient", resume="auto", max_iters=3, grad_clip=0),
                 rank1=dict(checkpoint_dir="other")),
            dict(name="unused", unused=True, flags=dict(run_name="unused")),
            dict(name="apart", apart="all", flags=dict(run_name="apart", micro_batch_size=4)),
            dict(name="one apart", apart="blocks.0.mlp.up.weight", flags=dict(run_name="one-apart")),
            dict(name="slow", slow=5.7, flags=dict(run_name="slow", max_iters=2, checkpoint_interval=1, timeout_minutes=0.08))]
    for optimizer, dtype in ON_RANKS:
        same = dict(optimizer=optimizer, dtype=dtype, max_iters=2 * HALF)
        name = f"{optimizer}-{dtype}"
        jobs.append(dict(name=name, flags=dict(same, run_name=name, checkpoint_interval=HALF)))
        jobs.append(dict(name=name + "-2", flags=dict(same, run_name=name + "-2", resume=f"checkpoints/{name}/step_{HALF:08d}.pt")))
    start(2, jobs)
    start(4, [dict(name="4", flags=dict(optimizer="muon-vs", max_iters=2 * HALF, run_name="4",
                                        resume=f"checkpoints/muon-vs-float32/step_{HALF:08d}.pt"))])
    os.chdir(before)
    return folder


def left(ranks, name) -> list[dict]:
    return [torch.load(path, weights_only=True) for path in sorted(ranks.glob(f"{name}.rank*.pt"))]


# ---------------------------------------------------------------------------------------------------------------------- an update
def test_an_update_has_the_gradient_of_one_large_batch(ranks):
    def alone(micro):
        module = fresh()
        optimizers, batches = record(module, {})
        module.main(flags(micro_batch_size=micro, max_iters=3, grad_clip=0, run_name=f"micro{micro}"))
        return module, optimizers[-1].seen, batches
    module, whole, batches = alone(8)
    _, accumulated, _ = alone(2)
    two = left(ranks, "gradient")
    assert len(whole) == len(accumulated) == len(two[0]["gradients"]) == 3
    for step in range(3):
        for a, b, c, d in zip(whole[step], accumulated[step], two[0]["gradients"][step], two[1]["gradients"][step]):
            assert torch.equal(c, d)
            size = a.abs().max() + 1e-12
            # sums of the same 128 terms in another order: some roundings of 6e-8 of the largest entry
            assert (a - b).abs().max() < 2e-6 * size and (a - c).abs().max() < 2e-6 * size
    # the first update against autograd in float64 on the large batch
    torch.manual_seed(module.seed)
    model = module.Model(320)
    module.initialise(model)
    x = torch.tensor([tokens for step, _, tokens in batches if step == 0][:8])
    model.double()(x[:, :-1], x[:, 1:]).backward()
    for p, g in zip(model.parameters(), whole[0]):
        assert torch.allclose(p.grad, g.double(), rtol=0, atol=2e-5 * float(p.grad.abs().max()))


def test_gradients_that_accumulate_on_ranks_stay_in_the_buckets_of_ddp(ranks):
    """Else no_sync would build gradients beside the buckets, which are kept: between updates, and when the first one is to come."""
    for part in left(ranks, "gradient"):
        first, second, third = part["places"]
        assert part["warm"] == [[first]] and first == second == third and len(set(first)) < len(first)  # several share a bucket
        assert part["held"] and all(part["held"])
        assert [step for step, *_ in part["batches"]].count(0) == (1 + 2 + 2) * 2  # warm-up: one without DDP, two with it; 2 rows each


def test_gradients_that_are_not_those_of_all_ranks_end_the_run(ranks):
    """Weights alone do not show it: each matrix has one owner, who sends it to all."""
    for job in ("apart", "one apart"):
        assert all("gradient of update 1 is not the same on all ranks" in part["error"] for part in left(ranks, job))


def test_ranks_draw_random_numbers_of_their_own(ranks):
    first, second = (part["seeds"][-3:] for part in left(ranks, "gradient"))
    assert len({*first, *second}) == 6


def test_a_parameter_that_the_loss_does_not_use_is_named(ranks):
    assert all("the loss does not use spare_norm.weight" in part["error"] for part in left(ranks, "unused"))


def test_a_checkpoint_may_take_longer_than_the_timeout(ranks):
    """One that the next one waits for, and the last one."""
    assert [(part["ended"], part.get("error")) for part in left(ranks, "slow")] == [([], None)] * 2
    assert (ranks / "checkpoints/slow/step_00000001.json").exists() and (ranks / "checkpoints/slow/step_00000002.json").exists()


def test_the_memory_told_is_that_of_the_rank_that_has_most(ranks):
    assert re.search(r"^final .* peak_memory_mib:2048 ", (ranks / "logs/gradient.txt").read_text(), re.M)
    assert re.search(r"^final .* peak_memory_mib:4096 ", (ranks / "logs/4.txt").read_text(), re.M)


def test_two_ranks_read_what_one_reads(ranks):
    module = fresh()
    _, alone = record(module, {})
    module.main(flags(max_iters=3))
    both = [set(map(tuple, part["batches"])) for part in left(ranks, "gradient")]
    assert not both[0] & both[1] and both[0] | both[1] == set(alone)


def test_the_gradient_is_clipped_by_its_global_norm():
    seen = {}
    for limit in (0, 1e-2, 1e3):
        module = fresh()
        optimizers, _ = record(module, {})
        module.main(flags(max_iters=1, grad_clip=limit, run_name=f"clip{limit}"))
        seen[limit] = torch.cat([g.flatten() for g in optimizers[-1].seen[0]])
    assert torch.equal(seen[0], seen[1e3]) and seen[0].norm() > 0.1
    assert torch.allclose(seen[1e-2], seen[0] * (1e-2 / seen[0].norm()), rtol=1e-4)
    logged = float(read_log("logs/clip0.01.txt")[1]["grad_norm"])
    assert logged == pytest.approx(float(seen[0].norm()), abs=1e-4)  # of the raw gradient, 4 decimals


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss(optimizer):
    result = train(optimizer=optimizer, max_iters=30, eval_interval=30)
    curve = losses(result["log"])
    assert curve["val_loss 0/30"] == pytest.approx(math.log(320), abs=0.02)
    assert curve["val_loss 30/30"] < curve["val_loss 0/30"] - 1


def test_schedules():
    def factors(**changes):
        module = configured(**changes)
        return [module.lr_factor(step) for step in range(module.max_iters)]
    assert factors(schedule="constant", max_iters=6, warmup_iters=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(schedule="constant", max_iters=3, warmup_iters=0) == [1, 1, 1]
    assert factors(schedule="wsd", max_iters=10, warmup_iters=0, decay_frac=0.4) == pytest.approx([1] * 7 + [0.75, 0.5, 0.25])
    assert factors(schedule="wsd", max_iters=4, warmup_iters=0, decay_frac=1.0) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert factors(schedule="wsd", max_iters=4, warmup_iters=0, decay_frac=0.0) == [1, 1, 1, 1]
    assert factors(schedule="wsd", max_iters=2, warmup_iters=0, decay_frac=1.0, min_lr_frac=0.2) == pytest.approx([1, 0.6])
    cosine = factors(schedule="cosine", max_iters=102, warmup_iters=2, min_lr_frac=0.01)
    assert cosine[:3] == [0.5, 1, 1] and cosine[52] == pytest.approx(0.505) and 0.01 < cosine[-1] < 0.011
    assert all(a >= b for a, b in itertools.pairwise(cosine[2:]))
    assert factors(max_iters=0) == []


def test_flops_per_token_is_what_torch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    module = configured(n_layer=3)
    model = module.Model(320)
    x = torch.zeros(2, 16, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    # 12 L D T for attention counts causal attention whole, as the counter does; the rest are the matrices
    assert counter.get_total_flops() / x.numel() == module.flops_per_token(model)


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989e12), ("NVIDIA GH200 480GB", 989e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A10G", 70e12), ("NVIDIA A10", 125e12), ("NVIDIA RTX A6000", 155e12),
    ("NVIDIA L40S", 362e12), ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA RTX A4000", None), ("NVIDIA RTX A1000 Laptop GPU", None),
    ("NVIDIA H200 NVL", 835e12), ("NVIDIA H20", 148e12), ("AMD Instinct MI300X", 1307e12), ("NVIDIA GeForce RTX 4090 D", None),
    ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None)])
def test_peak_of_a_device_is_known_or_not_claimed(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: name)
    assert fresh().peak_flops(torch.device("cuda", 0)) == peak


def test_every_parameter_is_in_one_group():
    module = configured(n_layer=2)
    model = module.Model(320)
    groups = module.parameter_groups(model)
    assert set(groups["embeddings"]) == {"embed.weight", "head.weight"}
    assert set(groups["matrices"]) == {f"blocks.{i}.{name}.weight" for i in (0, 1)
                                       for name in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")}
    assert set(groups["vectors"]) == {"norm.weight", *(f"blocks.{i}.ln{j}.weight" for i in (0, 1) for j in (1, 2))}
    muon, adam = module.build_optimizers(model, False, torch.float32)
    assert {id(p) for p in muon.param_groups[0]["params"]} == {id(p) for p in groups["matrices"].values()}
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0] and not muon.state
    table = module.parameter_table(model, [muon, adam])
    assert table.count("muon-vs") == 4 and table.count("adamw") == 5
    model.blocks[0].mlp.up.requires_grad_(False)
    assert module.parameter_table(model, [muon, adam]).count(" frozen ") == 1
    model.extra = torch.nn.Parameter(torch.zeros(2))  # a new one finds its group by its shape and place
    assert "extra" in module.parameter_groups(model)["vectors"]
    module.parameter_groups = lambda model: groups  # which do not know it
    with pytest.raises(RuntimeError, match=f"{len(list(model.parameters())) - 1} different ones, expected each of the model's "):
        module.build_optimizers(model, False, torch.float32)


def test_each_update_has_the_learning_rate_of_its_step_and_the_log_tells_it(monkeypatch):
    module, step, seen = fresh(), Recorder.step, []
    monkeypatch.setattr(Recorder, "step", lambda self: seen.append(self.param_groups[0]["lr"]) or step(self))
    record(module, {})
    module.main(flags(max_iters=6, decay_frac=0.5, run_name="rate"))
    rates = pytest.approx([0.005, 0.01, 0.01, 0.01, 0.02 / 3, 0.01 / 3], rel=1e-4)
    assert seen[0] == 0 and seen[1:] == rates  # the first one warms up
    assert [float(line["lr"]) for line in read_log("logs/rate.txt") if "lr" in line] == rates


def test_residual_projections_start_smaller():
    module = configured(n_layer=8, n_embd=128)
    model = module.Model(320)
    module.initialise(model)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.005 if name.endswith(("proj.weight", "down.weight")) else 0.02, rel=0.05), name


def test_activation_checkpointing_recomputes_every_block(monkeypatch):
    calls, gradients = [], []
    for on in (False, True):
        module = configured(activation_checkpointing=on, n_layer=3)
        again = module.checkpoint
        monkeypatch.setattr(module, "checkpoint", lambda *args, **how: calls.append(on) or again(*args, **how))
        torch.manual_seed(0)
        model = module.Model(64)
        x = torch.arange(16)[None]
        model(x, x).backward()
        gradients.append([p.grad for p in model.parameters()])
        with torch.no_grad():
            model(x, x)
    assert calls == [True] * 3 and all(map(torch.equal, *gradients))


def test_bf16_is_used_where_it_is_asked_for_or_fast():
    used = []
    for fast, given, parameters in itertools.product((False, True), ("auto", "float32", "bfloat16"), ("float32", "bfloat16")):
        module = configured(dtype=given, param_dtype=parameters)
        module.fast_bf16 = lambda where: fast
        used.append(module.uses_bf16(torch.device("cpu")))
    assert used == [False, True, False, True, True, True, True, True, False, True, True, True]
    for fast in (False, True):
        module, build = fresh(), []
        make = module.build_optimizers
        module.fast_bf16, module.build_optimizers = lambda where: fast, lambda *args: build.append(args[2]) or make(*args)
        module.main(flags(max_iters=0, run_name=f"fast{fast}"))
        assert set(build) == {torch.bfloat16 if fast else torch.float32}


@pytest.mark.parametrize("cpuinfo, fast", [
    ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n", True),
    ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16\n", True),
    ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f avx512_bf16\n", False),  # a Xeon whose AMX the virtual machine hides
    ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f\n", False),
    ("vendor_id\t: GenuineIntel\nflags\t\t: fpu amx_bf16_like\n", False),
    (None, False),  # macOS
])
def test_which_cpus_multiply_faster_in_bf16(monkeypatch, cpuinfo, fast):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo
    monkeypatch.setattr(Path, "read_text", read_text)
    assert fresh().fast_bf16(torch.device("cpu")) is fast


def test_a_cpu_is_named_with_what_it_multiplies_with(monkeypatch):
    text = "model name\t: Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16{}\n"
    for more, told in (("", "Xeon with avx512_bf16"), (" amx_bf16", "Xeon with amx_bf16"), (" amx_bf16x", "Xeon with avx512_bf16")):
        monkeypatch.setattr(Path, "read_text", lambda path: text.format(more))
        assert fresh().cpu_name() == told


def test_what_ranks_of_a_machine_share(monkeypatch):
    module = configured(micro_batch_size=0, threads=0)
    assert module.micro_batches(2) == 1 and module.micro_batch_size == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    read, share = Path.read_text, {}

    def reading(path, *how):
        if not str(path).startswith("/sys/fs/cgroup/cpu"):
            return read(path, *how)
        if path.name not in share:
            raise FileNotFoundError(path)
        return share[path.name]
    monkeypatch.setattr(Path, "read_text", reading)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun's, for several ranks
    module.keep_memory = lambda: None
    module.choose_device(0, 4)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(3)
    module.choose_device(0, 1)
    assert torch.get_num_threads() == 3  # it is the user's, whom torch has heard
    monkeypatch.delenv("OMP_NUM_THREADS")
    module.choose_device(0, 1)
    assert torch.get_num_threads() == 8
    for quota, ranks, expected in (("max", 1, 8), ("-1", 1, 8), ("350000", 1, 3), ("350000", 2, 1), ("50000", 1, 1)):
        for share in ({"cpu.max": f"{quota} 100000\n"}, {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}):
            module.choose_device(0, ranks)
            assert torch.get_num_threads() == expected
    torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------------------------------- edited scripts
def test_new_parameters_find_their_optimizer_and_the_table_tells_what_is_built():
    module = configured()
    model = module.Model(64)
    block = model.blocks[0]
    block.scale, block.experts = torch.nn.Parameter(torch.ones(4, 1)), torch.nn.Parameter(torch.ones(3, 8, 8))
    block.table = torch.nn.Embedding(8, 8)
    block.conv, block.deep = torch.nn.Conv1d(8, 8, 3, bias=False), torch.nn.Conv1d(8, 8, 3, groups=8, bias=False)
    groups = module.parameter_groups(model)
    assert "blocks.0.experts" in groups["matrices"] and {"blocks.0.conv.weight", "blocks.0.table.weight"} <= set(groups["embeddings"])
    assert {"blocks.0.scale", "blocks.0.deep.weight"} <= set(groups["vectors"])
    muon, adam = module.build_optimizers(model, False, torch.float32)
    embed = torch.optim.Rprop([dict(params=[model.embed.weight], lr=0.5, initial_lr=0.5)])  # it has no weight_decay
    adam.param_groups[0].update(params=[model.head.weight, block.conv.weight, block.table.weight], initial_lr=0.125)
    table = module.parameter_table(model, [muon, adam, embed]).splitlines()
    assert [row.split()[-5:] for row in table if row.startswith("embed")] == [["rprop", "lr", "0.5", "weight_decay", "0"]]
    assert [row.split()[-5:] for row in table if row.startswith("head")] == [["adamw", "lr", "0.125", "weight_decay", "0.1"]]


def test_tables_that_are_looked_up_cost_no_products():
    module = configured()
    model = module.Model(64)
    before = module.flops_per_token(model)
    model.value_embeds = torch.nn.ModuleList(torch.nn.Embedding(64, 32) for _ in range(2))
    assert module.flops_per_token(model) == before


def test_a_capped_head_is_capped_in_training_and_validation():
    module = configured()
    model = module.Model(64)
    model.unembed = lambda x: torch.zeros(*x.shape[:2], 64)
    x = torch.zeros(1, 16, dtype=torch.long)
    assert model(x, x).item() == pytest.approx(math.log(64)) and not model.logits(x).any()


def test_the_memory_of_a_block_of_other_names_is_estimated():
    module = configured()
    model = module.Model(64)
    module.micro_batch_size = 2
    expected = module.memory_estimate(model, world=1, gpu=True, bf16=True)
    for block in model.blocks:
        block.ffn, block.attention = block._modules.pop("mlp"), block._modules.pop("attn")
    estimate = module.memory_estimate(model, world=1, gpu=True, bf16=True)
    assert all(estimate[part] == expected[part] for part in ("parameters", "gradients", "optimizer"))
    assert 0.5 < estimate["activations"] / expected["activations"] < 2


def test_a_new_parameter_without_initialisation_is_named():
    module = configured()
    model = module.Model(64)
    model.blocks[0].scale = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(module.UserError, match="initialise.. says nothing of the parameter blocks.0.scale"):
        module.initialise(model)


def test_a_new_buffer_and_a_parameter_in_bf16_keep_their_precision():
    module, seen = fresh(), {}
    build = module.build_optimizers

    def building(model, *rest):
        seen.update(cos=model.cos.dtype, head=model.head.weight.dtype, embed=model.embed.weight.dtype)
        return build(model, *rest)
    module.build_optimizers = building
    module.main(flags(max_iters=0, param_dtype="bfloat16", run_name="bf16"))
    assert seen == dict(cos=torch.float32, head=torch.bfloat16, embed=torch.bfloat16)
    make = module.Model.__init__
    module.Model.__init__ = lambda self, vocab: make(self, vocab) or setattr(self, "embed", self.embed.bfloat16())
    module.main(flags(max_iters=1, param_dtype="float32", dtype="bfloat16", run_name="embed"))
    assert seen == dict(cos=torch.float32, head=torch.float32, embed=torch.bfloat16)


def test_an_optimizer_of_torch_is_spared_a_gradient_that_is_not_finite():
    module = fresh()
    build = module.build_optimizers

    def building(model, *rest):
        muon, adam = build(model, *rest)
        theirs = torch.optim.AdamW([dict(params=group["params"], lr=group["lr"], initial_lr=group["lr"]) for group in adam.param_groups])
        return [muon, theirs]
    module.build_optimizers = building
    broken = break_backward(module, {1 + 4 * 2 + 1})  # update 2
    result = module.main(flags(max_iters=5, run_name="theirs"))
    assert broken and math.isfinite(result["val_loss"]) and re.search(r"^step:5/5 .* skipped:1 ", Path("logs/theirs.txt").read_text(), re.M)


def dropping(**changes) -> dict:
    """Trains with dropout; the weights."""
    module = fresh()
    forward = module.MLP.forward
    module.MLP.forward = lambda self, x: F.dropout(forward(self, x), 0.5, self.training)
    seen, evaluate, clip = set(), module.evaluate, module.clip
    module.evaluate = lambda logits, *rest: seen.add(("evaluation", logits.__self__.training)) or evaluate(logits, *rest)
    module.clip = lambda parameters: seen.add(("update", module.model.training)) or clip(parameters)
    make = module.Model.__init__
    module.Model.__init__ = lambda self, vocab: make(self, vocab) or setattr(module, "model", self)
    module.main(flags(**changes))
    assert seen == {("evaluation", False), ("update", True)}
    return module.model.state_dict()


def test_dropout_is_of_training_alone_and_the_same_with_activation_checkpointing_and_after_a_resumption():
    same = dict(max_iters=2 * HALF, eval_interval=1, log_interval=1, checkpoint_interval=HALF, warmup_iters=0)
    whole = dropping(run_name="whole", **same)
    for changes in (dict(activation_checkpointing=True), dict(run_name="rest", resume=f"checkpoints/whole/step_{HALF:08d}.pt")):
        other = dropping(**{**same, "run_name": "again", **changes})
        assert all(torch.equal(whole[name], other[name]) for name in whole), changes
    other = dropping(run_name="seed", seed=2, **same)  # of the same data
    assert any(not torch.equal(whole[name], other[name]) for name in whole)


def test_what_an_edited_rule_or_forward_changes_before_the_first_update_is_undone():
    """Weight decay that no learning rate scales, and a buffer that counts batches."""
    def counting(**changes):
        module = fresh()
        make, forward, build = module.Model.__init__, module.Model.forward, module.build_optimizers
        module.Model.__init__ = lambda self, vocab: make(self, vocab) or self.register_buffer("batches", torch.zeros(()))
        module.Model.forward = lambda self, x, y: self.batches.add_(1) * 0 + forward(self, x, y)

        def building(model, *rest):
            optimizers = build(model, *rest)
            optimizers[-1].register_step_post_hook(lambda *_: torch._foreach_mul_([p.data for p in model.parameters()], 0.99))
            return optimizers
        module.build_optimizers = building
        module.main(flags(max_iters=2 * HALF, checkpoint_interval=HALF, **changes))
        return checkpoint(changes["run_name"], 2 * HALF)
    whole, rest = counting(run_name="whole"), counting(run_name="rest", resume=f"checkpoints/whole/step_{HALF:08d}.pt")
    assert_same_bits(whole, rest)
    assert whole["model"]["batches"] == 2 * HALF * 4


def test_state_is_not_given_to_other_parameters_of_the_same_shape():
    train(run_name="r", checkpoint_interval=2)
    path = Path("checkpoints/r/step_00000002.pt")
    swapped = ["norm.weight", "blocks.0.ln1.weight", "blocks.0.ln2.weight"]
    for names, message in ((swapped, "of another model or optimizer .norm.weight where this script has blocks.0.ln1"), (None, None)):
        saved = torch.load(path, weights_only=True)
        group = saved["optimizers"][1]["param_groups"][1]
        assert len(group.pop("param_names")) == 3
        if names:
            group["param_names"] = names
        else:  # as earlier checkpoints, which have none
            for opt in saved["optimizers"]:
                for group in opt["param_groups"]:
                    group.pop("param_names", None)
        torch.save(saved, path)
        certify(path)
        if not names:
            train(run_name="r2", resume=path)
            continue
        with pytest.raises(Exception, match=message):
            train(run_name="r1", resume=path)


def test_a_copy_of_a_compiled_model_has_its_own_loss(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: function(*args))
    limit = torch._dynamo.config.recompile_limit
    model = configured().Model(64)
    model.compile_parts()
    torch._dynamo.config.recompile_limit = limit
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(twin.head.weight)
    x = torch.arange(17)[None]
    assert twin(x[:, :-1], x[:, 1:]).item() == pytest.approx(math.log(64), rel=1e-6) != model(x[:, :-1], x[:, 1:]).item()


def test_an_edited_loop_may_end_at_a_target():
    source, hint = (ROOT / "train_gpt.py").read_text(), "  # of a run to a target: "
    begin, line = re.findall(f"{hint}(.+)", source)
    source = source.replace(hint + begin, f" {begin}").replace(hint + line, "\n            " + line).replace("TARGET", "99")
    Path("target.py").write_text(source)
    for _ in range(2):  # the second time it has ended already
        result = fresh(Path("target.py").absolute()).main(flags(max_iters=9, eval_interval=2, run_name="r", resume="auto"))
        assert result["step"] == 2 and checkpoint("r", 2)["step"] == 2 and "\nfinal val_loss:" in Path("logs/r.txt").read_text()


def test_compilation_inside_the_clock_is_told():
    module, stats = fresh(), torch._dynamo.utils.counters["stats"]
    factor, evaluate = module.lr_factor, module.evaluate
    module.lr_factor = lambda step: stats.update(unique_graphs=3 * (step == 2)) or factor(step)
    module.evaluate = lambda *args: stats.update(unique_graphs=1) or evaluate(*args)  # this one is outside
    module.main(flags(max_iters=5, eval_interval=1, run_name="r"))
    assert re.findall(r"^compiled:(\d+) .* update (\d+),", Path("logs/r.txt").read_text(), re.M) == [("3", "3")]


def test_a_table_inside_a_block_makes_no_activations_of_its_length():
    module = configured(micro_batch_size=4)
    model = module.Model(64)
    before = module.memory_estimate(model, 1, False, False)["activations"]
    model.blocks[0].mlp.table = torch.nn.Embedding(50_000, 32)
    assert module.memory_estimate(model, 1, False, False)["activations"] == before


def test_a_global_that_is_no_flag_is_told():
    module = fresh()
    module.windows = (128, 256)
    with pytest.raises(module.UserError, match=r"^--windows is no flag, because it is \(128, 256\): edit it in the script$"):
        module.configure(["--windows=128"])


def test_blocks_that_differ_may_each_have_a_graph(monkeypatch):
    module, limit, make = configured(n_layer=10), torch._dynamo.config.recompile_limit, torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: make(self, backend="eager", **options))
    monkeypatch.setattr(module.Block, "forward", lambda self, x, cos, sin: x / (self.number + 1))
    model = module.Model(64)
    for number, block in enumerate(model.blocks):
        block.number = number
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    try:
        model.compile_parts()
        model.trunk(torch.zeros(1, 16, dtype=torch.long))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 10  # torch's own limit is 8
    finally:
        torch._dynamo.config.recompile_limit = limit


def test_a_bare_name_turns_a_switch_on(capsys, monkeypatch):
    module = fresh()
    module.configure(["--stochastic_rounding", "--compile=false"])
    assert module.stochastic_rounding is True and module.compile is False
    for word, expected in (("--run_name", "--run_name"), ("--seed", "--seed"), ("profile", "--profile"), ("--", "--name")):
        assert f"found '{word}'; expected {expected}=value" in fails(capsys, monkeypatch, [word])
    assert "there is no --lr; --help lists the names" in fails(capsys, monkeypatch, ["--lr=3"])


@pytest.mark.parametrize("presets, message", [
    ({"mine": {}, "mine/moun-vs": {}}, "PRESETS has 'mine/moun-vs', which is never applied"),
    ({"mien/muon-vs": {}}, "PRESETS has 'mien/muon-vs', which is never applied")])
def test_a_preset_that_would_never_be_applied_is_named(presets, message):
    module = fresh()
    module.PRESETS |= presets
    with pytest.raises(module.UserError, match=message):
        module.configure([])


# ---------------------------------------------------------------------------------------------------------------------- data
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 187, 1000, 4096, 4097, 70_000])
def test_shuffle_is_a_permutation(n):
    shuffle = fresh().shuffle
    i = np.arange(n)
    first, again, other = (shuffle(i, n, *key) for key in ((1, 0), (1, 0), (1, 1)))
    assert np.array_equal(np.sort(first), i) and np.array_equal(first, again)
    assert np.array_equal(first[n // 2:], shuffle(i[n // 2:], n, 1, 0))  # one at a time as well as all at once
    if n > 16:
        assert not np.array_equal(first, other) and not np.array_equal(first, i)
    if n > 4000:  # no trace of the order that went in; a random permutation's correlation has a deviation of n ** -0.5
        assert all(abs(np.corrcoef(order, i)[0, 1]) < 5 * n ** -0.5 for order in (first, other))
        assert abs(np.corrcoef(np.diff(first), np.diff(other))[0, 1]) < 6 * n ** -0.5


def test_windows_lie_inside_shards_and_share_one_token():
    module = configured()
    shards = module.Shards("tiny", "train")
    files = [np.fromfile(path, np.uint16)[512:] for path in shards.files]
    assert shards.ends.tolist() == [125, 187] and shards.tokens == 3008 and shards.vocab == 257 and shards.eot == 256
    assert np.array_equal(shards.read(np.arange(125)), np.stack([files[0][16 * i:16 * i + 17] for i in range(125)]))
    expected = np.stack([files[1][16 * 61:16 * 61 + 17], files[1][:17], files[0][1984:2001]])
    assert np.array_equal(shards.read(np.array([186, 125, 124])), expected)


def test_every_window_once_an_epoch_in_a_new_order():
    module = configured(batch_size=10)
    shards = module.Shards("tiny", "train")
    order = []
    shards.read = lambda windows: order.extend(windows.tolist()) or windows
    steps = [shards.batch(step, range(10)) for step in range(56)]      # 187 windows an epoch: 18.7 updates
    epochs = [order[:187], order[187:374], order[374:560]]
    assert all(sorted(epoch) == list(range(187)) for epoch in epochs[:2]) and epochs[0] != epochs[1] != epochs[2]
    assert set(steps[18][:7]) == set(epochs[0][180:]) and list(steps[18][7:]) == epochs[1][:3]  # one batch of two epochs
    assert all(np.array_equal(shards.batch(step, range(10)), steps[step]) for step in (55, 0, 18))  # a function of step alone
    parts = [shards.batch(18, range(first, first + 5)) for first in (5, 0)]
    assert np.array_equal(np.concatenate(parts[::-1]), steps[18])
    module.data_seed = 2
    assert not np.array_equal(shards.batch(0, range(10)), steps[0])


@pytest.mark.parametrize("name", ["wiki_train", "wiki_val"])
def test_a_dataset_may_be_called_like_a_split(name):
    for split in ("train_000001", "val_000000"):
        write_shard(f"data/{name}/{name}_{split}.bin", text(500))
    module = configured(dataset=name)
    for split in ("train_000001", "val_000000"):
        assert [path.name for path in module.Shards(name, split.partition("_")[0]).files] == [f"{name}_{split}.bin"]


def test_shards_of_llm_c_are_read_and_files_without_header_are_not():
    write_shard("data/theirs/theirs_train_000001.bin", text(500) + 50_000, ours=False)
    write_shard("data/theirs/theirs_val_000000.bin", text(300), ours=False)
    module = configured(dataset="theirs")
    shards = module.Shards("theirs", "train")
    assert (shards.vocab, shards.eot, shards.tokens) == (50257, 50256, 500)
    inputs, targets = module.to_device(shards.read(np.arange(2)), torch.device("cpu"))
    assert inputs[0, 0] == text(500)[0] + 50_000 and torch.equal(inputs[:, 1:], targets[:, :-1])  # above 32767: no sign
    text(500).astype(np.uint16).tofile("data/theirs/theirs_train_000001.bin")
    with pytest.raises(module.UserError, match="not a token shard.*prepare.py import"):
        module.Shards("theirs", "train")


def test_shards_of_another_tokenizer_without_our_header_have_the_vocabulary_of_the_model():
    write_shard("data/theirs/theirs_train_000001.bin", text(500) % 60, ours=False)
    module = configured(dataset="theirs", vocab_size=64)
    shards = module.Shards("theirs", "train")
    assert (shards.vocab, shards.eot) == (64, 0)
    write_shard("data/theirs/theirs_train_000001.bin", text(500) + 50_000, ours=False)
    with pytest.raises(module.UserError, match="has token id 5.*expected ids below 64"):
        module.Shards("theirs", "train")
    module.check_shards = False  # nobody looks at the ids: then they are GPT-2's
    with pytest.raises(module.UserError, match="vocabulary of 50257 ids, the model has --vocab_size=64"):
        module.Shards("theirs", "train")


def test_reading_neither_grows_nor_stalls():
    write_shard("data/large/large_train_000001.bin", np.resize(text(100_003), 10_000_000))
    module = configured(dataset="large", block_size=256, batch_size=16, check_shards=False)
    shards = module.Shards("large", "train")
    rss = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    for step in range(100):
        shards.batch(step, range(16))
    before, times = rss(), []
    for step in range(10_000):  # 82 MB, of a file of 20: mapped, it would stay in memory
        begin = time.perf_counter()
        shards.batch(step, range(16))
        times.append(time.perf_counter() - begin)
    assert rss() - before < 4 << 20
    assert np.median(times) < 0.005, f"{1000 * np.median(times):.2f} ms a batch of 16 x 256 tokens"


def test_a_shard_that_ends_with_a_window_has_no_other():
    for n, windows in ((32, 1), (33, 2), (48, 2), (49, 3)):
        write_shard("data/edge/edge_train_000001.bin", text(n))
        shards = configured(dataset="edge").Shards("edge", "train")
        assert len(shards) == windows and len(shards.read(np.arange(windows))) == windows


def test_the_seed_orders_the_data_unless_data_seed_does():
    first = lambda **seeds: configured(**seeds).Shards("tiny", "train").batch(0, range(8)).tolist()
    assert first(seed=3, data_seed=0) == first(seed=1, data_seed=3) == first(seed=2, data_seed=3) != first(seed=2, data_seed=0)


def test_a_shard_is_checked_to_its_end_and_by_one_rank_of_a_machine(monkeypatch):
    module, pread = configured(), os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 1024), at))  # pieces of 512 tokens
    module.Shards("tiny", "train")
    tokens = text(2008, 1)
    tokens[3] = 300
    write_shard(TRAIN, tokens)
    with pytest.raises(module.UserError, match="token id 300"):
        module.Shards("tiny", "train")
    write_data(Path("data"))
    damaged("data/tiny/tiny_train_000002.bin", -100)
    module.Shards("tiny", "train", 0, 2)
    with pytest.raises(module.UserError, match="tiny_train_000002.bin is damaged"):
        module.Shards("tiny", "train", 1, 2)


def test_more_shards_than_a_process_may_open_at_first():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for i in range(3, 100):
        write_shard(f"data/tiny/tiny_train_{i:06}.bin", text(40))
    module, held = configured(), len(os.listdir("/dev/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 50, before[1]))
        with pytest.raises(module.UserError, match="Too many open files; raise the limit that `ulimit -Hn` shows"):
            module.Shards("tiny", "train")
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 110, before[1]))  # those are open still
        assert train(max_iters=0)["step"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---------------------------------------------------------------------------------------------------------------------- validation
def test_validation_is_of_fixed_tokens_whatever_the_batch():
    module = configured()
    shards = module.Shards("tiny", "val")
    torch.manual_seed(0)
    model = module.Model(320)
    module.initialise(model)
    tokens = torch.from_numpy(shards.read(np.arange(32)).astype(np.int64))  # val_tokens = 512 = 32 windows of 16
    with torch.no_grad():
        logits = model.double().logits(tokens[:, :-1]).flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, targets).item(), (logits.argmax(-1) == targets).double().mean()
    model.float()
    for micro in (1, 2, 5, 32, 50):
        module.micro_batch_size = micro
        loss, accuracy = module.evaluate(model.logits, shards, torch.device("cpu"), module.contextlib.nullcontext, 0, 1)
        assert loss == pytest.approx(expected[0], rel=1e-6) and accuracy == pytest.approx(float(expected[1]))  # float32 logits


def test_validation_is_the_same_on_two_ranks(ranks):
    one, two = losses(train(max_iters=3)["log"]), losses(ranks / "logs/gradient.txt")
    assert one["val_loss 0/3"] == pytest.approx(two["val_loss 0/3"], abs=1.1e-5)  # printed with 5 decimals


def test_validation_of_less_data_than_val_tokens_is_of_all_of_it():
    module = configured(val_tokens=100_000)
    shards, rows = module.Shards("tiny", "val"), []
    logits = lambda x: rows.append(len(x)) or torch.zeros(*x.shape, 320)
    loss, _ = module.evaluate(logits, shards, torch.device("cpu"), module.contextlib.nullcontext, 0, 1)
    assert loss == pytest.approx(math.log(320)) and sum(rows) == 44  # 43 windows, two at a time


def test_a_sample_goes_on_behind_its_last_token():
    module = configured(sample_tokens=40)
    model = SimpleNamespace(logits=lambda x: F.one_hot((x + 1) % 256, 320) * 1e4)
    assert module.sample(model, "bytes", 256, torch.device("cpu"), module.contextlib.nullcontext) == bytes(range(1, 41)).decode()


# ---------------------------------------------------------------------------------------------------------------------- logs
def test_log_format():
    result = train(max_iters=6, eval_interval=3, log_interval=2, optimizer="adamuon", sample_tokens=20, run_name="format")
    log = Path("logs/format.txt").read_bytes()
    script, optim, environment, body = re.split(b"^={100}\n", log, flags=re.M)
    assert script == (ROOT / "train_gpt.py").read_bytes() and optim == (ROOT / "optim.py").read_bytes()
    head = [line for line in environment.decode().splitlines()]
    facts = dict(line.split(": ", 1) for line in head if not line.startswith("--"))
    assert {"python", "torch", "numpy", "platform", "device", "world_size", "started", "script", "run_name", "dataset", "train_tokens",
            "data_checksum", "params", "flops_per_token"} <= facts.keys() | {line[2:].split("=")[0] for line in head
                                                                             if line.startswith("--")}
    again = fresh()
    again.configure([line for line in head if line.startswith("--")])  # the flags repeat the run
    assert {name: getattr(again, name) for name in again.GLOBALS} == checkpoint("format", 6)["globals"]
    records = re.findall(r"step:(\d+)/(\d+) val_loss:([\d.]+) train_time:([\d.]+)s step_avg:([\d.]+)ms", body.decode())  # the speedrun's
    assert [(int(step), int(last)) for step, last, *_ in records] == [(3, 6), (6, 6)]
    assert "nan" not in body.decode().split("sample:")[0] and "inf" not in body.decode().split("sample:")[0]
    lines = read_log("logs/format.txt")
    assert [line["step"] for line in lines if "step" in line] == ["0/6", "2/6", "3/6", "4/6", "6/6"]
    assert lines[0].keys() == {"step", "val_loss", "train_time", "val_acc"}
    assert {"train_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "time_left", "step_avg"} <= lines[1].keys()
    final = next(line for line in lines if "val_ppl" in line)
    assert float(final["val_ppl"]) == pytest.approx(math.exp(float(final["val_loss"])), rel=1e-3)
    assert float(final["val_loss"]) == pytest.approx(result["val_loss"], abs=1e-5)
    assert "\nsample: " in body.decode()


def test_zero_updates_give_a_validation_and_no_figures_that_do_not_exist():
    result = train(max_iters=0, run_name="none")
    assert result["val_loss"] == pytest.approx(math.log(320), abs=0.02)
    assert "nan" not in "".join(str(line) for line in read_log("logs/none.txt"))


def test_the_clock_stands_still_during_validation_and_saving_and_the_figures_of_a_line_agree(monkeypatch):
    module, now = fresh(), [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def passing(seconds, function):
        def call(*args):
            now[0] += seconds(*args)
            return function(*args)
        return call
    module.evaluate = passing(lambda *_: 100, module.evaluate)
    module.Checkpoints.save = passing(lambda *_: 100, module.Checkpoints.save)
    module.Shards.batch = passing(lambda shards, step, rows: 0.25 if step < 3 else 0.5, module.Shards.batch)  # 4 of them an update
    module.peak_flops = lambda where: 1e8
    result = module.main(flags(max_iters=6, eval_interval=2, checkpoint_interval=2, run_name="clock"))
    lines, clock = read_log("logs/clock.txt"), [1, 2, 3, 5, 7, 9]
    rows = [line for line in lines if "mfu" in line]
    flops = module.flops_per_token(configured().Model(320))
    assert len(rows) == 6 and result["train_time"] == 9
    for row, step, t in zip(rows, itertools.count(1), clock):
        rate = 128 if step <= 3 else 64
        assert (row["train_time"], row["step_avg"]) == (f"{t:.3f}s", f"{1000 * t / step:.2f}ms")
        assert (row["tokens_per_s"], row["mfu"]) == (f"{rate}", f"{rate * flops / 1e8:.3f}")
        assert row["time_left"] == f"{(6 - step) * t / step:.0f}s"
    assert lines[-1]["tokens_per_s"] == f"{6 * 128 / 9:.0f}"


def test_on_two_ranks_the_norm_of_the_gradient_and_mfu_are_not_those_of_twice_as_many(ranks):
    module = fresh()
    record(module, {})
    module.main(flags(run_name="one", max_iters=3, grad_clip=0))
    one, two = ([line for line in read_log(path) if "mfu" in line] for path in ("logs/one.txt", ranks / "logs/gradient.txt"))
    assert [float(row["grad_norm"]) for row in two] == pytest.approx([float(row["grad_norm"]) for row in one], abs=2e-4)
    module = configured()
    flops = module.flops_per_token(module.Model(320))
    assert [float(row["mfu"]) for row in two] == pytest.approx([float(row["tokens_per_s"]) * flops / 2e6 for row in two], rel=1e-2)


def test_durations_and_what_trackers_get_of_them():
    module, rows = configured(), []
    assert [module.duration(x) for x in (0.4, 599, 600, 35_999, 36_000)] == ["0s", "599s", "10min", "600min", "10.0h"]
    log = module.Log(Path("logs/units.txt"), "", 0)
    log.trackers = [lambda figures, step: rows.append((step, figures))]
    log("step:3/9 train_time:2.500s step_avg:1.50ms lr:1e-05 mfu:n/a time_left:10min")
    log("step:4/9 time_left:1.5h"), log("resumed:step:2 world_size:1")
    assert rows == [(3, dict(train_time=2.5, step_avg=1.5, lr=1e-5, time_left=600)), (4, dict(time_left=5400))]


def test_the_event_file_of_a_resumed_run_keeps_the_line_of_its_checkpoint(monkeypatch):
    module, seen = configured(tensorboard="true"), []
    fake = SimpleNamespace(SummaryWriter=lambda folder, purge_step: seen.append((folder, purge_step)))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    module.trackers("r", 0), module.trackers("r", 4)
    assert seen == [("logs/tensorboard/r", None), ("logs/tensorboard/r", 5)]


def test_the_log_of_a_run_that_left_no_checkpoint_is_kept():
    train(run_name="lost", max_iters=1)
    shutil.rmtree("checkpoints")
    before = Path("logs/lost.txt").read_bytes()
    train(run_name="lost", max_iters=1, resume="auto")
    assert Path("logs/lost.old").read_bytes() == before


@pytest.mark.parametrize("same", [True, False])
def test_a_terminal_that_is_gone_does_not_end_the_run(same, monkeypatch):
    """Or a pipe to tee or head, into which stderr goes too or not."""
    module, moved = configured(), []
    log = module.Log(Path("logs/gone.txt"), "head\n", 0)

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Gone())
        patch.setattr(module.os, "dup2", lambda fd, to: moved.append(to))
        patch.setattr(module.os.path, "sameopenfile", lambda a, b: same)
        log("step:1/2 a line \udce9")  # the name of a folder may have a byte that is no letter
    assert Path("logs/gone.txt").read_bytes() == b"head\nstep:1/2 a line \xe9\n" and moved == ([1, 2] if same else [1])


# ---------------------------------------------------------------------------------------------------------------------- bad input
def damaged(path, at):
    """Cuts a file at a byte, or flips a bit at a byte counted from its end."""
    data = bytearray(Path(path).read_bytes())
    if at < 0:
        data[at] ^= 4
    Path(path).write_bytes(data if at < 0 else data[:at])


TRAIN, VAL = "data/tiny/tiny_train_000001.bin", "data/tiny/tiny_val_000000.bin"
BAD = {  # what is wrong: (a change of the data, flags, what the message says)
    "name": (None, dict(learnig_rate=1), "--learning_rate=1"),
    "word": (None, ["max_iters=3"], "--max_iters=value"),
    "no value": (None, ["--max_iters"], "--max_iters=value"),
    "int": (None, dict(max_iters="ten"), "whole number"),
    "half": (None, dict(max_iters=1.5), "whole number"),
    "float": (None, dict(learning_rate="nan"), "expected a number"),
    "bool": (None, dict(compile="maybe"), "true or false"),
    "negative": (None, dict(learning_rate=-1), "at least 0"),
    "zero": (None, dict(batch_size=0), "above 0"),
    "beta": (None, dict(momentum=1), "[0, 1)"),
    "preset": (None, dict(preset="gpt2-smal"), "--preset=gpt2-small"),
    "optimizer": (None, dict(optimizer="muon-sv"), "--optimizer=muon-vs"),
    "schedule": (None, dict(schedule="cosin"), "--schedule=cosine"),
    "device": (None, dict(device="gpu"), "expected one of cpu, cuda, mps"),
    "run name": (None, dict(run_name="a/b"), "--run_name=a/b"),
    "number of a device": (None, dict(device="cpu:x"), "--device=cpu:x is unknown"),
    "dataset": (None, dict(dataset="tinny"), "prepare.py"),
    "corpus that is not prepared": (None, dict(dataset="openwebtext"), "run `python prepare.py openwebtext`"),
    "corpus of which a part is enough": (None, dict(dataset="dclm", max_iters=1000, batch_size=1000, block_size=1000, val_tokens=1000),
                                         "run `python prepare.py dclm --tokens 1020M`"),
    "data folder": (None, dict(data_dir="my data"), "run `python prepare.py text --input PATH --name tiny --data_dir='my data'`"),
    "manifest elsewhere": (lambda: (shutil.move("data", "there"), Path("there/tiny/manifest.json").write_text("{")), dict(data_dir="there"),
                           "`python prepare.py verify tiny --data_dir=there`"),
    "no validation": (lambda: os.remove(VAL), {}, "no val shards"),
    "truncated": (lambda: damaged(TRAIN, 3000), {}, "truncated or damaged: 3000 bytes, expected 5040"),
    "truncated header": (lambda: damaged(TRAIN, 11), {}, "truncated or damaged: 11 bytes"),
    "empty": (lambda: damaged(TRAIN, 0), {}, "not a token shard"),
    "bit flip": (lambda: damaged(TRAIN, -100), {}, "damaged: its checksum is"),
    "bit flip in validation": (lambda: damaged(VAL, -1), {}, "damaged: its checksum is"),
    "folder": (lambda: (os.remove(TRAIN), os.mkdir(TRAIN)), {}, "cannot read"),
    "missing": (lambda: Path("data/tiny/manifest.json").write_text('{"shards": [{"file": "tiny_train_000003.bin", "split": "train"}]}'),
                {}, "lacks tiny_train_000003.bin"),
    "manifest": (lambda: Path("data/tiny/manifest.json").write_text("{"), {}, "manifest.json cannot be read"),
    "tokenizer": (lambda: write_shard("data/tiny/tiny_train_000003.bin", text(99), vocab=32000), {}, "another tokenizer"),
    "validation of another tokenizer": (lambda: write_shard("data/other/o_val_000000.bin", text(99), vocab=32000),
                                        dict(val_dataset="other"), "same tokenizer"),
    "vocabulary": (None, dict(vocab_size=128), "--vocab_size=320"),
    "ids": (lambda: write_shard(TRAIN, text(99) + 250), {}, "token id"),
    "ids of theirs": (lambda: write_shard(TRAIN, text(99) + 50_257, ours=False), {}, "expected ids below 50257; use --vocab_size=50"),
    "files of others": (lambda: write_shard("data/owt/train.bin", text(99), ours=False), dict(dataset="owt"),
                        "`python prepare.py import data/owt --name owt-shards` and give `--dataset=owt-shards`"),
    "short data": (None, dict(block_size=1024, val_tokens=2048, n_embd=4), "--block_size=1024 is longer than the data"),
    "threads": (None, dict(threads=100_000), "--threads=100000: expected a number from 0 to 1024"),
    "val_tokens": (None, dict(val_tokens=15), "--val_tokens=16"),
    "batch": (None, dict(batch_size=9), "--micro_batch_size=1"),
    "batch smaller than micro-batch": (None, dict(batch_size=2, micro_batch_size=16), "--micro_batch_size=2"),
    "heads": (None, dict(n_embd=33), "--n_embd=32"),
    "log folder": (lambda: Path("logs").touch(), {}, "cannot write logs"),
    "checkpoint folder": (lambda: Path("full").touch(), dict(checkpoint_dir="full/x"), "cannot write full/x"),
    "memory": (None, dict(n_layer=400, n_embd=16384), "GiB are needed on cpu"),
    "run exists": (lambda: (os.mkdir("logs"), Path("logs/old.txt").touch()), dict(run_name="old"), "choose another --run_name"),
    "no checkpoint": (None, dict(resume="checkpoints/none/step_00000001.pt"), "there is no"),
    "empty folder": (lambda: os.makedirs("checkpoints/none"), dict(resume="checkpoints/none"), "there is no"),
}


def fails(capsys, monkeypatch, words: list[str]) -> str:
    """Runs the command line in this process; the one line that it prints to stderr."""
    before = {path for path in Path(".").rglob("*") if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *words])
    capsys.readouterr()
    assert fresh().cli() == 1
    line = capsys.readouterr().err
    assert line.startswith("train_gpt.py: error: ") and line.count("\n") == 1 and "Traceback" not in line, line
    assert {path for path in Path(".").rglob("*") if path.is_file()} == before, "a file was left behind"
    return line


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_line(what, capsys, monkeypatch):
    prepare, changes, expected = BAD[what]
    if prepare:
        prepare()
    line = fails(capsys, monkeypatch, flags(**changes) if isinstance(changes, dict) else flags() + changes)
    assert expected in line


def test_a_shard_that_is_cut_during_the_run_is_named():
    module = configured()
    shards = module.Shards("tiny", "train")
    os.truncate(TRAIN, 3000)
    with pytest.raises(module.UserError, match="tiny_train_000001.bin became shorter .*`python prepare.py verify tiny`"):
        shards.read(np.arange(100))


def test_bad_input_ends_the_process_with_status_1():
    done = subprocess.run([sys.executable, ROOT / "train_gpt.py", *flags(dataset="none")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train_gpt.py: error: no train shards in data/none")


def test_a_disk_too_small_for_the_checkpoints_is_told_at_the_start(capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 10**5, 10**5))
    assert "lower --keep_checkpoints" in fails(capsys, monkeypatch, flags())


def test_a_run_that_resume_does_not_find_by_its_default_name_is_named(capsys):
    train(run_name="demo-muon-vs-seed1-20260101-000000", max_iters=1)
    assert train(max_iters=1, resume="auto")["log"].name == "demo-muon-vs-seed1.txt"
    assert "give --run_name=demo-muon-vs-seed1-20260101-000000\n" in capsys.readouterr().err
    train(max_iters=1, resume="auto")
    assert "begins" not in capsys.readouterr().err


def test_a_run_resumed_inside_its_folder_keeps_its_name(monkeypatch):
    train(run_name="here", max_iters=2)
    monkeypatch.chdir("checkpoints/here")
    same = dict(max_iters=2, resume=".", data_dir="../../data", log_dir="../../logs", checkpoint_dir="..")
    assert train(**same)["log"].name == "here.txt"


def test_a_run_resumed_by_a_link_to_its_folder_keeps_the_links_name():
    train(run_name="elsewhere", max_iters=2)
    os.rename("checkpoints/elsewhere", "scratch")
    os.symlink("../scratch", "checkpoints/mine")
    assert train(max_iters=2, resume="checkpoints/mine")["log"].name == "mine.txt"


def test_the_corpora_are_those_of_prepare():
    assert fresh().SOURCES == tuple(fresh("prepare.py").SOURCES)


@pytest.mark.parametrize("parameters, changes, mend", [
    (9, {}, "free; use --param_dtype=bfloat16, more ranks"), (9, dict(param_dtype="bfloat16"), "free; use more ranks"),
    (1, {}, "free; lower --micro_batch_size\n"),
    (1, dict(micro_batch_size=1), "free; use --activation_checkpointing=true or a smaller --block_size"),
    (1, dict(micro_batch_size=1, activation_checkpointing=True), "free; use a smaller --block_size")])
def test_too_little_memory_gets_the_advice_that_helps(parameters, changes, mend, monkeypatch):
    module = configured(**changes)
    monkeypatch.setattr(module, "memory_estimate", lambda *_, **__: dict(parameters=parameters * 2.0**60, activations=2.0**62))
    with pytest.raises(module.UserError) as error:
        module.check_memory(None, torch.device("cpu"), 1, 1)
    assert mend in f"{error.value}\n"


@pytest.mark.parametrize("values, message", [
    (dict(n_layers=2), "the preset mine: there is no --n_layers; did you mean --n_layer=2?"),
    (dict(max_iters=2.5), "the preset mine: --max_iters=2.5: expected a whole number"),
    (dict(val_dataset=None), "the preset mine: val_dataset is None, expected a text or a number")])
def test_a_preset_of_yours_is_read_like_flags(values, message):
    module = fresh()
    module.PRESETS["mine"] = values
    with pytest.raises(module.UserError, match=re.escape(message)):
        module.configure(["--preset=mine"])


def test_an_error_of_nccl_is_told_with_its_reason(capsys, monkeypatch):
    module = fresh()
    error = ("[1] NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
             "details)\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
             "Duplicate GPU detected : rank 1 and rank 0")
    monkeypatch.setattr(module, "main", lambda argv: (_ for _ in ()).throw(RuntimeError(error)))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py"])
    monkeypatch.setenv("RANK", "1")
    assert module.cli() == 1
    assert "rank 1 cannot go on with the others (Duplicate GPU detected : rank 1 and rank 0); torchrun" in capsys.readouterr().err


def test_a_gpu_without_memory_gets_one_line(capsys, monkeypatch):
    module = fresh()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB")
    monkeypatch.setattr(module, "main", lambda argv: (_ for _ in ()).throw(error))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py"])
    assert module.cli() == 1
    assert capsys.readouterr().err == (
        "train_gpt.py: error: rank 0: CUDA out of memory. Tried to allocate 20.00 GiB; lower --micro_batch_size or set "
        "--activation_checkpointing=true; the last checkpoint is intact\n")


def test_a_machine_without_memory_gets_one_line(capsys, monkeypatch):
    module = fresh()
    monkeypatch.setattr(module, "main", lambda argv: torch.empty(10**15))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py"])
    assert module.cli() == 1
    told = capsys.readouterr().err
    assert "can't allocate memory: you tried to allocate 4000000000000000 bytes" in told and "; lower --micro_batch_size or" in told
    assert told.count("\n") == 1


def test_restarts_without_resume_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "--resume=auto" in fails(capsys, monkeypatch, flags())


def test_help_lists_every_global_with_its_comment(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--help"])
    module = fresh()
    assert module.cli() == 0
    out = capsys.readouterr().out
    assert all(f"\n  --{name}=" in out for name in module.GLOBALS) and len(module.GLOBALS) > 50
    assert re.search(r"^  --gamma=1000.0 +γ of muon-nsr and muon-nsr-post$", out, flags=re.M)


def test_help_may_be_read_in_part(place):
    """As by head: the pipe is closed before all is written."""
    done = subprocess.run(f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'train_gpt.py'))} --help | true; echo ${{PIPESTATUS[0]}}",
                          shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_help_prints_on_a_terminal_of_few_letters(monkeypatch):
    bare = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", bare)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--help"])
    assert fresh().cli() == 0
    bare.flush()
    assert b"? of muon-nsr and muon-nsr-post" in bare.buffer.getvalue()


def test_without_a_compiler_it_runs_eagerly_after_one_warning(place):
    # an empty cache, or inductor would take what another run has compiled
    environment = {**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(place / "cache")}
    done = subprocess.run([sys.executable, ROOT / "train_gpt.py", *flags(compile=True, run_name="eager")], capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0 and "final val_loss:" in done.stdout
    assert done.stderr.count("\n") == 1 and "runs uncompiled" in done.stderr
    train(run_name="uncompiled")
    eager, uncompiled = losses("logs/eager.txt"), losses("logs/uncompiled.txt")
    assert eager.keys() == uncompiled.keys() and all(eager[key] == pytest.approx(uncompiled[key], abs=1e-4) for key in eager)


def test_a_training_graph_that_does_not_compile_runs_eagerly(capfd):
    """Validation compiles nothing here; the loss of the first update fails."""
    def broken(graph, inputs):
        raise RuntimeError("no compiler")
    module = fresh()
    module.Model.compile_parts = lambda self: setattr(self, "loss", torch.compile(self.loss, backend=broken))
    try:
        module.main(flags(compile=True, run_name="broken"))
    finally:
        torch.compiler.set_stance("default")
    assert capfd.readouterr().err.count("runs uncompiled, so slower: torch.compile failed (BackendCompilerFailed: ") == 1
    train(run_name="eager")
    assert losses("logs/broken.txt") == losses("logs/eager.txt")


@pytest.mark.parametrize("tag", ["", "mine"])
def test_the_cache_of_graphs_tells_the_vectors_of_the_cpu(tag):
    """Torch's key lacks them, and code for AVX-512 gave NaN on AVX2. Nothing is compiled here."""
    module = fresh()
    module.configure(flags())
    with torch.compiler.config.patch(cache_key_tag=tag):
        module.Model(320).compile_parts()
        assert torch.compiler.config.cache_key_tag == (tag or torch.backends.cpu.get_cpu_capability())


def test_every_command_that_is_shown_runs():
    """Of README and of both scripts' docstrings: known flags in the right place, and a batch that its ranks can share."""
    texts, found = [(ROOT / "README.md").read_text(), *((ROOT / f"train_{kind}.py").read_text()[:1500] for kind in ("gpt", "llama"))], 0
    for launch, script, rest in re.findall(r"^ *(torchrun .*|python )(train_\w+\.py)(.*)$", "\n".join(texts), flags=re.M):
        module = fresh(script)
        module.configure(rest.partition("#")[0].split())
        ranks = math.prod(int(n) for n in re.findall(r"--n(?:nodes|proc_per_node)=(\d+)", launch))
        assert module.batch_size % (ranks * (module.micro_batch_size or 1)) == 0, (launch, rest)
        found += 1
    assert found > 12


def test_presets_of_an_optimizer_of_their_own_and_their_validation_data():
    def configured_by(*words):
        module = fresh()
        module.PRESETS |= {"mine": dict(optimizer="adamw", dataset="a", val_dataset="b"), "mine/adamw": dict(learning_rate=0.5),
                           "mine/muon": dict(learning_rate=0.25)}
        module.configure(["--preset=mine", *words])
        return module.optimizer, module.learning_rate, module.dataset, module.val_dataset
    assert configured_by() == ("adamw", 0.5, "a", "b")
    assert configured_by("--dataset=a") == ("adamw", 0.5, "a", "b")
    assert configured_by("--optimizer=muon", "--dataset=c") == ("muon", 0.25, "c", "")
    assert configured_by("--learning_rate=1", "--dataset=c", "--val_dataset=d") == ("adamw", 1, "c", "d")


def test_every_number_has_its_range():
    module, seen = fresh(), set()
    for text, bad, names in (
            ("above 0", (0, -1), "n_layer n_head n_embd block_size batch_size max_skipped rope_base log_interval eval_interval "
             "checkpoint_interval val_tokens keep_checkpoints timeout_minutes muon_eps ns_eps adam_eps"),
            ("of at least 0", (-1,), "max_iters micro_batch_size vocab_size learning_rate adam_lr weight_decay grad_clip gamma ns_steps "
             "warmup_iters sample_tokens seed data_seed"), ("from 0 to 1024", (-1, 1025), "threads"),
            ("in [0, 1)", (-0.5, 1), "momentum beta2 adam_beta1 adam_beta2"), ("in [0, 1]", (-0.5, 1.5), "decay_frac min_lr_frac")):
        for name in names.split():
            kept = getattr(module, name)
            for value in bad:
                with pytest.raises(module.UserError, match=re.escape(f"--{name}={type(kept)(value)}: expected a number {text}")):
                    module.configure([f"--{name}={value}"])
            setattr(module, name, kept)
            seen.add(name)
    assert seen == {name for name in module.GLOBALS if type(getattr(module, name)) in (int, float)}


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "a b"])
def test_a_run_is_called_as_files_can_be(name):
    """A dot at first would be another folder, or a hidden one."""
    module = fresh()
    with pytest.raises(module.UserError, match="it names files, so use letters"):
        module.configure([f"--run_name={name}"])
    fresh().configure(["--run_name=a.b-1_c=2+3"])


def test_averages_that_bf16_would_keep_for_ever_are_refused():
    """β times a bf16 number is rounded back to that number, for some from 0.9965 on, for all at 0.999."""
    mantissas = (1 + torch.arange(128) / 128).bfloat16()
    stuck = [int(((mantissas.double() * beta).bfloat16() == mantissas).sum()) for beta in (0.996, 0.9965, 0.999)]
    assert stuck[0] == 0 < stuck[1] and stuck[2] == 128
    for name, optimizer in (("momentum", "muon"), ("beta2", "normuon"), ("adam_beta1", "adamw"), ("adam_beta2", "muon-vs")):
        module, half = fresh(), [f"--optimizer={optimizer}", "--param_dtype=bfloat16"]
        module.configure([f"--{name}=0.999", f"--optimizer={optimizer}"])
        with pytest.raises(module.UserError, match=f"--{name}=0.997: expected a number of at most 0.996 beside --param_dtype=bfloat16"):
            module.configure([f"--{name}=0.997", *half])
        fresh().configure([f"--{name}=0.996", *half])
    fresh().configure(["--momentum=0.999", "--beta2=0.999", "--optimizer=adamw", "--param_dtype=bfloat16"])  # it has neither


def test_the_newest_the_best_and_the_one_being_written_must_fit(monkeypatch):
    module, free = configured(keep_checkpoints=2), [120]
    module.memory_estimate = lambda *_, **__: dict(parameters=10, optimizer=20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    module.check_disk(None, Path("c"))
    free[0] -= 1
    with pytest.raises(module.UserError, match="lower --keep_checkpoints"):
        module.check_disk(None, Path("c"))
    Path("c/step_00000001.pt").write_bytes(b"x")  # it will be replaced
    module.check_disk(None, Path("c"))


@pytest.mark.parametrize("files, free", [
    ({}, 2**30), ({"/sys/fs/cgroup/memory.max": "max"}, 2**30), ({"/sys/fs/cgroup/memory.max": "1000000"}, 1e6),
    ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000"}, 2e6),
    ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 2**30)])
def test_the_memory_of_a_container_is_what_it_may_have(files, free, monkeypatch):
    """Of which each of two ranks has half."""
    module = configured()
    files = {"/proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {2**20} kB\n", **files}

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]
    monkeypatch.setattr(Path, "read_text", read_text)
    for need in (free / 2, free / 2 + 1):
        module.memory_estimate = lambda *_: dict(parameters=need, activations=0)
        with pytest.raises(module.UserError, match="GiB are needed on cpu") if need > free / 2 else module.contextlib.nullcontext():
            module.check_memory(None, torch.device("cpu"), 2, 2)


def test_a_rank_holds_its_share_of_the_optimizer():
    module = configured()
    one, four = (module.memory_estimate(module.Model(64), world=world, gpu=False, bf16=False) for world in (1, 4))
    assert four["optimizer"] == one["optimizer"] / 4


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "stateless"])
def test_the_optimizers_state_is_estimated_as_it_is(optimizer, monkeypatch):
    """To the byte, with a stack of matrices as experts have, and for a rule of a fork's that keeps nothing."""
    monkeypatch.setitem(VARIANTS, "stateless", Variant(lambda G, S, h: (G, {}), ()))
    module = configured(optimizer=optimizer)
    model = module.Model(64)
    model.blocks[0].experts = torch.nn.Parameter(torch.ones(3, 8, 16))
    estimate = module.memory_estimate(model, world=1, gpu=False, bf16=False)["optimizer"]
    state = 0
    for opt in module.build_optimizers(model, False, torch.float32):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        state += sum(t.nbytes for entry in opt.state.values() for t in entry.values() if torch.is_tensor(t))
    assert estimate == state


def test_windows_is_told_what_is_expected(monkeypatch, capsys):
    module = fresh()
    monkeypatch.setattr(module, "os", SimpleNamespace(name="nt"))
    assert module.cli() == 1
    assert capsys.readouterr().err == ("train_gpt.py: error: found Windows, expected Linux or macOS; run it in WSL2, which "
                                       "`wsl --install` installs\n")


# ---------------------------------------------------------------------------------------------------------------------- not finite
def break_backward(module, bad: set) -> dict:
    """The gradient of these micro-batches (4 an update, the first one is the warm-up's) becomes infinite; the loss stays as it is.
    Returns a dictionary that gets the weights before each update."""
    initialise, batch, count, models, weights = module.initialise, module.Shards.batch, itertools.count(), [], {}

    def with_hook(model):
        initialise(model)
        models.append(model)
        model.head.weight.register_hook(lambda g: g * math.inf if next(count) in bad else g)

    def reading(self, step, rows):
        weights[step] = torch.cat([p.detach().flatten().clone() for p in models[0].parameters()])
        return batch(self, step, rows)
    module.initialise, module.Shards.batch = with_hook, reading
    return weights


def test_an_update_with_a_gradient_that_is_not_finite_is_left_out():
    module = fresh()
    weights = break_backward(module, {1 + 4 * 2 + 1})  # update 2
    result = module.main(flags(max_iters=6, checkpoint_interval=3, run_name="skip"))
    lines = read_log("logs/skip.txt")
    assert [line.get("skipped") for line in lines if "lr" in line] == [None, None, "1", "1", "1", "1"]
    assert "nan" not in str(lines) and "inf" not in str(lines)
    assert [torch.equal(weights[step], weights[step + 1]) for step in range(5)] == [False, False, True, False, False]
    saved = checkpoint("skip", 6)
    assert saved["skipped"] == 1 and result["step"] == 6 and math.isfinite(result["val_loss"])
    assert {entry["step"] for opt in saved["optimizers"] for entry in opt["state"].values()} == {6}  # counted
    assert not Path("checkpoints/skip/step_00000003.pt").exists()  # a run that goes on from a checkpoint repeats what was left out


def test_ten_in_a_row_end_the_run_with_the_weights_intact():
    module = fresh()
    weights = break_backward(module, set(range(1 + 4 * 3, 1000)))  # from update 3 on
    with pytest.raises(module.UserError, match="10 updates in a row, up to update 13; go on .* --resume=auto or =PATH, --a") as error:
        module.main(flags(max_iters=50, checkpoint_interval=1, keep_checkpoints=99, run_name="ten"))
    assert "\n" not in str(error.value)
    assert max(weights) == 12 and torch.equal(weights[3], weights[12]) and weights[12].isfinite().all()
    assert Path("logs/ten.txt").read_text().endswith("\ndiverged: the gradient was not finite in 10 updates in a row, up to update 13\n")
    assert sorted(path.name for path in Path("checkpoints/ten").glob("*.pt")) == [f"step_{step:08d}.pt" for step in (1, 2, 3)]


def test_a_loss_that_is_not_finite_ends_the_run():
    module = fresh()
    forward, count = module.Model.forward, itertools.count()
    module.Model.forward = lambda self, *batch: forward(self, *batch) * (math.nan if next(count) == 1 + 4 * 3 + 2 else 1)
    with pytest.raises(module.UserError) as error:
        module.main(flags(max_iters=50, checkpoint_interval=2, run_name="nan"))
    lines = read_log("logs/nan.txt")[:-1]
    assert lines[-1]["step"] == "3/50"
    assert re.search(r"^diverged: the loss of update 4 is nan, the last finite one was .*\n\Z", Path("logs/nan.txt").read_text(), re.M)
    assert "loss of update 4 is nan" in str(error.value) and f"{float(lines[-1]['train_loss']):.3f}"[:-1] in str(error.value)
    assert "--learning_rate" in str(error.value) and "\n" not in str(error.value)
    assert all(t.isfinite().all() for t in checkpoint("nan", 2)["model"].values())


def test_ten_skips_count_only_in_a_row():
    monitor = fresh().Monitor(0, print)
    for step in range(30):
        norm = math.inf if step % 2 else 1.0
        monitor.add(step, torch.tensor([1.0, norm, 0.0, norm**2]))
    assert (monitor.skipped, monitor.in_a_row) == (15, 1)


def test_a_resumed_run_goes_on_counting_time_and_what_was_left_out():
    module = fresh()
    break_backward(module, {1 + 4 * 2 + 1})  # update 2
    module.main(flags(max_iters=6, checkpoint_interval=4, run_name="first"))
    train(max_iters=6, run_name="second", resume="checkpoints/first/step_00000004.pt")
    rows = [line for line in read_log("logs/second.txt") if "lr" in line]
    assert [row["skipped"] for row in rows] == ["1", "1"] and checkpoint("second", 6)["skipped"] == 1
    assert float(rows[0]["train_time"][:-1]) >= checkpoint("first", 4)["train_time"] - 5e-4


# ---------------------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_half_and_half_is_the_whole_bit_for_bit(optimizer, dtype):
    same = dict(optimizer=optimizer, dtype=dtype, max_iters=2 * HALF)
    train(**same, run_name="whole", checkpoint_interval=HALF)
    train(**same, run_name="resumed", resume=f"checkpoints/whole/step_{HALF:08d}.pt")
    assert_same_bits(checkpoint("whole", 2 * HALF), checkpoint("resumed", 2 * HALF))
    whole, resumed = losses("logs/whole.txt"), losses("logs/resumed.txt")
    assert len(resumed) == HALF + 1 and resumed.items() <= whole.items()


def test_half_and_half_with_parameters_in_bf16_and_stochastic_rounding():
    same = dict(max_iters=2 * HALF, param_dtype="bfloat16", stochastic_rounding=True)
    train(**same, run_name="whole", checkpoint_interval=HALF)
    train(**same, run_name="resumed", resume=f"checkpoints/whole/step_{HALF:08d}.pt")
    assert checkpoint("whole", HALF)["model"]["head.weight"].dtype == torch.bfloat16
    assert_same_bits(checkpoint("whole", 2 * HALF), checkpoint("resumed", 2 * HALF))


@pytest.mark.parametrize("optimizer,dtype", ON_RANKS)
def test_half_and_half_on_two_ranks(ranks, monkeypatch, optimizer, dtype):
    monkeypatch.chdir(ranks)
    assert_same_bits(checkpoint(f"{optimizer}-{dtype}", 2 * HALF), checkpoint(f"{optimizer}-{dtype}-2", 2 * HALF))


def test_saved_on_two_ranks_resumed_on_one_and_four(ranks, monkeypatch):
    monkeypatch.chdir(ranks)
    train(max_iters=2 * HALF, run_name="1", resume=f"checkpoints/muon-vs-float32/step_{HALF:08d}.pt")
    two = losses("logs/muon-vs-float32.txt")
    for run in ("1", "4"):
        curve = losses(f"logs/{run}.txt")
        assert len(curve) == HALF + 1
        # float32 sums in another order; Newton-Schulz and the division by √Γ magnify what they differ in
        assert all(curve[key] == pytest.approx(two[key], abs=1e-4) for key in curve)


@pytest.mark.parametrize("what,expected", [("globals", "rank 1 differs from rank 0 in its --learning_rate;"), ("data", "in its data"),
                                           ("lonely", "in its checkpoint")])
def test_ranks_that_differ_stop_and_say_in_what(ranks, what, expected):
    assert all(expected in part["error"] for part in left(ranks, what))
    assert not any(part["watching"] for part in left(ranks, what))  # inside a call of the store it would abort the process as that ends


def test_a_checkpoint_holds_plain_types_and_raw_names():
    train(run_name="plain", max_iters=2)
    saved = checkpoint("plain", 2)  # weights_only
    assert set(saved["model"]) == {name for name, _ in configured().Model(320).named_parameters()}
    assert saved["step"] == 2 and saved["sequences"] == 16 and saved["globals"]["optimizer"] == "muon-vs" and len(saved["source"]) == 64
    assert not any(name.endswith(".tmp") for name in os.listdir("checkpoints/plain"))


def test_the_newest_and_the_best_stay():
    module = fresh()
    scores = iter([9.0, 3.0, 1.0, 2.0, 5.0, 4.0, 6.0])  # before the first update, then after updates 1 to 6
    module.evaluate = lambda *_: (next(scores), 0.5)
    module.main(flags(max_iters=6, eval_interval=1, checkpoint_interval=1, keep_checkpoints=2, run_name="keep"))
    assert sorted(os.listdir("checkpoints/keep")) == [f"step_{step:08d}.{end}" for step in (2, 5, 6) for end in ("json", "pt")]


def test_resume_auto(capsys):
    same = dict(max_iters=6, checkpoint_interval=2, keep_checkpoints=9, run_name="auto", resume="auto")
    train(**same)  # nothing to go on from: it starts
    whole = checkpoint("auto", 6)
    capsys.readouterr()
    folder = Path("checkpoints/auto")
    damaged(folder / "step_00000006.pt", -1000)
    damaged(folder / "step_00000004.pt", 5000)
    (folder / "step_00000008.pt.tmp").write_text("a write that was cut short")
    (folder / "step_00000008.pt").write_text("a checkpoint without its json")
    result = train(**same)
    passed_over = capsys.readouterr().err.splitlines()
    assert len(passed_over) == 3 and "step_00000008.pt: it has no readable .json" in passed_over[0]
    assert "step_00000006.pt: it does not match its checksum" in passed_over[1] and "step_00000004.pt: it has 5000 bytes" in passed_over[2]
    assert result["step"] == 6 and {"resumed": "step:2", "world_size": "1", "code": "same"} in read_log("logs/auto.txt")
    assert_same_bits(whole, checkpoint("auto", 6))
    train(**same)  # of a finished run: nothing is left to do
    assert_same_bits(whole, checkpoint("auto", 6))


def test_resume_path_names_what_is_damaged(capsys, monkeypatch):
    train(run_name="one", max_iters=2)
    damaged("checkpoints/one/step_00000002.pt", -500)
    line = fails(capsys, monkeypatch, flags(resume="checkpoints/one", max_iters=2))
    assert "step_00000002.pt does not match its checksum" in line


@pytest.mark.parametrize("changes,expected", [
    (dict(learning_rate=0.02), "learning_rate (0.01 then, 0.02 now)"), (dict(optimizer="muon"), "optimizer (muon-vs then, muon now)"),
    (dict(batch_size=16), "batch_size (8 then, 16 now)"), (dict(data_seed=2, seed=3), "seed (1 then, 3 now), data_seed (1 then, 2 now)")])
def test_globals_that_change_the_mathematics_are_refused_by_name(changes, expected, capsys, monkeypatch):
    train(run_name="old", max_iters=4, checkpoint_interval=2)
    words = dict(max_iters=4, run_name="new", resume="checkpoints/old/step_00000002.pt", **changes)
    assert expected in fails(capsys, monkeypatch, flags(**words))
    if "optimizer" not in changes:
        assert train(**words, allow_change=True)["step"] == 4
        told = ",".join(f"{name}={changes[name]}" for name in sorted(changes, reverse=True))  # in the order of the globals
        assert f" code:same changed:2:{told}\n" in Path("logs/new.txt").read_text()
        train(**{**words, "run_name": "later", "resume": "checkpoints/new", "max_iters": 4})  # a branch of it has its past
        assert f" code:same changed:2:{told}\n" in Path("logs/later.txt").read_text()
    unchanged = dict(words, micro_batch_size=4, log_interval=2, run_name="free", **{name: TINY.get(name, "") for name in changes})
    train(**{name: value for name, value in unchanged.items() if value != ""})
    assert " changed:" not in Path("logs/free.txt").read_text().split("=" * 100)[-1]


def test_other_data_and_another_model_are_refused(capsys, monkeypatch):
    train(run_name="old", max_iters=4, checkpoint_interval=2)
    words = dict(max_iters=4, run_name="new", resume="checkpoints/old/step_00000002.pt")
    for changes in (dict(n_embd=64), dict(optimizer="adamw"), dict(n_layer=2), dict(optimizer="normuon")):
        assert "of another model or optimizer" in fails_later(capsys, monkeypatch, flags(**words, **changes, allow_change=True))
        shutil.rmtree("logs/new.txt", ignore_errors=True)
        Path("logs/new.txt").unlink(missing_ok=True)
    write_shard(VAL, text(700, 4))
    assert "`python prepare.py verify tiny` tells whether a shard is damaged" in fails(capsys, monkeypatch, flags(**words))


def fails_later(capsys, monkeypatch, words) -> str:
    """As `fails`, for what is found only when the log has begun."""
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *words])
    capsys.readouterr()
    assert fresh().cli() == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("train_gpt.py: error: ")
    return line


def test_an_older_checkpoint_does_not_overwrite_newer_ones(capsys, monkeypatch):
    train(run_name="old", max_iters=6, checkpoint_interval=2, keep_checkpoints=9)
    line = fails(capsys, monkeypatch, flags(max_iters=6, resume="checkpoints/old/step_00000002.pt"))
    assert "step_00000006.pt" in line and "--run_name" in line


def test_nothing_in_a_checkpoint_is_executed(capsys, monkeypatch, place):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {place}/executed",)
    Path("checkpoints/evil").mkdir(parents=True)
    path = Path("checkpoints/evil/step_00000001.pt")
    torch.save(dict(model=Evil()), path)
    certify(path)
    for resume in ("auto", str(path)):
        assert "is not a checkpoint of train_gpt.py" in fails(capsys, monkeypatch, flags(resume=resume, run_name="evil"))
    assert not Path("executed").exists()


def full_disk(monkeypatch, module, failing):
    save, count = torch.save, itertools.count()

    def write(content, f):
        if next(count) in failing:
            f.write(b"x" * 1000)
            raise OSError(28, "No space left on device")
        save(content, f)
    monkeypatch.setattr(module.torch, "save", write)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(capsys, monkeypatch):
    module = fresh()
    full_disk(monkeypatch, module, {1})
    result = module.main(flags(max_iters=6, checkpoint_interval=2, keep_checkpoints=9, run_name="full"))
    assert result["step"] == 6 and "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in Path("checkpoints/full").iterdir()) == [
        f"step_{step:08d}.{end}" for step in (2, 6) for end in ("json", "pt")]
    assert module.damage(Path("checkpoints/full/step_00000002.pt")) == ""


def test_a_full_disk_at_the_last_checkpoint_is_an_error(capsys, monkeypatch):
    module = fresh()
    full_disk(monkeypatch, module, {2})
    with pytest.raises(module.UserError, match="No space left on device; free some space"):
        module.main(flags(max_iters=6, checkpoint_interval=2, run_name="full"))
    assert module.damage(Path("checkpoints/full/step_00000004.pt")) == ""
    assert any("val_ppl" in line for line in read_log("logs/full.txt"))  # the result is not lost


def test_saving_does_not_hold_up_training(monkeypatch):
    module = fresh()
    save = module.torch.save
    monkeypatch.setattr(module.torch, "save", lambda *what: time.sleep(1.5) or save(*what))
    begin = time.perf_counter()
    module.main(flags(max_iters=40, checkpoint_interval=20, run_name="slow"))
    clock = [float(line["train_time"][:-1]) for line in read_log("logs/slow.txt") if "step_avg" in line]
    assert max(np.diff(clock)) < 1.0 and time.perf_counter() - begin > 3  # no update waited for a write


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_saves_and_ends_with_status_0(name, capsys, monkeypatch):
    same = dict(max_iters=6, run_name="signal", resume="auto")
    module = fresh()
    batch, handlers = module.Shards.batch, [signal.getsignal(number) for number in module.SIGNALS]

    def reading(self, step, rows):
        if step == 3 and rows.start == 0:
            os.kill(os.getpid(), getattr(signal, name))
        return batch(self, step, rows)
    module.Shards.batch = reading
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *flags(**same)])
    assert module.cli() == 0
    assert f"stopped after update 4 by {name}; go on with the same command and --run_name=signal --resume=auto" in capsys.readouterr().out
    assert handlers == [signal.getsignal(number) for number in module.SIGNALS]
    train(**same)
    train(**{**same, "run_name": "undisturbed"})
    assert_same_bits(checkpoint("signal", 6), checkpoint("undisturbed", 6))


def test_only_a_signal_seconds_after_the_first_interrupts(monkeypatch):
    module, now = fresh(), iter([0.0, 2.0, 4.0])
    handlers = {number: signal.getsignal(number) for number in module.SIGNALS}
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stop = module.listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        remember = signal.getsignal(signal.SIGINT)
        remember(signal.SIGINT, None), remember(signal.SIGTERM, None)  # as a terminal and torchrun send them
        with pytest.raises(KeyboardInterrupt):
            remember(signal.SIGINT, None)
        assert stop["signal"] == "SIGINT"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_files_that_are_edited_during_a_run_do_not_become_its_source(monkeypatch):
    module = fresh()
    before = module.source_hash()
    monkeypatch.setattr(Path, "read_text", lambda *args, **how: "another version")
    assert module.source_hash() == before and module.log_head("r", {}).startswith('"""\nTrains a GPT-2')


def test_a_line_that_was_cut_short_does_not_spoil_the_next():
    train(run_name="torn", max_iters=4, checkpoint_interval=2)
    for path in Path("checkpoints/torn").glob("step_00000004.*"):
        path.unlink()
    with open("logs/torn.txt", "a") as log:
        log.write("step:3/4 train_ti")
    train(run_name="torn", max_iters=4, checkpoint_interval=2, resume="auto")
    assert "\nresumed:step:2 world_size:1 code:same\n" in Path("logs/torn.txt").read_text()


@pytest.mark.parametrize("what", ["silent", "late"])
def test_the_watch_names_the_rank_that_is_dead_or_slow(what, monkeypatch):
    module = configured(timeout_minutes=0.02)
    ended = []
    monkeypatch.setattr(module.Watch, "end", lambda self, message: ended.append(message))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = module.Watch(0, 3, store)
    module.Watch.waits = 5
    theirs = dist.PrefixStore("watch", dist.TCPStore("127.0.0.1", store.port))
    for beat in range(60):
        theirs.set("1", f"5 {beat} node1")
        theirs.set("2", f"4 {0 if what == 'silent' else beat} node2")
        time.sleep(0.05)
        if ended:
            break
    watch.done.set()
    watch.join()
    said = {"silent": "gave no sign of life", "late": "kept the others waiting"}[what]
    assert len(ended) == 1 and ended[0].startswith(f"rank 2 on node2 {said}")


def test_a_checkpoint_holds_the_weights_of_its_step_however_long_writing_takes(monkeypatch):
    module, save = fresh(), torch.save
    weights = break_backward(module, set())
    monkeypatch.setattr(module.torch, "save", lambda *what: time.sleep(0.5) or save(*what))
    module.main(flags(max_iters=4, checkpoint_interval=2, run_name="slow"))
    assert torch.equal(torch.cat([t.flatten() for t in checkpoint("slow", 2)["model"].values()]), weights[2])


def test_a_checkpoint_has_the_validation_loss_of_its_own_step_or_none():
    module, scores = fresh(), iter([9.0, 1.0, 2.0, 3.0])  # before the first update, then after 2, 4 and 5
    module.evaluate = lambda *_: (next(scores), 0.5)
    module.main(flags(max_iters=5, eval_interval=2, checkpoint_interval=1, keep_checkpoints=2, run_name="best"))
    notes = {path.name: json.loads(path.read_text())["val_loss"] for path in Path("checkpoints/best").glob("*.json")}
    assert notes == {"step_00000002.json": 1.0, "step_00000004.json": 2.0, "step_00000005.json": 3.0}
    module, scores = fresh(), iter([9.0, 7.0, 3.0])
    module.evaluate = lambda *_: (next(scores), 0.5)
    module.main(flags(max_iters=5, eval_interval=3, checkpoint_interval=1, keep_checkpoints=9, run_name="all"))
    notes = [json.loads(path.read_text())["val_loss"] for path in sorted(Path("checkpoints/all").glob("*.json"))]
    assert notes == [None, None, 7.0, None, 3.0]


def test_a_checkpoint_whose_validation_loss_is_nan_is_not_the_best():
    module, scores = fresh(), iter([9.0, math.nan, 2.0, 3.0, 4.0])
    module.evaluate = lambda *_: (next(scores), 0.5)
    module.main(flags(max_iters=4, eval_interval=1, checkpoint_interval=1, keep_checkpoints=1, run_name="nan"))
    assert sorted(path.name for path in Path("checkpoints/nan").glob("*.pt")) == ["step_00000002.pt", "step_00000004.pt"]


def test_what_cannot_be_saved_is_told(monkeypatch):
    module = fresh()

    def save(content, f):
        raise TypeError("cannot pickle 'generator' object")
    monkeypatch.setattr(module.torch, "save", save)
    with pytest.raises(module.UserError, match="could not save a checkpoint in checkpoints/edited: TypeError: cannot pickle 'generator'"):
        module.main(flags(max_iters=2, run_name="edited"))


def test_a_checkpoint_of_the_other_script_is_refused(capsys, monkeypatch):
    train(run_name="other", max_iters=1)
    path = Path("checkpoints/other/step_00000001.pt")
    torch.save({**checkpoint("other", 1), "script": "train_llama.py"}, path)
    path.with_suffix(".json").write_text(json.dumps(dict(val_loss=None, size=path.stat().st_size, sha256=fresh().sha256(path))))
    told = fails(capsys, monkeypatch, flags(max_iters=1, resume=path))
    assert "is not a checkpoint of train_gpt.py (ValueError: it is of train_llama.py)" in told


def test_a_resumed_run_initialises_nothing():
    train(run_name="whole", max_iters=4, checkpoint_interval=2)
    module = fresh()
    module.initialise = None
    module.main(flags(run_name="half", max_iters=4, resume="checkpoints/whole/step_00000002.pt"))
    assert_same_bits(checkpoint("half", 4), checkpoint("whole", 4))


def test_two_processes_do_not_write_one_run(capsys, monkeypatch):
    same = dict(run_name="twice", max_iters=2, resume="auto", timeout_minutes=0.01, allow_change=True)
    train(**same)
    other = os.open("checkpoints/twice", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    before = {path: path.read_bytes() for path in [*Path("checkpoints/twice").iterdir(), Path("logs/twice.txt")]}
    told = fails(capsys, monkeypatch, flags(**{**same, "max_iters": 4}))
    assert "another process writes to checkpoints/twice; wait for its end" in told
    assert before == {path: path.read_bytes() for path in [*Path("checkpoints/twice").iterdir(), Path("logs/twice.txt")]}
    module, sleep, held = fresh(), time.sleep, [other]

    def ending(seconds):
        if held and seconds == 0.5:
            os.close(held.pop())
        sleep(seconds)
    monkeypatch.setattr(module.time, "sleep", ending)
    assert module.main(flags(**{**same, "timeout_minutes": 1, "max_iters": 4}))["step"] == 4 and not held  # it has waited


def test_a_run_that_ends_early_is_over_when_its_checkpoint_is_written(monkeypatch):
    """Only then may another process write there."""
    module, save, validate = fresh(), torch.save, iter([True, False])
    monkeypatch.setattr(module.torch, "save", lambda *what: time.sleep(0.5) or save(*what))

    def evaluate(*_):
        if not next(validate):
            raise module.UserError("the end")
        return 5.0, 0.0
    module.evaluate = evaluate
    with pytest.raises(module.UserError, match="the end"):
        module.main(flags(max_iters=4, checkpoint_interval=2, eval_interval=3, run_name="early"))
    assert module.damage(Path("checkpoints/early/step_00000002.pt")) == ""


def test_a_file_system_that_cannot_sync_folders_will_do(monkeypatch):
    module, fsync = fresh(), os.fsync

    def refusing(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)
    monkeypatch.setattr(module.os, "fsync", refusing)
    module.main(flags(run_name="fs", max_iters=1))
    assert checkpoint("fs", 1)["step"] == 1


# ---------------------------------------------------------------------------------------------------------------------- single numbers
def test_each_optimizer_steps_at_its_own_learning_rate():
    module, seen = fresh(), []
    for name in ("Muon", "AdamW"):
        made = getattr(module, name)
        step = lambda self, step=made.step: seen.append([group["lr"] for group in self.param_groups]) or step(self)
        setattr(module, name, type(name, (made,), dict(step=step)))
    module.main(flags(max_iters=1, warmup_iters=0, schedule="constant", adam_lr=0.003, learning_rate=0.01))
    assert seen[-2:] == [[0.01], [0.003, 0.003]]


def test_the_weight_decay_given_reaches_embeddings():
    module = configured(weight_decay=0.3)
    muon, adam = module.build_optimizers(module.Model(64), False, torch.float32)
    assert [group["weight_decay"] for group in (*muon.param_groups, *adam.param_groups)] == [0.3, 0.3, 0.0]


def test_vocabularies_are_padded_to_multiples_of_64():
    assert [fresh().padded(n) for n in (1, 64, 65, 257, 32000, 50257)] == [64, 64, 128, 320, 32000, 50304]


def test_an_epoch_of_one_seed_is_no_epoch_of_the_next_seed():
    def epoch(step, seed):
        return configured(data_seed=seed, batch_size=187).Shards("tiny", "train").batch(step, range(187)).tolist()
    assert epoch(1, 1) != epoch(0, 2) and sorted(epoch(1, 1)) == sorted(epoch(0, 2))


def test_the_order_of_the_data_is_that_of_earlier_runs():
    """So that later code resumes them where they were, and their figures can be had again."""
    assert fresh().shuffle(np.arange(12), 12, 1, 0).tolist() == [1, 0, 4, 8, 7, 10, 3, 2, 6, 11, 9, 5]


def test_each_update_draws_random_numbers_of_its_own_by_the_seed():
    def noise(**changes):
        module, seen = fresh(), []
        clip = module.clip
        module.clip = lambda parameters: seen.append(torch.initial_seed()) or clip(parameters)
        module.main(flags(max_iters=3, **changes))
        return seen[-3:]
    assert noise(seed=1, run_name="a") == noise(seed=1, run_name="b") and len({*noise(seed=1), *noise(seed=2)}) == 6


def test_trackers_keep_the_whole_names_of_figures():
    module, seen = configured(), []
    module.trackers = lambda run, step: [lambda figures, step: seen.append((figures, step))]
    module.Log(Path("logs/x.txt"), "head\n", 0)("step:1/2 val_loss:1.5 ema/val_loss:9.5 train_time:2.000s")
    assert seen == [({"val_loss": 1.5, "ema/val_loss": 9.5, "train_time": 2.0}, 1)]


def test_validation_on_less_than_what_is_asked_for_is_told(capsys):
    train(max_iters=0, val_tokens=43 * 16, run_name="all")
    assert "validation is on" not in capsys.readouterr().out
    train(max_iters=0, val_tokens=44 * 16, run_name="few")
    assert "\nvalidation is on 688 tokens, all that tiny has, not --val_tokens=704\n" in capsys.readouterr().out


def test_a_dataset_that_was_prepared_without_validation_data_is_told():
    Path("data/tiny/tiny_val_000000.bin").unlink()
    shards = [dict(file=f"tiny_train_00000{i}.bin", split="train") for i in (1, 2)]
    Path("data/tiny/manifest.json").write_text(json.dumps(dict(shards=shards)))
    with pytest.raises(Exception, match="^data/tiny was prepared without val shards; give --val_dataset=NAME, .* `rm -r data/tiny`"):
        train()


def test_validation_adds_up_in_float64():
    """A mean over equal losses is that loss; sums in float32 would be off by 1e-6 and more."""
    write_shard("data/long/long_val_000000.bin", np.zeros(16_001, int))
    module = configured(val_tokens=16_000, micro_batch_size=1, val_dataset="long")
    shards, logits = module.Shards("long", "val"), lambda x: torch.linspace(0, 1, 320).expand(*x.shape, 320)
    loss, _ = module.evaluate(logits, shards, torch.device("cpu"), module.contextlib.nullcontext, 0, 1)
    module.val_tokens = 16
    first, _ = module.evaluate(logits, shards, torch.device("cpu"), module.contextlib.nullcontext, 0, 1)
    assert loss == pytest.approx(first, rel=1e-12)


def test_an_id_just_past_the_vocabulary_is_refused():
    tokens = text(2008, 1)
    tokens[3] = 257
    write_shard("data/tiny/tiny_train_000001.bin", tokens)
    module = configured()
    with pytest.raises(module.UserError, match="token id 257, expected ids below 257"):
        module.Shards("tiny", "train")


def test_another_version_of_the_shards_is_refused():
    path = Path("data/tiny/tiny_train_000001.bin")
    path.write_bytes(path.read_bytes()[:4] + b"\2" + path.read_bytes()[5:])
    module = configured()
    with pytest.raises(module.UserError, match=r"not a token shard: its first words are \[20240520, 2\]"):
        module.Shards("tiny", "train")


def test_shards_of_others_keep_their_end_of_text_where_the_vocabulary_is_given():
    write_shard("data/theirs/theirs_train_000001.bin", text(500), ours=False)
    assert configured(dataset="theirs", vocab_size=50257).Shards("theirs", "train").eot == 50256


def test_validation_reads_whole_windows_and_the_log_tells_how_many():
    module, rows = configured(val_tokens=40, micro_batch_size=1), []
    logits = lambda x: rows.append(len(x)) or torch.zeros(*x.shape, 320)
    module.evaluate(logits, module.Shards("tiny", "val"), torch.device("cpu"), module.contextlib.nullcontext, 0, 1)
    assert sum(rows) == 2
    train(max_iters=0, val_tokens=40, run_name="used")
    assert "\nval_tokens_used: 32\n" in Path("logs/used.txt").read_text()


def test_a_signal_in_the_last_update_keeps_the_result():
    module = fresh()
    batch = module.Shards.batch

    def reading(self, step, rows):
        if step == 3 and rows.start == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, step, rows)
    module.Shards.batch = reading
    module.main(flags(max_iters=4, run_name="end"))
    assert "\nfinal val_loss:" in Path("logs/end.txt").read_text()


def rewritten(path: str, change) -> str:
    """The checkpoint with `change` applied, as good as before."""
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    certify(Path(path))
    return path


def test_a_global_that_the_checkpoint_does_not_know_is_named(capsys, monkeypatch):
    train(run_name="old", max_iters=2)
    path = rewritten("checkpoints/old/step_00000002.pt", lambda saved: saved["globals"].pop("gamma"))
    assert "gamma (None then, 1000.0 now)" in fails(capsys, monkeypatch, flags(max_iters=2, run_name="new", resume=path))


def test_the_speed_of_a_resumed_run_is_its_own():
    train(run_name="old", max_iters=4, checkpoint_interval=2)
    path = rewritten("checkpoints/old/step_00000002.pt", lambda saved: saved.update(train_time=1e6))
    train(run_name="new", max_iters=4, resume=path)
    assert float(read_log("logs/new.txt")[-1]["tokens_per_s"]) > 10


def test_more_ranks_than_sequences_get_advice():
    module = configured(micro_batch_size=0, batch_size=8)
    with pytest.raises(module.UserError, match="x 16 ranks; use --batch_size=16"):
        module.micro_batches(16)


def test_a_sample_is_drawn_at_temperature_0_8(monkeypatch):
    module, seen, draw = configured(sample_tokens=1), [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, *a, **how: seen.append(p) or draw(p, *a, **how))
    logits = torch.arange(320) / 100
    model = SimpleNamespace(logits=lambda x: logits.expand(*x.shape, 320))
    module.sample(model, "bytes", 256, torch.device("cpu"), module.contextlib.nullcontext)
    torch.testing.assert_close(seen[0], torch.softmax(logits / 0.8, -1))


def test_epochs_and_perplexity_are_told(capsys):
    train(max_iters=47)
    assert " 2.00 epochs of tiny\n" in capsys.readouterr().out  # 47 x 8 of 187 windows
    module = fresh()
    module.evaluate = lambda *_: (100.0, 0.5)
    module.main(flags(max_iters=0, run_name="ppl"))
    assert float(read_log("logs/ppl.txt")[-1]["val_ppl"]) == pytest.approx(math.exp(100))
