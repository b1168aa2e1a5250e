"""
Turns a checkpoint into a Hugging Face model: safetensors, config, generation config and tokenizer, which load with
AutoModelForCausalLM and AutoTokenizer and need no code of this repository.

    python tools/export_hf.py checkpoints/RUN                           # the newest good checkpoint -> hf/RUN
    python tools/export_hf.py checkpoints/RUN --best --out my-model     # the one with the lowest validation loss
    python tools/export_hf.py checkpoints/RUN/step_00000600.pt --tokenizer_file tokenizer.model     # of a llama2 vocabulary

Models of train_llama.py become LlamaForCausalLM, those of train_gpt.py GPTNeoXForCausalLM with the residual in sequence, RoPE
over whole heads, GELU in its tanh form and biases of zero: the same functions. Rows that pad the vocabulary to a multiple
of 64 stand for no token and are cut off: logits of tokens stay as they are, ids that no text has get no probability.
The end-of-text token is also bos_token: in training it is what stands before a document.

Before the folder gets its name, what was written is loaded again and its logits are compared with the train script's in
float32, on the run's validation data where they are. Last line: `wrote hf/RUN`. Seconds for the demo.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))                                       # the train scripts import optim
SCRIPTS = ("train_gpt.py", "train_llama.py")                        # nothing else is imported, whatever a checkpoint says
VOCABULARY = {"bytes": 257, "gpt2": 50257, "llama2": 32000}         # tokens; a model may have more rows
TOLERANCE = 1e-4                                                    # of a logit, in float32


class UserError(Exception):
    """A mistake of the caller: one line on stderr, exit status 1."""


# -----------------------------------------------------------------------------
# Checkpoints

def load_script(name, settings=None):
    """A train script as a fresh module; settings: values of its globals, set as its own --name=value."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    try:
        script.configure([f"--{k}={v}" for k, v in (settings or {}).items() if k in script.GLOBALS])
    except script.UserError as e:
        raise UserError(f"the checkpoint does not fit this {name}: {e}") from None
    return script


def load_checkpoint(path, best=False):
    """A run's folder (newest good checkpoint, or the best by validation loss) or a .pt file -> (its file, content, script)."""
    format = load_script(SCRIPTS[0])        # of checkpoints, the same in both
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("step_*.pt"), reverse=True)
        if best:
            losses = {f: (format.read_note(f) or {}).get("val_loss") for f in files}
            files.sort(key=lambda f: math.inf if losses[f] is None or math.isnan(losses[f]) else losses[f])
    elif not path.exists():
        raise UserError(f"{path} does not exist; expected a run's folder or a file of it, such as checkpoints/RUN/step_00000600.pt")
    for file in files:
        if not (problem := format.damage(file)):
            break
        if not path.is_dir():
            raise UserError(f"{file} {problem}; give the run's folder, and its newest good checkpoint is taken")
        print(f"passing over {file}: it {problem}", file=sys.stderr)
    else:
        raise UserError(f"no good checkpoint in {path}; expected step_N.pt, each with its step_N.json; a train script saves both")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)      # nothing in it is executed
        name, settings, tokenizer, rows = saved["script"], dict(saved["globals"]), saved["tokenizer"], int(saved["vocab"])
    except Exception as e:                  # it may be any file
        raise UserError(f"{file} is not a checkpoint of a train script ({type(e).__name__}); expected one that "
                        f"{' or '.join(SCRIPTS)} saved") from None
    if name not in SCRIPTS:
        raise UserError(f"{file} is a checkpoint of {name}; expected one of {' or '.join(SCRIPTS)}")
    if tokenizer not in VOCABULARY:
        raise UserError(f"{file} has a vocabulary of {rows} rows of an unknown tokenizer; expected one of {', '.join(VOCABULARY)}: "
                        "prepare the data with one of these")
    script = load_script(name, settings)
    if saved.get("source") != script.source_hash():
        print(f"note: {file} was made by another version of {name} or optim.py; if its model was another one, this is not what was "
              "trained: then use the scripts that the run's log begins with", file=sys.stderr)
    return file, saved, script


# -----------------------------------------------------------------------------
# Models

