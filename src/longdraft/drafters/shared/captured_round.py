"""A whole round in one CUDA graph: growth of the trees, choice of nodes, verification, accepted path.

The host copies a row of integers for each sequence to the device, replays the graph, and reads the trees with the
target's tokens. The rest of a round is done by the host as in every round, except that the graph has already moved the
KV of the accepted paths into place.

Trees have a fixed shape, so that the host decides nothing within a round. Each sequence feeds its last W tokens, where
W is the most that a round emits; tokens that have been fed before are fed again. Tokens are the target's argmax, or
samples whose noise is known; other sequences are decoded without. Shapes: B sequences, D levels, N nodes of a tree with
its root.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.drafters.shared.draft_batch import DeviceBatch, batched_attend, supports_batched_attend
from longdraft.drafters.shared.draft_block import ALL, OutputRows
from longdraft.drafters.shared.draft_round import BoundDraft, CrossFn, DraftRound, cross_attend, run_draft_block
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.engine.verifier import VerifyOutput
from longdraft.memory.store import KVStore
from longdraft.model.gpu.captured_forwards import RoundFn, RoundInputs
from longdraft.model.gpu.cuda_graphs import CAPTURE_QUERY_LENS, tensor_key
from longdraft.model.outputs import nan_logits_error
from longdraft.model.runner import TargetRunner
from longdraft.trees.device_trees import DeviceTrees, choose_nodes
from longdraft.trees.level import LevelExpander, TreeLevel
from longdraft.trees.masks import AncestorMask
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.trees.tree_config import TreeConfig

if TYPE_CHECKING:
    from longdraft.drafters.shared.block_drafter import BlockDrafter

NAN_TOKEN = -1  # stands for the target's token at a node whose logits are NaN


class Rows(NamedTuple):
    """The integers of B sequences on the device.

    Attributes:
        slots, kv_lens: (B,) slot and KV length of the target.
        cache_lens, positions: (B,) number of entries of the draft's cache, and the position of the next token.
        cross_lens: (B,) number of the target's entries that the draft reads.
        max_depths: (B,) most levels of a tree whose tokens may still be emitted.
        window_starts: (B, D) first entry of the draft's cache that each level sees.
        tokens: (B, W) the tokens to feed.
    """

    slots: torch.Tensor
    kv_lens: torch.Tensor
    cache_lens: torch.Tensor
    positions: torch.Tensor
    cross_lens: torch.Tensor
    max_depths: torch.Tensor
    window_starts: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def split(cls, integers: torch.Tensor, depth: int) -> Rows:
        """Splits the integers (B, 6 + D + W) of :func:`_inputs`."""
        *numbers, window_starts, tokens = integers.split([1] * 6 + [depth, integers.shape[1] - depth - 6], dim=1)
        slots, kv_lens, cache_lens, positions, cross_lens, max_depths = (x[:, 0] for x in numbers)
        return cls(slots, kv_lens, cache_lens, positions, cross_lens, max_depths, window_starts, tokens)


def can_capture(drafter: BlockDrafter) -> bool:
    """Returns True if a graph can contain all of a round of this drafter."""
    store, max_nodes = drafter.store, drafter.tree.max_nodes
    drafts_by_levels = drafter.round_type is DraftRound and drafter.retrieval is None and drafter.is_capturable
    runs_graphs = drafter.runner.graphs.enabled and drafter.runner.fixed_batch_rows is None
    is_capturable = runs_graphs and supports_batched_attend(drafter.cache) and store.is_resident
    return drafts_by_levels and is_capturable and max_nodes < CAPTURE_QUERY_LENS[-1]


def replay_round(
    drafter: BlockDrafter, sequences: list[Sequence], limit: NodeLimit | None
) -> list[VerifyOutput] | None:
    """Replays a round; see :meth:`~longdraft.engine.drafter.Drafter.replay_round`. :func:`can_capture` must be true."""
    runner, store, cache, tree = drafter.runner, drafter.store, drafter.cache, drafter.tree
    if limit is not None and not tree.is_user_defined:  # of a tree that the user chose, a planner verifies a part
        tree = tree.as_fixed(limit.max_nodes)
    if not tree.is_fixed or (limit is not None and tree.is_user_defined):
        return None
    num_fed = tree.depth + 1
    if not all(_can_feed(drafter, s, num_fed) for s in sequences):
        return None
    settings = tuple(s.sampler.settings_key for s in sequences)
    samples = not sequences[0].greedy
    if None in settings or not all(s.sampler.is_noise_known if samples else s.sampler.is_argmax for s in sequences):
        return None
    if not any(s.max_draft_depth for s in sequences):  # a plain step emits the last token of all
        return None
    kv_bound = runner.graphs.kv_bound(max(store.lengths[s.slot] for s in sequences), store.capacity)
    most_entries = max(cache.store.lengths[s.slot] for s in sequences) + num_fed + cache.scratch
    draft_kv_bound = runner.graphs.kv_bound(most_entries, cache.store.capacity)

    def make_compute() -> RoundFn:
        return RoundComputation(
            drafter.bound, tree, runner, store.for_graph(), cache.store.for_graph(), kv_bound, draft_kv_bound,
            drafter.target_kv(()) is not None, drafter.token_shift > 0,
            tuple(Sampler(s.greedy, s.sampler.processors) for s in sequences) if samples else (),
        ).compute  # fmt: skip

    key = (
        "round", drafter.bound.block, tree, len(sequences), kv_bound, draft_kv_bound,
        samples, settings, *map(tensor_key, (store.keys, store.values, cache.store.keys, cache.store.values)),
    )  # fmt: skip
    owner = cache.store.arena_buffers or cache.store  # the graph lives as long as this memory
    results = runner.replay_round(owner, key, partial(_inputs, drafter, sequences, tree, samples), make_compute)
    if results is None:
        return None
    drafter.forwards += tree.depth
    return _read_outputs(runner, sequences, results)


def _can_feed(drafter: BlockDrafter, s: Sequence, num_fed: int) -> bool:
    """Returns True if W tokens contain all that the draft has not seen, and older ones of them may be fed again."""
    cache = drafter.cache
    num_new = drafter.num_input_tokens(s) - cache.context_len(s.slot)
    most = min(cache.max_new_entries, cache.keep_last or num_fed, cache.contiguous_suffix_len(s.slot) + num_new)
    return num_new <= num_fed <= most


def _inputs(drafter: BlockDrafter, sequences: list[Sequence], tree: TreeConfig, samples: bool) -> RoundInputs:
    """Commits the entries of new tokens in the draft's cache, which the graph fills. For each sequence, returns the
    fields of :class:`Rows` and, if tokens are sampled, the noise of the next D + 1 samples."""
    cache, depth, rows = drafter.cache, tree.depth, []
    for s in sequences:
        end = drafter.num_input_tokens(s)
        num_new = end - cache.context_len(s.slot)
        cache.make_room(s.slot, num_new)
        cache.commit(s.slot, num_new)
        target_kv = drafter.target_kv((s.slot,))
        row = [s.slot, drafter.store.lengths[s.slot], cache.store.lengths[s.slot], cache.next_position(s.slot)]
        row += [0 if target_kv is None else target_kv[2][0], s.max_draft_depth]
        row += [cache.window_start(s.slot, level) for level in range(depth)]
        rows.append([*row, *drafter.input_tokens(s, end - depth - 1, end)])
    noise = [s.sampler.noise.peek(i) for s in sequences for i in range(depth + 1)] if samples else []
    return rows, [x for x in noise if x is not None]


def _read_outputs(runner: TargetRunner, sequences: list[Sequence], results: torch.Tensor) -> list[VerifyOutput]:
    """Reads the results of :meth:`RoundComputation.compute` on the host, the only wait of the round."""
    host = results.cpu()
    integers, logprobs = host.tolist(), host[..., 3].contiguous().view(torch.float32).tolist()
    outputs, no_logits = [], torch.empty(0, dtype=torch.float32, device="cpu")
    for s, nodes, node_logprobs in zip(sequences, integers, logprobs, strict=True):
        tokens, parents, target_tokens, _ = zip(*nodes, strict=True)
        if NAN_TOKEN in target_tokens:
            raise nan_logits_error(runner.model)
        tree = TokenTree(tokens, (-1, *parents[1:]), tuple(node_logprobs)).limit_depth(s.max_draft_depth)
        tokens_at_nodes = list(target_tokens[: tree.size])  # deeper nodes come last
        outputs.append(VerifyOutput(s, tree, no_logits, (no_logits, no_logits), {}, target_tokens=tokens_at_nodes))
    return outputs


@dataclass(frozen=True)
class RoundComputation:
    """Computes a captured round. It holds no owner of buffers, because a graph must not keep their memory alive.

    Attributes:
        store, cache_store: the target's KV, and the KV of the draft.
        kv_bound, draft_kv_bound: upper bounds on the entries that a token attends to in each of them.
        has_cross_attention: the draft reads the KV of the target's last layer (LongSpec).
        reads_features: the draft reads the target's hidden states (EAGLE).
        samplers: of each sequence, without noise; empty if tokens are the argmax.
    """

    bound: BoundDraft
    tree: TreeConfig
    runner: TargetRunner
    store: KVStore
    cache_store: KVStore
    kv_bound: int
    draft_kv_bound: int
    has_cross_attention: bool
    reads_features: bool
    samplers: tuple[Sampler, ...]

    def compute(self, integers: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Computes a round.

        Args:
            integers: (B, 6 + D + W) those of :class:`Rows`.
            noise: (B * (D + 1), vocabulary) of the next samples; None: tokens are the argmax.

        Returns:
            int32 (B, N, 4): each node's token, parent, the target's token there, and the bits of the draft's
            log-probability.
        """
        rows, num_sequences = Rows.split(integers, self.tree.depth), len(integers)
        noise = None if noise is None else noise.unflatten(0, (num_sequences, -1))
        trees = self._grow(rows, noise)
        num_nodes = trees.tokens.shape[1]
        batch = ForwardBatch(
            # Values on the host are placeholders: a captured forward reads the tensors.
            (-1,) * num_sequences, (min(self.kv_bound, self.store.capacity - num_nodes),) * num_sequences, num_nodes,
            trees.mask, rows.slots.int(), rows.kv_lens.int(), trees.tokens, rows.kv_lens[:, None] + trees.depths,
            is_captured=True,
        )  # fmt: skip
        logits = self.runner.compute_captured(self.store, batch)
        maxima, target_tokens = logits.max(-1)
        if noise is not None:
            nodes = zip(self.samplers, logits, noise, trees.depths, strict=True)
            target_tokens = torch.stack([sampler.sample_with(x, e[depths]) for sampler, x, e, depths in nodes])
        paths = trees.accepted_paths(target_tokens, self.tree.depth)
        self.store.move_paths(rows.slots, rows.kv_lens, paths)
        target_tokens = target_tokens.masked_fill(maxima.isnan(), NAN_TOKEN)  # the maximum is NaN if any logit is
        return torch.stack(
            [*(x.int() for x in (trees.tokens, trees.parents, target_tokens)), trees.logprobs.view(torch.int32)], -1
        )

    def _grow(self, rows: Rows, noise: torch.Tensor | None) -> DeviceTrees:
        """Grows the trees, as :class:`~longdraft.drafters.shared.draft_round.DraftRound` does."""
        device, (num_sequences, num_fed) = rows.tokens.device, rows.tokens.shape
        cross: CrossFn | None = None
        if self.has_cross_attention:
            slots, kv_lens = rows.slots.int(), rows.cross_lens.int()
            keys, values = self.store.layer(self.store.shape.layers - 1)
            cross = partial(cross_attend, self.runner.prefix_attend, keys, values, None, self.kv_bound, slots, kv_lens)
        features = None
        if self.reads_features and self.store.features is not None:
            # At position t, the input is token t + 1 with the hidden state at t.
            positions = rows.positions[:, None] + torch.arange(-num_fed, 0, device=device)
            features = self.store.features[rows.slots[:, None], positions]
        draft = _GraphDraft(self, rows, features, cross)

        def couple(level: TreeLevel, logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
            assert noise is not None
            nodes = zip(self.samplers, logprobs, token_ids, noise[:, level.depth], strict=True)
            return torch.stack([sampler.couple(*node) for sampler, *node in nodes])

        coupled = None if noise is None else couple
        expander = LevelExpander(draft.logits_or_topk, device, self.bound.draft_to_target_ids, coupled)
        zeros = torch.zeros(num_sequences, 1, dtype=torch.float32, device=device)
        tokens = rows.tokens[:, -1:]
        roots = TreeLevel(tuple(range(num_sequences)), 0, tokens, torch.zeros_like(tokens), zeros, zeros)
        levels = self.tree.grow_levels(roots, expander, [self.tree.depth] * num_sequences)
        return choose_nodes(roots, levels, self.tree.max_nodes, rows.max_depths)


@dataclass
class _GraphDraft:
    """The draft's forwards within a captured round: of W tokens of each sequence, then of the expanded nodes."""

    graph: RoundComputation
    rows: Rows
    target_features: torch.Tensor | None  # (B, W, size) of the tokens to feed, for EAGLE's drafts
    cross: CrossFn | None
    ancestors: AncestorMask = field(default_factory=AncestorMask)
    last_features: torch.Tensor | None = None  # (B, T, hidden) for the children of the last level's nodes

    def logits_or_topk(self, level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
        """Feeds a level to the draft; see :data:`~longdraft.trees.level.LogitsOrTopk`."""
        rows, graph, device = self.rows, self.graph, self.rows.tokens.device
        (num_sequences, num_fed), is_root = rows.tokens.shape, not level.depth
        outputs: OutputRows = ALL
        if is_root:
            tokens, features, num_nodes = rows.tokens, self.target_features, 0
            mask = torch.empty(num_sequences, 1, 0, dtype=torch.bool, device=device)
            positions = rows.positions[:, None] + torch.arange(-num_fed, 0, device=device)
            outputs = torch.arange(1, num_sequences + 1, device=device) * num_fed - 1  # the last token of each
        else:
            tokens, features, mask = level.tokens, self.last_features, self.ancestors.add(level)
            num_nodes, positions = mask.shape[2], rows.positions[:, None] + level.depth - 1
            if features is not None:
                features = features.gather(1, level.parents[..., None].expand(-1, -1, features.shape[2]))
        cos, sin = (x.view(*positions.shape, -1) for x in graph.bound.rotary(positions.flatten()))
        inputs = (tokens, cos, sin) if features is None else (tokens, cos, sin, features)
        device_batch = self._device_batch(level.depth, tokens.shape[1], num_nodes, mask)
        attend_fns = [batched_attend(graph.cache_store, device_batch, graph.draft_kv_bound)]
        uses_target_features = is_root and features is not None
        draft_outputs = run_draft_block(
            graph.bound, uses_target_features, self.cross, top_k, len(inputs), *inputs, attend_fns, outputs
        )
        next_features, *result = (x.view(*level.tokens.shape, -1) for x in draft_outputs)
        if self.target_features is not None:
            self.last_features = next_features
        return tuple(result)

    def _device_batch(self, depth: int, width: int, num_nodes: int, mask: torch.Tensor) -> DeviceBatch:
        """Returns the places of ``width`` tokens, which end ``num_nodes`` behind the committed entries."""
        rows, start = self.rows, self.rows.window_starts[:, depth]
        entries = rows.cache_lens[:, None] + torch.arange(num_nodes - width, num_nodes, device=start.device)
        writes = torch.stack([rows.slots[:, None].expand_as(entries), entries], -1)
        return DeviceBatch(writes, rows.slots.int(), start.int(), (rows.cache_lens - start).int(), mask)
