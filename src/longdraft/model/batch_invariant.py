"""Batch invariance on a CPU for a model's own code: a row has the same bits alone and among others.

torch's matrix products sum in an order that depends on the number of rows. exp and similar functions are computed in
SIMD vectors, and the remainder of a tensor or of a thread's range number by number, which rounds differently. Inside
:class:`BatchInvariantMode` our kernels compute the products, and such functions run on full vectors only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longdraft.model.skinny_gemm import is_plain_tensor, kernel_linear
from longdraft.native import kernels
from longdraft.native.experts import ExpertWeights, GroupedGemm

# Elements that torch gives to one thread, and a multiple of every CPU's vector length.
_GRAIN_SIZE, _VECTOR_MULTIPLE = 32768, 128
_ELEMENTWISE = ("sigmoid", "silu", "softplus", "tanh", "exp", "gelu", "logsigmoid", "softsign", "log", "log1p", "expm1")
_MORE_NAMES = ("erf", "mish", "elu", "celu", "selu")

# Tensor arguments that can be passed by name; calls that do so run unchanged.
_TENSOR_KEYWORDS = frozenset({"input", "other", "mat2", "out"})

Call = Callable[..., Any]


class BatchInvariantMode(TorchFunctionMode):
    """Inside this mode a row's results do not depend on the other rows. Overhead: a microsecond per call of torch.

    Args:
        products: also replaces matmul, addmm and bmm, not only linear layers.
    """

    def __init__(self, products: bool = True) -> None:
        super().__init__()
        self._rules = _FUNCTIONS | _PRODUCTS if products else _FUNCTIONS

    def __torch_function__(
        self, func: Call, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        rule, kwargs = self._rules.get(func), kwargs or {}
        result = None if rule is None or _TENSOR_KEYWORDS & kwargs.keys() else rule(func, *args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def outside_mode(function: Call) -> Call:
    """The function with :class:`BatchInvariantMode` off inside: its calls are batch invariant already."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return wrapped


def in_full_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies an elementwise function so that no result depends on an element's position in the tensor."""
    count = x.numel()
    on_cpu = x.device.type == "cpu" and x.is_floating_point()
    if not on_cpu or (count <= _GRAIN_SIZE and count % _VECTOR_MULTIPLE == 0 and x.is_contiguous()):
        return function(x)
    flat = x.contiguous().view(-1)
    if padding := -count % _VECTOR_MULTIPLE:
        flat = F.pad(flat, (0, padding))
    return torch.cat([function(chunk) for chunk in flat.split(_GRAIN_SIZE)])[:count].view(x.shape)


def _in_full_vectors(call: Call, *args: Any, **named: Any) -> Any:
    if not args or not is_plain_tensor(args[0]):
        return None
    return in_full_vectors(lambda chunk: call(chunk, *args[1:], **named), args[0])


def _glu(call: Call, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """GLU combines the halves of a row, so it runs row by row."""
    return torch.cat([call(row, *args, **named) for row in x.reshape(-1, x.shape[-1]).split(1)]).view(*x.shape[:-1], -1)


def _complex_mul(_call: Call, a: Any, b: Any, **named: Any) -> torch.Tensor | None:
    """Complex products from real ones: torch rounds the last elements of a complex tensor differently."""
    if named or not all(isinstance(x, torch.Tensor) and x.is_complex() for x in (a, b)):
        return None
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _linear(
    _call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    plain = is_plain_tensor(x) and is_plain_tensor(weight)
    return kernel_linear(x, weight, bias) if plain and weight.dim() == 2 else None


def _matmul(call: Call, x: torch.Tensor, other: torch.Tensor, **named: Any) -> torch.Tensor | None:
    """x (..., in) times a matrix (in, out), or a matrix (out, in) times rows (B, in, T)."""
    if named or not is_plain_tensor(x) or not is_plain_tensor(other) or x.dim() < 1:
        return None
    if x.dim() == 2 and other.dim() == 3 and x.device.type == "cpu" and other.shape[0] * other.shape[2] > 1:
        products = [torch.cat([call(x, row) for row in matrix.split(1, 2)], dim=2) for matrix in other.split(1)]
        return torch.cat(products)
    if other.dim() != 2:
        return None
    if other.stride(0) == 1:
        return _linear(call, x, other.t())
    product = _bmm(call, x.reshape(1, -1, x.shape[-1]), other[None])
    return None if product is None else product.view(*x.shape[:-1], other.shape[1])


def _addmm(call: Call, bias: torch.Tensor, x: torch.Tensor, other: torch.Tensor, **named: Any) -> torch.Tensor | None:
    """A product with a bias, as GPT-2's layers call it."""
    product = _matmul(call, x, other, **named)
    return None if product is None else product + bias


def _bmm(_call: Call, x: torch.Tensor, other: torch.Tensor, **named: Any) -> torch.Tensor | None:
    """x (E, rows, in) times matrices (E, in, out). A matrix whose rows of x are all zero is not read."""
    cpu_kernels = kernels()
    readable = all(is_plain_tensor(t) and t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, other))
    if cpu_kernels is None or named or not readable or x.numel() == 0 or 1 not in other.stride()[1:]:
        return None
    by_input = other.stride(2) == 1
    weights = ExpertWeights(other.detach() if by_input else other.detach().transpose(1, 2), transposed=by_input)
    nonzero = (x != 0).any(-1)
    counts = nonzero.sum(1).tolist()
    out = x.new_zeros(*x.shape[:2], other.shape[2])
    if any(counts):
        experts = [i for i, count in enumerate(counts) if count]
        starts = [0, *itertools.accumulate(counts[i] for i in experts)]
        out[nonzero] = GroupedGemm(cpu_kernels, [weights])(x[nonzero], experts, starts)[0]
    return out


def _torch_functions(*names: str) -> list[Any]:
    """torch's functions of these names, in every namespace that a model may take them from."""
    namespaces = (torch, torch.Tensor, F, torch._C._nn)
    return [function for n in namespaces for name in names if (function := getattr(n, name, None)) is not None]


_FUNCTIONS: dict[Any, Call] = {
    **dict.fromkeys(_torch_functions(*_ELEMENTWISE, *_MORE_NAMES), _in_full_vectors),
    **dict.fromkeys(_torch_functions("glu"), _glu),
    **dict.fromkeys(_torch_functions("mul", "__mul__"), _complex_mul),
    **dict.fromkeys(_torch_functions("linear"), _linear),
}
_PRODUCTS: dict[Any, Call] = {
    **dict.fromkeys(_torch_functions("matmul", "__matmul__", "mm"), _matmul),
    **dict.fromkeys(_torch_functions("addmm"), _addmm),
    **dict.fromkeys(_torch_functions("bmm"), _bmm),
}
