"""The target as its own drafter: it drafts on a part of its KV and verifies on all of it.

A draft forward reads all of the weights, but a few hundred rows of KV instead of the text's; or all of them, in a
quarter of the bytes (Tiwari et al. 2025, QuantSpec). So it pays where the KV is what a forward waits for: long texts,
and batches, whose sequences share the weights and not the KV (Sadhukhan et al. 2024, MagicDec). What part: a
:class:`~longdraft.views.view.View`.

A round: the view takes in the exact rows that the last verification left in the full store, then the root and the tree
behind it are fed level by level, each level's rows behind those before. These rows are forgotten afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from typing import Any, ClassVar

import torch

from longdraft.drafters.shared.acceptance_calibrator import AcceptanceCalibrator
from longdraft.drafters.shared.lm_round import LMDraftRound
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.engine import method
from longdraft.engine.method import Method
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.verifier import verify_trees
from longdraft.memory.store import KVStore
from longdraft.model.fused_lm import FusedLM
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, option, parse
from longdraft.trees.level import TreeLevel
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.retrieval import ReselectionTimer
from longdraft.views.scorers import SCORERS
from longdraft.views.sparse_kv_cache import SparseKVCache
from longdraft.views.view import DTYPES, View, parse_dtype

DEFAULT_BUDGET = 512
# StreamingLLM's first tokens, which MagicDec and TokenSwift take over.
SINK = 16
# SnapKV's window, whose queries choose (MagicDec, section 4).
WINDOW = 32
# TriForce, section 4.1.
CHUNK = 8
# Rows of a window that no text leaves.
EVERYTHING = 2**40
# View -> its scorer, and the rows that it chooses together; None: there is nothing to choose, or only single rows.
VIEWS: dict[str, tuple[str, int | None]] = {
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


@dataclass(frozen=True)
class ViewOptions(Options):
    """The part of its KV that a model drafts on. None: not given."""

    budget: int | None = option(
        min=1, help="KV rows of each layer and head, sink and window included", usual="512; 2048 of view=attention"
    )
    sink: int | None = option(min=0, help="first rows, always seen", usual="16")
    window: int | None = option(
        min=1, help="last rows, always seen", usual="32; of view=streaming all that the budget leaves"
    )
    chunk: int | None = option(min=1, help="rows that are chosen together", usual="8; 1 of snapkv and tokens")
    refresh: int | None = option(
        min=0,
        help="verifications from one choice to the next; 0: only when the view has no room for new rows",
        usual="8; 16 of snapkv",
    )
    view_dtype: str | None = option(
        choices=tuple(DTYPES), help="what the view's keys and values are rounded to", usual="int8 of all and attention"
    )


def make_self_view(view: str, budget: int | None, sink: int | None, window: int | None, chunk: int | None) -> View:
    """A view from a drafter's options, None for those that were not given.

    Args:
        view: one of :data:`VIEWS`; "all" has no sizes.
        budget: rows, sink and window among them; 512 by default, of "streaming" with a window as many as that makes.
        sink: 16 by default, or as many of the first chunks as hold so many.
        window: 32 by default; with "streaming", all that the budget leaves.
        chunk: 8 by default, 1 with "snapkv"; not of "streaming" or "tokens".
    """
    if view == "all":
        sizes = {"budget": budget, "sink": sink, "window": window, "chunk": chunk}
        if given := [name for name, size in sizes.items() if size is not None]:
            raise ValueError(f"view=all sees all rows: leave {' and '.join(given)} out, or take another view")
        return View("streaming", 0, 0, EVERYTHING)
    scorer, usual = VIEWS[view]
    if chunk is not None and usual is None:
        raise ValueError(f"chunk shapes views that choose chunks, such as view=chunks, and not view={view}")
    size = chunk if chunk is not None else usual or 1
    sink = -(-SINK // size) * size if sink is None else sink
    streaming = SCORERS[scorer] is None
    if budget is None:
        budget = sink + window if streaming and window is not None else DEFAULT_BUDGET
    if window is None:
        window = max(budget - sink, 1) if streaming else WINDOW
    least = sink + window + (size if size > 1 else 0)
    if budget < least:
        raise ValueError(
            f"budget must be at least sink + window{' + chunk' if size > 1 else ''} ({least} tokens), got {budget}: "
            "give a larger budget, or a smaller sink and window"
        )
    reduction = "mean" if scorer == "snapkv" else "last"
    return View(scorer, budget - sink - window, sink, window, size, reduction=reduction)


# New rows that a view takes in before it is chosen anew, as a share of its budget, and at least.
FRESH_SHARE, FRESH = 4, 64
# Verifications from one choice to the next.
REFRESH, USUAL_REFRESH = {"snapkv": 16}, 8
# Share of tokens that it is believed to choose as the target does, at first (docs/self-drafting.md): on all rows; on
# 512; so much more each time these are doubled; at most, on some rows.
ALL, SOME, DOUBLED, MOST = 0.95, 0.4, 0.225, 0.85
# Rows of a view by attention where nobody says how many (docs/self-drafting.md).
MANY = 2048
# Time of a forward on lighter weights, of one on the target's (docs/self-drafting.md); in int8 arithmetic there are no
# lighter ones.
LIGHTER = 0.8


@dataclass(frozen=True)
class SelfOptions(ViewOptions):
    """The view of self-drafting."""

    view: str = option(
        "attention",
        choices=tuple(VIEWS),
        help="all rows, rounded; streaming: the first and the last; or these and the rows that a query ranks best",
        usual="attention; snapkv of magicdec, all of quantspec",
    )


def can_draft_quantized(runner: TargetRunner) -> bool:
    """True if a model drafts on an eight-bit view, and in float32 on lighter weights than it verifies on, by kernels of
    ours."""
    return (
        runner.can_round_kv
        and not runner.kv_is_rounded
        and runner.offload is None
        and runner.execution_model.fused.stack is not None
    )


class SelfDrafter(TreeDrafter):
    """Drafts with the target on a sparse view of its own KV.

    Args:
        options: of :class:`SelfOptions` and :class:`TreeOptions`; the tree is a chain of 4, and with a planner one as
            long as pays.

    Attributes:
        cache: the views' KV; from :meth:`bind` on.
    """

    options: ClassVar[tuple[type[Options], ...]] = (SelfOptions, TreeOptions)

    def __init__(self, **options: Any) -> None:
        own, tree = parse("self-drafting", options, SelfOptions, TreeOptions)
        view = own.view
        self.view_dtype = parse_dtype("int8" if view == "all" and own.view_dtype is None else own.view_dtype)
        self._many = view == "attention" and own.budget is None and own.view_dtype is None
        sizes = make_self_view(view, MANY if self._many else own.budget, own.sink, own.window, own.chunk)
        self.view = replace(sizes, max_new=max(FRESH, sizes.size // FRESH_SHARE))
        interval = REFRESH.get(view, USUAL_REFRESH) if own.refresh is None else own.refresh
        self.refresh = ReselectionTimer(interval, self.view.num_queries)
        self.tree = tree.kind("chain")
        more = log2(max(1.0, self.view.size / DEFAULT_BUDGET))
        self.prior_acceptance = ALL if view == "all" else min(SOME + DOUBLED * more, MOST)
        self._agreement: dict[int, AcceptanceCalibrator] = {}  # of each text
        self.fused_lm: FusedLM | None = None
        # Rows that trees fill which another one drafted and this one judges.
        self.max_verified_tokens = 0

    @property
    def forward_cost_ratio(self) -> float:  # type: ignore[override]
        return LIGHTER if self.fused_lm is not None and self.fused_lm.is_quantized else 1.0

    def kv_tokens_read(self, length: int) -> float | None:
        kept = self.runner.kv_dtype
        return min(length, self.view.size) * (self.view_dtype or kept).itemsize / kept.itemsize

    @property
    def views(self) -> tuple[View, ...]:
        return () if self.view.window == EVERYTHING else (self.view,)

    @property
    def num_prompt_queries(self) -> int:  # type: ignore[override]
        return max(1, self.view.num_queries)

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """All, where rows are chosen: each layer for itself."""
        return tuple(range(runner.kv_shape.layers)) if self.view.num_queries else ()

    def needs_queries(self, sequences: list[Sequence]) -> bool:
        """Not while the views hold all of the texts, and nothing is to be chosen."""
        # A recorded verification brings them for nothing, and one without them would be another recording.
        return self.runner.graphs.enabled or any(s.length + FRESH > self.view.size for s in sequences)

    def bind(self, runner: TargetRunner, store: KVStore, feature_layers: tuple[int, ...] = ()) -> None:
        self.runner, features = runner, feature_layers or store.feature_layers
        if self._many and runner.can_round_kv:
            self.view_dtype = torch.int8

        def new_store(slots: int, capacity: int) -> KVStore:
            return runner.new_store(slots, capacity, features, resident=True, dtype=self.view_dtype, with_states=False)

        self.cache = SparseKVCache(store, new_store, self.view, self.scratch_entries)
        self.fused_lm = FusedLM.of(runner)

    @property
    def scratch_entries(self) -> int:
        """Rows behind a view that a round fills at most, the root's included."""
        return max(self.tree.max_expanded_nodes, self.max_verified_tokens) + 1

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        self.update_views(sequences)

        def lift(level: TreeLevel, logprobs: torch.Tensor) -> torch.Tensor:
            texts = zip((sequences[row] for row in level.sequence_indices), logprobs, strict=True)
            return torch.stack([self.calibrator(s).calibrate(x) for s, x in texts])

        drafted, device = (
            LMDraftRound(self, self.runner, self.cache.store, self.fused_lm, sequences),
            self.runner.device,
        )
        return self.grow(sequences, drafted.expand, None, device, limit, drafted.likeliest, lift)

    def calibrator(self, sequence: Sequence) -> AcceptanceCalibrator:
        """The estimate of how often it chooses the target's token in this text."""
        return self._agreement.setdefault(sequence.index, AcceptanceCalibrator(self.prior_acceptance))

    @torch.inference_mode()
    def update_views(self, sequences: SequenceOf[Sequence]) -> None:
        """Updates the views to the readable rows of each text, and chooses rows again where that is due."""
        for s in sequences:
            due = self.view.num_queries > 0 and self.refresh.is_due(s.slot)
            if self.cache.update(s.slot, self.refresh.queries(s.slot), due):
                self.refresh.restart(s.slot)

    def observe(self, round_result: RoundResult) -> None:
        """Keeps queries for the next choice, learns from accepted tokens, forgets copies of changed rows."""
        slot = round_result.sequence.slot
        if round_result.is_prefill:  # nothing is kept of the last text in the slot
            self._begin(slot)
        if self.view.num_queries and round_result.queries:
            self.refresh.add_queries(slot, round_result.queries)
        if round_result.kv_rewritten_from is not None:
            self.cache.invalidate(slot, round_result.kv_rewritten_from)
        if round_result.is_prefill:  # as part of reading the prompt: the first round takes no longer than others
            self.update_views([round_result.sequence])
        elif round_result.tree.num_draft_tokens:  # a plain round says nothing of the view
            self.refresh.count_verification(slot)
            if round_result.tree.logprobs:
                self.calibrator(round_result.sequence).observe(round_result.tree, round_result.new_token_ids)

    def release(self, sequence: Sequence) -> None:
        self._agreement.pop(sequence.index, None)
        self._begin(sequence.slot)

    # --- as a verifier of what another one drafts ---

    @torch.inference_mode()
    def verify(self, sequences: SequenceOf[Sequence], trees: list[TokenTree]) -> list[torch.Tensor]:
        """Its logits (at least tree.size, vocabulary) on a tree of each sequence, rooted at its last token.

        The views must hold everything before the roots: call :meth:`update_views` first.
        """
        self.forwards += 1
        slots, bases = [s.slot for s in sequences], [s.length - 1 for s in sequences]
        out = verify_trees(self.runner, self.cache.store, slots, trees, bases)
        assert out.logits is not None
        return list(out.logits)

    def _begin(self, slot: int) -> None:
        self.cache.invalidate(slot)
        self.refresh.reset(slot)


method.register(
    Method(
        "self",
        SelfDrafter,
        "the model itself drafts on a part of its KV cache, and verifies on all of it",
        "Sun et al. 2024, TriForce, arXiv:2404.11912; Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049",
        accepts_lookup=True,
        is_worthwhile=can_draft_quantized,
    )
)
method.register(
    Method(
        "quantspec",
        partial(SelfDrafter, view="all"),
        "the model itself drafts on all of its KV cache in eight bits, and verifies on it as it is",
        "after Tiwari et al. 2025, QuantSpec, arXiv:2502.10424",
        accepts_lookup=True,
    )
)
method.register(
    Method(
        "magicdec",
        partial(SelfDrafter, view="snapkv"),
        "the model itself drafts a chain, on a part of its KV cache; for large batches",
        "Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049",
    )
)
