"""Linear layers for the few rows of a verification, on a CPU in float32.

torch's plain product reads a matrix badly for a few rows. Our own kernel reads it once, where it is stored.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.native import QuantizedMatrix, kernels
from longdraft.native.structures import LinearWeights

# Number of rows up to which our kernel is faster; more are bound by arithmetic, which torch's product does as well.
MAX_SKINNY_ROWS = 128


def skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., in) times a matrix (out, in), as ``F.linear``.

    Args:
        weight: it may be stored if there are kernels.
    """
    if isinstance(weight, QuantizedMatrix):
        own = kernels()
        assert own is not None
        return own.linear(x, [(weight, bias)])[0]
    found = kernel_linear(x, weight, bias) if x.numel() <= MAX_SKINNY_ROWS * x.shape[-1] else None
    return F.linear(x, weight, bias) if found is None else found


def kernel_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """x (..., in) times a matrix (out, in) by our kernel, in their dtype; None if it does not serve."""
    own, read = kernels(), weight.detach()
    plain, halves = _plain(weight), is_half_matrix(weight)
    if own is None or x.dtype != weight.dtype or x.device.type != "cpu" or not (plain or halves) or not x.numel():
        return None
    bias = None if bias is None else bias.detach().float()
    # Sums are float32; the results of a layer in half precision are rounded once.
    return own.linear(x.float(), [(read if plain else QuantizedMatrix.from_half(read), bias)])[0].to(x.dtype)


def patch_linears(module: nn.Module) -> None:
    """Makes the plain linear layers of a module of our own fast for few rows, for good."""
    for layer in module.modules():
        if type(layer) is nn.Linear and kernel_weights_of(layer) is not None:
            bias = None if layer.bias is None else layer.bias.detach()
            vars(layer)["forward"] = partial(skinny_gemm, weight=layer.weight.detach(), bias=bias)


def kernel_weights_of(layer: nn.Module) -> LinearWeights | None:
    """The weights and bias of a linear layer for our kernels; None if they do not serve this module."""
    weight: torch.Tensor | QuantizedMatrix
    if isinstance(kept := getattr(layer, "kernel_weights", None), QuantizedMatrix):
        weight = kept
    # A subclass (quantised, adapted) computes something else, and so does a weight of a tensor's subclass.
    elif type(layer) is not nn.Linear or not is_plain_tensor(getattr(layer, "weight", None)):
        return None
    elif _plain(layer.weight):
        weight = layer.weight.detach()  # detached: it may get another storage
    elif is_half_matrix(layer.weight):
        weight = QuantizedMatrix.from_half(layer.weight)
    else:
        return None
    bias = layer.bias
    return weight, bias.detach().float() if isinstance(bias, torch.Tensor) else None


def is_plain_tensor(weight: object) -> bool:
    """True if a weight is a tensor of torch's own. Quantised ones and shares of several processes are subclasses."""
    return type(weight) in (torch.Tensor, nn.Parameter)


def is_half_matrix(weight: torch.Tensor) -> bool:
    """True if our kernels can read this matrix in bfloat16 or float16."""
    half = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
    return half and is_plain_tensor(weight) and weight.shape[1] % 32 == 0 and weight.is_contiguous()


def is_dtensor(weight: object) -> bool:
    """True if a weight is a DTensor, of which each of several processes has a share."""
    return hasattr(weight, "device_mesh")


def _plain(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and is_plain_tensor(weight)
        and weight.dtype == torch.float32
        and weight.stride(-1) == 1
    )
