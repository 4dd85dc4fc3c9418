"""Recurrent layers: runs a model's own mixers on states of ours, without a fork of their code.

A mixer projects its rows, convolves them with the last few inputs, and passes them through a recurrence. It calls the
last two as functions of its module, and keeps its state in a cache. In our copy of the model those functions are ours,
and so is the cache (:class:`_StateCacheAdapter`). Everything else is the mixer's own code, which computes all rows at once.

While text is decoded, rows are computed one after another, each from the state behind its parent in the tree. A plain
step is a tree of one row, so a row gets the same bits whatever is verified beside it. A piece of a prompt goes through
the model's own rule for many tokens, which starts from the state and leaves a new one.
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

_CONVOLUTION = "causal_conv1d_fn"
# Names of a mixer's argument for the cache.
_CACHES = ("cache", "cache_params", "past_key_values")
# Words in the code of a mixer.
_WORDS = frozenset({"update_conv_state", "update_recurrent_state"})


def patch_mixers(model: PreTrainedModel) -> None:
    """Makes the mixers of a copy of our own use our states. Outside of a hosted forward they compute as usual.

    Raises:
        UnsupportedModelError: a mixer computes in another way than those that we know.
    """
    for index, module in enumerate(find_mixers(model)):
        _Mixer(module, index)


def recurrent_shapes(recorded: AttentionTrace) -> dict[int, RecurrentShape]:
    """The sizes of all layers' states, from a recorded forward of at least two tokens.

    Raises:
        UnsupportedModelError: a mixer computes in another way than those that we know.
    """
    return {index: turn.shape(mixer.unknown(), mixer.recurrence) for index, (mixer, turn) in recorded.mixers.items()}


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """The modules that keep a state from token to token."""
    return [module for module in model.modules() if _WORDS & names_in_forward(module)]


class _Mixer:
    """One mixer, with the functions that its forward calls in the place of its module's."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.index = index
        own, used, self._kind = class_forward(module), names_in_forward(module), type(module).__name__
        names, stateful = [n for n in RECURRENCES if n in used], "update_recurrent_state" in used
        replaced = getattr(get_forward(module), "__func__", None) is not type(module).forward
        if own is None or replaced or _CONVOLUTION not in used or len(names) != int(stateful):
            raise UnsupportedModelError(self.unknown())
        self._signature = inspect.signature(own)
        caches = [name for name in _CACHES if name in self._signature.parameters]
        if not caches:
            raise UnsupportedModelError(self.unknown())
        self._cache_name = caches[0]
        functions: dict[str, Callable[..., Any]] = {_CONVOLUTION: outside_mode(self._convolve)}
        self.convolution = own.__globals__[_CONVOLUTION]
        self.recurrence = RECURRENCES[names[0]] if names else None
        if self.recurrence is not None:
            functions[names[0]] = outside_mode(self._scan)
            self.rule = own.__globals__[names[0]]
        self._module, self._forward = module, with_globals(own, functions)
        self._turn: _StateCacheAdapter = _StateCacheAdapter()
        self._original = get_forward(module)
        replace_forward(module, self.forward)

    def unknown(self) -> str:
        """The message for a mixer that cannot be hosted."""
        return (
            f"{self._kind} keeps a state in a way that longdraft does not know, so longdraft cannot host it exactly. "
            f"Known are mixers of transformers that call {_CONVOLUTION} and one of {', '.join(RECURRENCES)}."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mixer's forward on the present block."""
        hosted, recorded = current_forward(), current_trace()
        if hosted is None and recorded is None:
            return self._original(*args, **kwargs)
        given = self._signature.bind(self._module, *args, **kwargs)
        named = dict(given.arguments)
        for name in [p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD]:
            named |= named.pop(name, {})
        # Our blocks have no padding that a mask would have to silence.
        named |= {"attention_mask": None} if "attention_mask" in self._signature.parameters else {}
        if hosted is None:
            assert recorded is not None
            if self.index in recorded.mixers:
                raise UnsupportedModelError(
                    f"{self._kind} is one module in several layers, which longdraft cannot host."
                )
            turn = _StateCacheAdapter()
            recorded.mixers[self.index] = self, turn
            return self._run(turn, named)
        block = hosted.batch
        slots = [recurrent_states(hosted.store).layer_state(slot, self.index) for slot in block.slots]
        if not block.is_prefill or block.query_len == 1:
            return self._run(_Rows(block, slots), named)
        parts = []
        for rows, slot in zip(named["hidden_states"].split(1), slots, strict=True):
            parts.append(self._run(_Piece(self, slot), {**named, "hidden_states": rows}))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, turn: _StateCacheAdapter, named: dict[str, Any]) -> Any:
        self._turn = turn
        return self._forward(**{**named, self._cache_name: turn})

    def _convolve(self, *args: Any, **named: Any) -> torch.Tensor:
        return self._turn.convolve(self, *args, **named)

    def _scan(self, *args: Any, **named: Any) -> Any:
        self._turn.scans += 1
        return self._turn.scan(self, bind_arguments(self.rule, args, named))


