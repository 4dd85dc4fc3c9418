"""Whole decoder layers by our kernels, on a CPU, for the few rows of a verification.

What a layer computes is not guessed from its name: a layer that has the parts of a Llama's is computed both ways once,
and only if both agree is the fast way taken from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.errors import LongdraftError
from longdraft.kv.store import KVStore
from longdraft.native import DecoderLayer, Kernels, Rows, kernels
from longdraft.native.library import HEAD_UNIT
from longdraft.target import hosting
from longdraft.target.parts import rotary_module

logger = logging.getLogger("longdraft")

# Rows up to which the kernels win.
MOST = 128
# Largest difference between both ways, by the size of what a layer adds.
_TOLERANCE = 1e-4
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FusedLayers:
    """The decoder layers of a model, computed by our kernels where that gives what the model's own code gives.

    Args:
        model: float32 on the CPU, or nothing is fused.

    Attributes:
        paused: layers run their own code: whoever wants to watch a layer's parts sets it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.paused = False
        self._kernels = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        self._layers: list[nn.Module] = []
        self._fused: list[DecoderLayer] = []

    def look(self) -> None:
        """Finds out what can be fused: at the start of every run, as a model may have been changed since the last."""
        if self._kernels is None:
            return
        self._layers = list(hosting.decoder_layers(self._model))
        weights = [_weights(layer) for layer in self._layers]
        if self._fused and all(w is not None and f.is_of(*w) for f, w in zip(self._fused, weights, strict=True)):
            return
        self._fused = []
        shape = hosting.kv_shape(self._model)
        if shape.head_dim % HEAD_UNIT or any(w is None for w in weights):
            return
        heads = int(hosting.decoder_config(self._model).num_attention_heads)
        found = []
        for layer, w in zip(self._layers, weights, strict=True):
            assert w is not None
            scale = float(getattr(layer.self_attn, "scaling", shape.head_dim**-0.5))
            found.append(DecoderLayer(*w, heads, shape.kv_heads, shape.head_dim, scale))
        if _agree(self._model, self._layers, found, self._kernels):
            self._fused = found

    @contextmanager
    def serving(self, hosted: hosting.Hosted) -> Iterator[None]:
        """Inside the ``with``, the layers compute by our kernels, if this forward is one of theirs."""
        block = hosted.block
        # Other kinds of stores move layers in and out as attention asks for them.
        if (
            self.paused
            or not self._fused
            or block.batch * block.size > MOST
            or block.captured
            or type(hosted.store) is not KVStore
        ):
            yield
            return
        assert self._kernels is not None
        for index, layer in enumerate(self._layers):
            vars(layer)["forward"] = _Forward(self._kernels, self._fused[index], index)
        try:
            yield
        finally:
            for layer in self._layers:
                vars(layer).pop("forward", None)


class _Forward:
    """What a layer computes with."""

    def __init__(self, kernels: Kernels, layer: DecoderLayer, index: int) -> None:
        self._kernels, self._layer, self._index = kernels, layer, index

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        longdraft_hosted: hosting.Hosted,
        **others: Any,
    ) -> torch.Tensor:
        hosted = longdraft_hosted
        if hosted.rows is None:  # the same for all layers of a forward
            hosted.rows = _rows(hosted.block, *position_embeddings)
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
    first = [n + block.behind for n in block.lengths]
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
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in inside):
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
        with hosting.hosting(model):
            for index, (layer, own) in enumerate(zip(layers, fused, strict=True)):
                expected = layer(x, position_embeddings=position, use_cache=False, longdraft_hosted=plain)
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
