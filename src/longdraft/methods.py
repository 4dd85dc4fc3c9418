"""The named methods: each names the parts that make it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longdraft import drafts
from longdraft.drafters import draft_folder
from longdraft.drafters.base import Draft, Drafter, NoDrafter
from longdraft.drafters.eagle3 import Eagle3Drafter
from longdraft.drafters.eagle3_draft import Eagle3Draft
from longdraft.drafters.longspec import LongSpecDrafter
from longdraft.drafters.longspec_draft import LongSpecDraft
from longdraft.drafters.ngram import NGramDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.small_lm_draft import SmallLMDraft
from longdraft.errors import CapabilityError, CheckpointError, UnknownMethodError, UnsupportedModelError
from longdraft.kv.partial import PartialLayout
from longdraft.target.runner import TargetRunner
from longdraft.verify.schedule import Schedule
from longdraft.verify.specpv import ExactSpecPV, SpecPV


@dataclass(frozen=True)
class Method:
    """A recipe.

    Attributes:
        name: what users call it.
        exact: same greedy tokens and same sampling distribution as the target alone.
        needs_draft: drafts with trained weights, from a folder.
        paper: where it comes from.
        summary: one line for the list of methods.
        drafter: builds its drafter from keyword options; where a draft is needed, ``draft`` is one of them. None: it
            takes any other method's, which the option ``drafter`` names.
        load_draft: reads a draft folder; None where none is needed.
        draft_kind: which folders it reads, as they name their drafter; several methods may read the same.
        schedule: builds what verifies, from keyword options of its own.
    """

    name: str
    exact: bool
    needs_draft: bool
    paper: str
    summary: str
    drafter: Callable[..., Drafter] | None
    load_draft: Callable[[Path | str], Draft] | None = None
    draft_kind: str | None = None
    schedule: Callable[..., Schedule] = Schedule

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The method's own options by name."""
        if self.drafter is not None:
            return self.drafter_options
        inner = {name: p for each in DRAFTING for name, p in METHODS[each].drafter_options.items()}
        # Of options that both have, such as `recent`, the schedule's defaults are the method's.
        return self.schedule_options | {"drafter": _DRAFTER} | inner | self.schedule_options

    @property
    def drafter_options(self) -> dict[str, inspect.Parameter]:
        """Those that its drafter takes."""
        return _parameters(self.drafter) if self.drafter is not None else {}

    @property
    def schedule_options(self) -> dict[str, inspect.Parameter]:
        """Those that its schedule takes."""
        return _parameters(self.schedule)

    @property
    def takes_draft(self) -> bool:
        """Whether a draft folder means anything to it."""
        return "draft" in self.options

    def check_names(self, options: Iterable[str]) -> None:
        """Raises ValueError for an option that the method does not have, naming those it has."""
        if unknown := sorted(set(options) - set(self.options)):
            raise ValueError(
                f"Method {self.name} has no option {', '.join(unknown)}. Its options: "
                f"{', '.join(self.options) or 'none'}."
            )


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(factory).parameters.items() if not name.startswith("_")}


def _specpv(
    kind: type[SpecPV], budget: int = 1024, selector: str = "minmax", reduction: str = "mean", margin: int = 20,
    sink: int = 32, recent: int = 128, block: int = 16,
) -> SpecPV:  # fmt: skip
    """A schedule from a method's options: :class:`PartialLayout`'s, with ``recent`` for its window."""
    return kind(PartialLayout(budget, sink, recent, block, margin, selector, reduction))


_DRAFTER = inspect.Parameter("drafter", inspect.Parameter.KEYWORD_ONLY, default=None)
_SPECPV = "Tan et al. 2025, SpecPV, arXiv:2512.02337"

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
            "longspec",
        ),
        Method(
            "eagle3",
            True,
            True,
            "Li et al. 2025, EAGLE-3, arXiv:2503.01840",
            "a trained one-layer draft that reads the model's hidden states; published drafts load as they are",
            Eagle3Drafter,
            Eagle3Draft.load,
            "eagle3",
        ),
        Method(
            "small-lm",
            True,
            True,
            "Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
            "a small language model with the model's vocabulary, on all of the text or on a part of it",
            SmallLMDrafter,
            SmallLMDraft.load,
            "small-lm",
        ),
        Method(
            "specextend",
            True,
            True,
            "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
            "a small language model that sees the chunks of a long text which the model attends to",
            partial(SmallLMDrafter, view="retrieval"),  # and so an OPT-Tree
            SmallLMDraft.load,
            "small-lm",
        ),
        Method(
            "specextend-eagle3",
            True,
            True,
            "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
            "EAGLE-3 that sees the chunks of a long text which the model attends to, at positions it knows",
            partial(Eagle3Drafter, retrieval=True),  # and so an OPT-Tree
            Eagle3Draft.load,
            "eagle3",
        ),
        Method(
            "specpv",
            False,
            False,
            _SPECPV,
            "verifies on the part of a long context that matters, and on all of it every few rounds; any drafter",
            None,
            schedule=partial(_specpv, SpecPV),
        ),
        Method(
            "specpv-exact",
            True,
            False,
            f"ours, after {_SPECPV}",
            "the same, but nothing is emitted before a full pass has confirmed it",
            None,
            schedule=partial(_specpv, ExactSpecPV),
        ),
    )
}
# What decodes where nobody names a method: the first that has the given options and whose draft, if it needs one,
# comes with the package for this target.
DEFAULTS = ("longspec", "prompt-lookup")
# Whose drafter a method takes that has none of its own: the first whose draft, if it needs one, is there.
DRAFTING = ("eagle3", "longspec", "small-lm", "prompt-lookup", "ar")


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
    # Drafts as LongSpec's authors published them do not say.
    kind = draft_folder.kind(folder) or ("small-lm" if draft_folder.is_language_model(folder) else "longspec")
    found = METHODS.get(kind)
    if found is None or not found.needs_draft:
        raise CheckpointError(f"{folder} holds a draft for {kind!r}, which this version of longdraft does not know.")
    return found


