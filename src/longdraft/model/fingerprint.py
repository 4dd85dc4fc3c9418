"""Notices changes of a model that a user loaded: a user may edit, move or replace any part of it between runs.

- :func:`signature` lists what the execution model was copied from. If it changes, a new copy is made.
- :func:`placement_of` and :func:`structure_of` change if a runner's stores no longer fit the model.
- :func:`check_mapped_files` notices writes to files that weights are mapped from.
- :func:`fingerprint_of` digests all settings and every number of every tensor. Cached KV is reused only by a target
  with the same fingerprint. A digest takes as long as reading the weights once. So it is cached until a quick check
  (milliseconds) finds a change: replaced tensors, writes that torch counts (``_version``), or writes to a sampled
  number.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longdraft.errors import CheckpointError, UnsupportedModelError
from longdraft.model.called_functions import HOOKS, called_functions, user_code_in
from longdraft.model.model_copy import COMPILED_CALL, MODULE_ATTRIBUTES
from longdraft.model.model_parts import decoder_config
from longdraft.model.quant.stored import storage_tensors, weight_storage
from longdraft.model.rope import depends_on_length
from longdraft.model.tensor_parallel import local_tensor

# Types whose values are compared and digested by value.
_SCALAR_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)
# Attributes of modules that do not change what our forwards compute.
_IGNORED_ATTRIBUTES = frozenset({"training", "generation_config", COMPILED_CALL})
# Attribute of a model: the files that its weights are memory-mapped from, with their identities and states at loading.
_MAPPED_FILES = "_longdraft_mapped"
# The quick check samples about 128 rows of a matrix. A matrix of 2**14 rows or more counts as an embedding. All rows of
# an embedding are sampled, as a user may edit a few tokens only.
_SAMPLED_ROWS, _MIN_EMBEDDING_ROWS = 128, 1 << 14
_PAGE_BYTES = 4096  # the full digest hashes the sum of each page, as summing is faster than hashing
# Settings that do not change KV.
_IGNORED_SETTINGS = frozenset(
    ("transformers_version", "name_or_path", "architectures", "dtype", "kernel_config", "hf_device_map", "loss_type")
)
_EXCLUDED_ATTRIBUTES = MODULE_ATTRIBUTES | _IGNORED_ATTRIBUTES | _IGNORED_SETTINGS | {"_is_hf_initialized"}
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


def signature(model: PreTrainedModel) -> list[Any]:
    """Lists everything that a copy of the model depends on, for :func:`same_signature`.

    The parts are modules and their types, functions that forwards call, the storage of parameters and buffers, hooks,
    replaced forwards, attributes and configurations. In-place writes to weights leave the signature unchanged.

    Raises UnsupportedModelError if a module is scripted, which hides its attributes."""
    parts: list[Any] = [*called_functions(model).values()]
    seen_configs: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{type(model).__name__} has scripted modules, which longdraft cannot run: load it without torch.jit."
            )
        parts += (module, type(module))
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers"):
                for key, tensor in list(value.items()):
                    parts += (key, tensor, data_ptr_of(tensor), None if tensor is None else tensor.dtype)
            elif name in HOOKS:
                parts += value.values()
            elif name == "_modules":
                parts += value
            elif name not in MODULE_ATTRIBUTES and name not in _IGNORED_ATTRIBUTES:
                parts.append(name)
                parts += _describe(value, seen_configs)
    # Weak references keep no model alive. They may be compared with `is`: ref(x) returns one object while x lives.
    return [ref(part) if isinstance(part, nn.Module | MethodType) else part for part in parts]


def same_signature(before: list[Any], after: list[Any]) -> bool:
    """True if two signatures describe the same structure."""
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) and isinstance(a, _SCALAR_TYPES) and a == b)
        for a, b in zip(before, after, strict=True)
    )


def _describe(value: Any, seen_configs: set[int]) -> Iterator[Any]:
    """Yields an attribute's parts of the signature: the value, and modules in a container or settings of a config."""
    if not isinstance(value, PretrainedConfig):
        yield value
        if type(value) in (list, tuple, dict, OrderedDict):
            items = value.values() if isinstance(value, dict) else value
            # Strings are compared for PEFT, which lists the names of the adapters that it has merged into the weights.
            yield from [item for item in items if isinstance(item, nn.Module | MethodType | str)]
    elif id(value) not in seen_configs:
        seen_configs.add(id(value))
        yield value
        # The attention implementation does not count: the copy has its own.
        settings = {n: x for n, x in list(vars(value).items()) if n != "_attn_implementation_internal"}
        nested = [setting for setting in settings.values() if isinstance(setting, PretrainedConfig)]
        yield repr({name: id(x) if isinstance(x, PretrainedConfig) else x for name, x in settings.items()})
        for config in nested:
            yield from _describe(config, seen_configs)


def placement_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Returns a model's device and dtype, and address, shape and dtype of the embedding's and of the head's weights."""
    weights = [weight_storage(m) for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    return model.device, model.dtype, *((w.data_ptr(), w.shape, w.dtype) for w in weights)


def structure_of(model: PreTrainedModel) -> tuple[object, ...]:
    """Returns a model's placement, configuration, module classes and shapes. If one changes, runners become stale."""
    modules = [(type(m), *(p.shape for p in m._parameters.values() if p is not None)) for m in model.modules()]
    return placement_of(model), str(decoder_config(model)), modules


def record_mapped_files(model: nn.Module, files: Iterable[Path]) -> None:
    """Records the files that a model's weights are mapped from, for :func:`check_mapped_files`."""
    vars(model)[_MAPPED_FILES] = [(file.absolute(), _file_state(file)) for file in files]


def check_mapped_files(model: nn.Module) -> None:
    """Raises CheckpointError if a file that a model's weights are mapped from was written to.
    Renaming another file over the mapped file is allowed."""
    for file, (identity, state) in vars(model).get(_MAPPED_FILES, ()):
        # A deleted file stays mapped.
        current_identity, current_state = _file_state(file) if file.exists() else (None, None)
        if current_identity == identity and current_state != state:
            raise CheckpointError(
                f"{file} was written to while its weights were in use: load the model again. (To replace a file that "
                "is in use, write another and rename it.)"
            )


def _file_state(file: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns a file's identity (device, inode), and its state (size, modification time)."""
    stat = file.stat()
    return (stat.st_dev, stat.st_ino), (stat.st_size, stat.st_mtime_ns)


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
    if isinstance(value, _SCALAR_TYPES):
        return value
    if isinstance(value, dict) and depth < 4:
        settings = {str(k): v for k, v in value.items() if str(k) not in _IGNORED_SETTINGS and str(k)[:1] != "_"}
        return {k: _serializable(v, depth + 1) for k, v in settings.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth < 4:
        items = [_serializable(item, depth + 1) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    return "" if isinstance(value, PretrainedConfig) else getattr(value, "__qualname__", type(value).__qualname__)


def data_ptr_of(tensor: torch.Tensor | None) -> int:
    """Returns the address of a tensor's data; 0 if there is none."""
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except RuntimeError:  # a tensor subclass without storage
        return 0
