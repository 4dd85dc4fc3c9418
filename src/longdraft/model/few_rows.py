"""Linear layers for the few rows of a verification, on a CPU in float32.

torch's plain product reads a matrix badly for more than one row and fewer than many. Our own kernel reads it once, from
where it lies; where that cannot be compiled, oneDNN's packed product does nearly as well, for a second copy of the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.model.packing import PackedLinear, packable, pays, room_for
from longdraft.native import Kernels, Stored, kernels
from longdraft.native.rounded import Rounded
from longdraft.native.structures import Weights

# Rows up to which our kernel wins; more are bound by arithmetic, which torch's product does as well.
MOST = 128
# The same for bfloat16 and float16 where the machine multiplies these as such.
MOST_HALVES = 8
# Layers of one module that are given the same rows: their products are one call.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@cache
def _most_halves() -> int:
    """Rows of bfloat16 or float16 up to which our kernel wins here."""
    # Not public: older torch may lack them.
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return MOST_HALVES if any(ask is not None and ask() for ask in asked) else MOST


class FewRowsLinear:
    """One weight matrix, as ``F.linear``.

    Args:
        weight: (out, in). It is not changed. Where there are kernels, it may be stored or rounded.
    """

    def __init__(self, weight: torch.Tensor | Stored | Rounded, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        if not isinstance(weight, torch.Tensor):
            self._kernels, self._packed = kernels(), None
            return
        self._kernels = kernels() if _plain(weight) else None
        self._packed = PackedLinear(weight, bias) if self._kernels is None and packable(weight) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out)."""
        rows = x.numel() // x.shape[-1]
        if self._kernels is not None and (rows <= MOST or not isinstance(self.weight, torch.Tensor)):
            return self._kernels.linear(x, [(self.weight, self.bias)])[0]
        assert isinstance(self.weight, torch.Tensor)
        if self._packed is not None and pays(rows):
            return self._packed(x)
        return F.linear(x, self.weight, self.bias)


class FewRowsModule:
    """Makes the linear layers of a module fast for few rows, from now on: the module has to be nobody's but ours.

    One thread at a time may use the module.

    Args:
        module: layers that are plain ``nn.Linear`` in float32 on the CPU take part, and those with
            ``kernel_weights`` (:class:`~longdraft.native.Stored`); others do not.

    Attributes:
        most: rows up to which our kernel serves, and torch's product beyond them; None: ours serves any number. The two
            differ in the last bits, so where a row's result must not depend on the rows beside it, one has to do all.
    """

    def __init__(self, module: nn.Module) -> None:
        self.most: int | None = MOST
        layers = [m for m in module.modules() if weights_of(m) is not None and "forward" not in vars(m)]
        self._kernels = kernels() if layers else None
        self._room: bool | None = None
        self._groups: list[_Group] = []
        self._packed: dict[nn.Module, PackedLinear] = {}
        if self._kernels is not None:
            self._groups = [_Group(self, self._kernels, members) for members in _together(module, layers)]
            for group in self._groups:
                group.install()
        else:
            plain = [x for x in layers if type(x) is nn.Linear and packable(x.weight)]
            self._packed = {x: PackedLinear(x.weight, x.bias) for x in plain}
            for layer in self._packed:
                vars(layer)["forward"] = self._by_packed(layer)

    @property
    def layers(self) -> list[nn.Module]:
        """Those that take part."""
        return [layer for group in self._groups for layer in group.layers] or list(self._packed)

    def serves(self, x: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether our kernel multiplies these rows (..., in) with layers that compute in a dtype."""
        if self.most is not None:
            most = self.most if dtype == torch.float32 else min(self.most, _most_halves())
            if x.numel() > most * x.shape[-1]:
                return False
        # A model may be cast or moved while a run goes on.
        return x.dtype == dtype and x.device.type == "cpu"

    def forget(self) -> None:
        """Lets go of what a forward that was broken off has left."""
        for group in self._groups:
            group.forget()

    def _by_packed(self, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        packed = self._packed[layer]
        otherwise = layer.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if pays(x.numel() // x.shape[-1]) and x.dtype == torch.float32 and self._has_room():
                return packed(x)
            return otherwise(x)

        return forward

    def _has_room(self) -> bool:
        if self._room is None:  # found out once, when packed weights are first wanted
            self._room = room_for(self._packed)
        return self._room


class _Group:
    """Layers that are called with the same rows one after the other: the first call computes for all."""

    def __init__(self, owner: FewRowsModule, kernels: Kernels, layers: list[nn.Module]) -> None:
        self._owner, self._kernels, self.layers = owner, kernels, layers
        # Where a weight gets another storage, the kernel reads the one that it had when it was looked at.
        self._pairs = [pair for x in layers if (pair := weights_of(x)) is not None]
        self._dtype = _computes_in(layers[0])
        self.forget()

    def forget(self) -> None:
        self._x: torch.Tensor | None = None
        self._found: list[torch.Tensor | None] = []

    def install(self) -> None:
        """Puts our product in the place of the layers' own."""
        for number, layer in enumerate(self.layers):
            vars(layer)["forward"] = self._member(number)

    def _member(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        otherwise = self.layers[number].forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not self._owner.serves(x, self._dtype):
                return otherwise(x)
            if x is not self._x or self._found[number] is None:
                # Sums are float32; what a layer in half precision gives is rounded once.
                self._x, self._found = x, [y.to(x.dtype) for y in self._kernels.linear(x.float(), self._pairs)]
            out = self._found[number]
            assert out is not None
            self._found[number] = None  # a layer that is asked twice computes twice: x may have changed
            if not any(other is not None for other in self._found):
                self.forget()
            return out

        return forward


def _together(module: nn.Module, layers: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """The layers, those that are given the same rows in one list."""
    left = dict.fromkeys(layers)
    for parent in module.modules():
        for names in _TOGETHER:
            members = [m for m in (getattr(parent, name, None) for name in names) if m in left]
            if len(members) == len(names) and len({*map(_computes_in, members)}) == 1:
                yield members
                left = {layer: None for layer in left if layer not in members}
    for layer in left:
        yield [layer]


def weights_of(layer: nn.Module) -> Weights | None:
    """What a linear layer multiplies with, for our kernels; None: it is none, or one that they do not serve."""
    weight: torch.Tensor | Stored
    if isinstance(kept := getattr(layer, "kernel_weights", None), Stored):
        weight = kept
    elif type(layer) is not nn.Linear:  # a subclass (quantised, adapted) computes something else
        return None
    elif _plain(layer.weight):
        weight = layer.weight.detach()  # detached: it may get another storage
    elif in_halves(layer.weight):
        weight = Stored.of(layer.weight)
    else:
        return None
    bias = layer.bias
    return weight, bias.detach().float() if isinstance(bias, torch.Tensor) else None


def in_halves(weight: torch.Tensor) -> bool:
    """Whether our kernels read a bfloat16 or float16 matrix as it is."""
    half = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
    return half and not is_shared_out(weight) and weight.shape[1] % 32 == 0 and weight.is_contiguous()


def is_shared_out(weight: object) -> bool:
    """Whether a weight is a DTensor: several processes have a share of it each."""
    return hasattr(weight, "device_mesh")


def _computes_in(layer: nn.Module) -> torch.dtype:
    return layer.weight.dtype if type(layer) is nn.Linear else torch.float32


def _plain(weight: torch.Tensor) -> bool:
    own = weight.device.type == "cpu" and not is_shared_out(weight)
    return own and weight.dtype == torch.float32 and weight.stride(-1) == 1
