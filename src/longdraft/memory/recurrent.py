"""States of recurrent layers (gated delta rule, Mamba, short convolutions) for the slots of a KV store.

A checkpoint has constant size: convolution states (the last inputs of a short convolution) and a recurrent state. A
decoding forward starts from the checkpoint, computes the tree's tokens one after another, and stores only the inputs of
the tokens. :meth:`RecurrentStates.commit` makes the inputs of accepted tokens *pending*. The next forward first replays
the pending inputs, with the same arithmetic, and stores the new checkpoint. Inputs of rejected tokens are dropped.

In prefill, the model's own code computes a prompt chunk at once and returns the state after the chunk. A slot saves
some of these states in host memory, and the state at the end of an output that a further prompt continues. Another
sequence with the same prefix starts from the longest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from longdraft.memory import memory_info

# Maximum number of checkpoints that a slot saves: so many, and one more for every CHECKPOINT_SPACING tokens while host
# memory is free, so that a restored state is about that many tokens at most before the end of the common prefix.
MIN_CHECKPOINTS, CHECKPOINT_SPACING = 6, 4096

_HOST = torch.device("cpu")
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

    def copy_to(self, device: torch.device) -> StateCheckpoint:
        """Returns a copy on a device."""
        conv_states = {i: x.to(device, copy=True) for i, x in self.conv_states.items()}
        state = None if self.recurrent_state is None else self.recurrent_state.to(device, copy=True)
        return StateCheckpoint(conv_states, state, tuple(x.to(device) for x in self.pending_inputs))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in a snapshot file, where a convolution state is a "window"."""
        tensors = {f"window.{i}": state for i, state in self.conv_states.items()}
        tensors |= {} if self.recurrent_state is None else {"state": self.recurrent_state}
        return tensors | {f"pending.{i}": inputs for i, inputs in enumerate(self.pending_inputs)}


