"""``longdraft bench``: grids, results files, named data sets, and interrupts."""

from __future__ import annotations

import json

import pytest

from longdraft.bench.run import Bench
from longdraft.cli import progress
from longdraft.engine import prefill
from tests.support.gguf_files import write_gguf

ROW = {
    "method", "dataset", "context_tokens", "batch", "samples", "tokens_per_second", "speedup_vs_ar", "speedup_vs_hf",
    "mean_accepted_length", "prompts", "standard_error", "ttft_seconds", "mismatches", "near_ties",
    "context", "tokens_per_second_spread", "speedup_vs_ar_spread", "speedup_vs_ar_range", "faster_than_ar",
    "slower_than_ar", "depth_accepted", "peak_memory_bytes", "view", "scored", "score",
}  # fmt: skip


@pytest.fixture
def data_file(tmp_path):
    rows = [{"context": f"five six {i} " * 30, "input": "why?", "dataset": "made-up"} for i in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def bench(shell, model_folder, data_file):
    def run(*arguments, data=True):
        given = ["--data", data_file] if data else []
        return shell("bench", "--model", model_folder, *given, "-n", 4, "--repeats", 1, *arguments)

    return run


def rows_of(ended):
    return json.loads(ended.out.splitlines()[-1])["rows"]


def test_the_table_and_the_json_object_of_the_contract(bench, data_file, tmp_path):
    data_file.write_text(
        '{"text": "one two one two one two", "dataset": "a/b"}\n{"text": "three four three four", "dataset": "a/b"}\n'
        '{"context": "five six five six five six", "input": "why?", "answers": [""], "dataset": "c|<i>"}\n'
    )
    ours, written = "prompt-lookup:plan=fixed:max_draft=3", tmp_path / "r.md"
    ended = bench("--methods", f"{ours},hf", "--profile", "--json", "--markdown", written)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert {"rows", "hardware", "versions"} <= set(found)
    assert [(r["method"], r["dataset"], r["samples"]) for r in found["rows"]] == [
        (method, *of) for of in (("a/b", 2), ("c|<i>", 1)) for method in ("ar", ours, "hf")
    ]
    for row in found["rows"]:
        assert {*row} - {"profile"} == ROW and row["mismatches"] == 0
        assert row["tokens_per_second"] > 0 and row["ttft_seconds"] > 0 and row["speedup_vs_hf"] > 0
        assert "profile" not in row if row["method"] == "hf" else {*row["profile"]} == {"seconds", "prefix_share"}
    shown, markdown = f"{found['rows'][1]['mean_accepted_length']:.2f}", written.read_text()
    for text in ("a/b: 2 samples", "1 sample,", "mean accepted length =", "tokens/s:", "near tie", "verify: attention"):
        assert text in ended.out
    assert "| method | tokens/s | vs ar |" in markdown and "- tokens/s: new tokens" in markdown
    assert shown in markdown and shown in ended.out


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--methods", "ar"),
        ("bench", "acceptance", "--methods", "ar", "--lengths", "64"),
        ("bench", "quality", "--budget", "256", "-o", "drafter=prompt-lookup"),
    ],
)
def test_a_run_says_how_far_it_has_read_its_prompt(shell, model_folder, data_file, monkeypatch, command):
    """Reading 30,000 tokens takes minutes."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.0)
    ended = shell(*command, "--model", model_folder, "--data", data_file, "-n", 4, "--limit", 1)
    assert ended.code == 0, ended.err
    read = [int(line.split()[-4]) for line in ended.err.splitlines() if line.endswith(" prompt tokens read")]
    assert 16 in read and 32 in read


def test_files_that_cannot_be_written_are_refused_first(shell, tmp_path):
    for form in ("markdown", "svg", "results"):
        ended = shell("bench", "acceptance", f"--{form}", tmp_path / "none" / "x")
        assert ended.code == 1 and f"--{form}" in ended.err


def test_a_grid(bench):
    ended = bench("--context", "64,128", "--batch", "1,3", "--methods", "ar", "--json")
    assert ended.code == 0 and "1 sample" not in ended.out
    assert [(r["context"], r["batch"], r["samples"], r["context_tokens"]) for r in rows_of(ended)] == [
        (64, 1, 4, 64), (64, 3, 3, 64), (128, 1, 4, 128), (128, 3, 3, 128),
    ]  # fmt: skip
    for title in ("made-up: 4 samples, 64 prompt tokens", "made-up: 3 samples, 3 at a time, 128 prompt tokens"):
        assert title in ended.out
    assert "left out of batches of 3" in ended.err


def test_transformers_runs_on_unpacked_weights(shell, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", kind="Q8_0", words="F16")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "the heat of the day " * 3}))
    model = ("--model", tmp_path / "tiny.gguf", "--weights", "stored")
    ended = shell("bench", *model, "--data", rows, "-n", 8, "--repeats", 1, "--raw", "--methods", "hf", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert found["notes"] == {"ar": "Q8_0 and F16 weights, int8 arithmetic", "hf": "float32 weights"}
    # In another arithmetic, so its tokens are not compared.
    assert [row["mismatches"] for row in found["rows"]] == [0, None]
    assert "ar: Q8_0 and F16 weights, int8 arithmetic." in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        (["--context", "64,x"], 2, "--context"),
        (["--batch", "1,9"], 2, "9"),
        (["--methods", "magic"], 2, "magic"),
        (["--data", "gov_report"], 2, "--data gov_report=FILE"),
        (["--data", "none.jsonl"], 2, "none.jsonl"),
        (["--repeats", "0"], 2, "repeats"),
        (["-n", "600"], 2, "--max-tokens"),
        (["-n", "500"], 2, "--context 12"),
    ],
)
def test_what_cannot_be(bench, arguments, code, key):
    ended = bench(*arguments)
    assert ended.code == code
    assert key in ended.err.splitlines()[-1]


def test_without_data_the_standard_library_is_read(bench):
    ended = bench("--quick", "--context", 200, "--json", data=False)
    assert ended.code == 0
    found = rows_of(ended)
    assert {(r["dataset"], r["context_tokens"], r["samples"]) for r in found} == {
        ("stdlib-summary", 200, 1), ("stdlib-quote", 200, 1),
    }  # fmt: skip
    assert [r["method"] for r in found[:4]] == ["ar", "prompt-lookup", "self:lookup=true", "hf"]


def test_a_results_file_is_gone_on_with(bench, tmp_path, press_ctrl_c):
    """After Ctrl-C, and with the partial line that a killed process leaves."""
    path = tmp_path / "results.jsonl"
    arguments = ("--methods", "ar", "--context", "64,128", "--limit", 2, "--results", path, "--json")
    press_ctrl_c(Bench, "measure", 4)
    first = bench(*arguments)
    assert first.code == 130 and "Stopped after 3 of 4 batches." in first.err
    assert json.loads(first.out.splitlines()[-1])["complete"] is False and rows_of(first)[0]["samples"] == 2
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3
    path.write_text("".join(lines[:3]) + lines[3][:50])
    second, third = bench(*arguments), bench(*arguments)
    assert "2 batches are in" in second.err and "4 batches are in" in third.err
    assert len(path.read_text().splitlines()) == 5 and rows_of(third) == rows_of(second)
    assert [(r["context"], r["samples"]) for r in rows_of(second)] == [(64, 2), (128, 2)]
    assert json.loads(second.out.splitlines()[-1])["complete"] is True
    other = bench(*arguments, "--seed", 3)
    assert other.code == 2 and "settings.seed: 0 there, 3 here" in other.err
