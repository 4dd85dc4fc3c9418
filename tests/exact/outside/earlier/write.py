"""Writes what a commit of longdraft leaves behind: drafts that it trained, a snapshot, a results file.

In a checkout of that commit: ``PYTHONPATH=src:. python .../earlier/write.py FOLDER``, an empty folder named after it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longdraft import PromptCache, Speculator, load
from longdraft.cli.main import main
from tests.support.tiny import tiny_folder

KINDS = {
    "longspec": ["window=16", "intermediate_size=32"],
    "eagle3": ["intermediate_size=32", "feature_layers=[0,1,2]"],
    "eagle": ["intermediate_size=32"],
    "tokenswift": [],
}
# What drafts are asked with: TokenSwift's heads alone.
OPTIONS = {"tokenswift": {"view": "none", "reuse": False}}
PROMPT = "the river bends twice before the mill, and the road bends with the river. the mill stands. " * 2
BENCH = [
    "bench", "--model", "target", "--data", "rows.jsonl", "-n", "8", "--methods", "ar,prompt-lookup", "--quick",
    "--threads", "1",
]  # fmt: skip
FAST = [
    "max_length=64",
    "min_length=16",
    "rows=256",
    "precision=no",
    "device=cpu",
    "threads=1",
    "epochs=20",
    "lr=5e-3",
    "held_out=0.2",
]


def trained_target(folder: Path, **sizes: int) -> Path:
    """A tiny model that continues PROMPT, so that drafts can learn what it says."""
    tiny_folder(folder, **sizes)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer.encode(PROMPT, add_special_tokens=False))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(400):
        rows = torch.stack([ids.roll(-(step * 7 + i * 11))[:64] for i in range(8)])
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def write(folder: Path) -> None:
    target = trained_target(folder / "target", heads=4, kv_heads=2, head_dim=8, hidden=32, layers=3)
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": PROMPT[i:] + PROMPT[:i]}) + "\n" for i in range(0, 160, 4)))
    expected = {}
    for kind, settings in KINDS.items():
        run = folder / "run"
        code = main(["train", kind, *FAST, *settings, f"data={text}", f"target={target}", f"out={run}"])
        assert code == 0, kind
        shutil.copytree(run / "best", folder / kind)
        shutil.rmtree(run)
    model, tokenizer = load(target, device="cpu")
    prompt = tokenizer.encode(PROMPT)
    for kind in KINDS:
        spec = Speculator(target=model, draft=folder / kind, plan="fixed", **OPTIONS.get(kind, {}))
        result = spec.generate([prompt], max_new_tokens=24)[0]
        expected[kind] = [result.token_ids, result.rounds, result.drafted, result.accepted]
    speculator, cache = Speculator("ar", target=model), PromptCache()
    result = speculator.generate([prompt], max_new_tokens=8, cache=cache)[0]
    cache.save(folder / "prompt.safetensors", speculator.runner().fingerprint)
    expected["snapshot"] = [result.token_ids]
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"text": PROMPT}) + "\n")
    assert main([*BENCH, "--results", "results.jsonl"]) == 0


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    write(Path())
    for file in (Path("text.jsonl"), *Path().glob("*/README.md")):
        file.unlink()
