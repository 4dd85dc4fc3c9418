"""EAGLE-3's training step: the training-time test, from a few documents' features to the loss of one block.

Step 0 is the draft behind the target's own features. Step i > 0 stands in for the draft's i-th token beyond them: a
row's g is the draft's output of the step before, one row back, while its token stays the text's. Every row goes through
every step, and sees just what it will see when drafting (:mod:`longdraft.training.drafted_attention`).

Row t joins the features of position t with token t+1 and says token t+2; its rotary position is t's in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from longdraft.drafters.eagle3_block import Eagle3Block
from longdraft.host.parts import SharedParts
from longdraft.training.drafted_attention import drafted
from longdraft.training.features import Features
from longdraft.training.longspec import StepOutput
from longdraft.training.losses import soft_cross_entropy, targets
from longdraft.training.vocabulary import to_draft

# positions (T,) -> cos and sin (T, d)
Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Eagle3Trainee(nn.Module):
    """The block with what it borrows from the target. The block alone has parameters, its head among them.

    Args:
        rotary: the draft's own.
        kept: (V',) target ids of the draft's vocabulary, None for all.
        steps: of the training-time test. decay: weight of a step, against the one before.
        window: keys of its own that a row sees, its own included; None for all.
        distill: share of the loss that follows the target's own distribution.
        product_dtype: of the head's matrix products, and of the features.
    """

    def __init__(
        self,
        block: Eagle3Block,
        parts: SharedParts,
        rotary: Rotary,
        kept: torch.Tensor | None = None,
        steps: int = 5,
        decay: float = 0.8,
        window: int | None = None,
        distill: float = 1.0,
        product_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.block = block
        self.steps, self.decay, self.window, self.distill = steps, decay, window, distill
        self._parts = parts  # no module: nothing of the target is registered, so none of it is trained or saved
        self._rotary, self._product_dtype = rotary, product_dtype
        vocabulary = parts.head.shape[0]
        kept = torch.arange(vocabulary) if kept is None else kept.cpu()
        self._to_draft = to_draft(kept, vocabulary).to(parts.head.device)

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), steps: int | None = None
    ) -> StepOutput:
        """The loss of a packed batch, summed over rows and, with their weights, over steps.

        Documents lie end to end, and none sees another. A row takes part in step i when it has i learned rows before
        it. Rows whose likeliest token (the target's) the draft cannot say teach nothing.

        Args:
            shifts: not used: every row goes through every step.
            steps: another number of steps than training's, for measuring.

        Returns:
            ``depths`` are 1 for step 0, and so on.
        """
        ids, features, positions, queries, truth, top_ids, top_log_probs = [], [], [], [], [], [], []
        lengths: list[int] = []
        counts: list[int] = []
        for document in documents:
            first, end = document.start - 1, len(document.tokens) - 2  # the last two tokens are said, not read
            if first >= end:
                raise ValueError(f"a document of {len(document.tokens)} tokens has none to learn from {first + 1} on")
            low = 0 if self.window is None else max(0, first - self.window + 1)
            ids.append(document.tokens[low + 1 : end + 1])
            features.append(document.hidden[low:end])
            positions.append(document.positions[low:end])
            queries.append(torch.arange(first - low, end - low) + sum(lengths))
            truth.append(document.tokens[first + 2 :])
            top_ids.append(document.top_ids[1:])
            top_log_probs.append(document.top_log_probs[1:])
            lengths.append(end - low)
            counts.append(end - first)
        device = self._to_draft.device
        with torch.no_grad():
            x = self._parts.embedding(torch.cat(ids).to(device)).float()
            cos, sin = self._rotary(torch.cat(positions).to(device))
            wanted = self._to_draft[torch.cat(truth).to(device)]
            likely = self._to_draft[torch.cat(top_ids).to(device)]
            target_ids, weights = targets(wanted, likely, torch.cat(top_log_probs).to(device), self.distill)
            weights = weights * (likely[:, :1] >= 0)

        # Float32: sums of the residual stream are; the products are autocast's.
        g = self.block.project(torch.cat(features).to(device, self._product_dtype)).float()
        attention = _Steps(lengths, counts, self.window)
        out = self.block(x, g, cos, sin, attention, torch.cat(queries).to(device))
        outputs, rows = [out], [torch.arange(sum(counts), device=device)]
        x, cos, sin = (t[torch.cat(queries).to(device)] for t in (x, cos, sin))
        for _ in range(1, steps or self.steps):
            fed, following = (index.to(device) for index in attention.next_step())
            if not len(following):  # short documents alone
                break
            x, cos, sin = x[following], cos[following], sin[following]
            out = self.block(x, out[fed], cos, sin, attention)
            outputs.append(out)
            rows.append(rows[-1][following])
        decays = [torch.full((len(r),), self.decay**i, device=device) for i, r in enumerate(rows)]
        depths = torch.cat([torch.full((len(r),), i + 1, device=device) for i, r in enumerate(rows)])
        row = torch.cat(rows)
        head = self.block.lm_head.weight.to(self._product_dtype)
        loss, ranks = soft_cross_entropy(
            self.block.norm(torch.cat(outputs)), head, target_ids[row], weights[row] * torch.cat(decays)[:, None]
        )
        return StepOutput(loss, torch.where(wanted[row] >= 0, ranks, len(head)), depths)


class _Steps:
    """Attention of one batch, step after step: remembers every step's keys.

    Args:
        lengths: rows of each document. counts: how many of them, the last ones, are learned.
    """

    def __init__(self, lengths: list[int], counts: list[int], window: int | None) -> None:
        self.lengths, self.counts, self.window = lengths, counts, window
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._later: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in lengths]

    def next_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every document loses its first row.

        Returns:
            Among the rows until now, those whose output is fed (all but each document's last), and those that are left
            (all but its first).
        """
        at = torch.arange(sum(self.counts)).split(self.counts)
        fed, left = torch.cat([i[:-1] for i in at]), torch.cat([i[1:] for i in at])
        self.counts = [max(0, n - 1) for n in self.counts]
        return fed, left

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Split, never sliced: the gradient of a slice is as large as what it was cut from.
        if not self._first:
            each = zip(k.split(self.lengths, 1), v.split(self.lengths, 1), strict=True)
            self._first = [(k.contiguous(), v.contiguous()) for k, v in each]
        else:
            for kept, *pair in zip(self._later, k.split(self.counts, 1), v.split(self.counts, 1), strict=True):
                kept.append((pair[0], pair[1]))
        out = []
        for d, mine in enumerate(q.split(self.counts, 1)):
            if mine.shape[1] == 0:
                out.append(mine)
                continue
            # Step s has s - 1 rows more than this one, the last of which nobody sees any more.
            n = mine.shape[1]
            later = [torch.stack([pair[i][:, :n] for pair in self._later[d]], 2) for i in (0, 1) if self._later[d]]
            out.append(drafted(mine, *self._first[d], (later[0], later[1]) if later else None, self.window))
        return torch.cat(out, 1)
