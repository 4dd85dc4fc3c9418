"""The documents of a run: cut to length, split into learned and held out, in a fixed order."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from longdraft.errors import PromptError
from longdraft.training.config import LmConfig, RunConfig
from longdraft.training.documents import Document, Skipped
from longdraft.training.tokens import Tokens

# Documents with this many first tokens in common are about the same passage.
SAME_PASSAGE = 48


class Documents(Sequence[Document]):
    """Some pieces of documents, in a fixed order. Their tokens stay where they are: a piece takes 18 bytes here.

    Attributes:
        lengths, starts: tokens of each piece, and its first learned token.
    """

    def __init__(self, sources: Sequence[Tokens]) -> None:
        self.sources = sources
        self.lengths, self.starts = array("i"), array("i")
        self._source, self._begins = array("H"), array("q")

    def add(self, source: int, begin: int, length: int, start: int) -> None:
        """Adds a piece: of which source, and which of its tokens from ``begin`` on."""
        self._source.append(source)
        self._begins.append(begin)
        self.lengths.append(length)
        self.starts.append(start)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Document:  # type: ignore[override]  # no slices
        source, begin = self.sources[self._source[i]], self._begins[i]
        return Document(source.slice(begin, begin + self.lengths[i]), self.starts[i])

    def ordered(self) -> Documents:
        """The same pieces in order of their tokens, whatever the order of the files; of shards, as they are."""
        if any(source.mapped for source in self.sources):
            return self

        def key(i: int) -> bytes:
            """Bytes sort as the tokens do, and take less memory than lists."""
            begin = self._begins[i]
            ids = self.sources[self._source[i]].ids[begin : begin + self.lengths[i]]
            return ids.numpy().astype(">u4").tobytes()

        found = Documents(self.sources)
        for i in sorted(range(len(self)), key=key):
            found.add(self._source[i], self._begins[i], self.lengths[i], self.starts[i])
        return found

    def digest(self) -> str:
        """A name for the pieces that depends on their content; a resumed run must have the same."""
        hashed = hashlib.sha256(repr([source.digest for source in self.sources]).encode())
        for column in (self._source, self._begins, self.lengths, self.starts):
            hashed.update(column.tobytes())
        return hashed.hexdigest()[:16]


class Corpus(NamedTuple):
    """The documents to train on and to measure on. No passage is in both."""

    learned: Documents
    held_out: Documents


def collect(
    sources: Sequence[Tokens], skipped: Skipped, config: RunConfig, shortest_learned: int, longest: int = 1 << 30
) -> Corpus:
    """Cuts, filters and splits documents as the settings say.

    Plain text is cut into pieces of ``max_length`` tokens. A document with a prompt is cut at its end, and left out if
    nothing learned would remain; for a language model it is cut at its beginning, and with ``learn_prompts`` one that
    was not cut is learned from its second token on. The pieces of a text are learned, or held out, together.

    Args:
        skipped: counts the documents that are left out.
        shortest_learned: a document must have more learned tokens than this (the largest shift).
        longest: tokens that the target reads at most.

    Raises:
        PromptError: there is nothing to train on.
    """
    max_length, keep_end = min(config.max_length, longest), isinstance(config, LmConfig)
    learn_prompts = isinstance(config, LmConfig) and config.learn_prompts
    learned, measured = Documents(sources), Documents(sources)
    for at, source in enumerate(sources):
        end = 0
        for start, at_end in zip(source.starts.tolist(), source.ends.tolist(), strict=True):
            first, end = end, at_end
            length = end - first
            # Where each piece begins among the source's tokens, how long it is, and its start.
            if start == 1:
                pieces = [(cut, min(max_length, end - cut), 1) for cut in range(first, end - 1, max_length)]
            elif keep_end:
                cut = max(0, length - max_length)
                pieces = [(first + cut, length - cut, max(1, start - cut))]
            elif start < max_length:
                pieces = [(first, min(length, max_length), start)]
            else:
                skipped["with a prompt longer than max_length"] += 1
                continue
            # A document is assigned by how it begins, with all its pieces.
            passage = source.slice(first, min(end, first + SAME_PASSAGE))
            side = measured if _share(passage, "held out") < config.held_out else learned
            for begin, length, learned_from in pieces:
                sampled = source.slice(begin, min(begin + length, begin + SAME_PASSAGE)) if start == 1 else passage
                if config.sample < 1 and _share(sampled, "sample") >= config.sample:
                    continue
                if length < config.min_length or length - learned_from <= shortest_learned:
                    skipped["too short"] += 1
                else:
                    whole = learn_prompts and side is learned and length < max_length
                    side.add(at, begin, length, 1 if whole else learned_from)
    if not len(learned):
        raise PromptError(
            f"Nothing to train on: no usable document in the data (left out: {skipped}; held out: {len(measured)}). "
            "Rows need `text`, `messages` or `tokens`, and more of them than `sample` and `held_out` take away."
        )
    return Corpus(learned.ordered(), measured.ordered())


def _share(passage: list[int], purpose: str) -> float:
    """A number in [0, 1) that depends on how a document begins."""
    hashed = hashlib.sha256(f"{purpose}{passage}".encode()).digest()
    return int.from_bytes(hashed[:6], "big") / 2**48
