"""Documents, their split, the vocabulary, and prompts."""

from __future__ import annotations

import gzip
import json
import lzma
from itertools import islice
from types import SimpleNamespace

import pytest

from longdraft.errors import PromptError
from longdraft.memory.token_ids import common_prefix_len
from longdraft.training import dataset
from longdraft.training.answers import PROMPTS as SAID
from longdraft.training.answers import sample_prompts
from longdraft.training.config import LmConfig, RunConfig
from longdraft.training.documents import Document, SkipCounts, encode_documents
from tests.support.tiny import tiny_tokenizer
from tests.training.helpers import in_memory


def read(path, tokenizer=None, skipped=None):
    found = encode_documents(
        [path], tokenizer or tiny_tokenizer(chat=True), SkipCounts() if skipped is None else skipped, 61
    )
    return [document for document in found if document]


def test_texts_end_with_eos_and_chats_learn_the_answer(tmp_path):
    path, tokenizer = tmp_path / "rows.jsonl", tiny_tokenizer(chat=True)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [{"text": "abc"}, {"messages": chat}, {"tokens": [7, 8, 9], "start": 2}]
    path.write_text("\n".join(map(json.dumps, rows)))
    text, answered, ids = read(path, tokenizer)
    assert text == Document([*tokenizer("abc")["input_ids"], tokenizer.eos_token_id])
    assert tokenizer.decode(answered.token_ids[: answered.start]) == "<user>hi<eos><assistant>"
    assert tokenizer.decode(answered.token_ids[answered.start :]) == "yes<eos>"
    assert ids == Document([7, 8, 9], 2)


@pytest.mark.parametrize(("name", "opener"), [("a.jsonl.gz", gzip.open), ("a.jsonl.xz", lzma.open)])
def test_packed_files(tmp_path, name, opener):
    with opener(tmp_path / name, "wt") as file:
        file.write('{"text": "abc"}\n')
    assert len(read(tmp_path / name)) == 1
    cut = tmp_path / f"cut.{name}"
    cut.write_bytes((tmp_path / name).read_bytes()[:-6])
    with pytest.raises(PromptError):
        read(cut)


def collect(found, skipped=None, kind=RunConfig, **over):
    settings = kind(**({"max_length": 20, "min_length": 4, "held_out": 0.3} | over))
    learned, held_out = dataset.split_dataset(
        in_memory(found), SkipCounts() if skipped is None else skipped, settings, 3
    )
    return SimpleNamespace(learned=list(learned), held_out=list(held_out), digest=learned.digest())


def test_cut_split_and_ordered():
    texts = [Document([i, *range(10), *range(50 + 40 * i, 90 + 40 * i)]) for i in range(20)]
    prompts = [Document(list(range(i, 30)), 12) for i in range(5)]
    skipped = SkipCounts()
    found = collect([*texts, *prompts, Document([1] * 30, 25), Document([1, 2])], skipped)
    everything = found.learned + found.held_out
    assert len(everything) == 20 * 3 + 5
    assert {len(d.token_ids) for d in everything} == {20, 11}
    assert skipped == {"with a prompt longer than max_length": 1, "too short": 1}
    assert found.held_out
    assert not {tuple(d.token_ids) for d in found.learned} & {tuple(d.token_ids) for d in found.held_out}
    assert 0 < len(collect(texts, sample=0.5).learned) < len(collect(texts).learned)
    assert found.digest == collect([*texts, *prompts, Document([1] * 30, 25), Document([1, 2])]).digest
    assert found.digest != collect(texts).digest


def test_the_end_of_what_is_too_long():
    prompts = [Document([*range(10), *range(i, 40)], 32) for i in range(8)]
    long_answers = [Document(list(range(90, 130)), 9)]
    found = collect([*prompts, *long_answers, Document(list(range(45)))], kind=LmConfig, learn_prompts=False)
    everything = found.learned + found.held_out
    assert sorted(len(d.token_ids) for d in everything) == [5] + 11 * [20]
    cut = [d for d in everything if d.start > 1]
    assert sorted((d.start, d.token_ids) for d in cut) == sorted((32 - (10 + 40 - i - 20), p.token_ids[-20:])
                                                              for i, p in enumerate(prompts))  # fmt: skip
    assert Document(list(range(110, 130)), 1) in everything


def test_the_vocabulary():
    found = dataset.most_frequent_tokens(
        [Document([5, 5, 5, 9, 9, 2], 1), Document([7, 7, 7, 1], 3)], 20, 4, always=[19]
    )
    assert found.tolist() == [1, 5, 9, 19] or found.tolist() == [2, 5, 9, 19]


TEXTS = [("the rain in spain stays mainly in the plain. " * 90, ""), ("a fish, an old man and the sea. " * 40, "")]


def test_prompts_begin_alike_up_to_the_end_of_their_passage():
    groups = list(islice(sample_prompts(TEXTS, (20, 300), 6, (0.0, 0.0, 1.0), 7), 60))
    shared = [min(common_prefix_len(group[0].text, ask.text) for ask in group[1:]) for group in groups]
    assert sum(length >= 75 for length in shared) > 40
    assert any(length < 40 for length in shared), "no prompts without a passage"
    for group in groups:
        assert len({ask.text for ask in group}) == len(group) == 6
        assert [ask.temperature for ask in group] == [0.0, 0.0, 1.0] * 2
    assert groups == list(islice(sample_prompts(TEXTS, (20, 300), 6, (0.0, 0.0, 1.0), 7), 60))
    assert groups != list(islice(sample_prompts(TEXTS, (20, 300), 6, (0.0, 0.0, 1.0), 8), 60))


def test_prompts_suit_their_passage():
    code = "def f(x):\n    return x\n\nfor i in range(3):\n    print(f(i))\n" * 50
    meeting = "anna: yes, let us do that.\nbert: i do not think so.\n" * 50
    for text, kinds in ((code, ("code", "question")), (meeting, ("meeting", "summary", "question"))):
        closings = tuple(closing for kind in kinds for closing in SAID[kind])
        for group in islice(sample_prompts([(text, "")], (100, 300), 6, (0.0,), 1), 20):
            if text[:12] in group[0].text:
                assert all(ask.text.endswith(closings) and ask.kind in kinds for ask in group)
