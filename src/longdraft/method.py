"""Describes a method: a drafter, a verifier and their options; :mod:`longdraft.registry` holds the table of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from longdraft.engine.drafter import Drafter
from longdraft.engine.verifier import Verifier
from longdraft.model.runner import TargetRunner
from longdraft.options import Option, Options, checked, declared, option, options_of


@dataclass(frozen=True)
class LookupOptions(Options):
    """Options of a suffix lookup that proposes tokens in addition to a draft model."""

    lookup: bool = option(False, help="also propose tokens by suffix lookup")
    earlier: int = option(0, min=0, help="how many tokens of earlier requests that lookup searches")


@dataclass(frozen=True)
class DrafterOption(Options):
    """The option ``drafter`` of methods without a drafter of their own: the name of another method."""

    drafter: str | None = option(help="method whose drafter it takes", usual="the first whose weights are available")


@dataclass(frozen=True, eq=False)
class Method:
    """A drafter, a verifier and their options, under a name.

    Attributes:
        name: the name by which users choose the method.
        drafter: function that builds the drafter from keyword options, and from the folder ``draft`` if the drafter
            needs trained weights; None: the option ``drafter`` names another method, and that method's drafter is used.
        drafter_choices: returns the methods that the option ``drafter`` accepts; for a method without a drafter.
        summary: what the method does, in the list of methods.
        paper: the paper's citation, in the list of methods.
        draft_kind: name of the :class:`~longdraft.drafts.kinds.Kind` of trained draft; None: no draft is needed.
        verifier: function that builds the verifier from keyword options.
        accepts_lookup: True if the method accepts ``lookup=true``. Methods with a trained draft always accept it.
        is_worthwhile: returns whether the method speeds up a target if a planner sizes its trees; None: it is a
            default without a planner too. Used only for the methods of DEFAULT_METHODS.
    """

    name: str
    drafter: Callable[..., Drafter] | None
    summary: str
    paper: str = ""
    _: KW_ONLY
    drafter_choices: Callable[[], Mapping[str, Method]] = dict
    draft_kind: str | None = None
    verifier: Callable[..., Verifier] = Verifier
    accepts_lookup: bool = False
    is_worthwhile: Callable[[TargetRunner], bool] | None = None

    @cached_property
    def exact(self) -> bool:
        """True if greedy tokens and the sampling distribution equal those of plain decoding."""
        return self.verifier().exact

    @property
    def needs_draft(self) -> bool:
        """True if the method needs trained weights from a draft folder."""
        return self.draft_kind is not None

    @property
    def drafter_options(self) -> dict[str, Option]:
        """The options of the method's own drafter; empty without one."""
        options = {} if self.drafter is None else options_of(self.drafter)
        return options | declared(LookupOptions) if self.needs_draft or self.accepts_lookup else options

    @property
    def verifier_options(self) -> dict[str, Option]:
        """The options of the verifier."""
        return options_of(self.verifier)

    @property
    def options(self) -> dict[str, Option]:
        """All options by name."""
        verifier_options = self.verifier_options
        if self.drafter is not None:
            return verifier_options | self.drafter_options
        drafter_options: dict[str, Option] = {}
        for m in self.drafter_choices().values():
            for name, current in m.drafter_options.items():
                previous = drafter_options.get(name, current)
                if previous != current:  # the drafters disagree on this option, so the chosen drafter checks the value
                    current = Option(name, aliases=(*previous.aliases, *current.aliases))
                drafter_options[name] = current
        # verifier_options is first for the order in lists, and last to replace drafter options with an equal name.
        return verifier_options | declared(DrafterOption) | drafter_options | verifier_options

    @property
    def takes_draft(self) -> bool:
        """True if the method accepts a draft folder: for its own drafter, or for the drafter that the user chooses."""
        return "draft" in self.options

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Checks options, and returns a dict from their official names to the values.

        Raises:
            ValueError: the method has no such option, or the option does not accept the value.
        """
        return checked(f"Method {self.name}", options, self.options)
