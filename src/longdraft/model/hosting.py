"""Hosting: runs a transformers model, without a fork of its code, with our attention and our KV store.

transformers lets a model's attention be any registered function. Ours receives the block's queries, keys (after
RoPE) and values of one layer, writes the keys and values into the store, and attends to the store's rows. The model's
own cache is never used. The state of a forward is one keyword argument, which transformers hands through to the
attention function. All this is done to a copy of the model (``model/twin.py``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from longdraft.attention.block import Block
from longdraft.attention.reference import Attend
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVShape
from longdraft.model import adapters, stored
from longdraft.native import Rows

IMPLEMENTATION = "longdraft"


class Store(Protocol):
    """The part of :class:`~longdraft.memory.store.KVStore` that a forward uses."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def shape(self) -> KVShape: ...

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, block: Block) -> None: ...

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass
class Hosted:
    """The state of one forward: its inputs to every layer and its attention, and its results.

    Attributes:
        query_layers, hidden_layers: layers whose queries and output hidden states go to ``queries`` and ``hidden``.
        fused: layers that our kernels can compute in one piece are computed so.
        layers_seen: number of layers that went through our attention.
        rows: the block as fused layers read it, made by the first of them.
    """

    store: Store
    block: Block
    attend: Attend
    query_layers: frozenset[int] = frozenset()
    hidden_layers: frozenset[int] = frozenset()
    fused: bool = False
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    layers_seen: int = 0
    rows: Rows | None = None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    longdraft_hosted: Hosted | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (B, Hq, T, d), key and value (B, Hkv, T, d) -> (B, T, Hq, d), as transformers expects."""
    if longdraft_hosted is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention function, "
            "so longdraft cannot host it."
        )
    for option in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(option) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses {option}, which longdraft does not host exactly."
            )
    # Doge computes a mask of its own; BERT as a causal LM looks ahead by default.
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not attend to the whole text before each token (it brings its own mask, or "
            "looks ahead), so longdraft cannot host it exactly."
        )
    hosted = longdraft_hosted
    shape = hosted.store.shape
    if any(x.shape[1::2] != (shape.kv_heads, shape.head_dim) for x in (key, value)):
        raise UnsupportedModelError(
            f"{type(module).__name__} has keys {tuple(key.shape)} and values {tuple(value.shape)}, not both "
            f"{shape.kv_heads} heads of size {shape.head_dim} (latent attention?), which longdraft does not host."
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    if layer in hosted.query_layers:
        hosted.queries[layer] = query
    hosted.store.write(layer, key, value, hosted.block)
    hosted.layers_seen += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = hosted.attend(query, *hosted.store.layer(layer), hosted.block, scale)
    return out.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _attention)


def switch_on(model: PreTrainedModel) -> None:
    """Routes a model's attention through longdraft, for good. The model must be a copy of our own."""
    decoder_config(model)._attn_implementation = IMPLEMENTATION


def decoder_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


def kv_shape(model: PreTrainedModel) -> KVShape:
    """The shape of the model's KV cache."""
    config = decoder_config(model)
    heads = config.num_attention_heads
    return KVShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
    )


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers: the module list that is as long as the model is deep."""
    count = decoder_config(model).num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} decoder layers.")


def context_length(model: PreTrainedModel) -> int:
    """The longest sequence in tokens that the model takes, YaRN's factor included."""
    return int(decoder_config(model).max_position_embeddings)


def fingerprint(model: PreTrainedModel) -> str:
    """A short name of a target, from its configuration and some of its weights, to guard KV snapshots."""
    config = decoder_config(model)
    keys = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "rope_parameters")
    described = {k: getattr(config, k, None) for k in keys} | {"dtype": str(model.dtype)}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        digest.update(str(quantised).encode())
    for part in (*sampled(model), *adapters.described(model)):
        digest.update(part.encode() if isinstance(part, str) else part.float().cpu().numpy().tobytes())
    return f"{config.model_type}-{digest.hexdigest()[:16]}"


def sampled(model: PreTrainedModel) -> list[torch.Tensor]:
    """Some weights of the embedding and of the last layer's first matrix, to identify a model."""
    first = next(m for m in decoder_layers(model)[-1].modules() if stored.has_weights(m))
    return [stored.weight_sample(m) for m in (model.get_input_embeddings(), first)]


def tap(model: PreTrainedModel, layer: int) -> None:
    """Adds a hook to a decoder layer that keeps its output (B, T, hidden) in forwards that ask for it."""

    def hook(_module: nn.Module, _inputs: Any, named: dict[str, Any], output: Any) -> None:
        hosted = named.get("longdraft_hosted")
        if isinstance(hosted, Hosted) and layer in hosted.hidden_layers:
            hosted.hidden[layer] = output[0] if isinstance(output, tuple) else output

    decoder_layers(model)[layer].register_forward_hook(hook, with_kwargs=True)
