"""The draft's own, smaller vocabulary.

A draft spends much of its time in the head, which is several times smaller if it has only the tokens that texts use. A
token outside the vocabulary is never proposed; the output stays exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from longdraft.model.stored import unpacked
from longdraft.native import Stored
from longdraft.training.documents import Document


def most_frequent(
    documents: Iterable[Document], vocab_size: int, count: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """The ``count`` most frequent learned tokens, in increasing order of id.

    Tokens before a document's ``start`` count a little, so that they break ties: a draft copies from them. The ids
    ``always`` are included in any case (end of sequence).
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for document in documents:
        tokens = torch.tensor(document.tokens)
        counts += torch.bincount(tokens[document.start :], minlength=vocab_size)
        counts += 0.05 * torch.bincount(tokens[: document.start], minlength=vocab_size)
    counts[list(always)] = float("inf")
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def rows_of(head: torch.Tensor | Stored, kept: torch.Tensor | None) -> torch.Tensor:
    """The rows of a head for the target ids ``kept`` (None: all), as floats."""
    if kept is not None:
        kept = kept.to(head.device)
        head = head.rows(kept) if isinstance(head, Stored) else head[kept]
    return unpacked(head) if isinstance(head, Stored) else head
