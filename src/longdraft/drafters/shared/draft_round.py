"""One round of a draft with a KV cache of its own: feeds the new tokens, then grows the trees level by level.

:meth:`DraftRound.forward` runs the draft by one call of our CPU kernels, by torch, or by a captured CUDA graph. All
B sequences of a batch feed W tokens each, of which the last T have outputs. A sequence with fewer than W new tokens
feeds its last old tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.prefix import PrefixAttentionFunction
from longdraft.attention.transfer import to_device
from longdraft.drafters.shared.draft_batch import DeviceBatch, DraftBatch, batched_attend, supports_batched_attend
from longdraft.drafters.shared.fused_level import BlockInputs, FusedLevel, draft_kernels
from longdraft.engine.sequence import Sequence
from longdraft.model.gpu.cuda_graphs import padded_batch_size, tensor_key
from longdraft.model.layers.skinny_gemm import patch_linears
from longdraft.model.round_profiler import profiled
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import HeadWeight
from longdraft.trees.level import TreeLevel, logits_or_topk
from longdraft.trees.masks import AncestorMask

if TYPE_CHECKING:
    from longdraft.drafters.shared.block_drafter import BlockDrafter

# Maximum number of new tokens that a round feeds to the block. Earlier new tokens are prefilled: keys and values only.
MAX_NEW_TOKENS = 64
# Inputs of W tokens of each of B sequences: token ids (B, W) or embeddings (B, W, hidden); cos and sin (B, W, d), or
# (B, 1, d) if all W tokens have one position. EAGLE's drafts have a fourth input, features (B, W, size): the target's
# hidden states for new tokens, the outputs at their parents for tree nodes.
Inputs = tuple[torch.Tensor, ...]
# Cross-attention to the target's KV: (slots, KV lengths, q) -> output.
CrossFn = Callable[..., torch.Tensor]


class BoundDraft:
    """A draft in its target's dtype and on its device, with the parts that it shares with the target.

    Args:
        runner: the target.
        block: the draft's module.
        rotary: function of N positions (N,) that returns cos and sin (N, d).
        draft_to_target_ids: (draft vocabulary,) target id of each draft id; None: both vocabularies are the same.
        head: (draft vocabulary, hidden) weight of the target's head; None: the draft has a head of its own.

    Attributes:
        fused_level: computes a tree level in one call of our CPU kernels; None if they do not support the draft.
        target_to_draft_ids: (vocabulary,) draft id of each target id, or -1; None: both vocabularies are the same.
    """

    def __init__(
        self,
        runner: TargetRunner,
        block: Any,
        rotary: Any,
        draft_to_target_ids: torch.Tensor | None,
        head: HeadWeight | None = None,
    ) -> None:
        self.block, self.rotary, device = block, rotary, runner.device
        self.embedding: nn.Module = getattr(block, "embed_tokens", runner.shared_parts.embedding)
        self.fused_level = self.draft_to_target_ids = self.target_to_draft_ids = None
        if block.has_fused_kernel and (kernels := draft_kernels(runner, block.shape.head_dim)) is not None:
            self.fused_level = FusedLevel(kernels, block, block.lm_head.weight if head is None else head)
        if draft_to_target_ids is not None:
            self.draft_to_target_ids = ids = draft_to_target_ids.to(device)
            vocab_size = runner.shared_parts.head.shape[0]
            self.target_to_draft_ids = torch.full((vocab_size,), -1, device=device, dtype=torch.long)
            self.target_to_draft_ids[ids] = torch.arange(len(ids), device=device)
        patch_linears(block)

    def block_inputs(self, uses_target_features: bool, tokens: torch.Tensor, *inputs: torch.Tensor) -> BlockInputs:
        """Converts :data:`Inputs` to the block's inputs (B * W, ...): embeddings, features, cos and sin.
        ``uses_target_features``: the features are the target's hidden states, and still have to be projected."""
        batch_size, width = tokens.shape[:2]
        cos, sin, *features = (t.expand(batch_size, width, -1).flatten(0, 1) for t in inputs)
        g = self.block.project_features(features[0]) if uses_target_features else features[0] if features else None
        x = tokens.flatten(0, 1)
        return x if x.is_floating_point() else self.embedding(x), g, cos, sin


