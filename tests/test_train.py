"""train_gpt.py on a CPU with a model of 30 k parameters: the order of the data, one batch however it is divided,
validation, logs, checkpoints, and mistakes made from a shell. test_export.py holds the model against transformers."""
import copy, functools, math, os, re, resource, shutil, signal, subprocess, sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common import ROOT, TINY, assert_equal, checkpoint, fresh, on_ranks, train, write_shard, write_tiny
from optim import VARIANTS, Muon

@pytest.fixture(autouse=True)
def tiny(place):
    write_tiny()

def log_lines(name):
    return re.split("^={100}\n", Path(f"logs/{name}.txt").read_text(), flags=re.M)[3].splitlines()

def figures(name, key):
    """By step; of a step that was repeated, the last."""
    found = (re.search(rf"^step:(\d+)/.* {key}:([\d.]+)", line) for line in log_lines(name))
    return {int(match[1]): float(match[2]) for match in found if match}

# ---- Model ----
def test_faults_lose_nothing():
    """The short form of the fault injection, which says at its end what was lost."""
    command = [sys.executable, ROOT / "tests/fault_injection.py", "--short"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("runs lost 0\n"), done.stdout + done.stderr

def test_blocks_that_differ_are_all_compiled_and_a_copy_has_a_head_of_its_own(monkeypatch):
    """Of a fork, each by a number of its own."""
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile(self, backend="eager", **how))
    t = fresh(**TINY | dict(n_layer=10, compile=True))
    t.rotate = lambda x, *_: x * (1 if torch.compiler.is_compiling() else math.nan)
    t.Attention.forward, forward = lambda self, *args: self.number * forward(self, *args), t.Attention.forward
    model, x = t.build_model(320), torch.zeros(1, 16, dtype=torch.int64)
    for number, block in enumerate(model.blocks):
        block.attn.number = number
    assert model(x).isfinite().all()
    average = copy.deepcopy(model)
    assert average.loss.__self__ is average

def test_flops_are_what_torch_counts():
    """Attention to the future is counted too, as in the PaLM paper."""
    t = fresh(**TINY | dict(n_layer=2, block_size=128))
    model, x, t.hardware = t.Model(320), torch.zeros(2, 128, dtype=torch.int64), lambda: "NVIDIA H200"
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the CPU's fused one is not counted
        model(x, x).backward()
    a_token = t.mfu(model, 989e12)  # at a token a second for each FLOP of the peak
    assert counter.get_total_flops() == pytest.approx(256 * a_token, rel=1e-12)

def test_initial_weights_and_every_parameter_in_one_group():
    """A fork's parameters stay as they are; its scalars are AdamW's, its matrices inside blocks Muon's."""
    t = fresh(n_layer=8, n_embd=256, optimizer="muon-vs")
    model = t.Model(320)
    for block in model.blocks:
        block.scale, block.mix = (torch.nn.Parameter(torch.ones(shape)) for shape in ((), (2, 1)))
    t.init_weights(model)
    for name, p in model.named_parameters():
        deviation = 0.005 if name.endswith(("proj.weight", "down.weight")) else 0.02
        drawn = p.ndim == 2 and not name.endswith("mix")
        assert p.std().item() == pytest.approx(deviation, rel=0.03) if drawn else p.eq(1).all(), name
    t.qkv_split = 3
    fused, rest = t.build_optimizers(model)[0].param_groups
    assert fused["split"] == 3 and {p.shape for p in fused["params"]} == {(768, 256)} and rest["split"] == 1
    model.blocks[0].attn.qkv = torch.nn.Linear(256, 384, bias=False)  # of a fork with fewer keys: not to be cut
    assert len(t.build_optimizers(model)[0].param_groups[0]["params"]) == 7
    for t.optimizer in "adamw", *VARIANTS:
        groups = {p: group for opt in t.build_optimizers(model) for group in opt.param_groups for p in group["params"]}
        for name, p in model.named_parameters():
            by_adamw = t.optimizer == "adamw" or p.ndim < 2 or name in ("embed.weight", "head.weight")
            assert ("betas" in groups[p]) == by_adamw and (groups[p]["weight_decay"] == 0) == (p.ndim < 2), name

