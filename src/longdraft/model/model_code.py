"""The code of a model's modules: what a forward calls, and forwards that call something else in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn


@cache
def _forward(kind: Any) -> FunctionType | None:
    # A scripted class has none.
    forward = getattr(kind, "forward", None)
    function = None if forward is None else inspect.unwrap(forward)
    return function if isinstance(function, FunctionType) else None


def own_forward(module: nn.Module) -> FunctionType | None:
    """The forward of a module's class, without decorators; None if it is not written in Python."""
    kind: Any = type(module)
    return _forward(kind)


def words(module: nn.Module) -> frozenset[str]:
    """Names that the forward of a module's class uses: of globals, attributes and methods."""
    own = own_forward(module)
    return frozenset() if own is None else frozenset(own.__code__.co_names)


def calling(own: FunctionType, functions: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """The same forward, with other functions in the place of globals."""
    made = FunctionType(own.__code__, {**own.__globals__, **functions}, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def present_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that :func:`replace_forward` would replace."""
    inside: Callable[..., Any] = vars(module).get("_old_forward") or module.forward
    return inside


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces a forward for good, inside hooks of accelerate if it has some. The module must be of our own copy."""
    name = "_old_forward" if "_old_forward" in vars(module) else "forward"
    vars(module)[name] = forward
