"""Runs a model's own mixers on our states, for recurrent layers (Mamba, gated DeltaNet, ...).

A mixer (the module of a recurrent layer that mixes tokens) projects tokens, convolves them with the last few inputs,
and runs a recurrence. It calls global functions of its Python module for convolution and recurrence, and keeps its
state in a cache. Our copy of the model has other functions in place of both, and an adapter in place of the cache
(:class:`_StateCacheAdapter`).

In decoding, each token is computed alone, from its parent's state in the tree. A plain step is a tree of one node, so a
token's bits do not depend on the other tokens of a verification. A prefill chunk runs the model's own chunked function.
Shapes: B sequences of T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import UnsupportedModelError
from longdraft.memory.recurrent import RecurrentLayerState, RecurrentShape, StateCheckpoint
from longdraft.model.compat import CACHE_NAMES
from longdraft.model.hosting import current_forward, current_trace, recurrent_states
from longdraft.model.layers.batch_invariant import in_full_vectors, outside_mode
from longdraft.model.layout import AttentionTrace
from longdraft.model.linear_attention.recurrences import RECURRENCES, Recurrence, bind_arguments, step_function
from longdraft.model.linear_attention.tree_paths import conv_input_indices, tree_orders, tree_parents, with_ancestors
from longdraft.model.model_copy import class_forward, get_forward, names_in_forward, replace_forward, with_globals
from longdraft.native import kernels
from longdraft.native.recurrent import RecurrentSequence, convolve, run_recurrence

_CONV_FUNCTION = "causal_conv1d_fn"
# A module is a mixer if its forward calls one of these methods of the cache.
_STATE_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})


def patch_mixers(model: PreTrainedModel) -> None:
    """Makes a model's mixers use our states in hosted forwards. The model must be our own copy.
    Raises UnsupportedModelError if a mixer calls an unknown function for its convolution or recurrence."""
    for index, module in enumerate(find_mixers(model)):
        _Mixer(module, index)


def recurrent_shapes(trace: AttentionTrace) -> dict[int, RecurrentShape]:
    """Returns recurrent layer -> shape of its state, from a traced forward of at least two tokens.
    Raises UnsupportedModelError if a mixer calls an unknown function for its convolution or recurrence."""
    return {i: adapter.traced_shape(mixer) for i, (mixer, adapter) in trace.mixers.items()}


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """Finds the mixers of a model's recurrent layers, in module order."""
    return [module for module in model.modules() if _STATE_UPDATES & names_in_forward(module)]


