"""Renders chat templates, which are programs of strangers, in a process of their own with bounds.

The process is started at the first template, serves all of them, and ends with this one. A template that takes too long
or too much memory ends it alone.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.sandbox

from longdraft.errors import PromptError

# For one text by the clock, which also runs while the machine does other work.
MAX_WALL_SECONDS = 60
# Bytes of memory, and characters of the text, beside so many times what the template is given.
_MEMORY, _CHARACTERS, _TIMES = 256 << 20, 1 << 22, 32


class TemplateRenderer:
    """The process, as this one sees it.

    Args:
        seconds: of the processor, which a text may take.
    """

    def __init__(self, seconds: int = 3) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, template: str, variables: Mapping[str, Any]) -> str:
        """Raises PromptError if the template refuses, fails or exceeds a bound; the message goes on from "it"."""
        request = json.dumps([template, variables], default=str).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _started(self._seconds)
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(MAX_WALL_SECONDS, process.kill)
            timer.start()
            try:
                process.stdin.write(request)
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = b""
            finally:
                timer.cancel()
            if not answer.endswith(b"\n"):
                self.close()
                raise PromptError(
                    f"takes more than {self._seconds} seconds or the memory that it may (exit {process.poll()})"
                )
        text, problem = json.loads(answer)
        if problem is not None:
            raise PromptError(problem)
        return str(text)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _started(seconds: int) -> subprocess.Popen[bytes]:
    # The path is set before anything is imported: not from the folder that this process happens to be in.
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({seconds})"
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True
    )


render_template = TemplateRenderer()
atexit.register(render_template.close)
if hasattr(os, "register_at_fork"):  # the pipes are the parent's
    os.register_at_fork(after_in_child=lambda: render_template.__init__())  # type: ignore[misc]


# --- inside the process ---


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks answers for training, and shows what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Further arguments of the filter tojson.
_LAYOUT = ("ensure_ascii", "indent", "separators", "sort_keys")


@lru_cache
def _compiled(template: str) -> jinja2.Template:
    """Compiles a template in the environment that transformers promises, without a loader: it can import nothing."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    world = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    world.filters["tojson"] = _to_json
    world.globals |= {"raise_exception": _refuse, "strftime_now": lambda layout: datetime.now().strftime(layout)}
    return world.from_string(template)


def _to_json(x: Any, *places: Any, **layout: Any) -> str:
    return json.dumps(x, **{"ensure_ascii": False, **dict(zip(_LAYOUT, places, strict=False)), **layout})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _bound(given: int, seconds: int) -> None:
    """Bounds what this process may take from now on, where the system can."""
    import resource

    used, memory = resource.getrusage(resource.RUSAGE_SELF), resource.RLIM_INFINITY
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        memory = pages * resource.getpagesize() + _MEMORY + _TIMES * given
    seconds += int(used.ru_utime + used.ru_stime) + 1
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
        with suppress(OSError, ValueError):  # a lower limit stays
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _answer(line: bytes) -> tuple[str | None, str | None]:
    """A text, or what is wrong."""
    try:
        template, variables = json.loads(line)
        pieces, left = [], _CHARACTERS + _TIMES * len(line)
        for piece in _compiled(template).generate(variables):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                return None, "makes a text without end"
        "".join(pieces).encode()  # or it is not valid Unicode
        return "".join(pieces), None
    except MemoryError:
        return None, "takes more memory than it may"
    except RecursionError:
        return None, "calls itself without end"
    except Exception as error:  # a template may fail in any way
        said = str(error)[:1000].encode(errors="replace").decode() or type(error).__name__
        return None, f"refuses these messages: {said}"


def serve(seconds: int) -> None:
    for line in sys.stdin.buffer:
        with suppress(ImportError):  # Windows has the clock alone
            _bound(len(line), seconds)
        sys.stdout.buffer.write(json.dumps(_answer(line)).encode() + b"\n")
        sys.stdout.buffer.flush()
