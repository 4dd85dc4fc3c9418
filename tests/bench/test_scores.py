"""Scores of answers, by the definitions of the data sets' authors, worked out by hand."""

from __future__ import annotations

import random
import sys

import pytest

from longdraft.bench import scores, tasks
from longdraft.bench.data import Sample


@pytest.mark.parametrize(
    ("score", "text", "answer", "wanted"),
    [
        ("f1", "It is the Eiffel Tower", "Eiffel Tower", 2 * 1 * 0.5 / 1.5),
        ("f1", "cat cat", "cat", 2 * 0.5 / 1.5),
        ("f1", "none", "cat", 0),
        ("edit_similarity", "```python\n# a remark\nreturn x\n", "return y", 0.88),  # 7 of 8 letters, rounded as there
        ("edit_similarity", "\nreturn x", "return x", 1),
        ("edit_similarity", "# remarks alone", "return x", 0),
        ("choice", "**The correct answer is (B).**", "B", 1),
        ("choice", "The correct answer is C", "C", 1),
        ("choice", "It is B", "B", 0),
        ("number", r"1 + 1 = \boxed{2}, not 3", "2", 1),
        ("number", "The answer is 1,204. I checked 3 times.", "1204", 1),
        ("number", "first 7, then 073", "73", 1),
        ("number", "no idea", "7", 0),
        ("numbers", "Paragraph 3 or paragraph 4", "Paragraph 3", 0.5),
        ("numbers", "none", "3", 0),
        ("rouge_l", "cats sat here", "a cat sat here", 6 / 7),  # cats and cat share a stem
        ("rouge_l", "你好", "你好", 1),
        ("found", "It is ABCDE", "abcde", 1),
    ],
)
def test_an_answer(score, text, answer, wanted):
    sample = Sample("x", "", "any", "", answers=(answer,), metric=score)
    assert scores.score_answer(sample, text) == pytest.approx(wanted)


def test_scores_are_those_of_lm_eval():
    """On random words, if `lm_eval[longbench]` is installed."""
    theirs = pytest.importorskip("lm_eval.tasks.longbench.metrics", exc_type=ImportError)
    generator = random.Random(0)
    words = "the a an cat Dog sat, mat. Paris 12 7 3, 1204 Paragraph return x=1 (b) # // ` Animal and plant City"
    classes = ["Animal", "Animal and plant", "City", "plant", "Paris"]

    def text(most: int, joints: str = " ") -> str:
        chosen = generator.choices(words.split(), k=generator.randint(1, most))
        return "".join(word + generator.choice(joints) for word in chosen).strip()

    for _ in range(1000):
        own, answer, right, name = text(8), text(5), str(generator.choice([3, 7])), generator.choice(classes)
        code = text(12, " \n")
        assert scores.score_f1(own, answer) == pytest.approx(theirs.qa_f1_score(own, answer))
        assert scores.score_numbers(own, right) == theirs.count_score(own, right)
        assert scores.score_numbers(own, f"Paragraph {right}") == theirs.retrieval_score(own, f"Paragraph {right}")
        assert scores.class_match(own, name, classes) == theirs.classification_score(own, name, all_classes=classes)
        assert scores.edit_similarity(code, answer) == pytest.approx(theirs.code_sim_score(code, answer))


def test_several_references():
    best = Sample("x", "", "any", "", answers=("cat", "dog"), metric="f1")
    assert scores.score_answer(best, "dog") == 1
    needles = Sample("x", "", "vt", "", answers=("ABC", "DEF"), metric="found")
    assert scores.score_answer(needles, "abc, xyz") == 0.5


def test_classes_and_first_lines():
    names = ("Animal", "Animal and plant", "City")
    sample = Sample(
        "x", "", "any", "", answers=("Animal and plant",), metric="classes", score_first_line=True, classes=names
    )
    assert (
        scores.score_answer(sample, "\nAnimal and plant\nQuestion: City") == 1
    )  # part of the answer's name; another line
    assert scores.score_answer(sample, "City or Animal and plant") == 0.5
    assert scores.score_answer(sample, "City") == 0


def test_every_score_is_some_data_sets_or_can_be_asked_for():
    assert {task.metric for task in tasks.TASKS.values()} - {""} == set(scores.METRICS)
    assert scores.score_answer(Sample("x", "", "qmsum", ""), "text") is None


def test_without_rouge(monkeypatch):
    sample = Sample("x", "", "qmsum", "", answers=("a",), metric="rouge_l")
    assert scores.missing_rouge_note([sample]) == ""
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    assert scores.score_answer(sample, "a") is None
    assert "qmsum" in scores.missing_rouge_note([sample]) and "longdraft[bench]" in scores.missing_rouge_note([sample])
