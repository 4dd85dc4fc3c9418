"""Mixtures of experts while text is decoded: exact row by row, and only what the rows are routed to is read.

transformers multiplies a token's row with its experts' matrices in grouped products, which round by the number of rows.
Here our kernels multiply the rows with the matrices of the experts that they are routed to, each matrix read once. What
such a module computes between its two products is its own function. A module that our code does not know computes by
its own code with our products in it (row_products.py), and if that is not exact by row, row by row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.model import adapters
from longdraft.model.expert_parts import Experts, after_of, between_of
from longdraft.model.hosting import decoder_config
from longdraft.model.model_code import own_forward, present_forward, replace_forward
from longdraft.model.row_functions import undisturbed
from longdraft.model.row_products import RowProducts
from longdraft.model.stored_experts import StoredExperts
from longdraft.native import Stored, kernels
from longdraft.native.boundary import FLOATS
from longdraft.native.experts import ExpertWeights

logger = logging.getLogger("longdraft")

# Rows of the made-up inputs of a check, and the largest relative difference to the module's own result, in float32 and
# in 16 bits.
_ROWS, _CLOSE, _ROUNDED = 7, 1e-3, 0.1


def install(model: PreTrainedModel, wanted: Callable[[], bool]) -> None:
    """Makes a model's mixtures of experts exact by row, for good. The model must be a copy of our own.

    Args:
        wanted: called in each forward; while it returns False, mixtures compute as usual.
    """
    if kernels() is None:  # without kernels, products do not give a row the same bits either
        return
    size, trying = decoder_config(model).hidden_size, False

    def ours_wanted() -> bool:
        return trying or wanted()

    known: dict[type, bool] = {}  # kinds of experts -> whether our kernels compute them
    exact: dict[type, bool] = {}  # kinds of mixtures -> whether their rows are exact
    left_out = adapters.replacing_weights(model)
    blocks = [m for m in model.modules() if any(_has_experts(name, child) for name, child in m.named_children())]
    for block in [block for block in blocks if block not in left_out]:
        for experts in block.children():
            _take_over(experts, ours_wanted, known)
        for inner in block.modules():
            if type(inner) is nn.Linear:
                replace_forward(inner, undisturbed(present_forward(inner)))
        present, kind = present_forward(block), type(block)
        ours = _with_products(present)
        if kind not in exact:
            trying = True
            exact[kind] = model.dtype != torch.float32 or _exact(ours, size)
            trying = False
            if not exact[kind]:
                logger.warning("%s is computed row by row, which is slower.", kind.__name__)
        replace_forward(block, _either(ours if exact[kind] else _each_row(ours), present, wanted))


def _take_over(experts: nn.Module, wanted: Callable[[], bool], known: dict[type, bool]) -> None:
    """Has our kernels compute a module of experts, if they know it."""
    if (parts := experts_of(experts)) is None:
        return
    kind, ours, own = type(experts), _forward(experts, parts), present_forward(experts)
    if kind not in known:
        known[kind] = isinstance(experts, StoredExperts) or _same(experts, parts, ours, own)
        if not known[kind]:
            logger.warning("%s is computed by its own code with our products, which is slower.", kind.__name__)
    if known[kind]:
        replace_forward(experts, _either(ours, own, wanted))


def _has_experts(name: str, module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.ModuleList):
        return False
    several = any(weight.dim() == 3 for weight in module.parameters(recurse=False))
    return name == "experts" or several or isinstance(module, StoredExperts)


def experts_of(module: nn.Module) -> Experts | None:
    """The parts of a module of experts that our kernels can multiply with; None if it is of another kind."""
    if isinstance(module, StoredExperts):
        return module.parts
    own = dict(module.named_parameters(recurse=False))
    gated = "gate_up_proj" in own
    first, last = own.get("gate_up_proj" if gated else "up_proj"), own.get("down_proj")
    if first is None or last is None or "gate_proj" in own or first.dim() != 3 or last.dim() != 3:
        return None
    # Without a word of the class: (E, hidden, out) and (E, in, hidden), or the other way round.
    by_input = bool(getattr(module, "is_transposed", first.shape[1] == last.shape[2]))
    bias = own.get("gate_up_proj_bias" if gated else "up_proj_bias"), own.get("down_proj_bias")
    weights = [_weights(w, b, by_input) for w, b in zip((first, last), bias, strict=True)]
    between = between_of(module)
    if weights[0] is None or weights[1] is None or between is None or first.shape[0] != last.shape[0]:
        return None
    return Experts([weights[0]], weights[1], between, after_of(module))


def _weights(weight: torch.Tensor, bias: torch.Tensor | None, by_input: bool) -> ExpertWeights | None:
    bias = None if bias is None else bias.detach().float()
    weight = weight.detach()
    if weight.device.type != "cpu" or not weight.is_contiguous() or hasattr(weight, "device_mesh"):
        return None
    if weight.dtype == torch.float32:
        return ExpertWeights(weight, bias, by_input)
    if weight.dtype in (torch.bfloat16, torch.float16) and not by_input and weight.shape[2] % 32 == 0:
        return ExpertWeights(Stored.of(weight.flatten(0, 1)), bias, count=weight.shape[0])
    return None


def _forward(module: nn.Module, parts: Experts) -> Callable[..., torch.Tensor]:
    """A forward with the parameters of the module's own."""
    names = own_forward(module).parameters
    if len(names) < 3:
        return parts.sorted

    def forward(*args: Any, **named: Any) -> torch.Tensor:
        x, index, weights = (*args, *(named[name] for name in names[len(args) : 3]))
        return parts.routed(x, index, weights)

    return forward