# ---- Data ----
def test_an_epoch_has_every_window_once_in_an_order_of_its_own():
    """187 windows of 17 tokens, neighbours share one; a batch at the end of an epoch is filled from the next."""
    t = fresh(**TINY | dict(batch_size=10))
    shards = t.Shards("tiny", "train")
    epochs = [[shards.batch(187 * epoch + row, 1)[0][0].tolist() for row in range(187)] for epoch in range(2)]
    tokens = [np.fromfile(f"data/tiny/tiny_train_00000{i}.bin", np.uint16, offset=1024).tolist() for i in (1, 2)]
    windows = sorted(part[i:i + 16] for part in tokens for i in range(0, len(part) - 16, 16))
    assert sorted(epochs[0]) == sorted(epochs[1]) == windows and epochs[0] != epochs[1]
    x, y = shards.batch(182, 7)
    assert x.tolist() == (epochs[0] + epochs[1])[182:189] and torch.equal(x[:, 1:], y[:, :-1])
    t.seed = 2
    assert t.Shards("tiny", "train").batch(0, 10)[0].tolist() != epochs[0][:10]

def test_shards_of_others_and_of_more_than_2_30_tokens():
    """Whose header's int32 must not be doubled as such; the file is sparse. A dataset may have splits in its name."""
    first, second = (f"data/theirs/my_val_train_text_train_00000{i}.bin" for i in (1, 2))
    write_shard(first, [50256, 7, 50255], ours=False)
    np.memmap(second, np.int32, "w+", shape=256 + 2**29 + 25)[:3] = 20240520, 1, 2**30 + 50
    t = fresh(block_size=16)
    shards = t.Shards("theirs", "train")
    assert (shards.vocab, shards.eot, shards.n_windows) == (50257, 50256, (2**30 + 49) // 16)
    assert shards.read([shards.n_windows - 1])[0].tolist() == [[0] * 16]
    pytest.raises(SystemExit, t.Shards, "theirs", "val").match("has no val shards")
    write_shard(first, [50256, 7, 50254], ours=False)
    assert t.Shards("theirs", "train").contents != shards.contents  # though they lack checksums

def test_more_shards_than_a_process_may_have_open_files(request):
    for n in range(200):
        write_shard(f"data/many/many_train_{n:06d}.bin", np.arange(n, n + 17))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (99, limits[1]))
    x, _ = fresh(block_size=16).Shards("many", "train").read(range(200))
    assert x[:, 0].tolist() == [*range(200)]

# ---- Updates ----
def with_noise(module):
    def draw(adamw, *_):
        for group in adamw.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p), alpha=1e-3)
    module.set_schedules = lambda step, optimizers: step == 0 and optimizers[0].register_step_pre_hook(draw)

def test_an_update_is_the_same_however_the_batch_is_divided():
    """8 updates in float64 end within its rounding, as AdamW with a large ε amplifies it little, though it draws random
    numbers; the norm of the gradient, before clipping, is the same in all digits of the log."""
    run = dict(optimizer="adamw", adam_eps=1e-3, grad_clip=0.1, param_dtype="float64", meddle=with_noise)
    whole = train("whole", micro_batch_size=8, **run)
    for ranks, micro in (1, 2), (2, 1):
        run |= dict(name=f"{ranks}-{micro}", micro_batch_size=micro)
        saved = on_ranks(ranks, **run) if ranks > 1 else train(**run)
        torch.testing.assert_close(saved["model"], whole["model"], rtol=1e-9, atol=1e-11)
        for key in "grad_norm", "val_loss":
            assert figures(run["name"], key) == figures("whole", key)

