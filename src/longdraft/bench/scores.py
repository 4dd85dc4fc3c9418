"""Scores of answers against references, in [0, 1], and which data set is scored how.

F1, edit similarity, classes and numbers are defined as in LongBench (Bai et al. 2024, its ``metrics.py``), choices as
in LongBench v2 and needles found as in RULER. ROUGE-L is that of the package rouge-score.
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

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# Few-shot tasks, whose models write on: only the first line is the answer (LongBench).
_FIRST_LINE = ("trec", "triviaqa", "samsum")


def _words(text: str) -> list[str]:
    """Lower case, without punctuation and articles (SQuAD's normalisation)."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(text: str, answer: str) -> float:
    """F1 of the words that both have, after SQuAD's normalisation."""
    own, wanted = _words(text), _words(answer)
    same = (Counter(own) & Counter(wanted)).total()
    return 2 * same / (len(own) + len(wanted)) if same else 0.0


def edit_similarity(text: str, answer: str) -> float:
    """Similarity of the first line of code in a text, as fuzzywuzzy's ``ratio`` without its C extension has it."""
    lines = text.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


def choice(text: str, answer: str) -> float:
    """1 if "The correct answer is (X)" names the answer's letter; brackets may be missing."""
    found = re.search(r"The correct answer is (?:\(([A-D])\)|([A-D]))", text.replace("*", ""))
    return float(found is not None and (found[1] or found[2]) == answer.strip())


def number(text: str, answer: str) -> float:
    r"""1 if the number in a text is the answer: the last in ``\boxed{}``, else behind "answer is", else the last."""
    boxed, said = re.findall(r"\\boxed\{([^{}]*)\}", text), re.findall(r"(?i:answer is)(.*)", text)
    for parts, place in ((boxed[-1:], -1), (said[-1:], 0), ([text], -1)):
        if own := [number for part in parts for number in _NUMBER.findall(part)]:
            return float(_value(own[place]) == _value((_NUMBER.findall(answer) or ["nan"])[-1]))
    return 0.0


def numbers(text: str, answer: str) -> float:
    """Share of the whole numbers in a text that are the answer's first one."""
    found = re.findall(r"\d+", text)
    wanted = re.findall(r"\d+", answer)[:1]
    return sum([x] == wanted for x in found) / len(found) if found else 0.0


def contains_answer(text: str, answer: str) -> float:
    """1 if the answer stands in a text, in lower or upper case."""
    return float(answer.lower() in text.lower())


def class_match(text: str, answer: str, classes: Sequence[str]) -> float:
    """1 / the classes that a text names, if the answer is one of them; names that are part of the answer's are none."""
    named = [c for c in classes if c in text and (c == answer or c not in answer)]
    return 1 / len(named) if answer in named else 0.0


def rouge_l() -> Callable[[str, str], float]:
    """ROUGE-L (Lin 2004) of (reference, text): F1 of their longest common subsequence of words, stemmed, in [0, 1].

    The package knows words of Latin letters and digits alone; equal texts score 1.0 in any script.

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


ROUGE, CLASSES, FOUND = "rouge_l", "classes", "found"
_PLAIN: dict[str, Callable[[str, str], float]] = {
    "f1": f1, "edit_similarity": edit_similarity, "choice": choice, "number": number, "numbers": numbers,
    FOUND: contains_answer,
}  # fmt: skip
METRICS = (*_PLAIN, ROUGE, CLASSES)
"""Names of all scores."""
_DATASETS = {
    "f1": ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
    ROUGE: ("gov_report", "qmsum", "multi_news", "samsum", "booksum"),
    "edit_similarity": ("lcc", "repobench-p"),
    "numbers": ("passage_count", "passage_retrieval_en"),
    CLASSES: ("trec",),
    "choice": ("longbench-v2",),
    "number": ("aime24",),
    FOUND: ("ruler", "niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt"),
}


def metric_of_dataset(name: str) -> str:
    """The score of a data set by its name; empty if it has none."""
    return next((score for score, names in _DATASETS.items() if name in names), "")


def score_answer(sample: Sample, text: str) -> float | None:
    """The score of an answer: that of the likeliest reference; for needles the share of references that are found.

    Returns:
        None: the sample has no references or no score, or ROUGE is not installed.
    """
    if not sample.answers or not sample.metric:
        return None
    if sample.dataset in _FIRST_LINE:
        text = text.lstrip("\n").split("\n")[0]
    if sample.metric == ROUGE:
        try:
            own = rouge_l()
        except CapabilityError:
            return None
        return max(own(answer, text) for answer in sample.answers)
    if sample.metric == CLASSES:
        return max(class_match(text, answer, sample.classes) for answer in sample.answers)
    each = [_PLAIN[sample.metric](text, answer) for answer in sample.answers]
    return sum(each) / len(each) if sample.metric == FOUND else max(each)


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
