"""gguf's reader of a file, made faster and wary, and given to transformers."""

from __future__ import annotations

import importlib.util
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.errors import CheckpointError
from longdraft.files import regular
from longdraft.model.collector import paused

if TYPE_CHECKING:
    from gguf import GGUFReader

# Long fields that something uses. Others are passed over if they have more bytes than those of any model's numbers.
_LONG = {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges", "precompiled_charsmap")}
_TEMPLATE, _SHORT = "tokenizer.chat_template", 1 << 13
# Kinds of fields, and bytes of numbers, by the kind.
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Many more than any model has. What stands for each takes far more memory than in the file.
_MOST = {"fields": 1 << 12, "tensors": 1 << 16, "items": 1 << 21, "parts": 1 << 12, "bytes of a template": 1 << 20}


def needs(package: str, path: Path) -> None:
    """Raises CheckpointError if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise CheckpointError(f'Reading {path.name} needs the package {package!r}: pip install "longdraft[demo]"')


@contextmanager
def instead(reader: GGUFReader) -> Iterator[None]:
    """Makes transformers use this reader, as it would read the file anew for configuration and tokenizer."""
    import gguf

    theirs = gguf.GGUFReader
    gguf.GGUFReader = lambda *_args, **_named: reader
    try:
        yield
    finally:
        gguf.GGUFReader = theirs


def parts_of(path: Path, count: int) -> list[Path]:
    """The files of a model that was split into several; raises CheckpointError if one is missing."""
    if count < 2:
        return [path]
    if count > _MOST["parts"]:
        raise CheckpointError(f"{path} is one of {count} parts, it says: it is damaged, fetch it again.")
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


def reader_of(path: Path) -> GGUFReader:
    """gguf's reader of a file, or of all parts of a model that was split: their tensors, and the first one's fields.

    Arrays are read in a faster way: a tokenizer's strings would take gguf seconds. Long fields that nothing uses are
    not read.

    Raises:
        CheckpointError: a part is missing.
        ValueError, struct.error: a file is damaged: its tensors do not lie in it, side by side.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _build_fields(self, offs: int, count: int) -> int:
            _few("fields", int(count))
            if self.byte_order != "I":
                raise ValueError("its numbers are those of a big-endian machine")
            data = self.data._mmap
            for _ in range(int(count)):
                (length,) = struct.unpack_from("<Q", data, offs)
                _few("fields", length)
                begin = offs + 8 + length
                name = data[offs + 8 : begin].decode()
                if name in _LONG:
                    offs = super()._build_fields(offs, 1)
                    continue
                end = _end(data, begin + 4, *struct.unpack_from("<I", data, begin))
                if name == _TEMPLATE:
                    _few("bytes of a template", end - begin)
                if name == _TEMPLATE or end - begin <= _SHORT:
                    super()._build_fields(offs, 1)
                offs = end
            return offs

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data = self.data._mmap
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            of, at, parts = gguf.GGUFValueType(kind), orig_offs + 12, []
            _few("items", count)
            if of is gguf.GGUFValueType.STRING:
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", data, at)
                    parts.append(np.frombuffer(data, np.uint8, length, at + 8))
                    at += 8 + length
            else:
                numbers = np.frombuffer(data, self.gguf_scalar_to_np[of], count, at)
                parts, at = [numbers[i : i + 1] for i in range(count)], at + numbers.nbytes
            return at - orig_offs, parts, list(range(count)), [gguf.GGUFValueType.ARRAY, *[of] * bool(count)]

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            _few("tensors", int(count))
            return super()._build_tensor_info(offs, count)

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            spans = []
            for field in fields:
                *_, dims, kind, offset = field.parts
                block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind[0]))]
                count, begin = math.prod(map(int, dims)), start_offs + int(offset[0])
                end = begin + count // block * size
                if len(dims) > 4 or not count or count % block or begin % self.alignment or end > len(self.data):
                    raise ValueError(f"{field.name[:99]} does not lie in it as it says")
                spans.append((begin, end, field.name))
            for (_, end, name), (begin, _, other) in pairwise(sorted(spans)):
                if begin < end:
                    raise ValueError(f"{name} and {other} lie at the same place in it")
            super()._build_tensors(start_offs, fields)

    with paused():
        reader = Reader(regular(path), "c")
        split = reader.get_field(gguf.Keys.Split.LLM_KV_SPLIT_COUNT)
        parts = parts_of(path, 1 if split is None else int(split.contents()))
        first, *others = [reader if part == path else Reader(part, "c") for part in parts]
        first.tensors += [tensor for other in others for tensor in other.tensors]  # which keep the files mapped
        if len({tensor.name for tensor in first.tensors}) < len(first.tensors):
            raise ValueError("two of its parts have a tensor of the same name")
        return first


def _few(what: str, count: int) -> None:
    if count > _MOST[what]:
        raise ValueError(f"it has {count:,} {what}, where at most {_MOST[what]:,} are read")


def _end(data: Any, at: int, kind: int) -> int:
    """The offset behind a field's value.

    Raises:
        ValueError, struct.error: it has no end in the file, or is of an unknown kind.
    """
    if kind == _STRING:
        end = at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    elif kind == _ARRAY:
        kind, count = struct.unpack_from("<IQ", data, at)
        end = at + 12
        if kind == _STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += count * _SIZES.get(kind, len(data))
    else:
        end = at + _SIZES.get(kind, len(data))
    if end > len(data):
        raise ValueError("a field goes beyond its end, or is of an unknown kind")
    return end
