"""What the planner decides, given what things cost and what was accepted."""

from __future__ import annotations

import random
from itertools import accumulate
from math import exp, log

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from longdraft.planning.calibration import Calibration
from longdraft.planning.costs import CostTable
from longdraft.planning.gate import Gate
from longdraft.planning.planner import Ends, Planner
from longdraft.sequence import Sequence
from longdraft.trees.tree import TokenTree


def table(*per_row: float) -> CostTable:
    """Verification of 1, 2, ... rows, whatever the text's length."""
    return CostTable((0,), tuple(range(1, len(per_row) + 1)), (per_row,))


CHEAP = table(*(1.0 + 0.01 * i for i in range(64)))
DEAR = table(*(1.0 + 1.0 * i for i in range(64)))


def sequence(index=0):
    s = Sequence(index, [1, 2, 3], 100)
    s.append(4)
    return s


def tree(*chances, parents=None):
    """A tree of nodes with these probabilities given their parents; a chain unless said otherwise."""
    parents = tuple(range(len(chances))) if parents is None else parents
    return TokenTree((0,) * (len(chances) + 1), (-1, *parents), (0.0, *(log(p) for p in chances)))


def speculating(planner, sequences=None):
    """A plan whose first round, which is plain to see what that costs, is over."""
    plan = planner.start(True)
    sequences = sequences or [sequence()]
    assert plan.budget(sequences) is None
    roots = [TokenTree((0,), (-1,)) for _ in sequences]
    plan.saw(roots, [(0,)] * len(sequences), [1] * len(sequences), 0, 0.0, 1.0)
    assert plan.budget(sequences) is not None
    return plan


# --- nodes ---


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12),
    st.lists(st.floats(0.0, 0.5), min_size=13, max_size=13),
    st.randoms(),
)
def test_no_other_number_of_nodes_promises_more(chances, steps, rng):
    """Against all sizes of the same tree, by tokens less what their time is worth."""
    parents = tuple(rng.randrange(i + 1) for i in range(len(chances)))
    drafted = tree(*chances, parents=parents)
    costs = list(accumulate([1.0, *steps]))
    planner = Planner(table(*costs))
    (kept,) = speculating(planner).prune([drafted])

    paths = [1.0] * drafted.size
    for node in range(1, drafted.size):
        paths[node] = paths[drafted.parents[node]] * exp(drafted.log_probs[node])
    best = sorted(paths[1:], reverse=True)
    values = [sum(best[:n]) - planner.costs.verification(n + 1, [4]) / 1.0 for n in range(drafted.drafted + 1)]
    # One plain step makes one token: a second is worth a token here.
    gain = max(values) - values[0]
    assume(abs(gain - 0.04) > 1e-6)  # a smaller gain is not believed
    assert values[kept.drafted] == pytest.approx(max(values) if gain > 0.04 else values[0], abs=1e-6)


def test_dear_nodes_must_be_likely():
    drafted = tree(0.9, 0.9, 0.9, 0.9)
    assert speculating(Planner(CHEAP)).prune([drafted])[0].drafted == 4
    assert speculating(Planner(table(1.0, 1.85, 2.75, 3.7, 4.7))).prune([drafted])[0].drafted == 1
    assert speculating(Planner(DEAR)).prune([drafted])[0].drafted == 0


def test_a_gain_that_may_be_an_error_is_not_taken():
    """Chances and costs are estimates: 3 % of a plain step are within what they are wrong by."""
    assert speculating(Planner(table(1.0, 1.47))).prune([tree(0.5)])[0].drafted == 0
    assert speculating(Planner(table(1.0, 1.45))).prune([tree(0.5)])[0].drafted == 1


def test_the_best_nodes_are_kept_with_their_parents():
    drafted = tree(0.9, 0.1, 0.8, 0.05, parents=(0, 0, 1, 2))
    planner = Planner(table(1.0, 1.2, 1.4, 1.6, 1.8))
    (kept,) = speculating(planner).prune([drafted])
    assert kept.parents == (-1, 0, 1) and kept.log_probs == pytest.approx((0.0, log(0.9), log(0.8)))


def test_trees_without_probabilities_are_sized_by_what_becomes_of_them():
    planner = Planner(table(*(1.0 + 0.3 * i for i in range(20))))
    drafted = TokenTree((0,) * 9, tuple(range(-1, 8)))
    plan = speculating(planner)
    assert plan.prune([drafted])[0].drafted == 8
    for _ in range(30):
        plan.saw([drafted], [(0,)], [1], 0, 0.0, 3.4)
    assert plan.prune([drafted])[0].drafted == 0


