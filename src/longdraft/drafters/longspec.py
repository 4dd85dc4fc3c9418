"""LongSpec: a one-block drafter whose memory does not grow with the context (Yang et al. 2025, section 3.1).

    h = x + SelfAttn(RMSNorm(x))            keys of the last `window` positions
    h = h + CrossAttn(RMSNorm(h))           keys and values: the target's last layer, read in its KV cache
    h = h + SwiGLU(RMSNorm(h))
    logits = target_head(h)                 no final norm in the paper; `final_norm` adds one

x is the target's token embedding; embedding, head and rotary embedding are the target's own, by reference.

A round: the tokens emitted since the last one enter the window; the newest of them, the root, goes through the whole
block; then the tree grows level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from longdraft.attention import dispatch
from longdraft.attention.block import Block
from longdraft.attention.prefix import PrefixAttend
from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.layers import SelfAttend
from longdraft.drafters.shared.levels import DraftRound, Fed, Inputs, each_row, filled, last_rows
from longdraft.drafters.shared.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.drafters.shared.retrieval import RetrievalOptions, RetrievingDrafter
from longdraft.drafters.shared.whole_level import Text, WholeLevel, products_of, serves
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import PUBLISHED, DraftFolder, filled_in, shape_of
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.runner import TargetRunner
from longdraft.model.sharded import product
from longdraft.model.shared_parts import SharedParts
from longdraft.native import Kernels
from longdraft.native.draft import DraftBlock
from longdraft.native.stored import Stored
from longdraft.options import parse
from longdraft.trees.level import Level, likeliest
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import TokenTree
from longdraft.views.retrieved import RetrievedKV
from longdraft.views.window import Window

KIND = "longspec"
# Published drafts carry these; the block never uses what they compute.
_DEAD = {f"cross_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with what it borrows from the target.

    Attributes:
        head: (draft vocabulary, hidden): the target's own, or the rows of it that the draft's vocabulary needs.
        ids: (draft vocabulary,) target id of each draft id; None if they are the same.
        whole: computes a level in one kernel call; None without such kernels.
        few_rows: speeds up the block's layers on a CPU.
    """

    block: LongSpecBlock
    parts: SharedParts
    head: torch.Tensor | Stored
    ids: torch.Tensor | None
    whole: WholeLevel | None
    few_rows: FewRowsModule

    @cached_property
    def _head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return product(self.head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, draft vocabulary)."""
        return self._head(hidden)


class LongSpecDraft(TrainedDraft[BoundDraft]):
    """A trained draft, ours or one as LongSpec's authors published them."""

    kind, label = KIND, "LongSpec"

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        theirs = contents.kind == KIND and "longdraft_format" not in contents.config
        super().__init__(folder, _as_ours(folder, contents) if theirs else contents)

    @cached_property
    def shape(self) -> LongSpecShape:
        return shape_of(LongSpecShape, self.config, self.folder, self.label)

    def module(self) -> LongSpecBlock:
        return LongSpecBlock(self.shape)

    def needs(self) -> dict[str, Any]:
        """The target's KV is read with the draft's heads."""
        return {n: getattr(self.shape, n) for n in ("hidden_size", "heads", "kv_heads", "head_dim")}

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        check_rotary(runner)

    def make(self, runner: TargetRunner) -> BoundDraft:
        block = self.placed(runner)
        head, ids = self.head(runner)
        found = serves(runner, self.shape.head_dim)
        whole = None if found is None else _whole(found, block, head)
        return BoundDraft(block, runner.parts, head, ids, whole, FewRowsModule(block))


def _whole(found: Kernels, block: LongSpecBlock, head: torch.Tensor | Stored) -> WholeLevel:
    own, cross, mlp, shape = block.self_attn, block.cross_attn, block.mlp, block.shape
    norms: dict[str, torch.Tensor] = {
        "norm": block.input_layernorm.weight,
        "cross_norm": block.post_self_attention_layernorm.weight,
        "mlp_norm": block.post_cross_attention_layernorm.weight,
    }
    if shape.final_norm:
        norms["final_norm"] = block.norm.get_parameter("weight")
    layers = {
        **{"q": own.q_proj, "k": own.k_proj, "v": own.v_proj, "o": own.o_proj},
        **{"cross_q": cross.q_proj, "cross_o": cross.o_proj},
        **{"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj},
    }
    sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.rms_norm_eps
    return WholeLevel(found, DraftBlock(norms, products_of(layers, head=head), *sizes))


def check_rotary(runner: TargetRunner) -> None:
    """Raises UnsupportedModelError for a target whose last full layer or rotary embedding a draft cannot share."""
    if not runner.kv_shape.layers:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has no layer with full attention, whose keys LongSpec drafts read. Use "
            "another method: prompt-lookup."
        )
    cos, _ = runner.parts.rotary(torch.zeros(1, dtype=torch.long, device=runner.device))
    if cos.shape[-1] != (size := runner.kv_shape.head_dim):
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} rotates {cos.shape[-1]} of {size} dimensions of a head; LongSpec drafts "
            "share rotary embeddings of whole heads only. Use another method: prompt-lookup."
        )


