"""
Samples text from a trained model and streams it to the terminal.

    python tools/sample.py checkpoints/RUN "def main(" "import "                # a run's newest good checkpoint
    python tools/sample.py checkpoints/RUN --max_new_tokens=500 --temperature=0.9 --top_k=50 --top_p=0.95 --seed=7
    python tools/sample.py hf/RUN "Once upon a time" --temperature=0                    # an exported folder; greedy

Without a prompt a new document is started. A text ends at an end-of-text token or after max_new_tokens. Needs transformers.
A token costs one pass over one token (KV cache); when the context is full, the newer half of the text is read again.
"""

import argparse
from pathlib import Path

import torch

from export_hf import Parser, UserError, build_tokenizer, complaints, convert, load_checkpoint


def load(path, best=False, tokenizer_file=None):
    """A run's folder, a checkpoint file or an exported folder -> (model, tokenizer) of transformers, float32."""
    if (path / "config.json").exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer
        try:
            return AutoModelForCausalLM.from_pretrained(path).float().eval(), AutoTokenizer.from_pretrained(path)
        except (ValueError, OSError) as e:
            why = (str(e) or type(e).__name__).splitlines()[0][:200]
            raise UserError(f"{path} is not a model that transformers loads: {why}; expected an export: python tools/export_hf.py "
                            "checkpoints/RUN") from None
    _, saved, script = load_checkpoint(path, best)
    return convert(saved, script)[1], build_tokenizer(saved["tokenizer"], script.block_size, tokenizer_file)


def draw(logits_V, temperature, top_k, top_p):
    """An id: the likeliest for temperature 0, else from the top_k likeliest (0: all) among the fewest that hold top_p."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.double().cpu()
    p, ids = torch.softmax((logits_V - logits_V.max()) / temperature, -1).sort(descending=True)
    p[top_k or len(p):] = 0
    p[p.cumsum(-1) - p >= top_p * p.sum()] = 0      # what comes before an id holds top_p already
    return int(ids[torch.multinomial(p, 1)])


@torch.no_grad()
def generate(model, ids, max_new_tokens, pick):
    """Yields ids that follow `ids`. pick: logits (V,) -> id."""
    context, cache, ids = model.config.max_position_embeddings, None, list(ids)
    unread = ids[-context:]
    for _ in range(max_new_tokens):
        if cache is not None and cache.get_seq_length() + len(unread) > context:
            unread, cache = ids[-max(1, context // 2):], None
        out = model(torch.tensor([unread], device=model.device), past_key_values=cache, use_cache=True)
        cache, unread = out.past_key_values, [pick(out.logits[0, -1])]
        ids += unread
        yield ids[-1]


def write(model, tokenizer, prompt, args):
    """The prompt and what follows it, to stdout. Each prompt stands at the beginning of a document, as text does in training."""
    eot = tokenizer.eos_token_id
    ids = [eot, *tokenizer(prompt).input_ids]

    def text():     # decoded as a whole: bytes that are no text change what a decoder makes of those before
        return tokenizer.decode(ids, skip_special_tokens=True)

    print(prompt, end="", flush=True)
    shown = len(text())
    for id in generate(model, ids, args.max_new_tokens, lambda logits: draw(logits, args.temperature, args.top_k, args.top_p)):
        if id == eot:
            break
        ids.append(id)
        if not (whole := text()).endswith("\ufffd"):    # else more bytes of a character may come
            print(whole[shown:], end="", flush=True)
            shown = max(shown, len(whole))
    print(text()[shown:], flush=True)


def main(argv=None):
    parser = Parser(prog="sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoints/RUN, a file step_N.pt of it, or an exported folder")
    parser.add_argument("prompts", nargs="*", default=[], help="what the texts begin with")
    parser.add_argument("--max_new_tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, default=0, help="0: all")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--best", action="store_true", help="the lowest validation loss instead of the newest")
    parser.add_argument("--tokenizer_file", type=Path, help="Llama 2's tokenizer.model, for a checkpoint of that vocabulary")
    args = parser.parse_intermixed_args(argv)
    for name, good, expected in (("max_new_tokens", args.max_new_tokens > 0, "above 0"), ("top_k", args.top_k >= 0, "of at least 0"),
                                 ("temperature", args.temperature >= 0, "of at least 0"), ("top_p", 0 < args.top_p <= 1, "in (0, 1]")):
        if not good:
            raise UserError(f"found --{name}={getattr(args, name)}; expected a number {expected}, such as "
                            f"--{name}={parser.get_default(name)}")
    model, tokenizer = load(args.model, args.best, args.tokenizer_file)
    try:
        model.to(args.device)
    except (RuntimeError, AssertionError) as e:     # the latter from a torch without CUDA
        raise UserError(f"--device={args.device}: {str(e).splitlines()[0]}; expected cpu, cuda or mps, such as --device=cpu") from None
    torch.manual_seed(args.seed)
    for i, prompt in enumerate(args.prompts or [""]):
        print("-" * 40 + "\n" if i else "", end="")
        write(model, tokenizer, prompt, args)


if __name__ == "__main__":
    with complaints("sample.py"):
        main()
