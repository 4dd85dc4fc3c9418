"""The catalogue of methods, and the choice among them: from a user's words to the parts of a run.

Every module of :mod:`longdraft.drafters` registers its methods when it is imported, as does every module named by an
entry point of the group ``longdraft.drafters``. :func:`resolve` turns a name and options into a method as far as that
goes without a target, :func:`recipe` settles the rest for a target, and a :class:`Recipe` builds drafter and schedule.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft import drafters
from longdraft.arguments import suggestion
from longdraft.drafters.autoregressive import NoDrafter
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.shared.suffixes import Earlier
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.united import UnitedDrafter
from longdraft.drafts import kinds, shipped
from longdraft.drafts.draft import Draft
from longdraft.drafts.kinds import KINDS, kind_of
from longdraft.engine import specpv  # noqa: F401 - it registers its methods
from longdraft.engine.drafter import Drafter
from longdraft.engine.method import DEFAULTS, DRAFTING, METHODS, Method, method_named
from longdraft.engine.method import register as _register
from longdraft.engine.schedule import Schedule
from longdraft.errors import CapabilityError, CheckpointError, UnsupportedModelError, values_checked
from longdraft.folders import is_gguf
from longdraft.model.runner import TargetRunner
from longdraft.options import listed, options_of

__all__ = [
    "DEFAULTS",
    "DRAFTING",
    "METHODS",
    "Method",
    "Recipe",
    "compose",
    "method_named",
    "method_of",
    "methods",
    "recipe",
    "register",
    "resolve",
]  # fmt: skip

logger = logging.getLogger("longdraft")

GROUP = "longdraft.drafters"
for _module in pkgutil.iter_modules(drafters.__path__):
    importlib.import_module(f"{drafters.__name__}.{_module.name}")
for _entry in importlib.metadata.entry_points(group=GROUP):
    try:
        _entry.load()
    except Exception as error:
        logger.warning("The drafter %s of an installed package cannot be loaded: %r.", _entry.value, error)

# As lists show them: exact methods without a draft, with one, approximate methods.
for _name in sorted(METHODS, key=lambda name: (not METHODS[name].exact, METHODS[name].needs_draft, name)):
    METHODS[_name] = METHODS.pop(_name)
_BUILT_IN = frozenset(METHODS)


def methods() -> list[dict[str, Any]]:
    """All methods, as ``longdraft methods --json`` prints them.

    One that needs a draft is available if such a draft comes with the package; with a draft folder it always works.
    """
    return [
        {
            "name": m.name,
            "exact": m.exact,
            "needs_draft": m.needs_draft,
            "paper": m.paper,
            "available": not m.needs_draft or KINDS[m.draft_kind or ""].shipped,
        }
        for m in METHODS.values()
    ]


def method_of(folder: Path | str) -> Method:
    """The method that a draft folder is for.

    Raises:
        CheckpointError: not a draft folder, or one for a method that this version does not have.
    """
    return method_named(kind_of(folder).name)


@values_checked(instead_of=(ValueError, TypeError))
def compose(
    name: str,
    drafter: Callable[..., Drafter],
    schedule: Callable[..., Schedule] = Schedule,
    draft: str | None = None,
    summary: str = "a composition of one's own",
    paper: str = "",
) -> Method:
    """Makes a method from a drafter and a schedule, and registers it. A composition of the same name is replaced.

    Speculator, the bench and the command line know it by its name, a planner sizes its trees, and its output is exact
    if its schedule is.

    Args:
        name: the method's name.
        drafter: builds a fresh drafter for a run. Its keyword parameters are the method's options.
        schedule: builds the schedule; by default the one that verifies on the whole cache. Its keyword parameters are
            options too.
        draft: kind of trained draft that ``drafter`` takes as ``draft``, "longspec" or any other that is registered:
            the shipped one that fits the target, or the folder that a user names.
        summary, paper: for the list of methods.

    Raises:
        RequestError: a name that is taken or not allowed, an unknown kind of draft, or a factory that does not take
            what it is given.
    """
    _check_name(name)
    if draft is not None and draft not in KINDS:
        raise ValueError(f"draft must be one of {', '.join(m for m in METHODS if m in KINDS)}, got {draft!r}")
    own, other = options_of(drafter), options_of(schedule)
    if ("draft" in own) != (draft is not None):
        wanted = f"takes no `draft`, but {draft} was named" if draft else "takes a `draft`: name its kind with draft="
        raise ValueError(f"the drafter of {name} {wanted}")
    if both := {*own} & {*other}:
        raise ValueError(f"drafter and schedule of {name} both have an option {', '.join(sorted(both))}")
    return _register(Method(name, schedule().exact, paper, summary, drafter, draft, schedule))


@values_checked(instead_of=(ValueError, TypeError))
def register(kind: kinds.Kind) -> Method:
    """Registers a kind of trained draft, and the method of its name. One of the same name is replaced.

    Folders of the kind are then drafts like any other. If the kind says how it is trained, ``longdraft train`` has a
    command for it.

    Raises:
        RequestError: a name that is taken or not allowed, or a drafter that takes no ``draft``.
    """
    if not isinstance(kind, kinds.Kind):
        raise TypeError(f"register takes a Kind, got {kind!r}")
    _check_name(kind.name)
    if "draft" not in options_of(kind.drafter):
        raise ValueError(f"the drafter of {kind.name} takes no `draft`")
    return kinds.register(kind)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a method's name is a text, got {name!r}")
    if name in _BUILT_IN:
        raise ValueError(f"{name} is a method of longdraft: give yours another name")
    if not name or any(c in name for c in ":, /="):
        raise ValueError(f"a method's name has no colon, comma, blank, slash or equals sign, got {name!r}")


@dataclass(frozen=True)
class Recipe:
    """A method with its options, settled for a target.

    Attributes:
        drafting: the method whose drafter it takes; usually itself.
        options: the method's own and the drafter's, with a loaded draft if one is needed.
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
            if earlier and not lookup:
                raise ValueError("earlier is for lookups: give lookup=true too, or leave it out")
        drafter = self.drafting.drafter(**options)
        if lookup:
            drafter = UnitedDrafter(SuffixDrafter(earlier=earlier), drafter)
        return (
            drafter if self.method.wraps is None else self.method.wraps(drafter, **self._of(self.method.wrap_options))
        )

    def schedule(self) -> Schedule:
        """A fresh schedule, for one run."""
        return self.method.schedule(**self._of(self.method.schedule_options))

    @property
    def can_be_planned(self) -> bool:
        """True if a planner can size its trees, that is, if anything drafts."""
        return self.drafting.drafter is not NoDrafter

    def _of(self, known: Iterable[str]) -> dict[str, Any]:
        return {name: self.options[name] for name in known if name in self.options}


