"""Mixtures of experts whose matrices stay as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.model.experts import Experts, is_mixture, joined
from longdraft.model.few_rows import in_halves
from longdraft.model.stored import StoredWeights, unpacked
from longdraft.native import Stored, kernels
from longdraft.native.experts import ExpertWeights

# Kinds of matrices of an expert: a gate and what it is for, in one matrix or in two, or the latter alone.
_FIRST = ("gate_up", "gate", "up")
LAST = "down"


class StoredMatrices(StoredWeights):
    """The matrices (out, in) of all experts, one behind the other."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """The mixture saves its matrices."""


class StoredExperts(nn.Module):
    """A mixture of experts with stored matrices, in the place of a module of transformers.

    Args:
        module: the module that it replaces. Its weights are dropped, and its function between the products is kept.
        matrices: kind of matrix -> (experts * out, in): ``gate_up``, or ``gate`` and ``up``, or ``up``; and ``down``.
        biases: the same kinds -> (experts, out).
    """

    def __init__(
        self, module: nn.Module, matrices: Mapping[str, Stored], biases: Mapping[str, torch.Tensor], count: int
    ) -> None:
        super().__init__()
        for name in dict(module.named_parameters(recurse=False)):
            module.register_parameter(name, None)
        self.count = count
        self.replaced: Any = module
        for kind, matrix in matrices.items():
            own = StoredMatrices(matrix)
            own.outs = matrix.shape[0] // count
            setattr(self, kind, own)
            self.register_buffer(f"{kind}_bias", biases.get(kind), persistent=False)
        self._parts: tuple[object, Experts] | None = None

    @property
    def parts(self) -> Experts:
        """The parts for our kernels."""
        key = [m.matrix.place() for m in self.children() if isinstance(m, StoredMatrices)]
        if self._parts is None or self._parts[0] != key:
            first = [self._weights(kind) for kind in _FIRST if hasattr(self, kind)]
            self._parts = key, Experts(self.replaced, first, self._weights(LAST))
        return self._parts[1]

    def _weights(self, kind: str) -> ExpertWeights:
        return ExpertWeights(getattr(self, kind).matrix, getattr(self, f"{kind}_bias"), count=self.count)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows (rows, hidden), each for its experts (rows, k) -> the weighted sums of their results."""
        if kernels() is not None and hidden_states.device.type == "cpu" and hidden_states.dtype == torch.float32:
            return self.parts.routed(hidden_states, top_k_index, top_k_weights)
        parts, x = self.parts, hidden_states
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        for expert in top_k_index.unique().tolist():
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            first = torch.stack([_product(x[rows], each, expert) for each in parts.first])
            found = _product(parts.between(first), parts.last, expert)
            out.index_add_(0, rows, (parts.after(found) * top_k_weights[rows, places, None]).to(x.dtype))
        return out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        side_by_side, turned = self.replaced.is_concatenated, self.replaced.is_transposed
        first = [kind for kind in _FIRST if hasattr(self, kind)]
        name = "up_proj" if first == ["up"] else "gate_up_proj"
        for saved, kinds in ((name, first), ("down_proj", [LAST])):
            matrices = [getattr(self, kind).weight.unflatten(0, (self.count, -1)) for kind in kinds]
            whole = joined(matrices, side_by_side)
            destination[prefix + saved] = whole.transpose(1, 2).contiguous() if turned else whole
            biases = [bias for kind in kinds if (bias := getattr(self, f"{kind}_bias")) is not None]
            if biases:
                destination[f"{prefix}{saved}_bias"] = joined(biases, side_by_side)


def keep_experts(model: nn.Module) -> None:
    """Keeps the experts' matrices of a model in bfloat16 or float16 as they are when the rest computes in float32."""
    for path, module in list(model.named_modules()):
        if not is_mixture(module):
            continue
        own = dict(module.named_parameters(recurse=False))
        first = "gate_up" if module.has_gate else "up"
        names = {first: f"{first}_proj", LAST: "down_proj"}
        weights = [own[name] for name in names.values()]
        count = len(weights[0])
        # An output's weights side by side, as kernels read them.
        turned = module.is_transposed and all(w.itemsize == 2 for w in weights)
        weights = [w.detach().transpose(1, 2).contiguous() for w in weights] if turned else weights
        if not all(in_halves(w.flatten(0, 1)) for w in weights):
            continue
        matrices = {kind: Stored.of(w.flatten(0, 1)) for kind, w in zip(names, weights, strict=True)}
        biases = {
            kind: b.detach().float() for kind, name in names.items() if (b := own.get(f"{name}_bias")) is not None
        }
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, StoredExperts(module, matrices, biases, count))


def _product(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    matrices, outs = weights.matrices, weights.shape[0]
    assert isinstance(matrices, Stored)
    own = Stored(matrices.data[expert * outs : (expert + 1) * outs], matrices.format, matrices.int8)
    return F.linear(x, unpacked(own).to(x.dtype), None if weights.bias is None else weights.bias[expert].to(x.dtype))
