"""``longdraft bench report`` as the shell runs it, behind ``longdraft bench --profile``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.results_files import header, line, write


def results(folder: Path) -> Path:
    return write(folder / "run.jsonl", header(("ar", "longspec")), line({"ar": 4.0, "longspec": 2.0}))


def test_a_page_beside_the_results(shell, tmp_path):
    ended = shell("bench", "report", results(tmp_path))
    assert ended.code == 0
    page = tmp_path / "run-report" / "index.html"
    assert ended.out.strip() == str(page)
    assert "longspec decodes at 2.00x" in page.read_text(encoding="utf-8")


def test_another_folder_and_json(shell, tmp_path):
    ended = shell("bench", "report", results(tmp_path), "--out", tmp_path / "out", "--json")
    found = json.loads(ended.out)
    assert found["page"] == str(tmp_path / "out" / "index.html")
    assert found["images"] and all(Path(image).is_file() for image in found["images"])


def test_a_file_that_is_none(shell, tmp_path):
    ended = shell("bench", "report", tmp_path / "none.jsonl")
    assert ended.code == 1 and "none.jsonl cannot be read" in ended.err
    assert shell("bench", "report").code == 2


def test_from_a_profiled_run(shell, model_folder, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "one two three one two three one two"}) + "\n")
    file = tmp_path / "r.jsonl"
    ended = shell(
        "bench", "--model", model_folder, "--data", data, "-n", 8, "--repeats", 1, "--methods", "prompt-lookup,hf",
        "--profile", "--results", file, "--ignore-eos",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert shell("bench", "report", file, "--out", tmp_path).code == 0
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Where a round&#39;s time goes" in text or "Where a round's time goes" in text
    assert "KV cache" in text and 'class="tree"' in text
