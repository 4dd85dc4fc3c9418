"""Memory in large pages, for weights that are read once a step; those of a file can be taken before they are needed.

The system clears a page, and a virtual machine finds one, when it is first written to. While Python imports torch and
transformers, which keeps one core busy for three seconds, another can do that.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

_LEAST = 256 << 20  # bytes of a file for which it pays
_STEP = 64 << 20  # bytes that are written at a time: in between, Python waits for the thread that imports

_begun: tuple[mmap.mmap, Thread, Event] | None = None


def allocate(size: int) -> mmap.mmap | None:
    """So many bytes of zeros, in large pages where Linux has some; None on a system without such memory.

    What is read once a step is mostly not in the caches, and with small pages the processor would look for a page's
    place every 4 KiB.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def prefault(path: str | os.PathLike[str] | None, available: int, min_bytes: int = _LEAST) -> None:
    """Begins to take memory for the weights of a GGUF file, and to read the file, in the background.

    Does nothing for another path, for a file below ``min_bytes`` bytes, and if twice its size is not ``available``.
    """
    global _begun
    if _begun is not None or not os.fspath(path or "").endswith(".gguf"):
        return
    # Whoever loads the model says what is wrong with its file.
    with suppress(OSError, RuntimeError, ValueError):
        file = Path(path or "").expanduser()
        size = file.stat().st_size if file.is_file() else 0
        if min_bytes <= size <= available // 2 and (pages := allocate(size)) is not None:
            with file.open("rb") as read:
                os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            over = Event()
            thread = Thread(target=_write, args=(pages, over), daemon=True)
            thread.start()
            _begun = pages, thread, over


def _write(pages: mmap.mmap, over: Event) -> None:
    """Writes to every page, until they are taken."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for at in range(0, len(pages), _STEP):
        if over.is_set():
            return
        ctypes.memset(first + at, 0, min(_STEP, len(pages) - at))


def take_prefaulted(size: int) -> mmap.mmap | None:
    """The memory that was begun, which nobody else gets then; None if so many bytes do not fit it."""
    global _begun
    if _begun is None:
        return None
    (pages, thread, over), _begun = _begun, None
    over.set()
    thread.join()  # it would write to what is somebody's by then
    return pages if len(pages) >= size else None


def drop_prefaulted() -> None:
    """Gives the memory that was begun back, if nobody took it."""
    take_prefaulted(0)
