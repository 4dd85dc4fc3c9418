"""The named methods: each names the parts that make it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft import drafts
from longdraft.drafters import draft_folder
from longdraft.drafters.base import Draft, Drafter, NoDrafter
from longdraft.drafters.longspec import LongSpecDrafter
from longdraft.drafters.longspec_draft import LongSpecDraft
from longdraft.drafters.ngram import NGramDrafter
from longdraft.errors import CapabilityError, CheckpointError, UnknownMethodError, UnsupportedModelError
from longdraft.target.runner import TargetRunner


@dataclass(frozen=True)
class Method:
    """A recipe.

    Attributes:
        name: what users call it.
        exact: same greedy tokens and same sampling distribution as the target alone.
        needs_draft: drafts with trained weights, from a folder.
        paper: where it comes from.
        summary: one line for the list of methods.
        drafter: builds its drafter from keyword options; where a draft is needed, ``draft`` is one of them.
        load_draft: reads a draft folder; None where none is needed.
    """

    name: str
    exact: bool
    needs_draft: bool
    paper: str
    summary: str
    drafter: Callable[..., Drafter]
    load_draft: Callable[[Path | str], Draft] | None = None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The method's own options by name."""
        parameters = inspect.signature(self.drafter).parameters
        return {name: p for name, p in parameters.items() if not name.startswith("_")}

    def build(self, **options: Any) -> Drafter:
        """A fresh drafter.

        Raises:
            ValueError: for an option that the method does not have, naming those it has.
        """
        self.check_names(options)
        return self.drafter(**options)

    def check_names(self, options: Iterable[str]) -> None:
        """Raises ValueError for an option that the method does not have, naming those it has."""
        if unknown := sorted(set(options) - set(self.options)):
            raise ValueError(
                f"Method {self.name} has no option {', '.join(unknown)}. Its options: "
                f"{', '.join(self.options) or 'none'}."
            )


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
        Method(
            "longspec",
            True,
            True,
            "Yang et al. 2025, LongSpec, arXiv:2502.17421",
            "a trained one-block draft that reads the model's own KV cache, at the same cost for any context",
            LongSpecDrafter,
            LongSpecDraft.load,
        ),
    )
}
# What decodes where nobody names a method: the first that has the given options and whose draft, if it needs one,
# comes with the package for this target.
DEFAULTS = ("longspec", "prompt-lookup")


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


def method_of(folder: Path | str) -> Method:
    """The method that a draft folder is for.

    Raises:
        CheckpointError: not a draft folder, or one for a method that this version does not have.
    """
    kind = draft_folder.kind(folder) or "longspec"  # drafts as LongSpec's authors published them do not say
    found = METHODS.get(kind)
    if found is None or not found.needs_draft:
        raise CheckpointError(f"{folder} holds a draft for {kind!r}, which this version of longdraft does not know.")
    return found


@dataclass(frozen=True)
class Recipe:
    """A method with its options: all that a run's drafter is built from.

    Attributes:
        options: for :meth:`Method.build`, a loaded draft among them where one is needed.
    """

    method: Method
    options: Mapping[str, Any]

    def build(self) -> Drafter:
        """A fresh drafter, for one run."""
        return self.method.build(**self.options)


def asked_for(name: str | Path | None, options: Mapping[str, Any]) -> tuple[Method | None, dict[str, Any]]:
    """The method and the options that a user's words stand for, checked as far as that goes without a target.

    Args:
        name: a method's name or a draft folder; None leaves the choice to :func:`recipe`.
        options: the method's own; a draft folder among them is read.

    Raises:
        UnknownMethodError: neither a method nor a folder.
        CheckpointError: the draft cannot be read.
        ValueError: for an option that the method does not have, or a value it cannot use.
    """
    options = dict(options)
    if isinstance(name, str) and (name in METHODS or not Path(name).is_dir()):
        found: Method | None = method(name)
    elif name is not None:
        options = {"draft": name} | options
        found = method_of(name)
    else:
        given = options.get("draft")
        found = method_of(given) if isinstance(given, str | Path) else None
    if found is not None:
        found.check_names(options)
        if found.load_draft is not None and isinstance(options.get("draft"), str | Path):
            options["draft"] = found.load_draft(options["draft"])
        if not found.needs_draft or options.get("draft") is not None:
            found.build(**options)
    return found, options


def recipe(named: Method | None, options: Mapping[str, Any], runner: TargetRunner) -> Recipe:
    """What to decode a target with.

    Args:
        named, options: as :func:`asked_for` gives them; no method: the first of ``DEFAULTS`` that will do.

    Raises:
        CapabilityError: the method needs a draft, none is given, and none of the shipped ones fits the target.
        CheckpointError: the draft was made for another target.
        UnsupportedModelError: the target takes no trained drafts.
        ValueError: for an option that the method does not have, or a value it cannot use.
    """
    if named is None:
        able = [METHODS[name] for name in DEFAULTS if set(options) <= set(METHODS[name].options)]
        fitting = [m for m in able if not m.needs_draft or "draft" in options or _shipped(m, runner) is not None]
        named = (fitting or able or [METHODS[DEFAULTS[-1]]])[0]
    named.check_names(options)
    if named.load_draft is not None:
        draft = options.get("draft")
        if draft is None:
            draft = named.load_draft(_needed(named, runner))
        draft.bound(runner)  # a draft for another target is refused now
        options = {**options, "draft": draft}
    found = Recipe(named, options)
    found.build()  # and so is a wrong value
    return found


def _needed(needing: Method, runner: TargetRunner) -> Path:
    """The shipped draft of a method for a target."""
    folder = _shipped(needing, runner)
    if folder is None:
        model = runner.parts.description["model_type"]
        raise CapabilityError(
            f"Method {needing.name} needs a draft that was trained for the model, and none comes with longdraft for "
            f"this {model}. Name a draft folder (draft=, or --draft DIR), train one (`longdraft train`), or use "
            "prompt-lookup, which needs none."
        )
    return folder


def _shipped(needing: Method, runner: TargetRunner) -> Path | None:
    """The shipped draft of a method for a target; None for a target that takes none."""
    try:
        folder = drafts.shipped(runner.parts.description)
    except UnsupportedModelError:
        return None
    return folder if folder is not None and method_of(folder) is needing else None


def methods() -> list[dict[str, Any]]:
    """All methods, as ``longdraft methods --json`` prints them.

    One that needs a draft is available when one comes with the package; with a draft folder it always works.
    """
    return [
        {
            "name": m.name,
            "exact": m.exact,
            "needs_draft": m.needs_draft,
            "paper": m.paper,
            "available": not m.needs_draft or any(method_of(folder) is m for folder in drafts.folders()),
        }
        for m in METHODS.values()
    ]
