"""Matrices whose rows ranks share out, as FSDP2's fully_shard makes them: optim.Muon alone, in a script of one's own
with torch.distributed.checkpoint, and in the train scripts."""
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from common import on_ranks, train, write_tiny
from optim import VARIANTS, Muon, newton_schulz
from test_optim import on_groups, parameters, run, set_gradients

SHAPES = [(24, 16), (24, 16), (10, 24), (1, 5)]  # divided evenly, unevenly, and none for some ranks
FULL = torch.float32
KINDS = [*((variant, "frobenius", FULL) for variant in VARIANTS), ("muon", "match_rms_adamw", FULL),
         ("muon-vs", "original", torch.bfloat16)]
FEW = [("muon-vs", "original", FULL), ("normuon", "frobenius", FULL)]
EVEN = SHAPES[:3]

def steps(kinds, shard=lambda t: t, n=3, split=1, shapes=SHAPES):
    """Each kind is a group of one optimizer."""
    whole = parameters(*shapes * len(kinds))
    params = [nn.Parameter(shard(p.detach())) for p in whole]
    groups = [dict(params=params[i * len(shapes):][:len(shapes)], variant=variant, adjust_lr_fn=scale, ns_dtype=dtype)
              for i, (variant, scale, dtype) in enumerate(kinds)]
    opt = Muon(groups, lr=0.02, power=0.5, split=split, compile=False)
    for step in range(n):
        set_gradients(whole, step)
        for p, q in zip(params, whole):
            p.grad = shard(q.grad)
        if step == 1 < n - 1:
            params[0].grad = None
        opt.step()
    return params, opt

def layouts(world, line):
    """Name, mesh and placements."""
    yield "rows", line, [Shard(0)]
    yield "columns", line, [Shard(1)]
    yield "copies", line, [Replicate()]
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        yield "copies of rows", grid, [Replicate(), Shard(0)]  # hybrid FSDP
        yield "rows and columns", grid, [Shard(0), Shard(1)]  # FSDP, and tensor parallel across columns
        yield "rows of rows", grid, [Shard(0), Shard(0)]  # FSDP, and tensor parallel across rows
        yield "rows in turns", grid, [_StridedShard(0, split_factor=2), Replicate()]

def sharded_is_whole(rank, world, folder):
    """fp32 sums in another order, of norms alone; with bf16 Newton-Schulz a few of its roundings, of the way."""
    alone = torch.load(f"{folder}/alone.pt")
    on = lambda mesh, placements: lambda t: distribute_tensor(t, mesh, placements, src_data_rank=None)
    line = init_device_mesh("cpu", (world,))
    for name, mesh, placements in layouts(world, line):
        kinds = KINDS if name == "rows" else FEW
        whole, state = alone[len(kinds)]
        params, opt = steps(kinds, on(mesh, placements))
        for i, (p, q, start) in enumerate(zip(params, whole, parameters(*SHAPES * len(kinds)))):
            momentum = opt.state[p]["momentum"]
            assert list(p.placements) == list(momentum.placements) == placements
            assert p.to_local().shape == momentum.to_local().shape
            if kinds[i // len(SHAPES)][2] == FULL:
                torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6, msg=name)
            else:
                assert (p.full_tensor() - q).norm() <= 0.03 * (q - start).norm()
        saved = opt.full_state_dict()
        if rank == 0:
            torch.testing.assert_close(saved["state"], state, rtol=1e-4, atol=1e-6)
        params, _ = steps(FEW, on(mesh, placements), n=2, split=2, shapes=EVEN)
        torch.testing.assert_close([p.full_tensor() for p in params], alone["split"], rtol=1e-5, atol=1e-6, msg=name)

    p, q = parameters((8, 16)) + parameters((8, 16))  # a gradient that is the sum of what the ranks have
    part = nn.Parameter(on(line, [Replicate()])(p.detach()))
    set_gradients([q], 0)
    part.grad = DTensor.from_local(q.grad / world, line, [Partial()])
    for opt in Muon([part], lr=0.1, ns_dtype=torch.float32), Muon([q], lr=0.1, ns_dtype=torch.float32, compile=False):
        opt.step()
    torch.testing.assert_close(part.full_tensor(), q, rtol=1e-4, atol=1e-6)

    rows = nn.Parameter(on(line, [Shard(0)])(q.detach()))  # what a wrapper keeps is placed like its parameter
    assert newton_schulz(1e6 * rows, steps=0, dtype=torch.float16).full_tensor().isfinite().all()
    opt = Muon([rows])
    rows.grad = rows.detach().clone()
    opt.step()  # a whole state is loaded into one in parts
    opt.state[rows]["slow_copy"] = rows.detach().clone()
    saved = [opt.full_state_dict()]
    dist.broadcast_object_list(saved)
    opt.load_state_dict(saved[0])
    assert opt.state[rows]["slow_copy"].placements == rows.placements and opt.state[rows]["slow_copy"].equal(rows)

