"""The target's own answers: what they say, how a run goes on, what is left out."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict

import pytest
import torch

from longdraft.errors import CheckpointError, ContextError
from longdraft.model.chat import chat_prompt, follow_up
from longdraft.model.runner import TargetRunner
from longdraft.speculator import Speculator
from longdraft.training import generations
from longdraft.training.answer_file import AnswerFile
from longdraft.training.generations import generate, looping
from longdraft.training.kept_features import KeptFeatures
from longdraft.training.prompts import Ask, asks
from tests.tiny import tiny_model, tiny_tokenizer

EOS, LONGEST, TOTAL = 2, 16, 9
TEXTS = ["the rain in spain stays mainly in the plain. " * 6, "a fish, an old man and the sea. " * 9]
TOKENIZER = tiny_tokenizer(chat=True)


@pytest.fixture(scope="module")
def spec():
    model = tiny_model(context=256)
    model.generation_config.eos_token_id = EOS
    return Speculator("ar", target=model, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def runner(spec):
    return spec.runner()


def passages(tokens=(5, 20), temperatures=(0.0, 0.0, 1.0)):
    return asks(TEXTS, tokens, 4, temperatures, 0)


def run(runner, out, asked=None, total=TOTAL, tokenizer=TOKENIZER, **over):
    """Rows in the file, in the end."""
    settings = {"batch": 6, "places": 2, "max_new_tokens": LONGEST, "seed": 3} | over
    file = AnswerFile(out, "tokens")
    generate(runner, tokenizer, enumerate(asked or passages()), file, total=total, **settings)
    return file.rows


def rows_of(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def by_passage(rows) -> dict[int, list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[row["at"][0]].append(row)
    return found


def folder(runner, tmp_path, name="a", layers=(0, 2)):
    return KeptFeatures(tmp_path / f"{name}.features", runner.parts.description, layers)


@pytest.mark.parametrize(("native", "features"), [("1", True), ("0", False)])
def test_greedy_answers_are_plain_decodings(spec, runner, tmp_path, monkeypatch, native, features):
    monkeypatch.setenv("LONGDRAFT_NATIVE", native)
    out = tmp_path / "a.jsonl"
    have = run(runner, out, total=2 * TOTAL, features=folder(runner, tmp_path) if features else None)
    rows = rows_of(out)
    assert have == len(rows) >= 2 * TOTAL and {row["temperature"] for row in rows} == {0.0, 1.0}
    single = 0
    for row in rows:
        prompt, answer = row["tokens"][: row["start"]], row["tokens"][row["start"] :]
        assert row["text"] == TOKENIZER.decode(answer, skip_special_tokens=True)
        if row["temperature"] == 0 and EOS not in answer[:-1]:  # a follow-up begins with the template's own
            single += 1
            assert spec.generate(prompt, max_new_tokens=LONGEST)[0].token_ids == answer
            assert len(answer) == LONGEST or answer[-1] == EOS
    assert single > 6
    assert any(row["tokens"][-1] == EOS for row in rows), "no answer ended: EOS was not tested"
    for number, found in by_passage(rows).items():
        assert [row["at"] for row in found] == [[number, i, len(found)] for i in range(len(found))]


def test_what_was_sampled_depends_on_the_seed_and_the_passage_alone(runner, tmp_path):
    asked = [[Ask(f"say {word}.", 1.0) for word in ("yes", "no")] for _ in range(4)]
    run(runner, tmp_path / "a.jsonl", iter(asked), 8)
    run(runner, tmp_path / "b.jsonl", iter(asked), 8, batch=1)
    run(runner, tmp_path / "c.jsonl", iter(asked), 8, seed=4)
    a, b, c = ({str(row["tokens"]) for row in rows_of(tmp_path / f"{name}.jsonl")} for name in "abc")
    assert a == b != c and len(a) == 8


@pytest.fixture(scope="module")
def whole(runner, tmp_path_factory):
    """A run that nothing has stopped: its folder."""
    found = tmp_path_factory.mktemp("whole")
    run(runner, found / "a.jsonl", features=folder(runner, found))
    return found


@pytest.mark.parametrize("cut", ["between passages", "within a passage", "within a line", "at the end of a line"])
def test_gone_on_after_a_kill(runner, whole, tmp_path, cut):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    out, kept = tmp_path / "a.jsonl", folder(runner, tmp_path)
    lines, before = out.read_text().splitlines(keepends=True), by_passage(rows_of(out))
    size = json.loads(lines[0])["at"][2]
    text = {
        "between passages": "".join(lines[:size]),
        "within a passage": "".join(lines[: size + 1]),
        "within a line": "".join(lines[: size + 2])[:-30],
        "at the end of a line": "".join(lines[:size])[:-1],
    }[cut]
    out.write_text(text)
    have = run(runner, out, features=kept)
    found = by_passage(rows_of(out))
    assert have == len(rows_of(out)) and out.read_text().startswith("".join(lines[: size - 1]))
    for number, rows in found.items():
        assert [row["at"] for row in rows] == [[number, i, len(rows)] for i in range(len(rows))]
        if number in before:  # up to rounding, and here that is the same
            assert rows == before[number]
    assert not kept.lacking(found)


def test_stopped_in_the_middle(runner, tmp_path):
    seen, out = [], tmp_path / "a.jsonl"
    have = run(runner, out, progress=lambda: seen.append(1), stop=lambda: len(seen) == 1)
    rows = rows_of(out)
    assert 0 < have == len(rows) < TOTAL
    assert run(runner, out) >= TOTAL
    assert rows_of(out)[:have] == rows
    assert run(runner, out, total=3) >= TOTAL  # what is there is kept


@pytest.mark.parametrize("total", [1, 4, 7])
def test_so_many_rows_as_are_asked_for_and_then_more(runner, tmp_path, total):
    """Answers that were left out of a passage are not made up for there."""
    out = tmp_path / "a.jsonl"
    assert run(runner, out, total=total) == len(rows_of(out)) == total
    first = rows_of(out)
    assert run(runner, out, total=total + 6) == len(rows_of(out)) == total + 6
    assert rows_of(out)[:total] == first


@pytest.mark.parametrize("text", ['{"text": "mine"}\n', "a diary\n", '{"tokens": [1, 2], "start": 1, "text": "old"}\n'])
def test_a_file_of_something_else_is_left_alone(runner, tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(CheckpointError):
        run(runner, tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == text


def test_features_that_were_not_kept_and_files_that_cannot_be_written(runner, tmp_path):
    run(runner, tmp_path / "a.jsonl", total=1)
    with pytest.raises(CheckpointError):
        run(runner, tmp_path / "a.jsonl", features=folder(runner, tmp_path))
    with pytest.raises(CheckpointError):
        run(runner, tmp_path / "none" / "a.jsonl")


def test_prompts_too_long_are_left_out(runner, tmp_path):
    asked = [[Ask("yes " * 100, 0.0), Ask("yes.", 0.0)], [Ask("no " * 100, 0.0)], [Ask("no.", 0.0)]]
    assert run(runner, tmp_path / "a.jsonl", iter(asked), 9) == 2
    assert sorted(row["at"] for row in rows_of(tmp_path / "a.jsonl")) == [[0, 0, 1], [2, 0, 1]]


def test_no_prompt_fits(runner, tmp_path):
    with pytest.raises(ContextError):
        run(runner, tmp_path / "a.jsonl", max_new_tokens=250)


class Scripted:
    """A target of which a test says what it says: :class:`~longdraft.training.branches.Branches` without a model."""

    keeps = False

    def __init__(self, script):
        self.script, self.fed = script, defaultdict(list)

    def read(self, passage, prefix):
        return None

    def forget(self, passage):
        pass

    def clear(self, row):
        self.fed[row] = []

    def step(self, rows, passages, tokens):
        logits = torch.zeros(len(rows), 61)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            self.fed[row].append(token)
            logits[i, self.script(row, self.fed[row])] = 1
        return logits


def scripted(runner, out, monkeypatch, script, asked, **over):
    monkeypatch.setattr(generations, "Branches", lambda *a: Scripted(script))
    run(runner, out, iter(asked), 99, **over)
    return [row["tokens"][row["start"] :] for row in rows_of(out)]


def test_another_turn(runner, tmp_path, monkeypatch):
    """It ends the answer as the template does, is not said by the target, and ends where the target says so."""
    asked = [[Ask("yes.", 0.0, ("and?", "so?"))]]
    behind = [follow_up(TOKENIZER, text) for text in ("and?", "so?")]
    question = chat_prompt(TOKENIZER, "yes.")
    assert TOKENIZER.decode(behind[0]) == "<eos><user>and?<eos><assistant>"
    turns = [[7, 8], [9], [10, 11, 12]]
    wanted = [*turns[0], *behind[0], *turns[1], *behind[1], *turns[2], EOS]

    def script(row, fed):
        answer = fed[1:]  # behind the last token of the question
        ends = answer in (turns[0], [*turns[0], *behind[0], *turns[1]])
        return EOS if ends or len(answer) >= len(wanted) else wanted[len(answer)]

    (answer,) = scripted(runner, tmp_path / "a.jsonl", monkeypatch, script, asked, max_new_tokens=40)
    assert answer == wanted
    assert rows_of(tmp_path / "a.jsonl")[0]["tokens"][: len(question)] == question


def test_no_room_for_another_turn(runner, tmp_path, monkeypatch):
    asked = [[Ask("yes.", 0.0, ("x" * 100,))]]
    (answer,) = scripted(runner, tmp_path / "a.jsonl", monkeypatch, lambda row, fed: EOS, asked)
    assert answer == [EOS]


def test_a_long_answer_holds_nothing_up(runner, tmp_path, monkeypatch):
    """While one answer goes on, its neighbours' rows take one passage after the other."""
    asked = [[Ask(f"{i}{j}?", 0.0) for j in ("ab" if i == 0 else "cd")] for i in range(5)]

    def script(row, fed):
        return 10 + len(fed) % 37 if TOKENIZER.decode(fed[0]) == "a" else EOS

    scripted(runner, tmp_path / "a.jsonl", monkeypatch, script, asked, batch=2, max_new_tokens=70)
    assert [row["at"][0] for row in rows_of(tmp_path / "a.jsonl")] == [1, 1, 2, 2, 3, 3, 4, 4, 0, 0]


