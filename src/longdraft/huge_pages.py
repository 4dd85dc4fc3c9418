"""Memory in transparent huge pages for model weights, which can be faulted in before the weights are loaded.

The first write to a page makes the system clear it (and a virtual machine find one). Another core can do that while
Python imports torch and transformers, which keeps one core busy for three seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

_MIN_FILE_BYTES = 256 << 20  # prefaulting does not pay for smaller files
_STEP = 64 << 20  # bytes cleared at a time; in between, the importing thread gets its turn

_prefaulting: tuple[mmap.mmap, Thread, Event] | None = None


def allocate(size: int) -> mmap.mmap | None:
    """Allocates ``size`` zero bytes, in huge pages if Linux has some; None on a system without them.

    Weights are read once a step and mostly miss the caches. With small pages, the processor would also look up an
    address (a TLB miss) every 4 KiB.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a Linux kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def prefault(path: str | os.PathLike[str] | None, available: int, min_bytes: int = _MIN_FILE_BYTES) -> None:
    """Starts in the background to fault in memory for a GGUF file's weights, and to read the file.

    Does nothing for another kind of file, one below ``min_bytes``, or one of more than half the ``available`` bytes.
    """
    global _prefaulting
    if _prefaulting is not None or not os.fspath(path or "").endswith(".gguf"):
        return
    # Loading the model reports what is wrong with its file.
    with suppress(OSError, RuntimeError, ValueError):
        file = Path(path or "").expanduser()
        size = file.stat().st_size if file.is_file() else 0
        if min_bytes <= size <= available // 2 and (pages := allocate(size)) is not None:
            with file.open("rb") as read:
                os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            stop = Event()
            thread = Thread(target=_fault_in, args=(pages, stop), daemon=True)
            thread.start()
            _prefaulting = pages, thread, stop


def _fault_in(pages: mmap.mmap, stop: Event) -> None:
    """Writes to one page after another, until all are written or ``stop`` is set."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for offset in range(0, len(pages), _STEP):
        if stop.is_set():
            return
        ctypes.memset(base + offset, 0, min(_STEP, len(pages) - offset))


def take_prefaulted(size: int) -> mmap.mmap | None:
    """Hands over the prefaulted memory, once; None if there is none or it has fewer than ``size`` bytes."""
    global _prefaulting
    if _prefaulting is None:
        return None
    (pages, thread, stop), _prefaulting = _prefaulting, None
    stop.set()
    thread.join()  # it must not write to memory that has an owner
    return pages if len(pages) >= size else None


def drop_prefaulted() -> None:
    """Frees the prefaulted memory, if nothing took it."""
    take_prefaulted(0)
