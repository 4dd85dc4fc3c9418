"""An EAGLE-3 draft: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longdraft.drafters import eagle3_formats, eagle3_remarks
from longdraft.drafters.draft import TrainedDraft
from longdraft.drafters.draft_folder import CONFIG, OFFSETS, DraftFolder
from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape
from longdraft.drafters.eagle3_formats import KIND, Eagle3Contents, usual_layers
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.few_rows import FewRowsModule
from longdraft.host.rotary import Rotary
from longdraft.host.runner import TargetRunner


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with the embedding that it borrows.

    Attributes:
        ids: (draft vocabulary,) target id of each draft id; None where they are the same.
        few_rows: makes the block's layers, its head included, fast on a CPU.
    """

    block: Eagle3Block
    embedding: nn.Module
    rotary: Rotary
    ids: torch.Tensor | None
    few_rows: FewRowsModule


class Eagle3Draft(TrainedDraft[BoundDraft]):
    """A trained draft of any layout.

    Attributes:
        contents: what the folder says.
    """

    kind, label = KIND, "EAGLE-3"

    def __init__(self, folder: Path | str, contents: Eagle3Contents) -> None:
        self.contents = contents
        table = {} if contents.offsets is None else {OFFSETS: contents.offsets}
        vocabulary = contents.shape.vocabulary if table else None
        if any(offsets.shape != (vocabulary,) for offsets in table.values()):
            raise CheckpointError(
                f"{OFFSETS} of {folder} has the shape {tuple(table[OFFSETS].shape)} where {vocabulary} tokens need one "
                "offset each: the draft is damaged; copy it again."
            )
        config = contents.config | {"trained_length": contents.trained_length, "draft_vocab_size": vocabulary}
        super().__init__(folder, DraftFolder(KIND, config, contents.tensors | table, contents.target))
        if contents.window is not None and (type(contents.window) is not int or contents.window < 1):
            raise CheckpointError(f"{CONFIG} of {folder} has no number that could be right for window.")

    @classmethod
    def load(
        cls,
        folder: Path | str,
        rope_theta: float | None = None,
        head_dim: int | None = None,
        rope_factor: float | None = None,
    ) -> Eagle3Draft:
        """Reads a draft folder: ours, a published one, or one of `speculators`.

        Args:
            rope_theta, head_dim: instead of the folder's, which published drafts leave out or misstate.
            rope_factor: stretch the draft's context so many times (YaRN), instead of what the folder says.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, eagle3_formats.read(folder, rope_theta, head_dim, rope_factor))

    @property
    def shape(self) -> Eagle3Shape:
        return self.contents.shape

    @property
    def reach(self) -> int | None:
        """Tokens of context that its positions are good for, YaRN included; None where the folder does not say."""
        rope = self.contents.rope
        if rope["rope_type"] == "yarn":
            return int(float(rope["factor"]) * int(rope["original_max_position_embeddings"]))
        return self.trained_length

    @property
    def window(self) -> int | None:
        """Keys that a query sees, its own included; None: all."""
        return self.contents.window

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs it reads, low to high.

        Raises:
            CheckpointError: the target has no such layers.
        """
        count = runner.kv_shape.layers
        layers = self.contents.feature_layers or usual_layers(count)
        if min(layers) < 0 or max(layers) >= count or list(layers) != sorted(set(layers)):
            raise CheckpointError(
                f"The draft in {self.folder} reads the outputs of layers {', '.join(map(str, layers))} of its target, "
                f"counted from 0; this one has {count}, and they must be there and increase. Load the target it was "
                "trained with, or correct the layers in its config.json."
            )
        return layers

    def module(self) -> Eagle3Block:
        return Eagle3Block(self.shape)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size}

    def save(self, folder: Path | str) -> None:
        if self.contents.layout != "longdraft":
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
        self._rotary(torch.float32, "cpu")

    def remarks(self, runner: TargetRunner) -> list[str]:
        return eagle3_remarks.remarks(self, runner)

    def make(self, runner: TargetRunner) -> BoundDraft:
        block, rotary = self.placed(runner), self._rotary(runner.kv_shape.dtype, runner.device)
        ids = None if self.ids is None else self.ids.to(runner.device)
        return BoundDraft(block, runner.parts.embedding, rotary, ids, FewRowsModule(block))

    def _rotary(self, dtype: torch.dtype, device: torch.device | str) -> Rotary:
        return Rotary(self.shape.head_dim, self.contents.rope, dtype, device)
