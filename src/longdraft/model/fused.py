"""Decoder layers and the head by our kernels, on a CPU, for the few rows of a verification: one call a forward.

A layer with the parts of a Llama's is computed once by its own code and once by the kernels, and the kernels are used
only if both agree. The same check is made of the whole model, from tokens to logits.
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
from longdraft.model.layout import layout_of
from longdraft.model.shared_parts import rotary_module
from longdraft.model.stored import parameters
from longdraft.native import DecoderLayer, DecoderStack, Kernels, Rows, Stored, kernels
from longdraft.native.library import HEAD_UNIT
from longdraft.native.nibbled import Nibbled
from longdraft.native.rounded import Rounded, light
from longdraft.native.structures import CHUNK, Norm, Weights

logger = logging.getLogger("longdraft")

# Largest difference between both results, relative to the largest number.
_TOLERANCE = 1e-4
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class FusedLayers:
    """Makes a model compute with our kernels if they give what the model's own code gives.

    Args:
        model: a copy of our own, with our attention switched on. Only float32 models on the CPU are fused.

    Attributes:
        layers: the kernels' layers, one for each layer of the model; empty if the model is not fused.
        stack: all layers with the head; None if the model does more than run them in order.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[DecoderLayer] = []
        self.stack: DecoderStack | None = None
        own = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        layout = layout_of(model)
        shape = layout.shape
        if own is None or shape.head_dim % HEAD_UNIT or layout.windows:
            return
        self._kernels, self._model = own, model
        self._rotary = rotary_module(model)
        self._int8 = stored.arithmetic_of(model) == "int8"
        # Results are compared in float32: in int8 arithmetic the last bit of a float can change a row's rounding.
        stored.use_int8(model, False)
        try:
            self._fuse(shape)
        finally:
            stored.use_int8(model, self._int8)

    def _fuse(self, shape: KVShape) -> None:
        own, model = self._kernels, self._model
        theirs = list(hosting.decoder_layers(model))
        candidates = [_layer(layer, model, shape.kv_heads, shape.head_dim) for layer in theirs]
        fused = [layer for layer in candidates if layer is not None]
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
        """Rounds the weights of :attr:`stack` to eight bits, for a draft. Prompts are read with the exact weights."""
        if self.stack is not None:
            self.stack = self.stack.changed(_lighter)

    @cached_property
    def draft_stack(self) -> DecoderStack | None:
        """The whole model for drafting for itself: layers in four bits, the head in eight. None without a stack or
        without memory for this copy. In int8 arithmetic it is :attr:`stack`, and weights in fewer bits stay."""
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
        """True if the kernels compute a forward over a block."""
        if not self.layers or block.captured or not in_place(store):
            return False
        # torch computes long prompts in float32; in int8 arithmetic our kernels take any number of rows.
        return not block.prompt or self._int8 or block.batch * block.size <= MOST

    def run(self, hosted: hosting.Hosted, logits: Literal["all", "last", "none"]) -> torch.Tensor | None:
        """A forward of the whole model, which needs a :attr:`stack`. Queries and hidden states go to ``hosted``.

        Returns:
            Logits (B, T, vocabulary), (B, 1, vocabulary) or None.
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
        """Compares the whole model with its own code, on made-up tokens."""
        block, stores = _made_up(self._model)
        theirs, ours = (hosting.Hosted(store, block, _reference, layout_of(self._model)) for store in stores)
        try:
            expected = hosting.run(self._model, theirs).logits
            if _close(self.run(ours, "all"), expected) and _same_kv(stores):
                return True
            logger.info("The model does more with its layers than a Llama does: its own code calls them.")
        except (TypeError, RuntimeError, AttributeError, LongdraftError) as error:
            logger.info("Layers are called one by one: %s", error)
        return False


def in_place(store: KVStore) -> bool:
    """True if a store keeps all layers in memory, where the kernels read them."""
    return type(store) in (KVStore, PackedStore)


def _in_int8(weights: Weights) -> Weights:
    matrix, bias = weights
    return matrix.computing(int8=True) if isinstance(matrix, Stored) else matrix, bias


def _lighter(weights: Weights) -> Weights:
    matrix, bias = weights
    return matrix if isinstance(matrix, Rounded | Nibbled) else light(matrix), bias


class _Forward:
    """The forward of one layer by the kernels, or by its own code (``original``) if they do not serve."""

    def __init__(
        self, kernels: Kernels, layer: DecoderLayer, index: int, original: Callable[..., Any] | None = None
    ) -> None:
        self._kernels, self._stack, self._index, self._original = kernels, DecoderStack([layer]), index, original

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        hosted = named["longdraft_hosted"]
        # A model may be cast or moved during a run; the kernel takes any memory for float32.
        fused = hosted.fused and hidden_states.dtype == torch.float32 and hidden_states.device.type == "cpu"
        if not fused and self._original is not None:
            return self._original(hidden_states, *more, **named)
        if hosted.rows is None:  # the same for all layers of a forward
            hosted.rows = _rows(hosted.block, *named["position_embeddings"])
        x, layer = hidden_states.clone(memory_format=torch.contiguous_format), slice(self._index, self._index + 1)
        keys, values = hosted.store.keys[layer], hosted.store.values[layer]
        queries = (0,) if self._index in hosted.query_layers else ()
        out = self._kernels.stack(self._stack, hosted.rows, keys, values, x, queries=queries)
        if queries:
            hosted.queries[self._index] = out.queries[0]
        hosted.layers_seen += 1
        return x


def _rows(block: Block, cos: torch.Tensor, sin: torch.Tensor) -> Rows:
    mask, chunk = block.mask, block.prompt and block.mask is None and not block.offset
    # A long piece of a prompt needs no mask, which would take the square of its length.
    if mask is None and block.width > 1 and not (chunk and block.size > CHUNK):
        mask = block.block_mask(0, torch.device("cpu")).expand(block.batch, -1, -1)
    cos, sin = (x.expand(block.batch, -1, -1) for x in (cos, sin))
    first = [n + block.offset for n in block.lengths]
    return Rows(cos, sin, block.slots, first, [n + block.width for n in block.lengths], mask, chunk)


def _layer(layer: nn.Module, model: PreTrainedModel, kv_heads: int, head_dim: int) -> DecoderLayer | None:
    """A layer of the Llama kind for our kernels; None for another kind, or if the user has hooks inside it."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    modules = [getattr(attention, name, None) or getattr(mlp, name, None) for name in _PRODUCTS]
    products = [None if p is None else weights_of(p) for p in modules]
    norms = [_norm(getattr(layer, name, None)) for name in ("input_layernorm", "post_attention_layernorm")]
    of_heads = [_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    inside = [m for m in layer.modules() if m is not layer]
    # Hooks of the layer itself do no harm: they run around any forward.
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
    """True if a module has hooks, or a forward that replaces its class's."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _ends(model: PreTrainedModel, layers: list[nn.Module]) -> tuple[Norm, Any] | None:
    """The final norm and the head; None if they are of another kind, or if the user has hooks in the model."""
    decoder = hosting.decoder_of(model)
    head, norm = model.get_output_embeddings(), _norm(getattr(decoder, "norm", None))
    modules = [model, decoder, model.get_input_embeddings(), head, *decoder.children(), *layers]
    weights = weights_of(head)
    if norm is None or weights is None or any(map(_touched, modules)):
        return None
    return norm, weights


def _made_up(model: PreTrainedModel) -> tuple[Block, list[KVStore]]:
    """A tree of three tokens behind a text of five, and two stores with the same keys and values."""
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
    """Compares every layer with its own code, on made-up rows."""
    rotary = rotary_module(model)
    if rotary is None:
        return False
    block, stores = _made_up(model)
    x = torch.randn(1, 3, int(hosting.decoder_config(model).hidden_size), generator=torch.Generator().manual_seed(0))
    try:
        position = rotary(x, block.positions)
        if position[0].shape[-1] != stores[0].shape.head_dim:
            return False
        plain, ours = (hosting.Hosted(store, block, _reference, layout_of(model)) for store in stores)
        for index, (layer, own) in enumerate(zip(layers, fused, strict=True)):
            # layer.forward, so that the user's hooks do not see made-up rows.
            expected = layer.forward(x, position_embeddings=position, use_cache=False, longdraft_hosted=plain)
            result = _Forward(kernels, own, index)(x, position_embeddings=position, longdraft_hosted=ours)
            if not (_close(result, expected) and _same_kv(stores, index)):
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
