"""Refuses dtypes of keys and values that no attention path of this machine reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from longdraft.errors import CapabilityError

if TYPE_CHECKING:
    from longdraft.model.runner import TargetRunner


def check(runner: TargetRunner, dtype: torch.dtype, option: str) -> None:
    """Raises CapabilityError for a dtype that cannot be kept here, of all keys and values (the option ``kv_dtype``) or
    of a view's (``view_dtype``)."""
    of_views = option == "view_dtype"
    offloaded = runner.offload is not None and not of_views
    reason = "it is for KV that is not offloaded" if offloaded else _unreadable(runner, dtype)
    if reason is None:
        return
    advice = "leave it out"
    if of_views:
        advice += "; a view of all rows needs it, so take another"
    elif runner.device.type == "cuda":
        advice += '; offload="host" or a partial view (specpv, self) takes less of a GPU\'s memory'
    name = str(dtype).removeprefix("torch.")
    raise CapabilityError(f"{option}={name} cannot be kept here: {reason}. So {advice}.")


def _unreadable(runner: TargetRunner, dtype: torch.dtype) -> str | None:
    """The reason why no attention path here reads keys and values rounded to a dtype; None if one does."""
    shape = runner.kv_shape
    if dtype == shape.dtype or runner.can_round_kv:
        return None
    if runner.attends_itself or shape.padded:
        return "the model attends with code of its own, or its layers' keys and values have several sizes"
    if runner.device.type != "cuda":
        own = f"{shape.dtype} on {runner.device} ({runner.attention_path})"
        return f"it is for models in float32 on a CPU with its own attention path, and this one is {own}"
    return None if dtype == torch.int8 else "on a GPU keys and values are in the model's dtype or in int8"
