"""Finds the parts of a transformers model: its decoder, the decoder's configuration, layers and final norm."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError

UNLIMITED_CONTEXT = 1 << 20  # context length, in tokens, of models whose configuration has none: any large number


def decoder_config(model: PreTrainedModel) -> Any:
    """Returns the configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Returns the submodule that computes hidden states from token ids: the decoder with the token embedding."""
    embedding = model.get_input_embeddings()
    candidates: list[nn.Module] = [model.get_decoder(), model.base_model]
    return next((c for c in candidates if any(m is embedding for m in c.modules())), candidates[0])


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Returns the decoder layers: the module list with ``num_hidden_layers`` members.
    A model that runs a layer several times has no such list: then it is the longest list with modules of one class."""
    num_layers = getattr(decoder_config(model), "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    for modules in lists:
        if len(modules) == num_layers:
            return modules
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers.")
    return max(lists, key=lambda modules: len(modules) if len({type(m) for m in modules}) == 1 else 0)


def context_length(model: PreTrainedModel) -> int:
    """Returns the model's context length in tokens, which RoPE scaling may have extended."""
    config = decoder_config(model)
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    return next((int(length) for name in names if (length := getattr(config, name, None))), UNLIMITED_CONTEXT)


def norm_before_head(model: PreTrainedModel) -> nn.Module | None:
    """Returns the norm between the last layer and the head; None if there is none."""
    children = reversed(list(decoder_of(model).named_children()))
    # Gemma 3n and 4 also have a norm for per-layer embeddings, which is skipped.
    return next((m for name, m in children if "norm" in name and not name.startswith("per_layer")), None)


def takes_argument(module: nn.Module, name: str) -> bool:
    """True if the forward of a module's class has an argument of this name."""
    return name in inspect.signature(type(module).forward).parameters
