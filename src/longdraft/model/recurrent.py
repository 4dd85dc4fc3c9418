"""Recurrent layers (Mamba, gated DeltaNet, ...): runs a model's own mixers on our states.

A mixer (the module of a recurrent layer that mixes tokens) projects tokens, convolves them with the last few inputs,
and runs a recurrence. It calls global functions of its Python module for convolution and recurrence, and keeps its
state in a cache. In our copy of the model both functions and the cache (:class:`_StateCacheAdapter`) are replaced.

In decoding, each token is computed alone, from its parent's state in the tree. A plain step is a tree of one node, so a
token has the same bits whatever is verified with it. A prefill chunk runs the model's own chunked function.
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
from longdraft.memory.recurrent import RecurrentLayerState, RecurrentShape, RecurrentStates, StateCheckpoint
from longdraft.memory.store import KVStore
from longdraft.model.batch_invariant import in_full_vectors, outside_mode
from longdraft.model.hosting import current_forward, current_trace
from longdraft.model.layout import AttentionTrace
from longdraft.model.model_copy import class_forward, get_forward, names_in_forward, replace_forward, with_globals
from longdraft.model.recurrences import RECURRENCES, Recurrence, bind_arguments, step_function
from longdraft.model.tree_paths import conv_input_indices, tree_parents, with_ancestors
from longdraft.native import kernels
from longdraft.native.recurrent import RecurrentSequence, TreeOrder, convolve, run_recurrence

_CONV_FUNCTION = "causal_conv1d_fn"
# Names of a mixer's cache argument in the supported versions of transformers.
_CACHE_ARGS = ("cache", "cache_params", "past_key_values")
# A module is a mixer if its forward calls one of these methods of the cache.
_STATE_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})


def patch_mixers(model: PreTrainedModel) -> None:
    """Makes a model's mixers use our states in hosted forwards. The model must be our own copy.

    Raises UnsupportedModelError if a mixer calls an unknown function for its convolution or recurrence."""
    for index, module in enumerate(find_mixers(model)):
        _Mixer(module, index)


def recurrent_shapes(trace: AttentionTrace) -> dict[int, RecurrentShape]:
    """The state shapes of all recurrent layers, from a traced forward of at least two tokens.

    Raises UnsupportedModelError if a mixer calls an unknown function for its convolution or recurrence."""
    return {i: adapter.shape(mixer.unsupported(), mixer.recurrence) for i, (mixer, adapter) in trace.mixers.items()}


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """The mixers of a model's recurrent layers, in module order."""
    return [module for module in model.modules() if _STATE_UPDATES & names_in_forward(module)]


class _Mixer:
    """One mixer: replaces its module's forward, and the functions ``convolution`` and ``chunked_function`` therein.

    ``recurrence`` describes ``chunked_function``; it is None for a mixer with a convolution only."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.index, self._module, self._class_name = index, module, type(module).__name__
        forward, used_names = class_forward(module), names_in_forward(module)
        recurrence_names = [name for name in RECURRENCES if name in used_names]
        has_state = "update_recurrent_state" in used_names
        replaced = getattr(get_forward(module), "__func__", None) is not type(module).forward
        if forward is None or replaced or _CONV_FUNCTION not in used_names or len(recurrence_names) != int(has_state):
            raise UnsupportedModelError(self.unsupported())
        self._signature = inspect.signature(forward)
        cache_args = [name for name in _CACHE_ARGS if name in self._signature.parameters]
        if not cache_args:
            raise UnsupportedModelError(self.unsupported())
        self._cache_arg = cache_args[0]
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

    def unsupported(self) -> str:
        """The message for a mixer that cannot be hosted."""
        return (
            f"{self._class_name} keeps a state in a way unknown to longdraft, which cannot host it exactly. Mixers of "
            f"transformers are known if they call {_CONV_FUNCTION} and one of {', '.join(RECURRENCES)}."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mixer's forward: on the current batch, in a trace, or else unchanged."""
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
        if not batch.is_prefill or batch.query_len == 1:
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
        self._adapter.scans += 1
        return self._adapter.scan(self, bind_arguments(self.chunked_function, args, kwargs))


