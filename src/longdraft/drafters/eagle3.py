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
newest of them, which carries the root, goes through the whole layer; then the tree grows level by level. The layer
itself is in shared/eagle3_block.py and the round in shared/eagle3_round.py, since drafts of its kin share them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.eagle3_block import Eagle3Block
from longdraft.drafters.shared.eagle3_round import BoundDraft, Eagle3Round, last_row
from longdraft.drafters.shared.layered import layered
from longdraft.drafters.shared.layers import SelfAttend
from longdraft.drafters.shared.levels import Fed
from longdraft.drafters.shared.retrieval import RetrievalOptions, RetrievingDrafter
from longdraft.drafters.shared.whole_level import WholeLevel, products_of, serves
from longdraft.drafts.eagle_draft import EagleDraft
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.drafts.speculators import to_speculators
from longdraft.engine import method
from longdraft.engine.event import Event
from longdraft.engine.method import Method
from longdraft.engine.sequence import Sequence
from longdraft.memory import sizes
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.runner import TargetRunner
from longdraft.native import Kernels
from longdraft.native.draft import DraftBlock
from longdraft.options import Options, option, parse
from longdraft.trees.kind import TreeKind
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import TokenTree
from longdraft.views.retrieved import CompactWindow
from longdraft.views.window import SPARE, Window

# Rows whose keys and values are computed together: bounds the memory that reading a long prompt takes.
CHUNK = 1024

logger = logging.getLogger("longdraft")
# Drafts of which it has been said that texts are longer than they were trained for: said once, not once a run.
_outgrown: WeakSet[Eagle3Draft] = WeakSet()


class Eagle3Draft(EagleDraft[BoundDraft]):
    """A trained draft of any layout."""

    levels: int | None = None  # of a dynamic tree; None: as usual

    def module(self) -> Eagle3Block:
        return Eagle3Block(self.shape)

    def make(self, runner: TargetRunner) -> BoundDraft:
        block, rotary = self.placed(runner), self.rotary(runner.kv_shape.dtype, runner.device)
        ids = None if self.ids is None else self.ids.to(runner.device)
        shape = self.shape
        found = (
            None if shape.qk_norm or shape.output_bias or shape.decoder_layers > 1 else serves(runner, shape.head_dim)
        )
        whole = None if found is None else _whole(found, block)
        embedding = runner.parts.embedding if shape.embedding is None else block.embed_tokens
        draft_ids = None
        if ids is not None:
            draft_ids = torch.full((runner.parts.head.shape[0],), -1, device=runner.device, dtype=torch.long)
            draft_ids[ids] = torch.arange(len(ids), device=runner.device)
        return BoundDraft(block, embedding, rotary, ids, draft_ids, whole, FewRowsModule(block))


