"""What the training steps of all kinds of draft share: what is borrowed from the target, what is said, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from longdraft.model.parts import SharedParts
from longdraft.training.features import Features
from longdraft.training.losses import soft_cross_entropy, targets
from longdraft.training.vocabulary import rows_of, to_draft


class StepOutput(NamedTuple):
    """A tuple, so that FSDP finds the loss in it.

    Attributes:
        loss: summed over the learned rows, with its graph.
        ranks: (rows,) how many tokens the draft holds likelier than the text's next: 0 is a hit. None where the loss
            came from a kernel that does not tell.
        depths: (rows,) the level of drafting that each row was trained for: 1 for the root's.
    """

    loss: torch.Tensor
    ranks: torch.Tensor | None
    depths: torch.Tensor


class Said(NamedTuple):
    """What should be said by N rows, as draft ids; -1 where the draft's vocabulary has none.

    Attributes:
        text: (N,) the text's tokens. likely: (N, K) the target's likeliest.
        ids, weights: (N, K + 1) both mixed, as :func:`~longdraft.training.losses.soft_cross_entropy` takes them.
    """

    text: torch.Tensor
    likely: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def at(self, rows: torch.Tensor) -> Said:
        """The same of some of the rows."""
        return Said(*(each[rows] for each in self))


class Trainee(nn.Module):
    """A module with what it borrows from the target, of which nothing is trained or saved.

    Args:
        kept: (V',) target ids of the draft's vocabulary, None for all.
        distill: share of the loss that follows the target's own distribution.
        product_dtype: of the head's matrix products.
    """

    ahead = 1
    """Row t says token t + ahead."""

    def __init__(
        self, parts: SharedParts, kept: torch.Tensor | None, distill: float, product_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.kept, self.distill = kept, distill
        self._parts = parts  # no module: nothing of the target is registered
        self._product_dtype = product_dtype
        vocabulary = parts.head.shape[0]
        table = to_draft(torch.arange(vocabulary) if kept is None else kept.cpu(), vocabulary)
        self._to_draft = table.to(parts.head.device)

    def borrowed_head(self) -> torch.Tensor:
        """(V', hidden size) the target's head, the rows of the draft's vocabulary."""
        return rows_of(self._parts.head, self.kept).detach().to(self._product_dtype)

    def learned(self, tokens: int, start: int, shift: int) -> int:
        """Rows that are learned of a text of so many tokens, from token ``start`` on, at a shift."""
        return tokens - start - self.ahead + 1

    def bounds(self, document: Features, shift: int = 0) -> tuple[int, int]:
        """First and end of the rows that are learned.

        Raises:
            ValueError: there are none.
        """
        tokens = len(document.tokens)
        end = tokens - self.ahead
        first = end - self.learned(tokens, document.start, shift)
        if first >= end:
            where = f"at shift {shift}" if shift else f"from {first + 1} on"
            raise ValueError(f"a document of {tokens} tokens has none to learn {where}")
        return first, end

    def said(self, documents: Sequence[Features], firsts: Sequence[int]) -> Said:
        """What the rows from ``firsts`` on of documents, end to end, should say: the tokens that lie ``ahead``."""
        device, ahead = self._to_draft.device, self.ahead
        rows = list(zip(documents, firsts, strict=True))
        with torch.no_grad():
            text = self._to_draft[torch.cat([d.tokens[first + ahead :] for d, first in rows]).to(device)]
            likely = self._to_draft[torch.cat([d.top_ids[first + ahead - d.start :] for d, first in rows]).to(device)]
            log_probs = torch.cat([d.top_log_probs[first + ahead - d.start :] for d, first in rows]).to(device)
            return Said(text, likely, *targets(text, likely, log_probs, self.distill))

    def output(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        said: Said,
        depths: torch.Tensor,
        weight: torch.Tensor | float = 1.0,
    ) -> StepOutput:
        """The loss of (N, hidden size) rows by a head; a token that the draft lacks has the worst rank.

        Args:
            weight: of each row, (N, 1).
        """
        loss, ranks = soft_cross_entropy(hidden, head, said.ids, said.weights * weight)
        return StepOutput(loss, torch.where(said.text >= 0, ranks, len(head)), depths)
