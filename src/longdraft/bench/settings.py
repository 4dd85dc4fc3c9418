"""Settings of a benchmark: contenders and their options, lengths of prompts, batch sizes.

A contender's name is a method with the contender's own options (``specpv:budget=512``), or a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longdraft.attention.prefill_window import check_prefill_window
from longdraft.bench.peers import PEERS
from longdraft.drafts import draft_folder
from longdraft.engine.sampler import Sampling
from longdraft.errors import UnknownMethodError
from longdraft.folders import is_gguf
from longdraft.memory import offload as offloading
from longdraft.model.load.checkpoints import LoadedModel, Progress
from longdraft.options import whole_number
from longdraft.planning import plans
from longdraft.recipes import resolve
from longdraft.registry import METHODS, kind_of
from longdraft.speculator import Speculator
from longdraft.views.view import parse_dtype

REFERENCE = "ar"
"""The contender with which all are compared: plain autoregressive decoding."""
# Options of a contender that change the target, so that prompts are read anew.
TARGET_OPTIONS = ("kv_dtype", "prefill_window")


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark."""

    # names of contenders. ``ar`` is measured even if it is not among them
    methods: tuple[str, ...] = (REFERENCE, "prompt-lookup")
    max_tokens: int = 64  # new tokens of a prompt, at most
    contexts: tuple[int | None, ...] = (None,)  # prompt lengths, each measured; None: prompts are not cut
    batches: tuple[int, ...] = (1,)  # batch sizes, each measured
    repeats: int = 3  # timed runs of each contender
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0  # of the random numbers
    raw: bool = False  # prompts are plain text, without the chat template
    ignore_eos: bool = False  # decode on to ``max_tokens``
    # before the timed runs every contender has a run with its own prefill, which gives the time to first token. False:
    # the prefill of ``ar`` serves all of longdraft's methods
    cold: bool = True
    # options for all methods that take a draft: ``draft``, ``widths``, ``nodes``
    draft_options: Mapping[str, Any] = field(default_factory=dict)
    # by the name of a contender: options of the method, ``plan``, and of the target (TARGET_OPTIONS)
    contender_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plan: str | None = None  # for longdraft's methods, as for Speculator; offload too
    offload: str | None = None
    profile: bool = False  # after the timed runs, profile some more rounds of longdraft's methods
    # ``system`` and arguments of the chat template, such as ``enable_thinking``
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {
            "max-tokens": (self.max_tokens,), "repeats": (self.repeats,), "batch": self.batches,
            "context": tuple(length for length in self.contexts if length is not None),
        }  # fmt: skip
        for name, values in counts.items():
            for value in values:
                whole_number(name, value, 1)
        if not self.contexts or not self.batches:
            raise ValueError("context and batch must name one value at least")
        for name in self.methods:
            if method_name(name) not in METHODS and name not in PEERS:
                names = f"Methods: {', '.join(METHODS)}. Peers: {', '.join(PEERS)}."
                raise UnknownMethodError(f"There is no method {name!r}. {names}")
            if name not in PEERS:
                resolve(method_name(name), self.options(name))  # raises if an option is wrong or the draft unreadable
            plans.check_plan(self.plan_of(name))
            target_options = self.target_options(name)
            parse_dtype(target_options.get("kv_dtype"), "kv_dtype")
            check_prefill_window(target_options.get("prefill_window"))
        offloading.parse(self.offload)
        if self.draft_options and not any(self.takes_draft(name) for name in self.methods):
            names = ", ".join(method.name for method in METHODS.values() if method.takes_draft)
            raise ValueError(f"none of the methods takes {', '.join(self.draft_options)}: add one that does ({names})")

    def options(self, name: str) -> Mapping[str, Any]:
        """Returns the options of a contender's method. The shared ``draft`` applies to contenders that take its kind of
        draft, or to all contenders if there is no such contender."""
        shared = dict(self.draft_options) if self.takes_draft(name) else {}
        draft = shared.get("draft")
        if isinstance(draft, str | Path) and (draft_folder.is_draft_folder(draft) or is_gguf(draft)):
            kinds = (kind_of(draft).name, None)  # None: the method takes drafts of any kind
            takers = [contender for contender in self.methods if self.takes_draft(contender)]
            matching = [contender for contender in takers if METHODS[method_name(contender)].draft_kind in kinds]
            if matching and name not in matching:
                del shared["draft"]
        options = shared | dict(self.contender_options.get(name, {}))
        return {option: value for option, value in options.items() if option not in ("plan", *TARGET_OPTIONS)}

    def plan_of(self, name: str) -> str | None:
        """Returns the ``plan`` of a contender."""
        return dict(self.contender_options.get(name, {})).get("plan", self.plan)

    def target_options(self, name: str) -> dict[str, Any]:
        """Returns the options of a contender that change the target."""
        options = self.contender_options.get(name, {})
        return {option: options[option] for option in TARGET_OPTIONS if option in options}

    def takes_draft(self, name: str) -> bool:
        """Returns True if ``draft_options`` apply to a contender."""
        return name not in PEERS and METHODS[method_name(name)].takes_draft

    @property
    def contenders(self) -> tuple[str, ...]:
        """The name of each contender once. ``ar`` is the first."""
        return tuple(dict.fromkeys((REFERENCE, *self.methods)))


def make_speculator(settings: Settings, name: str, loaded: LoadedModel, progress: Progress | None = None) -> Speculator:
    """Makes the speculator of a contender. Measures the costs that its planner of draft trees needs."""
    spec = Speculator(
        method_name(name), target=loaded.model, tokenizer=loaded.tokenizer, offload=settings.offload,
        plan=settings.plan_of(name), **settings.target_options(name), **settings.options(name),
    )  # fmt: skip
    spec.planner(progress)
    return spec


def contender_name(method: str, options: Mapping[str, Any]) -> str:
    """Returns the name of a contender, such as ``specpv:budget=512``."""
    return ":".join([method, *(f"{name}={format_option(value)}" for name, value in options.items())])


def format_option(value: Any) -> str:
    """Returns the value of an option as text, such as ``4,16``."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def method_name(contender: str) -> str:
    """Returns the method of a contender, such as ``specpv`` of ``specpv:budget=512``."""
    return contender.partition(":")[0]
