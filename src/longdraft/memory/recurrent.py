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
    """The state that one layer keeps of a slot's committed rows.

    Attributes:
        windows: convolution -> its last inputs (inputs kept, channels).
        state: the recurrent state (shape of the layer), which lacks the pending rows.
        pending: their inputs. These tensors are never written to.
    """

    windows: dict[int, torch.Tensor]
    state: torch.Tensor | None
    pending: Rows = ()

    def clone(self) -> Checkpoint:
        state = None if self.state is None else self.state.clone()
        return Checkpoint({i: window.clone() for i, window in self.windows.items()}, state, self.pending)

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by the names that they have in a file."""
        found = {f"window.{i}": window for i, window in self.windows.items()}
        found |= {} if self.state is None else {"state": self.state}
        return found | {f"pending.{i}": rows for i, rows in enumerate(self.pending)}


@dataclass
class LayerSlot:
    """One layer's part of a slot.

    Attributes:
        now: the checkpoint.
        inputs: convolution -> inputs (rows, channels) of unverified rows.
        rows: inputs of the recurrence for unverified rows.
        after: the checkpoint after a piece of a prompt, in the place of its rows' inputs.
        prompt: the unverified rows are a piece of a prompt.
    """

    now: Checkpoint
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: Rows = ()
    after: Checkpoint | None = None
    prompt: bool = False

    def begin(self, prompt: bool) -> None:
        """Called when a forward begins."""
        self.prompt, self.after = prompt, None

    def keep_inputs(self, number: int, offset: int, new: torch.Tensor) -> torch.Tensor:
        """Writes a convolution's inputs (T, channels) of unverified rows from ``offset`` on; returns all of them."""
        self.inputs[number] = new if not offset else torch.cat([self.inputs[number][:offset], new])
        return self.inputs[number]

    def keep_rows(self, offset: int, new: Rows) -> None:
        """Writes the recurrence's inputs (T, ...) of unverified rows from ``offset`` on."""
        old = self.rows
        self.rows = tuple(torch.cat([a[:offset], b]) for a, b in zip(old, new, strict=True)) if offset else new

    def commit(self, path: Sequence[int]) -> None:
        """Keeps a path of the unverified rows; of a piece of a prompt all rows or none."""
        if self.after is not None:
            self.now = self.after if path else self.now
        elif path:
            for number, window in self.now.windows.items():
                new = _select(self.inputs[number], path[-len(window) :] if len(window) else [])
                self.now.windows[number] = torch.cat([window, new])[len(new) :]
            accepted = tuple(_select(x, path) for x in self.rows)
            before = self.now.pending
            self.now.pending = tuple(map(torch.cat, zip(before, accepted, strict=True))) if before else accepted
        self.forget()

    def forget(self) -> None:
        """Drops the unverified rows."""
        self.inputs, self.rows, self.after, self.prompt = {}, (), None, False


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
        self._kept: list[dict[int, dict[int, Checkpoint]]] = [{} for _ in range(slots)]
        self._lengths = [0] * slots

    def _zeros(self) -> dict[int, Checkpoint]:
        at, found = self._device, {}
        for layer, shape in self.shapes.items():
            windows = {i: torch.zeros(s, dtype=shape.dtype, device=at) for i, s in shape.windows.items()}
            state = None if shape.state is None else torch.zeros(shape.state, dtype=torch.float32, device=at)
            found[layer] = Checkpoint(windows, state)
        return found

    def _of(self, checkpoints: Mapping[int, Checkpoint]) -> dict[int, LayerSlot]:
        return {layer: LayerSlot(checkpoint.clone()) for layer, checkpoint in checkpoints.items()}

    def _now(self, slot: int) -> dict[int, Checkpoint]:
        return {layer: each.now for layer, each in self._layers[slot].items()}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that a slot may take."""
        return (1 + KEPT) * sum(shape.bytes for shape in self.shapes.values())

    def layer(self, slot: int, layer: int) -> LayerSlot:
        """One layer's part of a slot, for a forward."""
        return self._layers[slot][layer]

    def prepare(self, slots: Sequence[int], bases: Sequence[int], rows: int) -> None:
        """Makes room before a forward: here any number of rows has some."""

    def commit(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Keeps rows of the last block.

        Args:
            start: committed rows before.
            path: indices of rows behind them, strictly increasing.
        """
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
        kept[self._lengths[slot]] = {layer: each.clone() for layer, each in self._now(slot).items()}
        lengths = sorted(kept)
        if len(lengths) > KEPT:
            ratios = [c / a for a, _, c in zip(lengths, lengths[1:], lengths[2:], strict=False)]
            del kept[lengths[1 + ratios.index(min(ratios))]]

    def restorable(self, slot: int, length: int) -> int:
        """The largest number of rows, ``length`` at most, that :meth:`truncate` can go back to. 0 always works."""
        if length >= self._lengths[slot]:
            return self._lengths[slot]
        return max((n for n in self._kept[slot] if n <= length), default=0)

    def truncate(self, slot: int, length: int) -> None:
        """Goes back to the state after ``length`` rows, which must be restorable."""
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
        self._layers[slot], self._lengths[slot] = self._of(kept[length] if length else self._zeros()), length

    def copy(self, other: RecurrentStates, source: int, slot: int, length: int) -> None:
        """Takes over the state after ``length`` rows of a slot of ``other``, which must be restorable there."""
        kept = other._kept[source]
        found = other._now(source) if length == other._lengths[source] else kept[length] if length else self._zeros()
        self._layers[slot], self._lengths[slot] = self._of(found), length
        self._kept[slot] = {n: states for n, states in kept.items() if n <= length}

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """The state of a slot as named tensors on the host, for a file."""
        return {
            f"{name}.{layer}.{each}": tensor.detach().cpu().contiguous()
            for name, states in [("now", self._now(slot)), *self._kept[slot].items()]
            for layer, checkpoint in states.items()
            for each, tensor in checkpoint.named().items()
        }

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        """Restores what :meth:`save` returned, as the state after ``length`` rows.

        Raises:
            ValueError: the tensors are not those of such a state.
        """
        found = {name: self._loaded(name, tensors) for name in {"now", *(n.split(".")[0] for n in tensors)}}
        self._layers[slot], self._lengths[slot] = self._of(found.pop("now")), length
        self._kept[slot] = {int(name): states for name, states in found.items()}

    def _loaded(self, beginning: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, Checkpoint]:
        loaded = self._zeros()
        for n, layer in loaded.items():
            for name, place in layer.named().items():
                found = tensors.get(f"{beginning}.{n}.{name}")
                if found is None or found.shape != place.shape:
                    raise ValueError(f"{beginning}.{n}.{name} is not the state of this model's layer")
                place.copy_(found)
            names = (f"{beginning}.{n}.pending.{i}" for i in range(len(tensors)))
            layer.pending = tuple(tensors[name].to(self._device) for name in names if name in tensors)
        return loaded


def _select(rows: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """A copy of some rows, so that the others' memory is given back."""
    if list(path) == list(range(len(path))):
        return rows[: len(path)].clone()
    return rows[torch.tensor(list(path), dtype=torch.long, device=rows.device)]
