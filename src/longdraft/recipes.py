"""Turns a user's method and options into the drafter and the verifier of a run.

:func:`resolve` checks what does not depend on the target. :func:`recipe_for` then decides the rest for a target: it
returns a :class:`Recipe`, which builds drafter and verifier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.shared.suffix_matches import RequestHistory
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafts import hub, shipped
from longdraft.drafts.draft import Draft
from longdraft.drafts.draft_models import origin_of
from longdraft.engine.drafter import Drafter
from longdraft.engine.verifier import Verifier
from longdraft.errors import CapabilityError, CheckpointError, UnsupportedModelError
from longdraft.folders import is_gguf
from longdraft.method import Method
from longdraft.model.runner import TargetRunner
from longdraft.options import listed, unknown_option_error
from longdraft.registry import DEFAULT_DRAFTERS, DEFAULT_METHODS, KINDS, METHODS, get_method, kind_of


@dataclass(frozen=True)
class Recipe:
    """A method with its options for a target.

    Attributes:
        method: provides the verifier: the method that the user named, else the chosen one.
        drafting_method: provides the drafter: usually ``method`` itself.
        options: options of verifier and drafter. The option ``draft`` is a loaded draft.
        use_chains: True if the drafter proposes chains, unless the options shape a tree.
    """

    method: Method
    drafting_method: Method
    options: Mapping[str, Any]
    use_chains: bool = False

    def drafter(self) -> Drafter:
        """Builds a drafter for one run."""
        assert self.drafting_method.drafter is not None
        options = self._select(self.drafting_method.drafter_options)
        lookup, earlier = False, 0  # earlier: the number of tokens of past requests in which lookups search too
        if "lookup" in self.drafting_method.drafter_options:
            lookup, earlier = options.pop("lookup", lookup), options.pop("earlier", earlier)
            if earlier and not lookup:
                raise ValueError("earlier is an option of lookups: give lookup=true too, or leave it out")
        drafter = self.drafting_method.drafter(**options)
        if lookup:
            drafter = CombinedDrafter(SuffixDrafter(earlier=earlier), drafter)
        if self.use_chains:
            drafter.use_chains()
        return drafter

    def verifier(self) -> Verifier:
        """Builds a verifier for one run."""
        return self.method.verifier(**self._select(self.method.verifier_options))

    @property
    def is_plannable(self) -> bool:
        """True if the method drafts, so that a planner can size its trees."""
        return self.drafter().max_nodes > 0

    def _select(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.options[name] for name in names if name in self.options}


def resolve(name: str | Path | Method | None, options: Mapping[str, Any]) -> tuple[Method | None, dict[str, Any]]:
    """Looks up a method, and checks its options as far as possible without a target.

    Args:
        name: a method, its name, or a draft folder (or GGUF file). None: :func:`recipe_for` chooses a method.
        options: the method's options. They are returned with a loaded draft in place of a draft folder.

    Raises:
        UnknownMethodError: the name is neither a method nor a folder.
        CheckpointError: the draft cannot be read.
        ValueError: the method does not have an option, or the option's value is unusable.
    """
    options = dict(options)
    method = _find_method(name, options)
    if method is None:
        for default_method in _suitable_defaults(options):
            if not default_method.needs_draft:
                _checked_recipe(default_method, default_method, default_method.check_options(options))
        return None, options
    options = method.check_options(options)
    if method.takes_draft and isinstance(options.get("draft"), str | Path):
        kind = KINDS[method.draft_kind] if method.draft_kind else kind_of(options["draft"])
        options["draft"] = kind.load(options["draft"])
    draft = options.get("draft")
    if draft is not None and method.draft_kind not in (None, draft.kind):
        raise CheckpointError(f"{draft.folder} holds a draft for {draft.kind}, not for {method.draft_kind}.")
    drafting_method = _choose_drafting_method(method, options, None)
    if not drafting_method.needs_draft or draft is not None:
        _checked_recipe(method, drafting_method, options)
    return method, options


def _find_method(name: str | Path | Method | None, options: dict[str, Any]) -> Method | None:
    """Looks up a method. A draft folder in place of the name becomes the option ``draft``."""
    draft = options.get("draft")
    if draft is not None and not isinstance(draft, str | Path | Draft):
        raise ValueError(f"draft takes a draft folder, got {draft!r}")
    if isinstance(name, Method):
        return name
    if isinstance(name, str) and (not name or name in METHODS or not (Path(name).is_dir() or is_gguf(name))):
        return get_method(name)
    if isinstance(name, str | Path):
        options.setdefault("draft", name)
        return get_method(kind_of(name).name)
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
    return get_method(kind_of(options["draft"]).name)


def recipe_for(method: Method | None, options: Mapping[str, Any], runner: TargetRunner, lookup: bool = False) -> Recipe:
    """Chooses method, drafter and options for a target.

    Args:
        method: the method of :func:`resolve`; None: the first of ``DEFAULT_METHODS`` that suits options and target.
        options: the options of :func:`resolve`.
        runner: the target's runner.
        lookup: True: a method chosen here also drafts by suffix lookup, unless the options contain ``lookup``.

    Raises:
        CapabilityError: the method needs a draft, the options name none, and no shipped one fits the target.
        CheckpointError: the draft was made for another target.
        UnsupportedModelError: the target supports no trained drafts.
        ValueError: the method does not have an option, or the option's value is unusable.
    """
    if method is None:
        defaults = _suitable_defaults(options)
        # ``lookup`` is True if a planner sizes the drafts.
        worthwhile = [m for m in defaults if m.is_worthwhile is None or (lookup and m.is_worthwhile(runner))]
        method = next((m for m in worthwhile if _has_draft(m, options, runner)), defaults[-1])
        if lookup and "lookup" in method.options:
            options = {"lookup": True, **options}
    options = method.check_options(options)
    drafting_method = _choose_drafting_method(method, options, runner)
    if drafting_method.needs_draft:
        if options.get("draft") is None:
            options["draft"] = KINDS[drafting_method.draft_kind or ""].load(_require_draft(drafting_method, runner))
        options["draft"].bind(runner)  # raises CheckpointError if the draft is for another target
    if options.get("earlier"):  # one history for all runs with this target
        options["earlier"] = RequestHistory(options["earlier"])
    return replace(_checked_recipe(method, drafting_method, options), use_chains=runner.has_recurrent_layers)


def _suitable_defaults(options: Mapping[str, Any]) -> list[Method]:
    """Returns the default methods that have all options. Raises ValueError if there is none, or for a wrong value."""
    defaults = [METHODS[name] for name in DEFAULT_METHODS]
    option_names = [[name for o in m.options.values() for name in (o.name, *o.aliases)] for m in defaults]
    suitable = [m for m, names in zip(defaults, option_names, strict=True) if set(options) <= set(names)]
    for m in suitable:
        m.check_options(options)
    if suitable:
        return suitable
    all_names = dict.fromkeys(name for names in option_names for name in names)
    unknown = next((name for name in options if name not in all_names), None)
    if unknown is None:
        raise ValueError(f"No default method has {' and '.join(options)} together: name the method")
    raise unknown_option_error(unknown, all_names, {m.name: m.options for m in METHODS.values()})


def _checked_recipe(method: Method, drafting_method: Method, options: Mapping[str, Any]) -> Recipe:
    """Makes a recipe, and builds its parts once as a check. Raises ValueError for an unknown option or wrong value."""
    drafter_options = drafting_method.drafter_options
    # The option "drafter" is no option of a drafter: it has chosen ``drafting_method``.
    if unknown := sorted(set(options) - {*drafter_options, *method.verifier_options, "drafter"}):
        raise ValueError(
            f"Method {method.name} drafts with {drafting_method.name}, which has no option {', '.join(unknown)}. "
            f"Options of {drafting_method.name}: {listed(drafter_options)}."
        )
    recipe = Recipe(method, drafting_method, options)
    recipe.drafter()
    recipe.verifier()
    return recipe


def _choose_drafting_method(method: Method, options: Mapping[str, Any], runner: TargetRunner | None) -> Method:
    """Returns the method that drafts for ``method``: itself if it has a drafter, else the option ``drafter``, else the
    draft's kind, else a default for which a draft fits the target (not tested if ``runner`` is None).

    Raises:
        ValueError: the option ``drafter`` names a method that cannot draft here, or the draft is of another kind.
    """
    if method.drafter is not None:
        return method
    draft = options.get("draft")
    draft_kind = None if draft is None else draft.kind
    name, choices = options.get("drafter") or draft_kind, method.drafter_choices()
    if name is not None:
        if name not in choices:
            raise ValueError(f"drafter must be one of {', '.join(choices)}, got {name!r}")
        if draft_kind is not None and draft_kind != choices[name].draft_kind:
            raise ValueError(f"the draft is for {draft_kind}, not for {name}: leave drafter out, or name another draft")
        return choices[name]
    drafter_options = set(options) - set(method.verifier_options) - {"drafter"}
    suitable = [m for m in choices.values() if drafter_options <= set(m.drafter_options)]
    available = (m for m in suitable if runner is None or _has_draft(m, options, runner))
    return next(available, METHODS[DEFAULT_DRAFTERS[-1]])


def _has_draft(method: Method, options: Mapping[str, Any], runner: TargetRunner) -> bool:
    """True if a method needs no draft, or if there is a draft of the method's kind for the target."""
    return not method.needs_draft or "draft" in options or _find_draft(method, runner) is not None


def _require_draft(method: Method, runner: TargetRunner) -> Path:
    """Returns the folder that :func:`_find_draft` finds. Raises CapabilityError if there is none."""
    folder = _find_draft(method, runner)
    kind = KINDS[method.draft_kind or ""]  # never "": the method needs a draft
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


def _find_draft(method: Method, runner: TargetRunner) -> Path | None:
    """Returns the folder of a draft for a method: one of longdraft, else of the target's checkpoint, else None."""
    try:
        folder = shipped.find_draft(runner.shared_parts.description, method.draft_kind)
    except UnsupportedModelError:
        return None
    has_draft = KINDS[method.draft_kind].in_checkpoint if method.draft_kind else None
    if folder is not None or has_draft is None:
        return folder
    checkpoint = origin_of(runner.model)
    return checkpoint if checkpoint is not None and has_draft(checkpoint) else None
