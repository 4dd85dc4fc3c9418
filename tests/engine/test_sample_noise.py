"""Sample noise: samples equal torch's multinomial, however far a drafter peeks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import Sampling
from longdraft.engine.sampler import SampleNoise, Sampler

STEPS, VOCABULARY = 12, 20


def probabilities() -> torch.Tensor:
    return torch.rand(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(1)).softmax(-1)


@given(counts=st.lists(st.integers(0, 5), min_size=STEPS, max_size=STEPS), forked_at=st.integers(1, STEPS - 1))
def test_samples_equal_multinomial_however_far_one_peeks_and_a_fork_samples_the_same(counts, forked_at):
    p, expected, generator = probabilities(), torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    noise, expected_tail = SampleNoise(generator), []
    assert noise.peek(0) is None  # nothing has been sampled, so the vocabulary's size is not known
    for step, count in enumerate(counts):
        if step:
            ahead = noise.peek(count)
            assert ahead is not None and torch.equal(ahead, noise.peek(count))
        if step == forked_at:
            forked = noise.fork_for_draft()
            expected_tail = [forked.sample(x) for x in p[step:]]
        sampled = noise.sample(p[step])
        assert sampled == int(torch.multinomial(p[step], 1, generator=expected))
        assert step < forked_at or sampled == expected_tail[step - forked_at]
    noise.restore_generator()
    assert torch.equal(generator.get_state(), expected.get_state())


def test_the_global_generator_cannot_be_peeked():
    noise = SampleNoise(None)
    noise.sample(probabilities()[0])
    assert noise.peek(0) is None


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.0, min_p=0.05)])
def test_coupled_logprobs_of_the_target_predict_its_samples(sampling):
    logits = 2 * torch.randn(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(False, sampling.processors(), SampleNoise(torch.Generator().manual_seed(3)))
    empty, tokens = torch.empty(0, dtype=torch.long), torch.arange(VOCABULARY)
    sampler.sample(empty, logits[0])
    assert sampler.is_noise_known
    coupled = [sampler.gumbel_coupled_logprobs(i, x.log_softmax(-1), tokens) for i, x in enumerate(logits[1:])]
    assert [int(x.argmax()) for x in coupled] == [sampler.sample(empty, x) for x in logits[1:]]
    assert torch.allclose(torch.stack(coupled).exp().sum(-1), torch.ones(STEPS - 1))


def test_unpredictable_noise_gives_the_same_samples_and_other_forks():
    p = probabilities()
    known, unknown = (SampleNoise(torch.Generator().manual_seed(3), given) for given in (True, False))
    assert [known.sample(x) for x in p[:4]] == [unknown.sample(x) for x in p[:4]]
    assert known.peek(0) is not None and unknown.peek(0) is None
    forked_at = unknown.fork_for_draft()
    assert [forked_at.sample(x) for x in p[4:]] != (true := [unknown.sample(x) for x in p[4:]])
    assert true == [known.sample(x) for x in p[4:]]
