"""Reads RoPE scaling of GGUF files as ``rope_parameters`` of a config. transformers ignores scaling in GGUF files."""

from __future__ import annotations

import math
from typing import Any

import torch

from longdraft.errors import CapabilityError
from longdraft.model.gguf.header import GGUFHeader

# Parameters of Llama 3.1, 3.2 and 3.3: GGUF files store only the tensor rope_freqs, which is computed from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN_BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}  # llama.cpp's name -> transformers'
# Both tensors of LongRoPE, with the factors for short and for long contexts, have names that begin so.
_LONGROPE_PREFIX = "rope_factors_"
# YaRN parameters that transformers lacks -> the value that has no effect. Other values are refused.
_UNSUPPORTED_YARN = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def rope_scaling(header: GGUFHeader, config: Any) -> dict[str, Any]:
    """Returns ``rope_parameters`` without ``rope_theta``; empty if nothing is scaled.

    Raises:
        CapabilityError: transformers lacks this scaling, or the file's rotary dimension differs from the config's.
    """
    if any(name.startswith(_LONGROPE_PREFIX) for name in header.tensors):
        raise _unsupported_error(header, "longrope scaling")
    factors = None if header.rope_freqs is None else torch.from_numpy(header.rope_freqs)
    if factors is not None and bool((factors == 1).all()):  # divisors of 1 scale nothing
        factors = None
    fields = _scaling_fields(header, config.max_position_embeddings)
    file_dim, rotary_dim = header("rope.dimension_count"), _rotary_dim(config)
    if file_dim is not None and int(file_dim) != rotary_dim:
        raise _unsupported_error(header, f"RoPE of only {file_dim} of each head's {config.head_dim} dimensions")
    if factors is None:
        return fields
    if fields:
        raise _unsupported_error(header, f"{fields['rope_type']} scaling together with rope_freqs")
    if len(factors) != rotary_dim // 2:
        raise _unsupported_error(header, f"rope_freqs for {len(factors)} frequencies, not {rotary_dim // 2}")
    return _from_factors(factors.double(), config)


def _unsupported_error(header: GGUFHeader, feature: str) -> CapabilityError:
    return CapabilityError(
        f"{header.path} needs {feature}, which is not read from GGUF files: give the model's Hugging Face folder or id."
    )


def _rotary_dim(config: Any) -> int:
    """Returns how many dimensions of a head RoPE rotates."""
    return int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _scaling_fields(header: GGUFHeader, context_length: int) -> dict[str, Any]:
    """Returns ``rope_parameters``. ``context_length``: the original context length if the file does not state it."""

    def field(name: str) -> Any:
        return header(f"rope.scaling.{name}")

    rope_type, factor = field("type"), field("factor")
    if factor is None:
        factor = header("rope.scale_linear")  # in files of 2023
    # As in llama.cpp, a missing type means linear, and a factor of 0 means no scaling.
    rope_type = "linear" if rope_type is None else str(rope_type)
    if rope_type == "none" or (rope_type == "linear" and factor in (None, 0, 1)):
        return {}
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if rope_type != "yarn":
        raise _unsupported_error(header, f"{rope_type} scaling")
    if not factor or factor < 1:
        raise _unsupported_error(header, f"yarn scaling with a factor of {factor}")
    for name, neutral_value in _UNSUPPORTED_YARN.items():
        if (value := field(name)) is not None and value != neutral_value:
            raise _unsupported_error(header, f"yarn scaling with {name} {value:g}")
    fields: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(field("original_context_length") or context_length),
    }
    fields |= {hf_name: float(beta) for name, hf_name in _YARN_BETAS.items() if (beta := field(name)) is not None}
    # attention_factor = (yarn_attn_factor, by default 0.1 ln(factor) + 1) * attn_factor.
    if (yarn_factor := field("yarn_attn_factor")) is not None:
        fields["attention_factor"] = float(yarn_factor)
    if (attn_factor := field("attn_factor")) is not None:
        fields["attention_factor"] = fields.get("attention_factor", 0.1 * math.log(factor) + 1) * float(attn_factor)
    return fields


def _from_factors(factors: torch.Tensor, config: Any) -> dict[str, Any]:
    """Returns ``rope_parameters`` that divide frequencies by ``factors``: of type llama3 if it fits, or longrope."""
    dim = _rotary_dim(config)
    full_attention = config.rope_parameters.get("full_attention")
    theta = (full_attention or config.rope_parameters)["rope_theta"]
    # In turns per token, not in radians.
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.double, device="cpu") / dim) / (2 * math.pi)
    factor, low, high, context_length = float(factors.max()), *map(float, _LLAMA3.values())
    smooth = ((frequencies * context_length - low) / (high - low)).clamp(0, 1)  # transformers' smooth_factor
    if torch.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4, atol=0):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # LongRoPE takes any factors: short and long contexts get the same list.
    factor_list = factors.tolist()
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factor_list,
        "long_factor": factor_list,
        "original_max_position_embeddings": int(config.max_position_embeddings),
    }