def _whole(found: Kernels, block: Eagle3Block) -> WholeLevel:
    layer, shape = block.midlayer, block.shape
    own, mlp = layer.self_attn, layer.mlp
    norms = {
        "norm": layer.input_layernorm.weight,
        "joined_norm": layer.hidden_norm.weight,
        "mlp_norm": layer.post_attention_layernorm.weight,
        "final_norm": block.norm.weight,
    }
    layers = {
        **{"q": own.q_proj, "k": own.k_proj, "v": own.v_proj, "o": own.o_proj},
        **{"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj, "head": block.lm_head},
    }
    sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.rms_norm_eps
    return WholeLevel(found, DraftBlock(norms, products_of(layers), *sizes, shape.norm_before_residual))


@dataclass(frozen=True)
class WindowOptions(Options):
    """The tokens that an EAGLE draft sees."""

    window: int | None = option(
        min=1, help="the draft sees so many tokens back and no further", usual="its folder's, or the trained length"
    )


class Eagle3Drafter(RetrievingDrafter):
    """Drafts trees with an EAGLE-3 layer.

    With retrieval, it sees the chunks of the text that the target attends to, at compact positions, and keeps its own
    keys of the whole text behind them (SpecExtend, section 2.2); a window that its folder names is then the room that
    they have.

    Args:
        draft: a trained draft.
        options: of :class:`TreeOptions`, :class:`WindowOptions` and :class:`RetrievalOptions`.

    Raises:
        ValueError: for sizes that make no tree, one deeper than the window, or no retrieval; ``window`` and
            ``retrieval`` together.
    """

    options: ClassVar[tuple[type[Options], ...]] = (TreeOptions, WindowOptions, RetrievalOptions)

    def __init__(self, draft: Eagle3Draft, **options: Any) -> None:
        tree, own, *others = parse(draft.label, options, *self.options)
        retrieval: RetrievalOptions = others[0] if others else RetrievalOptions()
        self.tree = self.shaped(tree.kind("opt" if retrieval.retrieval else "dynamic", draft.levels), draft, options)
        self.window = draft.window if own.window is None else own.window
        if self.window is not None and self.tree.depth >= self.window:
            whose = f"{draft.folder}: " if own.window is None else ""
            raise ValueError(
                f"{whose}window must be more tokens than the tree has levels ({self.tree.depth}), got {self.window}"
            )
        if retrieval.retrieval and own.window is not None:
            raise ValueError("window and retrieval both say what the draft sees: give one of them")
        if retrieval.retrieval and draft.decoder_layers > 1:
            raise ValueError("retrieval is for drafts of one layer")
        self.retrieval = retrieval.made(draft, None if self.window is None else self.window - self.tree.depth)
        if self.retrieval is not None:
            self.window = None
        self.draft = draft
        self._bound: BoundDraft | None = None

    def shaped(self, tree: TreeKind, draft: Eagle3Draft, options: Mapping[str, Any]) -> TreeKind:
        """The tree as the draft can grow it. ``options`` are the user's."""
        return tree

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The layers that the draft's folder names, usually three."""
        return self.draft.feature_layers(runner)

    @property
    def back(self) -> int | None:
        """Tokens back that the draft sees; None: the whole text."""
        return self.window or (self.draft.reach if self.retrieval is None else None)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Takes the target's embedding, and memory for the draft's own keys and values.

        Raises:
            CheckpointError: the draft was made for another target.
            UnsupportedModelError: the target has nothing that a draft could share.
            MemoryBudgetError: they do not fit the memory that is free.
        """
        self._bound = self.draft.bound(runner)
        self.runner, self.store = runner, store
        own = self.own_kv(runner)
        # RoPE tells distances alone, so in a window all are distances that the draft knows: as if the positions were
        # moved back to 0. No text of this run outgrows the store.
        window = store.capacity if self.back is None else self.back
        self.seen = rows = max(min(window, store.capacity), self.tree.depth + 1)
        if self.deep:
            rows += CHUNK + 1  # the rows that are read together see as many back as one alone
        beside = self.scratch + (0 if self.retrieval is None else self.retrieval.view.capacity + self.tree.depth)
        beside += SPARE if self.retrieval is None else 2 * SPARE
        needed = KVStore.bytes_for(own, store.slots, rows + beside)
        sizes.require(needed, runner.device, f"The draft's own cache of {rows} tokens")
        if self.retrieval is None:
            self.cache = Window(own, store.slots, rows, self.scratch, runner.device, runner.rooms)
        else:
            self.cache = CompactWindow(
                own, store.slots, rows, self.scratch, runner.device,
                self.retrieval, self.tree.depth, self._bound.rotary.turns,
            )  # fmt: skip
        # For each slot, how many leading rows can no longer change.
        self._settled = [0] * store.slots

    @torch.inference_mode()
    def observe(self, event: Event) -> None:
        """Reads a prompt's last window, keys and values alone; forgets changed rows; scores chunks when that is due."""
        slot = event.sequence.slot
        if event.begins:
            self._warn(event.sequence)
            self.cache.forget(slot, 0)
            self._settled[slot] = 0
            self._fill(event.sequence)
        self.tell(self.store, event)
        if event.replaced is not None:
            self.cache.forget(slot, event.replaced)
        if event.taken_back:
            self._rewind(event.sequence)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        assert self._bound is not None
        for s in sequences:
            if last_row(s) - self.cache.end(s.slot) > CHUNK:
                self._fill(s)
        drafted = self.round_of(self._bound, sequences, self.tree.fit(limit).depth)
        return self.grow(sequences, drafted.expand, self._bound.ids, self.runner.device, limit, drafted.likeliest)

    def own_kv(self, runner: TargetRunner) -> KVShape:
        """The shape of the draft's own keys and values."""
        shape, layers = self.draft.shape, self.draft.decoder_layers
        # The heads of all layers lie side by side.
        return KVShape(1, layers * shape.kv_heads, shape.head_dim, runner.kv_shape.dtype)

    @property
    def deep(self) -> bool:
        """True if rows go through several layers, which see the rows before in each."""
        return self.draft.decoder_layers > 1

    @property
    def scratch(self) -> int:
        """Rows of its own cache that a round needs behind the text."""
        return self.tree.max_expanded

    def round_of(self, bound: BoundDraft, sequences: list[Sequence], depth: int) -> Eagle3Round:
        """A round of trees of ``depth`` levels at most."""
        return Eagle3Round(self, bound, sequences, depth)

    def _rewind(self, sequence: Sequence) -> None:
        """Reads rows again that may have changed; the whole window if it lacks rows that the shorter text needs."""
        slot = sequence.slot
        self.cache.forget(slot, 0 if self.cache.wrapped(slot) else min(self._settled[slot], last_row(sequence)))
        self._fill(sequence)

    def inputs(self, slot: int, tokens: SequenceOf[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings x and projected features g (T, hidden) of rows [start, start + T).

        Args:
            tokens: T tokens, each the one after its row's position.
        """
        assert self._bound is not None and self.store.features is not None
        ids = on_device(tokens, self.runner.device)
        x: torch.Tensor = self._bound.embedding(ids)
        return x, self._bound.block.project(self.store.features[slot, start : start + len(tokens)])

    def fed(self, sequence: Sequence) -> None:
        """Notes which rows are settled: they and the token after them are committed."""
        self._settled[sequence.slot] = max(0, self.store.lengths[sequence.slot] - 1)

    def _fill(self, sequence: Sequence) -> None:
        """Reads rows up to the last one, which the next round feeds."""
        assert self._bound is not None
        slot, text, end = sequence.slot, sequence.tokens, last_row(sequence)
        block, back = (
            self._bound.block,
            self.cache.window if not self.deep else self.draft.decoder_layers * self.seen,
        )
        start = max(self.cache.end(slot), end - back)
        for a in range(start, end, min(CHUNK, self.cache.window)):
            b = min(end, a + CHUNK, a + self.cache.window)
            x, g = self.inputs(slot, text[a + 1 : b + 1], a)
            cos, sin = self._bound.rotary(torch.arange(a, b, device=self.runner.device))
            if self.deep:
                block.through(x, g, cos, sin, self.attends(Fed((slot,), (b - a,), b - a, starts=(a,))))
            else:
                self.cache.append(slot, a, *block.keys_values(x, g, cos, sin))
        self.fed(sequence)

    def attends(self, fed: Fed) -> list[SelfAttend]:
        """The attention of each layer of a deep draft over fed rows, all of which get an output."""
        return layered(fed, self.cache, self.draft.decoder_layers, self.seen)

    def _warn(self, s: Sequence) -> None:
        """Says once per draft that a text is longer than it was trained for, and what that means."""
        reach, length = self.draft.reach, len(s.prompt) + s.max_new_tokens
        what, then = "this one has", f"it sees the last {reach} tokens (another: window=N)"
        if self.retrieval is not None:
            length = min(length, self.retrieval.view.capacity + self.tree.depth)
            what, then = "its working cache has", "acceptance will be lower: give fewer chunks"
        if self.draft in _outgrown or self.window is not None or reach is None or length <= reach:
            return
        _outgrown.add(self.draft)
        logger.warning(
            "The draft in %s was trained for texts of %d tokens; %s up to %d. Output stays exact; %s, or load the "
            "draft with a rope_factor.",
            self.draft.folder, reach, what, length, then,
        )  # fmt: skip


register(
    Kind(
        "eagle3",
        Eagle3Draft.load,
        Eagle3Drafter,
        "a trained one-layer draft that reads the model's hidden states; published drafts load as they are",
        "Li et al. 2025, EAGLE-3, arXiv:2503.01840",
        Training(
            "longdraft.training.config:Eagle3Config",
            "longdraft.training.eagle3:train_eagle3",
            "Train an EAGLE-3 draft",
        ),
        # EAGLE-3 norms the hidden states that it joins.
        tensors=lambda names: any(".0.hidden_norm." in name or "midlayer.hidden_norm." in name for name in names),
        layouts={"speculators": to_speculators},
    )
)
method.register(
    Method(
        "specextend-eagle3",
        True,
        "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
        "EAGLE-3 that sees the chunks of a long text which the model attends to, at positions it knows",
        partial(Eagle3Drafter, retrieval=True),  # and so an OPT-Tree
        "eagle3",
    )
)
