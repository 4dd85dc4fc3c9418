"""Mixtures of experts in GGUF files, where a tensor has one matrix (gate, up or down) of every expert of a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from longdraft.model.experts import LAST, StoredExperts, as_parameters, is_mixture
from longdraft.native import Stored

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def put_in(model: nn.Module, tensors: Mapping[str, torch.Tensor | Stored]) -> Iterator[str]:
    """Gives the mixtures of a model without memory their weights. Yields what is wrong with them.

    Args:
        tensors: the file's, by name: matrices as they are stored, (experts * out, in), or floats (experts, out, in).
    """
    for path, module in list(model.named_modules()):
        if is_mixture(module):
            yield from _put_in(model, path, module, tensors)


def _put_in(model: nn.Module, path: str, module: Any, tensors: Mapping[str, torch.Tensor | Stored]) -> Iterator[str]:
    count, *sizes = module.down_proj.shape
    hidden, inner = sizes[::-1] if module.is_transposed else sizes
    layer = _LAYER.search(f".{path}.")
    name = f"blk.{layer[1] if layer else ''}.ffn_{{}}_exps."
    first = ["gate_up"] if name.format("gate_up") + "weight" in tensors else ["gate", "up"]
    found: dict[str, torch.Tensor | Stored] = {}
    biases: dict[str, torch.Tensor] = {}
    for kind in (*first, LAST):
        wanted = (hidden, inner) if kind == LAST else (2 * inner if kind == "gate_up" else inner, hidden)
        weight, bias = (tensors.get(name.format(kind) + leaf) for leaf in ("weight", "bias"))
        if weight is None:
            yield f"{path}.{kind} (not there)"
            return
        shape = tuple(weight.shape)
        if shape != ((count * wanted[0], wanted[1]) if isinstance(weight, Stored) else (count, *wanted)):
            yield f"{path}.{kind} ({shape}, not {(count, *wanted)})"
            return
        found[kind] = weight
        if isinstance(bias, torch.Tensor):
            biases[kind] = bias
    stored = {kind: weight for kind, weight in found.items() if isinstance(weight, Stored)}
    if len(stored) == len(found):
        model.set_submodule(path, StoredExperts(module, stored, biases, count))
        return
    floats = {k: w.floats().unflatten(0, (count, -1)) if isinstance(w, Stored) else w for k, w in found.items()}
    for saved, weight in as_parameters(module, floats, biases).items():
        setattr(module, saved, nn.Parameter(weight, requires_grad=False))
