"""tools/export_hf.py, tools/sample.py, --tensorboard and --wandb, the zero-shot harness, and optim.py inside a script of nanoGPT's shape.

Models of some ten thousand parameters on a CPU. Nothing needs a network; the vocabularies of GPT-2 and Llama 2 are taken
from TIKTOKEN_CACHE_DIR and LLAMA2_TOKENIZER, else from their caches."""
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from common import ROOT, fresh, write_shard

pytest.importorskip("transformers")
import export_hf  # noqa: E402
import sample  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=8, max_iters=4, warmup_iters=0, eval_interval=2, log_interval=1,
            checkpoint_interval=2, val_tokens=256, compile=False, threads=1, device="cpu", sample_tokens=0, dtype="float32",
            learning_rate=0.05, adam_lr=0.05, schedule="constant", seed=1)
LLAMA = dict(TINY, n_ffn=64)
TEXT = (ROOT / "optim.py").read_text()
RUNS = {  # name: script, dataset, what differs
    "gpt": ("train_gpt", "bytes", {"rope_base": 500.0}),
    "llama": ("train_llama", "bytes", {"rope_base": 500.0, "norm_eps": 1e-3}),
    "tied": ("train_llama", "bytes", {"tied": True, "fused_qkv": True, "init_residual": True}),
    "bf16": ("train_llama", "bytes", {"param_dtype": "bfloat16"}),
    "gpt-gpt2": ("train_gpt", "gpt2", {"n_layer": 1, "max_iters": 1}),
    "llama-llama2": ("train_llama", "llama2", {"n_layer": 1, "max_iters": 1}),
}


def flags(name: str, **changes) -> list[str]:
    return [f"--{key}={value}" for key, value in {**(LLAMA if name == "train_llama" else TINY), **changes}.items()]


def llama2_file() -> str:
    from huggingface_hub import try_to_load_from_cache
    file = os.environ.get("LLAMA2_TOKENIZER") or try_to_load_from_cache("hf-internal-testing/llama-tokenizer", "tokenizer.model")
    if not file:
        pytest.skip("Llama 2's tokenizer.model is not on this machine: set LLAMA2_TOKENIZER")
    return str(file)


def reference(name: str):
    """-> text to ids and ids to text, of the library that made the vocabulary."""
    if name == "bytes":
        return lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace")
    if name == "gpt2":
        tiktoken = pytest.importorskip("tiktoken")
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception:
            pytest.skip("GPT-2's vocabulary is not on this machine: set TIKTOKEN_CACHE_DIR")
        return lambda text: gpt2.encode(text, disallowed_special=()), gpt2.decode
    llama2 = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=llama2_file())
    return llama2.encode, llama2.decode


def tokenizer_of(name: str):
    reference(name)
    return export_hf.build_tokenizer(name, 64, llama2_file() if name == "llama2" else None)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def write_data(folder: Path, name: str) -> None:
    ids, (vocab, eot) = reference(name)[0](TEXT[:12_000]), {"bytes": (257, 256), "gpt2": (50257, 50256), "llama2": (32000, 2)}[name]
    for split, tokens in (("train_000001", ids[:-1000]), ("val_000000", ids[-1000:])):
        write_shard(folder / f"{name}_{split}.bin", [eot, *tokens], vocab, eot)


@pytest.fixture
def run(home, monkeypatch):
    """run(name): the folder of a trained run of RUNS, made once. The working directory holds data/, logs/ and checkpoints/."""
    monkeypatch.chdir(home)

    def make(name):
        module, dataset, changes = RUNS[name]
        if not Path("checkpoints", name).exists():
            if not Path("data", dataset).exists():
                write_data(Path("data", dataset), dataset)
            fresh(f"{module}.py").main(flags(module, dataset=dataset, run_name=name, **changes))
        return Path("checkpoints", name)
    return make


def exported(run, name: str) -> Path:
    if not Path("hf", name).exists():
        file = ["--tokenizer_file", llama2_file()] if "llama2" in name else []
        export_hf.main([str(run(name)), *file])
    return Path("hf", name)


def fails(capsys, tool, argv) -> str:
    """What the tool complains: one line on stderr, exit status 1."""
    name = Path(tool.__file__).name
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop, export_hf.complaints(name):
        tool.main([str(word) for word in argv])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and len(lines) == 1 and lines[0].startswith(f"{name}: error: "), lines
    return lines[0]


