"""
Turns a checkpoint into a Hugging Face model that loads with AutoModelForCausalLM and AutoTokenizer and needs no code of
this repository: safetensors, configuration, tokenizer.

    pip install "lm-eval[hf]==0.4.11" sentencepiece             # transformers, and the harness that scores exports
    python tools/export_hf.py checkpoints/RUN                   # the newest checkpoint -> hf/RUN; or give one step_N.pt
    lm_eval --model hf --model_args pretrained=hf/RUN,dtype=bfloat16 --num_fewshot 0 --batch_size auto \\
        --tasks arc_easy,hellaswag,lambada_openai,piqa,race,record,sglue_rte,truthfulqa_mc1,truthfulqa_mc2,winogrande \\
        --output_path logs/zeroshot                             # the paper's zero-shot tasks

Models of train_llama.py become LlamaForCausalLM; those of train_gpt.py GPTNeoXForCausalLM with the residual in
sequence, RoPE over whole heads and biases of 0. Rows of embedding and head that pad the vocabulary are cut off. The
end-of-text token is bos_token too: in training it stands before each document. Logits are compared with the train
script's, of 256 positions, as transformers rounds far angles, before anything is written. Last line: "wrote hf/RUN".
"""
import argparse, sys
from pathlib import Path

import torch
from sample import load_checkpoint, load_tokenizer

try:
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
except ModuleNotFoundError as error:
    sys.exit(f"package {error.name} is missing; run: pip install 'lm-eval[hf]==0.4.11' sentencepiece")

