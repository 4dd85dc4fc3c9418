"""Products in a layer's own code that give a row the same bits whatever rows are beside it.

A router or a mixture of experts multiplies with weights that are no linear layers. torch's products round by the number
of rows; here such calls go to our kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from longdraft.model.few_rows import in_halves
from longdraft.model.row_functions import WholeVectors
from longdraft.native import Stored, kernels
from longdraft.native.experts import ExpertProducts, ExpertWeights


class RowProducts(WholeVectors):
    """While it is on, products and elementwise functions of float32 on the CPU compute each row by itself."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        product = _PRODUCTS.get(func)
        if product is not None:
            found = product(*args, **(kwargs or {}))
            if found is not None:
                return found
        return super().__torch_function__(func, types, args, kwargs)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
    own = kernels()
    if own is None or not isinstance(weight, torch.Tensor) or x.numel() == 0 or weight.dim() != 2:
        return None
    bias = None if bias is None else bias.detach().float()
    if _served(x, weight) and weight.stride(1) == 1:
        return own.linear(x, [(weight.detach(), bias)])[0]
    if x.dtype == weight.dtype and in_halves(weight):
        return own.linear(x.float(), [(Stored.of(weight), bias)])[0].to(x.dtype)
    return None


def _matmul(x: torch.Tensor, other: torch.Tensor, **_: Any) -> torch.Tensor | None:
    """x (..., in) times a matrix (in, out)."""
    if not isinstance(other, torch.Tensor) or other.dim() != 2 or x.dim() < 1:
        return None
    if other.stride(0) == 1:
        return _linear(x, other.t())
    rows = x.reshape(1, -1, x.shape[-1])
    found = _bmm(rows, other[None])
    return None if found is None else found.view(*x.shape[:-1], other.shape[1])


def _bmm(x: torch.Tensor, other: torch.Tensor, **_: Any) -> torch.Tensor | None:
    """x (E, rows, in) times matrices (E, in, out)."""
    own = kernels()
    if own is None or not _served(x, other) or x.numel() == 0 or 1 not in other.stride()[1:]:
        return None
    count, rows, size = x.shape
    by_input = other.stride(2) == 1
    weights = ExpertWeights(other.detach() if by_input else other.detach().transpose(1, 2), by_input=by_input)
    products = ExpertProducts(own, [weights])
    found = products(x.reshape(-1, size), range(count), range(0, count * rows + 1, rows))
    return found.view(count, rows, -1)


def _served(x: Any, weight: Any) -> bool:
    return all(
        isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.dtype == torch.float32
        for each in (x, weight)
    )


_PRODUCTS: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm), _matmul),
    **dict.fromkeys((torch.bmm, torch.Tensor.bmm), _bmm),
}
