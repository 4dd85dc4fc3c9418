"""``longdraft reproduce`` as the shell runs it, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from longdraft.bench.papers import PAPERS, get_table
from longdraft.bench.quality import FULL
from tests.support.drafts import random_draft, random_eagle3, random_lm
from tests.support.tiny import tiny_model


@pytest.fixture(scope="session")
def drafts(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("reproduced"), tiny_model(context=512)
    return {
        "longspec": random_draft(folder / "longspec", model),
        "eagle3": random_eagle3(folder / "eagle3", model, layers=(0, 1, 2)),
        "lm": random_lm(folder / "lm", model, length=256),
    }


@pytest.fixture
def reproduce(shell, model_folder):
    def run(*arguments):
        return shell("reproduce", *arguments, "--model", model_folder, "-n", 4, "--limit", 1, "--json")

    return run


def last(ended):
    return json.loads(ended.out.splitlines()[-1])


def test_papers_and_tables_are_listed(shell):
    ended = shell("reproduce", "--json")
    assert ended.code == 0 and ("specpv", "4") in {(row["paper"], row["table"]) for row in last(ended)}
    assert "drafts: eagle3; data: pg19" in ended.out
    assert {row["paper"] for row in last(shell("reproduce", "longspec", "--json"))} == {"longspec"}


def test_a_table_of_speed(reproduce, drafts, tmp_path):
    """Our figures and the paper's are in one row; methods without a draft are left out; a stopped run continues."""
    path = tmp_path / "r.jsonl"
    given = ("longspec", "fig6", "--draft", drafts["longspec"], "--results", path)
    ended = reproduce(*given)
    found = last(ended)
    assert ended.code == 0 and found["complete"]
    plain, own = found["rows"]
    assert (own["line"], own["column"], own["method"][:9]) == ("LongSpec", "AIME24", "longspec:")
    assert own["published"] == [
        {"model": "QwQ-32B", "accepted": 3.82, "tokens_per_second": 42.63, "speedup": pytest.approx(2.25, abs=0.01)}
    ]
    assert own["mismatches"] == 0 and own["as_published"]["accepted"] == own["mean_accepted_length"] >= 1
    assert plain["mean_accepted_length"] == 1.0
    assert any("modules of Python's library" in text for text in own["differs"])
    assert any("paper: 32,768" in text for text in found["differs"])
    assert "paper, QwQ-32B" in ended.out and "18.92" in ended.out
    again = reproduce(*given)
    assert "already; 0 are left" in again.err and last(again)["rows"] == found["rows"]
    assert reproduce("longspec", "fig7", *given[2:]).code == 2  # another table
    file = tmp_path / "aime.jsonl"  # in the place of the data set
    file.write_text(json.dumps({"problem": "what is " + "one and " * 200}) + "\n")
    found = last(reproduce(*given[:4], "--data", f"aime24={file}"))
    assert not any("Python" in text for row in found["rows"] for text in row["differs"])


def test_parts_of_a_round(reproduce, drafts, monkeypatch):
    table = get_table(PAPERS["longspec"], "4")
    table = replace(table, columns=table.columns[:1])
    monkeypatch.setitem(PAPERS, "longspec", replace(PAPERS["longspec"], tables=(table,)))
    found = last(reproduce("longspec", "4", "--draft", drafts["longspec"]))
    assert found["complete"] and found["rows"]
    assert all(row["as_published"][key] is not None for row in found["rows"] for key in table.figures)


def test_accepted_lengths_as_the_paper_counts_them(reproduce, drafts):
    ended = reproduce("specpv", "3", "--draft", drafts["eagle3"])
    found = last(ended)
    assert {row["line"] for row in found["rows"]} == {"Eagle3-Yarn", "SpecPV-8K", "SpecPV-4K", "SpecPV-2K"}
    for row in found["rows"]:
        assert row["as_published"]["accepted"] == pytest.approx(row["mean_accepted_length"] - 1)
    assert "the paper does not count the bonus token" in ended.out
    assert any("all that fits" in text for text in found["rows"][0]["differs"])


def test_a_table_of_quality(reproduce, drafts, tmp_path):
    """As the package rouge-score has it of the texts in the file of results, in per cent."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)
    ended = reproduce("specpv", "4", "--draft", drafts["eagle3"], "--results", tmp_path / "r.jsonl")
    found = last(ended)
    assert [row["line"] for row in found["rows"]] == ["Mean", "Max", "Last"]
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()[1:]
    likenesses, texts = [], json.loads(line)["measured"]["runs"]
    for row in found["rows"]:
        like = scorer.score(texts[FULL]["text"], texts[row["method"]]["text"])["rougeL"].fmeasure
        assert row["as_published"]["rouge_l"] == pytest.approx(100 * like)
        likenesses.append(like)
    assert len(set(likenesses)) > 1
    assert found["rows"][0]["published"][0] == {"model": "L-8B", "rouge_l": 56.1, "accepted": 3.53}


def test_a_table_of_two_drafts_needs_two(reproduce, drafts, tmp_path):
    """LongSpec's table 2: each line decodes with its own draft, in the order of --draft."""
    other = random_draft(tmp_path / "other", tiny_model(context=512), seed=1)
    ended = reproduce("longspec", "2", "--draft", drafts["longspec"], "--draft", other)
    found = last(ended)
    assert ended.code == 0 and len({row["method"] for row in found["rows"]}) == 2
    assert {row["line"] for row in found["rows"]} == {"w/o Anchor-Offset", "w/ Anchor-Offset"}
    one = last(reproduce("longspec", "2", "--draft", drafts["longspec"]))
    assert {row["line"] for row in one["rows"]} == {"w/o Anchor-Offset"}
    assert any("w/ Anchor-Offset is left out: it needs draft 2" in note for note in one["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("longspec", "9"), "Its tables: 1, 2, 3, 4, fig5"),
        (("medusa", "1"), "Papers: longspec"),
        (("specpv", "1", "--scale", "paper"), "--data pg19=FILE"),
        (("specpv", "3"), "Nothing of Table 3 can run"),
        (("longspec", "1", "--plan", "x"), "--plan"),
    ],
)
def test_what_cannot_be(reproduce, arguments, message):
    ended = reproduce(*arguments)
    assert ended.code == 2 and message in ended.err
