"""The planner's decisions, by given costs and given acceptance."""

from __future__ import annotations

from itertools import accumulate
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdraft.drafters.suffix import SuffixDrafter
from longdraft.engine.drafter import SelfDraftCost
from longdraft.engine.planner import Planner, RoundPlan, discount_odds
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.planning.acceptance import (
    DECAY,
    MAX_ASSUMED_CHAIN,
    PRIOR_TOKENS_PER_STEP,
    AcceptanceModel,
    DraftGain,
    PriorDraftGain,
)
from longdraft.planning.costs import CostTable
from longdraft.trees.tree import TokenTree


def table(*per_row: float) -> CostTable:
    """Verification of 1, 2, ... rows, whatever the text's length."""
    return CostTable((0,), tuple(range(1, len(per_row) + 1)), (per_row,))


CHEAP = table(*(1.0 + 0.01 * i for i in range(64)))
ROOT = TokenTree((0,), (-1,))


def sequence(index=0, greedy=True):
    s = Sequence(index, [1, 2, 3], 1000, greedy=greedy)
    s.append(4)
    return s


def tree(*chances, parents=None):
    """A tree of nodes with these probabilities given their parents; a chain unless said otherwise."""
    parents = tuple(range(len(chances))) if parents is None else parents
    return TokenTree((0,) * (len(chances) + 1), (-1, *parents), (0.0, *(log(p) for p in chances)))


HALF = tree(0.5)


def begun(planner: Planner, sequences=None) -> RoundPlan:
    sequences = sequences or [sequence()]
    return RoundPlan(planner, SuffixDrafter(), sequences, [s.length for s in sequences])


def event(s: Sequence, verified: TokenTree, accepted: int) -> RoundResult:
    """The event of a chain of zeros, the first ``accepted`` of them right."""
    accepted = min(accepted, verified.num_draft_tokens)
    came = (0,) * accepted + (1,)
    return RoundResult(s, verified, accepted, tuple(range(accepted + 1)), came)


def rounds(
    planner, count, right, *, draft_tree=HALF, free=ROOT, forwards=1, forward_seconds=0.1, step=1.0, sequences=None
):
    """Rounds of a run: which of them asked the draft, and what they took.

    Args:
        right: tokens of the draft that are right whenever it is asked. drafted: by the draft; free: without it.
        forwards, each: of the draft, in a round that asks it; seconds of one. step: seconds of a verification's row 1.
    """
    sequences = sequences or [sequence()]
    asked, seconds = [], 0.0
    for _ in range(count):
        plan = begun(planner, sequences)
        chosen = plan.limit.select_sequences(sequences, [free] * len(sequences))
        asked.append(len(chosen))
        verified = plan.prune([draft_tree if s in chosen else free for s in sequences])
        drafting = forwards * forward_seconds if chosen else 0.0
        verifying = planner.costs.table.seconds_at(max(t.size for t in verified) * len(sequences), 0) * step
        events = [event(s, t, right if s in chosen else 0) for s, t in zip(sequences, verified, strict=True)]
        plan.observe(events, forwards if chosen else 0, drafting + verifying, drafting)
        seconds += drafting + verifying
    return asked, seconds


# --- how many nodes ---


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12),
    st.lists(st.floats(0.0, 0.5), min_size=13, max_size=13),
    st.randoms(),
)
def test_no_other_number_of_nodes_promises_more_tokens_a_second(chances, steps, rng):
    parents = tuple(rng.randrange(i + 1) for i in range(len(chances)))
    draft_tree = tree(*chances, parents=parents)
    planner = Planner(table(*accumulate([1.0, *steps])))
    (pruned,) = begun(planner).prune([draft_tree])

    paths = [1.0] * draft_tree.size
    for node in range(1, draft_tree.size):
        paths[node] = paths[draft_tree.parents[node]] * exp(draft_tree.logprobs[node])
    best = sorted(map(discount_odds, paths[1:]), reverse=True)
    rates = [
        (1 + sum(best[:n])) / planner.costs.forward_seconds(n + 1, [4]) for n in range(draft_tree.num_draft_tokens + 1)
    ]
    assert rates[pruned.num_draft_tokens] == pytest.approx(max(rates))


def test_a_batch_shares_a_forward():
    """One likely tree alone does not pay for rows of all sequences."""
    sequences = [sequence(i) for i in range(4)]
    plan = begun(Planner(table(*(1.0 + 0.1 * i for i in range(64)))), sequences)
    likely, unlikely = tree(0.9, 0.9), tree(0.02, 0.02)
    assert [t.num_draft_tokens for t in plan.prune([likely] * 4)] == [2] * 4
    assert max(t.num_draft_tokens for t in plan.prune([unlikely] * 4)) == 0


# --- whether to draft ---


def test_a_draft_that_is_right_is_asked_all_the_time():
    limits, _ = rounds(Planner(CHEAP), 200, right=2, draft_tree=tree(0.8, 0.8), forwards=2)
    assert sum(limits) > 180


@pytest.mark.parametrize("each", [0.05, 0.15, 0.3])
def test_a_draft_that_is_wrong_costs_little(each):
    limits, seconds = rounds(Planner(CHEAP), 128, right=0, draft_tree=tree(0.3, 0.3), forwards=2, forward_seconds=each)
    assert sum(limits) >= 1 and seconds < 128 * 1.03


