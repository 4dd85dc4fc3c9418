"""The layer of a GGUF file that predicts further tokens (MTP; llama.cpp calls it nextn), behind the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longdraft.errors import CapabilityError
from longdraft.model import hosting
from longdraft.model.checkpoints import quiet, reading
from longdraft.model.gguf import layout
from longdraft.model.gguf.files import File
from longdraft.model.gguf.header import needs
from longdraft.model.stored import StoredLinear
from longdraft.model.stored_parts import ArrangedLinear
from longdraft.native import Stored

_BESIDE = ("eh_proj", "enorm", "hnorm", "shared_head_norm")


@contextmanager
def _opened(path: Path) -> Iterator[_Further | None]:
    """A file that has such a layer; None of another.

    Raises:
        CheckpointError: the file is damaged.
    """
    needs("gguf", path)
    remedy = "It may be truncated: fetch it again, or give the model's Hugging Face folder."
    with reading(path, f"{path} cannot be read as a GGUF file", remedy), quiet():
        file = _Further(path)
        yield file if file("nextn_predict_layers") else None


def holds(path: Path) -> bool:
    """True if a file has such a layer.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _opened(path) as file:
        return file is not None


def read(path: Path) -> dict[str, torch.Tensor | Stored] | None:
    """Tensors of the first such layer; None without one. Names are transformers' within a layer, and
    ``eh_proj.weight``, ``enorm.weight``, ``hnorm.weight`` and ``shared_head_norm.weight``. Matrices are as they are
    stored, those of experts floats.

    Raises:
        CheckpointError: the file is damaged.
        CapabilityError: further layers of this architecture are not read from GGUF files.
    """
    with _opened(path) as file:
        return None if file is None else file.parameters()


class _Further(File):
    def parameters(self) -> dict[str, torch.Tensor | Stored]:
        config = self.config()
        number = int(config.num_hidden_layers)
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [*kinds[:number], "full_attention"]
        config.num_hidden_layers = number + 1
        layer = hosting.decoder_layers(self.model(config))[-1]
        found: dict[str, torch.Tensor | Stored] = dict(layer.state_dict())
        for name, module in layer.named_modules():
            if isinstance(module, ArrangedLinear):
                raise CapabilityError(f"{self.path} has rows of {name} in an order that is not read.")
            if isinstance(module, StoredLinear):
                found[f"{name}.weight"] = module.matrix
        for name in _BESIDE:
            if (tensor := self.tensors.get(f"blk.{number}.nextn.{name}.weight")) is not None:
                weight = layout.weight(self.arch, [tensor], config, ())
                assert isinstance(weight, torch.Tensor | Stored)
                found[f"{name}.weight"] = weight
        return found

    def _spare(self, name: str, config: Any) -> bool:
        return True
