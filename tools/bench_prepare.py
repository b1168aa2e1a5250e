"""
The rate of prepare.py with gpt2 against one thread of bare tiktoken.encode_ordinary on the same text.

    python tools/bench_prepare.py                     # 300 MB, a worker a core: 2 minutes on 2 cores
    python tools/bench_prepare.py --mb 100 --repeat 1

The text is the source of Python's standard library, over and over, as the documents of a parquet file. Each run times
both, one after the other: the bare loop with all text in memory, and prepare.py as a command, from its start to the
manifest. On a machine that does other work the rates per CPU second say more. Needs the gpt2 vocabulary
(TIKTOKEN_CACHE_DIR). The last line has the medians:

    prepare.py with 2 workers: 25.3 MB/s, 1.95 x the 13.0 MB/s of one bare thread
"""
import argparse
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path


def main():
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=300, help="of text")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    library = [path.read_bytes().decode(errors="replace")
               for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))]
    texts, size = [], 0
    while size < args.mb * 1e6:
        texts.append(library[len(texts) % len(library)])
        size += len(texts[-1].encode())
    script = Path(__file__).resolve().parent.parent / "prepare.py"
    encode, mb, runs = tiktoken.get_encoding("gpt2").encode_ordinary, size / 1e6, []
    for i in range(args.repeat):
        began, cpu_began = time.perf_counter(), time.process_time()
        for text in texts:
            encode(text)
        bare, bare_cpu = time.perf_counter() - began, time.process_time() - cpu_began
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder, "corpus.parquet")
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), corpus, row_group_size=200)
            command = [sys.executable, script, "text", "--input", corpus, "--name", "bench", "--tokenizer", "gpt2",
                       "--data_dir", folder, "--workers", str(args.workers)]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            prepared, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        runs.append((mb / bare, mb / prepared))
        print(f"run {i + 1}: bare {mb / bare:.1f} MB/s, {mb / bare_cpu:.1f} MB a CPU second; "
              f"prepare.py {mb / prepared:.1f} MB/s, {mb / cpu:.1f} MB a CPU second", flush=True)
    base, rate = (statistics.median(run[i] for run in runs) for i in (0, 1))
    print(f"prepare.py with {args.workers} workers: {rate:.1f} MB/s, {rate / base:.2f} x the {base:.1f} MB/s of one "
          "bare thread")


if __name__ == "__main__":
    main()
