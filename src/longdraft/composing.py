"""Methods of one's own: a drafter and a schedule that no paper put together.

    drafter (what it reads, what tree it grows)  x  schedule (on what it is verified)

What is composed is a method like any other: Speculator, the bench and the command line know it by its name, a planner
sizes its trees, and its output is exact wherever its schedule is. So is a kind of trained draft that the package has
never heard of, once :func:`register` was told how it is read, drafted with and trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from longdraft.drafts import kinds
from longdraft.engine.drafter import Drafter
from longdraft.engine.schedule import Schedule
from longdraft.errors import values_checked
from longdraft.methods import METHODS, Method, of_kind

_BUILT_IN = frozenset(METHODS)


@values_checked(instead_of=(ValueError, TypeError))
def compose(
    name: str,
    drafter: Callable[..., Drafter],
    schedule: Callable[..., Schedule] = Schedule,
    draft: str | None = None,
    summary: str = "a composition of one's own",
    paper: str = "",
) -> Method:
    """Makes a method and registers it. A composition of the same name is replaced.

    Args:
        name: what to call it.
        drafter: builds a fresh drafter for a run. Its keyword parameters are the method's options.
        schedule: builds what verifies; on the whole cache by default. Its parameters are options too.
        draft: kind of trained draft that ``drafter`` takes as ``draft``, "longspec" or any other that is registered:
            the shipped one that fits the target, or the folder that a user names.
        summary, paper: for the list of methods.

    Raises:
        RequestError: the name is that of a method of this package or cannot be one, no such kind of draft, or a factory
            that does not take what it is given.
    """
    _check_name(name)
    if draft is not None and draft not in kinds.KINDS:
        raise ValueError(f"draft must be one of {', '.join(m for m in METHODS if m in kinds.KINDS)}, got {draft!r}")
    takes = "draft" in inspect.signature(drafter).parameters
    if takes != (draft is not None):
        wanted = f"takes no `draft`, but {draft} was named" if draft else "takes a `draft`: name its kind with draft="
        raise ValueError(f"the drafter of {name} {wanted}")
    both = {*inspect.signature(drafter).parameters} & {*inspect.signature(schedule).parameters}
    if both:
        raise ValueError(f"drafter and schedule of {name} both have an option {', '.join(sorted(both))}")
    exact = schedule().exact
    METHODS[name] = Method(name, exact, draft is not None, paper, summary, drafter, draft, schedule)
    return METHODS[name]


@values_checked(instead_of=(ValueError, TypeError))
def register(kind: kinds.Kind) -> Method:
    """Makes a kind of trained draft known, and with it the method of its name. One of the same name is replaced.

    Folders of the kind are then drafts like any other, and ``longdraft train`` has a command for it where it says how
    it is trained.

    Raises:
        RequestError: the name is that of a method of this package or cannot be one, or the drafter takes no ``draft``.
    """
    if not isinstance(kind, kinds.Kind):
        raise TypeError(f"register takes a Kind, got {kind!r}")
    _check_name(kind.name)
    if "draft" not in inspect.signature(kind.drafter).parameters:
        raise ValueError(f"the drafter of {kind.name} takes no `draft`")
    METHODS[kind.name] = of_kind(kinds.register(kind))
    return METHODS[kind.name]


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a method's name is a text, got {name!r}")
    if name in _BUILT_IN:
        raise ValueError(f"{name} is a method of longdraft: give yours another name")
    if not name or any(c in name for c in ":, /="):
        raise ValueError(f"a method's name has no colon, comma, blank, slash or equals sign, got {name!r}")
