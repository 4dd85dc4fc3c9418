"""``longdraft bench acceptance`` as the shell runs it."""

from __future__ import annotations

import json

import pytest

from longdraft import Speculator


@pytest.fixture
def data_file(tmp_path):
    rows = [{"context": f"five six {i} " * n, "input": "why?", "dataset": "made-up"} for i, n in enumerate((60, 20))]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def acceptance(shell, model_folder, data_file):
    def run(*arguments):
        given = ("--model", model_folder, "--data", data_file, "-n", 4, "--methods", "prompt-lookup")
        return shell("bench", "acceptance", *given, "--lengths", "64,600", "--ignore-eos", *arguments)

    return run


def rows_of(ended):
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])["rows"]


def test_a_table_and_json(acceptance):
    ended = acceptance("--json", "--levels", 2)
    found = json.loads(ended.out.splitlines()[-1])
    assert [
        (r["method"], r["temperature"], r["length"], r["rope_factor"], r["prompts"], r["context_tokens"])
        for r in found["rows"]
    ] == [
        ("prompt-lookup", t, length, factor, prompts, length)
        for t in (0.0, 1.0)
        for length, factor, prompts in ((64, None, 2), (600, 2.0, 1))
    ]
    assert all(r["new_tokens"] == 3 * r["prompts"] and r["mean_accepted_length"] >= 1 for r in found["rows"])
    assert found["complete"] and "600 tokens: 1 of 2 texts are not that long" in found["notes"][0]
    for line in (
        "Mean accepted length: made-up, greedy",
        "Accepted by depth: made-up, T = 1",
        "600 x2",
        "1 of 2 texts",
    ):
        assert line in ended.out


def test_a_results_file_is_gone_on_with_and_added_to(acceptance, tmp_path):
    path = tmp_path / "r.jsonl"
    given = ("--lengths", 64, "--results", path, "--json")
    first = rows_of(acceptance(*given))
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 4
    path.write_text("".join(lines[:3]) + lines[3][:50])
    second = acceptance(*given)
    assert rows_of(second) == first
    assert "2 runs are in" in second.err and "2 are left" in second.err
    third = acceptance(*given)
    assert rows_of(third) == first and "4 runs are in" in third.err
    more = rows_of(acceptance(*given, "--methods", "prompt-lookup,ar", "-t", 0, "--lengths", "48,64"))
    assert [(r["method"], r["length"]) for r in more] == [
        ("prompt-lookup", 48), ("ar", 48), ("prompt-lookup", 64), ("ar", 64),
    ]  # fmt: skip
    assert more[2] == first[0] and more[3]["mean_accepted_length"] == 1.0
    assert len(path.read_text().splitlines()) == 1 + 4 + 6
    other = acceptance(*given, "--seed", 3)
    assert other.code == 2 and "settings.seed: 0 there, 3 here" in other.err
    other = acceptance(*given, "--no-foresee")
    assert other.code == 2 and "settings.foresee" in other.err


def test_ctrl_c_keeps_what_is_done(acceptance, tmp_path, press_ctrl_c):
    press_ctrl_c(Speculator, "stream", 2)
    ended = acceptance("--json", "--results", tmp_path / "r.jsonl")
    assert ended.code == 130 and "Stopped after 1 of 6 runs" in ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert len(found["rows"]) == 1 and not found["complete"]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


def test_figures(acceptance, tmp_path):
    pytest.importorskip("matplotlib")
    assert acceptance("--lengths", "48,64", "--svg", tmp_path / "f.svg").code == 0
    assert {path.name for path in tmp_path.glob("*.svg")} == {"f-t0.svg", "f-t1.svg"}
    assert acceptance("--lengths", "64", "-t", 1, "--svg", tmp_path / "one.svg").code == 0
    assert (tmp_path / "one.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "64,x"], "--lengths takes whole numbers"),
        (["--lengths", ""], "must name one value at least"),
        (["--lengths", "0"], "context must be at least 1"),
        (["--lengths", "2"], "not even the instruction fits 2 tokens"),
        (["--lengths", "4096"], "4,096 tokens: no text is that long"),
        (["--lengths", "2000", "--rope-factor", "2"], "raise the factor, or leave it out"),
        (["--temperature", "-1"], "temperature"),
        (["--methods", "nothing"], "There is no method 'nothing'"),
        (["--methods", "hf"], "takes methods of longdraft"),
        (["--methods", ""], "takes methods of longdraft"),
        (["--short", "cut"], "leave"),
    ],
)
def test_what_cannot_be(acceptance, arguments, message):
    ended = acceptance(*arguments)
    assert ended.code == 2
    assert message in ended.err


def test_a_model_without_a_draft(shell, model_folder, data_file):
    ended = shell("bench", "acceptance", "--model", model_folder, "--data", data_file, "--lengths", 64)
    assert ended.code == 2 and "No draft for this model comes with longdraft" in ended.err