@dataclass(frozen=True)
class Recipe:
    """A method with its options: all that a run's parts are built from.

    Attributes:
        drafting: the method whose drafter it takes; as a rule itself.
        options: the method's own and the drafter's, a loaded draft among them where one is needed.
    """

    method: Method
    drafting: Method
    options: Mapping[str, Any]

    def drafter(self) -> Drafter:
        """A fresh drafter, for one run."""
        assert self.drafting.drafter is not None
        return self.drafting.drafter(**self._of(self.drafting.drafter_options))

    def schedule(self) -> Schedule:
        """What verifies, for one run."""
        return self.method.schedule(**self._of(self.method.schedule_options))

    @property
    def can_be_planned(self) -> bool:
        """Whether trees of any size do: something drafts, and every verification is a full one."""
        return self.drafting.drafter is not NoDrafter and self.method.schedule is Schedule

    def _of(self, known: Iterable[str]) -> dict[str, Any]:
        return {name: self.options[name] for name in known if name in self.options}


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
        # A draft that has been read knows whose it is.
        found = method_of(given) if isinstance(given, str | Path) else METHODS[given.kind] if given else None
    if found is not None:
        found.check_names(options)
        if found.takes_draft and isinstance(options.get("draft"), str | Path):
            load = found.load_draft or method_of(options["draft"]).load_draft
            assert load is not None
            options["draft"] = load(options["draft"])
        draft = options.get("draft")
        if draft is not None and found.draft_kind not in (None, draft.kind):
            raise CheckpointError(f"{draft.folder} holds a draft for {draft.kind}, not for {found.draft_kind}.")
        drafting = _drafting(found, options, None)
        if not drafting.needs_draft or options.get("draft") is not None:
            _checked(found, drafting, options)
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
        named = next((m for m in able if _ready(m, options, runner)), (able or [METHODS[DEFAULTS[-1]]])[0])
    named.check_names(options)
    drafting = _drafting(named, options, runner)
    if drafting.load_draft is not None:
        draft = options.get("draft")
        if draft is None:
            draft = drafting.load_draft(_needed(drafting, runner))
        draft.bound(runner)  # a draft for another target is refused now
        options = {**options, "draft": draft}
    return _checked(named, drafting, options)  # and so is a wrong value


def _checked(named: Method, drafting: Method, options: Mapping[str, Any]) -> Recipe:
    """A recipe whose parts have been built once.

    Raises:
        ValueError: for an option that neither method nor drafter has, or a value it cannot use.
    """
    known = {*drafting.drafter_options, *named.schedule_options, "drafter"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"Method {named.name} drafts as {drafting.name} does, which has no option {', '.join(unknown)}. "
            f"Its options: {', '.join(drafting.drafter_options) or 'none'}."
        )
    found = Recipe(named, drafting, options)
    found.drafter()
    found.schedule()
    return found


def _drafting(named: Method, options: Mapping[str, Any], runner: TargetRunner | None) -> Method:
    """The method whose drafter a method takes.

    Args:
        runner: the target; None: there is none yet, and shipped drafts are not looked for.

    Raises:
        ValueError: the option ``drafter`` names no method that drafts by itself, or the draft is of another kind.
    """
    if named.drafter is not None:
        return named
    draft = options.get("draft")
    kind = None if draft is None else draft.kind
    name = options.get("drafter") or kind
    if name is not None:
        if name not in DRAFTING:
            raise ValueError(f"drafter must be one of {', '.join(DRAFTING)}, got {name!r}")
        if kind is not None and kind != name:
            raise ValueError(f"the draft is for {kind}, not for {name}: leave drafter out, or name another draft")
        return METHODS[name]
    own = set(options) - set(named.schedule_options) - {"drafter"}
    able = [m for m in (METHODS[each] for each in DRAFTING) if own <= set(m.drafter_options)]
    ready = (m for m in able if runner is None or _ready(m, options, runner))
    return next(ready, METHODS[DRAFTING[-1]])


def _ready(m: Method, options: Mapping[str, Any], runner: TargetRunner) -> bool:
    """Whether a method has the draft it needs, if it needs one."""
    return not m.needs_draft or "draft" in options or _shipped(m, runner) is not None


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
        return drafts.shipped(runner.parts.description, needing.draft_kind)
    except UnsupportedModelError:
        return None


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
            "available": not m.needs_draft or any(draft_folder.kind(f) == m.draft_kind for f in drafts.folders()),
        }
        for m in METHODS.values()
    ]
