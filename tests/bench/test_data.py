"""Samples of data files, and their prompts."""

from __future__ import annotations

import json

import pytest

from longdraft.bench import tasks
from longdraft.bench.data import Sample, encode_truncated, insert_needles
from longdraft.errors import ContextError, PromptError
from tests.support.tiny import tiny_tokenizer


@pytest.fixture
def write(tmp_path):
    def written(*lines, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return written


def test_rows_of_files(write):
    """Blank lines are passed over, and the limit is each file's."""
    rows = [{"text": "a"}, "", {"input": "why?", "context": "b", "answers": [], "dataset": "qmsum"}, {"text": "c"}]
    paths = [write(*rows, name=f"{name}.jsonl") for name in "xy"]
    found = tasks.load_samples([str(path) for path in paths], limit=2)
    assert found == [
        sample for path in paths
        for sample in (Sample("a", "", path.stem, f"{path}:1"), Sample("b", "why?", "qmsum", f"{path}:3"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line", ["{", [1], {"prompt": "x"}, {"text": " "}, {"text": 3}, {"context": "x", "input": 3}], ids=str
)
def test_a_bad_line_is_named(write, line):
    path = write({"text": "fine"}, line)
    with pytest.raises(PromptError, match=rf"{path}:2"):
        tasks.load_samples([str(path)])


SAMPLE = Sample("one two three " * 30, "why?", "rows", "rows.jsonl:1", preface="hm.")


@pytest.mark.parametrize("tokens", [30, 333])
@pytest.mark.parametrize("raw", [False, True])
def test_the_document_is_cut_and_what_stands_around_it_kept(tokens, raw):
    tokenizer = tiny_tokenizer(chat=True)
    ids = encode_truncated(SAMPLE, tokenizer, tokens, raw)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert len(ids) == tokens  # one token a character: it can be met exactly
    assert text.endswith("why?")
    assert text.startswith("hm.\n\none")
    assert encode_truncated(SAMPLE, tokenizer, 10_000, raw) == encode_truncated(
        SAMPLE, tokenizer, None, raw
    )  # what fits is left whole
    assert ("<assistant>" in tokenizer.decode(ids)) != raw
    with pytest.raises(ContextError, match=r"rows\.jsonl:1"):
        encode_truncated(SAMPLE, tokenizer, 5, raw)


@pytest.mark.parametrize(
    ("text", "depth", "placed"),
    [
        ("one two three. " * 3, 0.5, "one two three. one two three. NEEDLE one two three. "),
        ("one two.", 1.0, "one two. NEEDLE"),
        ("one two three", 0.3, "one two NEEDLE three"),
        ("onetwothree", 0.3, "onetwothree NEEDLE"),
    ],
)
def test_a_needle_lies_behind_a_sentence_or_a_word(text, depth, placed):
    assert insert_needles(text, [(depth, "NEEDLE")]) == placed
