"""Samples of data files, and their prompts."""

from __future__ import annotations

import json

import pytest

from longdraft.bench import tasks
from longdraft.bench.data import Sample, encode_truncated, insert_needles
from longdraft.bench.tasks import read_samples
from longdraft.errors import ContextError, PromptError
from tests.support.tiny import tiny_tokenizer


@pytest.fixture
def write(tmp_path):
    def written(*lines, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return written


@pytest.mark.parametrize(
    ("row", "document", "instruction", "dataset"),
    [
        ({"text": "read this"}, "read this", "", "rows"),
        ({"input": "why?", "context": "long", "answers": [], "dataset": "qmsum"}, "long", "why?", "qmsum"),
    ],
)
def test_rows_of_a_file(write, row, document, instruction, dataset):
    path = write(row)
    assert tasks.load_samples([str(path)]) == [Sample(document, instruction, dataset, f"{path}:1")]


def test_blank_lines_are_passed_over_and_the_limit_is_each_files(write):
    rows = [{"text": "a"}, "", {"text": "b"}, {"text": "c"}]
    found = read_samples([write(*rows, name="x.jsonl"), write(*rows, name="y.jsonl")], limit=2)
    assert [(s.document, s.dataset) for s in found] == [("a", "x"), ("b", "x"), ("a", "y"), ("b", "y")]
    assert found[1].origin.endswith("x.jsonl:3")


@pytest.mark.parametrize(
    "line", ["{", [1], {"prompt": "x"}, {"text": " "}, {"text": 3}, {"context": "x", "input": 3}], ids=str
)
def test_a_bad_line_is_named(write, line):
    path = write({"text": "fine"}, line)
    with pytest.raises(PromptError) as caught:
        read_samples([path])
    assert f"{path}:2" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path, write):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    for path in (tmp_path / "none.jsonl", tmp_path, write(), tmp_path / "binary"):
        with pytest.raises(PromptError):
            read_samples([path])


SAMPLE = Sample("one two three " * 30, "why?", "rows", "rows.jsonl:1", preface="hm.")


def test_a_chat_prompt_has_document_then_instruction():
    tokenizer = tiny_tokenizer(chat=True)
    text = tokenizer.decode(encode_truncated(Sample("long", "why?", "rows", ""), tokenizer, None))
    assert "<user>long\n\nwhy?" in text
    assert "<assistant>" in text
    assert (
        tokenizer.decode(encode_truncated(Sample("long", "why?", "rows", ""), tokenizer, None, raw=True))
        == "long\n\nwhy?"
    )


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
