"""LongSpec: a one-block draft whose memory does not grow with the context (Yang et al. 2025, section 3.1).

    h = x + SelfAttn(RMSNorm(x))            over the last `window` positions
    h = h + CrossAttn(RMSNorm(h))           over the KV cache of the target's last layer
    h = h + SwiGLU(RMSNorm(h))
    logits = target_head(h)                 no final norm in the paper; `final_norm` adds one

Token embedding x, head and rotary embedding are the target's, by reference.

A round writes keys and values of the new tokens to the window. Only the last new token, the root, goes through the
whole block. Then the tree grows level by level.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from longdraft.drafters.shared.block_drafter import BlockDrafter
from longdraft.drafters.shared.draft_block import DraftBlock, DraftLayer
from longdraft.drafters.shared.draft_round import BoundDraft
from longdraft.drafters.shared.fused_level import TargetKV
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import HF_NAMES, DraftFolder, read_shape, with_derived_sizes
from longdraft.errors import UnsupportedModelError
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import parallel_linear
from longdraft.options import parse
from longdraft.trees.options import TreeOptions
from longdraft.views.draft_cache import DraftCache

KIND = "longspec"
# Tensors of published drafts that the forward does not use, because cross-attention reads the target's keys and values.
_UNUSED_TENSORS = {f"cross_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")}


@dataclass(frozen=True)
class LongSpecShape:
    """Sizes of the block. ``heads``, ``kv_heads`` and ``head_dim`` must be the target's, whose KV the block reads."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    window: int = 512
    """Number of keys that self-attention reads, the query's own included."""
    final_norm: bool = False
    """True: an RMSNorm before the head. It keeps training stable at a higher learning rate; the paper has none."""
    attention_bias: ClassVar[bool] = True  # fixed, like the next three: LongSpec has one layout
    output_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    norm_before_residual: ClassVar[bool] = False


class LongSpecBlock(DraftLayer, DraftBlock):
    """LongSpec's block. The state dict is the published layout without ``_UNUSED_TENSORS``."""

    has_fused_kernel = True

    def __init__(self, shape: LongSpecShape) -> None:
        super().__init__(shape, shape.hidden_size, "input_layernorm", cross=True)
        self.shape = shape
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps) if shape.final_norm else nn.Identity()

    @property
    def first_layer(self) -> DraftLayer:
        return self

    def combine_inputs(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (RMSNorm(x), x). As ``g`` is unused, keys and values depend on token and position only."""
        return self.input_layernorm(x), x

    def initialize(self, seed: int = 0, std: float = 0.02) -> None:
        """Sets the weights as :meth:`DraftBlock.initialize`, and a final norm of 0.5."""
        super().initialize(seed, std)
        if self.shape.final_norm:
            with torch.no_grad():  # 0.5 makes small logits: a block that is still the identity must not be sure
                self.norm.get_parameter("weight").fill_(0.5)


class LongSpecDraft(TrainedDraft[BoundDraft]):
    """A trained draft in our layout, or as LongSpec's authors published it."""

    kind, label = KIND, "LongSpec"
    shape_type, module_type = LongSpecShape, LongSpecBlock

    def __init__(self, folder: Path | str, contents: DraftFolder) -> None:
        is_published = contents.kind == KIND and "longdraft_format" not in contents.config
        super().__init__(folder, _converted(folder, contents) if is_published else contents)

    def needs(self) -> dict[str, Any]:
        """Returns the sizes that the target must have, because the block reads the target's KV."""
        return {name: getattr(self.shape, name) for name in ("hidden_size", "heads", "kv_heads", "head_dim")}

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        check_rotary(runner)

    def make(self, runner: TargetRunner) -> BoundDraft:
        block = self.load_module(runner)
        head, ids = self.head(runner)
        block.borrow_head(parallel_linear(head))
        return BoundDraft(runner, block, runner.shared_parts.rotary, ids, head)


def check_rotary(runner: TargetRunner) -> None:
    """Raises UnsupportedModelError if the target has no full attention, or rotates only a part of each head."""
    if not runner.kv_shape.layers:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has no layer with full attention. LongSpec drafts read the keys of such a "
            "layer. Use another method: prompt-lookup."
        )
    cos, _ = runner.shared_parts.rotary(torch.zeros(1, dtype=torch.long, device=runner.device))
    if cos.shape[-1] != (size := runner.kv_shape.head_dim):
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} rotates {cos.shape[-1]} of {size} dimensions of a head; LongSpec drafts "
            "share rotary embeddings of whole heads only. Use another method: prompt-lookup."
        )


def _converted(folder: Path | str, published: DraftFolder) -> DraftFolder:
    """Converts a published draft, whose config has transformers' names and lacks some sizes, to our layout."""
    config = with_derived_sizes(published.config)
    shape = read_shape(LongSpecShape, config, folder, "LongSpec", HF_NAMES)
    our_config = asdict(shape) | {key: config[key] for key in ("trained_length", "draft_vocab_size") if key in config}
    required_target = {} if config.get("vocab_size") is None else {"vocab_size": config["vocab_size"]}
    tensors = {name: tensor for name, tensor in published.tensors.items() if name not in _UNUSED_TENSORS}
    return DraftFolder(KIND, our_config, tensors, required_target | published.target)


class LongSpecDrafter(BlockDrafter):
    """Drafts trees with a LongSpec block."""

    options = (TreeOptions,)
    draft: LongSpecDraft

    def __init__(self, draft: LongSpecDraft, **options: Any) -> None:
        (tree_options,) = parse("LongSpec", options, *self.options)
        self.tree = tree_options.config("beam")
        if self.tree.depth >= draft.shape.window:
            raise ValueError(f"depth must be less than the draft's window {draft.shape.window}, got {self.tree.depth}")
        self.draft = draft

    def make_cache(self) -> DraftCache:
        """Makes a cache of the last ``window`` tokens."""
        # A CUDA graph cannot read offloaded target KV, because the host moves it between forwards.
        self.is_capturable = self.store.is_resident
        kv_shape = replace(self.runner.kv_shape, layers=1, kv_heads=self.draft.shape.kv_heads)
        return self.window_cache(kv_shape, self.draft.shape.window, self.tree.max_expanded_nodes)

    def target_kv(self, slots: SequenceOf[int]) -> TargetKV:
        """Returns keys and values of the target's last layer, and how many entries of each slot can be read."""
        return *self.store.layer(self.store.shape.layers - 1), [self.store.readable_len(slot) for slot in slots]
