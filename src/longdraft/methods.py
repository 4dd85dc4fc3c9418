"""The catalogue of methods.

Each module of :mod:`longdraft.drafters` registers its methods when it is imported. :mod:`longdraft.recipes` chooses a
method for a target.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from longdraft import drafters
from longdraft.drafts import draft_folder, kinds, shipped
from longdraft.drafts.kinds import KINDS
from longdraft.engine import specpv  # noqa: F401 - it registers specpv
from longdraft.engine.drafter import Drafter
from longdraft.engine.method import DEFAULT_DRAFTERS, DEFAULT_METHODS, METHODS, Method, get_method
from longdraft.engine.method import register as _register
from longdraft.engine.verifier import Verifier
from longdraft.errors import values_checked
from longdraft.options import options_of

__all__ = [
    "DEFAULT_DRAFTERS", "DEFAULT_METHODS", "METHODS", "Method", "compose", "get_method", "methods", "register",
]  # fmt: skip

for _module in pkgutil.iter_modules(drafters.__path__):
    importlib.import_module(f"{drafters.__name__}.{_module.name}")
# Lists show exact methods without a draft first, then exact methods with a draft, then approximate methods.
for _name in sorted(METHODS, key=lambda name: (not METHODS[name].exact, METHODS[name].needs_draft, name)):
    METHODS[_name] = METHODS.pop(_name)
_BUILT_IN_NAMES = frozenset(METHODS)


def methods() -> list[dict[str, Any]]:
    """Lists all methods, as ``longdraft methods --json`` prints them.

    A method is ``available`` if the user needs no draft folder: it uses no draft, or a draft comes with longdraft.
    """
    shipped_kinds = {draft_folder.detect_kind(folder) for folder in shipped.folders()}
    return [
        {
            "name": method.name,
            "exact": method.exact,
            "needs_draft": method.needs_draft,
            "paper": method.paper,
            "available": not method.needs_draft or method.draft_kind in shipped_kinds,
        }
        for method in METHODS.values()
    ]


@values_checked(caught_types=(ValueError, TypeError))
def compose(
    name: str,
    drafter: Callable[..., Drafter],
    schedule: Callable[..., Verifier] = Verifier,
    draft: str | None = None,
    summary: str = "a composition of one's own",
    paper: str = "",
) -> Method:
    """Makes a method from a drafter and a verifier, and registers it in place of an earlier method of the same name.

    Speculator, benchmarks and the command line then accept the method's name, and a planner sizes its trees. The output
    is exact if the verifier is exact.

    Args:
        name: the method's name.
        drafter: builds a new drafter for a run. Its keyword parameters are the method's options.
        schedule: builds the verifier; default: a verifier that reads the full KV cache. The keyword parameters of
            ``schedule`` are options of the method too.
        draft: the registered kind of trained draft that the drafter takes as ``draft``, such as "longspec". The draft
            is loaded from the folder that the user names, else from the shipped folder that fits the target.
        summary: what the method does, for the list of methods.
        paper: the method's paper, for the list of methods.

    Raises:
        RequestError: the name is taken or not allowed, the kind of draft is unknown, or the drafter's parameters do not
            match ``draft``.
    """
    _check_name(name)
    if draft is not None and draft not in KINDS:  # listed in the order of METHODS
        raise ValueError(f"draft must be one of {', '.join(kind for kind in METHODS if kind in KINDS)}, got {draft!r}")
    drafter_options, verifier_options = options_of(drafter), options_of(schedule)
    if ("draft" in drafter_options) != (draft is not None):
        problem = f"takes no `draft`, but {draft} was named" if draft else "takes a `draft`: name its kind with draft="
        raise ValueError(f"the drafter of {name} {problem}")
    if duplicates := {*drafter_options} & {*verifier_options}:
        raise ValueError(f"drafter and schedule of {name} both have an option {', '.join(sorted(duplicates))}")
    return _register(Method(name, drafter, summary, paper, draft_kind=draft, verifier=schedule))


@values_checked(caught_types=(ValueError, TypeError))
def register(kind: kinds.Kind) -> Method:
    """Registers a kind of trained draft, which is also a method. It replaces an earlier kind of the same name.

    A draft folder of this kind is then accepted wherever a draft is. ``longdraft train`` gets a command for the kind if
    the kind defines ``training``.

    Raises:
        RequestError: the name is taken or not allowed, or the drafter has no parameter ``draft``.
    """
    if not isinstance(kind, kinds.Kind):
        raise TypeError(f"register takes a Kind, got {kind!r}")
    _check_name(kind.name)
    if kind.drafter is None or "draft" not in options_of(kind.drafter):
        raise ValueError(f"the drafter of {kind.name} takes no `draft`")
    return kinds.register(kind)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a method's name is a string, got {name!r}")
    if name in _BUILT_IN_NAMES:
        raise ValueError(f"{name} is a method of longdraft: give yours another name")
    if not name or any(c in name for c in ":, /="):
        raise ValueError(f"a method's name has no colon, comma, blank, slash or equals sign, got {name!r}")


class _Catalogue(ModuleType):
    """Makes this module callable, because ``longdraft.methods`` is both this module and the function."""

    def __call__(self) -> list[dict[str, Any]]:
        return methods()


sys.modules[__name__].__class__ = _Catalogue
