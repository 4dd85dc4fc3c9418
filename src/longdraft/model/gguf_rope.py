"""Scaled rotary frequencies of GGUF files, in the words of transformers, which reads none of them itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

# Llama 3.1, 3.2 and 3.3 have these parameters. Their files hold what follows from them, not the parameters.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Of YaRN, as llama.cpp and transformers name them.
_BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
# Kinds whose rotation transformers does otherwise, or not at all, where these are not what they are by default.
_UNKNOWN = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


class RopeError(ValueError):
    """The frequencies are scaled in a way that cannot be said to transformers. The message says which."""


def scaling(value: Callable[[str], Any], factors: torch.Tensor | None, config: Any) -> dict[str, Any]:
    """Gives what a configuration's ``rope_parameters`` need beside ``rope_theta``; empty: the frequencies are plain.

    Args:
        value: gives the file's value of a name behind ``{architecture}.rope.``; None: the file has none.
        factors: of the tensor ``rope_freqs``: what divides each frequency.
        config: of the model, its head size and context length right. None: of a kind that is not looked into.

    Raises:
        RopeError: scaled in a way that transformers does not know, or a part of each head is rotated.
    """
    if factors is not None and bool((factors == 1).all()):
        factors = None
    found = _named(value, 0 if config is None else config.max_position_embeddings)
    if config is None:
        if found or factors is not None:
            raise RopeError(found.get("rope_type", "rope_freqs"))
        return {}
    rotated = value("dimension_count")
    if rotated is not None and int(rotated) != config.head_dim:
        raise RopeError(f"{rotated} of each head's {config.head_dim} dimensions are rotated")
    if factors is None:
        return found
    if found:
        raise RopeError(f"{found['rope_type']} together with rope_freqs")
    if len(factors) != config.head_dim // 2:
        raise RopeError(f"rope_freqs for {len(factors)} frequencies, where there are {config.head_dim // 2}")
    return _divided(factors.double(), config)


def _named(value: Callable[[str], Any], context: int) -> dict[str, Any]:
    """The kind that a file names, with its parameters."""
    kind, factor = value("scaling.type"), value("scaling.factor")
    if factor is None:
        factor = value("scale_linear")  # as files of 2023 call it
    # llama.cpp takes a factor without a kind for linear, and a factor of 0 for none.
    kind = "linear" if kind is None else str(kind)
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise RopeError(kind)
    if not factor or factor < 1:
        raise RopeError(f"yarn with a factor of {factor}")
    for name, usual in _UNKNOWN.items():
        if (given := value(f"scaling.{name}")) is not None and given != usual:
            raise RopeError(f"yarn with {name} {given:g}")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(value("scaling.original_context_length") or context),
    }
    found |= {ours: float(x) for name, ours in _BETAS.items() if (x := value(f"scaling.{name}")) is not None}
    # llama.cpp's converter writes transformers' attention_factor by the first name; what has the second comes on top.
    if (whole := value("scaling.yarn_attn_factor")) is not None:
        found["attention_factor"] = float(whole)
    if (more := value("scaling.attn_factor")) is not None:
        found["attention_factor"] = found.get("attention_factor", 0.1 * math.log(factor) + 1) * float(more)
    return found


def _divided(factors: torch.Tensor, config: Any) -> dict[str, Any]:
    """Parameters that give frequencies divided by these factors."""
    size = config.head_dim
    base = config.rope_parameters["rope_theta"]
    turns = base ** -(torch.arange(0, size, 2, dtype=torch.double) / size) / (2 * math.pi)  # in one token
    factor, low, high, length = float(factors.max()), *map(float, _LLAMA3.values())
    share = ((turns * length - low) / (high - low)).clamp(0, 1)  # of the frequency that stays as it is
    if torch.allclose(1 / ((1 - share) / factor + share), factors, rtol=1e-4, atol=0):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # LongRoPE takes any factors. Those of short texts and of long ones are the same here.
    each, context = factors.tolist(), int(config.max_position_embeddings)
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": each,
        "long_factor": each,
        "original_max_position_embeddings": context,
    }
