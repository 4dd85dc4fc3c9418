"""Maps a GGUF file's tensors to transformers' parameters: reverts what the converter has changed, which is names, the
order of rows and columns, and values. Quant blocks are requantized only if our kernels do not read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from longdraft.model.gguf.architectures import Arch
from longdraft.model.gguf.header import GGUFTensor
from longdraft.model.layers.experts import DOWN, StoredExperts, as_parameters, is_moe_experts
from longdraft.model.quant.stored import ArrangedLinear
from longdraft.native import QuantizedMatrix
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.quantized_matrix import QUANT_SIZES, quantize_blocks

LoadedWeight = torch.Tensor | QuantizedMatrix | ArrangedLinear

_CHUNK_ROWS = 256  # number of rows that a thread converts at a time, to limit memory

# Short names (:func:`_short_name`) of tensors whose shape differs from the parameter's.
_RESHAPED_TENSORS = ("ffn_gate_inp_shexp", "ssm_conv1d", "shortconv", "ssm_a", "ssm_d", "ssm_norm")

# For names that the package gguf's map lacks: suffix of a parameter's or buffer's name -> suffix of the tensor's name.
_EXTRA_SUFFIXES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
}
_MODULE_LAYER_PATTERN = re.compile(r"\.layers\.(\d+)\.")


def extra_tensor_name(name: str) -> str | None:
    """Returns the tensor's name for a parameter or buffer of :data:`_EXTRA_SUFFIXES`; None for all others."""
    layer = _MODULE_LAYER_PATTERN.search(name)
    suffix = next((tensor for end, tensor in _EXTRA_SUFFIXES.items() if name.endswith(f".{end}")), None)
    return f"blk.{layer[1]}.{suffix}" if layer and suffix else None


def tensor_names(parameter: str, name_map: Callable[[str], str | None], available: Collection[str]) -> tuple[str, ...]:
    """Returns the names of the tensors that make up a parameter; empty if gguf has no name. ``name_map`` maps a name of
    a module or parameter in transformers to gguf's, or to None. ``available`` are the names in the file."""
    module, _, leaf = parameter.rpartition(".")
    layer = _MODULE_LAYER_PATTERN.search(parameter)
    if (extra := extra_tensor_name(parameter)) is not None:
        return (extra,)
    if module == "lm_head":
        return (f"output.{leaf}",)
    if leaf == "dt_bias":
        module, leaf = f"{module}.dt_proj", "bias"
    elif (full_name := name_map(parameter)) is not None:  # the map names the parameter itself, not its module
        return (full_name if full_name in available else f"{full_name}.weight",)
    if module.endswith(".in_proj_qkvz"):
        # The file has two tensors, or, from the first version of the converter, one that the map names.
        names = tuple(f"blk.{layer[1] if layer else ''}.{name}.{leaf}" for name in ("attn_qkv", "attn_gate"))
        if names[0] in available:
            return names
    name = name_map(module)
    return () if name is None else (f"{name}.{leaf}",)


def load_weight(
    arch: Arch, tensors: Sequence[GGUFTensor], config: Any, shape: Sequence[int], requantize: bool
) -> LoadedWeight:
    """Loads a parameter of a shape from one or more tensors: quantized if all tensors are quantized, else as floats."""
    tensor = tensors[0]
    name = _short_name(tensor.name)
    parts = [read_tensor(t, requantize) for t in tensors]
    row_order = _row_order(arch, name, parts, config)
    head_order = _value_head_order(config) if arch.tiled_value_heads and name == "ssm_out" else None
    column_order = None if head_order is None else _expand_heads(head_order, config.linear_value_head_dim)
    quantized = tuple(part for part in parts if isinstance(part, QuantizedMatrix))
    if len(quantized) == len(parts):
        if len(quantized) > 1 or column_order is not None:
            return ArrangedLinear(quantized, row_order, column_order)
        return quantized[0] if row_order is None else quantized[0].select_rows(row_order)
    floats = [part.dequantize() if isinstance(part, QuantizedMatrix) else part for part in parts]
    data = floats[0] if len(floats) == 1 else torch.cat(floats)
    data = data if row_order is None else data[row_order]
    data = data if column_order is None else data[:, column_order]
    if name == "ssm_a":
        data = (-data).log()  # the file has -exp(A_log)
    if name in _RESHAPED_TENSORS and data.numel() == torch.Size(shape).numel():
        data = data.reshape(*shape)
    has_offset = arch.norm_plus_one and tensor.name.endswith("norm.weight") and name != "ssm_norm"
    return data - 1 if has_offset else data


def _short_name(name: str) -> str:
    """Returns ``attn_q`` for ``blk.0.attn_q.weight``."""
    parts = name.split(".")
    return parts[2] if parts[0] == "blk" else parts[0]


def is_foreign(tensor: GGUFTensor) -> bool:
    """True for a matrix in blocks that our kernels do not read, such as IQ3_S."""
    return len(tensor.shape) > 1 and tensor.quant_type not in (*QUANT_SIZES, "F32")


