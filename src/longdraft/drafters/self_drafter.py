"""Self-drafting: the target drafts on a part of its KV (a :class:`~longdraft.views.view.View`), and verifies on all.

A draft forward reads all weights, but only a few hundred KV entries, or all KV entries in int8, a quarter of float32's
bytes (Tiwari et al. 2025, QuantSpec). So self-drafting is worthwhile where reading KV dominates a forward: for long
contexts, and for batches, whose sequences share the weights but not the KV (Sadhukhan et al. 2024, MagicDec).

A round first copies new KV entries, which the last verification wrote to the full store, to the view. Then it feeds the
root and the tree level by level. The KV of these nodes is written after the view, and dropped when the round ends.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import log2
from typing import Any, ClassVar

import torch

from longdraft.drafters.shared.lm_round import LMDraftRound
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.four_bit import four_bit_draft
from longdraft.drafts.fused_lm import FusedLM
from longdraft.engine.drafter import CHEAP_FORWARD_RATIO, DraftNeeds, SelfDraftCost
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.verifier import verify_trees
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.native.quantized_kv import entry_bytes
from longdraft.options import Options, option, parse
from longdraft.planning.acceptance import AcceptanceCalibrator
from longdraft.trees.level import LevelExpander, TreeLevel
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.retrieval import ReselectionTimer
from longdraft.views.scorers import SCORERS
from longdraft.views.sparse_kv_cache import SparseKVCache
from longdraft.views.view import DTYPES, View, parse_dtype

DEFAULT_BUDGET = 512  # KV entries of a view
SINK = 16  # number of first tokens that a view always has, as in StreamingLLM, MagicDec and TokenSwift
WINDOW = 32  # number of last tokens that a view always has; their queries rank chunks in SnapKV (MagicDec, section 4)
CHUNK = 8  # entries of a chunk (TriForce, section 4.1)
UNLIMITED = 2**40  # window of view=all: longer than any context
# {view: (scorer, default chunk size)}. None: the chunk size cannot be set, because the view selects no chunks.
VIEW_SCORERS: dict[str, tuple[str, int | None]] = {
    "all": ("streaming", None),
    "streaming": ("streaming", None),
    "snapkv": ("snapkv", 1),
    "chunks": ("mean-key", CHUNK),
    "tokens": ("tokens", None),
    "minmax": ("minmax", CHUNK),
    "quest": ("quest", CHUNK),
    "attention": ("attention", CHUNK),
    "mean-key": ("mean-key", CHUNK),
}
_SIZES = ("budget", "sink", "window", "chunk")  # options that shape every view except "all"


@dataclass(frozen=True)
class ViewOptions(Options):
    """The part of its KV that a model drafts on. None: the default."""

    budget: int | None = option(
        min=1, help="KV entries of each layer and head, sink and window included", usual="512; view=attention: 2048"
    )
    sink: int | None = option(min=0, help="first tokens, always in the view", usual="16")
    window: int | None = option(
        min=1, help="last tokens, always in the view", usual="32; view=streaming: the rest of the budget"
    )
    chunk: int | None = option(min=1, help="tokens that are selected together", usual="8; snapkv and tokens: 1")
    refresh: int | None = option(
        min=0,
        help="verifications from one selection to the next; 0: only when the view has no space for new tokens",
        usual="8; snapkv: 16",
    )
    view_dtype: str | None = option(
        choices=tuple(DTYPES), help="dtype of the view's keys and values", usual="all and attention: int8"
    )


# A view has space for size / NEW_TOKENS_DIVISOR new tokens before its chunks are reselected, at least MIN_NEW_TOKENS.
NEW_TOKENS_DIVISOR, MIN_NEW_TOKENS = 4, 64
# {view: verifications from one selection of chunks to the next}, and the number for all other views.
RESELECT_INTERVALS, DEFAULT_INTERVAL = {"snapkv": 16}, 8
# Acceptance rates that a planner assumes at first, as measured (docs/self-drafting.md): of view=all; of a view of 512
# entries; what each doubling of the 512 entries adds; and the upper bound of that sum.
FULL_ACCEPTANCE, BASE_ACCEPTANCE, ACCEPTANCE_PER_DOUBLING, MAX_ACCEPTANCE = 0.95, 0.4, 0.225, 0.85
QUANTIZED_ACCEPTANCE = 0.9  # of a view that holds the whole context, if the copy is much cheaper than the model
ATTENTION_BUDGET = 2048  # default budget of view=attention (docs/self-drafting.md)


@dataclass(frozen=True)
class SelfOptions(ViewOptions):
    """The view of self-drafting."""

    view: str = option(
        "attention",
        choices=tuple(VIEW_SCORERS),
        help="all: all tokens, in int8; streaming: first and last tokens; others: also the best tokens by this scorer",
        usual="attention; magicdec: snapkv; quantspec: all",
    )
    draft_weights: str | None = option(
        choices=("own", "q4_0"),
        help="weights of draft forwards; q4_0: a copy in four bits, if the model's have seven or more",
        usual="own; float32 arithmetic on a CPU: q4_0",
    )

    def make_view(self) -> View:
        """Makes the view, without space for new tokens. Raises ValueError if the sizes do not fit the view."""
        budget, sink, window, chunk = sizes = self.budget, self.sink, self.window, self.chunk
        if self.view == "all":
            if names := [name for name, size in zip(_SIZES, sizes, strict=True) if size is not None]:
                raise ValueError(f"view=all has no sizes: leave {' and '.join(names)} out, or take another view")
            return View("streaming", 0, 0, UNLIMITED)
        scorer, default_chunk = VIEW_SCORERS[self.view]
        if chunk is not None and default_chunk is None:
            raise ValueError(f"view={self.view} selects no chunks: leave chunk out, or give view=chunks")
        chunk_size = chunk if chunk is not None else default_chunk or 1
        sink = -(-SINK // chunk_size) * chunk_size if sink is None else sink  # rounded up to whole chunks
        is_streaming = SCORERS[scorer] is None
        if budget is None:
            budget = sink + window if is_streaming and window is not None else DEFAULT_BUDGET
        if window is None:
            window = max(budget - sink, 1) if is_streaming else WINDOW
        minimum = sink + window + (chunk_size if chunk_size > 1 else 0)
        if budget < minimum:
            raise ValueError(
                f"budget {budget} is less than sink + window{' + chunk' if chunk_size > 1 else ''} ({minimum} tokens): "
                "give a larger budget, or a smaller sink and window"
            )
        reduction = "mean" if scorer == "snapkv" else "last"  # which of the last queries' scores rank the chunks
        return View(scorer, budget - sink - window, sink, window, chunk_size, reduction=reduction)


def can_draft_quantized(runner: TargetRunner) -> bool:
    """Returns whether our kernels can draft on an int8 view, and with quantised weights if the model is float32."""
    return (
        runner.can_round_kv
        and not runner.kv_is_rounded
        and runner.offload is None
        and runner.allows_fusion
        and runner.execution_model.fused.stack is not None
    )


class SelfDrafter(TreeDrafter):
    """Drafts with the target on a sparse view of its own KV.

    Args:
        options: fields of :class:`SelfOptions` and :class:`TreeOptions`. The default tree is a chain of 4 tokens; a
            planner may make it longer or shorter.

    Attributes:
        cache: KV cache of the views; from :meth:`bind` on.
    """

    options: ClassVar[tuple[type[Options], ...]] = (SelfOptions, TreeOptions)

    def __init__(self, **options: Any) -> None:
        config, tree_options = parse("self-drafting", options, SelfOptions, TreeOptions)
        view = config.view
        dtype = "int8" if view == "all" and config.view_dtype is None else config.view_dtype
        self.view_dtype, self._draft_weights = parse_dtype(dtype), config.draft_weights
        # By default view=attention is in int8 if the target's kernels can round KV (see :meth:`bind`).
        self._prefers_int8 = view == "attention" and config.view_dtype is None
        if view == "attention" and config.budget is None:
            config = replace(config, budget=ATTENTION_BUDGET)
        sized_view = config.make_view()
        self.view = replace(sized_view, max_new=max(MIN_NEW_TOKENS, sized_view.size // NEW_TOKENS_DIVISOR))
        interval = RESELECT_INTERVALS.get(view, DEFAULT_INTERVAL) if config.refresh is None else config.refresh
        self.timer = ReselectionTimer(interval, self.view.num_queries)
        self.tree = tree_options.config("chain")
        acceptance = BASE_ACCEPTANCE + ACCEPTANCE_PER_DOUBLING * log2(max(1.0, self.view.size / DEFAULT_BUDGET))
        self.prior_acceptance = FULL_ACCEPTANCE if view == "all" else min(acceptance, MAX_ACCEPTANCE)
        self._calibrators: dict[int, AcceptanceCalibrator] = {}  # by sequence index
        self._slots_without_queries: set[int] = set()  # slots whose last round had no queries
        self.fused_lm: FusedLM | None = None
        self._forward_ratio = 1.0  # seconds of a draft forward / seconds of the target's, from :meth:`bind` on
        self.max_verified_tokens = 0  # most tokens of one :meth:`verify`; set by the drafter that calls it

    @property
    def self_draft_cost(self) -> SelfDraftCost:
        kv_dtype, view = self.runner.kv_dtype, self.view
        view_bytes, kv_bytes = (
            entry_bytes(dtype, self.runner.kv_shape.head_dim) for dtype in (self.view_dtype or kv_dtype, kv_dtype)
        )
        return SelfDraftCost(
            lambda length: min(length, view.size) * view_bytes / kv_bytes, self._forward_ratio, self._prior_acceptance
        )

    def _prior_acceptance(self, length: int) -> float:
        """Returns the assumed acceptance rate in a context of ``length`` tokens."""
        is_cheap = self._forward_ratio < CHEAP_FORWARD_RATIO
        return QUANTIZED_ACCEPTANCE if is_cheap and length <= self.view.size else self.prior_acceptance

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        """Returns the queries of all layers if the view selects entries, because each layer selects by its own."""
        num_queries, views = self.view.num_queries, () if self.view.window == UNLIMITED else (self.view,)
        layers = range(runner.kv_shape.layers if num_queries else 0)
        return DraftNeeds(query_layers=tuple(layers), num_prompt_queries=max(1, num_queries), views=views)

    def needs_queries(self, sequences: list[Sequence], has_drafted: bool) -> bool:
        """Returns False in rounds without a draft, and while nothing is selected: the views hold the full contexts."""
        return has_drafted and any(s.length + MIN_NEW_TOKENS > self.view.size for s in sequences)

    def bind(self, runner: TargetRunner, store: KVStore, feature_layers: tuple[int, ...] = ()) -> None:
        self.runner, features = runner, feature_layers or store.feature_layers
        if self._prefers_int8 and runner.can_round_kv:
            self.view_dtype = torch.int8

        def new_store(slots: int, capacity: int) -> KVStore:
            return runner.new_store(slots, capacity, features, resident=True, dtype=self.view_dtype, with_states=False)

        self.cache = SparseKVCache(store, new_store, self.view, self.scratch_entries)
        self._draft_runner, self.fused_lm = runner, FusedLM.from_runner(runner, self._draft_weights)
        self._forward_ratio = 1.0 if self.fused_lm is None else self.fused_lm.forward_ratio
        if runner.device.type == "cuda" and self._draft_weights == "q4_0":
            draft = four_bit_draft(runner)
            if draft is not None:
                self._draft_runner, self._forward_ratio = draft.runner, draft.forward_ratio

    @property
    def scratch_entries(self) -> int:
        """Maximum number of entries that a round writes after a view, one of them for the root."""
        return max(self.tree.max_expanded_nodes, self.max_verified_tokens) + 1

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        self.update_views(sequences)

        def calibrate(level: TreeLevel, logprobs: torch.Tensor) -> torch.Tensor:
            calibrators = [self.calibrator(sequences[i]) for i in level.sequence_indices]
            return torch.stack([c.calibrate(x) for c, x in zip(calibrators, logprobs, strict=True)])

        draft_round = LMDraftRound(self, self._draft_runner, self.cache.store, self.fused_lm, sequences)
        expander = LevelExpander(draft_round.logits_or_topk, self.runner.device, calibrate=calibrate)
        return self.grow(sequences, expander, limit)

    def calibrator(self, sequence: Sequence) -> AcceptanceCalibrator:
        """Returns a sequence's acceptance calibrator, and makes it on first use."""
        return self._calibrators.setdefault(
            sequence.index, AcceptanceCalibrator(self._prior_acceptance(sequence.length))
        )

    @torch.inference_mode()
    def update_views(self, sequences: SequenceOf[Sequence]) -> None:
        """Copies each sequence's new entries to the view, and selects the view's chunks anew if the timer says so."""
        for s in sequences:
            is_due = self.view.num_queries > 0 and self.timer.is_due(s.slot)
            if self.cache.update(s.slot, self.timer.queries(s.slot), is_due):
                self.timer.restart(s.slot)

    def observe(self, round_result: RoundResult) -> None:
        """Stores queries for the next selection, drops copies of rewritten entries, and updates the calibrator."""
        slot = round_result.sequence.slot
        if round_result.is_prefill:  # the slot held another sequence before
            self._reset(slot)
        if self.view.num_queries and round_result.queries:
            self.timer.add_queries(slot, round_result.queries)
            if slot in self._slots_without_queries:  # the view was selected before the rounds without a draft
                self.timer.expire(slot)
                self._slots_without_queries.remove(slot)
        else:
            self._slots_without_queries.add(slot)
        if round_result.kv_rewritten_from is not None:
            self.cache.invalidate(slot, round_result.kv_rewritten_from)
        if round_result.is_prefill:  # fills the view now, so that the first round takes no longer than later ones
            self.update_views([round_result.sequence])
        elif round_result.tree.num_draft_tokens:  # a round without drafts tells nothing about the view
            self.timer.count_verification(slot)
            if round_result.tree.logprobs:
                self.calibrator(round_result.sequence).observe(round_result.tree, round_result.new_token_ids)

    def release(self, sequence: Sequence) -> None:
        self._calibrators.pop(sequence.index, None)
        self._reset(sequence.slot)

    # --- as a verifier of another drafter's trees (TriForce, TokenSwift) ---

    @torch.inference_mode()
    def verify(self, sequences: SequenceOf[Sequence], trees: list[TokenTree]) -> list[torch.Tensor]:
        """Returns each tree's logits (at least tree.size, vocabulary) on the views. A tree's root is the last token of
        the tree's sequence. Call :meth:`update_views` first."""
        self.forwards += 1
        slots, root_positions = [s.slot for s in sequences], [s.length - 1 for s in sequences]
        out = verify_trees(self.runner, self.cache.store, slots, trees, root_positions)
        assert out.logits is not None
        return list(out.logits)

    def _reset(self, slot: int) -> None:
        self.cache.invalidate(slot)
        self.timer.reset(slot)
        self._slots_without_queries.discard(slot)
