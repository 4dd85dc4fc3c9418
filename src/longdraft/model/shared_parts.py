"""Finds the parts of a target that drafts share (embedding, head, RoPE), and describes the target for draft folders."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.model.layout import config_kv_shape
from longdraft.model.model_parts import decoder_config, decoder_layers, norm_before_head
from longdraft.model.quant import stored
from longdraft.model.quant.planes import Planes, PlanesLinear
from longdraft.model.rope import CosSin, rotary_module, takes_layer_type
from longdraft.model.tensor_parallel import local_tensor
from longdraft.native import QuantizedMatrix, kernels

HeadWeight: TypeAlias = torch.Tensor | QuantizedMatrix | Planes


@dataclass(frozen=True)
class SharedParts:
    """Parts of a target that a draft uses by reference, and sizes that a draft copies.

    Attributes:
        embedding: token embedding, ids (...) -> (..., hidden_size).
        head: weight (vocabulary, hidden_size) of the LM head. It is quantised if the target's is and our kernels can
            read it: on a GPU as planes. A factor on the target's logits is left out, as it does not change their order.
        rms_norm_eps: epsilon of the target's norms.
        intermediate_size: size of the target's MLP.
        hidden_size: size of the target's hidden states.
        num_heads: number of the target's query heads.
        description: the target's sizes and RoPE and a digest of its weights, as saved with a draft.
        softcap: softcap of the target's logits; None for no softcap."""

    embedding: nn.Module
    head: HeadWeight
    rms_norm_eps: float
    intermediate_size: int
    hidden_size: int
    num_heads: int
    description: dict[str, Any]
    _rotary: nn.Module
    _hidden_like: torch.Tensor  # a tensor with the dtype and device of hidden states
    _norm: nn.Module | None = None
    softcap: float | None = None

    def apply_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the head's input: ``hidden``, the last layer's output, after the final norm if there is one."""
        hidden = hidden.to(self._hidden_like.dtype)
        return hidden if self._norm is None else self._norm(hidden)

    def rotary(self, positions: torch.Tensor) -> CosSin:
        """Returns cos and sin (T, rotary dimensions) of the target's rotary embedding at positions (T,), with YaRN.
        If layer types rotate differently, as in Gemma 3, they are for full attention, whose keys drafts read."""
        position_ids = positions[None]
        if hasattr(self._rotary, "mrope_section"):  # M-RoPE of vision models: time, height and width
            position_ids = position_ids.expand(3, 1, -1)
        layer_type = ["full_attention"] if takes_layer_type(self._rotary) else []
        cos, sin = self._rotary(self._hidden_like, position_ids, *layer_type)
        return cos[0], sin[0]


def shared_parts(model: PreTrainedModel, description: dict[str, Any] | None = None) -> SharedParts:
    """Returns the parts of a hosted model that drafts share.

    Args:
        model: our copy of the target.
        description: the description if it is known; None computes it (:func:`describe_target`).

    Raises UnsupportedModelError if the model has no rotary embedding, or a head that drafts cannot use."""
    config = decoder_config(model)
    rotary = rotary_module(model)
    if rotary is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary embedding that a draft could share, so it takes no trained drafts."
        )
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UnsupportedModelError(f"{type(model).__name__} has a head with a bias, which drafts do not support yet.")
    return SharedParts(
        embedding=model.get_input_embeddings(),
        head=_head_weight(head),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        hidden_size=int(config.hidden_size),
        num_heads=int(config.num_attention_heads),
        description=describe_target(model) if description is None else description,
        _rotary=rotary,
        _hidden_like=torch.empty(1, 1, dtype=model.dtype, device=model.device),
        _norm=norm_before_head(model),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _head_weight(head: nn.Module) -> HeadWeight:
    if isinstance(head, stored.StoredLinear) and head.data.device.type == "cpu" and kernels() is not None:
        return head.matrix
    if isinstance(head, PlanesLinear):
        return head.planes
    weight = head.weight
    assert isinstance(weight, torch.Tensor)
    if hasattr(type(local_tensor(weight)), "__tensor_flatten__") or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"Another package quantised the head ({type(head).__name__}), so drafts cannot read it: leave lm_head out "
            "of the quantisation."
        )
    return weight.detach()


def describe_target(model: PreTrainedModel) -> dict[str, Any]:
    """Describes a target for its drafts' folders: architecture, sizes, RoPE base and a digest of the weights.

    Weights are rounded to bfloat16 first, so the digest does not depend on the loaded dtype. RoPE scaling (YaRN) is
    left out, so that drafts still fit the target after its context is extended."""
    digest = hashlib.sha256()
    last_layer = decoder_layers(model)[-1].modules()
    first_weights = next(m for m in last_layer if stored.has_weights(m))
    for module in (model.get_input_embeddings(), first_weights):
        digest.update(stored.weight_sample(module).to(torch.bfloat16).float().cpu().numpy().tobytes())
    return describe_config(model) | {"weights": digest.hexdigest()[:16]}


def describe_config(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the description of :func:`describe_target`, without the digest of the weights."""
    config = decoder_config(model)
    shape = config_kv_shape(model)
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "model_type": config.model_type,
        "vocab_size": stored.weight_shape(model.get_output_embeddings())[0],
        "hidden_size": int(config.hidden_size),
        "layers": shape.layers,
        "heads": int(config.num_attention_heads),
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": rope.get("rope_theta"),
    }
