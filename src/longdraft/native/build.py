"""Compiles the kernels once for this processor, and keeps what came out."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longdraft.folders import cache_folder

logger = logging.getLogger("longdraft")

SOURCES = ("linear.cpp", "attention.cpp", "layer.cpp")
_HEADERS = ("kernels.h", "vectors.h")
# No -ffast-math: NaN and infinity keep their meaning.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-Wno-psabi")
_SECONDS = 120


def shared_object(folder: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The compiled kernels: found, or compiled now, which takes some seconds.

    Args:
        folder: where they are kept; None: in the package's cache.
        progress: called with a line of text before they are compiled.

    Raises:
        OSError: no compiler, one that cannot compile them, or no room to keep them. The message says which.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"kernels are compiled for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    compiler = _compiler()
    here = Path(__file__).parent
    threads = _threads_library()
    parts = [(here / name).read_bytes() for name in (*SOURCES, *_HEADERS)]
    made_for = "\n".join((*_FLAGS, _version(compiler), _processor(), threads or ""))
    digest = hashlib.sha256(b"\0".join([*parts, made_for.encode()])).hexdigest()[:16]
    file = (cache_folder() / "native" if folder is None else folder) / f"kernels-{digest}.so"
    if not (file.is_file() and _own(file)):
        line = "Compiling kernels for this processor (once; a few seconds)"
        logger.info(line)
        if progress is not None:
            progress(line)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".compiling-") as place:
            _compile(compiler, here, Path(place), threads).replace(file)
    return file


def _compile(compiler: str, sources: Path, place: Path, threads: str | None) -> Path:
    objects = []
    for name in SOURCES:
        objects.append(str(place / f"{name}.o"))
        _run([compiler, *_FLAGS, "-fopenmp", "-c", str(sources / name), "-o", objects[-1]])
    # torch's own threads serve the kernels too: a second pool would fight with the first for the cores.
    _run([compiler, "-shared", *objects, *([threads] if threads else ["-fopenmp"]), "-o", str(place / "kernels.so")])
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


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++"):
        path = shutil.which(name)
        # The sources are written for GNU C++, as is the interface to torch's threads.
        if path and "Free Software Foundation" in _version(path):
            return path
    raise OSError(f"no GNU C++ compiler ({wanted or 'g++'}) was found")


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _processor() -> str:
    """What -march=native depends on."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return line
    return platform.processor()


def _threads_library() -> str | None:
    """The OpenMP library that torch has loaded, where it is one that GNU's code can use."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            found = re.search(r"\S*/lib(gomp|iomp5)[^/]*\.so[.\d]*$", line)
            if found:
                return found[0]
    return None


def _own(file: Path) -> bool:
    """Whether nobody else could have written a file: its code will run here."""
    stat = file.stat()
    return stat.st_uid in (os.getuid(), 0) and not stat.st_mode & 0o022
