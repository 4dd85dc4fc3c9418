"""Mixture-of-experts layers, batch invariant in decoding: our kernels read each routed expert's matrices once.

transformers' grouped GEMMs round by the number of tokens. This file covers the modules of its ``ExpertsInterface``,
which declare their matrices' layout and the function between the products. Other MoE layers run their own code in
:class:`~longdraft.model.batch_invariant.BatchInvariantMode`.
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

# An expert's matrices: gate and up projection, in one matrix or in two, or up alone; and the down projection.
_FIRST_KINDS, LAST = ("gate_up", "gate", "up"), "down"


@dataclass
class Experts:
    """A layer's experts, with matrices for our kernels.

    Attributes:
        module: transformers' module, which computes everything but the products.
        first: gate and up projection, in one matrix or in two, or up alone. last: the down projection.
    """

    module: Any
    first: list[ExpertWeights]
    last: ExpertWeights

    @cached_property
    def _products(self) -> tuple[GroupedGemm, GroupedGemm]:
        cpu_kernels = kernels()
        assert cpu_kernels is not None
        return GroupedGemm(cpu_kernels, self.first), GroupedGemm(cpu_kernels, [self.last])

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x (tokens, hidden), routed to ``top_k_index`` (tokens, k) -> sums weighted by ``top_k_weights``."""
        num_tokens, k = top_k_index.shape
        module, (first, last) = self.module, self._products
        with torch._C.DisableTorchFunction():
            experts, starts, order = _group_by_expert(top_k_index.reshape(-1))  # order // k: the tokens
            hidden = fuse_gate_up([*first(x[order // k].float(), experts, starts).to(x.dtype)], module.is_concatenated)
        gated: torch.Tensor = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        with torch._C.DisableTorchFunction():
            hidden = last(gated.float(), experts, starts)[0].to(x.dtype)
        if getattr(module, "has_post_expert_norm", False):  # in later versions of transformers
            hidden = module.post_expert_norm(hidden)
        with torch._C.DisableTorchFunction():
            results = torch.empty_like(hidden)
            results[order] = hidden
            scaled = results.view(num_tokens, k, -1) * top_k_weights[..., None].to(hidden.dtype)
            # Added in the router's order: torch's sum may take another order for more tokens.
            total = scaled[:, 0]
            for i in range(1, k):
                total = total + scaled[:, i]
            return total.to(x.dtype)


def is_moe_experts(module: nn.Module) -> bool:
    """True for a module of transformers' ``ExpertsInterface``."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")


def make_batch_invariant(model: nn.Module) -> None:
    """Makes a model's MoE layers batch invariant in decoding. The model must be our own copy."""
    for module in model.modules():
        if kernels() is not None and is_moe_experts(module):
            replace_forward(module, _kernel_forward(module))


def _kernel_forward(module: Any) -> Callable[..., torch.Tensor]:
    original = get_forward(module)
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    cached: list[Any] = []  # the parameters, and the Experts made of them

    def current_experts() -> Experts | None:
        parameters = [module._parameters.get(name) for name in names]
        if not cached or any(a is not b for a, b in zip(cached, parameters, strict=False)):
            experts = _experts(module, names)
            if any(parameter is None for parameter in parameters):  # an adapter replaces them for this forward
                return experts
            cached[:] = [*parameters, experts]
        result: Experts | None = cached[-1]
        return result

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        fast = current_experts() if in_decode() else None
        compute = original if fast is None else fast.forward
        out: torch.Tensor = compute(hidden_states, top_k_index, top_k_weights)
        return out

    return forward


def _experts(module: Any, names: tuple[str, str]) -> Experts | None:
    """A module's experts for our kernels; None if the kernels cannot read its matrices."""
    matrices = []
    for name in names:
        weight, bias = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        if not is_plain_tensor(weight) or weight.device.type != "cpu" or not weight.is_contiguous():
            return None
        bias = None if bias is None else bias.detach().float()
        if weight.dtype == torch.float32:
            matrices.append(ExpertWeights(weight, bias, module.is_transposed))
        elif not module.is_transposed and is_half_matrix(weight.flatten(0, 1)):
            stacked = QuantizedMatrix.from_half(weight.flatten(0, 1))
            matrices.append(ExpertWeights(stacked, bias, num_experts=len(weight)))
        else:
            return None
    return Experts(module, matrices[:1], matrices[1])


def _group_by_expert(expert_ids: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
    """Sorts by expert: the experts that occur, where each begins (and the end), and the sorting permutation."""
    order = expert_ids.argsort(stable=True)
    experts: list[int] = []
    starts: list[int] = []
    for i, expert in enumerate(expert_ids[order].tolist()):
        if not experts or expert != experts[-1]:
            experts.append(expert)
            starts.append(i)
    return experts, [*starts, len(expert_ids)], order


def fuse_gate_up(parts: list[torch.Tensor], is_concatenated: bool) -> torch.Tensor:
    """Joins tensors (E, out, ...) along their outputs, concatenated or interleaved."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if is_concatenated else torch.stack(parts, 2).flatten(1, 2)


def as_parameters(
    module: Any, matrices: Mapping[str, torch.Tensor], biases: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Matrices (experts, out, in) and biases (experts, out) by kind -> the parameters of transformers' module."""
    parameters: dict[str, torch.Tensor] = {}
    first = [kind for kind in _FIRST_KINDS if kind in matrices]
    for name, kinds in (("up_proj" if first == ["up"] else "gate_up_proj", first), ("down_proj", [LAST])):
        fused = fuse_gate_up([matrices[kind] for kind in kinds], module.is_concatenated)
        parameters[name] = fused.transpose(1, 2).contiguous() if module.is_transposed else fused
        if kind_biases := [biases[kind] for kind in kinds if kind in biases]:
            parameters[f"{name}_bias"] = fuse_gate_up(kind_biases, module.is_concatenated)
    return parameters


class StoredExperts(nn.Module):
    """Replaces transformers' experts with matrices that stay quantised, or in half precision.

    Args:
        module: the module that it replaces. Loses its weights, and still computes everything but the products.
        matrices: kind of matrix -> (experts * out, in): ``gate_up``, or ``gate`` and ``up``, or ``up``; and ``down``.
        biases: the same kinds -> (experts, out).
    """

    def __init__(
        self, module: nn.Module, matrices: Mapping[str, QuantizedMatrix], biases: Mapping[str, torch.Tensor], count: int
    ) -> None:
        super().__init__()
        for name in dict(module.named_parameters(recurse=False)):
            module.register_parameter(name, None)
        self.expert_count = count
        self.replaced: Any = module
        for kind, matrix in matrices.items():
            weights = StoredWeights(matrix)  # all experts' matrices, stacked
            weights.rows_per_matrix, weights.saved_by_parent = matrix.shape[0] // count, True
            setattr(self, kind, weights)
            self.register_buffer(f"{kind}_bias", biases.get(kind), persistent=False)
        self._parts: tuple[object, Experts] | None = None

    @property
    def _matrices(self) -> dict[str, StoredWeights]:
        return {kind: weights for kind, weights in self.named_children() if isinstance(weights, StoredWeights)}

    @property
    def parts(self) -> Experts:
        """The same experts for our kernels, made anew if a matrix moved."""
        key = [stored.matrix.kernel_address() for stored in self._matrices.values()]
        if self._parts is None or self._parts[0] != key:
            weights = {
                kind: ExpertWeights(stored.matrix, getattr(self, f"{kind}_bias"), num_experts=self.expert_count)
                for kind, stored in self._matrices.items()
            }
            first = [weights[kind] for kind in _FIRST_KINDS if kind in weights]
            self._parts = key, Experts(self.replaced, first, weights[LAST])
        return self._parts[1]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (tokens, hidden), routed to experts (tokens, k) -> the weighted sums of their results."""
        inputs = (hidden_states, top_k_index, top_k_weights)
        if kernels() is not None and hidden_states.device.type == "cpu" and hidden_states.dtype == torch.float32:
            return self.parts.forward(*inputs)
        parameters = {name: x.to(hidden_states.dtype) for name, x in self._dequantized().items()}
        out: torch.Tensor = functional_call(self.replaced, parameters, inputs)
        return out

    def _dequantized(self) -> dict[str, torch.Tensor]:
        """The parameters of the replaced module, in float32."""
        matrices = {kind: w.weight.unflatten(0, (self.expert_count, -1)) for kind, w in self._matrices.items()}
        biases = {kind: bias for kind in matrices if (bias := getattr(self, f"{kind}_bias")) is not None}
        return as_parameters(self.replaced, matrices, biases)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: x for name, x in self._dequantized().items()})


def store_half_experts(model: nn.Module) -> None:
    """Leaves experts' matrices in bfloat16 or float16, for a model that computes in float32."""
    for path, module in list(model.named_modules()):
        if not is_moe_experts(module):
            continue
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
        matrices, biases = {}, {}
        for kind in ("gate_up" if module.has_gate else "up", LAST):
            weight, bias = parameters[f"{kind}_proj"], parameters.get(f"{kind}_proj_bias")
            # Kernels read an output's weights side by side.
            transpose = module.is_transposed and weight.itemsize == 2
            weight = (weight.transpose(1, 2).contiguous() if transpose else weight).flatten(0, 1)
            if is_half_matrix(weight):
                matrices[kind] = QuantizedMatrix.from_half(weight)
            if bias is not None:
                biases[kind] = bias.float()
        if len(matrices) == 2:
            model.set_submodule(path, StoredExperts(module, matrices, biases, len(parameters["down_proj"])))
