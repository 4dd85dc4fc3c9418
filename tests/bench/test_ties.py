"""First differences of outputs, and whether rounding explains them."""

from __future__ import annotations

import math

import pytest
import torch

from longdraft import Sampling, Speculator
from longdraft.bench.ties import compare_outputs, near_tie
from longdraft.model.runner import TargetRunner
from tests.support.tiny import tiny_model

PROMPT = [5, 6, 7, 8, 9]


def test_the_gap_is_that_of_the_models_logits_there():
    model = tiny_model()
    assert compare_outputs(TargetRunner(model), PROMPT, [1, 2], [1, 2]) is None
    found = compare_outputs(TargetRunner(model), PROMPT, [10, 11, 12], [10, 11, 13])
    logits = model(torch.tensor([[*PROMPT, 10, 11]])).logits[0, -1].detach()
    assert (found.position, found.token, found.reference) == (2, 12, 13)
    assert found.gap == pytest.approx(float((logits[12] - logits[13]).abs()), abs=1e-4)
    assert not found.near_tie
    found = compare_outputs(TargetRunner(model), PROMPT, [10], [10, 11])  # an end is no near tie
    assert (found.position, found.token, found.reference, found.gap) == (1, None, 11, math.inf)
    assert not found.near_tie


def twins(gap: float):
    """A model whose tokens 2k and 2k + 1 have nearly the same logits: a near tie at every step."""
    model = tiny_model(vocab=60)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[1::2] = head[::2] * (1 + gap)
    return model


def test_a_near_tie():
    tokens = Speculator("ar", target=twins(0)).generate(PROMPT, max_new_tokens=6)[0].token_ids
    other = [*tokens[:4], tokens[4] ^ 1, 3]
    runner = TargetRunner(twins(0))
    found = compare_outputs(runner, PROMPT, other, tokens)
    assert found.position == 4
    assert found.gap < 1e-6
    assert found.near_tie
    assert not compare_outputs(TargetRunner(twins(0.1)), PROMPT, other, tokens).near_tie


@pytest.mark.parametrize(
    ("dtype", "logit", "gap", "near"),
    [
        (torch.float32, -20.0, 1e-4, True),
        (torch.float32, 20.0, 2e-4, False),
        (torch.bfloat16, 20.0, 0.5, True),  # four spacings of 0.125
        (torch.bfloat16, 20.0, 0.625, False),
        (torch.float16, 20.0, 0.125, False),
        (torch.float32, 20.0, math.inf, False),
        (torch.float32, 0.0, 0.0, True),
    ],
)
def test_how_near_is_a_matter_of_the_dtypes_spacing(dtype, logit, gap, near):
    assert near_tie(gap, logit, dtype) is near


def test_processors_are_applied_first():
    model = twins(0)
    sampling = Sampling(repetition_penalty=3.0)
    # 11's twin 10 has been said and is penalised, so what ties without the processor does not with it.
    plain = compare_outputs(TargetRunner(model), [*PROMPT, 10], [10], [11])
    penalised = compare_outputs(TargetRunner(model), [*PROMPT, 10], [10], [11], sampling)
    assert plain.near_tie
    assert not penalised.near_tie


def test_two_tokens_that_a_filter_ruled_out():
    model = tiny_model()
    worst = model(torch.tensor([PROMPT])).logits[0, -1].argsort()[:2].tolist()
    found = compare_outputs(TargetRunner(model), PROMPT, worst[:1], worst[1:], Sampling(temperature=1.0, top_k=2))
    assert found.gap == math.inf
