"""Batch invariance on a CPU for a model's own code: the batch size does not change the bits of a row's result.

torch breaks batch invariance in two ways. Its matrix products sum in an order that depends on the number of rows. Its
elementwise functions (exp, ...) compute most elements in SIMD vectors, but the last few of a thread's range in scalar
code, which rounds differently. :class:`BatchInvariantMode` runs products on longdraft's kernels, and pads the inputs of
elementwise functions to full vectors. Shapes: E matrices or experts, T tokens, in and out a layer's features.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longdraft.model.layers.skinny_gemm import is_plain_tensor, kernel_linear
from longdraft.native import kernels
from longdraft.native.experts import ExpertWeights, GroupedGemm

_GRAIN_SIZE = 32768  # at::internal::GRAIN_SIZE: torch computes a tensor of at most this many elements in one thread
_PADDED_MULTIPLE = 128  # elements: a multiple of what torch's loops compute at once (SIMD width times unrolling)
_ACTIVATIONS = ("sigmoid", "silu", "softplus", "tanh", "gelu", "logsigmoid", "softsign", "mish", "elu", "celu", "selu")
_MATH_FUNCTIONS = ("exp", "log", "log1p", "expm1", "erf")
# The replacements expect tensors by position, so a call with one of these keyword arguments runs unchanged.
_TENSOR_KEYWORDS = frozenset({"input", "other", "mat2", "out"})


class BatchInvariantMode(TorchFunctionMode):
    """Makes torch's functions batch invariant inside a ``with``. Each call of torch takes a microsecond longer."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement, kwargs = _REPLACEMENTS.get(func), kwargs or {}
        result = None
        if replacement is not None and not _TENSOR_KEYWORDS & kwargs.keys():
            result = replacement(func, *args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def outside_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that is batch invariant without :class:`BatchInvariantMode`: the mode is off while it runs."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return wrapped


def in_full_vectors(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies an elementwise function to full SIMD vectors, so that no result depends on an element's position."""
    num_elements = x.numel()
    is_supported = x.device.type == "cpu" and x.is_floating_point()
    if not is_supported or (num_elements <= _GRAIN_SIZE and num_elements % _PADDED_MULTIPLE == 0 and x.is_contiguous()):
        return function(x)
    flat = x.contiguous().view(-1)
    if padding := -num_elements % _PADDED_MULTIPLE:
        flat = F.pad(flat, (0, padding))
    return torch.cat([function(chunk) for chunk in flat.split(_GRAIN_SIZE)])[:num_elements].view(x.shape)


# Each replacement takes torch's function (op) and the call's arguments. It returns None to let op run unchanged.
def _elementwise(op: Any, *args: Any, **kwargs: Any) -> Any:
    if not args or not is_plain_tensor(args[0]):
        return None
    return in_full_vectors(lambda chunk: op(chunk, *args[1:], **kwargs), args[0])


def _glu(op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs GLU row by row. GLU multiplies the two halves of a row, which padding would move."""
    rows = x.reshape(-1, x.shape[-1]).split(1)
    return torch.cat([op(row, *args, **kwargs) for row in rows]).view(*x.shape[:-1], -1)


def _complex_mul(_: Any, a: Any, b: Any, **kwargs: Any) -> torch.Tensor | None:
    """Multiplies by real and imaginary parts, because torch's complex product rounds its last elements differently."""
    if kwargs or not all(isinstance(x, torch.Tensor) and x.is_complex() for x in (a, b)):
        return None
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _linear(_: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    are_plain = is_plain_tensor(x) and is_plain_tensor(weight)
    return kernel_linear(x, weight, bias) if are_plain and weight.dim() == 2 else None


def _matmul(op: Any, x: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
    """Multiplies tokens x (..., in) by a matrix (in, out), or a matrix x (out, in) by tokens (sequences, in, T)."""
    if kwargs or not is_plain_tensor(x) or not is_plain_tensor(other) or x.dim() < 1:
        return None
    if x.dim() == 2 and other.dim() == 3 and x.device.type == "cpu" and other.shape[0] * other.shape[2] > 1:
        # One product for each token, so that its bits do not depend on T. A single token needs no change.
        sequences = [torch.cat([op(x, t) for t in tokens.split(1, 2)], 2) for tokens in other.split(1)]
        return torch.cat(sequences)
    if other.dim() != 2:
        return None
    if other.stride(0) == 1:
        return _linear(op, x, other.t())
    product = _bmm(op, x.reshape(1, -1, x.shape[-1]), other[None])
    return None if product is None else product.view(*x.shape[:-1], other.shape[1])


def _addmm(op: Any, bias: torch.Tensor, x: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
    """Computes bias + x @ other, as GPT-2's linear layers (Conv1D) do."""
    product = _matmul(op, x, other, **kwargs)
    return None if product is None else product + bias


def _bmm(_: Any, x: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
    """Multiplies rows x (E, rows, in) by matrices (E, in, out) with the kernel for experts.
    Rows of zeros are skipped: some MoE layers pass all tokens to all experts, and zero those that are not routed."""
    cpu_kernels = kernels()
    supported = all(is_plain_tensor(t) and t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, other))
    if cpu_kernels is None or kwargs or not supported or x.numel() == 0 or 1 not in other.stride()[1:]:
        return None
    transposed = other.stride(2) == 1  # each matrix lies in memory as (in, out), not (out, in)
    weights = ExpertWeights(other.detach() if transposed else other.detach().transpose(1, 2), transposed=transposed)
    nonzero = (x != 0).any(-1)
    num_rows = nonzero.sum(1).tolist()  # for each matrix
    out = x.new_zeros(*x.shape[:2], other.shape[2])
    if any(num_rows):
        experts = [i for i, num in enumerate(num_rows) if num]
        starts = [0, *itertools.accumulate(num_rows[i] for i in experts)]
        out[nonzero] = GroupedGemm(cpu_kernels, [weights])(x[nonzero], experts, starts)[0]
    return out


def _torch_functions(*names: str) -> list[Any]:
    """Returns torch's functions with these names, from every namespace that a model may call them in."""
    namespaces = (torch, torch.Tensor, F, torch._C._nn)
    return [function for space in namespaces for name in names if (function := getattr(space, name, None)) is not None]


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_torch_functions(*_ACTIVATIONS, *_MATH_FUNCTIONS), _elementwise),
    **dict.fromkeys(_torch_functions("glu"), _glu),
    **dict.fromkeys(_torch_functions("mul", "__mul__"), _complex_mul),
    **dict.fromkeys(_torch_functions("linear"), _linear),
    **dict.fromkeys(_torch_functions("matmul", "__matmul__", "mm"), _matmul),
    **dict.fromkeys(_torch_functions("addmm"), _addmm),
    **dict.fromkeys(_torch_functions("bmm"), _bmm),
}
