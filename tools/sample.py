"""
Prints texts that a trained model writes.

    python tools/sample.py checkpoints/RUN --prompt="def main("                         # a run's newest checkpoint
    python tools/sample.py hf/RUN --samples=3 --temperature=0.9 --top_k=50 --seed=7     # an exported folder

A text begins with a document, or with the prompt at the beginning of one, and ends with the document, after
--max_new_tokens or where the model's context is full. Needs transformers, and sentencepiece for Llama 2's vocabulary.
"""
import argparse
import sys
from pathlib import Path

import torch
from export_hf import build_tokenizer, convert, load_checkpoint, transformers

def load(path: Path, tokenizer: Path | None):
    """Model and tokenizer of transformers, from an exported folder, a run's folder or a checkpoint."""
    if (path / "config.json").exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model, transformers.AutoTokenizer.from_pretrained(path)
    saved, script = load_checkpoint(path)
    return convert(saved, script)[0], build_tokenizer(saved, tokenizer)

def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoints/RUN, a step_N.pt of it, or an exported folder")
    parser.add_argument("--prompt", default="", help="what each text begins with")
    parser.add_argument("--samples", type=int, default=1, help="texts; default: 1")
    parser.add_argument("--max_new_tokens", type=int, default=300, help="default: 300")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token; default: 0.8")
    parser.add_argument("--top_k", type=int, default=0, help="draw from that many likeliest tokens; default: from all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="Llama 2's tokenizer.model, for a checkpoint of that vocabulary")
    args = parser.parse_args(argv)
    for name, least in ("samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 0):
        if not getattr(args, name) >= least:
            parser.error(f"argument --{name}: found {getattr(args, name)}, expected a number of at least {least}")
    model, tokenizer = load(args.model, args.tokenizer)
    ids = [tokenizer.eos_token_id, *tokenizer(args.prompt).input_ids]
    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        sys.exit(f"--prompt has {len(ids) - 1} tokens, the model's context is {len(ids) + room}; give a shorter one")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    draw = dict(do_sample=True, temperature=args.temperature, top_k=args.top_k) if args.temperature else {}
    prompts_BT = torch.tensor([ids] * args.samples, device=device)
    texts_BT = model.to(device).generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), **draw,
                                         max_new_tokens=min(args.max_new_tokens, room))
    print(("\n" + "-" * 40 + "\n").join(tokenizer.batch_decode(texts_BT, skip_special_tokens=True)))

if __name__ == "__main__":
    main(sys.argv[1:])
