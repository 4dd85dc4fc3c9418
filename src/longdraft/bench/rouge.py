"""ROUGE-L, the field's measure of how much of one text is in another (Lin 2004)."""

from __future__ import annotations

from collections.abc import Callable

from longdraft.errors import CapabilityError


def rouge_l() -> Callable[[str, str], float]:
    """Scores (reference, text): F1 of their longest common subsequence of words, stemmed, in [0, 1].

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
