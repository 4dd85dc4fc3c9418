"""States of recurrent layers: a checkpoint for the committed rows, and the inputs of rows behind it.

A layer's checkpoint is its window (the last inputs of a short convolution) and its recurrent state, of constant size.
Rows are computed one after another from the checkpoint, each behind its parent, and only their inputs are kept.
:meth:`RecurrentStates.commit` makes the accepted rows' inputs *pending*. The next forward replays them first, with the
arithmetic that it computes rows with, and the checkpoint moves on. Rejected rows never enter it.

Pieces of a prompt are computed at once by the model's own rule, and bring the state after their last row. Some of those
states are kept, so that another text with the same beginning can start from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

# States of past lengths that a slot keeps at most; the newest, at the prompt's end, is one of them.
KEPT = 5

# The inputs of some rows of one layer: tensors (rows, ...).
RecurrentInputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RecurrentShape:
    """The sizes of one layer's state.

    Attributes:
        conv_shapes: convolution -> (inputs kept, channels).
        recurrent_shape: shape of the recurrent state; None if there is only a convolution.
        dtype: of the windows; the recurrent state is float32.
    """

    conv_shapes: Mapping[int, tuple[int, int]]
    recurrent_shape: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        window = sum(a * b for a, b in self.conv_shapes.values()) * self.dtype.itemsize
        return window + (0 if self.recurrent_shape is None else torch.Size(self.recurrent_shape).numel() * 4)


@dataclass
class StateCheckpoint:
    """The state that one layer keeps of a slot's committed rows.

    Attributes:
        windows: convolution -> its last inputs (inputs kept, channels).
        state: the recurrent state (shape of the layer), which lacks the pending rows.
        pending: their inputs. These tensors are never written to.
    """

    conv_states: dict[int, torch.Tensor]
    recurrent_state: torch.Tensor | None
    pending_inputs: RecurrentInputs = ()

    def clone(self) -> StateCheckpoint:
        state = None if self.recurrent_state is None else self.recurrent_state.clone()
        return StateCheckpoint(
            {i: window.clone() for i, window in self.conv_states.items()}, state, self.pending_inputs
        )

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by the names that they have in a file."""
        found = {f"window.{i}": window for i, window in self.conv_states.items()}
        found |= {} if self.recurrent_state is None else {"state": self.recurrent_state}
        return found | {f"pending.{i}": rows for i, rows in enumerate(self.pending_inputs)}


@dataclass
class RecurrentLayerState:
    """One layer's part of a slot.

    Attributes:
        now: the checkpoint.
        inputs: convolution -> inputs (rows, channels) of unverified rows.
        rows: inputs of the recurrence for unverified rows.
        after: the checkpoint after a piece of a prompt, in the place of its rows' inputs.
        prompt: the unverified rows are a piece of a prompt.
    """

    checkpoint: StateCheckpoint
    conv_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    recurrence_inputs: RecurrentInputs = ()
    after_chunk: StateCheckpoint | None = None
    is_prefill: bool = False

    def begin_forward(self, is_prefill: bool) -> None:
        """Called when a forward begins."""
        self.is_prefill, self.after_chunk = is_prefill, None

    def write_conv_inputs(self, conv_index: int, offset: int, new: torch.Tensor) -> torch.Tensor:
        """Writes a convolution's inputs (T, channels) of unverified rows from ``offset`` on; returns all of them."""
        self.conv_inputs[conv_index] = new if not offset else torch.cat([self.conv_inputs[conv_index][:offset], new])
        return self.conv_inputs[conv_index]

    def write_recurrence_inputs(self, offset: int, new: RecurrentInputs) -> None:
        """Writes the recurrence's inputs (T, ...) of unverified rows from ``offset`` on."""
        old = self.recurrence_inputs
        self.recurrence_inputs = (
            tuple(torch.cat([a[:offset], b]) for a, b in zip(old, new, strict=True)) if offset else new
        )

    def commit(self, path: Sequence[int]) -> None:
        """Keeps a path of the unverified rows; of a piece of a prompt all rows or none."""
        if self.after_chunk is not None:
            self.checkpoint = self.after_chunk if path else self.checkpoint
        elif path:
            for number, window in self.checkpoint.conv_states.items():
                new = _select(self.conv_inputs[number], path[-len(window) :] if len(window) else [])
                self.checkpoint.conv_states[number] = torch.cat([window, new])[len(new) :]
            accepted = tuple(_select(x, path) for x in self.recurrence_inputs)
            before = self.checkpoint.pending_inputs
            self.checkpoint.pending_inputs = (
                tuple(map(torch.cat, zip(before, accepted, strict=True))) if before else accepted
            )
        self.drop_unverified()

    def drop_unverified(self) -> None:
        """Drops the unverified rows."""
        self.conv_inputs, self.recurrence_inputs, self.after_chunk, self.is_prefill = {}, (), None, False


