"""States of recurrent layers (gated delta rule, Mamba, short convolutions) for the slots of a KV store.

A checkpoint has constant size: convolution states (the last inputs of a short convolution) and a recurrent state. A
decoding forward computes tokens one after another from it, each behind its parent, and stores only their inputs.
:meth:`RecurrentStates.commit` makes accepted inputs *pending*. The next forward replays them first, with the same
arithmetic, and the checkpoint moves on. Rejected tokens never enter it.

In prefill, the model's own code computes a prompt chunk at once and returns the state after the chunk. A slot keeps
checkpoints of some of these states, so that another sequence with the same prefix can start from one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

# The most checkpoints at chunk ends that a slot keeps, that of the prompt's end included.
MAX_CHECKPOINTS = 5

# What a layer's recurrence reads for some tokens: tensors (tokens, ...).
RecurrentInputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RecurrentShape:
    """The sizes of one layer's state.

    Attributes:
        conv_shapes: index of a convolution in the layer -> (number of last inputs, channels).
        recurrent_shape: shape of the recurrent state; None if the layer has only a convolution.
        dtype: dtype of the convolution states; the recurrent state is float32.
    """

    conv_shapes: Mapping[int, tuple[int, int]]
    recurrent_shape: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        conv_bytes = sum(a * b for a, b in self.conv_shapes.values()) * self.dtype.itemsize
        return conv_bytes + (0 if self.recurrent_shape is None else torch.Size(self.recurrent_shape).numel() * 4)


@dataclass
class StateCheckpoint:
    """One layer's state after a slot's committed tokens.

    Attributes:
        conv_states: index of a convolution -> its last inputs (number of inputs, channels).
        recurrent_state: the recurrent state before the pending inputs.
        pending_inputs: inputs of accepted tokens that the next forward replays. Nothing writes to these tensors.
    """

    conv_states: dict[int, torch.Tensor]
    recurrent_state: torch.Tensor | None
    pending_inputs: RecurrentInputs = ()

    def clone(self) -> StateCheckpoint:
        state = None if self.recurrent_state is None else self.recurrent_state.clone()
        return StateCheckpoint({i: x.clone() for i, x in self.conv_states.items()}, state, self.pending_inputs)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in a snapshot file."""
        tensors = {f"window.{i}": state for i, state in self.conv_states.items()}
        tensors |= {} if self.recurrent_state is None else {"state": self.recurrent_state}
        return tensors | {f"pending.{i}": inputs for i, inputs in enumerate(self.pending_inputs)}


@dataclass
class RecurrentLayerState:
    """One layer's state in a slot, with the inputs of unverified tokens.

    Attributes:
        checkpoint: the state after the committed tokens.
        conv_inputs: index of a convolution -> inputs (tokens, channels) of the unverified tokens.
        recurrence_inputs: inputs of the recurrence for the unverified tokens.
        after_chunk: the checkpoint after an unverified prompt chunk, which is stored in place of the chunk's inputs.
        is_prefill: True if the unverified tokens are a prompt chunk.
    """

    checkpoint: StateCheckpoint
    conv_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    recurrence_inputs: RecurrentInputs = ()
    after_chunk: StateCheckpoint | None = None
    is_prefill: bool = False

    def begin_forward(self, is_prefill: bool) -> None:
        """Prepares for a forward, which must call it first."""
        self.is_prefill, self.after_chunk = is_prefill, None

    def write_conv_inputs(self, conv_index: int, offset: int, new: torch.Tensor) -> torch.Tensor:
        """Stores a convolution's inputs (T, channels) of unverified tokens from ``offset`` on. Returns all inputs."""
        self.conv_inputs[conv_index] = new if not offset else torch.cat([self.conv_inputs[conv_index][:offset], new])
        return self.conv_inputs[conv_index]

    def write_recurrence_inputs(self, offset: int, new: RecurrentInputs) -> None:
        """Stores the recurrence's inputs (T, ...) of unverified tokens from ``offset`` on."""
        if offset:
            new = tuple(torch.cat([a[:offset], b]) for a, b in zip(self.recurrence_inputs, new, strict=True))
        self.recurrence_inputs = new

    def commit(self, path: Sequence[int]) -> None:
        """Accepts a path of the unverified tokens. Of a prompt chunk, it accepts all tokens or none."""
        if self.after_chunk is not None:
            self.checkpoint = self.after_chunk if path else self.checkpoint
        elif path:
            for i, state in self.checkpoint.conv_states.items():
                # A convolution's state is its last len(state) inputs, so earlier ones are not copied.
                new = _select(self.conv_inputs[i], path[-len(state) :] if len(state) else [])
                self.checkpoint.conv_states[i] = torch.cat([state, new])[len(new) :]
            accepted = tuple(_select(x, path) for x in self.recurrence_inputs)
            if pending := self.checkpoint.pending_inputs:
                accepted = tuple(map(torch.cat, zip(pending, accepted, strict=True)))
            self.checkpoint.pending_inputs = accepted
        self.drop_unverified()

    def drop_unverified(self) -> None:
        """Drops the inputs of unverified tokens."""
        self.conv_inputs, self.recurrence_inputs, self.after_chunk, self.is_prefill = {}, (), None, False


