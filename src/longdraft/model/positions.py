"""The positions of a block's rows, for models that count rows of a cache or rotate them by the text's length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.model import hosting

# What transformers calls the length of the cache, in its own words of 5.24 and of 5.17.
_LENGTHS = ("cache_length", "past_key_values_length")
CosSin = tuple[torch.Tensor, torch.Tensor]
_KIND = "longrope"
# What may differ between short and long texts.
_FACTORS = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))


def patch_position_ids(model: PreTrainedModel) -> None:
    """Adds hooks to the position embeddings of a copy of our own, if its forward takes no positions.

    Such a decoder counts the rows of its cache, and hands that to a position embedding, which also takes positions.
    Ours get those of the block: the rows of a tree are not one behind the other.
    """
    if _takes(model, "position_ids"):
        return
    for module in model.modules():
        if _takes(module, "position_ids") and any(_takes(module, name) for name in _LENGTHS):
            module.register_forward_pre_hook(_positions, with_kwargs=True)
            module.register_forward_hook(_shaped)


def _positions(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    hosted = hosting.current_forward()
    if hosted is None or hosted.layout.custom_cache_layers or len(given) > 2:
        return None
    return given, named | {"position_ids": hosted.batch.positions}


def _shaped(_module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
    """(B, T, hidden): some embeddings take positions (T,), and put another dimension before ours."""
    hosted = hosting.current_forward()
    if hosted is None or hosted.layout.custom_cache_layers or hosted.batch.positions is None:
        return output
    return output.reshape(*hosted.batch.positions.shape, -1)


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(type(module).forward).parameters


def rope_parameters(model: PreTrainedModel) -> list[Mapping[str, Any]]:
    """The RoPE parameters of the decoder: one set, or one for each kind of its layers."""
    config = hosting.decoder_config(model)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return []
    return [each for each in parameters.values() if isinstance(each, Mapping)] or [parameters]


def rope_type(parameters: Mapping[str, Any]) -> str:
    """The kind of a rotary embedding, as transformers names it."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def patch_longrope(model: PreTrainedModel) -> int | None:
    """Makes the rotary embeddings of a copy of our own choose LongRoPE's factors for each row by itself.

    transformers chooses them anew in each forward, by its last position. A piece of a long prompt, a batch, or a tree
    that reaches beyond the switch would get factors that one text, read as a whole, does not get. Ours go by the text
    that a row is the last token of: the row's own position, or the length of the prompt that it is a part of
    (``Block.text``). A text that would grow beyond the switch is refused (``TargetRunner.max_context_length``).

    Returns:
        The tokens of the longest text with the short factors; None if all texts are rotated alike.
    """
    limits = [
        int(each.get("original_max_position_embeddings") or hosting.context_length(model))
        for each in rope_parameters(model)
        if rope_type(each) == _KIND and any(each.get(short) != each.get(long) for short, long in _FACTORS)
    ]
    if not limits:
        return None
    switch = min(limits)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if _KIND in (kinds.values() if isinstance(kinds, Mapping) else (kinds,)):
            # Each forward writes its frequencies into the buffer, and the user's model may be at work meanwhile.
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.clone()
            vars(module)["forward"] = _by_row(module.forward, switch)
    return switch


def _by_row(theirs: Callable[..., CosSin], switch: int) -> Callable[..., CosSin]:
    @wraps(theirs)
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> CosSin:
        hosted = hosting.current_forward()
        if hosted is not None and hosted.batch.prompt_len > switch:
            return _long(position_ids, x, *more, **named)
        # Both are computed wherever a row may be beyond the switch, so that no device has to be asked.
        long = (position_ids >= switch).unsqueeze(-1)
        short = theirs(x, position_ids.clamp(max=switch - 1), *more, **named)
        cos, sin = (torch.where(long, a, b) for a, b in zip(_long(position_ids, x, *more, **named), short, strict=True))
        return cos, sin

    def _long(position_ids: torch.Tensor, x: torch.Tensor, *more: Any, **named: Any) -> CosSin:
        # One more position, beyond the switch, makes a forward a long text's.
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), switch)
        cos, sin = theirs(x, torch.cat((position_ids, beyond), dim=-1), *more, **named)
        return cos[..., :-1, :], sin[..., :-1, :]

    return forward
