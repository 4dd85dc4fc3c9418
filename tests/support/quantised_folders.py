"""Tiny checkpoints in the quantised layouts of other projects, written by hand or by their packages."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import generate_tokens, tiny_model, tiny_tokenizer

GROUP = 32
# Sizes that the kernels of all packages support.
SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 128, "layers": 2}
TEXT = [3, 9, 4, 7, 2, 5, 8, 1, 6, 10]
# Repetitive prompts of several lengths: lookups find drafts, and most of these are wrong.
PROMPTS = [TEXT[:7] * 2, TEXT * 3, TEXT[:3] * 2]
NEW = 12


def own_tokens(model: Any) -> list[list[int]]:
    """The output of the model's own ``generate`` for each prompt."""
    return [generate_tokens(model, prompt, NEW) for prompt in PROMPTS]


def plain_folder(out: Path, dtype: torch.dtype = torch.float32, **over: Any) -> Path:
    """A model that is not quantised, with its tokenizer."""
    tiny_model(**(SIZES | {"dtype": dtype} | over)).save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    return out


def quantised_folder(out: Path, kind: str) -> Path:
    """A checkpoint of one of :data:`KINDS`."""
    settings, quantise = KINDS[kind]
    plain_folder(out)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(out / "model.safetensors").items():
        if name.endswith("proj.weight"):
            parts = quantise(weight)
            tensors |= {name.removesuffix("weight") + part: t.contiguous() for part, t in parts.items()}
        else:
            tensors[name] = weight
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return out


def compressed_folder(out: Path, preset: str) -> Path:
    """A checkpoint that compressed-tensors writes; ``preset``: one of its schemes."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    model = tiny_model(**SIZES)
    groups = {"group_0": quantization.preset_name_to_scheme(preset, ["Linear"])}
    config = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _calibrate(module, module.quantization_scheme.weights)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    tiny_tokenizer().save_pretrained(out)
    return out


def _calibrate(layer: Any, settings: Any) -> None:
    """Sets the scales of a layer that compressed-tensors quantises: of its weights and of its inputs."""
    weight, shared = layer.weight.data, getattr(layer, "weight_global_scale", None)
    parts = weight.unflatten(1, (-1, settings.group_size or weight.shape[1]))
    if shared is not None:
        shared.data.fill_(448 * 6 / weight.abs().max())
    compute = importlib.import_module("compressed_tensors.quantization.utils").calculate_qparams
    scale, zero = compute(parts.amin(-1), parts.amax(-1), settings, global_scale=shared)
    if layer.weight_scale.numel() == 1:
        scale, zero = compute(weight.amin(), weight.amax(), settings)
    layer.weight_scale.data.copy_(scale.view_as(layer.weight_scale))
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data.copy_(zero.view_as(layer.weight_zero_point))
    for name, number in (("input_scale", 0.03), ("input_zero_point", 0), ("input_global_scale", 448 * 6 / 10)):
        if hasattr(layer, name):
            getattr(layer, name).data.fill_(number)


def _nibbles(numbers: torch.Tensor, axis: int, order: Iterable[int] = range(8)) -> torch.Tensor:
    """Packs numbers 0 to 15 along an axis, eight in an int32."""
    lines = numbers.movedim(axis, 0).long()
    packed = sum((lines[place::8] & 15) << (4 * i) for i, place in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(0, axis)


def _in_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """4-bit codes (out, in) with zero point 8, and scales (out, groups)."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half().float()
    return (groups / scales[..., None]).round().clamp(-8, 7).flatten(1).int() + 8, scales


def pack(kind: str, numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a layer of AWQ's or GPTQ's kind: integers (out, in), zero points and scales (out, groups)."""
    if kind == "gptq":
        packed = {"qweight": _nibbles(numbers.T, 0), "qzeros": _nibbles(zeros.T - 1, 1)}
        return packed | {"scales": scales.T.half(), "g_idx": torch.arange(numbers.shape[1]).int() // GROUP}
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {"qweight": _nibbles(numbers.T, 1, order), "qzeros": _nibbles(zeros.T, 1, order)}
    return packed | {"scales": scales.T.half()}


def _gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers, scales = _in_groups(weight)
    return pack("gptq", numbers, torch.full_like(scales, 8).int(), scales)


def _awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    numbers, scales = _in_groups(weight)
    return pack("awq", numbers, torch.full_like(scales, 8).int(), scales)


def _fp8_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax() / 448
    blocks = [-(-n // 128) for n in weight.shape]
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale.expand(blocks)}


def _bitnet(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ternary codes; a byte packs one code of each quarter of the rows."""
    scale = 1 / weight.abs().mean()
    quarters = ((weight * scale).round().clamp(-1, 1).to(torch.uint8) + 1).view(4, -1, weight.shape[1])
    packed = sum(quarter << (2 * i) for i, quarter in enumerate(quarters))
    assert isinstance(packed, torch.Tensor)
    return {"weight": packed, "weight_scale": scale.view(1)}


def _gemma(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two 4-bit codes with zero point 8 in a byte, and scales of inputs and outputs."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    numbers = ((weight / scale).round() + 8).to(torch.uint8)
    scales = {f"{side}_activation_scale": torch.tensor(0.1) for side in ("input", "output")}
    return {"weight": numbers[:, ::2] | numbers[:, 1::2] << 4, "weight_scale": scale, **scales}


# Kind -> quantization_config, and a function: weight (out, in) -> the tensors that replace it.
KINDS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], dict[str, torch.Tensor]]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
        | {"checkpoint_format": "gptq"},
        _gptq,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, _awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, _fp8_blocks),
    "bitnet": ({"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}, _bitnet),
    "gemma": ({"quant_method": "gemma", "num_bits": 4, "modules_to_not_convert": ["lm_head"]}, _gemma),
}