def llama(s, model, shared):
    """The script and its model -> LlamaForCausalLM, and what is in which of its weights, but for embedding and head."""
    from transformers import LlamaConfig, LlamaForCausalLM
    theirs = LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=s.n_ffn, rms_norm_eps=s.norm_eps, hidden_act="silu",
                                          rope_theta=s.rope_base, attention_bias=False, mlp_bias=False))
    weights = {"model.norm": model.norm}
    for i, block in enumerate(model.blocks):
        at, a = f"model.layers.{i}", block.attn
        q, k, v = a.qkv.weight.chunk(3) if s.fused_qkv else (a.q, a.k, a.v)
        weights |= {f"{at}.input_layernorm": block.norm1, f"{at}.post_attention_layernorm": block.norm2,
                    f"{at}.self_attn.q_proj": q, f"{at}.self_attn.k_proj": k, f"{at}.self_attn.v_proj": v,
                    f"{at}.self_attn.o_proj": a.proj, f"{at}.mlp.gate_proj": block.mlp.gate,
                    f"{at}.mlp.up_proj": block.mlp.up, f"{at}.mlp.down_proj": block.mlp.down}
    return theirs, weights


def gpt_neox(s, model, shared):
    """The script and its model -> GPTNeoXForCausalLM, and what is in which of its weights, but for embedding and head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    theirs = GPTNeoXForCausalLM(GPTNeoXConfig(
        **shared, intermediate_size=4 * s.n_embd, hidden_act="gelu_pytorch_tanh", rotary_pct=1.0, rotary_emb_base=s.rope_base,
        layer_norm_eps=model.norm.eps, use_parallel_residual=False, attention_bias=False))
    weights = {"gpt_neox.final_layer_norm": model.norm}
    for i, block in enumerate(model.blocks):
        at = f"gpt_neox.layers.{i}"
        qkv_3HKD = block.attn.qkv.weight.view(3, s.n_head, -1, s.n_embd)
        weights |= {f"{at}.input_layernorm": block.ln1, f"{at}.post_attention_layernorm": block.ln2,
                    f"{at}.attention.query_key_value": qkv_3HKD.transpose(0, 1).reshape(-1, s.n_embd),      # head by head
                    f"{at}.attention.dense": block.attn.proj,
                    f"{at}.mlp.dense_h_to_4h": block.mlp.up, f"{at}.mlp.dense_4h_to_h": block.mlp.down}
    return theirs, weights


@torch.no_grad()
def convert(saved, script):
    """Content of a checkpoint and its script -> (the script's model, the same of transformers), both float32, for inference."""
    ours, rows = script.Model(saved["vocab"]).eval(), VOCABULARY[saved["tokenizer"]]
    try:
        ours.load_state_dict(saved["model"])
    except RuntimeError as e:
        raise UserError(f"the checkpoint is of another model than this {saved['script']} has ({' '.join(str(e).split())[:200]}); "
                        "use the script that its log begins with") from None
    shared = dict(vocab_size=rows, hidden_size=script.n_embd, num_hidden_layers=script.n_layer, num_attention_heads=script.n_head,
                  max_position_embeddings=script.block_size, tie_word_embeddings=ours.head.weight is ours.embed.weight,
                  bos_token_id=saved["eot"], eos_token_id=saved["eot"], pad_token_id=saved["eot"])
    try:
        theirs, weights = (llama if saved["script"] == "train_llama.py" else gpt_neox)(script, ours, shared)
        state = {name: torch.zeros_like(bias) for name, bias in theirs.state_dict().items() if name.endswith(".bias")}
        state |= {f"{name}.weight": getattr(module, "weight", module) for name, module in weights.items()}
        names = {module: name for name, module in theirs.named_modules()}  # of embedding and head they differ by version
        state |= {f"{names[theirs.get_input_embeddings()]}.weight": ours.embed.weight[:rows],
                  f"{names[theirs.get_output_embeddings()]}.weight": ours.head.weight[:rows]}
        theirs.load_state_dict(state)
    except (AttributeError, RuntimeError) as e:
        raise UserError(f"the model of {saved['script']} has other parts than an export knows ({' '.join(str(e).split())[:200]}); was it "
                        "changed? then change gpt_neox() or llama() in tools/export_hf.py too") from None
    ids = torch.arange(min(64, script.block_size))[None] * 7 % rows
    worst = (ours.logits(ids)[..., :rows] - theirs.eval()(ids).logits).abs().max().item()
    if not worst <= 10 * TOLERANCE:                 # of any text; export() looks closer
        raise UserError(f"the logits of {saved['script']} and of {type(theirs).__name__} differ by {worst:.1e}: it computes another "
                        "function; was the model changed? then change gpt_neox() or llama() in tools/export_hf.py too")
    return ours, theirs


# -----------------------------------------------------------------------------
# Tokenizers

def merges(tokens):
    """All ways to make a token of two, first tokens first: byte-pair encoding as tiktoken and sentencepiece do it."""
    known = set(tokens)
    return [(t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if t[:i] in known and t[i:] in known]


def byte_level(tokens, split):
    """Tokens as bytes, in the order of their ids -> GPT-2's kind of tokenizer, which writes bytes as printable letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    spare = map(chr, range(256, 512))
    letters = [chr(b) if 33 <= b < 127 or 161 <= b < 256 and b != 173 else next(spare) for b in range(256)]
    names = ["".join(letters[b] for b in token) for token in tokens]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges(names)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(file):
    """Llama 2's tokenizer.model -> the same with byte fallback; a text begins with a space, as in sentencepiece."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, decoders, models, normalizers
    sp = SentencePieceProcessor(model_file=str(file))
    ids = range(sp.get_piece_size())
    plain = [i for i in ids if not (sp.is_unknown(i) or sp.is_control(i) or sp.is_byte(i))]
    pieces = [sp.id_to_piece(i) for i in sorted(plain, key=sp.get_score, reverse=True)]
    tokenizer = Tokenizer(models.BPE(vocab={sp.id_to_piece(i): i for i in ids}, merges=merges(pieces), unk_token="<unk>",
                                     fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return tokenizer


def build_tokenizer(name, block_size, file=None):
    """The tokenizer of a vocabulary, stock and fast. Text is encoded as in training, but for the names of special tokens."""
    import prepare
    from transformers import PreTrainedTokenizerFast
    try:
        name, file = prepare.named_tokenizer(argparse.Namespace(tokenizer=name, tokenizer_file=file), name)
        prepare.load_tokenizer(name, file)          # is it there, and the right one?
    except prepare.UserError as e:
        raise UserError(str(e)) from None
    if name == "llama2":
        tokenizer, eot, unknown = sentencepiece_bpe(file), "</s>", {"unk_token": "<unk>"}
    elif name == "gpt2":
        import tiktoken
        gpt2 = tiktoken.get_encoding(name)
        tokens = [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)]
        tokenizer, eot, unknown = byte_level(tokens, split=True), "<|endoftext|>", {}
    else:
        tokenizer, eot, unknown = byte_level([bytes([b]) for b in range(256)], split=False), "<|endoftext|>", {}
    tokenizer.add_special_tokens([eot])             # behind the others, or where it is
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=eot, eos_token=eot, pad_token=eot, **unknown,
                                   model_max_length=block_size, clean_up_tokenization_spaces=False)


# -----------------------------------------------------------------------------
# Export

def real_text(saved, script, tokenizer):
    """-> ids (B, T) and where they are from: the run's validation data, or this file."""
    try:
        name = script.val_dataset or script.dataset
        shards = script.Shards(name, "val")
        if shards.vocab == VOCABULARY[saved["tokenizer"]]:
            return torch.from_numpy(shards.read(range(min(2, len(shards)))).astype(int))[:, :-1], f"{name}'s validation data"
    except script.UserError:
        pass
    text = Path(__file__).read_text(encoding="utf-8")
    ids = tokenizer(text, truncation=True, max_length=script.block_size - 1).input_ids
    return torch.tensor([[saved["eot"], *ids]]), "export_hf.py itself"


def write(folder, model, tokenizer, saved, script):
    """What from_pretrained reads. Versions of transformers before 5 look for RoPE's settings and the class by older names."""
    if script.param_dtype == "bfloat16":
        model.to(torch.bfloat16)                    # as it was trained, without loss
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):        # which others may not read, unlike the rest
        weights.chmod((folder / "config.json").stat().st_mode)
    for name, more in (("config.json", dict(rope_theta=script.rope_base) if saved["script"] == "train_llama.py" else
                        dict(rotary_pct=1.0, rotary_emb_base=script.rope_base)),
                       ("tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast"))):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | more, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def export(path, out=None, best=False, tokenizer_file=None):
    """-> the folder and the largest difference of a logit."""
    out = Path(out) if out else Path("hf", (path if path.is_dir() else path.parent).resolve().name)
    if out.exists():
        raise UserError(f"{out} exists; expected a new folder: remove it, or choose another with --out")
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    file, saved, script = load_checkpoint(path, best)
    tokenizer = build_tokenizer(saved["tokenizer"], script.block_size, tokenizer_file)
    ours, theirs = convert(saved, script)
    rows = theirs.config.vocab_size
    print(f"{file}: step {saved['step']} of {saved['script']} -> {type(theirs).__name__}, {theirs.num_parameters() / 1e6:.2f} M "
          f"parameters, vocabulary {rows} ({saved['vocab'] - rows} rows of padding cut off)")
    with contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent))) / "model"
            write(folder, theirs, tokenizer, saved, script)
        except (OSError, SafetensorError) as e:
            raise UserError(f"cannot write {out}: {getattr(e, 'strerror', None) or e}; expected a writable folder and "
                            f"{theirs.num_parameters() / 2**18 + 4:.0f} MiB; choose another place with --out") from None
        theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder).float().eval(), AutoTokenizer.from_pretrained(folder)
        ids_BT, source = real_text(saved, script, tokenizer)
        if (highest := ids_BT.max().item()) >= rows:        # shards of others do not name their vocabulary
            raise UserError(f"{source} has the id {highest}; expected ids below {rows}, as {saved['tokenizer']} has: a model of another "
                            f"vocabulary cannot be exported; prepare the data with one of {', '.join(VOCABULARY)}")
        worst = max((ours.logits(row)[..., :rows] - theirs(row).logits).abs().max().item() for row in ids_BT.split(1))
        print(f"largest difference of a logit on {ids_BT.numel()} tokens of {source}: {worst:.1e} (at most {TOLERANCE:g})")
        if not worst <= TOLERANCE:
            raise UserError(f"the logits of {saved['script']} and of the export differ by {worst:.1e}, expected at most {TOLERANCE:g}; "
                            "nothing was written; was the model changed?")
        torch.manual_seed(0)
        length = max(2, min(200, script.block_size))
        ids = theirs.generate(torch.tensor([[saved["eot"]]]), do_sample=True, temperature=0.8, max_length=length)
        print("sample:", tokenizer.decode(ids[0], skip_special_tokens=True))
        os.rename(folder, out)
    print(f"wrote {out}")
    return out, worst


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see: python tools/{self.prog} --help")


