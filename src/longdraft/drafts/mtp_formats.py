"""Reads the layer that predicts further tokens (MTP, nextn) out of a target's own checkpoint.

    Qwen3-Next, Qwen3.5               mtp.{fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm, layers.0.*}
    `speculators`                     mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm, *}
    GLM-4.5, DeepSeek-V3              model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm, *}, N layers before it
    GGUF files                        blk.N.nextn.{eh_proj, enorm, hnorm, shared_head_norm}, blk.N.*

transformers drops these tensors when it loads a model. Copies of the target's embedding and head are dropped here.
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

_OF_OTHERS = re.compile(r"^(?:model\.)?mtp(?:_layers\.0)?\.(.+)$")
_NUMBERED = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)$")
# Names in either layout -> the block's.
_NAMES = {
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
_OWN = ("eh_proj", "enorm", "hnorm", "norm")
# Copies of what is the target's.
_SHARED = ("embed_tokens.", "shared_head.head.", "shared_head_head.", "lm_head.")


def has_mtp_layer(folder: Path | str) -> bool:
    """True if a checkpoint holds such a layer."""
    path = Path(folder)
    if is_gguf(path):
        return path.is_file() and mtp.has_mtp_layer(path)
    return bool(tensor_files.select_names(path, _wanted))


def read(folder: Path | str) -> dict[str, torch.Tensor | QuantizedMatrix]:
    """Tensors of the first such layer, by names of the block: ``eh_proj``, ``enorm``, ``hnorm``, ``norm``, ``layer.*``.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no such layer.
    """
    path = Path(folder)
    if is_gguf(path):
        found = mtp.read_mtp_layer(path) if path.is_file() else None
        if found is None:
            raise _none(folder)
        return {_named(name): tensor for name, tensor in found.items() if not name.startswith(_SHARED)}
    wanted = _wanted(tensor_files.names(path)) if tensor_files.has_safetensors(path) else {}
    if not wanted:
        raise _none(folder)
    if scaled := [name for name in wanted if "scale" in name.rpartition(".")[2]]:
        raise CheckpointError(
            f"{folder} stores its further layer quantised ({scaled[0]}), which is not read: name a folder that has it "
            "in bfloat16 as the draft (draft=, or --draft DIR), such as the original model's."
        )
    tensors = tensor_files.read(path, list(wanted))
    return dict(stack_experts({wanted[name]: tensor for name, tensor in tensors.items()}))


def _none(folder: Path | str) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds no layer that predicts further tokens (mtp.* or nextn): some copies and most quantised files "
        "leave it out. Get the model's own folder, or take another method, such as self or prompt-lookup."
    )


def _wanted(names: Iterable[str]) -> dict[str, str]:
    """Name in the checkpoint -> the block's name, for the tensors of the first further layer."""
    found: dict[str, str] = {}
    numbered: dict[int, dict[str, str]] = {}
    for name in names:
        if (of_others := _OF_OTHERS.match(name)) is not None:
            found[name] = of_others[1]
        elif (of_layer := _NUMBERED.match(name)) is not None:
            numbered.setdefault(int(of_layer[1]), {})[name] = of_layer[2]
    if not any(own in ("fc.weight", "input_proj.weight") for own in found.values()):
        further = [i for i, own in numbered.items() if "eh_proj.weight" in own.values()]
        found = numbered[min(further)] if further else {}
    kept = {name: own for name, own in found.items() if not own.startswith(_SHARED) and not own.endswith("inv_freq")}
    return {name: _named(own) for name, own in kept.items() if not re.match(r"layers\.[1-9]", own)}


def _named(name: str) -> str:
    """A tensor's name within the block."""
    path, _, leaf = name.rpartition(".")
    own = _NAMES.get(path, path)
    if own in _OWN:
        return f"{own}.{leaf}"
    return f"layer.{name.removeprefix('layers.0.')}"


def stack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of single experts put together as transformers keeps them; the rest as it is."""
    pattern = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = pattern.match(name)
        if match is None:
            found[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for path, parts in experts.items():
        rows = {part: torch.stack([each[i] for i in sorted(each)]) for part, each in parts.items()}
        if {"gate_proj", "up_proj"} <= rows.keys():
            found[f"{path}.gate_up_proj"] = torch.cat([rows["gate_proj"], rows["up_proj"]], dim=1)
        if "down_proj" in rows:
            found[f"{path}.down_proj"] = rows["down_proj"]
    return found
