"""Small random drafts for tiny targets, as folders."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from longdraft.drafters import draft_folder
from longdraft.drafters.draft_folder import DraftFolder
from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.target.parts import describe


def random_block(model: PreTrainedModel, window: int = 8, seed: int = 0, final_norm: bool = False) -> LongSpecBlock:
    """A block for this target in which every part matters: no weight is zero, no norm is one."""
    shape = describe(model)
    block = LongSpecBlock(
        LongSpecShape(
            shape["hidden_size"], 3 * shape["hidden_size"], shape["heads"], shape["kv_heads"], shape["head_dim"],
            model.config.rms_norm_eps, window, final_norm,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in block.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.25 * noise)
    return block


def random_draft(
    folder: Path,
    model: PreTrainedModel,
    *,
    window: int = 8,
    kept: list[int] | None = None,
    seed: int = 0,
    final_norm: bool = False,
) -> Path:
    """A draft folder for this target.

    Args:
        kept: target ids of a smaller vocabulary, in increasing order.
    """
    block = random_block(model, window, seed, final_norm)
    tensors = dict(block.state_dict())
    config = block.shape.as_dict() | {"draft_vocab_size": kept and len(kept), "trained_length": 64}
    if kept is not None:
        tensors["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
    draft_folder.save(folder, DraftFolder("longspec", config, tensors, describe(model)))
    return folder
