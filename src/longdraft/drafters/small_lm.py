"""A small language model as a drafter. It runs as the target does, with a KV cache of its own.

A round feeds the new tokens as a chain that ends with the root. The root's logits give the first level, and the tree
grows level by level. The KV of each level is written after the KV of earlier levels, under an ancestor mask. Only the
KV of emitted tokens is committed to the draft's cache. A draft of another vocabulary has an entry for each target token
too (:mod:`longdraft.drafts.token_map`).

The view is the part of the context that the draft attends to. A full view has all tokens, at true positions, as in
plain speculative decoding. A streaming view has the first and the last tokens. A retrieval view also has the chunks
that the target attends to (Cha et al. 2025, SpecExtend, section 2.2). A streaming or retrieval view keeps positions
within the trained length, and the cost of a round does not depend on the context's length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.drafters.shared.key_rotation import KeyRotation
from longdraft.drafters.shared.lm_round import LMDraftRound
from longdraft.drafters.shared.retrieval import ChunkOptions, RetrievalDrafter, make_retrieval
from longdraft.drafts.language_model import BoundLM, SmallLMDraft
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model.rope import rotary_module
from longdraft.model.round_profiler import profiled
from longdraft.model.runner import TargetRunner
from longdraft.options import option, parse
from longdraft.trees.level import LevelExpander, TreeLevel, logits_or_topk
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views import draft_cache
from longdraft.views.draft_cache import MIN_NEW_ENTRIES, DraftCache, RepositionedKVCache
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View

VIEWS = ("full", "streaming", "retrieval")
PREFILLS = ("window", "full")
STREAMING_RECENT = 1024  # last tokens of a streaming view: about 1K is best for 68M parameters (SpecExtend, E.1)
RETRIEVAL_RECENT = 128  # last tokens of a retrieval view


@dataclass(frozen=True)
class SmallLMOptions(ChunkOptions):
    """The view of a small language model. ``sink`` and ``recent`` also shape a streaming view."""

    view: str | None = option(
        choices=VIEWS,
        help="what the draft attends to: all of the context, its first and last tokens, or these and retrieved chunks",
        usual="full, or streaming for contexts longer than it was trained for",
    )
    prefill: str = option(
        "window",
        choices=PREFILLS,
        help="what a prompt's tokens attend to before a streaming or retrieval view: the first and latest tokens, or "
        "all earlier tokens (SpecExtend, 2.1)",
    )
    vocabulary: int | None = option(
        min=2, help="propose only the first N token ids, which are the frequent ones in most tokenizers", usual="all"
    )


class SmallLMDrafter(RetrievalDrafter):
    """Drafts trees with a small language model.

    Args:
        draft: the small model.
        options: fields of :class:`TreeOptions` and :class:`SmallLMOptions`. The default tree is an OPT-Tree with
            view="retrieval" (SpecExtend), else a dynamic tree.
    """

    options = (TreeOptions, SmallLMOptions)
    bound: BoundLM

    def __init__(self, draft: SmallLMDraft, **options: Any) -> None:
        tree_options, view_options = parse("small-lm", options, *self.options)
        view_name, sink, recent = view_options.view, view_options.sink, view_options.recent
        user_options = view_options.user_chunk_options(is_enabled=view_name == "retrieval", remedy="view=retrieval")
        self.tree = tree_options.config("opt" if view_name == "retrieval" else "dynamic")
        self.draft, self.view = draft.with_trimmed_vocab(view_options.vocabulary), view_name
        self._prefills_fully = view_options.prefill == "full"
        # Space after the view for new tokens: enough for one round at least.
        new_tokens = max(draft_cache.MIN_NEW_ENTRIES, self.tree.depth + 1)
        max_tokens = draft.trained_length - self.tree.depth - new_tokens
        make_streaming = partial(_make_streaming_retrieval, sink, recent, max_tokens, new_tokens)
        # Without ``view``, :meth:`bind` makes a streaming view if the context can outgrow the trained length.
        self._make_default_retrieval = make_streaming if max_tokens > sink else None
        if view_name == "streaming":
            self.retrieval = make_streaming()
        elif view_name == "retrieval":
            chunk_options = {"layer": draft.retrieval_layer} | user_options
            chunk_options |= {"sink": sink, "recent": RETRIEVAL_RECENT if recent is None else recent}
            self.retrieval = make_retrieval(**chunk_options, max_tokens=max_tokens, new_tokens=new_tokens)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.bound, self._target, self._store = self.draft.bind(runner), runner, store
        model, trained_length = self.bound.runner, self.draft.trained_length
        # The target's store bounds every sequence, so its capacity also bounds the draft's context.
        slots, capacity, scratch = store.slots, store.capacity, self.tree.max_expanded_nodes
        may_outgrow = capacity > trained_length and rotary_module(model.model) is not None
        if self.view is None and may_outgrow and self._make_default_retrieval and not model.has_recurrent_layers:
            self.retrieval = self._make_default_retrieval()
        self.cache: DraftCache = (
            # The scratch space is at least MIN_NEW_ENTRIES: padding of short chains is written there too.
            DraftCache(model.new_store(slots, capacity + max(scratch, MIN_NEW_ENTRIES)), scratch)
            if self.retrieval is None
            else make_repositioned_cache(
                model, slots, capacity, scratch, self.retrieval, trained_length, self._prefills_fully
            )
        )
        self.fed_token_ids: list[list[int]] = [[] for _ in range(slots)]  # for each slot, the tokens in the cache

    @torch.inference_mode()
    def observe(self, round_result: RoundResult) -> None:
        """Prefills a prompt, and updates the retrieval. The next round feeds the emitted tokens.

        Raises:
            CapabilityError: the view is full, and the sequence may exceed the draft's learned position embeddings.
        """
        s = round_result.sequence
        self.update_retrieval(self._store, round_result)
        if round_result.is_prefill:
            self._check_length(s)
            self._truncate(s.slot, 0)
            self._prefill(s.slot, s.tokens[:-1])

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        bound, draft_round = self.bound, SmallLMRound(self, sequences)
        expander = LevelExpander(draft_round.logits_or_topk, bound.runner.device, bound.draft_to_target_ids)
        return self.grow(sequences, expander, limit)

    def release(self, sequence: Sequence) -> None:
        self._truncate(sequence.slot, 0)

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Drops the KV after the first ``length`` tokens of a sequence."""
        if length < len(self.fed_token_ids[sequence.slot]):
            self._truncate(sequence.slot, length)

    def new_tokens(self, sequence: Sequence) -> list[int]:
        """Returns the new tokens to feed in one forward, the root last. Prefills all but the root if there are many."""
        slot, tokens = sequence.slot, sequence.tokens
        if len(self.fed_token_ids[slot]) >= len(tokens):  # the root must be fed again, for its logits
            self._truncate(slot, len(tokens) - 1)
        new_tokens = tokens[len(self.fed_token_ids[slot]) :]
        if len(new_tokens) > self.cache.max_new_entries:
            self._prefill(slot, new_tokens[:-1])
            new_tokens = new_tokens[-1:]
        with profiled(self._target.profiler, "update"):
            self.cache.make_room(slot, len(new_tokens))
        return new_tokens

    def commit(self, slot: int, tokens: list[int]) -> None:
        """Commits the KV of tokens that were fed."""
        self.cache.commit(slot, len(tokens))
        self.fed_token_ids[slot] += tokens

    def _truncate(self, slot: int, length: int) -> None:
        length = self.cache.restorable_length(slot, length)  # recurrent states may only have a shorter one
        self.cache.truncate(slot, length)
        del self.fed_token_ids[slot][length:]

    def _prefill(self, slot: int, tokens: list[int]) -> None:
        """Feeds tokens in chunks, without logits."""
        prompt_len = len(self.fed_token_ids[slot]) + len(tokens)
        while tokens:
            count = self.cache.begin_chunk(slot, len(tokens))
            chunk, tokens = tokens[:count], tokens[count:]
            store = self.cache.store
            batch = store.make_forward_batch([slot], [chunk], is_prefill=True, prompt_len=prompt_len)
            self.bound.runner.forward(self.bound.translate(batch), store, logits="none")
            self.commit(slot, chunk)

    def _check_length(self, s: Sequence) -> None:
        """Warns once if a sequence, or its view, can exceed the trained length. Raises CapabilityError for learned
        positions."""
        draft, trained_length, length = self.draft, self.draft.trained_length, s.max_length
        if self.retrieval is not None:
            length = min(length, self.retrieval.view.capacity)
            if length > trained_length:
                consequence = "acceptance may be lower: give fewer chunks, or a smaller recent"
                draft.warn_beyond_trained_length(trained_length, f"its view has up to {length}", consequence)
            return
        num_positions = self.bound.runner.context_length
        if length > max(trained_length, num_positions) and rotary_module(self.bound.runner.model) is None:
            raise CapabilityError(
                f"The text has up to {length} tokens, but the draft {draft.folder} has learned position embeddings for "
                f"{num_positions} only. Use a draft with a longer context, or prompt-lookup."
            )
        if length > trained_length:
            consequence = "acceptance will be lower: leave view out, or use view=retrieval (method specextend)"
            draft.warn_beyond_trained_length(trained_length, f"this one has up to {length}", consequence)


