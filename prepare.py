"""
Text -> tokenized shards in data/NAME/, which train_gpt.py and train_llama.py read.

    python prepare.py                            # the default: the source of Python's standard library, no download
    python prepare.py fineweb --tokens 10B       # a corpus of the paper, from the Hugging Face Hub: see SOURCES below
    python prepare.py text --input notes/ book.txt --name mine --tokenizer gpt2  # your .txt .md .py .jsonl .parquet
    python prepare.py import nanoGPT/data/openwebtext/train.bin --name owt       # tokens that another project made
    python prepare.py verify pysrc               # every checksum, count and id range
    python prepare.py show pysrc                 # the manifest and a decoded excerpt

The default takes 3 s on 2 cores, makes 63 MB of shards from 31.5 MB of text (Python 3.11) and ends with

    next: torchrun --standalone --nproc_per_node=1 train_gpt.py

A shard is what llm.c and modded-nanogpt read: 256 int32 header words, then uint16 token ids, little endian.

    word 0  magic 20240520      word 3  vocabulary size         word 6  1: words 3 to 5 are filled in
         1  version 1                4  end-of-text id                  (0 in the shards of others, who
         2  number of tokens         5  crc32 of the tokens             know the first three words only)

Every document is followed by the end-of-text id (bytes 256, gpt2 50256, llama2 </s> = 2; never <s>). Text that looks
like a special token is ordinary text. The shards' bytes do not depend on the number of workers.

Everything is written to data/NAME.partial/, which becomes data/NAME/ when it is complete. An interrupted run is
resumed by the same command from the last finished piece, and ends in the same bytes.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import difflib
import errno
import fnmatch
import functools
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import zlib
from pathlib import Path
from shlex import quote
from typing import Callable, NamedTuple

import numpy as np
from tqdm import tqdm

# ----------------------------------------------------------------------------------------------------------------------
# Sources on the Hub
#
# val: "none"; "all"; ("first", N), the first N documents, the same ones whatever --tokens is; ("drawn", seed, share),
# as datasets' train_test_split draws them, which needs the exact number of all `documents`. tokens: about what to expect
# of it all, as the dataset cards say (OpenWebText: nanoGPT's README); None where they do not.

FINEWEB = dict(repo="HuggingFaceFW/fineweb", revision="9bb295ddab0e05d785b879661af7260fed5140fc",
               tokenizer="gpt2", val=("first", 30_000))
SOURCES = {
    "openwebtext": dict(
        repo="Skylion007/openwebtext", revision="79d93d786212f7344586290adb811d4ae6a1762c",
        files="plain_text/*.parquet", tokenizer="gpt2", val=("drawn", 2357, 0.0005),
        documents=8_013_769, tokens=9_040_017_095),
    "fineweb": dict(FINEWEB, files="sample/100BT/*.parquet", tokens=100_000_000_000),
    "fineweb10b": dict(FINEWEB, files="sample/10BT/*.parquet", tokens=10_000_000_000),
    "fineweb10b-gpt2": dict(  # the same as tokens, which modded-nanogpt trains on
        repo="kjj0/fineweb10B-gpt2", revision="889765ea1f903759787add96995d81171b632d0c", files="fineweb_*.bin",
        tokenizer="gpt2", val="by file name", tokens=10_400_000_000),
    "dclm": dict(  # one tenth of it
        repo="mlfoundations/dclm-baseline-1.0", revision="a3b142c183aebe5af344955ae20836eb34dcf69b",
        files="global-shard_01_of_10/*.jsonl.zst", tokenizer="llama2", val="none", tokens=400_000_000_000),
    "c4": dict(
        repo="allenai/c4", revision="1588ec454efa1a09f29cd18ddd04fe05fc8653a2", files="en/c4-validation.*.json.gz",
        tokenizer="llama2", val="all", tokens=None),
}
LLAMA2 = dict(repo="hf-internal-testing/llama-tokenizer", file="tokenizer.model",  # Meta's, from where it is not gated
              sha256="9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347")

MAGIC, VERSION, HEADER = 20240520, 1, 1024  # HEADER in bytes
SHARD_TOKENS = 100_000_000
SPLITS = ("train", "val")
TEXT, RECORDS = (".txt", ".md", ".py"), (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".parquet")
UNIT = 8 << 20  # bytes of text, about, or of ids that a worker takes at a time
RETRY_PAUSES = (1, 4, 15, 60)  # seconds, after network errors
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SPLIT_WORD = re.compile(r"(?<![A-Za-z])(train|val(?:id|idation)?)(?![A-Za-z])")  # in the name of a file of tokens
TEST_WORD = re.compile(r"(?<![A-Za-z])test(?![A-Za-z])")


class UserError(Exception):
    """UserError(what was found, what was expected, the command that mends it), told in one line."""

    def __str__(self):
        return " ".join("{}; expected {}; {}".format(*self.args).split())


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

class Tokenizer(NamedTuple):
    name: str
    vocab_size: int
    eot: int
    encode: Callable  # (text, does it start a document?) -> array of ids
    decode: Callable  # list of ids -> text
    lengths: Callable = None  # () -> array: bytes of text behind each id


@functools.cache
def load_tokenizer(name, file=None):
    """file: Llama 2's tokenizer.model."""
    if name == "bytes":
        return Tokenizer("bytes", 257, 256, lambda text, start: np.frombuffer(text.encode(), dtype=np.uint8),
                         lambda ids: bytes(ids).decode(errors="replace"), lambda: np.array([1] * 256 + [0]))
    if name == "gpt2":
        import tiktoken
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as e:  # of requests, urllib3, ssl or the file system, or a hash mismatch
            raise UserError(f"the gpt2 vocabulary is neither cached nor downloadable ({type(e).__name__})",
                            "a network, or in the folder TIKTOKEN_CACHE_DIR vocab.bpe as "
                            "6d1cbeee0f20b3d9449abfede4726ed8212e3aee and encoder.json as "
                            "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "export TIKTOKEN_CACHE_DIR=FOLDER") from None
        return Tokenizer("gpt2", 50257, 50256, lambda text, start: gpt2.encode_to_numpy(text, disallowed_special=()), gpt2.decode,
                         functools.cache(lambda: np.array([len(gpt2.decode_single_token_bytes(i)) for i in range(50256)] + [0])))
    import sentencepiece
    if not Path(file).is_file() or sha256(file) != LLAMA2["sha256"]:
        raise UserError(f"{file} is not Llama 2's tokenizer.model", f"sha256 {LLAMA2['sha256'][:16]}...",
                        f"leave --tokenizer_file out and it is downloaded from {LLAMA2['repo']}")
    llama2 = sentencepiece.SentencePieceProcessor(model_file=str(file))

    def encode(text, start):
        # The model puts a space before any text. A newline merges with nothing, so text that does not start a document
        # goes in behind one, and the ids of that space and that newline are dropped.
        return np.array(llama2.encode(text) if start else llama2.encode("\n" + text)[2:], dtype=np.uint16)
    return Tokenizer("llama2", 32000, 2, encode, llama2.decode)


# A long text is tokenized in pieces, cut only where no token reaches across: before a space or a newline that follows
# something else. GPT-2's pre-tokenizer splits at each of these places and does not look back beyond it; no entry of
# Llama's vocabulary has a space after another character. So the ids are those of the whole text. The exceptions: a run
# of RUN letters, digits, spaces or others is cut, because on long runs old versions of tiktoken panic or take forever;
# and so is a file's last word, if nothing stands behind it and a unit ends in it.
CUT = re.compile(r"(?<=[^\s\u2581\ud800-\udfff])(?=[ \n])")
PIECE, RUN = 1 << 16, 4096
RUN_OF_N = r"[^\W\d_]{N}|\d{N}|\s{N}|(?:[^\w\s]|_){N}"
HALF_RUN, WHOLE_RUN = (re.compile(RUN_OF_N.replace("N", str(n))) for n in (RUN // 2, RUN))


def pieces(text):
    """Most documents come back whole."""
    cuts = []
    # In its first half a run has a multiple of RUN/2, from where half a run goes on: looking there costs very little.
    if any(HALF_RUN.match(text, i) for i in range(0, len(text) - RUN // 2 + 1, RUN // 2)):
        cuts = [run.end() for run in WHOLE_RUN.finditer(text)]
    at = 0
    while cut := CUT.search(text, at + PIECE):
        cuts.append(at := cut.start())
    cuts = sorted({0, *cuts, len(text)})
    return [text[a:b] for a, b in zip(cuts, cuts[1:])]


# ----------------------------------------------------------------------------------------------------------------------
# Inputs and units. An input is a file, or several small ones; a unit is the part of an input that a worker encodes at a
# time. Units follow from the inputs alone, not from the number of workers. Both are plain dicts that json can hold, so
# that a run can be compared with the interrupted one that it resumes.

def describe(kind, path, name):
    stat = os.stat(path)
    return {"kind": kind, "path": str(path), "name": name, "size": stat.st_size, "mtime": stat.st_mtime_ns}


def walk(folder):
    """
    -> (path, posix path relative to `folder`) of each file below it, sorted by the latter; folders that are links, and
    are not followed: they may lead in a circle.
    """
    paths = [Path(root, name) for root, folders, names in os.walk(folder) for name in folders + names]
    files = [path for path in paths if path.is_file()]  # not a dangling link, such as an editor's lock, nor a pipe
    return (sorted(((path, path.relative_to(folder).as_posix()) for path in files), key=lambda pair: pair[1]),
            [path for path in paths if path.is_symlink() and path.is_dir()])


def check_there(path, expected):
    if not path.is_file() and not path.is_dir():
        found = "is a pipe or a device" if path.exists() else "does not exist"
        raise UserError(f"{path} {found}", expected, f"ls -l {quote(str(path.parent))}")


def find_files(paths):
    """The files of known kind in `paths`, files or folders, in order; one that is met twice counts once."""
    found, linked = {}, []
    for path in map(Path, paths):
        check_there(path, "a file or a folder")
        files, links = walk(path) if path.is_dir() else ([(path, path.name)], [])
        files, linked = [(file, name) for file, name in files if name.endswith(TEXT + RECORDS)], linked + links
        if not files:
            besides = f" but in {links[0]}, a link, which is not followed" if links else ""
            raise UserError(f"--input {path} holds no text{besides}", f"text in files {' '.join(TEXT + RECORDS)}",
                            f"ls -R {quote(str(links[0] if links else path))}{'/' * bool(links)}")
        for file, name in files:
            kind = "text" if name.endswith(TEXT) else "parquet" if name.endswith(".parquet") else "json"
            found.setdefault(file.resolve(), describe(kind, file, name))
    given = [Path(path).resolve() for path in paths]
    if linked := [link for link in linked if not any(link.resolve().is_relative_to(other) for other in given)]:
        more = f" and {len(linked) - 1} more" if linked[1:] else ""
        print(f"prepare.py: note: folders that are links are left out: {linked[0]}{more}; give them with --input too", file=sys.stderr)
    return list(found.values())


def choose_val(files, share):
    """
    Set what validates: about `share` of the documents, by a hash of a file's relative path or of a record's beginning.
    However few there are, one does: the first record, else the file of lowest hash, else the end of the only file.
    """
    texts, records = ([file for file in files if (file["kind"] == "text") == is_text] for is_text in (True, False))
    for file in texts:
        file["val"] = hash_share(os.fsencode(file["name"])) < share
    first = share and next((file for file in records if any(True for _ in documents({**file, "val": False}))), None)
    for file in records:
        file.update(val=share, first_is_val=file is first)  # a file may be without a record
    if share and first is None:     # without records the texts are to have one
        if len(texts) == 1:
            texts[0].update(val=False, tail=share)
        elif texts and not any(file["val"] for file in texts):
            min(texts, key=lambda file: hash_share(os.fsencode(file["name"])))["val"] = True


def hash_share(data):
    """A number in [0, 1) that depends on these bytes alone."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


def grouped(files):
    """Inputs: small files that follow each other make one."""
    inputs = []
    for file in files:
        if file["size"] > UNIT or file.get("tail") or file["kind"] == "ready":
            inputs.append(file)
        elif inputs and inputs[-1]["kind"] == "files" and inputs[-1]["size"] + file["size"] <= UNIT:
            inputs[-1]["files"].append(file)
            inputs[-1]["size"] += file["size"]
        else:
            inputs.append({"kind": "files", "files": [file], "size": file["size"]})
    return inputs


def units_of(item, path, row):
    """-> (units of an input, its rows if it is parquet, else 0); path: where it lies here, row: rows in the inputs before."""
    kind, size, units, rows = item["kind"], item["size"], [], 0
    item = {**item, "path": str(path)}
    if kind == "parquet":  # row groups that follow each other: UNIT bytes of text, or one group
        meta = open_parquet(path).metadata
        column = [meta.schema.column(i).path for i in range(meta.num_columns)].index("text")
        for i, group in enumerate(meta.row_group(i) for i in range(meta.num_row_groups)):
            text = group.column(column).total_uncompressed_size
            if not units or units[-1]["text"] + text > UNIT:
                units.append({**item, "groups": [], "text": 0, "size": 0, "first": rows, "end": rows})
            unit, rows = units[-1], rows + group.num_rows
            unit["groups"].append(i)
            unit.update(text=unit["text"] + text, size=unit["size"] + size * group.num_rows // max(1, meta.num_rows), end=rows)
        if isinstance(item["val"], tuple):
            for unit in units:
                drawn, begin, end = val_documents(*item["val"]), row + unit["first"], row + unit["end"]
                unit["val"] = (drawn[np.searchsorted(drawn, begin):np.searchsorted(drawn, end)] - begin).tolist()
    elif kind == "text" or kind == "json" and item["path"].endswith(".jsonl"):
        cut = round(size * (1 - item.get("tail", 0)))  # the second document, if there is one, validates
        units = [{**item, "from": a, "to": min(a + UNIT, end), "start": start, "end": end,
                  "val": item["val"] or start > 0, "size": min(UNIT, end - a)}
                 for start, end in ((0, cut), (cut, size)) for a in range(start, end, UNIT)]
    elif kind == "ready":  # nanoGPT's one file in parts, of an even number of bytes; a shard as a whole, as its crc32 is of all of it
        skip = ready_header(path)
        step = size if skip else UNIT
        units = [{**item, "skip": skip, "from": a, "to": min(a + step, size), "size": min(step, size - a)} for a in range(0, size, step)]
    else:
        units = [item]
    return units, rows


@functools.cache
def val_documents(rule, *args):
    """The numbers of the documents that validate by a rule of SOURCES, sorted."""
    if rule == "first":
        return np.arange(*args)
    seed, share, documents = args  # the test split of datasets' train_test_split(test_size=share, seed=seed)
    return np.sort(np.random.default_rng(seed).permutation(documents)[:math.ceil(share * documents)])


def open_parquet(path):
    import pyarrow.parquet
    with whole(path):
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20)
    names = file.schema_arrow.names
    if "text" not in names or str(file.schema_arrow.field("text").type) not in ("string", "large_string"):
        raise UserError(f"{path} has no column text of strings, its columns are {', '.join(names)}",
                        "a column text of strings", "python -c \"import pyarrow.parquet as p; t = p.read_table('FILE'); p.write_table("
                        "t.rename_columns(['text' if c == 'COLUMN' else c for c in t.column_names]), 'NEW.parquet')\" renames yours")
    return file


@contextlib.contextmanager
def whole(path):
    """pyarrow's errors about a damaged file (ValueError, or OSError without a number) in one line."""
    try:
        yield
    except (ValueError, OSError) as e:
        if getattr(e, "errno", None):
            raise
        mend = f"rm {quote(str(path))} and get it again"
        raise UserError(f"{path} is damaged ({e})", "a whole file", mend) from None


def ready_header(path):
    """The bytes of header in a file of tokens: none in nanoGPT's."""
    with open(path, "rb") as f:
        start, size = f.read(4096), os.path.getsize(path)
    if re.fullmatch(rb"[^\0-\x08\x0b\x0e-\x1f]+", start):  # no control bytes; as ids these could be legal ones of gpt2
        raise UserError(f"{path} is text", "uint16 ids", f"python prepare.py text --input {quote(str(path))} --name NAME"
                        if str(path).endswith(TEXT) else "copy it again, it may be an error page or a pointer of git-lfs")
    magic, version, tokens = np.frombuffer(start[:12].ljust(12, b"\0"), "<u4").tolist()
    shard = magic == MAGIC
    expected = HEADER + 2 * tokens if shard else size + size % 2
    if size != expected or shard and version != VERSION:
        raise UserError(f"{path} has {size} bytes" + f" and version {version}" * shard,
                        f"{expected}, uint16 ids, version {VERSION}", "copy it again")
    return HEADER * shard


# ----------------------------------------------------------------------------------------------------------------------
# Encoding a unit, in a worker process

def documents(unit):
    """Yield (text, does it validate?, does it start a document?, end one?) in order."""
    kind, path, rule = unit["kind"], unit.get("path"), unit.get("val")
    if kind == "files":
        for file in unit["files"]:
            yield from documents(file)
    elif kind == "text":
        with open(path, "rb") as f:
            a, b = (boundary(f, unit.get(key)) for key in ("from", "to"))
            f.seek(a or 0)
            data = f.read(b - a if b else -1)
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            if unit.get("skip_not_utf8"):
                return
            raise UserError(f"{path} is not UTF-8 at byte {(a or 0) + e.start}", "UTF-8 text",
                            f"if it is Latin-1, iconv -f LATIN1 -t UTF-8 {quote(path)} -o FILE converts it") from None
        yield text, rule, unit.get("from") == unit.get("start"), unit.get("to") == unit.get("end")
    else:
        forced = unit.get("first_is_val") and not unit.get("from") and not unit.get("first")
        chosen = set(rule) if isinstance(rule, list) else ()
        for i, text in enumerate(parquet_rows(unit) if kind == "parquet" else json_rows(unit)):
            val = hash_share(text[:1000].encode()) < rule if isinstance(rule, float) else rule is True or i in chosen
            yield text, bool(val or forced and i == 0), True, True


def boundary(f, at):
    """The first place from byte `at` of a text on where it may be cut (see CUT); failing that, a character's start."""
    if at in (None, 0, os.fstat(f.fileno()).st_size):
        return at
    f.seek(at)
    window = f.read(1 << 20)
    text = window.decode("utf-8", "surrogateescape")
    if cut := CUT.search(text):
        return at + len(text[:cut.start()].encode("utf-8", "surrogateescape"))
    return at + next((i for i, byte in enumerate(window[:4]) if byte & 0xC0 != 0x80), len(window[:4]))


def parquet_rows(unit):
    path = unit["path"]
    with whole(path):
        for batch in open_parquet(path).iter_batches(256, unit.get("groups"), ["text"], use_threads=False):
            yield from (text or "" for text in batch.column(0).to_pylist())


def json_rows(unit):
    """The field "text" of the lines that start in the unit's part of a file, or of all lines of a compressed one."""
    path, at, end = unit["path"], unit.get("from", 0), unit.get("to", math.inf)
    if path.endswith(".jsonl"):
        f = open(path, "rb")
    else:
        import pyarrow
        packed = pyarrow.input_stream(path, compression="zstd" if path.endswith(".zst") else "gzip")
        f = io.BufferedReader(packed, 1 << 20)
    with f:
        if at:
            f.seek(at - 1)
            at += len(f.readline()) - 1  # a line that started before
        while at < end:
            with whole(path):
                line = f.readline()
            if not line:
                break
            if line.strip():
                yield json_text(line, f"{path}: the line at byte {at}")
            at += len(line)


def json_text(line, where):
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where} is not JSON in UTF-8 ({e})", "an object with a field text", "delete it") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where} has no string text, its fields are {fields}", "a string text",
                        "jq -c '{text: .FIELD}' FILE >NEW.jsonl renames yours")
    try:
        record["text"].encode()
        return record["text"]
    except UnicodeEncodeError:  # half a surrogate pair, from \ud800: U+FFFD takes its place, as in tiktoken
        return record["text"].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def ready_blocks(unit, tokenizer):
    """Yield (ids, rows of encode_unit's table) of a file that holds ids already."""
    lengths, path, crc = tokenizer.lengths(), unit["path"], 0
    with open(path, "rb") as f:
        words = np.frombuffer(f.read(unit["skip"]), "<u4")[3:7].tolist()  # none in nanoGPT's, zeros in llm.c's
        ours = words[3:] == [1]
        if ours and words[0] != tokenizer.vocab_size:
            raise UserError(f"{path} holds ids of a vocabulary of {words[0]}", f"{tokenizer.vocab_size}, of {tokenizer.name}",
                            "--tokenizer=bytes or gpt2 names what made it; shards of another run as they are: --dataset=NAME")
        f.seek(max(unit["skip"], unit["from"]))
        while block := f.read(min(UNIT, unit["to"] - f.tell())):
            crc = zlib.crc32(block, crc)
            ids = np.frombuffer(block, dtype="<u2")
            if ids.max() >= tokenizer.vocab_size:
                raise UserError(f"{path} holds the id {ids.max()}", f"ids below {tokenizer.vocab_size}",
                                "--tokenizer names what made it; ids over 65,535 do not fit in a shard")
            ends = np.flatnonzero(ids == tokenizer.eot) + 1
            starts = np.append(0, ends[ends < len(ids)])
            rows = np.zeros((len(starts), 4), dtype=np.int64)
            rows[:, 0], rows[:len(ends), 1] = unit["val"], 1
            rows[:, 2], rows[:, 3] = np.diff(starts, append=len(ids)), np.add.reduceat(lengths[ids], starts)
            yield ids, rows
    if ours and crc != words[2]:
        raise UserError(f"{path} is damaged, the crc32 of its tokens is {crc:08x}", f"{words[2]:08x}", "copy it again")


def encode_unit(unit, part, tokenizer):
    """
    Write the unit's tokens to part.train and part.val; -> a table with a row for each document: does it validate?, does
    it end here?, tokens, bytes of text.
    """
    tokenizer = load_tokenizer(*tokenizer)
    table, eot = [], np.array([tokenizer.eot], dtype="<u2")
    with open(f"{part}.train", "wb", 1 << 20) as train, open(f"{part}.val", "wb", 1 << 20) as val:
        files = (train, val)
        if unit["kind"] == "ready":
            for ids, rows in ready_blocks(unit, tokenizer):
                files[unit["val"]].write(ids)
                table.append(rows)  # arrays: as lists they would take five times as much
            table = np.concatenate([np.empty((0, 4), np.int64), *table])
        else:
            for text, validates, starts, ends in documents(unit):
                tokens = 0
                for i, piece in enumerate(pieces(text)):
                    ids = tokenizer.encode(piece, starts and i == 0)
                    files[validates].write(ids.astype("<u2"))
                    tokens += len(ids)
                if ends:
                    files[validates].write(eot)
                table.append((validates, ends, tokens + ends, len(text.encode())))
    return np.asarray(table, dtype=np.int64).reshape(-1, 4)


def start_worker():
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # none outlives a kill -9 of it


@contextlib.contextmanager
def encoders(workers, tokenizer):
    """-> submit(unit, part) -> wait() -> table. A single worker is this process."""
    if workers == 1:
        yield lambda *job: functools.partial(encode_unit, *job, tokenizer)
        return
    others = multiprocessing.active_children()
    executor = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker)
    try:
        pressed = []  # a Ctrl-C is for the parent to answer, and not in the middle of a start: any of its threads may take it
        handler = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                executor.submit(int)  # starts one, which inherits the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGINT, handler)
        if pressed:
            raise KeyboardInterrupt
        yield lambda *job: executor.submit(encode_unit, *job, tokenizer).result
    except concurrent.futures.process.BrokenProcessPool:
        raise UserError("a worker process was killed, most likely for want of memory", "0.5 GiB for each",
                        "the same command with --workers 1 goes on from here, or begins again if this took less than a minute") from None
    finally:
        for process in set(multiprocessing.active_children()) - set(others):
            process.terminate()
        executor.shutdown(cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------------------
# Building a dataset. Until it is complete NAME.partial/ holds its shards, parts/ (encoded units that wait for their
# turn, mostly in the system's memory: nothing syncs them) and state.json: where the next unit begins and how many
# tokens each split has. Whatever was written after the last state.json is cut off when the run is resumed.

def build(args, source, found, tokenizer, inputs, splits, limit=None, fetch=None, downloads={}):
    """
    Encode `inputs` into args.data_dir/args.name; -> the manifest, which has `source`, what was asked for, and `found`,
    what that turned out to be. tokenizer: (name, file). splits: those that must not be empty. limit: (split, tokens):
    leave out what follows the document that reaches so many. fetch: number of an input -> its path. downloads:
    {folder: bytes}.
    """
    final, folder = Path(args.data_dir, args.name), Path(args.data_dir, f"{args.name}.partial")
    size = sum(item["size"] for item in inputs)
    rate = 1 if inputs[0]["kind"] == "ready" else 2 if tokenizer[0] == "bytes" else 0.5  # bytes of shards per byte, at least
    need = 2 * limit[1] if limit else rate * size
    check_disk((args.data_dir, need - sum(shard.stat().st_size for shard in folder.glob("*.bin"))), *downloads.items())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = args.workers or min(cores, 1 + size // UNIT)
    codec = load_tokenizer(*tokenizer)  # a wrong one is told before any process starts
    with encoders(workers, tokenizer) as submit, locked(folder):
        if (final / "manifest.json").exists():  # since existing() looked
            with contextlib.suppress(OSError):
                folder.rmdir()  # which locked() has made anew
            raise UserError(f"another prepare.py has made {final} meanwhile", "nothing there", "the same command checks what it made")
        seen = list(itertools.accumulate(inputs, lambda before, item: digest([before, item]), initial=""))
        state = resume(folder, source, tokenizer[0], found, seen)
        began, fresh = time.monotonic(), state["at"] == [0, 0, 0]
        queue, numbers = collections.deque(), itertools.count()
        jobs = plan(inputs, state["at"], fetch or (lambda i: inputs[i].get("path", "")))
        counted = state["splits"][limit[0]] if limit else {"tokens": 0}
        full = bool(limit) and counted["tokens"] >= limit[1]
        bar = tqdm(desc=args.name, total=limit[1] if limit else size, unit="tok" if limit else "B", unit_scale=True,
                   initial=counted["tokens"] or sum(item["size"] for item in inputs[:state["at"][0]]),
                   delay=0.5, mininterval=1, disable=not sys.stderr)
        try:
            while not full:
                while len(queue) < (2 * workers if workers > 1 else 1) and (job := next(jobs, None)):
                    at, unit = job
                    part = folder / "parts" / f"{os.getpid()}_{next(numbers)}"  # not of a worker that is about to die
                    queue.append((at, part, unit["size"], submit(unit, part)))
                if not queue:
                    break
                at, part, unit_size, wait = queue.popleft()
                table, before = wait(), counted["tokens"]
                full = take(folder, part, table, state, limit, codec)
                state.update(at=at, seen=seen[at[0] + (at[1] > 0)])
                write_json(folder / "state.json", state, indent=None)  # often: json takes three times as long to indent
                for split in SPLITS:
                    part.with_suffix(f".{split}").unlink()
                bar.update(counted["tokens"] - before if limit else unit_size)
            manifest = finish(folder, args.name, state, codec, splits)
        except Exception as e:
            bar.leave = False
            if fresh and time.monotonic() - began < 60 and getattr(e, "errno", None) not in DISK_FULL:
                shutil.rmtree(folder, ignore_errors=True)  # nobody misses so little work; a worker may still write there
            raise
        finally:
            bar.close()
        folder.rename(final)
        sync(args.data_dir)
        tidy(final)
    return manifest


def tidy(folder):
    (folder / "state.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "parts", ignore_errors=True)


def plan(inputs, at, fetch):
    """Yield (where the next unit begins, unit) from `at` = [input, unit of it, rows of the inputs before] on."""
    k, skip, rows = at
    for k in range(k, len(inputs)):
        units, n = units_of(inputs[k], fetch(k), rows)
        for i in range(skip, len(units)):
            yield [k, i + 1, rows] if i + 1 < len(units) else [k + 1, 0, rows + n], units[i]
        skip, rows = 0, rows + n


def resume(folder, source, tokenizer, found, seen):
    """
    -> the state of the unfinished run in `folder`, with its shards cut back to that, or a new state.
    seen: digests of the first 0, 1, 2, ... inputs.
    """
    shutil.rmtree(folder / "parts", ignore_errors=True)
    (folder / "parts").mkdir()
    state = {"source": source, "tokenizer": tokenizer, "found": found, "at": [0, 0, 0], "seen": seen[0], "shards": [],
             "splits": {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}}
    if (folder / "state.json").exists():
        state = {**read_json(folder / "state.json"), "found": found}
        had = {**state["source"], "tokenizer": state["tokenizer"]}
        if digest(had) != digest({**source, "tokenizer": tokenizer}) or state["seen"] not in seen:
            raise UserError(f"{folder} holds an unfinished run of {json.dumps(had)}, or its files changed",
                            "the same source, tokenizer and files",
                            f"choose another --name, or rm -r {quote(str(folder))}")
    for split in SPLITS:
        whole, rest = divmod(state["splits"][split]["tokens"], SHARD_TOKENS)
        last = shard_path(folder, split, whole)
        for shard in folder.glob(f"{last.name[:-len('000000.bin')]}*.bin"):
            if shard > last or shard == last and not rest:
                shard.unlink()
        if rest:
            os.truncate(last, HEADER + 2 * rest)
    return state


def take(folder, part, table, state, limit, codec):
    """Move an encoded unit to the end of the shards; -> is the limit reached?"""
    full = False
    for flag, split in enumerate(SPLITS):
        rows, total = table[table[:, 0] == flag], state["splits"][split]
        if limit and limit[0] == split:
            last = np.searchsorted(total["tokens"] + np.cumsum(rows[:, 2]), limit[1])
            full, rows = last < len(rows), rows[:last + 1]
        n_documents, n_tokens, n_bytes = rows[:, 1:].sum(axis=0).tolist()
        for index in append(folder, split, total["tokens"], f"{part}.{split}", n_tokens):
            state["shards"].append(seal(folder, split, index, SHARD_TOKENS, codec))
        total["tokens"] += n_tokens
        total["documents"] += n_documents
        total["bytes"] += n_bytes
    return full


def append(folder, split, at, part, count):
    """Put the first `count` tokens of the file `part` behind the split's first `at`; -> the shards that this fills."""
    filled = []
    with open(part, "rb") as source:
        while count:
            index, offset = divmod(at, SHARD_TOKENS)
            n = min(count, SHARD_TOKENS - offset)
            with open(shard_path(folder, split, index), "r+b" if offset else "wb") as f:
                f.seek(HEADER + 2 * offset)
                for left in range(2 * n, 0, -(1 << 18)):
                    f.write(source.read(min(left, 1 << 18)))
                f.flush()
                os.fsync(f.fileno())
            at, count = at + n, count - n
            if at % SHARD_TOKENS == 0:
                filled.append(index)
    return filled


def seal(folder, split, index, tokens, codec):
    """Write the header of a shard that has all its tokens; -> its entry in the manifest."""
    path = shard_path(folder, split, index)
    crc, _, _ = scan(path, codec.eot)
    header = np.zeros(256, dtype="<u4")
    header[:7] = MAGIC, VERSION, tokens, codec.vocab_size, codec.eot, crc, 1
    with open(path, "r+b") as f:
        f.write(header)
        f.flush()
        os.fsync(f.fileno())
    return {"file": path.name, "split": split, "tokens": tokens, "crc32": f"{crc:08x}", "sha256": sha256(path)}


def finish(folder, name, state, codec, splits):
    """Seal the last shards and write the manifest."""
    totals, shards, source = state["splits"], list(state["shards"]), state["source"]
    n = sum(total["documents"] for total in totals.values())
    if not any(total["bytes"] for total in totals.values()):
        paths = " ".join(source.get("inputs") or [source.get("path") or source.get("repo") or source["kind"]])
        raise UserError(f"none of the {n} documents of {paths} holds text", "at least one that does", "give other files")
    for split in SPLITS:
        whole, rest = divmod(totals[split]["tokens"], SHARD_TOKENS)
        if split in splits and not whole + rest:
            mend = {"hub": "give more --tokens", "text": "add text, or give another --val_fraction"}
            raise UserError(f"{n} documents leave none for {split}", "at least one", mend.get(source["kind"], "add text"))
        if rest:
            shards.append(seal(folder, split, whole, rest, codec))
    manifest = {"format": 1, "name": name, "source": {**source, **state["found"]}, "tokenizer": codec.name,
                "vocab_size": codec.vocab_size, "eot": codec.eot, "splits": totals,
                "shards": sorted(shards, key=lambda shard: shard["file"])}
    write_json(folder / "manifest.json", manifest)
    sync(folder)
    return manifest


def shard_path(folder, split, index):
    """folder: data/NAME.partial. Training shards count from 1, validation shards from 0, as those of others do."""
    return folder / f"{folder.name.removesuffix('.partial')}_{split}_{index + (split == 'train'):06d}.bin"


def scan(path, eot):
    """(crc32, highest id, number of end-of-text ids) of a shard's tokens."""
    crc = highest = ends = 0
    with open(path, "rb") as f:
        f.seek(HEADER)
        while block := f.read(1 << 20):
            ids = np.frombuffer(block, dtype="<u2")
            crc, highest, ends = zlib.crc32(block, crc), max(highest, int(ids.max())), ends + int((ids == eot).sum())
    return crc, highest, ends


def sha256(path):
    state = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def digest(thing):
    return hashlib.sha256(json.dumps(thing, sort_keys=True).encode()).hexdigest()[:32]


@contextlib.contextmanager
def locked(folder):
    """Two runs never write to one folder; the system drops the lock when a process ends, however it ends."""
    import fcntl
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another prepare.py is writing {folder}", "none", "wait, or choose another --name") from None
        yield
    finally:
        os.close(descriptor)


def sync(folder):
    """Let the names in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems cannot
        os.fsync(descriptor)
    os.close(descriptor)


def read_json(path):
    return json.loads(Path(path).read_text())


def write_json(path, thing, indent=1):
    """A file that appears at `path` whole or not at all."""
    with open(f"{path}.tmp", "wb") as f:
        f.write(json.dumps(thing, indent=indent).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


def check_disk(*needs):
    """needs: (folder, bytes that will be written there)"""
    by_disk = collections.Counter()
    for folder, need in needs:
        folder = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
        disk, free = os.stat(folder).st_dev, shutil.disk_usage(folder).free
        by_disk[disk] += need
        if free < by_disk[disk]:
            raise UserError(f"{free / 1e9:.1f} GB are free at {folder}", f"{by_disk[disk] / 1e9:.1f} GB at least",
                            "make room, choose another disk with --data_dir and HF_HOME, or take a part of a corpus with --tokens")


# ----------------------------------------------------------------------------------------------------------------------
# The Hub. huggingface_hub does the work: HF_HOME, HF_ENDPOINT, HF_TOKEN and proxies mean what they always mean.

def hub(what, call, instead=""):
    """call(HfApi()), with network errors retried and every other one told in one line. instead: what does without a network"""
    from huggingface_hub import HfApi, constants, errors
    api, login = HfApi(), "hf auth login, or look at HF_ENDPOINT"
    refusals = [(errors.GatedRepoError, "the repository is gated", "an account that accepted its terms", login),
                (errors.RevisionNotFoundError, "no such revision", "a branch, tag or commit", "--revision main"),
                (errors.RepositoryNotFoundError, f"{api.endpoint} has no such repository, or it is private",
                 "one that this account can read", login),
                (errors.EntryNotFoundError, "no such file at this revision", "a revision that has it", "--revision main")]
    for pause in (*RETRY_PAUSES, None):
        try:
            return call(api)
        except Exception as e:  # of huggingface_hub, and by its version of requests or httpx
            error, status = e, getattr(getattr(e, "response", None), "status_code", None) or 500
        if getattr(error, "errno", None) in (*DISK_FULL, errno.EACCES, errno.EROFS):
            raise error
        if constants.HF_HUB_OFFLINE:
            raise UserError(f"{what}: HF_HUB_OFFLINE is set", "a network", f"unset HF_HUB_OFFLINE{instead}")
        if not isinstance(error, errors.LocalEntryNotFoundError):  # that one is a network error by another name
            for kind, found, expected, mend in refusals:
                if isinstance(error, kind):
                    raise UserError(f"{what}: {found}", expected, mend + instead)
            if status < 500 and status not in (408, 429):
                raise UserError(f"{what}: {api.endpoint} answers {status}", "200", login + instead)
        if pause is not None:
            tqdm.write(f"prepare.py: {what}: {type(error).__name__}; trying again in {pause} s{instead}", file=sys.stderr)
            time.sleep(pause)
    raise UserError(f"{what}: {api.endpoint} does not answer ({type(error).__name__}: {str(error)[:160]})", "a network",
                    f"when it is back, the same command goes on from here{instead}")


def prepare_hub(args):
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    spec = SOURCES[args.command]
    repo, revision, val, pattern = spec["repo"], args.revision or spec["revision"], spec["val"], spec["files"]
    tokenizer = named_tokenizer(args, spec["tokenizer"])
    source = {"kind": "hub", "repo": repo, "revision": revision, "files": pattern, "val": val, "limit": args.tokens}
    if manifest := existing(args, source, tokenizer[0]):
        return manifest
    unfinished = Path(args.data_dir, f"{args.name}.partial", "state.json")
    if unfinished.exists() and digest(read_json(unfinished)["source"]) == digest(source):
        commit = read_json(unfinished)["found"]["commit"]  # a branch may have moved on
    else:
        commit = hub(f"{repo} at {revision}", lambda api: api.dataset_info(repo, revision=revision).sha)
    listing = hub(f"the files of {repo} at {commit[:12]}", lambda api: list(api.list_repo_tree(
        repo, pattern.rpartition("/")[0] or None, recursive=True, revision=commit, repo_type="dataset")))
    sizes = {file.path: file.size for file in listing if hasattr(file, "size") and fnmatch.fnmatch(file.path, pattern)}
    if not sizes:
        raise UserError(f"{repo} at {commit[:12]} has no file {pattern}", "some", "leave --revision out")
    rule = {"none": False, "all": True}.get(val, (*val, spec["documents"]) if val[0] == "drawn" else val)
    kinds = {".parquet": "parquet", ".bin": "ready"}
    inputs = [{"kind": kinds.get(Path(path).suffix, "json"), "name": path, "size": sizes[path],
               "val": validates(path) if val == "by file name" else rule}
              for path in sorted(sizes, key=lambda path: (not validates(path), path))]

    where = {"repo_id": repo, "repo_type": "dataset", "revision": commit}

    def prefetch(name):
        with contextlib.suppress(Exception):  # fetch() waits for the cache's lock, tries again, and tells
            HfApi().hf_hub_download(filename=name, **where)

    def fetch(i):
        for item in inputs[i + 1:i + 2]:  # comes down while this one is encoded, in a thread that no exit waits for
            threading.Thread(target=prefetch, args=[item["name"]], daemon=True).start()
        name = inputs[i]["name"]
        return hub(f"{name} of {repo}", lambda api: api.hf_hub_download(filename=name, **where))

    share = min(1, args.tokens / spec["tokens"]) if args.tokens and spec["tokens"] else 1
    missing = sum(item["size"] for item in inputs[:math.ceil(share * len(inputs))]
                  if not isinstance(try_to_load_from_cache(filename=item["name"], **where), str))
    splits = {"none": ("train",), "all": ("val",)}.get(val, SPLITS)
    limit = (splits[0], args.tokens) if args.tokens else None
    return build(args, source, {"commit": commit}, tokenizer, inputs, splits, limit, fetch,
                 {constants.HF_HUB_CACHE: missing})


def named_tokenizer(args, default):
    file, repo, model = getattr(args, "tokenizer_file", None), LLAMA2["repo"], LLAMA2["file"]
    name = args.tokenizer or ("llama2" if file else default)
    if file and name != "llama2":
        raise UserError(f"--tokenizer_file={file} is not for {name}", "--tokenizer llama2 with it", "leave --tokenizer_file out")
    if name == "llama2":
        file = file or hub(f"{model} of {repo}", lambda api: api.hf_hub_download(repo, model),
                           "; --tokenizer_file=PATH takes one that you have")
    return name, file


# ----------------------------------------------------------------------------------------------------------------------
# Commands

def prepare_pysrc(args):
    """Every .py of the running Python's library, outside site-packages; those that are not UTF-8 are left out."""
    library, others = sysconfig.get_paths()["stdlib"], {"site-packages", "dist-packages", "__pycache__"}
    files = [{**describe("text", path, name), "skip_not_utf8": True} for path, name in walk(library)[0]
             if name.endswith(".py") and not others & set(name.split("/"))]
    choose_val(files, 0.02)
    return prepare_files(args, {"kind": "pysrc", "python": sys.version.split()[0]}, ("bytes", None), files, SPLITS)


def prepare_text(args):
    files = find_files(args.input)
    choose_val(files, args.val_fraction)
    paths = [os.path.normpath(path) for path in args.input]
    source = {"kind": "text", "inputs": paths, "val_fraction": args.val_fraction}
    splits = SPLITS if args.val_fraction else SPLITS[:1]
    return prepare_files(args, source, named_tokenizer(args, "bytes"), files, splits)


def prepare_import(args):
    """Tokens of others: nanoGPT's headerless train.bin and val.bin, or shards of llm.c or modded-nanogpt."""
    path = Path(args.path)
    check_there(path, "train.bin, or a folder of shards")
    folder = path if path.is_dir() else path.parent
    pair = [folder / name for name in ("val.bin", "train.bin") if (folder / name).exists()]  # nanoGPT's belong together
    if path in pair or path == folder and pair:
        shards = pair
    else:
        shards = [path] if path != folder else [shard for shard in folder.glob("*.bin") if shard.is_file()]
        shards.sort(key=lambda p: (not validates(p.name), p.name))
    if (folder / "meta.pkl").exists() or not shards:
        found = "a meta.pkl, so its ids are those of a character-level vocabulary" if shards else "no .bin file"
        raise UserError(f"{folder} holds {found}", "ids of gpt2", "python prepare.py text --input PATH --name NAME")
    tests = [shard for shard in shards if TEST_WORD.search(shard.name) and not SPLIT_WORD.search(shard.name)]
    if tests and tests != shards:
        raise UserError(f"{folder} holds {tests[0].name} beside other files", "files to train and to validate on",
                        f"mv {quote(str(tests[0]))} elsewhere")
    files = [{**describe("ready", shard, shard.name), "val": validates(shard.name)} for shard in shards]
    splits = [split for split in SPLITS if any(file["val"] == (split == "val") for file in files)]
    return prepare_files(args, {"kind": "import", "path": args.path}, (args.tokenizer or "gpt2", None), files, splits)


def validates(name):
    """Does a file of tokens, by the last such word in its name?"""
    return SPLIT_WORD.findall(name)[-1:] not in ([], ["train"])


def prepare_files(args, source, tokenizer, files, splits):
    found = {"files": len(files), "bytes": sum(file["size"] for file in files),
             "fingerprint": digest([[file["name"], file["size"]] for file in files])}
    return existing(args, {**source, **found}, tokenizer[0], files) \
        or build(args, source, found, tokenizer, grouped(files), splits)


def existing(args, source, tokenizer, files=()):
    """-> the manifest if the dataset is there and of this source, None if there is none; UserError if another is."""
    folder = Path(args.data_dir, args.name)
    mend = f"choose another --name, or rm -r {quote(str(folder))}"
    if not folder.is_dir() or not any(folder.iterdir()):
        if folder.is_file() or folder.is_symlink():  # what is made could not take its place
            raise UserError(f"{folder} is a file or a link", "a folder, or nothing there", "choose another --name")
        return None
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder} holds {min(folder.iterdir()).name} and no manifest.json", "nothing there",
                        "choose another --name")
    manifest = read_manifest(args)
    had, wanted = {**manifest["source"], "tokenizer": manifest["tokenizer"]}, {**source, "tokenizer": tokenizer}
    for key in wanted:
        if digest(had.get(key)) != digest(wanted[key]):
            raise UserError(f"{folder} holds another source, its {key} is {had.get(key)}", wanted[key], mend)
    made = (folder / "manifest.json").stat().st_mtime_ns
    for file in files:
        if file["mtime"] > made:
            raise UserError(f"{folder} is older than {file['path']}", "files that did not change", mend)
    check_shards(folder, manifest)
    with contextlib.suppress(OSError):  # where nothing can be written nothing is left over
        tidy(folder)  # in case a run was killed after its last step but one
    print(f"{folder} is complete already: nothing to do")
    return manifest


def read_manifest(args):
    folder = Path(args.data_dir, args.name)
    path = folder / "manifest.json"
    if not path.exists():
        if (folder / "train.bin").exists():
            raise UserError(f"{folder} holds nanoGPT's headerless train.bin", "shards and a manifest.json",
                            f"python prepare.py import {quote(str(folder / 'train.bin'))} --name {args.name}-shards")
        there = sorted(found.parent.name for found in Path(args.data_dir).glob("*/manifest.json"))
        raise UserError(f"{path} does not exist", f"a prepared dataset: {', '.join(there) or 'there is none yet'}",
                        did_you_mean(args.name, there) or "python prepare.py makes one")
    try:
        manifest = read_json(path)
        if {"format", "name", "source", "tokenizer", "vocab_size", "eot", "splits", "shards"} - set(manifest):
            raise ValueError("keys are missing")
    except (ValueError, TypeError) as e:
        raise UserError(f"{path} is damaged ({e})", "what prepare.py wrote",
                        f"rm -r {quote(str(folder))} and prepare it again") from None
    return manifest


def check_shards(folder, manifest, thorough=False):
    """UserError names the first thing that is not as the manifest says."""
    def expect(file, what, found, expected):
        if found != expected:
            mend = f"rm -r {quote(str(folder))} and prepare it again"
            raise UserError(f"{folder / file}: {what} {found}", expected, mend)
    shards, totals = {shard["file"]: shard for shard in manifest["shards"]}, {split: [0, 0] for split in SPLITS}
    for file in sorted({*shards, *(path.name for path in folder.glob("*.bin"))}):
        path, shard = folder / file, shards.get(file)
        places = ["in the manifest"] * (shard is not None) + ["on the disk"] * path.exists()
        expect(file, "it is", " and ".join(places), "in the manifest and on the disk")
        expect(file, "its bytes are", path.stat().st_size, HEADER + 2 * shard["tokens"])
        totals[shard["split"]][0] += shard["tokens"]
        if thorough:
            crc, highest, ends = scan(path, manifest["eot"])
            expect(file, "its header is", np.fromfile(path, "<u4", 7).tolist(), [
                MAGIC, VERSION, shard["tokens"], manifest["vocab_size"], manifest["eot"], int(shard["crc32"], 16), 1])
            expect(file, "the crc32 of its tokens is", f"{crc:08x}", shard["crc32"])
            expect(file, "its sha256 is", sha256(path), shard["sha256"])
            expect(file, "its highest id is", highest, min(highest, manifest["vocab_size"] - 1))
            totals[shard["split"]][1] += ends
    for split, total in manifest["splits"].items():
        expect("manifest.json", f"its {split} tokens are", total["tokens"], totals[split][0])
        if thorough:
            expect("manifest.json", f"its {split} documents are", total["documents"], totals[split][1])


def verify(args):
    manifest = read_manifest(args)
    check_shards(Path(args.data_dir, args.name), manifest, thorough=True)
    print(f"{len(manifest['shards'])} shards verified: sizes, headers, checksums, id ranges, tokens and documents")
    return manifest


def show(args):
    manifest = read_manifest(args)
    check_shards(Path(args.data_dir, args.name), manifest)
    print(json.dumps(manifest, indent=1))
    args.tokenizer = manifest["tokenizer"]
    codec = load_tokenizer(*named_tokenizer(args, None))
    for shard in {shard["split"]: shard for shard in reversed(manifest["shards"])}.values():
        ids = np.fromfile(Path(args.data_dir, args.name, shard["file"]), "<u2", 200, offset=HEADER)
        print(f"\n{shard['file']} begins with {ids[:10].tolist()}")
        for document in np.split(ids, np.flatnonzero(ids[:-1] == codec.eot) + 1):
            print(f"| {codec.decode([i for i in document.tolist() if i != codec.eot])!r}")
    return manifest


# ----------------------------------------------------------------------------------------------------------------------
# int main

COMMANDS = {"pysrc": prepare_pysrc, "text": prepare_text, "import": prepare_import, "verify": verify, "show": show,
            **dict.fromkeys(SOURCES, prepare_hub)}
NEXT = {"pysrc": "train_gpt.py", "openwebtext": "train_gpt.py --preset=gpt2-small",
        "fineweb": "train_llama.py --preset=suite-b-210m", "dclm": "train_llama.py --preset=suite-a-130m",
        "c4": "train_llama.py --preset=suite-a-130m"}


def did_you_mean(word, words):
    close = difflib.get_close_matches(word, words, 1, 0.5)
    return f"did you mean {close[0]}?" if close else ""


def token_count(text):
    number = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kMBT]?)", text)
    unit = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    count = round(float(number[1].replace("_", "")) * unit[number[2]]) if number else 0
    if not count:
        raise argparse.ArgumentTypeError(f"{text} is not a number of tokens, such as 10B, 500M or 1_000_000")
    return count


def val_fraction(text):
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to less than 1")


def worker_count(text):
    if re.fullmatch(r"0*[1-9]\d{0,2}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 999")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message, "what the help says", f"python {self.prog} --help")


