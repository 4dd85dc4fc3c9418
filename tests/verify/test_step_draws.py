"""Rows that draw at their own pace draw what one multinomial a step gives them together."""

from __future__ import annotations

import torch

from longdraft.verify.step_draws import StepDraws

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