def _make_streaming_retrieval(sink: int, recent: int | None, max_tokens: int, new_tokens: int) -> Retrieval:
    """Makes a Retrieval without chunks: first and last tokens, at most ``max_tokens`` unless ``recent`` says more.
    Raises ValueError if ``sink`` leaves no space for last tokens."""
    if sink >= max_tokens:
        raise ValueError(
            f"sink is too large: only {max_tokens} tokens of the draft's trained length are left after those of a "
            "round. Lower sink or the tree's depth"
        )
    recent = min(STREAMING_RECENT, max_tokens - sink) if recent is None else recent
    return Retrieval(View("streaming", 0, sink, recent, max_new=new_tokens, shared_by_heads=True))


def make_repositioned_cache(
    runner: TargetRunner, slots: int, capacity: int, scratch: int, retrieval: Retrieval, trained_length: int,
    prefills_fully: bool = False,
) -> RepositionedKVCache:  # fmt: skip
    """Makes the working cache of a view. A prefill chunk attends to the sink, the tokens just before it, and itself.

    Args:
        slots: number of sequences.
        capacity: number of entries for the full context of a sequence.
        scratch: number of entries that a round writes after the view.
        trained_length: the draft's trained length.
        prefills_fully: True if a prefill chunk attends to all of the prompt before it.

    Raises:
        UnsupportedModelError: the model has recurrent layers, or its keys cannot be moved to other positions.
        MemoryBudgetError: the cache does not fit the free memory.
    """
    if runner.has_recurrent_layers:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has recurrent layers, whose state covers the full context: let it draft on "
            "the full context (view=full)."
        )
    view = retrieval.view
    prefill_length = min(trained_length, view.sink + view.window + draft_cache.PREFILL_CHUNK)
    prefill_capacity = max(view.capacity, capacity if prefills_fully else prefill_length)
    rotation = KeyRotation(runner, prefill_capacity)
    store = runner.new_store(slots, prefill_capacity + max(scratch, view.max_new), resident=True)
    # The KV of the full context. Views are gathered from it; no forward attends to it.
    full_store = KVStore(runner.kv_shape, slots, capacity, runner.device)
    rotate, unrotate = rotation.rotate, rotation.unrotate
    return RepositionedKVCache(store, full_store, scratch, retrieval, rotate, unrotate, prefill_capacity)


