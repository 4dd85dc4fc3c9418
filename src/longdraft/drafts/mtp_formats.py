"""Reads the multi-token prediction layer (MTP, nextn) from a target's checkpoint.

    Qwen3-Next, Qwen3.5               mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm, layers.0.*}
    `speculators`                     mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm, *}
    GLM-4.5, DeepSeek-V3              model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm, *}, behind N layers
    GGUF files                        blk.N.nextn.{eh_proj, enorm, hnorm, shared_head_norm}, blk.N.*

transformers drops these tensors when it loads a model. Copies of the target's embedding and head are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from longdraft.drafts import tensor_files
from longdraft.errors import CheckpointError
from longdraft.folders import is_gguf
from longdraft.model.gguf import mtp
from longdraft.native import QuantizedMatrix

_MTP_NAME = re.compile(r"^(?:model\.)?mtp(?:_layers\.0)?\.(.+)$")
_LAYER_NAME = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)$")
# Name of a module in any layout -> name in our module.
_RENAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "shared_head.norm": "norm",
    "shared_head_norm": "norm",
    "final_layernorm": "norm",
    "input_proj": "eh_proj",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
}
_OUTER_NAMES = ("eh_proj", "enorm", "hnorm", "norm")  # modules outside of the decoder layer
# Copies of the target's tensors.
_TARGET_COPIES = ("embed_tokens.", "shared_head.head.", "shared_head_head.", "lm_head.")


def has_mtp_layer(folder: Path | str) -> bool:
    """True if a checkpoint contains an MTP layer."""
    path = Path(folder)
    if is_gguf(path):
        return path.is_file() and mtp.has_mtp_layer(path)
    return bool(tensor_files.select_names(path, _select_tensors))


def read(folder: Path | str) -> dict[str, torch.Tensor | QuantizedMatrix]:
    """Reads the first MTP layer, by our module's names: ``eh_proj``, ``enorm``, ``hnorm``, ``norm``, ``layer.*``.
    Raises CheckpointError if the checkpoint cannot be read, or has no MTP layer."""
    path = Path(folder)
    if is_gguf(path):
        layer = mtp.read_mtp_layer(path) if path.is_file() else None
        if layer is None:
            raise _no_layer(folder)
        return {_rename(name): tensor for name, tensor in layer.items() if not name.startswith(_TARGET_COPIES)}
    names = _select_tensors(tensor_files.names(path)) if tensor_files.has_safetensors(path) else {}
    if not names:
        raise _no_layer(folder)
    if scales := [name for name in names if "scale" in name.rpartition(".")[2]]:
        raise CheckpointError(
            f"{folder} stores its MTP layer quantised ({scales[0]}), which longdraft does not read: name a folder that "
            "has it in bfloat16 as the draft (draft=, or --draft DIR), such as the original model's."
        )
    tensors = tensor_files.read(path, list(names))
    return dict(stack_experts({names[name]: tensor for name, tensor in tensors.items()}))


def _no_layer(folder: Path | str) -> CheckpointError:
    return CheckpointError(
        f"{folder} has no multi-token prediction layer (mtp.* or nextn): some copies and most quantised files leave it "
        "out. Get the model's own folder, or take another method, such as self or prompt-lookup."
    )


def _select_tensors(names: Iterable[str]) -> dict[str, str]:
    """Maps the tensors of the first MTP layer from their names in the checkpoint to their names in our module."""
    # Full name -> the part after the MTP module's name, or after the layer's number.
    suffixes: dict[str, str] = {}
    by_layer: dict[int, dict[str, str]] = {}
    for name in names:
        if (match := _MTP_NAME.match(name)) is not None:
            suffixes[name] = match[1]
        elif (match := _LAYER_NAME.match(name)) is not None:
            by_layer.setdefault(int(match[1]), {})[name] = match[2]
    # Without a projection in an MTP module, the MTP layers have numbers behind the target's layers.
    if not any(suffix in ("fc.weight", "input_proj.weight") for suffix in suffixes.values()):
        mtp_layers = [i for i, layer_suffixes in by_layer.items() if "eh_proj.weight" in layer_suffixes.values()]
        suffixes = by_layer[min(mtp_layers)] if mtp_layers else {}
    unused = re.compile(r"layers\.[1-9]|.*inv_freq$")  # further MTP layers; RoPE frequencies
    return {
        name: _rename(suffix)
        for name, suffix in suffixes.items()
        if not suffix.startswith(_TARGET_COPIES) and not unused.match(suffix)
    }


def _rename(name: str) -> str:
    """Returns a tensor's name in our module."""
    module, _, parameter = name.rpartition(".")
    renamed = _RENAMES.get(module, module)
    if renamed in _OUTER_NAMES:
        return f"{renamed}.{parameter}"
    return f"layer.{name.removeprefix('layers.0.')}"


def stack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks the matrices of single experts as transformers does, and returns all other tensors unchanged."""
    pattern = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    stacked: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = pattern.match(name)
        if match is None:
            stacked[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for path, projections in experts.items():
        weights = {name: torch.stack([by_index[i] for i in sorted(by_index)]) for name, by_index in projections.items()}
        if {"gate_proj", "up_proj"} <= weights.keys():
            stacked[f"{path}.gate_up_proj"] = torch.cat([weights["gate_proj"], weights["up_proj"]], dim=1)
        if "down_proj" in weights:
            stacked[f"{path}.down_proj"] = weights["down_proj"]
    return stacked