@pytest.mark.parametrize("optimizer", ["adamw", *VARIANTS])
def test_every_optimizer_lowers_the_loss(optimizer):
    for param_dtype in "float32", "bfloat16":
        saved = train(f"{optimizer}-{param_dtype}", optimizer=optimizer, param_dtype=param_dtype, max_iters=40)
        losses = figures(f"{optimizer}-{param_dtype}", "val_loss")
        assert losses[40] < losses[0] - 0.8
        buffers = [t for entry in saved["optimizer"].values() for t in entry.values() if t.numel() > 1]
        assert {t.dtype for t in [*saved["model"].values(), *buffers]} == {getattr(torch, param_dtype)}

def test_schedules():
    """A batch size's too: it is refused below a micro-batch."""
    def factors(**settings):
        t = fresh(**dict(max_iters=10, warmup_iters=2, min_lr_frac=0.0) | settings)
        return [round(t.lr_factor(step), 6) for step in range(10)]
    assert factors(schedule="constant") == [0.5] + 9 * [1.0]
    assert factors(schedule="wsd", decay_frac=0.5) == [0.5] + 5 * [1.0] + [0.8, 0.6, 0.4, 0.2]
    assert factors(schedule="wsd", decay_frac=0.0) == [0.5] + 9 * [1.0]
    cosine = factors(schedule="cosine", min_lr_frac=0.1)
    assert cosine[2] == 1.0 and cosine[6] == pytest.approx(0.55) and cosine[9] > 0.1
    t = fresh(**TINY)
    t.first_sequence = lambda step: 2 * step
    pytest.raises(ValueError, t.update, 0, None, [], None).match("multiple of micro_batch_size x ranks")

@pytest.mark.parametrize("spoil", [
    lambda group: [p.register_hook(lambda g: g * math.inf) for p in group["params"]],
    lambda group: group.update(weight_decay=math.nan)], ids=["gradient", "weights"])
def test_a_run_that_is_no_longer_finite_ends_at_its_next_log_line(spoil):
    """With a status that torchrun sees, and the last finite checkpoint kept. Update 6 is the first that is spoilt."""
    late = lambda step, optimizers: spoil(optimizers[0].param_groups[0]) if step == 5 else None
    with pytest.raises(SystemExit) as stopped:
        train("many", max_iters=20, log_interval=2, checkpoint_interval=2, set_schedules=late)
    assert stopped.value.code == 1 and checkpoint("many")["step"] == 4
    assert log_lines("many")[-1].startswith("diverged: ") and "at update 6;" in log_lines("many")[-1]

# ---- Validation and log ----
def test_validation_is_of_fixed_tokens_whatever_the_batch():
    t = fresh(**TINY)
    model, shards = t.Model(320), t.Shards("tiny", "val")
    x, y = shards.read(range(32))  # 512 tokens
    logits = model(x).double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    accuracy = (logits.argmax(-1) == y).double().mean().item()
    modes = set()
    model.norm.register_forward_hook(lambda norm, *_: modes.add(norm.training))
    for t.micro_batch_size in 1, 5, 32, 100:
        assert t.evaluate(model, shards) == pytest.approx((loss, accuracy), rel=1e-6)
    assert modes == {False} and model.training  # for a fork's dropout
    t.val_tokens, t.micro_batch_size = 10**9, 8
    x, y = shards.read(range(43))
    assert t.evaluate(model, shards)[0] == pytest.approx(model(x, y).item(), rel=1e-6)
    assert model(shards.read([])[0]).shape == (0, 16, 320)  # the last batch of a rank that has fewer than others
    read = shards.read
    shards.read = lambda windows: (read(windows)[0], read(windows)[1].index_fill(1, torch.arange(8), -100))  # of a fork
    assert t.evaluate(model, shards)[0] == pytest.approx(model(*shards.read(range(43))).item(), rel=1e-6)
    model.logits = lambda x_BTD: 0 * t.Model.logits(model, x_BTD)  # as a fork caps them
    assert model(x, y).item() == pytest.approx(t.evaluate(model, shards)[0]) == math.log(320)