# ---- Models ----
LLAMA = {  # part of a layer there: part of a block here
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v", "self_attn.o_proj": "attn.proj",
    "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
GPT_NEOX = {
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "attention.query_key_value": "attn.qkv",
    "attention.dense": "attn.proj", "mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down"}

def llama(script, weights: dict[str, torch.Tensor], shared: dict):
    """The model there, the names of its parts, and its last norm. Brings qkv in `weights` into its form."""
    for name in [name for name in weights if "qkv" in name]:
        weights |= {name.replace("qkv", part): weight for part, weight in zip("qkv", weights[name].chunk(3))}
    config = transformers.LlamaConfig(**shared, intermediate_size=script.n_ffn, rms_norm_eps=script.norm_eps)
    model = transformers.LlamaForCausalLM(config)
    return model, LLAMA, model.model.norm

def gpt_neox(script, weights: dict[str, torch.Tensor], shared: dict):
    """As llama(). RoPE turns whole heads."""
    for name in [name for name in weights if "qkv" in name]:  # there the order is q, k, v of each head
        weights[name] = weights[name].view(3, script.n_head, -1, script.n_embd).transpose(0, 1).flatten(0, 2)
    config = transformers.GPTNeoXConfig(**shared, intermediate_size=4 * script.n_embd, hidden_act="gelu_pytorch_tanh",
                                        use_parallel_residual=False, attention_bias=False, rotary_pct=1.0)
    config.rotary_pct = 1.0  # version 5 writes it elsewhere, and version 4 would take 0.25 without a word
    model = transformers.GPTNeoXForCausalLM(config)
    return model, GPT_NEOX, model.gpt_neox.final_layer_norm

@torch.no_grad()
def convert(saved: dict, script, ours: torch.nn.Module):
    """The model of transformers that computes what the checkpoint's does, and the largest difference of a logit on
    random tokens, both in float32. Exits if it is above 1e-4 of the largest logit, far more than rounding."""
    weights, rows, eot = dict(saved["model"]), saved["vocab"], saved["eot"]
    shared = dict(vocab_size=rows, hidden_size=script.n_embd, num_hidden_layers=script.n_layer,
                  num_attention_heads=script.n_head, max_position_embeddings=script.block_size, bos_token_id=eot,
                  eos_token_id=eot, pad_token_id=eot, tie_word_embeddings=ours.head.weight is ours.embed.weight)
    theirs, names, norm = (llama if hasattr(script, "n_ffn") else gpt_neox)(script, weights, shared)
    for parameter in theirs.eval().parameters():  # biases, which ours has not
        parameter.zero_()
    for i, layer in enumerate(theirs.base_model.layers):
        for there, here in names.items():
            layer.get_submodule(there).weight.copy_(weights[f"blocks.{i}.{here}.weight"])
    norm.weight.copy_(weights["norm.weight"])
    theirs.get_input_embeddings().weight.copy_(weights["embed.weight"][:rows])
    theirs.get_output_embeddings().weight.copy_(weights["head.weight"][:rows])

    ids_BT = torch.randint(rows, (1, min(256, script.block_size)), generator=torch.Generator().manual_seed(0))
    logits_BTV = ours(ids_BT)[..., :rows]
    worst = (logits_BTV - theirs(ids_BT).logits).abs().max().item()
    if not worst <= 1e-4 * logits_BTV.abs().max().item():
        sys.exit(f"logits differ by {worst:.1e}; if {saved['script']} has another model now, change export_hf.py too")
    return theirs, worst

# ---- Tokenizers ----
def merges(tokens: list) -> list[tuple]:
    """All ways to make a token of two, first tokens first: the byte-pair encoding of tiktoken and sentencepiece."""
    known = set(tokens)
    return [(t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if t[:i] in known and t[i:] in known]

def byte_level(tokens: list[bytes], split: bool) -> Tokenizer:
    """Of tokens in the order of their ids, written as GPT-2 does, a printable letter a byte. split: by its pattern."""
    spare = map(chr, range(256, 512))
    letters = [chr(b) if 33 <= b < 127 or 161 <= b < 256 and b != 173 else next(spare) for b in range(256)]
    names = ["".join(letters[b] for b in token) for token in tokens]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges(names)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

def sentencepiece_bpe(sp) -> Tokenizer:
    """Of a SentencePieceProcessor of Llama 2's kind: with byte fallback; a text begins with a space."""
    ids = range(sp.get_piece_size())
    plain = [i for i in ids if not (sp.is_unknown(i) or sp.is_control(i) or sp.is_byte(i))]
    pieces = [sp.id_to_piece(i) for i in sorted(plain, key=sp.get_score, reverse=True)]
    tokenizer = Tokenizer(models.BPE(vocab={sp.id_to_piece(i): i for i in ids}, merges=merges(pieces),
                                     unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return tokenizer

def build_tokenizer(saved: dict, file: Path | None = None) -> transformers.PreTrainedTokenizerFast:
    """That of sample.py, in the form of transformers."""
    library, eot = load_tokenizer(saved, file)[2], "<|endoftext|>"
    if saved["vocab"] == 257:
        tokenizer = byte_level([bytes([b]) for b in range(256)], split=False)
    elif saved["vocab"] == 50257:
        tokenizer = byte_level([library.decode_single_token_bytes(i) for i in range(library.eot_token)], split=True)
    else:
        tokenizer, eot = sentencepiece_bpe(library), "</s>"
    tokenizer.add_special_tokens([eot])  # behind the others, or where it is
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=eot, eos_token=eot, pad_token=eot,
        model_max_length=saved["globals"]["block_size"], clean_up_tokenization_spaces=False)

# ---- Main ----
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoints/RUN, or a step_N.pt of it")
    parser.add_argument("--out", type=Path, help="folder to make; default: hf/RUN")
    parser.add_argument("--tokenizer", type=Path, help="Llama 2's; default: data/DATASET/tokenizer.model")
    args = parser.parse_args(argv)
    run = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    out = args.out or Path("hf", run.resolve().name)
    if out.exists():
        sys.exit(f"{out} exists; remove it, or give another --out")
    saved, script, ours = load_checkpoint(args.checkpoint)
    tokenizer = build_tokenizer(saved, args.tokenizer)
    model, worst = convert(saved, script, ours)
    print(f"{args.checkpoint}: update {saved['step']} of {saved['script']} -> {type(model).__name__}, "
          f"{model.num_parameters():,} parameters; logits differ by {worst:.1e} at most")
    unfinished = out.with_name(f"{out.name}.partial")
    model.to(getattr(torch, saved["globals"]["param_dtype"])).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out)
    print(f"wrote {out}")

if __name__ == "__main__":
    main(sys.argv[1:])
