"""Compiles the kernels once for an instruction set, and keeps what came out.

What was compiled depends on nothing but the sources and the instruction set, so it serves wherever it is found: with
another compiler than it was made with, with none, and beside any build of torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from longdraft.folders import cache_folder

logger = logging.getLogger("longdraft")

SOURCES = ("linear.cpp", "attention.cpp", "layer.cpp", "draft.cpp", "rounded.cpp")
_HEADERS = ("kernels.h", "vectors.h", "stored.h", "threads.h", "blocks.h", "parts.h", "rounded.h")
# No -ffast-math: NaN and infinity keep their meaning. Nothing is fused but what the sources fuse (vectors.h).
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-Wno-psabi")
_SECONDS = 120

# Instruction sets from the widest on, and the flags by which /proc/cpuinfo says that a processor has them.
LEVELS = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe",
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
}


def levels() -> list[str]:
    """The instruction sets that this machine executes, the widest first.

    Raises:
        OSError: no kernels are made for such a machine.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"kernels are compiled for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    has: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                has = set(line.split())
                break
    # Each level has all of the ones below it.
    names = list(LEVELS)
    return [name for i, name in enumerate(names) if all(has >= set(LEVELS[below].split()) for below in names[i:])]


def shared_object(level: str, folder: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The kernels compiled for an instruction set: found, or compiled now, which takes some seconds.

    Args:
        level: one of :data:`LEVELS`.
        folder: where they are kept; None: in the package's cache.
        progress: called with a line of text before they are compiled.

    Raises:
        OSError: no compiler, one that cannot compile them, or no place to keep them. The message says which.
    """
    here = Path(__file__).parent
    parts = [(here / name).read_bytes() for name in (*SOURCES, *_HEADERS)]
    digest = hashlib.sha256(b"\0".join([*parts, "\n".join(_FLAGS).encode()])).hexdigest()[:16]
    file = (cache_folder() / "native" if folder is None else folder) / f"kernels-{level}-{digest}.so"
    if not (file.is_file() and _own(file)):
        compiler = _compiler()
        line = "Compiling kernels for this processor (once; a few seconds)"
        logger.info(line)
        if progress is not None:
            progress(line)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent, prefix=".compiling-") as place:
                _compile(compiler, level, here, Path(place)).replace(file)
        except OSError as error:
            if error.errno is None:  # of the compiler
                raise
            raise OSError(
                f"{file.parent} cannot be written to ({error.strerror}): set LONGDRAFT_CACHE to a folder that can"
            ) from None
    return file


def _compile(compiler: list[str], level: str, sources: Path, place: Path) -> Path:
    def compile_one(name: str) -> str:
        made = str(place / f"{name}.o")
        _run([*compiler, *_FLAGS, f"-march={level}", "-c", str(sources / name), "-o", made])
        return made

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, SOURCES))
    _run([*compiler, "-shared", *objects, "-o", str(place / "kernels.so")])
    return place / "kernels.so"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} took longer than {_SECONDS} seconds") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        error = next((line for line in lines if "error" in line), lines[-1])
        raise OSError(f"{command[0]} failed: {error}")


def _compiler() -> list[str]:
    """$CXX with its arguments (``ccache g++``), else what is found of g++, clang++ and c++."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        command = shlex.split(name)
        path = shutil.which(command[0]) if command else None
        if path:
            return [path, *command[1:]]
    raise OSError(f"no C++ compiler ({wanted or 'g++, clang++'}) was found: install one, or name it in CXX")


def _own(file: Path) -> bool:
    """Whether nobody else could have written a file: its code will run here."""
    stat = file.stat()
    return stat.st_uid in (os.getuid(), 0) and not stat.st_mode & 0o022
