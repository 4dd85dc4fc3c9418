"""The catalogue of methods.

Every module of :mod:`longdraft.drafters` registers its methods when it is imported. :mod:`longdraft.recipes` chooses
among them.
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
    "DEFAULT_DRAFTERS",
    "DEFAULT_METHODS",
    "METHODS",
    "Method",
    "compose",
    "get_method",
    "methods",
    "register",
]  # fmt: skip

for _module in pkgutil.iter_modules(drafters.__path__):
    importlib.import_module(f"{drafters.__name__}.{_module.name}")
# As lists show them: exact methods without a draft, with one, approximate methods.
for _name in sorted(METHODS, key=lambda name: (not METHODS[name].exact, METHODS[name].needs_draft, name)):
    METHODS[_name] = METHODS.pop(_name)
_BUILT_IN = frozenset(METHODS)


def methods() -> list[dict[str, Any]]:
    """All methods, as ``longdraft methods --json`` prints them.

    One that needs a draft is available if such a draft comes with the package; with a draft folder it always works.
    """
    held = {draft_folder.detect_kind(folder) for folder in shipped.folders()}
    return [
        {
            "name": m.name,
            "exact": m.exact,
            "needs_draft": m.needs_draft,
            "paper": m.paper,
            "available": not m.needs_draft or m.draft_kind in held,
        }
        for m in METHODS.values()
    ]


@values_checked(instead_of=(ValueError, TypeError))
def compose(
    name: str,
    drafter: Callable[..., Drafter],
    schedule: Callable[..., Verifier] = Verifier,
    draft: str | None = None,
    summary: str = "a composition of one's own",
    paper: str = "",
) -> Method:
    """Makes a method from a drafter and a schedule, and registers it. A composition of the same name is replaced.

    Speculator, the bench and the command line know it by its name, a planner sizes its trees, and its output is exact
    if its schedule is.

    Args:
        name: the method's name.
        drafter: builds a fresh drafter for a run. Its keyword parameters are the method's options.
        schedule: builds the schedule; by default the one that verifies on the whole cache. Its keyword parameters are
            options too.
        draft: kind of trained draft that ``drafter`` takes as ``draft``, "longspec" or any other that is registered:
            the shipped one that fits the target, or the folder that a user names.
        summary: what the method does, for the list of methods.
        paper: its paper, for that list.

    Raises:
        RequestError: a name that is taken or not allowed, an unknown kind of draft, or a factory that does not take
            what it is given.
    """
    _check_name(name)
    if draft is not None and draft not in KINDS:
        raise ValueError(f"draft must be one of {', '.join(m for m in METHODS if m in KINDS)}, got {draft!r}")
    own, other = options_of(drafter), options_of(schedule)
    if ("draft" in own) != (draft is not None):
        wanted = f"takes no `draft`, but {draft} was named" if draft else "takes a `draft`: name its kind with draft="
        raise ValueError(f"the drafter of {name} {wanted}")
    if both := {*own} & {*other}:
        raise ValueError(f"drafter and schedule of {name} both have an option {', '.join(sorted(both))}")
    return _register(Method(name, drafter, summary, paper, draft_kind=draft, verifier=schedule))


@values_checked(instead_of=(ValueError, TypeError))
def register(kind: kinds.Kind) -> Method:
    """Registers a kind of trained draft, and the method of its name. One of the same name is replaced.

    Folders of the kind are then drafts like any other. If the kind says how it is trained, ``longdraft train`` has a
    command for it.

    Raises:
        RequestError: a name that is taken or not allowed, or a drafter that takes no ``draft``.
    """
    if not isinstance(kind, kinds.Kind):
        raise TypeError(f"register takes a Kind, got {kind!r}")
    _check_name(kind.name)
    if kind.drafter is None or "draft" not in options_of(kind.drafter):
        raise ValueError(f"the drafter of {kind.name} takes no `draft`")
    return kinds.register(kind)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a method's name is a text, got {name!r}")
    if name in _BUILT_IN:
        raise ValueError(f"{name} is a method of longdraft: give yours another name")
    if not name or any(c in name for c in ":, /="):
        raise ValueError(f"a method's name has no colon, comma, blank, slash or equals sign, got {name!r}")


class _Catalogue(ModuleType):
    """``longdraft.methods`` is this module, and also the function of its name."""

    def __call__(self) -> list[dict[str, Any]]:
        return methods()


sys.modules[__name__].__class__ = _Catalogue
