"""Errors in the words of the command line: flags in the place of the names that Python has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from longdraft.errors import LongdraftError


def flags(names: Iterable[str]) -> dict[str, str]:
    """Names and their flags: rope_factor, --rope-factor."""
    return {name: f"--{name.replace('_', '-')}" for name in names}


_NAMES = (
    "rope_factor", "kv_dtype", "dtype", "device", "weights", "arithmetic", "offload", "plan", "temperature", "top_p",
    "min_p", "repetition_penalty", "repetition_window", "seed", "stop", "draft", "widths", "nodes", "tree", "depth",
    "threshold", "batch",
)  # fmt: skip
_FLAGS = flags(_NAMES) | {"max_new_tokens": "--max-tokens (-n)", "top_k": "--tree-top-k"}

# The name of a flag of sampling too, and of options of methods.
_FIRST = ("top_k",)


def flagged(message: str, names: Mapping[str, str] = _FLAGS) -> str:
    """A message with flags for names.

    A name is told from an English word by its underscore, by a value (device='cpu') or by standing first.
    """
    message = message.replace("(draft=)", "(--draft)")
    for name, flag in names.items():
        if re.search(rf"--?{name}\b|-o {name}=", message):
            continue  # it speaks of the flag already
        message = re.sub(rf"\b{name}='?(\w+)'?", rf"{flag} \1", message)
        anywhere = "_" in name and name not in _FIRST
        message = re.sub(rf"(?<![\w-]){name}(?![\w=-])" if anywhere else rf"^{name}(?= )", flag, message)
    return message


@contextmanager
def in_flags(names: Iterable[str]) -> Iterator[None]:
    """Inside it, our errors are about flags of these names.

    Raises:
        LongdraftError: of the kind it was, with flags in its words.
    """
    try:
        yield
    except LongdraftError as error:
        raise type(error)(flagged(str(error), flags(names))) from error
