"""Commands under torchrun: the processes share a model (tensor parallelism), and only the main process prints."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from longdraft.errors import CapabilityError

# Commands that may run under torchrun.
_DISTRIBUTED = ("generate", "bench", "train", "methods")


def num_processes() -> int:
    """Returns the number of processes of this command."""
    # LOCAL_RANK is checked too, because some clusters set WORLD_SIZE for single processes.
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def is_main_process() -> bool:
    """True for the process that prints."""
    return num_processes() == 1 or int(os.environ.get("RANK", "0")) == 0


def check_verb(verb: str | None) -> None:
    """Raises CapabilityError if there are several processes and the command runs only in one."""
    if num_processes() > 1 and verb is not None and verb not in _DISTRIBUTED:
        raise CapabilityError(
            f"`longdraft {verb}` runs in one process, but {num_processes()} were started: start it without torchrun. "
            "`longdraft generate`, `bench` and Python programs may share a model; vLLM serves one (docs/cluster.md)."
        )


def check_options(values: Mapping[str, object]) -> None:
    """Raises CapabilityError if there are several processes and one of these options is set."""
    for option in (name for name, value in values.items() if value and num_processes() > 1):
        raise CapabilityError(f"{option} cannot be used under torchrun: leave it out.")


def distributed(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command run under torchrun: only the main process prints, and no process reads standard input."""

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        if num_processes() == 1:
            command(**options)
            return
        with ExitStack() as stack:
            stack.callback(setattr, sys, "stdin", sys.stdin)
            sys.stdin = None  # prompt_input then reads nothing
            if not is_main_process():
                devnull = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(devnull))
                stack.enter_context(redirect_stderr(devnull))
            command(**options)
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    return wrapped