def run_draft_block(
    bound: BoundDraft, uses_target_features: bool, cross: CrossFn | None, top_k: int, num_tensors: int, *args: Any
) -> tuple[torch.Tensor, ...]:
    """Runs the block in torch. A CUDA graph can capture this function, because its only side effect is on KV caches.
    For the results and the other arguments see :meth:`DraftRound.forward`.

    Args:
        cross: cross-attention to the target's KV; None: the block has no cross-attention.
        num_tensors: number of input tensors, which :data:`Inputs` lists.
        args: the inputs; slots and KV lengths if there is ``cross``; then ``attend_fns`` and ``output_rows``.
    """
    inputs, (*cross_tensors, attend_fns, output_rows) = args[:num_tensors], args[num_tensors:]
    attend_target = None if cross is None else partial(cross, *cross_tensors)
    out = bound.block(*bound.block_inputs(uses_target_features, *inputs), attend_fns, output_rows, attend_target)
    return bound.block.next_features(out), *logits_or_topk(bound.block.logits(out), top_k)


def cross_attend(
    prefix_attend: PrefixAttentionFunction,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch | None,
    max_kv_len: int,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    q: torch.Tensor,
) -> torch.Tensor:
    """Returns the attention of q (query heads, B * T, d) to the target's keys and values before each sequence's root.
    ``slots``, ``kv_lens``: tensors of ``batch``, or inputs of a CUDA graph, with lengths up to ``max_kv_len``. A
    captured round has no ``batch``."""
    query_len = q.shape[1] // len(slots)
    if batch is None or kv_lens is not batch.prefix_lens_t:  # inside a CUDA graph: slots and lengths come from the
        no_slots = (-1,) * len(slots)  # tensors, so the values on the host are placeholders
        batch = ForwardBatch(no_slots, (max_kv_len,) * len(slots), query_len, None, slots, kv_lens, is_captured=True)
    queries = q.unflatten(1, (-1, query_len)).transpose(0, 1)
    return prefix_attend(queries, keys, values, batch, keys.shape[3] ** -0.5).transpose(0, 1).flatten(1, 2)


