"""Reads a GGUF file's MTP layer (multi-token prediction; llama.cpp's nextn), which follows the decoder layers."""

from __future__ import annotations

from pathlib import Path

import torch

from longdraft.errors import CapabilityError
from longdraft.model.gguf import tensor_mapping
from longdraft.model.gguf.loading import open_gguf
from longdraft.model.model_parts import decoder_layers
from longdraft.model.quant.stored import ArrangedLinear, StoredLinear
from longdraft.native import QuantizedMatrix

_NUM_LAYERS_FIELD = "nextn_predict_layers"
_MTP_MODULES = ("eh_proj", "enorm", "hnorm", "shared_head_norm")  # besides those of a decoder layer


def has_mtp_layer(path: Path) -> bool:
    """True if a file has an MTP layer. Raises CheckpointError if the file is damaged."""
    with open_gguf(path) as file:
        return bool(file(_NUM_LAYERS_FIELD))


def read_mtp_layer(path: Path) -> dict[str, torch.Tensor | QuantizedMatrix] | None:
    """Reads the tensors of the first MTP layer, by name; None if the file has none. Names are those of a decoder layer
    in transformers, and MODULE.weight for :data:`_MTP_MODULES`. Matrices stay quantized, experts become floats.

    Raises:
        CheckpointError: the file is damaged.
        CapabilityError: MTP layers of this architecture are not read from GGUF files.
    """
    with open_gguf(path) as file:
        if not file(_NUM_LAYERS_FIELD):
            return None
        config = file.config()
        index = int(config.num_hidden_layers)
        if layer_types := getattr(config, "layer_types", None):
            config.layer_types = [*layer_types[:index], "full_attention"]
        config.num_hidden_layers = index + 1  # the MTP layer is loaded as one more decoder layer
        layer = decoder_layers(file.load_model(config, requantize=True, layer=index))[index]
        tensors: dict[str, torch.Tensor | QuantizedMatrix] = dict(layer.state_dict())
        for name, module in layer.named_modules():
            if isinstance(module, ArrangedLinear):
                raise CapabilityError(f"{path}: the row order of {name} is not supported; use another draft.")
            if isinstance(module, StoredLinear):
                tensors[f"{name}.weight"] = module.matrix
        for name in _MTP_MODULES:
            if (tensor := file.tensors.get(f"blk.{index}.nextn.{name}.weight")) is not None:
                # (): no tensor to reshape
                weight = tensor_mapping.load_weight(file.arch, [tensor], config, (), requantize=True)
                assert isinstance(weight, torch.Tensor | QuantizedMatrix)
                tensors[f"{name}.weight"] = weight
        return tensors
