"""
prepare.py: what is in the shards against an independent reading of the same files; the bytes after an interruption,
of any number of workers and from a Hub served on loopback; what bad input gets.

gpt2 and llama2 need files that are not in the repository; without these variables their tests are skipped:
  TIKTOKEN_CACHE_DIR=FOLDER LLAMA2_TOKENIZER=FOLDER/tokenizer.model python -m pytest tests/test_prepare.py
PREPARE_SLOW_TESTS=1 runs the memory test of gpt2 on 300 MB instead of 24 MB.
"""
import contextlib
import errno
import gzip
import hashlib
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types
import urllib.parse

import numpy as np
import pytest

import prepare
from common import write_shard

SCRIPT = os.path.abspath(prepare.__file__)
LLAMA2 = os.environ.get("LLAMA2_TOKENIZER")
PYTHONPATH = {**os.environ, "PYTHONPATH": os.path.dirname(SCRIPT)}
TEXT = ("text", "--input", "in", "--name", "mine")
needs_gpt2 = pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="TIKTOKEN_CACHE_DIR is not set")
needs_llama2 = pytest.mark.skipif(not LLAMA2, reason="LLAMA2_TOKENIZER (path of tokenizer.model) is not set")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*args, timeout=120, **env):
    """prepare.py in a process of its own."""
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **env})


def start(*args, setup="", **kwargs):
    """prepare.py in a process of its own, after the statements of `setup`, as it runs."""
    program = f"import sys, prepare\n{setup}\nsys.exit(prepare.cli())"
    return subprocess.Popen([sys.executable, "-c", program, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            text=True, env=PYTHONPATH, **kwargs)


def text(*inputs, name="mine", tokenizer="bytes", workers="1", **options):
    """prepare.py text in this process."""
    options = {"name": name, "tokenizer": tokenizer, "workers": workers, **options}
    if tokenizer == "llama2":
        options["tokenizer_file"] = LLAMA2
    prepare.main(["text", "--input", *map(str, inputs), *(f"--{key}={value}" for key, value in options.items())])


def tokens(name, split):
    """A split as modded-nanogpt's loader reads it: three header words, then uint16."""
    found = []
    for path in sorted(pathlib.Path("data", name).glob(f"{name}_{split}_*.bin")):
        header = np.fromfile(path, "<i4", 256)
        assert header[0] == 20240520 and header[1] == 1
        found.append(np.fromfile(path, "<u2", offset=1024))
        assert len(found[-1]) == header[2]
    return np.concatenate(found) if found else np.array([], dtype="<u2")


def documents(name, split, eot=256):
    """The split's documents, each without its end of text."""
    ids = tokens(name, split)
    assert len(ids) == 0 or ids[-1] == eot
    parts = np.split(ids, np.flatnonzero(ids == eot)[:-1] + 1) if len(ids) else []
    return [part[part != eot].tolist() for part in parts]


def texts(name, split):
    return [bytes(document).decode() for document in documents(name, split)]


def contents(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def write(path, data):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def write_parquet(path, rows, group=7):
    import pyarrow
    import pyarrow.parquet
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(rows))), "text": pyarrow.array(rows, "string"), "score": [0.5] * len(rows)})
    pyarrow.parquet.write_table(table, path, row_group_size=group)


def write_zst(path, data):
    import pyarrow
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.output_stream(str(path), compression="zstd") as f:
        f.write(data)


def shard_of_others(ids):
    return np.array([20240520, 1, len(ids)] + [0] * 253, "<i4").tobytes() + ids.astype("<u2").tobytes()


def jsonl(rows, **more):
    return "".join(json.dumps({"id": i, "text": row, **more}) + "\n" for i, row in enumerate(rows)).encode()


def sentences(n, seed=0, length=300):
    """n documents of words, punctuation, numbers and letters of other alphabets."""
    rng = random.Random(seed)
    words = ["the", "quick", "don't", "x1", "naïve", "日本語", "3.14", "…", "\n", "  ", "🙂", "Ω", "<|endoftext|>", "</s>"]
    return [" ".join(rng.choices(words, k=rng.randint(1, length))) + f" {seed}.{i}" for i in range(n)]


# ----------------------------------------------------------------------------------------------------------------------
# The default dataset

def test_default_is_the_standard_library():
    out = run()
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-1] == "next: torchrun --standalone --nproc_per_node=1 train_gpt.py"
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    expected = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.relative_to(root).parts):
            with contextlib.suppress(UnicodeDecodeError):
                expected.append(path.read_bytes().decode())
    train, val = texts("pysrc", "train"), texts("pysrc", "val")
    ways = {0}  # how many documents of train may lie before the next one: both are in order, but several documents are equal
    for k, document in enumerate(expected):
        ways = {i + 1 for i in ways if train[i:i + 1] == [document]} | {i for i in ways if val[k - i:k - i + 1] == [document]}
    assert len(train) in ways and len(train) + len(val) == len(expected)  # nothing is lost
    assert 0.01 < len(val) / len(expected) < 0.03
    manifest = json.loads(pathlib.Path("data/pysrc/manifest.json").read_text())
    assert manifest["vocab_size"] == 257 and manifest["eot"] == 256 and manifest["tokenizer"] == "bytes"
    assert manifest["splits"]["val"] == {"tokens": len(tokens("pysrc", "val")), "documents": len(val),
                                         "bytes": sum(len(document.encode()) for document in val)}
    header = np.fromfile("data/pysrc/pysrc_train_000001.bin", "<u4", 256)
    assert header[3:].tolist() == [257, 256, int(manifest["shards"][0]["crc32"], 16), 1] + [0] * 249
    assert sorted(os.listdir("data")) == ["pysrc"] and len(os.listdir("data/pysrc")) == 3

    first = contents("data/pysrc")
    again = run()
    assert again.returncode == 0 and "complete already" in again.stdout and contents("data/pysrc") == first
    os.rename("data", "two_workers")
    prepare.main(["--workers", "1"])
    assert contents("data/pysrc") == first


def test_import_does_nothing():
    out = subprocess.run([sys.executable, "-c", "import prepare"], capture_output=True, text=True, env=PYTHONPATH)
    assert out.returncode == 0 and out.stdout + out.stderr == "" and os.listdir(".") == []


# ----------------------------------------------------------------------------------------------------------------------
# Ids against the tokenizers' own libraries

def reference(tokenizer):
    if tokenizer == "gpt2":
        import tiktoken
        return tiktoken.get_encoding("gpt2").encode_ordinary
    import sentencepiece
    return sentencepiece.SentencePieceProcessor(model_file=LLAMA2).encode


TOKENIZERS = [pytest.param("gpt2", 50256, marks=needs_gpt2), pytest.param("llama2", 2, marks=needs_llama2)]


def encode(tokenizer, document):
    encoder = prepare.load_tokenizer(tokenizer, LLAMA2).encode
    return [int(i) for n, piece in enumerate(prepare.pieces(document)) for i in encoder(piece, n == 0)]


@pytest.mark.parametrize("tokenizer, eot", TOKENIZERS)
def test_pieces_do_not_change_the_ids(tokenizer, eot, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 30)
    atoms = ["a", "the", " the", "'s", "'", "'ll", "1", "23", " ", "   ", "\n", "\n\n", "\t", "\r\n", "\0", "\x1c", "\x85",
             "\u00a0", "\u3000", "\u2003", "\u2028", "\u2581", "\u0301", "é", "日本", "。", "🙂", "½", "-", "--", "_",
             "<|endoftext|>", "</s>", "<0x0A>"]
    rng, cuts, expected = random.Random(1), 0, reference(tokenizer)
    for _ in range(4000):
        document = "".join(rng.choices(atoms, k=rng.randint(1, 200)))
        assert "".join(prepare.pieces(document)) == document
        assert encode(tokenizer, document) == expected(document), repr(document)
        cuts += len(prepare.pieces(document)) - 1
    assert cuts > 4000


@pytest.mark.parametrize("tokenizer, eot", TOKENIZERS)
def test_a_large_text_is_encoded_in_parts_with_the_ids_of_the_whole(tokenizer, eot, monkeypatch):
    monkeypatch.setattr(prepare, "UNIT", 3000)
    document = "".join(sentences(100, seed=5))
    write("in/a.txt", document)
    write("in/b.txt", "b")  # shares the corpus, so that a.txt stays one document
    text("in", tokenizer=tokenizer)
    both = documents("mine", "train", eot) + documents("mine", "val", eot)
    assert sorted(both, key=len)[-1] == reference(tokenizer)(document)
    assert len(both) == 2


