"""Prompt lookup: what followed the last few tokens when they stood in the text before."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

from longdraft.drafters.base import Drafter
from longdraft.events import Event
from longdraft.sequence import Sequence
from longdraft.trees.budget import Budget
from longdraft.trees.builders import union
from longdraft.trees.tree import TokenTree


class NGramIndex:
    """Where each n-gram of a growing text ended, for n = min_n .. max_n.

    Adding a token and looking up cost O(max_n), whatever the length of the text.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n
        self.text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens. The n-grams that end at the text's very last token are found only from the next call on."""
        start = len(self.text)
        self.text.extend(tokens)
        # An n-gram is recorded with the position behind it, once a token stands there.
        for end in range(max(start, 1), len(self.text)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                self._ends.setdefault(tuple(self.text[end - n : end]), []).append(end)

    def continuations(self, length: int, count: int) -> list[tuple[int, list[int]]]:
        """Up to ``count`` different continuations of the text's end: the longest match first, then the latest.

        Returns:
            (matched n, up to ``length`` following tokens) for each.
        """
        found: list[tuple[int, list[int]]] = []
        starts: set[int] = set()
        for n in range(min(self.max_n, len(self.text)), self.min_n - 1, -1):
            for end in reversed(self._ends.get(tuple(self.text[-n:]), ())):
                if end in starts:
                    continue
                starts.add(end)
                path = self.text[end : end + length]
                # A match that runs into the text's end is periodic: what follows is its own beginning again.
                while path and len(path) < length:
                    path += path[: length - len(path)]
                if not any(path == known[: len(path)] for _, known in found):
                    found.append((n, path))
                    if len(found) == count:
                        return found
                if len(starts) >= 8 * count:  # many occurrences that all say the same
                    return found
        return found


class Record:
    """How often matches were right lately, by their length n: their first token, and each one after a right one.

    What came instead is seen whether or not a proposal was verified, so nothing has to be tried to be known.
    """

    # So many guesses are believed in before any was seen, and what each new one leaves of the others.
    PRIOR, KEEP = 2.0, 0.96
    # Sampled text repeats less of what stands before it.
    SAMPLED = 0.3

    def __init__(self) -> None:
        self.trust = 1.0
        self._right: dict[tuple[int, bool], float] = {}
        self._seen: dict[tuple[int, bool], float] = {}

    def chance(self, n: int, first: bool) -> float:
        """Of a token, the first of its match or a later one."""
        # A longer match is right more often.
        expected = self.trust * self.PRIOR * n / (n + 1)
        return (expected + self._right.get((n, first), 0.0)) / (self.PRIOR + self._seen.get((n, first), 0.0))

    def log_probs(self, n: int, length: int) -> list[float]:
        """Of the tokens of a match, each given those before."""
        return [log(self.chance(n, i == 0)) for i in range(length)]

    def saw(self, n: int, path: list[int], came: list[int]) -> None:
        """A proposal, and the tokens that came in its place."""
        for i, (token, real) in enumerate(zip(path, came, strict=False)):
            kind = (n, i == 0)
            self._right[kind] = self.KEEP * self._right.get(kind, 0.0) + (token == real)
            self._seen[kind] = self.KEEP * self._seen.get(kind, 0.0) + 1.0
            if token != real:
                break


@dataclass
class NGramDrafter(Drafter):
    """Drafts by n-gram lookup in prompt and output.

    The draft's length follows how drafts fared: it doubles when a whole draft was right, and falls back to what was
    right when it was not; a match of one token starts shorter than a long match. A draft that is never right
    costs a little verification; where nothing matches, nothing is drafted.

    Attributes:
        max_draft: longest continuation, in tokens.
        max_nodes: most drafted nodes of a tree (several continuations share a prefix).
        branches: how many different continuations to join into a tree; 1 gives a chain.
        min_n, max_n: match lengths, in tokens.
    """

    free = True

    max_draft: int = 15
    max_nodes: int = 15
    branches: int = 1
    min_n: int = 2
    max_n: int = 5
    _indexes: dict[int, NGramIndex] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    # For each sequence, the best match of the last round: n, where the text ended then, and the tokens proposed.
    _matches: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)
    _record: Record = field(default_factory=Record)

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"need 1 <= min_n <= max_n, got {self.min_n} and {self.max_n}")
        if self.max_draft < 1 or self.branches < 1 or self.max_nodes < 1:
            raise ValueError("max_draft, max_nodes and branches must be at least 1")

    def propose(self, sequences: list[Sequence], budget: Budget | None = None) -> list[TokenTree]:
        return [self._propose(s, budget) for s in sequences]

    def _propose(self, sequence: Sequence, budget: Budget | None) -> TokenTree:
        root = sequence.output[-1]
        # With a budget, how many of the nodes are verified is the planner's business.
        length = self._lengths[sequence.index] if budget is None else self.max_draft
        length = min(length, sequence.remaining - 1)
        if length < 1:
            return TokenTree((root,), (-1,))
        found = self._indexes[sequence.index].continuations(length, self.branches)
        if not found:
            return TokenTree((root,), (-1,))
        self._matches[sequence.index] = (found[0][0], len(sequence.prompt) + len(sequence.output), found[0][1])
        chances = [self._record.log_probs(n, len(path)) for n, path in found]
        return union(root, [path for _, path in found], self.max_nodes, chances)

    def observe(self, event: Event) -> None:
        """Takes in what was emitted, and how far the last match was right."""
        s = event.sequence
        if event.begins or event.taken_back:
            self._indexes[s.index] = NGramIndex(self.min_n, self.max_n)
            self._matches.pop(s.index, None)
        if event.begins:
            self._lengths[s.index] = self.max_draft // 2 + 1
            self._record.trust = 1.0 if s.greedy else Record.SAMPLED
        index = self._indexes[s.index]
        index.extend(s.tokens[len(index.text) :])
        if s.index in self._matches:
            n, end, path = self._matches.pop(s.index)
            self._record.saw(n, path, index.text[end:])
        if event.tree.drafted and not event.taken_back:
            length, full = self._lengths[s.index], event.accepted >= max(event.tree.depths)
            self._lengths[s.index] = min(2 * length, self.max_draft) if full else max(event.accepted + 1, 2)

    def release(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.index, None)
        self._lengths.pop(sequence.index, None)
        self._matches.pop(sequence.index, None)
