"""Compares texts of partial verification with those of full verification by the same drafter.

Each prompt is read once; ``ar``, full verification and every variant of ``specpv`` then decode it from the same
KV, and ``ar`` from KV that was rounded as it was read. Full verification against ``ar`` is the noise floor: both
are exact, and only rounding makes them differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from longdraft.bench import exact_forwards
from longdraft.bench.contenders import ends_of
from longdraft.bench.json_lines import fingerprint, plain
from longdraft.bench.prompts import Prompt
from longdraft.bench.run import WAKE_PROMPT, WAKE_TOKENS
from longdraft.bench.scores import rouge_l, score
from longdraft.bench.settings import contender
from longdraft.bench.tables import mean_of, median_of
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

    selector: str = "minmax"
    budget: int | None = 1024
    margin: int = 20

    @property
    def options(self) -> dict[str, Any]:
        """The variant as options of the method."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def name(self) -> str:
        """The variant as the bench writes contenders."""
        return contender(METHOD, self.options)


def variants(budgets: Sequence[int], margins: Sequence[int], selectors: Sequence[str]) -> tuple[Variant, ...]:
    """Every combination, each once.

    Raises:
        ValueError: one of them is empty.
    """
    for name, values in (("budgets", budgets), ("margins", margins), ("selectors", selectors)):
        if not values:
            raise ValueError(f"{name} must name one at least")
    found: dict[Variant, None] = {}
    for selector, budget, margin in product(selectors, budgets, margins):
        # An unknown selector is a variant too: the method refuses it, with the names there are.
        found[Variant(selector, budget if SCORERS.get(selector, selector) else None, margin)] = None
    return tuple(found)


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

    variants: tuple[Variant, ...]
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

    def header(self) -> dict[str, Any]:
        """The settings as a file of records holds them."""
        names, draft = [variant.name for variant in self.variants], self.options.get("draft")
        drafts = {} if draft is None else {"draft": fingerprint(Path(draft))}
        return {"settings": {**vars(self), "variants": names, "options": plain({**self.options, **drafts})}}