@needs_gpt2
@pytest.mark.parametrize("run_of", ["a", " ", "\n", "=", "7", "字", "_-", "\u3000"])
def test_long_runs_of_one_character(run_of):
    import tiktoken
    document = "x " + run_of * (1_000_000 // len(run_of)) + " y"
    began = time.monotonic()
    ids = encode("gpt2", document)
    assert time.monotonic() - began < 10
    assert tiktoken.get_encoding("gpt2").decode(ids) == document
    assert max(map(len, prepare.pieces(document))) <= 2 * prepare.PIECE
    document = "x " + run_of * (prepare.RUN // len(run_of) // 2) + " y"  # not long: the tokenizer's own
    assert encode("gpt2", document) == tiktoken.get_encoding("gpt2").encode_ordinary(document)


@pytest.mark.parametrize("tokenizer, eot", TOKENIZERS)
def test_every_kind_of_file(tokenizer, eot, tmp_path):
    rows = {kind: sentences(30, seed) for seed, kind in enumerate(["parquet", "jsonl", "gz", "zst", "c4"])}
    whole = {name: sentences(1, seed=name)[0] for name in ("a.txt", "b.md", "sub/c.py")}
    for name, document in whole.items():
        write(f"in/{name}", document)
    write("in/ignored.png", b"\x89\xff")
    write_parquet("in/d.parquet", rows["parquet"])
    write("in/e.jsonl", jsonl(rows["jsonl"]) + b"\n  \n")
    write("in/f.jsonl.gz", gzip.compress(jsonl(rows["gz"])))
    write_zst("in/g.jsonl.zst", jsonl(rows["zst"], nested={"a": [1, {"b": None}]}))
    write("in/h.json.gz", gzip.compress(jsonl(rows["c4"])))
    text("in", tokenizer=tokenizer, val_fraction=0.2)
    expected = [whole["a.txt"], whole["b.md"], *(row for kind in rows.values() for row in kind), whole["sub/c.py"]]
    train, val = documents("mine", "train", eot), documents("mine", "val", eot)
    assert 10 < len(val) < 60
    position = 0
    for document in map(reference(tokenizer), expected):
        if val and document == val[0]:
            val.pop(0)
        else:
            assert document == train[position]
            position += 1
    assert not val and position == len(train)
    total = json.loads(pathlib.Path("data/mine/manifest.json").read_text())["splits"]
    assert total["train"]["bytes"] + total["val"]["bytes"] == sum(len(document.encode()) for document in expected)
    for shard in pathlib.Path("data/mine").glob("*.bin"):
        assert np.fromfile(shard, "<u4", 256)[3:5].tolist() == [{"gpt2": 50257, "llama2": 32000}[tokenizer], eot]
    prepare.main(["verify", "mine"])


@pytest.mark.parametrize("tokenizer, vocabulary, eot", [("bytes", 257, 256), pytest.param("gpt2", 50257, 50256, marks=needs_gpt2),
                                                        pytest.param("llama2", 32000, 2, marks=needs_llama2)])
def test_the_training_script_reads_what_was_prepared(tokenizer, vocabulary, eot, monkeypatch):
    """Its vocabulary, its checksums and every window of 16 + 1 tokens, over several shards."""
    import train_gpt
    write("in/a.jsonl", jsonl(sentences(20)))
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1000)
    text("in", tokenizer=tokenizer)
    for name, value in dict(block_size=16, data_dir="data", check_shards=True).items():
        monkeypatch.setattr(train_gpt, name, value)
    shards, windows = train_gpt.Shards("mine", "train"), []
    for start in range(0, shards.tokens, 1000):
        part = tokens("mine", "train")[start:start + 1000]
        windows += [part[i:i + 17] for i in range(0, len(part) - 16, 16)]
    assert (shards.vocab, shards.eot, len(shards)) == (vocabulary, eot, len(windows)) and shards.tokens > 2000
    assert np.array_equal(shards.read(np.arange(len(shards))), windows)


# ----------------------------------------------------------------------------------------------------------------------
# Splits, shards, units

def test_bytes_are_the_same_for_any_number_of_workers_and_units():
    write("in/a.txt", "".join(sentences(200)))
    write("in/b.jsonl", jsonl(sentences(500, 1)))
    write_parquet("in/c.parquet", sentences(500, 2))
    out = run("text", "--input", "in", "--name", "mine", "--workers", "3")
    assert out.returncode == 0, out.stderr
    three = contents("data/mine")
    shutil.rmtree("data")
    text("in")
    assert contents("data/mine") == three


def test_a_cut_within_the_last_character_is_behind_it(monkeypatch):
    """Of the one document that validation takes the end of, and of a file longer than a unit."""
    cats = "吾輩は猫である。名前はまだ無い。どこで生れたか。"
    text(write("in/cats.txt", cats))
    assert texts("mine", "train") + texts("mine", "val") == [cats, ""]
    monkeypatch.setattr(prepare, "UNIT", 8)
    long = "x" * 6 + "😀"
    text(write("in/long.txt", long), write("in/other.txt", "other"), name="long")
    assert sorted(texts("long", "train") + texts("long", "val")) == sorted([long, "other"])


@pytest.mark.parametrize("empty", ["z.jsonl", "z.parquet"])
def test_records_without_a_document_leave_validation_to_the_texts(empty):
    for i in range(10):
        write(f"in/{i}.txt", f"text {i}")
    if empty.endswith("jsonl"):
        write(f"in/{empty}", "")
    else:
        write_parquet(f"in/{empty}", [])
    text("in", val_fraction=1e-9)
    assert len(texts("mine", "val")) == 1 and len(texts("mine", "train")) == 9
    text("in/0.txt", f"in/{empty}", name="one", val_fraction=0.4)  # as if it were alone
    assert (texts("one", "train"), texts("one", "val")) == (["text"], [" 0"])


def test_units_do_not_change_the_documents(monkeypatch):
    rows = sentences(120, 3)
    write("in/b.jsonl", jsonl(rows))
    write_parquet("in/c.parquet", rows)
    text("in", name="whole", val_fraction=0.1)
    monkeypatch.setattr(prepare, "UNIT", 4000)
    text("in", name="parts", val_fraction=0.1)
    for split in ("train", "val"):
        assert np.array_equal(tokens("whole", split), tokens("parts", split))
    val = texts("parts", "val")
    assert len(val) > 3 and all(val.count(row) == 2 for row in val if row != rows[0])  # copies stay together


@pytest.mark.parametrize("unit", [67, 99, 100, 101, 199, 201, 250])
def test_every_line_is_in_one_unit(unit, monkeypatch):
    rows = [f"{i:087}" for i in range(30)]  # lines of 100 bytes
    assert {len(line) for line in write("a.jsonl", b"".join(b'{"text": "%s"}\n' % row.encode() for row in rows)).open("rb")} == {100}
    monkeypatch.setattr(prepare, "UNIT", unit)
    text("a.jsonl", val_fraction=0)
    assert texts("mine", "train") == rows


def test_shards_are_cut_at_a_fixed_size(monkeypatch):
    write("in/a.jsonl", jsonl(sentences(50)))
    text("in", name="one")
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(prepare, "UNIT", 700)
    text("in", name="many")
    for split in ("train", "val"):
        assert np.array_equal(tokens("one", split), tokens("many", split))
    for split, first in (("train", 1), ("val", 0)):
        shards = sorted(pathlib.Path("data/many").glob(f"many_{split}_*.bin"))
        assert [shard.name for shard in shards] == [f"many_{split}_{first + i:06}.bin" for i in range(len(shards))]
        assert [shard.stat().st_size for shard in shards[:-1]] == [1024 + 2 * 1000] * (len(shards) - 1)
    assert len(os.listdir("data/many")) > 10
    prepare.main(["verify", "many"])


def test_a_small_corpus_has_a_validation_split():
    write("one.txt", "word " * 1000)
    text("one.txt", name="one")
    assert 0.01 < len(tokens("one", "val")) / len(tokens("one", "train")) < 0.03
    assert "".join(texts("one", "train") + texts("one", "val")) == "word " * 1000
    for i in range(5):
        write(f"few/{i}.md", f"document {i}")
    text("few", name="few")
    assert len(texts("few", "val")) == 1 and len(texts("few", "train")) == 4
    write("r.jsonl", jsonl(["first", "second"]))
    text("r.jsonl", name="records")
    assert texts("records", "val") == ["first"] and texts("records", "train") == ["second"]
    write_parquet("empty/a.parquet", [])
    write("empty/b.jsonl", "")
    write("empty/c.jsonl", jsonl(["first", "second"]))
    text("empty", name="after_empty_files")
    assert texts("after_empty_files", "val") == ["first"] and texts("after_empty_files", "train") == ["second"]
    text("few", name="all", val_fraction=0)
    assert len(texts("all", "train")) == 5 and texts("all", "val") == []


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    write("r.jsonl", b'{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude42"}\n{"text": ""}\n')
    text("r.jsonl")
    assert texts("mine", "val") == ["a\ufffdb"] and texts("mine", "train") == ["🙂", ""]


def test_the_permutation_is_that_of_datasets():
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"i": range(5000)}).train_test_split(test_size=0.0105, seed=2357, shuffle=True)
    assert prepare.val_documents("drawn", 2357, 0.0105, 5000).tolist() == sorted(split["test"]["i"])
    assert len(prepare.val_documents("drawn", 2357, 0.0005, 8_013_769)) == 4007  # nanoGPT's val.bin


# ----------------------------------------------------------------------------------------------------------------------
# Interruptions

def many_files(n=40):
    for i in range(n):
        write(f"in/{i:03}.jsonl.gz", gzip.compress(jsonl(sentences(20, i))))  # a unit each


