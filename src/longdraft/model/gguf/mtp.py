"""The layer of a GGUF file that predicts further tokens (MTP; llama.cpp calls it nextn), behind the model's own."""

from __future__ import annotations

from pathlib import Path

import torch

from longdraft.errors import CapabilityError
from longdraft.model import hosting
from longdraft.model.gguf import tensor_mapping
from longdraft.model.gguf.loading import open_gguf
from longdraft.model.stored import ArrangedLinear, StoredLinear
from longdraft.native import QuantizedMatrix

_COUNT = "nextn_predict_layers"
_BESIDE = ("eh_proj", "enorm", "hnorm", "shared_head_norm")


def has_mtp_layer(path: Path) -> bool:
    """True if a file has such a layer.

    Raises:
        CheckpointError: the file is damaged.
    """
    with open_gguf(path) as file:
        return bool(file(_COUNT))


def read_mtp_layer(path: Path) -> dict[str, torch.Tensor | QuantizedMatrix] | None:
    """Tensors of the first such layer; None without one. Names are transformers' within a layer, and
    ``eh_proj.weight``, ``enorm.weight``, ``hnorm.weight`` and ``shared_head_norm.weight``. Matrices are as they are
    stored, those of experts floats.

    Raises:
        CheckpointError: the file is damaged.
        CapabilityError: further layers of this architecture are not read from GGUF files.
    """
    with open_gguf(path) as file:
        if not file(_COUNT):
            return None
        config = file.config()
        number = int(config.num_hidden_layers)
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [*kinds[:number], "full_attention"]
        config.num_hidden_layers = number + 1
        layer = hosting.decoder_layers(file.load_model(config, require_all=False))[-1]
        found: dict[str, torch.Tensor | QuantizedMatrix] = dict(layer.state_dict())
        for name, module in layer.named_modules():
            if isinstance(module, ArrangedLinear):
                raise CapabilityError(f"{path} has rows of {name} in an order that is not read.")
            if isinstance(module, StoredLinear):
                found[f"{name}.weight"] = module.matrix
        for name in _BESIDE:
            if (tensor := file.tensors.get(f"blk.{number}.nextn.{name}.weight")) is not None:
                weight = tensor_mapping.load_weight(file.arch, [tensor], config, ())
                assert isinstance(weight, torch.Tensor | QuantizedMatrix)
                found[f"{name}.weight"] = weight
        return found
