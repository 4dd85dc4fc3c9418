"""Allocates memory for model weights in transparent huge pages, and prefaults it in the background.

The first write to a page makes the system find and clear memory for the page (a fault). A second core can do this work
while Python imports torch and transformers, which takes one core about three seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

_MIN_FILE_BYTES = 256 << 20  # smaller files load quickly without prefaulting
_CHUNK_BYTES = 64 << 20  # cleared at a time; between chunks, the thread checks whether to stop

_prefaulting: tuple[mmap.mmap, Thread, Event] | None = None


def allocate(size: int) -> mmap.mmap | None:
    """Allocates ``size`` zero bytes, in huge pages if Linux has some; None on systems other than Linux.

    Every forward reads all weights, mostly from memory. With small pages, there is a TLB miss every 4 KiB.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a Linux kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def prefault(path: str | os.PathLike[str] | None, free_bytes: int, min_bytes: int = _MIN_FILE_BYTES) -> None:
    """Starts to prefault memory for a GGUF file's weights in the background, and to read the file into the page cache.

    Does nothing if the file is no GGUF file, is below ``min_bytes``, or exceeds half of ``free_bytes``.
    """
    global _prefaulting
    if _prefaulting is not None or not os.fspath(path or "").endswith(".gguf"):
        return
    # Errors are silent here: loading the model reports what is wrong with its file.
    with suppress(OSError, RuntimeError, ValueError):
        file = Path(path or "").expanduser()
        size = file.stat().st_size if file.is_file() else 0
        if min_bytes <= size <= free_bytes // 2 and (pages := allocate(size)) is not None:
            with file.open("rb") as opened_file:
                os.posix_fadvise(opened_file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            stop = Event()
            thread = Thread(target=_prefault_pages, args=(pages, stop), daemon=True)
            thread.start()
            _prefaulting = pages, thread, stop


def _prefault_pages(pages: mmap.mmap, stop: Event) -> None:
    """Writes zeros to the pages from first to last, until ``stop`` is set."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for offset in range(0, len(pages), _CHUNK_BYTES):
        if stop.is_set():
            return
        ctypes.memset(base + offset, 0, min(_CHUNK_BYTES, len(pages) - offset))


def take_prefaulted(size: int) -> mmap.mmap | None:
    """Hands over the prefaulted memory to its one user; None if there is none or it has fewer than ``size`` bytes."""
    global _prefaulting
    if _prefaulting is None:
        return None
    (pages, thread, stop), _prefaulting = _prefaulting, None
    stop.set()
    thread.join()  # the thread must not write zeros over the caller's data
    return pages if len(pages) >= size else None


def drop_prefaulted() -> None:
    """Frees the prefaulted memory, if nothing took it."""
    take_prefaulted(0)
