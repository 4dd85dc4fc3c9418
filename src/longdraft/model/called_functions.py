"""The functions that a model's forward calls. Users replace them: in a class, in the model's file, in torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

# Packages whose functions do the same in every process.
_KNOWN = ("longdraft.", "transformers.", "torch.", "accelerate.", "peft.")
_TORCH = {"torch.nn.functional": vars(F), "torch": vars(torch), "torch.Tensor": vars(torch.Tensor)}


def is_library_code(code: Any) -> bool:
    """True if a function is of one of the packages that we know, whatever ``functools.wraps`` says that it is."""
    while (inside := getattr(code, "func", None) or getattr(code, "__func__", None)) is not None:
        code = inside  # of a partial function, of a method
    return f"{_home(code)}.".startswith(_KNOWN)


def _home(code: Any) -> str:
    """The module in which a function was written."""
    if isinstance(code, BuiltinFunctionType) and code.__module__ is None:
        return "torch"  # torch.rsqrt and its like
    own = code.__globals__.get("__name__") if isinstance(code, FunctionType) else getattr(code, "__module__", "")
    return str(own)


def called_functions(model: nn.Module) -> dict[str, Any]:
    """Returns the functions that the forwards of a model's classes call now, by place ("torch.nn.functional.silu"):
    methods of the classes, functions of their files and of torch."""
    kinds = dict.fromkeys(map(type, model.modules()))
    classes = dict.fromkeys(c for kind in kinds for c in kind.__mro__ if not issubclass(PreTrainedModel, c))
    files = {c.__module__: vars(file) for c in classes if (file := sys.modules.get(c.__module__)) is not None}
    own = {f"{c.__module__}.{c.__qualname__}": vars(c) for c in classes}
    return _reached(("forward", "__call__"), {**own, **files, **_TORCH})


def functions_called_by(place: str, function: Any) -> dict[str, Any]:
    """A function and what it calls in its file and in torch, as :func:`called_functions` returns them."""
    return _reached((place,), {"": {place: function}, _home(function): getattr(function, "__globals__", {})} | _TORCH)


def replaced_functions(model: nn.Module) -> list[str]:
    """Places in the packages that we know where a function is that none of them wrote."""
    return [
        f"{p} ({f!r})"
        for p, f in called_functions(model).items()
        if f"{p}.".startswith(_KNOWN) and not is_library_code(f)
    ]


def _reached(first: Iterable[str], spaces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the functions that names lead to in all of the spaces, and on from the names in their code: if in doubt,
    too many."""
    found, names = dict[str, Any](), [*first]
    for name in names:  # which grows
        for space, own in spaces.items():
            value = getattr(own.get(name), "__func__", own.get(name))
            if not callable(value) or isinstance(value, type):
                continue
            found[f"{space}.{name}".lstrip(".")] = value
            while value is not None:
                if isinstance(value, FunctionType) and (home := _home(value)) in spaces and home not in _TORCH:
                    names += [each for each in dict.fromkeys(_names(value.__code__)) if each not in names]
                value = getattr(value, "__wrapped__", None)
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _names(inside)
