"""Suffix lookup: proposes what followed earlier occurrences of the sequence's last tokens, as a tree.

Prompt lookup (Saxena 2023) takes the latest match. SuffixDecoding (arXiv:2411.04975) counts what followed matches in
the output, the prompt and earlier requests, and grows a tree by these counts. This drafter also grows a tree by counts,
but interpolates the counts of all match lengths.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import log, log2
from typing import Any

from longdraft.drafters.shared.suffix_matches import SEPARATOR, Match, OccurrenceIndex, RequestHistory, SuffixMatches
from longdraft.engine.drafter import Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.options import Options, option, parse
from longdraft.planning.acceptance import OnlinePlattScaler
from longdraft.trees.tree import NodeLimit, TokenTree

# {is greedy: pseudo-count of unseen continuations}. Greedy output repeats its context more than sampled output does.
UNSEEN_PSEUDO_COUNT = {True: 1.0, False: 3.0}
# Minimum probability of a path (SuffixDecoding: 0.1). With a planner the minimum is lower, as the planner prunes trees.
MIN_PATH_PROBABILITY, MIN_PATH_PROBABILITY_PLANNED = 0.2, 0.01


def mixed_match_probabilities(matches: SequenceOf[tuple[int, int]], pseudo_count: float) -> dict[int, float]:
    """Returns the probability of each next token, interpolated from matches of all lengths.

    The estimate p starts at zeros, and is updated once for each match length, from the shortest to the longest::

        p <- f + (p - f) ((1 + shorter) / (1 + length)) ^ log2(1 + N / pseudo_count)

    N is the number of matches of at least this length, f the frequency of each next token among these N matches, and
    ``shorter`` the next smaller length. For example, with a pseudo-count of 1, one match of n tokens gives n / (n + 1).
    A long match changes p more than several short matches do.

    Args:
        matches: (length, next token), longest first.
        pseudo_count: weight of unseen continuations, as a number of matches.
    """
    counts: dict[int, int] = {}
    probabilities: dict[int, float] = {}
    remaining = 1.0  # computed from the longest matches on: the weight that these leave to shorter ones
    for n, (length, token) in enumerate(matches, 1):
        counts[token] = counts.get(token, 0) + 1
        shorter = matches[n][0] if n < len(matches) else 0
        if shorter < length:  # the first n matches are all matches of at least ``length`` tokens
            rest = remaining * ((1 + shorter) / (1 + length)) ** log2(1 + n / pseudo_count)
            for next_token, token_count in counts.items():
                probabilities[next_token] = probabilities.get(next_token, 0.0) + (remaining - rest) * token_count / n
            remaining = rest
    return probabilities


class _Continuation:
    """A node of the tree: a continuation of the sequence, and the matches that contain this continuation.

    Args:
        matches: matches that continue with ``path``, longest first.
        path: the continuation's tokens. A match that runs to the sequence's end takes the next tokens from the path.
        pseudo_count: see :func:`mixed_match_probabilities`.

    Attributes:
        probabilities: {next token: probability before calibration}.
        children: {token: child node}, for the tokens that were followed.
    """

    def __init__(self, matches: SequenceOf[Match], path: list[int], pseudo_count: float) -> None:
        self.path, self._pseudo_count = path, pseudo_count
        self._matches = []  # (next token, length, tokens, index of the next token): a Match and its next token
        for length, tokens, i in matches:
            next_token = tokens[i] if i < len(tokens) else path[i - len(tokens)]
            if next_token != SEPARATOR:
                self._matches.append((next_token, length, tokens, i))
        next_tokens = [(length, token) for token, length, _, _ in self._matches]
        self.probabilities = mixed_match_probabilities(next_tokens, pseudo_count)
        self.children: dict[int, _Continuation] = {}

    def follow(self, token: int) -> _Continuation:
        """Makes, stores and returns the child node of a token."""
        matches = [(length + 1, tokens, i + 1) for t, length, tokens, i in self._matches if t == token]
        self.children[token] = _Continuation(matches, [*self.path, token], self._pseudo_count)
        return self.children[token]


class _SequenceMatches:
    """Matches of the end of one sequence: in the sequence itself, in earlier requests, and in a predicted output.

    Attributes:
        scaler: calibrates this sequence alone, so that drafts do not depend on the rest of the batch.
        last_root: root of the last tree; None if none was proposed since the last round.
    """

    def __init__(self, prompt: list[int], max_length: int, other_indices: SequenceOf[OccurrenceIndex]) -> None:
        self._index = OccurrenceIndex()
        self._all_matches = [SuffixMatches(index, max_length) for index in (self._index, *other_indices)]
        self.scaler = OnlinePlattScaler()
        self.last_root: _Continuation | None = None
        # Matches are at most ``max_length`` long, so the tokens before the prompt's end are indexed without matching.
        for token in prompt[:-max_length]:
            self._index.append(token)

    def advance(self, s: Sequence) -> list[int]:
        """Extends the matches by the sequence's new tokens; returns these tokens."""
        num_read, prompt_len = len(self._index.token_ids), len(s.prompt)
        new_tokens = s.output[num_read - prompt_len :] if num_read >= prompt_len else s.tokens[num_read:]
        for token in new_tokens:
            for matches in self._all_matches:
                matches.advance(token)
            self._index.append(token)
        return new_tokens

    def make_root(self, min_length: int, pseudo_count: float) -> _Continuation:
        """Makes the root of the next tree, with the matches of at least ``min_length`` tokens."""
        selected = [match for matches in self._all_matches for match in matches.select(min_length)]
        # Longest first; of equal lengths, the sequence's own matches first, then the latest.
        selected.sort(key=lambda match: (-match[0], match[1] is not self._index.token_ids, -match[2]))
        self.last_root = _Continuation(selected, [], pseudo_count)
        return self.last_root