# ---------------------------------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize("name", RUNS)
def test_export_loads_with_auto_classes_and_has_the_scripts_logits(run, capsys, name):
    reference(RUNS[name][1])
    folder = exported(run, name)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"wrote hf/{name}" and "\nsample:" in printed
    assert float(re.search(r"largest difference .* validation data: (\S+)", printed)[1]) <= 1e-4
    assert {f.name for f in folder.iterdir()} >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                                                  "tokenizer_config.json"} and not list(folder.glob("*.py"))
    assert len({f.stat().st_mode for f in folder.iterdir()}) == 1  # who may read one may read all
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == ("GPTNeoXForCausalLM" if name.startswith("gpt") else "LlamaForCausalLM")
    _, saved, module = export_hf.load_checkpoint(run(name))
    rows = export_hf.VOCABULARY[saved["tokenizer"]]
    assert model.config.vocab_size == rows == len(tokenizer) and saved["vocab"] == -(-rows // 64) * 64
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == saved["eot"]
    ours = module.Model(saved["vocab"])
    ours.load_state_dict(saved["model"])
    ids = tokenizer(TEXT[-4000:], return_tensors="pt").input_ids[:, -32:]
    with torch.no_grad():  # fp32 rounds at 1e-7 of the largest term; it adds up over a width of 32 to 64
        torch.testing.assert_close(ours.logits(ids)[..., :rows], model.float()(ids).logits, atol=1e-4, rtol=0)


def perturbed(folder: Path):
    """A checkpoint's content and script, its weights moved far away."""
    _, saved, module = export_hf.load_checkpoint(folder)
    torch.manual_seed(0)
    saved["model"] = {key: value + torch.randn_like(value) * 0.3 for key, value in saved["model"].items()}
    if folder.name == "tied":
        saved["model"]["head.weight"] = saved["model"]["embed.weight"]
    return saved, module


@pytest.mark.parametrize("name", ["gpt", "llama", "tied"])
def test_weights_that_are_all_large_and_different_agree_too(run, name):
    """A trained checkpoint might hide a swapped gain or a swapped head; here each weight matters and none is like another."""
    ours, theirs = export_hf.convert(*perturbed(run(name)))
    ids = torch.randint(0, 257, (4, 32))
    with torch.no_grad():
        a, b = ours.logits(ids)[..., :257], theirs(ids).logits
        assert a.std() > 1
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
        ours.blocks[1].attn.proj.weight.view(-1)[0] += 0.1  # and the comparison is sharp enough for one weight
        assert (ours.logits(ids)[..., :257] - b).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_model_that_was_changed_is_not_passed_off_as_the_stock_one(run, monkeypatch, name):
    """Its weights still fit, what it computes does not: without RoPE here. sample.py converts too, and compares nothing itself."""
    _, saved, module = export_hf.load_checkpoint(run(name))
    monkeypatch.setattr(module, "rotate", lambda x, cos, sin: x)
    with pytest.raises(export_hf.UserError, match="computes another function; was the model changed"):
        export_hf.convert(saved, module)
    monkeypatch.undo()
    make = module.Model
    for change in (lambda model: delattr(model.blocks[0], "mlp"),
                   lambda model: setattr(model.blocks[0].mlp, "down", torch.nn.Linear(3, 5, bias=False))):
        def altered(vocab, change=change):
            model = make(vocab)
            change(model)
            model.load_state_dict = lambda state: None  # as if the checkpoint were of such a model
            return model
        monkeypatch.setattr(module, "Model", altered)
        with pytest.raises(export_hf.UserError, match="other parts than an export knows.*was it changed"):
            export_hf.convert(saved, module)


def test_a_script_that_was_edited_since_is_told(run, monkeypatch, capsys):
    folder, load = run("gpt"), export_hf.load_script
    export_hf.load_checkpoint(folder)
    assert capsys.readouterr().err == ""

    def edited(*args):
        script = load(*args)
        script.source_hash = lambda: "of another version"
        return script
    monkeypatch.setattr(export_hf, "load_script", edited)
    export_hf.load_checkpoint(folder)
    assert "was made by another version of train_gpt.py or optim.py" in capsys.readouterr().err


def test_bf16_parameters_stay_bf16(run):
    folder = exported(run, "bf16")
    state = export_hf.load_checkpoint(run("bf16"))[1]["model"]
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")
    assert model.dtype == torch.bfloat16 and torch.equal(model.model.layers[1].mlp.gate_proj.weight, state["blocks.1.mlp.gate.weight"])


def test_which_checkpoint(run, tmp_path, capsys):
    folder = shutil.copytree(run("gpt"), tmp_path / "gpt")
    newest, older = folder / "step_00000004.pt", folder / "step_00000002.pt"
    note = json.loads(older.with_suffix(".json").read_text())
    older.with_suffix(".json").write_text(json.dumps(note | {"val_loss": 0.1}))
    assert export_hf.load_checkpoint(folder)[0] == newest
    assert export_hf.load_checkpoint(folder, best=True)[0] == older
    assert export_hf.load_checkpoint(older)[1]["step"] == 2
    newest.write_bytes(newest.read_bytes()[:-1])
    assert export_hf.load_checkpoint(folder)[0] == older
    assert f"passing over {newest}: it has" in capsys.readouterr().err


def test_without_validation_data_a_built_in_text_serves(run, tmp_path, monkeypatch, capsys):
    folder = run("gpt").resolve()
    monkeypatch.chdir(tmp_path)
    export_hf.main([str(folder), "--out", "there/model"])
    assert "tokens of export_hf.py itself: " in capsys.readouterr().out
    assert sorted(f.name for f in tmp_path.rglob("*") if f.is_dir()) == ["model", "there"]  # no temporary folder is left


def test_bad_input_to_export_is_one_line_and_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def broken(change):
        folder = shutil.copytree(run("gpt"), tmp_path / str(random.random()))
        saved = torch.load(folder / "step_00000004.pt", weights_only=True)
        change(saved)
        digest = export_hf.load_script("train_gpt.py").write_whole(folder / "step_00000004.pt", lambda f: torch.save(saved, f))
        (folder / "step_00000004.json").write_text(json.dumps(dict(
            val_loss=None, size=(folder / "step_00000004.pt").stat().st_size, sha256=digest)))
        return folder / "step_00000004.pt"

    export = lambda *argv: fails(capsys, export_hf, [*argv, "--out", tmp_path / "new"])
    assert "is a checkpoint of train_vit.py; expected one of train_gpt.py or train_llama.py" in export(
        broken(lambda saved: saved.update(script="train_vit.py")))
    assert "is not a checkpoint of a train script" in export(broken(lambda saved: saved.pop("globals")))
    assert "of an unknown tokenizer" in export(broken(lambda saved: saved.update(tokenizer="")))
    assert "another model than this train_gpt.py has" in export(broken(lambda saved: saved["model"].pop("embed.weight")))
    assert "the checkpoint does not fit this train_gpt.py: --n_head" in export(broken(lambda saved: saved["globals"].update(n_head=-1)))
    assert "nowhere does not exist" in export(tmp_path / "nowhere")
    assert "no good checkpoint in" in export(tmp_path)
    unfinished = Path(shutil.copy(run("gpt") / "step_00000004.pt", tmp_path / "step_00000004.pt"))
    assert "not a checkpoint, or saving it was interrupted" in export(unfinished)
    shutil.copy(run("gpt") / "step_00000004.json", tmp_path)
    unfinished.write_bytes(unfinished.read_bytes()[:-1] + b"x")
    assert "does not match its checksum: it is damaged" in export(unfinished)
    assert "unrecognized arguments: --bets" in fails(capsys, export_hf, [run("gpt"), "--bets"])
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} exists; expected a new folder" in fails(capsys, export_hf, [run("gpt"), "--out", tmp_path / "file"])
    assert "file/model: File exists; expected a writable folder" in fails(capsys, export_hf, [run("gpt"), "--out", tmp_path / "file/model"])
    monkeypatch.setattr(export_hf, "TOLERANCE", 1e-12)
    assert "differ by" in export(run("gpt"))
    for package in ("transformers", "safetensors"):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, package, None)
            assert f"package {package} is missing; expected it to be installed: pip install {package}" in export(run("gpt"))
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


