"""export_hf.py and sample.py on tiny models. For all of it set TIKTOKEN_CACHE_DIR and LLAMA2_TOKENIZER."""
import json, os, random, sys
from pathlib import Path

import pytest
import torch

from common import ROOT, TINY, fresh

pytest.importorskip("transformers", reason="pip install transformers")
import export_hf, sample, train_gpt
from transformers import AutoModelForCausalLM, AutoTokenizer

@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

def save(script, **settings):
    """Writes a checkpoint with large weights, so that each matters in its place. Returns model (fp32) and content."""
    t = fresh(script, **TINY | dict(n_layer=2, block_size=64) | settings)
    torch.manual_seed(0)
    model = t.Model(320)
    for p in model.parameters():
        p.data = (torch.randn_like(p) * 0.3 + (p.ndim == 1)).to(getattr(torch, t.param_dtype))
    saved = dict(step=8, train_time=1.0, skipped=0, model=model.state_dict(), optimizers=[], script=script, vocab=257,
                 globals={name: getattr(t, name) for name in t.GLOBALS}, eot=256)
    Path("checkpoints/run").mkdir(parents=True)
    torch.save(saved, "checkpoints/run/step_00000008.pt")
    return model.float().requires_grad_(False), saved

@pytest.mark.parametrize("script, settings", [
    ("train_gpt.py", {}), ("train_llama.py", dict(norm_eps=1e-3)),
    ("train_llama.py", dict(tied=True, fused_qkv=True, param_dtype="bfloat16"))])
def test_an_export_loads_with_auto_classes_and_has_our_logits(script, settings):
    ours, saved = save(script, **settings)
    export_hf.main(["checkpoints/run"])
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained("hf/run"), AutoTokenizer.from_pretrained("hf/run")
    assert str(theirs.dtype) == "torch." + saved["globals"]["param_dtype"]
    assert theirs.config.eos_token_id == tokenizer.eos_token_id == 256 and tokenizer.model_max_length == 64
    ids = torch.randint(0, 257, (4, 64))
    logits = ours(ids)[..., :257]
    torch.testing.assert_close(theirs.float()(ids).logits, logits, rtol=0, atol=1e-4)  # fp32's rounding: 1e-5 measured
    ours.blocks[1].attn.proj.weight[0, 0] += 0.1  # and one weight would be seen
    assert (ours(ids)[..., :257] - logits).abs().max() > 1e-3

@pytest.mark.parametrize("argv, what", [
    (["nowhere"], "nowhere"), (["bad.pt"], "checksum"), (["other.pt"], "train_vit"), (["checkpoints/run"], "hf/run"),
    (["llama2.pt", "--out=x"], "tokenizer.model"), (["checkpoints/run", "--out=x"], "logits differ")])
def test_a_mistake_is_one_line_and_writes_nothing(argv, what, monkeypatch):
    saved = save("train_gpt.py")[1]
    torch.save(saved | dict(script="train_vit.py"), "other.pt")
    torch.save(saved | dict(vocab=32000), "llama2.pt")
    Path("bad.pt").write_bytes(Path("other.pt").read_bytes().replace(b"train_vit", b"train_gpt"))
    Path("hf/run").mkdir(parents=True)
    monkeypatch.setattr(train_gpt, "rotate", lambda x, cos, sin: x)  # as if someone took RoPE away
    with pytest.raises(SystemExit, match=what) as stop:
        export_hf.main(argv)
    assert "\n" not in str(stop.value) and not list(Path().glob("x*")) and not list(Path("hf").rglob("*.*"))

def reference(name):
    if name == "bytes":
        return 257, 256, lambda text: list(text.encode()), lambda ids: bytes(ids).decode()
    variable = {"gpt2": "TIKTOKEN_CACHE_DIR", "llama2": "LLAMA2_TOKENIZER"}[name]
    path = os.environ.get(variable) or pytest.skip(f"set {variable}")
    if name == "gpt2":
        gpt2 = pytest.importorskip("tiktoken").get_encoding("gpt2")
        return 50257, 50256, gpt2.encode_ordinary, gpt2.decode
    Path("data/tiny").mkdir(parents=True)
    Path("data/tiny/tokenizer.model").symlink_to(path)  # where the train scripts look for it
    llama2 = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=path)
    return 32000, 2, llama2.encode, llama2.decode