@dataclass(frozen=True)
class SuffixOptions(Options):
    """Options of a lookup: the lengths of matches, and the shape of trees."""

    max_draft: int = option(15, min=1, help="longest continuation, in tokens")
    max_nodes: int = option(15, min=1, help="maximum number of draft nodes")
    branches: int = option(15, min=1, help="maximum number of leaves; 1: a chain")
    min_n: int = option(1, min=1, help="minimum length of a match, in tokens")
    max_n: int = option(64, min=1, help="maximum length of a match, in tokens")
    earlier: Any = option(0, help="also look up the latest N tokens of earlier requests")


class SuffixDrafter(Drafter):
    """Drafts what followed earlier occurrences of the sequence's end in prompt and output, and in earlier requests.
    Options: :class:`SuffixOptions`. ``earlier`` may also be a :class:`RequestHistory` that several drafters share."""

    free = True
    options = (SuffixOptions,)

    def __init__(self, **options: Any) -> None:
        (config,) = parse("prompt-lookup", options, SuffixOptions)
        if config.min_n > config.max_n:
            raise ValueError(f"min_n must be at most max_n, got {config.min_n} and {config.max_n}")
        self.max_draft, self.max_nodes, self.branches = config.max_draft, config.max_nodes, config.branches
        self.min_n, self.max_n = config.min_n, config.max_n
        self._has_user_branches = "branches" in options
        earlier = config.earlier
        self.earlier = earlier if isinstance(earlier, RequestHistory) else RequestHistory(earlier) if earlier else None
        self._sequence_matches: dict[int, _SequenceMatches] = {}

    def use_chains(self) -> bool:
        if not self._has_user_branches:
            self.branches = 1
        return self.branches == 1

    def _history(self, s: Sequence) -> RequestHistory | None:
        return None if self.earlier is None else self.earlier.for_tenant(s.tenant)

    def _other_indices(self, s: Sequence) -> list[OccurrenceIndex]:
        """Returns the indices of earlier requests and of the predicted output, if there are any."""
        history = self._history(s)
        indices = [] if history is None else [history.index]
        if s.predicted:
            indices.append(OccurrenceIndex())
            for token in (*s.predicted, SEPARATOR):
                indices[-1].append(token)
        return indices

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        min_probability = MIN_PATH_PROBABILITY if limit is None else MIN_PATH_PROBABILITY_PLANNED
        return [self._propose(s, min_probability) for s in sequences]

    def _propose(self, s: Sequence, min_probability: float) -> TokenTree:
        """Makes a tree. Adds the most probable node until the tree is full, or the node's path is too improbable."""
        tokens, parents, logprobs = [s.output[-1]], [-1], [0.0]
        matches, next_index = self._sequence_matches[s.index], count()
        max_depth = min(self.max_draft, s.max_draft_depth)
        # (minus the path log-probability, index of insertion, parent, token, log-probability, parent's continuation)
        heap: list[tuple[float, int, int, int, float, _Continuation]] = []

        def push_children(node: int, path_logprob: float, continuation: _Continuation) -> None:
            for token, p in continuation.probabilities.items():
                logprob = log(matches.scaler.calibrate(p))
                heappush(heap, (-path_logprob - logprob, next(next_index), node, token, logprob, continuation))

        push_children(0, 0.0, matches.make_root(self.min_n, UNSEEN_PSEUDO_COUNT[s.greedy]))
        inner_nodes: set[int] = set()
        num_leaves = 1
        while heap and max_depth > 0 and len(tokens) <= self.max_nodes and heap[0][0] <= -log(min_probability):
            minus_path_logprob, _, parent, token, logprob, continuation = heappop(heap)
            if parent in inner_nodes:  # a second child of a node adds a leaf
                if num_leaves == self.branches:
                    continue
                num_leaves += 1
            inner_nodes.add(parent)
            tokens.append(token)
            parents.append(parent)
            logprobs.append(logprob)
            if len(continuation.path) + 1 < max_depth:
                push_children(len(tokens) - 1, -minus_path_logprob, continuation.follow(token))
        lookup_nodes = frozenset(range(1, len(tokens)))
        return TokenTree(tuple(tokens), tuple(parents), tuple(logprobs), lookup_nodes=lookup_nodes)

    def observe(self, round_result: RoundResult) -> None:
        """Extends the matches by the emitted tokens, and calibrates by the last proposal."""
        s = round_result.sequence
        if round_result.is_prefill:
            self._sequence_matches[s.index] = _SequenceMatches(s.prompt, self.max_n, self._other_indices(s))
        matches = self._sequence_matches[s.index]
        new_tokens, continuation = matches.advance(s), matches.last_root
        matches.last_root = None
        for token in new_tokens:
            if continuation is None:
                break
            for proposed_token, p in continuation.probabilities.items():
                matches.scaler.observe(p, proposed_token == token)
            continuation = continuation.children.get(token)

    def release(self, sequence: Sequence) -> None:
        """Adds the output to the history, and before it as many prompt tokens as the longest match can have."""
        matches = self._sequence_matches.pop(sequence.index, None)
        if matches is not None and (history := self._history(sequence)) is not None:
            history.add(sequence.prompt[-self.max_n :] + sequence.output)
