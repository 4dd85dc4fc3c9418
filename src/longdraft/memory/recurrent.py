"""States of recurrent layers (gated delta rule, Mamba, short convolutions) for the slots of a KV store.

A checkpoint has constant size: convolution states (the last inputs of a short convolution) and a recurrent state. A
decoding forward starts from the checkpoint, computes the tree's tokens one after another, and stores only the inputs of
the tokens. :meth:`RecurrentStates.commit` makes the inputs of accepted tokens *pending*. The next forward first replays
the pending inputs, with the same arithmetic, and stores the new checkpoint. Inputs of rejected tokens are dropped.

In prefill, the model's own code computes a prompt chunk at once and returns the state after the chunk. A slot saves
some of these states, so that another sequence with the same prefix can start from a saved state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

# Maximum number of checkpoints at chunk ends that a slot saves: more restore longer prefixes, and take more memory.
MAX_CHECKPOINTS = 5

# The inputs of a layer's recurrence for some tokens: tensors (tokens, ...).
RecurrentInputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RecurrentShape:
    """The shape and the dtype of one layer's state.

    Attributes:
        conv_shapes: index of a convolution in the layer -> (number of last inputs, channels).
        recurrent_shape: shape of the recurrent state; None if the layer has only a convolution.
        dtype: dtype of the convolution states. The recurrent state is always float32.
    """

    conv_shapes: Mapping[int, tuple[int, int]]
    recurrent_shape: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        conv_bytes = sum(inputs * channels for inputs, channels in self.conv_shapes.values()) * self.dtype.itemsize
        num_recurrent = 0 if self.recurrent_shape is None else torch.Size(self.recurrent_shape).numel()
        return conv_bytes + num_recurrent * torch.float32.itemsize


@dataclass
class StateCheckpoint:
    """One layer's state after a slot's committed tokens.

    Attributes:
        conv_states: index of a convolution -> the convolution's last inputs (number of inputs, channels).
        recurrent_state: the recurrent state before the pending inputs; None if the layer has only a convolution.
        pending_inputs: inputs of accepted tokens that the next forward replays. Nothing writes to these tensors.
    """

    conv_states: dict[int, torch.Tensor]
    recurrent_state: torch.Tensor | None
    pending_inputs: RecurrentInputs = ()

    def clone(self) -> StateCheckpoint:
        state = None if self.recurrent_state is None else self.recurrent_state.clone()
        return StateCheckpoint({i: x.clone() for i, x in self.conv_states.items()}, state, self.pending_inputs)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in a snapshot file, where a convolution state is a "window"."""
        tensors = {f"window.{i}": state for i, state in self.conv_states.items()}
        tensors |= {} if self.recurrent_state is None else {"state": self.recurrent_state}
        return tensors | {f"pending.{i}": inputs for i, inputs in enumerate(self.pending_inputs)}


@dataclass
class RecurrentLayerState:
    """One layer's state in a slot, with the inputs of uncommitted tokens.

    Attributes:
        checkpoint: the state after the committed tokens.
        conv_inputs: index of a convolution -> inputs (tokens, channels) of the uncommitted tokens.
        recurrence_inputs: inputs of the recurrence for the uncommitted tokens.
        after_chunk: the state after an uncommitted prompt chunk. A chunk's inputs are not stored.
        is_prefill: True if the uncommitted tokens are a prompt chunk.
    """

    checkpoint: StateCheckpoint
    conv_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    recurrence_inputs: RecurrentInputs = ()
    after_chunk: StateCheckpoint | None = None
    is_prefill: bool = False

    def begin_forward(self, is_prefill: bool) -> None:
        """Prepares the state for a forward. Each forward calls this first."""
        self.is_prefill, self.after_chunk = is_prefill, None

    def write_conv_inputs(self, conv_index: int, offset: int, new: torch.Tensor) -> torch.Tensor:
        """Stores ``new`` inputs (tokens, channels) of a convolution after the inputs of the first ``offset``
        uncommitted tokens. Returns the inputs of all uncommitted tokens."""
        self.conv_inputs[conv_index] = new if not offset else torch.cat([self.conv_inputs[conv_index][:offset], new])
        return self.conv_inputs[conv_index]

    def write_recurrence_inputs(self, offset: int, new: RecurrentInputs) -> None:
        """Stores ``new`` inputs of the recurrence behind the inputs of the first ``offset`` uncommitted tokens."""
        if offset:
            new = tuple(torch.cat([old[:offset], x]) for old, x in zip(self.recurrence_inputs, new, strict=True))
        self.recurrence_inputs = new

    def commit(self, path: Sequence[int]) -> None:
        """Accepts the uncommitted tokens at the indices of ``path``: of a prompt chunk, all tokens or no token."""
        if self.after_chunk is not None:
            self.checkpoint = self.after_chunk if path else self.checkpoint
        elif path:
            for i, state in self.checkpoint.conv_states.items():
                # A convolution's state is the last len(state) inputs, so earlier inputs are not copied.
                new = _select(self.conv_inputs[i], path[-len(state) :] if len(state) else [])
                self.checkpoint.conv_states[i] = torch.cat([state, new])[len(new) :]
            accepted = tuple(_select(x, path) for x in self.recurrence_inputs)
            if pending := self.checkpoint.pending_inputs:
                accepted = tuple(map(torch.cat, zip(pending, accepted, strict=True)))
            self.checkpoint.pending_inputs = accepted
        self.drop_uncommitted()

    def drop_uncommitted(self) -> None:
        """Drops the inputs of uncommitted tokens."""
        self.conv_inputs, self.recurrence_inputs, self.after_chunk, self.is_prefill = {}, (), None, False


