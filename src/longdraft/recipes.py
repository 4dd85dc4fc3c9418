"""From a user's words to the parts of a run: which method, with which draft and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.arguments import meant
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.suffixes import Earlier
from longdraft.drafters.united import UnitedDrafter
from longdraft.drafts import shipped
from longdraft.drafts.draft import Draft
from longdraft.drafts.kinds import KINDS, kind_of
from longdraft.engine.drafter import Drafter, NoDrafter
from longdraft.engine.schedule import Schedule
from longdraft.errors import CapabilityError, CheckpointError, UnsupportedModelError
from longdraft.folders import is_gguf
from longdraft.methods import DEFAULTS, DRAFTING, METHODS, Method, method, method_of
from longdraft.model.runner import TargetRunner


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
        options = self._of(self.drafting.drafter_options)
        lookup, earlier = False, 0
        if "lookup" in self.drafting.drafter_options:
            lookup, earlier = options.pop("lookup", lookup), options.pop("earlier", earlier)
            if not isinstance(lookup, bool):
                raise ValueError(f"lookup must be True or False, got {lookup!r}")
            if earlier and not lookup:
                raise ValueError("earlier is for lookups: give lookup=true too, or leave it out")
        made = self.drafting.drafter(**options)
        made = UnitedDrafter(SuffixDrafter(earlier=earlier), made) if lookup else made
        return made if self.method.wraps is None else self.method.wraps(made, **self._of(self.method.wrap_options))

    def schedule(self) -> Schedule:
        """What verifies, for one run."""
        return self.method.schedule(**self._of(self.method.schedule_options))

    @property
    def can_be_planned(self) -> bool:
        """Whether there is a draft whose size can be planned."""
        return self.drafting.drafter is not NoDrafter

    def _of(self, known: Iterable[str]) -> dict[str, Any]:
        return {name: self.options[name] for name in known if name in self.options}


def asked_for(
    name: str | Path | Method | None, options: Mapping[str, Any], alone: bool = False
) -> tuple[Method | None, dict[str, Any]]:
    """The method and the options that a user's words stand for, checked as far as that goes without a target.

    Args:
        name: a method, its name or a draft folder (or GGUF file); None leaves the choice to :func:`recipe`.
        options: the method's own; a draft folder among them is read.
        alone: there will be no target soon that they could be checked with: do so now, as far as that goes.

    Raises:
        UnknownMethodError: neither a method nor a folder.
        CheckpointError: the draft cannot be read.
        ValueError: for an option that the method does not have, or a value it cannot use.
    """
    options = dict(options)
    given = options.get("draft")
    if given is not None and not isinstance(given, str | Path | Draft):
        raise ValueError(f"draft takes a draft folder, got {given!r}")
    if isinstance(name, Method):
        found: Method | None = name
    elif isinstance(name, str) and (not name or name in METHODS or not _is_draft(name)):
        found = method(name)
    elif isinstance(name, str | Path):
        options = {"draft": name} | options
        found = method_of(name)
    elif name is not None:
        raise ValueError(
            f"A method is a name or a draft folder, not {type(name).__name__}. A model is the target: "
            "Speculator(target=model)"
        )
    else:
        # A draft that has been read knows whose it is.
        found = method_of(given) if isinstance(given, str | Path) else method(given.kind) if given else None
    if found is None:
        for able in _able(options):
            if not able.needs_draft:
                _checked(able, able, options)
            elif options and alone:
                _check_with_shipped(able, able, options)
    else:
        found.check(options)
        if found.takes_draft and isinstance(options.get("draft"), str | Path):
            kind = KINDS[found.draft_kind] if found.draft_kind else kind_of(options["draft"])
            options["draft"] = kind.load(options["draft"])
        draft = options.get("draft")
        if draft is not None and found.draft_kind not in (None, draft.kind):
            raise CheckpointError(f"{draft.folder} holds a draft for {draft.kind}, not for {found.draft_kind}.")
        drafting = _drafting(found, options, None)
        if not drafting.needs_draft or options.get("draft") is not None:
            _checked(found, drafting, options)
        elif options and alone:
            _check_with_shipped(found, drafting, options)
    return found, options


def _is_draft(name: str) -> bool:
    """Whether a name is that of a draft folder or a GGUF file, and no method's."""
    return Path(name).is_dir() or is_gguf(name)


