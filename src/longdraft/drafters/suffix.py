"""Suffix lookup: what followed the longest matches of the text's end, as a tree with probabilities.

Prompt lookup (Saxena 2023) takes the latest match; SuffixDecoding (arXiv:2411.04975) counts what followed, over the
output, the prompt and earlier requests, and grows a tree by it. So does this, with counts of all match lengths mixed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import exp, log, log2
from typing import Any

from longdraft.drafters.shared.suffix_matches import SEPARATOR, OccurrenceIndex, RequestHistory, SuffixMatches
from longdraft.engine.drafter import Drafter
from longdraft.engine.method import Method, register
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.options import Options, option, parse
from longdraft.trees.tree import NodeLimit, TokenTree

# Matches that the unknown counts as: greedy text repeats more of what stands before it than sampled text.
UNSEEN_PSEUDO_COUNT = {True: 1.0, False: 3.0}
# The least probability of a path where nothing plans (SuffixDecoding: 0.1), and where a planner knows what a node must
# promise: there it bounds the work.
MIN_PATH_PROBABILITY, MIN_PATH_PROBABILITY_PLANNED = 0.2, 0.01


def mixed_match_probabilities(matches: SequenceOf[tuple[int, int]], pseudo_count: float) -> dict[int, float]:
    """Probabilities of the next token, from what followed earlier matches.

    From shorter to longer matches, each length's shares f pull the estimate p of the shorter ones towards them::

        p <- f + (p - f) ((1 + shorter) / (1 + length)) ^ log2(1 + N / unknown)

    N: how many matches there are of at least that length. A single match of n tokens is right with n / (n + 1), where
    one counts as the unknown does; many that agree are believed sooner, and longer matches before frequent ones.

    Args:
        matches: (length, the token that followed), longest first.
        unknown: matches that a token which never followed counts as.
    """
    counts: dict[int, int] = {}
    chances: dict[int, float] = {}
    left = 1.0  # what longer matches leave to shorter ones
    for i, (length, token) in enumerate(matches, 1):
        counts[token] = counts.get(token, 0) + 1
        shorter = matches[i][0] if i < len(matches) else 0
        if shorter < length:
            kept = left * ((1 + shorter) / (1 + length)) ** log2(1 + i / pseudo_count)
            for known, times in counts.items():
                chances[known] = chances.get(known, 0.0) + (left - kept) * times / i
            left = kept
    return chances


class OnlinePlattScaler:
    """Corrects such probabilities by how right they were lately: a line in log-odds, learned online.

    It learns whether or not a proposal was verified, since the next token is seen in any case.
    """

    # How fast the line follows: its shift, and a tenth of that its slope. Both are as good at half and at twice this.
    RATE = 0.05

    def __init__(self) -> None:
        self.shift, self.slope = 0.0, 1.0

    def calibrate(self, said: float) -> float:
        return 1.0 / (1.0 + exp(-self.shift - self.slope * _log_odds(said)))

    def observe(self, said: float, right: bool) -> None:
        """Learns whether a proposed token was right."""
        step = self.RATE * (right - self.calibrate(said))
        self.shift += step
        self.slope += 0.1 * step * _log_odds(said)


def _log_odds(p: float) -> float:
    p = min(max(p, 1e-4), 1 - 1e-4)
    return log(p / (1 - p))


class _Node:
    """A continuation of the text: the matches that agree with it, and the tokens that followed them.

    Args:
        matches: length, the tokens that the match lies in, and the place of the next one there; longest first.
        path: tokens from the text's end on. A match that runs into the text's end is periodic, and goes on in them.

    Attributes:
        said: probability of each next token, before it is corrected.
    """

    def __init__(self, matches: SequenceOf[tuple[int, list[int], int]], path: list[int], unknown: float) -> None:
        self.path = path
        self._unknown = unknown
        self._matches = [
            (token, *match)
            for match in matches
            if (token := match[1][match[2]] if match[2] < len(match[1]) else path[match[2] - len(match[1])])
            != SEPARATOR
        ]
        self.said = mixed_match_probabilities([(length, token) for token, length, _, _ in self._matches], unknown)
        self.children: dict[int, _Node] = {}

    def follow(self, token: int) -> _Node:
        """The child node for a token."""
        going = [(length + 1, tokens, at + 1) for known, length, tokens, at in self._matches if known == token]
        self.children[token] = _Node(going, [*self.path, token], self._unknown)
        return self.children[token]


class _Text:
    """Matches of a sequence's end: in its own text, in earlier requests, and in its predicted output.

    Attributes:
        trust: its own, so that a text is drafted alike whatever is decoded beside it.
        proposed: the root of the last round's paths.
    """

    def __init__(self, prompt: list[int], longest: int, others: SequenceOf[OccurrenceIndex]) -> None:
        self._own = OccurrenceIndex()
        self._matches = [SuffixMatches(store, longest) for store in (self._own, *others)]
        self.trust = OnlinePlattScaler()
        self.proposed: _Node | None = None
        # Matches begin at the end: nobody asks for those of a prompt's inside.
        for token in prompt[:-longest]:
            self._own.append(token)

    def read(self, s: Sequence) -> list[int]:
        """Reads the text's new tokens, and returns them."""
        read, prompt = len(self._own.token_ids), len(s.prompt)
        new = s.output[read - prompt :] if read >= prompt else s.tokens[read:]
        for token in new:
            for matches in self._matches:
                matches.advance(token)
            self._own.append(token)
        return new

    def root(self, least: int, unknown: float) -> _Node:
        found = [match for matches in self._matches for match in matches.select(least)]
        # Of equally long ones the own text's before earlier ones, and the latest of each first.
        found.sort(key=lambda match: (-match[0], match[1] is not self._own.token_ids, -match[2]))
        self.proposed = _Node(found, [], unknown)
        return self.proposed


