"""Prompt lookup: the index against a search through the text, and the drafter's manners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdraft.drafters.base import NoDrafter
from longdraft.drafters.ngram import NGramDrafter, NGramIndex
from longdraft.sequence import Sequence
from longdraft.trees.builders import chain
from longdraft.trees.tree import TokenTree
from tests.events import begun, verified

small_texts = st.lists(st.integers(0, 2), max_size=40)
match_lengths = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda t: (t[0], t[0] + t[1]))


def index_of(text: list[int], min_n: int = 1, max_n: int = 5) -> NGramIndex:
    index = NGramIndex(min_n, max_n)
    index.extend(text)
    return index


def search(text: list[int], min_n: int, max_n: int) -> tuple[int, int] | None:
    """By looking everywhere: the longest n that stood before, and the latest position behind it."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                return n, end
    return None


def periodic(text: list[int], start: int, length: int) -> list[int]:
    """What follows ``start``, read on as if the text from there repeated."""
    tail = text[start:]
    return [tail[i % len(tail)] for i in range(length)]


def sequence(prompt: list[int], output: list[int], max_new_tokens: int = 100) -> Sequence:
    s = Sequence(0, prompt, max_new_tokens)
    for token in output:
        s.append(token)
    return s


def proposal(drafter: NGramDrafter, s: Sequence) -> TokenTree:
    (tree,) = drafter.propose([s])
    return tree


# --- the index ---


@given(small_texts, match_lengths, st.integers(1, 6))
def test_the_first_continuation_follows_the_longest_and_then_latest_match(text, lengths, length):
    found = index_of(text, *lengths).continuations(length, 1)
    expected = search(text, *lengths)
    if expected is None:
        assert found == []
    else:
        n, end = expected
        assert found == [(n, periodic(text, end, length))]


@given(small_texts, st.integers(1, 6), st.integers(1, 4))
def test_several_continuations_differ_and_come_from_ever_shorter_matches(text, length, count):
    found = index_of(text).continuations(length, count)
    assert len(found) <= count
    assert len({tuple(path) for _, path in found}) == len(found)
    assert [n for n, _ in found] == sorted((n for n, _ in found), reverse=True)


@given(small_texts, st.integers(1, 6), st.integers(1, 4))
def test_each_continuation_stands_behind_an_earlier_copy_of_the_texts_end(text, length, count):
    for n, path in index_of(text).continuations(length, count):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[len(text) - n :]]
        assert path in [periodic(text, end, length) for end in ends]


@given(small_texts, small_texts, match_lengths)
def test_an_index_that_grows_finds_what_one_made_at_once_finds(first, second, lengths):
    grown = index_of(first, *lengths)
    for token in second:
        grown.extend([token])
    at_once = index_of(first + second, *lengths)
    assert grown.text == at_once.text
    assert grown.continuations(5, 3) == at_once.continuations(5, 3)


def test_the_longest_match_comes_before_a_later_shorter_one():
    #       1 2 3 -> 4          3 -> 5 (later)   the end: 1 2 3
    text = [1, 2, 3, 4, 0, 3, 5, 1, 2, 3]
    assert index_of(text).continuations(1, 2) == [(3, [4]), (1, [5])]


def test_the_latest_of_equally_long_matches_comes_first():
    assert index_of([1, 2, 7, 1, 2, 8, 1, 2]).continuations(1, 2) == [(2, [8]), (2, [7])]


def test_a_match_that_runs_into_the_end_is_read_on_periodically():
    assert index_of([1, 2, 3, 1, 2, 3]).continuations(8, 1) == [(3, [1, 2, 3, 1, 2, 3, 1, 2])]


def test_a_match_shorter_than_the_least_is_no_match():
    assert index_of([1, 2, 3, 1], min_n=2).continuations(3, 1) == []


def test_a_text_does_not_match_itself():
    assert index_of([1, 2, 3]).continuations(3, 1) == []
    assert index_of([]).continuations(3, 1) == []


# --- the drafter ---


def test_a_repeating_text_is_drafted_from_its_last_token_on():
    drafter = NGramDrafter()
    s = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [3])
    drafter.observe(begun(s))
    tree = proposal(drafter, s)
    assert tree.tokens[:5] == (3, 4, 5, 6, 7) and tree.is_chain


def test_nothing_is_drafted_where_nothing_matches():
    drafter = NGramDrafter()
    s = sequence([1, 2, 3, 4], [5])
    drafter.observe(begun(s))
    assert proposal(drafter, s) == TokenTree((5,), (-1,))


