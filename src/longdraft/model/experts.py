"""Mixtures of experts: exact row by row while text is decoded, and only what the rows are routed to is read.

transformers multiplies a token's row with its experts' matrices in grouped products, which round by the number of rows.
Here our kernels multiply the rows with the matrices of the experts that they are routed to, each matrix read once. This
serves the modules of transformers' ``ExpertsInterface``, which say how their matrices lie and what is computed between
the products. Other mixtures run their own code, with products that are exact by row (:mod:`.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from longdraft.model.hosting import in_decode
from longdraft.model.model_copy import get_forward, replace_forward
from longdraft.model.skinny_gemm import is_half_matrix, is_plain_tensor
from longdraft.model.stored import StoredWeights
from longdraft.native import QuantizedMatrix, kernels
from longdraft.native.experts import ExpertWeights, GroupedGemm

# Kinds of matrices of an expert: a gate and what it is for, in one matrix or in two, or the latter alone.
_FIRST, LAST = ("gate_up", "gate", "up"), "down"


@dataclass
class Experts:
    """The experts of a mixture, with matrices for our kernels.

    Attributes:
        module: the module of transformers with what is computed between and behind the products.
        first, last: matrices of the first product, and of the last one. The first have gate and up in one matrix or in
            two, or up alone.
    """

    module: Any
    first: list[ExpertWeights]
    last: ExpertWeights

    @cached_property
    def _products(self) -> tuple[GroupedGemm, GroupedGemm]:
        own = kernels()
        assert own is not None
        return GroupedGemm(own, self.first), GroupedGemm(own, [self.last])

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x (rows, hidden), each row for its experts ``top_k_index`` (rows, k) -> sums of their results by ``top_k_weights``."""
        rows, k = top_k_index.shape
        own, (first, last) = self.module, self._products
        with torch._C.DisableTorchFunction():
            experts, starts, order = _grouped(top_k_index.reshape(-1))
            found = fuse_gate_up([*first(x[order // k].float(), experts, starts).to(x.dtype)], own.is_concatenated)
        between: torch.Tensor = own._apply_gate(found) if own.has_gate else own.act_fn(found)
        with torch._C.DisableTorchFunction():
            found = last(between.float(), experts, starts)[0].to(x.dtype)
        if getattr(own, "has_post_expert_norm", False):  # a word of later versions of transformers
            found = own.post_expert_norm(found)
        with torch._C.DisableTorchFunction():
            results = torch.empty_like(found)
            results[order] = found
            scaled = results.view(rows, k, -1) * top_k_weights[..., None].to(found.dtype)
            # One after the other, in the order of the router: torch's sum may take another order for more rows.
            total = scaled[:, 0]
            for i in range(1, k):
                total = total + scaled[:, i]
            return total.to(x.dtype)


def is_moe_experts(module: nn.Module) -> bool:
    """True for a module of experts of transformers' ``ExpertsInterface``."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")


def make_batch_invariant(model: nn.Module) -> None:
    """Makes a model's mixtures of experts exact by row while text is decoded. The model must be a copy of our own."""
    for module in model.modules():
        if kernels() is not None and is_moe_experts(module):
            replace_forward(module, _by_kernels(module))


def _by_kernels(module: Any) -> Callable[..., torch.Tensor]:
    own = get_forward(module)
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    known: list[Any] = []  # parameters, and the experts made of them

    def experts() -> Experts | None:
        now = [module._parameters.get(name) for name in names]
        if not known or any(a is not b for a, b in zip(known, now, strict=False)):
            found = _experts(module, names)
            if any(parameter is None for parameter in now):  # an adapter's, in their place for this forward
                return found
            known[:] = [*now, found]
        made: Experts | None = known[-1]
        return made

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        served = experts() if in_decode() else None
        compute = own if served is None else served.forward
        out: torch.Tensor = compute(hidden_states, top_k_index, top_k_weights)
        return out

    return forward


def _experts(module: Any, names: tuple[str, str]) -> Experts | None:
    """A mixture's experts for our kernels; None if they do not read such matrices."""
    found = []
    for name in names:
        weight, bias = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        if not is_plain_tensor(weight) or weight.device.type != "cpu" or not weight.is_contiguous():
            return None
        bias = None if bias is None else bias.detach().float()
        if weight.dtype == torch.float32:
            found.append(ExpertWeights(weight, bias, module.is_transposed))
        elif not module.is_transposed and is_half_matrix(weight.flatten(0, 1)):
            found.append(ExpertWeights(QuantizedMatrix.from_half(weight.flatten(0, 1)), bias, num_experts=len(weight)))
        else:
            return None
    return Experts(module, found[:1], found[1])


def _grouped(numbers: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
    """The numbers that occur, where each begins once they are sorted (and their end), and the order that sorts them."""
    order = numbers.argsort(stable=True)
    experts: list[int] = []
    starts: list[int] = []
    for place, number in enumerate(numbers[order].tolist()):
        if not experts or number != experts[-1]:
            experts.append(number)
            starts.append(place)
    return experts, [*starts, len(numbers)], order


def fuse_gate_up(parts: list[torch.Tensor], is_concatenated: bool) -> torch.Tensor:
    """One tensor (E, out, ...) of several, one behind the other or in turns."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if is_concatenated else torch.stack(parts, 2).flatten(1, 2)


def as_parameters(
    module: Any, matrices: Mapping[str, torch.Tensor], biases: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Matrices (experts, out, in) and biases (experts, out), by their kinds, as parameters of a module of experts."""
    found: dict[str, torch.Tensor] = {}
    first = [kind for kind in _FIRST if kind in matrices]
    for name, kinds in (("up_proj" if first == ["up"] else "gate_up_proj", first), ("down_proj", [LAST])):
        whole = fuse_gate_up([matrices[kind] for kind in kinds], module.is_concatenated)
        found[name] = whole.transpose(1, 2).contiguous() if module.is_transposed else whole
        if own := [biases[kind] for kind in kinds if kind in biases]:
            found[f"{name}_bias"] = fuse_gate_up(own, module.is_concatenated)
    return found


class StoredExperts(nn.Module):
    """A mixture of experts with stored matrices, in the place of a module of transformers.

    Args:
        module: the module that it replaces. Its weights are dropped, and its function between the products is kept.
        matrices: kind of matrix -> (experts * out, in): ``gate_up``, or ``gate`` and ``up``, or ``up``; and ``down``.
        biases: the same kinds -> (experts, out).
    """

    def __init__(
        self,
        module: nn.Module,
        matrices: Mapping[str, QuantizedMatrix],
        biases: Mapping[str, torch.Tensor],
        num_experts: int,
    ) -> None:
        super().__init__()
        for name in dict(module.named_parameters(recurse=False)):
            module.register_parameter(name, None)
        self.num_experts = num_experts
        self.replaced: Any = module
        for kind, matrix in matrices.items():
            own = StoredWeights(matrix)  # of all experts, one behind the other
            own.rows_per_matrix, own.saved_by_parent = matrix.shape[0] // num_experts, True
            setattr(self, kind, own)
            self.register_buffer(f"{kind}_bias", biases.get(kind), persistent=False)
        self._parts: tuple[object, Experts] | None = None

    @property
    def _matrices(self) -> dict[str, StoredWeights]:
        return {kind: own for kind, own in self.named_children() if isinstance(own, StoredWeights)}

    @property
    def parts(self) -> Experts:
        """The parts for our kernels."""
        key = [own.matrix.kernel_address() for own in self._matrices.values()]
        if self._parts is None or self._parts[0] != key:
            weights = {
                kind: ExpertWeights(own.matrix, getattr(self, f"{kind}_bias"), num_experts=self.num_experts)
                for kind, own in self._matrices.items()
            }
            first = [weights[kind] for kind in _FIRST if kind in weights]
            self._parts = key, Experts(self.replaced, first, weights[LAST])
        return self._parts[1]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows (rows, hidden), each for its experts (rows, k) -> the weighted sums of their results."""
        given = (hidden_states, top_k_index, top_k_weights)
        if kernels() is not None and hidden_states.device.type == "cpu" and hidden_states.dtype == torch.float32:
            return self.parts.forward(*given)
        floats = {name: x.to(hidden_states.dtype) for name, x in self._floats().items()}
        out: torch.Tensor = functional_call(self.replaced, floats, given)
        return out

    def _floats(self) -> dict[str, torch.Tensor]:
        """The parameters of the module that was replaced."""
        matrices = {kind: own.weight.unflatten(0, (self.num_experts, -1)) for kind, own in self._matrices.items()}
        biases = {kind: bias for kind in matrices if (bias := getattr(self, f"{kind}_bias")) is not None}
        return as_parameters(self.replaced, matrices, biases)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: x for name, x in self._floats().items()})


def store_half_experts(model: nn.Module) -> None:
    """Keeps the experts' matrices of a model in bfloat16 or float16 as they are when the rest computes in float32."""
    for path, module in list(model.named_modules()):
        if not is_moe_experts(module):
            continue
        own = {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
        matrices, biases = {}, {}
        for kind in ("gate_up" if module.has_gate else "up", LAST):
            weight, bias = own[f"{kind}_proj"], own.get(f"{kind}_proj_bias")
            # An output's weights side by side, as kernels read them.
            turned = module.is_transposed and weight.itemsize == 2
            weight = (weight.transpose(1, 2).contiguous() if turned else weight).flatten(0, 1)
            if is_half_matrix(weight):
                matrices[kind] = QuantizedMatrix.from_half(weight)
            if bias is not None:
                biases[kind] = bias.float()
        if len(matrices) == 2:
            model.set_submodule(path, StoredExperts(module, matrices, biases, len(own["down_proj"])))