class SlotCheckpoint(dict[int, StateCheckpoint]):
    """Layer -> the layer's state, of all layers after the same tokens."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for state in self.values() for tensor in state.named_tensors().values())

    def copy_to(self, device: torch.device) -> SlotCheckpoint:
        """Returns a copy on a device."""
        return SlotCheckpoint({layer: state.copy_to(device) for layer, state in self.items()})


def thin_out(checkpoints: Mapping[int, SlotCheckpoint], count: int) -> dict[int, SlotCheckpoint]:
    """Returns at most ``count`` of the checkpoints, by their lengths: the last three, and others in about even steps.

    Three, for the ends of an output, of its prompt, and of a chunk before it: many chat templates write the last tokens
    of a prompt in another way once there is an answer.
    """
    lengths = [0, *sorted(checkpoints)]
    while len(lengths) > 1 + count:
        gaps = [after - before for before, after in zip(lengths, lengths[2:], strict=False)][:-2] or [0]
        del lengths[1 + gaps.index(min(gaps))]
    return {length: checkpoints[length] for length in lengths[1:]}


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
        self._layers = [self._make_layer_states(self._initial_checkpoint()) for _ in range(slots)]
        # For each slot: length -> the states after so many tokens, in host memory. Nothing writes to these tensors.
        self._saved: list[dict[int, SlotCheckpoint]] = [{} for _ in range(slots)]
        self._lengths = [0] * slots
        memory_info.reclaimables.add(self)

    def _initial_checkpoint(self) -> SlotCheckpoint:
        """Returns the states before the first token, which are 0, in host memory."""
        device, checkpoint = _HOST, SlotCheckpoint()
        for layer, shape in self.shapes.items():
            conv_states = {i: torch.zeros(s, dtype=shape.dtype, device=device) for i, s in shape.conv_shapes.items()}
            size = shape.recurrent_shape
            state = None if size is None else torch.zeros(size, dtype=torch.float32, device=device)
            checkpoint[layer] = StateCheckpoint(conv_states, state)
        return checkpoint

    def _make_layer_states(self, checkpoint: SlotCheckpoint) -> dict[int, RecurrentLayerState]:
        """Returns layer -> a layer state that starts from a copy of the layer's checkpoint."""
        return {layer: RecurrentLayerState(state) for layer, state in checkpoint.copy_to(self._device).items()}

    def _current_checkpoint(self, slot: int) -> SlotCheckpoint:
        return SlotCheckpoint({layer: state.checkpoint for layer, state in self._layers[slot].items()})

    @property
    def bytes_per_slot(self) -> int:
        """Number of bytes of the device's memory that a slot needs."""
        num_saved = MIN_CHECKPOINTS if self._device.type == "cpu" else 0
        return (1 + num_saved) * sum(shape.nbytes for shape in self.shapes.values())

    def layer_state(self, slot: int, layer: int) -> RecurrentLayerState:
        """Returns the state of one layer in a slot, for a forward."""
        return self._layers[slot][layer]

    def prepare(self, slots: Sequence[int], root_positions: Sequence[int], num_tokens: int) -> None:
        """Does nothing, because states have a constant size. (:class:`WindowKVCache` makes space here.)"""

    def commit(self, slot: int, base_len: int, path: Sequence[int]) -> None:
        """Accepts tokens of the last forward in a slot with ``base_len`` committed tokens. ``path`` has the indices of
        the accepted tokens, counted from ``base_len``, strictly increasing."""
        layers = self._layers[slot].values()
        is_prefill = any(layer.is_prefill for layer in layers) and bool(path)
        if is_prefill:
            self._save_checkpoint(slot)  # of an output's end; of a chunk's end it is saved already
        for layer in layers:
            layer.commit(path)
        self._lengths[slot] = base_len + len(path)
        if is_prefill:
            self._save_checkpoint(slot)

    def _save_checkpoint(self, slot: int) -> None:
        """Saves a slot's state, and drops saved ones beyond the maximum number."""
        saved = self.checkpoints(slot)
        count, nbytes = MIN_CHECKPOINTS, len(saved) * sum(shape.nbytes for shape in self.shapes.values())
        # Growing slots will need free memory later, so a slot's checkpoints may take at most a quarter of it.
        if len(saved) > count and (memory_info.available_bytes(_HOST) or 0) > 4 * nbytes:
            count += self._lengths[slot] // CHECKPOINT_SPACING
        self._saved[slot] = thin_out(saved, count)

    def reclaim(self) -> bool:
        """Drops the checkpoints that only free memory allowed. Returns True if there were any."""
        num_saved = sum(map(len, self._saved))
        self._saved = [thin_out(saved, MIN_CHECKPOINTS) for saved in self._saved]
        return sum(map(len, self._saved)) < num_saved

    def restorable_length(self, slot: int, length: int) -> int:
        """Returns the largest length up to ``length`` that :meth:`truncate` can restore; 0 is always possible."""
        if length >= self._lengths[slot]:
            return self._lengths[slot]
        return max((n for n in self._saved[slot] if n <= length), default=0)

    def truncate(self, slot: int, length: int) -> None:
        """Restores the state after ``length`` tokens. Raises ValueError if no checkpoint has this length."""
        for layer in self._layers[slot].values():
            layer.drop_uncommitted()
        if length == self._lengths[slot]:
            return
        if length and length not in self._saved[slot]:
            raise ValueError(
                f"slot {slot} of {self._lengths[slot]} tokens cannot go back to {length}, as its recurrent layers have "
                f"no checkpoint there; {self.restorable_length(slot, length)} is possible"
            )
        self.restore(slot, self._saved[slot], length)

    def copy_from(self, other: RecurrentStates, source_slot: int, slot: int, length: int) -> None:
        """Copies the state after ``length`` tokens from a slot of ``other``, where ``length`` must be restorable."""
        self.restore(slot, other.checkpoints(source_slot), length)

    def checkpoints(self, slot: int) -> dict[int, SlotCheckpoint]:
        """Returns length -> the states after so many tokens, in host memory: the saved and the present ones."""
        saved, length = self._saved[slot], self._lengths[slot]
        return saved | ({length: self._current_checkpoint(slot).copy_to(_HOST)} if length not in {0, *saved} else {})

    def restore(self, slot: int, checkpoints: Mapping[int, SlotCheckpoint], length: int) -> None:
        """Makes the states after ``length`` tokens, 0 or one of the lengths, the states of a slot. Saves the others up
        to this length."""
        self._layers[slot] = self._make_layer_states(checkpoints[length] if length else self._initial_checkpoint())
        self._lengths[slot] = length
        self._saved[slot] = {n: checkpoint for n, checkpoint in checkpoints.items() if n <= length}

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns a slot's states as named tensors on the host, for a snapshot file."""
        saved = thin_out(self._saved[slot], MIN_CHECKPOINTS)
        return {
            f"{length}.{layer}.{name}": tensor.detach().cpu().contiguous()
            for length, checkpoint in [("now", self._current_checkpoint(slot)), *saved.items()]
            for layer, state in checkpoint.items()
            for name, tensor in state.named_tensors().items()
        }

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        """Loads the named tensors of :meth:`save` as the state after ``length`` tokens.

        Raises:
            ValueError: a tensor is missing, or has another shape than the state of this model's layer.
        """
        checkpoints = {key: self._load_checkpoint(key, tensors) for key in {"now", *(n.split(".")[0] for n in tensors)}}
        self._layers[slot], self._lengths[slot] = self._make_layer_states(checkpoints.pop("now")), length
        self._saved[slot] = {int(key): checkpoint for key, checkpoint in checkpoints.items()}

    def _load_checkpoint(self, key: str, tensors: Mapping[str, torch.Tensor]) -> SlotCheckpoint:
        """Loads the states that :meth:`save` named ``key``, a length or "now", to host memory."""
        checkpoint = self._initial_checkpoint()
        for layer, state in checkpoint.items():
            for name, target in state.named_tensors().items():
                tensor = tensors.get(f"{key}.{layer}.{name}")
                if tensor is None or tensor.shape != target.shape:
                    raise ValueError(f"{key}.{layer}.{name} is not the state of this model's layer")
                target.copy_(tensor)
            names = (f"{key}.{layer}.pending.{i}" for i in range(len(tensors)))
            state.pending_inputs = tuple(tensors[name] for name in names if name in tensors)
        return checkpoint


def _select(inputs: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """Copies the inputs of the tokens of ``path``, so that the memory of the other inputs can be freed."""
    if list(path) == list(range(len(path))):
        return inputs[: len(path)].clone()
    return inputs[torch.tensor(list(path), dtype=torch.long, device=inputs.device)]
