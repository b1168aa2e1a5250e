"""
Times training: runs each codebase's own script, unmodified, as a process, in turn, and reads the clock in its log.

    python tools/bench_train.py --nanogpt=../nanoGPT                          # the demo; a clone of karpathy/nanoGPT
    python tools/bench_train.py --nanogpt=../nanoGPT --ours="--dtype=float32 --optimizer=adamw"
    python tools/bench_train.py --ours= --ours=--optimizer=muon               # what variance adaptation costs
    python tools/bench_train.py --ours="--preset=gpt2-small --dataset=fineweb10B --n_head=6 --batch_size=512
        --micro_batch_size=64" --modded=../modded-nanogpt/records/track_3_optimization/train_gpt_simple.py    # on a GPU

--ours are flags of the script that has their preset, a row of the table each. nanoGPT gets the model, batch and data of
the first, which has to be a GPT: its own optimizer is AdamW, its positions are learned, its head is tied, and on a CPU
it computes in fp32 whatever the dtype. modded-nanogpt's script has no flags; above are ours that match its model and
batch. The first updates do not count, as scripts compile there. A run's figure is the median over stretches of ten
updates; the table has medians over rounds [and quartiles]; a ratio is taken within a round.
"""
import argparse, os, pickle, re, shlex, shutil, subprocess, sys, tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from bench_optim import SCRIPTS, command, machine, summary, train_gpt

ROOT = Path(__file__).resolve().parent.parent
STRETCH = 10  # updates

class Clock:
    """Reads a script's log: marks[n] are the seconds of the first n updates, by its own clock."""

    def __init__(self):
        self.marks, self.seconds = {}, 0.0

    def read(self, line: str) -> None:
        if match := re.match(r"iter (\d+): loss .*, time ([\d.]+)ms", line):           # nanoGPT: of one update
            self.seconds += float(match[2]) / 1000
            self.marks[int(match[1]) + 1] = self.seconds
        elif match := re.match(r"step:(\d+)/.* train_time:([\d.]+)(m?)s", line):       # ours, modded-nanogpt: of all
            self.marks[int(match[1])] = float(match[2]) / (1000 if match[3] else 1)

    def per_update(self, last: int) -> float:
        """Median seconds of an update, over stretches from the end of the first one to update `last`."""
        ends = [self.marks[n] for n in range(STRETCH, last + 1, STRETCH)]
        return float(np.median(np.diff(ends))) / STRETCH

def run(row: list[str], folder: Path, last: int) -> float:
    """Starts a process, ends it after update `last`, and returns its seconds per update."""
    clock, output = Clock(), []
    with subprocess.Popen(row, cwd=folder, env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            output.append(line)
            clock.read(line)
            if last in clock.marks:
                process.terminate()  # once: a second signal would part torchrun from its ranks
                process.stdout.read()
    if last not in clock.marks:
        sys.exit(f"{shlex.join(row)}\nended with status {process.returncode}:\n{''.join(output[-10:])}")
    return clock.per_update(last)

def script(flags: str):
    """The train script that has the preset of these flags."""
    return SCRIPTS.get(dict(re.findall(r"--(preset)[= ](\S+)", flags)).get("preset"), train_gpt)

def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]

def ours(checkout: Path, flags: str, ranks: int) -> list[str]:
    """Validation, checkpoints and sample stay outside the updates that count."""
    rarely = dict(eval_interval=10**6, checkpoint_interval=10**6, val_tokens=2**14)
    python, file = torchrun(ranks) if ranks > 1 else [sys.executable], Path(script(flags).__file__).name
    return [*python, str(checkout.resolve() / file), *shlex.split(flags), f"--log_interval={STRETCH}",
            *(f"--{name}={value}" for name, value in rarely.items())]

def nanogpt(clone: Path, folder: Path) -> list[str]:
    """Copies its files to `folder`, beside our first shards in its format, and gives it the settings of train_gpt."""
    data = folder / "data/ours"
    data.mkdir(parents=True)
    for file in clone.glob("*.py"):
        shutil.copy(file, folder)
    for split, name in ("train", train_gpt.dataset), ("val", train_gpt.val_dataset or train_gpt.dataset):
        shards = train_gpt.Shards(name, split)
        np.fromfile(shards.files[0], np.uint16, offset=1024).tofile(data / f"{split}.bin")
    vocab = -(-shards.vocab // 64) * 64
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab}))
    micro = train_gpt.micro_batch_size or train_gpt.batch_size
    settings = dict(dataset="ours", batch_size=micro, gradient_accumulation_steps=train_gpt.batch_size // micro,
                    eval_interval=10**6, eval_iters=1)
    for name in "n_layer", "n_head", "n_embd", "block_size", "weight_decay", "grad_clip", "device", "dtype", "compile":
        settings[name] = getattr(train_gpt, name)
    return [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="append", metavar="FLAGS", help="default: none, so the demo with Muon-VS")
    parser.add_argument("--ranks", type=int, default=1, help="of ours, which torchrun starts if there are several (1)")
    parser.add_argument("--beside", type=Path, metavar="PATH", help="another checkout of this project")
    parser.add_argument("--nanogpt", type=Path, metavar="PATH", help="a clone of karpathy/nanoGPT")
    parser.add_argument("--modded", type=Path, metavar="PATH", help="modded-nanogpt's train_gpt_simple.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=40, help=f"that count; a multiple of {STRETCH}")
    args = parser.parse_args()
    args.ours = args.ours or [""]
    train = train_gpt if args.nanogpt else script(args.ours[0])
    train.configure(shlex.split(args.ours[0]))
    train.init_ranks()  # which settles its dtype

    with tempfile.TemporaryDirectory() as temporary:
        rows = {}
        for flags in args.ours:
            name = f"ours {flags}".strip()
            rows[name] = ours(ROOT, flags, args.ranks)
            if args.beside:
                rows[f"{name}, before"] = ours(args.beside, flags, args.ranks)
        if args.nanogpt:
            rows["nanoGPT"] = nanogpt(args.nanogpt, Path(temporary, "nanoGPT"))
        if args.modded:
            rows["modded-nanogpt"] = [*torchrun(1), str(args.modded.resolve())]

        rounds = [{} for _ in range(args.rounds)]
        turns = [(i, name) for i in range(args.rounds) for name in np.random.default_rng(i).permutation(list(rows))]
        for i, name in tqdm(turns):
            folder = Path(temporary, "nanoGPT") if name == "nanoGPT" else Path(tempfile.mkdtemp(dir=temporary))
            if name != "nanoGPT":
                (folder / "data").symlink_to(Path("data").resolve())
            rounds[i][name] = run(rows[name], folder, STRETCH + args.updates)
    seconds = pd.DataFrame(rounds, columns=list(rows))
    print(f"{command()}\nmachine: {machine(train.device)}\n"
          f"an update: {train.batch_size} x {train.block_size} tokens, ours in {train.dtype}; "
          f"{args.rounds} rounds of {args.updates} updates; medians [quartiles]\n\n{summary(seconds, list(rows)[-1])}")

if __name__ == "__main__":
    main()
