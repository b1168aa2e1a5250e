"""
Text -> tokenized shards in data/NAME/, which train_gpt.py and train_llama.py read.

    python prepare.py                            # the default, pysrc: Python's own standard library, no download
    python prepare.py fineweb --tokens 10B       # a corpus of the paper from the Hugging Face Hub: see SOURCES below
    python prepare.py text --input notes/ book.txt --name mine --tokenizer gpt2  # your .txt .md .py .jsonl .parquet
    python prepare.py import nanoGPT/data/openwebtext --name owt                 # nanoGPT's train.bin and val.bin
    python prepare.py verify pysrc               # every checksum, count and id range
    python prepare.py show pysrc                 # the manifest and a decoded excerpt

The default takes 2 s and ends with "next: torchrun ... train_gpt.py --dataset=pysrc". data/README.md has the shards'
format and the sources. The same command resumes an interrupted run, and ends in the same bytes with any --workers.
"""
import argparse, codecs, contextlib, hashlib, io, itertools, json, math, os, re, shutil, sys, sysconfig, zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

# ---- Sources on the Hub ----------------------------------------------------------------------------------------------

# val: which documents validate, by number; or (share, seed, documents), the test split that datasets' train_test_split
# draws of so many; or None, where files hold ids and are named. count: split of --tokens. pair: has the split not here
FINEWEB = dict(repo="HuggingFaceFW/fineweb", revision="9bb295ddab0e05d785b879661af7260fed5140fc", val=range(30_000))
SOURCES = {
    "openwebtext": dict(repo="Skylion007/openwebtext", revision="79d93d786212f7344586290adb811d4ae6a1762c",
                        files="plain_text/*.parquet", val=(0.0005, 2357, 8_013_769),  # nanoGPT's
                        next="train_gpt.py --preset=gpt2-small"),
    "fineweb": dict(FINEWEB, files="sample/100BT/*.parquet", next="train_llama.py --preset=suite-b-210m"),
    "fineweb10b": dict(FINEWEB, files="sample/10BT/*.parquet"),
    "fineweb10b-gpt2": dict(repo="kjj0/fineweb10B-gpt2", revision="889765ea1f903759787add96995d81171b632d0c",
                            files="fineweb_*.bin", val=None),
    "dclm": dict(repo="mlfoundations/dclm-baseline-1.0", revision="a3b142c183aebe5af344955ae20836eb34dcf69b",
                 files="global-shard_01_of_10/*/*.jsonl.zst", tokenizer="llama2", val=range(0), pair="c4"),  # a tenth
    "c4": dict(repo="allenai/c4", revision="1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
               files="en/c4-validation.*.json.gz", tokenizer="llama2", val=range(10**9), count="val", pair="dclm"),
}
MAGIC, HEADER, SHARD_TOKENS = 20240520, 1024, 100_000_000  # HEADER in bytes
TEXT, RECORDS = (".txt", ".md", ".py"), (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".parquet")
BLOCK, BATCH, GROUP = 1 << 16, 1 << 20, 64 << 20  # read of a text at a time; for a thread; files that are one input

@contextlib.contextmanager
def in_one_line(what, mend):
    try:
        yield
    except Exception as e:  # of huggingface_hub, httpx, datasets, pyarrow, tiktoken ...: there is no common one
        sys.exit(f"{what}: {type(e).__name__}: {' '.join(str(e).split())[:300]}; {mend}")

# ---- Tokenizers ------------------------------------------------------------------------------------------------------

TOKENIZERS = {"bytes": (257, 256), "gpt2": (50257, 50256), "llama2": (32000, 2)}  # vocabulary size, end-of-text id
LLAMA2 = "hf-internal-testing/llama-tokenizer"  # has Meta's tokenizer.model, of this sha256
LLAMA2_SHA256 = "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"

# Where a text may be cut and keeps its ids: GPT-2's pattern always splits before a space or newline that follows
# something else, and no entry of Llama's vocabulary has a space after another character.
CUT = re.compile(r"(?<=[^\s\u2581\ud800-\udfff])(?=[ \n])")

