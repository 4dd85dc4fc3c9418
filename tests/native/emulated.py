"""Kernels of another processor, run under an emulator on this process's own memory: see emulated.cpp."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longdraft.native import build

MACHINE, PAGE = "aarch64-linux-gnu", 4096
# A processor of qemu's with these instructions: the first two have none of the next.
PROCESSORS = {"armv8-a": "cortex-a72", "armv8.2-a-dotprod": "neoverse-n1", "armv8.2-a-i8mm": "max"}
INTS, FLOATS = 24, 4
CALL = struct.Struct(f"<32s{INTS}q{FLOATS}f")


def library(level: str) -> Library:
    """The kernels for an instruction set of aarch64, by Debian's cross compiler and qemu."""
    compiler = f"{MACHINE}-g++"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", compiler)
        kernels = build.ensure_compiled(level)
    program = kernels.with_suffix(".emulated")
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([compiler, "-std=c++17", "-O1", "-Wall", "-Werror", str(source), "-o", str(program)], check=True)
    emulator = [f"qemu-{MACHINE.split('-')[0]}", "-cpu", PROCESSORS[level], "-L", f"/usr/{MACHINE}"]
    return Library([*emulator, str(program), str(kernels)])


class Library:
    """The part of ctypes.CDLL that tests use. Its functions take the same arguments, and work on this process's memory.

    Args:
        command: emulated.cpp, compiled, and its argument.
    """

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._functions: dict[str, _Function] = {}

    def __getattr__(self, name: str) -> _Function:
        return self._functions.setdefault(name, _Function(self, name))

    def call(self, name: str, ints: list[int], floats: list[float]) -> int:
        ints, floats = ints + [0] * (INTS - len(ints)), floats + [0.0] * (FLOATS - len(floats))
        self._process.stdin.write(CALL.pack(name.encode(), *ints, *floats))
        lent = {}
        while page := self._number():
            lent[page] = ctypes.string_at(page, PAGE)
            self._process.stdin.write(lent[page])
        result = self._number()
        for _ in range(self._number()):
            page = self._number()
            before, after = (np.frombuffer(x, np.uint8) for x in (lent[page], self._read(PAGE)))
            # Only what the kernel wrote: Python's own objects lie in a page too, and may have changed meanwhile.
            written = np.flatnonzero(before != after)
            np.frombuffer((ctypes.c_uint8 * PAGE).from_address(page), np.uint8)[written] = after[written]
        return result

    def _number(self) -> int:
        return int.from_bytes(self._read(8), "little")

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._process.stdout.read(size - len(data))
            if not part:
                raise RuntimeError(f"the emulator ended with {self._process.wait()}")
            data += part
        return data


class _Function:
    def __init__(self, library: Library, name: str) -> None:
        self._library, self.__name__ = library, name
        self.argtypes: list[Any] = []
        self.restype: Any = ctypes.c_int
        self.errcheck: Any = lambda result, function, args: result

    def __call__(self, *args: Any) -> int:
        if self.__name__ == "longdraft_set_parallel_entry":  # this process's threads are none of the emulator's
            return 0
        floats = [x for x, kind in zip(args, self.argtypes, strict=True) if kind is ctypes.c_float]
        ints = [x for x, kind in zip(args, self.argtypes, strict=True) if kind is not ctypes.c_float]
        places = [x if isinstance(x, int) else 0 if x is None else ctypes.addressof(x) for x in ints]
        return self.errcheck(self._library.call(self.__name__, places, floats), self, args)
