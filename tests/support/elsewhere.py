"""Runs functions in other processes at little cost: torch and transformers are imported only once.

The processes are forked from one that has imported them and computed nothing, so it has no threads and no autograd
engine that a fork would break.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
if os.name == "posix":
    _CONTEXT.set_forkserver_preload(["longdraft.cli.main", "longdraft.speculator", "tests.training.worker"])


def start(output: Path, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Calls a function of a module in another process.

    Args:
        output: a file for stdout and stderr.
    """
    process = _CONTEXT.Process(target=_redirected, args=(output, function, *arguments))
    process.start()
    return process


def _redirected(output: Path, function: Callable[..., None], *arguments: Any) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)


def start_at_terminal(name: str, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Calls a function of a module in another process, in the foreground of a terminal."""
    process = _CONTEXT.Process(target=_in_the_foreground, args=(name, function, *arguments))
    process.start()
    return process


def _in_the_foreground(name: str, function: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # the session's first terminal becomes its controlling one: it sends Ctrl-C
    for number in range(3):
        os.dup2(terminal, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    for variable in ("COLUMNS", "LINES", "NO_COLOR"):
        os.environ.pop(variable, None)
    os.environ["TERM"] = "xterm"
    function(*arguments)


def command(*words: str) -> None:
    """Runs longdraft's command line, for :func:`start` and :func:`start_at_terminal`; 200 columns without terminal."""
    from longdraft.cli.main import main

    if not sys.stdout.isatty():
        os.environ["COLUMNS"] = "200"
    raise SystemExit(main(words))


def wait_for_exit(process: BaseProcess, seconds: float) -> int:
    """Waits for a process and returns its exit status (minus the signal that ended it). Fails after ``seconds``."""
    process.join(seconds)
    timed_out = process.exitcode is None
    process.kill()
    process.join()
    assert not timed_out, f"still running after {seconds} seconds"
    return int(process.exitcode or 0)
