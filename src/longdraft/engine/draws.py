"""The random numbers that tokens are sampled with: a sample of p is the argmax of p / e, one exponential e a token.

That is how torch's multinomial samples. It is also the argmax of log p - log e: a Gumbel number is added to each
log-probability. A drafter that adds the numbers of coming samples to its own log-probabilities mostly finds the tokens
that the target will sample (Daliri et al. 2024, arXiv:2408.07978), without changing them.

:class:`OwnDraws` serve a sequence with a generator to itself. :class:`StepDraws` serve a batch as ``generate`` does:
numbers are taken once a step for all rows together, so a row's depend on its place in the batch. Here rows come to a
step at different times. The block of a step is made when the first row needs it, in the order of steps; for the others
it is kept, or made again from the state that the generator had.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Protocol

import torch

# Blocks that are kept: rows are rarely more steps apart, nor drafts longer.
_KEPT = 16


class Draws(Protocol):
    """The random numbers of one sequence's samples."""

    def sample(self, probabilities: torch.Tensor) -> int:
        """Samples a token with these probabilities (vocabulary,)."""

    def ahead(self, count: int) -> torch.Tensor | None:
        """(vocabulary,) exponentials of the sample after ``count`` others; None if they are not known beforehand."""

    def advance(self, count: int) -> None:
        """Skips the numbers of ``count`` samples, which were made with those of :meth:`ahead`."""

    def rehearsal(self) -> Draws:
        """Returns the same coming numbers without using them up here."""


class OwnDraws:
    """Random numbers from a generator that nobody else uses.

    Args:
        generator: None: torch's global one, whose numbers are never known ahead.
        known: the numbers of coming samples are known ahead.
    """

    def __init__(self, generator: torch.Generator | None, known: bool = True) -> None:
        self._generator, self._known = generator, known and generator is not None
        self._made: deque[torch.Tensor] = deque()  # known ahead, and not used yet
        self._like: torch.Tensor | None = None

    def sample(self, probabilities: torch.Tensor) -> int:
        self._like = probabilities
        numbers = self._made.popleft() if self._made else self._draw(probabilities)
        return int((probabilities / numbers).argmax())

    def ahead(self, count: int) -> torch.Tensor | None:
        if not self._known or self._like is None:
            return None
        while len(self._made) <= count:
            self._made.append(self._draw(self._like))
        return self._made[count]

    def advance(self, count: int) -> None:
        for _ in range(count):
            self._made.popleft()

    def rehearsal(self) -> OwnDraws:
        """Like the protocol's, but with other numbers where the coming ones are not to be known."""
        device = torch.device("cpu") if self._generator is None else self._generator.device
        generator = torch.Generator(device)
        if self._generator is not None and not self._known:
            return OwnDraws(generator.manual_seed(self._generator.initial_seed() ^ 1), known=False)
        generator.set_state(torch.get_rng_state() if self._generator is None else self._generator.get_state())
        twin = OwnDraws(generator)
        twin._made, twin._like = self._made.copy(), self._like
        return twin

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like).exponential_(1, generator=self._generator)


class StepDraws:
    """Random numbers from torch's global generator, for the rows of a batch.

    Args:
        rows: number of rows.
        device: where logits are.
        alone: nobody else takes numbers from that generator meanwhile, so that they may be made ahead.
    """

    def __init__(self, rows: int, device: torch.device, alone: bool = True) -> None:
        self._rows, self.alone = rows, alone
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generator = torch.cuda.default_generators[index]
        else:
            self.generator = torch.default_generator
        self._made = 0  # steps whose blocks were made
        self._states: dict[int, torch.Tensor] = {}  # of the generator, before each step's block
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._next = dict.fromkeys(range(rows), 0)  # each row's next step
        self._steps = 0  # most steps of any row
        self._like: torch.Tensor | None = None

    def row(self, index: int) -> RowDraws:
        return RowDraws(self, index)

    def close(self, row: int) -> None:
        """Ends a row. After the last, the generator is as if nothing had been made ahead."""
        self._next.pop(row, None)
        if not self._next and self._steps in self._states:
            self.generator.set_state(self._states[self._steps])
        self._forget()

    def at(self, step: int, row: int, like: torch.Tensor | None = None) -> torch.Tensor | None:
        """(vocabulary,) exponentials of a row at a step.

        Args:
            like: has their shape, dtype and device; None: like the last ones. If there were none, returns None.
        """
        like = self._like if like is None else like
        if like is None:
            return None
        self._like = like
        while self._made <= step:
            self._states[self._made] = self.generator.get_state()
            self._keep(self._made, self._draw(like))
            self._made += 1
        if step not in self._blocks:
            now = self.generator.get_state()
            self.generator.set_state(self._states[step])
            self._keep(step, self._draw(like))
            self.generator.set_state(now)
        return self._blocks[step][row]

    def advance(self, row: int, step: int) -> None:
        """Ends a step of a row."""
        if row in self._next:
            self._next[row] = step + 1
            self._steps = max(self._steps, step + 1)
            self._forget()

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        block = torch.empty(self._rows, like.shape[0], dtype=like.dtype, device=like.device)
        return block.exponential_(1, generator=self.generator)

    def _keep(self, step: int, block: torch.Tensor) -> None:
        self._blocks[step] = block
        if len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)

    def _forget(self) -> None:
        first = min(self._next.values(), default=self._made)
        self._states = {step: state for step, state in self._states.items() if step >= first}


class RowDraws:
    """The random numbers of one row, from step ``step`` on; ``rehearsed`` ones leave the batch's unchanged."""

    def __init__(self, draws: StepDraws, row: int, step: int = 0, rehearsed: bool = False) -> None:
        self._draws, self._row, self._step, self._rehearsed = draws, row, step, rehearsed

    def ahead(self, count: int) -> torch.Tensor | None:
        return self._draws.at(self._step + count, self._row) if self._draws.alone else None

    def rehearsal(self) -> RowDraws:
        return RowDraws(self._draws, self._row, self._step, rehearsed=True)

    def sample(self, probabilities: torch.Tensor) -> int:
        numbers = self._draws.at(self._step, self._row, probabilities)
        assert numbers is not None
        token = int((probabilities / numbers).argmax())
        self.advance(1)
        return token

    def advance(self, count: int) -> None:
        self._step += count
        if not self._rehearsed:
            self._draws.advance(self._row, self._step - 1)