@contextlib.contextmanager
def complaints(name):
    """One line on stderr and exit status 1 for whatever is not a fault of the code; 130 for Ctrl-C."""
    try:
        with contextlib.suppress(AttributeError):       # a sample may have letters that the terminal has not
            sys.stdout.reconfigure(errors="replace")
        with contextlib.suppress(ModuleNotFoundError):
            from transformers.utils import logging
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        yield
        return
    except UserError as e:
        message, status = str(e), 1
    except ModuleNotFoundError as e:
        message, status = f"package {e.name} is missing; expected it to be installed: pip install {e.name}", 1
    except OSError as e:
        message, status = f"{e.filename or 'output'}: {e.strerror}" if e.strerror else " ".join(str(e).split())[:300], 1
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    print(f"{name}: error: {message}", file=sys.stderr)
    sys.exit(status)


def main(argv=None):
    parser = Parser(prog="export_hf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoints/RUN, or a file step_N.pt of it")
    parser.add_argument("--out", type=Path, help="folder to make (default: hf/RUN)")
    parser.add_argument("--best", action="store_true", help="the lowest validation loss instead of the newest")
    parser.add_argument("--tokenizer_file", type=Path, help="Llama 2's tokenizer.model, for a llama2 vocabulary")
    args = parser.parse_args(argv)
    export(args.checkpoint, args.out, args.best, args.tokenizer_file)


if __name__ == "__main__":
    with complaints("export_hf.py"):
        main()
