"""Fuses decoder layers: on a CPU all layers and the head into one kernel call, on a GPU each layer into a few launches.

The kernels compute layers like Llama's, and on a CPU also layers like Gemma's and gated DeltaNet. They are used only if
their results equal those of the model's own code (:func:`longdraft.model.probes.tokens.outputs_agree`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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
from longdraft.model import hosting
from longdraft.model.gpu import layers as gpu_layers
from longdraft.model.gpu.layers import FusedLayer, FusedLayerForward
from longdraft.model.layers.layer_parts import LayerKinds, final_norm_and_head, is_cpu_float32, kernel_layer
from longdraft.model.layers.skinny_gemm import MAX_SKINNY_ROWS
from longdraft.model.layout import KVLayout, config_layout
from longdraft.model.linear_attention.delta_net import delta_layer_inputs, kernel_delta_layer
from longdraft.model.model_copy import copy_without_hooks
from longdraft.model.model_parts import decoder_layers
from longdraft.model.probes.tokens import ComputePairs, OutputPair, outputs_agree
from longdraft.model.quant import stored_model
from longdraft.model.quant.stored import quantize_for_draft, quantized_draft_bytes
from longdraft.model.rope import CosSin
from longdraft.native import DecoderLayer, DecoderStack, QuantizedMatrix, kernels
from longdraft.native.delta import GatedDeltaNetLayer
from longdraft.native.structures import LinearWeights

logger = logging.getLogger("longdraft")

# A model in int8 arithmetic drafts on a copy in four bits if its layers have at least this many bits a weight, as in
# Q8_0. Q6_K and Q5_K (6.6 and 5.5) are read nearly as fast as four bits.
MIN_BITS_TO_QUANTIZE = 7.0


class FusedLayers:
    """Fuses the layers of a model on a GPU, or in float32 on a CPU, if fused layers compute the same results.

    Args:
        model: our own copy, with our attention.
        layout: where its KV lies; None if all layers have full attention.

    Attributes:
        layers: the layers for the kernels, one for each layer of the model; empty if the model is not fused.
        layer_kinds: the window and RoPE of each layer; None if the kernels do not support them.
        on_gpu: True if the model is on a GPU that the kernels support.
        stack: all layers with the head, for one kernel call; None on a GPU, or if the model is not fused."""

    def __init__(self, model: PreTrainedModel, layout: KVLayout | None) -> None:
        self.layers: list[DecoderLayer | GatedDeltaNetLayer] | list[FusedLayer] = []
        self.stack: DecoderStack | None = None
        self._model, self._is_quantized_for_draft = model, False
        cpu_kernels = kernels() if model.device.type == "cpu" and model.dtype == torch.float32 else None
        self.on_gpu = gpu_layers.supports(model)
        self.layer_kinds: LayerKinds | None = None
        if cpu_kernels is None and not self.on_gpu:
            return
        self._layout = layout or config_layout(model)
        self.layer_kinds = LayerKinds.from_model(model, self._layout)
        if self.layer_kinds is None:
            return
        if cpu_kernels is None:
            self._fuse_on_gpu(self.layer_kinds)
            return
        self._kernels = cpu_kernels
        self._int8 = stored_model.arithmetic_of(model) == "int8"
        # Results are compared in float32: in int8 arithmetic the last bit of one number can change a whole row.
        stored_model.set_int8(model, False)
        try:
            self._fuse_on_cpu(self.layer_kinds)
        finally:
            stored_model.set_int8(model, self._int8)

    def _fuse_on_cpu(self, kinds: LayerKinds) -> None:
        modules, head_dim = list(decoder_layers(self._model)), self._layout.shape.head_dim
        if not all(map(is_cpu_float32, modules)):
            return
        converted = [kernel_layer(layer, head_dim) or kernel_delta_layer(layer) for layer in modules]
        layers = [layer for layer in converted if layer is not None]
        norm_and_head = final_norm_and_head(self._model, modules)
        if len(layers) < len(modules) or norm_and_head is None:
            return
        self.layers = layers
        kind_indices, cache_indices = kinds.kind_indices, kinds.cache_indices  # the kernels call a kind a KV group
        self.stack = DecoderStack(layers, **norm_and_head, kv_group_ids=kind_indices, index_in_group=cache_indices)
        if not self._agrees_with_model(self._compare_stack):
            self.layers, self.stack = [], None
        elif self._int8:
            self.layers = [layer.map_weights(_in_int8) for layer in layers]
            self.stack = self.stack.map_weights(_in_int8)

    def _fuse_on_gpu(self, kinds: LayerKinds) -> None:
        model, shape = self._model, self._layout.shape
        if shape.padded or any(kind.window_index is not None for kind in kinds.kinds):
            return
        converted = [gpu_layers.fused_layer_of(layer, shape.head_dim) for layer in decoder_layers(model)]
        layers = [layer for layer in converted if layer is not None]
        if len(layers) < len(converted):
            logger.info("The GPU kernels do not support this model's layers: the model's own code computes them.")
            return

        def fused_forwards(copied: PreTrainedModel) -> Iterator[tuple[nn.Module, FusedLayerForward]]:
            for index, (layer, fused_layer) in enumerate(zip(decoder_layers(copied), layers, strict=True)):
                yield layer, FusedLayerForward(fused_layer, kinds, index, layer.forward)

        def compare_layers(reference: hosting.ForwardContext, kernel: hosting.ForwardContext) -> Iterator[OutputPair]:
            """Yields each layer's fused and original output. Both get the original input, so errors do not add up."""
            model_copy, pairs, fused_ctx = copy_without_hooks(model), list[OutputPair](), replace(kernel, fused=True)

            def run_both(forward: FusedLayerForward, *args: Any, **kwargs: Any) -> Any:
                expected = forward.original(*args, **kwargs)
                pairs.append((forward(*args, **kwargs | {"longdraft_attend": fused_ctx}), expected))
                return expected

            for layer, forward in fused_forwards(model_copy):
                vars(layer)["forward"] = partial(run_both, forward)
            hosting.run(model_copy, reference)
            yield from pairs

        if self._agrees_with_model(compare_layers):
            for layer, forward in fused_forwards(model):
                vars(layer)["forward"] = forward
            self.layers = layers

    @property
    def _recurrent_layers(self) -> list[GatedDeltaNetLayer]:
        return [layer for layer in self.layers if isinstance(layer, GatedDeltaNetLayer)]

    def quantize_for_draft(self) -> None:
        """Quantises the weights of :attr:`stack` to 8 bits, for a draft model. Prefill keeps the exact weights."""
        if self.stack is not None:
            self.stack, self._is_quantized_for_draft = self.stack.map_weights(_quantized_for_draft), True

    def draft_stack(self, weights: str | None = None) -> DecoderStack | None:
        """Returns the stack with which the model drafts for itself; None if there is none, or if a layer is recurrent.

        Args:
            weights: "own": :attr:`stack`. "q4_0": a copy with at most 4 bits a weight in layers and 8 in the head, if
                it saves bytes and fits into memory. None: "own" in int8 arithmetic, else "q4_0"."""
        if self.stack is None or self._recurrent_layers:
            return None
        is_own = weights == "own" or (weights is None and self._int8)
        return self.stack if is_own or self._is_quantized_for_draft else self._four_bit_stack

    @cached_property
    def _four_bit_stack(self) -> DecoderStack | None:
        assert self.stack is not None
        own_stack = self.stack if self._int8 else None
        matrices = [matrix for layer in self.stack.layers for matrix, _ in layer.projections]
        num_weights = sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)
        if self._int8 and 8 * _num_bytes(matrices) < MIN_BITS_TO_QUANTIZE * num_weights:
            return own_stack
        sizes = [quantized_draft_bytes(matrix, 4) for matrix in matrices]
        sizes += [] if self.stack.head is None else [quantized_draft_bytes(self.stack.head[0])]
        try:
            memory_info.require_bytes(sum(sizes), torch.device("cpu"), "A model that drafts for itself")
        except MemoryBudgetError as error:
            logger.info("Drafting uses the target's own weights, not a quantised copy: %s", error)
            return own_stack
        return self.stack.map_weights(partial(_quantized_for_draft, bits=4), _quantized_for_draft)

    def can_run(self, store: KVStore, batch: ForwardBatch) -> bool:
        """True if the fused layers can compute this batch, and are not slower than the model's own code."""
        if not self.layers or not store.is_resident:
            return False
        if self.on_gpu:
            return store.dtype == store.shape.dtype  # KV in another dtype needs the model's own code
        if batch.is_captured:
            return False
        if self._recurrent_layers and batch.is_prefill:  # the model's own chunked recurrence is faster
            return False
        # In float32 torch is faster for many tokens; in int8 arithmetic only our kernels compute.
        return not batch.is_prefill or self._int8 or batch.batch_size * batch.query_len <= MAX_SKINNY_ROWS

    def run(self, ctx: hosting.ForwardContext, logits: int | Literal["all", "last", "none"]) -> torch.Tensor | None:
        """Runs the whole model, which must have a :attr:`stack`. ``ctx`` receives queries and hidden states.

        ``logits`` are the tokens whose logits are computed; a number n means the last n tokens of each sequence.
        Returns logits (sequences, these tokens, vocabulary); None for "none"."""
        assert self.stack is not None and self.layer_kinds is not None
        batch, kinds = ctx.batch, self.layer_kinds
        x = self._model.get_input_embeddings()(batch.token_ids)
        kv_group, *more_kv_groups = kinds.kernel_inputs(ctx.store, batch, self._rotations(ctx, x))
        # Decoder layer -> KV layer, without window layers and recurrent layers.
        locations = {i: kv for i, kv in enumerate(kinds.kv_locations) if kv is not None}
        kv_layers = {i: kv.layer for i, kv in locations.items() if kv.window_index is None}
        query_layers = {i: layer for i, layer in kv_layers.items() if layer in ctx.query_layers}
        with delta_layer_inputs(ctx, self._recurrent_layers) as recurrent:
            out = self._kernels.run_stack(
                *(self.stack, *kv_group, x),
                query_layers=query_layers,
                hidden_layers=ctx.hidden_layers,
                logits=logits,
                more_kv_groups=more_kv_groups,
                recurrent=recurrent,
            )
        ctx.queries, ctx.hidden = {query_layers[i]: q for i, q in out.queries.items()}, out.hidden
        return out.logits

    def _rotations(self, ctx: hosting.ForwardContext, x: torch.Tensor) -> list[CosSin]:
        """Returns RoPE's cos and sin at the batch's positions, for each kind of layer, in x's dtype."""
        assert self.layer_kinds is not None
        with hosting.forward_scope(ctx):
            return [self.layer_kinds.cos_sin(kind.rope, x, ctx.batch.positions) for kind in self.layer_kinds.kinds]

    def _compare_stack(self, reference: hosting.ForwardContext, kernel: hosting.ForwardContext) -> Iterator[OutputPair]:
        """Yields pairs of logits and of the last layer's outputs, as the final norm hides a wrong scale in logits."""
        assert self.layer_kinds is not None
        last = len(decoder_layers(self._model)) - 1
        reference, kernel = (replace(ctx, hidden_layers=frozenset([last])) for ctx in (reference, kernel))
        hook = hosting.add_hidden_hook(self._model, last)
        try:
            expected = hosting.run(self._model, reference).logits
        finally:
            hook.remove()
        rotations = self._rotations(kernel, self._model.get_input_embeddings()(kernel.batch.token_ids))
        layers = zip(self.layer_kinds.kind_indices, self.layers, strict=True)
        # If RoPE rotates more dimensions than a head has, the stack does not run. Its missing output is a difference.
        if all(rotations[i][0].shape[-1] <= layer.head_dim for i, layer in layers if isinstance(layer, DecoderLayer)):
            yield self.run(kernel, "all"), expected
        yield kernel.hidden.get(last), reference.hidden.get(last)

    def _agrees_with_model(self, compute: ComputePairs) -> bool:
        """True if the pairs of results that ``compute`` yields are equal. Logs the reason if not."""
        try:
            if outputs_agree(self._model, self._layout, compute):
                return True
            logger.info("The model's layers compute something else than longdraft's kernels: their own code is used.")
        except Exception as error:  # a model, a compiler or a driver can raise any type
            # On a GPU an exception means that the compiler or the driver is missing. The user can mend that.
            level = logging.WARNING if self.on_gpu else logging.INFO
            logger.log(level, "Layers run by their own code, not by fused kernels: %s", reason_of(error))
        return False


def stack_bytes(stack: DecoderStack) -> int:
    """Returns the bytes of the matrices of a stack's layers and head."""
    head = [] if stack.head is None else [stack.head]
    return _num_bytes([matrix for weights in (*(x.projections for x in stack.layers), head) for matrix, _ in weights])


def _num_bytes(matrices: Sequence[torch.Tensor | QuantizedMatrix]) -> int:
    data = (x.data if isinstance(x, QuantizedMatrix) else x for x in matrices)
    return sum(x.numel() * x.itemsize for x in data)


def _in_int8(weights: LinearWeights) -> LinearWeights:
    matrix, bias = weights
    return matrix.with_int8(int8=True) if isinstance(matrix, QuantizedMatrix) else matrix, bias


def _quantized_for_draft(weights: LinearWeights, bits: Literal[4, 8] = 8) -> LinearWeights:
    return quantize_for_draft(weights[0], bits), weights[1]
