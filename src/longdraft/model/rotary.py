"""Makes a draft's rotary embedding and configuration. Base and scaling of its RoPE may differ from the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longdraft.errors import CheckpointError

# YaRN's defaults for Llama (Peng et al. 2023, section 3.2). The SpecPV paper states no values.
BETA_FAST, BETA_SLOW = 32.0, 1.0


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
        # transformers changes the frequencies of these RoPE types at positions beyond the trained length. A draft's
        # window is never longer than the trained length, so it keeps the frequencies at any position.
        self._keeps_frequencies = parameters.get("rope_type") in ("dynamic", "longrope")

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


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with all settings: those missing in ``config`` get transformers' defaults.
    Raises ValueError if transformers does not know its ``model_type``, or a value is not allowed."""
    settings = {name: value for name, value in config.items() if name != "model_type"}
    completed: dict[str, Any] = AutoConfig.for_model(str(config.get("model_type") or "llama"), **settings).to_dict()
    return completed
