"""A round of drafts with keys and values of their own: the rows that are new, then the tree level by level.

Everything that is computed goes through :meth:`DraftRound.step`: by one call of our kernels, by torch, or by a recorded
graph. All sequences feed as many rows: those that lack fewer feed earlier ones once more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.prefix import PrefixAttentionFunction
from longdraft.attention.transfer import to_device
from longdraft.drafters.shared.draft_batch import DeviceBatch, DraftBatch, attends_batched, batched_attend
from longdraft.drafters.shared.fused_level import BlockInputs, FusedLevel, draft_kernels
from longdraft.engine.sequence import Sequence
from longdraft.model.gpu.cuda_graphs import padded_batch_size
from longdraft.model.runner import TargetRunner
from longdraft.model.skinny_gemm import patch_linears
from longdraft.native.quantized_matrix import QuantizedMatrix
from longdraft.trees.level import TreeLevel, topk_logprobs
from longdraft.trees.masks import AncestorMask

if TYPE_CHECKING:
    from longdraft.drafters.shared.block_drafter import BlockDrafter

# New rows of a text that are fed in a round; more are read before, keys and values alone.
MAX_NEW_TOKENS = 64
# Inputs for W rows of each of B sequences: tokens (B, W) as ids, or (B, W, hidden) as embeddings; cos and sin (B, W, d)
# at their positions, W may be 1 for all; and (B, W, size) what EAGLE's drafts join with the tokens.
Inputs = tuple[torch.Tensor, ...]


class BoundDraft:
    """A draft in its target's dtype and on its device, with what it shares of the target.

    Args:
        rotary: positions (T,) -> cos and sin (T, d).
        draft_to_target_ids: (draft vocabulary,) target id of each draft id; None if they are the same.
        head: the target's rows that the draft borrows; None: it has a head of its own.

    Attributes:
        fused_level: computes a level in one kernel call; None without such kernels.
        target_to_draft_ids: (vocabulary,) draft id of each target id, -1 for one that the draft does not know; None: the same.
    """

    def __init__(
        self,
        runner: TargetRunner,
        block: Any,
        rotary: Any,
        draft_to_target_ids: torch.Tensor | None,
        head: torch.Tensor | QuantizedMatrix | None = None,
    ) -> None:
        self.block, self.rotary, self.draft_to_target_ids = (
            block,
            rotary,
            None if draft_to_target_ids is None else draft_to_target_ids.to(runner.device),
        )
        self.embedding: nn.Module = getattr(block, "embed_tokens", runner.shared_parts.embedding)
        self.fused_level = self.target_to_draft_ids = None
        if block.has_fused_kernel and (found := draft_kernels(runner, block.shape.head_dim)) is not None:
            self.fused_level = FusedLevel(found, block, block.lm_head.weight if head is None else head)
        if self.draft_to_target_ids is not None:
            self.target_to_draft_ids = torch.full(
                (runner.shared_parts.head.shape[0],), -1, device=runner.device, dtype=torch.long
            )
            self.target_to_draft_ids[self.draft_to_target_ids] = torch.arange(
                len(self.draft_to_target_ids), device=runner.device
            )
        patch_linears(block)

    def flat(self, entering: bool, tokens: torch.Tensor, *others: torch.Tensor) -> BlockInputs:
        """Rows (B * W, ...) of inputs as the block takes them: embeddings, what joins them, cos and sin.

        Args:
            entering: the rows are new tokens, and join what the target says of them.
        """
        batch, width = tokens.shape[:2]
        x = tokens.flatten(0, 1)
        cos, sin, *joined = (t.expand(batch, width, -1).flatten(0, 1) for t in others)
        g = self.block.project_features(joined[0]) if entering else joined[0] if joined else None
        return x if x.is_floating_point() else self.embedding(x), g, cos, sin


def _forward(
    bound: BoundDraft, entering: bool, cross: Callable[..., torch.Tensor] | None, best: int, count: int, *given: Any
) -> tuple[torch.Tensor, ...]:
    """The block on ``count`` inputs: what its nodes' children join, and what is said of them.

    It depends on what it is given alone: a recording outlives the round.

    Args:
        cross: what the block attends to beside its own keys.
        given: the inputs, further tensors of ``cross``, what attends, and the rows that go on.
    """
    *beside, attends, going = given[count:]
    out = bound.block(*bound.flat(entering, *given[:count]), attends, going, cross and partial(cross, *beside))
    logits = bound.block.logits(out)
    return bound.block.next_features(out), *(topk_logprobs(logits, best) if best else (logits,))


def _cross(
    prefix_attend: PrefixAttentionFunction,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: ForwardBatch,
    longest: int,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    q: torch.Tensor,
) -> torch.Tensor:
    """Every row attends to the target's keys and values before its sequence's root.

    Args:
        block: of the sequences. slots, lengths: its own, or those of a recorded graph, with ``longest`` rows at most.
    """
    seen, query_len = block, q.shape[1] // len(slots)
    if lengths is not block.prefix_lens_t:
        nowhere = (-1,) * len(slots)
        seen = ForwardBatch(nowhere, (longest,) * len(slots), query_len, None, slots, lengths, is_captured=True)
    rows = q.unflatten(1, (-1, query_len)).transpose(0, 1)
    return prefix_attend(rows, keys, values, seen, keys.shape[3] ** -0.5).transpose(0, 1).flatten(1, 2)


class DraftRound:
    """One round of a batch.

    Args:
        depth: levels of the trees at most.
    """

    def __init__(self, drafter: BlockDrafter, sequences: list[Sequence], depth: int) -> None:
        self.sequences, self._owner, self._depth = sequences, drafter, depth
        self._cache, self._bound = drafter.cache, drafter.bound
        self._prefixes: ForwardBatch | None = None  # of the last level's sequences
        self._graphs, self._device = drafter.runner.graphs, drafter.runner.device
        self._ancestors = AncestorMask()
        # The last level, and its nodes' outputs (B', W, hidden).
        self._last: tuple[TreeLevel, torch.Tensor] | None = None
        # The level of the roots; cos and sin (B, depth - 1, d) at the levels behind them.
        self._entered: TreeLevel | None = None
        self._ahead: tuple[torch.Tensor, ...] = ()

    def expand(self, level: TreeLevel) -> torch.Tensor:
        """Logits (B', W, draft vocabulary) of what follows each node."""
        return self.said(level, 0)[0].view(*level.tokens.shape, -1)

    def likeliest(self, level: TreeLevel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and draft ids (B', W, k) of the likeliest tokens behind each node."""
        logprobs, ids = (x.view(*level.tokens.shape, -1) for x in self.said(level, count))
        return logprobs, ids

    def said(self, level: TreeLevel, best: int) -> tuple[torch.Tensor, ...]:
        """Logits (B' * W, draft vocabulary) of what follows each node where ``best`` is 0; else log-probabilities and
        draft ids (B' * W, k) of the ``best`` likeliest."""
        self._owner.forwards += 1
        rows, inputs = self.nodes(level) if level.depth else self.roots(level)
        out, *said = self.step(rows, inputs, best, entering=not level.depth)
        self._last = level, out.view(*level.tokens.shape, -1)
        return tuple(said)

    def roots(self, level: TreeLevel) -> tuple[DraftBatch, Inputs]:
        """The rows that the cache lacks, the roots the last of them. They join what the target says of them, and count
        as read from now on."""
        cache, sequences = self._cache, [self.sequences[row] for row in level.sequence_indices]
        ends = [self._owner.known(s) for s in sequences]
        width = self._fit(sequences, ends)
        for s, end in zip(sequences, ends, strict=True):
            self._owner.read(s, end - width)
            cache.make_room(s.slot, end - cache.context_len(s.slot))
            cache.commit(s.slot, end - cache.context_len(s.slot))
        each = [(s, end - width, end) for s, end in zip(sequences, ends, strict=True)]
        tokens = [token for of_text in each for token in self._owner.tokens(*of_text)]
        places = [cache.next_position(s.slot) - width + i for s in sequences for i in range(width + self._depth - 1)]
        numbers = to_device([*tokens, *places], self._device)
        cos, sin = (x.unflatten(0, (len(ends), -1)) for x in self._bound.rotary(numbers[len(tokens) :]))
        self._entered, self._ahead = level, (cos[:, width:], sin[:, width:])
        found = [self._owner.features(s.slot, start, end) for s, start, end in each]
        joined = [torch.stack(states)] if (states := [x for x in found if x is not None]) else []
        inputs = numbers[: len(tokens)].view(len(ends), width), cos[:, :width], sin[:, :width], *joined
        return DraftBatch.new(cache, self.slots(level), width), inputs

    def nodes(self, level: TreeLevel) -> tuple[DraftBatch, Inputs]:
        """The nodes of a level, which join their parents' outputs: a node's position is its root's + its depth."""
        rows = DraftBatch.nodes(self._cache, self.slots(level), level.depth, self._ancestors.add(level))
        assert self._entered is not None
        cos, sin = (
            self._entered.index_select(level.sequence_indices, x)[:, level.depth - 1, None] for x in self._ahead
        )
        if not self._owner.token_shift:
            return rows, (level.tokens, cos, sin)
        assert self._last is not None
        above = self._last[0].index_select(level.sequence_indices, self._last[1])
        joined = above.gather(1, level.parents[..., None].expand(-1, -1, above.shape[2]))
        return rows, (level.tokens, cos, sin, joined)

    def _fit(self, sequences: list[Sequence], ends: list[int]) -> int:
        """The number of rows that every sequence feeds."""
        cache = self._cache
        lacking = [end - cache.context_len(s.slot) for s, end in zip(sequences, ends, strict=True)]
        most = max(1, min(MAX_NEW_TOKENS, cache.max_new_entries, *([cache.keep_last] if cache.keep_last else [])))
        width = max(1, min(max(lacking), most))
        if attends_batched(cache) and self._owner.is_capturable:
            width = min(self._graphs.padded_query_len(width) or width, most)
        # Rows that are fed once more lie one behind the other in the cache.
        return max(
            1, min(width, *(cache.contiguous_suffix_len(s.slot) + n for s, n in zip(sequences, lacking, strict=True)))
        )

    def slots(self, level: TreeLevel) -> tuple[int, ...]:
        return tuple(self.sequences[row].slot for row in level.sequence_indices)

    # --- the one step ---

    def _beside(
        self, rows: DraftBatch
    ) -> tuple[Callable[..., torch.Tensor] | None, tuple[torch.Tensor, ...], Hashable]:
        """The attention beside the block's own keys, further tensors (B, ...) that it takes, and its recordings'
        key: they are of these keys and values."""
        text = self._owner.text(rows.slots)
        if text is None:
            return None, (), ()
        keys, values, lengths = text
        if self._prefixes is None or self._prefixes.slots != rows.slots:
            self._prefixes = ForwardBatch.make(rows.slots, lengths, rows.going, device=keys.device)
        block, longest = (
            replace(self._prefixes, query_len=rows.going),
            self._graphs.kv_bound(max(lengths), keys.shape[2]),
        )
        cross = partial(_cross, self._owner.runner.prefix_attend, keys, values, block, longest)
        return cross, (block.slots_t, block.prefix_lens_t), (keys.data_ptr(), values.data_ptr(), longest)

    def step(self, rows: DraftBatch, inputs: Inputs, best: int, entering: bool = False) -> tuple[torch.Tensor, ...]:
        """One forward over some rows: outputs (rows that go on, hidden), and what :meth:`said` returns.

        Args:
            entering: the rows are new tokens, and join what the target says of them.
        """
        entering = entering and len(inputs) > 3
        if self._bound.fused_level is not None:
            flat, text = self._bound.flat(entering, *inputs), self._owner.text(rows.slots)
            out, *said = self._bound.fused_level(rows, flat, self._cache, text, best)
            return self._bound.block.next_features(out), *said
        cross, beside, kind = self._beside(rows)
        forward = partial(_forward, self._bound, entering, cross, best, len(inputs))
        kind = kind, self._bound.block, entering, best
        recordable = self._owner.is_capturable and not inputs[0].is_floating_point() and attends_batched(self._cache)
        found = self._replayed(rows, inputs, beside, forward, kind) if recordable else None
        if found is not None:
            return found
        return forward(*inputs, *beside, rows.attends(self._cache), rows.outputs(self._device))

    def _replayed(
        self,
        rows: DraftBatch,
        inputs: SequenceOf[torch.Tensor],
        beside: SequenceOf[torch.Tensor],
        forward: Callable[..., tuple[torch.Tensor, ...]],
        kind: Hashable,
    ) -> tuple[torch.Tensor, ...] | None:
        """The forward, replayed from a recorded graph; None if there is none.

        New tokens are as many as a recording takes already; nodes are padded.
        """
        graphs, cache = self._graphs, self._cache
        wide = graphs.padded_query_len(rows.width)
        if wide is None or (wide != rows.width and rows.going < rows.width):
            return None
        sequences = len(rows.slots)
        batch = padded_batch_size(sequences, cache.store.slots)
        bound = graphs.kv_bound(rows.longest, cache.store.capacity)
        going = wide if rows.going == rows.width else rows.going

        def given() -> list[torch.Tensor]:
            more = batch - sequences  # which are like the first sequence
            rest = [torch.cat([x, x[:1].expand(more, *x.shape[1:])]) for x in beside] if more else beside
            return [*inputs, *rest, *DeviceBatch.of(cache, rows, wide, batch)]

        memory = copy(cache)  # the same tensors; a recording outlives the cache itself
        memory.store = copy(cache.store)
        memory.store.arena_buffers = None
        like = DraftBatch((0,) * batch, wide, going, ((0, bound),) * batch)

        def level(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own, at = given[: -len(DeviceBatch._fields)], DeviceBatch(*given[-len(DeviceBatch._fields) :])
            out = forward(*own, [batched_attend(memory, at, bound)], like.outputs(own[0].device))
            return tuple(x.unflatten(0, (batch, -1)) for x in out)

        key = kind, bound, cache.scratch, rows.going == rows.width
        found = graphs.run_draft(cache.store.arena_buffers or cache.store, key, (batch, wide), given, level)
        return None if found is None else tuple(x[:, : rows.going].flatten(0, 1) for x in found)