class _StateCacheAdapter:
    """Stands in for transformers' cache (its interface since 5.17). This base class has no state: it traces shapes.

    Attributes:
        state: the recurrent state in transformers' layout; None makes the mixer call its chunked function.
        record_past: True if there is no state of earlier tokens.
        scans: number of calls of the recurrence.
    """

    record_past = True

    def __init__(self) -> None:
        self.state: torch.Tensor | None = None
        self.scans = 0
        self._conv_inputs: dict[int, torch.Tensor] = {}
        self._num_past_inputs: dict[int, int] = {}  # convolution's index -> number of past inputs that it reads
        self._conv_index = 0  # of the convolution that is called next
        self._state_after: torch.Tensor | None = None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return not self.record_past

    def is_recording_past(self, *_: Any) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        """A convolution's past inputs (1, channels, inputs), or None."""
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        return self.state

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Takes a convolution's new inputs (B, channels, T). Returns them behind the past inputs, if there are any."""
        self._conv_inputs[state_idx], self._conv_index = x, state_idx
        return x

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Takes the state after the last token."""
        self._state_after = state
        return state

    @property
    def layers(self) -> _StateCacheAdapter:
        """Stands for the layers too: some mixers read ``cache.layers[i].conv_states`` and ``.recurrent_states``."""
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
        """x (B, channels, T), weight (channels, inputs), bias, activation -> (B, channels, T)."""
        self._num_past_inputs[self._conv_index] = weight.shape[-1] - 1
        out: torch.Tensor = mixer.convolution(x, weight, *args, **kwargs)
        return out

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        """Runs the recurrence on all tokens. Returns the chunked function's result."""
        return mixer.chunked_function(**arguments)

    def shape(self, message: str, recurrence: Recurrence | None) -> RecurrentShape:
        """The traced shape. Raises UnsupportedModelError, with this message, if an expected call was not made."""
        has_state = recurrence is not None
        if self._num_past_inputs.keys() != self._conv_inputs.keys() or self.scans != int(has_state):
            raise UnsupportedModelError(message)
        if has_state is (self._state_after is None):
            raise UnsupportedModelError(message)
        conv_shapes = {i: (self._num_past_inputs[i], x.shape[1]) for i, x in self._conv_inputs.items()}
        dtype = next(iter(self._conv_inputs.values())).dtype
        if self._state_after is None:
            return RecurrentShape(conv_shapes, None, dtype)
        _, *outer, a, b = self._state_after.shape
        assert recurrence is not None
        return RecurrentShape(conv_shapes, (*outer, b, a) if recurrence.is_transposed else (*outer, a, b), dtype)


