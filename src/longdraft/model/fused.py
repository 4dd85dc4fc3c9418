"""Decoder layers by our kernels: on a CPU all of them and the head in one call, on a GPU each in a few launches.

They serve layers with the parts of a Llama's (on a CPU also a Gemma's), and are used only if they agree with the
model's own code (:func:`longdraft.model.validation.agree`).
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

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import MemoryBudgetError, reason_of
from longdraft.memory import memory_info
from longdraft.memory.store import KVStore
from longdraft.model import hosting, stored_model
from longdraft.model.delta_parts import delta_layer_inputs, kernel_delta_layer
from longdraft.model.gpu import layers as gpu_layers
from longdraft.model.gpu.layers import FusedLayer, FusedLayerForward
from longdraft.model.layer_parts import CosSin, LayerKinds, final_norm_and_head, kernel_layer
from longdraft.model.layout import layout_of
from longdraft.model.model_copy import copy_without_hooks
from longdraft.model.skinny_gemm import MAX_SKINNY_ROWS
from longdraft.model.stored import quantize_for_draft, quantized_draft_bytes
from longdraft.model.validation import ComputePairs, OutputPair, outputs_agree
from longdraft.native import DecoderLayer, DecoderStack, QuantizedMatrix, kernels
from longdraft.native.delta import GatedDeltaNetLayer
from longdraft.native.structures import LinearWeights

logger = logging.getLogger("longdraft")


class FusedLayers:
    """Makes a model compute with our kernels if they give what the model's own code gives.

    Args:
        model: a copy of our own, with our attention switched on. Models on a GPU are fused, and float32 models on the
            CPU.

    Attributes:
        layers: the kernels' layers, one for each layer of the model; empty if the model is not fused.
        layer_kinds: of the layers; None if the kernels do not know them.
        stack: all layers with the head; None on a GPU, or if the model is not fused.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[DecoderLayer | GatedDeltaNetLayer] | list[FusedLayer] = []
        self.stack: DecoderStack | None = None
        self._model, self._rounded = model, False
        own = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        self.on_gpu = gpu_layers.supports(model)
        self.layer_kinds = LayerKinds.of(model) if own is not None or self.on_gpu else None
        if self.layer_kinds is None:
            return
        if own is None:
            self._fuse_on_gpu(self.layer_kinds)
            return
        self._kernels = own
        self._int8 = stored_model.arithmetic_of(model) == "int8"
        # Results are compared in float32: in int8 arithmetic the last bit of a float can change a row's rounding.
        stored_model.set_int8(model, False)
        try:
            self._fuse(self.layer_kinds)
        finally:
            stored_model.set_int8(model, self._int8)

    def _fuse(self, kinds: LayerKinds) -> None:
        theirs, size = list(hosting.decoder_layers(self._model)), layout_of(self._model).shape.head_dim
        found = [kernel_layer(layer, size) or kernel_delta_layer(layer) for layer in theirs]
        layers, ends = [layer for layer in found if layer is not None], final_norm_and_head(self._model, theirs)
        if len(layers) < len(theirs) or ends is None:
            return
        self.layers = layers
        self.stack = DecoderStack(layers, **ends, kv_group_ids=kinds.kind_indices, index_in_group=kinds.cache_indices)
        if not self._agrees(self._whole):
            self.layers, self.stack = [], None
        elif self._int8:
            self.layers = [layer.map_weights(_in_int8) for layer in layers]
            self.stack = self.stack.map_weights(_in_int8)

    def _fuse_on_gpu(self, kinds: LayerKinds) -> None:
        model, shape = self._model, layout_of(self._model).shape
        if shape.padded or any(kind.window is not None for kind in kinds.kinds):
            return
        found = [gpu_layers.fused_layer_of(layer, shape.head_dim) for layer in hosting.decoder_layers(model)]
        layers = [layer for layer in found if layer is not None]
        if len(layers) < len(found):
            logger.info("Layers are not of the kind that kernels compute on a GPU: their own code is taken.")
            return

        def forwards(each: PreTrainedModel) -> Iterator[tuple[nn.Module, FusedLayerForward]]:
            for index, (layer, fast) in enumerate(zip(hosting.decoder_layers(each), layers, strict=True)):
                yield layer, FusedLayerForward(fast, kinds, index, layer.forward)

        def by_layer(theirs: hosting.ForwardContext, ours: hosting.ForwardContext) -> Iterator[OutputPair]:
            """Each layer on the input that the model's own layers give: roundings in 16 bits grow from layer to layer.

            What is around the layers is always the model's own.
            """
            tried, pairs, own = copy_without_hooks(model), list[OutputPair](), replace(ours, fused=True)

            def both(forward: FusedLayerForward, *given: Any, **named: Any) -> Any:
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
    def _deltas(self) -> list[GatedDeltaNetLayer]:
        return [layer for layer in self.layers if isinstance(layer, GatedDeltaNetLayer)]

    def quantize_for_draft(self) -> None:
        """Rounds the weights of :attr:`stack` to eight bits, for a draft. Prompts are read with the exact weights."""
        if self.stack is not None:
            self.stack, self._rounded = self.stack.map_weights(_lighter), True

    @cached_property
    def draft_stack(self) -> DecoderStack | None:
        """The whole model for drafting for itself: layers in four bits, the head in eight. None without a stack or
        without memory for this copy, or with recurrent layers. In int8 arithmetic, and where :meth:`quantize_for_draft` was called,
        it is :attr:`stack`; weights in fewer bits stay."""
        if self.stack is None or self._deltas:
            return None
        if self._int8 or self._rounded:
            return self.stack
        needed = [quantized_draft_bytes(matrix, 4) for layer in self.stack.layers for matrix, _ in layer.projections]
        needed += [] if self.stack.head is None else [quantized_draft_bytes(self.stack.head[0])]
        try:
            memory_info.require_bytes(sum(needed), torch.device("cpu"), "A model that drafts for itself")
        except MemoryBudgetError as error:
            logger.info("Drafts read the weights that verifications read: %s", error)
            return None
        return self.stack.map_weights(partial(_lighter, bits=4), _lighter)

    def can_run(self, store: KVStore, block: ForwardBatch) -> bool:
        """True if the kernels compute a forward over a block."""
        if not self.layers or not store.is_resident:
            return False
        if self.on_gpu:
            return store.dtype == store.shape.dtype
        if block.is_captured:
            return False
        if self._deltas and block.is_prefill:  # the model's own rule reads prompts
            return False
        # torch computes long prompts in float32; in int8 arithmetic our kernels take any number of rows.
        return not block.is_prefill or self._int8 or block.batch_size * block.query_len <= MAX_SKINNY_ROWS

    def run(self, hosted: hosting.ForwardContext, logits: int | Literal["all", "last", "none"]) -> torch.Tensor | None:
        """A forward of the whole model, which needs a :attr:`stack`. Queries and hidden states go to ``hosted``.

        Returns:
            Logits (B, T, vocabulary), (B, 1, vocabulary) or None.
        """
        assert self.stack is not None and self.layer_kinds is not None
        block, kinds = hosted.batch, self.layer_kinds
        x = self._model.get_input_embeddings()(block.token_ids)
        rows, *more = kinds.kernel_inputs(hosted.store, block, self._turns(hosted, x))
        whole = {i: p.layer for i, p in enumerate(kinds.kv_locations) if p is not None and p.window is None}
        wanted = {i: layer for i, layer in whole.items() if layer in hosted.query_layers}
        with delta_layer_inputs(hosted, deltas := self._deltas, range(len(deltas))) as recurrent:
            out = self._kernels.run_stack(
                *(self.stack, *rows, x),
                query_layers=wanted,
                hidden_layers=hosted.hidden_layers,
                logits=logits,
                more_kv_groups=more,
                recurrent=recurrent,
            )
        hosted.queries, hosted.hidden = {wanted[i]: q for i, q in out.queries.items()}, out.hidden
        return out.logits

    def _turns(self, hosted: hosting.ForwardContext, x: torch.Tensor) -> list[CosSin]:
        """cos and sin of each kind of layer."""
        assert self.layer_kinds is not None
        with hosting.forward_scope(hosted):
            return [self.layer_kinds.rotate(kind.rope, x, hosted.batch.positions) for kind in self.layer_kinds.kinds]

    def _whole(self, theirs: hosting.ForwardContext, ours: hosting.ForwardContext) -> Iterator[OutputPair]:
        """Logits of the whole model, and the last layer's output: the norm behind it would hide a factor."""
        assert self.layer_kinds is not None
        last = len(hosting.decoder_layers(self._model)) - 1
        theirs, ours = (replace(each, hidden_layers=frozenset([last])) for each in (theirs, ours))
        tapped = hosting.add_hidden_hook(self._model, last)
        try:
            expected = hosting.run(self._model, theirs).logits
        finally:
            tapped.remove()
        turns = self._turns(ours, self._model.get_input_embeddings()(ours.batch.token_ids))
        widths = zip(self.layer_kinds.kind_indices, self.layers, strict=True)
        # No layer's heads may be narrower than what is turned of them.
        if all(turns[n][0].shape[-1] <= x.head_dim for n, x in widths if isinstance(x, DecoderLayer)):
            yield self.run(ours, "all"), expected
        yield ours.hidden.get(last), theirs.hidden.get(last)

    def _agrees(self, compute: ComputePairs) -> bool:
        """True if the kernels give what the model's own code gives."""
        try:
            if outputs_agree(self._model, compute):
                return True
            logger.info("The model does more with its layers than our kernels: its own code is taken.")
        except Exception as error:  # a model, a compiler or a driver can raise any type
            # On a GPU nothing but what is missing on the machine fails here.
            level = logging.WARNING if self.on_gpu else logging.INFO
            logger.log(level, "Layers run by their own code, not by fused kernels: %s", reason_of(error))
        return False


def _in_int8(weights: LinearWeights) -> LinearWeights:
    matrix, bias = weights
    return matrix.with_int8(int8=True) if isinstance(matrix, QuantizedMatrix) else matrix, bias


def _lighter(weights: LinearWeights, bits: Literal[4, 8] = 8) -> LinearWeights:
    return quantize_for_draft(weights[0], bits), weights[1]
