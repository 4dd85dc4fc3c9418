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
Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RecurrentShape:
    """The sizes of one layer's state.

    Attributes:
        windows: convolution -> (inputs kept, channels).
        state: shape of the recurrent state; None if there is only a convolution.
        dtype: of the windows; the recurrent state is float32.
    """

    windows: Mapping[int, tuple[int, int]]
    state: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        window = sum(a * b for a, b in self.windows.values()) * self.dtype.itemsize
        return window + (0 if self.state is None else torch.Size(self.state).numel() * 4)


@dataclass
class Checkpoint:
    """A layer's state after some rows: windows (inputs kept, channels) and recurrent state (shape of the layer)."""

    windows: dict[int, torch.Tensor]
    state: torch.Tensor | None

    def clone(self) -> Checkpoint:
        state = None if self.state is None else self.state.clone()
        return Checkpoint({i: window.clone() for i, window in self.windows.items()}, state)


@dataclass
class LayerSlot:
    """One layer's part of a slot.

    Attributes:
        now: the checkpoint. Its windows are those of all committed rows, its recurrent state lacks the pending ones.
        pending: inputs of committed rows that the recurrent state lacks. Tensors here are never written to.
        inputs: convolution -> inputs (rows, channels) of unverified rows.
        rows: inputs of the recurrence for unverified rows.
        written: number of unverified rows.
        after: the checkpoint after a piece of a prompt of ``written`` rows, in the place of their inputs.
        prompt: the unverified rows are a piece of a prompt.
    """

    now: Checkpoint
    pending: list[Rows] = field(default_factory=list)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: Rows = ()
    written: int = 0
    after: Checkpoint | None = None
    prompt: bool = False

    def copy(self) -> LayerSlot:
        """The committed part alone."""
        return LayerSlot(self.now.clone(), list(self.pending))

    @property
    def waiting(self) -> Rows | None:
        """The pending rows in one piece; None if there are none."""
        if len(self.pending) < 2:
            return self.pending[0] if self.pending else None
        return tuple(map(torch.cat, zip(*self.pending, strict=True)))

    def begin(self, written: int, prompt: bool) -> None:
        """Called when a forward begins, with the number of unverified rows at its end."""
        self.written, self.prompt, self.after = written, prompt, None

    def keep_inputs(self, number: int, offset: int, new: torch.Tensor) -> torch.Tensor:
        """Writes a convolution's inputs (T, channels) of unverified rows from ``offset`` on; returns all of them."""
        self.inputs[number] = new if not offset else torch.cat([self.inputs[number][:offset], new])
        return self.inputs[number]

    def keep_rows(self, offset: int, new: Rows) -> Rows:
        """Writes the recurrence's inputs (T, ...) of unverified rows from ``offset`` on; returns all of them."""
        self.rows = (
            new if not offset else tuple(torch.cat([a[:offset], b]) for a, b in zip(self.rows, new, strict=True))
        )
        return self.rows

    def commit(self, path: Sequence[int]) -> None:
        """Keeps a path of the unverified rows.

        Raises:
            ValueError: rows that no forward has written, or only a part of a piece of a prompt.
        """
        if path and path[-1] >= self.written:
            raise ValueError(f"row {path[-1]} of a recurrent layer was not computed, {self.written} rows were")
        if self.after is not None:
            if len(path) not in (0, self.written):
                raise ValueError(f"a piece of {self.written} prompt tokens is kept whole, not {len(path)} of them")
            if path:
                self.now, self.pending = self.after, []
        elif path:
            for number, window in self.now.windows.items():
                accepted = _select(self.inputs[number], path[-len(window) :] if len(window) else [])
                self.now.windows[number] = torch.cat([window, accepted])[len(accepted) :]
            if self.rows:
                self.pending.append(tuple(_select(x, path) for x in self.rows))
        self.forget()

    def forget(self) -> None:
        """Drops the unverified rows."""
        self.inputs, self.rows, self.written, self.after, self.prompt = {}, (), 0, None, False


