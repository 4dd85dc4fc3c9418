"""Finds the functions that a model's forward calls, to notice those that a user replaced (monkeypatching)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

# Functions of these packages compute the same in every process.
_LIBRARY_PREFIXES = ("longdraft.", "transformers.", "torch.", "accelerate.", "peft.")
_TORCH_NAMESPACES = {"torch.nn.functional": vars(F), "torch": vars(torch), "torch.Tensor": vars(torch.Tensor)}


def is_library_code(function: Any) -> bool:
    """True if a function, method or partial comes from one of the packages in ``_LIBRARY_PREFIXES``."""
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner  # the function in a partial or a method
    return f"{_defining_module(function)}.".startswith(_LIBRARY_PREFIXES)


def _defining_module(f: Any) -> str:
    """The module in which a function was written. ``functools.wraps`` changes ``__module__``, but not the globals."""
    if isinstance(f, BuiltinFunctionType) and f.__module__ is None:
        return "torch"  # such as torch.rsqrt
    return str(f.__globals__.get("__name__") if isinstance(f, FunctionType) else getattr(f, "__module__", ""))


def called_functions(model: nn.Module) -> dict[str, Any]:
    """Dotted name ("torch.nn.functional.silu") -> function, for each function that the model's forward may call.

    Covers methods of the modules' classes, functions of these classes' files, and torch's functions. Each name has the
    function that it refers to now, which may be a user's."""
    types = dict.fromkeys(map(type, model.modules()))
    # PreTrainedModel and its bases compute nothing.
    classes = dict.fromkeys(c for cls in types for c in cls.__mro__ if not issubclass(PreTrainedModel, c))
    file_namespaces = {c.__module__: vars(file) for c in classes if (file := sys.modules.get(c.__module__)) is not None}
    class_namespaces = {f"{c.__module__}.{c.__qualname__}": vars(c) for c in classes}
    return _reachable(("forward", "__call__"), {**class_namespaces, **file_namespaces, **_TORCH_NAMESPACES})


def functions_called_by(dotted_name: str, function: Any) -> dict[str, Any]:
    """Dotted name -> function, for a function and all that it may call in its file and in torch."""
    file_namespace = {_defining_module(function): getattr(function, "__globals__", {})}
    return _reachable((dotted_name,), {"": {dotted_name: function}} | file_namespace | _TORCH_NAMESPACES)


def replaced_functions(model: nn.Module) -> list[str]:
    """Libraries' functions that a user replaced with other code: "dotted name (the function there now)"."""
    called = called_functions(model).items()
    return [f"{n} ({f!r})" for n, f in called if f"{n}.".startswith(_LIBRARY_PREFIXES) and not is_library_code(f)]


def _reachable(start_names: Iterable[str], namespaces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Dotted name -> function, for the functions with these names and, recursively, with any name in their code.

    More than is called: a name counts in every namespace that has it."""
    functions, names = dict[str, Any](), [*start_names]
    for name in names:  # the list grows inside the loop
        for namespace, members in namespaces.items():
            value = getattr(members.get(name), "__func__", members.get(name))
            if not callable(value) or isinstance(value, type):
                continue
            functions[f"{namespace}.{name}".lstrip(".")] = value
            while value is not None:
                module = _defining_module(value)
                if isinstance(value, FunctionType) and module in namespaces and module not in _TORCH_NAMESPACES:
                    names += [n for n in dict.fromkeys(_names_in(value.__code__)) if n not in names]
                value = getattr(value, "__wrapped__", None)  # what a decorator wraps
    return functions


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:  # functions that the code defines
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
