"""Documents, their split, the vocabulary, and the target's own answers."""

from __future__ import annotations

import gzip
import json
import lzma
from itertools import islice

import pytest

from longdraft.errors import ContextError, PromptError
from longdraft.speculator import Speculator
from longdraft.training import corpus
from longdraft.training.documents import Document, Skipped, documents, write
from longdraft.training.generations import generate
from longdraft.training.prompts import asks
from longdraft.training.vocabulary import most_frequent, to_draft
from longdraft.verify.sampling import Sampling
from tests.tiny import tiny_model, tiny_tokenizer


def read(path, tokenizer=None, skipped=None):
    return list(documents([path], tokenizer or tiny_tokenizer(chat=True), skipped or Skipped(), 61))


def test_texts_end_with_eos_and_chats_learn_the_answer(tmp_path):
    path, tokenizer = tmp_path / "rows.jsonl", tiny_tokenizer(chat=True)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [{"text": "abc"}, {"messages": chat}, {"tokens": [7, 8, 9], "start": 2}]
    path.write_text("\n".join(map(json.dumps, rows)))
    text, answered, ids = read(path, tokenizer)
    assert text == Document([*tokenizer("abc")["input_ids"], tokenizer.eos_token_id])
    assert tokenizer.decode(answered.tokens[: answered.start]) == "<user>hi<eos><assistant>"
    assert tokenizer.decode(answered.tokens[answered.start :]) == "yes<eos>"
    assert ids == Document([7, 8, 9], 2)
    write(read(path, tokenizer), tmp_path / "tokens.jsonl")
    assert read(tmp_path / "tokens.jsonl") == [text, answered, ids]


@pytest.mark.parametrize(("name", "opener"), [("a.jsonl.gz", gzip.open), ("a.jsonl.xz", lzma.open)])
def test_packed_files(tmp_path, name, opener):
    with opener(tmp_path / name, "wt") as file:
        file.write('{"text": "abc"}\n')
    assert len(read(tmp_path / name)) == 1
    cut = tmp_path / f"cut.{name}"
    cut.write_bytes((tmp_path / name).read_bytes()[:-6])
    with pytest.raises(PromptError, match=r"cut\.a.* cannot be read"):
        read(cut)


