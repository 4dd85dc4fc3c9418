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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.attention.block import Block
from longdraft.attention.prefix import PrefixAttend
from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.layers import ALL, Attention, Going, SelfAttend, SwiGLU, initialise
from longdraft.drafters.shared.neural import NeuralDrafter
from longdraft.drafters.shared.round import BoundDraft, DraftRound, Layer
from longdraft.drafters.shared.rows import Rows
from longdraft.drafters.shared.whole_level import Text, WholeLevel, products_of, serves
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import PUBLISHED, DraftFolder, filled_in, shape_of
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine.sequence import Sequence
from longdraft.errors import UnsupportedModelError
from longdraft.model.few_rows import quicken
from longdraft.model.runner import TargetRunner
from longdraft.model.sharded import product
from longdraft.native import Kernels
from longdraft.native.stored import Stored
from longdraft.options import parse
from longdraft.trees.options import TreeOptions
from longdraft.views.draft_cache import DraftCache

KIND = "longspec"
# Published drafts carry these; the block never uses what they compute.
_DEAD = {f"cross_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}
# q (Hq, T, d) -> output (Hq, T, d)
CrossAttend = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LongSpecShape:
    """Sizes of the block. Head counts and sizes are the target's, or its KV could not be read."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    window: int = 512
    """Keys that self-attention sees, the query's own included."""
    final_norm: bool = False
    """An RMSNorm before the head. The paper has none; with it, training is stable at a higher learning rate."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class LongSpecBlock(nn.Module):
    """The block. Its state dict is the published layout without the cross-attention's unused k and v."""

    def __init__(self, shape: LongSpecShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        sizes = size, size, shape.heads
        self.self_attn = Attention(*sizes, shape.kv_heads, shape.head_dim, bias=True)
        self.post_self_attention_layernorm = nn.RMSNorm(size, eps)
        self.cross_attn = Attention(*sizes, 0, shape.head_dim, bias=True)
        self.post_cross_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)
        self.norm = nn.RMSNorm(size, eps) if shape.final_norm else nn.Identity()

    def initialise(self, seed: int = 0, std: float = 0.02) -> None:
        """Normal weights, zero biases, and zero output projections: the block starts as the identity."""
        initialise(self, seed, std)
        if self.shape.final_norm:
            with torch.no_grad():
                self.norm.get_parameter("weight").fill_(0.5)  # small logits: at first the block repeats its input

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Self-attention's keys (after RoPE) and values (Hkv, T, d) of embeddings x (T, hidden).

        They depend only on token and position, so a prefill computes just these, for the last window.
        """
        return self.self_attn.keys_values(self.input_layernorm(x), cos, sin)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        self_attend: SelfAttend,
        cross_attend: CrossAttend,
        queries: Going = ALL,
    ) -> torch.Tensor:
        """The block over T rows.

        Args:
            x: (T, hidden) token embeddings.
            cos, sin: (T, d) rotary embedding at the rows' positions.
            self_attend: attends among the rows, and to the window that it holds.
            cross_attend: attends to the target's last-layer KV.
            queries: the rows to compute an output for; by default all. Keys and values are computed for every row.

        Returns:
            (Tq, hidden): the head's input.
        """
        cross = self.cross_attn
        h = x[queries] + self.self_attn(self.input_layernorm(x), cos, sin, self_attend, queries)
        q = cross.queries(self.post_self_attention_layernorm(h), cos[queries], sin[queries])
        h = h + cross.merge(cross_attend(q))
        out: torch.Tensor = self.norm(h + self.mlp(self.post_cross_attention_layernorm(h)))
        return out


class LongSpecDraft(TrainedDraft[BoundDraft]):
    """A trained draft, ours or one as LongSpec's authors published them."""

    kind, label = KIND, "LongSpec"
    shape_type, module_type = LongSpecShape, LongSpecBlock

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        theirs = contents.kind == KIND and "longdraft_format" not in contents.config
        super().__init__(folder, _as_ours(folder, contents) if theirs else contents)

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
        whole = None if found is None else whole_level(found, block, head)
        parts = runner.parts
        quicken(block)
        return BoundDraft(block, parts.embedding, parts.rotary, product(head), ids, whole)


def whole_level(found: Kernels, block: LongSpecBlock, head: torch.Tensor | Stored) -> WholeLevel:
    norms: dict[str, nn.Module] = {
        "norm": block.input_layernorm,
        "cross_norm": block.post_self_attention_layernorm,
        "mlp_norm": block.post_cross_attention_layernorm,
    }
    if block.shape.final_norm:
        norms["final_norm"] = block.norm
    cross = {"cross_q": block.cross_attn.q_proj, "cross_o": block.cross_attn.o_proj}
    return WholeLevel(found, block.shape, norms, products_of(block.self_attn, block.mlp) | cross, head)


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


class LongSpecRound(DraftRound["LongSpecDrafter"]):
    """One round of a batch."""

    def __init__(self, drafter: LongSpecDrafter, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, sequences, depth)
        # Forwards of other texts move keys and values, by numbers on the host.
        self.records = drafter.store.in_place
        self._prefixes: Block | None = None  # of the last level's sequences

    def layer(self, rows: Rows, entering: bool) -> tuple[Layer, tuple[torch.Tensor, ...], Hashable]:
        """Every row attends to the target's last-layer KV before its sequence's root."""
        keys, values, lengths = self._owner.text(rows.slots)
        if self._prefixes is None or self._prefixes.slots != rows.slots:
            self._prefixes = Block.make(rows.slots, lengths, rows.going, device=keys.device)
        block, longest = replace(self._prefixes, size=rows.going), self._graphs.bound(max(lengths), keys.shape[2])
        layer = partial(_layer, self._bound.block, self._owner.runner.prefix_attend, keys, values, block, longest)
        # Recordings are of these keys and values.
        return layer, (block.slots_t, block.lengths_t), ("longspec", keys.data_ptr(), values.data_ptr(), longest)


def _layer(
    layer: LongSpecBlock,
    prefix_attend: PrefixAttend,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    longest: int,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    attends: list[SelfAttend],
    going: Going,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block; a node joins nothing of its parent's.

    Args:
        block: of the sequences. slots, lengths: its own, or those of a recorded graph, with ``longest`` rows at most.
    """

    def cross_attend(q: torch.Tensor) -> torch.Tensor:
        seen, size = block, q.shape[1] // len(slots)
        if lengths is not block.lengths_t:
            nowhere = (-1,) * len(slots)
            seen = Block(nowhere, (longest,) * len(slots), size, None, slots, lengths, captured=True)
        rows = q.unflatten(1, (-1, size)).transpose(0, 1)
        return prefix_attend(rows, keys, values, seen, keys.shape[3] ** -0.5).transpose(0, 1).flatten(1, 2)

    out: torch.Tensor = layer(x, cos, sin, attends[0], cross_attend, going)
    return out, out


class LongSpecDrafter(NeuralDrafter):
    """Drafts trees with a LongSpec block."""

    options = (TreeOptions,)
    rounds = LongSpecRound
    draft: LongSpecDraft

    def __init__(self, draft: LongSpecDraft, **options: Any) -> None:
        (tree,) = parse("LongSpec", options, *self.options)
        self.tree = tree.kind("beam")
        if self.tree.depth >= draft.shape.window:
            raise ValueError(f"{self.tree.depth} levels do not fit the draft's window of {draft.shape.window} tokens")
        self.draft = draft

    def make_cache(self) -> DraftCache:
        """The last keys, which depend on token and position alone."""
        own = replace(self.runner.kv_shape, layers=1, kv_heads=self.draft.shape.kv_heads)
        return self.last_rows(own, self.draft.shape.window, self.tree.max_expanded)

    def keys_values(self, sequence: Sequence, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = on_device(self.tokens(sequence, start, end), self.runner.device)
        cos_sin = self.bound.rotary(self.cache.places(sequence.slot, end - start))
        k, v = self.bound.block.keys_values(self.bound.embedding(tokens), *cos_sin)
        return k[None], v[None]

    def text(self, slots: SequenceOf[int]) -> Text:
        """The target's last-layer keys and values, which cross-attention sees."""
        return *self.store.layer(self.store.shape.layers - 1), [self.store.readable(slot) for slot in slots]


register(
    Kind(
        "longspec",
        LongSpecDrafter,
        "a trained one-block draft that reads the model's own KV cache, at the same cost for any context",
        "Yang et al. 2025, LongSpec, arXiv:2502.17421",
        load=LongSpecDraft.load,
        training=Training(
            "longdraft.training.config:TrainConfig",
            "longdraft.training.longspec:train_longspec",
            "Train a LongSpec draft",
        ),
    )
)
