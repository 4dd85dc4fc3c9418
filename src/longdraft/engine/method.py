"""A method: a drafter, a verifier and their options, under a name. :mod:`longdraft.methods` has the catalogue.

Each method is one entry, registered in the file of its drafter (SpecPV in :mod:`longdraft.engine.specpv`).
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
    """Suffix lookup in addition to a drafter that costs forwards."""

    lookup: bool = option(False, help="also propose tokens by suffix lookup")
    earlier: int = option(0, min=0, help="how many tokens of earlier requests that lookup searches")


@dataclass(frozen=True)
class DrafterOption(Options):
    """The drafter of a method that leaves the choice open."""

    drafter: str | None = option(help="method whose drafter it takes", usual="the first whose weights are available")


@dataclass(frozen=True, eq=False)
class Method:
    """One entry of the catalogue.

    Attributes:
        name: what users call it.
        drafter: builds the drafter from keyword options, with ``draft`` if it needs trained weights. None if the option
            ``drafter`` names another method, whose drafter it uses.
        summary, paper: for the list of methods.
        draft_kind: the kind of trained draft, a name of a :class:`~longdraft.drafts.kinds.Kind`; None without.
        verifier: builds the verifier from keyword options.
        accepts_lookup: the method accepts ``lookup=true``. Methods with a trained draft always do.
        is_worthwhile: for default methods: whether planned rounds are faster with it on a target.
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
        """True if greedy tokens and the sampling distribution are those of the target alone."""
        return self.verifier().exact

    @property
    def needs_draft(self) -> bool:
        """True if it needs trained weights from a draft folder."""
        return self.draft_kind is not None

    @property
    def drafter_options(self) -> dict[str, Option]:
        """The options of the drafter."""
        options = {} if self.drafter is None else options_of(self.drafter)
        return options | declared(LookupOptions) if self.needs_draft or self.accepts_lookup else options

    @property
    def verifier_options(self) -> dict[str, Option]:
        """The options of the verifier."""
        return options_of(self.verifier)

    @property
    def drafter_choices(self) -> dict[str, Method]:
        """The methods that the option ``drafter`` accepts."""
        trained = (m.name for m in METHODS.values() if m.needs_draft and m.name == m.draft_kind)
        return {name: METHODS[name] for name in dict.fromkeys([*DEFAULT_DRAFTERS, *trained]) if name in METHODS}

    @property
    def options(self) -> dict[str, Option]:
        """All options by name."""
        verifier_options = self.verifier_options
        if self.drafter is not None:
            return verifier_options | self.drafter_options
        drafters: dict[str, Option] = {}
        for m in self.drafter_choices.values():
            for name, new in m.drafter_options.items():
                known = drafters.get(name, new)
                if known != new:  # options of one name that differ are checked by the drafter itself
                    new = Option(name, aliases=(*known.aliases, *new.aliases))
                drafters[name] = new
        # An option of both, such as `recent`, has the verifier's default.
        return verifier_options | declared(DrafterOption) | drafters | verifier_options

    @property
    def takes_draft(self) -> bool:
        """True if it accepts a draft folder."""
        return "draft" in self.options

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Checks options, and returns them under their official names.

        Raises:
            ValueError: the method has no such option, or the option does not accept the value.
        """
        return checked(f"Method {self.name}", options, self.options)


# Drafters for methods that leave the choice open, in order of preference. The first with available weights is used.
DEFAULT_DRAFTERS = (
    "eagle3", "longspec", "onepass", "eagle", "small-lm", "heads", "prompt-lookup", "self", "triforce", "ar",
)  # fmt: skip
# Default methods, in order. The first that has the user's options and is worthwhile on the target is used.
DEFAULT_METHODS = ("self", "longspec", "prompt-lookup")

METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Adds a method to the catalogue, in place of one of the same name."""
    METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """Returns the method of that name.

    Raises:
        UnknownMethodError: listing the names there are.
    """
    return method_in(METHODS, name)