def test_chats_that_cannot_be_used(tmp_path):
    path, skipped = tmp_path / "rows.jsonl", Skipped()
    rows = [{"messages": []}, {"messages": [{"role": "user", "content": "hi"}]}, {"messages": "hi"}, {"text": 3},
            {"tokens": [1, 2], "start": 2}, {"tokens": "no"}, {"tokens": [5]}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read(path, skipped=skipped) == []
    assert skipped.total == len(rows)


def collect(found, **over):
    settings = {"max_length": 20, "min_length": 4, "shortest_learned": 3, "held_out": 0.3} | over
    return corpus.collect(found, Skipped(), **settings)


def test_cut_split_and_ordered():
    texts = [Document([i, *range(10), *range(40)]) for i in range(20)]
    prompts = [Document(list(range(i, 30)), 12) for i in range(5)]
    found = collect([*texts, *prompts, Document([1] * 30, 25), Document([1, 2])])
    everything = found.learned + found.held_out
    assert len(everything) == 20 * 3 + 5
    assert {len(d.tokens) for d in everything} == {20, 11}
    assert found.skipped.reasons == {"with a prompt longer than max_length": 1, "too short": 1}
    assert found.learned == sorted(found.learned, key=lambda d: d.tokens) and found.held_out
    assert not {tuple(d.tokens) for d in found.learned} & {tuple(d.tokens) for d in found.held_out}
    assert collect(texts).learned == collect(reversed(texts)).learned
    assert 0 < len(collect(texts, sample=0.5).learned) < len(collect(texts).learned)
    assert corpus.digest(found.learned) != corpus.digest(found.learned[1:])


def test_the_end_of_what_is_too_long():
    prompts = [Document([*range(10), *range(i, 40)], 32) for i in range(8)]
    long_answers = [Document(list(range(90, 130)), 9)]
    found = collect([*prompts, *long_answers, Document(list(range(45)))], keep_end=True)
    everything = found.learned + found.held_out
    assert sorted(len(d.tokens) for d in everything) == [5] + 11 * [20]
    cut = [d for d in everything if d.start > 1]
    assert sorted((d.start, d.tokens) for d in cut) == sorted((32 - (10 + 40 - i - 20), p.tokens[-20:])
                                                              for i, p in enumerate(prompts))  # fmt: skip
    assert Document(list(range(110, 130)), 1) in everything
    # One passage, different ends of the prompt: all on one side, as where nothing is cut.
    same = [Document([*range(60), i, *range(30)], 61) for i in range(12)]
    for seed in range(5):
        moved = [Document([t + seed for t in d.tokens], d.start) for d in same]
        others = [Document(list(range(i, i + 20))) for i in range(100, 120)]
        found = collect([*moved, *others], keep_end=True, max_length=32, held_out=0.5)
        assert sum(len(d.tokens) == 32 for d in found.learned) in (0, 12)


def test_the_vocabulary():
    found = most_frequent([Document([5, 5, 5, 9, 9, 2], 1), Document([7, 7, 7, 1], 3)], 20, 4, always=[19])
    assert found.tolist() == [1, 5, 9, 19] or found.tolist() == [2, 5, 9, 19]
    assert to_draft(found, 20)[found].tolist() == [0, 1, 2, 3]
    assert (to_draft(found, 20) >= 0).sum() == 4


@pytest.fixture(scope="module")
def spec():
    model = tiny_model(context=256)
    model.generation_config.eos_token_id = 2
    return Speculator("ar", target=model, tokenizer=tiny_tokenizer(chat=True))


TEXTS = ["the rain in spain stays mainly in the plain. " * 6, "a fish, an old man and the sea. " * 9]


def run(spec, out, total=24, tokens=(5, 20), **over):
    settings = {"batch": 2, "max_new_tokens": 24, "seed": 3} | over
    return generate(spec, asks(TEXTS, tokens, 3, (0.0, 0.0, 1.0), 0), out, total=total, **settings)


def test_answers_are_the_targets_own(spec, tmp_path):
    assert run(spec, tmp_path / "a.jsonl") == 24
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [r["temperature"] for r in rows] == [0.0, 0.0, 1.0] * 8
    for row in rows:
        prompt, answer = row["tokens"][: row["start"]], row["tokens"][row["start"] :]
        if row["temperature"] == 0:
            assert spec.generate(prompt, max_new_tokens=24)[0].token_ids == answer
        assert row["text"] == spec.decode(answer)
        assert len(answer) == 24 or answer[-1] == 2
    assert any(row["tokens"][-1] == 2 for row in rows), "no answer ended: EOS was not tested"
    # Seeds follow the prompts: what a sampled row holds can be told.
    for i in (2, 5):
        first = rows[i]["tokens"][: rows[i]["start"]]
        again = spec.generate(first, max_new_tokens=24, sampling=Sampling(temperature=1.0), seed=3 + i)
        assert again[0].token_ids == rows[i]["tokens"][rows[i]["start"] :]


@pytest.mark.parametrize("keep", [0, 1, 6, 7, 13, 24])
def test_gone_on_after_a_kill_to_the_same_file(spec, tmp_path, keep):
    run(spec, tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(lines[:keep]) + ("" if keep == 24 else lines[keep][:30]))
    assert run(spec, tmp_path / "b.jsonl") == 24
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_prompts_too_long_are_left_out_and_do_not_count(spec, tmp_path):
    tokens = (20, 50)  # some passages leave no room in a context of 256
    run(spec, tmp_path / "a.jsonl", tokens=tokens)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    asked = [ask for group in islice(asks(TEXTS, tokens, 3, (0.0,), 0), 8) for ask in group]
    assert len(lines) == len(asked) == 24
    assert any(len(spec.encode(ask.text)) + 24 > 256 for ask in asked)
    (tmp_path / "b.jsonl").write_text("".join(lines[:9]))
    run(spec, tmp_path / "b.jsonl", tokens=tokens)
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_no_prompt_fits(spec, tmp_path):
    with pytest.raises(ContextError, match="No prompt fits the model's context of 256 tokens with 250"):
        run(spec, tmp_path / "a.jsonl", max_new_tokens=250)


def test_stopped(spec, tmp_path):
    seen = []
    run(spec, tmp_path / "a.jsonl", progress=lambda rows, tokens: seen.append(rows), stop=lambda: len(seen) >= 2)
    assert len(seen) == 2 and seen[-1] < 24
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == seen[-1]


def test_nothing_to_ask_about():
    with pytest.raises(PromptError, match="no text to ask about"):
        next(asks(["", " "], (5, 10), 3, (0.0,), 0))
