"""Maps a GGUF file's tensors to transformers' parameters: reverts the converter's changes of names, of the order of
rows and columns, and of values. Quant blocks are not requantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from longdraft.model.experts import DOWN, StoredExperts, as_parameters, is_moe_experts
from longdraft.model.gguf.architectures import Arch
from longdraft.model.gguf.header import GGUFTensor
from longdraft.model.stored import ArrangedLinear
from longdraft.native import QuantizedMatrix
from longdraft.native.quantized_matrix import QUANT_SIZES

LoadedWeight = torch.Tensor | QuantizedMatrix | ArrangedLinear

# Short names (:func:`_short_name`) of tensors whose shape differs from the parameter's.
_RESHAPED_TENSORS = ("ffn_gate_inp_shexp", "ssm_conv1d", "shortconv", "ssm_a", "ssm_d", "ssm_norm")

# Parameters and buffers that the package gguf's name map lacks: suffix of their name -> suffix of the tensor's name.
_EXTRA_SUFFIXES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
}
_LAYER_PATTERN = re.compile(r"\.layers\.(\d+)\.")


def extra_tensor_name(name: str) -> str | None:
    """The tensor's name for a parameter or buffer in :data:`_EXTRA_SUFFIXES`; None if it is not there."""
    layer = _LAYER_PATTERN.search(name)
    suffix = next((tensor for end, tensor in _EXTRA_SUFFIXES.items() if name.endswith(f".{end}")), None)
    return f"blk.{layer[1]}.{suffix}" if layer and suffix else None


def tensor_names(parameter: str, name_map: Callable[[str], str | None], available: Collection[str]) -> tuple[str, ...]:
    """Names of the tensors that a parameter consists of; empty if gguf has no name for it. name_map: maps a module's or
    parameter's name in transformers to gguf's, or to None. available: names of the file's tensors."""
    path, _, leaf = parameter.rpartition(".")
    layer = _LAYER_PATTERN.search(parameter)
    if (extra := extra_tensor_name(parameter)) is not None:
        return (extra,)
    if path == "lm_head":
        return (f"output.{leaf}",)
    if leaf == "dt_bias":
        path, leaf = f"{path}.dt_proj", "bias"
    elif (full_name := name_map(parameter)) is not None:  # the map names the parameter itself, not its module
        return (full_name if full_name in available else f"{full_name}.weight",)
    if path.endswith(".in_proj_qkvz"):
        # Two tensors, or in files of the first converter one, which the map names.
        names = tuple(f"blk.{layer[1] if layer else ''}.{name}.{leaf}" for name in ("attn_qkv", "attn_gate"))
        if names[0] in available:
            return names
    name = name_map(path)
    return () if name is None else (f"{name}.{leaf}",)


def load_weight(arch: Arch, tensors: Sequence[GGUFTensor], config: Any, shape: Sequence[int]) -> LoadedWeight:
    """Loads a parameter from one or several tensors: quantized if all tensors are quantized, else as floats."""
    tensor = tensors[0]
    name = _short_name(tensor.name)
    parts = [read_tensor(t) for t in tensors]
    rows = _row_permutation(arch, name, parts, config)
    heads = _value_head_permutation(config) if arch.tiled_value_heads and name == "ssm_out" else None
    columns = None if heads is None else _head_rows(heads, config.linear_value_head_dim)
    quantized = tuple(part for part in parts if isinstance(part, QuantizedMatrix))
    if len(quantized) == len(parts):
        if len(quantized) > 1 or columns is not None:
            return ArrangedLinear(quantized, rows, columns)
        return quantized[0] if rows is None else quantized[0].select_rows(rows)
    floats = [part.dequantize() if isinstance(part, QuantizedMatrix) else part for part in parts]
    data = floats[0] if len(floats) == 1 else torch.cat(floats)
    data = data if rows is None else data[rows]
    data = data if columns is None else data[:, columns]
    if name == "ssm_a":
        data = (-data).log()  # the file has -exp(A_log)
    if name in _RESHAPED_TENSORS and data.numel() == torch.Size(shape).numel():
        data = data.reshape(*shape)
    has_offset = arch.norm_plus_one and tensor.name.endswith("norm.weight") and name != "ssm_norm"
    return data - 1 if has_offset else data


def _short_name(name: str) -> str:
    """``attn_q`` of ``blk.0.attn_q.weight``."""
    parts = name.split(".")
    return parts[2] if parts[0] == "blk" else parts[0]


