"""Calls the kernels as operators of torch, such as ``longdraft::stack``, so that torch's profilers show their names.

Without a profiler a kernel is called directly, because an operator takes as long as a small product.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from longdraft.errors import MemoryBudgetError

NAMES = (
    *("linear", "unpack", "attend", "attend_chunk", "stack", "draft"),
    *("summarise", "choose", "copy_view", "copy_rows", "recur", "convolve", "experts"),
)

_LIBRARY = torch.library.Library("longdraft", "DEF")
_numbers = itertools.count()
# The call of each operator in progress, by number: an operator's arguments can only be tensors and numbers.
_calls: dict[int, Callable[[], None]] = {}


def _run(tensors: list[torch.Tensor], call: int) -> None:
    _calls.pop(call)()


for _name in NAMES:
    _LIBRARY.define(f"{_name}(Tensor[] tensors, int call) -> ()")
    _LIBRARY.impl(_name, _run, "CPU")


def declared(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., None]:
    """A function of the compiled library, with the types of its arguments.

    It raises MemoryBudgetError where the library's returns its only error code.
    """
    function = getattr(library, f"longdraft_{name}")
    function.restype, function.argtypes, function.errcheck = ctypes.c_int, list(arguments), _checked
    typed: Callable[..., None] = function
    return typed


def _checked(code: int, function: Any, arguments: Any) -> None:
    if code:
        raise MemoryBudgetError(
            "A kernel got no memory to work in: the limit of this process, or the machine's memory, is reached. "
            "Shorten the prompt or lower the batch, use fewer threads, or raise the limit (ulimit -v)."
        )


def launch(name: str, tensors: Sequence[torch.Tensor], function: Callable[..., None], *arguments: Any) -> None:
    """Calls a kernel.

    Args:
        name: one of :data:`NAMES`.
        tensors: tensors that it reads and writes; a profiler may show their shapes.
        function, arguments: the function of the compiled library, and its arguments.
    """
    if not torch._C._autograd._profiler_enabled():
        function(*arguments)
        return
    number = next(_numbers)
    _calls[number] = partial(function, *arguments)
    getattr(torch.ops.longdraft, name)(list(tensors), number)
