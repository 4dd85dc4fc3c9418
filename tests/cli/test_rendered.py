"""Reports of measurements: Markdown, and files that cannot be written."""

from __future__ import annotations

import json


def test_a_run_as_a_table_in_markdown(shell, model_folder, tmp_path):
    data, written = tmp_path / "data.jsonl", tmp_path / "r.md"
    rows = [{"text": "one two three one two three one two", "dataset": name} for name in ("a/b", "c|<i>")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = shell(
        "bench", "--model", model_folder, "--data", data, "-n", 8, "--repeats", 1, "--methods", "prompt-lookup,hf",
        "--profile", "--ignore-eos", "--json", "--markdown", written,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = {row["method"]: row for row in json.loads(ended.out.splitlines()[-1])["rows"]}
    assert set(found["ar"]["profile"]) == {"seconds", "prefix_share"} and "profile" not in found["hf"]
    shown, markdown = f"{found['prompt-lookup']['mean_accepted_length']:.2f}", written.read_text()
    assert "| method | tokens/s | vs ar |" in markdown and "- tokens/s: new tokens" in markdown
    assert shown in markdown and shown in ended.out and "verify: attention" in ended.out


def test_files_that_cannot_be_written_are_refused_first(shell, tmp_path):
    for form in ("markdown", "svg", "results"):
        ended = shell("bench", "acceptance", f"--{form}", tmp_path / "none" / "x")
        assert ended.code == 1 and f"--{form}" in ended.err
