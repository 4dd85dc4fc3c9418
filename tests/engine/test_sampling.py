"""Sampling settings: what transformers' generate would do with them, and the values they refuse."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from longdraft import Sampling
from tests.support.tiny import tiny_model

SETTINGS = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.5},
}


def processors_of_generate(**settings):
    """The processors that transformers passes to a decoding loop for these settings."""
    model, ids, got = tiny_model(), torch.tensor([[1, 2, 3]]), {}

    def loop(model, input_ids, logits_processor, **kwargs):
        got["processors"] = logits_processor
        return input_ids

    off = {"top_k": 0, "top_p": 1.0}
    model.generate(ids, max_new_tokens=1, custom_generate=loop, **(off | settings))
    return got["processors"]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_mean_what_they_mean_in_generate(settings):
    text, scores = torch.tensor([[3, 5, 5, 60]]), 3 * torch.randn(1, 61)
    expected = processors_of_generate(do_sample=True, **settings)
    ours = Sampling(**settings).processors()
    assert len(ours) == len(expected) and all(map(isinstance, ours, map(type, expected)))
    assert torch.equal(ours(text, scores.clone()), expected(text, scores.clone()))


# --- the penalty on recent tokens ---


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_penalty_window_is_transformers_penalty_on_the_last_tokens(window):
    text, scores = torch.tensor([[1, 2, 3, 4, 2]]), torch.randn(1, 6)
    (mine,) = Sampling(repetition_penalty=1.3, repetition_window=window).processors()
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(text[:, -window:], scores)
    assert torch.equal(mine(text, scores.clone()), theirs)


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("top_p", [0.02, 0.8, 0.999])
def test_top_p_keeps_the_tokens_that_transformers_keeps(scale, top_p):
    """From nearly uniform distributions, which sort the whole vocabulary, to peaked ones."""
    for seed in range(4):
        scores = scale * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(seed))
        scores[0, 7] = -torch.inf
        (found,) = (p(None, scores.clone()) for p in Sampling(temperature=1.0, top_p=top_p).processors())
        expected = TopPLogitsWarper(top_p)(None, scores.clone())
        # Sums from above and from below round otherwise: the last of thousands of tokens may be one or the other.
        differ = (found != expected).nonzero()[:, 1]
        assert len(differ) <= 1 + int((expected > -torch.inf).sum()) // 1000
        kept = found > -torch.inf
        assert torch.equal(found[kept], scores[kept])
