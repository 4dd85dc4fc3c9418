"""Token reuse: what followed the last token most often in the output so far (TokenSwift, Wu et al. 2025).

A long output repeats itself. Each phrase of n tokens that was emitted is counted, and the k that began most often with
the token that came last are proposed together, the most frequent first, the latest first among equals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from math import log

from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.trees.builders import union
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree
from longdraft.views.view import check_sizes

# TokenSwift: phrases of four tokens, twenty of them.
PHRASE, PHRASES = 4, 20


class Phrases:
    """The phrases of a growing text, counted. Adding a token and looking up take the same time however long it is.

    Args:
        n: tokens of a phrase. k: how many that begin with the same token are kept in order.
    """

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.text: list[int] = []
        # How often each phrase stood in the text, and each beginning of one.
        self._counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
        # By first token, the best k, in order. One that falls out comes back by being seen again, and only so.
        self._best: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)

    def extend(self, tokens: SequenceOf[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if len(self.text) < self.n:
                continue
            phrase = tuple(self.text[-self.n :])
            for length in range(1, self.n + 1):
                self._counts[phrase[:length]] += 1
            self._rank(phrase)

    def _rank(self, phrase: tuple[int, ...]) -> None:
        """Puts the phrase that was just seen before those that were seen no more often."""
        best = self._best[phrase[0]]
        if phrase in best:
            best.remove(phrase)
        count = self._counts[phrase]
        place = next((i for i, other in enumerate(best) if self._counts[other] <= count), len(best))
        best.insert(place, phrase)
        del best[self.k :]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The most frequent continuations of a token, n - 1 tokens each, the best first."""
        return [phrase[1:] for phrase in self._best.get(token, ())]

    def log_probs(self, token: int, continuation: SequenceOf[int]) -> list[float]:
        """Of its tokens, each given those before: how often it came there, with one time more for something new."""
        phrase = (token, *continuation)
        seen = [self._counts[phrase[:length]] for length in range(1, len(phrase) + 1)]
        return [log(after / (before + 1)) for before, after in pairwise(seen)]


class ReuseDrafter(Drafter):
    """Proposes the phrases of the output that began most often with its last token.

    Args:
        n: tokens of a phrase, the last token of the text among them. k: phrases at most.
    """

    free = True

    def __init__(self, n: int = PHRASE, k: int = PHRASES) -> None:
        check_sizes(2, reuse_n=n)
        check_sizes(1, reuse_k=k)
        self.n, self.k = n, k
        self.max_nodes = k * (n - 1)
        self._phrases: dict[int, Phrases] = {}

    def observe(self, event: Event) -> None:
        if event.begins or event.taken_back:
            self._phrases[event.sequence.index] = Phrases(self.n, self.k)

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        return [self._propose(s) for s in sequences]

    def _propose(self, sequence: Sequence) -> TokenTree:
        phrases, root = self._phrases[sequence.index], sequence.output[-1]
        phrases.extend(sequence.output[len(phrases.text) :])
        found = phrases.after(root)
        return union(root, found, log_probs=[phrases.log_probs(root, path) for path in found])

    def release(self, sequence: Sequence) -> None:
        self._phrases.pop(sequence.index, None)
