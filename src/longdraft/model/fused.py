"""Decoder layers and the head by our kernels, on a CPU, for the few rows of a verification: one call a forward.

What a model computes is not guessed from its name: a layer that has the parts of a Llama's is computed both ways once,
and only if both agree is the fast way taken from then on; and so is the whole model from its tokens to its logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.errors import LongdraftError, MemoryBudgetError
from longdraft.memory import sizes
from longdraft.memory.packed_store import PackedStore
from longdraft.memory.store import KVShape, KVStore
from longdraft.model import hosting, stored
from longdraft.model.few_rows import MOST, weights_of
from longdraft.model.shared_parts import rotary_module
from longdraft.model.stored import parameters
from longdraft.native import DecoderLayer, DecoderStack, Kernels, Rows, Stored, kernels
from longdraft.native.library import HEAD_UNIT
from longdraft.native.nibbled import Nibbled
from longdraft.native.rounded import Rounded, light
from longdraft.native.structures import CHUNK, Norm, Weights

logger = logging.getLogger("longdraft")

# Largest difference between both ways, by the size of what a layer adds.
_TOLERANCE = 1e-4
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FusedLayers:
    """Makes a model compute by our kernels where that gives what the model's own code gives.

    Args:
        model: a copy that is nobody's but ours, with our attention switched on. Float32 on the CPU, or nothing is
            fused.

    Attributes:
        layers: what our kernels compute with, one a layer of the model; empty where nothing is fused.
        stack: all of them with the head, where the model does nothing else with them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[DecoderLayer] = []
        self.stack: DecoderStack | None = None
        own = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        shape = hosting.kv_shape(model)
        if own is None or shape.head_dim % HEAD_UNIT:
            return
        self._kernels, self._model = own, model
        self._rotary = rotary_module(model)
        self._int8 = stored.arithmetic_of(model) == "int8"
        # Both ways are compared in float32: in int8 arithmetic the last bit of a float may decide how a row is rounded.
        stored.use_int8(model, False)
        try:
            self._fuse(shape)
        finally:
            stored.use_int8(model, self._int8)

    def _fuse(self, shape: KVShape) -> None:
        own, model = self._kernels, self._model
        theirs = list(hosting.decoder_layers(model))
        found = [_layer(layer, model, shape.kv_heads, shape.head_dim) for layer in theirs]
        fused = [layer for layer in found if layer is not None]
        if len(fused) < len(theirs) or not _layers_agree(model, theirs, fused, own):
            return
        self.layers = fused
        ends = _ends(model, theirs)
        if ends is not None:
            self.stack = DecoderStack(fused, *ends)
            if not self._agrees():
                self.stack = None
        if self._int8:
            fused = self.layers = [layer.changed(_in_int8) for layer in fused]
            self.stack = None if self.stack is None or ends is None else DecoderStack(fused, ends[0], _in_int8(ends[1]))
        for index, (layer, fast) in enumerate(zip(theirs, fused, strict=True)):
            vars(layer)["forward"] = _Forward(own, fast, index, layer.forward)

    def round(self) -> None:
        """Holds the weights in eight bits from now on, where the whole model is one call: for a draft, which may be
        wrong at will. Prompts are read with the weights as they are."""
        if self.stack is not None:
            self.stack = self.stack.changed(_lighter)

    @cached_property
    def draft_stack(self) -> DecoderStack | None:
        """The whole model for its own drafts, made when first asked for: layers in four bits, the head in eight. Where
        the weights are rounded already, they stay as they are; in int8 arithmetic all do, and there is no second copy.
        None, too, where there is no memory for that."""
        if self.stack is None:
            return None
        if self._int8:
            return self.stack
        try:
            sizes.require(parameters(self._model), torch.device("cpu"), "A model that drafts for itself")
        except MemoryBudgetError as error:
            logger.info("Drafts read the weights that verifications read: %s", error)
            return None
        return self.stack.changed(self._least, _lighter)

    def _least(self, weights: Weights) -> Weights:
        matrix, bias = weights
        return matrix if isinstance(matrix, Rounded | Nibbled) else self._kernels.nibbled(matrix), bias

    def take(self, store: KVStore, block: Block) -> bool:
        """Whether a forward over a block is one of theirs."""
        if not self.layers or block.captured or not in_place(store):
            return False
        # Many rows in float32 are torch's business; in int8 arithmetic our kernels take any number.
        return not block.prompt or self._int8 or block.batch * block.size <= MOST

    def run(self, hosted: hosting.Hosted, logits: Literal["all", "last", "none"]) -> torch.Tensor | None:
        """A forward of the whole model. It needs a :attr:`stack`.

        Returns:
            Logits (B, T, vocabulary), (B, 1, vocabulary) or None. What else is asked for is in ``hosted``.
        """
        assert self.stack is not None
        block, store = hosted.block, hosted.store
        x = self._model.get_input_embeddings()(block.tokens)
        assert self._rotary is not None
        rows = _rows(block, *self._rotary(x, block.positions))
        caches, wanted = (store.keys, store.values), (hosted.query_layers, hosted.hidden_layers)
        out = self._kernels.stack(self.stack, rows, *caches, x, queries=wanted[0], hidden=wanted[1], logits=logits)
        hosted.queries, hosted.hidden = out.queries, out.hidden
        hosted.layers_seen = len(self.layers)
        return out.logits

    @torch.inference_mode()
    def _agrees(self) -> bool:
        """Computes made-up tokens both ways, a small tree behind a short text, from the embedding to the logits."""
        block, stores = _made_up(self._model)
        theirs, ours = (hosting.Hosted(store, block, _reference) for store in stores)
        inputs = {"input_ids": block.tokens, "position_ids": block.positions, "use_cache": False}
        try:
            expected = self._model(**inputs, longdraft_hosted=theirs).logits
            if _close(self.run(ours, "all"), expected) and _same_kv(stores):
                return True
            logger.info("The model does more with its layers than a Llama does: its own code calls them.")
        except (TypeError, RuntimeError, AttributeError, LongdraftError) as error:
            logger.info("Layers are called one by one: %s", error)
        return False


