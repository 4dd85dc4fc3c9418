"""A draft's layer: its configuration, and its rotary embedding, whose base and scaling may differ from the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longdraft.errors import CheckpointError

# The range of dimensions that YaRN blends over: for Llama (Peng et al. 2023, section 3.2). SpecPV names none.
BETA_FAST, BETA_SLOW = 32.0, 1.0


def make_rope_parameters(
    theta: float, factor: float | None = None, original_length: int | None = None
) -> dict[str, Any]:
    """RoPE parameters as transformers names them, plain or with YaRN.

    Args:
        theta: base of the frequencies.
        factor: YaRN's factor, by which the context is stretched; None for plain RoPE.
        original_length: tokens of the context before; required with a factor.
    """
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
    """cos and sin of a draft's heads, computed by transformers.

    Args:
        head_dim: dimensions of a head, all of which are rotated.
        parameters: RoPE parameters as transformers names them; :func:`make_rope_parameters` makes them.
        dtype: dtype of cos and sin.

    Attributes:
        module: transformers' module, which takes a tensor of the dtype and positions (1, T).

    Raises:
        CheckpointError: transformers cannot use the parameters.
    """

    def __init__(
        self,
        head_dim: int,
        parameters: Mapping[str, Any],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if parameters.get("partial_rotary_factor") not in (None, 1.0):
            raise CheckpointError("The draft rotates a part of a head only, which longdraft's EAGLE-3 does not.")
        length = int(parameters.get("original_max_position_embeddings") or 2048)
        try:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=int(length * float(parameters.get("factor") or 1.0)),
                rope_parameters=dict(parameters),
            )
            self.module = LlamaRotaryEmbedding(config).to(device)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The draft's RoPE parameters {dict(parameters)} cannot be used ({error!r}): correct its config.json, "
                "or load it with others: rope_theta=, rope_factor=."
            ) from error
        self._like = torch.empty(1, dtype=dtype, device=device)
        # Those kinds change their frequencies with the position. A draft sees a window of its trained length, whose
        # frequencies are the first ones, wherever the window lies.
        self._fixed = parameters.get("rope_type") in ("dynamic", "longrope")

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (T, head_dim) at positions (T,), YaRN's attention factor included."""
        if self._fixed:
            cos, sin = self.rotation(positions)
            return (cos * self.attention_scaling).to(self._like.dtype), (sin * self.attention_scaling).to(
                self._like.dtype
            )
        cos, sin = self.module(self._like, positions[None])
        return cos[0], sin[0]

    @property
    def attention_scaling(self) -> float:
        """YaRN's attention factor, by which cos and sin are multiplied."""
        return float(self.module.attention_scaling)

    def rotation(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (T, head_dim), float32, of the rotation that moves a key or a query on by (T,) positions.

        Rotations compose, so it does for what has been rotated already. YaRN's attention factor is no part of it.
        """
        angles = offsets[:, None].float() * self.module.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def complete_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the defaults of its model type.

    Raises:
        ValueError: a type that transformers does not know, or a value that it refuses.
    """
    rest = {name: value for name, value in stated.items() if name != "model_type"}
    found: dict[str, Any] = AutoConfig.for_model(str(stated.get("model_type") or "llama"), **rest).to_dict()
    return found