def _as_ours(folder: Path | str, published: DraftFolder) -> DraftFolder:
    """A published draft in our layout: transformers names its sizes differently and leaves some out."""
    config = filled_in(published.config)
    shape = shape_of(LongSpecShape, config, folder, "LongSpec", PUBLISHED)
    ours = shape.as_dict() | {n: config[n] for n in ("trained_length", "draft_vocab_size") if n in config}
    target = {} if config.get("vocab_size") is None else {"vocab_size": config["vocab_size"]}
    tensors = {name: t for name, t in published.tensors.items() if name not in _DEAD}
    return DraftFolder(KIND, ours, tensors, target | published.target)


class LongSpecDrafter(RetrievingDrafter):
    """Drafts trees with a LongSpec block.

    With retrieval, cross-attention sees the chunks of the text that the target attends to, at their true positions
    (SpecExtend, section 2.2); its time then does not grow with the context.

    Args:
        draft: a trained draft.
        options: of :class:`TreeOptions` and :class:`RetrievalOptions`.

    Raises:
        ValueError: for sizes that make no tree, one deeper than the draft's window, or no retrieval.
    """

    options = (TreeOptions, RetrievalOptions)

    def __init__(self, draft: LongSpecDraft, **options: Any) -> None:
        tree, retrieval = parse("LongSpec", options, *self.options)
        self.tree = tree.kind("beam")
        if self.tree.depth >= draft.shape.window:
            raise ValueError(f"{self.tree.depth} levels do not fit the draft's window of {draft.shape.window} tokens")
        self.retrieval = retrieval.made(draft)
        self.draft = draft
        self._bound: BoundDraft | None = None

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Takes the target's shared parts, and memory for the windows and the retrieved rows.

        Raises:
            CheckpointError: the draft was made for another target.
            UnsupportedModelError: the target has nothing that a draft could share.
            MemoryBudgetError: the retrieved rows do not fit the free memory.
        """
        self._bound = self.draft.bound(runner)
        self._runner, self._store = runner, store
        own = replace(runner.kv_shape, kv_heads=self.draft.shape.kv_heads)
        size = self.draft.shape.window, self.tree.max_expanded
        self.window = Window(own, store.slots, *size, runner.device, runner.rooms)
        self.retrieved: RetrievedKV | None = None
        if self.retrieval is not None:
            transposed = dispatch.prefers_transposed_keys(runner.attention_path, store.shape.dtype)
            self.retrieved = RetrievedKV(store, self.retrieval, transposed)

    @torch.inference_mode()
    def observe(self, event: Event) -> None:
        """Fills the window for a new text, or after tokens were taken back; scores chunks when that is due.

        Emitted tokens enter the window at the start of the next round.
        """
        s = event.sequence
        self.tell(self._store, event)
        if self.retrieved is not None:
            # The store's rows are read where they lie; what was gathered of them is gathered again.
            if event.replaced is not None:
                self.retrieved.forget(s.slot, event.replaced)
            if event.begins or event.taken_back:
                self.retrieved.forget(s.slot, 0 if event.begins else self._store.readable(s.slot))
        # After tokens were taken back, the window holds them where older ones stood.
        if event.begins or event.taken_back:
            self._fill(s.slot, s.tokens[:-1])

    def _fill(self, slot: int, text: list[int]) -> None:
        assert self._bound is not None
        start = max(0, len(text) - self.draft.shape.window)
        tokens = on_device(text[start:], self._runner.device)
        positions = torch.arange(start, len(text), device=self._runner.device)
        k, v = self._bound.block.keys_values(self._bound.parts.embedding(tokens), *self._bound.parts.rotary(positions))
        self.window.append(slot, start, k, v)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        assert self._bound is not None
        drafted = _Round(self, self._bound, sequences, self.tree.fit(limit).depth)
        return self.grow(sequences, drafted.expand, self._bound.ids, self._runner.device, limit, drafted.likeliest)

    def text(self, slots: SequenceOf[int]) -> Text:
        """The target's last-layer keys and values that cross-attention sees: the whole text or the retrieved part."""
        if self.retrieved is not None:
            return self.retrieved.read(slots)
        return *self._store.layer(self._store.shape.layers - 1), [self._store.readable(slot) for slot in slots]