def test_shards_of_others_with_ids_that_no_tokenizer_has_are_told(home, monkeypatch, capsys):
    """They name no vocabulary and pass for gpt2's, and a model with more rows trains on any ids."""
    reference("gpt2")
    monkeypatch.chdir(home)
    for split in ("train_000001", "val_000000"):
        write_shard(Path(f"data/wide/wide_{split}.bin"), [50_999] * 1000, ours=False)
    fresh("train_gpt.py").main(flags("train_gpt", dataset="wide", run_name="wide", n_layer=1, max_iters=1, vocab_size=51_008))
    error = fails(capsys, export_hf, ["checkpoints/wide"])
    assert "wide's validation data has the id 50999; expected ids below 50257, as gpt2 has" in error and "prepare the data with" in error
    assert not Path("hf/wide").exists()


def test_llama2_without_its_file_says_where_to_get_it(monkeypatch, tmp_path):
    import prepare

    def hub(what, call, instead):
        raise prepare.UserError(f"{what}: no answer", "a network", "wait" + instead)

    monkeypatch.setattr(prepare, "hub", hub)
    with pytest.raises(export_hf.UserError, match="tokenizer.model of .*: no answer.*--tokenizer_file=PATH takes"):
        export_hf.build_tokenizer("llama2", 64)
    (tmp_path / "some.model").write_text("what?")
    with pytest.raises(export_hf.UserError, match="some.model is not Llama 2's tokenizer.model"):
        export_hf.build_tokenizer("llama2", 64, tmp_path / "some.model")


