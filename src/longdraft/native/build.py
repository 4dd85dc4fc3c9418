"""Compiles the kernels once for each instruction set (``level``), and caches the shared object.

A shared object depends only on the sources and the instruction set, and works with any build of torch. Wheels contain
some of them: setup.py loads this file alone, so it imports nothing of the package at module level.
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
from typing import NamedTuple

logger = logging.getLogger("longdraft")

_SOURCE_DIR = Path(__file__).parent
SOURCES = tuple(sorted(file.name for file in _SOURCE_DIR.glob("*.cpp")))
_HEADERS = tuple(sorted(str(file.relative_to(_SOURCE_DIR)) for file in _SOURCE_DIR.rglob("*.h")))
# No -ffast-math: NaN and infinity keep their meaning. -ffp-contract=off: fmadd() is explicit (vectors.h).
# -fno-schedule-insns: GCC on aarch64 schedules before register allocation, which makes full register tiles spill.
_FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-schedule-insns", "-Wno-psabi")
_TIMEOUT = 600  # seconds to compile a file; an idle machine takes a tenth of this
# Source -> the flag that replaces -O3. matmul_int8.cpp unrolls its loops itself: -O3 only triples its compile time.
_OPTIMIZATION = {"matmul_int8.cpp": "-O2"}
# Number and arguments of the system call that asks for AMX: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


class Level(NamedTuple):
    """An instruction set.

    Attributes:
        machine: name of the machines that have it, as :func:`platform.machine` says it.
        title: name for messages.
        base: the instruction set that it extends, or None. It has the base's features and compiler flags too.
        features: what /proc/cpuinfo must list.
        flags: compiler flags; a later -march replaces an earlier one.
    """

    machine: str
    title: str
    base: str | None
    features: str
    flags: str


# For each machine the widest instruction set first. Old compilers suffice for AMX, which is in assembly (isa/amx.h).
LEVELS = {
    "x86-64-v4-amx": Level(
        "x86_64", "AVX-512 with AMX", "x86-64-v4-vnni", "amx_tile amx_int8 amx_bf16 avx512_bf16", "-DLONGDRAFT_AMX"
    ),
    "x86-64-v4-vnni": Level("x86_64", "AVX-512 with VNNI", "x86-64-v4", "avx512_vnni", "-mavx512vnni"),
    "x86-64-v4": Level(
        "x86_64", "AVX-512", "x86-64-v3", "avx512f avx512bw avx512cd avx512dq avx512vl", "-march=x86-64-v4"
    ),
    "x86-64-v3-vnni": Level("x86_64", "AVX2 with VNNI", "x86-64-v3", "avx_vnni", "-mavxvnni"),
    "x86-64-v3": Level("x86_64", "AVX2", None, "avx avx2 bmi1 bmi2 f16c fma abm movbe", "-march=x86-64-v3"),
    "armv8.2-a-i8mm": Level(
        "aarch64", "NEON with int8 matrix products", "armv8.2-a-dotprod", "i8mm", "-march=armv8.2-a+dotprod+i8mm"
    ),
    "armv8.2-a-dotprod": Level(
        "aarch64", "NEON with dot products", "armv8-a", "asimddp asimdrdm atomics crc32", "-march=armv8.2-a+dotprod"
    ),
    "armv8-a": Level("aarch64", "NEON", None, "", "-march=armv8-a"),  # every aarch64 processor has NEON
}
# Folder for the shared objects of a wheel, beside the sources.
PREBUILT_DIR = "compiled"


class UnsupportedPlatformError(OSError):
    """The kernels do not support this processor or operating system."""


class CompilerError(OSError):
    """There is no C++ compiler, or it fails."""


def option_name(level: str) -> str:
    """Returns the name of an instruction set in LONGDRAFT_NATIVE."""
    return level.removeprefix("x86-64-").removeprefix("armv8.2-a-")


def _with_bases(level: str | None) -> list[Level]:
    """Returns what an instruction set extends, the narrowest first, and the set itself last."""
    return [] if level is None else [*_with_bases(LEVELS[level].base), LEVELS[level]]


def _target_flags(level: str) -> list[str]:
    return [flag for base in _with_bases(level) for flag in base.flags.split()]


def platform_levels() -> list[str]:
    """Returns the instruction sets of this machine, the widest first; raises UnsupportedPlatformError without any."""
    levels = [name for name, level in LEVELS.items() if level.machine == platform.machine()]
    if sys.platform != "linux" or not levels:
        supported = " and ".join(dict.fromkeys(level.machine for level in LEVELS.values()))
        raise UnsupportedPlatformError(
            f"kernels are compiled for Linux on {supported}, this is {sys.platform} on {platform.machine()}"
        )
    return levels


def supported_levels() -> list[str]:
    """Returns the instruction sets that this machine executes, the widest first; raises UnsupportedPlatformError."""
    levels, features = platform_levels(), set[str]()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):  # x86-64, aarch64
                features = set(line.split())
                break
    if "amx_tile" in features and not request_amx_permission():
        features.remove("amx_tile")
    return [name for name in levels if all(features >= set(level.features.split()) for level in _with_bases(name))]


def request_amx_permission() -> bool:
    """Asks Linux to let this process and its children use AMX tiles; returns True if Linux permits it."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def load_library(level: str, progress: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """Loads the kernels for an instruction set, from a file that only this user or root can write. Arguments are as in
    :func:`ensure_compiled`. Raises OSError if the kernels cannot be compiled or loaded."""
    if level.endswith("amx") and not request_amx_permission():
        raise OSError("the system does not let this process use AMX tiles: set LONGDRAFT_NATIVE=v4-vnni")
    prebuilt = _SOURCE_DIR / PREBUILT_DIR / library_file_name(level)
    if prebuilt.is_file():
        return ctypes.CDLL(str(prebuilt))
    folder = _cache_dir()
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()  # checked and used without symbolic links
    unsafe_folder = _find_unsafe_folder(folder)
    if unsafe_folder is not None:
        logger.warning(
            "Other users can write to %s: kernels are not loaded from there, but compiled for this process alone. Run "
            "chmod go-w on it, or set LONGDRAFT_CACHE to a folder of your own.",
            unsafe_folder,
        )
    with nullcontext(folder) if unsafe_folder is None else tempfile.TemporaryDirectory(prefix="longdraft-") as safe:
        return ctypes.CDLL(f"/proc/self/fd/{_open_private(ensure_compiled(level, Path(safe), progress))}")


def ensure_compiled(level: str, folder: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Returns the shared object for an instruction set. Compiles it if it is missing, which takes some seconds.

    Args:
        level: an instruction set of :data:`LEVELS`.
        folder: the folder of shared objects; None for the package's cache.
        progress: called with a line of text before compiling.

    Raises:
        CompilerError: there is no compiler, or compiling fails.
        OSError: the folder is not writable.
    """
    folder = folder or _cache_dir()
    file = folder / library_file_name(level)
    try:
        os.close(_open_private(file))
    except OSError:
        _find_compiler()  # without a compiler, raises before progress() is called
        line = "Compiling kernels for this processor (once; a few seconds)"
        logger.info(line)
        if progress is not None:
            progress(line)
        try:
            compile_kernels(level, folder)
        except CompilerError:
            raise
        except OSError as error:
            raise OSError(
                f"{folder} cannot be written to ({error.strerror}): set LONGDRAFT_CACHE to a writable folder"
            ) from None
    return file


