"""
Prints texts that a trained model writes.

    python tools/sample.py checkpoints/RUN --prompt="def main(" --samples=3 --temperature=0.9 --top_k=50 --seed=7

The model is that of the train script which saved the checkpoint, with all that you have changed in it. A text begins
with a document, or with the prompt at the beginning of one, and ends with the document or after --max_new_tokens.
"""
import argparse, importlib, os, sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the train scripts, and for optim, which they import

def load_checkpoint(path: Path, device: str = "cpu"):
    """The content of a .pt file, or of a folder's newest one, its train script as a module, and its Model in fp32."""
    file = max(path.glob(f"step_{8 * '[0-9]'}.pt"), default=path)
    try:
        saved = importlib.import_module("train_gpt").read_checkpoint(file)  # of either script
        script = importlib.import_module(Path(saved["script"]).stem)
        if saved["code"][0] != (ROOT / saved["script"]).read_text(encoding="utf-8"):
            print(f"{file} was saved by another {saved['script']}; its model may differ", file=sys.stderr)
        vars(script).update(saved["globals"], device=device, dtype="float32")  # its functions read them
        model = script.Model(len(saved["model"]["embed.weight"])).to(device)
        model.load_state_dict(saved["model"])
    except Exception as error:  # it may be any file, or of another model
        sys.exit(f"cannot read {file} ({error!r:.120}); give checkpoints/RUN or a step_N.pt of it")
    return saved, script, model.eval()

def load_tokenizer(saved: dict, file: Path | None = None):
    """encode(text) -> ids, decode(ids) -> text and the library's own object. `file`: Llama 2's vocabulary."""
    if saved["vocab"] == 257:  # bytes
        return lambda text: list(os.fsencode(text)), lambda ids: bytes(ids).decode(errors="replace"), None
    try:
        if saved["vocab"] == 50257:
            import tiktoken
            gpt2 = tiktoken.get_encoding("gpt2")
            return gpt2.encode_ordinary, gpt2.decode, gpt2
        from sentencepiece import SentencePieceProcessor
        llama2 = SentencePieceProcessor(str(file or Path("data", saved["globals"]["dataset"], "tokenizer.model")))
        assert llama2.get_piece_size() == saved["vocab"], f"found one of {llama2.get_piece_size()}"
        return llama2.encode, llama2.decode, llama2
    except Exception as error:  # of the import, the network or the file
        sys.exit(f"no vocabulary of {saved['vocab']} ids ({error!r:.150}); pip install tiktoken sentencepiece, and for "
                 "GPT-2 set TIKTOKEN_CACHE_DIR, for Llama 2 give --tokenizer=PATH/tokenizer.model")

@torch.no_grad()
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoints/RUN, or a step_N.pt of it")
    parser.add_argument("--prompt", default="", help="what each text begins with")
    parser.add_argument("--samples", type=int, default=1, help="texts; default: 1")
    parser.add_argument("--max_new_tokens", type=int, default=300, help="default: 300")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token; default: 0.8")
    parser.add_argument("--top_k", type=int, default=0, help="draw from that many likeliest tokens; default: from all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="Llama 2's; default: data/DATASET/tokenizer.model")
    args = parser.parse_args(argv)
    for name, least in ("samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 0):
        if not getattr(args, name) >= least:
            parser.error(f"argument --{name}: found {getattr(args, name)}, expected a number of at least {least}")

    saved, script, model = load_checkpoint(args.checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    encode, decode, _ = load_tokenizer(saved, args.tokenizer)
    vocab, eot = saved["vocab"], saved["eot"]
    torch.manual_seed(args.seed)
    ids_BT = torch.tensor([[eot, *encode(args.prompt)]] * args.samples, device=script.device)
    for _ in range(args.max_new_tokens):
        logits_BV = model(ids_BT[:, -script.block_size:])[:, -1, :vocab]  # a full context moves along
        top_logits_BK, top_ids_BK = logits_BV.topk(min(args.top_k or vocab, vocab) if args.temperature else 1)
        drawn_B1 = torch.softmax(top_logits_BK / (args.temperature or 1), -1).multinomial(1)
        ids_BT = torch.cat([ids_BT, top_ids_BK.gather(1, drawn_B1)], 1)
        if (ids_BT[:, 1:] == eot).any(1).all():
            break
    texts = [decode(ids[:ids.index(eot)] if eot in ids else ids) for ids in ids_BT[:, 1:].tolist()]
    print(*texts, sep="\n" + "-" * 40 + "\n")

if __name__ == "__main__":
    main(sys.argv[1:])