def test_a_batch_shares_a_forward():
    """One likely tree alone does not pay for rows of all sequences."""
    sequences = [sequence(i) for i in range(4)]
    plan = speculating(Planner(table(*(1.0 + 0.1 * i for i in range(64)))), sequences)
    likely, unlikely = tree(0.9, 0.9), tree(0.02, 0.02)
    assert [t.drafted for t in plan.prune([likely] * 4)] == [2] * 4
    assert max(t.drafted for t in plan.prune([unlikely] * 4)) == 0


STEPS = [3.0, 3.5, 4.0, 8.0]


def test_texts_that_end_together_share_what_a_step_costs():
    assert Ends().shares([(i, 40) for i in range(4)], STEPS) == pytest.approx([1.0] * 4)
    assert Ends().shares([(7, 12)], [5.0]) == [1.0]


def test_the_last_text_decides_when_a_batch_ends():
    """What is left of it is steps of its own; of the first to end, only its rows in the steps of all."""
    shares = Ends().shares([(0, 10), (1, 30), (2, 20), (3, 30)], STEPS)
    assert shares == pytest.approx([4.0 / 2, 3.5 / 2 / 2, 0.5 / 2, 3.5 / 2 / 2])


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 30))
def test_shares_are_one_on_average_and_follow_the_pace(texts, rounds):
    ends = Ends()
    for i, (_, pace) in enumerate(texts):
        for _ in range(rounds):
            ends.saw(i, pace)
    shares = ends.shares([(i, remaining) for i, (remaining, _) in enumerate(texts)], STEPS[: len(texts)])
    assert sum(shares) == pytest.approx(len(texts)) and min(shares) > 0
    if len({remaining for remaining, _ in texts}) == 1 and rounds:
        slow, fast = (f(range(len(texts)), key=lambda i: texts[i][1]) for f in (min, max))
        assume(texts[slow][1] < texts[fast][1] and len(texts) < 4)  # the fourth text makes a step dear here
        assert shares[slow] > shares[fast]


def test_nothing_to_choose_from():
    roots = [TokenTree((5,), (-1,))]
    assert speculating(Planner(CHEAP)).prune(roots) == roots


# --- budgets ---


def test_a_dear_draft_has_to_promise_more():
    planner = Planner(CHEAP)
    plan = speculating(planner)
    plan.saw([tree(0.5)], [(0,)], [1], 2, 0.02, 1.0)
    cheap = plan.budget([sequence()])
    planner.forward = 0.5
    dear = plan.budget([sequence()])
    assert cheap is not None and dear is not None and cheap.price < 0.1 < 0.4 < dear.price


def test_budgets_follow_what_was_worth_verifying():
    planner = Planner(CHEAP)
    plan = speculating(planner)
    for _ in range(20):
        plan.prune([tree(0.9, 0.01)])
    few = plan.budget([sequence()])
    for _ in range(20):
        plan.prune([tree(*[0.99] * 30)])
    many = plan.budget([sequence()])
    assert few is not None and many is not None and few.nodes <= 8 < 50 < many.nodes


def test_every_so_often_a_round_is_plain():
    plan = Planner(CHEAP).start(True)
    plain = 0
    for _ in range(256):
        plain += plan.budget([sequence()]) is None
        plan.saw([tree(0.9)], [(0, 1)], [2], 1, 0.0, 1.0)
    assert 4 <= plain <= 8


def test_speculation_that_does_not_pay_is_given_up_and_tried_again():
    plan = Planner(CHEAP).start(True)
    speculated = 0
    for _ in range(400):
        budget = plan.budget([sequence()])
        if budget is None or not budget.paid:
            plan.saw([TokenTree((0,), (-1,))], [(0,)], [1], 0, 0.0, 1.0)
        else:
            speculated += 1
            plan.saw([tree(0.5, 0.5)], [(0,)], [1], 2, 0.1, 1.2)
    assert 8 <= speculated <= 40


def test_greedy_and_drawn_text_are_learned_apart():
    planner = Planner(CHEAP)
    plan = planner.start(True)
    for _ in range(20):
        if plan.budget([sequence()]) is not None:
            plan.saw([tree(0.5)], [(0,)], [1], 1, 0.3, 1.0)
        else:
            plan.saw([TokenTree((0,), (-1,))], [(0,)], [1], 0, 0.0, 1.0)
    assert planner.calibrations[True].trust < 0.9 and planner.calibrations[False].trust == 1.0


