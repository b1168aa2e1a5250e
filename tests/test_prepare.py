"""prepare.py: what the shards hold against an independent reading of the same files and the vocabularies' libraries;
interruptions; a Hub served on loopback in the sources' real layout; what people do wrong."""
import contextlib, gzip, hashlib, http.server, io, json, os, random, re, shutil, subprocess, sys, sysconfig, threading
from urllib.parse import unquote
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import zstandard

import prepare
from common import ROOT, fresh, write_shard

LLAMA2 = os.environ.get("LLAMA2_TOKENIZER")
COMMAND = ["text", "--input", "in", "--name", "mine"]

def child(*argv, setup="", **env):
    """prepare.py in a process of its own, after the statements of `setup`."""
    program = f"import os, resource, sys, prepare\n{setup}\nprepare.main(sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **env}
    return subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=60, env=env)

def tokens(name, split):
    """Read as modded-nanogpt does: three header words, then uint16."""
    found = [np.array([], "<u2")]
    for path in sorted(Path("data", name).glob(f"{name}_{split}_*.bin")):
        assert np.fromfile(path, "<i4", 3).tolist() == [20240520, 1, (path.stat().st_size - 1024) // 2]
        found.append(np.fromfile(path, "<u2", offset=1024))
    return np.concatenate(found)

def documents(name, split, eot=256):
    ids = tokens(name, split)
    return [part[:-1] for part in np.split(ids, np.flatnonzero(ids == eot) + 1)[:-1]]

def texts(name, split):
    return [document.astype(np.uint8).tobytes().decode() for document in documents(name, split)]

def write(path, data):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data.encode() if isinstance(data, str) else data)

def parquet(rows):
    table, file = pyarrow.table({"id": range(len(rows)), "text": pyarrow.array(rows, "string")}), io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=7)
    return file.getvalue()

def jsonl(rows, **more):
    return "".join(json.dumps({"text": row, **more}, ensure_ascii=False) + "\n" for row in rows).encode()

ATOMS = ["a", "the", " the", "'s", "'", "'ll", "1", "23", " ", "   ", "\n", "\n\n", "\t", "\r\n", "\0", "\x1c", "\x85",
         "\u00a0", "\u3000", "\u2003", "\u2028", "\u2581", "\u0301", "é", "日本", "。", "🙂", "½", "-", "--", "_",
         "<|endoftext|>", "</s>", "<0x0A>"]

def sentences(n, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(ATOMS, k=rng.randint(1, 200))) + f" {seed}.{i}" for i in range(n)]

def reference(tokenizer):
    if tokenizer == "gpt2":
        "TIKTOKEN_CACHE_DIR" in os.environ or pytest.skip("TIKTOKEN_CACHE_DIR is not set")
        return pytest.importorskip("tiktoken").get_encoding("gpt2").encode_ordinary
    LLAMA2 or pytest.skip("LLAMA2_TOKENIZER (path of tokenizer.model) is not set")
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=LLAMA2).encode

@pytest.mark.parametrize("tokenizer", ["gpt2", "llama2"])
def test_ids_are_the_librarys_own_wherever_a_text_is_cut(tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "BLOCK", 31)  # ends within characters
    rows, eot, expected = sentences(500), prepare.TOKENIZERS[tokenizer][1], reference(tokenizer)
    rows[0] = "\n" + rows[0]
    for i, row in enumerate(rows):
        write(f"in/{i:03}.txt", ("\ufeff" if i == 0 else "") + row)
    pieces = [piece for i in range(500) for piece in prepare.documents("a.txt", f"in/{i:03}.txt", "text")]
    assert len(pieces) > 1000
    file = ["--tokenizer_file", LLAMA2] if tokenizer == "llama2" else []
    prepare.main([*COMMAND, "--val_fraction=0", "--tokenizer", tokenizer, *file])
    assert [ids.tolist() for ids in documents("mine", "train", eot)] == [expected(row) for row in rows]
    shards = fresh().Shards("mine", "train")  # the train scripts'
    assert (shards.vocab, shards.eot) == prepare.TOKENIZERS[tokenizer]
    assert tokenizer != "llama2" or Path("data/mine/tokenizer.model").read_bytes() == Path(LLAMA2).read_bytes()