@pytest.mark.parametrize("name", ["bytes", "gpt2", "llama2"])
def test_a_tokenizer_gives_the_ids_and_texts_of_the_library_that_made_it(name):
    vocab, eot, encode, decode = reference(name)
    export_hf.build_tokenizer(dict(vocab=vocab, globals=dict(dataset="tiny", block_size=10**6))).save_pretrained("hf")
    tokenizer, rng, code = AutoTokenizer.from_pretrained("hf"), random.Random(0), (ROOT / "optim.py").read_text()
    assert len(tokenizer) == vocab and tokenizer.eos_token_id == eot
    odd = "     |\n|\t| |a|aa|the|1|00|é|漢|🙂|\0|'s|''|==|▁|\xa0|<s|</|\r\n|Ａ|\u0301|\ud7ff|\U0010fffd".split("|")
    letters = [chr(rng.randrange(below)) for below in (128, 0x300, 0xD800) for _ in range(1000)]
    for text in ["", " ", code, *("".join(rng.choices(pool, k=50)) for pool in (odd, letters) for _ in range(300))]:
        assert tokenizer(text).input_ids == encode(text), text
        assert tokenizer.decode(encode(text)) == decode(encode(text)), text

def test_samples(capsys):
    """Of a checkpoint as of its export; greedy ones are what our model finds likeliest, to the end of the context."""
    ours, _ = save("train_llama.py")
    export_hf.main(["checkpoints/run"])
    def sampled(folder, *flags):
        capsys.readouterr()
        sample.main([folder, "--prompt=def f(", *flags])
        return capsys.readouterr().out[:-1]
    ids = [256, *b"def f("]
    while len(ids) < 64 and ids.count(256) == 1:
        ids.append(int(ours(torch.tensor([ids]))[0, -1, :257].argmax()))
    greedy = sampled("hf/run", "--temperature=0")
    assert greedy == sampled("hf/run", "--top_k=1") == bytes(i for i in ids if i < 256).decode(errors="replace")
    two = sampled("hf/run", "--samples=2")
    first, second = two.split("\n" + "-" * 40 + "\n")
    assert first.startswith("def f(") and second.startswith("def f(") and first != second
    assert sampled("checkpoints/run", "--samples=2") == two != sampled("hf/run", "--samples=2", "--seed=1")
    with pytest.raises(SystemExit, match="context is 64"):
        sample.main(["hf/run", "--prompt=" + "x" * 64])

def test_the_harness_scores_an_export_as_our_model_does(monkeypatch):
    harness = pytest.importorskip("lm_eval.__main__", reason='pip install "lm-eval[hf]==0.4.11"')
    ours, _ = save("train_gpt.py")
    export_hf.main(["checkpoints/run"])
    documents = [dict(question=f"def f{i}(x):\n return", choices=[" x", " None"], answer=i % 2) for i in range(6)]
    Path("questions.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    Path("local.yaml").write_text(json.dumps(dict(
        task="local", dataset_path="json", dataset_kwargs=dict(data_files="questions.jsonl", cache_dir="cache"),
        test_split="train", output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
        doc_to_target="answer", target_delimiter="", metric_list=[dict(metric="acc", aggregation="mean")])))
    command = "lm_eval --model hf --model_args pretrained=hf/run,dtype=float32 --tasks local --include_path . " \
              "--device cpu --num_fewshot 0 --batch_size 4 --log_samples --output_path out"
    monkeypatch.setattr(sys, "argv", command.split())
    harness.cli_evaluate()
    results = [json.loads(line) for line in next(Path("out").rglob("samples_*.jsonl")).open()]
    assert len(results) == 6
    for result in results:
        for choice, response in zip(result["doc"]["choices"], result["resps"], strict=True):
            ids = torch.tensor(list((result["doc"]["question"] + choice).encode()))
            logp = ours(ids[None])[0, :, :257].log_softmax(-1)[:-1].gather(1, ids[1:, None])
            assert float(response[0][0]) == pytest.approx(logp[-len(choice):].sum().item(), abs=1e-3)
