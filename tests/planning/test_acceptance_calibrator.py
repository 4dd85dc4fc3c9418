"""The agreement rate of a draft is learned, and calibrates the probabilities of its tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.planning.acceptance import AcceptanceCalibrator
from longdraft.trees.tree import TokenTree


@given(st.floats(0.0, 1.0), st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5))
def test_calibrated_probabilities_are_probabilities_and_the_first_one_rises(rate, weights):
    p = torch.tensor(sorted(weights, reverse=True))
    p = p / (2 * p.sum())  # other children have the rest
    calibrated = AcceptanceCalibrator(rate).calibrate(p.log()).exp()
    assert calibrated[0] >= p[0] - 1e-6 and bool((calibrated[1:] <= p[1:] + 1e-6).all())
    assert float(calibrated.sum()) <= 1.0 + 1e-5
    assert float(calibrated[0]) == pytest.approx(rate + (1 - rate) * float(p[0]), abs=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_the_rate_is_estimated(rate):
    """Top-1 nodes with p = 0.25 are accepted as the model says. The prior counts as eight of the last fifty."""
    torch.manual_seed(1)
    calibrator = AcceptanceCalibrator(0.5)
    tail = []
    for i in range(1500):
        calibrated = float(calibrator.calibrate(torch.tensor([0.25]).log())[0])
        tree = TokenTree((7, 1), (-1, 0), (0.0, calibrated))
        calibrator.observe(tree, [1 if torch.rand(()) < rate + (1 - rate) * 0.25 else 2])
        tail += [calibrator.agreement_rate] if i > 500 else []
    assert sum(tail) / len(tail) == pytest.approx(rate, abs=0.2)


def test_nodes_after_a_rejected_one_are_not_counted():
    tree = TokenTree((7, 1, 2), (-1, 0, 1), (0.0, -0.1, -0.1))
    one, other = AcceptanceCalibrator(0.5), AcceptanceCalibrator(0.5)
    one.observe(tree, [3, 2])
    other.observe(TokenTree((7, 1), (-1, 0), (0.0, -0.1)), [3, 2])
    assert one.agreement_rate == other.agreement_rate < 0.5
    other.observe(TokenTree((7,), (-1,)), [3])
    assert one.agreement_rate == other.agreement_rate
