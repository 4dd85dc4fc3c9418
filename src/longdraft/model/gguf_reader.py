"""gguf's reader of a file, made faster, and given to transformers."""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.errors import CheckpointError
from longdraft.model.collector import paused

if TYPE_CHECKING:
    from gguf import GGUFReader


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
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    parts = [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}{path.suffix}") for i in range(count)]
    if missing := [part.name for part in parts if not part.is_file()]:
        advice = "fetch it, or join the parts with llama-gguf-split --merge"
        raise CheckpointError(f"Of the {count} parts of {path}, {', '.join(missing)} is not beside it: {advice}.")
    return parts


def reader_of(path: Path) -> GGUFReader:
    """gguf's reader of a file, with a faster way to read arrays: a tokenizer's strings would take it seconds.

    The parts of a model that was split are read as one, with the first one's fields.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            data = self.data._mmap
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            of, at, parts = gguf.GGUFValueType(kind), orig_offs + 12, []
            if of is gguf.GGUFValueType.STRING:
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", data, at)
                    parts.append(np.frombuffer(data, np.uint8, length, at + 8))
                    at += 8 + length
            elif of in self.gguf_scalar_to_np:
                numbers = np.frombuffer(data, self.gguf_scalar_to_np[of], count, at)
                parts, at = [numbers[i : i + 1] for i in range(count)], at + numbers.nbytes
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            return at - orig_offs, parts, list(range(count)), [gguf.GGUFValueType.ARRAY, *[of] * bool(count)]

    with paused():
        reader = Reader(path, "c")
        split = reader.get_field(gguf.Keys.Split.LLM_KV_SPLIT_COUNT)
        parts = parts_of(path, 1 if split is None else int(split.contents()))
        first, *others = [reader if part == path else Reader(part, "c") for part in parts]
        first.tensors += [tensor for other in others for tensor in other.tensors]  # which keep the files mapped
        return first