class RecurrentStates:
    """The states of a model's recurrent layers, for the slots of one store.

    Args:
        shapes: the sizes of each layer, by its number.
    """

    def __init__(self, shapes: Mapping[int, RecurrentShape], slots: int, device: torch.device) -> None:
        self.shapes, self.slots, self._device = dict(shapes), slots, device
        self._layers = [self._empty() for _ in range(slots)]
        # By slot: length -> the committed part of all layers, which is never written to.
        self._kept: list[dict[int, dict[int, LayerSlot]]] = [{} for _ in range(slots)]
        self._lengths = [0] * slots

    def _empty(self) -> dict[int, LayerSlot]:
        return {layer: LayerSlot(self._zeros(shape)) for layer, shape in self.shapes.items()}

    def _zeros(self, shape: RecurrentShape) -> Checkpoint:
        at, state = self._device, shape.state
        windows = {i: torch.zeros(s, dtype=shape.dtype, device=at) for i, s in shape.windows.items()}
        return Checkpoint(windows, None if state is None else torch.zeros(state, dtype=torch.float32, device=at))

    @property
    def bytes_per_slot(self) -> int:
        return (1 + KEPT) * sum(shape.bytes for shape in self.shapes.values())

    def layer(self, slot: int, layer: int) -> LayerSlot:
        """One layer's part of a slot, for a forward."""
        return self._layers[slot][layer]

    def prepare(self, slots: Sequence[int], bases: Sequence[int], rows: int) -> None:
        """Any number of rows has room."""

    def commit(self, slot: int, start: int, path: Sequence[int]) -> None:
        layers = self._layers[slot].values()
        piece = any(layer.prompt for layer in layers)
        for layer in layers:
            layer.commit(path)
        self._lengths[slot] = start + len(path)
        if piece and path:
            self._keep(slot)

    def _keep(self, slot: int) -> None:
        """Keeps the present state of a slot. Of too many, drops one so that the lengths stay spread evenly in scale."""
        kept = self._kept[slot]
        kept[self._lengths[slot]] = {n: layer.copy() for n, layer in self._layers[slot].items()}
        lengths = sorted(kept)
        if len(lengths) > KEPT:
            ratios = [c / a for a, _, c in zip(lengths, lengths[1:], lengths[2:], strict=False)]
            del kept[lengths[1 + ratios.index(min(ratios))]]

    def restorable(self, slot: int, length: int) -> int:
        if length >= self._lengths[slot]:
            return self._lengths[slot]
        return max((n for n in self._kept[slot] if n <= length), default=0)

    def truncate(self, slot: int, length: int) -> None:
        for layer in self._layers[slot].values():
            layer.forget()
        if length == self._lengths[slot]:
            return
        kept = self._kept[slot]
        if length and length not in kept:
            raise ValueError(
                f"slot {slot} of {self._lengths[slot]} rows cannot go back to {length}: its recurrent layers can to "
                f"{self.restorable(slot, length)}"
            )
        self._kept[slot] = {n: states for n, states in kept.items() if n <= length}
        self._set(slot, kept[length] if length else None, length)

    def _set(self, slot: int, states: Mapping[int, LayerSlot] | None, length: int) -> None:
        self._layers[slot] = self._empty() if states is None else {n: s.copy() for n, s in states.items()}
        self._lengths[slot] = length

    def copy(self, source: int, slot: int, length: int) -> None:
        whole = length == self._lengths[source]
        states = self._layers[source] if whole else self._kept[source][length] if length else None
        self._set(slot, states, length)
        self._kept[slot] = {n: states for n, states in self._kept[source].items() if n <= length}

    def adopt(self, other: RecurrentStates) -> None:
        for slot in range(other.slots):
            self._layers[slot], self._kept[slot] = other._layers[slot], other._kept[slot]
            self._lengths[slot] = other._lengths[slot]

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        tensors = _named("now", self._layers[slot])
        for length, states in self._kept[slot].items():
            tensors |= _named(str(length), states)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        layers = self._loaded("now", tensors)
        kept = {int(name): self._loaded(name, tensors) for name in {n.split(".")[0] for n in tensors} - {"now"}}
        self._layers[slot], self._kept[slot], self._lengths[slot] = layers, kept, length

    def _loaded(self, beginning: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, LayerSlot]:
        loaded = self._empty()
        for n, layer in loaded.items():
            for name, place in _named(beginning, {n: layer}).items():
                if name not in tensors or tensors[name].shape != place.shape:
                    raise ValueError(f"{name} is not the state of this model's layer")
                place.copy_(tensors[name])
            names = (f"{beginning}.{n}.pending.{i}" for i in range(len(tensors)))
            if rows := tuple(tensors[name].to(self._device) for name in names if name in tensors):
                layer.pending.append(rows)
        return loaded


def _named(beginning: str, layers: Mapping[int, LayerSlot]) -> dict[str, torch.Tensor]:
    """The tensors of a slot's committed part, by names that begin with ``beginning``."""
    tensors: dict[str, torch.Tensor] = {}
    for n, layer in layers.items():
        tensors |= {f"{beginning}.{n}.window.{i}": window for i, window in layer.now.windows.items()}
        if layer.now.state is not None:
            tensors[f"{beginning}.{n}.state"] = layer.now.state
        for i, rows in enumerate(zip(*layer.pending, strict=True)):
            tensors[f"{beginning}.{n}.pending.{i}"] = torch.cat(rows)
    return tensors


def _select(rows: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """A copy of some rows, so that the others' memory is given back."""
    if list(path) == list(range(len(path))):
        return rows[: len(path)].clone()
    return rows[torch.tensor(list(path), dtype=torch.long, device=rows.device)]
