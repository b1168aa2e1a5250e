"""Matrices whose rows ranks share out, as FSDP2's fully_shard makes them: optim.Muon alone, in a script of one's own
with torch.distributed.checkpoint, and in the train scripts."""
import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from common import checkpoint, on_ranks, train, write_tiny
from optim import VARIANTS, Muon, local
from test_optim import parameters, set_gradients

SHAPES = [(24, 16), (16, 16), (16, 16), (10, 24), (1, 5)]  # divided evenly, unevenly, and none for some ranks
KINDS = [*itertools.product(VARIANTS, ["match_rms_adamw", "frobenius"], ["float32"]),
         ("muon-vs", "original", "bfloat16")]

def thirty_steps(shard=lambda t: t):
    """Of each variant with each kind of scale, groups of one optimizer."""
    whole = parameters(*SHAPES * len(KINDS))
    params = [nn.Parameter(shard(p.detach())) for p in whole]
    groups = [dict(params=params[i * len(SHAPES):][:len(SHAPES)], variant=variant, adjust_lr_fn=scale, ns_dtype=dtype)
              for i, (variant, scale, dtype) in enumerate(KINDS)]
    opt = Muon(groups, lr=0.02, power=0.5, compile=False)
    for step in range(30):
        set_gradients(whole, step)
        for p, q in zip(params, whole):
            p.grad = shard(q.grad)
        if step == 20:
            params[0].grad = None
        opt.step()
    return params, opt

def on_groups(function, *args):
    """function(rank, world, *args) in process groups of 4, 3 and 2 ranks, one after the other."""
    mp.start_processes(_on_groups, (function, *args), nprocs=4, start_method="forkserver")

def _on_groups(rank, function, folder, *args):
    torch.set_num_threads(1)
    for world in 4, 3, 2:
        if rank < world:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
            function(rank, world, folder, *args)
            dist.destroy_process_group()
    Path(folder, f"done-{rank}").touch()
    while not all(Path(folder, f"done-{r}").exists() for r in range(4)):
        time.sleep(0.05)

def sharded_is_whole(rank, world, folder):
    """fp32 sums in another order, of norms alone; with bf16 Newton-Schulz a few of its roundings, of the way."""
    mesh = init_device_mesh("cpu", (world,))
    params, opt = thirty_steps(lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None))
    starts = parameters(*SHAPES * len(KINDS))
    for i, (p, alone, start) in enumerate(zip(params, torch.load(f"{folder}/alone.pt"), starts)):
        p = p.full_tensor()
        if KINDS[i // len(SHAPES)][2] == "float32":
            torch.testing.assert_close(p, alone, rtol=1e-5, atol=1e-6)
        else:
            assert (p - alone).norm() <= 0.03 * (alone - start).norm()
    for p in params[:4]:
        state = opt.state[p]["momentum"]
        assert state.placements == p.placements and state.to_local().shape == p.to_local().shape
    divided = [t for p in params[::len(SHAPES)] for t in opt.state[p].values()]  # of (24, 16)
    held = {t.data_ptr(): t.nbytes() for t in (local(t).untyped_storage() for t in divided)}  # one has several views
    assert sum(held.values()) <= 1.05 / world * sum(t.numel() * t.element_size() for t in divided)
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2))
        for mesh, placements in (mesh, [Shard(1)]), (mesh, [Replicate()]), (grid, [Replicate(), Shard(0)]):
            with pytest.raises(ValueError, match=r"expected a matrix with Shard\(0\)"):
                Muon([nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))])

def test_sharded_by_rows_is_whole(tmp_path):
    torch.save([p.detach() for p in thirty_steps()[0]], tmp_path / "alone.pt")
    on_groups(sharded_is_whole, str(tmp_path))

def someones_script(rank, world, folder):
    """Its checkpoint of four ranks goes on at three and at two, as it did there to fp32 rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 50), nn.GELU(), nn.Linear(50, 16), nn.Linear(16, 32))
    for layer in model[1], model[3]:
        fully_shard(layer)
    fully_shard(model)
    matrices = [model[1].weight, model[3].weight]
    others = [p for p in model.parameters() if p not in {*matrices}]
    muon = Muon(matrices, lr=0.02, variant="muon-vs", ns_dtype=torch.float32)
    optimizers = [muon, torch.optim.AdamW(others, lr=0.01)]
    if world < 4:
        weights, state = get_state_dict(model, optimizers)
        dcp.load({"model": weights, "optimizers": state}, checkpoint_id=f"{folder}/saved")
        set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state)
    for step in range(0 if world == 4 else 5, 10):
        if step == 5 and world == 4:
            weights, state = get_state_dict(model, optimizers)
            dcp.save({"model": weights, "optimizers": state}, checkpoint_id=f"{folder}/saved")
        tokens = torch.randint(32, (64,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32).backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
    end = [p.full_tensor() for p in model.parameters()]
    if world == 4 and rank == 0:
        torch.save(end, f"{folder}/end.pt")
    torch.testing.assert_close(end, torch.load(f"{folder}/end.pt"), rtol=1e-4, atol=1e-5) if world < 4 else None

def test_distributed_checkpoint_in_a_script_of_ones_own(tmp_path):
    on_groups(someones_script, str(tmp_path))

def test_a_run_goes_from_fsdp_to_one_rank_to_ddp_and_back():
    """Each goes on from what the one before has saved, and all end as one that nothing disturbed, but for the order of
    fp32 sums, through Newton-Schulz."""
    write_tiny()
    settings = dict(script="train_llama.py", n_ffn=72, tied=True, micro_batch_size=1, checkpoint_interval=2,
                    keep_checkpoints=0, fast_bf16=bool)
    whole = train("alone", **settings)
    on_ranks(4, name="a", fsdp=True, **settings)
    train("b", resume="checkpoints/a/step_00000002.pt", **settings)
    on_ranks(2, name="c", resume="checkpoints/b/step_00000004.pt", **settings)
    on_ranks(4, name="d", resume="checkpoints/c/step_00000006.pt", fsdp=True, **settings)
    for name, part in itertools.product("abcd", ["model", "optimizer"]):
        torch.testing.assert_close(checkpoint(name)[part], whole[part], rtol=1e-3, atol=1e-5)
