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

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from longdraft.drafters.shared.block_drafter import BlockDrafter
from longdraft.drafters.shared.draft_block import DraftBlock, DraftLayer, initialize
from longdraft.drafters.shared.draft_round import BoundDraft
from longdraft.drafters.shared.fused_level import TargetKV
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import HF_NAMES, DraftFolder, read_shape, with_derived_sizes
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.errors import UnsupportedModelError
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import parallel_linear
from longdraft.options import parse
from longdraft.trees.options import TreeOptions
from longdraft.views.draft_cache import DraftCache

KIND = "longspec"
# Published drafts carry these; the block never uses what they compute.
_DEAD = {f"cross_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}


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
    attention_bias: ClassVar[bool] = True
    output_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    norm_before_residual: ClassVar[bool] = False


class LongSpecBlock(DraftLayer, DraftBlock):
    """The block. Its state dict is the published layout without the cross-attention's unused k and v."""

    has_fused_kernel = True

    def __init__(self, shape: LongSpecShape) -> None:
        super().__init__(shape, shape.hidden_size, "input_layernorm", cross=True)
        self.shape = shape
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps) if shape.final_norm else nn.Identity()

    @property
    def first_layer(self) -> DraftLayer:
        return self

    def combine_inputs(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values depend on token and position alone."""
        return self.input_layernorm(x), x

    def initialize(self, seed: int = 0, std: float = 0.02) -> None:
        """Normal weights, zero biases, and zero output projections: the block starts as the identity."""
        initialize(self, seed, std)
        if self.shape.final_norm:
            with torch.no_grad():
                self.norm.get_parameter("weight").fill_(0.5)  # small logits: at first the block repeats its input


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
        block = self.load_module(runner)
        head, ids = self.head(runner)
        block.borrow_head(parallel_linear(head))
        return BoundDraft(runner, block, runner.shared_parts.rotary, ids, head)


def check_rotary(runner: TargetRunner) -> None:
    """Raises UnsupportedModelError for a target whose last full layer or rotary embedding a draft cannot share."""
    if not runner.kv_shape.layers:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has no layer with full attention, whose keys LongSpec drafts read. Use "
            "another method: prompt-lookup."
        )
    cos, _ = runner.shared_parts.rotary(torch.zeros(1, dtype=torch.long, device=runner.device))
    if cos.shape[-1] != (size := runner.kv_shape.head_dim):
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} rotates {cos.shape[-1]} of {size} dimensions of a head; LongSpec drafts "
            "share rotary embeddings of whole heads only. Use another method: prompt-lookup."
        )


def _as_ours(folder: Path | str, published: DraftFolder) -> DraftFolder:
    """A published draft in our layout: transformers names its sizes differently and leaves some out."""
    config = with_derived_sizes(published.config)
    shape = read_shape(LongSpecShape, config, folder, "LongSpec", HF_NAMES)
    ours = asdict(shape) | {n: config[n] for n in ("trained_length", "draft_vocab_size") if n in config}
    target = {} if config.get("vocab_size") is None else {"vocab_size": config["vocab_size"]}
    tensors = {name: t for name, t in published.tensors.items() if name not in _DEAD}
    return DraftFolder(KIND, ours, tensors, target | published.target)


class LongSpecDrafter(BlockDrafter):
    """Drafts trees with a LongSpec block."""

    options = (TreeOptions,)
    draft: LongSpecDraft

    def __init__(self, draft: LongSpecDraft, **options: Any) -> None:
        (tree,) = parse("LongSpec", options, *self.options)
        self.tree = tree.kind("beam")
        if self.tree.depth >= draft.shape.window:
            raise ValueError(f"{self.tree.depth} levels do not fit the draft's window of {draft.shape.window} tokens")
        self.draft = draft

    def make_cache(self) -> DraftCache:
        """The last keys, which depend on token and position alone."""
        # Forwards of other texts may move the target's keys and values, by numbers on the host.
        self.is_capturable = self.store.is_resident
        own = replace(self.runner.kv_shape, layers=1, kv_heads=self.draft.shape.kv_heads)
        return self.last_rows(own, self.draft.shape.window, self.tree.max_expanded_nodes)

    def text(self, slots: SequenceOf[int]) -> TargetKV:
        """The target's last-layer keys and values, which cross-attention sees."""
        return *self.store.layer(self.store.shape.layers - 1), [self.store.readable_len(slot) for slot in slots]


register(
    Kind(
        "longspec",
        LongSpecDrafter,
        "a trained one-block draft that reads the model's own KV cache, at the same cost for any context",
        "Yang et al. 2025, LongSpec, arXiv:2502.17421",
        load=LongSpecDraft.load,
        training=Training(
            "longdraft.training.config:LongSpecConfig",
            "longdraft.training.longspec:train_longspec",
            "Train a LongSpec draft",
        ),
    )
)
