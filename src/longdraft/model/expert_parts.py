"""The products of a mixture of experts: rows times the matrices of the experts that they chose, each read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from longdraft.model.row_products import RowProducts
from longdraft.native import kernels
from longdraft.native.experts import ExpertProducts, ExpertWeights


@dataclass
class Experts:
    """The parts of a mixture's experts, in the place of their module.

    Attributes:
        first, last: matrices of the first and of the last product.
        between: from the first products (kinds, rows, out) to the inputs of the last one (rows, in).
        after: what follows the last product; None if nothing does.
    """

    first: list[ExpertWeights]
    last: ExpertWeights
    between: Callable[[torch.Tensor], torch.Tensor]
    after: Callable[[torch.Tensor], torch.Tensor] | None = None

    @cached_property
    def _products(self) -> tuple[ExpertProducts, ExpertProducts]:
        own = kernels()
        assert own is not None
        return ExpertProducts(own, self.first), ExpertProducts(own, [self.last])

    def routed(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (rows, hidden), each row for its experts ``index`` (rows, k) -> sums of their results by ``weights``."""
        rows, k = index.shape
        with torch._C.DisableTorchFunction():
            experts, starts, order = _grouped(index.reshape(-1))
            chosen = x[order // k]
        found = self._computed(chosen, experts, starts)
        with torch._C.DisableTorchFunction():
            results = torch.empty_like(found)
            results[order] = found
            scaled = results.view(rows, k, -1) * weights[..., None].to(found.dtype)
            # One after the other, in the order of the router: torch's sum may take another order for more rows.
            total = scaled[:, 0]
            for i in range(1, k):
                total = total + scaled[:, i]
            return total.to(x.dtype)

    def sorted(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x (experts * rows, hidden) that lie expert by expert. Zero rows, which are not routed, give zero."""
        wanted = (x != 0).any(-1).nonzero().flatten()
        out = torch.zeros(x.shape[0], self.last.shape[0], dtype=x.dtype, device="cpu")
        experts, starts, order = _grouped(wanted // (x.shape[0] // self.last.count))
        if experts:
            wanted = wanted[order]
            out[wanted] = self._computed(x[wanted], experts, starts)
        return out

    def _computed(self, rows: torch.Tensor, experts: list[int], starts: list[int]) -> torch.Tensor:
        first, last = self._products
        between = self.between(first(rows.float(), experts, starts).to(rows.dtype))
        out = last(between.float(), experts, starts)[0].to(rows.dtype)
        return out if self.after is None else self.after(out)


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


def between_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function of a module of experts between its two products; None if our code does not know it.

    The first products are those with a matrix that holds gate and up, with two matrices, or with ``up`` alone.
    """
    own: Callable[[torch.Tensor], torch.Tensor] | None = getattr(module, "_apply_gate", None)
    act: Callable[[torch.Tensor], torch.Tensor] | None = getattr(module, "act_fn", None)
    gated = bool(getattr(module, "has_gate", True))
    side_by_side = bool(getattr(module, "is_concatenated", True))
    if own is None and act is None:
        return None

    def between(found: torch.Tensor) -> torch.Tensor:
        with RowProducts():
            if gated and own is not None:
                if len(found) == 1:
                    return own(found[0])
                return own(torch.cat([*found], -1) if side_by_side else torch.stack([*found], -1).flatten(-2))
            assert act is not None
            if not gated:
                return act(found[0])
            gate, up = found if len(found) == 2 else found[0].chunk(2, dim=-1)
            return act(gate) * up

    return between


def after_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function behind the last product of a module of experts; None if there is none."""
    norm: Callable[[torch.Tensor], torch.Tensor] | None = getattr(module, "post_expert_norm", None)
    return norm if getattr(module, "has_post_expert_norm", False) else None
