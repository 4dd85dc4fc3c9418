"""Functions in processes of their own, which cost next to nothing: torch and transformers are imported once for all.

They are forked from a process that has imported what they need and computed nothing, so none has threads or an autograd
engine that a fork would break.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
if os.name == "posix":
    _CONTEXT.set_forkserver_preload(["longdraft.cli.main", "tests.training.worker"])


def start(said: Path, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Calls a function of a module in another process.

    Args:
        said: a file for what it prints, errors and tracebacks too.
    """
    process = _CONTEXT.Process(target=_quietly, args=(said, function, *arguments))
    process.start()
    return process


def _quietly(said: Path, function: Callable[..., None], *arguments: Any) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)


def ended(process: BaseProcess, seconds: float) -> int:
    """Exit status, minus the signal if one ended it; fails where it does not end."""
    process.join(seconds)
    late = process.exitcode is None
    process.kill()
    process.join()
    assert not late, f"still running after {seconds} seconds"
    return int(process.exitcode or 0)
