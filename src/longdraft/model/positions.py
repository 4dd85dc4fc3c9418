"""Patches models to use our batches' positions: models without an argument position_ids, and models with LongRoPE."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.model import hosting
from longdraft.model.compat import CACHE_LENGTH_NAMES
from longdraft.model.model_parts import context_length, takes_argument
from longdraft.model.rope import LONGROPE, CosSin, rope_parameters, rope_type, rope_types

# LongRoPE's parameters, in pairs: the first for contexts up to the trained length, the second for longer contexts.
_FACTOR_KEYS = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))


def patch_position_ids(model: PreTrainedModel) -> None:
    """Makes position embeddings read our batch's positions, if the model's forward takes no ``position_ids``.

    Such a model passes its cache's length to the embedding module, which numbers new tokens from there on. Positions in
    a tree are not consecutive, so hooks pass them as the module's ``position_ids``. The model must be our own copy."""
    if takes_argument(model, "position_ids"):
        return
    for module in model.modules():
        takes_length = any(takes_argument(module, name) for name in CACHE_LENGTH_NAMES)
        if takes_length and takes_argument(module, "position_ids"):
            module.register_forward_pre_hook(_add_position_ids, with_kwargs=True)
            module.register_forward_hook(_reshape_output)


def _add_position_ids(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ctx = hosting.current_forward()
    if ctx is None or len(args) > 2:  # a third argument may be position_ids
        return None
    return args, kwargs | {"position_ids": ctx.batch.positions}


def _reshape_output(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    """Reshapes the output to (B, T, hidden). A module that expects positions (T,) adds a dimension to our (B, T)."""
    ctx = hosting.current_forward()
    if ctx is None or ctx.batch.positions is None:
        return output
    return output.reshape(*ctx.batch.positions.shape, -1)


def patch_longrope(model: PreTrainedModel) -> int | None:
    """Makes LongRoPE choose its factors for each token, in our own copy of a model.

    transformers chooses short or long factors by the last position of a forward, which is wrong for prefill chunks,
    batches, and trees across the switch. Here all tokens of a prompt longer than the switch get the long factors
    (``ForwardBatch.prompt_len``). Otherwise each token's position decides. A sequence with a shorter prompt ends at the
    switch (``TargetRunner.max_context_length``).

    Returns the switch: the longest context, in tokens, with the short factors; None without LongRoPE."""
    trained_lengths = [
        int(p.get("original_max_position_embeddings") or context_length(model))
        for p in rope_parameters(model)
        if rope_type(p) == LONGROPE and any(p.get(short) != p.get(long) for short, long in _FACTOR_KEYS)
    ]
    if not trained_lengths:
        return None
    switch = min(trained_lengths)
    for module in model.modules():
        if LONGROPE in rope_types(module):
            # Each forward writes frequencies into these buffers, so they must not be shared with the user's model.
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.clone()
            vars(module)["forward"] = _longrope_forward(module.forward, switch)
    return switch


def _longrope_forward(original: Callable[..., CosSin], switch: int) -> Callable[..., CosSin]:
    @wraps(original)
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> CosSin:
        ctx = hosting.current_forward()
        if ctx is not None and ctx.batch.prompt_len > switch:
            return long_cos_sin(position_ids, x, *args, **kwargs)
        # Both are computed for all tokens: an if would have to wait for the device.
        is_long = (position_ids >= switch).unsqueeze(-1)
        short = original(x, position_ids.clamp(max=switch - 1), *args, **kwargs)
        long = long_cos_sin(position_ids, x, *args, **kwargs)
        return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])

    def long_cos_sin(position_ids: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> CosSin:
        # transformers chooses the long factors if any position is at the switch or beyond, so such a position is added.
        extra_position = position_ids.new_full((*position_ids.shape[:-1], 1), switch)
        cos, sin = original(x, torch.cat((position_ids, extra_position), dim=-1), *args, **kwargs)
        return cos[..., :-1, :], sin[..., :-1, :]

    return forward
