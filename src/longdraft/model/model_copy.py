"""Copies a model's structure on the same weights, notices changes of it since, and replaces forwards in a copy."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longdraft.errors import UnsupportedModelError
from longdraft.model.called_functions import called_functions, is_library_code

# Attributes of every module: parameters, buffers, children and hooks.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# A model compiled in place calls itself, not its copy.
_LEFT_OUT = "_compiled_call_impl"
# Of a module and of a function that torch.compile made of another one.
_COMPILED, _COMPILED_FUNCTION = "_orig_mod", "_torchdynamo_orig_callable"
# Attributes and settings that our forwards do not depend on.
IGNORED_ATTRIBUTES = frozenset({"training", "generation_config", _LEFT_OUT})
_IGNORED_SETTINGS = frozenset({"_attn_implementation_internal"})
SCALAR_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)
# Depth to which nested lists are searched for modules.
_DEPTH = 3


def copy_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model of new modules, in evaluation mode, that hold the very parameters and buffers of ``model``.

    The new modules refer to each other as the old ones do, also through methods, partial functions and closures that
    replace a ``forward``. Configurations are copied. Everything else is shared, such as the user's hooks.

    Raises:
        UnsupportedModelError: a module cannot be copied.
    """
    name = type(model).__name__
    try:
        return _Copying(model).model.eval()
    except Exception as error:  # an unusual module can raise any type
        raise UnsupportedModelError(
            f"longdraft hosts a copy of a model's structure, and {name}'s cannot be copied ({error})."
        ) from error


def copy_without_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """A copy to try something out with: the user's hooks shall not see made-up tokens. Raises as :func:`copy_model`."""
    copy = copy_model(model)
    for module in copy.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copy


class _Copying:
    """Makes one copy, which is its ``model``."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        # id of an object -> its copy
        self._copies: dict[int, Any] = {id(m): object.__new__(type(m)) for m in modules}
        # What torch.compile wraps takes the wrapper's place: it would be compiled anew for every number of rows.
        for module in reversed(modules):
            if _COMPILED in module._modules:
                self._copies[id(module)] = self._copies[id(module._modules[_COMPILED])]
        for module in modules:
            if _COMPILED in module._modules:
                continue
            own = vars(self._copies[id(module)])
            for name, value in list(vars(module).items()):
                if name == "_modules":
                    own[name] = {n: child if child is None else self._copies[id(child)] for n, child in value.items()}
                elif name in MODULE_ATTRIBUTES:
                    own[name] = value.copy() if isinstance(value, dict | set) else value
                elif name != _LEFT_OUT:
                    own[name] = self._copied(getattr(value, _COMPILED_FUNCTION, value), name == "forward")
        self.model: PreTrainedModel = self._copies[id(model)]

    def _copied(self, value: Any, code: bool, depth: int = 0) -> Any:
        """The value's counterpart in the copy, which is the value itself unless it refers to modules.

        Args:
            code: the value replaces a ``forward``, so its closure is copied too.
        """
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, PretrainedConfig):
            return copy.deepcopy(value, self._copies)
        if isinstance(value, MethodType):
            owner = self._copied(value.__self__, code, depth)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            return self._partial(value, depth)
        if isinstance(value, FunctionType) and code:
            return self._function(value, depth)
        if type(value) in (list, tuple, dict, OrderedDict) and depth < _DEPTH:
            items = list(value.values() if isinstance(value, dict) else value)
            copies = [self._copied(item, False, depth + 1) for item in items]
            if all(a is b for a, b in zip(copies, items, strict=True)):
                return value
            return type(value)(zip(value, copies, strict=True) if isinstance(value, dict) else copies)
        return value

    def _partial(self, value: partial[Any], depth: int) -> Any:
        """accelerate replaces a module's ``forward`` with a partial function."""
        made = partial(
            self._copied(value.func, True, depth),
            *(self._copied(a, False, depth) for a in value.args),
            **{n: self._copied(a, False, depth) for n, a in value.keywords.items()},
        )
        vars(made).update(vars(value))
        return made

    def _function(self, value: FunctionType, depth: int) -> Any:
        self._copies[id(value)] = value  # ends the recursion if it closes over itself
        cells = [self._cell(cell, depth) for cell in value.__closure__ or ()]
        if all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
            return value
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        made.__kwdefaults__ = value.__kwdefaults__
        self._copies[id(value)] = made
        return made

    def _cell(self, cell: CellType, depth: int) -> CellType:
        try:
            inside = cell.cell_contents
        except ValueError:  # still empty
            return cell
        copied = self._copied(inside, depth < _DEPTH, depth + 1)
        return cell if copied is inside else CellType(copied)