def test_best_and_what_the_files_of_an_export_say(run, tmp_path, capsys):
    folder = shutil.copytree(run("gpt"), tmp_path / "gpt")
    note = folder / "step_00000002.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"val_loss": 0.1}))
    export_hf.main([str(folder), "--best", "--out", str(tmp_path / "best")])
    assert "step_00000002.pt: step 2 of train_gpt.py" in capsys.readouterr().out
    state = export_hf.load_checkpoint(folder, best=True)[1]["model"]
    assert torch.equal(sample.load(folder, best=True)[0].get_input_embeddings().weight, state["embed.weight"][:257])
    for name, more in (("gpt", {"rotary_pct": 1.0, "rotary_emb_base": 500.0}), ("llama", {"rope_theta": 500.0})):  # for older transformers
        config = json.loads((exported(run, name) / "config.json").read_text())
        assert config.items() >= (more | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)).items()
        assert AutoTokenizer.from_pretrained(Path("hf", name)).model_max_length == 32


def test_the_export_is_compared_on_the_data_that_validated(run, monkeypatch):
    _, saved, module = export_hf.load_checkpoint(run("llama"))
    write_data(Path("data/other"), "bytes")
    for file in Path("data/other").glob("*.bin"):
        file.rename(file.with_name(file.name.replace("bytes", "other")))
    monkeypatch.setattr(module, "val_dataset", "other")
    ids, source = export_hf.real_text(saved, module, None)
    assert ids.shape == (2, 32) and source == "other's validation data"


def test_a_checkpoint_that_diverged_is_not_the_best(run, tmp_path):
    folder = shutil.copytree(run("gpt"), tmp_path / "gpt")
    newest, older = folder / "step_00000004.pt", folder / "step_00000002.pt"
    note = json.loads(newest.with_suffix(".json").read_text())
    newest.with_suffix(".json").write_text(json.dumps(note | {"val_loss": float("nan")}))
    assert export_hf.load_checkpoint(folder, best=True)[0] == older


# ---------------------------------------------------------------------------------------------------------------------- tokenizers
def texts() -> list[str]:
    rng = random.Random(0)
    odd = ["     ", "\n", "\t", " ", "  ", "a", "aa", "the", "1", "00", "é", "漢", "🙂", "\x00", "'s", "''", "==", "▁", "\xa0", "<s", "</",
           "\r\n", "Ａ", "\u0301", "\ud7ff", "\U0010fffd"]
    any_letter = lambda: chr(rng.choice([rng.randrange(128), rng.randrange(0x300), rng.randrange(0xD800)]))
    return (["", " ", "\n\n def f(x):\n    return x  # naïve"] + [TEXT[i:i + 3000] for i in range(0, len(TEXT), 3000)]
            + ["".join(rng.choices(odd, k=40)) for _ in range(500)]
            + ["".join(any_letter() for _ in range(60)) for _ in range(300)])


@pytest.mark.parametrize("name", ["bytes", "gpt2", "llama2"])
def test_tokenizer_gives_the_ids_and_texts_of_the_library_that_made_it(tmp_path, name):
    encode, decode = reference(name)
    tokenizer_of(name).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.is_fast and len(tokenizer) == export_hf.VOCABULARY[name]
    tokenizer.model_max_length = 10**9  # no warning
    for text in texts():
        ids = encode(text)
        assert tokenizer(text).input_ids == ids, text
        assert tokenizer.decode(ids) == decode(ids), text
        assert name == "llama2" or tokenizer.decode(ids) == text
    eot = tokenizer.eos_token
    assert tokenizer(eot).input_ids == [tokenizer.eos_token_id] == [tokenizer.bos_token_id]  # its name is the token, as usual there
    assert tokenizer.decode([*encode("a b"), tokenizer.eos_token_id], skip_special_tokens=True) == "a b"


def test_any_bytes_decode_as_python_decodes_them():
    tokenizer, rng = tokenizer_of("bytes"), random.Random(1)
    for _ in range(300):
        data = rng.randbytes(50)
        assert tokenizer.decode(list(data)) == data.decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------------------- sample.py
@pytest.mark.parametrize("name", ["gpt", "tied"])
def test_cached_greedy_is_greedy_without_a_cache_also_behind_the_context(run, name):
    ours, model = export_hf.convert(*perturbed(run(name)))
    prompt = ids = list(b"def f(")
    start, lengths = 0, []
    model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].size(1)))
    found = list(sample.generate(model, ids, 100, lambda logits: int(logits.argmax())))
    with torch.no_grad():
        for _ in range(100):  # the train script's model on the whole window, every time anew
            if len(ids) - start > 32:
                start = len(ids) - 16
            ids = [*ids, int(ours.logits(torch.tensor([ids[start:]]))[0, -1, :257].argmax())]
    assert found == ids[len(prompt):] and len(set(found)) > 3
    assert set(lengths) == {1, 16, len(prompt)} and sum(lengths) < 100 + 100 + len(prompt)  # what a token costs is bounded
    assert list(sample.generate(model, list(range(50)), 3, lambda _: 7)) == [7, 7, 7]  # a prompt longer than the context


