"""Mixtures of experts in GGUF files, where a tensor has one matrix (gate, up or down) of every expert of a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from longdraft.model.experts import is_mixture, joined
from longdraft.model.stored_experts import LAST, StoredExperts
from longdraft.native import Stored

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A model's modules of experts, by name."""
    for path, module in model.named_modules():
        if is_mixture(module):
            yield path, module


def put_in(
    model: nn.Module, path: str, module: nn.Module, tensors: Mapping[str, torch.Tensor | Stored]
) -> Iterator[str]:
    """Gives a module without memory its weights. Yields what is wrong with them.

    Args:
        tensors: the file's, by name: matrices as they are stored, (experts * out, in), or floats (experts, out, in).
    """
    turned = bool(module.is_transposed)
    last = module.down_proj
    assert isinstance(last, torch.Tensor)
    count, *sizes = last.shape
    hidden, inner = sizes[::-1] if turned else sizes
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
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, StoredExperts(module, stored, biases, count))
        return
    side_by_side = bool(module.is_concatenated)
    for saved, kinds in (("gate_up_proj", first), ("down_proj", [LAST])):
        floats = [w.floats().unflatten(0, (count, -1)) if isinstance(w := found[kind], Stored) else w for kind in kinds]
        whole = joined(floats, side_by_side)
        setattr(module, saved, _frozen(whole.transpose(1, 2).contiguous() if turned else whole))
        if biases:
            setattr(module, f"{saved}_bias", _frozen(joined([biases[kind] for kind in kinds], side_by_side)))


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
