"""The base class of all training steps: packs documents, makes labels, and computes the loss.

Sizes in shapes: N labels; V tokens in the target's vocabulary, W in the draft's; a document has L tokens and T queries;
Hq query heads and Hkv KV heads of d numbers. A label is a token that the draft learns to predict at a position. Labels
that ``loss_mask`` excludes (a user's turn) have weight 0 in the loss.
"""

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

# q (Hq, T, d), k and v (Hkv, L, d) of one document -> (Hq, T, d)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# How a trainer computes the levels of a draft. "shift": a forward for each level (LongSpec). "step": all levels in one
# forward. "text": one forward, whose result holds for every level (a language model).
LevelMode = Literal["shift", "step", "text"]


class StepOutput(NamedTuple):
    """The result of a training step on N labels. A tuple, because FSDP finds the loss in tuples alone."""

    loss: torch.Tensor  # the sum over labels, with its autograd graph
    ranks: torch.Tensor  # (N,) number of tokens that the draft ranks above the label; 0: the first choice is right
    depths: torch.Tensor  # (N,) the level of a draft tree that the label belongs to; 1: the root's children
    loss_mask: torch.Tensor | None = None  # (N,) bool, True for labels that count in the loss; None: all count


class Labels(NamedTuple):
    """N labels as draft ids; -1 stands for a token that the draft's vocabulary lacks."""

    token_ids: torch.Tensor  # (N,) the text's tokens
    target_argmax: torch.Tensor  # (N,) the target's argmax, or ``token_ids`` for a trainer that does not need it
    loss_mask: torch.Tensor  # (N,) bool, True for labels that count in the loss
    target_distribution: TargetDistribution | None  # the target's distribution; None without distillation


class Span(NamedTuple):
    """Positions of a document: start .. end - 1 are inputs of the draft, label_start .. end - 1 have labels."""

    start: int
    label_start: int
    end: int