class DraftRound:
    """Drafts the trees of one round for the batch ``sequences``. A tree has at most ``depth`` levels."""

    level_cost: ClassVar[float] = 1.0
    """Cost of one more level, in forwards of the draft."""

    def __init__(self, drafter: BlockDrafter, sequences: list[Sequence], depth: int) -> None:
        self.sequences, self._drafter, self._depth = sequences, drafter, depth
        self._cache, self._bound = drafter.cache, drafter.bound
        self._cross_batch: ForwardBatch | None = None  # batch of the last cross-attention, which the next level reuses
        self._graphs, self._device = drafter.runner.graphs, drafter.runner.device
        self._ancestors = AncestorMask()
        # The level that was fed last, and the features (B, W, hidden) for the children of that level's nodes.
        self._last_level: TreeLevel | None = None
        self._last_features: torch.Tensor | None = None
        # The level of the roots, and cos and sin (B, depth - 1, d) of the positions after them.
        self._root_level: TreeLevel | None = None
        self._next_rotary: tuple[torch.Tensor, ...] = ()

    def logits_or_topk(self, level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
        """Feeds a level to the draft; see :data:`~longdraft.trees.level.LogitsOrTopk`."""
        self._drafter.forwards += 1
        batch, inputs = self.node_inputs(level) if level.depth else self.root_inputs(level)
        features, *result = self.forward(batch, inputs, top_k, uses_target_features=not level.depth)
        self._last_level, self._last_features = level, features.view(*level.tokens.shape, -1)
        return tuple(x.view(*level.tokens.shape, -1) for x in result)

    def root_inputs(self, level: TreeLevel) -> tuple[DraftBatch, Inputs]:
        """Reserves and commits cache entries for each sequence's new tokens, the root last. Returns the batch and the
        inputs of the forward that fills them."""
        drafter, cache = self._drafter, self._cache
        sequences = [self.sequences[i] for i in level.sequence_indices]
        ends = [drafter.num_input_tokens(s) for s in sequences]
        width = self._num_fed_tokens(sequences, ends)
        spans = [(s, end - width, end) for s, end in zip(sequences, ends, strict=True)]
        for s, start, end in spans:
            drafter.prefill(s, start)  # keys and values of new tokens before the fed ones
            num_new = end - cache.context_len(s.slot)
            with profiled(drafter.runner.profiler, "update"):
                cache.make_room(s.slot, num_new)
            cache.commit(s.slot, num_new)
        tokens = [token for span in spans for token in drafter.input_tokens(*span)]
        # Positions of the tokens, and of the tree levels after the root. One copy moves all integers to the device.
        num_positions = width + self._depth - 1
        positions = [cache.next_position(s.slot) - width + i for s in sequences for i in range(num_positions)]
        integers = to_device([*tokens, *positions], self._device)
        token_ids = integers[: len(tokens)].view(len(sequences), width)
        cos, sin = (x.unflatten(0, (len(sequences), -1)) for x in self._bound.rotary(integers[len(tokens) :]))
        self._root_level, self._next_rotary = level, (cos[:, width:], sin[:, width:])
        hidden_states = [drafter.target_features(s.slot, start, end) for s, start, end in spans]
        features = [torch.stack(states)] if (states := [x for x in hidden_states if x is not None]) else []
        batch = DraftBatch.from_new_tokens(cache, self.slots(level), width)
        return batch, (token_ids, cos[:, :width], sin[:, :width], *features)

    def node_inputs(self, level: TreeLevel) -> tuple[DraftBatch, Inputs]:
        """Returns a level's batch and inputs. The position of a node is the root's position plus the node's depth."""
        batch = DraftBatch.from_level(self._cache, self.slots(level), level.depth, self._ancestors.add(level))
        assert self._root_level is not None
        rotary = (self._root_level.index_select(level.sequence_indices, x) for x in self._next_rotary)
        cos, sin = (x[:, level.depth - 1, None] for x in rotary)
        if not self._drafter.token_shift:  # only EAGLE's drafts, whose input tokens are shifted, read features
            return batch, (level.tokens, cos, sin)
        assert self._last_level is not None and self._last_features is not None
        last_features = self._last_level.index_select(level.sequence_indices, self._last_features)
        features = last_features.gather(1, level.parents[..., None].expand(-1, -1, last_features.shape[2]))
        return batch, (level.tokens, cos, sin, features)

    def _num_fed_tokens(self, sequences: list[Sequence], ends: list[int]) -> int:
        """Returns W: the largest number of new tokens of a sequence, within the limits of the graphs and of the cache:
        ``max_new_entries`` tokens fit a forward, and ``keep_last`` entries a window (None: no window)."""
        cache = self._cache
        num_new = [end - cache.context_len(s.slot) for s, end in zip(sequences, ends, strict=True)]
        limit = max(1, min(MAX_NEW_TOKENS, cache.max_new_entries, cache.keep_last or MAX_NEW_TOKENS))
        width = max(1, min(max(num_new), limit))
        if supports_batched_attend(cache) and self._drafter.is_capturable:
            width = min(self._graphs.padded_query_len(width) or width, limit)
        # An old token may be fed again only if the cache holds all entries from this token on.
        max_fed = (cache.contiguous_suffix_len(s.slot) + n for s, n in zip(sequences, num_new, strict=True))
        return max(1, min(width, *max_fed))

    def slots(self, level: TreeLevel) -> tuple[int, ...]:
        """Returns the KV cache slots of a level's sequences."""
        return tuple(self.sequences[i].slot for i in level.sequence_indices)

    def _cross_attention(self, draft_batch: DraftBatch) -> tuple[CrossFn | None, tuple[torch.Tensor, ...], Hashable]:
        """Returns cross-attention or None, its tensors (slots and KV lengths), and its part of a CUDA graph's key."""
        target_kv = self._drafter.target_kv(draft_batch.slots)
        if target_kv is None:
            return None, (), ()
        keys, values, kv_lens = target_kv
        query_len = draft_batch.num_outputs
        if self._cross_batch is None or self._cross_batch.slots != draft_batch.slots:
            self._cross_batch = ForwardBatch.make(draft_batch.slots, kv_lens, query_len, device=keys.device)
        batch = replace(self._cross_batch, query_len=query_len)
        max_kv_len = self._graphs.kv_bound(max(kv_lens), keys.shape[2])
        cross = partial(cross_attend, self._drafter.runner.prefix_attend, keys, values, batch, max_kv_len)
        return cross, (batch.slots_t, batch.prefix_lens_t), (tensor_key(keys), tensor_key(values), max_kv_len)

    def forward(
        self, batch: DraftBatch, inputs: Inputs, top_k: int, uses_target_features: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Runs the draft. Returns features (B * T, hidden) for the children of the output tokens, then their logits
        (B * T, draft vocabulary) if ``top_k`` is 0, else log-probabilities and draft ids (B * T, top_k).
        ``uses_target_features``: if ``inputs`` has features, they are the target's."""
        uses_target_features = uses_target_features and len(inputs) > 3  # only EAGLE's drafts have a fourth input
        if self._bound.fused_level is not None:
            block_inputs = self._bound.block_inputs(uses_target_features, *inputs)
            target_kv = self._drafter.target_kv(batch.slots)
            out, *result = self._bound.fused_level(batch, block_inputs, self._cache, target_kv, top_k)
            return self._bound.block.next_features(out), *result
        cross, cross_tensors, cross_key = self._cross_attention(batch)
        run_block = partial(run_draft_block, self._bound, uses_target_features, cross)
        if self._drafter.is_capturable and not inputs[0].is_floating_point() and supports_batched_attend(self._cache):
            # A planner changes the number of candidates each round. Powers of two need few graphs.
            graph_top_k = top_k and 1 << (top_k - 1).bit_length()
            key = cross_key, self._bound.block, uses_target_features, graph_top_k
            run_graph = partial(run_block, graph_top_k, len(inputs))
            replayed = self._replay(batch, inputs, cross_tensors, run_graph, key)
            if replayed is not None:
                features, *outputs = replayed
                return features, *(x[:, :top_k] if top_k else x for x in outputs)
        attend, rows = batch.attend_fns(self._cache), batch.output_rows(self._device)
        return run_block(top_k, len(inputs), *inputs, *cross_tensors, attend, rows)

    def _replay(
        self,
        batch: DraftBatch,
        inputs: SequenceOf[torch.Tensor],
        cross_tensors: SequenceOf[torch.Tensor],
        run_block: Callable[..., tuple[torch.Tensor, ...]],
        key: Hashable,
    ) -> tuple[torch.Tensor, ...] | None:
        """Replays ``run_block`` from a captured CUDA graph; returns None if no graph fits. ``key``: what ``run_block``
        depends on. Tree levels are padded here to a captured length. ``_num_fed_tokens`` has already chosen one for new
        tokens where it could."""
        graphs, cache = self._graphs, self._cache
        query_len = graphs.padded_query_len(batch.query_len)
        has_all_outputs = batch.num_outputs == batch.query_len
        if query_len is None or (query_len != batch.query_len and not has_all_outputs):
            return None
        batch_size = padded_batch_size(len(batch.slots), cache.store.slots)
        max_kv_len = graphs.kv_bound(batch.max_kv_len, cache.store.capacity)

        def make_inputs() -> list[torch.Tensor]:
            num_padding = batch_size - len(batch.slots)
            padding = (x[:1].expand(num_padding, *x.shape[1:]) for x in cross_tensors)  # copies of the first sequence
            padded = [torch.cat(x) for x in zip(cross_tensors, padding, strict=True)] if num_padding else cross_tensors
            return [*inputs, *padded, *DeviceBatch.make(cache, batch, query_len, batch_size)]

        store = cache.store.for_graph()
        num_outputs = query_len if has_all_outputs else batch.num_outputs
        padded_batch = DraftBatch((0,) * batch_size, query_len, num_outputs, ((0, max_kv_len),) * batch_size)

        def padded_forward(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            num_fields = len(DeviceBatch._fields)
            tensors, device_batch = args[:-num_fields], DeviceBatch(*args[-num_fields:])
            attend = batched_attend(store, device_batch, max_kv_len)
            results = run_block(*tensors, [attend], padded_batch.output_rows(tensors[0].device))
            return tuple(x.unflatten(0, (batch_size, -1)) for x in results)

        memory_key = tensor_key(cache.store.keys), tensor_key(cache.store.values)
        # Masks are padded to the cache's scratch entries.
        graph_key = key, memory_key, max_kv_len, cache.scratch, has_all_outputs
        owner = cache.store.arena_buffers or cache.store  # the graph lives as long as this memory
        results = graphs.run_draft(owner, graph_key, (batch_size, query_len), make_inputs, padded_forward)
        return None if results is None else tuple(x[:, : batch.num_outputs].flatten(0, 1) for x in results)