def load_tokenizer(name, file=None):
    """Returns encode(text, starts) -> array of ids, and decode(list of ids) -> text. starts: does the text start a
    document? What looks like a special token is ordinary text. file: Llama 2's tokenizer.model."""
    if name == "bytes":
        return (lambda text, starts: np.frombuffer(text.encode(), np.uint8),
                lambda ids: bytes(ids).decode(errors="replace"))
    if name == "gpt2":
        import tiktoken
        with in_one_line("GPT-2's vocabulary", "set TIKTOKEN_CACHE_DIR to a folder that tiktoken cached it in"):
            gpt2 = tiktoken.get_encoding("gpt2")
        def encode(text, starts):
            try:  # encode_ordinary's ids, without its list and without the GIL
                return gpt2.encode_to_numpy(text, disallowed_special=())
            except ValueError:  # a run of a million spaces is too deep for its regex; encode_ordinary panics
                cut = CUT.search(text, len(text) // 2)
                half = cut.start() if cut else len(text) // 2
                return np.concatenate([encode(text[:half], starts), encode(text[half:], False)])
        return encode, gpt2.decode

    import sentencepiece
    if hashlib.sha256(Path(file).read_bytes()).hexdigest() != LLAMA2_SHA256:
        sys.exit(f"{file} is not Llama 2's tokenizer.model; give another --tokenizer_file")
    llama2 = sentencepiece.SentencePieceProcessor(model_file=str(file))
    # the model puts a space before any text; a newline merges with nothing: behind one a document goes on
    return (lambda text, starts: np.array(llama2.encode(text) if starts else llama2.encode("\n" + text)[2:], "<u2"),
            llama2.decode)

# ---- Reading ---------------------------------------------------------------------------------------------------------

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
        while left > 0:
            data = f.read(min(BLOCK, left))
            left -= len(data)
            block = decode(data, left == 0)
            if left and (cut := CUT.search(block)):
                yield text + block[:cut.start()], starts, False, begin > 0
                text, starts = block[cut.start():], False
            else:
                text += block
        yield text, starts, True, begin > 0

def documents(name, address, field, tail=0):
    """Yield as pieces() does of a text, or of each row of .parquet or line of JSON. hf://... is streamed."""
    if name.endswith(TEXT):
        with open(address, "rb") as f:
            yield from pieces(f, tail)
        return
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is told once
    kind, columns = ("parquet", {"columns": [field]}) if name.endswith(".parquet") else ("text", {})
    rows = datasets.load_dataset(kind, data_files=address, **columns, split="train", streaming=True)
    texts = (text for batch in rows.iter(256) for text in batch[field if columns else "text"])
    for number, text in enumerate(texts, 1):
        if kind == "text":  # a line; the reader of JSON wants the same fields in all of them, which DCLM's have not
            if not text.strip():
                continue
            with in_one_line(f"{address}, line {number}", f"expected JSON with the field {field} (--field)"):
                text = (json.loads(text)[field] or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield from pieces(io.BytesIO(text.encode()), tail) if tail else [(text or "", True, True, False)]

def batches(group, field, validates, number):
    """Yield lists of (text, split, starts, ends), of about BATCH characters, of a group of (name, address, *tail).
    validates(number of a document, name of its file or beginning of its text); number: of the first document."""
    batch, size = [], 0
    for name, address, *tail in group:
        with in_one_line(address, f"when it is UTF-8 with a field {field} (--field), the same command goes on"):
            for text, starts, ends, is_tail in documents(name, address, field, *tail):
                val = is_tail or validates(number, name if name.endswith(TEXT) else text[:1000])
                batch.append((text, "val" if val else "train", starts, ends))
                size += len(text)
                number += ends
                if size >= BATCH:
                    yield batch
                    batch, size = [], 0
    yield batch

def tokenizing(args, validates):
    """Returns convert(group, number of its first document), which yields (bytes of text, [(split, ids)])."""
    encode, _ = load_tokenizer(args.tokenizer, args.tokenizer_file)
    eot = np.array(TOKENIZERS[args.tokenizer][1:], "<u2")

    def convert_batch(batch):
        parts = {"train": [], "val": []}
        for text, split, starts, ends in batch:
            parts[split] += [encode(text, starts), eot] if ends else [encode(text, starts)]
        size = sum(len(text.encode()) for text, *_ in batch)
        return size, [(split, np.concatenate(ids).astype("<u2")) for split, ids in parts.items() if ids]
    return lambda group, number: in_threads(args.workers, convert_batch, batches(group, args.field, validates, number))

def in_threads(workers, function, jobs):
    """Yield function(job) in order. Tokenizers release the GIL. Few jobs are in memory, however many there are."""
    with ThreadPoolExecutor(workers) as pool:
        queue = []
        for job in jobs:
            queue.append(pool.submit(function, job))
            if len(queue) > 2 * workers:
                yield queue.pop(0).result()
        yield from (future.result() for future in queue)

def read_ids(address, vocab):
    """Yield (bytes, [(split, ids)]) of a file of ids, nanoGPT's or a shard; val in its name says that it validates."""
    import fsspec
    split = "val" if re.search(r"(?<![a-z])val(idation)?(?![a-z])", Path(address).name) else "train"
    with in_one_line(address, "is it whole, and are its ids of this --tokenizer?"):
        system, path = fsspec.url_to_fs(address)
        size = system.size(path)
        with system.open(path, "rb") as f:
            magic, _, tokens, header_vocab = np.frombuffer(f.read(16).ljust(16, b"\0"), "<u4").tolist()
            skip = HEADER if magic == MAGIC else 0
            if skip and (size != HEADER + 2 * tokens or header_vocab not in (0, vocab)):
                raise ValueError(f"{size} bytes, {tokens} tokens, ids below {header_vocab} and not {vocab}")
            f.seek(skip)
            while data := f.read(8 << 20):
                ids = np.frombuffer(data, "<u2")
                if ids.max() >= vocab:
                    raise ValueError(f"the id {ids.max()} and not below {vocab}")
                yield len(data), [(split, ids)]

# ---- Writing ---------------------------------------------------------------------------------------------------------

class Shard:  # that is being written
    def __init__(self, folder, name, split, vocab, eot):
        self.name, self.split, self.vocab, self.eot = name, split, vocab, eot
        self.tokens = self.documents = self.crc32 = 0
        self.file = open(folder / name, "wb", buffering=0)  # so that a full disk is told by write(), not by close()
        self.file.seek(HEADER)

    def write(self, ids):
        data = memoryview(ids).cast("B")
        while len(data):
            data = data[self.file.write(data):]
        self.tokens += len(ids)
        self.documents += int((ids == self.eot).sum())
        self.crc32 = zlib.crc32(ids, self.crc32)

    def close(self):
        """Returns its entry in the manifest."""
        header = np.zeros(256, "<u4")
        header[:7] = MAGIC, 1, self.tokens, self.vocab, self.eot, self.crc32, 1
        self.file.seek(0)
        self.file.write(header)
        os.fsync(self.file.fileno())
        self.file.close()
        return {"file": self.name, "split": self.split, "tokens": self.tokens, "documents": self.documents}

def read_manifest(folder, source=None):
    if not (folder / "manifest.json").exists():
        found = len(list(folder.glob("*.bin")))
        mend = f"python prepare.py import {folder} --name ANOTHER" if found else "see python prepare.py --help"
        sys.exit(f"{folder} was not made by prepare.py: {found} .bin files, no manifest.json; {mend}")
    manifest = json.loads((folder / "manifest.json").read_text())
    if source and manifest["source"] != source:
        sys.exit(f"{folder} holds something else, {manifest['source']}; choose another --name, or delete it")
    return manifest

def build(args, source, inputs, validates=None, count="train"):
    """Make data/NAME/ of inputs() -> groups of files, of ids or, if validates() says what validates, of text. --tokens
    are of the split `count`. Shards end with their group; the groups that manifest.json counts are not made again."""
    final, folder = Path("data", args.name), Path("data", f"{args.name}.partial")
    named = {} if args.field == "text" else {"field": args.field}
    source = json.loads(json.dumps({**source, **named, "tokenizer": args.tokenizer, "tokens": args.tokens}))
    if final.exists():
        read_manifest(final, source)
        print(f"{final} is complete already")
        return
    vocab, eot = TOKENIZERS[args.tokenizer]
    convert = tokenizing(args, validates) if validates else lambda group, number: read_ids(group[0][1], vocab)
    folder.mkdir(parents=True, exist_ok=True)
    state = read_manifest(folder, source) if (folder / "manifest.json").exists() else dict(
        name=args.name, source=source, tokenizer=args.tokenizer, vocab_size=vocab, eot=eot, done=0, shards=[])
    tokens = {split: sum(s["tokens"] for s in state["shards"] if s["split"] == split) for split in ("train", "val")}
    limit = args.tokens or math.inf
    with tqdm(desc=args.name, unit="B", unit_scale=True, disable=None) as bar:
        for group in inputs()[state["done"]:]:
            if tokens[count] >= limit:
                break
            growing, shards = {}, state["shards"]
            for n, parts in convert(group, sum(shard["documents"] for shard in shards)):
                for split, ids in parts:
                    if split not in growing:  # training shards count from 1, as those of others do
                        number = sum(shard["split"] == split for shard in shards) + (split == "train")
                        growing[split] = Shard(folder, f"{args.name}_{split}_{number:06d}.bin", split, vocab, eot)
                    growing[split].write(ids)
                    tokens[split] += len(ids)
                    if growing[split].tokens >= SHARD_TOKENS:
                        shards = [*shards, growing.pop(split).close()]
                bar.update(n)
                if tokens[count] >= limit:
                    break
            state.update(done=state["done"] + 1, shards=[*shards, *(shard.close() for shard in growing.values())])
            (folder / "manifest.tmp").write_text(json.dumps(state, indent=1))
            os.replace(folder / "manifest.tmp", folder / "manifest.json")

    if args.tokenizer_file:
        shutil.copy(args.tokenizer_file, folder / "tokenizer.model")  # for show and the tools
    folder.rename(final)
    print(f"{final}: {tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on")
    own = SOURCES.get(args.command, {})
    train, val = (args.name if tokens[split] else own.get("pair", "ANOTHER") for split in ("train", "val"))
    lacking = " or ".join(split for split in tokens if not tokens[split])
    print(f"{final} has no {lacking} tokens: give more text (import: files named {lacking}), or train with "
          f"--dataset={train} --val_dataset={val}" if lacking else
          f"next: torchrun --standalone --nproc_per_node=1 {own.get('next', f'train_gpt.py --dataset={train}')}")

# ---- Commands --------------------------------------------------------------------------------------------------------

def share(key):
    """A number in [0, 1) that depends on this text alone: a document validates wherever it is."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(key), digest_size=8).digest(), "big") / 2**64

def below(folder, endings):
    """[(posix path relative to `folder`, path)], sorted."""
    return sorted((path.relative_to(folder).as_posix(), str(path))
                  for path in Path(folder).rglob("*") if path.name.endswith(endings) and path.is_file())

def digest(files):
    """Another one when a file is another, or changed."""
    stats = [(name, os.stat(path).st_size, os.stat(path).st_mtime_ns) for name, path, *_ in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]

def prepare_pysrc(args):
    """Every .py of the running Python's library that is UTF-8, outside site-packages."""
    files = []
    for name, path in below(sysconfig.get_paths()["stdlib"], ".py"):
        if not {"site-packages", "dist-packages", "__pycache__"} & set(name.split("/")):
            with contextlib.suppress(UnicodeDecodeError):
                Path(path).read_bytes().decode()
                files.append((name, path))
    build(args, {"digest": digest(files)}, lambda: [files], lambda number, key: share(key) < 0.02)

def prepare_text(args):
    files, fraction = [], args.val_fraction
    for path in args.input:
        if not os.path.exists(path):
            sys.exit(f"--input {path} does not exist; give the path of a file or folder")
        files += [(Path(path).name, path)] if os.path.isfile(path) else below(path, TEXT + RECORDS)
    if not all(name.endswith(TEXT + RECORDS) for name, _ in files) or not any(os.path.getsize(p) for _, p in files):
        sys.exit(f"{' '.join(args.input)}: expected text in files {' '.join(TEXT + RECORDS)}, or folders with such")

    # of many documents at least one validates: the first record, else the text of lowest hash; of few the end of each
    always = min(range(len(files)), key=lambda i: (1, share(files[i][0])) if files[i][0].endswith(TEXT) else (0, i))
    texts, tables = ([file for file in files if file[0].endswith(TEXT) == kind] for kind in (True, False))
    known = itertools.chain(texts, itertools.chain.from_iterable(batches(tables, args.field, lambda *_: False, 0)))
    many = math.ceil(1 / fraction) if fraction > 0 else 0  # so many that one would validate
    few = sum(1 for _ in itertools.islice(known, many)) < many
    files = [(*file, fraction) for file in files] if few else files

    ends = np.cumsum([os.path.getsize(path) for _, path, *_ in files]) // GROUP
    groups = [[file for file, n in zip(files, ends) if n == end] for end in np.unique(ends)]
    build(args, {"input": args.input, "val_fraction": fraction, "digest": digest(files)}, lambda: groups,
          lambda number, key: not few and (share(key) < fraction or fraction > 0 and number == always))

def prepare_import(args):
    files = [(Path(args.what).name, args.what)] if os.path.isfile(args.what) else below(args.what, ".bin")
    if not any(os.path.getsize(path) for _, path in files):
        sys.exit(f"{args.what}: expected nanoGPT's train.bin, a shard, or a folder of such")
    for _, path in files:
        if (meta := Path(path).with_name("meta.pkl")).exists():
            sys.exit(f"{meta}: nanoGPT's ids of characters, not GPT-2's; tokenize the text: "
                     f"python prepare.py text --input {meta.with_name('input.txt')} --name {args.name}")
        if np.fromfile(path, "<u4", 1).tolist() == [20240801]:
            sys.exit(f"{path} has llm.c's ids of 32 bits, for Llama 3, and ours have 16; tokenize the text: "
                     f"python prepare.py text --input TEXT --name {args.name} --tokenizer gpt2")
    build(args, {"digest": digest(files)}, lambda: [[file] for file in files])

def prepare_hub(args):
    source = {key: SOURCES[args.command][key] for key in ("repo", "revision", "files")}
    address, val = "datasets/{repo}@{revision}/{files}".format(**source), SOURCES[args.command]["val"]
    if isinstance(val, tuple):
        part, seed, documents = val
        val = set(np.random.default_rng(seed).permutation(documents)[:math.ceil(part * documents)].tolist())

    def inputs():
        import huggingface_hub
        with in_one_line(address, "with a network the same command goes on"):
            found = huggingface_hub.HfFileSystem().glob(address)
        return [[(name, f"hf://{name}")] for name in sorted(found, key=lambda name: ("_val_" not in name, name))]
    validates = None if val is None else lambda number, key: number in val
    build(args, source, inputs, validates, SOURCES[args.command].get("count", "train"))

def verify(args):
    folder = Path(args.what) if "/" in args.what else Path("data", args.what)
    manifest = read_manifest(folder)
    vocab, eot, mend = manifest["vocab_size"], manifest["eot"], f"delete {folder} and prepare it again"
    if {shard["file"] for shard in manifest["shards"]} != {path.name for path in folder.glob("*.bin")}:
        sys.exit(f"{folder} holds other shards than its manifest.json; {mend}")
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        header, ids = np.fromfile(path, "<u4", 7).tolist(), np.fromfile(path, "<u2", offset=HEADER)
        found = {**shard, "tokens": len(ids), "documents": (ids == eot).sum()}
        if found != shard or header != [MAGIC, 1, len(ids), vocab, eot, zlib.crc32(ids), 1] or ids.max() >= vocab:
            sys.exit(f"{path} is damaged; {mend}")
    print(f"{len(manifest['shards'])} shards verified: sizes, headers, checksums, id ranges, tokens and documents")

def show(args):
    folder = Path(args.what) if "/" in args.what else Path("data", args.what)
    manifest = read_manifest(folder)
    _, decode = load_tokenizer(manifest["tokenizer"], folder / "tokenizer.model")
    print(json.dumps(manifest, indent=1))
    for shard in {shard["split"]: shard for shard in reversed(manifest["shards"])}.values():
        ids = np.fromfile(folder / shard["file"], "<u2", 200, offset=HEADER)
        print(f"\n{shard['file']} begins with", repr(decode(ids[ids != manifest["eot"]].tolist())))

# ---- Main ------------------------------------------------------------------------------------------------------------

COMMANDS = {"pysrc": prepare_pysrc, "text": prepare_text, "import": prepare_import, "verify": verify, "show": show,
            **dict.fromkeys(SOURCES, prepare_hub)}

def number_of_tokens(text):
    number = round(float(text.rstrip("kMBT")) * {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:], 1))
    if number < 1:
        raise ValueError
    return number

def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", nargs="?", default="pysrc", choices=COMMANDS)
    add("what", nargs="?", help="import: a .bin or a folder of them; verify, show: a dataset")
    add("--input", nargs="+", metavar="PATH", help="text: files, folders")
    add("--val_fraction", type=float, default=0.02, help="text: share of the documents that validates (0.02)")
    add("--field", metavar="NAME", default="text", help="text: of .jsonl and .parquet, where the text is (text)")
    add("--name", help="of the dataset to make; text and import need it")
    add("--tokenizer", choices=TOKENIZERS, help="default: a corpus' own, gpt2 for import, else bytes")
    add("--tokenizer_file", metavar="PATH", help="llama2's tokenizer.model (else it comes from the Hub)")
    add("--tokens", type=number_of_tokens, help="stop behind so many: 10B, 500M")
    add("--workers", type=int, default=os.cpu_count(), help="threads (one a core)")
    args = parser.parse_args(argv)
    needed = {"text": ("input", "name"), "import": ("what", "name"), "verify": ("what",), "show": ("what",)}
    if missing := [name for name in needed.get(args.command, ()) if not getattr(args, name)]:
        parser.error(f"{args.command} needs {' and '.join(missing)}; see --help")
    args.name = args.name or args.command
    if not re.fullmatch(r"(?!.*_(train|val))\w[\w.-]*", args.name):
        sys.exit(f"--name {args.name}: it names a folder in data/; give letters, digits, _ . -, no _train, no _val")
    own = "bytes" if args.command in ("pysrc", "text") else SOURCES.get(args.command, {}).get("tokenizer", "gpt2")
    args.tokenizer = args.tokenizer or own
    try:
        if args.tokenizer == "llama2" and not args.tokenizer_file:
            import huggingface_hub
            huggingface_hub.logging.set_verbosity_error()  # what fails is told once
            with in_one_line("Llama 2's tokenizer", "set --tokenizer_file to the path of its tokenizer.model"):
                args.tokenizer_file = huggingface_hub.hf_hub_download(LLAMA2, "tokenizer.model")
        COMMANDS[args.command](args)
    except ImportError as e:
        sys.exit(f"{e}; pip install {e.name}")
    except (OSError, KeyboardInterrupt) as e:  # a full disk, no such file, Ctrl-C
        sys.exit(f"{type(e).__name__}: {e}; what is finished is kept, and the same command goes on from there")

if __name__ == "__main__":
    main(sys.argv[1:])
