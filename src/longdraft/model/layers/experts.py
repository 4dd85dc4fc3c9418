"""Mixture-of-experts (MoE) layers on our CPU kernels, batch invariant in decoding.

transformers' grouped GEMMs are not batch invariant: their rounding depends on the number of tokens. This file replaces
them in modules of transformers' ``ExpertsInterface``, whose attributes state how the matrices are laid out and whether
there is a gate. Other MoE layers run their own code in :class:`~.batch_invariant.BatchInvariantMode`.
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
from longdraft.model.layers.skinny_gemm import is_half_matrix, is_plain_tensor
from longdraft.model.model_copy import get_forward, replace_forward
from longdraft.model.quant.stored import StoredWeights
from longdraft.native import QuantizedMatrix, kernels
from longdraft.native.experts import ExpertWeights, GroupedGemm

# Names of an expert's matrices: gate and up projection, in one matrix or two, or only up; down projection.
_GATE_UP, DOWN = ("gate_up", "gate", "up"), "down"


@dataclass
class Experts:
    """A layer's experts, with matrices for our kernels.

    Attributes:
        module: transformers' module, which computes everything but the matrix products.
        gate_up: gate and up projection, in one matrix or two, or only up.
        down: the down projection."""

    module: Any
    gate_up: list[ExpertWeights]
    down: ExpertWeights

    @cached_property
    def _products(self) -> tuple[GroupedGemm, GroupedGemm]:
        """The matrix products before and after the activation."""
        cpu_kernels = kernels()
        assert cpu_kernels is not None
        return GroupedGemm(cpu_kernels, self.gate_up), GroupedGemm(cpu_kernels, [self.down])

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the outputs of each token's k experts, (tokens, hidden) like ``x``.
        ``top_k_index`` (tokens, k) has the ids of these experts, and ``top_k_weights`` (tokens, k) their weights."""
        num_tokens, k = top_k_index.shape
        module, (gate_up_product, down_product) = self.module, self._products
        with torch._C.DisableTorchFunction():  # our products are batch invariant already
            expert_ids, starts, order = _group_by_expert(top_k_index.reshape(-1))
            # (1 or 2 matrices, pairs, out); order // k is each pair's token.
            products = gate_up_product(x[order // k].float(), expert_ids, starts)
            hidden = fuse_gate_up([*products.to(x.dtype)], module.is_concatenated)
        gated: torch.Tensor = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        with torch._C.DisableTorchFunction():
            hidden = down_product(gated.float(), expert_ids, starts)[0].to(x.dtype)
        if getattr(module, "has_post_expert_norm", False):  # in later versions of transformers
            hidden = module.post_expert_norm(hidden)
        with torch._C.DisableTorchFunction():
            unsorted = torch.empty_like(hidden)
            unsorted[order] = hidden
            scaled = unsorted.view(num_tokens, k, -1) * top_k_weights[..., None].to(hidden.dtype)
            # Added in the router's order: the order of torch's sum may depend on the number of tokens.
            total = scaled[:, 0]
            for i in range(1, k):
                total = total + scaled[:, i]
            return total.to(x.dtype)


def is_moe_experts(module: nn.Module) -> bool:
    """True for a module of transformers' ``ExpertsInterface``."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")


def make_batch_invariant(model: nn.Module) -> None:
    """Makes the MoE layers of a model batch invariant in decoding. The model must be our own copy."""
    for module in model.modules():
        if kernels() is not None and is_moe_experts(module):
            replace_forward(module, _kernel_forward(module))


def _kernel_forward(module: Any) -> Callable[..., torch.Tensor]:
    """Returns a forward that decodes with our kernels, and runs the module's own code in prefill."""
    original = get_forward(module)
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    cached: list[Any] = []  # the two parameters, then the Experts made from them

    def get_experts() -> Experts | None:
        parameters = [module._parameters.get(name) for name in names]
        if not cached or any(a is not b for a, b in zip(cached, parameters, strict=False)):
            experts = _experts_of(module, names)
            if any(p is None for p in parameters):  # an adapter put a tensor of this forward in its place
                return experts
            cached[:] = [*parameters, experts]
        result: Experts | None = cached[-1]
        return result

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        experts = get_experts() if in_decode() else None
        compute = original if experts is None else experts.forward
        out: torch.Tensor = compute(hidden_states, top_k_index, top_k_weights)
        return out

    return forward


def _experts_of(module: Any, names: tuple[str, str]) -> Experts | None:
    """Makes Experts from the parameters ``names`` of a module. Returns None if the kernels cannot read them."""
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
    """Sorts (token, expert) pairs by expert; ``expert_ids`` has the expert of each pair. Returns the experts that have
    pairs; where the pairs of each begin after sorting, then the number of pairs; each sorted pair's old index."""
    order = expert_ids.argsort(stable=True)
    experts: list[int] = []
    starts: list[int] = []
    for i, expert in enumerate(expert_ids[order].tolist()):
        if not experts or expert != experts[-1]:
            experts.append(expert)
            starts.append(i)
    return experts, [*starts, len(expert_ids)], order


def fuse_gate_up(parts: list[torch.Tensor], is_concatenated: bool) -> torch.Tensor:
    """Joins gate and up along dimension 1, concatenated or interleaved: activations (pairs, out), weights (experts,
    out, in) or biases (experts, out). Returns a single tensor unchanged."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if is_concatenated else torch.stack(parts, 2).flatten(1, 2)


def as_parameters(
    module: Any, matrices: Mapping[str, torch.Tensor], biases: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Converts matrices (experts, out, in) and biases (experts, out) to the parameters of transformers' ``module``."""
    parameters: dict[str, torch.Tensor] = {}
    gate_up = [name for name in _GATE_UP if name in matrices]
    for parameter, names in (("up_proj" if gate_up == ["up"] else "gate_up_proj", gate_up), ("down_proj", [DOWN])):
        fused = fuse_gate_up([matrices[name] for name in names], module.is_concatenated)
        parameters[parameter] = fused.transpose(1, 2).contiguous() if module.is_transposed else fused
        if fused_biases := [biases[name] for name in names if name in biases]:
            parameters[f"{parameter}_bias"] = fuse_gate_up(fused_biases, module.is_concatenated)
    return parameters


class StoredExperts(nn.Module):
    """Replaces transformers' module of experts, with matrices that stay quantised or in half precision.

    Args:
        module: the module to replace. It loses its weights, and still computes everything but the matrix products.
        matrices: name -> (experts * out, in). Names: ``gate_up``, or ``gate`` and ``up``, or ``up``; and ``down``.
        biases: name of a matrix -> (experts, out).
        num_experts: number of experts."""

    def __init__(
        self, module: nn.Module, matrices: dict[str, QuantizedMatrix], biases: dict[str, torch.Tensor], num_experts: int
    ) -> None:
        super().__init__()
        for name in dict(module.named_parameters(recurse=False)):
            module.register_parameter(name, None)
        self.expert_count = num_experts
        self.replaced: Any = module
        for name, matrix in matrices.items():
            weights = StoredWeights(matrix)  # all experts' matrices, stacked
            weights.rows_per_matrix, weights.saved_by_parent = matrix.shape[0] // num_experts, True
            setattr(self, name, weights)
            self.register_buffer(f"{name}_bias", biases.get(name), persistent=False)
        self._cached_experts: tuple[object, Experts] | None = None  # with the matrices' addresses

    @property
    def _matrices(self) -> dict[str, StoredWeights]:
        return {name: weights for name, weights in self.named_children() if isinstance(weights, StoredWeights)}

    @property
    def experts(self) -> Experts:
        """The experts for our kernels. They are rebuilt if a matrix has moved in memory."""
        addresses = [weights.matrix.kernel_address() for weights in self._matrices.values()]
        if self._cached_experts is None or self._cached_experts[0] != addresses:
            matrices = {
                name: ExpertWeights(weights.matrix, getattr(self, f"{name}_bias"), num_experts=self.expert_count)
                for name, weights in self._matrices.items()
            }
            gate_up = [matrices[name] for name in _GATE_UP if name in matrices]
            self._cached_experts = addresses, Experts(self.replaced, gate_up, matrices[DOWN])
        return self._cached_experts[1]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes like :meth:`Experts.forward`, or without our kernels from dequantised matrices."""
        inputs = (hidden_states, top_k_index, top_k_weights)
        if kernels() is not None and hidden_states.device.type == "cpu" and hidden_states.dtype == torch.float32:
            return self.experts.forward(*inputs)
        parameters = {name: x.to(hidden_states.dtype) for name, x in self._dequantized().items()}
        out: torch.Tensor = functional_call(self.replaced, parameters, inputs)
        return out

    def _dequantized(self) -> dict[str, torch.Tensor]:
        """The parameters of the replaced module, in float32."""
        matrices = {name: w.weight.unflatten(0, (self.expert_count, -1)) for name, w in self._matrices.items()}
        biases = {name: bias for name in matrices if (bias := getattr(self, f"{name}_bias")) is not None}
        return as_parameters(self.replaced, matrices, biases)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: x for name, x in self._dequantized().items()})


def store_half_experts(model: nn.Module) -> None:
    """Makes a model's experts compute in float32 while their matrices stay in bfloat16 or float16."""
    for path, module in list(model.named_modules()):
        if not is_moe_experts(module):
            continue
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}
        matrices, biases = {}, {}
        for name in ("gate_up" if module.has_gate else "up", DOWN):
            weight, bias = parameters[f"{name}_proj"], parameters.get(f"{name}_proj_bias")
            # The kernels need the weights of one output next to each other in memory.
            transpose = module.is_transposed and weight.itemsize == 2
            weight = (weight.transpose(1, 2).contiguous() if transpose else weight).flatten(0, 1)
            if is_half_matrix(weight):
                matrices[name] = QuantizedMatrix.from_half(weight)
            if bias is not None:
                biases[name] = bias.float()
        if len(matrices) == 2:  # the kernels can read both
            model.set_submodule(path, StoredExperts(module, matrices, biases, len(parameters["down_proj"])))
