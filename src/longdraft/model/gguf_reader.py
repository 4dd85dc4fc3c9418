"""gguf's reader of a file, made faster, and given to transformers."""

from __future__ import annotations

import importlib.util
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


def reader_of(path: Path) -> GGUFReader:
    """gguf's reader of a file, with a faster way to read arrays: a tokenizer's strings would take it seconds."""
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
        return Reader(path, "c")
