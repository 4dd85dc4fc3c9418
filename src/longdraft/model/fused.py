"""Decoder layers by our kernels: on a CPU all of them and the head in one call, on a GPU each in a few launches.

They serve layers with the parts of a Llama's (on a CPU also a Gemma's), and are used only if they agree with the
model's own code (:func:`longdraft.model.trial.agree`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.errors import MemoryBudgetError, reason_of
from longdraft.memory import sizes
from longdraft.memory.store import KVStore
from longdraft.model import hosting, stored_model
from longdraft.model.delta_parts import delta_layer_of, delta_rows
from longdraft.model.few_rows import MOST
from longdraft.model.gpu import layers as gpu_layers
from longdraft.model.gpu.layers import GpuForward, GpuLayer
from longdraft.model.layer_parts import CosSin, LayerKinds, ends_of, layer_of
from longdraft.model.layout import layout_of
from longdraft.model.model_copy import copy_without_hooks
from longdraft.model.stored import light, light_bytes
from longdraft.model.trial import Compute, Pair, agree
from longdraft.native import DecoderLayer, DecoderStack, Stored, kernels
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
        kinds: of the layers; None if the kernels do not know them.
        stack: all layers with the head; None on a GPU, or if the model is not fused.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[DecoderLayer | DeltaLayer] | list[GpuLayer] = []
        self.stack: DecoderStack | None = None
        self._model, self._rounded = model, False
        own = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        self.on_gpu = gpu_layers.serves(model)
        self.kinds = LayerKinds.of(model) if own is not None or self.on_gpu else None
        if self.kinds is None:
            return
        if own is None:
            self._fuse_on_gpu(self.kinds)
            return
        self._kernels = own
        self._int8 = stored_model.arithmetic_of(model) == "int8"
        # Results are compared in float32: in int8 arithmetic the last bit of a float can change a row's rounding.
        stored_model.use_int8(model, False)
        try:
            self._fuse(self.kinds)
        finally:
            stored_model.use_int8(model, self._int8)

    def _fuse(self, kinds: LayerKinds) -> None:
        theirs, size = list(hosting.decoder_layers(self._model)), layout_of(self._model).shape.head_dim
        found = [layer_of(layer, size) or delta_layer_of(layer) for layer in theirs]
        layers, ends = [layer for layer in found if layer is not None], ends_of(self._model, theirs)
        if len(layers) < len(theirs) or ends is None:
            return
        self.layers = layers
        self.stack = DecoderStack(layers, **ends, kinds=kinds.numbers, places=kinds.of_stack)
        if not self._agrees(self._whole):
            self.layers, self.stack = [], None
        elif self._int8:
            self.layers = [layer.changed(_in_int8) for layer in layers]
            self.stack = self.stack.changed(_in_int8)

    def _fuse_on_gpu(self, kinds: LayerKinds) -> None:
        model, shape = self._model, layout_of(self._model).shape
        if shape.padded or any(kind.window is not None for kind in kinds.of_layers):
            return
        found = [gpu_layers.layer_of(layer, shape.head_dim) for layer in hosting.decoder_layers(model)]
        layers = [layer for layer in found if layer is not None]
        if len(layers) < len(found):
            logger.info("Layers are not of the kind that kernels compute on a GPU: their own code is taken.")
            return

        def forwards(each: PreTrainedModel) -> Iterator[tuple[nn.Module, GpuForward]]:
            for index, (layer, fast) in enumerate(zip(hosting.decoder_layers(each), layers, strict=True)):
                yield layer, GpuForward(fast, kinds, index, layer.forward)

        def by_layer(theirs: hosting.Hosted, ours: hosting.Hosted) -> Iterator[Pair]:
            """Each layer on the input that the model's own layers give: roundings in 16 bits grow from layer to layer.

            What is around the layers is always the model's own.
            """
            tried, pairs, own = copy_without_hooks(model), list[Pair](), replace(ours, fused=True)

            def both(forward: GpuForward, *given: Any, **named: Any) -> Any:
                expected = forward.original(*given, **named)
                pairs.append((forward(*given, **named | {"longdraft_attend": own}), expected))
                return expected

            for layer, forward in forwards(tried):
                vars(layer)["forward"] = partial(both, forward)
            hosting.run(tried, theirs)
            yield from pairs

        if self._agrees(by_layer):
            for layer, forward in forwards(model):
                vars(layer)["forward"] = forward
            self.layers = layers

    @property
    def _deltas(self) -> list[DeltaLayer]:
        return [layer for layer in self.layers if isinstance(layer, DeltaLayer)]

    def round(self) -> None:
        """Rounds the weights of :attr:`stack` to eight bits, for a draft. Prompts are read with the exact weights."""
        if self.stack is not None:
            self.stack, self._rounded = self.stack.changed(_lighter), True

    @cached_property
    def draft_stack(self) -> DecoderStack | None:
        """The whole model for drafting for itself: layers in four bits, the head in eight. None without a stack or
        without memory for this copy, or with recurrent layers. In int8 arithmetic, and where :meth:`round` was called,
        it is :attr:`stack`; weights in fewer bits stay."""
        if self.stack is None or self._deltas:
            return None
        if self._int8 or self._rounded:
            return self.stack
        needed = [light_bytes(matrix, 4) for layer in self.stack.layers for matrix, _ in layer.products]
        needed += [] if self.stack.head is None else [light_bytes(self.stack.head[0])]
        try:
            sizes.require(sum(needed), torch.device("cpu"), "A model that drafts for itself")
        except MemoryBudgetError as error:
            logger.info("Drafts read the weights that verifications read: %s", error)
            return None
        return self.stack.changed(partial(_lighter, bits=4), _lighter)

    def take(self, store: KVStore, block: Block) -> bool:
        """True if the kernels compute a forward over a block."""
        if not self.layers or not store.in_place:
            return False
        if self.on_gpu:
            return store.dtype == store.shape.dtype
        if block.captured:
            return False
        if self._deltas and block.prompt:  # the model's own rule reads prompts
            return False
        # torch computes long prompts in float32; in int8 arithmetic our kernels take any number of rows.
        return not block.prompt or self._int8 or block.batch * block.size <= MOST

    def run(self, hosted: hosting.Hosted, logits: int | Literal["all", "last", "none"]) -> torch.Tensor | None:
        """A forward of the whole model, which needs a :attr:`stack`. Queries and hidden states go to ``hosted``.

        Returns:
            Logits (B, T, vocabulary), (B, 1, vocabulary) or None.
        """
        assert self.stack is not None and self.kinds is not None
        block, kinds = hosted.block, self.kinds
        x = self._model.get_input_embeddings()(block.tokens)
        rows, *more = kinds.rows(hosted.store, block, self._turns(hosted, x))
        whole = {i: p.layer for i, p in enumerate(kinds.places) if p is not None and p.window is None}
        wanted = {i: layer for i, layer in whole.items() if layer in hosted.query_layers}
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
        return out.logits

    def _turns(self, hosted: hosting.Hosted, x: torch.Tensor) -> list[CosSin]:
        """cos and sin of each kind of layer."""
        assert self.kinds is not None
        with hosting.computing(hosted):
            return [self.kinds.rotate(kind.rope, x, hosted.block.positions) for kind in self.kinds.of_layers]

    def _whole(self, theirs: hosting.Hosted, ours: hosting.Hosted) -> Iterator[Pair]:
        """Logits of the whole model, and the last layer's output: the norm behind it would hide a factor."""
        assert self.kinds is not None
        last = len(hosting.decoder_layers(self._model)) - 1
        theirs, ours = (replace(each, hidden_layers=frozenset([last])) for each in (theirs, ours))
        tapped = hosting.tap(self._model, last)
        try:
            expected = hosting.run(self._model, theirs).logits
        finally:
            tapped.remove()
        turns = self._turns(ours, self._model.get_input_embeddings()(ours.block.tokens))
        widths = zip(self.kinds.numbers, self.layers, strict=True)
        # No layer's heads may be narrower than what is turned of them.
        if all(turns[n][0].shape[-1] <= x.d for n, x in widths if isinstance(x, DecoderLayer)):
            yield self.run(ours, "all"), expected
        yield ours.hidden.get(last), theirs.hidden.get(last)

    def _agrees(self, compute: Compute) -> bool:
        """True if the kernels give what the model's own code gives."""
        try:
            if agree(self._model, compute):
                return True
            logger.info("The model does more with its layers than our kernels: its own code is taken.")
        except Exception as error:  # a model, a compiler or a driver can raise any type
            # On a GPU nothing but what is missing on the machine fails here.
            level = logging.WARNING if self.on_gpu else logging.INFO
            logger.log(level, "Layers run by their own code, not by fused kernels: %s", reason_of(error))
        return False


def _in_int8(weights: Weights) -> Weights:
    matrix, bias = weights
    return matrix.computing(int8=True) if isinstance(matrix, Stored) else matrix, bias


def _lighter(weights: Weights, bits: Literal[4, 8] = 8) -> Weights:
    return light(weights[0], bits), weights[1]
