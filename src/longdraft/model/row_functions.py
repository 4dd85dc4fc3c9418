"""Elementwise functions that give a number the same bits wherever it stands.

torch computes exp and its kin in vectors, and the numbers left over at the end of a tensor, or of a thread's share, one
by one, which rounds differently. Where a layer calls such a function itself, a row would depend on the number of rows
beside it. Here such calls are made on tensors of whole vectors, a thread's share at a time.

Activations that are modules of their own are treated in :mod:`longdraft.model.row_activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longdraft.model.model_code import own_forward, present_forward, replace_forward

# Numbers that torch gives to one thread (its grain size), and a multiple of the numbers of any CPU's vectors.
_SHARE, _VECTORS = 32768, 128
_NAMES = ("sigmoid", "silu", "softplus", "tanh", "exp", "gelu", "logsigmoid", "softsign", "log", "log1p", "expm1")
_FUNCTIONS = frozenset(
    function
    for home in (torch, torch.Tensor, F, torch._C._nn)
    for function in (getattr(home, name, None) for name in _NAMES)
    if function is not None
)
_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})
_TIMES = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__})
# Words in a layer's code that call one of them; rotations may multiply complex numbers.
_WORDS = frozenset({*_NAMES, "ACT2FN", "apply_rotary_emb"})


class WholeVectors(TorchFunctionMode):
    """While it is on, elementwise functions on the CPU do not depend on a number's place in a tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return _by_column(func, *args)
        if func in _TIMES and not kwargs and all(isinstance(x, torch.Tensor) and x.is_complex() for x in args):
            return _complex_product(*args)
        if func not in _FUNCTIONS or not args or "out" in kwargs:
            return func(*args, **kwargs)
        x = args[0]
        if not isinstance(x, torch.Tensor):
            return func(*args, **kwargs)
        return whole_vectors(lambda share: func(share, *args[1:], **kwargs), x)


def whole_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies an elementwise function so that no result depends on a number's place in the tensor."""
    count = x.numel()
    local = x.device.type == "cpu" and x.is_floating_point()
    if not local or (count <= _SHARE and count % _VECTORS == 0 and x.is_contiguous()):
        return function(x)
    flat = x.contiguous().view(-1)
    if missing := -count % _VECTORS:
        flat = F.pad(flat, (0, missing))
    return torch.cat([function(share) for share in flat.split(_SHARE)])[:count].view(x.shape)


def undisturbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without :class:`WholeVectors` inside, which takes a microsecond for each call of torch."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return inside


def _complex_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiplies complex numbers by real products: torch rounds those at the end of a tensor otherwise."""
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _by_column(product: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A weight a (out, in) times rows b (B, in, T), row by row: torch's product rounds by the number of rows."""
    if a.dim() != 2 or b.dim() != 3 or a.device.type != "cpu" or b.shape[0] * b.shape[2] == 1:
        out: torch.Tensor = product(a, b)
        return out
    return torch.cat([torch.cat([product(a, x) for x in one.split(1, 2)], dim=2) for one in b.split(1)])


def install(model: nn.Module, wanted: Callable[[], bool]) -> None:
    """Makes layers whose own code calls elementwise functions compute them so. The model must be a copy of our own.

    Args:
        wanted: called in each forward; while it returns False, layers compute as usual.
    """
    linear: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__module__.startswith("torch.") or type(module).__module__ == "transformers.activations":
            continue
        if _WORDS & own_forward(module).words:
            replace_forward(module, _switched(present_forward(module), wanted))
            for inner in module.modules():
                if type(inner) is nn.Linear and inner not in linear:  # a router may be a subclass
                    linear.add(inner)
                    replace_forward(inner, undisturbed(present_forward(inner)))


def _switched(forward: Callable[..., Any], wanted: Callable[[], bool]) -> Callable[..., Any]:
    def switched(*args: Any, **kwargs: Any) -> Any:
        if not wanted():
            return forward(*args, **kwargs)
        with WholeVectors():
            return forward(*args, **kwargs)

    return switched
