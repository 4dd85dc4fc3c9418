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
from longdraft.training.features import Features, head_rows
from longdraft.training.losses import TargetDistribution, soft_cross_entropy

# q (Hq, T, d), k and v (Hkv, S, d) of one document -> (Hq, T, d)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# How a draft computes its levels: a forward for each (LongSpec's shifts), all in one (the others), or, of a language
# model, which reads the text itself, the same at every level.
LevelMode = Literal["shift", "step", "text"]


class StepOutput(NamedTuple):
    """The result of a training step. It is a tuple so that FSDP finds the loss in it.

    Attributes:
        loss: summed over the learned rows, with its graph.
        ranks: (rows,) how many tokens the draft ranks above the text's next token; 0 if its first choice is right.
        depths: (rows,) the level of the tree that each row was trained for, 1 for the root's children.
        loss_mask: (rows,) bool, False for what another speaker says: such rows have no weight. None: all are.
    """

    loss: torch.Tensor
    ranks: torch.Tensor
    depths: torch.Tensor
    loss_mask: torch.Tensor | None = None


class Labels(NamedTuple):
    """The tokens that N rows should predict, as draft ids; -1 where the draft's vocabulary lacks the token.

    Attributes:
        token_ids: (N,) the text's tokens. learned: (N,) bool, whether they are learned.
        target_argmax: (N,) the target's; the text's where they are not read.
        target_distribution: its distribution; None where the loss does not follow it.
    """

    token_ids: torch.Tensor
    target_argmax: torch.Tensor
    loss_mask: torch.Tensor
    target_distribution: TargetDistribution | None


