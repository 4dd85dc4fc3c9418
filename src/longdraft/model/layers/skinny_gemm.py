"""Skinny GEMMs: linear layers on a CPU with few input rows, one for each token of a verification.

For few rows torch reads the weight matrix inefficiently. Our kernel reads the matrix once, without a copy.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.native import QuantizedMatrix, kernels
from longdraft.native.structures import LinearWeights

# Up to this number of input rows our kernel is faster. For more rows, arithmetic is the bottleneck: torch is as fast.
MAX_SKINNY_ROWS = 128


def skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes ``F.linear`` of x (..., in) with a weight (out, in). A QuantizedMatrix requires our kernels."""
    if isinstance(weight, QuantizedMatrix):
        cpu_kernels = kernels()
        assert cpu_kernels is not None
        return cpu_kernels.linear(x, [(weight, bias)])[0]
    product = kernel_linear(x, weight, bias) if x.numel() <= MAX_SKINNY_ROWS * x.shape[-1] else None
    return F.linear(x, weight, bias) if product is None else product


def kernel_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Computes ``F.linear`` with our kernel, for any number of rows. Returns None if our kernel cannot do it."""
    cpu_kernels, matrix = kernels(), _kernel_matrix(weight)
    if cpu_kernels is None or x.dtype != weight.dtype or x.device.type != "cpu" or matrix is None or not x.numel():
        return None
    bias = None if bias is None else bias.detach().float()
    # The kernel sums in float32. A result in half precision is rounded once, at the end.
    return cpu_kernels.linear(x.float(), [(matrix, bias)])[0].to(x.dtype)


def patch_linears(module: nn.Module) -> None:
    """Makes the linear layers of a module run :func:`skinny_gemm`. The module must not be the user's."""
    for layer in module.modules():
        if type(layer) is nn.Linear and kernel_weights_of(layer) is not None:
            bias = None if layer.bias is None else layer.bias.detach()
            vars(layer)["forward"] = partial(skinny_gemm, weight=layer.weight.detach(), bias=bias)


def kernel_weights_of(layer: nn.Module) -> LinearWeights | None:
    """Returns a linear layer's weight and bias for our kernels; None if the kernels do not support the layer."""
    weight = getattr(layer, "kernel_weights", None)
    if not isinstance(weight, QuantizedMatrix):
        # Subclasses of Linear (quantised, with adapters) may compute something else.
        weight = _kernel_matrix(getattr(layer, "weight", None)) if type(layer) is nn.Linear else None
    if weight is None:
        return None
    return weight, layer.bias.detach().float() if isinstance(layer.bias, torch.Tensor) else None


def is_plain_tensor(weight: object) -> bool:
    """True for a tensor or parameter of torch's own class; False for a subclass, such as DTensor or a quantised one."""
    return type(weight) in (torch.Tensor, nn.Parameter)


def is_half_matrix(weight: torch.Tensor) -> bool:
    """True for a bfloat16 or float16 matrix that our kernels can read."""
    is_half = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
    # The kernels read rows in blocks of 32 weights.
    return is_half and is_plain_tensor(weight) and weight.shape[1] % 32 == 0 and weight.is_contiguous()


def is_dtensor(weight: object) -> bool:
    """True if a weight is a DTensor, which is sharded over processes."""
    return hasattr(weight, "device_mesh")


def _kernel_matrix(weight: torch.Tensor | None) -> torch.Tensor | QuantizedMatrix | None:
    """Returns a matrix as our kernels read it, in the same memory; None if they cannot read it."""
    if weight is None or not is_plain_tensor(weight):  # a subclass may stand for other numbers
        return None
    if is_half_matrix(weight):
        return QuantizedMatrix.from_half(weight.detach())
    is_float32 = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.stride(-1) == 1
    return weight.detach() if is_float32 else None
