"""Settings of a benchmark: contenders, their options, lengths and batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longdraft.bench.peers import PEERS
from longdraft.drafts import draft_folder
from longdraft.drafts.kinds import kind_of
from longdraft.engine.sampler import Sampling
from longdraft.errors import UnknownMethodError
from longdraft.folders import is_gguf
from longdraft.memory import offload as offloading
from longdraft.methods import METHODS
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.planning import plans
from longdraft.recipes import resolve
from longdraft.speculator import Speculator
from longdraft.views.view import parse_dtype

REFERENCE = "ar"
"""Plain autoregressive decoding, which every contender is compared with."""


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark.

    Attributes:
        methods: names of methods and peers.
        max_tokens: new tokens of a prompt, at most.
        contexts: prompt lengths, each measured; None: prompts are not cut.
        batches: batch sizes, each measured.
        repeats: timed runs of each contender.
        raw: prompts are plain text, without the chat template.
        template_kwargs: ``system`` and arguments of the chat template, such as ``enable_thinking``.
        ignore_eos: decode on to ``max_tokens``.
        cold: every contender has a run with its own prefill, which gives its time to first token. If False, ``ar``
            does the prefill for all of longdraft's methods.
        draft_options: options for all methods that take a draft: ``draft``, ``widths``, ``nodes``.
        contender_options: by contender (``specpv:budget=512``): its method's options, ``plan`` and ``kv_dtype``.
        plan, offload: see :class:`~longdraft.speculator.Speculator`; for longdraft's methods.
        profile: profile some more rounds of longdraft's methods after the timed runs.
    """

    methods: tuple[str, ...] = (REFERENCE, "prompt-lookup")
    max_tokens: int = 64
    contexts: tuple[int | None, ...] = (None,)
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    raw: bool = False
    ignore_eos: bool = False
    cold: bool = True
    draft_options: Mapping[str, Any] = field(default_factory=dict)
    contender_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plan: str | None = None
    offload: str | None = None
    profile: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {
            "max-tokens": (self.max_tokens,), "repeats": (self.repeats,), "batch": self.batches,
            "context": tuple(c for c in self.contexts if c is not None),
        }  # fmt: skip
        for name, values in counts.items():
            if values and min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(values)}")
        if not self.contexts or not self.batches:
            raise ValueError("context and batch must name one value at least")
        for name in self.methods:
            if method_name(name) not in METHODS and name not in PEERS:
                names = f"Methods: {', '.join(METHODS)}. Peers: {', '.join(PEERS)}."
                raise UnknownMethodError(f"There is no method {name!r}. {names}")
            if name not in PEERS:
                resolve(method_name(name), self.options(name))  # raises on a wrong option or an unreadable draft
            plans.check_plan(self.plan_of(name))
            parse_dtype(self.kv_dtype_of(name), "kv_dtype")
        offloading.parse(self.offload)
        if self.draft_options and not any(self.takes_draft(name) for name in self.methods):
            takers = ", ".join(m.name for m in METHODS.values() if m.takes_draft)
            raise ValueError(f"none of the methods takes {', '.join(self.draft_options)}: add one that does ({takers})")

    def options(self, name: str) -> Mapping[str, Any]:
        """A contender's options. ``draft`` goes to the methods of its kind; if there are none, to all."""
        common = self.draft_options if self.takes_draft(name) else {}
        draft = common.get("draft")
        if isinstance(draft, str | Path) and (draft_folder.is_draft_folder(draft) or is_gguf(draft)):
            kinds = (kind_of(draft).draft_kind, None)
            matching = [n for n in self.methods if self.takes_draft(n) and METHODS[method_name(n)].draft_kind in kinds]
            if matching and name not in matching:
                common = {k: x for k, x in common.items() if k != "draft"}
        specific = self.contender_options.get(name, {})
        return {**common, **{k: x for k, x in specific.items() if k not in ("plan", "kv_dtype")}}

    def plan_of(self, name: str) -> str | None:
        """A contender's ``plan``."""
        return dict(self.contender_options.get(name, {})).get("plan", self.plan)

    def kv_dtype_of(self, name: str) -> str | None:
        """A contender's ``kv_dtype``; None: the model's dtype."""
        return dict(self.contender_options.get(name, {})).get("kv_dtype")

    def takes_draft(self, name: str) -> bool:
        """True if the draft options apply to a contender."""
        return name not in PEERS and METHODS[method_name(name)].takes_draft

    @property
    def contenders(self) -> tuple[str, ...]:
        """Each name once; ``ar``, the reference, is the first."""
        return tuple(dict.fromkeys((REFERENCE, *self.methods)))


def make_speculator(settings: Settings, name: str, loaded: LoadedModel, progress: Progress | None = None) -> Speculator:
    """A contender's method on a model. Measures the costs that the method's planner needs."""
    spec = Speculator(
        method_name(name),
        target=loaded.model,
        tokenizer=loaded.tokenizer,
        offload=settings.offload,
        plan=settings.plan_of(name),
        kv_dtype=settings.kv_dtype_of(name),
        **settings.options(name),
    )
    spec.planner(progress)
    return spec


def contender_name(method: str, options: Mapping[str, Any]) -> str:
    """The name of a contender: ``specpv:budget=512``."""
    return ":".join([method, *(f"{name}={format_option(x)}" for name, x in options.items())])


def format_option(value: Any) -> str:
    """An option's value as text: ``4,16``."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def method_name(contender: str) -> str:
    """The method of a contender: ``specpv`` of ``specpv:budget=512``."""
    return contender.partition(":")[0]
