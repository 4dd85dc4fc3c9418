"""Drafts that read the target's hidden states: reads folders of any layout, and checks drafts against a target."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from longdraft.drafts import draft_folder, formats
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import D2T, DraftFolder
from longdraft.drafts.eagle_formats import KIND, Eagle3Shape
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.rope import RotaryEmbedding
from longdraft.model.runner import TargetRunner

BoundT = TypeVar("BoundT")
DraftT = TypeVar("DraftT", bound="FeatureDraft[Any]")


class FeatureDraft(TrainedDraft[BoundT]):
    """A draft that reads the target's hidden states, in any layout. Subclasses beside the drafters define the module.

    Attributes:
        layout: the layout that the folder has: "longdraft", "published" or "speculators".
        rope: RoPE parameters as transformers names them.
        configured_layers: target layers whose outputs the draft reads, from config.json; None: the default layers.
        window: number of keys that a query attends to, the query's own key included; None: all.
        decoder_layers: number of the module's layers.
    """

    kind, label = KIND, "EAGLE-3"
    shape_type: ClassVar[type[Any]] = Eagle3Shape
    decoder_layers = 1

    def __init__(self, folder: Path | str, contents: DraftFolder, rope: dict[str, Any]) -> None:
        super().__init__(folder, contents)
        self.rope = rope
        self.layout: str = self.config.get("layout", "longdraft")
        layers = self.config.get("feature_layers")
        self.configured_layers: tuple[int, ...] | None = None if layers is None else tuple(layers)
        self.decoder_layers = int(self.config.get("decoder_layers") or 1)
        self.window = draft_folder.optional_int(self.config, "window", folder)

    @classmethod
    def load(cls: type[DraftT], folder: Path | str) -> DraftT:
        """Reads a draft folder of any layout. Raises CheckpointError if it is unreadable, or holds another kind."""
        return cls(folder, *formats.read(folder, cls.kind))

    @cached_property
    def shape(self) -> Any:
        shape = super().shape
        if shape.heads % shape.kv_heads:
            raise CheckpointError(
                f"{self.folder} has {shape.heads} heads, no multiple of its {shape.kv_heads} KV heads."
            )
        return shape

    @property
    def max_context(self) -> int | None:
        """Longest context, in tokens, that the draft's RoPE supports, YaRN included; None if unknown."""
        rope = self.rope
        if rope["rope_type"] == "yarn":
            return int(float(rope["factor"]) * int(rope["original_max_position_embeddings"]))
        if rope["rope_type"] == "longrope":
            return int(rope.get("original_max_position_embeddings") or self.trained_length or 0) or None
        return self.trained_length

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Returns the target's decoder layers whose outputs the draft reads, low to high.
        Raises CheckpointError if the target lacks one of these layers."""
        num_layers = runner.num_layers
        layers = self.configured_layers or self.default_feature_layers(num_layers)
        if min(layers) < 0 or max(layers) >= num_layers or list(layers) != sorted(set(layers)):
            raise CheckpointError(
                f"The draft in {self.folder} reads the outputs of layers {_join(layers)} of its target. The numbers "
                f"must increase, and this target has layers 0 to {num_layers - 1}. Load the target that the draft was "
                "trained with, or set feature_layers in the draft's config.json."
            )
        return layers

    def default_feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers that the draft reads of a target with ``num_layers`` layers if its folder names none."""
        return formats.default_feature_layers(num_layers)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size} if self.shape.embedding is None else {}

    def save(self, folder: Path | str, bits: int | None = None) -> None:
        if self.layout != "longdraft":
            raise CapabilityError(f"{self.folder} has another project's layout: copy the folder as it is.")
        super().save(folder, bits)

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        hidden_size, shape = runner.shared_parts.hidden_size, self.shape
        layers = self.feature_layers(runner)
        if shape.feature_size != len(layers) * hidden_size:
            raise CheckpointError(
                f"The draft in {self.folder} reads hidden states of {shape.feature_size} numbers; {len(layers)} layers "
                f"of this target give {len(layers) * hidden_size}. Load the target it was trained with."
            )
        if not shape.own_head and shape.hidden_size != hidden_size:
            raise CheckpointError(
                f"The draft in {self.folder} has no head (lm_head.weight), and with its hidden size "
                f"{shape.hidden_size} it cannot use this target's, of {hidden_size}: copy the draft again."
            )
        vocab_size = runner.shared_parts.head.shape[0]
        if self.draft_to_target_ids is None and shape.vocabulary != vocab_size:
            raise CheckpointError(
                f"The draft in {self.folder} has {shape.vocabulary} tokens, this target {vocab_size}, and the draft's "
                f"weights lack {D2T}, the table of target ids: copy the draft again."
            )
        self.rotary(torch.float32, "cpu")  # raises if the RoPE parameters cannot be computed

    def remarks(self, runner: TargetRunner) -> list[str]:
        remarks = []
        target, head_dim = runner.shared_parts.description, self.shape.head_dim
        target_theta, theta = target["rope_theta"], self.rope["rope_theta"]
        if target_theta is not None and float(target_theta) != float(theta):
            remarks.append(
                f"its rope_theta is {theta:g}, the target's {float(target_theta):g}: if few tokens are accepted, try "
                "the other (rope_theta in its config.json)"
            )
        if head_dim != target["head_dim"]:
            remarks.append(f"its head size is {head_dim}, the target's {target['head_dim']}: check head_dim")
        default_layers, layers = self.default_feature_layers(runner.num_layers), self.feature_layers(runner)
        if layers != default_layers:
            remarks.append(
                f"it reads the outputs of layers {_join(layers)}; usual for this target are {_join(default_layers)}"
            )
        length, ids = self.max_context, self.draft_to_target_ids
        if self.window is None and length is not None and length < runner.context_length:
            remarks.append(
                f"it was trained for texts of {length:,} tokens, the target reads {runner.context_length:,}: it sees "
                f"the last {length:,} of a longer text (-o window=N, or YaRN in its config.json, changes that)"
            )
        if ids is not None and not bool((ids[1:] > ids[:-1]).all()):
            remarks.append("d2t does not increase the target ids: does it hold ids in place of offsets?")
        return remarks

    def rotary(self, dtype: torch.dtype, device: torch.device | str) -> RotaryEmbedding:
        """Makes the draft's rotary embedding. Base and scaling may differ from the target's."""
        return RotaryEmbedding(self.shape.head_dim, self.rope, dtype, device)


def _join(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
