"""The choice of a method: from a user's words to the parts of a run.

:func:`resolve` turns a name and options into a method as far as possible without a target, :func:`recipe_for` settles
the rest for a target, and a :class:`Recipe` builds drafter and schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longdraft.drafters.autoregressive import NoDrafter
from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.shared.suffix_matches import RequestHistory
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafts import hub, shipped
from longdraft.drafts.draft import Draft
from longdraft.drafts.kinds import KINDS, kind_of
from longdraft.engine.drafter import Drafter
from longdraft.engine.verifier import Verifier
from longdraft.errors import CapabilityError, CheckpointError, UnsupportedModelError
from longdraft.folders import is_gguf
from longdraft.methods import DEFAULT_DRAFTERS, DEFAULT_METHODS, METHODS, Method, get_method
from longdraft.model.draft_models import origin_of
from longdraft.model.runner import TargetRunner
from longdraft.options import listed, no_option


@dataclass(frozen=True)
class Recipe:
    """A method with its options, settled for a target.

    Attributes:
        drafting_method: the method whose drafter it takes; usually itself.
        options: the method's own and the drafter's, with a loaded draft if one is needed.
        use_chains: its drafter proposes chains, unless the options shape a tree.
    """

    method: Method
    drafting_method: Method
    options: Mapping[str, Any]
    use_chains: bool = False

    def drafter(self) -> Drafter:
        """A fresh drafter, for one run."""
        assert self.drafting_method.drafter is not None
        options = self._of(self.drafting_method.drafter_options)
        lookup, earlier = False, 0
        if "lookup" in self.drafting_method.drafter_options:
            lookup, earlier = options.pop("lookup", lookup), options.pop("earlier", earlier)
            if earlier and not lookup:
                raise ValueError("earlier is for lookups: give lookup=true too, or leave it out")
        drafter = self.drafting_method.drafter(**options)
        if lookup:
            drafter = CombinedDrafter(SuffixDrafter(earlier=earlier), drafter)
        if self.use_chains:
            drafter.use_chains()
        return drafter

    def verifier(self) -> Verifier:
        """A fresh schedule, for one run."""
        return self.method.verifier(**self._of(self.method.verifier_options))

    @property
    def is_plannable(self) -> bool:
        """True if a planner can size its trees, that is, if anything drafts."""
        return self.drafting_method.drafter is not NoDrafter

    def _of(self, known: Iterable[str]) -> dict[str, Any]:
        return {name: self.options[name] for name in known if name in self.options}


def resolve(name: str | Path | Method | None, options: Mapping[str, Any]) -> tuple[Method | None, dict[str, Any]]:
    """The method and the options that a user's words stand for, checked as far as possible without a target.

    Args:
        name: a method, its name, or a draft folder (or GGUF file). None leaves the choice to :func:`recipe_for`.
        options: the method's own; a draft folder among them is read.

    Raises:
        UnknownMethodError: neither a method nor a folder.
        CheckpointError: the draft cannot be read.
        ValueError: an option that the method does not have, or a value it cannot use.
    """
    options = dict(options)
    method = _method_of(name, options)
    if method is None:
        for each in _able(options):
            if not each.needs_draft:
                _built(each, each, each.check_options(options))
        return None, options
    options = method.check_options(options)
    if method.takes_draft and isinstance(options.get("draft"), str | Path):
        kind = KINDS[method.draft_kind] if method.draft_kind else kind_of(options["draft"])
        options["draft"] = kind.load(options["draft"])
    draft = options.get("draft")
    if draft is not None and method.draft_kind not in (None, draft.kind):
        raise CheckpointError(f"{draft.folder} holds a draft for {draft.kind}, not for {method.draft_kind}.")
    drafting = _drafting(method, options, None)
    if not drafting.needs_draft or draft is not None:
        _built(method, drafting, options)
    return method, options


def _method_of(name: str | Path | Method | None, options: dict[str, Any]) -> Method | None:
    """The method that is meant; a draft folder given as the name becomes the option ``draft``."""
    draft = options.get("draft")
    if draft is not None and not isinstance(draft, str | Path | Draft):
        raise ValueError(f"draft takes a draft folder, got {draft!r}")
    if isinstance(name, Method):
        return name
    if isinstance(name, str) and (not name or name in METHODS or not (Path(name).is_dir() or is_gguf(name))):
        return get_method(name)
    if isinstance(name, str | Path):
        options.setdefault("draft", name)
        return kind_of(name)
    if name is not None:
        raise ValueError(
            f"A method is a name or a draft folder, not {type(name).__name__}. A model is the target: "
            "Speculator(target=model)"
        )
    if draft is None:
        return None
    if isinstance(draft, Draft):
        return get_method(draft.kind)
    options["draft"] = hub.local_folder(draft)
    return kind_of(options["draft"])


def recipe_for(method: Method | None, options: Mapping[str, Any], runner: TargetRunner, lookup: bool = False) -> Recipe:
    """The method, drafter and options that decode a target.

    Args:
        method, options: as :func:`resolve` returns them. Without a method: the first of ``DEFAULTS`` that is suitable.
        lookup: without a method, also propose tokens by suffix lookup, unless the options say otherwise.

    Raises:
        CapabilityError: the method needs a draft, none is given, and none of the shipped ones fits the target.
        CheckpointError: the draft was made for another target.
        UnsupportedModelError: the target takes no trained drafts.
        ValueError: an option that the method does not have, or a value it cannot use.
    """
    if method is None:
        able = _able(options)
        # Self-drafting is worth its forwards if a planner sizes the drafts.
        suitable = [m for m in able if m.drafter is not SelfDrafter or (lookup and m.is_worthwhile(runner))]
        method = next((m for m in suitable if _ready(m, options, runner)), able[-1])
        if lookup and "lookup" in method.options:
            options = {"lookup": True, **options}
    options = method.check_options(options)
    drafting = _drafting(method, options, runner)
    if drafting.needs_draft:
        if options.get("draft") is None:
            options["draft"] = KINDS[drafting.draft_kind or ""].load(_needed(drafting, runner))
        options["draft"].bind(runner)  # refuses a target that the draft was not made for
    if options.get("earlier"):  # kept for all runs with this target
        options["earlier"] = RequestHistory(options["earlier"])
    return replace(_built(method, drafting, options), use_chains=runner.branching_is_expensive)


def _able(options: Mapping[str, Any]) -> list[Method]:
    """The default methods that have all of the options.

    Raises:
        ValueError: none of them has, or a value that an option does not take.
    """
    defaults = [METHODS[name] for name in DEFAULT_METHODS]
    known = [{name: m for each in m.options.values() for name in (each.name, *each.aliases)} for m in defaults]
    able = [m for m, names in zip(defaults, known, strict=True) if set(options) <= set(names)]
    for m in able:
        m.check_options(options)
    if able:
        return able
    names = dict.fromkeys(name for each in known for name in each)
    unknown = next((name for name in options if name not in names), None)
    if unknown is None:
        raise ValueError(f"No method that is chosen by itself has {' and '.join(options)} together: name the method")
    raise no_option(unknown, names, {m.name: m.options for m in METHODS.values()})


def _built(method: Method, drafting: Method, options: Mapping[str, Any]) -> Recipe:
    """A recipe whose parts have been built once, as a check.

    Raises:
        ValueError: an option that neither method nor drafter has, or a value it cannot use.
    """
    known = {*drafting.drafter_options, *method.verifier_options, "drafter"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"Method {method.name} drafts as {drafting.name} does, which has no option {', '.join(unknown)}. "
            f"Its options: {listed(drafting.drafter_options)}."
        )
    found = Recipe(method, drafting, options)
    found.drafter()
    found.verifier()
    return found


def _drafting(method: Method, options: Mapping[str, Any], runner: TargetRunner | None) -> Method:
    """The method whose drafter a method takes.

    Args:
        runner: the target. Without one, shipped drafts are not looked for.

    Raises:
        ValueError: the option ``drafter`` names no method that drafts by itself, or the draft is of another kind.
    """
    if method.drafter is not None:
        return method
    draft = options.get("draft")
    kind = None if draft is None else draft.kind
    name, choices = options.get("drafter") or kind, method.drafter_choices
    if name is not None:
        if name not in choices:
            raise ValueError(f"drafter must be one of {', '.join(choices)}, got {name!r}")
        if kind is not None and kind != choices[name].draft_kind:
            raise ValueError(f"the draft is for {kind}, not for {name}: leave drafter out, or name another draft")
        return choices[name]
    own = set(options) - set(method.verifier_options) - {"drafter"}
    able = [m for m in choices.values() if own <= set(m.drafter_options)]
    ready = (m for m in able if runner is None or _ready(m, options, runner))
    return next(ready, METHODS[DEFAULT_DRAFTERS[-1]])


def _ready(m: Method, options: Mapping[str, Any], runner: TargetRunner) -> bool:
    """True if a method needs no draft, or has one."""
    return not m.needs_draft or "draft" in options or _shipped(m, runner) is not None


def _needed(method: Method, runner: TargetRunner) -> Path:
    """The draft of a method that comes with longdraft or with the target's checkpoint."""
    folder = _shipped(method, runner)
    kind = KINDS[method.draft_kind or ""]
    if folder is None and kind.in_checkpoint is not None and kind.training is None:
        name = getattr(runner.model, "name_or_path", "") or "this model, which was not loaded from a folder,"
        raise CapabilityError(
            f"Method {method.name} drafts with a part of the model's checkpoint, and {name} has no such part: many "
            "copies and quantised files leave it out. Name a folder that holds it (draft=, or --draft DIR), or use "
            "self or prompt-lookup, which need none."
        )
    if folder is None:
        model = runner.shared_parts.description["model_type"]
        raise CapabilityError(
            f"Method {method.name} needs a draft that was trained for the model, and none comes with longdraft for "
            f"this {model}. Name a draft folder (draft=, or --draft DIR), train one (`longdraft train`), or use "
            "prompt-lookup, which needs none."
        )
    return folder


def _shipped(method: Method, runner: TargetRunner) -> Path | None:
    """The draft of a method that comes with longdraft, or with the target's checkpoint; None without one."""
    try:
        found = shipped.find_draft(runner.shared_parts.description, method.draft_kind)
    except UnsupportedModelError:
        return None
    holds = KINDS[method.draft_kind].in_checkpoint if method.draft_kind else None
    if found is not None or holds is None:
        return found
    origin = origin_of(runner.model)
    return origin if origin is not None and holds(origin) else None
