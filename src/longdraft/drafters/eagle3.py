"""EAGLE-3: a one-layer draft on the target's hidden states (Li et al. 2025; SpecPV, section 3.1, uses it as well).

    g_t = fc(f_t)                           f_t: hidden states of three layers of the target at position t, concatenated
    x_t = [RMSNorm(embed(token_{t+1})), RMSNorm(g_t)]
    a_t = g_t + Attn(x_t)                   q, k, v from twice the hidden size; RoPE at position t
    o_t = a_t + SwiGLU(RMSNorm(a_t))
    logits of token_{t+2} = head(RMSNorm(o_t))

The input at position t is the target's hidden states at t, which the target's forward writes to its KV store, and token
t + 1. The output predicts token t + 2. Nodes of a tree have no hidden states of the target, so the draft's own o_t is
used as g_{t+1}. The embedding is the target's; the head is the draft's, or else the target's. EAGLE-3.1 norms the
hidden states before fc, and norms o_t before it becomes g_{t+1}.

A round writes keys and values of the new inputs to the draft's KV cache, which may be a window. Only the last input,
whose token is the root, goes through the whole layer. Then the tree grows level by level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from longdraft.drafters.shared.block_drafter import KV_CHUNK, BlockDrafter
from longdraft.drafters.shared.draft_batch import DraftBatch
from longdraft.drafters.shared.draft_block import DraftBlock, DraftLayer
from longdraft.drafters.shared.draft_round import BoundDraft, DraftRound
from longdraft.drafters.shared.retrieval import RetrievalOptions
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.drafts.feature_draft import FeatureDraft
from longdraft.engine.drafter import DraftNeeds
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.rope import apply_rotary
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import parallel_linear
from longdraft.options import Options, option, parse
from longdraft.trees.options import TreeOptions
from longdraft.views.draft_cache import DraftCache, RepositionedKVCache


class Eagle3Block(DraftBlock):
    """EAGLE-3's module. The state dict is the published layout without ``d2t`` and ``t2d``, the tables of token ids."""

    norm: nn.RMSNorm
    norm_output = False  # True in EAGLE-3.1: an output is normed before it becomes the children's features

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape, self.norm_output = shape, shape.norm_output
        eps, feature_size, hidden = shape.rms_norm_eps, shape.feature_size, shape.hidden_size
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(feature_size, eps)
        if shape.fc_norm is not None:  # a norm for the hidden state of each target layer
            self.fc_norm = nn.ModuleList(nn.RMSNorm(feature_size // shape.fc_norm, eps) for _ in range(shape.fc_norm))
        if shape.embedding is not None:
            self.embed_tokens = nn.Embedding(shape.embedding, hidden)
        self.fc = nn.Linear(feature_size, hidden, bias=False)
        self.midlayer = DraftLayer(shape, 2 * hidden, "input_layernorm", "hidden_norm")
        self.later_layers = tuple(DraftLayer(shape, hidden, "input_layernorm") for _ in range(1, shape.decoder_layers))
        if self.later_layers:
            self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(self.later_layers, 1)})
        self.norm = nn.RMSNorm(hidden, eps)
        if shape.own_head:
            self.lm_head = nn.Linear(hidden, shape.vocabulary, bias=False)
        self.has_fused_kernel = not shape.qk_norm and not shape.output_bias and not self.later_layers

    @property
    def first_layer(self) -> DraftLayer:
        return self.midlayer

    def initialize(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        """Sets weights as :meth:`DraftBlock.initialize`. ``head``: initial weight (vocabulary, hidden) of the head."""
        super().initialize(seed, std)
        if head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(head)

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.fc_norm is not None:
            by_layer = features.chunk(self.shape.fc_norm, -1)
            features = torch.cat([norm(states) for norm, states in zip(self.fc_norm, by_layer, strict=True)], -1)
        out: torch.Tensor = self.fc(features)
        return out

    def next_features(self, out: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.norm(out) if self.norm_output else out
        return features

    def combine_inputs(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert g is not None
        normed: torch.Tensor = self.midlayer.hidden_norm(g)
        n = torch.cat([self.midlayer.input_layernorm(x), normed], -1)
        return n, normed if self.shape.norm_before_residual else g

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = (self.lm_head if self.shape.own_head else self.head)(self.norm(out))
        return logits


class Eagle3Draft(FeatureDraft[BoundDraft]):
    """A trained EAGLE-3 draft of any published layout. ``module_type`` is the class of the draft's module."""

    module_type: ClassVar[type[Any]] = Eagle3Block
    round_type: ClassVar[type[DraftRound]] = DraftRound  # drafts the trees of one round
    default_depth: int | None = None  # number of levels of a dynamic tree; None: the preset's

    @property
    def max_levels(self) -> int | None:
        """Maximum number of levels of a tree, if one forward drafts all of them; None: no limit."""
        return getattr(self.shape, "slots", None)

    @property
    def is_multi_layer(self) -> bool:
        """True if the draft has several layers. A prefill then needs outputs, as later layers' keys depend on them."""
        return self.decoder_layers > 1

    def make(self, runner: TargetRunner) -> BoundDraft:
        rotary, block, head = self.rotary(runner.kv_shape.dtype, runner.device), self.load_module(runner), None
        if not self.shape.own_head:
            head, _ = self.head(runner)
            block.borrow_head(parallel_linear(head))
        return BoundDraft(runner, block, rotary, self.draft_to_target_ids, head)


@dataclass(frozen=True)
class WindowOptions(Options):
    """The tokens that an EAGLE draft attends to."""

    window: int | None = option(
        min=1, help="the draft attends to the last N tokens only", usual="its folder's, or the trained length"
    )


class Eagle3Drafter(BlockDrafter):
    """Drafts trees with a draft that reads the target's hidden states: EAGLE, P-EAGLE or DFlash.

    With retrieval, the draft attends only to the chunks of the context that the target attends to. Their KV is copied
    to a working cache, at positions 0, 1, 2, ...; the KV of the full context is stored apart (SpecExtend, section 2.2).
    The working cache has the size of the window that the draft's folder names.

    Args:
        draft: a trained draft.
        options: fields of :class:`TreeOptions`, :class:`WindowOptions` and :class:`RetrievalOptions`.
    """

    options: ClassVar[tuple[type[Options], ...]] = (TreeOptions, WindowOptions, RetrievalOptions)
    token_shift = 1
    draft: Eagle3Draft

    def __init__(self, draft: Eagle3Draft, **options: Any) -> None:
        tree_options, window_options, *rest = parse(draft.label, options, *self.options)
        retrieval_options: RetrievalOptions = rest[0] if rest else RetrievalOptions()  # MTP has no retrieval options
        uses_retrieval, user_window = retrieval_options.retrieval, window_options.window
        tree = tree_options.config("opt" if uses_retrieval else "dynamic", draft.default_depth)
        if (max_levels := draft.max_levels) is not None:
            set_by_user = [name for name in ("widths", "depth") if options.get(name) is not None]
            if set_by_user and tree.depth > max_levels:
                raise ValueError(
                    f"a tree of {tree.depth} levels is deeper than the {max_levels} tokens that the draft proposes: "
                    f"give {set_by_user[0]} of {max_levels} levels at most"
                )
            tree = tree.limit_depth(max_levels)
        self.tree, self.round_type = tree, draft.round_type
        self.window = draft.window if user_window is None else user_window
        if self.window is not None and self.tree.depth >= self.window:
            prefix = f"{draft.folder}: " if user_window is None else ""
            raise ValueError(
                f"{prefix}window must be more tokens than the tree has levels ({self.tree.depth}), got {self.window}"
            )
        if uses_retrieval and user_window is not None:
            raise ValueError("window and retrieval both limit what the draft attends to: give only one of the two")
        self.retrieval = retrieval_options.build(draft, None if self.window is None else self.window - self.tree.depth)
        if self.retrieval is not None:
            self.window = None
        self.draft = draft

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        """Returns the layers whose hidden states the draft reads, usually three, and the needs of the retrieval."""
        return replace(super().needs(runner), feature_layers=self.draft.feature_layers(runner))

    @property
    def scratch_entries(self) -> int:
        """Number of entries of the draft's cache that a round writes after the context: of nodes, or mask tokens."""
        max_levels = self.draft.max_levels
        return self.tree.max_expanded_nodes if max_levels is None else max_levels - 1

    def kv_shape_of_draft(self) -> KVShape:
        """Returns the shape of the draft's keys and values."""
        shape = self.draft.shape
        return KVShape(self.draft.decoder_layers, shape.kv_heads, shape.head_dim, self.runner.kv_shape.dtype)

    def make_cache(self) -> DraftCache:
        capacity, kv_shape = self.store.capacity, self.kv_shape_of_draft()
        if self.retrieval is not None:
            rotary, view = self.bound.rotary, self.retrieval.view
            store = self.new_cache_store(kv_shape, view.capacity + self.scratch_entries)
            full_store = KVStore(kv_shape, self.store.slots, capacity, self.runner.device)
            return RepositionedKVCache(
                store, full_store, self.scratch_entries, self.retrieval,
                lambda keys, positions: apply_rotary(keys, *rotary.rotation(positions)),
                lambda keys, positions: apply_rotary(keys, *rotary.rotation(-positions)),
                view.capacity,  # a multi-layer draft is prefilled through the working cache
            )  # fmt: skip
        # RoPE depends on distances only, and all distances in a window are within the trained length, so a window keeps
        # true positions. It is not larger than the store, and has space for the root and all levels of a tree.
        window = max(min(self.window or self.draft.max_context or capacity, capacity), self.tree.depth + 1)
        # In the prefill of a multi-layer draft, each token of a chunk attends to a full window before it.
        num_entries = window + (KV_CHUNK + 1 if self.draft.is_multi_layer else 0)
        return self.window_cache(kv_shape, num_entries, self.scratch_entries, window)

    @torch.inference_mode()
    def observe(self, round_result: RoundResult) -> None:
        """Prefills a prompt's last window, updates the retrieval, and drops entries whose features were recomputed."""
        if round_result.is_prefill:
            self._warn_if_too_long(round_result.sequence)
        super().observe(round_result)
        if round_result.kv_rewritten_from is not None:  # minus 1, because the input at t also contains token t + 1
            self.cache.truncate(round_result.sequence.slot, max(0, round_result.kv_rewritten_from - 1))

    def lookback(self, end: int) -> int:
        if self.draft.is_multi_layer:  # each layer looks one window further back
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
            num_tokens = cache.begin_chunk(slot, end - start)
            x, g, *_ = self.block_inputs(sequence, start, start + num_tokens)
            position = cache.next_position(slot)  # in a working cache it is not ``start``
            cos_sin = self.bound.rotary(torch.arange(position, position + num_tokens, device=self.runner.device))
            cache.commit(slot, num_tokens)
            self.bound.block(x, g, *cos_sin, DraftBatch.from_new_tokens(cache, (slot,), num_tokens).attend_fns(cache))
            start += num_tokens

    def _warn_if_too_long(self, s: Sequence) -> None:
        """Warns if a sequence can become longer than the draft was trained for."""
        max_context, length = self.draft.max_context, s.max_length
        subject, consequence = "this one has", f"the draft sees the last {max_context} tokens (window=N sets another N)"
        if self.retrieval is not None:
            max_context = self.draft.window or max_context
            length = min(length, self.retrieval.view.capacity + self.tree.depth)
            subject, consequence = "its working cache has", "acceptance will be lower: give fewer chunks"
        if self.window is None and max_context is not None and length > max_context:
            consequence = f"{consequence}, or set YaRN in its config.json"
            self.draft.warn_beyond_trained_length(max_context, f"{subject} up to {length}", consequence)
