"""The draft of a model on a GPU that drafts for itself with a copy of its weights in four bits."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from longdraft.model.quant.draft_copy import four_bit_copy
from longdraft.model.runner import TargetRunner


@dataclass(frozen=True)
class FourBitDraft:
    """A hosted copy of a target.

    Attributes:
        runner: runs the copy, on stores of the target's shape.
        forward_ratio: bytes that a forward of the copy reads / bytes that a forward of the target reads.
    """

    runner: TargetRunner
    forward_ratio: float


# Target -> version of its weights, and the copy of these weights, which later runs use too.
_drafts: WeakKeyDictionary[TargetRunner, tuple[int, FourBitDraft | None]] = WeakKeyDictionary()


def four_bit_draft(target: TargetRunner) -> FourBitDraft | None:
    """Returns the copy of a target on a GPU, made at the first call; None if :func:`.four_bit_copy` makes none."""
    version = target.execution_model.version
    made = _drafts.get(target)
    if made is None or made[0] != version:
        copied = four_bit_copy(target.model)
        draft = None
        if copied is not None:
            draft = FourBitDraft(TargetRunner(copied[0]), copied[1])
            draft.runner.graphs = target.graphs  # their graphs share memory; the keys name the weights
        made = _drafts[target] = version, draft
    return made[1]