def test_killed_at_random_moments(monkeypatch):
    many_files(40)
    monkeypatch.setattr(prepare, "UNIT", 1)
    text("in")
    whole = contents("data/mine")
    shutil.rmtree("data")

    def finished():  # units, at the last moment that counts
        if os.path.exists("data/mine"):
            return 40
        with contextlib.suppress(FileNotFoundError):
            return json.loads(pathlib.Path("data/mine.partial/state.json").read_text())["at"][0]
        return 0
    rng, reached, middle = random.Random(0), [0], 0
    for kill in range(14):
        workers = "2" if kill % 6 == 0 else "1"
        process = start("text", "--input", "in", "--name", "mine", "--workers", workers, setup="prepare.UNIT = 1")
        goal = reached[-1] + rng.randint(0, 4)
        while process.poll() is None and finished() < goal:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.kill()
        assert "rror" not in process.communicate()[1]
        reached.append(finished())
        assert reached[-1] >= reached[-2]  # nothing that was finished is done again
        middle += 0 < reached[-1] < 40
        if reached[-1] == 40:  # it was done, or all but: again from the start
            text("in")
            assert contents("data/mine") == whole
            shutil.rmtree("data")
            reached = [0]
    text("in")
    assert contents("data/mine") == whole and middle >= 6


@pytest.mark.parametrize("failing", ["append", "seal", "write_json", "sync", "encode_unit"])
def test_a_full_disk_at_any_step(failing, monkeypatch, capsys):
    many_files(6)
    write("in/a.txt", "".join(sentences(100)))
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 20_000)
    monkeypatch.setattr(prepare, "UNIT", 10_000)
    text("in", name="mine")
    whole = contents("data/mine")
    shutil.rmtree("data")
    whole_function, calls = getattr(prepare, failing), [0]
    for last in (1, 2, 3, 5, 8, 13, 21):  # from the third on one unit at least is finished, and kept
        def full(*args, **kwargs):
            calls[0] += 1
            if calls[0] >= last:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/mine.partial")
            return whole_function(*args, **kwargs)
        calls[0] = 0
        monkeypatch.setattr(prepare, failing, full)
        monkeypatch.setattr(sys, "argv", ["prepare.py", "text", "--input", "in", "--name", "mine", "--workers", "1"])
        status = prepare.cli()
        error = capsys.readouterr().err
        if status == 0:
            break
        assert status == 1 and error.count("\n") == 1 and "No space left on device" in error
        assert last < 3 or os.path.exists("data/mine.partial/state.json")
    monkeypatch.setattr(prepare, failing, whole_function)
    text("in", name="mine")
    assert contents("data/mine") == whole


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "llama2"])
def test_a_disk_that_is_too_small_is_refused(tokenizer, monkeypatch):
    """Two bytes a token: of each byte, or of about four."""
    write("a.txt", "x " * (1000 if tokenizer == "bytes" else 4000))
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3000})())
    flags = ("--tokenizer", tokenizer) + ("--tokenizer_file", "nowhere") * (tokenizer == "llama2")
    refused("0.0 GB", "--data_dir", "text", "--input", "a.txt", "--name", "mine", *flags)


@needs_gpt2
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_tokens_that_are_imported_take_as_much_again(tokenizer, monkeypatch, capsys):
    write("train.bin", np.full(1500, 65, "<u2").tobytes())
    flags = ("import", "train.bin", "--name", "mine", "--tokenizer", tokenizer, "--workers", "1")
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2999})())
    refused("0.0 GB", "--data_dir", *flags)
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3000})())
    prepare.main(flags)


def test_what_two_folders_need_of_one_disk_adds_up(monkeypatch):
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3000})())
    prepare.check_disk(("data", 2000), ("cache", 1000))
    with pytest.raises(prepare.UserError, match="make room"):
        prepare.check_disk(("data", 2000), ("cache", 1001))


def test_two_runs_do_not_write_one_dataset(monkeypatch):
    write("a.txt", "x " * 1000)
    os.makedirs("data/mine.partial")
    with prepare.locked("data/mine.partial"):
        refused("another prepare.py", "--name", "text", "--input", "a.txt", "--name", "mine", left=["mine.partial"])
    with pytest.raises(BlockingIOError), prepare.locked("data/mine.partial"):  # of a terminal, say: not the lock's
        raise BlockingIOError
    text("a.txt")
    whole = contents("data/mine")
    monkeypatch.setattr(prepare, "existing", lambda *args: None)  # it looked just before the other one was done
    refused("another prepare.py has made data/mine", "same command", "text", "--input", "a.txt", "--name", "mine", left=["mine"])
    assert contents("data/mine") == whole


@pytest.mark.parametrize("link", [False, True])
def test_what_the_finished_folder_cannot_replace_is_told_first(link, monkeypatch):
    write("a.txt", "x " * 1000)
    os.makedirs("data/empty")
    os.symlink("empty", "data/mine") if link else write("data/mine", "")
    monkeypatch.setattr(prepare, "build", None)
    refused("data/mine is a file or a link", "--name", "text", "--input", "a.txt", "--name", "mine", left=["empty", "mine"])


