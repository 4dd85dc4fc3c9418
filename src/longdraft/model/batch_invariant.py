"""Gives each row of a forward on a CPU the bits that it has alone, where a model runs its own code.

torch's products add up in an order that depends on the number of rows. exp and its kin are computed in vectors, and the
numbers left over at the end of a tensor, or of a thread's share, one by one, which rounds differently. Inside
:class:`BatchInvariantMode` such calls are made in another way: products by our kernels, functions on tensors of whole vectors.
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

# Numbers that torch gives to one thread (its grain size), and a multiple of the numbers of any CPU's vectors.
_SHARE, _VECTORS = 32768, 128
_NAMES = ("sigmoid", "silu", "softplus", "tanh", "exp", "gelu", "logsigmoid", "softsign", "log", "log1p", "expm1")
_MORE_NAMES = ("erf", "mish", "elu", "celu", "selu")

# Tensors that torch's functions take by name as well; such calls have no rule.
_OTHER_NAMES = frozenset({"input", "other", "mat2", "out"})

Call = Callable[..., Any]


class BatchInvariantMode(TorchFunctionMode):
    """While it is on, a row's results do not depend on the rows beside it. It takes a microsecond for a call of torch.

    Args:
        products: all products of matrices, and not those of linear layers alone.
    """

    def __init__(self, products: bool = True) -> None:
        super().__init__()
        self._rules = _FUNCTIONS | _PRODUCTS if products else _FUNCTIONS

    def __torch_function__(
        self, func: Call, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        rule, named = self._rules.get(func), kwargs or {}
        found = None if rule is None or _OTHER_NAMES & named.keys() else rule(func, *args, **named)
        return func(*args, **named) if found is None else found


def outside_mode(function: Call) -> Call:
    """The function without :class:`BatchInvariantMode` inside: what it calls is exact by row as it is."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return inside


def in_full_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies an elementwise function so that no result depends on a number's place in the tensor."""
    count = x.numel()
    local = x.device.type == "cpu" and x.is_floating_point()
    if not local or (count <= _SHARE and count % _VECTORS == 0 and x.is_contiguous()):
        return function(x)
    flat = x.contiguous().view(-1)
    if missing := -count % _VECTORS:
        flat = F.pad(flat, (0, missing))
    return torch.cat([function(share) for share in flat.split(_SHARE)])[:count].view(x.shape)


def _elementwise(call: Call, *args: Any, **named: Any) -> Any:
    if not args or not is_plain_tensor(args[0]):
        return None
    return in_full_vectors(lambda share: call(share, *args[1:], **named), args[0])


def _gated(call: Call, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """GLU puts halves of a row together."""
    return torch.cat([call(row, *args, **named) for row in x.reshape(-1, x.shape[-1]).split(1)]).view(*x.shape[:-1], -1)


def _times(_call: Call, a: Any, b: Any, **named: Any) -> torch.Tensor | None:
    """Multiplies complex numbers by real products: torch rounds those at the end of a tensor otherwise."""
    if named or not all(isinstance(x, torch.Tensor) and x.is_complex() for x in (a, b)):
        return None
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _linear(
    _call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    return (
        kernel_linear(x, weight, bias) if is_plain_tensor(x) and is_plain_tensor(weight) and weight.dim() == 2 else None
    )


def _matmul(call: Call, x: torch.Tensor, other: torch.Tensor, **named: Any) -> torch.Tensor | None:
    """x (..., in) times a matrix (in, out), or a matrix (out, in) times rows (B, in, T)."""
    if named or not is_plain_tensor(x) or not is_plain_tensor(other) or x.dim() < 1:
        return None
    if x.dim() == 2 and other.dim() == 3 and x.device.type == "cpu" and other.shape[0] * other.shape[2] > 1:
        each = [torch.cat([call(x, row) for row in one.split(1, 2)], dim=2) for one in other.split(1)]
        return torch.cat(each)
    if other.dim() != 2:
        return None
    if other.stride(0) == 1:
        return _linear(call, x, other.t())
    found = _bmm(call, x.reshape(1, -1, x.shape[-1]), other[None])
    return None if found is None else found.view(*x.shape[:-1], other.shape[1])


def _addmm(call: Call, bias: torch.Tensor, x: torch.Tensor, other: torch.Tensor, **named: Any) -> torch.Tensor | None:
    """A matrix times rows and a bias, as GPT-2 writes it."""
    found = _matmul(call, x, other, **named)
    return None if found is None else found + bias


def _bmm(_call: Call, x: torch.Tensor, other: torch.Tensor, **named: Any) -> torch.Tensor | None:
    """x (E, rows, in) times matrices (E, in, out). Where all rows of a matrix are zero, it is not read."""
    own = kernels()
    served = all(is_plain_tensor(t) and t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, other))
    if own is None or named or not served or x.numel() == 0 or 1 not in other.stride()[1:]:
        return None
    by_input = other.stride(2) == 1
    weights = ExpertWeights(other.detach() if by_input else other.detach().transpose(1, 2), transposed=by_input)
    wanted = (x != 0).any(-1)
    counts = wanted.sum(1).tolist()
    out = x.new_zeros(*x.shape[:2], other.shape[2])
    if any(counts):
        experts = [number for number, count in enumerate(counts) if count]
        starts = [0, *itertools.accumulate(counts[number] for number in experts)]
        out[wanted] = GroupedGemm(own, [weights])(x[wanted], experts, starts)[0]
    return out


def _named(*names: str) -> list[Any]:
    """The functions of torch with these names, wherever a model may take them from."""
    found = (getattr(home, name, None) for home in (torch, torch.Tensor, F, torch._C._nn) for name in names)
    return [function for function in found if function is not None]


_FUNCTIONS: dict[Any, Call] = {
    **dict.fromkeys(_named(*_NAMES, *_MORE_NAMES), _elementwise),
    **dict.fromkeys(_named("glu"), _gated),
    **dict.fromkeys(_named("mul", "__mul__"), _times),
    **dict.fromkeys(_named("linear"), _linear),
}
_PRODUCTS: dict[Any, Call] = {
    **dict.fromkeys(_named("matmul", "__matmul__", "mm"), _matmul),
    **dict.fromkeys(_named("addmm"), _addmm),
    **dict.fromkeys(_named("bmm"), _bmm),
}