def read_tensor(tensor: GGUFTensor, requantize: bool) -> torch.Tensor | QuantizedMatrix:
    """Reads a tensor in the file's row order: as a quantized matrix (experts: (experts * out, in)), or as floats.

    ``requantize``: True makes a foreign matrix (:func:`is_foreign`) a Q8_0 matrix; False makes it floats.
    """
    quant_type, data = tensor.quant_type, torch.from_numpy(tensor.data)
    if quant_type in QUANT_SIZES and len(tensor.shape) > 1 and tensor.shape[0] % QUANT_SIZES[quant_type][0] == 0:
        return QuantizedMatrix(data.flatten(0, -2), quant_type)
    if quant_type == "F32":
        return data
    import gguf

    requantize = requantize and is_foreign(tensor)

    def convert(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        floats = torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[quant_type])).float()
        return quantize_blocks(floats * factors, "Q8_0") if requantize else floats * factors

    rows = data.reshape(-1, data.shape[-1])
    scales = torch.ones(1, **CPU_FLOAT32) if tensor.scale is None else torch.from_numpy(tensor.scale)
    row_scales = scales.repeat_interleave(len(rows) // len(scales))[:, None]  # each expert has a scale
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        matrix = torch.cat([*pool.map(convert, rows.split(_CHUNK_ROWS), row_scales.split(_CHUNK_ROWS))])
    return QuantizedMatrix(matrix, "Q8_0") if requantize else matrix.view(*data.shape[:-1], -1)


def unpermuted_rows(num_rows: int, num_heads: int) -> torch.Tensor:
    """Returns the index in the file of each row of q or k, if the converter's ``permute`` has interleaved the rows."""
    return torch.arange(num_rows, device="cpu").view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _row_order(
    arch: Arch, name: str, parts: Sequence[torch.Tensor | QuantizedMatrix], config: Any
) -> torch.Tensor | None:
    """Returns, for each row of a parameter, the row's index in the file; None if the order is equal."""
    if arch.permuted_qk and name in ("attn_q", "attn_k"):
        num_heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
        return unpermuted_rows(parts[0].shape[0], num_heads)
    if len(parts) == 2:  # attn_qkv and attn_gate
        return _qkvz_order(config)
    if arch.tiled_value_heads and (head_order := _value_head_order(config)) is not None:
        value_rows = _expand_heads(head_order, config.linear_value_head_dim)
        if name in ("attn_qkv", "ssm_conv1d"):
            num_qk_rows = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            return torch.cat([torch.arange(num_qk_rows, device="cpu"), num_qk_rows + value_rows])
        if name == "attn_gate":
            return value_rows
        if name in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):  # one row for each head
            return head_order
    return None


def _value_head_order(config: Any) -> torch.Tensor | None:
    """Returns, for each value head, the head's index in a file with tiled heads; None if each key head has one."""
    num_key_heads, num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    indices = torch.arange(num_value_heads, device="cpu").view(-1, num_key_heads)
    return None if num_key_heads == num_value_heads else indices.T.reshape(-1)


def _qkvz_order(config: Any) -> torch.Tensor:
    """Returns the index of each row of in_proj_qkvz, which is grouped by key heads, in q, k, v and z concatenated."""
    num_heads, key_rows = config.linear_num_key_heads, config.linear_key_head_dim
    value_rows = config.linear_num_value_heads // num_heads * config.linear_value_head_dim
    begin, order = 0, []
    for num_rows in (key_rows, key_rows, value_rows, value_rows):  # rows of q, k, v and z for each key head
        order.append(begin + torch.arange(num_heads * num_rows, device="cpu").view(num_heads, num_rows))
        begin += num_heads * num_rows
    return torch.cat(order, dim=1).reshape(-1)


def _expand_heads(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the indices of the heads' rows; each head has ``head_dim`` rows."""
    return (heads[:, None] * head_dim + torch.arange(head_dim, device="cpu")).reshape(-1)


def load_experts(model: nn.Module, tensors: Mapping[str, torch.Tensor | QuantizedMatrix]) -> Iterator[str]:
    """Loads experts' weights into a model on the meta device. Yields a message for each missing or misshaped tensor.
    ``tensors`` are quantized (experts * out, in), or floats (experts, out, in)."""
    for path, module in list(model.named_modules()):
        if is_moe_experts(module):
            yield from _load_layer_experts(model, path, module, tensors)


def _load_layer_experts(
    model: nn.Module, path: str, module: Any, tensors: Mapping[str, torch.Tensor | QuantizedMatrix]
) -> Iterator[str]:
    num_experts, *sizes = module.down_proj.shape  # (experts, hidden, intermediate), or the last two transposed
    hidden_size, intermediate_size = sizes[::-1] if module.is_transposed else sizes
    layer = _MODULE_LAYER_PATTERN.search(f".{path}.")
    name = f"blk.{layer[1] if layer else ''}.ffn_{{}}_exps."
    input_projections = ["gate_up"] if name.format("gate_up") + "weight" in tensors else ["gate", "up"]
    weights: dict[str, torch.Tensor | QuantizedMatrix] = {}
    biases: dict[str, torch.Tensor] = {}
    for projection in (*input_projections, DOWN):
        in_rows = 2 * intermediate_size if projection == "gate_up" else intermediate_size
        num_rows, num_columns = (hidden_size, intermediate_size) if projection == DOWN else (in_rows, hidden_size)
        weight, bias = (tensors.get(name.format(projection) + leaf) for leaf in ("weight", "bias"))
        if weight is None:
            yield f"{path}.{projection} (not there)"
            return
        is_quantized, shape = isinstance(weight, QuantizedMatrix), tuple(weight.shape)
        if shape != ((num_experts * num_rows, num_columns) if is_quantized else (num_experts, num_rows, num_columns)):
            yield f"{path}.{projection} ({shape}, not {(num_experts, num_rows, num_columns)})"
            return
        weights[projection] = weight
        if isinstance(bias, torch.Tensor):
            biases[projection] = bias
    quantized = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedMatrix)}
    if len(quantized) == len(weights):
        model.set_submodule(path, StoredExperts(module, quantized, biases, num_experts))
        return
    floats = {
        name: weight.dequantize().unflatten(0, (num_experts, -1)) if isinstance(weight, QuantizedMatrix) else weight
        for name, weight in weights.items()
    }
    for parameter, weight in as_parameters(module, floats, biases).items():
        setattr(module, parameter, nn.Parameter(weight, requires_grad=False))