def test_files_may_change_until_they_are_read(monkeypatch):
    many_files(4)
    monkeypatch.setattr(prepare, "UNIT", 1)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1000)
    write_json, calls = prepare.write_json, []

    def interrupted(path, thing, **how):
        calls.append(path)
        if len(calls) == 2:  # two units are in the shards, one is accounted for
            raise KeyboardInterrupt
        write_json(path, thing, **how)
    monkeypatch.setattr(prepare, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text("in")
    monkeypatch.setattr(prepare, "write_json", write_json)
    refused("unfinished run", "rm -r", *TEXT, "--val_fraction", "0.5", left=["mine.partial"])
    read, stat = pathlib.Path("in/000.jsonl.gz"), os.stat("in/000.jsonl.gz")
    os.utime(read)
    refused("its files changed", "rm -r", *TEXT, left=["mine.partial"])
    os.utime(read, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for i in range(1, 4):
        write(f"in/00{i}.jsonl.gz", gzip.compress(jsonl([f"short {i}"])))
    text("in")
    resumed = contents("data/mine")
    shutil.rmtree("data")
    text("in")
    assert contents("data/mine") == resumed


@needs_gpt2
def test_an_unfinished_run_keeps_its_tokenizer(monkeypatch):
    many_files(2)
    monkeypatch.setattr(prepare, "finish", lambda *args: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        text("in")
    refused('"tokenizer": "bytes"', "rm -r", *TEXT, "--tokenizer", "gpt2", left=["mine.partial"])


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc to find processes in")
def test_no_worker_outlives_a_kill():
    many_files(40)
    process = start(*TEXT, "--workers", "3", setup="prepare.UNIT = 1")
    while not os.path.exists("data/mine.partial/state.json"):
        time.sleep(0.001)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    assert len(workers) >= 3
    began = time.monotonic()
    while any(map(running, workers)):
        assert time.monotonic() - began < 5
        time.sleep(0.01)


def test_interrupt_says_how_to_go_on():
    write("in/a.txt", "word " * 20_000_000)
    process = start(*TEXT, start_new_session=True)
    while not os.path.exists("data/mine.partial/state.json"):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and "the same command goes on" in error and "Traceback" not in error


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc to read signal masks from")
def test_no_worker_hears_an_interrupt_from_its_first_moment():
    """Its traceback, of imports, would come before the parent's line."""
    write("in/a.txt", "word " * 20_000_000)
    process = start(*TEXT, "--workers", "2", start_new_session=True)
    workers = set()
    while len(workers) < 2:
        for pid in set(children(process.pid)) - workers:
            with contextlib.suppress(OSError):
                if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                    blocked = re.search(r"SigBlk:\s+(\w+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]
                    assert int(blocked, 16) >> signal.SIGINT - 1 & 1
                    workers.add(pid)
    os.killpg(process.pid, signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=20)[1]


def children(pid):
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def running(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def resident(pid):
    """MiB of a process and its children."""
    total = 0
    with contextlib.suppress(OSError):
        status = re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())
        total += int(status[1]) / 1024 if status else 0
        total += sum(map(resident, children(pid)))
    return total


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc to read memory from")
@pytest.mark.parametrize("tokenizer, size", [("bytes", 300), pytest.param(
    "gpt2", 300 if os.environ.get("PREPARE_SLOW_TESTS") else 24, marks=needs_gpt2)])
def test_memory_is_bounded(tokenizer, size):
    block = "".join(sentences(2000)).encode()[:1 << 20].decode(errors="ignore").encode()
    with open("a.txt", "wb") as f:
        for _ in range(size):
            f.write(block)
    process = start("text", "--input", "a.txt", "--name", "mine", "--tokenizer", tokenizer, "--workers", "2")
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0 and 20 < peak < 1536, peak
    print(f"{size} MiB with {tokenizer}: peak {peak:.0f} MiB")


# ----------------------------------------------------------------------------------------------------------------------
# verify, show, import

@pytest.fixture
def dataset():
    write("in/a.jsonl", jsonl(sentences(50)))
    text("in")
    return pathlib.Path("data/mine")


def refused(found, mend, *argv, left=()):
    """UserError in one line with both in it, and nothing half-written."""
    with pytest.raises(prepare.UserError) as error:
        prepare.main(list(argv))
    message = str(error.value)
    assert found in message and mend in message and "expected" in message and "\n" not in message, message
    assert sorted(os.listdir("data") if os.path.exists("data") else []) == sorted(left)


def test_verify_names_the_first_bad_shard(dataset):
    prepare.main(["verify", "mine"])
    shard, manifest = dataset / "mine_train_000001.bin", dataset / "manifest.json"
    whole, listed = shard.read_bytes(), json.loads(manifest.read_text())

    def check(found):
        refused(found, "rm -r data/mine", "verify", "mine", left=["mine"])
        shard.write_bytes(whole)
        manifest.write_text(json.dumps(listed))
        prepare.main(["verify", "mine"])
    shard.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    check("mine_train_000001.bin: the crc32")
    for word in (0, 1, 3, 4, 5, 6):
        shard.write_bytes(whole[:4 * word] + b"\7" + whole[4 * word + 1:])
        check("mine_train_000001.bin: its header")
    shard.write_bytes(whole[:600] + b"\7" + whole[601:])
    check("mine_train_000001.bin: its sha256")
    shard.write_bytes(whole[:-2])
    check("mine_train_000001.bin: its bytes")
    shard.unlink()
    check("mine_train_000001.bin: it is in the manifest; expected in the manifest and on the disk")
    for key in ("tokens", "documents"):
        splits = {**listed["splits"], "val": {**listed["splits"]["val"], key: 99}}
        manifest.write_text(json.dumps({**listed, "splits": splits}))
        check(f"manifest.json: its val {key}")
    manifest.write_text("{")
    check("manifest.json is damaged")
    write(dataset / "mine_train_000009.bin", whole)
    refused("mine_train_000009.bin: it is on the disk; expected", "rm -r", "verify", "mine", left=["mine"])


def test_verify_finds_ids_beyond_the_vocabulary(dataset):
    shard = dataset / "mine_val_000000.bin"
    ids = np.fromfile(shard, "<u2")
    ids[600] = 300
    ids.tofile(shard)
    manifest = json.loads((dataset / "manifest.json").read_text())
    crc = prepare.scan(shard, 256)[0]
    np.concatenate([np.frombuffer(np.uint32(crc).tobytes(), "<u2")]).tofile("crc")
    ids[10:12] = np.fromfile("crc", "<u2")
    ids.tofile(shard)
    manifest["shards"][-1].update(crc32=f"{crc:08x}", sha256=prepare.sha256(shard))
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    refused("its highest id is 300", "rm -r", "verify", "mine", left=["mine"])


def test_show_decodes(dataset, capsys):
    prepare.main(["show", "mine"])
    out = capsys.readouterr().out
    assert '"tokenizer": "bytes"' in out and repr(sentences(50)[0][:20])[1:-1] in out
    write("r.jsonl", jsonl(["one", "two", "", "three"]))
    text("r.jsonl", name="short")
    capsys.readouterr()
    prepare.main(["show", "short"])  # shards of less than is shown: behind the last document there is none
    assert [line for line in capsys.readouterr().out.splitlines() if line[:1] == "|"] == ["| 'one'", "| 'two'", "| ''", "| 'three'"]


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_dataset_may_be_named_by_its_folder(dataset, command, capsys):
    for path in (f"{dataset}/", str(dataset.resolve())):  # the first as a shell completes it
        prepare.main([command, path])
        assert f"{os.path.normpath(path)}: bytes tokens" in capsys.readouterr().out
    refused("data/mien/manifest.json does not exist", "did you mean mine?", command, "data/mien/", left=["mine"])
    refused("found data/mine and --data_dir=there", "leave --data_dir out", command, "data/mine", "--data_dir", "there", left=["mine"])
    folder = dataset.resolve()
    os.chdir(folder)
    prepare.main([command, "."])
    assert f"{folder}: bytes tokens" in capsys.readouterr().out


@pytest.mark.parametrize("command, unbuffered, status, told", [("show", "", 0, b""), ("verify", "", 1, b"nobody reads the output"),
                                                               ("verify", "1", 1, b"nobody reads the output")])
def test_output_that_nobody_reads(dataset, command, unbuffered, status, told):
    """`show NAME | head` has read enough; of the other commands one would think that they did their work."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, SCRIPT, command, "mine"], stdout=writer, stderr=subprocess.PIPE,
                          env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(writer)
    assert done.returncode == status and told in done.stderr and done.stderr.count(b"\n") == status


def test_closed_output_is_no_mistake(dataset):
    assert subprocess.run(["sh", "-c", f"{sys.executable} {SCRIPT} verify mine >&-"], stderr=subprocess.PIPE).stderr == b""


def test_complete_means_same_source_and_whole_shards(dataset):
    refused("its val_fraction is 0.02", "rm -r data/mine", *TEXT, "--val_fraction", "0.5", left=["mine"])
    refused("its tokenizer is bytes", "--name", *TEXT, "--tokenizer", "gpt2", left=["mine"])
    refused("its kind is text", "--name", "pysrc", "--name", "mine", left=["mine"])
    write("in/b.txt", "more")
    refused("its files is 1", "rm -r", *TEXT, left=["mine"])
    os.remove("in/b.txt")
    text("in")
    os.utime("in/a.jsonl")
    refused("is older than in/a.jsonl", "rm -r", *TEXT, left=["mine"])
    write("data/theirs/shard.bin", b"1")
    refused("no manifest.json", "--name", "text", "--input", "in", "--name", "theirs", left=["mine", "theirs"])


def test_import_of_nanogpt_and_modded_nanogpt(monkeypatch):
    rng = np.random.default_rng(0)
    made = {split: rng.integers(0, 256, n).astype("<u2") for split, n in (("train", 50_000), ("val", 3000))}
    for ids in made.values():
        ids[rng.integers(0, len(ids), 20)] = 256
    write("nano/other.bin", b"not of these two")
    for split, ids in made.items():
        write(f"nano/{split}.bin", ids.tobytes())
        write(f"modded/fineweb_{split}_000001.bin", shard_of_others(ids))
    for name, path in (("one", "nano/train.bin"), ("two", "modded"), ("three", "data/three-raw")):
        if name == "three":
            shutil.copytree("nano", path)
            refused("headerless train.bin", f"python prepare.py import {path}/train.bin", "verify", "three-raw",
                    left=["one", "two", "three-raw"])
        prepare.main(["import", path, "--name", name, "--tokenizer", "bytes", "--workers", "1"])
        for split, ids in made.items():
            assert np.array_equal(tokens(name, split), ids)
        total = json.loads(pathlib.Path("data", name, "manifest.json").read_text())["splits"]["train"]
        assert total["documents"] == (made["train"] == 256).sum() == len(made["train"]) - total["bytes"]
        prepare.main(["verify", name])


def test_import_goes_on_from_the_last_finished_part_of_a_file(monkeypatch):
    """Parts of 700 tokens: documents cross their borders, and end and begin there. What is finished is not read again."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 3000)
    made = np.random.default_rng(0).integers(0, 256, 10_000).astype("<u2")
    made[[99, 699, 1400, 2500, 2501, 5599, 9999]] = 256
    write("nano/train.bin", made.tobytes())
    flags = ("import", "nano", "--name", "mine", "--tokenizer", "bytes", "--workers", "1")
    prepare.main(flags)
    whole = contents("data/mine")
    assert json.loads(whole["manifest.json"])["splits"]["train"] == {"tokens": 10_000, "documents": 7, "bytes": 9993}
    shutil.rmtree("data")
    monkeypatch.setattr(prepare, "UNIT", 1400)
    encode_unit, read = prepare.encode_unit, []

    def interrupted(unit, *job):
        read.append(unit["from"])
        if len(read) == 6:
            raise KeyboardInterrupt
        return encode_unit(unit, *job)
    monkeypatch.setattr(prepare, "encode_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.main(flags)
    prepare.main(flags)
    assert read == [*range(0, 8400, 1400), *range(7000, 20_000, 1400)]
    assert contents("data/mine") == whole


def test_import_makes_the_same_with_any_number_of_workers(monkeypatch):
    ids = np.random.default_rng(0).integers(0, 257, 5_000_000).astype("<u2")  # two parts
    write("nano/train.bin", ids.tobytes())
    for workers in ("1", "2"):
        prepare.main(["import", "nano", "--name", "mine", "--tokenizer", "bytes", "--workers", workers, "--data_dir", workers])
    assert contents("1/mine") == contents("2/mine") and np.array_equal(np.fromfile("1/mine/mine_train_000001.bin", "<u2", offset=1024), ids)


def test_import_tells_what_validates_by_a_word_not_by_three_letters(capsys):
    for name in ("my_val_set_train_000001", "my_val_set_val_000000", "train-00000-of-00001", "val-00000-of-00001"):
        write(f"retrieval/{name}.bin", shard_of_others(np.full(200, 65)))
    prepare.main(["import", "retrieval", "--tokenizer", "bytes", "--workers", "1", "--data_dir", "big"])
    splits = json.loads(pathlib.Path("big/retrieval/manifest.json").read_text())["splits"]
    assert splits["train"]["tokens"] == splits["val"]["tokens"] == 400
    assert capsys.readouterr().out.endswith("train_gpt.py --dataset=retrieval --data_dir=big\n")
    write("My Data/train.bin", np.full(400, 65, "<u2").tobytes())
    refused("My Data cannot name a dataset", "--name mine", "import", "My Data/train.bin", "--tokenizer", "bytes", left=[])


def test_little_to_validate_on_is_told(capsys):
    write("nano/train.bin", np.full(1000, 65, "<u2").tobytes())
    prepare.main(["import", "nano/train.bin", "--name", "one", "--tokenizer", "bytes", "--workers", "1"])
    out = capsys.readouterr().out
    assert "note: 0 tokens to validate on" in out and "rm -r data/one and import the folder that holds both" in out
    assert "note: no id among the tokens is the end of a text; is bytes their tokenizer? Look with prepare.py show one" in out


def test_import_of_our_own_shards(monkeypatch):
    write("in/a.jsonl", jsonl(sentences(50)))
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1000)
    text("in")
    prepare.main(["import", "data/mine", "--name", "again", "--tokenizer", "bytes", "--workers", "1"])
    first, second = (json.loads(pathlib.Path("data", name, "manifest.json").read_text()) for name in ("mine", "again"))
    assert first["splits"] == second["splits"] and len(first["shards"]) == len(second["shards"]) > 3


@pytest.mark.parametrize("tokens", [1000, 5_000_000])  # the latter is more than one block
def test_import_checks_the_header_of_our_own_shards(tokens):
    ids = np.full(tokens, 65)
    ids[::900] = 256
    write_shard("a/x_train_000001.bin", ids)
    flags = ("--name", "mine", "--tokenizer", "bytes", "--workers", "1")
    prepare.main(["import", "a", *flags])
    assert json.loads(pathlib.Path("data/mine/manifest.json").read_text())["splits"]["train"]["documents"] == (ids == 256).sum()
    shutil.rmtree("data")
    write("a/x_train_000001.bin", pathlib.Path("a/x_train_000001.bin").read_bytes()[:-2] + b"B\0")
    refused("x_train_000001.bin is damaged, the crc32", "copy it again", "import", "a", *flags)
    write_shard("a/x_train_000001.bin", ids, vocab=50257)
    refused("a vocabulary of 50257; expected 257, of bytes", "--tokenizer", "import", "a", *flags)


def test_import_does_not_train_on_what_is_there_to_test():
    for name in ("x_train", "x_val", "x_test"):
        write(f"a/{name}.bin", shard_of_others(np.full(400, 65)))
    flags = ("--name", "mine", "--tokenizer", "bytes", "--workers", "1")
    refused("a holds x_test.bin", "mv a/x_test.bin", "import", "a", *flags)
    os.makedirs("tests")
    os.rename("a/x_test.bin", "tests/x_test.bin")
    prepare.main(["import", "tests", *flags])  # of what is there alone its owner knows best
    assert len(tokens("mine", "train")) == 400
    shutil.rmtree("data")
    for name in ("train_test", "val_test"):
        write(f"b/{name}.bin", shard_of_others(np.full(400, 65)))
    prepare.main(["import", "b", *flags])
    assert len(tokens("mine", "train")) == len(tokens("mine", "val")) == 400


def test_import_refuses():
    write("a/train.bin", np.arange(300, dtype="<u2").tobytes())
    refused("holds the id 299", "--tokenizer", "import", "a/train.bin", "--tokenizer", "bytes", "--workers", "1")
    write("a/meta.pkl", b"")
    refused("character-level", "prepare.py text", "import", "a/train.bin", "--tokenizer", "bytes")
    write("e/train.bin", np.arange(65_530, 65_540, dtype="<u4").tobytes())
    refused("holds the id 65535", "ids over 65,535 do not fit", "import", "e/train.bin", "--tokenizer", "bytes",
            "--workers", "1")
    write("b/train.bin", b"\1\2\3")
    refused("3 bytes", "copy it again", "import", "b/train.bin", "--tokenizer", "bytes", "--workers", "1")
    write("c/x_train_000001.bin", shard_of_others(np.arange(50))[:1024])
    refused("1024 bytes", "copy it again", "import", "c", "--tokenizer", "bytes", "--workers", "1")
    shard = shard_of_others(np.arange(50))
    write("f/x_train_000001.bin", shard[:4] + b"\2" + shard[5:])
    refused("version 2", "version 1", "import", "f", "--tokenizer", "bytes", "--workers", "1")
    write("d/x", b"")
    refused("no .bin file", "prepare.py text", "import", "d", "--tokenizer", "bytes")
    write("g/notes.txt", "As uint16 this would be legal ids of gpt2.\n" * 9)
    refused("g/notes.txt is text", "prepare.py text --input g/notes.txt", "import", "g/notes.txt", "--workers", "1")
    write("g/train.bin", "version https://git-lfs.github.com/spec/v1\n")
    refused("g/train.bin is text", "git-lfs", "import", "g/train.bin", "--workers", "1")
    write("g/notes.txt", "Ça aussi, déjà vu, même “ici”.\n" * 9)
    refused("g/notes.txt is text", "prepare.py text --input g/notes.txt", "import", "g/notes.txt", "--workers", "1")
    refused("does not exist", "ls", "import", "nowhere/train.bin")


# ----------------------------------------------------------------------------------------------------------------------
# Bad input

@pytest.mark.parametrize("found, mend, argv", [
    ("no source or command fineweeb", "did you mean fineweb?", ["fineweeb"]),
    ("no source or command 7", "prepare.py text", ["7"]),
    ("pysrc has no option --worker", "did you mean --workers?", ["--worker", "3"]),
    ("text has no option --nam", "did you mean --name?", ["text", "--input", "in", "--nam", "x", "--name", "y"]),
    ("--input", "--help", ["text", "--name", "mine"]),
    ("--name", "--help", ["text", "--input", "in"]),
    ("0 is not a number from 1 to 999", "--help", ["fineweb", "--workers", "0"]),
    ("pysrc has no option --tokenizer;", "--help", ["pysrc", "--tokenizer", "gpt2"]),
    ("10Q", "--help", ["fineweb", "--tokens", "10Q"]),
    ("1.5 is not a number", "--help", ["text", "--input", "in", "--name", "mine", "--val_fraction", "1.5"]),
    ("invalid choice: 'gpt3'", "--help", ["text", "--input", "in", "--name", "mine", "--tokenizer", "gpt3"]),
    ("../up", "--name mine", ["text", "--input", "in", "--name", "../up"]),
    ("x.partial", "--name mine", ["text", "--input", "in", "--name", "x.partial"]),
    ("nowhere does not exist", "ls", ["text", "--input", "nowhere", "--name", "mine"]),
    ("in/odd.png holds no text", "ls", ["text", "--input", "in/odd.png", "--name", "mine"]),
    ("in/empty holds no text", "ls", ["text", "--input", "in/empty", "--name", "mine"]),
    ("is not UTF-8 at byte 3", "iconv", ["text", "--input", "in/latin.txt", "--name", "mine"]),
    ("is not UTF-8 at byte 3", "iconv", ["text", "--input", "in/latin", "--name", "mine"]),
    ("the line at byte 14 is not JSON", "delete it", ["text", "--input", "in/cut.jsonl", "--name", "mine"]),
    ("its fields are body, id", "jq", ["text", "--input", "in/body.jsonl", "--name", "mine"]),
    ("its columns are id, body", "rename_columns", ["text", "--input", "in/body.parquet", "--name", "mine"]),
    ("in/cut.parquet is damaged", "rm in/cut.parquet", ["text", "--input", "in/cut.parquet", "--name", "mine"]),
    ("is damaged", "rm in/cut.jsonl.zst", ["text", "--input", "in/cut.jsonl.zst", "--name", "mine"]),
    ("is damaged", "rm in/cut.jsonl.gz", ["text", "--input", "in/cut.jsonl.gz", "--name", "mine"]),
    ("in/odd.png holds no text", "ls", ["text", "--input", "in/fine.txt", "in/odd.png", "--name", "mine"]),
    ("none of the 2 documents of in/blank.jsonl holds text", "give other files", ["text", "--input", "in/blank.jsonl", "--name", "mine"]),
    ("none of the 0 documents of in/nothing.txt holds text", "give other files", ["text", "--input", "in/nothing.txt", "--name", "mine"]),
    ("1 documents leave none for train", "add text", ["text", "--input", "in/single.jsonl", "--name", "mine"]),
    ("the line at byte 0 is not JSON", "delete it", ["text", "--input", "in/deep.jsonl", "--name", "mine"]),
    ("nope/manifest.json does not exist", "python prepare.py", ["verify", "nope"]),
    ("not Llama 2's tokenizer.model", "--tokenizer_file", [
        "text", "--input", "in/fine.txt", "--name", "mine", "--tokenizer", "llama2", "--tokenizer_file", "in/odd.png"]),
    ("not Llama 2's tokenizer.model", "--tokenizer_file", [  # it alone means llama2
        "text", "--input", "in/fine.txt", "--name", "mine", "--tokenizer_file", "in/odd.png"]),
    ("--tokenizer_file=in/odd.png is not for bytes", "leave --tokenizer_file out", [
        "text", "--input", "in/fine.txt", "--name", "mine", "--tokenizer", "bytes", "--tokenizer_file", "in/odd.png"]),
    ("fineweb10b-gpt2 has no option --tokenizer_file", "--help", ["fineweb10b-gpt2", "--tokenizer_file", "in/odd.png"]),
])
def test_bad_input(found, mend, argv):
    import pyarrow
    import pyarrow.parquet
    os.makedirs("in/empty")
    write("in/odd.png", b"1")
    write("in/latin.txt", "abc\xe9 def".encode("latin-1") * 10)
    write("in/latin/1.txt", "abc\xe9 def".encode("latin-1") * 10)
    write("in/latin/2.txt", "fine")
    write("in/fine.txt", "fine")
    write("in/cut.jsonl", b'{"text": "a"}\n{"text": "b\n')
    write("in/body.jsonl", b'{"body": "a", "id": 1}\n')
    write("in/blank.jsonl", jsonl(["", ""]))
    write("in/single.jsonl", jsonl(["one"]))
    write("in/nothing.txt", "")
    write("in/deep.jsonl", '{"text": ' + "[" * 100_000)
    write("in/cut.parquet", b"PAR1 and no more")
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), "in/body.parquet")
    write_zst("whole.zst", os.urandom(10_000))
    write("in/cut.jsonl.zst", pathlib.Path("whole.zst").read_bytes()[:5000])
    write("in/cut.jsonl.gz", gzip.compress(os.urandom(10_000))[:5000])
    refused(found, mend, *argv, *(["--workers", "1"] if argv[0] == "text" else []))


@pytest.mark.parametrize("tokens", ["0", "0.0001k", "10Q"])
def test_a_number_of_tokens_is_at_least_one(tokens):
    with pytest.raises(prepare.UserError, match=f"{tokens} is not a number of tokens, such as 10B"):
        prepare.parse(["fineweb", "--tokens", tokens])


def test_a_folder_that_is_a_link_is_not_followed_and_told(capfd):
    write("in/a.txt", "word " * 1000)
    write("there/b.txt", "else")
    for name in ("b", "c"):
        os.symlink("../there", f"in/{name}")
    os.symlink("..", "in/circle")
    os.symlink("../in", "in/self")
    text("in", val_fraction=0)
    assert texts("mine", "train") == ["word " * 1000]
    told, = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"prepare.py: note: folders that are links are left out: in/\w+ and 2 more; give them with --input too", told)
    text("in", "in/b", name="both", val_fraction=0)
    assert texts("both", "train") == ["word " * 1000, "else"]
    assert "are left out: in/circle; give" in capfd.readouterr().err  # the others have been read
    os.mkdir("links")
    os.symlink("../there", "links/b")
    with pytest.raises(prepare.UserError, match="holds no text but in links/b, a link, which is not followed; .*; ls -R links/b/"):
        text("links")


def test_an_editors_lock_and_a_pipe_are_not_read():
    write("in/a.txt", "word " * 1000)
    write("in/x_train.bin", shard_of_others(np.full(400, 65)))
    for name in (".#a.txt", ".#x_train.bin"):
        os.symlink("me@host.1234", f"in/{name}")
    for name in ("b.txt", "x_val.bin"):
        os.mkfifo(f"in/{name}")
    text("in")
    prepare.main(["import", "in", "--name", "theirs", "--tokenizer", "bytes", "--workers", "1"])
    assert len(tokens("mine", "train")) > 4000 and len(tokens("theirs", "train")) == 400
    there = ["mine", "theirs"]
    refused("in/b.txt is a pipe", "ls", "text", "--input", "in/b.txt", "--name", "more", left=there)
    refused("in/x_val.bin is a pipe", "ls", "import", "in/x_val.bin", "--name", "more", left=there)


@pytest.mark.parametrize("package, argv", [("tiktoken", ["in/a.txt", "--tokenizer", "gpt2"]), ("pyarrow", ["in/b.parquet"]), (
    "sentencepiece", ["in/a.txt", "--tokenizer", "llama2", "--tokenizer_file", "nowhere"])])
def test_a_missing_package_is_one_line(package, argv, monkeypatch, capsys):
    write("in/a.txt", "word " * 100)
    write_parquet("in/b.parquet", ["one", "two"])
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(prepare, "load_tokenizer", prepare.load_tokenizer.__wrapped__)  # it remembers tokenizers
    monkeypatch.setattr(sys, "argv", ["prepare.py", "text", "--name", "mine", "--workers", "1", "--input", *argv])
    assert prepare.cli() == 1 and not os.path.exists("data/mine.partial")
    assert capsys.readouterr().err.endswith(f"error: package {package} is missing; expected it to be installed; pip install {package}\n")


def test_an_error_is_one_line_and_status_1():
    write("in/a.txt", "abc\xe9".encode("latin-1"))
    write("in/b.txt", "fine")
    write("file", "")
    for argv, found in ((["fineweeb"], "no source"), ([*TEXT, "--workers", "2"], "not UTF-8"),
                        (["--data_dir", "file/data"], "Not a directory")):
        out = run(*argv)
        assert out.returncode == 1 and len(out.stderr.splitlines()) == 1, out.stderr
        assert out.stderr.startswith("prepare.py: error: ") and found in out.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_to_write():
    os.makedirs("data", mode=0o500)
    out = run()
    assert out.returncode == 1 and "Permission denied" in out.stderr and len(out.stderr.splitlines()) == 1


def die(*job):
    os._exit(3)


def test_a_worker_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(prepare, "encode_unit", die)
    monkeypatch.setattr(prepare, "start_worker", None)
    with pytest.raises(prepare.UserError, match="worker process was killed.* or begins again if this took less than a minute"):
        with prepare.encoders(2, ("bytes", None)) as submit:
            submit({}, "part")()


def test_a_wrong_tokenizer_is_told_before_any_process_starts(monkeypatch):
    write("in/a.txt", "text " * 100)
    monkeypatch.setattr(prepare, "encoders", None)
    refused("in/a.txt is not Llama 2's tokenizer.model", "--tokenizer_file", *TEXT, "--tokenizer_file", "in/a.txt", "--workers", "2")


def test_gpt2_vocabulary_out_of_reach(tmp_path):
    write("in/a.txt", "text " * 100)
    nowhere = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9")
    nowhere.update(NO_PROXY="", no_proxy="", TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"))
    out = run(*TEXT, "--tokenizer", "gpt2", **nowhere)
    assert out.returncode == 1 and len(out.stderr.splitlines()) == 1 and not os.path.exists("data")
    for part in ("TIKTOKEN_CACHE_DIR", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
                 "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"):
        assert part in out.stderr


# ----------------------------------------------------------------------------------------------------------------------
# The Hub, served on loopback from files in their real layout

class Hub:
    """What huggingface_hub asks of a Hub, for the files below `root`/REPO."""
    sha, pause = "0123456789abcdef0123456789abcdef01234567", 0  # the latter in s before a file

    def __init__(self, root):
        self.root, self.failures, self.asked, self.gated = root, [], [], None

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(handler):
                self.answer(handler)
            do_HEAD = do_GET

            def log_message(handler, *args):
                pass
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, handler):
        path = urllib.parse.unquote(urllib.parse.urlsplit(handler.path).path)
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(handler.path).query)
        self.asked.append(f"{handler.command} {path}")
        for failure in self.failures:
            if failure["in"] in path and failure.get("times", 1) > 0:
                failure["times"] -= 1
                return self.send(handler, failure.get("status", 503), b"", failure.get("headers", {}))
        api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.*))?", path)
        file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
        repo, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else (None, None)
        folder = self.root / repo if repo else None
        if not folder or not folder.is_dir():
            return self.send(handler, 401, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", self.sha, Hub.sha, *(spec["revision"] for spec in prepare.SOURCES.values())):
            return self.send(handler, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        if api and api[2] == "revision":
            return self.json(handler, {"id": repo, "sha": self.sha, "siblings": [], "tags": [], "private": False,
                                       "downloads": 0, "likes": 0})
        if api:
            files = sorted(p for p in (folder / (api[4] or "")).rglob("*") if p.is_file())
            listing = [{"type": "file", "oid": "0" * 40, "size": p.stat().st_size,
                        "path": p.relative_to(folder).as_posix()} for p in files]
            start = int(query.get("cursor", ["0"])[0])
            link = {"Link": f'<{self.url}{handler.path.split("?")[0]}?recursive=true&cursor={start + 2}>; rel="next"'}
            return self.json(handler, listing[start:start + 2], link if start + 2 < len(listing) else {})
        if not (folder / file[3]).is_file():
            return self.send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
        time.sleep(self.pause * (handler.command == "GET"))
        data = (folder / file[3]).read_bytes()
        headers = {"ETag": f'"{len(data)}-{abs(hash(data))}"', "X-Repo-Commit": self.sha, "Accept-Ranges": "bytes"}
        begin = re.fullmatch(r"bytes=(\d+)-.*", handler.headers.get("Range", "bytes=0-"))
        self.send(handler, 200, data[int(begin[1]) if begin else 0:], headers)

    def json(self, handler, thing, headers={}):
        self.send(handler, 200, json.dumps(thing).encode(), {"Content-Type": "application/json", **headers})

    def send(self, handler, status, body, headers):
        handler.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            handler.send_header(key, str(value))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    served = Hub(tmp_path / "hub")
    yield served
    served.server.shutdown()


def from_hub(hub, *argv, setup=""):
    """prepare.py in a process whose Hub is `hub` and whose pauses are short; -> it, finished."""
    setup = f"import time; time.sleep = lambda seconds: None\nprepare.RETRY_PAUSES = (0.01, 0.02)\n{setup}"
    env = {**PYTHONPATH, "HF_ENDPOINT": hub.url, "HF_HOME": str(hub.root.parent / "hf_home"), "NO_PROXY": "127.0.0.1",
           **dict.fromkeys(("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"), "1")}
    program = f"import sys, prepare\n{setup}\nsys.exit(prepare.cli())"
    return subprocess.run([sys.executable, "-c", program, *argv, "--workers", "1"], capture_output=True, text=True,
                          timeout=120, env=env)


def lay_out(hub, source):
    """Files as the source has them, beside others that must be left alone; -> (train documents, val documents)."""
    repo = hub.root / prepare.SOURCES[source]["repo"]
    write(repo / "README.md", "card")
    if source == "openwebtext":
        rows = sentences(90, 1, 40)
        for i in range(3):
            write_parquet(repo / f"plain_text/train-0000{i}-of-00003.parquet", rows[30 * i:30 * i + 30])
        val = set(np.random.default_rng(2357).permutation(90)[:1].tolist())
        return [row for i, row in enumerate(rows) if i not in val], [row for i, row in enumerate(rows) if i in val]
    if source in ("fineweb", "fineweb10b"):
        folder = "sample/100BT" if source == "fineweb" else "sample/10BT"
        rows = sentences(60, 2, 40)
        for i in range(3):
            write_parquet(repo / folder / f"00{i}_00000.parquet", rows[20 * i:20 * i + 20])
        write_parquet(repo / "sample/350BT/000_00000.parquet", ["another sample"])
        write_parquet(repo / "data/CC-MAIN-2013-20/000_00000.parquet", ["the whole"])
        return rows[25:], rows[:25]
    if source == "dclm":
        rows = sentences(60, 3, 40)
        for i in range(4):
            nested = {"metadata": {"WARC-Type": "response", "n": i}, "language_id_whole_page_fasttext": {"en": 0.9}}
            name = f"global-shard_01_of_10/local-shard_{i // 2}_of_10/shard_0000000{i % 2}_processed.jsonl.zst"
            write_zst(repo / name, jsonl(rows[15 * i:15 * i + 15], **nested))
        write_zst(repo / name.replace("shard_01", "shard_02"), jsonl(["not this tenth"]))
        return rows, []
    rows = sentences(40, 4, 40)
    for i in range(2):
        packed = gzip.compress(jsonl(rows[20 * i:20 * i + 20], url="u", timestamp="t"))
        write(repo / f"en/c4-validation.0000{i}-of-00002.json.gz", packed)
    write(repo / "en/c4-train.00000-of-01024.json.gz", gzip.compress(jsonl(["training text"])))
    write(repo / "en.noblocklist/c4-validation.00000-of-00008.json.gz", gzip.compress(jsonl(["another configuration"])))
    return [], rows


SMALL = """prepare.SOURCES["openwebtext"]["documents"] = 90
for name in ("fineweb", "fineweb10b"): prepare.SOURCES[name]["val"] = ("first", 25)
prepare.UNIT = 3000"""


@pytest.mark.parametrize("source", ["openwebtext", "fineweb", "fineweb10b", "dclm", "c4"])
def test_source_from_the_hub(source, hub):
    train, val = lay_out(hub, source)
    out = from_hub(hub, source, "--tokenizer", "bytes", setup=SMALL)
    assert out.returncode == 0, out.stderr
    assert texts(source, "train") == train and texts(source, "val") == val
    manifest = json.loads(pathlib.Path("data", source, "manifest.json").read_text())
    assert manifest["source"]["commit"] == hub.sha and manifest["source"]["repo"] == prepare.SOURCES[source]["repo"]
    assert manifest["splits"]["train"]["documents"] == len(train) and manifest["splits"]["val"]["documents"] == len(val)
    prepare.main(["verify", source])
    hub.server.shutdown()
    again = from_hub(hub, source, "--tokenizer", "bytes", setup=SMALL)
    assert again.returncode == 0 and "complete already" in again.stdout  # and that without a network


@pytest.mark.parametrize("tokenizer, eot, source", [pytest.param("gpt2", 50256, "fineweb", marks=needs_gpt2),
                                                    pytest.param("llama2", 2, "c4", marks=needs_llama2)])
def test_source_with_its_own_tokenizer(tokenizer, eot, source, hub):
    _, val = lay_out(hub, source)
    out = from_hub(hub, source, *(["--tokenizer_file", LLAMA2] if tokenizer == "llama2" else []), setup=SMALL)
    assert out.returncode == 0, out.stderr
    assert documents(source, "val", eot) == [reference(tokenizer)(row) for row in val]


@needs_llama2
def test_llama2_tokenizer_from_the_hub(hub):
    write(hub.root / "api/models", "")
    write("r.jsonl", jsonl(["one", "two"]))
    out = from_hub(hub, "text", "--input", "r.jsonl", "--name", "mine", "--tokenizer", "llama2")
    assert out.returncode == 1 and "no such repository" in out.stderr and len(out.stderr.splitlines()) == 1


@needs_gpt2
def test_ready_shards_from_the_hub(hub):
    repo = hub.root / "kjj0/fineweb10B-gpt2"
    rng = np.random.default_rng(0)
    names = ("val_000000", "train_000001", "train_000002", "train_000003")
    made = {name: rng.integers(0, 50257, 5000).astype("<u2") for name in names}
    for name, ids in made.items():
        ids[::500] = 50256
        write(repo / f"fineweb_{name}.bin", shard_of_others(ids))
    out = from_hub(hub, "fineweb10b-gpt2", "--tokens", "9k")
    assert out.returncode == 0, out.stderr
    assert np.array_equal(tokens("fineweb10b-gpt2", "val"), made["val_000000"])
    train = tokens("fineweb10b-gpt2", "train")
    assert 9000 <= len(train) < 9502
    assert np.array_equal(train, np.concatenate([made["train_000001"], made["train_000002"]])[:len(train)])
    import tiktoken
    total = json.loads(pathlib.Path("data/fineweb10b-gpt2/manifest.json").read_text())["splits"]["val"]
    decode = tiktoken.get_encoding("gpt2").decode_single_token_bytes
    assert total["bytes"] == sum(len(decode(i)) for i in made["val_000000"] if i != 50256)
    prepare.main(["verify", "fineweb10b-gpt2"])


@pytest.mark.parametrize("pause", [0, 0.3])
def test_the_next_file_comes_down_meanwhile_and_every_file_once(pause, hub):
    """While the one before is encoded, which is held up until then; or what is still on its way then is waited for."""
    train, _ = lay_out(hub, "dclm")
    hub.pause = pause
    hold = """
import glob, threading
encode_unit = prepare.encode_unit
def held(*job):
    while len(glob.glob("hf_home/**/*.zst", recursive=True)) < 2: threading.Event().wait(0.01)
    return encode_unit(*job)
prepare.encode_unit = held"""
    out = from_hub(hub, "dclm", "--tokenizer", "bytes", setup="" if pause else hold)
    assert out.returncode == 0 and texts("dclm", "train") == train, out.stderr
    got = [asked for asked in hub.asked if asked.startswith("GET /datasets")]
    assert len(got) == len(set(got)) == 4, got


def test_tokens_stops_at_the_end_of_a_document(hub):
    train, val = lay_out(hub, "fineweb")
    exact = sum(len(row.encode()) + 1 for row in train[:9])
    for limit in (1, 1000, exact, 10**9):
        flags = ("--tokenizer", "bytes", "--tokens", str(limit), "--name", f"f{limit}")
        out = from_hub(hub, "fineweb", *flags, setup=SMALL)
        assert out.returncode == 0, out.stderr
        found = texts(f"f{limit}", "train")
        assert found == train[:len(found)] and texts(f"f{limit}", "val") == val  # val does not depend on --tokens
        assert len(tokens(f"f{limit}", "train")) >= limit or len(found) == len(train)
        assert len(found) == 1 or sum(len(row.encode()) + 1 for row in found[:-1]) < limit
        prepare.main(["verify", f"f{limit}"])
    out = from_hub(hub, "fineweb", "--tokenizer", "bytes", "--tokens", "2k", "--name", "f1000", setup=SMALL)
    assert out.returncode == 1 and "its limit is 1000; expected 2000" in out.stderr


def test_a_run_that_had_all_its_tokens_is_resumed(hub):
    lay_out(hub, "fineweb")
    flags = ("fineweb", "--tokenizer", "bytes", "--tokens", "1000", "--name")
    assert from_hub(hub, *flags, "my_val_set", setup=SMALL).returncode == 0
    whole = contents("data/my_val_set")
    shutil.rmtree("data")
    out = from_hub(hub, *flags, "my_val_set", setup=SMALL + "\nprepare.finish = lambda *args: sys.exit(7)")
    assert out.returncode == 7 and os.listdir("data") == ["my_val_set.partial"]
    hub.sha = "f" * 40  # the branch moves on; an unfinished run does not
    assert from_hub(hub, *flags, "my_val_set", setup=SMALL).returncode == 0
    assert contents("data/my_val_set") == whole


def test_network_errors_are_retried_then_named_and_the_run_goes_on_where_it_was(hub):
    train, val = lay_out(hub, "dclm")
    hub.failures = [{"in": part, "times": 1, "status": status} for part, status in (
        ("/tree/", 503), ("/revision/", 429), ("shard_00000001", 503))]
    out = from_hub(hub, "dclm", "--tokenizer", "bytes", "--name", "whole")
    assert out.returncode == 0 and "trying again" in out.stderr, out.stderr
    shutil.rmtree("hf_home")
    hub.failures = [{"in": "local-shard_1_of_10", "times": 10**6}]
    hours_go_by = "prepare.time.monotonic = lambda n=iter(range(0, 10**9, 100)): next(n)"
    out = from_hub(hub, "dclm", "--tokenizer", "bytes", setup=hours_go_by)
    error, = [line for line in out.stderr.splitlines() if line.startswith("prepare.py: error: ")]
    assert out.returncode == 1 and "local-shard_1_of_10" in error and "goes on" in error, out.stderr
    assert os.listdir("data/dclm.partial") and not os.path.exists("data/dclm")
    hub.failures, hub.asked = [], []
    shutil.rmtree("hf_home")
    out = from_hub(hub, "dclm", "--tokenizer", "bytes")
    assert out.returncode == 0, out.stderr
    assert not any("local-shard_0_of_10" in asked for asked in hub.asked)  # finished files are not even asked for
    assert texts("dclm", "train") == texts("whole", "train") == train


@pytest.mark.parametrize("where, status, code, found, mend", [
    ("/revision/", 403, "GatedRepo", "is gated", "hf auth login"),
    ("/revision/", 404, "RepoNotFound", "no such repository", "HF_ENDPOINT"),
    ("/revision/", 404, "RevisionNotFound", "no such revision", "--revision main"),
    ("/resolve/", 404, "EntryNotFound", "no such file", "--revision main"),
    ("/revision/", 418, "", "answers 418", "hf auth login"),
    ("/revision/", 503, "", "does not answer", "goes on from here"),
])
def test_what_the_hub_refuses_is_one_line(where, status, code, found, mend, hub):
    lay_out(hub, "c4")
    hub.failures = [{"in": where, "times": 10**6, "status": status, "headers": {"X-Error-Code": code}}]
    out = from_hub(hub, "c4", "--tokenizer", "bytes", setup="prepare.RETRY_PAUSES = ()")
    assert out.returncode == 1 and found in out.stderr and mend in out.stderr, out.stderr
    assert len(out.stderr.splitlines()) == 1, out.stderr
    assert not os.path.exists("data") or not os.listdir("data")


@pytest.mark.parametrize("call", [lambda api: api.dataset_info("a/b"), lambda api: api.hf_hub_download("a/b", "c")])
def test_what_the_user_put_offline_is_not_tried_again(call, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(prepare.time, "sleep", lambda seconds: pytest.fail("a pause"))
    with pytest.raises(prepare.UserError, match="a/b: HF_HUB_OFFLINE is set; expected a network; unset HF_HUB_OFFLINE"):
        prepare.hub("a/b", call)


def test_without_a_network_llama2_names_the_flag_that_needs_none(hub):
    hub.failures = [{"in": "tokenizer.model", "times": 10**6, "status": 503}]
    out = from_hub(hub, "c4", setup="prepare.RETRY_PAUSES = (0.01,)")
    retry, error = [line for line in out.stderr.splitlines() if line.startswith("prepare.py: ")]
    assert out.returncode == 1 and "trying again" in retry and "goes on from here" in error, out.stderr
    assert all(line.endswith("; --tokenizer_file=PATH takes one that you have") for line in (retry, error))


def test_a_repository_of_another_layout(hub):
    write(hub.root / "allenai/c4/README.md", "nothing else")
    out = from_hub(hub, "c4", "--tokenizer", "bytes")
    assert out.returncode == 1 and len(out.stderr.splitlines()) == 1, out.stderr


def test_what_validates_is_told_by_a_hash_that_never_changes(monkeypatch):
    """Another one would be another default dataset: that of the records could not be made again."""
    def share(data):
        return int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "big") / 2**64
    for i in range(1000):
        write(f"lib/{i}.py", f"{i}")
    monkeypatch.setattr(prepare.sysconfig, "get_paths", lambda: {"stdlib": "lib"})
    prepare.main(["--workers", "1"])
    assert texts("pysrc", "val") == sorted(str(i) for i in range(1000) if share(f"{i}.py") < 0.02)
    rows = [f"{i % 7:0950}{i:0100}" for i in range(300)]  # of a record the first 1000 characters count
    write("r.jsonl", jsonl(rows))
    text("r.jsonl", val_fraction=0.1)
    assert texts("mine", "val") == [row for i, row in enumerate(rows) if i == 0 or share(row[:1000]) < 0.1]
    for i in range(5):
        write(f"few/{i}.md", f"{i}")
    text("few", name="few", val_fraction=1e-9)
    assert texts("few", "val") == [min("01234", key=lambda i: share(f"{i}.md"))]


def test_an_interruption_between_two_files_keeps_the_count_of_documents(hub):
    train, val = lay_out(hub, "fineweb")
    stop = """
write_json = prepare.write_json
def interrupted(path, thing, **how):
    write_json(path, thing, **how)
    if thing.get("at", [0])[:2] == [1, 0]: raise KeyboardInterrupt
prepare.write_json = interrupted"""
    assert from_hub(hub, "fineweb", "--tokenizer", "bytes", setup=SMALL + stop).returncode == 130
    assert from_hub(hub, "fineweb", "--tokenizer", "bytes", setup=SMALL).returncode == 0
    assert texts("fineweb", "train") == train and texts("fineweb", "val") == val


def test_a_file_that_was_read_in_part_may_not_change(monkeypatch):
    write("in/a.jsonl", jsonl(sentences(60)))
    monkeypatch.setattr(prepare, "UNIT", 4000)
    write_json = prepare.write_json

    def interrupted(*args, **how):
        write_json(*args, **how)
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(prepare, "write_json", interrupted)
        text("in")
    os.utime("in/a.jsonl")
    refused("its files changed", "rm -r", *TEXT, left=["mine.partial"])


def test_of_a_parquet_file_in_parts_one_document_is_the_first(monkeypatch):
    rows = sentences(60, 3)
    write_parquet("in/a.parquet", rows)
    monkeypatch.setattr(prepare, "UNIT", 4000)
    text("in", val_fraction=1e-9)
    assert texts("mine", "val") == rows[:1] and texts("mine", "train") == rows[1:]


def test_the_first_id_beyond_the_vocabulary_is_beyond_it(dataset):
    write("a/train.bin", np.array([65] * 300 + [257], "<u2").tobytes())
    refused("holds the id 257", "--tokenizer", "import", "a/train.bin", "--name", "b", "--tokenizer", "bytes", "--workers", "1",
            left=["mine"])
    shard, manifest = dataset / "mine_val_000000.bin", json.loads((dataset / "manifest.json").read_text())
    ids = np.fromfile(shard, "<u2")
    ids[600] = 257
    ids.tofile(shard)
    crc = prepare.scan(shard, 256)[0]
    ids[10:12] = np.array([crc], "<u4").view("<u2")
    ids.tofile(shard)
    manifest["shards"][-1].update(crc32=f"{crc:08x}", sha256=prepare.sha256(shard))
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    refused("its highest id is 257; expected 256", "rm -r", "verify", "mine", left=["mine"])


def test_the_limit_is_of_the_split_that_there_is_and_a_disk_too_small_for_it_is_told(hub):
    _, val = lay_out(hub, "c4")
    assert from_hub(hub, "c4", "--tokenizer", "bytes", "--tokens", "1000", setup=SMALL).returncode == 0
    found = texts("c4", "val")
    assert found == val[:len(found)] and len(tokens("c4", "val")) >= 1000 > sum(len(row.encode()) + 1 for row in found[:-1])
    out = from_hub(hub, "c4", "--tokenizer", "bytes", "--tokens", "900T", "--name", "more", setup=SMALL)
    assert out.returncode == 1 and "expected 1800000.0 GB at least" in out.stderr


@pytest.mark.parametrize("written, count", [("10B", 10**10), ("500M", 5 * 10**8), ("1.5k", 1500), ("1T", 10**12), ("1_000_000", 10**6)])
def test_numbers_of_tokens(written, count):
    assert prepare.parse(["fineweb", "--tokens", written]).tokens == count


def test_what_is_given_twice_counts_once_and_a_row_without_text_is_an_empty_document():
    rows = sentences(9)
    write_parquet("in/a.parquet", [*rows, None])
    text("in", "in/a.parquet", val_fraction=0)
    assert texts("mine", "train") == [*rows, ""]


@pytest.mark.parametrize("n, told", [(255, True), (256, False)])
def test_less_than_a_window_to_validate_on_is_told(n, told, capsys):
    write("nano/train.bin", np.full(1000, 65, "<u2").tobytes())
    write("nano/val.bin", np.full(n + 1, 65, "<u2").tobytes())
    prepare.main(["import", "nano", "--tokenizer", "bytes", "--workers", "1"])
    assert (f"note: {n + 1} tokens to validate on" in capsys.readouterr().out) == told


def test_without_a_terminal_to_write_to_a_dataset_is_made():
    write("in/a.jsonl", jsonl(["one", "two"]))
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", sys.executable, SCRIPT, *TEXT, "--tokenizer", "bytes", "--workers", "1"])
    assert done.returncode == 0 and sorted(texts("mine", "train") + texts("mine", "val")) == ["one", "two"]


def test_a_complete_dataset_where_nothing_can_be_written_is_complete(dataset, monkeypatch, capsys):
    before = contents(dataset)

    def refusing(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")
    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(pathlib.Path, name, refusing)
    monkeypatch.setattr(prepare.shutil, "rmtree", refusing)
    prepare.main(TEXT)
    assert "is complete already" in capsys.readouterr().out and contents(dataset) == before


def test_a_file_system_that_cannot_sync_folders_will_do(monkeypatch):
    fsync = os.fsync

    def refusing(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)
    monkeypatch.setattr(os, "fsync", refusing)
    write("in/a.jsonl", jsonl(["one", "two"]))
    text("in")
    assert sorted(texts("mine", "train") + texts("mine", "val")) == ["one", "two"]


def test_windows_is_told_what_is_expected(monkeypatch, capsys):
    monkeypatch.setattr(prepare, "os", types.SimpleNamespace(name="nt"))
    assert prepare.cli() == 1 and capsys.readouterr().err.startswith("prepare.py: error: found Windows, expected Linux or macOS; run it in")
