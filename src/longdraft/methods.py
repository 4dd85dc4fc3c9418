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
# The order of lists: exact methods without a draft, exact ones with a draft, approximate ones.
for _name in sorted(METHODS, key=lambda name: (not METHODS[name].exact, METHODS[name].needs_draft, name)):
    METHODS[_name] = METHODS.pop(_name)
_BUILT_IN = frozenset(METHODS)


def methods() -> list[dict[str, Any]]:
    """Lists all methods, as ``longdraft methods --json`` prints them.

    A method is ``available`` if it works without a draft folder: it needs no draft, or one comes with the package.
    """
    shipped_kinds = {draft_folder.detect_kind(folder) for folder in shipped.folders()}
    return [
        {
            "name": m.name,
            "exact": m.exact,
            "needs_draft": m.needs_draft,
            "paper": m.paper,
            "available": not m.needs_draft or m.draft_kind in shipped_kinds,
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
    """Makes a method from a drafter and a verifier, and registers it in place of an earlier method of the same name.

    Speculator, benchmarks and the command line then accept its name, and a planner sizes its trees. Its output is exact
    if its verifier is exact.

    Args:
        name: the method's name.
        drafter: builds a new drafter for a run. Its keyword parameters are the method's options.
        schedule: builds the verifier; by default one that verifies on the full KV cache. Its keyword parameters are
            also options of the method.
        draft: a registered kind of trained draft, such as "longspec". ``drafter`` gets a draft of this kind as
            ``draft``: from the folder that the user names, else the shipped one that fits the target.
        summary: what the method does, for the list of methods.
        paper: the method's paper, for the list of methods.

    Raises:
        RequestError: a name that is taken or not allowed, an unknown kind of draft, or a drafter whose parameters do
            not match ``draft``.
    """
    _check_name(name)
    if draft is not None and draft not in KINDS:
        raise ValueError(f"draft must be one of {', '.join(m for m in METHODS if m in KINDS)}, got {draft!r}")
    drafter_options, verifier_options = options_of(drafter), options_of(schedule)
    if ("draft" in drafter_options) != (draft is not None):
        problem = f"takes no `draft`, but {draft} was named" if draft else "takes a `draft`: name its kind with draft="
        raise ValueError(f"the drafter of {name} {problem}")
    if shared := {*drafter_options} & {*verifier_options}:
        raise ValueError(f"drafter and schedule of {name} both have an option {', '.join(sorted(shared))}")
    return _register(Method(name, drafter, summary, paper, draft_kind=draft, verifier=schedule))


@values_checked(instead_of=(ValueError, TypeError))
def register(kind: kinds.Kind) -> Method:
    """Registers a kind of trained draft, which is also a method, in place of an earlier one of the same name.

    Folders of this kind can then be named wherever a draft can. A kind with ``training`` gets a command of
    ``longdraft train``.

    Raises:
        RequestError: a name that is taken or not allowed, or a drafter without a parameter ``draft``.
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
    if name in _BUILT_IN:
        raise ValueError(f"{name} is a method of longdraft: give yours another name")
    if not name or any(c in name for c in ":, /="):
        raise ValueError(f"a method's name has no colon, comma, blank, slash or equals sign, got {name!r}")


class _Catalogue(ModuleType):
    """Makes this module callable: ``longdraft.methods`` is the module and the function of that name."""

    def __call__(self) -> list[dict[str, Any]]:
        return methods()


sys.modules[__name__].__class__ = _Catalogue
