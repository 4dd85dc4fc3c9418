"""An EAGLE-3 draft: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from longdraft.drafters import eagle3_formats
from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape
from longdraft.drafters.eagle3_formats import KIND, usual_layers
from longdraft.drafters.whole_level import WholeLevel, products_of, serves
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import CONFIG, OFFSETS, DraftFolder, shape_of
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.rotary import Rotary
from longdraft.model.runner import TargetRunner
from longdraft.native import Kernels
from longdraft.native.draft import DraftBlock

Own = TypeVar("Own", bound="Eagle3Draft")


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with the embedding that it borrows.

    Attributes:
        ids: (draft vocabulary,) target id of each draft id; None where they are the same.
        draft_ids: (vocabulary,) the reverse, -1 where the draft has none.
        whole: computes levels in one call, where kernels do.
        few_rows: makes the block's layers, its head included, fast on a CPU.
    """

    block: Eagle3Block
    embedding: nn.Module
    rotary: Rotary
    ids: torch.Tensor | None
    draft_ids: torch.Tensor | None
    whole: WholeLevel | None
    few_rows: FewRowsModule


class Eagle3Draft(TrainedDraft[BoundDraft]):
    """A trained draft of any layout.

    Attributes:
        layout: "longdraft", "published" or "speculators".
        rope: RoPE's parameters as transformers names them.
        layers: decoder layers of the target whose outputs it reads; None: the usual ones.
        window: keys that a query sees, its own included; None: all.
    """

    kind, label = KIND, "EAGLE-3"

    def __init__(self, folder: Path | str, contents: DraftFolder, rope: dict[str, Any]) -> None:
        super().__init__(folder, contents)
        self.rope = rope
        self.layout: str = self.config.get("layout", "longdraft")
        layers = self.config.get("feature_layers")
        self.layers: tuple[int, ...] | None = None if layers is None else tuple(layers)
        self.window: int | None = self.config.get("window")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise CheckpointError(f"{CONFIG} of {folder} has no number that could be right for window.")

    @classmethod
    def load(
        cls: type[Own],
        folder: Path | str,
        rope_theta: float | None = None,
        head_dim: int | None = None,
        rope_factor: float | None = None,
    ) -> Own:
        """Reads a draft folder: ours, a published one, or one of `speculators`.

        Args:
            rope_theta, head_dim: instead of the folder's, which published drafts leave out or misstate.
            rope_factor: stretch the draft's context so many times (YaRN), instead of what the folder says.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, *eagle3_formats.read(folder, rope_theta, head_dim, rope_factor, cls.kind))

    @cached_property
    def shape(self) -> Eagle3Shape:
        shape = shape_of(Eagle3Shape, self.config, self.folder, self.label)
        if shape.heads % shape.kv_heads:
            raise CheckpointError(f"{self.folder}: {shape.heads} heads are no multiple of {shape.kv_heads} KV heads.")
        return shape

    @property
    def reach(self) -> int | None:
        """Tokens of context that its positions are good for, YaRN included; None where the folder does not say."""
        rope = self.rope
        if rope["rope_type"] == "yarn":
            return int(float(rope["factor"]) * int(rope["original_max_position_embeddings"]))
        return self.trained_length

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs it reads, low to high.

        Raises:
            CheckpointError: the target has no such layers.
        """
        count = runner.kv_shape.layers
        layers = self.layers or self.usual_layers(count)
        if min(layers) < 0 or max(layers) >= count or list(layers) != sorted(set(layers)):
            raise CheckpointError(
                f"The draft in {self.folder} reads the outputs of layers {_listed(layers)} of its target, "
                f"counted from 0; this one has {count}, and they must be there and increase. Load the target it was "
                "trained with, or correct the layers in its config.json."
            )
        return layers

    def usual_layers(self, count: int) -> tuple[int, ...]:
        """The layers that such drafts read, where their folders name none, of a target of so many."""
        return usual_layers(count)

    def module(self) -> Eagle3Block:
        return Eagle3Block(self.shape)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size}

    def save(self, folder: Path | str) -> None:
        if self.layout != "longdraft":
            raise CapabilityError(f"{self.folder} has a layout that others publish: copy the folder as it is.")
        super().save(folder)

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        hidden, shape = runner.parts.hidden_size, self.shape
        layers = self.feature_layers(runner)
        if shape.feature_size != len(layers) * hidden:
            raise CheckpointError(
                f"The draft in {self.folder} reads {shape.feature_size} numbers of a token; {len(layers)} layers of "
                f"this target have {len(layers) * hidden}. Load the target it was trained with."
            )
        size = runner.parts.head.shape[0]
        if self.ids is None and shape.vocabulary != size:
            raise CheckpointError(
                f"The draft in {self.folder} knows {shape.vocabulary} tokens, this target {size}, and its weights hold "
                f"no {OFFSETS}, which would say which: copy the draft again."
            )
        self.rotary(torch.float32, "cpu")

    def remarks(self, runner: TargetRunner) -> list[str]:
        """What costs acceptance, none of it correctness."""
        shape, target = self.shape, runner.parts.description
        found = []
        theta, own = target["rope_theta"], self.rope["rope_theta"]
        if theta is not None and float(theta) != float(own):
            found.append(
                f"its rope_theta is {own:g}, the target's {float(theta):g}: if few tokens are accepted, try the other "
                "(rope_theta in its config.json)"
            )
        if shape.head_dim != target["head_dim"]:
            found.append(f"its head size is {shape.head_dim}, the target's {target['head_dim']}: check head_dim")
        usual, layers = self.usual_layers(runner.kv_shape.layers), self.feature_layers(runner)
        if layers != usual:
            found.append(
                f"it reads the outputs of layers {_listed(layers)}; usual for this target are {_listed(usual)}"
            )
        if shape.norm_before_residual and self.layout == "published":
            found.append("norm_before_residual is set, which the published layout does not know")
        if self.window is None and self.reach is not None and self.reach < runner.context_length:
            found.append(
                f"it was trained for texts of {self.reach:,} tokens, the target reads {runner.context_length:,}: "
                f"beyond, acceptance falls; give it a window (-o window={self.reach}) or a rope_factor"
            )
        if self.ids is not None and not bool((self.ids[1:] > self.ids[:-1]).all()):
            found.append("d2t does not name increasing tokens: does it hold ids where offsets belong?")
        return found

    def make(self, runner: TargetRunner) -> BoundDraft:
        block, rotary = self.placed(runner), self.rotary(runner.kv_shape.dtype, runner.device)
        ids = None if self.ids is None else self.ids.to(runner.device)
        found = serves(runner, self.shape.head_dim)
        whole = None if found is None else _whole(found, block)
        draft_ids = None
        if ids is not None:
            draft_ids = torch.full((runner.parts.head.shape[0],), -1, device=runner.device)
            draft_ids[ids] = torch.arange(len(ids), device=runner.device)
        return BoundDraft(block, runner.parts.embedding, rotary, ids, draft_ids, whole, FewRowsModule(block))

    def rotary(self, dtype: torch.dtype, device: torch.device | str) -> Rotary:
        """Its rotary embedding; the target's may have another base, or be stretched otherwise."""
        return Rotary(self.shape.head_dim, self.rope, dtype, device)


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


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
