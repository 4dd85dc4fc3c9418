"""Mixtures of experts while text is decoded: exact row by row, and only what the rows are routed to is read.

transformers multiplies a token's row with its experts' matrices in grouped products, which round by the number of rows.
Here our kernels multiply the rows with the matrices of the experts that they are routed to, each matrix read once. This
serves the modules of transformers' ``ExpertsInterface``, which say how their matrices lie and what is computed between
the products. Other mixtures run their own code, with products that are exact by row (:mod:`.rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from longdraft.model.few_rows import in_halves, is_plain
from longdraft.model.model_code import present_forward, replace_forward
from longdraft.native import Stored, kernels
from longdraft.native.experts import ExpertProducts, ExpertWeights


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
    def _products(self) -> tuple[ExpertProducts, ExpertProducts]:
        own = kernels()
        assert own is not None
        return ExpertProducts(own, self.first), ExpertProducts(own, [self.last])

    def routed(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (rows, hidden), each row for its experts ``index`` (rows, k) -> sums of their results by ``weights``."""
        rows, k = index.shape
        first, last = self._products
        with torch._C.DisableTorchFunction():
            experts, starts, order = _grouped(index.reshape(-1))
            found = first(x[order // k].float(), experts, starts).to(x.dtype)
        between = self.between(found)
        with torch._C.DisableTorchFunction():
            found = last(between.float(), experts, starts)[0].to(x.dtype)
        found = self.after(found)
        with torch._C.DisableTorchFunction():
            results = torch.empty_like(found)
            results[order] = found
            scaled = results.view(rows, k, -1) * weights[..., None].to(found.dtype)
            # One after the other, in the order of the router: torch's sum may take another order for more rows.
            total = scaled[:, 0]
            for i in range(1, k):
                total = total + scaled[:, i]
            return total.to(x.dtype)

    def between(self, found: torch.Tensor) -> torch.Tensor:
        """From the first products (kinds, rows, out) to the inputs of the last one (rows, in)."""
        own = self.module
        x = joined([*found], own.is_concatenated)
        inputs: torch.Tensor = own._apply_gate(x) if own.has_gate else own.act_fn(x)
        return inputs

    def after(self, found: torch.Tensor) -> torch.Tensor:
        """Finishes what the last product has left."""
        out: torch.Tensor = self.module.post_expert_norm(found) if has_norm(self.module) else found
        return out


def has_norm(module: Any) -> bool:
    return bool(getattr(module, "has_post_expert_norm", False))  # a word of later versions of transformers


def is_mixture(module: nn.Module) -> bool:
    """True for a module of experts of transformers' ``ExpertsInterface``."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")


def install(model: nn.Module, wanted: Callable[[], bool]) -> None:
    """Makes a model's mixtures of experts exact by row, for good. The model must be a copy of our own.

    Args:
        wanted: called in each forward; while it returns False, mixtures compute as usual.
    """
    for module in model.modules():
        if kernels() is not None and is_mixture(module):
            replace_forward(module, _by_kernels(module, wanted))


def _by_kernels(module: Any, wanted: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    own = present_forward(module)
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
        served = experts() if wanted() else None
        compute = own if served is None else served.routed
        out: torch.Tensor = compute(hidden_states, top_k_index, top_k_weights)
        return out

    return forward


def _experts(module: Any, names: tuple[str, str]) -> Experts | None:
    """A mixture's experts for our kernels; None if they do not read such matrices."""
    found = []
    for name in names:
        weight, bias = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        if not is_plain(weight) or weight.device.type != "cpu" or not weight.is_contiguous():
            return None
        bias = None if bias is None else bias.detach().float()
        if weight.dtype == torch.float32:
            found.append(ExpertWeights(weight, bias, module.is_transposed))
        elif not module.is_transposed and in_halves(weight.flatten(0, 1)):
            found.append(ExpertWeights(Stored.of(weight.flatten(0, 1)), bias, count=len(weight)))
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


def joined(parts: list[torch.Tensor], side_by_side: bool) -> torch.Tensor:
    """One tensor (E, out, ...) of several, one behind the other or in turns."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if side_by_side else torch.stack(parts, 2).flatten(1, 2)