def _same(module: nn.Module, parts: Experts, ours: Callable[..., Any], own: Callable[..., Any]) -> bool:
    """Compares a mixture's made-up rows with those of its own code, and with the same rows alone."""
    dtype = next(module.parameters()).dtype
    generator, size, count = torch.Generator().manual_seed(0), parts.first[0].shape[1], parts.last.count
    x = torch.randn(_ROWS, size, generator=generator, **FLOATS).to(dtype)
    index = torch.rand(_ROWS, count, generator=generator, **FLOATS).argsort()[:, : min(2, count)]
    weights = torch.rand(index.shape, generator=generator, **FLOATS).to(dtype)
    try:
        with torch.no_grad():
            if len(own_forward(module).parameters) >= 3:
                expected, got = own(x, index, weights), ours(x, index, weights)
                alone = torch.cat([ours(x[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(_ROWS)])
            else:
                routed = torch.zeros(count, _ROWS, size, dtype=dtype, device="cpu")
                routed[index[:, 0], torch.arange(_ROWS, device="cpu")] = x
                expected, got = own(routed.flatten(0, 1)), ours(routed.flatten(0, 1))
                rows = [ours(routed[:, i].contiguous()) for i in range(_ROWS)]
                alone = torch.stack(rows, 1).flatten(0, 1)
    except Exception as error:  # the module's own code, with inputs that it may not take
        logger.info("%s takes other rows than ours: %s", type(module).__name__, error)
        return False
    if not bool(expected.isfinite().all()):  # a damaged model is noticed when it is used
        return True
    apart = (got.float() - expected.float()).norm() / expected.float().norm()
    return torch.equal(got, alone) and bool(apart < (_CLOSE if dtype == torch.float32 else _ROUNDED))


def _exact(block: Callable[..., Any], size: int) -> bool:
    """True if a mixture's made-up rows have the bits of the same rows alone, or if it cannot be called by itself."""
    x = torch.randn(1, _ROWS, size, generator=torch.Generator().manual_seed(0), **FLOATS)

    def rows(given: torch.Tensor) -> torch.Tensor:
        found = block(given)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.reshape(-1, size)

    try:
        with torch.no_grad():
            whole, alone = rows(x), torch.cat([rows(x[:, i : i + 1]) for i in range(_ROWS)])
    except Exception as error:
        logger.info("A mixture of experts cannot be tried out by itself: %s", error)
        return True
    return torch.equal(whole, alone) or not bool(whole.isfinite().all())


def _either(ours: Callable[..., Any], own: Callable[..., Any], wanted: Callable[[], bool]) -> Callable[..., Any]:
    def either(*args: Any, **named: Any) -> Any:
        return ours(*args, **named) if wanted() else own(*args, **named)

    return either


def _with_products(forward: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **named: Any) -> Any:
        with RowProducts():
            return forward(*args, **named)

    return inside


def _each_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a mixture, which takes (B, T, hidden), with one row after the other."""

    def by_row(x: torch.Tensor, *args: Any, **named: Any) -> Any:
        found = [forward(row, *args, **named) for row in x.reshape(-1, 1, 1, x.shape[-1])]
        several = isinstance(found[0], tuple)
        rows = torch.cat([each[0] if several else each for each in found]).view(x.shape)
        return (rows, *found[0][1:]) if several else rows

    return by_row
