"""tools/sweep.py over a stand-in for a train script, in a second an update where it has to be interrupted."""
import signal
import subprocess
import sys
import time

import pytest

from common import ROOT
import sweep

FAKE = '''
import os, signal, sys, time
flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
if flags["optimizer"] == "broken":
    sys.exit("no such optimizer")
path, stop = f"logs/{flags['run_name']}.txt", []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
begun = os.path.exists(path)
with open(path, "a", buffering=1) as log:
    if not begun:
        log.write(f"source\\n{'=' * 100}\\nfinal quoted\\n{'=' * 100}\\nthreads: {os.environ.get('OMP_NUM_THREADS')}\\n")
        log.writelines(f"--{name}={x}\\n" for name, x in flags.items())
        log.write("=" * 100 + "\\n")
    for step in range(open(path).read().count("step:"), 3):
        log.write(f"step:{step}/3\\n")
        time.sleep(float(flags.get("delay", 0)))
        if stop:
            sys.exit()
    log.write("final val_loss:1.0\\n")
'''

@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train_fake.py").write_text(FAKE)
    return tmp_path

def command(*flags):
    return [sys.executable, f"{ROOT}/tools/sweep.py", "train_fake.py", *flags]

def run(*flags):
    return subprocess.run(command(*flags), capture_output=True, text=True, timeout=60)

def test_grid_and_names():
    axes = sweep.parse(["--optimizer=muon,muon-vs", "--learning_rate=0.005", "--n_layer=2", "--seed=1..2,7"], None)
    runs = sweep.grid(sweep.Path("a/train_gpt.py"), axes)
    assert list(runs) == [f"gpt-{name}-lr0.005-seed{seed}" for name in ("muon", "muon-vs") for seed in (1, 2, 7)]
    assert runs["gpt-muon-vs-lr0.005-seed7"] == dict(optimizer="muon-vs", learning_rate="0.005", n_layer="2", seed="7")
    axes = sweep.parse(["--gamma=1000", "--preset=demo", "--dataset=a/b,c"], None)
    assert list(sweep.grid(sweep.Path("train_llama.py"), axes)) == ["llama-gamma1000-demo-dataseta_b", "llama-gamma1000-demo-datasetc"]

def test_finished_runs_are_skipped_and_cut_ones_resumed(folder):
    flags = ["--optimizer=muon,muon-vs", "--seed=1..2"]
    assert run(*flags).returncode == 0
    logs = sorted((folder / "logs").iterdir())
    assert [path.name for path in logs] == [f"fake-{name}-seed{seed}.txt" for name in ("muon", "muon-vs") for seed in (1, 2)]
    whole = logs[0].read_text()
    assert "--resume=auto" in whole
    logs[0].write_text(whole.split("step:1")[0])
    before = [path.stat().st_mtime_ns for path in logs[1:]]
    assert run(*flags).returncode == 0
    assert logs[0].read_text() == whole and [path.stat().st_mtime_ns for path in logs[1:]] == before

def test_a_failed_run_is_named_and_the_rest_goes_on(folder):
    done = run("--optimizer=broken,muon", "--seed=1")
    assert done.returncode == 1 and "failed: fake-broken-seed1: no such optimizer" in done.stderr
    assert "final" in (folder / "logs/fake-muon-seed1.txt").read_text()

def test_a_log_of_other_settings_is_not_taken_for_this_run(folder):
    run("--optimizer=muon", "--n_layer=2")
    assert run("--optimizer=muon", "--n_layer=2.0").returncode == 0
    done = run("--optimizer=muon", "--n_layer=3")
    assert done.returncode == 1 and "--n_layer=2, not 3" in done.stderr and done.stderr.count("\n") == 1

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_runs_save_and_the_same_command_goes_on(folder, number):
    flags = ["--optimizer=muon", "--seed=1..3", "--jobs=2", "--delay=0.5"]
    process = subprocess.Popen(command(*flags), stderr=subprocess.PIPE, text=True)
    logs = [folder / f"logs/fake-muon-seed{seed}.txt" for seed in (1, 2, 3)]
    deadline = time.time() + 60
    while not all(path.exists() and "step:0" in path.read_text() for path in logs[:2]) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert "stopped" in process.communicate(timeout=60)[1] and process.returncode == 1
    assert not logs[2].exists() and not any("step:2" in path.read_text() for path in logs[:2])
    if number == signal.SIGTERM:
        assert run(*flags[:2], "--delay=0.5").returncode == 0
        assert all("final" in path.read_text() for path in logs)
