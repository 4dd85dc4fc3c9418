"""Suffix lookup: its probabilities against the formula, and the drafter's manners."""

from __future__ import annotations

from math import exp, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdraft import Speculator
from longdraft.drafters.suffix import MIN_PATH_PROBABILITY, SuffixDrafter, mixed_match_probabilities
from longdraft.engine.sequence import Sequence
from longdraft.planning.acceptance import OnlinePlattScaler
from longdraft.trees.tree import NodeLimit, TokenTree
from tests.support.events import prefill_event, verify_event
from tests.support.tiny import tiny_model

PLANNED = NodeLimit(15, 0.0)
small_texts = st.lists(st.integers(0, 2), max_size=40)
found = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1).map(lambda m: sorted(m, reverse=True))


def sequence(prompt: list[int], output: list[int], max_new_tokens: int = 100, index: int = 0) -> Sequence:
    s = Sequence(index, prompt, max_new_tokens)
    for token in output:
        s.append(token)
    return s


def proposal(drafter: SuffixDrafter, s: Sequence, limit: NodeLimit | None = PLANNED) -> TokenTree:
    (tree,) = drafter.propose([s], limit)
    return tree


def started(drafter: SuffixDrafter, *args: object, **options: object) -> Sequence:
    s = sequence(*args, **options)  # type: ignore[arg-type]
    drafter.observe(prefill_event(s))
    return s


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(n)) for n in range(tree.size)}


# --- probabilities ---


def reference(matches: list[tuple[int, int]], unknown: float) -> dict[int, float]:
    """The formula as it stands, from shorter to longer matches."""
    chances = {token: 0.0 for _, token in matches}
    shorter = 0
    for length in sorted({n for n, _ in matches}):
        known = [token for n, token in matches if n >= length]
        kept = ((1 + shorter) / (1 + length)) ** log2(1 + len(known) / unknown)
        for token in chances:
            share = known.count(token) / len(known)
            chances[token] = share + (chances[token] - share) * kept
        shorter = length
    return chances


@given(found, st.sampled_from([0.5, 1.0, 3.0]))
def test_probabilities_follow_the_formula(matches, unknown):
    said = mixed_match_probabilities(matches, unknown)
    assert said == pytest.approx(reference(matches, unknown))
    assert all(0 < p < 1 for p in said.values()) and sum(said.values()) < 1


def test_trust_learns_what_probabilities_are_worth():
    trust = OnlinePlattScaler()
    assert trust.calibrate(0.8) == pytest.approx(0.8)
    for i in range(400):
        trust.observe(0.8, i % 2 == 0)
    assert trust.calibrate(0.8) == pytest.approx(0.5, abs=0.1)
    for _ in range(200):
        trust.observe(0.8, True)
    assert trust.calibrate(0.8) > 0.85


def test_trust_is_learned_without_verifying():
    """Nothing of what is proposed is in the trees that are verified, and still it is known to have been right."""
    drafter = SuffixDrafter(max_draft=3, branches=1)
    s = started(drafter, [1, 2, 3, 4] * 4, [1], 60)
    for i in range(12):
        assert proposal(drafter, s).num_draft_tokens == 3
        s.append([2, 3, 4, 1][i % 4])
        drafter.observe(verify_event(s, TokenTree((s.tokens[-2],), (-1,)), 0))
    untaught = SuffixDrafter(max_draft=3, branches=1)
    found, before = proposal(drafter, s), proposal(untaught, started(untaught, s.prompt, s.output, 60))
    assert found.tokens == before.tokens and found.logprobs[1] > before.logprobs[1]


# --- the drafter ---


# What it is, options, prompt, output, and the tokens of the tree, as far as they are said.
EXAMPLES: list[tuple[str, dict[str, int], list[int], list[int], tuple[int, ...]]] = [
    ("a text that repeats", {"branches": 1}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [3], (3, 4, 5, 6, 7)),
    ("a match that runs into the end is read on", {"branches": 1}, [1, 2, 3, 1, 2], [3], (3, 1, 2, 3, 1, 2, 3, 1, 2)),
    ("one branch is the likeliest", {"max_draft": 3, "branches": 1}, [1, 2, 5, 6, 1, 2, 5, 7, 1], [2], (2, 5, 7, 1)),
    ("branches share what they share", {"max_draft": 2}, [1, 2, 5, 6, 1, 2, 5, 7, 1], [2], (2, 5, 7, 6)),
    ("the longest match before a later one", {"max_draft": 1}, [1, 2, 3, 4, 0, 3, 5, 1, 2], [3], (3, 4, 5)),
    ("the latest of equally long ones", {"max_draft": 1}, [1, 2, 7, 1, 2, 8, 1], [2], (2, 8, 7)),
]


def test_what_is_proposed_for_a_text():
    for what, options, prompt, output, tokens in EXAMPLES:
        tree = proposal(drafter := SuffixDrafter(**options), started(drafter, prompt, output))
        assert tree.tokens[: len(tokens)] == tokens, what
        assert list(tree.path_logprobs[1:3]) == sorted(tree.path_logprobs[1:3], reverse=True), what
    for nothing in (SuffixDrafter(), SuffixDrafter(min_n=2)):
        assert proposal(nothing, started(nothing, [1, 2, 3, 4], [5])) == TokenTree((5,), (-1,), (0.0,))
    assert proposal(nothing, started(nothing, [1, 2, 3], [1], index=1)).num_draft_tokens == 0  # shorter than the least


@given(small_texts, st.sampled_from([1, 2, 4, 15]), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_a_proposal_keeps_to_its_limits(text, branches, max_draft, max_nodes, planned):
    drafter = SuffixDrafter(max_draft=max_draft, max_nodes=max_nodes, branches=branches)
    tree = proposal(drafter, started(drafter, [1, *text], [2]), PLANNED if planned else None)
    assert tree.tokens[0] == 2 and tree.num_draft_tokens <= max_nodes and max(tree.depths) <= max_draft
    leaves = set(range(tree.size)) - set(tree.parents)
    assert len(leaves) <= branches
    assert len(paths(tree)) == tree.size and all(p <= 0 for p in tree.logprobs)
    if not planned:
        assert all(exp(p) >= MIN_PATH_PROBABILITY * 0.999 for p in tree.path_logprobs)


@given(small_texts, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
def test_a_text_that_grows_is_drafted_as_one_read_at_once(prompt, rounds):
    grown, at_once = SuffixDrafter(max_n=6), SuffixDrafter(max_n=6)
    s = started(grown, [0, *prompt], [1])
    for emitted in rounds:
        for token in emitted:
            s.append(token)
        grown.observe(verify_event(s, TokenTree((1,), (-1,)), 0))
    now = started(at_once, [0, *prompt], s.output)
    # Matches of a prompt's inside are not followed; all that can still matter are.
    assert paths(proposal(grown, s)) == paths(proposal(at_once, now))


# --- earlier requests ---


@pytest.mark.parametrize("method", ["suffix", "prompt-lookup"])
def test_a_speculator_shares_texts_only_when_asked(method):
    model = tiny_model()
    prompt, accepted = [3, 1, 4, 1, 5, 9, 2, 6], {}
    for name, options in {"own": {}, "earlier": {"earlier": 1000}}.items():
        spec = Speculator(method, target=model, plan="fixed", **options)
        first, second = (spec.generate([prompt], max_new_tokens=40, eos_token_ids=[])[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        accepted[name] = first.accepted, second.accepted
    own, earlier = accepted["own"], accepted["earlier"]
    assert own[0] == own[1] == earlier[0]
    assert earlier[1] > own[1] and earlier[1] >= 30
