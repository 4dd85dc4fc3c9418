"""The penalty on recent tokens: transformers' own, on a window of the text."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from longdraft import Speculator
from longdraft.bench.contenders import Job
from longdraft.bench.hf import Generate
from longdraft.engine.sampler import Sampler, Sampling
from tests.tiny import tiny_model


@pytest.mark.parametrize("window", [1, 3, 100])
def test_it_is_transformers_on_the_last_tokens(window):
    text, scores = torch.tensor([[1, 2, 3, 4, 2]]), torch.randn(1, 6)
    (mine,) = Sampling(repetition_penalty=1.3, repetition_window=window).processors()
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(text[:, -window:], scores)
    assert torch.equal(mine(text, scores.clone()), theirs)


def test_a_nodes_own_path_decides():
    """The window moves along the path: what leaves it is not penalised any more."""
    sampler = Sampler(True, Sampling(repetition_penalty=2.0, repetition_window=2).processors())
    logits = torch.tensor([1.0, 1.5, 0.9])
    assert sampler.sample(torch.tensor([1, 0, 0]), logits) == 1
    assert sampler.sample(torch.tensor([0, 0, 1]), logits) == 2
    assert sampler.sample(torch.tensor([1, 2, 2]), logits) == 1


def test_windows_that_cannot_be():
    for window in (0, -5, 2.5, True):
        with pytest.raises(ValueError, match=r"repetition_window must be (a whole number|at least 1)"):
            Sampling(repetition_penalty=1.2, repetition_window=window)
    with pytest.raises(ValueError, match="give that too"):
        Sampling(repetition_window=10)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generate_beside_which_we_are_measured_has_the_same(temperature):
    model = tiny_model(vocab=11, dtype=torch.float64)
    prompt, sampling = (3, 9, 4, 7), Sampling(temperature, repetition_penalty=1.5, repetition_window=6)
    theirs = Generate(model).cold(Job((prompt,), 30, sampling, 5, frozenset()))
    ours = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 4, dtype=torch.long), max_new_tokens=30, do_sample=False
    )
    mine = Speculator("ar", target=model).generate([list(prompt)], max_new_tokens=30, sampling=sampling, seed=5)[0]
    assert list(theirs.tokens[0]) == mine.token_ids != ours[0, 4:].tolist()