@pytest.mark.parametrize(("budget", "drafted"), [(2, 0), (3, 1), (5, 3)])
def test_no_more_is_drafted_than_may_still_be_emitted(budget, drafted):
    # A draft of k tokens emits up to k + 1.
    drafter = NGramDrafter()
    s = sequence([1, 2, 3, 4, 5, 6, 1, 2], [3], max_new_tokens=budget)
    drafter.observe(begun(s))
    assert proposal(drafter, s).drafted == drafted


@given(small_texts, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_a_proposal_keeps_to_its_limits(text, branches, max_draft, max_nodes):
    drafter = NGramDrafter(max_draft, max_nodes, branches, min_n=1)
    s = sequence([1, *text], [2])
    drafter.observe(begun(s))
    tree = proposal(drafter, s)
    assert tree.tokens[0] == 2 and tree.drafted <= max_nodes and max(tree.depths) <= max_draft


def test_several_branches_give_a_tree_that_shares_what_they_share():
    drafter = NGramDrafter(branches=2, max_draft=3)
    s = sequence([1, 2, 5, 6, 1, 2, 5, 7, 1], [2])
    drafter.observe(begun(s))
    drafter.observe(verified(s, chain(2, [0]), 1))  # one right: the next draft is longer
    tree = proposal(drafter, s)
    assert not tree.is_chain
    assert {tuple(tree.tokens[i] for i in tree.path(n)) for n in range(tree.size)} >= {(2, 5, 7), (2, 5, 6)}
    assert tree.tokens.count(5) == 1


def observed_lengths(drafter: NGramDrafter, accepted: list[int]) -> list[int]:
    """Depths of successive drafts on a text that repeats for ever, told how much of each was right."""
    s = sequence([1, 2, 3, 4, 5] * 10, [1], max_new_tokens=10**4)
    drafter.observe(begun(s))
    lengths = []
    for count in accepted:
        tree = proposal(drafter, s)
        lengths.append(tree.drafted)
        right = min(count, tree.drafted)
        for _ in range(right + 1):
            s.append(s.output[-1] % 5 + 1)
        drafter.observe(verified(s, tree, right))
    return lengths


def test_a_draft_that_was_right_doubles_up_to_the_longest():
    assert observed_lengths(NGramDrafter(max_draft=15), [0, 99, 99, 99, 99, 99]) == [8, 2, 4, 8, 15, 15]


def test_a_draft_that_was_wrong_falls_back_to_what_was_right():
    assert observed_lengths(NGramDrafter(max_draft=15), [5, 3, 0, 0]) == [8, 6, 4, 2]


def test_a_round_without_a_draft_changes_no_length():
    drafter = NGramDrafter()
    s = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], [2])
    drafter.observe(begun(s))
    before = proposal(drafter, s).drafted
    drafter.observe(verified(s, TokenTree((2,), (-1,)), 0))
    assert proposal(drafter, s).drafted == before


def test_output_is_found_as_well_as_the_prompt():
    drafter = NGramDrafter(min_n=2)
    s = sequence([0], [4, 5, 6])
    drafter.observe(begun(s))
    assert proposal(drafter, s).drafted == 0
    for token in (4, 5):
        s.append(token)
    drafter.observe(verified(s, TokenTree((6,), (-1,)), 0))
    assert proposal(drafter, s).tokens[:3] == (5, 6, 4)


def test_sequences_do_not_see_each_others_text():
    drafter = NGramDrafter()
    one, two = sequence([1, 2, 3, 1], [2]), sequence([4, 5, 6, 1], [2])
    two.index = 1
    for s in (one, two):
        drafter.observe(begun(s))
    trees = drafter.propose([one, two])
    assert trees[0].drafted > 0 and trees[1].drafted == 0
    drafter.release(one)
    assert drafter.propose([two])[0].drafted == 0


@pytest.mark.parametrize(
    "options",
    [{"min_n": 0}, {"min_n": 4, "max_n": 3}, {"max_draft": 0}, {"branches": 0}, {"max_nodes": 0}],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=r"at least 1|min_n <= max_n"):
        NGramDrafter(**options)


def test_no_drafter_drafts_nothing():
    s = sequence([1, 2], [3, 4])
    assert NoDrafter().propose([s]) == [TokenTree((4,), (-1,))]