def in_place(store: KVStore) -> bool:
    """Whether a store keeps all layers where the kernels read them: others move layers in as attention asks."""
    return type(store) in (KVStore, PackedStore)


def _in_int8(weights: Weights) -> Weights:
    matrix, bias = weights
    return matrix.computing(int8=True) if isinstance(matrix, Stored) else matrix, bias


def _lighter(weights: Weights) -> Weights:
    matrix, bias = weights
    return matrix if isinstance(matrix, Rounded | Nibbled) else light(matrix), bias


class _Forward:
    """What a layer computes with.

    Args:
        otherwise: its own code.
    """

    def __init__(
        self, kernels: Kernels, layer: DecoderLayer, index: int, otherwise: Callable[..., Any] | None = None
    ) -> None:
        self._kernels, self._stack, self._index, self._otherwise = kernels, DecoderStack([layer]), index, otherwise

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        hosted = named["longdraft_hosted"]
        # A model may be cast or moved while a run goes on; the kernel reads what it is given as float32 in memory.
        ours = hosted.whole and hidden_states.dtype == torch.float32 and hidden_states.device.type == "cpu"
        if not ours and self._otherwise is not None:
            return self._otherwise(hidden_states, *more, **named)
        if hosted.rows is None:  # the same for all layers of a forward
            hosted.rows = _rows(hosted.block, *named["position_embeddings"])
        x, own = hidden_states.clone(memory_format=torch.contiguous_format), slice(self._index, self._index + 1)
        keys, values = hosted.store.keys[own], hosted.store.values[own]
        asked = (0,) if self._index in hosted.query_layers else ()
        out = self._kernels.stack(self._stack, hosted.rows, keys, values, x, queries=asked)
        if asked:
            hosted.queries[self._index] = out.queries[0]
        hosted.layers_seen += 1
        return x


def _rows(block: Block, cos: torch.Tensor, sin: torch.Tensor) -> Rows:
    mask, chunk = block.mask, block.prompt and block.mask is None and not block.offset
    # A large chunk of a prompt needs no mask, which would be as large as its square.
    if mask is None and block.width > 1 and not (chunk and block.size > CHUNK):
        mask = block.block_mask(0, torch.device("cpu")).expand(block.batch, -1, -1)
    cos, sin = (x.expand(block.batch, -1, -1) for x in (cos, sin))
    first = [n + block.offset for n in block.lengths]
    return Rows(cos, sin, block.slots, first, [n + block.width for n in block.lengths], mask, chunk)


