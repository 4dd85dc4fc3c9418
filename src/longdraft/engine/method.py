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
from longdraft.options import Option, Options, checked, declared, find_method, option, options_of


@dataclass(frozen=True)
class LookupOptions(Options):
    """Options of suffix lookup, which proposes tokens in addition to a draft model."""

    lookup: bool = option(False, help="also propose tokens by suffix lookup")
    earlier: int = option(0, min=0, help="how many tokens of earlier requests that lookup searches")


@dataclass(frozen=True)
class DrafterOption(Options):
    """The option ``drafter`` of methods that work with any drafter."""

    drafter: str | None = option(help="method whose drafter it takes", usual="the first whose weights are available")


@dataclass(frozen=True, eq=False)
class Method:
    """One entry of the catalogue.

    Attributes:
        name: the name by which users choose the method.
        drafter: builds the drafter from keyword options, with ``draft`` if it needs trained weights; None: the method
            has an option ``drafter``, the name of another method whose drafter is used.
        summary: what the method does, in the list of methods.
        paper: the paper's citation in that list.
        draft_kind: name of the :class:`~longdraft.drafts.kinds.Kind` of trained draft; None: no draft is needed.
        verifier: builds the verifier from keyword options.
        accepts_lookup: the method accepts ``lookup=true``. Methods with a trained draft always do.
        is_worthwhile: whether planned rounds are faster with the method on a target; asked of default methods only.
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
        """True if greedy tokens and the sampling distribution are those of plain decoding."""
        return self.verifier().exact

    @property
    def needs_draft(self) -> bool:
        """True if the method needs trained weights from a draft folder."""
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
        """The methods that the option ``drafter`` accepts: default drafters, and a method for each kind of draft."""
        trained = (m.name for m in METHODS.values() if m.needs_draft and m.name == m.draft_kind)
        return {name: METHODS[name] for name in dict.fromkeys([*DEFAULT_DRAFTERS, *trained]) if name in METHODS}

    @property
    def options(self) -> dict[str, Option]:
        """All options by name."""
        verifier_options = self.verifier_options
        if self.drafter is not None:
            return verifier_options | self.drafter_options
        drafter_options: dict[str, Option] = {}
        for m in self.drafter_choices.values():
            for name, new in m.drafter_options.items():
                previous = drafter_options.get(name, new)
                if previous != new:  # two drafters differ in this option: the chosen drafter checks its value
                    new = Option(name, aliases=(*previous.aliases, *new.aliases))
                drafter_options[name] = new
        # The verifier's options are first in the order, and replace drafters' options of equal names, such as `recent`.
        return verifier_options | declared(DrafterOption) | drafter_options | verifier_options

    @property
    def takes_draft(self) -> bool:
        """True if the method accepts a draft folder, perhaps for the drafter that a user chooses."""
        return "draft" in self.options

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Checks options, and returns them under their official names.

        Raises:
            ValueError: the method has no such option, or the option does not accept the value.
        """
        return checked(f"Method {self.name}", options, self.options)


# Drafters for methods with an option ``drafter``, in order of preference. The first with available weights is used.
DEFAULT_DRAFTERS = (
    "eagle3", "longspec", "onepass", "eagle", "small-lm", "heads", "prompt-lookup", "self", "triforce", "ar",
)  # fmt: skip
# Default methods. The first that accepts the user's options and is worthwhile on the target is used.
DEFAULT_METHODS = ("self", "longspec", "prompt-lookup")

METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Adds a method to the catalogue. It replaces a method of the same name."""
    METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """Returns the method of that name.

    Raises:
        UnknownMethodError: there is none; the message lists the names.
    """
    return find_method(METHODS, name)
