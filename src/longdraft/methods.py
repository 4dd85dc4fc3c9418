"""The named methods: each names the parts that make it. Which one decodes, and with what: :mod:`longdraft.recipes`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from longdraft.arguments import meant
from longdraft.drafters import eagle, heads, longspec, onepass  # noqa: F401 - they register their kinds
from longdraft.drafters.eagle3 import Eagle3Drafter
from longdraft.drafters.magicdec import magicdec_self, magicdec_small_lm
from longdraft.drafters.nested import nested, triforce
from longdraft.drafters.self_drafter import SelfDrafter, drafts_lightly
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.tokenswift import tokenswift
from longdraft.drafts.kinds import KINDS, Kind, kind_of
from longdraft.engine.drafter import Drafter, NoDrafter
from longdraft.engine.partial import ExactSpecPV, SpecPV, partial_view
from longdraft.engine.schedule import Schedule
from longdraft.errors import UnknownMethodError
from longdraft.model.runner import TargetRunner
from longdraft.views.view import dtype_of


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
            takes another one's, which the option ``drafter`` names.
        drafters: of these, the first by default; none: of the methods in ``DRAFTING``.
        joined: suffix lookup may join its drafter, as it may join every trained draft.
        wraps: builds its drafter around that one, from options of its own; None: takes it as it is.
        draft_kind: of :data:`longdraft.drafts.kinds.KINDS`, which drafts it takes; several methods may take the same.
        schedule: builds what verifies, from keyword options of its own.
        pays: on which targets it is worth taking unasked, where rounds are planned.
    """

    name: str
    exact: bool
    needs_draft: bool
    paper: str
    summary: str
    drafter: Callable[..., Drafter] | None
    draft_kind: str | None = None
    schedule: Callable[..., Schedule] = Schedule
    drafters: tuple[Method, ...] = ()
    wraps: Callable[..., Drafter] | None = None
    joined: bool = False
    pays: Callable[[TargetRunner], bool] = lambda runner: True

    @property
    def choices(self) -> dict[str, Method]:
        """Whose drafter the option ``drafter`` may name."""
        names = dict.fromkeys([*DRAFTING, *KINDS])
        return {m.name: m for m in self.drafters or [METHODS[name] for name in names if name in METHODS]}

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The method's own options by name."""
        if self.drafter is not None:
            return self.schedule_options | self.drafter_options
        inner = {name: p for each in self.choices.values() for name, p in each.drafter_options.items()}
        # Of options that both have, such as `recent`, the schedule's defaults are the method's.
        own = self.schedule_options | self.wrap_options
        return own | {"drafter": _DRAFTER} | inner | own

    @property
    def drafter_options(self) -> dict[str, inspect.Parameter]:
        """Those that its drafter takes."""
        own = _parameters(self.drafter) if self.drafter is not None else {}
        return own | {"lookup": _LOOKUP, "earlier": _EARLIER} if self.needs_draft or self.joined else own

    @property
    def schedule_options(self) -> dict[str, inspect.Parameter]:
        """Those that its schedule takes."""
        return _parameters(self.schedule)

    @property
    def wrap_options(self) -> dict[str, inspect.Parameter]:
        """Those of what is built around its drafter."""
        own = {} if self.wraps is None else _parameters(self.wraps)
        return {name: p for name, p in own.items() if name != "inner"}

    @property
    def takes_draft(self) -> bool:
        """Whether a draft folder means anything to it."""
        return "draft" in self.options

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuses options that the method does not have, and values of another kind than the defaults'.

        Raises:
            ValueError: naming the options there are, or the kind.
        """
        known = self.options
        for name in options:
            if name not in known:
                advice = meant(name, known) or f"its options are {', '.join(known) or 'none'}."
                raise ValueError(f"Method {self.name} has no option {name}: {advice}")
        for name, value in options.items():
            if (kind := wrong_kind(known[name].default, value)) is not None:
                raise ValueError(f"{name} must be {kind}, got {value!r}")


def wrong_kind(default: Any, value: Any) -> str | None:
    """What an option with this default takes, where a value is something else; None where nothing is wrong with it."""
    kind: Any = type(default)
    if kind not in _KINDS or (value is None and kind is not bool):
        return None
    fits = isinstance(value, Integral if kind is int else Real if kind is float else bool)
    return None if fits and isinstance(value, bool) == (kind is bool) else _KINDS[kind]


_KINDS = {int: "a whole number", float: "a number", bool: "True or False"}


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(factory).parameters.items() if not name.startswith("_")}


def of_kind(kind: Kind) -> Method:
    """The method that a kind of draft comes with."""
    return Method(kind.name, True, True, kind.paper, kind.summary, kind.drafter, kind.name)


def _specpv(
    kind: type[SpecPV], budget: int = 1024, selector: str = "minmax", reduction: str = "mean", margin: int = 20,
    sink: int = 32, recent: int = 128, block: int = 16, view_dtype: str | None = None,
) -> SpecPV:  # fmt: skip
    """A schedule from a method's options: :func:`partial_view`'s, with ``recent`` for its window."""
    return kind(partial_view(budget, sink, recent, block, margin, selector, reduction), dtype_of(view_dtype))


_DRAFTER = inspect.Parameter("drafter", inspect.Parameter.KEYWORD_ONLY, default=None)
# Of drafts that cost forwards: whether suffix lookup joins them, and how many tokens of earlier requests it sees.
_LOOKUP = inspect.Parameter("lookup", inspect.Parameter.KEYWORD_ONLY, default=False)
_EARLIER = inspect.Parameter("earlier", inspect.Parameter.KEYWORD_ONLY, default=0)
_MAGICDEC = "Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049"
_TRIFORCE = "Sun et al. 2024, TriForce, arXiv:2404.11912"
_SPECPV = "Tan et al. 2025, SpecPV, arXiv:2512.02337"

# What decodes where nobody names a method: the first that has the given options and pays on this target (`pays`), and
# whose draft, if it needs one, comes with the package.
DEFAULTS = ("self", "longspec", "prompt-lookup")
# Whose drafter a method takes that has none of its own: the first whose draft, if it needs one, is there.
DRAFTING = ("eagle3", "longspec", "onepass", "eagle", "small-lm", "heads", "prompt-lookup", "self", "triforce", "ar")

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
            SuffixDrafter,
        ),
        Method(
            "suffix",
            True,
            False,
            "Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975",
            "the same drafter by the name of its paper: earlier=N looks N tokens of earlier requests up too",
            SuffixDrafter,
        ),
        *map(of_kind, sorted(KINDS.values(), key=lambda kind: (kind.name not in DEFAULTS, DRAFTING.index(kind.name)))),
        Method(
            "specextend",
            True,
            True,
            "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
            "a small language model that sees the chunks of a long text which the model attends to",
            partial(SmallLMDrafter, view="retrieval"),  # and so an OPT-Tree
            "small-lm",
        ),
        Method(
            "specextend-eagle3",
            True,
            True,
            "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
            "EAGLE-3 that sees the chunks of a long text which the model attends to, at positions it knows",
            partial(Eagle3Drafter, retrieval=True),  # and so an OPT-Tree
            "eagle3",
        ),
        Method(
            "self",
            True,
            False,
            f"{_TRIFORCE}; {_MAGICDEC}",
            "the model itself drafts on a part of its KV cache, and verifies on all of it",
            SelfDrafter,
            joined=True,
            pays=drafts_lightly,
        ),
        Method(
            "quantspec",
            True,
            False,
            "after Tiwari et al. 2025, QuantSpec, arXiv:2502.10424",
            "the model itself drafts on all of its KV cache in eight bits, and verifies on it as it is",
            partial(SelfDrafter, view="all"),
            joined=True,
        ),
        Method(
            "magicdec",
            True,
            False,
            _MAGICDEC,
            "the model itself or a small language model drafts a chain, on a part of its KV cache; for large batches",
            None,
            draft_kind="small-lm",
            drafters=(
                Method("self", True, False, _MAGICDEC, "", magicdec_self),
                Method("small-lm", True, True, _MAGICDEC, "", magicdec_small_lm, "small-lm"),
            ),
        ),
        Method(
            "triforce",
            True,
            True,
            _TRIFORCE,
            "a small language model drafts for the model on a part of its KV cache, which drafts for it on all of it",
            triforce,
            "small-lm",
        ),
        Method(
            "nested",
            True,
            False,
            f"ours, after {_TRIFORCE}",
            "any drafter, whose proposals the model verifies on a part of its KV cache before it does on all of it",
            None,
            wraps=nested,
        ),
        Method(
            "tokenswift",
            True,
            True,
            "Wu et al. 2025, TokenSwift, arXiv:2502.18890",
            "the same heads, behind a forward of the model on a part of its KV cache, and phrases of the output",
            tokenswift,
            "heads",
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


def method(name: str) -> Method:
    """The method of that name.

    Raises:
        UnknownMethodError: listing the names there are.
    """
    try:
        return METHODS[name]
    except KeyError:
        advice = meant(name, METHODS) if isinstance(name, str) else ""
        raise UnknownMethodError(
            f"There is no method {name!r}{f': {advice}' if advice else '.'} Methods: {', '.join(METHODS)}. "
            "See `longdraft methods`."
        ) from None


def method_of(folder: Path | str) -> Method:
    """The method that a draft folder is for.

    Raises:
        CheckpointError: not a draft folder, or one for a method that this version does not have.
    """
    return method(kind_of(folder).name)


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
            "available": not m.needs_draft or KINDS[m.draft_kind or ""].shipped,
        }
        for m in METHODS.values()
    ]
