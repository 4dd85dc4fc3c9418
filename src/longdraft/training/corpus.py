"""From rows to the documents of a run: cut, split into learned and held out, in a fixed order."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from longdraft.errors import PromptError
from longdraft.training.documents import Document, Skipped

# Documents that share this many first tokens are the same passage with other instructions.
SAME_PASSAGE = 48


@dataclass(frozen=True)
class Corpus:
    """Attributes:
    learned, held_out: documents to train on and to measure on; no passage is in both.
    skipped: rows and documents that were left out.
    """

    learned: list[Document]
    held_out: list[Document]
    skipped: Skipped


def collect(
    documents: Iterable[Document],
    skipped: Skipped,
    *,
    max_length: int,
    min_length: int,
    shortest_learned: int,
    held_out: float,
    sample: float = 1.0,
    keep_end: bool = False,
) -> Corpus:
    """Cuts, filters and splits.

    Plain text is cut into pieces of ``max_length`` tokens. A document with a prompt, or with kept features, is cut at
    its end, and left out where nothing learned would be left; with ``keep_end`` it is cut at its beginning.

    Args:
        max_length, min_length: tokens.
        shortest_learned: a document must have more learned tokens than this (the largest shift).
        held_out: share of the documents to measure on, chosen by how they begin.
        sample: share of the documents to take at all, chosen likewise.

    Raises:
        PromptError: when nothing is left to train on.
    """
    kept: list[tuple[Document, bool]] = []
    for document in documents:
        pieces = [document]
        if document.start == 1 and not document.kept:
            cuts = range(0, len(document.tokens), max_length)
            pieces = [Document(t) for at in cuts if len(t := document.tokens[at : at + max_length]) > 1]
        elif len(document.tokens) > max_length and keep_end:
            cut = len(document.tokens) - max_length
            pieces = [Document(document.tokens[cut:], max(1, document.start - cut), document.kept, cut)]
        elif len(document.tokens) > max_length:
            pieces = [replace(document, tokens=document.tokens[:max_length])] if document.start < max_length else []
            if not pieces:
                skipped.add("with a prompt longer than max_length")
        for piece in pieces:
            # What is cut off its beginning still tells which passage it is about.
            whole = piece if document.start == 1 and not document.kept else document
            if _share(whole, "sample") >= sample:
                continue
            if len(piece.tokens) < min_length or len(piece.tokens) - piece.start <= shortest_learned:
                skipped.add("too short")
            else:
                kept.append((piece, _share(whole, "held out") < held_out))
    # In order of their tokens: those that begin alike lie together, and the target reads the beginning once.
    kept.sort(key=lambda pair: pair[0].tokens)
    learned = [d for d, is_held_out in kept if not is_held_out]
    measured = [d for d, is_held_out in kept if is_held_out]
    if not learned:
        raise PromptError(
            f"Nothing to train on: no usable document in the data (left out: {skipped}; held out: {len(measured)}). "
            "Rows need `text`, `messages` or `tokens`, and more of them than `sample` and `held_out` take away."
        )
    return Corpus(learned, measured, skipped)


def _share(document: Document, purpose: str) -> float:
    """A number in [0, 1) that depends on how the document begins, or on its passage's number where that is known."""
    # Its number alone: the folder may be moved, or split into several.
    passage = document.kept[1] if document.kept else document.tokens[:SAME_PASSAGE]
    found = hashlib.sha256(f"{purpose}{passage}".encode()).digest()
    return int.from_bytes(found[:6], "big") / 2**48


def digest(documents: Iterable[Document]) -> str:
    """Names a list of documents by their content: a resumed run must have the same."""
    found = hashlib.sha256()
    for document in documents:
        found.update(array("q", [len(document.tokens), document.start, *document.tokens]).tobytes())
    return found.hexdigest()[:16]


def offsets(documents: Sequence[Document], anchor_offset: int, context_length: int, seed: int) -> list[int]:
    """One random anchor-offset a document, uniform in 0 .. ``anchor_offset``, less where it would leave the context."""
    rng = random.Random(f"{seed}/offsets")
    return [rng.randint(0, max(0, min(anchor_offset, context_length - len(d.tokens)))) for d in documents]
