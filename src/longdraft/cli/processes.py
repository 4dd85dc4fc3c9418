"""A command that several processes run together under torchrun: they share the model, and the first one speaks."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from longdraft.errors import CapabilityError

# Training shares out its data, and says so itself; the last loads no model.
_TOGETHER = ("generate", "bench", "train", "methods")


def num_processes() -> int:
    """The number of processes that run this command together."""
    # Some clusters give each machine's only process a WORLD_SIZE too.
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def is_main_process() -> bool:
    """True for the process that speaks for all."""
    return num_processes() == 1 or int(os.environ.get("RANK", "0")) == 0


def check_verb(verb: str | None) -> None:
    """Raises CapabilityError for a verb that one process runs, if there are several."""
    if num_processes() > 1 and verb is not None and verb not in _TOGETHER:
        raise CapabilityError(
            f"`longdraft {verb}` runs in one process, and {num_processes()} were started: start it without torchrun. "
            "`longdraft generate` and `bench` and Python programs share a model out; vLLM serves one (docs/cluster.md)."
        )


def check_options(given: Mapping[str, object]) -> None:
    """Raises CapabilityError for the first of some options that was given, which one process alone takes."""
    for option in (name for name, value in given.items() if value and num_processes() > 1):
        raise CapabilityError(f"Processes that share a model take no {option}: leave it out.")


def distributed(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb that several processes run together: only the first prints, and none reads the input that all have."""

    @functools.wraps(verb)
    def wrapped(**options: Any) -> None:
        if num_processes() == 1:
            verb(**options)
            return
        with ExitStack() as changed:
            changed.callback(setattr, sys, "stdin", sys.stdin)
            sys.stdin = None
            if not is_main_process():
                nothing = changed.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                changed.enter_context(redirect_stdout(nothing))
                changed.enter_context(redirect_stderr(nothing))
            verb(**options)
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    return wrapped
