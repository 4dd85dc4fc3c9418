"""Decoder layers by our kernels: on a CPU all of them and the head in one call, on a GPU each in a few launches.

A layer with the parts of a Llama's (on a CPU also a Gemma's) is computed once by its own code and once by the kernels,
and the kernels are used only if both agree. On a CPU the same check is made of the whole model, from tokens to logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.attention.reference import attend
from longdraft.errors import LongdraftError, MemoryBudgetError
from longdraft.memory import sizes
from longdraft.memory.store import KVStore
from longdraft.model import gpu_layers, hosting, stored
from longdraft.model.delta_parts import delta_layer_of, delta_rows
from longdraft.model.few_rows import MOST
from longdraft.model.fused_check import close, layers_agree, made_up, same_kv
from longdraft.model.gpu_layers import GpuForward, GpuLayer
from longdraft.model.layer_parts import ends_of, layer_of
from longdraft.model.layer_rows import UNTURNED, LayerKinds, rows_of
from longdraft.model.layout import layout_of
from longdraft.model.sharded import is_spread
from longdraft.model.stored import light, parameters
from longdraft.native import DecoderLayer, DecoderStack, Kernels, Stored, kernels
from longdraft.native.delta import DeltaLayer
from longdraft.native.structures import Weights

logger = logging.getLogger("longdraft")


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
        self.layers: list[DecoderLayer | DeltaLayer] | list[GpuLayer] = []
        self.stack: DecoderStack | None = None
        here = not is_spread(model)  # else a layer's weights come when its own code is called
        own = kernels() if here and model.device.type == "cpu" and model.dtype == torch.float32 else None
        self.on_gpu = here and gpu_layers.serves(model)
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
        size = hosting.kv_shape(model).head_dim
        candidates = [layer_of(layer, size) or delta_layer_of(layer) for layer in theirs]
        fused = [layer for layer in candidates if layer is not None]
        forwards = [_Forward(own, layer, kinds, index) for index, layer in enumerate(fused)]
        if len(fused) < len(theirs) or not layers_agree(model, kinds, forwards):
            return
        self.layers = fused
        ends = ends_of(model, theirs)
        if ends is not None:
            self.stack = DecoderStack(
                *(fused, ends.norm, ends.head),
                kinds=kinds.numbers,
                places=kinds.of_stack,
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
        if not layers_agree(model, kinds, [GpuForward(layer, kinds, index) for index, layer in enumerate(fused)]):
            return
        self.layers = fused
        for index, (layer, fast) in enumerate(zip(theirs, fused, strict=True)):
            vars(layer)["forward"] = GpuForward(fast, kinds, index, layer.forward)

    @property
    def _deltas(self) -> list[DeltaLayer]:
        return [layer for layer in self.layers if isinstance(layer, DeltaLayer)]

    def round(self) -> None:
        """Rounds the weights of :attr:`stack` to eight bits, for a draft. Prompts are read with the exact weights."""
        if self.stack is not None:
            self.stack = self.stack.changed(_lighter)

    @cached_property
    def draft_stack(self) -> DecoderStack | None:
        """The whole model for drafting for itself: layers in four bits, the head in eight. None without a stack or
        without memory for this copy, or with recurrent layers. In int8 arithmetic it is :attr:`stack`, and weights in
        fewer bits stay."""
        if self.stack is None or self._deltas:
            return None
        if self._int8:
            return self.stack
        try:
            sizes.require(parameters(self._model), torch.device("cpu"), "A model that drafts for itself")
        except MemoryBudgetError as error:
            logger.info("Drafts read the weights that verifications read: %s", error)
            return None
        return self.stack.changed(partial(_lighter, bits=4), _lighter)

    def take(self, store: KVStore, block: Block) -> bool:
        """True if the kernels compute a forward over a block."""
        if not self.layers or not store.in_place:
            return False
        if self.on_gpu:
            return True
        if block.captured:
            return False
        if self._deltas and block.prompt:  # the model's own rule reads prompts
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
        with delta_rows(hosted, deltas := self._deltas, range(len(deltas))) as recurrent:
            out = self._kernels.stack(
                *(self.stack, *rows, x),
                queries=wanted,
                hidden=hosted.hidden_layers,
                logits=logits,
                more=more,
                recurrent=recurrent,
            )
        hosted.queries, hosted.hidden = {wanted[i]: q for i, q in out.queries.items()}, out.hidden
        hosted.layers_seen = kinds.attending
        return out.logits

    @torch.inference_mode()
    def _agrees(self) -> bool:
        """Compares the whole model with its own code, on made-up tokens."""
        block, stores = made_up(self._model)
        theirs, ours = (hosting.Hosted(store, block, attend, layout_of(self._model)) for store in stores)
        try:
            expected = hosting.run(self._model, theirs).logits
            if close(self.run(ours, "all"), expected) and same_kv(stores):
                return True
            logger.info("The model does more with its layers than run them in order: its own code calls them.")
        except (TypeError, RuntimeError, LongdraftError) as error:
            logger.info("Layers are called one by one: %s", error)
        return False


def _in_int8(weights: Weights) -> Weights:
    matrix, bias = weights
    return matrix.computing(int8=True) if isinstance(matrix, Stored) else matrix, bias


def _lighter(weights: Weights, bits: Literal[4, 8] = 8) -> Weights:
    return light(weights[0], bits), weights[1]


class _Forward:
    """The forward of one layer by the kernels, or by its own code (``original``) if they do not serve.

    Attributes:
        d: size of a head; None for a recurrent layer.
    """

    def __init__(
        self,
        kernels: Kernels,
        layer: DecoderLayer | DeltaLayer,
        kinds: LayerKinds,
        index: int,
        original: Callable[..., Any] | None = None,
    ) -> None:
        self._place, self._number, self._state = kinds.places[index], kinds.numbers[index], kinds.of_stack[index]
        place = 0 if self._place is None else self._place.layer
        self._kernels, self._stack = kernels, DecoderStack([layer], places=[place])
        self._delta = layer if isinstance(layer, DeltaLayer) else None
        self.d = layer.d if isinstance(layer, DecoderLayer) else None
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
        rows, keys, values = hosted.rows[self._number]
        if self._place is None:
            assert self._delta is not None
            with delta_rows(hosted, [self._delta], [self._state]) as recurrent:
                self._kernels.stack(self._stack, rows, keys, values, x, recurrent=recurrent)
            return x
        wanted = self._place.window is None and self._place.layer in hosted.query_layers
        out = self._kernels.stack(self._stack, rows, keys, values, x, queries=(0,) if wanted else ())
        if wanted:
            hosted.queries[self._place.layer] = out.queries[0]
        hosted.layers_seen += 1
        return x
