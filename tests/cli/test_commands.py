"""The other verbs, the version, and running as a module."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import longdraft
from longdraft.registry import METHODS
from tests.support.tiny import tiny_tokenizer
from tests.zoo import tiny_models as zoo


def test_as_a_module():
    """In its own process, as from a shell; it starts without the packages of training."""
    command = [sys.executable, "-X", "importtime", "-m", "longdraft", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"longdraft {longdraft.__version__}\n")
    assert "longdraft.cli.main" in done.stderr and "longdraft.training" not in done.stderr


def test_says_at_once_that_torch_is_imported(tmp_path):
    """Here torch is a file that fails: the message comes before, and for commands that need torch alone."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    paths = os.pathsep.join(filter(None, (str(tmp_path), *sys.path)))
    for words, said in (("methods", ["Loading torch and transformers ...", "broken"]), ("--version", [])):
        command = [sys.executable, "-m", "longdraft", words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
        lines = done.stderr.splitlines()
        assert len(lines) == len(said) and all(text in line for text, line in zip(said, lines, strict=True)), lines


def test_methods(shell):
    ended = shell("methods", "--json")
    found = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 0
    assert [entry["name"] for entry in found] == list(METHODS)
    assert set(found[0]) == {"name", "exact", "needs_draft", "paper", "available"}
    assert all(name in ended.out and method.summary in ended.out for name, method in METHODS.items())


def test_doctor(shell, model_folder):
    ended = shell("doctor", "--model", model_folder, "--json")
    found = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 0
    assert set(found) == {"hardware", "versions", "attention", "kernels", "model", "drafts"}
    assert found["hardware"]["cores"] >= 1 and found["versions"]["torch"]
    assert found["attention"]["path"] == "cpu" and "hybrid" in found["attention"]["unavailable"]
    model = found["model"]
    # keys and values, 3 layers, 2 heads of size 16, float32
    assert model["kv_bytes_per_1k_tokens"] == 1024 * 2 * 3 * 2 * 16 * 4
    assert (model["context_tokens"], model["hosted"], model["reason"]) == (512, True, None)
    assert model["parameters"] > 10_000 and model["layers"] == "3 layers: 3 full"
    for said in (model["layers"], "512 tokens", f"kernels    {found['kernels']['line']}\n"):
        assert said in ended.out
    assert not re.search(r"hybrid|flash|triton|CUDA|nvidia", ended.out.rpartition("\n{")[0], re.I)  # no GPU is there


def test_doctor_says_why_a_model_cannot_be_used(shell, tmp_path, model_folder, monkeypatch):
    ended = shell("doctor", "--model", tmp_path / "none", "--json")
    found = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 1 and found["model"]["hosted"] is False and "none" in found["model"]["reason"]
    assert found["hardware"]["cpu"] in ended.out and found["kernels"]["line"] in ended.out
    zoo.tiny_model("openai-gpt").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    ended = shell("doctor", "--model", tmp_path / "model", "--json")
    model = json.loads(ended.out.splitlines()[-1])["model"]
    assert ended.code == 1 and "attention interface" in model["reason"]
    assert model["class"] == "OpenAIGPTLMHeadModel" and model["layers"].startswith("4 layers")
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "hybrid")
    ended = shell("doctor", "--model", model_folder)
    assert ended.code == 1 and "LONGDRAFT_ATTENTION=hybrid cannot run" in ended.out
