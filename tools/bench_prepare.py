"""
The rate of prepare.py with gpt2 against one thread of bare tiktoken.encode_ordinary on the same text.

    python tools/bench_prepare.py                     # 150 MB, all cores, about a minute a core; needs the gpt2 vocabulary
    python tools/bench_prepare.py --mb 40 --repeat 1

The text is the source of Python's standard library, over and over, as documents of one parquet file; the rates are medians
of `repeat` runs, taken in turns, the whole of prepare.py from start to verified manifest. Ends with e.g.

    1.95x of one bare thread with 2 workers: 25.1 MB/s against 12.9 MB/s
"""
import argparse
import os
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
    parser.add_argument("--mb", type=int, default=150, help="of text")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))
    texts, size = [], 0
    while size < args.mb * 1e6:
        for path in library:
            text = path.read_bytes().decode(errors="replace")
            texts.append(text)
            size += len(text.encode())
            if size >= args.mb * 1e6:
                break
    script = Path(__file__).resolve().parent.parent / "prepare.py"
    encode, bare, prepared = tiktoken.get_encoding("gpt2").encode_ordinary, [], []
    for i in range(args.repeat):
        began = time.perf_counter()
        for text in texts:
            encode(text)
        bare.append(size / 1e6 / (time.perf_counter() - began))
        with tempfile.TemporaryDirectory() as folder:
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), Path(folder, "a.parquet"), row_group_size=1000)
            began = time.perf_counter()
            subprocess.run([sys.executable, script, "text", "--input", Path(folder, "a.parquet"), "--name", "bench", "--data_dir", folder,
                            "--tokenizer", "gpt2", "--workers", str(args.workers)], check=True, stdout=subprocess.DEVNULL)
            prepared.append(size / 1e6 / (time.perf_counter() - began))
        print(f"run {i + 1}: bare {bare[-1]:.1f} MB/s, prepare.py {prepared[-1]:.1f} MB/s", flush=True)
    rate, base = statistics.median(prepared), statistics.median(bare)
    print(f"{rate / base:.2f}x of one bare thread with {args.workers} workers: {rate:.1f} MB/s against {base:.1f} MB/s")


if __name__ == "__main__":
    main()
