"""The random numbers that tokens are sampled with: a sample of p is the argmax of p / e, one exponential e a token.

That is how torch's multinomial samples. It is the argmax of log p - log e too: a Gumbel number is added to each
log-probability. A drafter may look at the numbers of coming samples. Where it adds them to its own
log-probabilities, it mostly finds the tokens that the target will sample (Daliri et al. 2024, arXiv:2408.07978); what
these are does not depend on it.

:class:`OwnDraws` are a sequence's that has a generator to itself. :class:`StepDraws` are a batch's, as ``generate``
takes them: once a step, for all rows together, so a row's depend on its place in the batch. Here rows come to a step at
different times. The block of a step is made when it is first asked for, in the order of steps; for the others it is
kept, or made again from the state that the generator had.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Protocol

import torch

# Blocks that are kept rather than made again: rows are rarely further apart, nor drafts longer.
_KEPT = 16


class Draws(Protocol):
    """The random numbers of one sequence's samples.

    Attributes:
        generator: where they come from; None: torch's global one.
    """

    @property
    def generator(self) -> torch.Generator | None: ...

    def sample(self, probabilities: torch.Tensor) -> int:
        """A token sampled with these probabilities (vocabulary,)."""

    def ahead(self, count: int) -> torch.Tensor | None:
        """(vocabulary,) exponentials of the sample behind the next ``count``; None where they cannot be told."""

    def advance(self, count: int) -> None:
        """Told that ``count`` samples were made with the numbers of :meth:`ahead`: the next ones come behind them."""

    def rehearsal(self) -> Draws:
        """The same numbers as will come here, which are left as they are."""


class OwnDraws:
    """Random numbers from a generator that nobody else uses, or from torch's global one (none told ahead)."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._made: deque[torch.Tensor] = deque()  # looked at, and not used yet
        self._like: torch.Tensor | None = None

    @property
    def generator(self) -> torch.Generator | None:
        return self._generator

    def sample(self, probabilities: torch.Tensor) -> int:
        self._like = probabilities
        numbers = self._made.popleft() if self._made else self._draw(probabilities)
        return int((probabilities / numbers).argmax())

    def ahead(self, count: int) -> torch.Tensor | None:
        if self._generator is None or self._like is None:
            return None
        while len(self._made) <= count:
            self._made.append(self._draw(self._like))
        return self._made[count]

    def advance(self, count: int) -> None:
        for _ in range(count):
            self._made.popleft()

    def rehearsal(self) -> OwnDraws:
        device = torch.device("cpu") if self._generator is None else self._generator.device
        twin = OwnDraws(torch.Generator(device))
        assert twin._generator is not None
        own = self._generator
        twin._generator.set_state(torch.get_rng_state() if own is None else own.get_state())
        twin._made, twin._like = self._made.copy(), self._like
        return twin

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like).exponential_(1, generator=self._generator)


class StepDraws:
    """Random numbers from torch's global generator, for the rows of a batch.

    Args:
        rows: of the batch. device: where logits are.
        alone: nobody else takes numbers from that generator meanwhile, so that they may be looked at ahead.
    """

    def __init__(self, rows: int, device: torch.device, alone: bool = True) -> None:
        self._rows, self.alone = rows, alone
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generator = torch.cuda.default_generators[index]
        else:
            self.generator = torch.default_generator
        self._drawn = 0
        self._states: dict[int, torch.Tensor] = {}
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._next = dict.fromkeys(range(rows), 0)
        self._steps = 0  # as many as a row has taken
        self._like: torch.Tensor | None = None

    def row(self, index: int) -> RowDraws:
        """The random numbers of one row."""
        return RowDraws(self, index)

    def close(self, row: int) -> None:
        """Told when a row has ended: it needs no more numbers. After the last, it is as if nobody had looked ahead."""
        self._next.pop(row, None)
        if not self._next and self._steps in self._states:
            self.generator.set_state(self._states[self._steps])
        self._forget()

    def at(self, step: int, row: int, like: torch.Tensor | None = None) -> torch.Tensor | None:
        """(vocabulary,) exponentials of a row at a step; ``like`` has their shape, dtype and device. None: like the
        last ones; where there were none yet, there are none."""
        if like is None and self._like is None:
            return None
        self._like = like = self._like if like is None else like
        assert like is not None
        while self._drawn <= step:
            self._states[self._drawn] = self.generator.get_state()
            self._keep(self._drawn, self._draw(like))
            self._drawn += 1
        if step not in self._blocks:
            now = self.generator.get_state()
            self.generator.set_state(self._states[step])
            self._keep(step, self._draw(like))
            self.generator.set_state(now)
        return self._blocks[step][row]

    def advance(self, row: int, step: int) -> None:
        """A row will not ask for this step again."""
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
        first = min(self._next.values(), default=self._drawn)
        self._states = {step: state for step, state in self._states.items() if step >= first}


class RowDraws:
    """The random numbers of one row, step by step.

    Args:
        step: the next one.
    """

    def __init__(self, draws: StepDraws, row: int, step: int = 0, rehearsed: bool = False) -> None:
        self._draws, self._row, self._step, self._rehearsed = draws, row, step, rehearsed

    @property
    def generator(self) -> torch.Generator:
        return self._draws.generator

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
