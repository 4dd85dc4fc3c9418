"""Whole decoder layers by our kernels, on a CPU, for the few rows of a verification.

What a layer computes is not guessed from its name: a layer that has the parts of a Llama's is computed both ways once,
and only if both agree is the fast way taken from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.errors import LongdraftError
from longdraft.few_rows import MOST
from longdraft.host import hosting
from longdraft.host.parts import rotary_module
from longdraft.kv.packed_store import PackedStore
from longdraft.kv.store import KVStore
from longdraft.native import DecoderLayer, Kernels, Rows, kernels
from longdraft.native.library import HEAD_UNIT

logger = logging.getLogger("longdraft")

# Largest difference between both ways, by the size of what a layer adds.
_TOLERANCE = 1e-4
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FusedLayers:
    """Makes a model's decoder layers compute by our kernels where that gives what the model's own code gives.

    Args:
        model: a copy that is nobody's but ours, with our attention switched on. Float32 on the CPU, or nothing is
            fused.

    Attributes:
        layers: what our kernels compute with, one a layer of the model; empty where nothing is fused.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[DecoderLayer] = []
        own = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        if own is None:
            return
        theirs = list(hosting.decoder_layers(model))
        weights = [_weights(layer) for layer in theirs]
        shape = hosting.kv_shape(model)
        if shape.head_dim % HEAD_UNIT or any(w is None for w in weights):
            return
        heads = int(hosting.decoder_config(model).num_attention_heads)
        found = []
        for layer, w in zip(theirs, weights, strict=True):
            assert w is not None
            scale = float(getattr(layer.self_attn, "scaling", shape.head_dim**-0.5))
            found.append(DecoderLayer(*w, heads, shape.kv_heads, shape.head_dim, scale))
        if not _agree(model, theirs, found, own):
            return
        self.layers = found
        for index, (layer, fused) in enumerate(zip(theirs, found, strict=True)):
            vars(layer)["forward"] = _Forward(own, fused, index, layer.forward)

    def take(self, store: KVStore, block: Block) -> bool:
        """Whether a forward over a block is one of theirs."""
        # Other kinds of stores move layers in and out as attention asks for them.
        if not self.layers or block.captured or type(store) not in (KVStore, PackedStore):
            return False
        return not block.prompt or block.batch * block.size <= MOST


class _Forward:
    """What a layer computes with.

    Args:
        otherwise: its own code.
    """

    def __init__(
        self, kernels: Kernels, layer: DecoderLayer, index: int, otherwise: Callable[..., Any] | None = None
    ) -> None:
        self._kernels, self._layer, self._index, self._otherwise = kernels, layer, index, otherwise

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        hosted = named["longdraft_hosted"]
        # A model may be cast or moved while a run goes on; the kernel reads what it is given as float32 in memory.
        ours = hosted.whole and hidden_states.dtype == torch.float32 and hidden_states.device.type == "cpu"
        if not ours and self._otherwise is not None:
            return self._otherwise(hidden_states, *more, **named)
        if hosted.rows is None:  # the same for all layers of a forward
            hosted.rows = _rows(hosted.block, *named["position_embeddings"])
        keys, values = hosted.store.layer(self._index)
        out, queries = self._kernels.layer(self._layer, hosted.rows, keys, values, hidden_states)
        if self._index in hosted.query_layers:
            hosted.queries[self._index] = queries
        hosted.layers_seen += 1
        return out


def _rows(block: Block, cos: torch.Tensor, sin: torch.Tensor) -> Rows:
    mask = block.mask
    if mask is None and block.width > 1:
        mask = block.block_mask(0, torch.device("cpu")).expand(block.batch, -1, -1)
    cos, sin = (x.expand(block.batch, -1, -1) for x in (cos, sin))
    first = [n + block.offset for n in block.lengths]
    return Rows(cos, sin, block.slots, first, [n + block.width for n in block.lengths], mask)


def _weights(layer: nn.Module) -> tuple[list[Any], list[Any]] | None:
    """Norms and products of a layer of the Llama kind; None for another kind, or where somebody hooks into it."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    eps = [getattr(n, "variance_epsilon", getattr(n, "eps", None)) for n in norms]
    products = [getattr(attention, n, None) or getattr(mlp, n, None) for n in _PRODUCTS]
    if not all(type(p) is nn.Linear for p in products) or not all(isinstance(e, float) for e in eps):
        return None
    inside = [m for m in layer.modules() if m is not layer]
    # The layer's own hooks are called around whatever computes it.
    if any(m._forward_hooks or m._forward_pre_hooks for m in inside) or any(
        "forward" in vars(m) for m in layer.modules()
    ):
        return None
    tensors = [t for m in inside for t in m.parameters(recurse=False)]
    if not all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors):
        return None
    found = [n.weight.detach() for n in norms if n is not None]
    pairs = [(p.weight.detach(), None if p.bias is None else p.bias.detach()) for p in products if p is not None]
    return list(zip(found, eps, strict=True)), pairs


@torch.inference_mode()
def _agree(model: PreTrainedModel, layers: list[nn.Module], fused: list[DecoderLayer], kernels: Kernels) -> bool:
    """Computes every layer both ways on made-up rows, a small tree behind a short text."""
    rotary = rotary_module(model)
    if rotary is None:
        return False
    shape, size, text = hosting.kv_shape(model), 3, 5
    tree = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    like = torch.Generator().manual_seed(0)
    x = torch.randn(1, size, int(hosting.decoder_config(model).hidden_size), generator=like)
    block = Block.make([0], [text], size, tree[None])
    try:
        position = rotary(x, torch.tensor([[text, text + 1, text + 1]]) + 100)
        if position[0].shape[-1] != shape.head_dim:
            return False
        stores = [KVStore(shape, 1, text + size) for _ in range(2)]
        for store in stores:
            for t in (store.keys, store.values):
                t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)))
        plain, ours = (hosting.Hosted(store, block, _reference) for store in stores)
        for index, (layer, own) in enumerate(zip(layers, fused, strict=True)):
            # Not called: hooks that somebody put on a layer are not for made-up rows.
            expected = layer.forward(x, position_embeddings=position, use_cache=False, longdraft_hosted=plain)
            found = _Forward(kernels, own, index)(x, position_embeddings=position, longdraft_hosted=ours)
            pairs = [(found, expected)]
            pairs += [tuple(getattr(store, kv)[index] for store in reversed(stores)) for kv in ("keys", "values")]
            if not all(_close(a, b) for a, b in pairs):
                logger.info("Layer %d is not of the Llama kind: its own code is taken.", index)
                return False
    except (TypeError, RuntimeError, AttributeError, LongdraftError) as error:
        logger.info("Decoder layers are not fused: %s", error)
        return False
    return True


def _close(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())


def _reference(*args: Any) -> torch.Tensor:
    from longdraft.attention.reference import attend

    return attend(*args)
