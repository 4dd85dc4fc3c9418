"""Random numbers: what is sampled is torch's multinomial, however far a drafter has looked ahead."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.engine.draws import OwnDraws, StepDraws
from longdraft.engine.sampler import Sampler, Sampling

STEPS, ROWS, VOCABULARY = 12, 3, 20


def probabilities() -> torch.Tensor:
    return torch.rand(STEPS, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)).softmax(-1)


def together() -> list[list[int]]:
    torch.manual_seed(5)
    return [torch.multinomial(p, 1)[:, 0].tolist() for p in probabilities()]


def test_rows_far_apart_draw_the_same():
    expected, p = together(), probabilities()
    torch.manual_seed(5)
    draws = StepDraws(ROWS, torch.device("cpu"))
    for row in (1, 0, 2):  # each goes to the end before the next begins
        own = draws.row(row)
        assert [own.sample(p[step, row]) for step in range(STEPS)] == [tokens[row] for tokens in expected]
        draws.close(row)
    assert not draws._states


def test_a_rehearsal_draws_what_comes_and_leaves_it():
    expected, p = together(), probabilities()
    torch.manual_seed(5)
    own = StepDraws(ROWS, torch.device("cpu")).row(2)
    first = own.sample(p[0, 2])
    twin = own.rehearsal()
    guessed = [twin.sample(p[step, 2]) for step in range(1, STEPS)]
    assert [first, *guessed] == [first, *(own.sample(p[step, 2]) for step in range(1, STEPS))]
    assert [first, *guessed] == [tokens[2] for tokens in expected]


@given(looks=st.lists(st.integers(0, 5), min_size=STEPS, max_size=STEPS))
def test_looking_ahead_changes_no_sample_and_leaves_a_batchs_generator_where_it_would_be(looks):
    expected, p = together(), probabilities()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    draws = StepDraws(ROWS, torch.device("cpu"))
    rows = [draws.row(i) for i in range(ROWS)]
    for step, look in enumerate(looks):
        for i, row in enumerate(rows):
            row.ahead(look)
            assert row.sample(p[step, i]) == expected[step][i]
    for i in range(ROWS):
        draws.close(i)
    assert torch.equal(torch.get_rng_state(), state)


@given(looks=st.lists(st.integers(0, 5), min_size=STEPS, max_size=STEPS), rehearsed=st.integers(1, STEPS - 1))
def test_one_text_samples_what_multinomial_does_and_its_rehearsal_what_comes(looks, rehearsed):
    p = probabilities()[:, 0]
    expected = torch.Generator().manual_seed(9)
    own, found = OwnDraws(torch.Generator().manual_seed(9)), []
    assert own.ahead(0) is None  # nothing has been sampled: how many numbers it takes is not known
    for step, look in enumerate(looks):
        if step:
            ahead = own.ahead(look)
            assert ahead is not None and torch.equal(ahead, own.ahead(look))
        if step == rehearsed:
            twin = own.rehearsal()
            found = [twin.sample(x) for x in p[step:]]
        sampled = own.sample(p[step])
        assert sampled == int(torch.multinomial(p[step], 1, generator=expected))
        if step >= rehearsed:
            assert sampled == found[step - rehearsed]


def test_nobody_looks_ahead_of_the_global_generator():
    own = OwnDraws(None)
    own.sample(probabilities()[0, 0])
    assert own.ahead(0) is None


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6), Sampling(1.0, top_k=3), Sampling(1.0, min_p=0.05)])
def test_who_says_what_the_target_says_foresees_what_it_samples(sampling):
    logits = 2 * torch.randn(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(False, sampling.processors(), OwnDraws(torch.Generator().manual_seed(3)))
    empty, tokens = torch.empty(0, dtype=torch.long), torch.arange(VOCABULARY)
    sampler.sample(empty, logits[0])
    assert sampler.foresees
    foreseen = [sampler.foresee(i, x.log_softmax(-1), tokens) for i, x in enumerate(logits[1:])]
    assert [int(x.argmax()) for x in foreseen] == [sampler.sample(empty, x) for x in logits[1:]]
    assert torch.allclose(torch.stack(foreseen).exp().sum(-1), torch.ones(STEPS - 1))


def test_nobody_looks_ahead_where_others_take_numbers_too():
    own = StepDraws(ROWS, torch.device("cpu"), alone=False).row(0)
    own.sample(probabilities()[0, 0])
    assert own.ahead(0) is None


def test_numbers_that_are_not_to_be_known_give_the_same_samples():
    p = probabilities()[:, 0]
    known, unknown = (OwnDraws(torch.Generator().manual_seed(3), given) for given in (True, False))
    assert [known.sample(x) for x in p[:4]] == [unknown.sample(x) for x in p[:4]]
    assert known.ahead(0) is not None and unknown.ahead(0) is None
    rehearsed = unknown.rehearsal()
    assert [rehearsed.sample(x) for x in p[4:]] != (true := [unknown.sample(x) for x in p[4:]])
    assert true == [known.sample(x) for x in p[4:]]
