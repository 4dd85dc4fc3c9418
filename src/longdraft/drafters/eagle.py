"""EAGLE-1 and EAGLE-2: a one-layer drafter that foresees the target's last hidden states, from drafts as published.

It drafts as EAGLE-3 does (:mod:`longdraft.drafters.eagle3`); what differs is the module, and that it reads one layer.
"""

from __future__ import annotations

from functools import cached_property

from longdraft.drafters.eagle3 import Eagle3Drafter
from longdraft.drafters.eagle3_draft import BoundDraft, Eagle3Draft
from longdraft.drafters.eagle3_formats import EAGLE
from longdraft.drafters.eagle_block import EagleBlock, EagleShape
from longdraft.drafts.draft_folder import shape_of
from longdraft.drafts.kinds import Kind, register
from longdraft.errors import UnsupportedModelError
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.runner import TargetRunner
from longdraft.model.sharded import product
from longdraft.model.shared_parts import norm_before_head


class EagleDraft(Eagle3Draft):
    """A draft in the layout of EAGLE's authors."""

    kind, label = EAGLE, "EAGLE"

    @cached_property
    def shape(self) -> EagleShape:
        return shape_of(EagleShape, self.config, self.folder, self.label)

    def module(self) -> EagleBlock:
        return EagleBlock(self.shape)

    def usual_layers(self, count: int) -> tuple[int, ...]:
        return (count - 1,)

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        if norm_before_head(runner.model) is None:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has no norm before its head, behind which EAGLE's drafts read it."
            )

    def make(self, runner: TargetRunner) -> BoundDraft:
        block, norm = self.placed(runner), norm_before_head(runner.model)
        assert norm is not None
        # Calls, not modules: they are the target's, and no part of the block.
        block.borrow(norm.__call__, product(runner.parts.head))
        rotary = self.rotary(runner.kv_shape.dtype, runner.device)
        return BoundDraft(block, runner.parts.embedding, rotary, None, None, None, FewRowsModule(block))


register(
    Kind(
        EAGLE,
        EagleDraft.load,
        Eagle3Drafter,
        "published drafts of EAGLE-1 and EAGLE-2: one layer that foresees the model's last hidden states",
        "Li et al. 2024, EAGLE, arXiv:2401.15077; EAGLE-2, arXiv:2406.16858",
        # A layer of its own before the decoder's, and EAGLE-3's norm is missing.
        tensors=lambda names: (
            any(name.split(".")[-2:] == ["fc", "weight"] for name in names)
            and not any("hidden_norm." in name for name in names)
        ),
    )
)