class _StateCacheAdapter:
    """Treats a mixer's state as the present forward wants it, as the cache that the mixer is called with, in the words
    of transformers' versions since 5.17. This one has no state, and learns its sizes.

    Attributes:
        state: the recurrent state as transformers has it; None if the mixer shall pass all its rows to one function.
        record_past: there is no state of earlier rows.
        scans: number of calls of the recurrence.
    """

    record_past = True

    def __init__(self) -> None:
        self.state: torch.Tensor | None = None
        self.scans = 0
        self._inputs: dict[int, torch.Tensor] = {}
        self._windows: dict[int, int] = {}
        self._last = 0
        self._after: torch.Tensor | None = None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return not self.record_past

    def is_recording_past(self, *_: Any) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        """A convolution's last inputs (1, channels, inputs), or None."""
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        return self.state

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Takes a convolution's inputs (B, channels, T), and returns what it is to be called with."""
        self._inputs[state_idx], self._last = x, state_idx
        return x

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Takes the state after the last row."""
        self._after = state
        return state

    @property
    def layers(self) -> _StateCacheAdapter:
        return self

    def __getitem__(self, layer: int) -> _StateCacheAdapter:
        return self

    @property
    def conv_states(self) -> list[torch.Tensor | None]:
        return [self.get_conv_state()]

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        return [self.state]

    def convolve(self, mixer: _Mixer, x: torch.Tensor, weight: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        """x (B, channels, T), weight (channels, inputs), bias, activation -> (B, channels, T)."""
        self._windows[self._last] = weight.shape[-1] - 1
        out: torch.Tensor = mixer.convolution(x, weight, *more, **named)
        return out

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        """Passes the rows through the recurrence; returns what the function for many tokens would."""
        return mixer.rule(**arguments)

    def shape(self, unknown: str, recurrence: Recurrence | None) -> RecurrentShape:
        """The sizes of the state; raises UnsupportedModelError, with this message, if not all calls were made."""
        stateful = recurrence is not None
        if (
            self._windows.keys() != self._inputs.keys()
            or self.scans != int(stateful)
            or stateful is (self._after is None)
        ):
            raise UnsupportedModelError(unknown)
        windows = {n: (self._windows[n], x.shape[1]) for n, x in self._inputs.items()}
        dtype = next(iter(self._inputs.values())).dtype
        if self._after is None:
            return RecurrentShape(windows, None, dtype)
        _, *outer, a, b = self._after.shape
        assert recurrence is not None
        return RecurrentShape(windows, (*outer, b, a) if recurrence.is_transposed else (*outer, a, b), dtype)


class _Piece(_StateCacheAdapter):
    """A piece of one sequence's prompt: the model's own functions, from the committed state to a new one."""

    record_past = False

    def __init__(self, mixer: _Mixer, slot: RecurrentLayerState) -> None:
        super().__init__()
        slot.begin_forward(is_prefill=True)
        self._slot, self._now = slot, slot.checkpoint
        self._turned = mixer.recurrence is not None and mixer.recurrence.is_transposed
        self.state = self._theirs()  # it lacks the pending rows: see scan
        self._next = slot.after_chunk = StateCheckpoint({}, None)

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor:
        return self._now.conv_states[state_idx].T[None]

    def update_conv_state(self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        x = torch.cat([self.get_conv_state(state_idx=state_idx), x], dim=-1)
        kept = self._now.conv_states[state_idx].shape[0]
        self._next.conv_states[state_idx] = x[0, :, x.shape[-1] - kept :].T.contiguous()
        return x

    def _theirs(self) -> torch.Tensor | None:
        state = self._now.recurrent_state
        return None if state is None else (state.transpose(1, 2) if self._turned else state)[None]

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._next.recurrent_state = (state.transpose(2, 3) if self._turned else state)[0].float().contiguous()
        return state

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        assert mixer.recurrence is not None
        recurrence, state = mixer.recurrence, apply_pending(mixer.recurrence, self._slot, arguments)
        if (name := recurrence.initial_state_arg) is not None:
            return mixer.rule(**{**arguments, name: self._theirs()})
        outputs, self._next.recurrent_state = recurrence.run(
            arguments, tuple(x[0] for x in recurrence.token_inputs(arguments)), state
        )
        return recurrence.original_result(arguments, torch.stack(outputs)[None], self._next.recurrent_state)


class _Rows(_StateCacheAdapter):
    """Rows of trees, computed one after another. Without a state, a mixer passes any number of them to one function."""

    def __init__(self, block: ForwardBatch, slots: Sequence[RecurrentLayerState]) -> None:
        super().__init__()
        self._block, self._slots = block, slots
        for slot in slots:
            slot.begin_forward(block.is_prefill)

    def convolve(
        self,
        mixer: _Mixer,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Convolves each row with the last inputs on its path."""
        block, size, number = self._block, weight.shape[-1], self._last
        places = conv_input_indices(block, size)
        inputs = []
        for b, slot in enumerate(self._slots):
            rows = slot.write_conv_inputs(number, block.tree_offset, x[b].T.contiguous())
            inputs.append((slot.checkpoint.conv_states[number], rows))
        weights = [weight] if bias is None else [weight, bias]
        served = all(y.dtype == torch.float32 and y.device.type == "cpu" for y in (x, *weights))
        if served and activation in (None, "silu", "swish") and (own := kernels()) is not None:
            return convolve(own, weight, bias, activation is not None, inputs, places).transpose(1, 2)
        seen = [torch.cat(both)[chosen] for both, chosen in zip(inputs, places, strict=True)]
        each = torch.stack(seen).float()  # (B, T, inputs, channels)
        # Products and sums one by one, which no vector unit rounds differently.
        y = each[:, :, 0] * weight[:, 0].float()
        for i in range(1, size):
            y = y + each[:, :, i] * weight[:, i].float()
        y = (y if bias is None else y + bias.float()).to(x.dtype).transpose(1, 2)
        return y if activation is None else in_full_vectors(ACT2FN[activation], y)

    def scan(self, mixer: _Mixer, arguments: dict[str, Any]) -> Any:
        recurrence, block = mixer.recurrence, self._block
        assert recurrence is not None
        new = recurrence.token_inputs(arguments)
        for b, slot in enumerate(self._slots):
            slot.write_recurrence_inputs(block.tree_offset, tuple(x[b].contiguous() for x in new))
        out = self._by_kernel(recurrence, arguments)
        if out is None:
            out = torch.stack([self._one_by_one(recurrence, arguments, b) for b in range(block.batch_size)])
        state = self._slots[0].checkpoint.recurrent_state
        assert state is not None
        return recurrence.original_result(arguments, out, state)

    def _by_kernel(self, recurrence: Recurrence, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Outputs (B, T, ...) of the last rows; None if our kernel does not compute them."""
        kind = recurrence.linear_recurrence(arguments)
        served = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in self._slots[0].recurrence_inputs)
        by_channel = kind.a is not None and kind.a.dim() > 1
        if by_channel or not served or (own := kernels()) is None:
            return None
        trees, first = [], self._block.tree_offset
        for slot, parents in zip(self._slots, tree_parents(self._block), strict=True):
            assert slot.checkpoint.recurrent_state is not None
            pending, rows = (
                recurrence.kernel_inputs(x) if x else ()
                for x in (slot.checkpoint.pending_inputs, slot.recurrence_inputs)
            )
            trees.append(
                RecurrentSequence(
                    slot.checkpoint.recurrent_state,
                    pending,
                    rows,
                    TreeOrder(parents, with_ancestors(parents, first), first),
                )
            )
        out = run_recurrence(own, kind, trees)
        for slot in self._slots:
            slot.checkpoint.pending_inputs = ()
        return out

    def _one_by_one(self, recurrence: Recurrence, arguments: dict[str, Any], b: int) -> torch.Tensor:
        """Outputs (T, ...) of a sequence's last rows."""
        slot, parents = self._slots[b], tree_parents(self._block)[b]
        outputs, states = [], {-1: apply_pending(recurrence, slot, arguments)}
        step = step_function(recurrence.linear_recurrence(arguments), recurrence.kernel_inputs(slot.recurrence_inputs))
        for row in with_ancestors(parents, self._block.tree_offset):
            out, states[row] = step(row, states[parents[row]])
            if row >= self._block.tree_offset:
                outputs.append(out)
        return torch.stack(outputs)


def recurrent_states(store: KVStore) -> RecurrentStates:
    """The states of a store's recurrent layers."""
    return next(states for states in store.states if isinstance(states, RecurrentStates))


def apply_pending(recurrence: Recurrence, slot: RecurrentLayerState, arguments: dict[str, Any]) -> torch.Tensor:
    """Takes the committed rows' inputs into the recurrent state, which is returned.

    Args:
        arguments: of the present call: those that are the same for all rows are taken from here.
    """
    state = slot.checkpoint.recurrent_state
    assert state is not None
    if slot.checkpoint.pending_inputs:
        _, state = recurrence.run(arguments, slot.checkpoint.pending_inputs, state)
    slot.checkpoint.recurrent_state, slot.checkpoint.pending_inputs = state, ()
    return state
