"""The fields and tensors of a GGUF file, checked against one another before anything is built of them."""

from __future__ import annotations

import importlib.util
import math
import mmap
import re
import struct
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longdraft.errors import CheckpointError
from longdraft.files import check_numbers, require_regular

ROPE_FREQS = "rope_freqs.weight"
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.")
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# What a file may hold in place of a model, by its general.type.
_OTHERS = {"adapter": "a LoRA adapter", "mmproj": "what reads images for one", "imatrix": "statistics of one"}
# Long fields that something uses. Others are passed over if they have more bytes than those of any model's numbers.
_LONG = {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges", "precompiled_charsmap")}
_TEMPLATE, _SHORT = "tokenizer.chat_template", 1 << 13
# Kinds of fields; those of numbers as the module struct writes them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Many more than any model has. What stands for each takes far more memory than in the file.
_MOST = {
    "fields": 1 << 12, "bytes of a name": 1 << 12, "tensors": 1 << 16, "items": 1 << 21, "parts": 1 << 12,
    "bytes of a template": 1 << 20,
}  # fmt: skip


class GGUFTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        kind: gguf's name of its type.
        shape: its sizes; neighbours of the first one lie side by side.
        data: (..., bytes of a row) uint8, mapped from the file, with the first size last; of the kind F32 the numbers.
    """

    name: str
    quant_type: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


def require_package(package: str, path: Path) -> None:
    """Raises CheckpointError if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise CheckpointError(f'Reading {path.name} needs the package {package!r}: pip install "longdraft[demo]"')


class GGUFHeader:
    """An open GGUF file of an ``architecture``, named as in the file, or all files of a model that was split.

    Attributes:
        parts: the files.
        fields: values by their whole names. Long ones that nothing uses are not read.
        tensors: of all parts, by name.

    Raises:
        ValueError, KeyError, OSError, struct.error: the file is damaged or cut short.
        CheckpointError: it holds no model, or a part is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields, _, self.mapped = own = _read(path)
        self.parts = _parts_of(path, int(self.field("split.count") or 1))
        read = [own if part == path else _read(part) for part in self.parts]
        self.fields = read[0][0]
        tensors = [tensor for _, found, _ in read for tensor in found]
        self.tensors = {tensor.name: tensor for tensor in tensors}
        if len(self.tensors) < len(tensors):
            raise ValueError("two of its tensors have the same name")
        if (kind := self.field("general.type")) not in (None, "model"):
            raise CheckpointError(
                f"{path} holds no model but {_OTHERS.get(kind, repr(kind))}: give the model's own file, into which an "
                "adapter can be merged with llama-export-lora."
            )
        if (architecture := self.field("general.architecture")) is None:
            raise ValueError("it names no architecture")
        self.architecture = str(architecture)

    def field(self, name: str) -> Any:
        """The value of a field's whole name, or None."""
        return self.fields.get(name)

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value of a name behind the architecture's."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def check(self) -> None:
        """Checks the file's numbers against its tensors.

        Raises:
            CheckpointError: one does not fit.
        """
        fields = {name: value for name, value in self.fields.items() if name.startswith(f"{self.architecture}.")}
        check_numbers(fields, self.path, max(max(t.shape) for t in self.tensors.values()))
        layers = {found[1] for name in self.tensors if (found := LAYER_PATTERN.match(name))}
        if layers and layers != {str(i) for i in range(int(self("block_count")))}:
            raise CheckpointError(
                f"{self.path} has tensors of {len(layers)} layers, which are not those that it counts "
                f"(block_count {self('block_count')}): fetch it again."
            )
        embeddings = self.tensors.get("token_embd.weight")
        if embeddings is not None and len(embeddings.shape) > 1 and self.vocab_size > embeddings.shape[1]:
            raise CheckpointError(
                f"{self.path} has {self.vocab_size} tokens, and embeddings of {embeddings.shape[1]}: fetch it again."
            )

    @property
    def num_layers(self) -> int:
        """The number of layers, without those that predict further tokens."""
        return int(self("block_count")) - int(self("nextn_predict_layers", 0))

    @property
    def head_dim(self) -> int:
        size = self("attention.key_length")
        return int(self("embedding_length")) // int(self("attention.head_count")) if size is None else int(size)

    @property
    def rope_freqs(self) -> np.ndarray[Any, Any] | None:
        """The numbers that divide the rotary frequencies, if the file has any."""
        tensor = self.tensors.get(ROPE_FREQS)
        return None if tensor is None else tensor.data

    @property
    def vocab(self) -> list[str]:
        """The vocabulary, in the order of its ids."""
        return self.fields.get("tokenizer.ggml.tokens") or []

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return len(self.vocab)

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that the file says to end a text, a turn, a message or a part of code."""
        ids = [self.field(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
        return [int(i) for i in ids if i is not None and 0 <= i < self.vocab_size]


def _parts_of(path: Path, count: int) -> list[Path]:
    """The files of a model that was split into several; raises CheckpointError if one is missing."""
    if count < 2:
        return [path]
    _few("parts", count)
    if (named := re.fullmatch(rf"(.*)-\d{{5}}-of-{count:05}", path.stem)) is None:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, and its name does not say which (NAME-00001-of-{count:05}"
            ".gguf): give the parts their names, or join them with llama-gguf-split --merge."
        )
    parts = [path.with_name(f"{named[1]}-{i + 1:05}-of-{count:05}{path.suffix}") for i in range(count)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, and {', '.join(missing[:5])} is not beside it."
        )
    return parts


def _read(path: Path) -> tuple[dict[str, Any], list[GGUFTensor], mmap.mmap]:
    """The fields, the tensors and the memory of a file.

    Raises:
        ValueError, struct.error: it is damaged: its tensors do not lie in it, side by side.
    """
    with require_regular(path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _, version, tensors, count = struct.unpack_from("<4sIQQ", memory)
    if version not in (2, 3):
        raise ValueError(f"its version is {version:#x}, and little-endian files of the versions 2 and 3 are read")
    _few("fields", count)
    _few("tensors", tensors)
    at, fields = 24, dict[str, Any]()
    for _ in range(count):
        name, at = _name(memory, at)
        (kind,) = struct.unpack_from("<I", memory, at)
        begin, at = at + 4, _end(memory, at + 4, kind)
        if name == _TEMPLATE:
            _few("bytes of a template", at - begin)
        if name == _TEMPLATE or name in _LONG or at - begin <= _SHORT:
            fields.setdefault(name, _value(memory, begin, kind))
    return fields, _tensors(memory, at, tensors, int(fields.get("general.alignment", 32))), memory


def _tensors(memory: mmap.mmap, at: int, count: int, alignment: int) -> list[GGUFTensor]:
    """The tensors whose descriptions begin at an offset."""
    import gguf

    described = []
    for _ in range(count):
        name, at = _name(memory, at)
        (dims,) = struct.unpack_from("<I", memory, at)
        if not 0 < dims <= 4:
            raise ValueError(f"{name[:99]} has {dims} dimensions")
        *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", memory, at + 4)
        at += 4 + 8 * dims + 12
        described.append((name, shape, _kind(kind), offset))
    found, spans, start = [], [], -(-at // alignment) * alignment
    for name, shape, kind, offset in described:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        begin, row = start + offset, shape[0] // block * size
        end = begin + row * math.prod(shape[1:])
        if begin == end or shape[0] % block or begin % alignment or end > len(memory):
            raise ValueError(f"{name[:99]} does not lie in it as it says")
        data = np.frombuffer(memory, np.uint8, end - begin, begin).reshape(*shape[:0:-1], row)
        found.append(GGUFTensor(name, kind.name, tuple(shape), data.view(np.float32) if kind.name == "F32" else data))
        spans.append((begin, end, name))
    for (_, end, name), (begin, _, other) in pairwise(sorted(spans)):
        if begin < end:
            raise ValueError(f"{name} and {other} lie at the same place in it")
    return found


@cache
def _kind(number: int) -> Any:
    """The kind of a tensor's blocks; raises CheckpointError for one that the package gguf cannot unpack."""
    import gguf

    word = f"number {number}"
    try:
        kind = gguf.GGMLQuantizationType(number)
        word, (block, size) = kind.name, gguf.GGML_QUANT_SIZES[kind]
        if block > 1:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        return kind
    except (ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"It has blocks of the type {word}, which the installed package gguf does not unpack: take the model in "
            "another quantisation (Q4_K_M, Q8_0), or pip install -U gguf."
        ) from error


def _few(what: str, count: int) -> None:
    if count > _MOST[what]:
        raise ValueError(f"it has {count:,} {what}, where at most {_MOST[what]:,} are read")


def _name(memory: mmap.mmap, at: int) -> tuple[str, int]:
    """A name, and the offset behind it."""
    (length,) = struct.unpack_from("<Q", memory, at)
    _few("bytes of a name", length)
    return memory[at + 8 : at + 8 + length].decode(), at + 8 + length


def _end(memory: mmap.mmap, at: int, kind: int) -> int:
    """The offset behind a field's value.

    Raises:
        ValueError, struct.error: it has no end in the file, or is of an unknown kind.
    """
    count, end = 1, at
    if kind == _ARRAY:
        kind, count = struct.unpack_from("<IQ", memory, at)
        end += 12
    if kind == _STRING:
        for _ in range(count):
            end += 8 + struct.unpack_from("<Q", memory, end)[0]
    else:
        end += count * struct.calcsize(f"<{_NUMBERS[kind]}") if kind in _NUMBERS else len(memory)
    if end > len(memory):
        raise ValueError("a field goes beyond its end, or is of an unknown kind")
    return end


def _value(memory: mmap.mmap, at: int, kind: int) -> Any:
    """A field's value, which has its end in the file: a string, a number, or a list of such."""
    count, array = 1, kind == _ARRAY
    if array:
        kind, count = struct.unpack_from("<IQ", memory, at)
        at += 12
        _few("items", count)
    values: list[Any] = []
    if kind == _STRING:
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", memory, at)
            values.append(memory[at + 8 : at + 8 + length].decode())
            at += 8 + length
    else:
        values += struct.unpack_from(f"<{count}{_NUMBERS[kind]}", memory, at)
    return values if array else values[0]