def test_a_long_run_of_spaces():
    """tiktoken's own encode_ordinary panics: its regex runs out of stack."""
    begin, run, end, expected = "some words " * 1000, " " * 1_100_000, "more words " * 1000, reference("gpt2")
    encode, decode = prepare.load_tokenizer("gpt2")
    ids = encode(begin + run + end, True).tolist()
    assert decode(ids) == begin + run + end
    assert ids[:1990] == expected(begin)[:1990] and ids[-1990:] == expected(end)[-1990:]

def test_the_default_is_the_standard_library(capsys):
    prepare.main([])
    library, expected = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, folders, files in os.walk(library):
        folders[:] = {*folders} - {"site-packages", "dist-packages"}
        for name in files:
            with contextlib.suppress(UnicodeDecodeError):
                if name.endswith(".py"):
                    expected.append(Path(folder, name).read_bytes().decode())
    train, val = texts("pysrc", "train"), texts("pysrc", "val")
    assert sorted(train + val) == sorted(expected) and 0.01 < len(val) / len(expected) < 0.04
    prepare.main(["show", "data/pysrc/"])
    assert repr(train[0][:100])[:-1] in capsys.readouterr().out
    prepare.main(["pysrc"])
    assert "complete already" in capsys.readouterr().out

def test_every_kind_of_file_gives_its_documents_in_order(monkeypatch):
    """The first record validates, and what has a hash below --val_fraction: of its file's name or its own text."""
    monkeypatch.setattr(prepare, "BLOCK", 31)
    monkeypatch.setattr(prepare, "BATCH", 99)
    rows, a = [[1000 * "=" + row for row in sentences(30, seed)] for seed in range(5)], "\r\n".join(sentences(9, 9))
    write("in/a.txt", a)
    write("in/0.parquet", parquet([]))
    write("in/b.parquet", parquet([*rows[0], None, ""]))
    with pyarrow.parquet.ParquetWriter("in/b0.parquet", schema := pyarrow.schema({"text": "string"})) as file:
        for part in [], ["r0"], [], ["r1"]:
            file.write_table(pyarrow.table({"text": part}, schema))
    write("in/c.jsonl", jsonl(rows[1]) + b'\n  \n{"text": null}\n{"text": "half \\ud800, \\ud83d\\ude42"}')
    write("in/d.jsonl.gz", gzip.compress(jsonl(rows[2][:9])) + gzip.compress(jsonl(rows[2][9:])))
    write("in/e.jsonl.zst", zstandard.compress(jsonl(rows[3][:9], a={"b": 1})) + zstandard.compress(jsonl(rows[3][9:])))
    write("in/f.json.gz", gzip.compress(jsonl(rows[4])))
    write("in/g/val.md", "")  # left out
    write("in/g/h.py", "h = 1")
    prepare.main([*COMMAND, "--val_fraction=0.2", "--workers=3"])
    records = [*rows[0], "", "", "r0", "r1", *rows[1], "", "half \ufffd, 🙂", *rows[2], *rows[3], *rows[4]]
    expected = {"train": [], "val": []}
    for key, document in [("in/a.txt", a), *zip(records, records), ("in/g/h.py", "h = 1")]:
        share = int(hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), 16) / 2**64
        expected["val" if share < 0.2 or document == rows[0][0] else "train"].append(document)
    assert {split: texts("mine", split) for split in expected} == expected

def test_of_few_documents_the_end_of_each_validates(capsys):
    """As a share of its bytes, from the next word on or else the next character; with text in another field than the
    default's. Too little text is told."""
    book, chinese = "one line\nanother\n" * 4000, "日本" * 100
    write("in/book.txt", book)
    pyarrow.parquet.write_table(pyarrow.table({"body": [chinese]}), "in/c.parquet")
    write("in/d.jsonl", jsonl([book]).replace(b'"text"', b'"body"'))
    write("in/note.md", "short\n")
    refused(r"c.parquet.*text.*\(--field\)", *COMMAND)
    prepare.main([*COMMAND, "--field=body", "--val_fraction=0.05", "--tokens=99"])  # leaves out nothing that validates
    assert "next: " in capsys.readouterr().out
    rest, end = book[:64603], book[64603:]  # 95 % are 64600
    assert texts("mine", "val") == [end, chinese[-10:], end] and end.startswith(" line\n")
    assert texts("mine", "train") == [rest, chinese[:-10], rest, "short\n"]
    for lacking, *argv in ("val", "in/note.md", "--name=a"), ("train", "in/book.txt", "--name=b", "--val_fraction=1"):
        prepare.main(["text", "--input", *argv])
        assert f" has no {lacking} tokens: give more text" in capsys.readouterr().out.splitlines()[-1]