def compile_kernels(level: str, folder: Path) -> Path:
    """Compiles the kernels for an instruction set, which this machine need not support; returns the file in ``folder``.

    Raises:
        CompilerError: there is no compiler, or compiling fails.
        OSError: the folder is not writable.
    """
    compiler = _find_compiler()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as temp_folder:
        library = _compile(compiler, level, _SOURCE_DIR, Path(temp_folder))
        library.chmod(0o755)  # whatever the user's umask is
        return library.replace(folder / library_file_name(level))


def _cache_dir() -> Path:
    from longdraft.folders import cache_folder

    return cache_folder() / "native"


def library_file_name(level: str) -> str:
    """Returns the file name of the shared object, which contains a digest of the sources and the flags."""
    parts = [(_SOURCE_DIR / name).read_bytes() for name in (*SOURCES, *_HEADERS)]
    flags = repr((_FLAGS, _OPTIMIZATION, _target_flags(level))).encode()
    digest = hashlib.sha256(b"\0".join([*parts, flags])).hexdigest()[:16]
    return f"kernels-{level}-{digest}.so"


def _compile(compiler: list[str], level: str, source_dir: Path, output_dir: Path) -> Path:
    def compile_one(name: str) -> str:
        output = str(output_dir / f"{name}.o")
        flags = (_OPTIMIZATION.get(name, "-O3"), *_FLAGS, *_target_flags(level))
        _run_compiler([*compiler, *flags, "-c", str(source_dir / name), "-o", output])
        return output

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, SOURCES))
    _run_compiler([*compiler, "-shared", *objects, "-o", str(output_dir / "kernels.so")])
    return output_dir / "kernels.so"


def _run_compiler(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{command[0]} took longer than {_TIMEOUT} seconds") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        error = next((line for line in lines if "error" in line), lines[-1])
        raise CompilerError(f"{command[0]} failed: {error}")


def _find_compiler() -> list[str]:
    """Returns $CXX, split into arguments (``ccache g++``), or else the first installed of g++, clang++ and c++."""
    requested = os.environ.get("CXX")
    for name in (requested,) if requested else ("g++", "clang++", "c++"):
        command = shlex.split(name)
        path = shutil.which(command[0]) if command else None
        if path:
            return [path, *command[1:]]
    raise CompilerError(f"no C++ compiler ({requested or 'g++, clang++'}) was found: install one, or name it in CXX")


def _open_private(file: Path) -> int:
    """Opens a file; raises OSError if it is missing, a symbolic link, or writable by others. Returns a descriptor: at
    the file's path, another file could replace the checked one."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not _is_private(status):
        os.close(descriptor)
        raise OSError(f"{file} may have been written by another user: remove it")
    return descriptor


def _is_private(status: os.stat_result) -> bool:
    """Returns True if only this user or root can write to the file or folder."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022  # no write bit of the group or of others


def _find_unsafe_folder(folder: Path) -> Path | None:
    """Returns ``folder`` or its nearest parent that other users can write to; None if they can write to none."""
    for path in (folder, *folder.parents):
        try:
            status = path.stat()
        except OSError:  # does not exist yet
            continue
        # A parent that is sticky, such as /tmp, is safe: other users cannot rename this user's files in it.
        sticky = path != folder and status.st_mode & stat.S_ISVTX and status.st_uid in (os.getuid(), 0)
        if not (sticky or _is_private(status)):
            return path
    return None
