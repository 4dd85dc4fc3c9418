"""Finds the functions that a model's forward calls, as users can replace them: in a class, a model's file or torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

# Packages whose functions are the same in every process.
_LIBRARIES = ("longdraft.", "transformers.", "torch.", "accelerate.", "peft.")
_TORCH = {"torch.nn.functional": vars(F), "torch": vars(torch), "torch.Tensor": vars(torch.Tensor)}


def is_library_code(code: Any) -> bool:
    """True if a function was written in one of ``_LIBRARIES``, whatever module ``functools.wraps`` claims."""
    while (inner := getattr(code, "func", None) or getattr(code, "__func__", None)) is not None:
        code = inner  # the function in a partial or a method
    return f"{_module_of(code)}.".startswith(_LIBRARIES)


def _module_of(code: Any) -> str:
    """The module in which a function was written."""
    if isinstance(code, BuiltinFunctionType) and code.__module__ is None:
        return "torch"  # such as torch.rsqrt
    name = code.__globals__.get("__name__") if isinstance(code, FunctionType) else getattr(code, "__module__", "")
    return str(name)


def called_functions(model: nn.Module) -> dict[str, Any]:
    """Dotted name ("torch.nn.functional.silu") -> each function that the forwards of a model's classes call now.

    Covers methods of the classes, functions of their files, and torch's."""
    types = dict.fromkeys(map(type, model.modules()))
    classes = dict.fromkeys(c for cls in types for c in cls.__mro__ if not issubclass(PreTrainedModel, c))
    files = {c.__module__: vars(file) for c in classes if (file := sys.modules.get(c.__module__)) is not None}
    methods = {f"{c.__module__}.{c.__qualname__}": vars(c) for c in classes}
    return _reachable(("forward", "__call__"), {**methods, **files, **_TORCH})


def functions_called_by(dotted_name: str, function: Any) -> dict[str, Any]:
    """A function and those that it calls in its file and in torch, as :func:`called_functions` returns them."""
    file = {_module_of(function): getattr(function, "__globals__", {})}
    return _reachable((dotted_name,), {"": {dotted_name: function}} | file | _TORCH)


def replaced_functions(model: nn.Module) -> list[str]:
    """Dotted names in the libraries that hold a function from elsewhere."""
    called = called_functions(model).items()
    return [f"{p} ({f!r})" for p, f in called if f"{p}.".startswith(_LIBRARIES) and not is_library_code(f)]


def _reachable(roots: Iterable[str], namespaces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The functions of these names in all namespaces, and recursively those named in their code: an upper bound."""
    functions, names = dict[str, Any](), [*roots]
    for name in names:  # the list grows
        for namespace, members in namespaces.items():
            value = getattr(members.get(name), "__func__", members.get(name))
            if not callable(value) or isinstance(value, type):
                continue
            functions[f"{namespace}.{name}".lstrip(".")] = value
            while value is not None:
                module = _module_of(value)
                if isinstance(value, FunctionType) and module in namespaces and module not in _TORCH:
                    names += [n for n in dict.fromkeys(_names_in(value.__code__)) if n not in names]
                value = getattr(value, "__wrapped__", None)
    return functions


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
