"""Undoes what llama.cpp's converter changes in tensors: names, order of rows and columns, numbers, experts apart.

Blocks of quantised weights stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from longdraft.model.experts import LAST, StoredExperts, as_parameters, is_moe_experts
from longdraft.model.gguf.architectures import Arch
from longdraft.model.gguf.header import GGUFTensor
from longdraft.model.stored import ArrangedLinear
from longdraft.native import QuantizedMatrix
from longdraft.native.quantized_matrix import QUANT_SIZES

LoadedWeight = torch.Tensor | QuantizedMatrix | ArrangedLinear

# Tensors of another shape, by the first part of their name in a layer.
_RESHAPED = ("ffn_gate_inp_shexp", "ssm_conv1d", "shortconv", "ssm_a", "ssm_d", "ssm_norm")

# Ends of the names of parameters and buffers that gguf has no names for -> ends of tensors' names.
_OTHERS = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def extra_tensor_name(name: str) -> str | None:
    """The tensor of a file that a parameter or buffer is which gguf has no name for, or None."""
    layer, end = _LAYER.search(name), next((x for ours, x in _OTHERS.items() if name.endswith(f".{ours}")), None)
    return f"blk.{layer[1]}.{end}" if layer and end else None


def tensor_names(parameter: str, name_map: Callable[[str], str | None], available: Collection[str]) -> tuple[str, ...]:
    """The tensors of a file that a model's parameter consists of; empty if gguf has no name for it.

    Args:
        name_map: gguf's name of a module or parameter of transformers, or None.
        available: the file's tensors.
    """
    path, _, leaf = parameter.rpartition(".")
    layer = _LAYER.search(parameter)
    if (other := extra_tensor_name(parameter)) is not None:
        return (other,)
    if path == "lm_head":
        return (f"output.{leaf}",)
    if leaf == "dt_bias":
        path, leaf = f"{path}.dt_proj", "bias"
    elif (whole := name_map(parameter)) is not None:
        return (whole if whole in available else f"{whole}.weight",)  # not a layer's weight or bias
    if path.endswith(".in_proj_qkvz"):
        # Two tensors, but one in files of the first converter.
        names = tuple(f"blk.{layer[1] if layer else ''}.{name}.{leaf}" for name in ("attn_qkv", "attn_gate"))
        if names[0] in available:
            return names
    name = name_map(path)
    return () if name is None else (f"{name}.{leaf}",)


def load_weight(arch: Arch, tensors: Sequence[GGUFTensor], config: Any, shape: Sequence[int]) -> LoadedWeight:
    """A parameter of the model, of one tensor or several: as it is stored, or floats.

    Args:
        wanted: the parameter's shape.
    """
    tensor = tensors[0]
    part = _part(tensor.name)
    parts = [read_tensor(each) for each in tensors]
    rows, heads = (
        _rows(arch, part, parts, config),
        _value_heads(config) if arch.tiled_value_heads and part == "ssm_out" else None,
    )
    columns = None if heads is None else _each(heads, config.linear_value_head_dim)
    packed = tuple(each for each in parts if isinstance(each, QuantizedMatrix))
    if len(packed) == len(parts):
        if len(packed) > 1 or columns is not None:
            return ArrangedLinear(packed, rows, columns)
        return packed[0] if rows is None else packed[0].select_rows(rows)
    floats = [each.dequantize() if isinstance(each, QuantizedMatrix) else each for each in parts]
    data = floats[0] if len(floats) == 1 else torch.cat(floats)
    data = data if rows is None else data[rows]
    data = data if columns is None else data[:, columns]
    if part == "ssm_a":
        data = (-data).log()  # the file has -exp of it
    if part in _RESHAPED and data.numel() == torch.Size(shape).numel():
        data = data.reshape(*shape)
    more = arch.norm_plus_one and tensor.name.endswith("norm.weight") and part != "ssm_norm"
    return data - 1 if more else data


def _part(name: str) -> str:
    """The first part of a tensor's name behind its layer."""
    pieces = name.split(".")
    return pieces[2] if pieces[0] == "blk" else pieces[0]


