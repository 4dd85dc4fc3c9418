"""``longdraft batch``: every row once and in order, whatever ends it."""

from __future__ import annotations

import json

import pytest

from longdraft.batch.output import OutputFile

ROWS = 60


def prompts(path, count, tokens=4):
    rows = [{"id": f"r{i}", "prompt": f"what is {i} plus {i * 7}?", "max_tokens": 2 + i % tokens} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bad_rows_stand_in_their_place_and_show_in_the_exit_code(shell, model_folder, tmp_path):
    source, out = prompts(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    source.write_text(source.read_text() + "nonsense\n" + json.dumps({"prompt": "a", "max_tokens": 2}) + "\n")
    command = ["batch", source, out, "--model", model_folder, "--method", "ar"]
    ended = shell(*command, "--json")
    assert ended.code == 1 and json.loads(ended.out)["errors"] == 1 and "1 of them errors" in ended.err
    assert ["error" in row for row in found(out)] == [False, False, False, True, False]
    before = out.read_bytes()
    assert shell(*command).code == 1 and out.read_bytes() == before  # there is nothing left to do
    for changed, said in ((["-n", "9"], "max_tokens 256, not 9"), (["--seed", "1"], "seed"), (["--raw"], "raw")):
        ended = shell(*command, *changed)
        assert ended.code == 2 and said in ended.err
    assert shell(*command[:-1], "prompt-lookup").code == 1  # an exact method changes no text
    source.write_text(source.read_text() + "{}\n")
    ended = shell(*command)
    assert ended.code == 2 and "begun with input" in ended.err and out.read_bytes() == before


@pytest.mark.parametrize(
    ("source", "answers", "code", "named"),
    [
        ("nowhere", "out", 1, "nowhere"),
        ("empty", "out", 1, "empty"),
        ("in", "in", 2, "in is the file of prompts"),
        ("in", "nowhere/out", 1, "nowhere/out"),
    ],
)
def test_files_that_cannot_be_used_are_named(shell, model_folder, tmp_path, source, answers, code, named):
    (tmp_path / "empty").write_text("\n")
    prompts(tmp_path / "in", 1)
    ended = shell("batch", tmp_path / source, tmp_path / answers, "--model", model_folder, "--method", "ar")
    assert ended.code == code and str(tmp_path / named) in ended.err


def test_a_run_that_ended_early_goes_on_with_every_row_once(shell, model_folder, tmp_path, press_ctrl_c):
    """By Ctrl-C, and with the partial line that a killed process leaves."""
    source, out, whole = prompts(tmp_path / "in", ROWS), tmp_path / "out", tmp_path / "whole"
    command = ["--model", model_folder, "--method", "prompt-lookup", "--slots", 4, "-t", 0.7]
    press_ctrl_c(OutputFile, "write", 21)
    ended = shell("batch", source, out, *command)
    there = len(found(out))
    assert ended.code == 130 and "The same command continues" in ended.err and 20 <= there < ROWS
    with out.open("ab") as torn:
        torn.write(b'{"line": ')
    ended = shell("batch", source, out, *command, "--json")
    assert ended.code == 0 and f"{there} of {ROWS} rows are done" in ended.err
    assert json.loads(ended.out)["rows_this_run"] == ROWS - there
    assert shell("batch", source, whole, *command).code == 0
    assert found(out) == found(whole) and [row["id"] for row in found(whole)] == [f"r{i}" for i in range(ROWS)]
    assert len({row["text"] for row in found(whole)}) > 20