class _ChunkAdapter(_StateCacheAdapter):
    """Prefill of one chunk of one sequence by the model's own functions, from the committed state to a new one."""

    record_past = False

    def __init__(self, mixer: _Mixer, state: RecurrentLayerState) -> None:
        super().__init__()
        state.begin_forward(is_prefill=True)
        self._layer_state, self._checkpoint = state, state.checkpoint
        self._is_transposed = mixer.recurrence is not None and mixer.recurrence.is_transposed
        self.state = self._committed_state()  # tokens pending in the checkpoint are applied by scan
        self._new_checkpoint = state.after_chunk = StateCheckpoint({}, None)

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor:
        return self._checkpoint.conv_states[state_idx].T[None]

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        x = torch.cat([self.get_conv_state(state_idx=state_idx), x], dim=-1)
        count = self._checkpoint.conv_states[state_idx].shape[0]
        self._new_checkpoint.conv_states[state_idx] = x[0, :, x.shape[-1] - count :].T.contiguous()
        return x

    def _committed_state(self) -> torch.Tensor | None:
        """The committed state in transformers' layout."""
        state = self._checkpoint.recurrent_state
        return None if state is None else (state.transpose(1, 2) if self._is_transposed else state)[None]

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        own_layout = state.transpose(2, 3) if self._is_transposed else state
        self._new_checkpoint.recurrent_state = own_layout[0].float().contiguous()
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
    """Decoding of trees. ``state`` stays None, so the mixer passes all tokens to its chunked function, our scan."""

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
        """Convolves each token with the past inputs on its path in the tree."""
        batch, kernel_size, conv_index = self._batch, weight.shape[-1], self._conv_index
        input_indices = conv_input_indices(batch, kernel_size)
        inputs = []
        for b, state in enumerate(self._states):
            tree_inputs = state.write_conv_inputs(conv_index, batch.tree_offset, x[b].T.contiguous())
            inputs.append((state.checkpoint.conv_states[conv_index], tree_inputs))
        weights = [weight] if bias is None else [weight, bias]
        is_float32 = all(y.dtype == torch.float32 and y.device.type == "cpu" for y in (x, *weights))
        if is_float32 and activation in (None, "silu", "swish") and (cpu_kernels := kernels()) is not None:
            return convolve(cpu_kernels, weight, bias, activation is not None, inputs, input_indices).transpose(1, 2)
        path_inputs = [torch.cat(x)[indices] for x, indices in zip(inputs, input_indices, strict=True)]
        windows = torch.stack(path_inputs).float()  # (B, T, inputs, channels)
        # Elementwise operations fix the order of the sum.
        y = windows[:, :, 0] * weight[:, 0].float()
        for i in range(1, kernel_size):
            y = y + windows[:, :, i] * weight[:, i].float()
        y = (y if bias is None else y + bias.float()).to(x.dtype).transpose(1, 2)
        return y if activation is None else in_full_vectors(ACT2FN[activation], y)

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        recurrence, batch = mixer.recurrence, self._batch
        assert recurrence is not None
        inputs = recurrence.token_inputs(arguments)
        for b, layer_state in enumerate(self._states):
            layer_state.write_recurrence_inputs(batch.tree_offset, tuple(x[b].contiguous() for x in inputs))
        out = self._run_kernel(recurrence, arguments)
        if out is None:
            out = torch.stack([self._run_steps(recurrence, arguments, b) for b in range(batch.batch_size)])
        state = self._states[0].checkpoint.recurrent_state
        assert state is not None
        return recurrence.original_result(arguments, out, state)

    def _run_kernel(self, recurrence: Recurrence, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Outputs (B, T, ...) of the batch's tokens; None if our kernel cannot compute them."""
        form = recurrence.linear_recurrence(arguments)
        is_float32 = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in self._states[0].recurrence_inputs)
        has_decay_matrix = form.a is not None and form.a.dim() > 1  # Mamba-1
        if has_decay_matrix or not is_float32 or (cpu_kernels := kernels()) is None:
            return None
        sequences, offset = [], self._batch.tree_offset
        for state, parents in zip(self._states, tree_parents(self._batch), strict=True):
            checkpoint, order = state.checkpoint, TreeOrder(parents, with_ancestors(parents, offset), offset)
            assert checkpoint.recurrent_state is not None
            pending = recurrence.kernel_inputs(checkpoint.pending_inputs) if checkpoint.pending_inputs else ()
            inputs = recurrence.kernel_inputs(state.recurrence_inputs) if state.recurrence_inputs else ()
            sequences.append(RecurrentSequence(checkpoint.recurrent_state, pending, inputs, order))
        out = run_recurrence(cpu_kernels, form, sequences)
        for state in self._states:
            state.checkpoint.pending_inputs = ()
        return out

    def _run_steps(self, recurrence: Recurrence, arguments: dict[str, Any], sequence_index: int) -> torch.Tensor:
        """Outputs (T, ...) of one sequence's tokens, computed by :func:`step_function`."""
        state, parents = self._states[sequence_index], tree_parents(self._batch)[sequence_index]
        outputs, states = [], {-1: apply_pending(recurrence, state, arguments)}
        step = step_function(recurrence.linear_recurrence(arguments), recurrence.kernel_inputs(state.recurrence_inputs))
        for node in with_ancestors(parents, self._batch.tree_offset):
            out, states[node] = step(node, states[parents[node]])
            if node >= self._batch.tree_offset:
                outputs.append(out)
        return torch.stack(outputs)


def recurrent_states(store: KVStore) -> RecurrentStates:
    """The states of a store's recurrent layers."""
    return next(states for states in store.states if isinstance(states, RecurrentStates))


def apply_pending(recurrence: Recurrence, layer_state: RecurrentLayerState, arguments: dict[str, Any]) -> torch.Tensor:
    """Advances the committed state by the tokens that were accepted but not applied yet, and returns it.

    ``arguments`` are those of the current call: parameters such as A are the same for all tokens.
    """
    checkpoint = layer_state.checkpoint
    assert checkpoint.recurrent_state is not None
    if checkpoint.pending_inputs:
        _, checkpoint.recurrent_state = recurrence.run(arguments, checkpoint.pending_inputs, checkpoint.recurrent_state)
        checkpoint.pending_inputs = ()
    return checkpoint.recurrent_state
