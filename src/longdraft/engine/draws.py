"""The random numbers that tokens are sampled with: a sample of p is the argmax of p / e, one exponential e a token.

That is how torch's multinomial samples. It is also the argmax of log p - log e: a Gumbel number is added to each
log-probability. A drafter that adds the numbers of coming samples to its own log-probabilities mostly finds the tokens
that the target will sample (Daliri et al. 2024, arXiv:2408.07978), without changing them.
"""

from __future__ import annotations

from collections import deque

import torch


class Draws:
    """The random numbers of one sequence's samples.

    Args:
        generator: nobody else uses it meanwhile; None: torch's global one, whose numbers are never known ahead.
        known: the numbers of coming samples are known ahead.
    """

    def __init__(self, generator: torch.Generator | None, known: bool = True) -> None:
        self._generator, self._known = generator, known and generator is not None
        # Made ahead and not used yet, each with the generator's state before it.
        self._made: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._like: torch.Tensor | None = None

    def sample(self, probabilities: torch.Tensor) -> int:
        """Samples a token with these probabilities (vocabulary,)."""
        self._like = probabilities
        numbers = self._made.popleft()[1] if self._made else self._draw(probabilities)
        return int((probabilities / numbers).argmax())

    def ahead(self, count: int) -> torch.Tensor | None:
        """(vocabulary,) exponentials of the sample after ``count`` others; None if they are not known beforehand."""
        if not self._known or self._like is None or self._generator is None:
            return None
        while len(self._made) <= count:
            self._made.append((self._generator.get_state(), self._draw(self._like)))
        return self._made[count][1]

    def advance(self, count: int) -> None:
        """Skips the numbers of ``count`` samples, which were made with those of :meth:`ahead`."""
        for _ in range(count):
            self._made.popleft()

    def close(self) -> None:
        """Leaves the generator as if nothing had been made ahead."""
        if self._made and self._generator is not None:
            self._generator.set_state(self._made[0][0])
            self._made.clear()

    def rehearsal(self) -> Draws:
        """Returns the same coming numbers without using them up here; others where they are not to be known."""
        device = torch.device("cpu") if self._generator is None else self._generator.device
        generator = torch.Generator(device)
        if self._generator is not None and not self._known:
            return Draws(generator.manual_seed(self._generator.initial_seed() ^ 1), known=False)
        generator.set_state(torch.get_rng_state() if self._generator is None else self._generator.get_state())
        twin = Draws(generator)
        twin._made, twin._like = self._made.copy(), self._like
        return twin

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like).exponential_(1, generator=self._generator)
