"""Scores answers against reference answers, from 0 to 1.

F1, edit similarity, classes and numbers are defined as in LongBench (Bai et al. 2024, ``metrics.py``), choices as in
LongBench v2, needles as in RULER, similarity as in OpenAI's MRCR. The package rouge-score computes ROUGE-L.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher

from longdraft.bench.data import Sample
from longdraft.errors import CapabilityError, needs_extra

_NUMBER_PATTERN = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def _words(text: str) -> list[str]:
    """Splits a text into words in lower case, without punctuation and articles (SQuAD's normalisation)."""
    unpunctuated = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", unpunctuated).split()


def score_f1(text: str, answer: str) -> float:
    """Returns the F1 of the words that the text and the answer have in common, after SQuAD's normalisation."""
    predicted, expected = _words(text), _words(answer)
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def edit_similarity(text: str, answer: str) -> float:
    """Compares the answer with the text's first line of code, like ``ratio`` of fuzzywuzzy in pure Python."""
    lines = text.lstrip("\n").split("\n")
    not_code = ("`", "#", "//")  # lines with code fences or comments
    line = next((line for line in lines if not any(mark in line for mark in not_code)), "")
    if line == answer:
        return 1.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


def similarity(text: str, answer: str) -> float:
    """Returns the ratio of ``difflib``: twice the characters in common, over the characters of both."""
    return SequenceMatcher(None, text, answer).ratio()


def score_choice(text: str, answer: str) -> float:
    """Returns 1 if the text says "The correct answer is (X)" with the answer's letter. The brackets may be missing."""
    match = re.search(r"The correct answer is (?:\(([A-D])\)|([A-D]))", text.replace("*", ""))
    return float(match is not None and (match[1] or match[2]) == answer.strip())


def score_number(text: str, answer: str) -> float:
    r"""Returns 1 if the text gives the answer's number. A text gives the last number in its last ``\boxed{}``, else the
    first number after its last "answer is", else its last number."""
    boxed, after_phrase = re.findall(r"\\boxed\{([^{}]*)\}", text), re.findall(r"(?i:answer is)(.*)", text)
    expected = (_NUMBER_PATTERN.findall(answer) or ["nan"])[-1]
    for parts, index in ((boxed[-1:], -1), (after_phrase[-1:], 0), ([text], -1)):
        if candidates := [number for part in parts for number in _NUMBER_PATTERN.findall(part)]:
            return float(_parse_number(candidates[index]) == _parse_number(expected))
    return 0.0


def score_numbers(text: str, answer: str) -> float:
    """Returns the share of the text's whole numbers that equal the first whole number of the answer."""
    candidates = re.findall(r"\d+", text)
    expected = next(iter(re.findall(r"\d+", answer)), None)
    return sum(number == expected for number in candidates) / len(candidates) if candidates else 0.0


def contains_answer(text: str, answer: str) -> float:
    """Returns 1 if the text contains the answer, in upper or lower case."""
    return float(answer.lower() in text.lower())


def class_match(text: str, answer: str, classes: Sequence[str]) -> float:
    """Returns 1 / the number of classes that the text names, if the answer is one of these classes; else 0."""
    # A class whose name is a part of the answer's name does not count.
    named = [name for name in classes if name in text and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def rouge_l() -> Callable[[str, str], float]:
    """Returns a function of a reference and a text that computes ROUGE-L (Lin 2004): F1 of the longest common
    subsequence of stemmed words.

    rouge-score counts only words of Latin letters and digits. Here equal texts score 1.0 in any script.

    Raises:
        CapabilityError: the package rouge-score is not installed.
    """
    with needs_extra("bench", "ROUGE needs the package rouge-score"):
        from rouge_score import rouge_scorer
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)

    def score(reference: str, text: str) -> float:
        return 1.0 if reference == text else float(scorer.score(reference, text)["rougeL"].fmeasure)

    return score


ROUGE, CLASSES, CONTAINS = "rouge_l", "classes", "found"
_METRIC_FUNCTIONS: dict[str, Callable[[str, str], float]] = {
    "f1": score_f1, "edit_similarity": edit_similarity, "similarity": similarity, "choice": score_choice,
    "number": score_number, "numbers": score_numbers, CONTAINS: contains_answer,
}  # fmt: skip
METRICS = (*_METRIC_FUNCTIONS, ROUGE, CLASSES)
"""Names of all metrics."""


def score_answer(sample: Sample, text: str) -> float | None:
    """Returns the best score of an answer over the references; for needles, the share of the references in the answer.
    Returns None if the sample has no references or no metric, or if ROUGE is not installed."""
    if not sample.answers or not sample.metric:
        return None
    if not text.startswith(sample.answer_prefix):
        return 0.0
    text = text.removeprefix(sample.answer_prefix)
    if sample.score_first_line:
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
    """Returns a note if some samples are not scored because ROUGE is not installed; otherwise an empty text."""
    names = dict.fromkeys(sample.dataset for sample in samples if sample.metric == ROUGE and sample.answers)
    if names:
        try:
            rouge_l()
        except CapabilityError as error:
            return f"No scores for {', '.join(names)}. {error}"
    return ""


def _parse_number(number: str) -> float:
    return float(number.replace(",", ""))
