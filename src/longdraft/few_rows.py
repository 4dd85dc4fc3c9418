"""Linear layers for the few rows of a verification, on a CPU in float32.

torch's plain product reads a matrix badly for more than one row and fewer than many. Our own kernel reads it once, from
where it lies; where that cannot be compiled, oneDNN's packed product does nearly as well, for a second copy of the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.native import Kernels, kernels
from longdraft.packing import PackedLinear, packable, pays, room_for

# Rows up to which our kernel wins; more are bound by arithmetic, which torch's product does as well.
MOST = 128
# Layers of one module that are given the same rows: their products are one call.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FewRowsLinear:
    """One weight matrix, as ``F.linear``.

    Args:
        weight: (out, in). It is not changed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._kernels = kernels() if _plain(weight) else None
        self._packed = PackedLinear(weight, bias) if self._kernels is None and packable(weight) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out)."""
        rows = x.numel() // x.shape[-1]
        if self._kernels is not None and rows <= MOST:
            return self._kernels.linear(x, [(self.weight, self.bias)])[0]
        if self._packed is not None and pays(rows):
            return self._packed(x)
        return F.linear(x, self.weight, self.bias)


class FewRowsModule:
    """The linear layers of a module, made fast for few rows; the module itself stays as it is.

    Args:
        module: layers that are plain ``nn.Linear`` in float32 on the CPU take part, others do not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [m for m in module.modules() if isinstance(m, nn.Linear) and _takes_part(m)]
        self._kernels = kernels() if self._layers else None
        self._room: bool | None = None
        self._forwards: list[Callable[[torch.Tensor], torch.Tensor]]
        if self._kernels is not None:
            self._together = _groups(module, self._layers, self._kernels)
            member = {layer: forward for group in self._together for layer, forward in group.forwards()}
            self._forwards = [member.get(m) or FewRowsLinear(m.weight, m.bias) for m in self._layers]
        else:
            self._together = []
            self._layers = [layer for layer in self._layers if packable(layer.weight)]
            self._forwards = [PackedLinear(layer.weight, layer.bias) for layer in self._layers]

    def _pays(self, rows: int) -> bool:
        if self._kernels is not None:
            return rows <= MOST
        if not pays(rows):
            return False
        if self._room is None:  # found out once, when packed weights are first wanted
            self._room = room_for(self._layers)
        return self._room

    @contextmanager
    def serving(self, rows: int) -> Iterator[None]:
        """Inside the ``with``, the layers compute by our means, where that pays for this many rows."""
        if not self._layers or not self._pays(rows):
            yield
            return
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            vars(layer)["forward"] = forward
        try:
            yield
        finally:
            for layer in self._layers:
                vars(layer).pop("forward", None)
            for group in self._together:
                group.forget()


class _Together:
    """Layers that are called with the same rows one after the other: the first call computes for all."""

    def __init__(self, kernels: Kernels, layers: list[nn.Linear]) -> None:
        self._kernels, self._layers = kernels, layers
        self._pairs = [(layer.weight, layer.bias) for layer in layers]
        self.forget()

    def forget(self) -> None:
        self._x: torch.Tensor | None = None
        self._found: list[torch.Tensor | None] = []

    def forwards(self) -> Iterator[tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]]:
        """(layer, what it shall compute with)."""
        for number, layer in enumerate(self._layers):
            yield layer, self._member(number)

    def _member(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if x is not self._x or self._found[number] is None:
                self._x, self._found = x, list(self._kernels.linear(x, self._pairs))
            out = self._found[number]
            assert out is not None
            self._found[number] = None  # a layer that is asked twice computes twice: x may have changed
            return out

        return forward


def _groups(module: nn.Module, layers: list[nn.Linear], kernels: Kernels) -> list[_Together]:
    able = set(layers)
    found = []
    for parent in module.modules():
        for names in _TOGETHER:
            members = [m for m in (getattr(parent, name, None) for name in names) if m in able]
            if len(members) == len(names):
                found.append(_Together(kernels, members))
    return found


def _takes_part(layer: nn.Linear) -> bool:
    # Exactly nn.Linear: a subclass (quantised, adapted) computes something else.
    return type(layer) is nn.Linear and _plain(layer.weight) and "forward" not in vars(layer)


def _plain(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.stride(-1) == 1