def test_few_jobs_are_read_ahead_and_results_are_in_order():
    read = []
    jobs = (read.append(n) or n for n in range(99))
    results = prepare.in_threads(2, lambda n: threading.Event().wait(0.001 * (n % 3)) or n, jobs)
    for n in range(90):
        assert next(results) == n and len(read) <= n + 1 + 2 * 2

def test_shards_end_with_a_batch_and_those_of_a_group_that_failed_are_no_part_of_the_dataset(monkeypatch):
    """So a header's int32 count cannot overflow, and no record lies in two shards."""
    assert prepare.SHARD_TOKENS < 2**30
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 2000)
    monkeypatch.setattr(prepare, "BATCH", 300)
    write("in/a.jsonl", jsonl(sentences(180)) + b'{"text": "cut')
    refused("a.jsonl, line 181: JSONDecodeError", *COMMAND, "--val_fraction=0", "--workers=1")
    failed = os.listdir("data/mine.partial")
    write("in/a.jsonl", jsonl(sentences(90)))
    prepare.main([*COMMAND, "--val_fraction=0"])
    assert texts("mine", "train") == sentences(90)
    shards = json.loads(Path("data/mine/manifest.json").read_text())["shards"]
    assert 5 < len(shards) < len(failed) and sum(shard["documents"] for shard in shards) == 90
    assert all(2000 <= shard["tokens"] < 4000 for shard in shards[:-1])
    assert all(np.fromfile(f"data/mine/{shard['file']}", "<u2")[-1] == 256 for shard in shards)

KILL = "def kill(*_): os.kill(os.getpid(), 9)\nprepare.GROUP = 1000\n"

@pytest.mark.parametrize("setup", [
    KILL + "write = prepare.write_shard\n"
           "prepare.write_shard = lambda *a: kill() if len(a[3]) > 6 else write(*a)",
    KILL + "replace = os.replace\nos.replace = lambda *a: replace(*a) or kill()",
    KILL + "prepare.Path.rename = kill",
    "prepare.GROUP = 1000\nresource.setrlimit(resource.RLIMIT_FSIZE, (3500, 3500))"],
    ids=["killed in a group", "killed behind the first group", "killed before the last step", "no room"])
def test_the_same_command_ends_an_interrupted_run_in_the_same_bytes(setup, monkeypatch):
    monkeypatch.setattr(prepare, "GROUP", 1000)
    for i in range(12):
        write(f"in/{i}.txt", "".join(sentences(3, seed=i + 5)))
    prepare.main(COMMAND)
    Path("data/mine").rename("whole")
    run = child(*COMMAND, setup=setup)
    assert run.returncode == -9 or run.returncode == 1 and len(run.stderr.splitlines()) == 1 and "OSError" in run.stderr
    assert os.listdir("data") == ["mine.partial"]
    manifest = Path("data/mine.partial/manifest.json").read_text()
    done = {path.name: path.stat().st_mtime_ns for path in Path("data/mine.partial").iterdir() if path.name in manifest}
    prepare.main(COMMAND)
    assert os.listdir("data") == ["mine"] and len(os.listdir("whole")) > 6
    for path in Path("whole").iterdir():
        assert path.read_bytes() == Path("data/mine", path.name).read_bytes()
    assert all(Path("data/mine", name).stat().st_mtime_ns == time for name, time in done.items())  # not made again

def refused(pattern, *argv):
    error = pytest.raises(SystemExit, prepare.main, list(argv))
    assert error.match(pattern) and "\n" not in error.value.code

@pytest.mark.parametrize("name, data, pattern", [
    # with a time in the file, workers would collect tests of different names
    ("a.jsonl.gz", gzip.compress(jsonl("abc"), mtime=0)[:-9], "Truncated(?!.*(UTF-8|--field))"),
    ("a.jsonl", b'\n{"body": "x"}', "a.jsonl, line 2: KeyError: 'text'.*--field"), ("a.parquet", b"PAR1", "Arrow"),
    ("a.jsonl", '{"text": 5}', "line 1: AttributeError")])
def test_what_cannot_be_read_is_named(name, data, pattern):
    write("in/" + name, data)
    refused(f"in.*{pattern}", *COMMAND)
    assert not Path("data/mine").exists()

