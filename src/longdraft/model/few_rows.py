"""Linear layers for the few rows of a verification, on a CPU in float32.

torch's plain product reads a matrix badly for a few rows. Our own kernel reads it once, where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.native import Kernels, Stored, kernels
from longdraft.native.structures import Weights

# Number of rows up to which our kernel is faster; more are bound by arithmetic, which torch's product does as well.
MOST = 128
# The same for bfloat16 and float16 if the machine has instructions that multiply them.
MOST_HALVES = 8
# Layers of one module that get the same input: their products are one call.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@cache
def _most_halves() -> int:
    """Number of rows of bfloat16 or float16 up to which our kernel is faster here."""
    # These functions are private: older versions of torch may lack them.
    checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return MOST_HALVES if any(check is not None and check() for check in checks) else MOST


class FewRowsLinear:
    """Multiplies with one weight matrix, as ``F.linear``.

    Args:
        weight: (out, in). It may be stored if there are kernels.
    """

    def __init__(self, weight: torch.Tensor | Stored, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._kernels = kernels() if not isinstance(weight, torch.Tensor) or _plain(weight) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out)."""
        rows = x.numel() // x.shape[-1]
        if self._kernels is not None and (rows <= MOST or not isinstance(self.weight, torch.Tensor)):
            return self._kernels.linear(x, [(self.weight, self.bias)])[0]
        assert isinstance(self.weight, torch.Tensor)
        return F.linear(x, self.weight, self.bias)


class FewRowsModule:
    """Makes the linear layers of a module fast for few rows, for good. One thread at a time may use the module.

    Args:
        module: a module of our own. Plain ``nn.Linear`` on the CPU take part, and layers with ``kernel_weights``
            (:class:`~longdraft.native.Stored`).

    Attributes:
        most: our kernel computes up to this number of rows, and torch more rows; None: our kernel computes any number.
            The two differ in the last bits, so a row's result is independent of the rows beside it only with None.
    """

    def __init__(self, module: nn.Module) -> None:
        self.most: int | None = MOST
        plain_forward = [m for m in module.modules() if "forward" not in vars(m)]
        layers = [m for m in plain_forward if weights_of(m) is not None]
        own = kernels() if layers else None
        self._groups = [] if own is None else [_Group(self, own, members) for members in _together(module, layers)]

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that take part."""
        return [layer for group in self._groups for layer in group.layers]

    def serves(self, x: torch.Tensor, dtype: torch.dtype) -> bool:
        """True if our kernel multiplies the rows x (..., in) with layers that compute in ``dtype``."""
        if self.most is not None:
            most = self.most if dtype == torch.float32 else min(self.most, _most_halves())
            if x.numel() > most * x.shape[-1]:
                return False
        # A model may be cast or moved during a run.
        return x.dtype == dtype and x.device.type == "cpu"

    def forget(self) -> None:
        """Drops products that an interrupted forward has left."""
        for group in self._groups:
            group.forget()


class _Group:
    """Layers that are called with the same rows one after the other: the first call computes all products."""

    def __init__(self, owner: FewRowsModule, kernels: Kernels, layers: list[nn.Module]) -> None:
        self._owner, self._kernels, self.layers = owner, kernels, layers
        # If a weight gets another storage, the kernel still reads the one that it has here.
        self._pairs = [pair for x in layers if (pair := weights_of(x)) is not None]
        self._dtype = _computes_in(layers[0])
        self.forget()
        for number, layer in enumerate(layers):
            vars(layer)["forward"] = self._member(number)

    def forget(self) -> None:
        self._x: torch.Tensor | None = None
        self._products: list[torch.Tensor | None] = []

    def _member(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = self.layers[number]
        original, weight = layer.forward, layer._parameters.get("weight")

        def forward(x: torch.Tensor) -> torch.Tensor:
            # An adapter may have another weight in its place for this forward.
            if not self._owner.serves(x, self._dtype) or layer._parameters.get("weight") is not weight:
                return original(x)
            with torch._C.DisableTorchFunction():
                return products(x)

        def products(x: torch.Tensor) -> torch.Tensor:
            if x is not self._x or self._products[number] is None:
                # Sums are float32; the results of a layer in half precision are rounded once.
                self._x, self._products = x, [y.to(x.dtype) for y in self._kernels.linear(x.float(), self._pairs)]
            out = self._products[number]
            assert out is not None
            self._products[number] = None  # a second call of the layer computes again: x may have changed
            if all(other is None for other in self._products):
                self.forget()
            return out

        return forward


def _together(module: nn.Module, layers: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Groups the layers that get the same rows."""
    remaining = dict.fromkeys(layers)
    for parent in module.modules():
        for names in TOGETHER:
            members = [m for m in (getattr(parent, name, None) for name in names) if m in remaining]
            if len(members) == len(names) and len({*map(_computes_in, members)}) == 1:
                yield members
                remaining = {layer: None for layer in remaining if layer not in members}
    for layer in remaining:
        yield [layer]


def weights_of(layer: nn.Module) -> Weights | None:
    """The weights and bias of a linear layer for our kernels; None if they do not serve this module."""
    weight: torch.Tensor | Stored
    if isinstance(kept := getattr(layer, "kernel_weights", None), Stored):
        weight = kept
    # A subclass (quantised, adapted) computes something else, and so does a weight of a tensor's subclass.
    elif type(layer) is not nn.Linear or not is_plain(getattr(layer, "weight", None)):
        return None
    elif _plain(layer.weight):
        weight = layer.weight.detach()  # detached: it may get another storage
    elif in_halves(layer.weight):
        weight = Stored.of(layer.weight)
    else:
        return None
    bias = layer.bias
    return weight, bias.detach().float() if isinstance(bias, torch.Tensor) else None


def is_plain(weight: object) -> bool:
    """True if a weight is a tensor of torch's own. Quantised ones and shares of several processes are subclasses."""
    return type(weight) in (torch.Tensor, nn.Parameter)


def in_halves(weight: torch.Tensor) -> bool:
    """True if our kernels can read this matrix in bfloat16 or float16."""
    half = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
    return half and is_plain(weight) and weight.shape[1] % 32 == 0 and weight.is_contiguous()


def is_shared_out(weight: object) -> bool:
    """True if a weight is a DTensor, of which each of several processes has a share."""
    return hasattr(weight, "device_mesh")


def _computes_in(layer: nn.Module) -> torch.dtype:
    return layer.weight.dtype if type(layer) is nn.Linear else torch.float32


def _plain(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and is_plain(weight) and weight.dtype == torch.float32 and weight.stride(-1) == 1
