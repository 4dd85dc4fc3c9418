"""Reads the scaled rotary frequencies of GGUF files as RoPE parameters of transformers, which ignores them."""

from __future__ import annotations

import math
from typing import Any

import torch

from longdraft.errors import CapabilityError
from longdraft.model.gguf.header import GGUFHeader

# The parameters of Llama 3.1, 3.2 and 3.3. Their files hold only the factors that follow from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Parameters of YaRN, as llama.cpp and transformers name them.
_BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
# Factors for short and for long texts (LongRoPE).
_BY_LENGTH = "rope_factors_"
# Parameters of YaRN that transformers lacks, with the values at which they change nothing.
_UNKNOWN = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def rope_scaling(header: GGUFHeader, config: Any) -> dict[str, Any]:
    """The ``rope_parameters`` of a configuration beside ``rope_theta``; empty if the frequencies are not scaled.

    Raises:
        CapabilityError: transformers does not know this scaling, or another part of each head is rotated than it says.
    """
    if any(name.startswith(_BY_LENGTH) for name in header.tensors):
        raise _unknown(header, "longrope")
    factors = None if header.rope_freqs is None else torch.from_numpy(header.rope_freqs)
    if factors is not None and bool((factors == 1).all()):
        factors = None
    named = _named(header, config.max_position_embeddings)
    rotated, size = header("rope.dimension_count"), _size(config)
    if rotated is not None and int(rotated) != size:
        raise _unknown(header, f"{rotated} of each head's {config.head_dim} dimensions are rotated")
    if factors is None:
        return named
    if named:
        raise _unknown(header, f"{named['rope_type']} together with rope_freqs")
    if len(factors) != size // 2:
        raise _unknown(header, f"rope_freqs for {len(factors)} frequencies, where there are {size // 2}")
    return _divided(factors.double(), config)


def _unknown(header: GGUFHeader, scaled: str) -> CapabilityError:
    return CapabilityError(
        f"{header.path} scales its rotary frequencies ({scaled}), which is not read from GGUF files: give the model's "
        "Hugging Face folder or id."
    )


def _size(config: Any) -> int:
    """The number of dimensions of a head that are rotated."""
    return int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _named(header: GGUFHeader, context: int) -> dict[str, Any]:
    """The kind of scaling that a file names, with its parameters."""

    def value(name: str) -> Any:
        return header(f"rope.scaling.{name}")

    kind, factor = value("type"), value("factor")
    if factor is None:
        factor = header("rope.scale_linear")  # its name in files of 2023
    # llama.cpp reads a factor without a kind as linear, and a factor of 0 as none.
    kind = "linear" if kind is None else str(kind)
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise _unknown(header, kind)
    if not factor or factor < 1:
        raise _unknown(header, f"yarn with a factor of {factor}")
    for name, usual in _UNKNOWN.items():
        if (number := value(name)) is not None and number != usual:
            raise _unknown(header, f"yarn with {name} {number:g}")
    named: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(value("original_context_length") or context),
    }
    named |= {ours: float(x) for name, ours in _BETAS.items() if (x := value(name)) is not None}
    # llama.cpp's converter writes transformers' attention_factor by the first name; the second one multiplies it.
    if (attention := value("yarn_attn_factor")) is not None:
        named["attention_factor"] = float(attention)
    if (more := value("attn_factor")) is not None:
        named["attention_factor"] = named.get("attention_factor", 0.1 * math.log(factor) + 1) * float(more)
    return named


def _divided(factors: torch.Tensor, config: Any) -> dict[str, Any]:
    """The parameters that divide the frequencies by these factors."""
    size = _size(config)
    by_kind = config.rope_parameters.get("full_attention")
    base = (by_kind or config.rope_parameters)["rope_theta"]
    turns = base ** -(torch.arange(0, size, 2, dtype=torch.double, device="cpu") / size) / (2 * math.pi)  # in one token
    factor, low, high, length = float(factors.max()), *map(float, _LLAMA3.values())
    share = ((turns * length - low) / (high - low)).clamp(0, 1)  # of the frequency that stays as it is
    if torch.allclose(1 / ((1 - share) / factor + share), factors, rtol=1e-4, atol=0):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # LongRoPE takes any factors, which are the same for short and long texts here.
    each, context = factors.tolist(), int(config.max_position_embeddings)
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": each,
        "long_factor": each,
        "original_max_position_embeddings": context,
    }
