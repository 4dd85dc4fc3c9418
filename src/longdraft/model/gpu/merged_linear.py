"""Matrices that get the same rows, side by side in memory, so that one product serves for several.

:func:`join` moves the weights of a model that longdraft has loaded: its parameters become views of the joined matrices,
so nothing is kept twice. A model that a user brings is never changed; its layers compute product by product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.model.skinny_gemm import is_plain_tensor

# Layers of one module that get the same input.
MERGED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedLinear:
    """Products of the same rows with several linear layers: one product if their weights lie side by side.

    Attributes:
        joined: True if it is one product.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (x.weight.detach(), None if x.bias is None else x.bias.detach()) for x in layers
        ]
        self._sizes = [x.out_features for x in layers]
        biases = [bias for _, bias in self._pairs if bias is not None]
        matrix, bias = as_one_tensor([weight for weight, _ in self._pairs]), as_one_tensor(biases)
        self.is_merged = matrix is not None and (not biases or (bias is not None and len(biases) == len(layers)))
        if self.is_merged and matrix is not None:
            self._pairs = [(matrix, bias)]

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x (..., in) -> (..., out) of each layer; with one product these are views of its result."""
        found = [F.linear(x, weight, bias) for weight, bias in self._pairs]
        return found[0].split(self._sizes, dim=-1) if self.is_merged else found


def as_one_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of tensors (n_i, ...) as one (sum n_i, ...); None if they do not lie one behind the other in memory."""
    if not tensors:
        return None
    first, place = tensors[0], tensors[0].data_ptr()
    for each in tensors:
        alike = each.dtype == first.dtype and each.device == first.device and each.shape[1:] == first.shape[1:]
        if not alike or not each.is_contiguous() or each.data_ptr() != place:
            return None
        place += each.numel() * each.itemsize
    # Two allocations may lie one behind the other by chance.
    end = first.storage_offset() * first.itemsize + place - first.data_ptr()
    if end > first.untyped_storage().nbytes():
        return None
    shape = (sum(each.shape[0] for each in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride())


@torch.no_grad()
def join(model: nn.Module) -> None:
    """Moves weights that get the same rows side by side, in place: parameters keep their numbers and their names.

    The model must be longdraft's own, as other references to the old memory would no longer see changes.
    """
    for parent in model.modules():
        for names in MERGED_PROJECTIONS:
            layers: list[Any] = [x for name in names if type(x := getattr(parent, name, None)) is nn.Linear]
            if len(layers) == len(names):
                _join([layer.weight for layer in layers])
                _join([layer.bias for layer in layers if layer.bias is not None])


def _join(parameters: Sequence[nn.Parameter]) -> None:
    alike = {(p.dtype, p.device, p.shape[1:]) for p in parameters}
    if len(alike) != 1 or not all(map(is_plain_tensor, parameters)) or as_one_tensor(parameters) is not None:
        return
    joined = torch.cat(list(parameters))
    for parameter, view in zip(parameters, joined.split([p.shape[0] for p in parameters]), strict=True):
        parameter.data = view
