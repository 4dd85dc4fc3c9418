"""Compares texts of partial verification with those of full verification by the same drafter.

Each prompt is read once; ``ar``, full verification and every variant of ``specpv`` then decode it from the same
KV, and ``ar`` from KV that was rounded as it was read. Full verification against ``ar`` is the noise floor: both
are exact, and only rounding makes them differ.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.contenders import Job, Kept, Ours, Run, ends_of
from longdraft.bench.experiment import Tick
from longdraft.bench.json_lines import fingerprint, plain
from longdraft.bench.prompts import Prompt
from longdraft.bench.run import WAKE_PROMPT, WAKE_TOKENS
from longdraft.bench.scores import rouge_l, score
from longdraft.bench.settings import contender
from longdraft.bench.tables import mean_of, median_of
from longdraft.bench.thinking import TURN, turn
from longdraft.bench.ties import first_difference, read
from longdraft.engine.partial import SpecPV
from longdraft.engine.sampler import Sampling
from longdraft.errors import ContextError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.methods import method_named
from longdraft.model.checkpoints import LoadedModel
from longdraft.recipes import resolve
from longdraft.speculator import Speculator
from longdraft.views.scorers import SCORERS
from longdraft.views.view import View, dtype_of

METHOD, FULL, REFERENCE = "specpv", "full", "ar"
VARIED = {"selector": "minmax", "budget": 1024, "margin": 20}
"""Options that variants of specpv differ in."""
Variants = dict[str, dict[str, Any]]
"""Options of variants by name, as the bench writes contenders."""


def variants(budgets: Sequence[int], margins: Sequence[int], selectors: Sequence[str]) -> Variants:
    """Every combination; a selector that retrieves nothing has no budget.

    Raises:
        ValueError: one of them is empty.
    """
    for name, values in (("budgets", budgets), ("margins", margins), ("selectors", selectors)):
        if not values:
            raise ValueError(f"{name} must name one at least")
    found = {}
    for selector, budget, margin in product(selectors, budgets, margins):
        # An unknown selector is a variant too: the method refuses it, with the names there are.
        retrieved = {"budget": budget} if SCORERS.get(selector, selector) else {}
        options = {"selector": selector, **retrieved, "margin": margin}
        found[contender(METHOD, options)] = options
    return found


@dataclass(frozen=True)
class QualitySettings:
    """Settings of a comparison.

    Attributes:
        max_tokens: new tokens at most, a prompt.
        ignore_eos: decode on to ``max_tokens``.
        kv_dtypes: plain decoding on a KV cache rounded to each of them is compared too.
        options: further options of specpv and its drafter, the same for all variants.
        temperature: above 0 all are sampled with the same random numbers.
        answer_tokens: above 0 a text is a chain of thought, behind which an answer of so many tokens at most is asked
            for, and scored in its place.

    Raises:
        ValueError: for a combination that makes no partial cache.
        LongdraftError: for an option that the method does not have, or a draft that cannot be read.
    """

    variants: Variants
    max_tokens: int = 128
    ignore_eos: bool = False
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
        if twice := sorted(VARIED.keys() & self.options):
            raise ValueError(f"{', '.join(twice)}: give it as --{twice[0]}, which takes several")
        for name in self.kv_dtypes:
            dtype_of(name, "kv-dtype")
        resolve(METHOD, self.options)
        known = method_named(METHOD)
        for options in self.variants.values():
            given = {**self.options, **options}
            known.schedule(**{name: given[name] for name in known.schedule_options if name in given})

    @property
    def new_tokens(self) -> int:
        """Tokens behind a prompt, at most."""
        return self.max_tokens + (self.answer_tokens and TURN + self.answer_tokens)

    def header(self) -> dict[str, Any]:
        """The settings as a file of records holds them."""
        draft = self.options.get("draft")
        drafts = {} if draft is None else {"draft": fingerprint(Path(draft))}
        return {"settings": {**vars(self), "options": plain({**self.options, **drafts})}}


class Quality:
    """The comparison on one loaded model.

    Attributes:
        drafter: name of the method whose drafter all but ``ar`` use.

    Raises:
        CapabilityError: the drafter's draft is missing; when texts are compared, rouge-score is not installed; when
            answers are asked for, the model's chat template has no second turn.
    """

    def __init__(self, loaded: LoadedModel, settings: QualitySettings) -> None:
        self.settings, self._loaded = settings, loaded
        options = settings.options
        first = self._method(METHOD, {**options, **next(iter(settings.variants.values()))}).recipe()
        self.drafter = first.drafting.name
        # A draft that has been read is not read again.
        own = {name: first.options[name] for name in first.drafting.drafter_options if name in first.options}
        shared = {**options, **own, "drafter": self.drafter}
        specs = {REFERENCE: self._method(REFERENCE, {}), FULL: self._method(self.drafter, own)}
        specs |= {name: self._method(METHOD, {**shared, **each}) for name, each in settings.variants.items()}
        layers = specs[FULL].feature_layers()
        self._kept = Kept(PromptCache(layers), layers)
        self._contenders = {name: Ours(name, spec, self._kept) for name, spec in specs.items()}
        for dtype in settings.kv_dtypes:  # its prompt's KV is rounded too
            name, spec = f"{REFERENCE}:kv_dtype={dtype}", self._method(REFERENCE, {"kv_dtype": dtype})
            self._contenders[name] = Ours(name, spec, Kept(PromptCache()))
        self._runner = specs[REFERENCE].runner()
        self._ends = ends_of(self._runner, loaded.tokenizer, ignore_eos=False)
        self._turn = turn(loaded.tokenizer) if settings.answer_tokens else []
        self._awake = False

    def _method(self, name: str, options: Mapping[str, Any]) -> Speculator:
        return Speculator(name, self._loaded.model, self._loaded.tokenizer, plan="fixed", **options)

    @property
    def names(self) -> tuple[str, ...]:
        """Contenders, in the order in which they decode a prompt."""
        return tuple(self._contenders)

    def reference(self, name: str) -> str | None:
        """The contender whose text is the reference of another's."""
        return None if name == REFERENCE else FULL if name in self.settings.variants else REFERENCE

    def view(self, name: str) -> View:
        """The view of a variant's partial verification."""
        schedule = self._contenders[name].spec.recipe().schedule()
        assert isinstance(schedule, SpecPV)
        return schedule.view

    def uncut(self, lengths: Sequence[int]) -> list[str]:
        """Notes on variants whose partial cache holds some of the texts of these lengths whole.

        Raises:
            ContextError: it holds all of them, so that all rounds would be full.
        """
        notes = []
        for name in self.settings.variants:
            total = self.view(name).budget
            whole = sum(length <= total for length in lengths)
            if whole == len(lengths):
                raise ContextError(
                    f"{name}: every round would be full. Its partial cache holds {total:,} tokens, and the "
                    f"longest text, new tokens included, has {max(lengths):,}. Lower --budget, or take longer prompts."
                )
            if whole:
                of = f"{whole} of {len(lengths)} prompts fit"
                notes.append(f"{name}: {of} its partial cache whole: full rounds alone.")
        return notes

    def compare(self, prompt: Prompt, tick: Tick = lambda name: None) -> dict[str, Any]:
        """Decodes a prompt with everything.

        Args:
            tick: called before each run with the contender's name.

        Returns:
            An object for JSON: the prompt's data set, origin and length, and ``runs`` by contender, with each run's
            text, likeness to its reference, figures and score.
        """
        if not self._awake:  # the first run does not pay for work that is done once
            self._awake = True
            for name in (REFERENCE, FULL):
                self._run(name, prompt.tokens[:WAKE_PROMPT], WAKE_TOKENS)
        self._kept.clear()
        tokens: dict[str, tuple[int, ...]] = {}
        runs: dict[str, dict[str, Any]] = {}
        for name in self.names:
            tick(name)
            run = self._run(name, prompt.tokens, self.settings.max_tokens)
            (tokens[name],) = run.tokens
            answer = self._answer(name, prompt.tokens, tokens[name])
            runs[name] = {
                "text": self._text(tokens[name]),
                "tokens": run.new_tokens,
                "rounds": sum(run.rounds),
                "partial_rounds": run.partial_rounds,
                "tokens_per_second": run.tokens_per_second,
                "surprise": self._surprise(prompt.tokens, tokens[name]),
                "answer": answer,
                "score": score(prompt.sample, answer),
                "view": f"{self.view(name).budget:,} = {self.view(name)}" if name in self.settings.variants else None,
            }
            runs[name] |= self._likeness(self.reference(name), name, tokens, runs)
        sample = prompt.sample
        about = {"dataset": sample.dataset, "origin": sample.origin, "scored": sample.score or None}
        return {**about, "context_tokens": len(prompt.tokens), "runs": runs}

    def _run(self, name: str, prompt: Sequence[int], max_tokens: int, eos: frozenset[int] | None = None) -> Run:
        if eos is None:
            eos = frozenset() if self.settings.ignore_eos else self._ends
        gc.collect()  # or a collection falls due inside somebody's turn
        return self._contenders[name].warm(
            Job((tuple(prompt),), max_tokens, Sampling(self.settings.temperature), 0, eos)
        )

    def _answer(self, name: str, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that is scored: that of a run, or the answer that is asked for behind its chain of thought."""
        if not self._turn:
            return self._text(tokens)
        thought = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        run = self._run(name, (*prompt, *thought, *self._turn), self.settings.answer_tokens, self._ends)
        return self._text(run.tokens[0])

    def _likeness(
        self, of: str | None, name: str, tokens: Mapping[str, Sequence[int]], runs: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, float | None]:
        """ROUGE-L of a text and its reference, tokens before the first difference, and their share of the longer."""
        if of is None:
            return {"rouge_l": None, "same_tokens": None, "same_share": None}
        longer, same = max(len(tokens[of]), len(tokens[name])), first_difference(tokens[of], tokens[name])
        same = longer if same is None else same
        like = rouge_l()(runs[of]["text"], runs[name]["text"])
        return {"rouge_l": like, "same_tokens": same, "same_share": same / longer}

    @torch.inference_mode()
    def _surprise(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Mean -log p of an output's tokens by the target with all of the KV, in nats."""
        first, total = len(prompt) - 1, 0.0
        text = [*prompt, *output[:-1]]
        for start, piece, out in read(self._runner, self._kept.cache, text, prompt, first):
            if start >= first:
                assert out.logits is not None
                tokens = torch.tensor(output[start - first : start - first + len(piece)], device=out.logits.device)
                total -= float(out.logits[0].float().log_softmax(-1).gather(1, tokens[:, None]).sum())
        return total / len(output)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))


def figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of one contender over its runs, with the keys that docs/figures.md defines."""
    rounds = sum(run["rounds"] for run in runs)
    likeness = [run["rouge_l"] for run in runs if run["rouge_l"] is not None]
    shares = [run["same_share"] for run in runs if run.get("same_share") is not None]
    return {
        "samples": len(runs),
        "rouge_l_mean": mean_of(likeness),
        "rouge_l_min": min(likeness, default=None),
        "same_tokens": mean_of(run.get("same_tokens") for run in runs),
        "same_share": mean_of(shares),
        "identical": shares.count(1.0) if shares else None,
        "surprise": mean_of(run["surprise"] for run in runs),
        "tokens_per_second": median_of(run["tokens_per_second"] for run in runs),
        "mean_accepted_length": sum(run["tokens"] - 1 for run in runs) / rounds if rounds else None,
        "partial_share": sum(run["partial_rounds"] for run in runs) / rounds if rounds else None,
        "score": mean_of(run.get("score") for run in runs),
        "view": runs[0].get("view"),
    }
