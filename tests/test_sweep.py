"""tools/sweep.py over a stand-in for a train script."""
import signal, subprocess, sys, time
from pathlib import Path

from common import ROOT
import sweep

FAKE = '''
import os, sys, time
flags = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
path, line = f"logs/{flags['run_name']}.txt", "=" * 100 + "\\n"
if not os.path.exists(path):
    head = "".join(f"--{name}={x}\\n".replace(",", ", ") for name, x in flags.items())  # as Python prints tuples
    open(path, "w").write(line.join([open(__file__).read(), "final quoted\\n", head, ""]))
with open(path, "a", buffering=1) as log:
    for step in range(open(path).read().count("\\nstep:"), 3):
        log.write(f"step:{step}/3\\n")
        time.sleep(float(flags.get("delay", 0)))
    log.write("final val_loss:1.0\\n")
'''

def start(*flags, script=FAKE):
    Path("train_fake.py").write_text(script)
    command = [sys.executable, f"{ROOT}/tools/sweep.py", "train_fake.py", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

def end(process):
    return process.communicate()[1], process.returncode

def test_grid_and_names():
    axes = sweep.parse(["--optimizer=muon,muon-vs", "--learning_rate=0.005", "--n_layer=2", "--seed=1..2,7"], None)
    runs = sweep.grid(sweep.Path("a/train_gpt.py"), axes)
    assert sweep.parse(["--seed=2..1"], None) == {"seed": ["2..1"]}  # for the script to refuse
    assert sweep.plain("(1E-3,.9,1_024)") == sweep.plain("(0.001, 0.9, 1024)")
    assert list(runs) == [f"gpt-{name}-lr0.005-seed{seed}" for name in ("muon", "muon-vs") for seed in (1, 2, 7)]
    betas = sweep.parse(["--adam_betas=(0.9, 0.95),(0.8,0.9)", "--ns_steps=3, 5"], None)
    assert betas == dict(adam_betas=["(0.9,0.95)", "(0.8,0.9)"], ns_steps=["3", "5"])
    assert runs["gpt-muon-lr0.005-seed7"] == dict(optimizer="muon", learning_rate="0.005", n_layer="2", seed="7")

def test_finished_runs_are_skipped_and_cut_ones_resumed():
    flags = ["--n_layer=2", "--optimizer=muon,muon-vs", "--adam_betas=(0.9,0.95)", "--seed=1..2"]
    assert end(start(*flags))[1] == 0
    logs = sorted(Path("logs").iterdir())
    assert [path.stem for path in logs] == [f"fake-{name}-seed{i}" for name in ("muon", "muon-vs") for i in (1, 2)]
    whole = logs[0].read_text()
    logs[0].write_text(whole.split("step:1")[0])
    logs[1].write_text(finished := logs[1].read_text() + "not run again\n")
    assert end(start(*flags))[1] == 0 and "--resume=auto" in whole
    assert [path.read_text() for path in logs[:2]] == [whole, finished]
    assert end(start(*flags, "--repeat=2"))[1] == 0 and "--rep" not in open("logs/fake-muon-seed1-repeat2.txt").read()
    error, status = end(start("--n_layer=3", *flags[1:]))  # not to be taken for these runs
    assert status == 1 and "--n_layer=2, not 3" in error and error.count("\n") == 1
    logs[0].write_text(whole.replace("--n_layer", "--dtype=bfloat16\n--n_layer"))
    assert end(start(*flags, "--dtype=auto"))[1] == 0
    Path("checkpoints/fake-muon-seed3").mkdir(parents=True)  # of a run whose log was moved
    assert "seed3 has no logs/fake-muon-seed3.txt" in end(start("--optimizer=muon", "--seed=3"))[0]
    Path("optim.py").touch()
    error, _ = end(start(*flags, script=FAKE + "\n"))
    assert all(f"fake-muon-seed1.txt is of another {name}.py\n" in error for name in ("train_fake", "optim"))

def test_a_failed_run_is_named_and_the_rest_goes_on():
    error, status = end(start("--optimizer=muon", "--delay=long,0"))
    assert status == 1 and "failed: fake-muon-delaylong: ValueError: could not convert" in error
    assert "\nfinal val" in Path("logs/fake-muon-delay0.txt").read_text()

def test_a_signal_lets_the_runs_save_and_the_same_command_goes_on():
    flags = ["--optimizer=muon", "--seed=1..3", "--delay=0.3"]
    logs = [Path(f"logs/fake-muon-seed{seed}.txt") for seed in (1, 2, 3)]
    process, deadline = start(*flags, "--jobs=2"), time.time() + 60
    while not all(path.exists() and "step:0" in path.read_text() for path in logs[:2]) and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert end(process)[1] == 1
    assert not logs[2].exists() and not any("\nfinal val" in path.read_text() for path in logs[:2])
    assert end(start(*flags))[1] == 0 and all("\nfinal val" in path.read_text() for path in logs)