def test_what_was_given_up_is_tried_again():
    planner = Planner(CHEAP)
    limits, _ = rounds(planner, 300, right=0, forwards=2, forward_seconds=0.15)
    last = len(limits) - limits[::-1].index(1)
    assert last > 100 and sum(limits) < 30
    again, _ = rounds(planner, 500, right=3, draft_tree=tree(0.8, 0.8, 0.8), forwards=2, forward_seconds=0.15)
    assert sum(again) > 150


def test_trials_in_vain_become_rare_and_a_draft_that_pays_is_found_again():
    planner, given = Planner(CHEAP), {"forwards": 3, "forward_seconds": 0.5}
    early, late = (rounds(planner, 2000, right=0, **given)[0] for _ in range(2))
    assert sum(late) <= sum(early) < 24 and 2 <= sum(late) < 12
    again, _ = rounds(planner, 1200, right=3, draft_tree=tree(0.9, 0.9, 0.9), forwards=1, forward_seconds=0.1)
    assert sum(again) > 400 and all(again[-100:])
    soon, _ = rounds(planner, 400, right=0, **given)  # it paid: it is tried again as soon as ever
    assert soon.count(1) > 3


def test_a_sure_lookup_needs_no_draft():
    planner = Planner(CHEAP)
    rounds(planner, 50, right=1, forwards=1, forward_seconds=0.3)
    s = sequence()
    for lookup, chosen in ((ROOT, [s]), (tree(0.3, 0.9), [s]), (tree(0.95, 0.95), [])):
        assert begun(planner, [s]).limit.select_sequences([s], [lookup]) == chosen


def test_only_what_the_lookup_had_not_is_the_drafts():
    """A draft that says what the lookup says adds nothing, however right it is."""
    same = tree(0.5, 0.5)
    limits, _ = rounds(Planner(CHEAP), 100, right=2, draft_tree=same, free=same, forwards=2, forward_seconds=0.2)
    assert sum(limits) < 20


def test_in_a_batch_a_text_whose_draft_is_bad_is_left_out():
    good, bad = sequence(0), sequence(1)
    planner, asked = Planner(CHEAP), {0: 0, 1: 0}
    for _ in range(100):
        plan = begun(planner, [good, bad])
        chosen = plan.limit.select_sequences([good, bad], [ROOT, ROOT])
        verified = plan.prune([tree(0.8, 0.8) if s in chosen else ROOT for s in (good, bad)])
        events = [event(s, t, 2 * (s is good)) for s, t in zip((good, bad), verified, strict=True)]
        plan.observe(events, 2 * bool(chosen), 0.4 * bool(chosen) + 1.0, 0.4 * bool(chosen))
        for s in chosen:
            asked[s.index] += 1
    assert asked[0] > 90 and asked[1] < 50


def test_greedy_and_sampled_text_are_learned_apart():
    planner = Planner(CHEAP)
    rounds(planner, 40, right=0)
    assert planner.draft_gains[True].added_tokens < 0.8 * PRIOR_TOKENS_PER_STEP * planner.prior_gain.extra_steps
    assert planner.draft_gains[False].added_tokens == pytest.approx(
        PRIOR_TOKENS_PER_STEP * planner.prior_gain.extra_steps
    )
    assert planner.acceptance[True].probability(log(0.5)) < 0.4 < planner.acceptance[False].probability(log(0.5))


# --- what is believed ---


@pytest.mark.parametrize("truth", [0.1, 0.4, 0.9])
def test_promises_are_corrected(truth):
    seen, promised = AcceptanceModel(), log(0.5)
    for i in range(600):
        seen.observe(promised, (i * truth) % 1 < truth)
        seen.decay()
    assert seen.probability(promised) == pytest.approx(truth, abs=0.1)


def test_evidence_fades():
    seen, worth = AcceptanceModel(), DraftGain(PriorDraftGain(0.3))
    for _ in range(50):
        seen.observe(log(0.5), False)
        worth.observe(0.0, 1.0, 0.6)
    assert seen.probability(log(0.5)) < 0.05 and worth.added_tokens < 0.05 and worth.extra_steps > 0.55
    for _ in range(round(8 / (1 - DECAY))):
        seen.decay()
        worth.decay(False)
    assert seen.probability(log(0.5)) > 0.45 and worth.added_tokens > 0.35 and worth.extra_steps < 0.35


class OnItself(SuffixDrafter):
    self_draft_cost = SelfDraftCost(lambda length: min(length, 1000), 1.0, lambda length: 0.8)


@pytest.mark.parametrize(("length", "asked"), [(100, False), (100_000, True)])
def test_own_drafts_are_tried_where_texts_are_so_long_that_they_pay(length, asked):
    """A step takes 1 + length / 10,000; a draft forward reads 1,000 rows."""
    planner = Planner(CostTable((0, 100_000), (1, 64), ((1.0, 1.5), (11.0, 16.5))))
    drafter, s = OnItself(), sequence()
    assert RoundPlan(planner, drafter, [s], [length]).limit.select_sequences([s], [ROOT]) == ([s] if asked else [])


@given(st.floats(0.05, 0.98), st.floats(0.01, 2.0))
def test_what_is_hoped_of_a_chain_is_the_best_of_all_lengths(share, level):
    prior = PriorDraftGain(1.0)
    prior.assume_best_chain(share, level)
    chains = [(sum(share**i for i in range(1, n + 1)), n * level) for n in range(1, MAX_ASSUMED_CHAIN + 1)]
    best = max((1 + tokens) / (1 + steps) for tokens, steps in chains)
    assert (1 + prior.added_tokens) / (1 + prior.extra_steps) == pytest.approx(best)
    assert (prior.added_tokens > prior.extra_steps) == (best > 1)