def signature(model: PreTrainedModel) -> list[Any]:
    """Everything that a copy depends on, to be compared by :func:`same_signature`.

    That is modules and their types, functions that their forwards call, the storage of parameters and buffers, hooks,
    replaced forwards, attributes and configurations. Writing into a weight in place changes nothing.

    Raises:
        UnsupportedModelError: a module is scripted, so its attributes cannot be read.
    """
    parts: list[Any] = [*called_functions(model).values()]
    known: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{type(model).__name__} has scripted modules, which longdraft cannot host: load it without."
            )
        parts += (module, type(module))
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers"):
                for key, tensor in list(value.items()):
                    parts += (key, tensor, data_ptr_of(tensor), None if tensor is None else tensor.dtype)
            elif name in HOOKS:
                parts += value.values()
            elif name == "_modules":
                parts += value
            elif name not in MODULE_ATTRIBUTES and name not in IGNORED_ATTRIBUTES:
                parts.append(name)
                parts += _described(value, known)
    # A module has one reference as long as it lives. The signature keeps no model alive.
    return [ref(each) if isinstance(each, nn.Module | MethodType) else each for each in parts]


def same_signature(before: list[Any], now: list[Any]) -> bool:
    """True if two signatures describe the same structure."""
    return len(before) == len(now) and all(
        a is b or (type(a) is type(b) and isinstance(a, SCALAR_TYPES) and a == b)
        for a, b in zip(before, now, strict=True)
    )


def _described(value: Any, known: set[int]) -> Iterator[Any]:
    """An attribute's identity or value, and all settings of a configuration."""
    if not isinstance(value, PretrainedConfig):
        yield value
        if type(value) in (list, tuple, dict, OrderedDict):
            items = value.values() if isinstance(value, dict) else value
            # Strings: PEFT appends the names of adapters that it has merged into the weights.
            yield from [item for item in items if isinstance(item, nn.Module | MethodType | str)]
    elif id(value) not in known:
        known.add(id(value))
        yield value
        kept = {name: setting for name, setting in list(vars(value).items()) if name not in _IGNORED_SETTINGS}
        inner = [setting for setting in kept.values() if isinstance(setting, PretrainedConfig)]
        yield repr({name: id(x) if isinstance(x, PretrainedConfig) else x for name, x in kept.items()})
        for each in inner:
            yield from _described(each, known)


def data_ptr_of(tensor: torch.Tensor | None) -> int:
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except RuntimeError:  # a kind of tensor without storage
        return 0


def class_forward(module: nn.Module) -> FunctionType | None:
    """The forward of a module's class, without decorators but a user's; None if it is not written in Python."""
    # A scripted class has none.
    forward: Any = getattr(type(module), "forward", None)
    function = None if forward is None else inspect.unwrap(forward, stop=lambda each: not is_library_code(each))
    return function if isinstance(function, FunctionType) else None


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Names that the forward of a module's class uses: of globals, attributes and methods."""
    own = class_forward(module)
    return frozenset() if own is None else frozenset(own.__code__.co_names)


def with_globals(own: FunctionType, functions: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """The same forward, with other functions in the place of globals."""
    made = FunctionType(own.__code__, {**own.__globals__, **functions}, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def get_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that :func:`replace_forward` would replace."""
    inside: Callable[..., Any] = vars(module).get("_old_forward") or module.forward
    return inside


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces a forward for good, inside hooks of accelerate if it has some. The module must be of our own copy."""
    name = "_old_forward" if "_old_forward" in vars(module) else "forward"
    vars(module)[name] = forward