def test_a_dataset_is_one_folder_in_data_of_one_source():
    write("in/a.txt", "A b c")
    # the train scripts would take my_val_train_000001.bin for both
    for name in "../x", "a/b", "..", ".x", "a.partial", "my_val":
        refused("--name", *COMMAND[:-1], name)
    for command in COMMAND, ["import", "in/a.txt", "--name=ids"]:
        refused("not Llama 2's tokenizer", *command, "--tokenizer_file=in/a.txt")
    refused("nowhere does not exist", "text", "--input", "in", "nowhere", "--name", "mine")
    assert os.listdir() == ["in"]
    prepare.main(COMMAND)
    os.rename("in", "elsewhere")
    shutil.copytree("elsewhere", "in", copy_function=shutil.copyfile)  # other times
    prepare.main([*COMMAND[:2], "./in/", *COMMAND[3:]])
    write("in/b.txt", "B")
    refused("holds something else", *COMMAND)

def test_damage_is_found():
    write("in/a.txt", " ".join(sentences(9)))
    prepare.main(COMMAND)
    path = Path("data/mine/mine_train_000001.bin")
    good = path.read_bytes()
    for bad in good[:-2], good + b"a", good[:500], good[:1030] + b"?" + good[1031:], good[:12] + b"?" + good[13:]:
        path.write_bytes(bad)
        refused("damaged", "verify", "mine")
    path.write_bytes(good)
    prepare.main(["verify", "mine"])
    write_shard(path, np.flip(np.frombuffer(good[1024:], "<u2")), vocab=257, eot=256)
    refused("damaged", "verify", "mine")  # it is whole, but another
    write("data/mine/mine_train_000099.bin", good)
    refused("other shards", "verify", "mine")

def test_import_refuses_what_is_cut_or_of_another_tokenizer():
    write_shard("a/train.bin", np.arange(500) % 257)
    write("b/train.bin", Path("a/train.bin").read_bytes()[:1500])
    write("c/train.bin", np.full(500, 60000, "<u2").tobytes())
    for name, tokenizer, pattern in ("a", "gpt2", "257"), ("b", "bytes", "1500 bytes"), ("c", "gpt2", "60000"):
        refused(pattern, "import", "--name", name, name, "--tokenizer", tokenizer)

