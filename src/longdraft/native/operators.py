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
from longdraft.native.header import FUNCTIONS

_LIBRARY = torch.library.Library("longdraft", "DEF")
_numbers = itertools.count()
# The call of each operator in progress, by number: an operator's arguments can only be tensors and numbers.
_calls: dict[int, Callable[[], None]] = {}


def _run(tensors: list[torch.Tensor], call: int) -> None:
    _calls.pop(call)()


for _name in FUNCTIONS:
    _LIBRARY.define(f"{_name}(Tensor[] tensors, int call) -> ()")
    _LIBRARY.impl(_name, _run, "CPU")


class Functions:
    """The functions of the compiled library, by the names of :data:`~longdraft.native.header.FUNCTIONS`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[str, Callable[..., None]] = {}
        for name, arguments in FUNCTIONS.items():
            function = getattr(library, f"longdraft_{name}")
            function.restype, function.argtypes, function.errcheck = ctypes.c_int, arguments, _checked
            self._functions[name] = function

    def __call__(self, name: str, tensors: Sequence[torch.Tensor], *arguments: Any) -> None:
        """Calls a function with torch's number of threads, its last argument.

        Args:
            tensors: tensors that it reads and writes; a profiler may show their shapes.

        Raises:
            MemoryBudgetError: it got no memory to work in.
        """
        arguments = *arguments, torch.get_num_threads()
        if not torch._C._autograd._profiler_enabled():
            self._functions[name](*arguments)
            return
        number = next(_numbers)
        _calls[number] = partial(self._functions[name], *arguments)
        getattr(torch.ops.longdraft, name)(list(tensors), number)


def _checked(code: int, function: Any, arguments: Any) -> None:
    if code:
        raise MemoryBudgetError(
            "A kernel got no memory to work in: the limit of this process, or the machine's memory, is reached. "
            "Shorten the prompt or lower the batch, use fewer threads, or raise the limit (ulimit -v)."
        )
