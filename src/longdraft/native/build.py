"""Compiles the kernels once for each instruction set, and keeps the shared object.

A shared object depends only on the sources and the instruction set, so it can be used with another compiler or none,
and with any build of torch. Wheels carry it: setup.py loads this file by itself, when nothing else of the package can
be imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

logger = logging.getLogger("longdraft")

_HERE = Path(__file__).parent
SOURCES = tuple(sorted(file.name for file in _HERE.glob("*.cpp")))
_HEADERS = tuple(sorted(file.name for file in _HERE.glob("*.h")))
# Without -ffast-math NaN and infinity keep their meaning. Only the sources fuse operations (vectors.h). A tile fills
# the registers: if loads were scheduled before register allocation, as GCC does on aarch64, it would no longer fit.
_FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-schedule-insns", "-Wno-psabi")
_SECONDS = 600  # a file takes a tenth of this on a quiet machine
# All loops of int8.cpp are unrolled by hand: -O3 makes nothing faster, and compiling takes three times as long.
_LEVEL = {"int8.cpp": "-O2"}
# Before its first tile a process calls arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _PERMISSION, _TILES = 158, 0x1023, 18

# Machine -> instruction set, the widest first -> the flags of /proc/cpuinfo that show it.
LEVELS = {
    "x86_64": {
        "x86-64-v4-amx": "amx_tile amx_int8 amx_bf16 avx512_bf16",  # tiles of products
        "x86-64-v4-vnni": "avx512_vnni",  # integer products
        "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
        "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe",
    },
    "aarch64": {"armv8-a": ""},  # all of them have NEON
}
# Instruction set -> its common name.
LEVEL_NAMES = {
    "x86-64-v4-amx": "AVX-512 with AMX",
    "x86-64-v4-vnni": "AVX-512 with VNNI",
    "x86-64-v4": "AVX-512",
    "x86-64-v3": "AVX2",
    "armv8-a": "NEON",
}
# Compiler flags of instruction sets that -march has no name for. Compilers know AMX later than assemblers (tiles.h).
_TARGETS = {
    "x86-64-v4-amx": ("-march=x86-64-v4", "-mavx512vnni", "-DLONGDRAFT_AMX"),
    "x86-64-v4-vnni": ("-march=x86-64-v4", "-mavx512vnni"),
}
# The folder of a wheel's shared objects.
CARRIED = "compiled"


class UnsupportedPlatformError(OSError):
    """There are no kernels for this processor or system."""


def platform_levels() -> dict[str, str]:
    """The entry of :data:`LEVELS` for this machine.

    Raises:
        UnsupportedPlatformError: there are no kernels for this kind of machine.
    """
    if sys.platform != "linux" or platform.machine() not in LEVELS:
        known = " and ".join(LEVELS)
        raise UnsupportedPlatformError(
            f"kernels are compiled for Linux on {known}, this is {sys.platform} on {platform.machine()}"
        )
    return LEVELS[platform.machine()]


def supported_levels() -> list[str]:
    """The instruction sets that this machine executes, the widest first.

    Raises:
        UnsupportedPlatformError: there are no kernels for this kind of machine.
    """
    flags, has = platform_levels(), set[str]()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                has = set(line.split())
                break
    if "amx_tile" in has and not request_amx_permission():
        has.remove("amx_tile")
    # A level includes all levels below it.
    names = list(flags)
    return [name for i, name in enumerate(names) if all(has >= set(flags[below].split()) for below in names[i:])]


def request_amx_permission() -> bool:
    """Asks Linux, which then lets this process and those that it forks use AMX's tiles."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _PERMISSION, _TILES) == 0


