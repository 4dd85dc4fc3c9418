"""Weights of drafts in few bits on a GPU: a model's copy in four bits, a trained draft's layers in eight.

A forward of few tokens takes the time to read the weights. A model that drafts for itself with a copy in four bits
takes some 0.3 of the time of 16 bits. On a CPU our kernels round drafts by themselves
(:func:`longdraft.model.quant.stored.quantize_for_draft`).
"""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import MemoryBudgetError
from longdraft.memory import memory_info
from longdraft.model.layers.skinny_gemm import is_plain_tensor
from longdraft.model.model_copy import copy_model
from longdraft.model.quant.planes import Planes, PlanesLinear, planes_of
from longdraft.model.quant.stored import quantize_rows, weight_shape
from longdraft.native.quantized_matrix import QUANT_SIZES

logger = logging.getLogger("longdraft")

ModuleT = TypeVar("ModuleT", bound=nn.Module)

MAX_RATIO = 0.75  # a copy that reads more than this part of the model's bytes hardly drafts faster


def four_bit_copy(model: PreTrainedModel) -> tuple[PreTrainedModel, float] | None:
    """Copies a model, with Q4_0 in the linear layers whose weights have 8 or 16 bits, and Q8_0 in a head of 16 bits.

    The copy shares all other parameters. Layers of other types stay as they are.

    Returns:
        The copy, and the bytes that a forward of it reads / the bytes that a forward of the model reads; None if the
        copy does not fit into memory, or if it would read more than :data:`MAX_RATIO` of the bytes.
    """
    copied, embedding, head = copy_model(model), model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = not isinstance(head, PlanesLinear) and embedding.weight is head.weight
    formats: dict[str, Literal["Q4_0", "Q8_0"]] = {}
    own_bytes = copy_bytes = other_bytes = 0
    for path, module in model.named_modules():
        if module is embedding and not is_tied:
            continue  # a forward reads few rows
        if not _can_quantize(module) or (module is head and isinstance(head, PlanesLinear)):
            other_bytes += _num_bytes(module)
            continue
        formats[path] = "Q8_0" if module is head else "Q4_0"
        own_bytes += _num_bytes(module)
        block_size, block_bytes = QUANT_SIZES[formats[path]]
        copy_bytes += weight_shape(module)[0] * weight_shape(module)[1] // block_size * block_bytes
    ratio = (copy_bytes + other_bytes) / max(1, own_bytes + other_bytes)
    if ratio > MAX_RATIO:
        return None
    try:
        memory_info.require_bytes(copy_bytes, model.device, "A copy in four bits, which drafts")
    except MemoryBudgetError as error:
        logger.info("Drafting uses the target's own weights, not a quantised copy: %s", error)
        return None
    for path, target_format in formats.items():
        copied.set_submodule(path, _quantized(model.get_submodule(path), target_format))
    return copied, ratio


def round_to_eight_bits(draft: ModuleT) -> ModuleT:
    """Rounds a draft's linear layers to Q8_0, in place, and returns the draft. Rows that are no whole blocks stay."""
    for path, module in list(draft.named_modules()):
        if _can_quantize(module):
            draft.set_submodule(path, _quantized(module, "Q8_0"))
    return draft


def eight_bit_planes(head: torch.Tensor) -> Planes | torch.Tensor:
    """Returns a head (vocabulary, hidden) in Q8_0; unchanged if its rows are no whole blocks."""
    if head.shape[1] % QUANT_SIZES["Q8_0"][0] or not is_plain_tensor(head):
        return head
    return _planes(head, "Q8_0")


def _can_quantize(module: nn.Module) -> bool:
    """True for a linear layer of 8 or more bits a weight whose rows are whole blocks, not quantised by a package."""
    if isinstance(module, PlanesLinear):
        return not module.interleave
    if type(module) is not nn.Linear or hasattr(module.weight, "__tensor_flatten__"):
        return False
    return module.weight.is_floating_point() and not module.in_features % QUANT_SIZES["Q4_0"][0]


def _num_bytes(module: nn.Module) -> int:
    return sum(x.nbytes for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


@torch.no_grad()
def _quantized(layer: Any, target_format: Literal["Q4_0", "Q8_0"]) -> PlanesLinear:
    return PlanesLinear(_planes(layer.weight, target_format), layer.bias)


def _planes(weight: torch.Tensor, target_format: Literal["Q4_0", "Q8_0"]) -> Planes:
    planes = planes_of(quantize_rows(weight, target_format))
    assert planes is not None
    return planes