def test_answers_that_begin_alike_are_dropped(runner, tmp_path, monkeypatch):
    """The first is kept, and one that differs within the first 32 tokens; what waits takes the row."""
    asked = [[Ask(f"{i}?", 0.0) for i in range(7)]]

    def script(row, fed):
        answer = len(fed) - 4  # behind "i?<eos><assistant>"
        if answer < 0:
            return 0
        other = TOKENIZER.convert_ids_to_tokens(fed[0]) == "2" and answer == 20
        return 50 if other else 10 + answer % 37

    answers = scripted(runner, tmp_path / "a.jsonl", monkeypatch, script, asked, max_new_tokens=40)
    assert len(answers) == 2 and all(len(answer) == 40 for answer in answers)
    assert [row["at"] for row in rows_of(tmp_path / "a.jsonl")] == [[0, 0, 2], [0, 1, 2]]


def test_an_answer_that_repeats_itself_ends(runner, tmp_path, monkeypatch):
    def script(row, fed):
        return 10 + len(fed) if len(fed) < 20 else 40 + len(fed) % 5

    (answer,) = scripted(runner, tmp_path / "a.jsonl", monkeypatch, script, [[Ask("yes.", 0.0)]], max_new_tokens=200)
    assert 96 < len(answer) < 140


def test_looping():
    assert looping([1, 2, 3] * 32)
    assert looping([*range(100, 116), *range(32), *range(32), *range(32)])
    assert not looping([1, 2, 3] * 33)  # looked at every 16 tokens
    assert not looping([5] * 80)
    assert not looping([*range(48), *range(48)])
    assert not looping([*[1, 2, 3] * 31, 4, 5, 6])


def test_a_tokenizer_without_a_chat_template(tmp_path):
    model = tiny_model(context=256)
    runner, tokenizer = TargetRunner(model), tiny_tokenizer(eos=True)
    asked = [[Ask("the rain. why?", 0.0, ("more.",)), Ask("the rain. so?", 0.0)]]
    assert run(runner, tmp_path / "a.jsonl", asked, 2, tokenizer, max_new_tokens=5) == 2
    assert tokenizer.decode(follow_up(tokenizer, "more.")) == "\n\nmore.\n\n"