def read_tensor(tensor: GGUFTensor) -> torch.Tensor | QuantizedMatrix:
    """A tensor in its file's order: a matrix, or those of several experts one behind the other, or floats."""
    kind, data = tensor.quant_type, torch.from_numpy(tensor.data)
    if kind in QUANT_SIZES and len(tensor.shape) > 1 and tensor.shape[0] % QUANT_SIZES[kind][0] == 0:
        return QuantizedMatrix(data.flatten(0, -2), kind)
    if kind == "F32":
        return data
    import gguf

    return torch.from_numpy(gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[kind])).float()


def _rows(arch: Arch, part: str, parts: Sequence[torch.Tensor | QuantizedMatrix], config: Any) -> torch.Tensor | None:
    """Place in the file of each row; None if they are in order."""
    if arch.permuted_qk and part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        count = parts[0].shape[0]
        return torch.arange(count, device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(-1)
    if len(parts) == 2:  # queries, keys and values, and gates
        return _by_key_head(config)
    if arch.tiled_value_heads and (heads := _value_heads(config)) is not None:
        if part in ("attn_qkv", "ssm_conv1d"):
            keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            return torch.cat([torch.arange(keys, device="cpu"), keys + _each(heads, config.linear_value_head_dim)])
        if part == "attn_gate":
            return _each(heads, config.linear_value_head_dim)
        if part in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
            return heads
    return None


def _value_heads(config: Any) -> torch.Tensor | None:
    """Place in a tiled file of each value head; None if there are as many as key heads."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return None if keys == values else torch.arange(values, device="cpu").view(-1, keys).T.reshape(-1)


def _by_key_head(config: Any) -> torch.Tensor:
    """Place in queries, keys, values and gates of each row, where rows of a key head are side by side."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    begin, found = 0, []
    for each in (size, size, values, values):
        found.append(begin + torch.arange(heads * each, device="cpu").view(heads, each))
        begin += heads * each
    return torch.cat(found, dim=1).reshape(-1)


def _each(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Places of heads -> places of their rows."""
    return (heads[:, None] * size + torch.arange(size, device="cpu")).reshape(-1)


def load_experts(model: nn.Module, tensors: Mapping[str, torch.Tensor | QuantizedMatrix]) -> Iterator[str]:
    """Gives the mixtures of a model without memory their weights. Yields what is wrong with them.

    Args:
        tensors: the file's, by name: matrices as they are stored, (experts * out, in), or floats (experts, out, in).
    """
    for path, module in list(model.named_modules()):
        if is_moe_experts(module):
            yield from _put_mixture_in(model, path, module, tensors)


def _put_mixture_in(
    model: nn.Module, path: str, module: Any, tensors: Mapping[str, torch.Tensor | QuantizedMatrix]
) -> Iterator[str]:
    count, *sizes = module.down_proj.shape
    hidden, inner = sizes[::-1] if module.is_transposed else sizes
    layer = _LAYER.search(f".{path}.")
    name = f"blk.{layer[1] if layer else ''}.ffn_{{}}_exps."
    first = ["gate_up"] if name.format("gate_up") + "weight" in tensors else ["gate", "up"]
    found: dict[str, torch.Tensor | QuantizedMatrix] = {}
    biases: dict[str, torch.Tensor] = {}
    for kind in (*first, LAST):
        wanted = (hidden, inner) if kind == LAST else (2 * inner if kind == "gate_up" else inner, hidden)
        weight, bias = (tensors.get(name.format(kind) + leaf) for leaf in ("weight", "bias"))
        if weight is None:
            yield f"{path}.{kind} (not there)"
            return
        shape = tuple(weight.shape)
        if shape != ((count * wanted[0], wanted[1]) if isinstance(weight, QuantizedMatrix) else (count, *wanted)):
            yield f"{path}.{kind} ({shape}, not {(count, *wanted)})"
            return
        found[kind] = weight
        if isinstance(bias, torch.Tensor):
            biases[kind] = bias
    stored = {kind: weight for kind, weight in found.items() if isinstance(weight, QuantizedMatrix)}
    if len(stored) == len(found):
        model.set_submodule(path, StoredExperts(module, stored, biases, count))
        return
    floats = {
        k: w.dequantize().unflatten(0, (count, -1)) if isinstance(w, QuantizedMatrix) else w for k, w in found.items()
    }
    for saved, weight in as_parameters(module, floats, biases).items():
        setattr(module, saved, nn.Parameter(weight, requires_grad=False))
