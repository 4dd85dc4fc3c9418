"""Finds the functions that a model's forward calls, to notice those that a user replaced (monkeypatching)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # attributes of modules
# Functions of these packages are taken as unchanged code. Functions from elsewhere are the user's.
_LIBRARY_PREFIXES = ("longdraft.", "transformers.", "torch.", "accelerate.", "peft.")
_TORCH_NAMESPACES = {"torch.nn.functional": vars(F), "torch": vars(torch), "torch.Tensor": vars(torch.Tensor)}


def is_library_code(function: Any) -> bool:
    """True if a function, method or partial comes from one of the packages in ``_LIBRARY_PREFIXES``."""
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner  # the function that a partial or a method holds
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and _defining_module(function) == "contextlib":  # what @contextmanager made of ``wrapped``
        return is_library_code(wrapped)
    return f"{_defining_module(function)}.".startswith(_LIBRARY_PREFIXES)


def _defining_module(function: Any) -> str:
    """Returns the name of the module in which a function was written.
    ``functools.wraps`` changes a wrapper's ``__module__``, so a Python function's globals tell the module."""
    if isinstance(function, BuiltinFunctionType) and function.__module__ is None:
        return "torch"  # such as torch.rsqrt
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    return str(getattr(function, "__module__", ""))


def called_functions(model: nn.Module) -> dict[str, Any]:
    """Returns dotted name ("torch.nn.functional.silu") -> function, for each function that the forward may call.

    These are methods of the modules' classes, functions in the files of the classes, and torch's functions. If a user
    has replaced a function, its name has the user's function."""
    types = dict.fromkeys(map(type, model.modules()))
    # PreTrainedModel and its base classes compute no outputs.
    classes = dict.fromkeys(c for cls in types for c in cls.__mro__ if not issubclass(PreTrainedModel, c))
    file_namespaces = {c.__module__: vars(file) for c in classes if (file := sys.modules.get(c.__module__)) is not None}
    class_namespaces = {f"{c.__module__}.{c.__qualname__}": vars(c) for c in classes}
    return _reachable(("forward", "__call__"), {**class_namespaces, **file_namespaces, **_TORCH_NAMESPACES})


def functions_called_by(dotted_name: str, function: Any) -> dict[str, Any]:
    """Returns dotted name -> function, for ``function`` and all functions of its file and of torch that it may call."""
    file_namespace = {_defining_module(function): getattr(function, "__globals__", {})}
    return _reachable((dotted_name,), {"": {dotted_name: function}} | file_namespace | _TORCH_NAMESPACES)


def replaced_functions(model: nn.Module) -> list[str]:
    """Describes library functions that a user replaced: "dotted name (repr of the user's function)" for each."""
    called = called_functions(model).items()
    return [f"{n} ({f!r})" for n, f in called if f"{n}.".startswith(_LIBRARY_PREFIXES) and not is_library_code(f)]


def user_code_in(model: nn.Module, include_classes: bool = False) -> list[str]:
    """Returns names of modules with a user's hooks or forwards, and names of library functions that a user replaced.
    ``include_classes``: True adds modules whose class comes from none of the packages that longdraft knows."""
    code_names = replaced_functions(model)
    for name, module in model.named_modules():
        functions = [hook for hooks in HOOKS for hook in getattr(module, hooks).values()]
        # Attributes of a PreTrainedModel other than forward may be functions that its forward does not call.
        # extra_repr, which torchao replaces, only prints.
        attributes = {name: value for name, value in vars(module).items() if name != "extra_repr"}
        values = [attributes.get("forward")] if isinstance(module, PreTrainedModel) else attributes.values()
        functions += [f for f in values if isinstance(f, FunctionType | MethodType | partial)]
        functions += [type(module).forward] if include_classes else []
        code_names += [name or type(module).__name__ for function in functions if not is_library_code(function)]
    return code_names


def _reachable(start_names: Iterable[str], namespaces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns dotted name -> function, for the start names and, recursively, for every name in a function's code.
    It finds too many rather than too few: a name stands for the functions of that name in all namespaces."""
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
                value = getattr(value, "__wrapped__", None)  # the function inside a decorator
    return functions


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:  # which contain the code of nested functions
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
