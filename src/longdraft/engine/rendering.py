"""Renders chat templates, which are untrusted programs, in a subprocess with limits of time and memory.

The subprocess starts at the first template, renders all templates, and ends with this process. A template that exceeds
a limit ends only the subprocess, and the next template starts another.
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

# Wall time for one rendering: generous, as the machine may be busy.
MAX_WALL_SECONDS = 60
# Limits of the memory that a template takes, in bytes, and of the text that it renders, in characters.
_MAX_MEMORY_BYTES, _MAX_CHARACTERS = 256 << 20, 1 << 22
_EXTRA_PER_INPUT_BYTE = 32  # both limits above grow by this much for each byte of the request


class TemplateRenderer:
    """Renders templates in the subprocess. ``max_cpu_seconds``: CPU time that one rendering may take."""

    def __init__(self, max_cpu_seconds: int = 3) -> None:
        self._max_cpu_seconds = max_cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, template: str, variables: Mapping[str, Any]) -> str:
        """Returns the text that ``template`` renders with ``variables``.
        Raises PromptError if it fails. The message is the rest of a sentence that begins "The chat template ..."."""
        request = json.dumps([template, variables], default=str).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start_process(self._max_cpu_seconds)
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(MAX_WALL_SECONDS, process.kill)
            timer.start()
            try:
                process.stdin.write(request)
                process.stdin.flush()
                response = process.stdout.readline()
            except OSError:
                response = b""
            finally:
                timer.cancel()
            if not response.endswith(b"\n"):
                self.close()
                raise PromptError(
                    f"takes more than {self._max_cpu_seconds} seconds or too much memory (exit {process.poll()})"
                )
        text, problem = json.loads(response)
        if problem is not None:
            raise PromptError(problem)
        return str(text)

    def close(self) -> None:
        """Ends the subprocess. The next rendering starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start_process(max_cpu_seconds: int) -> subprocess.Popen[bytes]:
    # sys.path is set before any import, so that nothing is imported from the working directory.
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({max_cpu_seconds})"
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=devnull, start_new_session=True
    )


render_template = TemplateRenderer()
atexit.register(render_template.close)
if hasattr(os, "register_at_fork"):  # a forked child gets a renderer without the parent's subprocess and pipes
    os.register_at_fork(after_in_child=lambda: render_template.__init__())  # type: ignore[misc]


# --- inside the subprocess ---


class _Generation(jinja2.ext.Extension):
    """Renders the content of the tag ``{% generation %}``, which marks the assistant's answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Parameters of the filter ``tojson`` of transformers, in order.
_JSON_ARGS = ("ensure_ascii", "indent", "separators", "sort_keys")


@lru_cache
def _compile(template: str) -> jinja2.Template:
    """Compiles a template in an environment like transformers', without a loader: it can include no files."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = _to_json
    env.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return env.from_string(template)


def _to_json(x: Any, *args: Any, **kwargs: Any) -> str:
    return json.dumps(x, **{"ensure_ascii": False, **dict(zip(_JSON_ARGS, args, strict=False)), **kwargs})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _set_limits(input_bytes: int, max_cpu_seconds: int) -> None:
    """Limits the memory and CPU time that this process may take from now on, if the system supports it."""
    import resource

    usage, max_memory = resource.getrusage(resource.RUSAGE_SELF), resource.RLIM_INFINITY
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        max_memory = pages * resource.getpagesize() + _MAX_MEMORY_BYTES + _EXTRA_PER_INPUT_BYTE * input_bytes
    cpu_limit = max_cpu_seconds + int(usage.ru_utime + usage.ru_stime) + 1  # + 1 rounds the used time up
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, cpu_limit), (resource.RLIMIT_AS, max_memory)):
        with suppress(OSError, ValueError):  # raised if a lower hard limit is set already
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


def _render(line: bytes) -> tuple[str | None, str | None]:
    """Renders one request. Returns (text, None), or (None, problem)."""
    try:
        template, variables = json.loads(line)
        parts, characters_left = [], _MAX_CHARACTERS + _EXTRA_PER_INPUT_BYTE * len(line)
        for part in _compile(template).generate(variables):
            parts.append(part)
            characters_left -= len(part)
            if characters_left < 0:
                return None, "renders a text that is too long"
        "".join(parts).encode()  # raises if it is not valid Unicode
        return "".join(parts), None
    except MemoryError:
        return None, "takes too much memory"
    except RecursionError:
        return None, "recurses without end"
    except Exception as error:  # a template can raise any type
        reason = str(error)[:1000].encode(errors="replace").decode() or type(error).__name__
        return None, f"refuses these messages: {reason}"


def serve(max_cpu_seconds: int) -> None:
    """Answers requests: reads one from each line of stdin, and writes one line to stdout for it."""
    for line in sys.stdin.buffer:
        with suppress(ImportError):  # Windows has no module resource: only the limit of wall time applies
            _set_limits(len(line), max_cpu_seconds)
        sys.stdout.buffer.write(json.dumps(_render(line)).encode() + b"\n")
        sys.stdout.buffer.flush()