@dataclass(frozen=True)
class SuffixOptions(Options):
    """Lookups, and the trees that they propose."""

    max_draft: int = option(15, min=1, help="longest continuation, in tokens")
    max_nodes: int = option(15, min=1, help="most drafted nodes of a tree")
    branches: int = option(15, min=1, help="most leaves of a tree; 1 gives a chain")
    min_n: int = option(1, min=1, help="shortest match that counts, in tokens")
    max_n: int = option(64, min=1, help="longest match that counts, in tokens")
    earlier: Any = option(0, help="look the latest so many tokens of earlier requests up too")


class SuffixDrafter(Drafter):
    """Drafts what followed matches of the text's end, in prompt and output, and if asked in earlier requests.

    Args:
        options: of :class:`SuffixOptions`. ``earlier`` may also be an :class:`Earlier`, which several drafters share.
    """

    free = True
    options = (SuffixOptions,)

    def __init__(self, **options: Any) -> None:
        (own,) = parse("prompt-lookup", options, SuffixOptions)
        if own.min_n > own.max_n:
            raise ValueError(f"min_n must be at most max_n, got {own.min_n} and {own.max_n}")
        self.max_draft, self.max_nodes, self.branches = own.max_draft, own.max_nodes, own.branches
        self.min_n, self.max_n = own.min_n, own.max_n
        self._shaped = "branches" in options
        given = own.earlier
        self.earlier = given if isinstance(given, RequestHistory) else RequestHistory(given) if given else None
        self._texts: dict[int, _Text] = {}

    def use_chains(self) -> bool:
        if not self._shaped:
            self.branches = 1
        return self.branches == 1

    def _store(self, s: Sequence) -> RequestHistory | None:
        return None if self.earlier is None else self.earlier.for_tenant(s.tenant)

    def _others(self, s: Sequence) -> list[OccurrenceIndex]:
        earlier = self._store(s)
        found = [] if earlier is None else [earlier.index]
        if s.predicted:
            found.append(OccurrenceIndex())
            for token in (*s.predicted, SEPARATOR):
                found[-1].append(token)
        return found

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        return [
            self._propose(s, MIN_PATH_PROBABILITY if limit is None else MIN_PATH_PROBABILITY_PLANNED) for s in sequences
        ]

    def _propose(self, s: Sequence, least: float) -> TokenTree:
        """Adds nodes, the likeliest first, until the tree is full or no node is likely enough."""
        tokens, parents, logprobs = [s.output[-1]], [-1], [0.0]
        text, depth, order = self._texts[s.index], min(self.max_draft, s.remaining - 1), count()
        heap: list[tuple[float, int, int, int, float, _Node]] = []

        def offer(place: int, score: float, node: _Node) -> None:
            for token, said in node.said.items():
                chance = log(text.trust.calibrate(said))
                heappush(heap, (-score - chance, next(order), place, token, chance, node))

        offer(0, 0.0, text.root(self.min_n, UNSEEN_PSEUDO_COUNT[s.greedy]))
        inner: set[int] = set()
        leaves = 1
        while heap and depth > 0 and len(tokens) <= self.max_nodes and heap[0][0] <= -log(least):
            score, _, parent, token, chance, node = heappop(heap)
            if parent in inner:
                if leaves == self.branches:
                    continue
                leaves += 1
            inner.add(parent)
            tokens.append(token)
            parents.append(parent)
            logprobs.append(chance)
            if len(node.path) + 1 < depth:
                offer(len(tokens) - 1, -score, node.follow(token))
        looked_up = frozenset(range(1, len(tokens)))
        return TokenTree(tuple(tokens), tuple(parents), tuple(logprobs), lookup_nodes=looked_up)

    def observe(self, round_result: RoundResult) -> None:
        """Reads the emitted tokens, and learns how right the last round's probabilities were."""
        s = round_result.sequence
        if round_result.is_prefill:
            self._texts[s.index] = _Text(s.prompt, self.max_n, self._others(s))
        text = self._texts[s.index]
        came, node = text.read(s), text.proposed
        text.proposed = None
        for token in came:
            if node is None:
                break
            for known, said in node.said.items():
                text.trust.observe(said, known == token)
            node = node.children.get(token)

    def release(self, sequence: Sequence) -> None:
        """Adds the text to the earlier ones: its output, preceded by enough of the prompt for the longest match."""
        known = self._texts.pop(sequence.index, None)
        if known is not None and (store := self._store(sequence)) is not None:
            store.add(sequence.prompt[-self.max_n :] + sequence.output)


register(
    Method(
        "prompt-lookup",
        SuffixDrafter,
        "drafts what followed the same words before, in prompt or output",
        "Saxena 2023, prompt lookup decoding; Yang et al. 2023, arXiv:2304.04487",
    )
)
register(
    Method(
        "suffix",
        SuffixDrafter,
        "the same drafter by the name of its paper: earlier=N looks N tokens of earlier requests up too",
        "Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975",
    )
)
