"""Merges linear layers (q, k and v; gate and up) into one GEMM, like vLLM's QKVParallelLinear.

:func:`join` merges the weights of a model that longdraft has loaded: parameters become views of the merged matrices, so
no weight is stored twice. longdraft never changes a model that the user loaded: there each weight takes a GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.model.layers.skinny_gemm import is_plain_tensor

# Linear layers of one module that have the same input.
MERGED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedLinear:
    """Runs several linear layers on one input. ``is_merged``: True if their weights are adjacent: one GEMM runs all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._weights: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (layer.weight.detach(), None if layer.bias is None else layer.bias.detach()) for layer in layers
        ]
        self._sizes = [layer.out_features for layer in layers]
        biases = [bias for _, bias in self._weights if bias is not None]
        weight, bias = as_one_tensor([weight for weight, _ in self._weights]), as_one_tensor(biases)
        self.is_merged = weight is not None and (not biases or (bias is not None and len(biases) == len(layers)))
        if self.is_merged and weight is not None:
            self._weights = [(weight, bias)]

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Maps x (..., in) to one output (..., out) for each layer. Merged layers return views of one tensor."""
        outputs = [F.linear(x, weight, bias) for weight, bias in self._weights]
        return outputs[0].split(self._sizes, dim=-1) if self.is_merged else outputs


def as_one_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Views tensors that are adjacent in memory as one, concatenated along dimension 0; None if they are not."""
    if not tensors:
        return None
    first, next_address = tensors[0], tensors[0].data_ptr()
    for x in tensors:
        is_alike = x.dtype == first.dtype and x.device == first.device and x.shape[1:] == first.shape[1:]
        if not is_alike or not x.is_contiguous() or x.data_ptr() != next_address:
            return None
        next_address += x.numel() * x.itemsize
    # Separate allocations may be adjacent by chance: all tensors must lie in the storage of the first one.
    end = first.storage_offset() * first.itemsize + next_address - first.data_ptr()
    if end > first.untyped_storage().nbytes():
        return None
    shape = (sum(x.shape[0] for x in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride())


@torch.no_grad()
def join(model: nn.Module) -> None:
    """Merges the weights of :data:`MERGED_PROJECTIONS` in place: parameters keep their names and values.

    longdraft must have loaded the model: other references to the old memory would no longer see changes of weights.
    """
    for parent in model.modules():
        for names in MERGED_PROJECTIONS:
            layers: list[Any] = [x for name in names if type(x := getattr(parent, name, None)) is nn.Linear]
            if len(layers) == len(names):
                _join([layer.weight for layer in layers])
                _join([layer.bias for layer in layers if layer.bias is not None])


def _join(parameters: Sequence[nn.Parameter]) -> None:
    kinds = {(p.dtype, p.device, p.shape[1:]) for p in parameters}
    if len(kinds) != 1 or not all(map(is_plain_tensor, parameters)) or as_one_tensor(parameters) is not None:
        return
    merged = torch.cat(list(parameters))
    for parameter, view in zip(parameters, merged.split([p.shape[0] for p in parameters]), strict=True):
        parameter.data = view