def _check_with_shipped(found: Method, drafting: Method, options: Mapping[str, Any]) -> None:
    """Options of a method whose draft is chosen for the target later: with one of the shipped ones they must do.

    Raises:
        ValueError: with none of them.
    """
    wrong: ValueError | None = None
    for folder in shipped.folders():
        kind = kind_of(folder)
        if kind.name == drafting.draft_kind:
            try:
                _checked(found, drafting, {**options, "draft": kind.load(folder)})
                return
            except ValueError as error:
                wrong = error
    if wrong is not None:
        raise wrong


def recipe(named: Method | None, options: Mapping[str, Any], runner: TargetRunner, lookup: bool = False) -> Recipe:
    """What to decode a target with.

    Args:
        named, options: as :func:`asked_for` gives them; no method: the first of ``DEFAULTS`` that will do.
        lookup: where no method is named, propose what the text repeats beside what a draft says, unless options say.

    Raises:
        CapabilityError: the method needs a draft, none is given, and none of the shipped ones fits the target.
        CheckpointError: the draft was made for another target.
        UnsupportedModelError: the target takes no trained drafts.
        ValueError: for an option that the method does not have, or a value it cannot use.
    """
    if named is None:
        able = _able(options)
        # The target's own drafts are worth their forwards where a planner sizes them; fixed trees are of small drafts.
        fit = [m for m in able if m.drafter is not SelfDrafter or (lookup and m.pays(runner))]
        named = next((m for m in fit if _ready(m, options, runner)), able[-1])
        if lookup and "lookup" in named.options:
            options = {"lookup": True, **options}
    named.check(options)
    drafting = _drafting(named, options, runner)
    if drafting.needs_draft:
        draft = options.get("draft")
        if draft is None:
            draft = KINDS[drafting.draft_kind or ""].load(_needed(drafting, runner))
        draft.bound(runner)  # a draft for another target is refused now
        options = {**options, "draft": draft}
    if options.get("earlier"):  # kept for all runs with this target
        options = {**options, "earlier": Earlier(options["earlier"])}
    return _checked(named, drafting, options)  # and so is a wrong value


def _able(options: Mapping[str, Any]) -> list[Method]:
    """The methods that decode where nobody names one, those that have all of the options.

    Raises:
        ValueError: none of them has.
    """
    defaults = [METHODS[name] for name in DEFAULTS]
    able = [m for m in defaults if set(options) <= set(m.options)]
    if not able:
        known = dict.fromkeys(name for m in defaults for name in m.options)
        if unknown := next((name for name in options if name not in known), None):
            advice = meant(unknown, ["target", "tokenizer", *known])
            owners = [m.name for m in METHODS.values() if unknown in m.options]
            if owners:
                advice = f"it is one of {', '.join(owners)}; name the method."
            raise ValueError(f"There is no option {unknown}: {advice or 'no method has one.'}")
        raise ValueError(f"No method that is chosen by itself has {' and '.join(options)} together: name the method")
    for m in able:
        m.check(options)
    return able


def _checked(named: Method, drafting: Method, options: Mapping[str, Any]) -> Recipe:
    """A recipe whose parts have been built once.

    Raises:
        ValueError: for an option that neither method nor drafter has, or a value it cannot use.
    """
    known = {*drafting.drafter_options, *named.schedule_options, *named.wrap_options, "drafter"}
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
    name, choices = options.get("drafter") or kind, named.choices
    if name is not None:
        if name not in choices:
            raise ValueError(f"drafter must be one of {', '.join(choices)}, got {name!r}")
        if kind is not None and kind != choices[name].draft_kind:
            raise ValueError(f"the draft is for {kind}, not for {name}: leave drafter out, or name another draft")
        return choices[name]
    if named.drafters:
        return named.drafters[0]
    own = set(options) - set(named.schedule_options) - set(named.wrap_options) - {"drafter"}
    able = [m for m in choices.values() if own <= set(m.drafter_options)]
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
        return shipped.fitting(runner.parts.description, needing.draft_kind)
    except UnsupportedModelError:
        return None
