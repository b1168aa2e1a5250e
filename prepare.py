"""
Text -> tokenized shards in data/NAME/, which train_gpt.py and train_llama.py read.

    python prepare.py                            # pysrc: Python's own standard library, no download
    python prepare.py fineweb --tokens 10B       # a corpus of the paper from Hugging Face's Hub: SOURCES
    python prepare.py text --input notes/ book.txt --name mine --tokenizer gpt2  # your .txt .md .py .jsonl .parquet
    python prepare.py import nanoGPT/data/openwebtext --name owt                 # nanoGPT's train.bin and val.bin
    python prepare.py verify pysrc               # every checksum and count; show: manifest, excerpt

data/README.md has the format and the sources. The same command resumes an interrupted run and ends in the same bytes.
"""
import argparse, codecs, contextlib, hashlib, io, itertools, json, math, os, re, shutil, sys, sysconfig, zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

# ---- Sources on the Hub ----
# val: the numbers of the documents that validate; or (share, seed, documents) of datasets' train_test_split; or None,
# where files hold ids and are named. count: split of --tokens. pair: has the split that is not here
FINEWEB = dict(repo="HuggingFaceFW/fineweb", revision="9bb295ddab0e05d785b879661af7260fed5140fc", val=range(30_000))
SOURCES = {
    "openwebtext": dict(repo="Skylion007/openwebtext", files="plain_text/*.parquet", val=(0.0005, 2357, 8_013_769),
        revision="79d93d786212f7344586290adb811d4ae6a1762c", next="train_gpt.py --preset=gpt2-small"),
    "fineweb": dict(FINEWEB, files="sample/100BT/*.parquet", next="train_llama.py --preset=suite-b-210m"),
    "fineweb10b": dict(FINEWEB, files="sample/10BT/*.parquet"),
    "fineweb10b-gpt2": dict(repo="kjj0/fineweb10B-gpt2", files="fineweb_*.bin", val=None,
        revision="889765ea1f903759787add96995d81171b632d0c"),
    "dclm": dict(repo="mlfoundations/dclm-baseline-1.0", files="global-shard_01_of_10/*/*.jsonl.zst",
        revision="a3b142c183aebe5af344955ae20836eb34dcf69b", tokenizer="llama2", val=range(0), pair="c4"),
    "c4": dict(repo="allenai/c4", files="en/c4-validation.*.json.gz", val=range(10**9), count="val",
        revision="1588ec454efa1a09f29cd18ddd04fe05fc8653a2", tokenizer="llama2", pair="dclm"),
}
MAGIC, HEADER, SHARD_TOKENS = 20240520, 1024, 100_000_000  # HEADER in bytes
TEXT, RECORDS = (".txt", ".md", ".py"), (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".parquet")
BLOCK, BATCH, GROUP = 1 << 16, 1 << 20, 64 << 20  # read of a text at a time; for a thread; files that are one input
# what a file is for, by words of its name and folders; the first that fits counts
WORDS = {"test": "(news[a-z]*)?(te?st[ab]?|dev(el(opment)?)?|eval(uation)?)(ing|set|split|data|test|dev)?s?|held|"
         "h[eo]ld *out(s|set)?", "val": "val(id(ation)?)?(set|split|data)?s?", "train": "train(ing|set|split|data)?"}

@contextlib.contextmanager
def in_one_line(what, mend):
    try:
        yield
    except Exception as e:
        mend = "save it as UTF-8, and the same command goes on" if isinstance(e, UnicodeDecodeError) else mend
        sys.exit(f"{what}: {type(e).__name__}: {' '.join(str(e).split())[:300]}; {mend}")

# ---- Tokenizers ----
TOKENIZERS = {"bytes": (257, 256), "gpt2": (50257, 50256), "llama2": (32000, 2)}  # vocabulary size, end-of-text id
LLAMA2_SHA256 = "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"

# Where a text may be cut and keeps its ids: GPT-2's pattern always splits before a space or newline that follows
# something else, and no entry of Llama's vocabulary has a space after another character.
CUT = re.compile(r"(?<=[^\s\u2581\ufeff\ud800-\udfff])(?=[ \n])")

