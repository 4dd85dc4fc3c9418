"""DFlash, DFlash 2 and DSpark: a block of tokens from one forward of a few layers, from published drafts.

    c_t = RMSNorm(fc(f_t))                    f_t: hidden states of the target at position t, concatenated
    x   = embed(anchor, mask, ..., mask)      the block to draft; the anchor is the last token of the context
    layer: attention of x to [c, x]           the same k and v projections for c and x; RoPE at absolute positions
           and SwiGLU, both with norms before
    logits_k = head(RMSNorm(x_k))             predicts the token at position k of the block; in DSpark, at k + 1

A prefill projects c to the context's keys and values, which the draft caches, and runs no other layer. All tokens of a
block except the anchor are masks, so DFlash drafts each token without knowing the drafted tokens before it. DSpark
therefore corrects the logits of a level by the token t of the level before: its Markov head adds W2 W1[t]. DFlash 2 has
a selector and convolutions (:mod:`.dflash2`).

DFlash: arXiv:2602.06036; DSpark: arXiv:2607.05147. Shapes: B sequences, T tokens, W nodes of a level for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from longdraft.attention.sdpa import attend_sequence
from longdraft.attention.transfer import to_device
from longdraft.drafters.dflash2 import CandidateSelector, DFlash2Layer
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.shared.block_drafter import BlockDrafter
from longdraft.drafters.shared.draft_block import DraftLayer
from longdraft.drafters.shared.single_forward import NUM_CANDIDATES, LevelTopk, SingleForwardRound
from longdraft.drafts.dflash_formats import KIND, DFlashShape
from longdraft.drafts.formats import check_mask_token
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import TreeLevel, topk_logprobs

# Sizes and settings that drafts have elsewhere, with which longdraft does not train them.
_UNTRAINED = (
    "from_anchor", "embedding", "markov_rank", "selector_rank", "conv_taps", "embedding_scale", "logit_scale",
    "softcap",
)  # fmt: skip


class MarkovHead(nn.Module):
    """Parameters of DSpark's correction: a level's logits depend on the token before, as in a Markov chain."""

    def __init__(self, shape: DFlashShape, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.vocabulary, bias=False)


class DFlashBlock(nn.Module):
    """The layers of a draft. Their state dict is the published layout.

    Args:
        vocab_size: size of the target's vocabulary.
        causal: one flag for each layer; True: a token of the block attends to no later tokens of the block.
        windows: for each layer, how many of the context's last tokens it attends to; None: all.
    """

    has_fused_kernel = False  # our CPU kernels do not compute these layers
    reads_tokens = False  # keys and values of the context are projections of the target's hidden states

    def __init__(self, shape: DFlashShape, vocab_size: int, causal: list[bool], windows: list[int | None]) -> None:
        super().__init__()
        self.shape, self.causal, self.windows = shape, causal, windows
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(shape.feature_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(_make_layer(shape) for _ in range(shape.decoder_layers))
        self.norm = nn.RMSNorm(size, eps)
        if shape.own_head:
            self.lm_head = nn.Linear(size, shape.vocabulary, bias=False)
        if shape.embedding is not None:
            self.embed_tokens = nn.Embedding(shape.embedding, size)  # shape.embedding: its number of rows
        if shape.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size, dtype=torch.float32))
        if shape.markov_rank is not None:
            self.markov_head = MarkovHead(shape, shape.markov_rank, vocab_size)
        if shape.selector_rank is not None:
            self.candidate_selector = CandidateSelector(shape, shape.selector_rank, vocab_size)

    def borrow_head(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Sets the target's head, (T, hidden) -> (T, vocabulary), for a draft without one."""
        self._head = head

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The layers, with their type."""
        return cast(list[DraftLayer], list(self.layers))

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Converts the target's features (T, feature_size) to c (T, hidden)."""
        out: torch.Tensor = self.hidden_norm(self.fc(features))
        return out

    def keys_values(
        self, x: None, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the context's keys after RoPE and values (layers, KV heads, T, head_dim).
        ``g``: the context c of the module docstring. ``x``: no embeddings are read."""
        by_layer = [layer.self_attn.keys_values(g, cos, sin) for layer in self.draft_layers]
        return torch.stack([k for k, _ in by_layer]), torch.stack([v for _, v in by_layer])

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context_kv: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Converts embeddings (B, block size, hidden) of B blocks to outputs of the same shape, after the final norm.
        ``cos``, ``sin``: rotary embedding of all tokens. ``context_kv``: each sequence's keys and values in all layers.
        """
        h = x.flatten(0, 1)
        for i, layer in enumerate(self.draft_layers):
            h = layer.run_layer(layer.input_layernorm(h), h, cos, sin, partial(self._attend, i, context_kv))
        out: torch.Tensor = self.norm(h)
        return out.view(x.shape)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Converts outputs (T, hidden) after the final norm to logits (T, vocabulary)."""
        shape = self.shape
        logits: torch.Tensor = (self.lm_head if shape.own_head else self._head)(out) * shape.logit_scale
        return logits if shape.softcap is None else torch.tanh(logits / shape.softcap) * shape.softcap

    def _attend(
        self,
        layer: int,
        context_kv: list[tuple[torch.Tensor, torch.Tensor]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the attention of each block's tokens to their sequence's context and to the tokens of the block."""
        window, block_size = self.windows[layer], q.shape[1] // len(context_kv)
        ones = torch.ones(block_size, block_size, dtype=torch.bool, device=q.device) if self.causal[layer] else None
        outputs = []
        for context, queries, *block_kv in zip(context_kv, *(x.split(block_size, 1) for x in (q, k, v)), strict=True):
            start = 0 if window is None else max(0, context[0].shape[2] - window)
            keys, values = (torch.cat([c[layer, :, start:], x], 1) for c, x in zip(context, block_kv, strict=True))
            mask = None if ones is None else F.pad(ones.tril(), (keys.shape[1] - block_size, 0), value=True)
            outputs.append(attend_sequence(queries, keys, values, mask))
        return torch.cat(outputs, 1)


def _make_layer(shape: DFlashShape) -> DraftLayer:
    if shape.conv_taps is None or shape.conv_group_size is None:
        return DraftLayer(shape, shape.hidden_size, "input_layernorm")
    return DFlash2Layer(shape, shape.conv_taps, shape.conv_group_size)


class DFlashRound(SingleForwardRound):
    """Drafts the trees of one round from a block: the root as the anchor, and mask tokens."""

    def __init__(self, drafter: BlockDrafter, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, sequences, depth)
        self._shape: DFlashShape = drafter.draft.shape

    @property
    def num_candidates(self) -> int:
        if self._shape.selector_top_k is not None:
            return self._shape.selector_top_k
        return NUM_CANDIDATES if self._shape.markov_rank is not None else 1  # 1: no correction, so top_k is enough

    def forward_all_levels(self, level: TreeLevel, k: int) -> tuple[torch.Tensor, ...]:
        """Caches the keys and values of the new tokens, and runs the forward over one block for each sequence."""
        block, shape, cache = self._bound.block, self._shape, self._cache
        positions, context_kv = [], []
        for s in (self.sequences[i] for i in level.sequence_indices):
            self._drafter.prefill(s, self._drafter.num_input_tokens(s))
            cache.make_room(s.slot, 0)
            positions += [cache.next_position(s.slot) + i for i in range(shape.block_size)]
            visible = slice(cache.window_start(s.slot), cache.store.lengths[s.slot])
            context_kv.append((cache.store.keys[:, s.slot, :, visible], cache.store.values[:, s.slot, :, visible]))
        cos, sin = self._bound.rotary(to_device(positions, self._device))
        first_output = 0 if shape.from_anchor else 1  # DSpark: the anchor's output already predicts the next token
        out = block(self._embed(level), cos, sin, context_kv)[:, first_output : first_output + self._depth]
        logprobs, ids = topk_logprobs(block.logits(out.flatten(0, 1)).unflatten(0, out.shape[:2]), k)
        return logprobs, ids, out

    def _embed(self, level: TreeLevel) -> torch.Tensor:
        """Returns the embeddings (B, block size, hidden) of each anchor and the mask tokens after it."""
        shape, masks_shape = self._shape, (len(level.sequence_indices), self._shape.block_size - 1)
        masks = torch.full(masks_shape, shape.mask_token, device=level.tokens.device, dtype=torch.long)
        if not shape.own_mask:
            x: torch.Tensor = self._bound.embedding(torch.cat([level.tokens, masks], 1))
        else:
            mask_embeddings = self._bound.block.mask_embedding.expand(*masks_shape, -1)
            x = torch.cat([self._bound.embedding(level.tokens), mask_embeddings], 1)
        return x * shape.embedding_scale if shape.embedding_scale != 1 else x

    def corrected_scores(self, level: TreeLevel, topk: LevelTopk) -> torch.Tensor:
        """Returns scores (B, W, M): ``topk.logprobs`` (B, 1, M), in DSpark plus the Markov head's W2 W1[token], in
        DFlash 2 plus the selector's correction."""
        if self._shape.selector_rank is not None:
            selector = self._bound.block.candidate_selector
            return topk.logprobs + selector.correction(level.tokens, topk.correction_inputs, topk.ids[:, 0])
        if self._shape.markov_rank is None:
            return super().corrected_scores(level, topk)
        head = self._bound.block.markov_head
        candidate_weights = head.markov_w2.weight[topk.ids[:, 0]]
        return topk.logprobs + (head.markov_w1(level.tokens) @ candidate_weights.mT).float()


class DFlashDraft(Eagle3Draft):
    """A draft of DFlash, DFlash 2 or DSpark, in the layout of its authors or of `speculators`."""

    kind, label = KIND, "DFlash"
    shape_type, round_type = DFlashShape, DFlashRound

    @cached_property
    def shape(self) -> DFlashShape:
        shape: DFlashShape = super().shape
        if shape.conv_group_size and shape.hidden_size % shape.conv_group_size:
            raise CheckpointError(f"{self.folder}: conv_group_size does not divide hidden_size. Download it again.")
        if shape.slots < 1:
            raise CheckpointError(f"block_size in {self.folder} is too small to draft any token. Download it again.")
        return shape

    def module(self) -> DFlashBlock:
        vocab_size = self.config.get("target_vocabulary") or self.shape.vocabulary
        return DFlashBlock(self.shape, vocab_size, self.config["causal"], self.config["windows"])

    def default_feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns evenly spaced layers from 1 to num_layers - 3 (the authors' code); for `speculators`, EAGLE-3's."""
        n, span = self.shape.feature_size // self.required_target["hidden_size"], num_layers - 4
        evenly_spaced = (num_layers // 2,) if n == 1 else tuple(round(1 + i * span / (n - 1)) for i in range(n))
        return super().default_feature_layers(num_layers) if self.layout == "speculators" else evenly_spaced

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        if not self.shape.own_mask:
            check_mask_token(self.shape, runner.shared_parts.head.shape[0], self.folder)

    @property
    def is_multi_layer(self) -> bool:
        return False  # a prefill runs no layer: all keys and values are projections of the target's hidden states

    def trainable_module(self) -> Any:
        others = [
            f.name for f in fields(self.shape) if f.name in _UNTRAINED and getattr(self.shape, f.name) != f.default
        ]
        if others:
            raise CapabilityError(f"{self.folder} sets {', '.join(others)}: longdraft trains DFlash without that.")
        return super().trainable_module()
