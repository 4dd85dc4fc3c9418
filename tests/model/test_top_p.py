"""Top-p on a GPU: the kernel against its definition in Triton's interpreter, and the tokens against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers import TopPLogitsWarper

pytest.importorskip("triton")

from longdraft import Sampling
from longdraft.model.gpu import top_p, top_p_kernel
from tests.support.simulated_gpu import SimulatedTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # one is to be seen with `-m gpu` alone


def scores_of(rows: int, size: int) -> torch.Tensor:
    """From nearly uniform to peaked."""
    noise = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    return torch.linspace(0.5, 9.0, rows)[:, None] * noise


@pytest.mark.parametrize("share", [0.02, 0.8, 0.999])
@pytest.mark.parametrize("size", [3, 5000])
def test_the_kernel_finds_the_lowest_probability_that_is_kept(share, size):
    probabilities = scores_of(5, size).softmax(-1).to(DEVICE)
    found = top_p_kernel.top_p_threshold(probabilities, share)
    expected = top_p.top_p_threshold(probabilities, share)
    # Sums in another order may end one token earlier or later.
    kept, expected_kept = ((probabilities >= x[:, None]).sum(-1) for x in (found, expected))
    assert (kept - expected_kept).abs().max() <= (size > 3)
    assert all((row == threshold).any() for row, threshold in zip(probabilities, found, strict=True))
    assert torch.equal(top_p_kernel.top_p_threshold(probabilities[2:3], share)[0], found[2])


def test_equal_probabilities_stay_together():
    probabilities = torch.tensor([[0.1, 0.3, 0.3, 0.2, 0.1], [0.2] * 5, [1.0, 0, 0, 0, 0]], device=DEVICE)
    for function in (top_p.top_p_threshold, top_p_kernel.top_p_threshold):
        assert function(probabilities, 0.35).tolist() == pytest.approx([0.3, 0.2, 1.0])


@pytest.mark.parametrize("share", [0.3, 0.95])
def test_the_tokens_are_those_of_transformers(share):
    scores = scores_of(4, 300)
    expected = TopPLogitsWarper(share)(None, scores.clone())
    assert torch.equal(top_p.keep_top_p(scores.to(DEVICE), share, -torch.inf).cpu(), expected)


def test_a_gpu_takes_this_way(simulated_gpu):
    (processor,) = Sampling(temperature=1.0, top_p=0.7).processors()
    scores = scores_of(3, 200)
    found = processor(None, SimulatedTensor(scores))
    assert not simulated_gpu.waits and simulated_gpu.launches == 4
    assert torch.equal(found.numbers, TopPLogitsWarper(0.7)(None, scores.clone()))
