"""Names a target by its weights and settings, to guard the rows of texts that are kept, in memory and on disk.

A name is a digest of all settings and of every number of every tensor. It takes as long as reading the weights once, so
it is made anew only if the target has changed: a look takes milliseconds, and sees another tensor, another version of
one (any write that torch knows of) and other numbers among those that are sampled (writes that it does not know of).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longdraft.model.called_functions import called_functions, is_library_code, replaced_functions
from longdraft.model.model_copy import HOOKS, IGNORED_ATTRIBUTES, MODULE_ATTRIBUTES, SCALAR_TYPES, data_ptr_of
from longdraft.model.stored import storage_tensors
from longdraft.model.tensor_parallel import local_tensor

# Rows of a matrix that are sampled, a number of each; every row of a matrix with as many rows as a vocabulary.
_ROWS, _VOCABULARY = 128, 1 << 14
_PAGE = 4096
# Settings on which no row depends. So are those of transformers' models that begin with an underscore.
_NAMES = frozenset(
    ("transformers_version", "name_or_path", "architectures", "dtype", "kernel_config", "hf_device_map", "loss_type")
)
_LEFT_OUT = MODULE_ATTRIBUTES | IGNORED_ATTRIBUTES | _NAMES | {"_is_hf_initialized"}
# What transformers computes anew from the settings, by the length of the text that a model has just read.
_BY_LENGTH = ("inv_freq", "attention_scaling", "max_seq_len_cached")

_names: WeakKeyDictionary[PreTrainedModel, tuple[bytes, str]] = WeakKeyDictionary()
# What was at each place when a model was first named.
_functions: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
_process, _uses = uuid.uuid4().hex, itertools.count()


def fingerprint_of(model: PreTrainedModel) -> str:
    """The name of a target as it is now."""
    modules = list(model.modules())
    tensors = [
        (name, _bytes(part), tensor)
        for name, tensor in _tensors(modules)
        for part in storage_tensors(local_tensor(tensor))
    ]
    settings, samples = "\n".join(_settings(model, modules)), [_sample(each) for _, each, _ in tensors]
    state = [
        (id(tensor), data_ptr_of(tensor), 0 if tensor.is_inference() else tensor._version) for _, _, tensor in tensors
    ]
    seen = hashlib.sha256(f"{settings}\n{state}".encode())
    content = hashlib.sha256(settings.encode())
    for sample in samples:
        seen.update(sample)
        content.update(sample)
    known = _names.get(model)
    if known is None or known[0] != seen.digest():
        for name, each, tensor in tensors:
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(_sums(each))
        kind = model.config.get_text_config().model_type
        known = _names[model] = seen.digest(), f"{kind}-{content.hexdigest()[:16]}"
    return known[1]


def hooks_suffix(model: nn.Module) -> str:
    """Another name at every call where a model has a user's hooks, which may compute something else in the next run, or
    calls other functions than at first."""
    first = _functions.setdefault(model, {})
    changed = [place for place, now in called_functions(model).items() if first.setdefault(place, id(now)) != id(now)]
    return f", hooks {_process}.{next(_uses)}" if changed or user_code_in(model) else ""


def user_code_in(model: nn.Module, include_classes: bool = False) -> list[str]:
    """Names of modules with hooks or replaced forwards, and places of functions that their forwards call, that none of
    the packages put there that we know.

    Args:
        classes: also of modules whose class has its forward from no such package.
    """
    found = replaced_functions(model)
    for name, module in model.named_modules():
        own = [hook for hooks in HOOKS for hook in getattr(module, hooks).values()]
        names = {"forward"} if isinstance(module, PreTrainedModel) else vars(module).keys()
        own += [v for k, v in vars(module).items() if k in names and isinstance(v, FunctionType | MethodType | partial)]
        own += [type(module).forward] if include_classes else []
        found += [name or type(module).__name__ for each in own if not is_library_code(each)]
    return found


def _tensors(modules: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, module in enumerate(modules):
        for own in (module._parameters, module._buffers, vars(module)):
            yield from (
                (f"{number} {key}", each)
                for key, each in own.items()
                if isinstance(each, torch.Tensor) and not _by_length(module, key)
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as rows of bytes (rows, bytes of a row)."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() and tensor.numel() else tensor.reshape(1, -1)
    return rows.contiguous().view(torch.uint8)


def _sample(each: torch.Tensor) -> bytes:
    """Eight bytes from each of some rows, at another place in every one."""
    rows, size = each.shape
    if each.numel() <= 8 * _ROWS:
        return each.cpu().numpy().tobytes()
    step = (1 if rows >= _VOCABULARY else max(1, rows // _ROWS)) * size + 8
    return each.view(-1).unfold(0, 8, step).cpu().contiguous().numpy().tobytes()


def _sums(each: torch.Tensor) -> bytes:
    """The sums of all pages, eight bytes at a time, and the bytes behind the last page."""
    flat = each.reshape(-1)
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    whole = flat.numel() // _PAGE * _PAGE
    sums = flat[:whole].view(torch.int64).view(-1, _PAGE // 8).sum(1)
    return sums.cpu().numpy().tobytes() + flat[whole:].cpu().numpy().tobytes()


def _settings(model: PreTrainedModel, modules: list[nn.Module]) -> Iterator[str]:
    """The configuration, every module's class and attributes."""
    yield json.dumps(_plain(model.config.to_dict()), sort_keys=True, default=str)
    for module in modules:
        yield type(module).__qualname__
        left_out = _LEFT_OUT
        if isinstance(module, PreTrainedModel):
            left_out |= {key for key in vars(module) if key.startswith("_")}
        kept = {k: v for k, v in vars(module).items() if k not in left_out and not _by_length(module, k)}
        yield from (f"{key} {_plain(value)}" for key, value in kept.items())


def _by_length(module: nn.Module, key: str) -> bool:
    kinds = str(getattr(module, "rope_type", ""))  # of all layers, or of each type of layer
    return key.endswith(_BY_LENGTH) and ("longrope" in kinds or "dynamic" in kinds)


def _plain(value: Any, depth: int = 0) -> Any:
    """The part of a setting that is the same in every process."""
    if isinstance(value, SCALAR_TYPES):
        return value
    if isinstance(value, dict) and depth < 4:
        return {str(k): _plain(v, depth + 1) for k, v in value.items() if str(k) not in _NAMES and str(k)[:1] != "_"}
    if isinstance(value, list | tuple | set | frozenset) and depth < 4:
        items = [_plain(item, depth + 1) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    return "" if isinstance(value, PretrainedConfig) else getattr(value, "__qualname__", type(value).__qualname__)
