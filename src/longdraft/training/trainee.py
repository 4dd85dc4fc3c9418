"""The base of all training steps: packed documents, what their rows should predict, and the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from longdraft.errors import UnsupportedModelError
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import SharedParts
from longdraft.training.config import RunConfig
from longdraft.training.features import Features, rows_of
from longdraft.training.losses import Target, soft_cross_entropy

# q (Hq, T, d), k and v (Hkv, S, d) of one document -> (Hq, T, d)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# How a draft computes its levels: a forward for each (LongSpec's shifts), all in one (the others), or, of a language
# model, which reads the text itself, the same at every level.
By = Literal["shift", "step", "text"]


class StepOutput(NamedTuple):
    """The result of a training step. It is a tuple so that FSDP finds the loss in it.

    Attributes:
        loss: summed over the learned rows, with its graph.
        ranks: (rows,) how many tokens the draft ranks above the text's next token; 0 if its first choice is right.
        depths: (rows,) the level of the tree that each row was trained for, 1 for the root's children.
        learned: (rows,) bool, False for what another speaker says: such rows have no weight. None: all are.
    """

    loss: torch.Tensor
    ranks: torch.Tensor
    depths: torch.Tensor
    learned: torch.Tensor | None = None


class Labels(NamedTuple):
    """The tokens that N rows should predict, as draft ids; -1 where the draft's vocabulary lacks the token.

    Attributes:
        text: (N,) the text's tokens. learned: (N,) bool, whether they are learned.
        likeliest: (N,) the target's; the text's where they are not read.
        target: its distribution; None where the loss does not follow it.
    """

    text: torch.Tensor
    likeliest: torch.Tensor
    learned: torch.Tensor
    target: Target | None


@dataclass(frozen=True)
class Pack:
    """Documents laid end to end.

    Attributes:
        spans: (low, first, end) of each: rows from ``low`` to ``end`` are computed, those from ``first`` on learned.
    """

    documents: Sequence[Features]
    spans: list[tuple[int, int, int]]

    @property
    def lengths(self) -> list[int]:
        """Computed rows of each document."""
        return [end - low for low, _, end in self.spans]

    @property
    def counts(self) -> list[int]:
        """Learned rows of each document."""
        return [end - first for _, first, end in self.spans]

    @property
    def learned(self) -> torch.Tensor:
        """(sum of counts,) indices of the learned rows among all computed rows."""
        begins = accumulate(self.lengths, initial=0)
        each = zip(begins, self.spans, strict=False)
        return torch.cat([torch.arange(begin + first - low, begin + end - low) for begin, (low, first, end) in each])

    def rows(self, values: Sequence[torch.Tensor], ahead: int = 0) -> torch.Tensor:
        """Joins one tensor (L, ...) of each document: (sum of lengths, ...), each row's entry ``ahead`` rows later."""
        each = zip(values, self.spans, strict=True)
        return torch.cat([value[low + ahead : end + ahead] for value, (low, _, end) in each])

    def attend(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention within each document; q are all rows or the learned ones, k and v all rows."""
        queries = self.lengths if q.shape[1] == k.shape[1] else self.counts
        # Split, never sliced: the gradient of a slice is as large as the tensor it was cut from.
        each = zip(q.split(queries, 1), k.split(self.lengths, 1), v.split(self.lengths, 1), strict=True)
        return torch.cat([attention(*qkv) for qkv in each], 1)


class Trainee(nn.Module):
    """A module to train, with the parts it borrows from the target. Borrowed parts are neither trained nor saved.

    Args:
        block: the module to train, which has the draft's weights.
        kept: (V',) target ids of the draft's vocabulary; None for all.
        config: the run's settings; None: plain cross-entropy in float32.

    Attributes:
        distill: share of the loss that follows the target's distribution.
        product_dtype: dtype of the matrix product with the head.
        recompute: compute the layers again in the backward pass instead of keeping what is between them.
        scale: factor of the target's own logits.
        decay: weight of a level relative to the level before it.
        to_draft: (vocabulary,) the draft id of each target id; -1 for those outside the draft's vocabulary.
    """

    ahead = 1
    """Row t predicts token t + ahead."""
    by: ClassVar[By] = "step"
    reads_likeliest: ClassVar[bool] = False
    """Whether a row's weight depends on the target's likeliest token, which takes logits of all its vocabulary."""

    def __init__(
        self,
        block: nn.Module,
        parts: SharedParts,
        kept: torch.Tensor | None = None,
        config: RunConfig | None = None,
    ) -> None:
        super().__init__()
        config = config or RunConfig(precision="no")
        self.block, self.parts, self.kept, self.distill = block, parts, kept, config.distill
        self.product_dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.recompute, self.scale, self.decay = config.recompute, 1.0, getattr(config, "decay", 1.0)
        size, device = parts.head.shape[0], parts.head.device
        ids = torch.arange(size, device=device) if kept is None else kept.to(device)
        self.to_draft = torch.full((size,), -1, device=device)
        self.to_draft[ids] = torch.arange(len(ids), device=device)

    @property
    def device(self) -> torch.device:
        return self.to_draft.device

    @cached_property
    def target_head(self) -> torch.Tensor:
        """(V', hidden size) rows of the target's head for the draft's vocabulary."""
        return rows_of(self.parts.head, self.kept).detach().to(self.product_dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N,) tokens -> (N, hidden size) the target's embedding of them, float32."""
        with torch.no_grad():
            return self.parts.embedding(tokens.to(self.device)).float()

    @torch.no_grad()
    def measure_scale(self, runner: TargetRunner) -> None:
        """Finds the factor between products with the target's head and its logits, on a few tokens.

        Raises:
            UnsupportedModelError: its logits are not such products.
        """
        tokens, cap = list(range(8)), self.parts.softcap
        store = runner.new_store(1, len(tokens), (runner.depth - 1,))
        out = runner.forward(store.block([0], [tokens], prompt=True, text=len(tokens)), store)
        assert out.logits is not None and store.features is not None
        states = self.parts.normed(store.features[0, : len(tokens)])
        products = (states.to(self.product_dtype) @ self.target_head.T).float()
        logits = out.logits[0] if self.kept is None else out.logits[0][:, self.kept.to(self.device)]
        clear = logits.abs() < (cap / 2 if cap else math.inf)  # a cap there does little, and so does rounding
        logits, products = logits[clear], products[clear]
        logits = torch.atanh(logits / cap) * cap if cap else logits
        scale = float(logits @ products / products.square().sum())
        if not (logits - scale * products).norm() < 0.1 * logits.norm():
            name = type(runner.model).__name__
            raise UnsupportedModelError(f"{name} has logits of a make that no draft learns from: set distill to 0.")
        self.scale = 1.0 if abs(scale - 1) < 0.01 else scale

    def layer(self, compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """``compute(*arguments)``, the part of a step that ``recompute`` is about; it may be called twice."""
        if not self.recompute or not torch.is_grad_enabled():
            return compute(*arguments)
        out: torch.Tensor = checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
        return out

    def learned(self, tokens: int, start: int, shift: int) -> int:
        """The number of learned rows of a text of ``tokens`` tokens that is learned from token ``start`` on."""
        return tokens - start - self.ahead + 1

    def pack(self, documents: Sequence[Features], shifts: Sequence[int] = (), before: int | None = None) -> Pack:
        """Lays documents end to end.

        Args:
            shifts: shift of each document; none: all 0.
            before: rows before the first learned one that are computed too; None for all.
        """
        spans = []
        for document, shift in zip(documents, shifts or [0] * len(documents), strict=True):
            tokens = len(document.tokens)
            end = tokens - self.ahead
            first = end - self.learned(tokens, document.start, shift)
            spans.append((0 if before is None else max(0, first - before), first, end))
        return Pack(documents, spans)

    def labels(self, pack: Pack, chosen: torch.Tensor | None = None) -> Labels:
        """The labels of the learned rows, or of those chosen among them: the tokens that lie ``ahead``."""
        firsts = [(d, first + self.ahead) for d, (_, first, _) in zip(pack.documents, pack.spans, strict=True)]
        with torch.no_grad():
            text = self.to_draft[torch.cat([d.tokens[at:] for d, at in firsts]).to(self.device)]
            likeliest = text
            if self.reads_likeliest:
                read = [d.likeliest[at - d.start :] for d, at in firsts if d.likeliest is not None]
                likeliest = self.to_draft[torch.cat(read).to(self.device)]
            learned = torch.cat([d.learned[at:] for d, at in firsts]).to(self.device)
            rows = torch.arange(len(text), device=self.device) if chosen is None else chosen
            target = None
            if self.distill:
                last = [d.last[at - 1 : -1, -self.parts.hidden_size :] for d, at in firsts]
                states = self.parts.normed(torch.cat(last).to(self.device)).to(self.product_dtype)
                target = Target(states, rows, self.target_head, self.scale, self.parts.softcap)
            return Labels(text[rows], likeliest[rows], learned[rows], target)

    def output(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: Labels,
        depths: torch.Tensor,
        weight: torch.Tensor | float = 1.0,
    ) -> StepOutput:
        """The loss of (N, hidden size) rows. A token that the draft's vocabulary lacks has the worst rank.

        Args:
            head: (V', hidden size). weight: of each row, (N,).
        """
        weight = weight * labels.learned
        loss, ranks = soft_cross_entropy(hidden, head, labels.text, weight, labels.target, self.distill)
        return StepOutput(loss, torch.where(labels.text >= 0, ranks, len(head)), depths, labels.learned)
