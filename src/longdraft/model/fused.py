"""Decoder layers by our kernels: on a CPU all of them and the head in one call, on a GPU each in a few launches.

A layer with the parts of a Llama's (on a CPU also a Gemma's) is computed once by its own code and once by the kernels,
and the kernels are used only if both agree. On a CPU the same check is made of the whole model, from tokens to logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.attention.transfer import on_device
from longdraft.errors import LongdraftError, MemoryBudgetError, reason_of
from longdraft.memory import sizes
from longdraft.memory.packed_store import PackedStore
from longdraft.memory.store import KVStore
from longdraft.memory.windows import WindowStates
from longdraft.model import gpu_layers, hosting, stored
from longdraft.model.few_rows import MOST
from longdraft.model.gpu_layers import GpuForward, GpuLayer
from longdraft.model.layer_parts import ends_of, layer_of
from longdraft.model.layer_rows import UNTURNED, LayerKinds, rows_of
from longdraft.model.layout import layout_of
from longdraft.model.stored import parameters
from longdraft.native import DecoderLayer, DecoderStack, Kernels, Stored, kernels
from longdraft.native.nibbled import Nibbled
from longdraft.native.rounded import Rounded, light
from longdraft.native.structures import Weights

logger = logging.getLogger("longdraft")

# Largest difference between both results, relative to the largest number: in float32, and in 16 bits in steps of the
# dtype, where a sum in another order is now and then rounded the other way.
_TOLERANCE, _STEPS = 1e-4, 6


class FusedLayers:
    """Makes a model compute with our kernels if they give what the model's own code gives.

    Args:
        model: a copy of our own, with our attention switched on. Models on a GPU are fused, and float32 models on the
            CPU.

    Attributes:
        layers: the kernels' layers, one for each layer of the model; empty if the model is not fused.
        kinds: of the layers; None if the model is not fused.
        stack: all layers with the head; None if the model does more than run them in order.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[DecoderLayer] | list[GpuLayer] = []
        self.stack: DecoderStack | None = None
        own = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        self.on_gpu = gpu_layers.serves(model)
        self.kinds = LayerKinds.of(model) if own is not None or self.on_gpu else None
        if self.kinds is None:
            return
        if own is None:
            self._fuse_on_gpu(model, self.kinds)
            return
        self._kernels, self._model = own, model
        self._int8 = stored.arithmetic_of(model) == "int8"
        # Results are compared in float32: in int8 arithmetic the last bit of a float can change a row's rounding.
        stored.use_int8(model, False)
        try:
            self._fuse(self.kinds)
        finally:
            stored.use_int8(model, self._int8)

    def _fuse(self, kinds: LayerKinds) -> None:
        own, model = self._kernels, self._model
        theirs = list(hosting.decoder_layers(model))
        candidates = [layer_of(layer, hosting.kv_shape(model).head_dim) for layer in theirs]
        fused = [layer for layer in candidates if layer is not None]
        forwards = [_Forward(own, layer, kinds, index) for index, layer in enumerate(fused)]
        if len(fused) < len(theirs) or not _layers_agree(model, kinds, forwards):
            return
        self.layers = fused
        ends = ends_of(model, theirs)
        if ends is not None:
            places = [place.layer for place in kinds.places]
            self.stack = DecoderStack(
                *(fused, ends.norm, ends.head),
                kinds=kinds.numbers,
                places=places,
                softcap=ends.softcap,
                plus=ends.plus,
            )
            if not self._agrees():
                self.stack = None
        if self._int8:
            fused = self.layers = [layer.changed(_in_int8) for layer in fused]
            self.stack = None if self.stack is None else self.stack.changed(_in_int8)
        for index, (layer, fast) in enumerate(zip(theirs, fused, strict=True)):
            vars(layer)["forward"] = _Forward(own, fast, kinds, index, layer.forward)

    def _fuse_on_gpu(self, model: PreTrainedModel, kinds: LayerKinds) -> None:
        shape = hosting.kv_shape(model)
        if shape.padded or any(kind.window is not None for kind in kinds.of_layers):
            return
        theirs = list(hosting.decoder_layers(model))
        candidates = [gpu_layers.layer_of(layer, shape.head_dim) for layer in theirs]
        fused = [layer for layer in candidates if layer is not None]
        if len(fused) < len(theirs):
            logger.info("Layers are not of the kind that kernels compute on a GPU: their own code is taken.")
            return
        if not _layers_agree(model, kinds, [GpuForward(layer, kinds, index) for index, layer in enumerate(fused)]):
            return
        self.layers = fused
        for index, (layer, fast) in enumerate(zip(theirs, fused, strict=True)):
            vars(layer)["forward"] = GpuForward(fast, kinds, index, layer.forward)

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
        if not self.layers or not in_place(store):
            return False
        if self.on_gpu:
            return True
        if block.captured:
            return False
        # torch computes long prompts in float32; in int8 arithmetic our kernels take any number of rows.
        return not block.prompt or self._int8 or block.batch * block.size <= MOST

    def run(self, hosted: hosting.Hosted, logits: Literal["all", "last", "none"]) -> torch.Tensor | None:
        """A forward of the whole model, which needs a :attr:`stack`. Queries and hidden states go to ``hosted``.

        Returns:
            Logits (B, T, vocabulary), (B, 1, vocabulary) or None.
        """
        assert self.stack is not None and self.kinds is not None
        block, kinds = hosted.block, self.kinds
        x = self._model.get_input_embeddings()(block.tokens)
        with hosting.computing(hosted):
            turns = [kinds.rotate(rope, x, block.positions) for rope in kinds.ropes]
        rows, *more = kinds.rows(hosted.store, block, turns)
        wanted = {kinds.decoder_layer(i): i for i in hosted.query_layers}
        out = self._kernels.stack(
            self.stack, *rows, x, queries=wanted, hidden=hosted.hidden_layers, logits=logits, more=more
        )
        hosted.queries, hosted.hidden = {wanted[i]: q for i, q in out.queries.items()}, out.hidden
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
            logger.info("The model does more with its layers than run them in order: its own code calls them.")
        except (TypeError, RuntimeError, LongdraftError) as error:
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
    """The forward of one layer by the kernels, or by its own code (``original``) if they do not serve.

    Attributes:
        d: size of a head.
    """

    def __init__(
        self,
        kernels: Kernels,
        layer: DecoderLayer,
        kinds: LayerKinds,
        index: int,
        original: Callable[..., Any] | None = None,
    ) -> None:
        self._place, self._number, self._index = kinds.places[index], kinds.numbers[index], index
        self._kernels, self._stack = kernels, DecoderStack([layer], places=[self._place.layer])
        self.d = layer.d
        self._kinds, self._original = kinds, original

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        hosted = named["longdraft_hosted"]
        # A model may be cast or moved during a run; the kernel takes any memory for float32.
        fused = hosted.fused and hidden_states.dtype == torch.float32 and hidden_states.device.type == "cpu"
        if not fused and self._original is not None:
            return self._original(hidden_states, *more, **named)
        if self._number not in hosted.rows:  # the same for all layers of a kind
            window, rope = self._kinds.of_layers[self._number]
            cos_sin = named["position_embeddings"] if rope is not None else UNTURNED
            hosted.rows[self._number] = rows_of(hosted.store, hosted.block, window, cos_sin)
        x = hidden_states.clone(memory_format=torch.contiguous_format)
        wanted = self._place.window is None and self._place.layer in hosted.query_layers
        rows, keys, values = hosted.rows[self._number]
        out = self._kernels.stack(self._stack, rows, keys, values, x, queries=(0,) if wanted else ())
        if wanted:
            hosted.queries[self._place.layer] = out.queries[0]
        hosted.layers_seen += 1
        return x


