"""Parses a GGUF file into metadata fields and tensors, and checks that the fields fit the tensors."""

from __future__ import annotations

import importlib.util
import math
import mmap
import re
import struct
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longdraft.errors import CheckpointError
from longdraft.files import check_numbers, require_regular

ROPE_FREQS = "rope_freqs.weight"
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.")
_EOS_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# The field general.type of a file that contains no model -> what the file contains.
_NON_MODEL_TYPES = {"adapter": "a LoRA adapter", "mmproj": "a multimodal projector", "imatrix": "an importance matrix"}
# Fields that are read however long they are. Other fields are skipped if they exceed _MAX_SHORT_BYTES, as unused.
_LONG_FIELDS = {
    f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges", "precompiled_charsmap")
}
_TEMPLATE_FIELD, _MAX_SHORT_BYTES = "tokenizer.chat_template", 1 << 13
# Value types of GGUF fields (GGUFValueType). Scalar types -> format codes of the module struct.
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Ids of ggml types that versions of the package gguf lack -> names.
_NEW_TYPES = {39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
_FIELDS_START = 24  # bytes of magic, version and the numbers of tensors and fields
# Limits, many times above any real model: Python objects take far more memory than their bytes in a file.
_LIMITS = {
    "fields": 1 << 12, "bytes of a name": 1 << 12, "tensors": 1 << 16, "items": 1 << 21, "parts": 1 << 12,
    "bytes of a template": 1 << 20,
}  # fmt: skip


class GGUFTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        quant_type: name of the tensor's ggml type, such as Q4_K.
        shape: sizes in GGUF's order, where the first dimension is contiguous.
        data: the bytes, mapped from the file, in torch's order: (..., bytes of a row) uint8; float32 for the type F32.
        scale: None, or a factor of all weights (1,) or of each expert's weights (experts,), which NVFP4 has.
    """

    name: str
    quant_type: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any] | None = None


def require_package(package: str, path: Path) -> None:
    """Raises CheckpointError if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise CheckpointError(f'Reading {path.name} needs the package {package!r}: pip install "longdraft[demo]"')


class GGUFHeader:
    """Metadata and tensors of a GGUF file, or of all parts of a split model. ``header(name)`` reads a model's field.

    Attributes:
        path: the named file, one of ``parts``; ``mapped`` is its memory map.
        parts: paths of all files of the model.
        fields: {full name: value} of the first part, without long fields that nothing reads.
        tensors: {name: tensor} of all parts.
        architecture: the field ``general.architecture``.

    Raises:
        ValueError, KeyError, OSError, struct.error: the file is damaged or truncated.
        CheckpointError: the file contains no model, or a part is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields, _, self.mapped = contents = _read(path)  # any part has the field split.count
        self.parts = _find_parts(path, int(self.field("split.count") or 1))
        contents_of_parts = [contents if part == path else _read(part) for part in self.parts]
        self.fields = contents_of_parts[0][0]
        tensors = [tensor for _, part_tensors, _ in contents_of_parts for tensor in part_tensors]
        self.tensors = {tensor.name: tensor for tensor in tensors}
        if len(self.tensors) < len(tensors):
            raise ValueError("two of its tensors have the same name")
        if (kind := self.field("general.type")) not in (None, "model"):
            raise CheckpointError(
                f"{path} contains {_NON_MODEL_TYPES.get(kind, repr(kind))}, not a model: give the model's file. "
                "llama-export-lora merges an adapter into it."
            )
        if (architecture := self.field("general.architecture")) is None:
            raise ValueError("it names no architecture")
        self.architecture = str(architecture)
        for name in [name for name, tensor in self.tensors.items() if tensor.quant_type == "NVFP4"]:
            stem = name.removesuffix(".weight")
            self.tensors.pop(f"{stem}.input_scale", None)  # of activations in 4 bits
            # In Gemma 4 the router multiplies by the scales of the experts' down projections.
            is_router_scale = self.architecture == "gemma4" and stem.endswith("ffn_down_exps")
            if not is_router_scale and (scale := self.tensors.pop(f"{stem}.scale", None)) is not None:
                self.tensors[name] = self.tensors[name]._replace(scale=scale.data)

    def field(self, name: str) -> Any:
        """Returns the field with the full name ``name``, or None."""
        return self.fields.get(name)

    def __call__(self, name: str, default: Any = None) -> Any:
        """Returns the field ``<architecture>.<name>``, or ``default``."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def check(self) -> None:
        """Checks that the model's fields fit the tensors. Raises CheckpointError if one does not."""
        fields = {name: value for name, value in self.fields.items() if name.startswith(f"{self.architecture}.")}
        # A draft may have no tensor as large as its target's vocabulary.
        check_numbers(fields, self.path, max(self.vocab_size, *(max(t.shape) for t in self.tensors.values())))
        layers = {match[1] for name in self.tensors if (match := LAYER_PATTERN.match(name))}
        if layers and layers != {str(i) for i in range(int(self("block_count")))}:
            raise CheckpointError(
                f"{self.path} has tensors of {len(layers)} layers, which do not match its block_count "
                f"{self('block_count')}: fetch it again."
            )
        embeddings = self.tensors.get("token_embd.weight")
        if embeddings is not None and len(embeddings.shape) > 1 and self.vocab_size > embeddings.shape[1]:
            raise CheckpointError(
                f"{self.path} has {self.vocab_size} tokens, but embeddings of {embeddings.shape[1]}: fetch it again."
            )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without MTP layers (llama.cpp's nextn)."""
        return int(self("block_count")) - int(self("nextn_predict_layers", 0))

    @property
    def head_dim(self) -> int:
        size = self("attention.key_length")
        return int(self("embedding_length")) // int(self("attention.head_count")) if size is None else int(size)

    @property
    def rope_freqs(self) -> np.ndarray[Any, Any] | None:
        """The divisors of RoPE's frequencies, (rotary_dim / 2,); None if the file has none."""
        tensor = self.tensors.get(ROPE_FREQS)
        return None if tensor is None else tensor.data

    @property
    def vocab(self) -> list[str]:
        """The tokens in the order of their ids."""
        return self.fields.get("tokenizer.ggml.tokens") or []

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)

    @property
    def eos_ids(self) -> list[int]:
        """The ids of tokens that end a text, a turn, a message, or code in the middle (fim)."""
        ids = [self.field(f"tokenizer.ggml.{name}_token_id") for name in _EOS_ROLES]
        return [int(i) for i in ids if i is not None and 0 <= i < self.vocab_size]


def _find_parts(path: Path, num_parts: int) -> list[Path]:
    """Returns the files of a split model. Raises CheckpointError if one is missing."""
    if num_parts < 2:
        return [path]
    _check_limit("parts", num_parts)
    if (match := re.fullmatch(rf"(.*)-\d{{5}}-of-{num_parts:05}", path.stem)) is None:
        raise CheckpointError(
            f"{path} is one of {num_parts} parts of a model, but its name does not say which: name the parts "
            f"NAME-00001-of-{num_parts:05}.gguf and so on, or join them with llama-gguf-split --merge."
        )
    parts = [path.with_name(f"{match[1]}-{i + 1:05}-of-{num_parts:05}{path.suffix}") for i in range(num_parts)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {num_parts} parts of a model, and {', '.join(missing[:5])} is not beside it."
        )
    return parts


def _map_file(path: Path) -> tuple[mmap.mmap, int, int]:
    """Maps a file. Returns its memory map, and its numbers of fields and tensors."""
    with require_regular(path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", memory)
    if version not in (2, 3):
        raise ValueError(f"its version is {version:#x}; only little-endian files of versions 2 and 3 are read")
    _check_limit("fields", num_fields)
    _check_limit("tensors", num_tensors)
    return memory, num_fields, num_tensors


def _read(path: Path) -> tuple[dict[str, Any], list[GGUFTensor], mmap.mmap]:
    """Reads a file. Returns its fields, its tensors and its memory map.

    Raises:
        ValueError, struct.error: the file is damaged, or tensors overlap or reach beyond the file's end.
    """
    memory, num_fields, num_tensors = _map_file(path)
    offset, fields = _FIELDS_START, dict[str, Any]()
    for name, value_type, begin, offset in _iterate_fields(memory, num_fields):
        if name == _TEMPLATE_FIELD:
            _check_limit("bytes of a template", offset - begin)
        if name == _TEMPLATE_FIELD or name in _LONG_FIELDS or offset - begin <= _MAX_SHORT_BYTES:
            fields.setdefault(name, _read_value(memory, begin, value_type))
    return fields, _read_tensors(memory, offset, num_tensors, int(fields.get("general.alignment", 32))), memory


def _iterate_fields(memory: mmap.mmap, num_fields: int) -> Iterator[tuple[str, int, int, int]]:
    """Yields each field's name, value type, and the offsets of its value and behind it."""
    offset = _FIELDS_START
    for _ in range(num_fields):
        name, offset = _read_name(memory, offset)
        (value_type,) = struct.unpack_from("<I", memory, offset)
        begin, offset = offset + 4, _find_value_end(memory, offset + 4, value_type)
        yield name, value_type, begin, offset


def read_architecture(path: Path) -> str:
    """Returns the field ``general.architecture``, and reads no field behind it; "" if the file has none.
    Raises the errors of :class:`GGUFHeader` for a damaged file."""
    memory, num_fields = _map_file(path)[:2]
    for name, value_type, begin, _ in _iterate_fields(memory, num_fields):
        if name == "general.architecture":
            return str(_read_value(memory, begin, value_type))
    return ""


def _read_tensors(memory: mmap.mmap, offset: int, num_tensors: int, alignment: int) -> list[GGUFTensor]:
    """Reads the tensors' infos, which begin at ``offset``, and maps the tensors' data, which follow the last info."""
    import gguf

    infos = []
    for _ in range(num_tensors):
        name, offset = _read_name(memory, offset)
        (num_dims,) = struct.unpack_from("<I", memory, offset)
        if not 0 < num_dims <= 4:
            raise ValueError(f"{name[:99]} has {num_dims} dimensions")
        *shape, type_id, data_offset = struct.unpack_from(f"<{num_dims}QIQ", memory, offset + 4)
        offset += 4 + 8 * num_dims + 12
        infos.append((name, shape, _quant_type(type_id), data_offset))
    tensors, spans, data_start = [], [], -(-offset // alignment) * alignment  # ``offset``, rounded up
    for name, shape, quant_type, data_offset in infos:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
        begin, row_bytes = data_start + data_offset, shape[0] // block_size * block_bytes
        end = begin + row_bytes * math.prod(shape[1:])
        if begin == end or shape[0] % block_size or begin % alignment or end > len(memory):
            raise ValueError(f"the data of {name[:99]} are misaligned or beyond its end")
        data = np.frombuffer(memory, np.uint8, end - begin, begin).reshape(*shape[:0:-1], row_bytes)
        data = data.view(np.float32) if quant_type.name == "F32" else data
        tensors.append(GGUFTensor(name, quant_type.name, tuple(shape), data))
        spans.append((begin, end, name))
    for (_, end, name), (next_begin, _, next_name) in pairwise(sorted(spans)):
        if next_begin < end:
            raise ValueError(f"the data of {name} and {next_name} overlap")
    return tensors


@cache
def _quant_type(type_id: int) -> Any:
    """Returns the gguf.GGMLQuantizationType of an id. Raises CheckpointError if the package gguf cannot unpack it."""
    import gguf

    name = _NEW_TYPES.get(type_id, "unknown")
    try:
        quant_type = gguf.GGMLQuantizationType(type_id)
        name, (block_size, block_bytes) = quant_type.name, gguf.GGML_QUANT_SIZES[quant_type]
        if block_size > 1:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), quant_type)
        return quant_type
    except (ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointError(
            f"It has blocks of the type {name} (number {type_id}), which the installed package gguf does not unpack: "
            "use the model in another quantisation (Q4_K_M, Q8_0), or pip install -U gguf."
        ) from error


def _check_limit(unit: str, number: int) -> None:
    if number > _LIMITS[unit]:
        raise ValueError(f"it has {number:,} {unit}; at most {_LIMITS[unit]:,} are read")


def _read_name(memory: mmap.mmap, offset: int) -> tuple[str, int]:
    """Reads a name: its length (8 bytes) and its bytes. Returns the name, and the offset behind the name."""
    (length,) = struct.unpack_from("<Q", memory, offset)
    _check_limit("bytes of a name", length)
    return memory[offset + 8 : offset + 8 + length].decode(), offset + 8 + length


def _find_value_end(memory: mmap.mmap, offset: int, value_type: int) -> int:
    """Returns the offset behind a field's value.

    Raises:
        ValueError, struct.error: the value reaches beyond the file's end, or has an unknown type.
    """
    count, end = 1, offset
    if value_type == _ARRAY:
        value_type, count = struct.unpack_from("<IQ", memory, offset)
        end += 12
    if value_type == _STRING:
        for _ in range(count):
            end += 8 + struct.unpack_from("<Q", memory, end)[0]
    else:
        # An unknown type gets the file's size, and so the error below.
        end += count * struct.calcsize(f"<{_SCALAR_CODES[value_type]}") if value_type in _SCALAR_CODES else len(memory)
    if end > len(memory):
        raise ValueError("a field reaches beyond its end, or has an unknown type")
    return end


def _read_value(memory: mmap.mmap, offset: int, value_type: int) -> Any:
    """Reads a field's value: a string, a number, or a list. :func:`_find_value_end` has checked the value's end."""
    count, is_array = 1, value_type == _ARRAY
    if is_array:
        value_type, count = struct.unpack_from("<IQ", memory, offset)
        offset += 12
        _check_limit("items", count)
    values: list[Any] = []
    if value_type == _STRING:
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", memory, offset)
            values.append(memory[offset + 8 : offset + 8 + length].decode())
            offset += 8 + length
    else:
        values += struct.unpack_from(f"<{count}{_SCALAR_CODES[value_type]}", memory, offset)
    return values if is_array else values[0]