def test_of_others_shards_one_line_says_what_was_found_and_what_to_run(capsys):
    write_shard("data/llmc/tiny_shakespeare_train.bin", range(500), ours=False)
    refused("no manifest.json of prepare.py's; python prepare.py import data/llmc ", "verify", "llmc")
    refused("data/lmlc has no manifest.json", "verify", "lmlc")
    refused("no manifest.json of prepare.py", "import", "data/llmc", "--name", "llmc")
    write("llama3/edu_fineweb_train_000001.bin", np.array([20240801, 7, 128_000], "<u4").tobytes())
    refused("llama3/.* ids of 32 bits.*python prepare.py text", "import", "llama3", "--name", "llama3")
    write("chars/train.bin", np.arange(65, dtype="<u2").tobytes())
    write("chars/meta.pkl", "")
    refused("python prepare.py text --input TEXT --name c", "import", "chars/train.bin", "--name", "c")
    prepare.main(["import", "data/llmc", "--name", "mine"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("data/mine has no val tokens: ") and last.endswith("--dataset=mine --val_dataset=ANOTHER")
    Path("data/mine").rename("data/mine.partial")
    prepare.main(["import", "data", "--name", "once"])
    assert tokens("once", "train").tolist() == [*range(500)]

def test_no_name_is_a_pattern_or_an_address():
    odd = ["a[1]", "a*", "a?", "{a,b}", "x::a", "file:", "~", "[!a]", "%41", "a b#"]
    for name in ["a1", "ab", "b", *odd]:
        write(f"in/{name}/{name}_train.jsonl", jsonl([name]))
        write(f"in/{name}/{name}_train.bin", 2 * name)
    prepare.main(["text", "--name=mine", "--val_fraction=0", "--input", *(f"in/{name}" for name in odd)])
    assert texts("mine", "train") == odd
    for n, name in enumerate(odd):
        prepare.main(["import", f"in/{name}", f"--name=n{n}"])
        assert tokens(f"n{n}", "train").tobytes() == (2 * name).encode()

def test_an_import_refuses_ids_of_another_width():
    ids = np.random.default_rng(0).integers(0, 50257, 4000)
    sparse = np.where(ids % 9, 0, ids)
    for width in "<i4", "<i8":
        labels = np.where(np.arange(4000) % 1000, ids, -100)  # where nothing is to be learnt
        for part in ids, ids % 65, sparse, ids % 50000 + 65536 * (ids % 2), labels:
            write("wide/train.bin", part.astype(width).tobytes())
            refused("wide/train.bin .* ids of 32 bits or 64.*prepare.py text", "import", "wide", "--name=wide")
    np.save(numpys := io.BytesIO(), ids.astype("<u2"))
    for part, looks in ((Path(__file__).read_bytes(), "text"), ((ids % 65).astype("u1"), "text"),
                        ((ids % 65).astype(">i4"), "ids of 32 bits or 64, not 16"),
                        ((ids % 65).astype("<f8"), "ids of 32 bits or 64, not 16"),
                        (numpys.getvalue(), "a file of NumPy's"), (b"LITPKDS  ", "a file of lit-gpt's")):
        write("wide/train.bin", bytes(part))
        refused(f"wide/train.bin looks like {looks}; ", "import", "wide", "--name=wide")
    assert os.listdir() == ["wide"]
    for n, part in enumerate([ids, ids % 3, sparse, ids * 0, [5, 0], np.repeat([7, 0, 0, 0], 99)]):
        write(f"n{n}/train.bin", np.asarray(part, "<u2").tobytes())
        prepare.main(["import", f"n{n}", f"--name=n{n}"])
        assert np.array_equal(tokens(f"n{n}", "train"), part)

def test_what_is_held_out_is_not_trained_on(capsys):
    """By whole words of its name or its folders': contest is not left out, nor is latest."""
    for n, name in enumerate([
            "val", "b/Validation/0", "train/validset", "contest_train", "latest/train", "train/interval", "train/hold",
            "train/hin_Deva", "test", "a/my-test_01", "test/0", "train/Test/0", "train.dev", "tests/train", "held-out",
            "train/holdout", "testing/0", "hold-out", "testdata/0", "newsdiscusstest2015", "testsplit", "tst2013",
            "wikiTest", "QATest", "eng.testb", "lambada_development_plain_text", "testdev", "testsets/0", "HELDout",
            "all/0"]):
        write(f"ids/{name}.bin", np.array([n], "<u2").tobytes())
        write(f"in/{name}.txt", str(n))
    os.remove("ids/all/0.bin")
    write("ids/part0.bin", np.array([99], "<u2").tobytes())
    write("in/part/0.txt", "99")
    for link, target in (("in/test_part", "part"), ("in/a0", "test"), ("in/a1", "b/Validation"),
                         ("in/tests/0.txt", "../all/0.txt")):
        os.symlink(target, link)
    for left_out, argv in (22, ["import", "ids", "--name=ids"]), (23, COMMAND):
        prepare.main(argv)
        assert f"left out: {left_out} " in capsys.readouterr().out.splitlines()[0]
    for split, numbers in ("val", [0, 1, 2]), ("train", [3, 4, 5, 6, 7]):
        assert sorted(tokens("ids", split)) == numbers == sorted(map(int, texts("mine", split)))
    prepare.main(["import", "ids", "--name=few", "--tokens=1"])  # what validates is not counted
    assert [len(tokens("few", split)) for split in ("val", "train")] == [3, 1]
    for path in "in/test", "in/test.txt", "in/test/0.txt":
        refused("expected text", "text", "--name=no", "--input", path)
    refused("named train or val", "import", "ids/test/", "--name=no")
    folders = [f"corpus/{split}/en" for split in ("test", "train", "val")]
    for folder in folders:
        write(f"{folder}/0.txt", folder)
    write("corpus/test/0.txt", "test")  # less deep than others
    files = ["corpus/test/0.txt", *(f"{folder}/0.txt" for folder in folders)]
    for name, *tops, last in ("files", *files), ("folders", "corpus/test", *folders[1:]), ("globbed", *folders):
        prepare.main(["text", f"--name={name}", "--input", *tops, "--input", last])
        assert (texts(name, "train"), texts(name, "val")) == (folders[1:2], folders[2:])
    write("corpus/train/0.txt", "a")
    prepare.main(["text", "--name=one", "--val_fraction=0", "--input", folders[0], "corpus/train/0.txt"])
    assert texts("one", "train") == ["a"]
    write("dev/notes/a.txt", "a")
    write("b.txt", "b")
    prepare.main(["text", "--name=mixed", "--input", *folders, "b.txt"])
    assert (sorted(texts("mixed", "train")), texts("mixed", "val")) == (["b", folders[1]], folders[2:])
    prepare.main(["text", "--name=apart", "--val_fraction=0", "--input", "dev/notes", "b.txt"])
    assert sorted(texts("apart", "train")) == ["a", "b"]

def test_the_split_does_not_depend_on_the_locale():
    """Neither of texts nor of files by their names."""
    shares = "sys.exit(repr([prepare.share('caf\\xe9'), prepare.share(os.fsdecode(b'caf\\xc3\\xa9'))]))"
    run = child(setup=shares, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert eval(run.stderr) == [prepare.share("caf\xe9")] * 2

def test_capitals_and_links_are_read_and_hidden_files_counted(capsys):
    write("in/A.TXT", b"\xef\xbb\xbfmarked")
    write("in/B.JSONL", b"\xef\xbb\xbf" + jsonl(["record"]))
    write("elsewhere/C.Md", "linked")
    for name in "in/._a\n.txt", "in/.git/b.txt", "in/c.png":
        write(name, b"\xff")
    write("in/v2/d.txt", "in v2")
    for link, target in (("in/link", "../elsewhere"), ("in/once_more", "link"), ("in/loop", "."), ("in/.new", "v2"),
                         ("elsewhere/up", ".."), ("in/z.txt", "A.TXT")):
        os.symlink(target, link)
    write("in/blobs/9f2c", "blob")  # as the Hub's cache has them
    os.symlink("blobs/9f2c", "in/z.md")
    os.symlink("nowhere", "in/v2/e.txt")
    prepare.main(["text", "--name=mine", "--val_fraction=0", "--input", "in", "elsewhere", "in/A.TXT"])
    assert texts("mine", "train") == ["marked", "record", "linked", "in v2", "blob"]  # each once
    line = capsys.readouterr().out.splitlines()[0]
    assert "left out: 5 " in line and line.endswith(r"/._a\n.txt'")

@pytest.mark.parametrize("mended", [4, 5000])  # bytes
def test_when_a_damaged_file_is_mended_the_same_command_goes_on(mended, monkeypatch):
    monkeypatch.setattr(prepare, "GROUP", 1000)
    for name, damaged, *command in [("txt", b"\xff" * 1500, "text", "--input"), ("bin", b"odd", "import")]:
        command = [*command, "in", f"--name={name}", "--val_fraction=0"]
        write(f"in/a/train.{name}", "\1" * 998)
        write(f"in/b/train.{name}", damaged)
        refused(f"b/train.{name}: .*{'UTF-8' if name == 'txt' else ''}", *command)
        first = f"{name}_train_000001.bin"
        done = os.stat(f"data/{name}.partial/{first}").st_mtime_ns
        write(f"in/b/train.{name}", "\2" * mended)
        prepare.main(command)
        prepare.main(command)
        assert os.stat(f"data/{name}/{first}").st_mtime_ns == done  # not made again
        found = tokens(name, "train")
        expected = [1] * 998 + [256] + [2] * mended + [256] if name == "txt" else [257] * 499 + [514] * (mended // 2)
        assert found.tolist() == expected
        write(f"in/a/train.{name}", "\3" * 998)
        refused("holds something else", *command)

@pytest.mark.parametrize("told, words", [
    ("--workers", "--workers=0"), ("--tokens", "--tokens=inf"), ("--tokens", "--tokens=9MB"),
    ("pysrc takes name;", "--input in --name=a"), ("verify takes what;", "verify"),
    ("text takes input and name;", "text --input in"), ("text takes input and name;", "text --input= --name=a"),
    ("a fraction is 0 to 1", "text --input in --name=a --val_fraction=5")])
def test_a_number_is_a_number_and_nothing_is_ignored(told, words, capsys):
    pytest.raises(SystemExit, prepare.main, words.split()).match("2")
    assert told in capsys.readouterr().err.splitlines()[-1]

class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a Hub, for the files in hub/REPO, at the pinned revisions only."""
    log_message = lambda *args: None

    def do_GET(self):
        path, _, query = unquote(self.path).partition("?")
        repo, kind, revision, name = re.match("(?:/api)?/datasets/(.+?/.+?)/(.+?)/([^/]+)/?(.*)", path).groups()
        assert revision in [spec["revision"] for spec in prepare.SOURCES.values() if spec["repo"] == repo]
        file, status = Path("hub", repo, name), 200
        if kind == "revision":
            body = json.dumps({"id": repo, "sha": revision, "siblings": []}).encode()
        elif kind == "tree":
            body = json.dumps([dict(
                type="directory" if path.is_dir() else "file", oid="0" * 40, size=path.stat().st_size,
                path=path.relative_to(Path("hub", repo)).as_posix())
                for path in (file.rglob("*") if "recursive=true" in query else file.iterdir())]).encode()
        else:
            first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
            status, body = 206, file.read_bytes()[first:last + 1]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

def test_every_source_from_the_hub():
    import datasets
    rows, ids = sentences(90), np.arange(3000)
    repos = {name: f"hub/{spec['repo']}/" for name, spec in prepare.SOURCES.items()}
    for i in range(3):
        part = rows[30 * i:30 * i + 30]
        write(repos["openwebtext"] + f"plain_text/train-{i:05d}-of-00003.parquet", parquet(part))
        write(repos["fineweb"] + f"sample/100BT/{i:03d}_00000.parquet", parquet(part))
        write(repos["fineweb"] + f"sample/10BT/{i:03d}_00000.parquet", parquet(part[::-1]))
        write(repos["dclm"] + f"global-shard_01_of_10/local-shard_{i}_of_10/shard_00000000_processed.jsonl.zst",
              zstandard.compress(jsonl(part[:9], metadata={"A": 1}) + jsonl(part[9:], metadata={"A": "x", "B": []})))
        write(repos["c4"] + f"en/c4-validation.{i:05d}-of-00003.json.gz", gzip.compress(jsonl(part, url="u")))
        write_shard(repos["fineweb10b-gpt2"] + f"fineweb_train_{i + 1:06d}.bin", ids[i:], ours=False)
    write_shard(repos["fineweb10b-gpt2"] + "fineweb_val_000000.bin", ids[:500], ours=False)
    write(repos["fineweb"] + "sample/350BT/000_00000.parquet", b"not to be read")
    write(repos["dclm"] + "global-shard_02_of_10/local-shard_0_of_10/shard_0.jsonl.zst", b"not to be read")
    setup = """prepare.SOURCES["openwebtext"]["val"] = (0.03, 2357, 90)
prepare.SOURCES["fineweb"]["val"] = prepare.SOURCES["fineweb10b"]["val"] = range(40)
for name in set(prepare.SOURCES) - {"c4"}:
    prepare.main([name, "--tokens=4k"] if name == "fineweb10b-gpt2" else [name, "--tokenizer=bytes"])"""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = child("c4", "--tokenizer", "bytes", setup=setup, HF_HUB_DISABLE_XET="1",
                HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    assert run.returncode == 0 and not run.stderr, run.stderr

    drawn = datasets.Dataset.from_dict({"n": range(90)}).train_test_split(0.03, seed=2357)["test"]["n"]
    backwards = [row for i in range(0, 90, 30) for row in rows[i:i + 30][::-1]]
    for name, order, val in [("openwebtext", rows, sorted(drawn)), ("fineweb", rows, range(40)), ("dclm", rows, []),
                             ("fineweb10b", backwards, range(40)), ("c4", rows, range(90))]:
        assert texts(name, "val") == [order[i] for i in val]
        assert texts(name, "train") == [row for i, row in enumerate(order) if i not in set(val)]
        prepare.main(["verify", name])
    assert np.array_equal(tokens("fineweb10b-gpt2", "train"), [*ids, *ids[1:]])  # the third is beyond --tokens
    assert np.array_equal(tokens("fineweb10b-gpt2", "val"), ids[:500])

@pytest.mark.parametrize("argv, pattern", [
    (["c4", "--tokenizer", "bytes"], "with a network the same command goes on"), (["c4"], "set --tokenizer_file to"),
    (["text", "--input", "a.txt", "--name", "mine", "--tokenizer", "gpt2"], "set TIKTOKEN_CACHE_DIR to")])
def test_without_a_network_one_line_says_what_to_do(argv, pattern):
    write("a.txt", "A b c")
    env = dict.fromkeys(["HF_ENDPOINT", "HTTPS_PROXY", "https_proxy"], "http://127.0.0.1:9")
    offline = str(int(argv == ["c4"]))  # else huggingface_hub tries for 20 s
    run = child(*argv, TIKTOKEN_CACHE_DIR="empty", HF_HUB_OFFLINE=offline, **env)
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and pattern in run.stderr
