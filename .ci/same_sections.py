"""Fails where train_gpt.py and train_llama.py differ in a section or function that they share."""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPT, LLAMA = ((ROOT / name).read_text() for name in ("train_gpt.py", "train_llama.py"))

def sections(text):
    return dict(re.findall(r"^# ---- ([\w ,]+) -+\n(.*?)(?=^# ---- |\Z)", text, re.M | re.S))

def function(name, text):
    return re.search(rf"^(?:def|class) {name}\b.*?(?=^(?:def|class|# ----))", text, re.M | re.S)[0]

gpt, llama = sections(GPT), sections(LLAMA)
assert list(gpt) == list(llama) and len(gpt) == 8, f"sections: {[*gpt]} and {[*llama]}"
title = "Initialisation, optimizers, schedule"
for text, part in (GPT, gpt), (LLAMA, llama):
    part[title] = part[title].replace(function("init_weights", text), "")
different = {title for title in gpt if gpt[title] != llama[title]}
assert different == {"Globals and presets", "Model"}, f"sections that differ: {different}"
for name in "rotate", "Block":
    same = function(name, GPT).replace("LayerNorm(n_embd, bias=False)", "RMSNorm(n_embd, eps=norm_eps)")
    assert same == function(name, LLAMA), name