class _Round(DraftRound):
    """One round of a batch: its sequences' rows go through the layers together."""

    def __init__(self, drafter: LongSpecDrafter, bound: BoundDraft, sequences: list[Sequence], depth: int) -> None:
        super().__init__(sequences, bound.parts.rotary, depth, drafter._runner.device, bound.whole is not None)
        self._drafter, self._bound, self._window = drafter, bound, drafter.window
        self._graphs = drafter._runner.graphs
        # Forwards of other texts move keys and values, by numbers on the host.
        self._recordable = bound.whole is None and drafter._store.in_place and drafter.retrieval is None
        self._prefixes: Block | None = None  # of the last level's sequences

    def said(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._drafter.forwards += 1
        return self._of_nodes(level, best) if level.depth else self._of_roots(level, best)

    def _of_roots(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens that the window lacks. All get keys and values; only the roots get an output."""
        starts, ends, lacking = [], [], []
        for s in (self.sequences[row] for row in level.rows):
            ends.append(len(s.prompt) + len(s.output))
            starts.append(max(self._window.end(s.slot), ends[-1] - self._window.window))
            lacking.append(s.output[starts[-1] - len(s.prompt) :])
        rows = self.padded_rows(self._graphs, self._window, lacking) if self._recordable else None
        fed, cos, sin, roots = self.entering(level, starts, ends, rows)
        tokens = on_device([token for each in lacking for token in filled(each, rows)], self._device)
        if rows is None:
            return self._unrecorded(fed, best, tokens, cos, sin, roots)
        forward, prefixes, kind = self._forward(fed, best)
        forward, beside = partial(_of_last_rows, forward), (*prefixes, roots)
        found = self.recorded(self._graphs, (kind, "roots"), fed, self._window, (tokens, cos, sin), forward, beside)
        return found[0], found[0], found[-1]

    def _of_nodes(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fed, cos, sin = self.following(level)
        tokens = level.tokens.flatten()
        if not self._recordable:
            return self._unrecorded(fed, best, tokens, cos, sin, slice(None))
        forward, prefixes, kind = self._forward(fed, best)
        found = self.recorded(self._graphs, kind, fed, self._window, (tokens,), forward, (cos, sin, *prefixes))
        return found[0], found[0], found[-1]

    def _unrecorded(
        self,
        fed: Fed,
        best: int,
        tokens: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        queries: slice | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._bound.whole is not None:
            x, text = self._bound.parts.embedding(tokens), self._drafter.text(fed.slots)
            inputs = Inputs(x, None, each_row(cos, len(x)), each_row(sin, len(x)))
            _, *said = self._bound.whole(fed, inputs, self._window, text, best)
            return said[0], said[1], said[2]
        forward, prefixes, _ = self._forward(fed, best)
        found = forward(tokens, cos, sin, *prefixes, fed.attend(self._window), queries)
        return found[0], found[0], found[-1]

    def _forward(
        self, fed: Fed, best: int
    ) -> tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor], Hashable]:
        """The draft's forward for these sequences, the slots and lengths that it takes, and its recordings' key."""
        keys, values, lengths = self._drafter.text(fed.slots)
        if self._prefixes is None or self._prefixes.slots != fed.slots:
            self._prefixes = Block.make(fed.slots, lengths, fed.width, device=keys.device)
        block = replace(self._prefixes, size=fed.width)
        longest = self._graphs.bound(max(lengths), keys.shape[2])
        attend = self._drafter._runner.prefix_attend
        forward = partial(_forward, self._bound, attend, keys, values, block, longest, best)
        # Recordings are of the block's weights, and of these keys and values.
        kind = "longspec", self._bound.block, keys.data_ptr(), values.data_ptr(), longest, best
        return forward, (block.slots_t, block.lengths_t), kind


def _of_last_rows(
    forward: Callable[..., tuple[torch.Tensor, ...]],
    tokens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    lasts: torch.Tensor,
    attend: SelfAttend,
) -> tuple[torch.Tensor, ...]:
    """The forward over padded rows, with an output for each sequence's last one."""
    return forward(tokens, cos, sin, slots, lengths, attend, last_rows(len(tokens), lasts))


def _forward(
    bound: BoundDraft,
    prefix_attend: PrefixAttend,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    longest: int,
    best: int,
    tokens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    attend: SelfAttend,
    queries: slice | torch.Tensor = slice(None),
) -> tuple[torch.Tensor, ...]:
    """The draft over some tokens: logits where ``best`` is 0, else log-probabilities and ids of the ``best`` likeliest.

    Each row attends to the target's last-layer KV before its sequence's root: ``lengths`` rows, the block's own or
    those of a recorded graph, ``longest`` at most.
    """
    x = bound.parts.embedding(tokens)
    cos, sin = each_row(cos, len(x)), each_row(sin, len(x))
    if lengths is not block.lengths_t:
        batch = len(slots)
        size = len(x if isinstance(queries, slice) else queries) // batch
        block = Block((-1,) * batch, (longest,) * batch, size, None, slots, lengths, captured=True)
    scale = keys.shape[3] ** -0.5

    def cross_attend(q: torch.Tensor) -> torch.Tensor:
        rows = q.unflatten(1, (block.batch, block.size)).transpose(0, 1)
        return prefix_attend(rows, keys, values, block, scale).transpose(0, 1).flatten(1, 2)

    logits = bound.logits(bound.block(x, cos, sin, attend, cross_attend, queries))
    return likeliest(logits, best) if best else (logits,)


register(
    Kind(
        "longspec",
        LongSpecDraft.load,
        LongSpecDrafter,
        "a trained one-block draft that reads the model's own KV cache, at the same cost for any context",
        "Yang et al. 2025, LongSpec, arXiv:2502.17421",
        Training(
            "longdraft.training.config:TrainConfig",
            "longdraft.training.longspec:train_longspec",
            "Train a LongSpec draft",
        ),
        tensors=lambda names: any("cross_attn" in name for name in names),
    )
)
