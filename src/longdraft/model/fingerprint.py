"""Fingerprints of a target's weights and settings. Cached KV is reused only by a target with the same fingerprint.

A fingerprint digests all settings and every number of every tensor, which takes as long as reading the weights once.
So it is cached until a quick check (milliseconds) finds a change: replaced tensors, writes that torch counts
(``_version``), or writes to a sampled number.
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
from longdraft.model.quant.stored import storage_tensors
from longdraft.model.rope import depends_on_length
from longdraft.model.tensor_parallel import local_tensor

# The quick check samples about 128 rows of a matrix. A matrix of 2**14 rows or more counts as an embedding. All rows of
# an embedding are sampled, as a user may edit a few tokens only.
_SAMPLED_ROWS, _MIN_EMBEDDING_ROWS = 128, 1 << 14
_PAGE_BYTES = 4096  # the full digest hashes the sum of each page, as summing is faster than hashing
# Settings that do not change KV.
_IGNORED_SETTINGS = frozenset(
    ("transformers_version", "name_or_path", "architectures", "dtype", "kernel_config", "hf_device_map", "loss_type")
)
_EXCLUDED_ATTRIBUTES = MODULE_ATTRIBUTES | IGNORED_ATTRIBUTES | _IGNORED_SETTINGS | {"_is_hf_initialized"}
# Attribute -> its earlier name, which digests keep so that snapshots on disk stay valid. Class names are digested too.
_DIGEST_NAMES = {
    "rows_per_matrix": "outs", "saved_by_parent": "inside", "expert_count": "count", "dtype_sample": "like",
    "_repacked": "_woven", "_cached_experts": "_parts",
}  # fmt: skip
# Endings of the attributes that rotary embeddings with dynamic RoPE or LongRoPE recompute in each forward.
_LENGTH_DEPENDENT = ("inv_freq", "attention_scaling", "max_seq_len_cached")

# Model -> its last quick digest and fingerprint.
_fingerprints: WeakKeyDictionary[PreTrainedModel, tuple[bytes, str]] = WeakKeyDictionary()
# Model -> dotted name -> id of the function that had that name at the model's first fingerprint.
_first_functions: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
_PROCESS_ID, _suffix_counter = uuid.uuid4().hex, itertools.count()


def fingerprint_of(model: PreTrainedModel) -> str:
    """Returns the fingerprint of a target as it is now: "<model type>-<16 hex digits>"."""
    modules = list(model.modules())
    shards = [(name, tensor, local_tensor(tensor)) for name, tensor in _named_tensors(modules)]
    tensors = [(name, _as_bytes(part), tensor) for name, tensor, shard in shards for part in storage_tensors(shard)]
    settings, samples = "\n".join(_settings(model, modules)), [_sample(rows) for _, rows, _ in tensors]
    versions = [(id(t), data_ptr_of(t), 0 if t.is_inference() else t._version) for _, _, t in tensors]
    quick_digest = hashlib.sha256(f"{settings}\n{versions}".encode())
    full_digest = hashlib.sha256(settings.encode())
    for sample in samples:
        quick_digest.update(sample)
        full_digest.update(sample)
    cached = _fingerprints.get(model)
    if cached is None or cached[0] != quick_digest.digest():
        for name, rows, tensor in tensors:
            full_digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            full_digest.update(_page_sums(rows))
        model_type = model.config.get_text_config().model_type
        cached = _fingerprints[model] = quick_digest.digest(), f"{model_type}-{full_digest.hexdigest()[:16]}"
    return cached[1]


def hooks_suffix(model: nn.Module) -> str:
    """Returns a suffix for the fingerprint of a model that runs a user's hooks or functions; "" for other models.
    Each call returns another suffix. A user's code may compute other KV in the next run, so KV must not be reused."""
    first_ids = _first_functions.setdefault(model, {})
    changed = [name for name, f in called_functions(model).items() if first_ids.setdefault(name, id(f)) != id(f)]
    return f", hooks {_PROCESS_ID}.{next(_suffix_counter)}" if changed or user_code_in(model) else ""


