"""One case: a damaged copy of a file is used, within limits of time and memory, and the outcome is judged."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from longdraft import LongdraftError
from longdraft.errors import MemoryBudgetError
from tests.fuzz.formats import Format

# Limits: processor seconds, seconds of the clock, and bytes on top of those in use.
SECONDS, WAIT, ROOM = 10, 300, 6 << 30


class EndlessCase(BaseException):
    """A case that does not end."""


@contextmanager
def limited() -> Iterator[None]:
    """Limits time and memory."""

    def end(*_: object) -> None:
        raise EndlessCase

    signals = {signal.SIGALRM: (signal.ITIMER_REAL, WAIT), signal.SIGPROF: (signal.ITIMER_PROF, SECONDS)}
    before = {each: signal.signal(each, end) for each in signals}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for timer, seconds in signals.values():
        signal.setitimer(timer, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for each, (timer, _) in signals.items():
            signal.setitimer(timer, 0)
            signal.signal(each, before[each])


def verdict(name: str, form: Format, seed: int, whole: Path, place: Path) -> str | None:
    """What went wrong with a damaged copy of ``whole``; None if its use was right, or refused with the file's name."""
    r = Random(f"{name} {seed}")
    path = place / whole.name
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    shutil.copytree(whole, path) if whole.is_dir() else shutil.copy(whole, path)
    part = r.choice(sorted(form.changes))
    try:
        r.choice(form.changes[part])(r, path / part if part else path)
    except (KeyError, TypeError, ValueError, UnicodeError):
        return None  # a change that cannot be written
    right = form.right()
    try:
        with limited():
            got = form.use(path)
    except MemoryBudgetError as error:
        return f"{name} {seed} {part}: {error}"
    except LongdraftError as error:
        return None if path.name in str(error) else f"{name} {seed} {part}: does not name the file: {error!r}"
    except BaseException as error:
        return f"{name} {seed} {part}: {type(error).__name__}: {str(error)[:300]}"
    return None if got == right else f"{name} {seed} {part}: another text"