class SmallLMRound(LMDraftRound):
    """Drafts the trees of one round. Feeds the new tokens as a chain that ends with the root."""

    def __init__(self, drafter: SmallLMDrafter, sequences: list[Sequence]) -> None:
        super().__init__(drafter, drafter.bound.runner, drafter.cache.store, drafter.bound.fused_lm, sequences)
        self._small_lm, self._translate = drafter, drafter.bound.translate

    def root_position(self, sequence: Sequence) -> int:
        """Returns the root's position in the cache, which already holds the root."""
        return self._store.lengths[sequence.slot] - 1

    def logits_or_topk(self, level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
        """Feeds a level. Before the level of the roots, feeds and commits the new tokens of each sequence."""
        if level.depth:
            return super().logits_or_topk(level, top_k)
        self._drafter.forwards += 1
        sequences = self.sequences_of(level)
        slots, chains = [s.slot for s in sequences], [self._small_lm.new_tokens(s) for s in sequences]
        batch, fused_lm = self._translate(self._store.make_forward_batch(slots, chains)), self._fused_lm
        is_even = len({*map(len, chains)}) == 1  # no chain is padded, so the last logits are the root's
        result: tuple[torch.Tensor, ...]
        if top_k and fused_lm is not None and is_even and fused_lm.supports(self._store, sum(map(len, chains))):
            result = fused_lm.topk(batch, self._store, top_k, last_only=True)
        else:
            out = self._runner.forward(batch, self._store, logits="last" if is_even else "all", check_nan=False)
            logits = out.logits
            assert logits is not None
            if not is_even:
                logits = torch.stack([logits[i, len(chain) - 1] for i, chain in enumerate(chains)])[:, None]
            result = logits_or_topk(logits, top_k)
        for slot, chain in zip(slots, chains, strict=True):
            self._small_lm.commit(slot, chain)
        return result

    def _forward_batch(self, level: TreeLevel) -> ForwardBatch:
        return self._translate(super()._forward_batch(level))
