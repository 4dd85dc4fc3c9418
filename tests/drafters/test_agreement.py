"""How often a draft agrees with its target is learned, and says what its chains are worth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.drafters.shared.acceptance_calibrator import PRIOR_WEIGHT, AcceptanceCalibrator
from longdraft.trees.tree import TokenTree


@given(st.floats(0.0, 1.0), st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5))
def test_lifted_probabilities_are_probabilities_and_the_first_gains(share, weights):
    p = torch.tensor(sorted(weights, reverse=True))
    p = p / (2 * p.sum())  # children that were not asked for have the rest
    lifted = AcceptanceCalibrator(share).calibrate(p.log()).exp()
    assert lifted[0] >= p[0] - 1e-6 and bool((lifted[1:] <= p[1:] + 1e-6).all())
    assert float(lifted.sum()) <= 1.0 + 1e-5
    assert float(lifted[0]) == pytest.approx(share + (1 - share) * float(p[0]), abs=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_share_is_found(share):
    """Of nodes whose p is 0.25, as many are right as the model says. The prior is worth eight of the last fifty."""
    torch.manual_seed(1)
    known = AcceptanceCalibrator(0.5)
    tail = []
    for i in range(1500):
        lifted = float(known.calibrate(torch.tensor([0.25]).log())[0])
        tree = TokenTree((7, 1), (-1, 0), (0.0, lifted))
        known.observe(tree, [1 if torch.rand(()) < share + (1 - share) * 0.25 else 2])
        tail += [known.agreement_rate] if i > 500 else []
    assert sum(tail) / len(tail) == pytest.approx(share, abs=0.2)


def test_what_lies_behind_a_wrong_choice_says_nothing():
    tree = TokenTree((7, 1, 2), (-1, 0, 1), (0.0, -0.1, -0.1))
    one, other = AcceptanceCalibrator(0.5), AcceptanceCalibrator(0.5)
    one.observe(tree, [3, 2])
    other.observe(TokenTree((7, 1), (-1, 0), (0.0, -0.1)), [3, 2])
    assert one.agreement_rate == other.agreement_rate < 0.5
    other.observe(TokenTree((7,), (-1,)), [3])
    assert one.agreement_rate == other.agreement_rate


def test_a_right_choice_that_was_said_to_be_impossible_is_no_evidence_for_a_share_of_nothing():
    known = AcceptanceCalibrator(0.0)
    known.observe(TokenTree((7, 1), (-1, 0), (0.0, -1e9)), [1])
    assert known.agreement_rate == 0.0
    known = AcceptanceCalibrator(0.5)
    known.observe(TokenTree((7, 1), (-1, 0), (0.0, -1e9)), [1])  # less than the share cannot have been said
    assert known.agreement_rate == pytest.approx((PRIOR_WEIGHT * 0.5 + 1) / (PRIOR_WEIGHT + 1))
