"""Damages files by a seed: their bytes, or the structure of JSON, safetensors and GGUF."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

WHOLE = (0, 1, 2, 3, 7, 100, 65_536, 10**5, 2**31 - 1, 2**31, 2**32 - 1, 10**9, 2**63 - 1, 10**18, 2**64 - 1)
VALUES = (
    *WHOLE, -1, -(2**63), 10**30, 10**400, 0.5, -0.5, 1e-30, 1e30, float("inf"), -float("inf"), float("nan"), True,
    False, None, "", "x", "1", "\ud800", "../../../etc/passwd", [], [[]], [0], [-1], [10**9], ["x"], {}, {"x": 1},
    [None] * 3,
)  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
# Values that the package json would not write.
TEXTS = (DEEP, "9" * 5_000, f"[{'0, ' * 200_000}0]", '1, "name": 2', "1 2", '{"a": ' * 900 + "1" + "}" * 900)
DTYPES = (torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool, torch.uint8, torch.int8, torch.float64)
NAMED = ("F16", "BF16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "x")


def damage_bytes(r: Random, data: bytes) -> bytes:
    """Flips a bit, or cuts, repeats or overwrites bytes."""
    found = bytearray(data)
    at = r.randrange(len(found)) if r.random() < 0.4 else r.randrange(min(len(found), 2_000))
    kind = r.randrange(6)
    if kind == 0:
        found[at] ^= 1 << r.randrange(8)
    elif kind == 1:
        return bytes(found[:at])
    elif kind == 2:
        found[at:at] = found[at : at + r.randrange(1, 64)]
    elif kind == 3:
        del found[at : at + r.randrange(1, 64)]
    elif kind == 4:
        found[at : at + 8] = struct.pack("<Q", r.choice(WHOLE))
    else:
        for _ in range(r.randrange(2, 40)):
            found[r.randrange(len(found))] = r.randrange(256)
    return bytes(found)


def damage_json(r: Random, data: bytes) -> bytes:
    """Replaces or removes a value, or changes a name."""
    if r.random() < 0.1:
        whole = (DEEP, "", "null", "[]", "7", '"x"', "{", "{}", '{"a":' * 50_000, "\ufeff" + data.decode())
        return r.choice((*(each.encode() for each in whole), data.decode().encode("utf-16"), b"\xff" + data, data * 2))
    whole = json.loads(data)
    holders: list[tuple[Any, Any]] = []
    left = [whole]
    while left:
        each = left.pop()
        pairs = each.items() if isinstance(each, dict) else enumerate(each)
        for key, value in pairs:
            holders.append((each, key))
            if isinstance(value, dict | list):
                left.append(value)
    holder, key = r.choice(holders)
    if isinstance(holder, dict) and r.random() < 0.2:
        value = holder.pop(key)
        if r.random() < 0.3:
            holder[key[:-1]] = value
    elif r.random() < 0.2:
        holder[key] = "PLACE"
        return json.dumps(whole).replace('"PLACE"', r.choice(TEXTS)).encode()
    else:
        holder[key] = r.choice(VALUES)
    return json.dumps(whole).encode()


def damage_lines(r: Random, data: bytes) -> bytes:
    """JSON lines: damages, replaces or removes one of them."""
    lines = data.splitlines(keepends=True)
    at, kind = r.randrange(len(lines)), r.randrange(6)
    if kind == 0:
        lines[at] = lines[r.randrange(len(lines))]
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        lines[at] = damage_bytes(r, lines[at])
    else:
        lines[at] = damage_json(r, lines[at]) + b"\n"
    return b"".join(lines)


def damage_tensors(r: Random, path: Path) -> None:
    """Changes a tensor's type, shape, name or values, swaps two tensors, or damages the header."""
    data = path.read_bytes()
    kind = r.randrange(7)
    if kind == 0:
        path.write_bytes(damage_bytes(r, data))
        return
    if kind == 1:
        (size,) = struct.unpack_from("<Q", data)
        head = data[8 : 8 + size]
        if r.random() < 0.3:
            head = head.replace(b'"F32"', f'"{r.choice(NAMED)}"'.encode(), r.randrange(1, 3))
        else:
            head = damage_json(r, head)
        path.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])
        return
    tensors = load_file(path)
    name = r.choice(sorted(tensors))
    tensor = tensors[name]
    if kind == 2:
        tensors[name] = tensor.to(r.choice(DTYPES))
    elif kind == 3:
        tensors[name] = r.choice((tensor[None], tensor[:-1], tensor.flatten(), torch.zeros(0), torch.zeros(())))
        tensors[name] = tensors[name].contiguous().clone()
    elif kind == 4:
        other = r.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other], tensor
    elif kind == 5:
        tensors[r.choice((name[:-1], "", name + ".x", "layers.999999999." + name))] = tensors.pop(name)
    elif tensor.is_floating_point():
        tensors[name] = torch.full_like(tensor, r.choice((float("nan"), float("inf"), 1e30, 0.0)))
    else:
        tensors[name] = torch.full_like(tensor, r.choice((-1, 10**9, 0, 2**62)))
    (size,) = struct.unpack_from("<Q", data)
    save_file(tensors, path, metadata=json.loads(data[8 : 8 + size]).get("__metadata__"))


def damage_gguf(r: Random, path: Path) -> None:
    """Changes a field's value, type, name or length; or a tensor's offset, size, type or name."""
    reader = gguf.GGUFReader(path, "r+")  # its arrays are the file's memory
    if r.random() < 0.5:
        _, name, dims, sizes, type_, place = r.choice(reader.tensors).field.parts
        kind, near = r.randrange(5), int(place[0])
        if kind == 0:
            name[r.randrange(len(name))] ^= 1 << r.randrange(7)
        elif kind == 1:
            sizes[r.randrange(len(sizes))] = r.choice(WHOLE)
        elif kind == 2:
            type_[0] = r.choice((0, 1, 2, 8, 14, 20, 30, 99))
        elif kind == 3:
            place[0] = r.choice((near + 1, near ^ 32, max(0, near - 64), 0, 2**64 - 32, 2**64 - 4096, *WHOLE))
        else:
            dims[0] = r.choice((0, 1, 3, 5, 2**32 - 1))
    else:
        fields = [field.parts for name, field in reader.fields.items() if not name.startswith("GGUF.")]
        _, name, type_, *value = r.choice(fields)
        what, kind = r.random(), gguf.GGUFValueType(int(type_[0]))
        if what < 0.15:
            name[r.randrange(len(name))] ^= 1 << r.randrange(7)
        elif what < 0.3:
            type_[0] = r.randrange(14)
        elif kind is gguf.GGUFValueType.FLOAT32:
            numbers = (0.0, -1.0, 1e30, 1e-30, float("inf"), float("nan"), -float("inf"), 1e-45, 3e38)
            value[0][0] = r.choice(numbers)
        else:  # a number, or the length of a string or list
            number = value[1] if kind is gguf.GGUFValueType.ARRAY else value[0]
            number[0] = r.choice(WHOLE) % (1 << 8 * number.itemsize)
    reader.data.flush()


def replace_file(r: Random, path: Path) -> None:
    """Replaces the file by a folder, a pipe, a device, a link to itself or elsewhere, or nothing."""
    path.unlink()
    kind = r.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind < 5:
        path.symlink_to((path.name, "/dev/zero", "/etc/passwd")[kind - 2])


def in_place(change: Callable[[Random, bytes], bytes]) -> Callable[[Random, Path], None]:
    """Applies a change of bytes to a file."""

    def changing(r: Random, path: Path) -> None:
        path.write_bytes(change(r, path.read_bytes()))

    return changing