@dataclass(frozen=True)
class PackedBatch:
    """Documents laid end to end.

    Attributes:
        spans: (low, first, end) of each: rows from ``low`` to ``end`` are computed, those from ``first`` on learned.
    """

    documents: Sequence[Features]
    spans: list[tuple[int, int, int]]

    @property
    def input_lengths(self) -> list[int]:
        """Computed rows of each document."""
        return [end - low for low, _, end in self.spans]

    @property
    def loss_lengths(self) -> list[int]:
        """Learned rows of each document."""
        return [end - first for _, first, end in self.spans]

    @property
    def loss_indices(self) -> torch.Tensor:
        """(sum of counts,) indices of the learned rows among all computed rows."""
        begins = accumulate(self.input_lengths, initial=0)
        each = zip(begins, self.spans, strict=False)
        return torch.cat([torch.arange(begin + first - low, begin + end - low) for begin, (low, first, end) in each])

    def gather(self, values: Sequence[torch.Tensor], shift: int = 0) -> torch.Tensor:
        """Joins one tensor (L, ...) of each document: (sum of lengths, ...), each row's entry ``label_shift`` rows later."""
        each = zip(values, self.spans, strict=True)
        return torch.cat([value[low + shift : end + shift] for value, (low, _, end) in each])

    def attend(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention within each document; q are all rows or the learned ones, k and v all rows."""
        queries = self.input_lengths if q.shape[1] == k.shape[1] else self.loss_lengths
        # Split, never sliced: the gradient of a slice is as large as the tensor it was cut from.
        each = zip(q.split(queries, 1), k.split(self.input_lengths, 1), v.split(self.input_lengths, 1), strict=True)
        return torch.cat([attention(*qkv) for qkv in each], 1)


class DraftTrainer(nn.Module):
    """A module to train, with the parts it borrows from the target. Borrowed parts are neither trained nor saved.

    Args:
        block: the module to train, which has the draft's weights.
        draft_to_target: (V',) target ids of the draft's vocabulary; None for all.
        config: the run's settings; None: plain cross-entropy in float32.

    Attributes:
        distill: share of the loss that follows the target's distribution.
        matmul_dtype: dtype of the matrix product with the head.
        recompute: compute the layers again in the backward pass instead of keeping what is between them.
        logit_scale: factor of the target's own logits.
        decay: weight of a level relative to the level before it.
        target_to_draft: (vocabulary,) the draft id of each target id; -1 for those outside the draft's vocabulary.
    """

    label_shift = 1
    """Row t predicts token t + ahead."""
    level_mode: ClassVar[LevelMode] = "step"
    needs_target_argmax: ClassVar[bool] = False
    """Whether a row's weight depends on the target's likeliest token, which takes logits of all its vocabulary."""

    def __init__(
        self,
        block: nn.Module,
        parts: SharedParts,
        draft_to_target: torch.Tensor | None = None,
        config: RunConfig | None = None,
    ) -> None:
        super().__init__()
        config = config or RunConfig(precision="no")
        self.block, self.parts, self.draft_to_target, self.distill = block, parts, draft_to_target, config.distill
        self.matmul_dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.recompute, self.logit_scale, self.decay = config.recompute, 1.0, getattr(config, "decay", 1.0)
        size, device = parts.head.shape[0], parts.head.device
        ids = torch.arange(size, device=device) if draft_to_target is None else draft_to_target.to(device)
        self.target_to_draft = torch.full((size,), -1, device=device)
        self.target_to_draft[ids] = torch.arange(len(ids), device=device)

    @property
    def device(self) -> torch.device:
        return self.target_to_draft.device

    @cached_property
    def target_head(self) -> torch.Tensor:
        """(V', hidden size) rows of the target's head for the draft's vocabulary."""
        return head_rows(self.parts.head, self.draft_to_target).detach().to(self.matmul_dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N,) tokens -> (N, hidden size) the target's embedding of them, float32."""
        with torch.no_grad():
            return self.parts.embedding(tokens.to(self.device)).float()

    @torch.no_grad()
    def measure_logit_scale(self, runner: TargetRunner) -> None:
        """Finds the factor between products with the target's head and its logits, on a few tokens.

        Raises:
            UnsupportedModelError: its logits are not such products.
        """
        tokens, cap = list(range(8)), self.parts.softcap
        store = runner.new_store(1, len(tokens), (runner.num_layers - 1,))
        out = runner.forward(store.make_forward_batch([0], [tokens], is_prefill=True, prompt_len=len(tokens)), store)
        assert out.logits is not None and store.features is not None
        states = self.parts.apply_final_norm(store.features[0, : len(tokens)])
        products = (states.to(self.matmul_dtype) @ self.target_head.T).float()
        logits = (
            out.logits[0] if self.draft_to_target is None else out.logits[0][:, self.draft_to_target.to(self.device)]
        )
        clear = logits.abs() < (cap / 2 if cap else math.inf)  # a cap there does little, and so does rounding
        logits, products = logits[clear], products[clear]
        logits = torch.atanh(logits / cap) * cap if cap else logits
        scale = float(logits @ products / products.square().sum())
        if not (logits - scale * products).norm() < 0.1 * logits.norm():
            name = type(runner.model).__name__
            raise UnsupportedModelError(f"{name} has logits of a make that no draft learns from: set distill to 0.")
        self.logit_scale = 1.0 if abs(scale - 1) < 0.01 else scale

    def run_layer(self, compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """``compute(*arguments)``, the part of a step that ``recompute`` is about; it may be called twice."""
        if not self.recompute or not torch.is_grad_enabled():
            return compute(*arguments)
        out: torch.Tensor = checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
        return out

    def num_loss_tokens(self, num_tokens: int, start: int, shift: int) -> int:
        """The number of learned rows of a text of ``num_tokens`` tokens that is learned from token ``start`` on."""
        return num_tokens - start - self.label_shift + 1

    def pack(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), num_context: int | None = None
    ) -> PackedBatch:
        """Lays documents end to end.

        Args:
            shifts: shift of each document; none: all 0.
            num_context: rows before the first learned one that are computed too; None for all.
        """
        spans = []
        for document, shift in zip(documents, shifts or [0] * len(documents), strict=True):
            tokens = len(document.token_ids)
            end = tokens - self.label_shift
            first = end - self.num_loss_tokens(tokens, document.start, shift)
            spans.append((0 if num_context is None else max(0, first - num_context), first, end))
        return PackedBatch(documents, spans)

    def labels(self, pack: PackedBatch, indices: torch.Tensor | None = None) -> Labels:
        """The labels of the learned rows, or of those chosen among them: the tokens that lie ``label_shift``."""
        firsts = [(d, first + self.label_shift) for d, (_, first, _) in zip(pack.documents, pack.spans, strict=True)]
        with torch.no_grad():
            text = self.target_to_draft[torch.cat([d.token_ids[at:] for d, at in firsts]).to(self.device)]
            likeliest = text
            if self.needs_target_argmax:
                read = [d.target_argmax[at - d.start :] for d, at in firsts if d.target_argmax is not None]
                likeliest = self.target_to_draft[torch.cat(read).to(self.device)]
            learned = torch.cat([d.loss_mask[at:] for d, at in firsts]).to(self.device)
            rows = torch.arange(len(text), device=self.device) if indices is None else indices
            target = None
            if self.distill:
                last = [d.last[at - 1 : -1, -self.parts.hidden_size :] for d, at in firsts]
                states = self.parts.apply_final_norm(torch.cat(last).to(self.device)).to(self.matmul_dtype)
                target = TargetDistribution(states, rows, self.target_head, self.logit_scale, self.parts.softcap)
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
        weight = weight * labels.loss_mask
        loss, ranks = soft_cross_entropy(
            hidden, head, labels.token_ids, weight, labels.target_distribution, self.distill
        )
        return StepOutput(loss, torch.where(labels.token_ids >= 0, ranks, len(head)), depths, labels.loss_mask)