# --- calibration ---


@pytest.mark.parametrize("truth", [0.1, 0.4, 0.9])
def test_promises_are_corrected(truth):
    rng, seen = random.Random(0), Calibration()
    promised = 0.5
    grade = Calibration.grade(log(promised))
    for _ in range(600):
        seen.saw(promised, grade, rng.random() < truth)
        seen.fade()
    assert seen.chance(promised, grade) == pytest.approx(truth, abs=0.15)
    assert 0 < seen.chance(1.0, grade) <= 1


def test_what_was_given_up_is_believed_again_in_time():
    seen = Calibration()
    grade = Calibration.grade(log(0.5))
    for _ in range(50):
        seen.saw(0.5, grade, False)
    doubted = seen.chance(0.5, grade)
    for _ in range(1500):
        seen.fade()
    assert doubted < 0.05 and seen.chance(0.5, grade) > 0.45


@given(st.floats(-1e6, 0.0))
def test_every_probability_has_a_grade(log_prob):
    assert 0 <= Calibration.grade(log_prob) < 24


# --- gate ---


def test_pauses_grow_until_a_trial_goes_well():
    gate, pauses = Gate(), []
    for _ in range(4):
        while gate.open():
            gate.saw(1.0, 1.3)
        closed = 1
        while not gate.open():
            closed += 1
        pauses.append(closed)
    assert pauses == sorted(pauses) and pauses[-1] >= 4 * pauses[0]
    for _ in range(40):
        gate.saw(2.0, 1.2)
    while gate.open():
        gate.saw(1.0, 1.5)
    closed = 1
    while not gate.open():
        closed += 1
    assert closed == pauses[0]


def test_a_bad_text_costs_little():
    """Rounds that bring nothing at 1.3 plain steps each, 256 tokens: within 3 % of plain decoding."""
    gate, time, tokens = Gate(), 0.0, 0
    gate.begin()
    while tokens < 256:
        cost = 1.0
        if gate.open():
            cost = 1.3
            gate.saw(1.0, cost)
        time += cost
        tokens += 1
    assert time < 256 * 1.03


def test_after_a_bad_text_the_next_one_has_a_shorter_trial():
    gate = Gate()
    lengths = []
    for _ in range(2):
        gate.begin()
        tried = 0
        while gate.open():
            gate.saw(1.0, 1.3)
            tried += 1
        lengths.append(tried)
    assert lengths[1] < lengths[0]


def test_a_batch_has_a_short_trial():
    gate = Gate()
    gate.begin(doubtful=True)
    rounds = 0
    while gate.open():
        gate.saw(1.0, 1.2)
        rounds += 1
    assert rounds == 3


def test_drawn_text_is_tried_less_often():
    tries = {}
    for doubtful in (False, True):
        gate, tries[doubtful] = Gate(doubtful), 0
        for _ in range(64):
            if gate.open():
                gate.saw(1.0, 1.5)
                tries[doubtful] += 1
    assert tries[True] == 2 < tries[False]


def test_a_good_text_keeps_it_open():
    rng, gate = random.Random(1), Gate()
    gate.begin()
    closed = sum(
        not gate.open() or gate.saw(rng.choice([1, 1, 2, 3]), 1.2) is not None  # type: ignore[func-returns-value]
        for _ in range(500)
    )
    assert closed < 150


def test_what_costs_nothing_goes_on_behind_a_closed_gate():
    """Rounds in which no draft forward was made do not open or close it."""
    plan = speculating(Planner(CHEAP))
    for _ in range(40):
        budget = plan.budget([sequence()])
        plan.saw([tree(0.5)], [(0,)], [1], 0, 0.0, 1.5)
    assert budget is not None and budget.paid


def test_in_a_batch_a_closed_gate_stops_lookups_too():
    sequences = [sequence(i) for i in range(4)]
    planner = Planner(CHEAP)
    plan = planner.start(True)
    drafted = [tree(0.5) for _ in sequences]
    asked = []
    for _ in range(40):
        budget = plan.budget(sequences)
        asked.append(budget is not None)
        if budget is not None:
            plan.saw(drafted, [(0,)] * 4, [1] * 4, 0, 0.0, 8.0)
    assert asked[1] and not asked[-1]