@dataclass(frozen=True)
class PackedBatch:
    """The inputs of several documents, end to end. ``spans``: the positions that are inputs, for each document."""

    documents: Sequence[Features]
    spans: list[Span]

    @property
    def input_lengths(self) -> list[int]:
        """Number of inputs of each document."""
        return [span.end - span.start for span in self.spans]

    @property
    def num_labels(self) -> list[int]:
        """Number of labels of each document."""
        return [span.end - span.label_start for span in self.spans]

    @property
    def label_indices(self) -> torch.Tensor:
        """(N,) indices of the inputs that have labels."""
        ends = accumulate(self.input_lengths)  # of each document; the inputs with labels are a document's last ones
        return torch.cat([torch.arange(end - n, end) for end, n in zip(ends, self.num_labels, strict=True)])

    def gather(self, values: Sequence[torch.Tensor], shift: int = 0) -> torch.Tensor:
        """Concatenates, from each document's tensor (L, ...), the values ``shift`` positions behind the inputs."""
        spans = zip(values, self.spans, strict=True)
        return torch.cat([value[span.start + shift : span.end + shift] for value, span in spans])

    def attend(self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes attention in each document: k and v of all inputs, q of all inputs or of those with labels."""
        query_lens = self.input_lengths if q.shape[1] == k.shape[1] else self.num_labels
        # Split, not sliced: the gradient of each slice would be as large as the whole tensor.
        k_and_v = (x.split(self.input_lengths, 1) for x in (k, v))
        return torch.cat([attention(*qkv) for qkv in zip(q.split(query_lens, 1), *k_and_v, strict=True)], 1)


class DraftTrainer(nn.Module):
    """Wraps a draft's module for training. The wrapper's forward computes the loss of a batch.

    Args:
        parts: the target's embedding, final norm and head, which are neither trained nor saved.
        draft_to_target: (W,) target ids of the draft's vocabulary; None: all.
        config: the run's settings; None: plain cross-entropy in float32.

    Attributes:
        distill: share of the loss that distils the target's distribution.
        matmul_dtype: dtype of matrix products with the head.
        recompute: recompute layers in the backward pass (gradient checkpointing).
        logit_scale: factor of the target's logits: logits = softcap(logit_scale * state @ head.T).
        decay: weight of a level in the loss, relative to the level before it.
        target_to_draft: (V,) the draft id of each target id; -1: not in the draft's vocabulary.
    """

    label_shift = 1
    """The label of position t is token t + label_shift."""
    level_mode: ClassVar[LevelMode] = "step"
    needs_target_argmax: ClassVar[bool] = False
    """True if a label's weight depends on the target's argmax. The argmax takes logits over the target's vocabulary."""

    def __init__(
        self, block: nn.Module, parts: SharedParts, draft_to_target: torch.Tensor | None = None,
        config: RunConfig | None = None,
    ) -> None:  # fmt: skip
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
        """(W, hidden size), the rows of the target's head for the draft's vocabulary."""
        return head_rows(self.parts.head, self.draft_to_target).detach().to(self.matmul_dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the target's embeddings (n, hidden size), in float32, of token ids (n,)."""
        with torch.no_grad():
            return self.parts.embedding(token_ids.to(self.device)).float()

    @torch.no_grad()
    def measure_logit_scale(self, runner: TargetRunner) -> None:
        """Measures :attr:`logit_scale` on a few tokens. Raises UnsupportedModelError if the target's logits are not a
        multiple of the product of state and head."""
        ids, cap = list(range(8)), self.parts.softcap  # any few tokens do: the scale is the same for all
        store = runner.new_store(1, len(ids), (runner.num_layers - 1,))
        out = runner.forward(store.make_forward_batch([0], [ids], is_prefill=True, prompt_len=len(ids)), store)
        assert out.logits is not None and store.features is not None
        states = self.parts.apply_final_norm(store.features[0, : len(ids)])
        products = (states.to(self.matmul_dtype) @ self.target_head.T).float()
        logits = out.logits[0]
        logits = logits if self.draft_to_target is None else logits[:, self.draft_to_target.to(self.device)]
        uncapped = logits.abs() < (cap / 2 if cap else math.inf)  # elsewhere, atanh amplifies rounding
        logits, products = logits[uncapped], products[uncapped]
        logits = torch.atanh(logits / cap) * cap if cap else logits
        scale = float(logits @ products / products.square().sum())
        if not (logits - scale * products).norm() < 0.1 * logits.norm():  # rounding errors are far below a tenth
            name = type(runner.model).__name__
            raise UnsupportedModelError(f"{name} computes logits in a way that cannot be distilled: set distill=0.")
        self.logit_scale = 1.0 if abs(scale - 1) < 0.01 else scale  # a smaller difference is rounding

    def run_layer(self, compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Returns ``compute(*arguments)``; with ``recompute``, the backward pass calls ``compute`` again."""
        if not self.recompute or not torch.is_grad_enabled():
            return compute(*arguments)
        out: torch.Tensor = checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
        return out

    def count_labels(self, num_tokens: int, start: int, shift: int) -> int:
        """Returns the number of labels of a document. ``start``: index of the first token in the loss."""
        return num_tokens - start - self.label_shift + 1

    def pack(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), context: int | None = None
    ) -> PackedBatch:
        """Packs documents with their shifts (none: 0). ``context``: inputs before the first label; None: all."""
        spans = []
        for document, shift in zip(documents, shifts or [0] * len(documents), strict=True):
            num_tokens = len(document.token_ids)
            end = num_tokens - self.label_shift
            label_start = end - self.count_labels(num_tokens, document.start, shift)
            spans.append(Span(0 if context is None else max(0, label_start - context), label_start, end))
        return PackedBatch(documents, spans)

    def make_labels(self, batch: PackedBatch, indices: torch.Tensor | None = None) -> Labels:
        """Makes the labels of a batch. ``indices``: the labels to take, which may repeat; None: each once."""
        spans = zip(batch.documents, batch.spans, strict=True)
        # (document, index of the token that is its first label)
        pairs = [(document, span.label_start + self.label_shift) for document, span in spans]
        with torch.no_grad():
            ids = self.target_to_draft[torch.cat([d.token_ids[i:] for d, i in pairs]).to(self.device)]
            argmax = ids
            if self.needs_target_argmax:
                argmaxes = [d.target_argmax[i - d.start :] for d, i in pairs if d.target_argmax is not None]
                argmax = self.target_to_draft[torch.cat(argmaxes).to(self.device)]
            mask = torch.cat([d.loss_mask[i:] for d, i in pairs]).to(self.device)
            indices = torch.arange(len(ids), device=self.device) if indices is None else indices
            target = None
            if self.distill:
                # The target predicts a label from the state of the token before.
                last_states = torch.cat([d.last[i - 1 : -1, -self.parts.hidden_size :] for d, i in pairs])
                states = self.parts.apply_final_norm(last_states.to(self.device)).to(self.matmul_dtype)
                target = TargetDistribution(states, indices, self.target_head, self.logit_scale, self.parts.softcap)
            return Labels(ids[indices], argmax[indices], mask[indices], target)

    def compute_loss(
        self, hidden: torch.Tensor, head: torch.Tensor, labels: Labels, depths: torch.Tensor,
        weights: torch.Tensor | float = 1.0,
    ) -> StepOutput:  # fmt: skip
        """Computes the loss of labels. A label that the draft's vocabulary lacks gets the rank W.

        Args:
            hidden: (N, hidden size), states of the draft.
            head: (W, hidden size). The logits are ``hidden @ head.T``.
            depths: (N,), the level of each label.
            weights: (N,), the weight of each label in the loss.
        """
        ids, _, mask, target = labels
        loss, ranks = soft_cross_entropy(hidden, head, ids, weights * mask, target, self.distill)
        return StepOutput(loss, torch.where(ids >= 0, ranks, len(head)), depths, mask)