def test_draw_keeps_what_transformers_keeps():
    from transformers import TopKLogitsWarper, TopPLogitsWarper
    torch.manual_seed(0)
    logits = torch.randn(30) * 2
    assert sample.draw(logits, 0, 0, 1.0) == sample.draw(logits, 1.0, 1, 1.0) == sample.draw(logits, 1.0, 0, 1e-6) == logits.argmax()
    assert sample.draw(logits, 1e-40, 0, 1.0) == sample.draw(logits, 5e-324, 0, 1.0) == logits.argmax()
    for temperature, k, p in ((1.0, 0, 0.7), (0.7, 5, 1.0), (1.5, 8, 0.8), (1.0, 0, 1.0)):
        scores = logits[None] / temperature
        scores = TopKLogitsWarper(k)(None, scores) if k else scores
        expected = torch.softmax(TopPLogitsWarper(p)(None, scores) if p < 1 else scores, -1)[0]
        counts = torch.bincount(torch.tensor([sample.draw(logits, temperature, k, p) for _ in range(4000)]), minlength=30)
        assert not counts[expected == 0].any()
        torch.testing.assert_close(counts / 4000, expected, atol=0.035, rtol=0)  # 4 standard deviations of a share of 4000


@pytest.mark.parametrize("name", ["bytes", "gpt2", "llama2"])
def test_the_stream_is_the_text_piece_by_piece(monkeypatch, capsys, name):
    tokenizer = tokenizer_of(name)
    prompt, text = "def naïve(", "x):\n    é = '漢字'\n    return 🙂  # and  spaces\n"
    ids = tokenizer(prompt).input_ids
    rest = tokenizer(prompt + text).input_ids[len(ids):]
    monkeypatch.setattr(sample, "generate", lambda *args: iter([*rest, tokenizer.eos_token_id, 65]))
    writes = []
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=writes.append, flush=lambda: writes.append(None)))
    sample.write(None, tokenizer, prompt, types.SimpleNamespace(max_new_tokens=None, temperature=0, top_k=0, top_p=1))
    monkeypatch.undo()
    pieces, events = [w for w in writes if w], [w for w in writes if w != ""]
    assert "".join(pieces) == prompt + text + "\n" and len(pieces) > 10
    assert not any(a and b for a, b in zip(events, events[1:]))  # each is flushed at once


def test_the_stream_bears_any_ids(monkeypatch, capsys):
    """An untrained model writes bytes that are no text."""
    tokenizer, rng = tokenizer_of("bytes"), random.Random(0)
    for _ in range(100):
        ids = [rng.randrange(256) for _ in range(40)] + [46]
        monkeypatch.setattr(sample, "generate", lambda *args: iter(ids))
        sample.write(None, tokenizer, "", types.SimpleNamespace(max_new_tokens=None, temperature=0, top_k=0, top_p=1))
        assert capsys.readouterr().out == bytes(ids).decode(errors="replace") + "\n"


def test_the_stream_bears_bytes_that_change_the_text_before(monkeypatch, capsys):
    """Llama's newline is a byte token, and its decoder makes all of a run of bytes U+FFFD if one of them fits no character."""
    tokenizer, args = tokenizer_of("llama2"), types.SimpleNamespace(max_new_tokens=None, temperature=0, top_k=0, top_p=1)
    for ids, expected in (([13, 243, 2114], "a\n\ufffd fact\n"), ([13, 243], "a\n\ufffd\n"), ([2114, 13, 13, 2114], "a fact\n\n fact\n")):
        monkeypatch.setattr(sample, "generate", lambda *_: iter(ids))
        sample.write(None, tokenizer, "a", args)
        assert capsys.readouterr().out == expected
    rng = random.Random(0)
    for _ in range(100):
        ids = [rng.choice([rng.randrange(3, 259), rng.randrange(259, 32000)]) for _ in range(40)] + [2114]
        sample.write(None, tokenizer, "a", args)
        assert capsys.readouterr().out.endswith(" fact\n")


def test_a_context_of_one_token_is_kept_to():
    seen = []

    def model(ids, past_key_values, use_cache):
        seen.append((ids.tolist(), past_key_values))
        return types.SimpleNamespace(past_key_values=types.SimpleNamespace(get_seq_length=lambda: 1), logits=torch.zeros(1, 1, 4))
    model.config, model.device = types.SimpleNamespace(max_position_embeddings=1), "cpu"
    assert list(sample.generate(model, [1, 2], 3, lambda logits: 3)) == [3, 3, 3] and seen == [([[2]], None), ([[3]], None), ([[3]], None)]


