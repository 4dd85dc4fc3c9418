"""Compares texts of partial verification with those of full verification by the same drafter.

Each prompt is read once; ``ar``, full verification and every variant of ``specpv`` then decode it from the same
KV, and ``ar`` from KV that was rounded as it was read. Full verification against ``ar`` is the noise floor: both
are exact, and only rounding makes them differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from longdraft.bench.contenders import ends_of
from longdraft.bench.drift import Drift, Listener, RecordedSpecPV, drift, exact
from longdraft.bench.needle import ANSWER_TOKENS, Haystack
from longdraft.bench.prompts import Prompt
from longdraft.bench.run import WAKE_PROMPT, WAKE_TOKENS
from longdraft.bench.scores import rouge_l, score
from longdraft.bench.settings import contender
from longdraft.bench.thinking import TURN, turn
from longdraft.bench.ties import first_difference
from longdraft.engine.draws import OwnDraws
from longdraft.engine.loop import Engine
from longdraft.engine.partial import SpecPV
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.sequence import Sequence as Text
from longdraft.engine.sequence import StopRule
from longdraft.engine.stopping import eos_rule
from longdraft.errors import ContextError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.methods import method_named
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner
from longdraft.recipes import Recipe, recipe_for, resolve
from longdraft.views.scorers import SCORERS
from longdraft.views.view import View, dtype_of

METHOD, FULL, REFERENCE = "specpv", "full", "ar"


@dataclass(frozen=True)
class Variant:
    """A setting of ``specpv``.

    Attributes:
        budget: retrieved tokens; None for a selector that retrieves nothing.
    """

    selector: str
    budget: int | None
    margin: int

    @property
    def options(self) -> dict[str, Any]:
        """The variant as options of the method."""
        given = {"selector": self.selector, "budget": self.budget, "margin": self.margin}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def name(self) -> str:
        """The variant as the bench writes contenders."""
        return contender(METHOD, self.options)


@dataclass(frozen=True)
class Settings:
    """Settings of a comparison.

    Attributes:
        budgets, margins, selectors: every combination is a variant.
        max_tokens: new tokens at most, a prompt.
        answer_tokens: above 0 a text is a chain of thought, behind which an answer of so many tokens at most is asked
            for, and scored in its place.
        ignore_eos: decode on to ``max_tokens``.
        drift: compare hidden states too.
        temperature: above 0 all are sampled with the same random numbers.
        kv_dtypes: plain decoding on a KV cache rounded to each of them is compared too.
        options: further options of specpv and its drafter, the same for all variants.

    Raises:
        ValueError: for a combination that makes no partial cache.
        LongdraftError: for an option that the method does not have, or a draft that cannot be read.
    """

    budgets: tuple[int, ...] = (512, 1024)
    margins: tuple[int, ...] = (20,)
    selectors: tuple[str, ...] = ("minmax",)
    max_tokens: int = 128
    ignore_eos: bool = False
    drift: bool = True
    kv_dtypes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    answer_tokens: int = 0

    def __post_init__(self) -> None:
        Sampling(self.temperature)
        if self.max_tokens < 2:
            raise ValueError(f"max-tokens must be at least 2, got {self.max_tokens}")
        if self.answer_tokens < 0:
            raise ValueError(f"answer-tokens must be at least 0, got {self.answer_tokens}")
        for name in ("budgets", "margins", "selectors"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name one at least")
        if twice := sorted({"budget", "margin", "selector"} & set(self.options)):
            raise ValueError(f"{', '.join(twice)}: give it as --{twice[0]}, which takes several")
        for name in self.kv_dtypes:
            dtype_of(name, "kv-dtype")
        resolve(METHOD, self.options)
        known = method_named(METHOD)
        for variant in self.variants:
            given = {**self.options, **variant.options}
            known.schedule(**{name: given[name] for name in known.schedule_options if name in given})

    @property
    def new_tokens(self) -> int:
        """Tokens behind a prompt, at most."""
        return self.max_tokens + (self.answer_tokens and TURN + self.answer_tokens)

    @property
    def variants(self) -> list[Variant]:
        """All that is compared, each once."""
        # An unknown selector is a variant too: the method refuses it, with the names there are.
        budgets = {s: self.budgets if SCORERS.get(s, s) else (None,) for s in self.selectors}
        return list(dict.fromkeys(Variant(s, b, m) for s in self.selectors for b in budgets[s] for m in self.margins))


@dataclass(frozen=True)
class Decoded:
    """One run.

    Attributes:
        seconds: decode seconds, without the prefill.
        surprise: mean -log p of its tokens by the exact target, in nats; None if it was not computed.
    """

    tokens: tuple[int, ...]
    seconds: float
    rounds: int
    partial_rounds: int
    surprise: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return len(self.tokens) / self.seconds if self.rounds and self.seconds > 0 else None


@dataclass(frozen=True)
class Likeness:
    """Similarity of a text and its reference.

    Attributes:
        rouge_l: F1. same: tokens before the first difference. share: these / the longer text's tokens; 1.0 if equal.
    """

    rouge_l: float
    same: int
    share: float


@dataclass(frozen=True)
class Compared:
    """One prompt.

    Attributes:
        runs: by name: ``ar``, ``full`` and the variants'.
        likeness: by name; ``full`` and rounded KV are compared with ``ar``, every variant with ``full``.
        drifts: by variant; empty without drift.
        scores: of the answers by name, where the sample has references.
        answers: what was scored, by name: the run's text, or the answer behind it.
    """

    prompt: Prompt
    runs: dict[str, Decoded]
    likeness: dict[str, Likeness]
    drifts: dict[str, list[Drift]]
    scores: dict[str, float]
    answers: dict[str, str]


@dataclass(frozen=True)
class Answered:
    """One haystack. By contender: the share of the answer that was found, and the run."""

    haystack: Haystack
    right: dict[str, float]
    runs: dict[str, Decoded]


class Quality:
    """The comparison on one loaded model.

    Attributes:
        drafter: name of the method whose drafter all but ``ar`` use.

    Raises:
        CapabilityError: the drafter's draft is missing; when texts are compared, rouge-score is not installed; when
            answers are asked for, the model's chat template has no second turn.
    """

    def __init__(self, loaded: LoadedModel, settings: Settings) -> None:
        self.settings = settings
        self._tokenizer = loaded.tokenizer
        # One runner for all: packed weights and drafts are held once.
        self.runner = Listener(TargetRunner(loaded.model))
        self.variants = {v.name: v for v in settings.variants}
        first = self._recipe(settings.variants[0], settings.options)
        self.drafter = first.drafting.name
        own = {n: first.options[n] for n in first.drafting.drafter_options if n in first.options}
        # A draft that has been read is not read again.
        loaded_once = {**settings.options, **own, "drafter": self.drafter}
        self._recipes = {
            FULL: recipe_for(first.drafting, own, self.runner),
            REFERENCE: recipe_for(method_named(REFERENCE), {}, self.runner),
            **{name: self._recipe(v, loaded_once) for name, v in self.variants.items()},
        }
        # Rounded KV is another model's, with a cache of its own.
        self._rounded: dict[str, tuple[TargetRunner, PromptCache]] = {}
        for dtype in settings.kv_dtypes:
            name, runner = f"{REFERENCE}:kv_dtype={dtype}", TargetRunner(loaded.model, kv_dtype=dtype_of(dtype))
            self._rounded[name] = runner, PromptCache()
            self._recipes[name] = recipe_for(method_named(REFERENCE), {}, runner)
        self._cache = PromptCache()
        self._rule = eos_rule(ends_of(self.runner, loaded.tokenizer, settings.ignore_eos))
        self._ends = ends_of(self.runner, loaded.tokenizer, ignore_eos=False)
        self._turn = turn(loaded.tokenizer) if settings.answer_tokens else []

    @property
    def names(self) -> list[str]:
        """Contenders, in the order in which they decode a prompt."""
        return list(self._recipes)

    @property
    def approximate(self) -> list[str]:
        """Contenders whose output may differ from the target's."""
        return [*self.variants, *self._rounded]

    def reference(self, name: str) -> str | None:
        """The contender whose text is the reference of another's."""
        return None if name == REFERENCE else FULL if name in self.variants else REFERENCE

    def view(self, name: str) -> View:
        """The view of a variant's partial verification."""
        schedule = self._recipes[name].schedule()
        assert isinstance(schedule, SpecPV)
        return schedule.view

    def seen(self, name: str) -> str | None:
        """The rows of a variant's partial cache, as text; None for what sees all."""
        return f"{self.view(name).budget:,} = {self.view(name)}" if name in self.variants else None

    def cut(self, lengths: Sequence[int]) -> dict[str, int]:
        """Counts the texts of these lengths that each variant's partial cache shortens.

        Raises:
            ContextError: a variant cuts none, so that all its rounds would be full.
        """
        found = {}
        for name in self.variants:
            total = self.view(name).budget
            found[name] = sum(length > total for length in lengths)
            if not found[name]:
                raise ContextError(
                    f"{name}: every round would be full. Its partial cache holds {total:,} tokens, and the "
                    f"longest text, new tokens included, has {max(lengths):,}. Lower --budget, or take longer prompts."
                )
        return found

    def searched(self, haystacks: Sequence[Haystack]) -> list[str]:
        """Contenders of the needle test: ``ar``, ``full``, the variants of the first margin that cut haystacks, and
        rounded KV.

        Raises:
            ContextError: no variant cuts one.
        """
        shortest = min(len(h.tokens) for h in haystacks)
        able = [
            name
            for name, v in self.variants.items()
            if v.margin == self.settings.margins[0] and self.view(name).budget < shortest
        ]
        if not able:
            raise ContextError(
                f"No partial cache is smaller than the haystacks, which have {shortest:,} tokens: lower --budget, or "
                "raise --needle-context."
            )
        return [REFERENCE, FULL, *able, *self._rounded]

    def wake(self, prompt: Sequence[int]) -> None:
        """Warm-up: decodes a few tokens, so that the first run does not pay for work that is done once."""
        for name in (FULL, REFERENCE):
            self._decode(name, prompt[:WAKE_PROMPT], WAKE_TOKENS)

    def compare(self, prompt: Prompt, tick: Callable[[str], None] = lambda name: None) -> Compared:
        """Decodes a prompt with everything.

        Args:
            tick: called before each run with the contender's name.
        """
        runs: dict[str, Decoded] = {}
        drifts: dict[str, list[Drift]] = {}
        answers: dict[str, str] = {}
        self._make_room(prompt.tokens, self.settings.new_tokens)
        for name in self._recipes:
            tick(name)
            recorded = None
            if self.settings.drift and name in self.variants:
                recorded = RecordedSpecPV(self.view(name), self.runner)
            run = self._decode(name, prompt.tokens, self.settings.max_tokens, recorded)
            seen = exact(self.runner, self._cache, prompt.tokens, run.tokens)
            runs[name] = replace(run, surprise=seen.surprise)
            if recorded is not None:
                drifts[name] = drift(seen, len(prompt.tokens), recorded.computed)
            answers[name] = self._answer(name, prompt.tokens, run.tokens)
        likeness = {
            name: self._likeness(runs[of], runs[name]) for name in runs if (of := self.reference(name)) is not None
        }
        given = {name: score(prompt.sample, text) for name, text in answers.items()}
        known = {name: x for name, x in given.items() if x is not None}
        return Compared(prompt, runs, likeness, drifts, known, answers)

    def search(
        self, haystack: Haystack, names: Sequence[str], tick: Callable[[str], None] = lambda n: None
    ) -> Answered:
        """Asks contenders for a haystack's code."""
        runs = {}
        self._make_room(haystack.tokens, ANSWER_TOKENS)
        # The one that wants hidden states beside the KV comes first.
        for name in sorted(names, key=self.names.index):
            tick(name)
            runs[name] = self._decode(name, haystack.tokens, ANSWER_TOKENS)
        right = {name: haystack.score(self.text(run.tokens)) for name, run in runs.items()}
        return Answered(haystack, right, runs)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a run's tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _answer(self, name: str, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that is scored: that of a run, or the answer that is asked for behind its chain of thought."""
        if not self._turn:
            return self.text(tokens)
        thought = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        asked = [*prompt, *thought, *self._turn]
        return self.text(self._decode(name, asked, self.settings.answer_tokens, rule=eos_rule(self._ends)).tokens)

    def _recipe(self, variant: Variant, options: Mapping[str, Any]) -> Recipe:
        return recipe_for(*resolve(METHOD, {**options, **variant.options}), self.runner)

    def _make_room(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Takes memory for the largest run once: the store need not grow, which would hold it twice."""
        drafter = self._recipes[FULL].drafter()
        nodes, layers = drafter.max_nodes, drafter.feature_layers(self.runner)
        extra = max(r.schedule().extra_rows(nodes) for r in self._recipes.values())
        new_store = partial(self.runner.new_store, feature_layers=layers)
        self._cache.open(new_store, 1, len(prompt) + max_tokens + nodes + extra, layers)

    def _decode(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        schedule: RecordedSpecPV | None = None,
        rule: StopRule | None = None,
    ) -> Decoded:
        sampling, device = Sampling(self.settings.temperature), self.runner.device
        draws = OwnDraws(torch.Generator(device).manual_seed(0))
        sampler = Sampler(sampling.greedy, sampling.processors(), draws)
        sequence = Text(
            0,
            list(prompt),
            max_tokens,
            device,
            greedy=sampling.greedy,
            sampler=sampler,
            rules=(rule or self._rule,),
        )
        chosen = self._recipes[name]
        runner, cache = self._rounded.get(name, (self.runner, self._cache))
        engine = Engine(runner, chosen.drafter(), schedule or chosen.schedule(), cache)
        engine.add(sequence)
        gc.collect()  # or a collection falls due inside somebody's turn
        seconds = sum(step.seconds for step in engine.run() if step.mode != "prefill")
        stats = engine.stats[0]
        return Decoded(tuple(sequence.output), seconds, stats.rounds, stats.rounds_by_mode["partial"])

    def _likeness(self, reference: Decoded, run: Decoded) -> Likeness:
        longer = max(len(reference.tokens), len(run.tokens))
        same = first_difference(reference.tokens, run.tokens)
        same = longer if same is None else same
        rouge = rouge_l()(self.text(reference.tokens), self.text(run.tokens))
        return Likeness(rouge, same, same / longer)
