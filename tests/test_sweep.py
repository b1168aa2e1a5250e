"""
tools/sweep.py over a tiny stand-in for a train script: grids and names, skipping, resuming, failures, pinning, Ctrl-C.

    python -m pytest tests/test_sweep.py        # a few seconds
"""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from common import ROOT, write_shard

import sweep  # noqa: E402

TRAIN = os.path.join(ROOT, "train_gpt.py")

FAKE = '''"""A stand-in."""
# =====================================================================================================================
# =====================================================================================================================
# =====================================================================================================================
"""
final val_loss:0.0 is only quoted here
"""
import os, signal, sys, time
flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
if flags.get("optimizer") == "broken":
    sys.exit("train_fake.py: error: no such optimizer")
log = os.path.join(flags.get("log_dir", "logs"), flags["run_name"] + ".txt")
start, ends = 0, []
if os.path.exists(log):
    start = int(open(log).read().rsplit("step:", 1)[1].split("/")[0])
else:
    with open(log, "w") as f:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        f.write(open(__file__).read() + "=" * 100 + "\\n# optim\\n" + "=" * 100 + f"\\ncores: {cores} "
                f"threads: {os.environ['OMP_NUM_THREADS']}\\nargs: {sys.argv[1:]}\\n" + "=" * 100 + "\\n")
signal.signal(signal.SIGINT, lambda *_: ends.append(1))
for step in range(start + 1, 5):
    with open(log, "a") as f:
        f.write(f"step:{step}/4 val_loss:1.0 train_time:1.0s\\n")
    time.sleep(float(flags.get("delay", 0)))
    if ends:
        open(log, "a").write("interrupted\\n")
        sys.exit(130)
open(log, "a").write("final val_loss:1.0\\n")
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sweep, "gpus", lambda: [])
    (tmp_path / "train_fake.py").write_text(FAKE)
    return tmp_path


def test_lists_ranges_and_brackets():
    assert sweep.parse(["--seed=1..3,7", "--betas=(0.9,0.95),(0.8,0.98)", "--optimizer=muon"]) == {
        "seed": ["1", "2", "3", "7"], "betas": ["(0.9,0.95)", "(0.8,0.98)"], "optimizer": ["muon"]}


def test_names_are_readable_and_safe():
    settings = {"seed": "3", "preset": "demo", "optimizer": "muon-nsr", "gamma": "1000", "log_dir": "elsewhere"}
    assert sweep.run_name("train_gpt.py", settings) == "gpt-demo-muon-nsr-gamma1000-seed3"
    settings = {"repeat": "2", "dataset": "x/y z", "seed": "1"}
    assert sweep.run_name("a/train_llama.py", settings) == "llama-datasetx_y_z-seed1-repeat2"
    assert sweep.run_name("train_gpt.py", {"b": "2", "a": "1"}) == sweep.run_name("train_gpt.py", {"a": "1", "b": "2"}) == "gpt-a1-b2"
    many = {f"setting{i}": str(i) for i in range(30)}
    names = {sweep.run_name("train_gpt.py", many | {"seed": "1", "setting0": v}) for v in "12"}
    assert len(names) == 2 and all(len(name) < 40 for name in names)


def test_studies():
    seeds = sweep.grid("train_gpt.py", "seeds", {"preset": ["demo"], "seed": ["1", "2"]})
    assert len(seeds) == 12 and list(seeds)[:2] == ["gpt-demo-muon-seed1", "gpt-demo-adamuon-seed1"]    # seed by seed
    gamma = sweep.grid("train_gpt.py", "gamma", {"gamma": ["1", "5"]})
    assert list(gamma) == ["gpt-muon-nsr-gamma1-seed1", "gpt-muon-nsr-gamma5-seed1", "gpt-muon-seed1",
                           "gpt-adamuon-seed1", "gpt-muon-vs-seed1"]
    repeat = sweep.grid("train_gpt.py", "repeat", {})
    assert repeat["gpt-muon-vs-seed1-repeat2"] == repeat["gpt-muon-vs-seed1"] == {"seed": "1", "optimizer": "muon-vs"}
    assert all(sweep.grid("train_gpt.py", study, {}) for study in sweep.STUDIES)


def test_runs_skips_resumes(fake, capsys):
    args = ["train_fake.py", "--optimizer=muon,muon-vs", "--seed=1..2"]
    assert sweep.main(args) == 0
    logs = sorted(p.name for p in (fake / "logs").iterdir())        # no .out is left of runs that succeeded
    assert logs == [f"fake-{o}-seed{s}.txt" for o in ("muon", "muon-vs") for s in (1, 2)]
    assert capsys.readouterr().out.endswith("4 runs: 4 finished, 0 failed\n")
    text = (fake / "logs/fake-muon-seed1.txt").read_text()
    assert "'--seed=1', '--optimizer=muon', '--run_name=fake-muon-seed1', '--resume=auto'" in text
    (fake / "logs/fake-muon-seed1.txt").write_text(text[:text.index("step:3/4")])      # as if it had been killed
    before = (fake / "logs/fake-muon-seed2.txt").stat().st_mtime_ns
    assert sweep.main(args) == 0 and "4 runs, 3 of them finished before" in capsys.readouterr().out
    assert (fake / "logs/fake-muon-seed1.txt").read_text() == text
    assert (fake / "logs/fake-muon-seed2.txt").stat().st_mtime_ns == before


def test_two_sweeps_may_share_a_run(fake, capsys, monkeypatch):
    """One that another sweep has ended meanwhile is not begun; one that both run may have lost its .out to the other."""
    ended = fake / "logs/fake-a2-seed1.txt"
    sections = f"\n{'=' * 100}\n".join(["a", "b", "c", "step:4/4 val_loss:1.0\nfinal val_loss:1.0\n"])
    start = sweep.Run.start

    def starting(run, place):
        start(run, place)
        run.out.unlink()
        ended.write_text(sections)
    monkeypatch.setattr(sweep.Run, "start", starting)
    assert sweep.main(["train_fake.py", "--a=1,2", "--seed=1"]) == 0
    out = capsys.readouterr().out
    assert ended.read_text() == sections and "start     fake-a2" not in out and out.endswith("2 runs: 2 finished, 0 failed\n")
    assert sweep.main(["train_fake.py", "--optimizer=broken"]) == 1
    assert "failed    fake-broken  [1/1, 0 min left]: exit status 1" in capsys.readouterr().err


def test_finished_by_another_version_is_told(fake, capsys):
    """Of the script or of the optim.py beside it, both of which a log begins with."""
    args = ["train_fake.py", "--optimizer=muon", "--seed=1..2"]
    assert sweep.main(args) == 0
    for optim, change, told in ("# optim\n", "", 0), ("# edited\n", "", 2), ("# optim\n", "# edited\n", 2):
        (fake / "optim.py").write_text(optim)
        with open("train_fake.py", "a") as f:
            f.write(change)
        capsys.readouterr()
        assert sweep.main(args) == 0
        assert capsys.readouterr().out.count("was finished by another version of train_fake.py or optim.py") == told


def test_a_dry_run_may_have_a_reader_who_has_read_enough(fake):
    done = subprocess.run(f"set -o pipefail; {sys.executable} {ROOT}/tools/sweep.py train_fake.py --seed=1..2000 --dry_run | head -1",
                          shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "--seed=1 " in done.stdout
    done = subprocess.run(f"(sleep 1; exec {sys.executable} {ROOT}/tools/sweep.py train_fake.py --seed=1) | true; exit ${{PIPESTATUS[0]}}",
                          shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("sweep.py: error: nobody reads the output;")


def test_dry_run_runs_nothing(fake, capsys, monkeypatch):
    assert sweep.main(["train_fake.py", "--optimizer=muon,muon-vs", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert out.count("new   ") == 2 and "--optimizer=muon-vs --run_name=fake-muon-vs --resume=auto" in out
    monkeypatch.setattr(sweep, "gpus", lambda: ["0", "1"])
    assert sweep.main(["train_fake.py", "--seed=1", "--nproc=2", "--dry_run"]) == 0
    assert "-m torch.distributed.run --standalone --nproc_per_node=2 train_fake.py --seed=1" in capsys.readouterr().out
    assert not (fake / "logs").exists()


def test_failures_are_named_and_the_rest_goes_on(fake, capsys):
    assert sweep.main(["train_fake.py", "--optimizer=broken,muon", "--seed=1"]) == 1
    out, err = capsys.readouterr()
    assert "failed    fake-broken-seed1" in err and "train_fake.py: error: no such optimizer" in err
    assert out.endswith("2 runs: 1 finished, 1 failed\n  fake-broken-seed1\n")
    assert (fake / "logs/fake-muon-seed1.txt").exists()


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: [])(0)) < 2, reason="needs two cores")
def test_jobs_get_their_own_cores(fake):
    assert sweep.main(["train_fake.py", "--optimizer=muon", "--seed=1,2", "--jobs=2", "--delay=0.1"]) == 0
    logs = [(fake / f"logs/fake-muon-delay0.1-seed{seed}.txt").read_text() for seed in (1, 2)]
    found = [re.search(r"^cores: (.*) threads: (\d+)$", log, re.M) for log in logs]
    cores = [set(map(int, re.findall(r"\d+", m[1]))) for m in found]
    assert not cores[0] & cores[1] and [len(c) for c in cores] == [int(m[2]) for m in found]


def test_jobs_get_their_own_gpus(fake, monkeypatch):
    places = sweep.places(2, 2, ["0", "1", "5", "7"])
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in places] == ["0,1", "5,7"]
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert sweep.gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert sweep.gpus() == []
    with pytest.raises(sweep.UserError, match="needs 8 GPUs, found 1; give at most --nproc=1"):
        sweep.places(1, 8, ["0"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_runs_and_the_same_command_goes_on(fake, number):
    command = [sys.executable, os.path.join(ROOT, "tools/sweep.py"), "train_fake.py", "--optimizer=muon", "--seed=1,2"]
    process = subprocess.Popen([*command, "--delay=0.3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # under nohup it would be ignored
    log = fake / "logs/fake-muon-delay0.3-seed1.txt"
    deadline = time.time() + 20
    while not (log.exists() and "step:1/4" in log.read_text()) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "waiting for 1 runs" in err and "Traceback" not in err
    assert log.read_text().endswith("step:1/4 val_loss:1.0 train_time:1.0s\ninterrupted\n")
    assert subprocess.run([*command, "--delay=0.3"], capture_output=True).returncode == 0
    assert log.read_text().count("step:1/4") == 1 and log.read_text().endswith("final val_loss:1.0\n")


def test_train_gpt_end_to_end(fake, capsys):
    """The real script: two runs of two updates, found finished by a second sweep, read by report.py."""
    report = pytest.importorskip("report")
    pytest.importorskip("scipy")
    tokens = np.random.default_rng(0).integers(0, 256, 4096)
    for split in "train", "val":
        write_shard(fake / f"data/tiny/tiny_{split}_000000.bin", tokens)
    flags = dict(dataset="tiny", n_layer=1, n_head=1, n_embd=16, block_size=32, batch_size=2, micro_batch_size=2,
                 max_iters=2, warmup_iters=0, eval_interval=1, val_tokens=256, sample_tokens=0, compile="false",
                 device="cpu")
    command = [os.path.join(ROOT, "train_gpt.py"), "--optimizer=muon,muon-vs", "--seed=1",
               *(f"--{k}={v}" for k, v in flags.items())]
    assert sweep.main(command) == 0, capsys.readouterr().err
    assert sweep.main(command) == 0 and "2 runs, 2 of them finished before" in capsys.readouterr().out
    rows = report.build_experiments(report.read_logs([fake / "logs"]), "muon")[0].rows
    assert [(r.label, r.steps.tolist()) for r in rows] == [("muon", [0, 1, 2]), ("muon-vs", [0, 1, 2])]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("args, message", [
    (["nowhere.py"], "no script 'nowhere.py'"),
    (["train_fake.py", "--study=none"], "unknown study 'none'; expected one of main"),
    (["train_fake.py", "--study=lr,gamma"], "unknown study 'lr,gamma'"), (["train_fake.py", "--jobs=1,2"], "found --jobs=1,2"),
    (["train_fake.py", "--jobs=0"], "found --jobs=0"), (["train_fake.py", "--jobs=9999"], "needs 9999 cores"),
    (["train_fake.py", "--seed=1..2", "--seed=5"], "found --seed twice; expected one list: --seed=1,2,5"),
    (["train_fake.py", "--seed"], "found '--seed'"), (["train_fake.py", "--seed=1,,2"], "found '--seed=1,,2'"),
    (["train_fake.py", "--dataset=a/b,a_b"], "--dataset=a/b and --dataset=a_b would both be the run fake-dataseta_b; give each"),
    (["train_fake.py", "--log_dir=x,y", "--seed=1..2"], "--log_dir=x and --log_dir=y would both be the run fake-seed1"),
    (["train_fake.py", "--run_name=mine", "--seed=1..2"], "found --run_name; sweep.py names its runs by their settings"),
    (["train_fake.py", "--resume=none"], "found --resume; sweep.py"),
    (["train_fake.py", "--log_dir=train_fake.py/x"], "cannot make the folder --log_dir=train_fake.py/x: Not a directory"),
    (["train_fake.py", "--log_dir=train_fake.py"], "cannot make the folder --log_dir=train_fake.py: File exists"),
    (["broken.py", "--seed=1"], "broken.py cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
    ([TRAIN, "--optimizer=muon,moun"], "did you mean --optimizer=muon?"), ([TRAIN, "--gama=1,10"], "did you mean --gamma=1?"),
    ([TRAIN, "--preset=demo,gpt2-small", "--n_head=4,7"], "expected a number divisible by 2 x --n_head, as RoPE turns pairs: --n_embd=252")
])
def test_mistakes_are_one_line(fake, args, message):
    (fake / "broken.py").write_text("import nowhere\n\nGLOBALS = []\ndef configure(argv): pass\n")
    command = [sys.executable, os.path.join(ROOT, "tools/sweep.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("sweep.py: error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and not (fake / "logs").exists()


def test_ranks_share_the_cores_of_their_job(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert sweep.places(2, 2, []) == [([0, 1, 2, 3], {"OMP_NUM_THREADS": "2"}), ([4, 5, 6, 7], {"OMP_NUM_THREADS": "2"})]


def test_without_a_final_line_a_run_has_failed(fake, capsys):
    (fake / "train_quits.py").write_text("import sys\nprint('train_quits.py: error: why\\ntorchrun: more')\nsys.exit(len(sys.argv) > 4)\n")
    for flags, told in ((["--seed=1"], "[1/1, 0 min left]: train_quits.py: error: why"),
                        (["--seed=1", "--a=1"], "train_quits.py: error: why  (see")):
        assert sweep.main(["train_quits.py", *flags]) == 1
        out, err = capsys.readouterr()
        assert told in err and "  [0/1]\n" in out and out.endswith(", 1 failed\n  " + err.split()[1] + "\n")


def test_the_share_of_a_run(tmp_path):
    (tmp_path / "a.txt").write_text("step:1/4 val_loss:1.0\nstep:3/4 val_loss:1.0\n")
    assert sweep.Run("a", tmp_path / "a.txt", []).share() == 0.75


def test_gpus_are_counted_once_and_left_alone_by_a_cpu_run(fake, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (fake / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)'\n")
    os.chmod("nvidia-smi", 0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    assert sweep.gpus() == ["0"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert sweep.main(["train_fake.py", "--device=cpu", "--jobs=2", "--dry_run"]) == 0
