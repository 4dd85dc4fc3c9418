"""Copies a model's modules but not its weights, and replaces forwards in copies."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.model.called_functions import is_library_code

# Attributes that every module has: parameters, buffers, children and hooks.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Attribute for the compiled forward of ``model.compile()``. It is not copied: it would call the original modules.
COMPILED_CALL = "_compiled_call_impl"
# Attributes in which a wrapper of ``torch.compile`` holds the module or function that it wraps.
_COMPILED_MODULE, _COMPILED_FUNCTION = "_orig_mod", "_torchdynamo_orig_callable"
# Containers and closures are searched for modules down to this depth of nesting.
_MAX_DEPTH = 3


def copy_model(model: PreTrainedModel) -> PreTrainedModel:
    """Copies a model's modules, in eval mode. The copies share the parameters and buffers of ``model``.

    In the copy, references between modules point to copies. This covers bound methods, partials, and closures of a
    replaced forward. Configurations are copied. Everything else is shared, such as the user's hooks.

    Raises UnsupportedModelError if a module cannot be copied."""
    name = type(model).__name__
    try:
        return _Copier(model).model.eval()
    except Exception as error:  # an unusual module can raise any type
        raise UnsupportedModelError(
            f"longdraft computes with a copy of a model's modules, and those of {name} cannot be copied ({error})."
        ) from error


def copy_without_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """Copies a model without hooks, for forwards that only probe the model with made-up tokens."""
    copied = copy_model(model)
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied


class _Copier:
    """Makes one copy of a model. The attribute ``model`` is the copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        # id of an original object -> its copy
        self._copies: dict[int, Any] = {id(m): object.__new__(type(m)) for m in modules}
        # A wrapper of torch.compile is replaced by the module it wraps: the wrapper would recompile for each number of
        # tokens. Inner wrappers are resolved first.
        for module in reversed(modules):
            if _COMPILED_MODULE in module._modules:
                self._copies[id(module)] = self._copies[id(module._modules[_COMPILED_MODULE])]
        for module in modules:
            if _COMPILED_MODULE in module._modules:
                continue
            attributes = vars(self._copies[id(module)])
            for name, value in list(vars(module).items()):
                if name == "_modules":
                    children = {key: None if m is None else self._copies[id(m)] for key, m in value.items()}
                    attributes[name] = children
                elif name in MODULE_ATTRIBUTES:
                    attributes[name] = value.copy() if isinstance(value, dict | set) else value
                elif name != COMPILED_CALL:
                    attributes[name] = self._copy(getattr(value, _COMPILED_FUNCTION, value), name == "forward")
        self.model: PreTrainedModel = self._copies[id(model)]

    def _copy(self, value: Any, copy_closure: bool, depth: int = 0) -> Any:
        """Returns an attribute's value for the copied modules: a copy if it refers to modules, else ``value`` itself.

        ``copy_closure``: copy the closure of a function too; True if the value replaces a ``forward``. ``depth``: the
        number of containers and closures around the value."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, PretrainedConfig):
            return copy.deepcopy(value, self._copies)
        if isinstance(value, MethodType):
            bound_object = self._copy(value.__self__, copy_closure, depth)
            return value if bound_object is value.__self__ else MethodType(value.__func__, bound_object)
        if isinstance(value, partial):
            return self._copy_partial(value, depth)
        if isinstance(value, FunctionType) and copy_closure:
            return self._copy_function(value, depth)
        if type(value) in (list, tuple, dict, OrderedDict) and depth < _MAX_DEPTH:
            items = list(value.values() if isinstance(value, dict) else value)
            copies = [self._copy(item, False, depth + 1) for item in items]
            if all(a is b for a, b in zip(copies, items, strict=True)):
                return value
            return type(value)(zip(value, copies, strict=True) if isinstance(value, dict) else copies)
        return value

    def _copy_partial(self, value: partial[Any], depth: int) -> Any:
        """Copies a partial function. accelerate replaces a ``forward`` by a partial function."""
        copied = partial(
            self._copy(value.func, True, depth),
            *(self._copy(a, False, depth) for a in value.args),
            **{n: self._copy(a, False, depth) for n, a in value.keywords.items()},
        )
        vars(copied).update(vars(value))
        return copied

    def _copy_function(self, value: FunctionType, depth: int) -> Any:
        self._copies[id(value)] = value  # ends the recursion if the function closes over itself
        cells = [self._copy_cell(cell, depth) for cell in value.__closure__ or ()]
        if all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
            return value
        copied = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        copied.__kwdefaults__ = value.__kwdefaults__
        self._copies[id(value)] = copied
        return copied

    def _copy_cell(self, cell: CellType, depth: int) -> CellType:
        try:
            contents = cell.cell_contents
        except ValueError:  # the variable has no value yet
            return cell
        copied = self._copy(contents, depth < _MAX_DEPTH, depth + 1)
        return cell if copied is contents else CellType(copied)


def class_forward(module: nn.Module) -> FunctionType | None:
    """Returns the forward of a module's class, without decorators of libraries; None if it is not written in Python."""
    forward: Any = getattr(type(module), "forward", None)  # None for a scripted class
    function = None if forward is None else inspect.unwrap(forward, stop=lambda f: not is_library_code(f))
    return function if isinstance(function, FunctionType) else None


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Returns the names of globals, attributes and methods that the forward of a module's class uses."""
    function = class_forward(module)
    return frozenset() if function is None else frozenset(function.__code__.co_names)


def with_globals(f: FunctionType, replacements: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """Returns a copy of ``f`` that calls other global functions: ``replacements`` has them by name."""
    copied = FunctionType(f.__code__, {**f.__globals__, **replacements}, f.__name__, f.__defaults__, f.__closure__)
    copied.__kwdefaults__ = f.__kwdefaults__
    return copied


def get_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward that :func:`replace_forward` would replace."""
    # accelerate's hooks keep a module's own forward as _old_forward.
    forward: Callable[..., Any] = vars(module).get("_old_forward") or module.forward
    return forward


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces a module's forward, also inside accelerate's hooks. The module must be in our own copy."""
    name = "_old_forward" if "_old_forward" in vars(module) else "forward"
    vars(module)[name] = forward