def _layer(layer: nn.Module, model: PreTrainedModel, kv_heads: int, head_dim: int) -> DecoderLayer | None:
    """A layer of the Llama kind for our kernels; None for another kind, or where somebody hooks into it."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    modules = [getattr(attention, name, None) or getattr(mlp, name, None) for name in _PRODUCTS]
    products = [None if p is None else weights_of(p) for p in modules]
    norms = [_norm(getattr(layer, name, None)) for name in ("input_layernorm", "post_attention_layernorm")]
    of_heads = [_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    inside = [m for m in layer.modules() if m is not layer]
    # The layer's own hooks are called around whatever computes it.
    if None in products or None in norms or any(map(_touched, inside)) or "forward" in vars(layer):
        return None
    tensors = [t for m in inside for t in m.parameters(recurse=False)]
    if not all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors):
        return None
    heads = int(hosting.decoder_config(model).num_attention_heads)
    scale = float(getattr(attention, "scaling", head_dim**-0.5))
    return DecoderLayer((*norms, *of_heads), products, heads, kv_heads, head_dim, scale)  # type: ignore[arg-type]


def _norm(module: nn.Module | None) -> Norm | None:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return None
    return weight.detach(), eps


def _touched(module: nn.Module) -> bool:
    """Whether somebody watches a module, or put a forward in the place of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _ends(model: PreTrainedModel, layers: list[nn.Module]) -> tuple[Norm, Any] | None:
    """The final norm and the head; None where there are none of the Llama kind, or somebody hooks into the model."""
    decoder = model.get_decoder()
    head, norm = model.get_output_embeddings(), _norm(getattr(decoder, "norm", None))
    own = [model, decoder, model.get_input_embeddings(), head, *decoder.children(), *layers]
    weights = weights_of(head)
    if norm is None or weights is None or any(map(_touched, own)):
        return None
    return norm, weights


def _made_up(model: PreTrainedModel) -> tuple[Block, list[KVStore]]:
    """Three tokens, a small tree behind a text of five, and two stores that hold the same keys and values."""
    text, vocabulary = 5, int(hosting.decoder_config(model).vocab_size)
    tree = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    shape = hosting.kv_shape(model)
    stores = [KVStore(shape, 1, text + 3) for _ in range(2)]
    for store in stores:
        for t in (store.keys, store.values):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)))
    tokens, places = [[i % vocabulary for i in (1, 2, 3)]], [[100 + text, 101 + text, 101 + text]]
    return Block.make([0], [text], 3, tree[None], tokens=tokens, positions=places), stores


@torch.inference_mode()
def _layers_agree(model: PreTrainedModel, layers: list[nn.Module], fused: list[DecoderLayer], kernels: Kernels) -> bool:
    """Computes every layer both ways on made-up rows."""
    rotary = rotary_module(model)
    if rotary is None:
        return False
    block, stores = _made_up(model)
    x = torch.randn(1, 3, int(hosting.decoder_config(model).hidden_size), generator=torch.Generator().manual_seed(0))
    try:
        position = rotary(x, block.positions)
        if position[0].shape[-1] != stores[0].shape.head_dim:
            return False
        plain, ours = (hosting.Hosted(store, block, _reference) for store in stores)
        for index, (layer, own) in enumerate(zip(layers, fused, strict=True)):
            # Not called: hooks that somebody put on a layer are not for made-up rows.
            expected = layer.forward(x, position_embeddings=position, use_cache=False, longdraft_hosted=plain)
            found = _Forward(kernels, own, index)(x, position_embeddings=position, longdraft_hosted=ours)
            if not (_close(found, expected) and _same_kv(stores, index)):
                logger.info("Layer %d is not of the Llama kind: its own code is taken.", index)
                return False
    except (TypeError, RuntimeError, AttributeError, LongdraftError) as error:
        logger.info("Decoder layers are not fused: %s", error)
        return False
    return True


def _same_kv(stores: list[KVStore], layer: int | slice = slice(None)) -> bool:
    theirs, ours = stores
    return all(_close(getattr(ours, kv)[layer], getattr(theirs, kv)[layer]) for kv in ("keys", "values"))


def _close(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())


def _reference(*args: Any) -> torch.Tensor:
    from longdraft.attention.reference import attend

    return attend(*args)
