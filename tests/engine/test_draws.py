"""Random numbers: what is sampled is torch's multinomial, however far a drafter has looked ahead."""

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


@given(looks=st.lists(st.integers(0, 5), min_size=STEPS, max_size=STEPS))
def test_looking_ahead_changes_no_sample_and_leaves_the_generator_where_it_would_be(looks):
    p, expected, generator = probabilities(), torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    own = SampleNoise(generator)
    for look, each in zip(looks, p, strict=True):
        own.peek(look)
        assert own.sample(each) == int(torch.multinomial(each, 1, generator=expected))
    own.restore_generator()
    assert torch.equal(generator.get_state(), expected.get_state())


@given(looks=st.lists(st.integers(0, 5), min_size=STEPS, max_size=STEPS), rehearsed=st.integers(1, STEPS - 1))
def test_one_text_samples_what_multinomial_does_and_its_rehearsal_what_comes(looks, rehearsed):
    p = probabilities()
    expected = torch.Generator().manual_seed(9)
    own, found = SampleNoise(torch.Generator().manual_seed(9)), []
    assert own.peek(0) is None  # nothing has been sampled: how many numbers it takes is not known
    for step, look in enumerate(looks):
        if step:
            ahead = own.peek(look)
            assert ahead is not None and torch.equal(ahead, own.peek(look))
        if step == rehearsed:
            twin = own.fork_for_draft()
            found = [twin.sample(x) for x in p[step:]]
        sampled = own.sample(p[step])
        assert sampled == int(torch.multinomial(p[step], 1, generator=expected))
        if step >= rehearsed:
            assert sampled == found[step - rehearsed]


def test_nobody_looks_ahead_of_the_global_generator():
    own = SampleNoise(None)
    own.sample(probabilities()[0])
    assert own.peek(0) is None


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.0, min_p=0.05)])
def test_who_says_what_the_target_says_foresees_what_it_samples(sampling):
    logits = 2 * torch.randn(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(False, sampling.processors(), SampleNoise(torch.Generator().manual_seed(3)))
    empty, tokens = torch.empty(0, dtype=torch.long), torch.arange(VOCABULARY)
    sampler.sample(empty, logits[0])
    assert sampler.is_noise_known
    foreseen = [sampler.gumbel_coupled_logprobs(i, x.log_softmax(-1), tokens) for i, x in enumerate(logits[1:])]
    assert [int(x.argmax()) for x in foreseen] == [sampler.sample(empty, x) for x in logits[1:]]
    assert torch.allclose(torch.stack(foreseen).exp().sum(-1), torch.ones(STEPS - 1))


def test_numbers_that_are_not_to_be_known_give_the_same_samples():
    p = probabilities()
    known, unknown = (SampleNoise(torch.Generator().manual_seed(3), given) for given in (True, False))
    assert [known.sample(x) for x in p[:4]] == [unknown.sample(x) for x in p[:4]]
    assert known.peek(0) is not None and unknown.peek(0) is None
    rehearsed = unknown.fork_for_draft()
    assert [rehearsed.sample(x) for x in p[4:]] != (true := [unknown.sample(x) for x in p[4:]])
    assert true == [known.sample(x) for x in p[4:]]