class Quality:
    """The comparison on one loaded model.

    Attributes:
        names: contenders, in the order in which they decode a prompt.
        variants: those that verify partially, by name.
        drafter: name of the method whose drafter all but ``ar`` use.

    Raises:
        CapabilityError: the drafter's draft is missing; when texts are compared, rouge-score is not installed; when
            answers are asked for, the model's chat template has no second turn.
    """

    def __init__(self, loaded: LoadedModel, settings: QualitySettings) -> None:
        self.settings = settings
        self._tokenizer = loaded.tokenizer
        # One runner for all: packed weights and drafts are held once.
        self.runner = TargetRunner(loaded.model)
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
        self.names, self._awake = tuple(self._recipes), False
        self._cache = PromptCache()
        self._rule = eos_rule(ends_of(self.runner, loaded.tokenizer, settings.ignore_eos))
        self._ends = ends_of(self.runner, loaded.tokenizer, ignore_eos=False)
        self._turn = turn(loaded.tokenizer) if settings.answer_tokens else []

    def reference(self, name: str) -> str | None:
        """The contender whose text is the reference of another's."""
        return None if name == REFERENCE else FULL if name in self.variants else REFERENCE

    def view(self, name: str) -> View:
        """The view of a variant's partial verification."""
        schedule = self._recipes[name].schedule()
        assert isinstance(schedule, SpecPV)
        return schedule.view

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

    def compare(self, prompt: Prompt, tick: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
        """Decodes a prompt with everything.

        Args:
            tick: called before each run with the contender's name.

        Returns:
            An object for JSON: the prompt's data set, origin and length, and ``runs`` by contender, with each run's
            text, likeness to its reference, figures and score.
        """
        if not self._awake:  # the first run does not pay for work that is done once
            self._awake = True
            for name in (FULL, REFERENCE):
                self._decode(name, prompt.tokens[:WAKE_PROMPT], WAKE_TOKENS)
        self._make_room(prompt.tokens, self.settings.new_tokens)
        tokens: dict[str, Sequence[int]] = {}
        runs: dict[str, dict[str, Any]] = {}
        for name in self.names:
            tick(name)
            tokens[name], runs[name] = self._decode(name, prompt.tokens, self.settings.max_tokens)
            answer = self._answer(name, prompt.tokens, tokens[name])
            surprise = self._surprise(prompt.tokens, tokens[name])
            runs[name] |= {"surprise": surprise, "answer": answer, "score": score(prompt.sample, answer)}
        for name, run in runs.items():
            of = self.reference(name)
            run |= NO_LIKENESS if of is None else _likeness(runs[of]["text"], tokens[of], run["text"], tokens[name])
        sample = prompt.sample
        about = {"dataset": sample.dataset, "origin": sample.origin, "scored": sample.score or None}
        return {**about, "context_tokens": len(prompt.tokens), "runs": runs}

    def _answer(self, name: str, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that is scored: that of a run, or the answer that is asked for behind its chain of thought."""
        if not self._turn:
            return self._text(tokens)
        thought = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        asked = [*prompt, *thought, *self._turn]
        return self._text(self._decode(name, asked, self.settings.answer_tokens, eos_rule(self._ends))[0])

    @torch.inference_mode()
    def _surprise(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Mean -log p of an output's tokens by the target with all of the KV, in nats."""
        first, total = len(prompt) - 1, 0.0
        text = [*prompt, *output[:-1]]
        for start, piece, out in exact_forwards.read(self.runner, self._cache, text, prompt, first):
            if start >= first:
                assert out.logits is not None
                tokens = torch.tensor(output[start - first : start - first + len(piece)], device=out.logits.device)
                total -= float(out.logits[0].float().log_softmax(-1).gather(1, tokens[:, None]).sum())
        return total / len(output)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

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
        self, name: str, prompt: Sequence[int], max_tokens: int, rule: StopRule | None = None
    ) -> tuple[list[int], dict[str, Any]]:
        """A run's tokens, and its text and figures."""
        sampling, device = Sampling(self.settings.temperature), self.runner.device
        draws = OwnDraws(torch.Generator(device).manual_seed(0))
        sampler = Sampler(sampling.greedy, sampling.processors(), draws)
        rules = (rule or self._rule,)
        sequence = Text(0, list(prompt), max_tokens, device, greedy=sampling.greedy, sampler=sampler, rules=rules)
        chosen = self._recipes[name]
        runner, cache = self._rounded.get(name, (self.runner, self._cache))
        engine = Engine(runner, chosen.drafter(), chosen.schedule(), cache)
        engine.add(sequence)
        gc.collect()  # or a collection falls due inside somebody's turn
        seconds = sum(step.seconds for step in engine.run() if step.mode != "prefill")
        stats, tokens = engine.stats[0], list(sequence.output)
        return tokens, {
            "text": self._text(tokens),
            "tokens": len(tokens),
            "rounds": stats.rounds,
            "partial_rounds": stats.rounds_by_mode["partial"],
            "tokens_per_second": len(tokens) / seconds if stats.rounds and seconds > 0 else None,
            "view": f"{self.view(name).budget:,} = {self.view(name)}" if name in self.variants else None,
        }


NO_LIKENESS = dict.fromkeys(("rouge_l", "same_tokens", "same_share"))


def _likeness(reference: str, reference_tokens: Sequence[int], text: str, tokens: Sequence[int]) -> dict[str, float]:
    """ROUGE-L of a text and its reference, tokens before the first difference, and their share of the longer text."""
    longer = max(len(reference_tokens), len(tokens))
    same = first_difference(reference_tokens, tokens)
    same = longer if same is None else same
    return {"rouge_l": rouge_l()(reference, text), "same_tokens": same, "same_share": same / longer}


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