class _Mixer:
    """Replaces the forward of a mixer's module, and the functions that the forward calls.

    Attributes:
        index: index of the recurrent layer, in module order.
        convolution: transformers' function for the convolution, which was replaced.
        chunked_function: transformers' function for the recurrence, which was replaced; unset without a recurrence.
        recurrence: describes ``chunked_function``; None for a mixer with a convolution only."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.index, self._module, self._class_name = index, module, type(module).__name__
        forward, used_names = class_forward(module), names_in_forward(module)
        recurrence_names = [name for name in RECURRENCES if name in used_names]
        has_state = "update_recurrent_state" in used_names
        is_replaced = getattr(get_forward(module), "__func__", None) is not type(module).forward
        is_known = _CONV_FUNCTION in used_names and len(recurrence_names) == int(has_state)
        if forward is None or is_replaced or not is_known:
            raise self.unsupported_error()
        self._signature = inspect.signature(forward)
        cache_arg = next((name for name in CACHE_NAMES if name in self._signature.parameters), None)
        if cache_arg is None:
            raise self.unsupported_error()
        self._cache_arg = cache_arg
        functions: dict[str, Callable[..., Any]] = {_CONV_FUNCTION: outside_mode(self._convolve)}
        self.convolution = forward.__globals__[_CONV_FUNCTION]
        self.recurrence = RECURRENCES[recurrence_names[0]] if has_state else None
        if has_state:
            functions[recurrence_names[0]] = outside_mode(self._scan)
            self.chunked_function = forward.__globals__[recurrence_names[0]]
        self._forward_on_adapter = with_globals(forward, functions)
        self._adapter: _StateCacheAdapter = _StateCacheAdapter()
        self._original_forward = get_forward(module)
        replace_forward(module, self.forward)

    def unsupported_error(self) -> UnsupportedModelError:
        """Makes the error for a mixer that cannot be hosted."""
        return UnsupportedModelError(
            f"{self._class_name} keeps a state in a way unknown to longdraft, which cannot host it exactly. Mixers of "
            f"transformers are known if they call {_CONV_FUNCTION} and one of {', '.join(RECURRENCES)}."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's forward: computes the current batch, records a trace, or else runs the original."""
        ctx, trace = current_forward(), current_trace()
        if ctx is None and trace is None:
            return self._original_forward(*args, **kwargs)
        bound = self._signature.bind(self._module, *args, **kwargs)
        arguments = dict(bound.arguments)
        for name in [p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD]:
            arguments |= arguments.pop(name, {})
        # Our batches have no padding to mask.
        arguments |= {"attention_mask": None} if "attention_mask" in self._signature.parameters else {}
        if ctx is None:
            assert trace is not None
            if self.index in trace.mixers:
                raise UnsupportedModelError(
                    f"{self._class_name} is one module in several layers, which longdraft cannot host."
                )
            adapter = _StateCacheAdapter()
            trace.mixers[self.index] = self, adapter
            return self._run(adapter, arguments)
        batch = ctx.batch
        states = [recurrent_states(ctx.store).layer_state(slot, self.index) for slot in batch.slots]
        if not batch.is_prefill or batch.query_len == 1:  # for one token mixers call other functions than for a chunk
            return self._run(_TreeAdapter(batch, states), arguments)
        outputs = []
        for hidden_states, state in zip(arguments["hidden_states"].split(1), states, strict=True):
            outputs.append(self._run(_ChunkAdapter(self, state), {**arguments, "hidden_states": hidden_states}))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run(self, adapter: _StateCacheAdapter, arguments: dict[str, Any]) -> Any:
        self._adapter = adapter
        return self._forward_on_adapter(**{**arguments, self._cache_arg: adapter})

    def _convolve(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._adapter.convolve(self, *args, **kwargs)

    def _scan(self, *args: Any, **kwargs: Any) -> Any:
        self._adapter.num_scans += 1
        return self._adapter.scan(self, bind_arguments(self.chunked_function, args, kwargs))


class _StateCacheAdapter:
    """Stands in for transformers' cache (its interface since 5.17). This base class has no state: it traces shapes.

    Attributes:
        state: the recurrent state in transformers' layout; None makes the mixer call its chunked function.
        record_past: True if there is no state of earlier tokens (``is_recording_past`` of transformers' cache).
        num_scans: number of calls of the recurrence."""

    record_past = True

    def __init__(self) -> None:
        self.state: torch.Tensor | None = None
        self.num_scans = 0
        self._conv_inputs: dict[int, torch.Tensor] = {}  # index of a convolution -> its new inputs (B, channels, T)
        self._num_past_inputs: dict[int, int] = {}  # index of a convolution -> number of past inputs that it reads
        self._conv_index = 0  # index of the convolution that is called next
        self._state_after: torch.Tensor | None = None  # the state after the last token

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return not self.record_past

    def is_recording_past(self, *_: Any) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        """Returns a convolution's past inputs (1, channels, number of inputs), or None."""
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        return self.state

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Receives a convolution's new inputs (B, channels, T). Returns past inputs, if there are any, and new ones."""
        self._conv_inputs[state_idx], self._conv_index = x, state_idx
        return x

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Receives the state after the last token."""
        self._state_after = state
        return state

    @property
    def layers(self) -> _StateCacheAdapter:
        """The adapter itself, for mixers that read ``cache.layers[i].conv_states`` and ``.recurrent_states``."""
        return self

    def __getitem__(self, layer: int) -> _StateCacheAdapter:
        return self

    @property
    def conv_states(self) -> list[torch.Tensor | None]:
        return [self.get_conv_state()]

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        return [self.state]

    def convolve(self, mixer: _Mixer, x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convolves x (B, channels, T) with weight (channels, kernel size), bias and activation -> (B, channels, T)."""
        self._num_past_inputs[self._conv_index] = weight.shape[-1] - 1
        out: torch.Tensor = mixer.convolution(x, weight, *args, **kwargs)
        return out

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        """Runs the recurrence on all tokens. Returns the chunked function's result."""
        return mixer.chunked_function(**arguments)

    def traced_shape(self, mixer: _Mixer) -> RecurrentShape:
        """Returns the traced shape. Raises UnsupportedModelError if the mixer left out an expected call."""
        recurrence, has_state = mixer.recurrence, mixer.recurrence is not None
        if self._num_past_inputs.keys() != self._conv_inputs.keys() or self.num_scans != int(has_state):
            raise mixer.unsupported_error()
        if has_state is (self._state_after is None):
            raise mixer.unsupported_error()
        conv_shapes = {i: (self._num_past_inputs[i], x.shape[1]) for i, x in self._conv_inputs.items()}
        dtype = next(iter(self._conv_inputs.values())).dtype
        if self._state_after is None:
            return RecurrentShape(conv_shapes, None, dtype)
        _, *outer_sizes, rows, columns = self._state_after.shape
        assert recurrence is not None
        sizes = (columns, rows) if recurrence.is_transposed else (rows, columns)
        return RecurrentShape(conv_shapes, (*outer_sizes, *sizes), dtype)


class _ChunkAdapter(_StateCacheAdapter):
    """Prefills one chunk of one sequence with the model's own functions, from the committed state to a new state."""

    record_past = False

    def __init__(self, mixer: _Mixer, state: RecurrentLayerState) -> None:
        super().__init__()
        state.begin_forward(is_prefill=True)
        self._layer_state, self._checkpoint = state, state.checkpoint
        self._is_transposed = mixer.recurrence is not None and mixer.recurrence.is_transposed
        self.state = self._committed_state()  # scan applies the checkpoint's pending tokens
        self._new_checkpoint = state.after_chunk = StateCheckpoint({}, None)

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor:
        return self._checkpoint.conv_states[state_idx].T[None]

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        x = torch.cat([self.get_conv_state(state_idx=state_idx), x], dim=-1)
        num_past = self._checkpoint.conv_states[state_idx].shape[0]
        self._new_checkpoint.conv_states[state_idx] = x[0, :, x.shape[-1] - num_past :].T.contiguous()
        return x

    def _committed_state(self) -> torch.Tensor | None:
        """Returns the committed state in transformers' layout."""
        state = self._checkpoint.recurrent_state
        return None if state is None else (state.transpose(1, 2) if self._is_transposed else state)[None]

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        in_our_layout = state.transpose(2, 3) if self._is_transposed else state
        self._new_checkpoint.recurrent_state = in_our_layout[0].float().contiguous()
        return state

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        assert mixer.recurrence is not None
        recurrence, state = mixer.recurrence, apply_pending(mixer.recurrence, self._layer_state, arguments)
        if (name := recurrence.initial_state_arg) is not None:
            return mixer.chunked_function(**{**arguments, name: self._committed_state()})
        inputs = tuple(x[0] for x in recurrence.token_inputs(arguments))
        outputs, self._new_checkpoint.recurrent_state = recurrence.run(arguments, inputs, state)
        return recurrence.original_result(arguments, torch.stack(outputs)[None], self._new_checkpoint.recurrent_state)


class _TreeAdapter(_StateCacheAdapter):
    """Decodes trees. ``state`` stays None, so the mixer passes all tokens to its chunked function: our scan."""

    def __init__(self, batch: ForwardBatch, states: Sequence[RecurrentLayerState]) -> None:
        super().__init__()
        self._batch, self._states = batch, states
        for state in states:
            state.begin_forward(batch.is_prefill)

    def convolve(
        self,
        mixer: _Mixer,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Convolves each token with the last inputs on its path: nodes of the tree, and committed tokens before it."""
        batch, kernel_size, conv_index = self._batch, weight.shape[-1], self._conv_index
        input_indices = conv_input_indices(batch, kernel_size)
        inputs = []
        for i, state in enumerate(self._states):
            tree_inputs = state.write_conv_inputs(conv_index, batch.tree_offset, x[i].T.contiguous())
            inputs.append((state.checkpoint.conv_states[conv_index], tree_inputs))
        weights = [weight] if bias is None else [weight, bias]
        is_float32 = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (x, *weights))
        if is_float32 and activation in (None, "silu", "swish") and (cpu_kernels := kernels()) is not None:
            return convolve(cpu_kernels, weight, bias, activation is not None, inputs, input_indices).transpose(1, 2)
        sequence_inputs = [torch.cat(pair)[indices] for pair, indices in zip(inputs, input_indices, strict=True)]
        path_inputs = torch.stack(sequence_inputs).float()  # (B, T, kernel size, channels)
        # Elementwise operations fix the order of the sum.
        y = path_inputs[:, :, 0] * weight[:, 0].float()
        for i in range(1, kernel_size):
            y = y + path_inputs[:, :, i] * weight[:, i].float()
        y = (y if bias is None else y + bias.float()).to(x.dtype).transpose(1, 2)
        return y if activation is None else in_full_vectors(ACT2FN[activation], y)

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        recurrence, batch = mixer.recurrence, self._batch
        assert recurrence is not None
        inputs = recurrence.token_inputs(arguments)
        for i, layer_state in enumerate(self._states):
            layer_state.write_recurrence_inputs(batch.tree_offset, tuple(x[i].contiguous() for x in inputs))
        out = self._run_kernel(recurrence, arguments)
        if out is None:
            out = torch.stack([self._run_steps(recurrence, arguments, i) for i in range(batch.batch_size)])
        state = self._states[0].checkpoint.recurrent_state
        assert state is not None
        return recurrence.original_result(arguments, out, state)

    def _run_kernel(self, recurrence: Recurrence, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Returns the batch's outputs (B, T, ...); None if our kernel cannot compute them."""
        linear_recurrence = recurrence.linear_recurrence(arguments)
        is_float32 = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in self._states[0].recurrence_inputs)
        has_decay_matrix = linear_recurrence.a is not None and linear_recurrence.a.dim() > 1  # Mamba-1
        if has_decay_matrix or not is_float32 or (cpu_kernels := kernels()) is None:
            return None
        sequences = []
        for state, order in zip(self._states, tree_orders(self._batch), strict=True):
            checkpoint = state.checkpoint
            assert checkpoint.recurrent_state is not None
            pending = recurrence.kernel_inputs(checkpoint.pending_inputs) if checkpoint.pending_inputs else ()
            inputs = recurrence.kernel_inputs(state.recurrence_inputs) if state.recurrence_inputs else ()
            sequences.append(RecurrentSequence(checkpoint.recurrent_state, pending, inputs, order))
        out = run_recurrence(cpu_kernels, linear_recurrence, sequences)
        for state in self._states:
            state.checkpoint.pending_inputs = ()
        return out

    def _run_steps(self, recurrence: Recurrence, arguments: dict[str, Any], sequence_index: int) -> torch.Tensor:
        """Returns one sequence's outputs (T, ...), computed by :func:`step_function`."""
        state, parents = self._states[sequence_index], tree_parents(self._batch)[sequence_index]
        outputs, states = [], {-1: apply_pending(recurrence, state, arguments)}  # -1 is the parent of roots
        step = step_function(recurrence.linear_recurrence(arguments), recurrence.kernel_inputs(state.recurrence_inputs))
        for node in with_ancestors(parents, self._batch.tree_offset):
            out, states[node] = step(node, states[parents[node]])
            if node >= self._batch.tree_offset:
                outputs.append(out)
        return torch.stack(outputs)


def apply_pending(recurrence: Recurrence, layer_state: RecurrentLayerState, arguments: dict[str, Any]) -> torch.Tensor:
    """Applies the checkpoint's pending tokens (accepted ones) to the committed state. Returns the new committed state.
    ``arguments`` are the arguments of the current call, for the parameters that all tokens share, such as A."""
    checkpoint = layer_state.checkpoint
    assert checkpoint.recurrent_state is not None
    if checkpoint.pending_inputs:
        _, checkpoint.recurrent_state = recurrence.run(arguments, checkpoint.pending_inputs, checkpoint.recurrent_state)
        checkpoint.pending_inputs = ()
    return checkpoint.recurrent_state
