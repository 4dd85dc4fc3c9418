"""Finds earlier occurrences of the end of a text: in the text itself, or in a bounded store of earlier texts.

Each token knows where it stood last, so the occurrences of a token are a chain, latest first. A match is followed from
token to token: the positions where the text's end stood before are those of one token earlier that go on alike, and the
latest occurrences of the new token. So a token costs the same however long the text is and however long its matches
are, and the oldest texts can be dropped.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

# Matches that are followed: of each token as many of the latest occurrences are looked at, and no more than twice as
# many are kept.
MAX_MATCHES = 16
# A match at least so long is kept where one token differs: what follows a changed word is often what followed before.
MIN_RESUME_LENGTH = 4
# Ends a text in a store; no token.
SEPARATOR = -1


class OccurrenceIndex:
    """Tokens with an index of earlier occurrences: some twenty bytes a token.

    Position p is behind the p-th token; tokens that were dropped count.

    Attributes:
        tokens: those that are kept. dropped: how many there were before them.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_dropped = 0
        # For each kept token, the position behind its occurrence before; for each token id, behind its last one.
        self._before = array("q")
        self._last: dict[int, int] = {}

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self._before.append(self._last.get(token, 0))
        self._last[token] = self.num_dropped + len(self.token_ids)

    def drop_first(self, count: int) -> None:
        """Forgets the first tokens that are kept."""
        for position, token in enumerate(self.token_ids[:count], self.num_dropped + 1):
            if self._last[token] == position:
                del self._last[token]
        del self.token_ids[:count], self._before[:count]
        self.num_dropped += count

    def occurrences(self, token: int, max_count: int) -> list[int]:
        """The positions behind a token's occurrences, the latest first."""
        found: list[int] = []
        position = self._last.get(token, 0)
        while position > self.num_dropped and len(found) < max_count:
            found.append(position)
            position = self._before[position - self.num_dropped - 1]
        return found


class RequestHistory:
    """The latest texts of earlier requests. A drafter that shares it proposes tokens from them.

    Args:
        tokens: kept at most; the oldest text goes first, as a whole, and of a longer text only its end is kept.

    Raises:
        ValueError: no number of tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        if type(max_tokens) is not int or max_tokens < 2:
            raise ValueError(f"earlier is a number of tokens, at least 2 (0: none are kept), got {max_tokens!r}")
        self.max_tokens = max_tokens
        self.index = OccurrenceIndex()
        self._sizes: deque[int] = deque()
        self._tenants: dict[str, RequestHistory] = {}

    def for_tenant(self, tenant: str | None) -> RequestHistory:
        """The store of one tenant, which no other tenant sees; None: the store of requests that name no tenant."""
        return self if tenant is None else self._tenants.setdefault(tenant, RequestHistory(self.max_tokens))

    def add(self, token_ids: Sequence[int]) -> None:
        """Keeps a text, for as long as there is room."""
        kept = [*token_ids[-(self.max_tokens - 1) :], SEPARATOR]
        while len(self.index.token_ids) + len(kept) > self.max_tokens:
            self.index.drop_first(self._sizes.popleft())
        self._sizes.append(len(kept))
        for token in kept:
            self.index.append(token)


class SuffixMatches:
    """Earlier occurrences of the end of a growing text in a store, with the number of matching tokens.

    Args:
        suffixes: the store; where it is the text itself, a token is followed before it is appended.
        longest: matches count as no longer than this, in tokens. most: see :data:`MAX_MATCHES`.
        resumed: see :data:`MIN_RESUME_LENGTH`; None: a match ends where a token differs.

    Attributes:
        lengths: position -> matching tokens before it. A resumed match counts as one of one token, and grows again.
    """

    def __init__(
        self,
        index: OccurrenceIndex,
        max_length: int,
        max_matches: int = MAX_MATCHES,
        min_resume_length: int | None = MIN_RESUME_LENGTH,
    ) -> None:
        self.index, self._longest, self._most, self._resumed = index, max_length, max_matches, min_resume_length
        self.lengths: dict[int, int] = {}

    def advance(self, token: int) -> None:
        """Advances by one token of the text."""
        tokens, dropped = self.index.token_ids, self.index.num_dropped
        going: dict[int, int] = {}
        for position, length in self.lengths.items():
            if position <= dropped:
                continue
            following = tokens[position - dropped]
            if following == token:
                going[position + 1] = min(length + 1, self._longest)
            elif self._resumed is not None and length >= self._resumed and following != SEPARATOR:
                going[position + 1] = 1
        for position in self.index.occurrences(token, self._most):
            going.setdefault(position, 1)
        if len(going) > 2 * self._most:
            best = sorted(going.items(), key=lambda item: (item[1], item[0]), reverse=True)
            going = dict(best[: self._most])
        self.lengths = going

    def select(self, min_length: int) -> list[tuple[int, list[int], int]]:
        """The matches of at least so many tokens: length, the tokens that are kept, and the place of the next one."""
        tokens, dropped = self.index.token_ids, self.index.num_dropped
        return [(n, tokens, p - dropped) for p, n in self.lengths.items() if n >= min_length and p > dropped]