def resolve(
    name: str | Path | Method | None, options: Mapping[str, Any], alone: bool = False
) -> tuple[Method | None, dict[str, Any]]:
    """The method and the options that a user's words stand for, checked as far as possible without a target.

    Args:
        name: a method, its name, or a draft folder (or GGUF file). None leaves the choice to :func:`recipe`.
        options: the method's own; a draft folder among them is read.
        alone: no target will follow soon: check with shipped drafts now.

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
                _built(each, each, each.checked(options))
            elif options and alone:
                _check_with_shipped(each, each, each.checked(options))
        return None, options
    options = method.checked(options)
    if method.takes_draft and isinstance(options.get("draft"), str | Path):
        kind = KINDS[method.draft_kind] if method.draft_kind else kind_of(options["draft"])
        options["draft"] = kind.load(options["draft"])
    draft = options.get("draft")
    if draft is not None and method.draft_kind not in (None, draft.kind):
        raise CheckpointError(f"{draft.folder} holds a draft for {draft.kind}, not for {method.draft_kind}.")
    drafting = _drafting(method, options, None)
    if not drafting.needs_draft or draft is not None:
        _built(method, drafting, options)
    elif options and alone:
        _check_with_shipped(method, drafting, options)
    return method, options


def _method_of(name: str | Path | Method | None, options: dict[str, Any]) -> Method | None:
    """The method that is meant; a draft folder given as the name becomes the option ``draft``."""
    draft = options.get("draft")
    if draft is not None and not isinstance(draft, str | Path | Draft):
        raise ValueError(f"draft takes a draft folder, got {draft!r}")
    if isinstance(name, Method):
        return name
    if isinstance(name, str) and (not name or name in METHODS or not (Path(name).is_dir() or is_gguf(name))):
        return method_named(name)
    if isinstance(name, str | Path):
        options.setdefault("draft", name)
        return method_of(name)
    if name is not None:
        raise ValueError(
            f"A method is a name or a draft folder, not {type(name).__name__}. A model is the target: "
            "Speculator(target=model)"
        )
    if draft is None:
        return None
    return method_named(draft.kind) if isinstance(draft, Draft) else method_of(draft)


def recipe(method: Method | None, options: Mapping[str, Any], runner: TargetRunner, lookup: bool = False) -> Recipe:
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
        suitable = [m for m in able if m.drafter is not SelfDrafter or (lookup and m.pays(runner))]
        method = next((m for m in suitable if _ready(m, options, runner)), able[-1])
        if lookup and "lookup" in method.options:
            options = {"lookup": True, **options}
    options = method.checked(options)
    drafting = _drafting(method, options, runner)
    if drafting.needs_draft:
        if options.get("draft") is None:
            options["draft"] = KINDS[drafting.draft_kind or ""].load(_needed(drafting, runner))
        options["draft"].bound(runner)  # refuses a target that the draft was not made for
    if options.get("earlier"):  # kept for all runs with this target
        options["earlier"] = Earlier(options["earlier"])
    return _built(method, drafting, options)


def _able(options: Mapping[str, Any]) -> list[Method]:
    """The default methods that have all of the options.

    Raises:
        ValueError: none of them has, or a value that an option does not take.
    """
    defaults = [METHODS[name] for name in DEFAULTS]
    known = [{name: m for each in m.options.values() for name in (each.name, *each.aliases)} for m in defaults]
    able = [m for m, names in zip(defaults, known, strict=True) if set(options) <= set(names)]
    for m in able:
        m.checked(options)
    if able:
        return able
    names = dict.fromkeys(name for each in known for name in each)
    unknown = next((name for name in options if name not in names), None)
    if unknown is None:
        raise ValueError(f"No method that is chosen by itself has {' and '.join(options)} together: name the method")
    owners = [m.name for m in METHODS.values() if unknown in m.options]
    advice = f"it is one of {', '.join(owners)}; name the method." if owners else ""
    advice = advice or suggestion(unknown, ["target", "tokenizer", *names]) or "no method has one."
    raise ValueError(f"There is no option {unknown}: {advice}")


def _built(method: Method, drafting: Method, options: Mapping[str, Any]) -> Recipe:
    """A recipe whose parts have been built once, as a check.

    Raises:
        ValueError: an option that neither method nor drafter has, or a value it cannot use.
    """
    known = {*drafting.drafter_options, *method.schedule_options, *method.wrap_options, "drafter"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"Method {method.name} drafts as {drafting.name} does, which has no option {', '.join(unknown)}. "
            f"Its options: {listed(drafting.drafter_options)}."
        )
    found = Recipe(method, drafting, options)
    found.drafter()
    found.schedule()
    return found


def _check_with_shipped(method: Method, drafting: Method, options: Mapping[str, Any]) -> None:
    """Checks options of a method whose draft is chosen later: they must suit one of the shipped drafts.

    Raises:
        ValueError: they suit none.
    """
    wrong: ValueError | None = None
    for folder in shipped.folders():
        kind = kind_of(folder)
        if kind.name == drafting.draft_kind:
            try:
                _built(method, drafting, {**options, "draft": kind.load(folder)})
                return
            except ValueError as error:
                wrong = error
    if wrong is not None:
        raise wrong


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
    name, choices = options.get("drafter") or kind, method.choices
    if name is not None:
        if name not in choices:
            raise ValueError(f"drafter must be one of {', '.join(choices)}, got {name!r}")
        if kind is not None and kind != choices[name].draft_kind:
            raise ValueError(f"the draft is for {kind}, not for {name}: leave drafter out, or name another draft")
        return choices[name]
    if method.drafters:
        return method.drafters[0]
    own = set(options) - set(method.schedule_options) - set(method.wrap_options) - {"drafter"}
    able = [m for m in choices.values() if own <= set(m.drafter_options)]
    ready = (m for m in able if runner is None or _ready(m, options, runner))
    return next(ready, METHODS[DRAFTING[-1]])


def _ready(m: Method, options: Mapping[str, Any], runner: TargetRunner) -> bool:
    """True if a method needs no draft, or has one."""
    return not m.needs_draft or "draft" in options or _shipped(m, runner) is not None


def _needed(method: Method, runner: TargetRunner) -> Path:
    """The shipped draft of a method for a target."""
    folder = _shipped(method, runner)
    if folder is None:
        model = runner.parts.description["model_type"]
        raise CapabilityError(
            f"Method {method.name} needs a draft that was trained for the model, and none comes with longdraft for "
            f"this {model}. Name a draft folder (draft=, or --draft DIR), train one (`longdraft train`), or use "
            "prompt-lookup, which needs none."
        )
    return folder


def _shipped(method: Method, runner: TargetRunner) -> Path | None:
    """The shipped draft of a method for a target; None for a target that takes none."""
    try:
        return shipped.fitting(runner.parts.description, method.draft_kind)
    except UnsupportedModelError:
        return None