def parse(argv):
    if not argv or argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        argv = ["pysrc", *argv]
    if argv[0] not in COMMANDS and argv[0] not in ("-h", "--help"):
        raise UserError(f"there is no source or command {argv[0]}", f"one of {', '.join(COMMANDS)}", did_you_mean(
            argv[0], COMMANDS) or "python prepare.py text --input PATH --name NAME takes your own files")
    parser = Parser(prog="prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=", ".join(COMMANDS))
    for name in COMMANDS:
        add = commands.add_parser(name, prog=f"prepare.py {name}", allow_abbrev=False).add_argument
        if name == "text":
            add("--input", nargs="+", required=True, metavar="PATH", help="files, folders: " + " ".join(TEXT + RECORDS))
            add("--val_fraction", type=val_fraction, default=0.02, help="share of the documents that validates (0.02)")
        if name == "import":
            add("path", metavar="PATH", help="nanoGPT's train.bin, or a shard, or a folder of them")
        if name in ("verify", "show"):
            add("name", help="a dataset, or the path of its folder")
        else:
            default = None if name in ("text", "import") else name
            add("--name", required=name == "text", default=default, help="of the dataset to make")
            add("--workers", type=worker_count, metavar="N", help="processes (one a core)")
        if name in SOURCES:
            add("--tokens", type=token_count, help="stop at the end of the document that reaches so many: 10B, 500M")
            add("--revision", help=f"of {SOURCES[name]['repo']} ({SOURCES[name]['revision'][:12]})")
        if name in SOURCES or name in ("text", "import"):
            add("--tokenizer", choices={"import": ("bytes", "gpt2"), "fineweb10b-gpt2": ("gpt2",)}.get(
                name, ("bytes", "gpt2", "llama2")))
        if name not in ("pysrc", "import", "verify", "fineweb10b-gpt2"):
            add("--tokenizer_file", metavar="PATH", help="llama2's tokenizer.model (else it comes from the Hub)")
        add("--data_dir", default="data", help="where all datasets are (data)")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [name for action in commands.choices[args.command]._actions for name in action.option_strings[-1:]]
        raise UserError(f"{args.command} has no option {unknown[0]}", f"one of {', '.join(options)}",
                        did_you_mean(unknown[0], options) or f"python prepare.py {args.command} --help")
    if args.command == "import" and not args.name:
        path = Path(args.path)
        args.name = (path if path.is_dir() else path.parent).absolute().name
    if args.command in ("verify", "show"):
        if args.name in (".", ".."):
            args.name = os.path.abspath(args.name)
        if os.sep in args.name and args.data_dir != "data":
            raise UserError(f"found {args.name} and --data_dir={args.data_dir}", "a name below --data_dir, or a path",
                            "leave --data_dir out")
        if os.sep in args.name:  # data/pysrc/, as a shell completes it
            args.data_dir, args.name = str(Path(args.name).parent), Path(args.name).name
    elif not re.fullmatch(r"(?!.*\.partial$)[A-Za-z0-9][\w.-]*", args.name):
        raise UserError(f"{args.name} cannot name a dataset", "letters, digits, - _ and . in it", "--name mine")
    return args


def main(argv):
    began, args = time.monotonic(), parse(argv)
    manifest = COMMANDS[args.command](args)
    for split, total in manifest["splits"].items():
        print("{:5} {tokens:>15,} tokens {documents:>13,} documents {bytes:>17,} bytes of text".format(split, **total))
    folder, seconds = Path(args.data_dir, args.name), time.monotonic() - began
    print(f"{folder}: {manifest['tokenizer']} tokens, checksum {digest(manifest['shards'])[:16]}, {seconds:.1f} s")
    following = NEXT.get(args.name, f"train_gpt.py --dataset={args.name}")
    few = manifest["splits"].get("val", {}).get("tokens", 0)
    mend = {"text": "prepare more text, or with a larger --val_fraction",
            "import": f"give the trainer --val_dataset=NAME, or rm -r {quote(str(folder))} and import the folder that holds both files"}
    if few <= 256 and args.command in mend:
        print(f"note: {few} tokens to validate on are less than a window of the demo's; {mend[args.command]}")
    if args.command == "import" and not manifest["splits"].get("train", {"documents": 1})["documents"]:
        print(f"note: no id among the tokens is the end of a text; is {manifest['tokenizer']} their tokenizer? Look with prepare.py show "
              f"{args.name}; --tokenizer names another")
    elsewhere = "" if args.data_dir == "data" else f" --data_dir={quote(args.data_dir)}"
    print(f"next: torchrun --standalone --nproc_per_node=1 {following}{elsewhere}")


def cli():
    if os.name == "nt":
        print("prepare.py: error: found Windows, expected Linux or macOS; run it in WSL2, which `wsl --install` installs", file=sys.stderr)
        return 1
    with contextlib.suppress(AttributeError):  # a text may have letters that the terminal has not
        sys.stdout.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
        print(end="", flush=True)  # at exit it would be too late for the BrokenPipeError below
        return 0
    except UserError as e:
        message, status = str(e), 1
    except ModuleNotFoundError as e:
        message, status = f"package {e.name} is missing; expected it to be installed; pip install {e.name}", 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would fail too
        if sys.argv[1:2] == ["show"]:  # `show NAME | head` has read enough
            return 0
        message, status = "nobody reads the output; expected a terminal, a file or a reader; the same command goes on from here", 1
    except KeyboardInterrupt:
        message, status = "interrupted; what is finished is kept; the same command goes on from there", 130
    except OSError as e:
        status, message = 1, UserError(
            f"{e.strerror or e}: {e.filename or 'the folder of data'}", "files to read and a folder with room to write",
            "look with ls -ld and df -h; then the same command goes on from here, or elsewhere with --data_dir")
    print(f"prepare.py: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(cli())
