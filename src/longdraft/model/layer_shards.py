"""Decoder layers whose weights are spread over processes: each keeps a share, and all gather a layer when it computes.

That is FSDP2 (torch's ``fully_shard``). Unlike tensor parallelism (:mod:`.sharded`), each process computes whole layers
on rows of its own, so all processes must run equally many forwards.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from longdraft.errors import CapabilityError
from longdraft.model import hosting
from longdraft.model.layout import has_windows


def shard_layers(model: PreTrainedModel, device: torch.device, processes: int) -> None:
    """Spreads the weights of the decoder layers over all processes, in place; the rest goes to the device as it is.

    Args:
        model: on the CPU; one layer at a time is whole on the device. device: of this process.
        processes: number of processes, all of which call this.

    Raises:
        CapabilityError: the layers are quantised, or some see a window of the text only.
    """
    name = type(model).__name__
    if (method := _quantised(model)) is not None:
        raise CapabilityError(
            f"{name} is quantised ({method}), and shard_target takes plain weights: give a checkpoint in bfloat16, or "
            "leave shard_target out."
        )
    if has_windows(model):
        raise CapabilityError(f"{name} has layers with windows, which shard_target does not take: leave it out.")
    mesh = init_device_mesh(device.type, (processes,))
    layers = hosting.decoder_layers(model)
    shared = {weight for layer in layers for weight in layer.parameters()}
    others = {weight for weight in model.parameters() if weight not in shared}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # Owns nothing, but lets a layer be gathered while the one before it computes.
    fully_shard(hosting.decoder_of(model), mesh=mesh, ignored_params=others)
    model.to(device)


def _quantised(model: PreTrainedModel) -> str | None:
    """The way in which a model's layers are quantised; None if they are not."""
    if not getattr(model, "is_quantized", False):
        return None
    settings = getattr(model.config, "quantization_config", None) or {}
    method = (settings if isinstance(settings, dict) else vars(settings)).get("quant_method", "by another package")
    return str(getattr(method, "value", method))