def user_code_in(model: nn.Module, include_classes: bool = False) -> list[str]:
    """Returns names of modules with a user's hooks or forwards, and names of library functions that a user replaced.
    ``include_classes``: True adds modules whose class comes from none of the packages that longdraft knows."""
    code_names = replaced_functions(model)
    for name, module in model.named_modules():
        functions = [hook for hooks in HOOKS for hook in getattr(module, hooks).values()]
        # Attributes of a PreTrainedModel other than forward may be functions that its forward does not call.
        values = [vars(module).get("forward")] if isinstance(module, PreTrainedModel) else vars(module).values()
        functions += [f for f in values if isinstance(f, FunctionType | MethodType | partial)]
        functions += [type(module).forward] if include_classes else []
        code_names += [name or type(module).__name__ for function in functions if not is_library_code(function)]
    return code_names


def _named_tensors(modules: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all parameters, buffers and other tensors of modules, each with a name that is unique in the model."""
    for index, module in enumerate(modules):
        for members in (module._parameters, module._buffers, vars(module)):
            for key, tensor in members.items():
                if isinstance(tensor, torch.Tensor) and not _depends_on_length(module, key):
                    yield f"{index} {_DIGEST_NAMES.get(key, key)}", tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes as uint8 (rows, bytes of a row)."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() and tensor.numel() else tensor.reshape(1, -1)
    return rows.contiguous().view(torch.uint8)


def _sample(rows: torch.Tensor) -> bytes:
    """Returns eight bytes of each sampled row, each row's from the column behind that of the row before."""
    num_rows, row_bytes = rows.shape
    if rows.numel() <= 8 * _SAMPLED_ROWS:
        return rows.cpu().numpy().tobytes()
    row_step = 1 if num_rows >= _MIN_EMBEDDING_ROWS else max(1, num_rows // _SAMPLED_ROWS)
    return rows.view(-1).unfold(0, 8, row_step * row_bytes + 8).cpu().contiguous().numpy().tobytes()


def _page_sums(rows: torch.Tensor) -> bytes:
    """Returns the int64 sum of each page, and then the bytes behind the last full page."""
    flat = rows.reshape(-1)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # int64 needs an aligned start
    full_pages = flat.numel() // _PAGE_BYTES * _PAGE_BYTES
    sums = flat[:full_pages].view(torch.int64).view(-1, _PAGE_BYTES // 8).sum(1)
    return sums.cpu().numpy().tobytes() + flat[full_pages:].cpu().numpy().tobytes()


def _settings(model: PreTrainedModel, modules: list[nn.Module]) -> Iterator[str]:
    """Yields the configuration, and each module's class and attributes, as text."""
    yield json.dumps(_serializable(model.config.to_dict()), sort_keys=True, default=str)
    for module in modules:
        yield type(module).__qualname__
        excluded = _EXCLUDED_ATTRIBUTES
        if isinstance(module, PreTrainedModel):  # its private attributes do not change KV
            excluded |= {key for key in vars(module) if key.startswith("_")}
        attributes = {k: v for k, v in vars(module).items() if k not in excluded and not _depends_on_length(module, k)}
        yield from (f"{_DIGEST_NAMES.get(key, key)} {_serializable(value)}" for key, value in attributes.items())


def _depends_on_length(module: nn.Module, key: str) -> bool:
    return key.endswith(_LENGTH_DEPENDENT) and depends_on_length(module)


def _serializable(value: Any, depth: int = 0) -> Any:
    """Converts a setting to plain values that are equal in every process. An object becomes its or its class's name.
    Containers nested deeper than four levels become their class's name too."""
    if isinstance(value, SCALAR_TYPES):
        return value
    if isinstance(value, dict) and depth < 4:
        settings = {str(k): v for k, v in value.items() if str(k) not in _IGNORED_SETTINGS and str(k)[:1] != "_"}
        return {k: _serializable(v, depth + 1) for k, v in settings.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth < 4:
        items = [_serializable(item, depth + 1) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    return "" if isinstance(value, PretrainedConfig) else getattr(value, "__qualname__", type(value).__qualname__)
