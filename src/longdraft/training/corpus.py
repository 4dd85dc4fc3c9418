"""The documents of a run: cut to length, split into learned and held out, in a fixed order."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from longdraft.errors import PromptError
from longdraft.training.documents import Document, Skipped

# Documents with this many first tokens in common are about the same passage.
SAME_PASSAGE = 48


@dataclass(frozen=True)
class Corpus:
    """The documents to train on and to measure on. No passage is in both."""

    learned: list[Document]
    held_out: list[Document]


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
    """Cuts, filters and splits documents.

    Plain text is cut into pieces of ``max_length`` tokens. A document with a prompt or with kept features is cut at its
    end, and left out if nothing learned would remain; with ``keep_end`` it is cut at its beginning.

    Args:
        skipped: counts the documents that are left out.
        max_length, min_length: tokens.
        shortest_learned: a document must have more learned tokens than this (the largest shift).
        held_out: share of the documents to measure on, chosen by how they begin.
        sample: share of the documents to use at all, chosen in the same way.

    Raises:
        PromptError: there is nothing to train on.
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
            # A document that is cut at its beginning is assigned by the passage it began with.
            source = piece if document.start == 1 and not document.kept else document
            if _share(source, "sample") >= sample:
                continue
            if len(piece.tokens) < min_length or len(piece.tokens) - piece.start <= shortest_learned:
                skipped.add("too short")
            else:
                kept.append((piece, _share(source, "held out") < held_out))
    # In order of tokens, so that documents that begin alike are neighbours and the target reads the beginning once.
    kept.sort(key=lambda pair: pair[0].tokens)
    learned = [d for d, is_held_out in kept if not is_held_out]
    measured = [d for d, is_held_out in kept if is_held_out]
    if not learned:
        raise PromptError(
            f"Nothing to train on: no usable document in the data (left out: {skipped}; held out: {len(measured)}). "
            "Rows need `text`, `messages` or `tokens`, and more of them than `sample` and `held_out` take away."
        )
    return Corpus(learned, measured)


def _share(document: Document, purpose: str) -> float:
    """A number in [0, 1) that depends on how the document begins, or on its passage's number if that is known."""
    # The number without the folder, which may be moved or split.
    passage = document.kept[1] if document.kept else document.tokens[:SAME_PASSAGE]
    hashed = hashlib.sha256(f"{purpose}{passage}".encode()).digest()
    return int.from_bytes(hashed[:6], "big") / 2**48


def digest(documents: Iterable[Document]) -> str:
    """A name for a list of documents that depends on their content; a resumed run must have the same."""
    hashed = hashlib.sha256()
    for document in documents:
        hashed.update(array("q", [len(document.tokens), document.start, *document.tokens]).tobytes())
    return hashed.hexdigest()[:16]


def offsets(documents: Sequence[Document], anchor_offset: int, context_length: int, seed: int) -> list[int]:
    """A random offset for each document, uniform in 0 .. ``anchor_offset``, or less to stay in the context."""
    rng = random.Random(f"{seed}/offsets")
    return [rng.randint(0, max(0, min(anchor_offset, context_length - len(d.tokens)))) for d in documents]
