"""export_hf.py and sample.py on tiny models. For all of it set TIKTOKEN_CACHE_DIR and LLAMA2_TOKENIZER."""
import os, random
from pathlib import Path

import pytest
import torch

from common import ROOT, TINY, fresh

pytest.importorskip("transformers", reason="pip install transformers")
import export_hf, sample, train_gpt
from transformers import AutoModelForCausalLM, AutoTokenizer

def save(script, **settings):
    """Writes a checkpoint with large weights, so that each matters in its place. Returns model (fp32) and content."""
    t = fresh(script, **TINY | dict(n_layer=2, block_size=64) | settings)
    model = t.Model(320)
    torch.manual_seed(0)
    for p in model.parameters():
        p.data = (torch.randn_like(p) * 0.3 + (p.ndim == 1)).to(getattr(torch, t.param_dtype))
    saved = dict(step=8, train_time=1.0, model=model.state_dict(), optimizer={}, script=Path(script).name,
                 globals={name: getattr(t, name) for name in t.GLOBALS}, vocab=257, eot=256,
                 code=[Path(ROOT, script).read_text()])
    Path("checkpoints/run").mkdir(parents=True)
    torch.save(saved, "checkpoints/run/step_00000008.pt")
    Path("checkpoints/run/step_00000004.pt").write_text("written later, but not the newest")
    return model.float().requires_grad_(False), saved

@pytest.mark.parametrize("script, settings", [
    ("train_gpt.py", {}), ("train_llama.py", dict(norm_eps=1e-3)),
    ("train_llama.py", dict(tied=True, fused_qkv=True, param_dtype="bfloat16"))])
def test_an_export_loads_with_auto_classes_and_has_our_logits(script, settings):
    ours, saved = save(script, **settings)
    export_hf.main(["checkpoints/run"])
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained("hf/run"), AutoTokenizer.from_pretrained("hf/run")
    assert str(theirs.dtype) == "torch." + saved["globals"]["param_dtype"]
    for ids in theirs.config, tokenizer:
        assert {ids.bos_token_id, ids.eos_token_id, ids.pad_token_id} == {256}
    assert theirs.config.max_position_embeddings == tokenizer.model_max_length == 64
    ids = torch.randint(0, 257, (4, 64))
    logits = ours(ids)[..., :257]
    torch.testing.assert_close(theirs.float()(ids).logits, logits, rtol=0, atol=1e-4)  # fp32's rounding: 1e-5 measured

@pytest.mark.parametrize("argv, what", [
    (["nowhere"], "nowhere"), (["bad.pt"], "damaged"), (["other.pt"], "train_vit"), (["checkpoints/run"], "hf/run"),
    (["less.pt"], "Missing key"), (["llama2.pt", "--out=x"], "data/tiny/tokenizer.model"),
    (["checkpoints/run", "--out=x"], "logits differ")])
def test_a_mistake_is_one_line_and_writes_nothing(argv, what, monkeypatch):
    saved = save("train_gpt.py")[1]
    torch.save(saved | dict(script="train_vit.py"), "other.pt")
    torch.save(saved | dict(vocab=32000), "llama2.pt")
    torch.save(saved | dict(model={"embed.weight": saved["model"]["embed.weight"]}), "less.pt")
    Path("bad.pt").write_bytes(Path("other.pt").read_bytes().replace(b"train_vit", b"train_gpt"))
    Path("hf/run").mkdir(parents=True)
    monkeypatch.setattr(train_gpt, "rotate", lambda x, cos, sin: x)  # as if someone took RoPE away
    with pytest.raises(SystemExit, match=what) as stop:
        export_hf.main(argv)
    assert "\n" not in str(stop.value) and not list(Path().glob("x*")) and not list(Path("hf").rglob("*.*"))

@pytest.mark.parametrize("vocab, eot, variable", [
    (257, 256, ""), (50257, 50256, "TIKTOKEN_CACHE_DIR"), (32000, 2, "LLAMA2_TOKENIZER")])
def test_a_tokenizer_gives_the_ids_and_texts_of_the_library_that_made_it(vocab, eot, variable):
    file = variable and (os.environ.get(variable) or pytest.skip(f"set {variable}"))  # of Llama 2 alone
    saved = dict(vocab=vocab, globals=dict(block_size=10**6))
    encode, decode, _ = sample.load_tokenizer(saved, file)
    export_hf.build_tokenizer(saved, file).save_pretrained("hf")
    tokenizer, rng, code = AutoTokenizer.from_pretrained("hf"), random.Random(0), (ROOT / "optim.py").read_text()
    assert len(tokenizer) == vocab and tokenizer.eos_token_id == eot
    odd = "     |\n|\t| |a|aa|the|1|00|é|漢|🙂|\0|'s|''|==|▁|\xa0|<s|</|\r\n|Ａ|\u0301|\ud7ff|\U0010fffd".split("|")
    letters = [chr(rng.randrange(below)) for below in (128, 0x300, 0xD800) for _ in range(1000)]
    for text in ["", " ", code, *("".join(rng.choices(pool, k=50)) for pool in (odd, letters) for _ in range(300))]:
        assert tokenizer(text).input_ids == encode(text), text
        assert tokenizer.decode(encode(text)) == decode(encode(text)), text

def sampled(capsys, *flags):
    sample.main(["checkpoints/run", "--prompt=def f(", "--max_new_tokens=100", *flags])
    return capsys.readouterr().out[:-1]

def greedy(model):
    """As bytes, the prompt with 100 tokens or to the document's end, each the likeliest behind the 64 before it."""
    ids = [256, *b"def f("]
    while len(ids) < 107 and ids.count(256) == 1:
        ids.append(int(model(torch.tensor([ids[-64:]]))[0, -1, :257].argmax()))
    return bytes(i for i in ids if i < 256)

def test_samples_of_a_model_that_someone_has_changed(tmp_path, monkeypatch, capsys):
    source = (ROOT / "train_gpt.py").read_text().replace("x_BTD + self.mlp(", "x_BTD + self.gain * self.mlp(").replace(
        "self.mlp = MLP()", "self.mlp, self.gain = MLP(), nn.Parameter(torch.ones(n_embd))")
    Path("train_fork.py").write_text(source)
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ours, saved = save(tmp_path / "train_fork.py")
    ours.head.weight[256] *= 5  # an end comes soon
    torch.save(saved, "checkpoints/run/step_00000008.pt")
    assert "blocks.1.gain" in saved["model"] and len(greedy(ours)) < 20
    assert sampled(capsys, "--temperature=0") == greedy(ours).decode(errors="replace")
    two, again, other = (sampled(capsys, "--samples=2", seed) for seed in ("--seed=7", "--seed=7", "--seed=8"))
    assert two == again != other and all(text.startswith("def f(") for text in two.split("\n" + "-" * 40 + "\n"))
    ours.head.weight[256] = 0  # now none ends, and the context of 64 is soon full
    torch.save(saved, "checkpoints/run/step_00000012.pt")
    assert len(greedy(ours)) == 106
    assert sampled(capsys, "--temperature=0") == sampled(capsys, "--top_k=1") == greedy(ours).decode(errors="replace")
    Path("train_fork.py").write_text(source + "#")
    sample.main(["checkpoints/run", "--max_new_tokens=1"])
    assert "saved by another train_fork.py; its model may differ" in capsys.readouterr().err