def load_library(level: str, progress: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """The kernels for an instruction set, from a file that only this user or root can have written.

    Args: as :func:`ensure_compiled`. Raises OSError as it does, and if the file cannot be loaded.
    """
    if level.endswith("amx") and not request_amx_permission():
        raise OSError("the system does not let this process use AMX's tiles")
    carried = _HERE / CARRIED / library_file_name(level)
    if carried.is_file():
        return ctypes.CDLL(str(carried))
    folder = _cache()
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()  # no link is followed from here on
    shared = _shared(folder)
    if shared is not None:
        logger.warning(
            "Others can write to %s: kernels are not taken from there, and compiled for this process alone. Run chmod "
            "go-w on it, or set LONGDRAFT_CACHE to a folder of your own.",
            shared,
        )
    with nullcontext(folder) if shared is None else tempfile.TemporaryDirectory(prefix="longdraft-") as place:
        return ctypes.CDLL(f"/proc/self/fd/{_open(ensure_compiled(level, Path(place), progress))}")


def ensure_compiled(level: str, folder: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """The shared object of an instruction set, compiled now if it is missing, which takes some seconds.

    Args:
        level: one of :data:`LEVELS`.
        folder: where shared objects are kept; None for the package's cache.
        progress: called with a line of text before compiling.

    Raises:
        OSError: there is no compiler, it fails, or the folder cannot be written to. The message says which.
    """
    folder = folder or _cache()
    file = folder / library_file_name(level)
    try:
        os.close(_open(file))
    except OSError:
        _compiler()  # raises before the line is printed
        line = "Compiling kernels for this processor (once; a few seconds)"
        logger.info(line)
        if progress is not None:
            progress(line)
        try:
            compile_kernels(level, folder)
        except OSError as error:
            if error.errno is None:  # from the compiler
                raise
            raise OSError(
                f"{folder} cannot be written to ({error.strerror}): set LONGDRAFT_CACHE to a folder that can"
            ) from None
    return file


def compile_kernels(level: str, folder: Path) -> Path:
    """Compiles the kernels for an instruction set, which this machine need not have, into a folder.

    Raises:
        OSError: there is no compiler or it fails; with an errno, the folder cannot be written to.
    """
    compiler = _compiler()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as place:
        made = _compile(compiler, level, _HERE, Path(place))
        made.chmod(0o755)  # whatever the user's umask is
        return made.replace(folder / library_file_name(level))


def _cache() -> Path:
    from longdraft.folders import cache_folder

    return cache_folder() / "native"


def library_file_name(level: str) -> str:
    """The name of the kernels' file, which changes with the sources and the flags."""
    parts = [(_HERE / name).read_bytes() for name in (*SOURCES, *_HEADERS)]
    digest = hashlib.sha256(b"\0".join([*parts, repr((_FLAGS, _LEVEL)).encode()])).hexdigest()[:16]
    return f"kernels-{level}-{digest}.so"


def _compile(compiler: list[str], level: str, sources: Path, place: Path) -> Path:
    def compile_one(name: str) -> str:
        output = str(place / f"{name}.o")
        flags = (_LEVEL.get(name, "-O3"), *_FLAGS)
        _run([*compiler, *flags, *_TARGETS.get(level, (f"-march={level}",)), "-c", str(sources / name), "-o", output])
        return output

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
    """$CXX with its arguments (such as ``ccache g++``), else the first of g++, clang++ and c++ that is installed."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        command = shlex.split(name)
        path = shutil.which(command[0]) if command else None
        if path:
            return [path, *command[1:]]
    raise OSError(f"no C++ compiler ({wanted or 'g++, clang++'}) was found: install one, or name it in CXX")


def _open(file: Path) -> int:
    """Opens a file, whose code will run in this process, for as long as that lasts: what was looked at is loaded.

    Raises:
        OSError: it is missing, a link, or another user can have written it.
    """
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or not _is_own(found):
        os.close(number)
        raise OSError(f"{file} is not this user's alone")
    return number


def _is_own(found: os.stat_result) -> bool:
    """True if only this user or root can write to what has this status."""
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022


def _shared(folder: Path) -> Path | None:
    """A folder, or the parent of it, to which another user can write; None if there is none."""
    for each in (folder, *folder.parents):
        try:
            found = each.stat()
        except OSError:  # there is none yet
            continue
        # Others cannot rename what lies in a sticky folder such as /tmp.
        sticky = each != folder and found.st_mode & stat.S_ISVTX and found.st_uid in (os.getuid(), 0)
        if not (sticky or _is_own(found)):
            return each
    return None
