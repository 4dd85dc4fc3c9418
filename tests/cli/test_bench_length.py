"""``longdraft bench acceptance`` and ``bench length``: drafts against context length."""

from __future__ import annotations

import json

import pytest

from longdraft.bench.length_reports import doubling_lengths


@pytest.fixture
def data_file(tmp_path):
    rows = [{"context": f"five six {i} " * n, "input": "why?", "dataset": "made-up"} for i, n in enumerate((60, 20))]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def measured(shell, model_folder, data_file):
    def run(verb, *arguments):
        given = ("--model", model_folder, "--data", data_file, "-n", 4, "--methods", "prompt-lookup")
        return shell("bench", verb, *given, "--lengths", "64,600", "--ignore-eos", "--json", *arguments)

    return run


pytest.importorskip("matplotlib")


def last(ended):
    assert ended.code in (0, 130), ended.err
    return json.loads(ended.out.splitlines()[-1])


def test_a_table_a_figure_and_json(measured, tmp_path):
    ended = measured("acceptance", "--svg", tmp_path / "f.svg")
    found = last(ended)
    assert {(r["method"], r["temperature"], r["length"], r["rope_factor"], r["prompts"]) for r in found["rows"]} == {
        ("prompt-lookup", t, *of) for t in (0.0, 1.0) for of in ((64, None, 2), (600, 2.0, 1))
    }
    assert all(r["new_tokens"] == 3 * r["prompts"] and r["mean_accepted_length"] >= 1 for r in found["rows"])
    assert found["complete"] and "600 tokens: 1 of 2 texts are not that long" in found["notes"][0]
    for text in ("Mean accepted length: made-up, greedy", "600 x2", "1 of 2 texts"):
        assert text in ended.out
    assert {path.name for path in tmp_path.glob("*.svg")} == {"f-t0.svg", "f-t1.svg"}


def test_a_results_file_is_gone_on_with_and_added_to(measured, tmp_path):
    """Also a file of an earlier version, whose runs have no seconds."""
    path = tmp_path / "r.jsonl"
    given = ("--lengths", 64, "--results", path)
    first = last(measured("acceptance", *given))["rows"]
    head, *lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    old = [json.dumps({k: x for k, x in json.loads(text).items() if k != "seconds"}) + "\n" for text in lines[:2]]
    path.write_text(head + "".join(old) + lines[2][:50])
    second = measured("acceptance", *given)
    assert last(second)["rows"] == first
    assert "2 runs are in" in second.err and "2 are left" in second.err
    more = last(measured("acceptance", *given, "--methods", "prompt-lookup,ar", "-t", 0, "--lengths", "48,64"))["rows"]
    assert [(r["method"], r["length"]) for r in more] == [
        ("prompt-lookup", 48), ("ar", 48), ("prompt-lookup", 64), ("ar", 64),
    ]  # fmt: skip
    assert more[2] == first[0] and more[3]["mean_accepted_length"] == 1.0
    assert len(path.read_text().splitlines()) == 1 + 4 + 6
    for other, said in (("--seed=3", "settings.seed: 0 there, 3 here"), ("--no-foresee", "settings.foresee")):
        ended = measured("acceptance", *given, other)
        assert ended.code == 2 and said in ended.err
    # The same file: what has seconds stays.
    timed = last(measured("length", "--lengths", 64, "--results", path))["rows"]
    assert [row["break_even"] is not None for row in timed] == [True, True]


def test_the_papers_sampling_stands_beside_ours(measured, tmp_path):
    """Both in one file, which names the scheme; greedy text has none."""
    given = ("--lengths", 64, "--results", tmp_path / "r.jsonl")
    ours, papers = (measured("acceptance", *given, "--sampling", scheme) for scheme in ("coupled", "standard"))
    for ended, scheme in ((ours, "coupled"), (papers, "standard")):
        assert [(row["temperature"], row["sampling"]) for row in last(ended)["rows"]] == [(0.0, None), (1.0, scheme)]
        assert f"T = 1, {scheme} sampling" in ended.out
    assert "2 runs are in" in papers.err and last(papers)["rows"][0] == last(ours)["rows"][0]
    assert measured("acceptance", *given, "--sampling", "other").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "64,x"], "--lengths"),
        (["--lengths", "0"], "context"),
        (["--lengths", "2"], "2 tokens"),
        (["--lengths", "4096"], "4,096 tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--methods", "nothing"], "'nothing'"),
        (["--methods", "hf"], "--methods"),
        (["--short", "cut"], "leave"),
    ],
)
def test_what_cannot_be(measured, arguments, message):
    ended = measured("acceptance", *arguments)
    assert ended.code == 2 and message in ended.err


def test_a_model_without_a_draft(shell, model_folder, data_file):
    ended = shell("bench", "acceptance", "--model", model_folder, "--data", data_file, "--lengths", 64)
    assert ended.code == 2 and "--draft" in ended.err


def test_break_even_here(measured, tmp_path):
    given = ("--lengths", "64,128", "--short", "keep", "-n", 8, "--markdown", tmp_path / "r.md")
    ended = measured("length", *given)
    found = last(ended)
    assert [(r["method"], r["length"]) for r in found["rows"]] == [
        (name, n) for n in (64, 128) for name in ("ar", "prompt-lookup")
    ]
    for row in found["rows"]:
        # A round's seconds over a step's, from which accepted length and speed-up follow.
        assert row["break_even"] > 0 and row["prompts"] == 2
        if row["method"] == "ar":
            assert row["break_even"] == pytest.approx(1.0) and row["mean_accepted_length"] == 1.0
    assert "accepted / break-even" in ended.out and "break-even" in (tmp_path / "r.md").read_text()


def test_lengths_double():
    assert doubling_lengths(1024, 8192) == (1024, 2048, 4096, 8192)
    assert doubling_lengths(1024, 5000) == (1024, 2048, 4096, 5000)
    assert doubling_lengths(1024, 512) == (512,)
