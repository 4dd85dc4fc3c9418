"""Finds earlier occurrences of the end of a token sequence: in itself, or in a bounded history of other sequences.

Each token has a link to its previous occurrence, so the occurrences of a token are a linked list. A new token extends
the matches that continue with this token, ends the others, and starts matches at its latest occurrences. The cost of a
token does not depend on the length of the sequence or of the matches, and the oldest tokens can be dropped.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from longdraft.options import whole_number

# A new token starts matches at this number of its latest occurrences. At most twice as many matches are kept at a time.
MAX_MATCHES = 16
# A match of at least this length survives one differing token, because the text after a changed word is often the same.
MIN_RESUME_LENGTH = 4
# Stands in place of a token at the end of each sequence of a history, so that no match crosses it.
SEPARATOR = -1
Match = tuple[int, list[int], int]  # (length, the searched tokens, index there of the token after the match)


class OccurrenceIndex:
    """Tokens with links to earlier occurrences, some twenty bytes a token.

    A position is the number of tokens up to the end of a match, dropped tokens included.

    Attributes:
        token_ids: the tokens that are not dropped.
        num_dropped: number of tokens that were dropped from the start.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_dropped = 0
        self._previous_positions = array("q")  # for each token, the position of its previous occurrence; 0: none
        self._last_positions: dict[int, int] = {}  # {token: position of its last occurrence}

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self._previous_positions.append(self._last_positions.get(token, 0))
        self._last_positions[token] = self.num_dropped + len(self.token_ids)

    def drop_first(self, count: int) -> None:
        """Drops the first ``count`` tokens."""
        for position, token in enumerate(self.token_ids[:count], self.num_dropped + 1):
            if self._last_positions[token] == position:
                del self._last_positions[token]
        del self.token_ids[:count], self._previous_positions[:count]
        self.num_dropped += count

    def occurrences(self, token: int, max_count: int) -> list[int]:
        """Returns the positions after the occurrences of a token, the latest first."""
        positions: list[int] = []
        position = self._last_positions.get(token, 0)
        while position > self.num_dropped and len(positions) < max_count:
            positions.append(position)
            position = self._previous_positions[position - self.num_dropped - 1]
        return positions


class RequestHistory:
    """The tokens of the latest requests, from which drafters propose continuations. Several drafters may share it.

    Args:
        max_tokens: capacity. The oldest request is dropped first. A longer request is cut to its end.

    Raises:
        RequestError: ``max_tokens`` is not a whole number of at least 2.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = whole_number("earlier (0: no history)", max_tokens, 2)
        self.index = OccurrenceIndex()
        self._request_lengths: deque[int] = deque()  # with the separators
        self._tenants: dict[str, RequestHistory] = {}

    def for_tenant(self, tenant: str | None) -> RequestHistory:
        """Returns the history of one tenant's requests, which other tenants don't read. None: requests without one."""
        return self if tenant is None else self._tenants.setdefault(tenant, RequestHistory(self.max_tokens))

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds a request's tokens, and drops the oldest requests if there is no space."""
        added = [*token_ids[-(self.max_tokens - 1) :], SEPARATOR]
        while len(self.index.token_ids) + len(added) > self.max_tokens:
            self.index.drop_first(self._request_lengths.popleft())
        self._request_lengths.append(len(added))
        for token in added:
            self.index.append(token)


class SuffixMatches:
    """The occurrences in an index that match the end of a growing sequence, and the lengths of the matches.

    Args:
        index: the tokens to search. For the sequence's own tokens, call :meth:`advance` before ``index.append``.
        max_length: upper bound on a match's length, in tokens.
        max_matches: see :data:`MAX_MATCHES`.
        min_resume_length: see :data:`MIN_RESUME_LENGTH`; None: a match ends where a token differs.

    Attributes:
        lengths: {position in the index: length of the match that ends there}. A resumed match has length 1 again.
    """

    def __init__(
        self,
        index: OccurrenceIndex,
        max_length: int,
        max_matches: int = MAX_MATCHES,
        min_resume_length: int | None = MIN_RESUME_LENGTH,
    ) -> None:
        self.index, self._max_length = index, max_length
        self._max_matches, self._min_resume_length = max_matches, min_resume_length
        self.lengths: dict[int, int] = {}

    def advance(self, token: int) -> None:
        """Extends the matches by the sequence's next token."""
        tokens, dropped, min_resume_length = self.index.token_ids, self.index.num_dropped, self._min_resume_length
        lengths: dict[int, int] = {}
        for position, length in self.lengths.items():
            if position <= dropped:
                continue
            next_token = tokens[position - dropped]
            if next_token == token:
                lengths[position + 1] = min(length + 1, self._max_length)
            elif min_resume_length is not None and length >= min_resume_length and next_token != SEPARATOR:
                lengths[position + 1] = 1
        for position in self.index.occurrences(token, self._max_matches):
            lengths.setdefault(position, 1)
        if len(lengths) > 2 * self._max_matches:
            longest = sorted(lengths.items(), key=lambda item: (item[1], item[0]), reverse=True)
            lengths = dict(longest[: self._max_matches])
        self.lengths = lengths

    def select(self, min_length: int) -> list[Match]:
        """Returns the matches of at least ``min_length`` tokens."""
        tokens, dropped = self.index.token_ids, self.index.num_dropped
        return [(n, tokens, p - dropped) for p, n in self.lengths.items() if n >= min_length and p > dropped]
