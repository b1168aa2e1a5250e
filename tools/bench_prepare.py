"""
What the data cost: prepare.py against a bare tokenizer, and the loader of the train scripts against a training step.

    python tools/bench_prepare.py                     # 1 GB, twice, a worker a core: 4 minutes on 2 cores
    python tools/bench_prepare.py --mb 100 --repeat 1
    python tools/bench_prepare.py --loader            # 20 s

The first is the rate with gpt2 against one thread of bare tiktoken.encode_ordinary on the same text: the source of
Python's standard library, over and over, as the documents of a parquet file. Each run times both, one after the other:
the bare loop with all text in memory, and prepare.py as a command, from its start to the manifest. On a machine that
does other work the rates per CPU second say more. Needs the gpt2 vocabulary (TIKTOKEN_CACHE_DIR). The last line:

    prepare.py with 2 workers: 27.6 MB/s, 1.80 x the 15.4 MB/s of one bare thread

--loader times the reading of an update's whole batch, shuffled, from a file that the system caches. For the demo that
is with the inputs and targets of a CPU's training step, as a share of such a step (the step_avg of --log, which should
be of this machine). For the other presets, where a GPU makes those and one process reads a batch while the update
before it runs, it is a share of the time an update takes one H200 at 40 % of its 989 TFLOPS: reckoned, not measured.
"""
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from bench_train import Parser, UserError, cores, load, random_shard  # noqa: E402

TOKENS = 40_000_000  # that --loader reads with each preset


def machine():
    return f"{cores()} cores of an {load(ROOT / 'train_gpt.py').cpu_name()}, Python {sys.version.split()[0]}"


def prepare(args):
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    script = load(ROOT / "prepare.py")
    try:
        script.load_tokenizer("gpt2")
    except script.UserError as e:
        raise UserError(e) from None
    print(f"{machine()}, tiktoken {tiktoken.__version__}; {args.mb} MB of text, gpt2")
    library = [path.read_bytes().decode(errors="replace")
               for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))]
    texts, size = [], 0
    while size < args.mb * 1e6:
        texts.append(library[len(texts) % len(library)])
        size += len(texts[-1].encode())
    encode, mb, runs = tiktoken.get_encoding("gpt2").encode_ordinary, size / 1e6, []
    for i in range(args.repeat):
        began, cpu_began = time.perf_counter(), time.process_time()
        for text in texts:
            encode(text)
        bare, bare_cpu = time.perf_counter() - began, time.process_time() - cpu_began
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder, "corpus.parquet")
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), corpus, row_group_size=200)
            command = [sys.executable, ROOT / "prepare.py", "text", "--input", corpus, "--name", "bench", "--tokenizer",
                       "gpt2", "--data_dir", folder, "--workers", str(args.workers)]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise UserError(f"prepare.py ended with status {done.returncode}: {(done.stderr.splitlines() or ['no message'])[-1]}")
            prepared, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        runs.append((mb / bare, mb / prepared))
        print(f"run {i + 1}: bare {mb / bare:.1f} MB/s, {mb / bare_cpu:.1f} MB a CPU second; "
              f"prepare.py {mb / prepared:.1f} MB/s, {mb / cpu:.1f} MB a CPU second", flush=True)
    base, rate = (statistics.median(run[i] for run in runs) for i in (0, 1))
    print(f"prepare.py with {args.workers} workers: {rate:.1f} MB/s, {rate / base:.2f} x the {base:.1f} MB/s of one "
          "bare thread")


def loader(args):
    import torch
    found = re.findall(r"step_avg:([\d.]+)ms", args.log.read_text(errors="replace")) if args.log.is_file() else []
    if not found:
        raise UserError(f"--log={args.log} is not a log with a step_avg; expected one of train_gpt.py, such as logs/RUN.txt")
    step_avg = float(found[-1])
    print(f"{machine()}, torch {torch.__version__}; training step of {args.log.name}: {step_avg:.1f} ms")
    with tempfile.TemporaryDirectory() as folder:
        random_shard(Path(folder, "made/made_train_000001.bin"), TOKENS, 257)
        for script in ("train_gpt", "train_llama"):
            module = load(ROOT / f"{script}.py")
            for preset in (name for name in module.PRESETS if "/" not in name):
                module.configure([f"--preset={preset}", "--dataset=made", f"--data_dir={folder}",
                                  "--check_shards=false"])
                rows, shards = module.micro_batch_size or module.batch_size, module.Shards("made", "train")
                times, updates = [], -(-TOKENS // (module.batch_size * module.block_size))
                for step in range(min(2000, updates)):
                    began = time.perf_counter()
                    for first in range(0, module.batch_size, rows):
                        tokens = shards.batch(step, range(first, first + rows))
                        if preset == "demo":
                            module.to_device(tokens, torch.device("cpu"))
                    times.append(time.perf_counter() - began)
                read, update = 1000 * statistics.median(times), step_avg
                if preset != "demo":
                    with torch.device("meta"):
                        flops = module.flops_per_token(module.Model(32000 if preset.startswith("suite-a") else 50304))
                    update = flops * module.batch_size * module.block_size / (0.4 * 989e9)
                print(f"{script}.py {preset:13} {module.batch_size:4} x {module.block_size:4} tokens: {read:7.2f} ms, "
                      f"{100 * read / update:.3f} % of {update:.0f} ms", flush=True)


def main(argv):
    parser = Parser("bench_prepare.py", __doc__)
    parser.add_argument("--mb", type=int, default=1000, help="of text")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--loader", action="store_true", help="time the loader instead")
    parser.add_argument("--log", type=Path, default=ROOT / "records/demo/gpt-demo-muon-vs-seed1.txt")
    args = parser.parse_args(argv)
    if min(args.mb, args.repeat, args.workers) < 1:
        raise UserError(f"found --mb={args.mb} --repeat={args.repeat} --workers={args.workers}; expected numbers from 1")
    (loader if args.loader else prepare)(args)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"bench_prepare.py: error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f"bench_prepare.py: error: package {error.name} is missing; install it: pip install {error.name}")
