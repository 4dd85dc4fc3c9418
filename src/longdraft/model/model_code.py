"""The code of a model's modules: what a forward calls, and forwards that call something else in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Code:
    """A class's forward without decorators.

    Attributes:
        function: the function; None if it is not written in Python.
        words: names that it uses: of globals, attributes and methods.
        parameters: names of its parameters, without ``self``.
    """

    function: FunctionType | None
    words: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()

    def calling(self, functions: Mapping[str, Callable[..., Any]]) -> FunctionType:
        """The same forward, with other functions in the place of globals."""
        assert self.function is not None
        own = self.function
        made = FunctionType(
            own.__code__, {**own.__globals__, **functions}, own.__name__, own.__defaults__, own.__closure__
        )
        made.__kwdefaults__ = own.__kwdefaults__
        return made


@cache
def _code(kind: Any) -> Code:
    # A scripted class has none.
    forward = getattr(kind, "forward", None)
    function = None if forward is None else inspect.unwrap(forward)
    if not isinstance(function, FunctionType):
        return Code(None)
    return Code(function, frozenset(function.__code__.co_names), tuple(inspect.signature(function).parameters)[1:])


def own_forward(module: nn.Module) -> Code:
    """The code of a module's class."""
    kind: Any = type(module)
    return _code(kind)


def present_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that :func:`replace_forward` would replace."""
    inside: Callable[..., Any] = vars(module).get("_old_forward") or module.forward
    return inside


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces a forward for good, inside hooks of accelerate if it has some. The module must be of our own copy."""
    name = "_old_forward" if "_old_forward" in vars(module) else "forward"
    vars(module)[name] = forward
