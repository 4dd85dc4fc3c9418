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


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark.

    Attributes:
        methods: names of methods and peers.
        max_tokens: new tokens of a prompt at most.
        contexts: lengths to cut prompts to, each measured; None: prompts are whole.
        batches: batch sizes, each measured.
        repeats: timed rounds.
        raw: prompts are plain text, without the chat template.
        asked: ``system`` and arguments of the chat template, such as ``enable_thinking``.
        ignore_eos: decode on to ``max_tokens``.
        cold: every method reads the prompts once itself, which gives its time to first token. If false, ``ar`` reads
            them for all of ours.
        draft_options: options for the methods that take a draft: ``draft``, ``widths``, ``nodes``.
        contender_options: further options of single contenders, by name (``specpv:budget=512``), ``plan`` and ``kv_dtype``
            included.
        plan, offload: of our methods; see :class:`~longdraft.speculator.Speculator`.
        profile: profile some rounds of our methods after the timed ones.
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
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {
            "max-tokens": (self.max_tokens,), "repeats": (self.repeats,), "batch": self.batches,
            "context": tuple(c for c in self.contexts if c is not None),
        }  # fmt: skip
        for name, values in given.items():
            if values and min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(values)}")
        if not self.contexts or not self.batches:
            raise ValueError("context and batch must name one value at least")
        for name in self.methods:
            if method_name(name) not in METHODS and name not in PEERS:
                known = f"Methods: {', '.join(METHODS)}. To compare with: {', '.join(PEERS)}."
                raise UnknownMethodError(f"There is no method {name!r}. {known}")
            if name not in PEERS:
                # Refuses a wrong option, or a draft that cannot be read.
                resolve(method_name(name), self.options(name))
            plans.check_plan(self.plan_of(name))
            parse_dtype(self.kv_dtype_of(name), "kv_dtype")
        offloading.parse(self.offload)
        if self.draft_options and not any(self.takes_draft(name) for name in self.methods):
            needing = ", ".join(m.name for m in METHODS.values() if m.takes_draft)
            raise ValueError(
                f"none of the methods takes {', '.join(self.draft_options)}: add one that does ({needing})"
            )

    def options(self, name: str) -> Mapping[str, Any]:
        """The options of a contender of ours. A draft goes to the methods that take its kind, if there are any."""
        given = self.draft_options if self.takes_draft(name) else {}
        draft = given.get("draft")
        if isinstance(draft, str | Path) and (draft_folder.is_draft_folder(draft) or is_gguf(draft)):
            kinds = (kind_of(draft).draft_kind, None)
            readers = [n for n in self.methods if self.takes_draft(n) and METHODS[method_name(n)].draft_kind in kinds]
            if readers and name not in readers:
                given = {k: x for k, x in given.items() if k != "draft"}
        return {
            **given,
            **{k: x for k, x in self.contender_options.get(name, {}).items() if k not in ("plan", "kv_dtype")},
        }

    def plan_of(self, name: str) -> str | None:
        """The plan of one of our contenders."""
        return dict(self.contender_options.get(name, {})).get("plan", self.plan)

    def kv_dtype_of(self, name: str) -> str | None:
        """The KV cache's dtype of one of our contenders."""
        return dict(self.contender_options.get(name, {})).get("kv_dtype")

    def takes_draft(self, name: str) -> bool:
        """True if the draft options apply to this contender."""
        return name not in PEERS and METHODS[method_name(name)].takes_draft

    @property
    def contenders(self) -> tuple[str, ...]:
        """The names once each, ``ar`` first: everything is measured against it."""
        return tuple(dict.fromkeys((REFERENCE, *self.methods)))


def make_speculator(settings: Settings, name: str, loaded: LoadedModel, progress: Progress | None = None) -> Speculator:
    """The method of one of our contenders on a model, with what its planner has to know."""
    made = Speculator(
        method_name(name),
        target=loaded.model,
        tokenizer=loaded.tokenizer,
        offload=settings.offload,
        plan=settings.plan_of(name),
        kv_dtype=settings.kv_dtype_of(name),
        **settings.options(name),
    )
    made.planner(progress)
    return made


def contender_name(method: str, options: Mapping[str, Any]) -> str:
    """The name of a contender: ``specpv:budget=512``."""
    return ":".join([method, *(f"{name}={format_option(x)}" for name, x in options.items())])


def format_option(value: Any) -> str:
    """An option's value as a contender's name has it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def method_name(contender: str) -> str:
    """``specpv`` of ``specpv:budget=512``."""
    return contender.partition(":")[0]
