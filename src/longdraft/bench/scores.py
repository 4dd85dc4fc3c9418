"""Scores of answers against references, in [0, 1], and the metric of each data set.

F1, edit similarity, classes and numbers are defined as in LongBench (Bai et al. 2024, ``metrics.py``), choices as in
LongBench v2, needles as in RULER. ROUGE-L is the package rouge-score's.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from longdraft.errors import CapabilityError

if TYPE_CHECKING:
    from longdraft.bench.data import Sample

_NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# Few-shot tasks (LongBench): models go on with more examples after the answer, so only its first line counts.
_FIRST_LINE_DATASETS = ("trec", "triviaqa", "samsum")


def _words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles (SQuAD's normalisation)."""
    unpunctuated = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", unpunctuated).split()


def f1(text: str, answer: str) -> float:
    """F1 of the common words, after SQuAD's normalisation."""
    predicted, expected = _words(text), _words(answer)
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def edit_similarity(text: str, answer: str) -> float:
    """Similarity of the answer and the text's first line of code, as by fuzzywuzzy's ``ratio`` in pure Python."""
    lines = text.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


def choice(text: str, answer: str) -> float:
    """1 if "The correct answer is (X)" has the answer's letter; the brackets are optional."""
    match = re.search(r"The correct answer is (?:\(([A-D])\)|([A-D]))", text.replace("*", ""))
    return float(match is not None and (match[1] or match[2]) == answer.strip())


def number(text: str, answer: str) -> float:
    r"""1 if the text gives the answer's number: the last one in ``\boxed{}``, else the first behind the last "answer
    is", else the last one of the text."""
    boxed, after_phrase = re.findall(r"\\boxed\{([^{}]*)\}", text), re.findall(r"(?i:answer is)(.*)", text)
    for parts, index in ((boxed[-1:], -1), (after_phrase[-1:], 0), ([text], -1)):
        if candidates := [number for part in parts for number in _NUMBER_PATTERN.findall(part)]:
            return float(_value(candidates[index]) == _value((_NUMBER_PATTERN.findall(answer) or ["nan"])[-1]))
    return 0.0


def numbers(text: str, answer: str) -> float:
    """Share of a text's whole numbers that equal the answer's first one."""
    candidates = re.findall(r"\d+", text)
    expected = re.findall(r"\d+", answer)[:1]
    return sum([x] == expected for x in candidates) / len(candidates) if candidates else 0.0


def contains_answer(text: str, answer: str) -> float:
    """1 if the text contains the answer; case is ignored."""
    return float(answer.lower() in text.lower())


def class_match(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / number of classes named in the text, if the answer is among them; else 0."""
    # A class whose name is a part of the answer's does not count.
    named = [c for c in classes if c in text and (c == answer or c not in answer)]
    return 1 / len(named) if answer in named else 0.0


def rouge_l() -> Callable[[str, str], float]:
    """A function (reference, text) -> ROUGE-L (Lin 2004): F1 of the longest common subsequence of stemmed words.

    The package counts words of Latin letters and digits only; equal texts score 1.0 in any script.

    Raises:
        CapabilityError: the package rouge-score is not installed.
    """
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise CapabilityError('ROUGE needs the package rouge-score: pip install "longdraft[bench]"') from None
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)

    def score(reference: str, text: str) -> float:
        return 1.0 if reference == text else float(scorer.score(reference, text)["rougeL"].fmeasure)

    return score


ROUGE, CLASSES, CONTAINS = "rouge_l", "classes", "found"
_METRIC_FUNCTIONS: dict[str, Callable[[str, str], float]] = {
    "f1": f1, "edit_similarity": edit_similarity, "choice": choice, "number": number, "numbers": numbers,
    CONTAINS: contains_answer,
}  # fmt: skip
METRICS = (*_METRIC_FUNCTIONS, ROUGE, CLASSES)
"""Names of all metrics."""
_DATASETS_OF_METRIC = {
    "f1": ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
    ROUGE: ("gov_report", "qmsum", "multi_news", "samsum", "booksum"),
    "edit_similarity": ("lcc", "repobench-p"),
    "numbers": ("passage_count", "passage_retrieval_en"),
    CLASSES: ("trec",),
    "choice": ("longbench-v2",),
    "number": ("aime24",),
    CONTAINS: ("ruler", "niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt"),
}


def metric_of_dataset(name: str) -> str:
    """A data set's metric; empty if it has none."""
    return next((metric for metric, datasets in _DATASETS_OF_METRIC.items() if name in datasets), "")


def score_answer(sample: Sample, text: str) -> float | None:
    """The score of an answer: its best over the references; for needles, the share of references that it contains.

    Returns:
        None if the sample has no references or no metric, or if ROUGE is not installed.
    """
    if not sample.answers or not sample.metric:
        return None
    if sample.dataset in _FIRST_LINE_DATASETS:
        text = text.lstrip("\n").split("\n")[0]
    if sample.metric == ROUGE:
        try:
            rouge = rouge_l()
        except CapabilityError:
            return None
        return max(rouge(answer, text) for answer in sample.answers)
    if sample.metric == CLASSES:
        return max(class_match(text, answer, sample.classes) for answer in sample.answers)
    scores = [_METRIC_FUNCTIONS[sample.metric](text, answer) for answer in sample.answers]
    return sum(scores) / len(scores) if sample.metric == CONTAINS else max(scores)


def missing_rouge_note(samples: Iterable[Sample]) -> str:
    """A note on samples that are not scored because ROUGE is not installed; empty if there are none."""
    names = dict.fromkeys(s.dataset for s in samples if s.metric == ROUGE and s.answers)
    if names:
        try:
            rouge_l()
        except CapabilityError as error:
            return f"No scores for {', '.join(names)}. {error}"
    return ""


def _value(number: str) -> float:
    return float(number.replace(",", ""))