def read_tensor(tensor: GGUFTensor) -> torch.Tensor | QuantizedMatrix:
    """A tensor in the file's row order: a quantized matrix, (experts * out, in) for experts, or floats."""
    quant_type, data = tensor.quant_type, torch.from_numpy(tensor.data)
    if quant_type in QUANT_SIZES and len(tensor.shape) > 1 and tensor.shape[0] % QUANT_SIZES[quant_type][0] == 0:
        return QuantizedMatrix(data.flatten(0, -2), quant_type)
    if quant_type == "F32":
        return data
    import gguf

    return torch.from_numpy(gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[quant_type])).float()


def _row_permutation(
    arch: Arch, name: str, parts: Sequence[torch.Tensor | QuantizedMatrix], config: Any
) -> torch.Tensor | None:
    """For each row of the parameter the index of its row in the file; None if the order is equal."""
    if arch.permuted_qk and name in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
        count = parts[0].shape[0]
        return torch.arange(count, device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(-1)
    if len(parts) == 2:  # attn_qkv and attn_gate
        return _qkvz_permutation(config)
    if arch.tiled_value_heads and (heads := _value_head_permutation(config)) is not None:
        if name in ("attn_qkv", "ssm_conv1d"):
            num_qk_rows = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            return torch.cat(
                [torch.arange(num_qk_rows, device="cpu"), num_qk_rows + _head_rows(heads, config.linear_value_head_dim)]
            )
        if name == "attn_gate":
            return _head_rows(heads, config.linear_value_head_dim)
        if name in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
            return heads
    return None


def _value_head_permutation(config: Any) -> torch.Tensor | None:
    """For each value head its index in a file with tiled heads; None if key heads are as many, and nothing is tiled."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return None if keys == values else torch.arange(values, device="cpu").view(-1, keys).T.reshape(-1)


def _qkvz_permutation(config: Any) -> torch.Tensor:
    """For each row of in_proj_qkvz, which is grouped by key heads, its index in the concatenated q, k, v and z."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    value_rows = config.linear_num_value_heads // heads * config.linear_value_head_dim
    begin, order = 0, []
    for rows in (size, size, value_rows, value_rows):  # rows of q, k, v and z for each key head
        order.append(begin + torch.arange(heads * rows, device="cpu").view(heads, rows))
        begin += heads * rows
    return torch.cat(order, dim=1).reshape(-1)


def _head_rows(heads: torch.Tensor, size: int) -> torch.Tensor:
    """The indices of the heads' rows, ``size`` for each head."""
    return (heads[:, None] * size + torch.arange(size, device="cpu")).reshape(-1)


def load_experts(model: nn.Module, tensors: Mapping[str, torch.Tensor | QuantizedMatrix]) -> Iterator[str]:
    """Loads experts' weights into a model on the meta device; yields a message for each missing or misshaped tensor.
    Tensors are quantized (experts * out, in), or floats (experts, out, in)."""
    for path, module in list(model.named_modules()):
        if is_moe_experts(module):
            yield from _load_layer_experts(model, path, module, tensors)


def _load_layer_experts(
    model: nn.Module, path: str, module: Any, tensors: Mapping[str, torch.Tensor | QuantizedMatrix]
) -> Iterator[str]:
    num_experts, *sizes = module.down_proj.shape
    hidden, intermediate = sizes[::-1] if module.is_transposed else sizes
    layer = _LAYER_PATTERN.search(f".{path}.")
    name = f"blk.{layer[1] if layer else ''}.ffn_{{}}_exps."
    input_projections = ["gate_up"] if name.format("gate_up") + "weight" in tensors else ["gate", "up"]
    weights: dict[str, torch.Tensor | QuantizedMatrix] = {}
    biases: dict[str, torch.Tensor] = {}
    for projection in (*input_projections, DOWN):
        out_rows = 2 * intermediate if projection == "gate_up" else intermediate
        rows, columns = (hidden, intermediate) if projection == DOWN else (out_rows, hidden)
        weight, bias = (tensors.get(name.format(projection) + leaf) for leaf in ("weight", "bias"))
        if weight is None:
            yield f"{path}.{projection} (not there)"
            return
        is_quantized, shape = isinstance(weight, QuantizedMatrix), tuple(weight.shape)
        if shape != ((num_experts * rows, columns) if is_quantized else (num_experts, rows, columns)):
            yield f"{path}.{projection} ({shape}, not {(num_experts, rows, columns)})"
            return
        weights[projection] = weight
        if isinstance(bias, torch.Tensor):
            biases[projection] = bias
    quantized = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedMatrix)}
    if len(quantized) == len(weights):
        model.set_submodule(path, StoredExperts(module, quantized, biases, num_experts))
        return
    floats = {
        name: w.dequantize().unflatten(0, (num_experts, -1)) if isinstance(w, QuantizedMatrix) else w
        for name, w in weights.items()
    }
    for parameter, weight in as_parameters(module, floats, biases).items():
        setattr(module, parameter, nn.Parameter(weight, requires_grad=False))