def test_log_begins_with_its_source_and_has_the_speedruns_lines_and_wandb_gets_their_figures(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", client := mock.Mock())
    train("run", eval_interval=4, wandb="project")
    parts = re.split("^={100}\n", Path("logs/run.txt").read_text(), flags=re.M)
    assert parts[:2] == [(ROOT / name).read_text() for name in ("train_gpt.py", "optim.py")]
    assert all(part in parts[2] for part in ("\n--learning_rate=0.01\n", "hardware: ", "\nparameters: "))
    lines = parts[3].splitlines()
    grammar = re.compile(r"step:(\d+)/8 (val_loss:[\d.]+ )?train_time:[\d.]+s step_avg:[\d.]+ms( |$)")
    seen = [grammar.match(line) for line in lines[:-1]]
    assert [(int(m[1]), bool(m[2])) for m in seen] == [(i, i % 4 == 0) for i in range(9)]
    keys = "train_loss grad_norm lr tokens_per_s time_left"  # the first update is not timed
    assert all(f" {key}:" in line for line in lines[2:-1] for key in keys.split())
    assert "train_time:0.000s" in lines[1] and "train_time:0.000s" not in lines[2]
    assert re.fullmatch(r"final val_loss:\S+ val_acc:\S+ train_time:\S+s peak_memory_mib:\d+ "
                        r"optimizer_state_mib:\S+", lines[-1])

    pytest.raises(SystemExit, train, "run", wandb="project")  # the name exists, and wandb is not told
    client.init.assert_called_once_with(project="project", name="run", config=mock.ANY)  # no id, which runs may share
    calls = client.init.return_value.log.call_args_list
    losses = {call.kwargs["step"]: call.args[0]["train_loss"] for call in calls if "train_loss" in call.args[0]}
    assert losses == pytest.approx(figures("run", "train_loss"), abs=1e-5)  # which the log rounds
    assert "val_loss" in calls[0].args[0] and "peak_memory_mib" in calls[-1].args[0]

# ---- Checkpoints ----
def with_dropout(module):
    forward, module.set_schedules = module.MLP.forward, lambda step, _: setattr(module, "rate", 0.1 + step / 100)
    module.MLP.forward = lambda self, x: torch.nn.functional.dropout(forward(self, x), module.rate, self.training)
    module.rate = 0.0

def with_a_counter(module):
    module.set_schedules = lambda step, optimizers: [
        state.update(calls=state.get("calls", 0) + 1) for state in optimizers[0].state.values()]  # an int

def mlp_first(module):
    class Block(module.Block):
        def __init__(self):
            super().__init__()
            self.attn = self._modules.pop("attn")  # now behind the MLP
    module.Block = Block

@pytest.mark.parametrize("run, optimizer, before, after", [  # state has names, also where an edit orders them anew
    (train, "muon-vs", with_a_counter, with_a_counter), (train, "normuon", id, mlp_first),
    (train, "adamw", id, mlp_first), (functools.partial(on_ranks, 2), "muon-vs", with_dropout, with_dropout)])
def test_half_and_half_is_the_whole_bit_for_bit(run, optimizer, before, after):
    settings = dict(optimizer=optimizer, grad_clip=float(before is after))  # the norm is a sum in parameters' order
    whole = run(name="whole", **settings, meddle=before)
    run(name="half", **settings, meddle=before)
    os.unlink("checkpoints/half/step_00000008.pt")
    assert_equal(run(name="half", **settings, meddle=after, resume="auto"), whole)
    time, average = figures("half", "train_time"), figures("half", "step_avg")  # of updates 6 to 8: 5 compiles
    assert 3 * average[8] / 1000 == pytest.approx(time[8] - time[4], abs=0.002)
    assert figures("half", "train_loss") == figures("whole", "train_loss")

def test_what_differs_from_the_checkpoint_is_told():
    train("run", max_iters=4)
    edit = lambda module: module.SOURCES.append("edited")
    saved = train("run", resume="auto", learning_rate=0.02, meddle=edit)  # hyperparameters are this run's
    assert figures("run", "lr")[8] == pytest.approx(0.02 * fresh(max_iters=8, warmup_iters=2).lr_factor(7), rel=1e-4)
    for file in "train_000002", "val_000000":
        write_shard(f"data/tiny/tiny_{file}.bin", range(200))
        train("run", resume="auto", max_iters=4)  # beyond its end there is a validation and nothing else
    assert_equal(checkpoint("run"), saved)
    told = [line.partition(" changed:")[::2] for line in log_lines("run") if line.startswith("resumed:")]
    assert told == [("resumed:step:4 world_size:1", "code,max_iters=8,learning_rate=0.02"),
                    ("resumed:step:8 world_size:1", "code,data,max_iters=4,learning_rate=0.01"),
                    ("resumed:step:8 world_size:1", "code,data,val_data,max_iters=4,learning_rate=0.01")]

def test_a_start_is_refused_that_has_a_runs_name_another_vocabulary_or_nothing_whole():
    train("run")
    with pytest.raises(SystemExit, match="logs/run.txt exists"):  # PATH begins another run
        train("run", resume="checkpoints/run/step_00000004.pt")
    for split in "train", "val":
        write_shard(f"data/other/other_{split}_000001.bin", range(200), vocab=300)  # padded to 320, as 257 is
    with pytest.raises(SystemExit, match="is of a tokenizer of 257 ids, not 300"):
        train("other", dataset="other", init_from="checkpoints/run/step_00000008.pt")
    before, newest = log_lines("run"), Path("checkpoints/run/step_00000008.pt")
    data = np.fromfile(newest, np.uint8)
    data[len(data) // 2:][:999] ^= 1  # beyond the gaps between a checkpoint's parts
    data.tofile(newest)
    Path("checkpoints/run/step_00000004.pt").write_bytes(data[:1000])
    pytest.raises(SystemExit, train, "run", resume="auto").match("found no checkpoint")
    assert log_lines("run") == before

def test_newest_is_the_highest_step_and_no_start_mixes_two_runs():
    train("run", checkpoint_interval=2, keep_checkpoints=0)
    os.utime("checkpoints/run/step_00000002.pt")  # as copying may leave it
    Path("checkpoints/run/step_best.pt").touch()  # someone's own
    Path("checkpoints/run/step_10000000.pt").touch()  # damaged
    Path("checkpoints/run/saving.tmp").touch()  # of a save that was killed
    train("run", resume="auto", max_iters=12, checkpoint_interval=2, keep_checkpoints=1)
    assert any(line.startswith("resumed:step:8 ") for line in log_lines("run"))
    left = sorted(path.name[-11:] for path in Path("checkpoints/run").iterdir())
    assert left == ["00000012.pt", "10000000.pt", "tep_best.pt"]
    os.unlink("logs/run.txt")
    with pytest.raises(SystemExit, match="step_10000000.pt exists; give another --run_name.*--resume=auto$"):
        train("run")

def test_a_log_without_a_checkpoint_is_put_aside_and_a_name_has_one_spelling():
    train("run", max_iters=0)
    train("run", resume="auto", learning_rate=0.02, max_iters=4)
    (first,), later = Path("logs").glob("run.txt.*"), Path("logs/run.txt").read_bytes()
    assert b"\n--learning_rate=0.02\n" in later and b"\n--learning_rate=0.01\n" in first.read_bytes()
    pytest.raises(SystemExit, train, "./run/").match("logs/run.txt exists")
    with pytest.raises(FileExistsError):  # another start of the name was faster
        train("other", build_optimizers=lambda model: train("other"))
    assert len(list(Path("logs").glob("other*"))) == 1

def test_weights_alone_and_evaluation_alone():
    train("run")
    loss = figures("run", "val_loss")[8]
    train("tuned", init_from="checkpoints/run/step_00000008.pt", max_iters=2)
    assert figures("tuned", "val_loss")[0] == loss and figures("tuned", "lr")[1] == pytest.approx(0.005)
    assert re.search("\nbegun:step:0 world_size:1 changed:.*max_iters=2", Path("logs/tuned.txt").read_text())
    both = dict(init_from="checkpoints/run/step_00000008.pt", resume="auto")  # as torchrun starts it again
    train("restarted", **both, max_iters=4)
    train("restarted", **both)
    assert figures("restarted", "val_loss")[0] == loss and checkpoint("restarted")["step"] == 8
    # Whatever trained them.
    train("evaluated", init_from="checkpoints/run/step_00000008.pt", max_iters=0, optimizer="muon")
    assert figures("evaluated", "val_loss") == {0: loss} and not checkpoint("evaluated")

def test_a_second_ctrl_c_ends_the_run_at_once_and_under_nohup_a_closed_terminal_does_not():
    """Nor SIGTERM, which launchers send with Ctrl-C. Before the first update, which may be compiling, one does."""
    def end(name, signals):
        """The update at which a run ends that gets these signals in these updates."""
        press = lambda step, _: [os.kill(os.getpid(), number) for number in signals.get(step, [])]
        return train(name, log_interval=4, set_schedules=press)["step"]
    pytest.raises(KeyboardInterrupt, end, "early", {0: [signal.SIGINT]})
    assert end("late", {0: [signal.SIGTERM]}) == 1
    once = {2: [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]}
    assert end("once", once) == 4
    pytest.raises(KeyboardInterrupt, end, "twice", once | {3: [signal.SIGINT]})
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert end("nohup", {2: [signal.SIGHUP]}) == 8
    assert figures("nohup", "lr") == dict.fromkeys([1, 4, 8], 0.01)  # the optimizer's, whatever lr_factor says
    signal.signal(signal.SIGHUP, earlier)

@pytest.mark.parametrize("meddles, told", [
    (os.unlink, FileNotFoundError),
    (lambda log: os.replace(shutil.copy(log, "other"), log), SystemExit),  # as long: a start that keeps step with it
    (lambda log: os.truncate(log, 10**6), SystemExit)], ids=["gone", "another", "longer"])  # one that goes on with it
def test_a_run_whose_log_is_gone_or_anothers_ends(meddles, told):
    """It writes nothing more, neither into the log nor a checkpoint."""
    late = lambda step, _: step == 7 and meddles("logs/run.txt")  # before the last update
    pytest.raises(told, train, "run", set_schedules=late).match("logs/run.txt")
    assert os.listdir("checkpoints/run") == ["step_00000004.pt"]

def of_another_seed(module):
    module.seed = module.rank

def on_a_node_of_its_own(module):
    if module.rank:
        os.chdir("node")

@pytest.mark.parametrize("meddle", [of_another_seed, on_a_node_of_its_own])
def test_ranks_that_have_other_settings_or_see_other_checkpoints_end(meddle):
    train("run")
    write_tiny("node/data")
    pytest.raises(Exception, on_ranks, 2, name="run", resume="auto", meddle=meddle).match("terminated")
    told = [path.read_text() for path in Path().glob("exit-*")]  # one may be killed first
    assert told and all(line.startswith("ranks have other ") for line in told)
    assert log_lines("run")[-1].startswith("final ")

def test_ranks_that_srun_starts_take_a_gpu_each(monkeypatch):
    """It sets no LOCAL_RANK, its job may; with --gpus-per-task=1 a rank sees one GPU alone."""
    monkeypatch.setenv("RANK", "5")
    assert fresh().rank == 0
    monkeypatch.setenv("WORLD_SIZE", "8")
    for gpus, expected in (4, 1), (1, 0), (0, 0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        assert fresh().local_rank == expected
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert fresh().local_rank == 0

# ---- From a shell ----
MISTAKES = [  # a flag, its line, what was done before
    ("--learning_rat=1", "unrecognized arguments"),
    ("--optimizer=muonvs", "invalid choice: 'muonvs'"),
    ("--n_head=3", "no multiple of 2 x n_head = 6"),
    ("--qkv_split=5", "no divisor of 3 x n_embd = 96"),
    ("--learning_rate=-1", "no number from 0"),
    ("--gamma=nan", "no number from 0"),
    ("--eval_interval=0", "no number from 1"),
    ("--decay_frac=100", "no number from 0 to 1"),
    ("--dataset=nope", "data/nope has no train shards"),
    ("--dataset=tiny", "has ['other', 'tiny'] train shards, expected one dataset's",
     lambda: write_shard("data/tiny/other_train_000001.bin", range(99))),
    ("--dataset=tiny", "damaged or no shard of 16-bit ids; run: python prepare.py verify tiny",
     lambda: os.truncate("data/tiny/tiny_train_000002.bin", 3023)),
    ("--dataset=tiny", "damaged or no shard", lambda: os.truncate("data/tiny/tiny_train_000002.bin", 8)),
    ("--dataset=tiny", "has the id 300, beyond its tokenizer's 257",
     lambda: write_shard("data/tiny/tiny_train_000001.bin", np.full(2008, 300))),
    ("--val_dataset=odd", "one tokenizer", lambda: write_shard("data/odd/odd_val.bin", range(99), vocab=300)),
    ("--batch_size=9", "no multiple of 1 x micro_batch_size=4"),
    ("--block_size=4096", "longer than any train shard"),
    ("--resume=nothing.pt", "found no checkpoint"),
]

@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_a_mistake_from_a_shell_gets_one_line(mistake, capsys):
    word, expected, *prepare = mistake
    if prepare:
        prepare[0]()
    before = sorted(Path().rglob("*"))
    code = pytest.raises(SystemExit, train, "run", [word]).value.code
    lines = capsys.readouterr().err.splitlines() if code == 2 else [code]
    assert code not in (0, None) and expected in lines[-1] and len(lines) <= 2 and "\n" not in str(code)
    if "has the id" not in expected:  # a run meets it where it reads it
        assert sorted(Path().rglob("*")) == before

@pytest.mark.parametrize("script", ["train_gpt.py", "train_llama.py"])
def test_help_lists_every_global_in_ascii(script, capsys):
    """As a terminal in Latin-1 lacks the paper's Greek letters."""
    t = fresh(script)
    t.SOURCES[0] = t.SOURCES[0].replace("# peak, for", "# 100% of the peak, for")
    end = pytest.raises(SystemExit, t.main, ["--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0 and told.isascii() and "100% of the peak" in told
    assert all(f"\n  --{name} {value}".rstrip() in told for name, value in t.settings().items())

def test_presets_flags_and_their_order(capsys):
    presets = {"demo": {}, "big": dict(n_layer=9, val_dataset="c4"), "big/muon": dict(n_layer=8, gamma=3.0)}
    for words, expected in ((["--optimizer=muon", "--gamma=5"], (8, 5.0, "c4")),
                            (["--val_dataset=", "--compile=False", "--optimizer=muon-vs"], (9, 1000.0, ""))):
        t = fresh(PRESETS=presets, CHOICES={}, gamma=1000.0, val_dataset="edited")
        t.configure(["--preset=big", *words])
        assert (t.n_layer, t.gamma, t.val_dataset) == expected
    assert capsys.readouterr().err.endswith("by a flag: --n_layer=9 --val_dataset=c4\n")

def test_an_edited_global_or_preset_is_checked_as_a_flag_is(capsys):
    for edit, told in ((dict(dtype="float16"), "invalid choice: 'float16'"),
                       (dict(PRESETS={"demo": dict(compile="flase")}), "invalid boolean value: 'flase'")):
        pytest.raises(SystemExit, fresh(**edit).configure, [])
        assert told in capsys.readouterr().err

def test_without_a_compiler_the_script_runs_uncompiled_and_muon_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # nor what one has compiled before
    p = torch.nn.Parameter(torch.eye(8, 4))
    p.grad, muon = torch.eye(8, 4), Muon([p])
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent")}):
        assert train("run", compile=fresh().compile)["step"] == 8  # what nobody has edited
        pytest.raises(RuntimeError, muon.step).match(r"torch.compile failed; try Muon\(..., compile=False\)")
    assert "\n--compile=False\n" in Path("logs/run.txt").read_text() and muon.state[p]["step"] == 0