def load_tokenizer(name, file=None):
    """Returns encode(text, starts) -> array of ids, and decode(list of ids) -> text. starts: does the text start a
    document? What looks like a special token is ordinary text. file: Llama 2's tokenizer.model."""
    if name == "bytes":
        return lambda text, _: np.frombuffer(text.encode(), "u1"), lambda ids: bytes(ids).decode(errors="replace")
    if name == "gpt2":
        import tiktoken
        with in_one_line("GPT-2's vocabulary", "set TIKTOKEN_CACHE_DIR to where it is cached, or --tokenizer bytes"):
            gpt2 = tiktoken.get_encoding("gpt2")
        def encode(text, starts):
            try:  # encode_ordinary's ids, without its list or the GIL
                return gpt2.encode_to_numpy(text, disallowed_special=())
            except ValueError:  # a run of a million spaces is too deep for its regex; encode_ordinary panics
                cut = CUT.search(text, len(text) // 2)
                half = cut.start() if cut else len(text) // 2
                return np.concatenate([encode(text[:half], starts), encode(text[half:], False)])
        return encode, gpt2.decode
    import sentencepiece
    llama2 = sentencepiece.SentencePieceProcessor(model_file=str(file))
    # the model puts a space before any text; a newline merges with nothing: behind one a document goes on
    return (lambda text, starts: np.array(llama2.encode(text) if starts else llama2.encode("\n" + text)[2:], "<u2"),
            llama2.decode)

# ---- Reading ----
def open_file(address):
    if address.startswith("hf://"):
        import huggingface_hub
        return huggingface_hub.HfFileSystem().open(address, "rb")
    return open(address, "rb")

def pieces(f, tail=0):
    """Yield (text, does it start a document?, end it?, is it of the tail?) of a file of UTF-8, little of it in memory.
    The last `tail` of it, a share, is a document of its own and comes first, so that --tokens cannot leave it out."""
    size = f.seek(0, os.SEEK_END)
    at = f.seek(round(size * (1 - tail)))
    data = f.read(BLOCK)
    found = re.search(rb"(?<=\S)(?=[ \n]\s*\S)", data) or re.search(rb"[^\s\x80-\xbf]", data)  # a word, else a letter
    at = at + found.start() if found else size
    for begin, end in [(at, size), (0, at)] if 0 < at < size else [(0, size)]:
        f.seek(begin)
        left, text, starts = end - begin, "", True
        decode = codecs.getincrementaldecoder("utf-8")().decode  # a block may end within a character
        while data := f.read(min(BLOCK, left)):
            left -= len(data)
            block = decode(data, left == 0)
            if left and (cut := CUT.search(block)):
                yield text + block[:cut.start()], starts, False, begin > 0
                text, starts = block[cut.start():], False
            else:
                text += block
        yield text, starts, True, begin > 0

def documents(name, address, field, tail=0):
    """Yield as pieces() does of a text, a row of .parquet, a line of JSON."""
    with in_one_line(address, "when it can be read, the same command goes on"), open_file(address) as f:
        if name.lower().endswith(TEXT):
            yield from pieces(f, tail)
        else:
            for text in records(f, name.lower(), address, field):
                yield from pieces(io.BytesIO(text.encode()), tail) if tail else [(text, True, True, False)]

def records(f, name, address, field):
    import pyarrow.parquet
    mend = f"expected records with text in the field {field} (--field)"
    if name.endswith(".parquet"):
        for batch in pyarrow.parquet.ParquetFile(f).iter_batches(256, columns=[field]):
            with in_one_line(address, mend):
                texts = [(text or "") + "" for text in batch[field].to_pylist()]
            yield from texts
        return
    f = pyarrow.input_stream(f, {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix))
    for number, line in enumerate(io.TextIOWrapper(f, "utf-8"), 1):
        if line := line.strip("\ufeff \t\r\n"):
            with in_one_line(f"{address}, line {number}", mend):  # lines may differ in fields
                yield (json.loads(line)[field] or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")

def batches(group, field, validates, number):
    """Yield lists of (text, split, starts, ends), of about BATCH characters. number: of the first document.
    group: [(name, address, val)]. val: True; the share of each document that validates, its end; or False, and
    validates(number of a document, name of its file or its text) says."""
    batch, size = [], 0
    for name, address, val in group:
        for text, starts, ends, is_tail in documents(name, address, field, tail=0 if val is True else val):
            to_val = val is True or is_tail or validates(number, name if name.lower().endswith(TEXT) else text)
            batch.append((text, "val" if to_val else "train", starts, ends))
            size += len(text)
            number += ends
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch

def tokenize(args, group, validates, number):
    """Yield [(split, ids)] of a group of files of text."""
    encode, _ = load_tokenizer(args.tokenizer, args.tokenizer_file)
    eot = np.array(TOKENIZERS[args.tokenizer][1:], "<u2")

    def convert(batch):
        parts = {"train": [], "val": []}
        for text, split, starts, ends in batch:
            text = text.removeprefix("\ufeff") if starts and args.command == "text" else text  # a byte order mark
            parts[split] += [encode(text, starts), eot] if ends else [encode(text, starts)]
        return [(split, np.concatenate(ids).astype("<u2")) for split, ids in parts.items() if ids]
    return in_threads(args.workers, convert, batches(group, args.field, validates, number))

def in_threads(workers, function, jobs):
    """Yield function(job) in order. Tokenizers release the GIL. Few jobs are in memory."""
    with ThreadPoolExecutor(workers) as pool:
        queue = []
        for job in jobs:
            queue.append(pool.submit(function, job))
            if len(queue) > 2 * workers:
                yield queue.pop(0).result()
        yield from (future.result() for future in queue)

def read_ids(address, val, vocab):
    """Yield [(split, ids)] of a file of ids, nanoGPT's or a shard."""
    with in_one_line(address, "is it whole, with 16-bit ids of this --tokenizer?"), open_file(address) as f:
        magic, _, tokens, header_vocab = np.frombuffer(f.read(16).ljust(16, b"\0"), "<u4").tolist()
        size, skip = f.seek(0, os.SEEK_END), HEADER if magic == MAGIC else 0
        if skip and (size != HEADER + 2 * tokens or header_vocab not in (0, vocab)):
            raise ValueError(f"{size} bytes, {tokens} tokens, ids below {header_vocab} and not {vocab}")
        f.seek(skip)
        while data := f.read(8 << 20):
            ids = np.frombuffer(data, "<u2")
            if ids.max() >= vocab:
                raise ValueError(f"the id {ids.max()} and not below {vocab}")
            yield [("val" if val else "train", ids)]

# ---- Writing ----
def share(key):
    """A number in [0, 1) that depends on this text alone."""
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest(), "big") / 2**64

def write_shard(stem, split, parts, shards, vocab, eot):
    """Write the arrays `parts` as the split's next shard, and enter it in `shards`, the manifest's."""
    number = sum(shard["split"] == split for shard in shards) + (split == "train")  # these count from 1, as others' do
    path, ids = Path(f"{stem}_{split}_{number:06d}.bin"), np.concatenate(parts)
    header = [MAGIC, 1, len(ids), vocab, eot, zlib.crc32(ids), 1] + 249 * [0]
    with open(path, "wb") as file:
        file.writelines([np.array(header, "<u4"), ids])
        file.flush()
        os.fsync(file.fileno())
    shards.append(dict(file=path.name, split=split, tokens=len(ids), documents=int((ids == eot).sum()), crc=header[5]))

def identity(name, path, val):
    size = os.path.getsize(path)
    return name, val, size, zlib.crc32(np.memmap(path, "u1", "r") if size else b"")

def read_manifest(what):
    folder = Path("" if "/" in what else "data", what)
    with contextlib.suppress(OSError, ValueError):
        return folder, json.loads((folder / "manifest.json").read_text())
    mend = f"python prepare.py import {folder} --name ANOTHER" if any(folder.glob("*.bin")) else "give another name"
    sys.exit(f"{folder} has no manifest.json of prepare.py's; {mend}")

def build(args, source, files, validates=None):
    """Make data/NAME/ of files of text or, without validates(), of ids. The manifest has a digest of the files that are
    done; another may be mended, and the same command goes on."""
    own = SOURCES.get(args.command, {})
    local, count = not own, own.get("count", "train")  # what the Hub has is pinned
    final = Path("data", args.name)
    folder = final if final.exists() else Path("data", f"{args.name}.partial")
    source = {**source, "field": args.field, "tokenizer": args.tokenizer, "tokens": args.tokens}
    vocab, eot = TOKENIZERS[args.tokenizer]
    state = dict(source=source, vocab_size=vocab, eot=eot, done=0, digest=share("[]"), shards=[])
    if final.exists() or (folder / "manifest.json").exists():
        _, state = read_manifest(str(folder))
    tokens = {split: sum(s["tokens"] for s in state["shards"] if s["split"] == split) for split in ("train", "val")}
    limit = args.tokens or math.inf
    went_in = files if final.exists() and tokens[count] < limit else files[:state["done"]]
    went_in = [identity(*file) for file in went_in if local]
    if (state["source"], state.get("digest")) != (source, share(repr(went_in))):
        sys.exit(f"{folder} holds something else: {state['source']} or other files; delete it, or give another --name")
    if final.exists():
        return print(f"{final} is complete already")

    sizes = [os.path.getsize(path) if local and validates else GROUP for _, path, _ in files]
    group_of = dict(zip(files, np.cumsum(sizes) // GROUP))
    for _, group in itertools.groupby(files[state["done"]:], group_of.get):
        if tokens[count] >= limit:
            break
        group = list(group)
        went_in += [identity(*file) for file in group if local]
        growing, shards = {}, [*state["shards"]]  # a shard ends with its group
        before = sum(shard["documents"] for shard in shards)
        stream = tokenize(args, group, validates, before) if validates else read_ids(*group[0][1:], vocab)
        folder.mkdir(parents=True, exist_ok=True)
        for parts in tqdm(stream, f"{state['done']}/{len(files)} files", disable=None, leave=False):
            for split, ids in parts:
                growing.setdefault(split, []).append(ids)
                tokens[split] += len(ids)
                if sum(map(len, growing[split])) >= SHARD_TOKENS:
                    write_shard(folder / args.name, split, growing.pop(split), shards, vocab, eot)
            if tokens[count] >= limit:
                break
        for split, parts in growing.items():
            write_shard(folder / args.name, split, parts, shards, vocab, eot)
        state.update(done=state["done"] + len(group), digest=share(repr(went_in)), shards=shards)
        (folder / "manifest.tmp").write_text(json.dumps(state, indent=1))
        os.replace(folder / "manifest.tmp", folder / "manifest.json")

    if args.tokenizer == "llama2":
        shutil.copy(args.tokenizer_file, folder / "tokenizer.model")  # for show, the tools
    for path in {*folder.glob(f"{args.name}_*.bin")} - {folder / shard["file"] for shard in state["shards"]}:
        path.unlink()  # of an input since mended
    folder.rename(final)
    print(f"{final}: {tokens['train']:,} train, {tokens['val']:,} val tokens")
    train, val = (args.name if tokens[split] else own.get("pair", "ANOTHER") for split in ("train", "val"))
    lacking = " or ".join(split for split in tokens if not tokens[split])
    flags = "" if train == "pysrc" else f" --dataset={train} --run_name={train}"
    print(f"{final} has no {lacking} tokens: give more text or --tokens (import: files named {lacking}), or train with "
          f"--dataset={train} --val_dataset={val}" if lacking else
          f"next: python {own.get('next', 'train_gpt.py')}{flags}")

# ---- Commands ----
def below(top, leave=()):
    """[(name, path)] of the files at or below `top`, by every link that is no loop, without `leave`."""
    base = top if top.is_dir() else top.parent
    found, paths = [], [(top, {*base.resolve().parents})]
    for path, above in paths:  # it grows
        if not path.is_dir() or path != top and (path.name[:1] == "." or path.suffix == ".partial"):
            found.append((path.relative_to(base).as_posix(), str(path)))
        elif path.name not in leave and (real := path.resolve()) not in above:
            paths += [(inner, {*above, real}) for inner in sorted(path.iterdir())]
    return sorted(found)

def find(tops, endings, splits):
    """[(name, path, does it validate?)] of the files at or below tops; a line counts what is left out."""
    found, words, files = {}, {}, {}  # by real path: links may lead to a file under several names, and each counts
    for top in tops:
        if not os.path.exists(top):
            sys.exit(f"{top} does not exist")
        # files, folders or what is as deep may be a glob's, which folders tell apart: a/*/en, a/*/b.txt
        alike = [p for p in tops if os.path.isfile(p) == os.path.isfile(top) or p.count("/") == top.count("/")]
        base = os.path.commonpath(map(os.path.abspath, alike))
        for name, path in below(Path(top)):
            real, depth = os.path.realpath(path), name.count("/") + 2
            near, real_near = ("/".join(Path(os.path.relpath(p)).parts[-depth:]) for p in (path, real))
            where = re.sub(r"[\W\d_]+", " ", f"/{os.path.relpath(path, base)}/{near}/{real_near}/")
            words[real] = words.get(real, "") + where + re.sub(r"\B(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", " ", where)
            fits = name.lower().endswith(endings) and "/." not in f"/{name}" and os.path.exists(path)
            if fits and os.path.getsize(path):
                found.setdefault(real, (near, path))
    for real, (name, path) in found.items():
        split = next((split for split in WORDS if re.search(f"(?i) ({WORDS[split]}) ", words[real])), None)
        if split in splits:
            files[real] = (name, path, split == "val")
    left_out = sorted(words.keys() - files.keys())
    if left_out:
        print(f"left out: {len(left_out)} files, empty, hidden, test or of other kinds; first {left_out[0]!r}")
    if not files:
        sys.exit(f"{' '.join(tops)}: expected text (import: ids, named train or val) in {' '.join(endings)}, no tests")
    return sorted(files.values(), key=lambda file: not file[2])  # val first: --tokens cannot cut it

def prepare_pysrc(args):
    """Every .py of the running Python's library that is UTF-8, outside site-packages."""
    files = []
    for name, path in below(Path(sysconfig.get_paths()["stdlib"]), leave=("site-packages", "dist-packages")):
        if name.endswith(".py"):
            with contextlib.suppress(UnicodeDecodeError, FileNotFoundError):
                Path(path).read_text("utf-8")
                files.append((name, path, False))
    build(args, {}, files, lambda number, key: share(key) < 0.02)

def prepare_text(args):
    files = find(args.input, TEXT + RECORDS, ("train", "val", None))
    fraction = 0 if any(val for *_, val in files) else args.val_fraction  # a given split is not drawn
    texts = {name for name, *_ in files if name.lower().endswith(TEXT)}  # a document each
    rows = (text for name, path, _ in files if name not in texts for text, *_ in documents(name, path, args.field))
    # at least one document validates: the first row, or else the text of lowest hash
    row = [*itertools.islice(rows, 1)]
    always = min(row or texts or [""], key=share)
    source = {"val_fraction": args.val_fraction, "always": share(always)}
    enough = math.ceil(1 / fraction) if fraction > 0 else 0
    if sum(1 for _ in itertools.islice(itertools.chain(texts, row, rows), enough)) < enough:  # then the end of each
        files, fraction = [(name, path, fraction) for name, path, _ in files], 0
    build(args, source, files, lambda number, key: fraction > 0 and (key == always or share(key) < fraction))

def prepare_import(args):
    files = find([args.what], (".bin",), ("train", "val"))
    for _, path, _ in files:
        magic, ids = np.fromfile(path, "<u4", 1).tolist(), np.fromfile(path, "<u2", BATCH)
        high, low = sorted([(ids[::2] > 15).sum(), (ids[1::2] > 15).sum()])  # in wider numbers few high halves are
        other = {b"\x93NUM": "a file of NumPy's", b"LITP": "a file of lit-gpt's"}.get(ids[:2].tobytes())
        wide = magic == [20240801] or low > 15 and (100 * high < len(ids) // 2 or not (ids[::2] & 255).any())
        text = ((ids > 0x8ff) & (ids & 0x8080 == 0)).sum() > 0.6 * max(9, len(ids))  # ASCII in pairs
        looks = other or ("ids of 32 bits or 64, not 16" if wide else "text" if text else "ids of characters")
        if magic != [MAGIC] and (wide or other or text or Path(path).with_name("meta.pkl").exists()):
            sys.exit(f"{path} looks like {looks}; run: python prepare.py text --input TEXT --name {args.name}")
    build(args, {}, files)

def prepare_hub(args):
    own = SOURCES[args.command]
    source = {key: str(own[key]) for key in ("repo", "revision", "files", "val")}
    address, val = "datasets/{repo}@{revision}/{files}".format(**own), own["val"]
    if isinstance(val, tuple):
        part, seed, documents = val
        val = set(np.random.default_rng(seed).permutation(documents)[:math.ceil(part * documents)].tolist())
    found = []
    if not Path("data", args.name).exists():  # else build() needs no network
        import huggingface_hub
        with in_one_line(address, "with a network the same command goes on"):
            found = huggingface_hub.HfFileSystem().glob(address)
    files = sorted([(name, f"hf://{name}", "_val_" in name) for name in found], key=lambda file: (not file[2], file))
    build(args, source, files, None if val is None else lambda number, key: number in val)

def verify(args):
    folder, manifest = read_manifest(args.what)
    vocab, eot, mend = manifest["vocab_size"], manifest["eot"], f"delete {folder} and prepare it again"
    if {shard["file"] for shard in manifest["shards"]} != {path.name for path in folder.glob("*.bin")}:
        sys.exit(f"{folder} holds other shards than its manifest.json; {mend}")
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        header, crc = np.fromfile(path, "<u4", 7).tolist(), zlib.crc32(path.read_bytes()[HEADER:])
        if header != [MAGIC, 1, shard["tokens"], vocab, eot, crc, 1] or crc != shard.get("crc", crc):
            sys.exit(f"{path} is damaged; {mend}")
    print(f"{len(manifest['shards'])} shards verified: sizes, headers, checksums")

def show(args):
    folder, manifest = read_manifest(args.what)
    _, decode = load_tokenizer(manifest["source"]["tokenizer"], folder / "tokenizer.model")
    ids = np.fromfile(folder / manifest["shards"][0]["file"], "<u2", 200, offset=HEADER)
    print(json.dumps(manifest, indent=1), "begins with", repr(decode(ids[ids != manifest["eot"]].tolist())))

# ---- Main ----
COMMANDS = {"pysrc": prepare_pysrc, "text": prepare_text, "import": prepare_import, "verify": verify, "show": show,
            **dict.fromkeys(SOURCES, prepare_hub)}

def amount(text):
    number = float(re.sub("[kMBT]$", "", text)) * 1000 ** ("kMBT".find(text[-1:]) + 1)
    if not 1 <= number < math.inf:
        raise ValueError
    return round(number)

def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", nargs="?", default="pysrc", choices=COMMANDS)
    add("what", nargs="?", help="import: a .bin or a folder of them; verify, show: a dataset")
    add("--input", nargs="+", action="extend", metavar="PATH", help="text: files, folders")
    add("--val_fraction", type=float, default=0.02, help="text: share that validates, if no file is named val (0.02)")
    add("--field", metavar="NAME", default="text", help="where the text of .jsonl and .parquet is (text)")
    add("--name", help="of the dataset to make; text and import need it")
    add("--tokenizer", choices=TOKENIZERS, help="default: a corpus' own, gpt2 for import, else bytes")
    add("--tokenizer_file", metavar="PATH", help="llama2's tokenizer.model (else the Hub's)")
    add("--tokens", type=amount, help="stop behind 10B, 500M")
    add("--workers", type=amount, default=os.cpu_count(), help="threads (one a core)")
    args = parser.parse_intermixed_args(argv)
    takes = {"text": ["input", "name"], "import": ["what", "name"], "verify": ["what"], "show": ["what"]}
    given = [name for name in ("what", "input", "name") if getattr(args, name) and all(getattr(args, name))]
    if given != takes.get(args.command, given and ["name"]) or not 0 <= args.val_fraction <= 1:
        parser.error(f"{args.command} takes {' and '.join(takes.get(args.command, ['name']))}; a fraction is 0 to 1")
    args.name = args.name or args.command
    if not re.fullmatch(r"(?!.*(_train|_val|\.partial$))\w[\w.-]*", args.name):
        sys.exit(f"--name {args.name}: give letters, digits, _ . -, without _train or _val, no .partial")
    own = "bytes" if args.command in ("pysrc", "text") else SOURCES.get(args.command, {}).get("tokenizer", "gpt2")
    args.tokenizer = args.tokenizer or ("llama2" if args.tokenizer_file is not None else own)
    try:
        if args.tokenizer == "llama2" and not args.tokenizer_file:
            import huggingface_hub as hub
            with in_one_line("Llama 2's tokenizer", "set --tokenizer_file to the path of its tokenizer.model"):
                args.tokenizer_file = hub.hf_hub_download("hf-internal-testing/llama-tokenizer", "tokenizer.model")
        if args.tokenizer_file and hashlib.sha256(Path(args.tokenizer_file).read_bytes()).hexdigest() != LLAMA2_SHA256:
            sys.exit(f"{args.tokenizer_file} is not Llama 2's tokenizer.model; give another --tokenizer_file")
        COMMANDS[args.command](args)
    except ImportError as e:
        sys.exit(f"{e}; pip install {e.name}")
    except (OSError, KeyboardInterrupt) as e:  # a full disk, Ctrl-C
        sys.exit(f"{type(e).__name__}: {e}; what is finished is kept")

if __name__ == "__main__":
    main(sys.argv[1:])
