"""How a drafter samples, for residual acceptance: from what the target's processors make of its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Takes token ids (1, n) and scores (1, vocabulary), returns scores.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DraftSampler:
    """Samples one sequence's drafted tokens.

    Args:
        processors: those that the target's logits go through, or copies of theirs; None for the plain distribution.
        generator: its random numbers, independent of those that the target's tokens are sampled with.
        text: gives the (n,) token ids up to and including the root; called only when processors need it.
        vocabulary: of the target.
    """

    def __init__(
        self,
        processors: Processor | None,
        generator: torch.Generator,
        text: Callable[[], torch.Tensor],
        vocabulary: int,
    ) -> None:
        self._processors, self._generator, self._text, self._vocabulary = processors, generator, text, vocabulary

    def distribution(self, path: Sequence[int], logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """The draft distribution q, (vocabulary,) float32, of what follows a path from the root.

        Args:
            logits: (draft vocabulary,), the draft's.
            ids: (draft vocabulary,) target id of each draft id; None: they are the same.
        """
        scores = torch.full((self._vocabulary,), float("-inf"), device=logits.device)
        places = slice(len(logits)) if ids is None else ids
        scores[places] = logits[: self._vocabulary].float()
        if self._processors is not None:
            text = self._text()
            scores = self._processors(torch.cat([text, text.new_tensor(path)])[None], scores[None])[0]
        q = torch.softmax(scores, -1)
        # A draft that overflowed proposes badly, that is all; so does one that processors left no token.
        return q if bool(q.isfinite().all()) else torch.full_like(q, 1 / self._vocabulary)

    def sample(self, q: torch.Tensor, count: int) -> tuple[list[int], int]:
        """Up to ``count`` different tokens in the order in which they are sampled, and how many may be.

        q / e with one exponential e a token: the largest is a sample of q, the next one a sample of the rest.
        """
        noise = torch.empty_like(q).exponential_(generator=self._generator).clamp_min_(1e-30)
        keys, tokens = (q / noise).topk(min(count, len(q)))
        return tokens.tolist(), int((keys > 0).sum())
