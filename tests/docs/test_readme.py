"""The README's Python lines and shell commands run, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import longdraft
from longdraft.cli.main import app
from tests.support.tiny import tiny_folder, tiny_model, tiny_tokenizer

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line
    for language, text in BLOCKS
    if not language
    for line in text.splitlines()
    if re.search(r"\blongdraft \w", line)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a working folder with the files that the commands name, and a tiny chat model."""
    tiny_folder(tmp_path / "model", context=1024)
    (tmp_path / "report.txt").write_text("the rain in spain stays mainly in the plain. " * 3)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "one two three one two"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_lines_run(folder):
    (code,) = (text for language, text in BLOCKS if language == "python")
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "longdraft": longdraft,
        "model_id": folder / "model",
        "inputs": {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)},
    }
    exec(code.replace("max_new_tokens=512", "max_new_tokens=8"), names)
    assert names["out"].shape == (1, 13)


def test_the_python_lines_of_many_prompts_run(monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
    spec = longdraft.Speculator("prompt-lookup", target=tiny_model(context=512), tokenizer=tiny_tokenizer(chat=True))
    names = {"spec": spec, "prompts": ["one two", "three", "four"] * 4}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code.replace("max_new_tokens=200", "max_new_tokens=8"), names)
        if "results" in code:
            assert all(r.new_tokens for r in names["results"])
    assert len(names["results"]) == 2 and not names["session"].busy


@pytest.mark.parametrize("command", COMMANDS)
def test_the_shell_commands_run(folder, command):
    source, _, command = command.rpartition("| ")
    words = shlex.split(command)
    assert words.pop(0) == "longdraft"
    extra = {"generate": ["--max-tokens", "8"], "bench": ["--max-tokens", "4"]}.get(words[0], [])
    model = [] if words[0] == "methods" else ["--model", str(folder / "model")]
    piped = (folder / "report.txt").read_text() if source else None
    result = CliRunner().invoke(app, [*words, *model, *extra], input=piped)
    assert result.exit_code == 0, result.output


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 3
