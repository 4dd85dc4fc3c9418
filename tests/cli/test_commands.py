"""The other verbs, the version, and running as a module."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import longdraft
from longdraft.cli.main import app
from longdraft.methods import METHODS
from tests.tiny import tiny_tokenizer
from tests.zoo import tiny_models as zoo

ROW = [
    "method", "dataset", "context_tokens", "batch", "samples", "tokens_per_second", "speedup_vs_ar", "speedup_vs_hf",
    "mean_accepted_length", "ttft_seconds", "mismatches", "near_ties",
    "context", "tokens_per_second_spread", "speedup_vs_ar_spread", "speedup_vs_ar_range", "faster_than_ar",
    "slower_than_ar", "depth_accepted", "peak_memory_bytes", "view",
]  # fmt: skip


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
    assert "flash" in found["attention"]["unavailable"]
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
    model = zoo.tiny_model("bloom")
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    ended = shell("doctor", "--model", tmp_path / "model", "--json")
    assert ended.code == 1
    model = json.loads(ended.out.splitlines()[-1])["model"]
    assert model["class"] == "BloomForCausalLM" and model["layers"].startswith("4 layers")
    assert "attention interface" in model["reason"]


def test_doctor_and_a_forced_path_that_cannot_run(shell, model_folder, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "flash")
    ended = shell("doctor", "--model", model_folder)
    assert ended.code == 1
    assert "LONGDRAFT_ATTENTION=flash cannot run" in ended.out


@pytest.fixture
def data_file(tmp_path):
    rows = [
        {"text": "one two one two one two"},
        {"text": "three four three four"},
        {"context": "five six " * 20, "input": "why?", "answers": [""], "dataset": "made-up"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def bench(shell, model_folder, data_file):
    def run(*arguments):
        return shell("bench", "--model", model_folder, "--data", data_file, "-n", 8, "--repeats", 1, *arguments)

    return run


def test_bench(bench, tmp_path):
    ended = bench("--methods", "prompt-lookup,hf", "--json", "--out", tmp_path / "out.json")
    assert ended.code == 0
    found = json.loads(ended.out.splitlines()[-1])
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert {"rows", "hardware", "versions"} <= set(found)
    assert [(r["method"], r["dataset"], r["samples"]) for r in found["rows"]] == [
        ("ar", "rows", 2), ("prompt-lookup", "rows", 2), ("hf", "rows", 2),
        ("ar", "made-up", 1), ("prompt-lookup", "made-up", 1), ("hf", "made-up", 1),
    ]  # fmt: skip
    for row in found["rows"]:
        assert list(row) == ROW
        assert row["mismatches"] == 0
        assert row["tokens_per_second"] > 0
        assert row["ttft_seconds"] > 0
        assert row["speedup_vs_hf"] > 0
    for text in ("rows: 2 samples", "made-up: 1 sample,", "mean accepted length =", "tokens/s:", "near tie"):
        assert text in ended.out


def test_bench_cuts_documents(bench):
    ended = bench("--context", 24, "--methods", "ar", "--json")
    rows = json.loads(ended.out.splitlines()[-1])["rows"]
    assert all(row["context_tokens"] <= 24 for row in rows)


def test_bench_leaves_out_what_fills_no_batch(bench):
    ended = bench("--batch", 2, "--methods", "ar", "--json")
    (row,) = json.loads(ended.out.splitlines()[-1])["rows"]
    assert (row["batch"], row["samples"]) == (2, 2)
    assert "1 sample is left out" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--methods", "magic"], 2, "There is no method 'magic'"),
        (["--context", "3"], 2, "fits 3 tokens"),
        (["--batch", "3"], 2, "no batch of 3"),
        (["-n", "600"], 2, "--max-tokens"),
        (["-n", "500"], 2, "--context 12"),
        (["--repeats", "0"], 2, "repeats"),
        (["--data", "none.jsonl"], 2, "no file none.jsonl"),
        (["--out", "no/such/folder/x.json"], 1, "--out"),
    ],
)
def test_bench_refuses(bench, arguments, code, message):
    ended = bench(*arguments)
    assert ended.code == code
    assert message in ended.err.splitlines()[-1]


def test_bench_names_the_bad_line(bench, data_file):
    data_file.write_text('{"text": "fine"}\nnot json\n')
    ended = bench()
    assert ended.code == 2
    assert f"{data_file}:2 is not JSON" in ended.err
