"""The named methods: each names the parts that make it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longdraft.drafters.base import Drafter, NoDrafter
from longdraft.drafters.ngram import NGramDrafter
from longdraft.errors import UnknownMethodError


@dataclass(frozen=True)
class Method:
    """A recipe.

    Attributes:
        name: what users call it.
        exact: same greedy tokens and same sampling distribution as the target alone.
        needs_draft: needs a trained draft folder.
        paper: where it comes from.
        summary: one line for the list of methods.
        drafter: builds its drafter from keyword options.
    """

    name: str
    exact: bool
    needs_draft: bool
    paper: str
    summary: str
    drafter: Callable[..., Drafter]

    def build(self, **options: Any) -> Drafter:
        """A fresh drafter.

        Raises:
            ValueError: for an option that the method does not have, naming those it has.
        """
        known = [p for p in inspect.signature(self.drafter).parameters if not p.startswith("_")]
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(
                f"Method {self.name} has no option {', '.join(unknown)}. Its options: {', '.join(known) or 'none'}."
            )
        return self.drafter(**options)


METHODS = {
    m.name: m
    for m in (
        Method("ar", True, False, "", "plain decoding, one token a forward", NoDrafter),
        Method(
            "prompt-lookup",
            True,
            False,
            "Saxena 2023, prompt lookup decoding; Yang et al. 2023, arXiv:2304.04487",
            "drafts what followed the same words before, in prompt or output",
            NGramDrafter,
        ),
    )
}


def method(name: str) -> Method:
    """The method of that name.

    Raises:
        UnknownMethodError: listing the names there are.
    """
    try:
        return METHODS[name]
    except KeyError:
        raise UnknownMethodError(
            f"There is no method {name!r}. Methods: {', '.join(METHODS)}. See `longdraft methods`."
        ) from None


def methods() -> list[dict[str, Any]]:
    """All methods, as ``longdraft methods --json`` prints them."""
    return [
        {
            "name": m.name,
            "exact": m.exact,
            "needs_draft": m.needs_draft,
            "paper": m.paper,
            "available": not m.needs_draft,
        }
        for m in METHODS.values()
    ]