class RecurrentStates:
    """The states of a model's recurrent layers, for the slots of one store. They hold for the slots' committed rows.

    A forward computes a block's rows in scratch space. :meth:`commit` keeps the accepted ones; what is not committed
    leaves no trace.

    Args:
        shapes: the sizes of each layer, by its number.
    """

    def __init__(self, shapes: Mapping[int, RecurrentShape], slots: int, device: torch.device) -> None:
        self.shapes, self.slots, self._device = dict(shapes), slots, device
        self._layers = [self._of(self._zeros()) for _ in range(slots)]
        # By slot: length -> the checkpoints of all layers, which are never written to.
        self._kept: list[dict[int, dict[int, StateCheckpoint]]] = [{} for _ in range(slots)]
        self._lengths = [0] * slots

    def _zeros(self) -> dict[int, StateCheckpoint]:
        at, found = self._device, {}
        for layer, shape in self.shapes.items():
            windows = {i: torch.zeros(s, dtype=shape.dtype, device=at) for i, s in shape.conv_shapes.items()}
            state = (
                None
                if shape.recurrent_shape is None
                else torch.zeros(shape.recurrent_shape, dtype=torch.float32, device=at)
            )
            found[layer] = StateCheckpoint(windows, state)
        return found

    def _of(self, checkpoints: Mapping[int, StateCheckpoint]) -> dict[int, RecurrentLayerState]:
        return {layer: RecurrentLayerState(checkpoint.clone()) for layer, checkpoint in checkpoints.items()}

    def _now(self, slot: int) -> dict[int, StateCheckpoint]:
        return {layer: each.checkpoint for layer, each in self._layers[slot].items()}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that a slot may take."""
        return (1 + KEPT) * sum(shape.nbytes for shape in self.shapes.values())

    def layer_state(self, slot: int, layer: int) -> RecurrentLayerState:
        """One layer's part of a slot, for a forward."""
        return self._layers[slot][layer]

    def prepare(self, slots: Sequence[int], root_positions: Sequence[int], num_tokens: int) -> None:
        """Makes room before a forward: here any number of rows has some."""

    def commit(self, slot: int, base_len: int, path: Sequence[int]) -> None:
        """Keeps rows of the last block.

        Args:
            base_len: committed rows before.
            path: indices of rows behind them, strictly increasing.
        """
        layers = self._layers[slot].values()
        piece = any(layer.is_prefill for layer in layers)
        for layer in layers:
            layer.commit(path)
        self._lengths[slot] = base_len + len(path)
        if piece and path:
            self._keep(slot)

    def _keep(self, slot: int) -> None:
        """Keeps the present state of a slot. Of too many, drops one so that the lengths stay spread evenly in scale."""
        kept = self._kept[slot]
        kept[self._lengths[slot]] = {layer: each.clone() for layer, each in self._now(slot).items()}
        lengths = sorted(kept)
        if len(lengths) > KEPT:
            ratios = [c / a for a, _, c in zip(lengths, lengths[1:], lengths[2:], strict=False)]
            del kept[lengths[1 + ratios.index(min(ratios))]]

    def restorable_length(self, slot: int, length: int) -> int:
        """The largest number of rows, ``length`` at most, that :meth:`truncate` can go back to. 0 always works."""
        if length >= self._lengths[slot]:
            return self._lengths[slot]
        return max((n for n in self._kept[slot] if n <= length), default=0)

    def truncate(self, slot: int, length: int) -> None:
        """Goes back to the state after ``length`` rows, which must be restorable."""
        for layer in self._layers[slot].values():
            layer.drop_unverified()
        if length == self._lengths[slot]:
            return
        kept = self._kept[slot]
        if length and length not in kept:
            raise ValueError(
                f"slot {slot} of {self._lengths[slot]} rows cannot go back to {length}: its recurrent layers can to "
                f"{self.restorable_length(slot, length)}"
            )
        self._kept[slot] = {n: states for n, states in kept.items() if n <= length}
        self._layers[slot], self._lengths[slot] = self._of(kept[length] if length else self._zeros()), length

    def copy_from(self, other: RecurrentStates, source_slot: int, slot: int, length: int) -> None:
        """Takes over the state after ``length`` rows of a slot of ``other``, which must be restorable there."""
        kept = other._kept[source_slot]
        found = (
            other._now(source_slot)
            if length == other._lengths[source_slot]
            else kept[length]
            if length
            else self._zeros()
        )
        self._layers[slot], self._lengths[slot] = self._of(found), length
        self._kept[slot] = {n: states for n, states in kept.items() if n <= length}

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """The state of a slot as named tensors on the host, for a file."""
        return {
            f"{name}.{layer}.{each}": tensor.detach().cpu().contiguous()
            for name, states in [("now", self._now(slot)), *self._kept[slot].items()]
            for layer, checkpoint in states.items()
            for each, tensor in checkpoint.named_tensors().items()
        }

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        """Restores what :meth:`save` returned, as the state after ``length`` rows.

        Raises:
            ValueError: the tensors are not those of such a state.
        """
        found = {name: self._loaded(name, tensors) for name in {"now", *(n.split(".")[0] for n in tensors)}}
        self._layers[slot], self._lengths[slot] = self._of(found.pop("now")), length
        self._kept[slot] = {int(name): states for name, states in found.items()}

    def _loaded(self, beginning: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, StateCheckpoint]:
        loaded = self._zeros()
        for n, layer in loaded.items():
            for name, place in layer.named_tensors().items():
                found = tensors.get(f"{beginning}.{n}.{name}")
                if found is None or found.shape != place.shape:
                    raise ValueError(f"{beginning}.{n}.{name} is not the state of this model's layer")
                place.copy_(found)
            names = (f"{beginning}.{n}.pending.{i}" for i in range(len(tensors)))
            layer.pending_inputs = tuple(tensors[name].to(self._device) for name in names if name in tensors)
        return loaded


def _select(rows: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """A copy of some rows, so that the others' memory is given back."""
    if list(path) == list(range(len(path))):
        return rows[: len(path)].clone()
    return rows[torch.tensor(list(path), dtype=torch.long, device=rows.device)]
