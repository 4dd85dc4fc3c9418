"""EAGLE-3: a one-layer drafter that reads what the target thought of each token (Li et al. 2025; SpecPV, section 3.1).

    g_t = fc(f_t)                           f_t: three hidden states of the target at position t, side by side
    x_t = [RMSNorm(embed(token_{t+1})), RMSNorm(g_t)]
    a_t = g_t + Attn(x_t)                   q, k, v from twice the hidden size; RoPE at position t
    o_t = a_t + SwiGLU(RMSNorm(a_t))
    logits of token_{t+2} = head(RMSNorm(o_t))

Row t joins the target's hidden states at position t, kept in the store by every forward, with the token that follows,
and predicts the one after that. Past the tokens that the target has read there are no hidden states: the draft's own o
stands in for the next g. The embedding is the target's own, by reference, the head the draft's. EAGLE-3.1 norms the
hidden states before fc, and o before it becomes the next g.

A round: the rows that are new since the last one enter the draft's own cache (a window where the draft has one), the
newest of them, which carries the root, goes through the whole layer; then the tree grows level by level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from longdraft.drafters.shared.block_drafter import CHUNK, BlockDrafter
from longdraft.drafters.shared.draft_batch import DraftBatch
from longdraft.drafters.shared.draft_block import DraftBlock, DraftLayer, initialize
from longdraft.drafters.shared.draft_round import BoundDraft
from longdraft.drafters.shared.retrieval import RetrievalOptions
from longdraft.drafts.eagle_draft import EagleDraft
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine import method
from longdraft.engine.method import Method
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.key_rotation import apply_rotary
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, option, parse
from longdraft.trees.kind import TreeConfig
from longdraft.trees.options import TreeOptions
from longdraft.views.draft_cache import PREFILL_CHUNK, DraftCache, RepositionedKVCache


class Eagle3Block(DraftBlock):
    """The module. Its state dict is the published layout; the tables ``d2t`` and ``t2d`` are kept beside it."""

    norm: nn.RMSNorm
    norm_output = False

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape, self.norm_output = shape, shape.norm_output
        eps, size, hidden = shape.rms_norm_eps, shape.feature_size, shape.hidden_size
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(size, eps)
        if shape.fc_norm is not None:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size // shape.fc_norm, eps) for _ in range(shape.fc_norm))
        if shape.embedding is not None:
            self.embed_tokens = nn.Embedding(shape.embedding, hidden)
        self.fc = nn.Linear(size, hidden, bias=False)
        self.midlayer = DraftLayer(shape, 2 * hidden, "input_layernorm", "hidden_norm")
        self.later_layers = tuple(DraftLayer(shape, hidden, "input_layernorm") for _ in range(1, shape.decoder_layers))
        if self.later_layers:
            self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(self.later_layers, 1)})
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, shape.vocabulary, bias=False)
        self.has_fused_kernel = not shape.qk_norm and not shape.output_bias and not self.later_layers

    @property
    def first_layer(self) -> DraftLayer:
        return self.midlayer

    def initialize(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        """Normal weights, unit norms, zero output projections.

        Args:
            head: (vocabulary, hidden) rows of the target's head to start from.
        """
        initialize(self, seed, std)
        if head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(head)

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.fc_norm is not None:
            parts = features.chunk(self.shape.fc_norm, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(features)
        return out

    def next_features(self, out: torch.Tensor) -> torch.Tensor:
        following: torch.Tensor = self.norm(out) if self.norm_output else out
        return following

    def combine_inputs(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert g is not None
        normed: torch.Tensor = self.midlayer.hidden_norm(g)
        n = torch.cat([self.midlayer.input_layernorm(x), normed], -1)
        return n, normed if self.shape.norm_before_residual else g

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(out))
        return logits


class Eagle3Draft(EagleDraft[BoundDraft]):
    """A trained draft of any layout."""

    module_type: ClassVar[type[Any]] = Eagle3Block
    default_depth: int | None = None  # of a dynamic tree; None: as usual

    @property
    def is_multi_layer(self) -> bool:
        """True if the rows of a text go through several layers, which see the rows before in each."""
        return self.decoder_layers > 1

    def make(self, runner: TargetRunner) -> BoundDraft:
        rotary = self.rotary(runner.kv_shape.dtype, runner.device)
        return BoundDraft(runner, self.load_module(runner), rotary, self.draft_to_target_ids)


@dataclass(frozen=True)
class WindowOptions(Options):
    """The tokens that an EAGLE draft sees."""

    window: int | None = option(
        min=1, help="the draft sees so many tokens back and no further", usual="its folder's, or the trained length"
    )


class Eagle3Drafter(BlockDrafter):
    """Drafts trees with an EAGLE-3 layer.

    With retrieval, it sees the chunks of the text that the target attends to, at compact positions, and keeps its own
    keys of the whole text behind them (SpecExtend, section 2.2); a window that its folder names is then the room that
    they have.

    Args:
        draft: a trained draft.
        options: of :class:`TreeOptions`, :class:`WindowOptions` and :class:`RetrievalOptions`.
    """

    options: ClassVar[tuple[type[Options], ...]] = (TreeOptions, WindowOptions, RetrievalOptions)
    token_shift = 1
    draft: Eagle3Draft

    def __init__(self, draft: Eagle3Draft, **options: Any) -> None:
        tree, own, *others = parse(draft.label, options, *self.options)
        retrieval: RetrievalOptions = others[0] if others else RetrievalOptions()
        self.tree = self.adapt_tree(
            tree.kind("opt" if retrieval.retrieval else "dynamic", draft.default_depth), draft, options
        )
        self.window = draft.window if own.window is None else own.window
        if self.window is not None and self.tree.depth >= self.window:
            whose = f"{draft.folder}: " if own.window is None else ""
            raise ValueError(
                f"{whose}window must be more tokens than the tree has levels ({self.tree.depth}), got {self.window}"
            )
        if retrieval.retrieval and own.window is not None:
            raise ValueError("window and retrieval both say what the draft sees: give one of them")
        self.retrieval = retrieval.build(draft, None if self.window is None else self.window - self.tree.depth)
        if self.retrieval is not None:
            self.window = None
        self.draft = draft

    def adapt_tree(self, tree: TreeConfig, draft: Eagle3Draft, options: Mapping[str, Any]) -> TreeConfig:
        """The tree as the draft can grow it. ``options`` are the user's."""
        return tree

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The layers that the draft's folder names, usually three."""
        return self.draft.feature_layers(runner)

    @property
    def scratch(self) -> int:
        """Rows of its own cache that a round needs behind the text."""
        return self.tree.max_expanded_nodes

    def kv_shape_of_draft(self) -> KVShape:
        """The shape of the draft's own keys and values."""
        shape = self.draft.shape
        return KVShape(self.draft.decoder_layers, shape.kv_heads, shape.head_dim, self.runner.kv_shape.dtype)

    def make_cache(self) -> DraftCache:
        capacity, own = self.store.capacity, self.kv_shape_of_draft()
        if self.retrieval is not None:
            rotary, view = self.bound.rotary, self.retrieval.view
            store = self.new_cache_store(own, view.capacity + self.scratch)
            full = KVStore(own, self.store.slots, capacity, self.runner.device)
            # Through several layers a text is read behind a window of the working cache.
            piece = max(1, min(PREFILL_CHUNK, (view.capacity - view.sink) // 2))
            return RepositionedKVCache(
                store, full, self.scratch, self.retrieval,
                lambda keys, places: apply_rotary(keys, *rotary.rotation(places)),
                lambda keys, places: apply_rotary(keys, *rotary.rotation(-places)),
                piece, view.capacity,
            )  # fmt: skip
        # RoPE tells distances alone, so in a window all are distances that the draft knows: as if the positions were
        # moved back to 0. No text of this run outgrows the store.
        seen = max(min(self.window or self.draft.max_context or capacity, capacity), self.tree.depth + 1)
        # The rows that are read together through several layers see as many back as one alone.
        return self.last_rows(own, seen + (CHUNK + 1 if self.draft.is_multi_layer else 0), self.scratch, seen)

    @torch.inference_mode()
    def observe(self, round_result: RoundResult) -> None:
        """Reads a prompt's last window, keys and values alone; forgets changed rows; scores chunks when that is due."""
        if round_result.is_prefill:
            self._warn(round_result.sequence)
        super().observe(round_result)
        if round_result.kv_rewritten_from is not None:  # the row before joins the first of their tokens
            self.cache.truncate(round_result.sequence.slot, max(0, round_result.kv_rewritten_from - 1))

    def lookback(self, end: int) -> int:
        if self.draft.is_multi_layer:
            return self.draft.decoder_layers * (self.cache.window or end)
        return super().lookback(end)

    def prefill_chunk(self, sequence: Sequence, start: int, end: int) -> None:
        if not self.draft.is_multi_layer:
            super().prefill_chunk(sequence, start, end)
            return
        cache, slot = self.cache, sequence.slot
        if self.retrieval is None:
            cache.make_room(slot, end - start)
        while start < end:
            count = cache.begin_chunk(slot, end - start)
            x, g, *_ = self.inputs(sequence, start, start + count)
            first = cache.next_position(slot)
            cos_sin = self.bound.rotary(torch.arange(first, first + count, device=self.runner.device))
            cache.commit(slot, count)
            self.bound.block(x, g, *cos_sin, DraftBatch.new(cache, (slot,), count).attends(cache))
            start += count

    def _warn(self, s: Sequence) -> None:
        """Warns if a text is longer than the draft was trained for."""
        reach, length = self.draft.max_context, s.max_length
        what, then = "this one has", f"it sees the last {reach} tokens (another: window=N)"
        if self.retrieval is not None:
            length = min(length, self.retrieval.view.capacity + self.tree.depth)
            what, then = "its working cache has", "acceptance will be lower: give fewer chunks"
        if self.window is None and reach is not None and length > reach:
            self.draft.warn_beyond_trained_length(
                reach, f"{what} up to {length}", f"{then}, or set YaRN in its config.json"
            )


register(
    Kind(
        "eagle3",
        Eagle3Drafter,
        "a trained one-layer draft that reads the model's hidden states; published drafts load as they are",
        "Li et al. 2025, EAGLE-3, arXiv:2503.01840",
        load=Eagle3Draft.load,
        training=Training(
            "longdraft.training.config:Eagle3Config",
            "longdraft.training.eagle3:train_eagle3",
            "Train an EAGLE-3 draft",
        ),
    )
)
method.register(
    Method(
        "specextend-eagle3",
        partial(Eagle3Drafter, retrieval=True),  # and so an OPT-Tree
        "EAGLE-3 that sees the chunks of a long text which the model attends to, at positions it knows",
        "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
        draft_kind="eagle3",
    )
)
