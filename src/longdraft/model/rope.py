"""RoPE: reads and makes transformers' parameters, finds a model's rotary embedding, and rotates keys.

A draft has its own :class:`RotaryEmbedding`, whose base and scaling may differ from the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.model_parts import decoder_config, takes_argument
from longdraft.native.boundary import CPU_FLOAT32

# YaRN's defaults for Llama (Peng et al. 2023, section 3.2). The SpecPV paper states no values.
BETA_FAST, BETA_SLOW = 32.0, 1.0
LONGROPE = "longrope"
# RoPE's cos and sin, each (B, T, rotary dimensions) for B sequences of T tokens.
CosSin = tuple[torch.Tensor, torch.Tensor]
# cos and sin of layers without RoPE.
NO_ROTATION: CosSin = (torch.empty(1, 1, 0, **CPU_FLOAT32), torch.empty(1, 1, 0, **CPU_FLOAT32))


def make_rope_parameters(
    theta: float, factor: float | None = None, original_length: int | None = None
) -> dict[str, Any]:
    """Makes transformers' ``rope_parameters``, plain or with YaRN.

    Args:
        theta: base of the frequencies.
        factor: the factor by which YaRN extends the context; None for plain RoPE.
        original_length: the context length before the extension, in tokens; required with a factor."""
    if factor is None:
        return {"rope_type": "default", "rope_theta": float(theta)}
    return {
        "rope_type": "yarn",
        "rope_theta": float(theta),
        "factor": float(factor),
        "original_max_position_embeddings": original_length,
        "beta_fast": BETA_FAST,
        "beta_slow": BETA_SLOW,
    }


def stretch_rope(config: Any, factor: float) -> None:
    """Sets YaRN (Peng et al. 2023) in a model's config, in place. The context gets ``factor`` times the trained length.
    Raises CapabilityError for a config without RoPE, or with another RoPE scaling."""
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "none"}
    if (name := rope.get("rope_type", "one per layer type")) != "default":
        advice = "Leave rope_factor out, or edit rope_parameters in the model's config.json."
        raise CapabilityError(f"rope_factor needs plain RoPE; this model's is {name!r}. {advice}")
    trained_length = config.max_position_embeddings
    scaling = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained_length}
    config.rope_parameters = {**rope, **scaling}  # keeps rope_theta
    config.max_position_embeddings = int(trained_length * factor)


def rope_parameters(model: PreTrainedModel) -> list[Mapping[str, Any]]:
    """Returns the decoder's RoPE parameters: one dict for all layers, or one for each layer type."""
    config = decoder_config(model)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return []
    return [p for p in parameters.values() if isinstance(p, Mapping)] or [parameters]


def rope_type(parameters: Mapping[str, Any]) -> str:
    """Returns transformers' ``rope_type`` of RoPE parameters, such as "yarn"."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def original_context_length(model: PreTrainedModel) -> int | None:
    """Returns the context length, in tokens, before RoPE scaling; None if the model has no RoPE scaling."""
    lengths = (parameters.get("original_max_position_embeddings") for parameters in rope_parameters(model))
    return next((int(length) for length in lengths if length is not None), None)


def rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """Returns the rotary embedding that all layers share; None if there is none. It lies outside of the layers."""
    return next((m for n, m in model.named_modules() if n.endswith("rotary_emb") and n.count(".") <= 2), None)


def rope_types(module: nn.Module | None) -> list[str]:
    """Returns the ``rope_type`` of a rotary embedding, or one for each layer type; "None" for another module."""
    types = getattr(module, "rope_type", None)
    return [str(name) for name in (types.values() if isinstance(types, Mapping) else [types])]


def depends_on_length(module: nn.Module | None) -> bool:
    """True if transformers changes a rotary embedding's frequencies at positions beyond the trained length."""
    return any(name == LONGROPE or "dynamic" in name for name in rope_types(module))


def takes_layer_type(rotary: nn.Module) -> bool:
    """True if a rotary embedding rotates each layer type differently: its forward has an argument layer_type."""
    return takes_argument(rotary, "layer_type")


def apply_rotary(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first r dimensions of keys (..., n, d) by cos and sin (n, r), in float32 at least.
    Dimension i of the first half is rotated with dimension i of the second half, as in Llama."""
    rotary_dim = cos.shape[-1]
    x = keys[..., :rotary_dim].to(torch.promote_types(keys.dtype, torch.float32))
    first, second = x.chunk(2, dim=-1)
    rotated = (x * cos + torch.cat((-second, first), dim=-1) * sin).to(keys.dtype)
    return rotated if rotary_dim == keys.shape[-1] else torch.cat((rotated, keys[..., rotary_dim:]), dim=-1)


class RotaryEmbedding:
    """A draft's rotary embedding, computed by transformers.

    Args:
        head_dim: dimensions of a head, all of which are rotated.
        parameters: transformers' ``rope_parameters``; see :func:`make_rope_parameters`.
        dtype: dtype of cos and sin.
        device: device of cos and sin.

    Attributes:
        module: transformers' module, called with a tensor of the dtype and with positions (1, T).

    Raises CheckpointError if transformers cannot use the parameters."""

    def __init__(
        self,
        head_dim: int,
        parameters: Mapping[str, Any],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if parameters.get("partial_rotary_factor") not in (None, 1.0):
            raise CheckpointError(
                "The draft has partial_rotary_factor below 1, which longdraft's drafts do not support: take another."
            )
        original_length = int(parameters.get("original_max_position_embeddings") or 2048)
        try:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=int(original_length * float(parameters.get("factor") or 1.0)),
                rope_parameters=dict(parameters),
            )
            self.module = LlamaRotaryEmbedding(config).to(device)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The draft's RoPE parameters {dict(parameters)} cannot be used ({error!r}): correct its config.json, "
                "or load it with the options rope_theta=, rope_factor=."
            ) from error
        self._dtype_sample = torch.empty(1, dtype=dtype, device=device)
        # A draft's window is never longer than the trained length, so it keeps the frequencies at any position.
        self._keeps_frequencies = depends_on_length(self.module)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin (T, head_dim) at positions (T,), with YaRN's attention factor."""
        if self._keeps_frequencies:
            cos, sin = (x * self.attention_scaling for x in self.rotation(positions))
            return cos.to(self._dtype_sample.dtype), sin.to(self._dtype_sample.dtype)
        cos, sin = self.module(self._dtype_sample, positions[None])
        return cos[0], sin[0]

    @property
    def attention_scaling(self) -> float:
        """YaRN's factor on cos and sin (transformers' name), which scales attention scores."""
        return float(self.module.attention_scaling)

    def rotation(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin (T, head_dim), float32, that move a rotated key or query by offsets (T,), in positions.
        They are without YaRN's attention factor, which the key or query has already."""
        angles = offsets[:, None].float() * self.module.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()