def test_sharded_is_whole(tmp_path):
    alone = {"split": [p.detach() for p in steps(FEW, n=2, split=2, shapes=EVEN)[0]]}
    for kinds in KINDS, FEW:
        params, opt = steps(kinds)
        alone[len(kinds)] = [p.detach() for p in params], opt.full_state_dict()["state"]
    torch.save(alone, tmp_path / "alone.pt")
    on_groups(sharded_is_whole, str(tmp_path))

class Sent(TorchDispatchMode):
    """Counts the bytes that this rank gives to collectives."""
    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first to what it does on this rank
        if function.namespace in ("c10d", "_c10d_functional") and not re.search("_wrap|wait", str(function)):
            self.total += sum(t.nbytes for t in args if torch.is_tensor(t))
        return function(*args, **kwargs or {})

def bytes_of_a_step(rank, world, folder):
    """Of muon-vs: 8 matrices, of which a rank has 16 rows of 32; those travel there and back in ns_dtype, as if there
    were as many matrices for each rank. Batches sharded by expert do not travel."""
    mesh, number = init_device_mesh("cpu", (world,)), -(-8 // world) * world
    for shape, dtype, expected in (((16 * world, 32), torch.bfloat16, number * 2 * 2 * 16 * 32),
                                   ((16 * world, 32), torch.float32, number * 2 * 4 * 16 * 32),
                                   ((world, 16, 32), torch.float32, 0)):
        params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None))
                  for p in parameters(*[shape] * 8)]
        for p in params:
            p.grad = torch.ones_like(p)
        with Sent() as sent:
            Muon(params, ns_dtype=dtype).step()
        assert sent.total == expected

def two_pairs(rank, world, folder):
    """With a process group of its own each pair trains its own weights; all four ranks then have two results."""
    if world < 4:
        return
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    params = parameters((16, 8), (8, 16), (16, 8), seed=rank // 2)
    opt = Muon(params, process_group=pairs[rank // 2], compile=False)
    run(opt, params, 3, start=rank // 2)
    everyone, saved = [None] * 4, opt.full_state_dict()
    dist.all_gather_object(everyone, [p.tolist() for p in params])
    assert everyone[0] == everyone[1] != everyone[2] == everyone[3]
    assert len(opt.state) == (2, 1)[rank % 2] and len(saved) == (2, 0)[rank % 2]
    assert rank % 2 or saved["state"][0]["momentum"].equal(opt.state[params[0]]["momentum"])

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
            weights, state = get_state_dict(model, optimizers, options=StateDictOptions(cpu_offload=True))
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

def all_three(rank, world, folder):
    for part in bytes_of_a_step, two_pairs, someones_script:
        part(rank, world, folder)

def test_on_four_three_and_two_ranks(tmp_path):
    on_groups(all_three, str(tmp_path))

def in_fp32(module):
    module.optim.fast_dtype = lambda device: torch.float32

def test_a_run_goes_from_fsdp_to_one_rank_to_ddp_and_back(monkeypatch):
    """Each goes on from what the one before has saved, and all end as one that nothing disturbed, but for the order of
    fp32 sums, through Newton-Schulz."""
    monkeypatch.setattr("optim.fast_dtype", None)  # set in this process too, and so set back
    write_tiny()
    settings = dict(script="train_llama.py", n_ffn=72, tied=True, micro_batch_size=1, checkpoint_interval=2,
                    keep_checkpoints=0, meddle=in_fp32)
    whole = train("alone", **settings)
    for saved in (on_ranks(4, name="a", fsdp=True, **settings),
                  train("b", resume="checkpoints/a/step_00000002.pt", **settings),
                  on_ranks(2, name="c", resume="checkpoints/b/step_00000004.pt", **settings),
                  on_ranks(4, name="d", resume="checkpoints/c/step_00000006.pt", fsdp=True, **settings)):
        for part in "model", "optimizer":
            torch.testing.assert_close(saved[part], whole[part], rtol=1e-3, atol=1e-5)
