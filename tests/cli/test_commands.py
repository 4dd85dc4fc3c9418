"""The other verbs, the version, and running as a module."""

from __future__ import annotations

import json
import subprocess
import sys

from typer.testing import CliRunner

import longdraft
from longdraft.cli.main import app
from longdraft.methods import METHODS
from tests.tiny import tiny_tokenizer
from tests.zoo import tiny_models as zoo


def test_version(shell):
    assert shell("--version").out == f"longdraft {longdraft.__version__}\n"


def test_help_names_the_verbs():
    out = CliRunner().invoke(app, ["--help"]).output
    for verb in ("generate", "bench", "methods", "doctor"):
        assert verb in out


def test_an_unknown_verb(shell):
    assert shell("sing").code == 2


def test_as_a_module():
    """In a process of its own, as from a shell; and it starts without what training needs."""
    command = [sys.executable, "-X", "importtime", "-m", "longdraft", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"longdraft {longdraft.__version__}\n")
    assert "longdraft.cli.main" in done.stderr and "longdraft.training" not in done.stderr


def test_methods(shell):
    ended = shell("methods", "--json")
    found = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 0
    assert [entry["name"] for entry in found] == list(METHODS)
    assert set(found[0]) == {"name", "exact", "needs_draft", "paper", "available"}
    for name, method in METHODS.items():
        assert name in ended.out
        assert method.summary in ended.out


def test_doctor(shell, model_folder):
    ended = shell("doctor", "--model", model_folder, "--json")
    found = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 0
    assert set(found) == {"hardware", "versions", "attention", "kernels", "model", "drafts"}
    assert found["hardware"]["cores"] >= 1
    assert found["versions"]["torch"]
    assert found["attention"]["path"] == "cpu"
    assert "hybrid" in found["attention"]["unavailable"]
    model = found["model"]
    # keys and values, 3 layers, 2 heads of size 16, float32
    assert model["kv_bytes_per_1k_tokens"] == 1024 * 2 * 3 * 2 * 16 * 4
    assert model["context_tokens"] == 512
    assert model["hosted"] is True
    assert model["layers"] == "3 layers: 3 full attention"
    assert model["layers"] in ended.out
    assert "512 tokens" in ended.out
    assert model["parameters"] > 10_000
    assert f"kernels    {found['kernels']['line']}\n" in ended.out


def test_doctor_says_what_is_wrong_with_a_model(shell, tmp_path):
    ended = shell("doctor", "--model", tmp_path / "none", "--json")
    assert ended.code == 1
    found = json.loads(ended.out.splitlines()[-1])
    assert found["model"]["hosted"] is False
    assert "none" in found["model"]["reason"]
    assert found["hardware"]["cpu"] in ended.out
    assert found["kernels"]["line"] in ended.out


def test_doctor_says_why_a_model_cannot_be_hosted(shell, tmp_path):
    model = zoo.tiny_model("openai-gpt")
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    ended = shell("doctor", "--model", tmp_path / "model", "--json")
    assert ended.code == 1
    model = json.loads(ended.out.splitlines()[-1])["model"]
    assert model["class"] == "OpenAIGPTLMHeadModel" and model["layers"].startswith("4 layers")
    assert "attention interface" in model["reason"]


def test_doctor_and_a_forced_path_that_cannot_run(shell, model_folder, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "hybrid")
    ended = shell("doctor", "--model", model_folder)
    assert ended.code == 1
    assert "LONGDRAFT_ATTENTION=hybrid cannot run" in ended.out
