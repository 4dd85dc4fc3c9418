"""The layer of a GGUF file that predicts further tokens (MTP; llama.cpp calls it nextn), behind the model's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from longdraft.errors import CapabilityError
from longdraft.model import stored
from longdraft.model.checkpoints import quiet, reading
from longdraft.model.gguf import experts, layout
from longdraft.model.gguf.files import File
from longdraft.model.gguf.reader import needs
from longdraft.model.stored_parts import Arranged
from longdraft.native import Stored

_BESIDE = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
_REMEDY = "It may be truncated: fetch it again, or give the model's Hugging Face folder."


def holds(path: Path) -> bool:
    """True if a file has such a layer.

    Raises:
        CheckpointError: the file is damaged.
    """
    needs("gguf", path)
    with reading(path, f"{path} cannot be read as a GGUF file", _REMEDY), quiet():
        return _Further(path).count > 0


def read(path: Path) -> dict[str, torch.Tensor | Stored] | None:
    """Tensors of the first such layer; None without one. Names are transformers' within a layer, and
    ``eh_proj.weight``, ``enorm.weight``, ``hnorm.weight`` and ``shared_head_norm.weight``. Matrices are as they are
    stored, those of experts floats.

    Raises:
        CheckpointError: the file is damaged.
        CapabilityError: further layers of this architecture are not read from GGUF files.
    """
    needs("gguf", path)
    with reading(path, f"{path} cannot be read as a GGUF file", _REMEDY), quiet():
        file = _Further(path)
        return file.parameters() if file.count else None


class _Further(File):
    @property
    def count(self) -> int:
        """The number of such layers."""
        return int(self("nextn_predict_layers", 0))

    def parameters(self) -> dict[str, torch.Tensor | Stored]:
        config = self.config()
        number = int(config.num_hidden_layers)
        tensors = {name: t for name, t in self.tensors.items() if name.startswith(f"blk.{number}.")}
        model = _alone(config)
        own = {
            name.replace(f"blk.{number}.", "blk.0."): layout.experts_of(tensor)
            for name, tensor in tensors.items()
            if "_exps." in name
        }
        list(experts.put_in(model, own))
        config.num_hidden_layers = number + 1  # gguf has names for so many
        known, begin = self.known(config), "model.layers.0."
        found: dict[str, torch.Tensor | Stored] = {}
        for whole, parameter in model.named_parameters():
            name, theirs = whole.removeprefix(begin), whole.replace(begin, f"model.layers.{number}.")
            if whole == name:
                continue
            if not parameter.is_meta:
                found[name] = parameter.detach()  # an expert's
                continue
            parts = [tensors[each] for each in layout.tensor_names(theirs, known, tensors) if each in tensors]
            if parts:
                found[name] = self._ordered(parts, config, parameter.shape)
        for whole, buffer in model.named_buffers():
            theirs = whole.replace(begin, f"model.layers.{number}.")
            if (at := layout.buffer_name(theirs)) in tensors:
                found[whole.removeprefix(begin)] = torch.from_numpy(tensors[at].data).view(buffer.shape)
        for name in _BESIDE:
            if (tensor := tensors.get(f"blk.{number}.nextn.{name}.weight")) is not None:
                found[f"{name}.weight"] = self._ordered([tensor], config, ())
        return found

    def _ordered(self, parts: list[Any], config: Any, shape: Any) -> torch.Tensor | Stored:
        weight = self.weight(parts, config, shape)
        if isinstance(weight, Arranged):
            raise CapabilityError(f"{self.path} has rows of {parts[0].name} in an order that is not read.")
        return weight


def _alone(config: Any) -> Any:
    """A model of one layer, of the kind that predicts further tokens, without memory."""
    alike = copy.deepcopy(config)
    for name, value in (("layer_types", ["full_attention"]), ("first_k_dense_replace", 0), ("mlp_only_layers", [])):
        if getattr(alike, name, None) is not None:
            setattr(alike, name, value)
    alike.num_hidden_layers = 1
    with stored.without_memory():
        return AutoModelForCausalLM.from_config(alike, dtype=torch.float32)
