"""A method: a drafter, a schedule and their options, under a name. :mod:`longdraft.methods` has the catalogue.

Each method is one entry, registered in the file of its drafter (SpecPV's in :mod:`longdraft.engine.specpv`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from longdraft.engine.drafter import Drafter
from longdraft.engine.verifier import Verifier
from longdraft.model.runner import TargetRunner
from longdraft.options import Option, Options, checked, declared, method_in, option, options_of


@dataclass(frozen=True)
class LookupOptions(Options):
    """Suffix lookup beside a drafter that costs forwards."""

    lookup: bool = option(False, help="also propose tokens by suffix lookup")
    earlier: int = option(0, min=0, help="how many tokens of earlier requests that lookup searches")


@dataclass(frozen=True)
class DrafterOption(Options):
    """The drafter of a method that has none of its own."""

    drafter: str | None = option(help="method whose drafter it takes", usual="the first whose weights are available")


@dataclass(frozen=True, eq=False)
class Method:
    """One entry of the catalogue.

    Attributes:
        name: what users call it.
        drafter: builds its drafter from keyword options, with ``draft`` if it needs trained weights. None if it takes
            the drafter of another method, which the option ``drafter`` names.
        summary, paper: for the list of methods.
        draft_kind: the kind of trained draft it takes: the name of a :class:`~longdraft.drafts.kinds.Kind`.
        verifier: builds the schedule, from keyword options.
        accepts_lookup: suffix lookup can join its drafter. It can join every trained draft.
        is_worthwhile: whether the method is worthwhile on a target, if rounds are planned; for methods chosen by default.
    """

    name: str
    drafter: Callable[..., Drafter] | None
    summary: str
    paper: str = ""
    _: KW_ONLY
    draft_kind: str | None = None
    verifier: Callable[..., Verifier] = Verifier
    accepts_lookup: bool = False
    is_worthwhile: Callable[[TargetRunner], bool] = lambda runner: True

    @cached_property
    def exact(self) -> bool:
        """True for the same greedy tokens and the same sampling distribution as the target alone."""
        return self.verifier().exact

    @property
    def needs_draft(self) -> bool:
        """True if it drafts with trained weights from a folder."""
        return self.draft_kind is not None

    @property
    def drafter_options(self) -> dict[str, Option]:
        """The options of its own drafter."""
        own = {} if self.drafter is None else options_of(self.drafter)
        return own | declared(LookupOptions) if self.needs_draft or self.accepts_lookup else own

    @property
    def verifier_options(self) -> dict[str, Option]:
        """The options of its schedule."""
        return options_of(self.verifier)

    @property
    def drafter_choices(self) -> dict[str, Method]:
        """The methods whose drafters the option ``drafter`` may name."""
        trained = (m.name for m in METHODS.values() if m.needs_draft and m.name == m.draft_kind)
        return {name: METHODS[name] for name in dict.fromkeys([*DEFAULT_DRAFTERS, *trained]) if name in METHODS}

    @property
    def options(self) -> dict[str, Option]:
        """All options by name."""
        own = self.verifier_options
        if self.drafter is not None:
            return own | self.drafter_options
        drafters: dict[str, Option] = {}
        for m in self.drafter_choices.values():
            for name, each in m.drafter_options.items():
                other = drafters.get(name, each)
                if other != each:  # the drafter that is chosen checks a name that has several meanings
                    each = Option(name, aliases=(*other.aliases, *each.aliases))
                drafters[name] = each
        # If both have an option, such as `recent`, the schedule's default stands.
        return own | declared(DrafterOption) | drafters | own

    @property
    def takes_draft(self) -> bool:
        """True if it can use a draft folder."""
        return "draft" in self.options

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options by their official names.

        Raises:
            ValueError: an option that the method does not have, or a value that the option does not take.
        """
        return checked(f"Method {self.name}", options, self.options)


# Drafters for methods without one of their own, in order of preference. The first whose weights are available is used.
DEFAULT_DRAFTERS = (
    "eagle3",
    "longspec",
    "onepass",
    "eagle",
    "small-lm",
    "heads",
    "prompt-lookup",
    "self",
    "triforce",
    "ar",
)
# The default methods, in order. The first that has the given options and is worthwhile on the target is used.
DEFAULT_METHODS = ("self", "longspec", "prompt-lookup")

METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Adds a method to the catalogue. One of the same name is replaced."""
    METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UnknownMethodError: listing the names there are.
    """
    return method_in(METHODS, name)