class RecurrentStates:
    """The states of a model's recurrent layers after the committed tokens of each slot of a store.

    A forward leaves the checkpoints unchanged until :meth:`commit`. ``shapes`` maps a layer to the sizes of its state.
    """

    def __init__(self, shapes: Mapping[int, RecurrentShape], slots: int, device: torch.device) -> None:
        self.shapes, self.slots, self._device = dict(shapes), slots, device
        self._layers = [self._layer_states(self._zeros()) for _ in range(slots)]
        # By slot: length -> layer -> its checkpoint at that length. Nothing writes to these tensors.
        self._saved: list[dict[int, dict[int, StateCheckpoint]]] = [{} for _ in range(slots)]
        self._lengths = [0] * slots

    def _zeros(self) -> dict[int, StateCheckpoint]:
        device, checkpoints = self._device, {}
        for layer, shape in self.shapes.items():
            conv_states = {i: torch.zeros(s, dtype=shape.dtype, device=device) for i, s in shape.conv_shapes.items()}
            size = shape.recurrent_shape
            state = None if size is None else torch.zeros(size, dtype=torch.float32, device=device)
            checkpoints[layer] = StateCheckpoint(conv_states, state)
        return checkpoints

    def _layer_states(self, checkpoints: Mapping[int, StateCheckpoint]) -> dict[int, RecurrentLayerState]:
        return {layer: RecurrentLayerState(checkpoint.clone()) for layer, checkpoint in checkpoints.items()}

    def _checkpoints(self, slot: int) -> dict[int, StateCheckpoint]:
        return {layer: state.checkpoint for layer, state in self._layers[slot].items()}

    @property
    def bytes_per_slot(self) -> int:
        """The most bytes that a slot takes."""
        return (1 + MAX_CHECKPOINTS) * sum(shape.nbytes for shape in self.shapes.values())

    def layer_state(self, slot: int, layer: int) -> RecurrentLayerState:
        """One layer's state in a slot, for a forward."""
        return self._layers[slot][layer]

    def prepare(self, slots: Sequence[int], root_positions: Sequence[int], num_tokens: int) -> None:
        """Does nothing: states have a constant size. (Windows make space here before a forward.)"""

    def commit(self, slot: int, base_len: int, path: Sequence[int]) -> None:
        """Accepts tokens of the last forward.

        Args:
            base_len: number of tokens committed before.
            path: indices of the accepted tokens, counted from ``base_len``, strictly increasing.
        """
        layers = self._layers[slot].values()
        is_prefill = any(layer.is_prefill for layer in layers)
        for layer in layers:
            layer.commit(path)
        self._lengths[slot] = base_len + len(path)
        if is_prefill and path:
            self._save_checkpoint(slot)

    def _save_checkpoint(self, slot: int) -> None:
        """Saves a slot's state. If there are too many, drops one: that with the smallest ratio of the lengths after and
        before it. So the lengths stay spread geometrically."""
        saved = self._saved[slot]
        saved[self._lengths[slot]] = {layer: state.clone() for layer, state in self._checkpoints(slot).items()}
        lengths = sorted(saved)
        if len(lengths) > MAX_CHECKPOINTS:
            ratios = [after / before for before, after in zip(lengths, lengths[2:], strict=False)]
            del saved[lengths[1 + ratios.index(min(ratios))]]

    def restorable_length(self, slot: int, length: int) -> int:
        """The largest length up to ``length`` that :meth:`truncate` can restore; 0 is always possible."""
        if length >= self._lengths[slot]:
            return self._lengths[slot]
        return max((n for n in self._saved[slot] if n <= length), default=0)

    def truncate(self, slot: int, length: int) -> None:
        """Restores the state after ``length`` tokens. Raises ValueError if :meth:`restorable_length` differs."""
        for layer in self._layers[slot].values():
            layer.drop_unverified()
        if length == self._lengths[slot]:
            return
        saved = self._saved[slot]
        if length and length not in saved:
            raise ValueError(
                f"slot {slot} of {self._lengths[slot]} tokens cannot go back to {length}, as its recurrent layers have "
                f"no checkpoint there; {self.restorable_length(slot, length)} is possible"
            )
        self._saved[slot] = {n: states for n, states in saved.items() if n <= length}
        checkpoints = saved[length] if length else self._zeros()
        self._layers[slot], self._lengths[slot] = self._layer_states(checkpoints), length

    def copy_from(self, other: RecurrentStates, source_slot: int, slot: int, length: int) -> None:
        """Copies the state after ``length`` tokens from a slot of ``other``; the length must be restorable there."""
        saved = other._saved[source_slot]
        is_current = length == other._lengths[source_slot]
        checkpoints = other._checkpoints(source_slot) if is_current else saved[length] if length else self._zeros()
        self._layers[slot], self._lengths[slot] = self._layer_states(checkpoints), length
        self._saved[slot] = {n: states for n, states in saved.items() if n <= length}

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """A slot's states as named tensors on the host, for a snapshot file."""
        return {
            f"{length}.{layer}.{name}": tensor.detach().cpu().contiguous()
            for length, states in [("now", self._checkpoints(slot)), *self._saved[slot].items()]
            for layer, checkpoint in states.items()
            for name, tensor in checkpoint.named_tensors().items()
        }

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        """Restores the result of :meth:`save`, as the state after ``length`` tokens.

        Raises:
            ValueError: the tensors are not those of these layers' states.
        """
        states = {key: self._load_checkpoints(key, tensors) for key in {"now", *(n.split(".")[0] for n in tensors)}}
        self._layers[slot], self._lengths[slot] = self._layer_states(states.pop("now")), length
        self._saved[slot] = {int(key): checkpoints for key, checkpoints in states.items()}

    def _load_checkpoints(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, StateCheckpoint]:
        checkpoints = self._zeros()
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
    """Copies the inputs of a path's tokens, so that the memory of all inputs can be freed."""
    if list(path) == list(range(len(path))):
        return inputs[: len(path)].clone()
    return inputs[torch.tensor(list(path), dtype=torch.long, device=inputs.device)]