class RecurrentStates:
    """The states of a model's recurrent layers after the committed tokens of each slot of a store.

    A forward leaves the checkpoints unchanged until :meth:`commit`. ``shapes``: layer -> shape of the layer's state.
    """

    def __init__(self, shapes: Mapping[int, RecurrentShape], slots: int, device: torch.device) -> None:
        self.shapes, self.slots, self._device = dict(shapes), slots, device
        self._layers = [self._make_layer_states(self._initial_checkpoints()) for _ in range(slots)]
        # For each slot: length -> layer -> checkpoint of the layer at that length. Nothing writes to these tensors.
        self._saved_checkpoints: list[dict[int, dict[int, StateCheckpoint]]] = [{} for _ in range(slots)]
        self._lengths = [0] * slots

    def _initial_checkpoints(self) -> dict[int, StateCheckpoint]:
        """Returns layer -> the state before the first token, which is 0."""
        device, checkpoints = self._device, {}
        for layer, shape in self.shapes.items():
            conv_states = {i: torch.zeros(s, dtype=shape.dtype, device=device) for i, s in shape.conv_shapes.items()}
            size = shape.recurrent_shape
            state = None if size is None else torch.zeros(size, dtype=torch.float32, device=device)
            checkpoints[layer] = StateCheckpoint(conv_states, state)
        return checkpoints

    def _make_layer_states(self, checkpoints: Mapping[int, StateCheckpoint]) -> dict[int, RecurrentLayerState]:
        """Returns layer -> a layer state that starts from a copy of the layer's checkpoint."""
        return {layer: RecurrentLayerState(checkpoint.clone()) for layer, checkpoint in checkpoints.items()}

    def _current_checkpoints(self, slot: int) -> dict[int, StateCheckpoint]:
        return {layer: state.checkpoint for layer, state in self._layers[slot].items()}

    @property
    def bytes_per_slot(self) -> int:
        """Maximum number of bytes that a slot takes."""
        return (1 + MAX_CHECKPOINTS) * sum(shape.nbytes for shape in self.shapes.values())

    def layer_state(self, slot: int, layer: int) -> RecurrentLayerState:
        """Returns the state of one layer in a slot, for a forward."""
        return self._layers[slot][layer]

    def prepare(self, slots: Sequence[int], root_positions: Sequence[int], num_tokens: int) -> None:
        """Does nothing, because states have a constant size. (:class:`WindowKVCache` makes space here.)"""

    def commit(self, slot: int, base_len: int, path: Sequence[int]) -> None:
        """Accepts tokens of the last forward in a slot with ``base_len`` committed tokens. ``path`` has the indices of
        the accepted tokens, counted from ``base_len``, strictly increasing."""
        layers = self._layers[slot].values()
        is_prefill = any(layer.is_prefill for layer in layers)
        for layer in layers:
            layer.commit(path)
        self._lengths[slot] = base_len + len(path)
        if is_prefill and path:
            self._save_checkpoint(slot)

    def _save_checkpoint(self, slot: int) -> None:
        """Saves a slot's state. If more than MAX_CHECKPOINTS are saved, drops the one whose neighbours have the
        smallest ratio of lengths, so that the saved lengths grow about geometrically."""
        saved = self._saved_checkpoints[slot]
        saved[self._lengths[slot]] = {layer: state.clone() for layer, state in self._current_checkpoints(slot).items()}
        lengths = sorted(saved)
        if len(lengths) > MAX_CHECKPOINTS:
            ratios = [after / before for before, after in zip(lengths, lengths[2:], strict=False)]
            del saved[lengths[1 + ratios.index(min(ratios))]]

    def restorable_length(self, slot: int, length: int) -> int:
        """Returns the largest length up to ``length`` that :meth:`truncate` can restore; 0 is always possible."""
        if length >= self._lengths[slot]:
            return self._lengths[slot]
        return max((n for n in self._saved_checkpoints[slot] if n <= length), default=0)

    def truncate(self, slot: int, length: int) -> None:
        """Restores the state after ``length`` tokens. Raises ValueError if no checkpoint has this length."""
        for layer in self._layers[slot].values():
            layer.drop_uncommitted()
        if length == self._lengths[slot]:
            return
        saved = self._saved_checkpoints[slot]
        if length and length not in saved:
            raise ValueError(
                f"slot {slot} of {self._lengths[slot]} tokens cannot go back to {length}, as its recurrent layers have "
                f"no checkpoint there; {self.restorable_length(slot, length)} is possible"
            )
        self._saved_checkpoints[slot] = {n: states for n, states in saved.items() if n <= length}
        checkpoints = saved[length] if length else self._initial_checkpoints()
        self._layers[slot], self._lengths[slot] = self._make_layer_states(checkpoints), length

    def copy_from(self, other: RecurrentStates, source_slot: int, slot: int, length: int) -> None:
        """Copies the state after ``length`` tokens from a slot of ``other``, where ``length`` must be restorable."""
        saved = other._saved_checkpoints[source_slot]
        if length == other._lengths[source_slot]:
            checkpoints = other._current_checkpoints(source_slot)
        else:
            checkpoints = saved[length] if length else self._initial_checkpoints()
        self._layers[slot], self._lengths[slot] = self._make_layer_states(checkpoints), length
        self._saved_checkpoints[slot] = {n: states for n, states in saved.items() if n <= length}

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns a slot's states as named tensors on the host, for a snapshot file."""
        return {
            f"{length}.{layer}.{name}": tensor.detach().cpu().contiguous()
            for length, states in [("now", self._current_checkpoints(slot)), *self._saved_checkpoints[slot].items()]
            for layer, checkpoint in states.items()
            for name, tensor in checkpoint.named_tensors().items()
        }

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        """Loads the named tensors of :meth:`save` as the state after ``length`` tokens.

        Raises:
            ValueError: a tensor is missing, or has another shape than the state of this model's layer.
        """
        states = {key: self._load_checkpoints(key, tensors) for key in {"now", *(n.split(".")[0] for n in tensors)}}
        self._layers[slot], self._lengths[slot] = self._make_layer_states(states.pop("now")), length
        self._saved_checkpoints[slot] = {int(key): checkpoints for key, checkpoints in states.items()}

    def _load_checkpoints(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, StateCheckpoint]:
        """Loads the checkpoints that :meth:`save` named ``key``, a length or "now"."""
        checkpoints = self._initial_checkpoints()
        for layer, checkpoint in checkpoints.items():
            for name, target in checkpoint.named_tensors().items():
                tensor = tensors.get(f"{key}.{layer}.{name}")
                if tensor is None or tensor.shape != target.shape:
                    raise ValueError(f"{key}.{layer}.{name} is not the state of this model's layer")
                target.copy_(tensor)
            names = (f"{key}.{layer}.pending.{i}" for i in range(len(tensors)))
            checkpoint.pending_inputs = tuple(tensors[name].to(self._device) for name in names if name in tensors)
        return checkpoints


def _select(inputs: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """Copies the inputs of the tokens of ``path``, so that the memory of the other inputs can be freed."""
    if list(path) == list(range(len(path))):
        return inputs[: len(path)].clone()
    return inputs[torch.tensor(list(path), dtype=torch.long, device=inputs.device)]