def _made_up(model: PreTrainedModel, far: bool = False) -> tuple[Block, list[KVStore]]:
    """A tree of three tokens behind a text of five, and two stores with the same keys and values.

    Args:
        far: the positions are the last ones that the model takes.
    """
    text, vocabulary = 5, int(hosting.decoder_config(model).vocab_size)
    tree = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    stores = [KVStore(hosting.kv_shape(model), 1, text + 3, model.device) for _ in range(2)]
    for store in stores:
        store.keep_states(*hosting.new_states(model, 1, text + 3))
        for t in _kept(store):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1)))
    first = max(100, hosting.context_length(model) - text - 2) if far else 100
    tokens, places = [[i % vocabulary for i in (1, 2, 3)]], [[first + text, first + text + 1, first + text + 1]]
    return Block.make([0], [text], 3, tree[None], model.device, tokens=tokens, positions=places), stores


@torch.inference_mode()
def _layers_agree(model: PreTrainedModel, kinds: LayerKinds, forwards: Sequence[_Forward | GpuForward]) -> bool:
    """Compares every layer with its own code, on made-up rows, near and far."""
    theirs, size = hosting.decoder_layers(model), int(hosting.decoder_config(model).hidden_size)
    x = on_device(torch.randn(1, 3, size, generator=torch.Generator().manual_seed(0)).to(model.dtype), model.device)
    on_gpu = model.device.type != "cpu"
    try:
        for far in (False, True):
            block, stores = _made_up(model, far)
            plain, ours = (hosting.Hosted(store, block, _reference, layout_of(model)) for store in stores)
            for index, (layer, own) in enumerate(zip(theirs, forwards, strict=True)):
                position = kinds.rotate(kinds.ropes[kinds.numbers[index]] or kinds.usual, x, block.positions)
                if position[0].shape[-1] > own.d:
                    return False
                # layer.forward, so that the user's hooks do not see made-up rows.
                expected = layer.forward(x, position_embeddings=position, use_cache=False, longdraft_hosted=plain)
                result = own(x, position_embeddings=position, longdraft_hosted=ours)
                if not (_close(result, expected) and _same_kv(stores)):
                    logger.info("Layer %d is not of a kind that our kernels compute: its own code is taken.", index)
                    return False
    except Exception as error:  # a model, a compiler or a driver can raise any type
        # A layer may read an argument that is left out here. Any other attribute that is missing is a fault.
        if isinstance(error, AttributeError) and error.obj is not None:
            raise
        # On a GPU nothing but what is missing on the machine fails here: layers of other kinds are known before.
        level = logging.WARNING if on_gpu else logging.INFO
        logger.log(level, "Decoder layers run by their own code, not by fused kernels: %s", reason_of(error))
        return False
    return True


def _kept(store: KVStore) -> list[torch.Tensor]:
    """All keys and values of a store, those of windows too."""
    kept = [store, *(states for states in store.states if isinstance(states, WindowStates))]
    return [getattr(each, name) for each in kept for name in ("keys", "values")]


def _same_kv(stores: list[KVStore]) -> bool:
    return all(_close(ours, theirs) for theirs, ours in zip(*map(_kept, stores), strict=True))


def _close(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    apart, size, step = (a.float() - b.float()).abs(), b.float().abs(), torch.finfo(b.dtype).eps
    if b.element_size() == 2:
        return bool((apart.max() <= _STEPS * step * size.max()) & (apart.mean() <= step * size.mean()))
    return bool(apart.max() <= _TOLERANCE * size.max())


def _reference(*args: Any) -> torch.Tensor:
    from longdraft.attention.reference import attend

    return attend(*args)
