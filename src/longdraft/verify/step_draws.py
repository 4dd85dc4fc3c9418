"""The random numbers of a batch, as ``generate`` takes them: once a step, for all rows together.

A multinomial sample is the argmax of p / e with one exponential e a token. ``generate`` makes the (B, vocabulary)
exponentials of a step together, so a row's depend on its place in the batch. Here rows come to a step at different
times. The block of a step is made when the first row gets there, in the order of steps; for the others it is kept, or
made again from the state that the generator had.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

# Blocks that are kept rather than made again: rows are rarely further apart.
_KEPT = 4


class StepDraws:
    """Random numbers from torch's global generator, for the rows of a batch.

    Args:
        rows: of the batch. device: where logits are.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generator = torch.cuda.default_generators[index]
        else:
            self.generator = torch.default_generator
        self._drawn = 0
        self._states: dict[int, torch.Tensor] = {}
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._next = dict.fromkeys(range(rows), 0)

    def row(self, index: int) -> RowDraws:
        """The random numbers of one row."""
        return RowDraws(self, index)

    def close(self, row: int) -> None:
        """Told when a row has ended: it needs no more numbers."""
        self._next.pop(row, None)
        self._forget()

    def at(self, step: int, row: int, like: torch.Tensor) -> torch.Tensor:
        """(vocabulary,) exponentials of a row at a step; ``like`` has their shape, dtype and device."""
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

    def took(self, row: int, step: int) -> None:
        """A row will not ask for this step again."""
        if row in self._next:
            self._next[row] = step + 1
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
        """Where they come from."""
        return self._draws.generator

    def rehearsal(self) -> RowDraws:
        """The same numbers as will come here, which are left as they are."""
        return RowDraws(self._draws, self._row, self._step, rehearsed=True)

    def sample(self, probabilities: torch.Tensor) -> int:
        """A token sampled with these probabilities (vocabulary,)."""
        token = int((probabilities / self._draws.at(self._step, self._row, probabilities)).argmax())
        if not self._rehearsed:
            self._draws.took(self._row, self._step)
        self._step += 1
        return token