def test_sample_from_the_command_line(run, capsys):
    outputs = []
    for source, seed in ((run("gpt"), 1), (exported(run, "gpt"), 1), (run("gpt") / "step_00000004.pt", 2)):
        capsys.readouterr()
        sample.main([str(source), "def ", "import", "--max_new_tokens=40", "--top_k=50", "--top_p=0.9", f"--seed={seed}", "--device=cpu"])
        outputs.append(capsys.readouterr().out)
    first, second = outputs[0].split("-" * 40 + "\n")
    assert first.startswith("def ") and second.startswith("import") and len(first) > 5
    assert outputs[0] == outputs[1] != outputs[2]
    sample.main([str(run("gpt")), "--max_new_tokens=5", "--device=cpu"])  # no prompt: a document begins
    done = subprocess.run([sys.executable, str(ROOT / "tools/sample.py"), "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and re.fullmatch("sample.py: error: nowhere does not exist; expected .*\n", done.stderr)


def test_a_model_that_transformers_does_not_know_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    message = "is not a model that transformers loads: .*unheard-of.*; expected an export: python tools/export_hf.py"
    with pytest.raises(sample.UserError, match=message):
        sample.main([str(tmp_path)])


@pytest.mark.parametrize("name", ["sample.py", "export_hf.py"])
def test_ctrl_c_is_one_line_and_status_130(capsys, name):
    with pytest.raises(SystemExit) as stop, export_hf.complaints(name):
        raise KeyboardInterrupt
    assert stop.value.code == 130 and capsys.readouterr().err == f"{name}: error: interrupted\n"


def test_bad_input_to_sample_is_one_line(run, monkeypatch, capsys):
    for flag in ("--top_p=0", "--top_k=-1", "--temperature=-1", "--max_new_tokens=0"):
        assert f"found {flag}" in fails(capsys, sample, [run("gpt"), flag])
    assert "--device=nonsense: " in fails(capsys, sample, [run("gpt"), "--device=nonsense"])
    assert "invalid float value" in fails(capsys, sample, [run("gpt"), "--temperature=hot"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in fails(capsys, sample, [run("gpt")])


def test_a_prompt_stands_behind_an_end_of_text_and_flags_reach_the_draw(run, monkeypatch):
    seen = []

    def generate(model, ids, max_new_tokens, pick):
        torch.manual_seed(0)
        seen.append((ids, max_new_tokens, {pick(torch.tensor([0.0, 0.1, 0.0])) for _ in range(50)}, model.dtype))
        return []
    monkeypatch.setattr(sample, "generate", generate)
    sample.main([str(exported(run, "bf16")), "ab", "", "--max_new_tokens=7", "--temperature=0", "--device=cpu"])
    assert seen == [([256, 97, 98], 7, {1}, torch.float32), ([256], 7, {1}, torch.float32)]
    seen.clear()
    sample.main([str(run("gpt")), "--temperature=100", "--top_k=2", "--device=cpu"])
    assert seen[0][1] == 300 and len(seen[0][2]) == 2 and 1 in seen[0][2]


# ---------------------------------------------------------------------------------------------------------------------- tracking
def log_figures(path) -> dict[tuple[str, int], float]:
    """(key, step): number, of a log's lines of figures"""
    found, step = {}, 0
    for line in re.split("^={100}\n", Path(path).read_text(), flags=re.M)[3].splitlines():
        if line.startswith(("step:", "final ")):
            pairs = dict(pair.split(":") for pair in line.split() if ":" in pair)
            step = int(pairs.pop("step", f"{step}/").split("/")[0])
            for key, value in pairs.items():
                if value != "n/a":
                    found[key, step] = float(value.rstrip("ms"))
    return found


@pytest.mark.parametrize("name", ["train_gpt", "train_llama"])
def test_tensorboard_holds_the_figures_of_the_log(run, tmp_path, monkeypatch, name):
    run("gpt")
    files = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    work = lambda *more, **changes: fresh(f"{name}.py").main([*flags(name, dataset="bytes", log_dir=tmp_path, checkpoint_dir=tmp_path / "c",
                                                              run_name="r", **changes), *more])
    work("--tensorboard=true")
    seen = files.EventAccumulator(str(tmp_path / "tensorboard/r")).Reload()
    scalars = {(tag, event.step): event.value for tag in seen.Tags()["scalars"] for event in seen.Scalars(tag)}
    expected = log_figures(tmp_path / "r.txt")
    assert {key for key, _ in expected} >= {"val_loss", "val_acc", "train_loss", "lr", "grad_norm", "train_time", "tokens_per_s", "val_ppl"}
    assert scalars == pytest.approx(expected, rel=1e-6)  # event files hold fp32
    work("--resume=auto", max_iters=6, tensorboard=tmp_path / "own", allow_change=True)  # elsewhere, and only what is new
    seen = files.EventAccumulator(str(tmp_path / "own/r")).Reload()
    assert [event.step for event in seen.Scalars("train_loss")] == [5, 6]
    (tmp_path / "none").mkdir()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for key in [key for key in sys.modules if key.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, key)
    module = fresh(f"{name}.py")
    module.tensorboard = "False"  # as the log's own flags write it
    assert module.trackers("n", 0) == []
    with pytest.raises(module.UserError, match="needs a package that is not installed .*; run `pip install tensorboard`"):
        module.main(flags(name, dataset="bytes", log_dir=tmp_path / "none", checkpoint_dir=tmp_path / "c", run_name="n", tensorboard="1"))
    assert not list((tmp_path / "none").iterdir())


def test_wandb_gets_the_figures_of_the_log(run, tmp_path, monkeypatch):
    run("gpt")
    rows, start = [], {}
    session = types.SimpleNamespace(log=rows.append, define_metric=lambda *a, **k: None)
    client = types.ModuleType("wandb")
    client.init = lambda **settings: start.update(settings) or session
    monkeypatch.setitem(sys.modules, "wandb", client)
    work = lambda module, run_name: module.main(flags("train_gpt", dataset="bytes", log_dir=tmp_path, checkpoint_dir=tmp_path / "c",
                                                      run_name=run_name, wandb="my-project"))
    work(fresh(), "r")
    assert (start["project"], start["id"], start["config"]["n_embd"], start["dir"]) == ("my-project", "r", 32, str(tmp_path))
    assert {(key, row["step"]): value for row in rows for key, value in row.items() if key != "step"} == log_figures(tmp_path / "r.txt")
    client.init = lambda **settings: (_ for _ in ()).throw(RuntimeError("api_key not configured\n(no-tty)"))
    module = fresh()
    with pytest.raises(module.UserError, match=r"--wandb=my-project .*: api_key not configured \(no-tty\); wandb needs `wandb login`"):
        work(module, "s")
    monkeypatch.setitem(sys.modules, "wandb", None)
    module = fresh()
    with pytest.raises(module.UserError, match="pip install wandb"):
        work(module, "s")
    assert not (tmp_path / "s.txt").exists()


def test_wandb_itself_works_offline(run, tmp_path):
    run("gpt")
    pytest.importorskip("wandb")
    command = flags("train_gpt", dataset="bytes", log_dir=tmp_path, checkpoint_dir=tmp_path / "c", run_name="off", wandb="p")
    done = subprocess.run([sys.executable, str(ROOT / "train_gpt.py"), *command], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    assert done.returncode == 0, done.stderr
    data = next(tmp_path.glob("wandb/offline-run-*/run-off.wandb")).read_bytes()
    assert all(key in data for key in (b"val_loss", b"grad_norm", b"tokens_per_s"))


# ---------------------------------------------------------------------------------------------------------------------- zero-shot
def test_the_harness_scores_an_export_and_its_file_makes_the_table(run, tmp_path, monkeypatch, capsys):
    """lm-eval itself on a local task that takes arc_easy's name; its log-likelihoods against the train script's model."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval-harness: pip install lm-eval[hf]==0.4.11")
    assert lm_eval.__version__ == "0.4.11"
    folder, data = exported(run, "gpt"), tmp_path / "questions.jsonl"
    documents = [dict(question=f"def f{i}(x):\n    return", choices=[" x", " None", " qqqqqqqq"], answer=i % 3) for i in range(12)]
    data.write_text("".join(json.dumps(d) + "\n" for d in documents))
    (tmp_path / "task.yaml").write_text(f"""
task: arc_easy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}, {{metric: acc_norm, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
""")
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={folder},dtype=bfloat16", "--tasks", "arc_easy",
         "--num_fewshot", "0", "--batch_size", "auto", "--output_path", str(tmp_path / "out"), "--include_path", str(tmp_path),
         "--device", "cpu", "--log_samples"], capture_output=True, text=True, timeout=240,
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]

    _, saved, module = export_hf.load_checkpoint(run("gpt"))
    ours = module.Model(saved["vocab"])
    ours.load_state_dict(saved["model"])
    samples = {s["doc_id"]: s for s in map(json.loads, next((tmp_path / "out").rglob("samples_*.jsonl")).open())}
    margins, scores = [], []
    for i, d in enumerate(documents):
        for choice, response in zip(d["choices"], samples[i]["resps"]):
            ids, n = torch.tensor([list((d["question"] + choice).encode())]), len(choice)
            with torch.no_grad():
                logp = torch.log_softmax(ours.logits(ids)[0, :, :257], -1)
            expected = sum(logp[t - 1, ids[0, t]].item() for t in range(ids.size(1) - n, ids.size(1)))
            assert float(response[0][0]) == pytest.approx(expected, rel=0.01, abs=0.05)  # bf16 carries 8 bits
            scores.append(float(response[0][0]) / len(choice))
        margins.append(int(np.argmax(scores[-3:])) == d["answer"])
    import report
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    report.main(["--zeroshot", str(next((tmp_path / "out").rglob("results_*.json"))), "--out", str(tmp_path / "report")])
    table = (tmp_path / "report/report.md").read_text()
    assert "| task | gpt |" in table and f"| ARC-E (acc_norm) | {100 * np.mean(margins):.2f} |" in table
    assert "has version" not in table and "has shots" not in table and "has samples" not in table  # as the paper's would be


# ---------------------------------------------------------------------------------------------------------------------- nanoGPT
THEIRS = '''
import math, torch
from torch import nn
from torch.nn import functional as F

n_layer, n_head, n_embd, block_size, vocab_size = 2, 2, 32, 16, 64
learning_rate, weight_decay, beta1, beta2, grad_clip, max_iters, warmup_iters = 0.01, 0.1, 0.9, 0.95, 1.0, 150, 5

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(vocab_size, n_embd), wpe=nn.Embedding(block_size, n_embd),
                                              h=nn.ModuleList(Block() for _ in range(n_layer)), ln_f=nn.LayerNorm(n_embd)))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        nn.init.normal_(self.lm_head.weight, std=0.02)
    def forward(self, idx, targets):
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[:idx.size(1)]
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)

data = torch.tensor(list(b"a matrix is what a layer has; an update turns it, and whoever watches the loss sees that. " * 9)) % vocab_size
def get_batch():
    x = data[torch.randint(len(data) - block_size, (8, 1)) + torch.arange(block_size + 1)]
    return x[:, :-1], x[:, 1:]

torch.manual_seed(1337)
model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=SCALED)
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), "cpu")
losses, first = [], [p.detach().clone() for p in model.parameters()]
for iter_num in range(max_iters):
    lr = learning_rate * min(1, (iter_num + 1) / warmup_iters)
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr
    for micro_step in range(2):
        X, Y = get_batch()
        logits, loss = model(X, Y)
        scaler.scale(loss / 2).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
'''
RECIPE = [  # (the line of theirs, what takes its place), the new lines being README's
    ("import math, torch", "from optim import Muon\nimport math, torch"),
    ("losses, first =", """matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
muon = Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
losses, first ="""),
    ("    for param_group in optimizer.param_groups:", "    for param_group in optimizer.param_groups + muon.param_groups:"),
    ("    scaler.step(optimizer)", "    muon.step(); muon.zero_grad(set_to_none=True)\n    scaler.step(optimizer)"),
]


def test_five_lines_put_muon_into_a_script_of_nanogpts_shape(tmp_path, monkeypatch):
    shutil.copy(ROOT / "optim.py", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine, added = THEIRS, []
    for old, new in RECIPE:
        assert mine.count(old) == 1
        mine = mine.replace(old, new)
        added += [line for line in new.splitlines() if line.strip() and line not in THEIRS and line != old]
    assert len(added) == 5
    readme = " ".join((ROOT / "README.md").read_text().split())
    for line in added:
        assert line.strip() in readme, line
    runs = {}
    for name, text in (("theirs", THEIRS), ("mine", mine), ("scaled", mine)):
        runs[name] = {"SCALED": name == "scaled"}
        with torch.compiler.set_stance("force_eager"):  # seconds instead of a minute
            exec(compile(text, name, "exec"), runs[name])
    theirs, mine, scaled = runs["theirs"], runs["mine"], runs["scaled"]
    assert np.mean(theirs["losses"][:3]) > 4 and np.mean(mine["losses"][:3]) > 4  # ln 64 = 4.16
    assert np.mean(mine["losses"][-10:]) < np.mean(theirs["losses"][-10:]) < 3
    assert mine["losses"] == scaled["losses"]
    adam, muon = set(mine["optimizer"].state), set(mine["muon"].state)
    assert muon == set(mine["matrices"]) and len(muon) == 8 and not adam & muon and adam | muon == set(mine["model"].parameters())
    assert all(not torch.equal(a, b) for a, b in zip(mine["first"], mine["model"].parameters()))
    for a, b in zip(mine["model"].parameters(), scaled["model"].parameters()):  # the scale is a power of 2: nothing rounds
        assert torch.equal(a, b)
