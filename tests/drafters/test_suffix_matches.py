"""The index of occurrences against searches through the tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longdraft.drafters.shared.suffix_matches import (
    SEPARATOR,
    OccurrenceIndex,
    RequestHistory,
    SuffixMatches,
)

ALL = 10**6
small_texts = st.lists(st.integers(0, 2), max_size=40)


def index_of(text: list[int]) -> OccurrenceIndex:
    index = OccurrenceIndex()
    for token in text:
        index.append(token)
    return index


def state(index: OccurrenceIndex) -> tuple[object, ...]:
    """All that it keeps, positions counted from what it has not dropped."""
    every = (*range(4), SEPARATOR)
    return index.token_ids, [[p - index.num_dropped for p in index.occurrences(token, ALL)] for token in every]


def followed(
    text: list[int], max_matches: int = ALL, max_length: int = ALL, min_resume_length: int | None = None
) -> SuffixMatches:
    """Matches of a text's end in the text itself."""
    index = OccurrenceIndex()
    matches = SuffixMatches(index, max_length, max_matches, min_resume_length)
    for token in text:
        matches.advance(token)
        index.append(token)
    return matches


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens two texts end alike."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def search(text: list[int], store: list[int], before: int) -> dict[int, int]:
    """By looking everywhere: each position up to ``before`` where the text's end stands in the store, how far back."""
    found = {p: shared(store[:p], text) for p in range(1, before + 1)}
    return {p: n for p, n in found.items() if n}


# --- the index ---


@given(small_texts, st.integers(0, 2), st.integers(1, 9))
def test_occurrences_are_the_latest_ones(text, token, most):
    found = [i + 1 for i, x in enumerate(text) if x == token][::-1]
    assert index_of(text).occurrences(token, most) == found[:most]


# --- matches ---


@given(small_texts)
def test_all_matches_are_found_with_their_lengths(text):
    assert followed(text).lengths == search(text, text, len(text) - 1)


@given(small_texts, st.integers(1, 4))
def test_with_a_bound_fewer_and_shorter_matches_are_found_and_always_the_latest(text, most):
    found = followed(text, most).lengths
    everything = search(text, text, len(text) - 1)
    assert len(found) <= 2 * most and all(n <= everything[p] for p, n in found.items())
    assert not everything or max(everything) in found


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=6), small_texts)
def test_matches_in_a_store_do_not_go_across_its_texts(texts, text):
    earlier = RequestHistory(1000)
    for each in texts:
        earlier.add(each)
    matches = SuffixMatches(earlier.index, ALL, ALL, None)
    for token in text:
        matches.advance(token)
    store = [token for text in texts for token in (*text, SEPARATOR)]
    assert earlier.index.token_ids == store
    assert matches.lengths == search(text, store, len(store))


def test_a_long_match_goes_on_behind_a_token_that_differs_but_not_behind_its_texts_end():
    text = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4]
    for more, least, lengths in (([9], 4, {5: 1}), ([9, 6], 4, {6: 2}), ([9], 5, {})):
        assert followed([*text, *more], min_resume_length=least).lengths == lengths
    earlier = RequestHistory(100)
    for stored in ([1, 2, 3, 4], [5, 6]):
        earlier.add(stored)
    matches = SuffixMatches(earlier.index, 8)
    for token in (1, 2, 3, 4, 9):
        matches.advance(token)
    assert matches.lengths == {}


# --- earlier texts ---


@given(st.integers(2, 30), st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=12))
def test_the_oldest_texts_go_first_and_leave_nothing(most, texts):
    earlier = RequestHistory(most)
    for text in texts:
        earlier.add(text)
        assert len(earlier.index.token_ids) <= most
    kept: list[int] = []
    for text in reversed(texts):
        ended = [*text[-(most - 1) :], SEPARATOR]
        if len(kept) + len(ended) > most:
            break
        kept = ended + kept
    assert state(earlier.index) == state(index_of(kept))
