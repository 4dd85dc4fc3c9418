"""Compares the output of partial verification (``specpv``) with the output of full verification by the same drafter.

Each prompt is prefilled once. ``ar``, full verification and every variant of ``specpv`` decode from this KV. ``ar`` can
also decode with a KV cache of lower precision. The difference of full verification from ``ar`` is the noise floor: both
have the target's distribution, so only rounding makes the outputs differ.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from longdraft.bench import machine
from longdraft.bench.contenders import eos_ids
from longdraft.bench.experiment import Tick, no_bar
from longdraft.bench.prompts import Prompt
from longdraft.bench.records import fingerprint, jsonable
from longdraft.bench.run import Bench
from longdraft.bench.scores import rouge_l, score_answer
from longdraft.bench.settings import REFERENCE, Settings, contender_name
from longdraft.bench.tables import (
    ACCEPTED_DEFINITION,
    SPEED_DEFINITION,
    Column,
    Report,
    acceptance_stats,
    format_cell,
    group_by,
    mean_of,
    median_of,
    new_table,
    nonempty_columns,
    pluralize,
    ratio,
)
from longdraft.bench.thinking import MAX_TURN_TOKENS, answer_turn
from longdraft.bench.ties import first_difference, forward_in_chunks
from longdraft.engine.sampler import Sampling
from longdraft.engine.specpv import SpecPV
from longdraft.metrics import tokens_per_second
from longdraft.model.load.checkpoints import LoadedModel
from longdraft.options import whole_number
from longdraft.recipes import resolve
from longdraft.registry import get_method
from longdraft.speculator import Speculator
from longdraft.views.scorers import SCORERS
from longdraft.views.view import View, parse_dtype

METHOD = "specpv"
FULL = "full"  # name of the contender with the same drafter and full verification
VARIANT_DEFAULTS = {"selector": "minmax", "budget": 1024, "margin": 20}
"""The options in which the variants of specpv differ, with defaults."""
Variants = dict[str, dict[str, Any]]
"""By the name of a contender, such as ``specpv:budget=512``: the options of the variant."""
DEFINITIONS = (
    "full: full verification with the same drafter. Variants are compared with full; full and rounded KV are compared "
    "with ar, and full against ar is the noise floor.",
    "ROUGE-L: F1 of stemmed words, of an output against its reference; mean and least of the samples.",
    "same: mean tokens before the first difference; share: their share of the text. equal: identical samples.",
    "nats: mean -log p of the text's tokens by the exact target; means of the samples.",
    f"{SPEED_DEFINITION}; vs full: over those of full on the same sample; medians of the samples, one run each.",
    ACCEPTED_DEFINITION,
    "score: the answers against the data set's references (docs/figures.md); the mean of the samples.",
    "view: KV entries of the partial cache: first entries + chunks x entries of each + last entries.",
    "partial: target forwards on the partial cache / all target forwards, after the prefill.",
)
# (heading, key of the figure in a row, format)
COLUMNS = (
    ("ROUGE-L", "rouge_l_mean", "{:.3f}"), ("least", "rouge_l_min", "{:.3f}"),
    ("same", "same_tokens", "{:.1f}"), ("share", "same_share", "{:.0%}"), ("equal", "identical", "{}"),
    ("nats", "surprise", "{:.3f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"), ("vs full", "speedup_vs_full", "{:.2f}x"),
    ("accepted", "mean_accepted_length", "{:.2f}"), ("partial", "partial_share", "{:.0%}"),
    ("score", "score", "{:.3f}"), ("view", "view", "{}"),
)  # fmt: skip


def make_variants(budgets: Sequence[int], margins: Sequence[int], selectors: Sequence[str]) -> Variants:
    """Makes a variant of each combination of the options. A selector that retrieves nothing has no budget."""
    for name, values in (("budgets", budgets), ("margins", margins), ("selectors", selectors)):
        if not values:
            raise ValueError(f"{name} must not be empty")
    variants = {}
    for selector, budget, margin in product(selectors, budgets, margins):
        # An unknown selector counts as one that retrieves: the method later raises an error that names all selectors.
        budget_option = {"budget": budget} if SCORERS.get(selector, selector) else {}
        options = {"selector": selector, **budget_option, "margin": margin}
        variants[contender_name(METHOD, options)] = options
    return variants


@dataclass(frozen=True)
class QualitySettings:
    """Settings of a comparison.

    Raises:
        ValueError: the options make no partial cache.
        LongdraftError: the method has no such option, or the draft cannot be read.
    """

    variants: Variants  # the compared variants of specpv
    max_tokens: int = 128  # new tokens of a prompt, at most
    ignore_eos: bool = False  # decode on to ``max_tokens``
    kv_dtypes: tuple[str, ...] = ()  # dtypes of KV caches with which ``ar`` decodes too
    options: Mapping[str, Any] = field(default_factory=dict)  # options of specpv and its drafter that all variants have
    temperature: float = 0.0  # above 0, all contenders sample with the same random numbers
    # Above 0, a text is a chain of thought. Then the answer is asked for, of so many tokens at most, and scored.
    answer_tokens: int = 0

    def __post_init__(self) -> None:
        Sampling(self.temperature)
        whole_number("max-tokens", self.max_tokens, 2)
        whole_number("answer-tokens", self.answer_tokens, 0)
        if varied := sorted(VARIANT_DEFAULTS.keys() & self.options):
            raise ValueError(f"{', '.join(varied)} differs between variants: give it as --{varied[0]}, a list")
        for name in self.kv_dtypes:
            parse_dtype(name, "kv-dtype")
        resolve(METHOD, self.options)
        method = get_method(METHOD)
        for variant_options in self.variants.values():
            options = {**self.options, **variant_options}
            method.check_options(options)
            method.verifier(**{name: options[name] for name in method.verifier_options if name in options})

    @property
    def new_tokens(self) -> int:
        """Tokens after a prompt, at most."""
        return self.max_tokens + (MAX_TURN_TOKENS + self.answer_tokens if self.answer_tokens else 0)

    def header(self) -> dict[str, Any]:
        """The settings for the header of a file of records."""
        path = self.options.get("draft")
        draft = {} if path is None else {"draft": fingerprint(Path(path))}
        return {"settings": {**vars(self), "options": jsonable({**self.options, **draft})}}


class QualityBench:
    """Compares the outputs of contenders on one loaded model.

    Attributes:
        drafter: name of the method whose drafter all contenders but ``ar`` use.
        names: names of the contenders, in the order in which they decode a prompt.

    Raises:
        CapabilityError: the drafter's draft is missing; or answers are to be asked for, and the chat template has no
            second turn. If rouge-score is missing, ``measure`` raises CapabilityError.
    """

    def __init__(self, loaded: LoadedModel, settings: QualitySettings) -> None:
        self.settings, self._tokenizer = settings, loaded.tokenizer
        first_variant = {**settings.options, **next(iter(settings.variants.values()))}
        recipe = Speculator(METHOD, loaded.model, loaded.tokenizer, plan="fixed", **first_variant).recipe()
        method = recipe.drafting_method
        self.drafter = method.name
        # These options hold the loaded draft, so that the draft is read once.
        drafter_options = {name: recipe.options[name] for name in method.drafter_options if name in recipe.options}
        common = {**settings.options, **drafter_options, "drafter": self.drafter}
        options: dict[str, dict[str, Any]] = {self.drafter: drafter_options}
        options |= {name: {**common, **variant} for name, variant in settings.variants.items()}
        options |= {contender_name(REFERENCE, {"kv_dtype": dtype}): {"kv_dtype": dtype} for dtype in settings.kv_dtypes}
        bench_settings = Settings(
            tuple(options), settings.max_tokens, sampling=Sampling(settings.temperature),
            ignore_eos=settings.ignore_eos, contender_options=options, plan="fixed",
        )  # fmt: skip
        self._bench = Bench(loaded, bench_settings)
        self.names = tuple(FULL if name == self.drafter else name for name in self._bench.methods)
        self._contenders = dict(zip(self.names, self._bench.methods.values(), strict=True))
        self._eos = eos_ids(self._bench.target, loaded.tokenizer, ignore_eos=False)
        self._answer_turn = answer_turn(loaded.tokenizer) if settings.answer_tokens else ()

    def reference_of(self, name: str) -> str | None:
        """Returns the name of the contender that a contender is compared with; None for ``ar``."""
        if name == REFERENCE:
            return None
        return FULL if name in self.settings.variants else REFERENCE

    def view_of(self, name: str) -> View:
        """Returns the view of the KV that a variant's partial verifications see (the partial cache)."""
        verifier = self._contenders[name].spec.recipe().verifier()
        assert isinstance(verifier, SpecPV)
        return verifier.view

    def notes_on_short_prompts(self, lengths: Sequence[int]) -> list[str]:
        """Notes on variants whose partial cache holds whole contexts. ``lengths``: for each prompt, its tokens."""
        sizes = {name: self.view_of(name).size for name in self.settings.variants}
        num_fitting = {name: sum(length <= size for length in lengths) for name, size in sizes.items()}
        all_full = f"of {len(lengths)} prompts fit into the partial cache, so all of their rounds are full."
        return [f"{name}: {count} {all_full}" for name, count in num_fitting.items() if count]

    def measure(self, prompt: Prompt, tick: Tick = no_bar) -> dict[str, Any]:
        """Decodes a prompt with every contender. Calls ``tick`` with the contender's name.

        Returns:
            A JSON object: the prompt's data set, origin and length, and in ``runs`` by contender's name: the text, its
            similarity to the reference's text, its score, and figures of the run.
        """
        self._bench.warm_up(prompt)
        for contender in self._contenders.values():
            contender.release()
        tokens: dict[str, tuple[int, ...]] = {}
        runs: dict[str, dict[str, Any]] = {}
        for name in self.names:
            job = self._bench.make_job([prompt.token_ids], self.settings.max_tokens).announced(tick, name)
            gc.collect()  # so that no collection falls into a timed run
            run = self._contenders[name].decode_warm(job)
            (tokens[name],) = run.tokens
            text = self._text(tokens[name])
            answer = self._answer(name, prompt.token_ids, tokens[name]) if self._answer_turn else None
            view = self.view_of(name) if name in self.settings.variants else None
            runs[name] = {
                "text": text, "tokens": run.new_tokens, "rounds": sum(run.rounds),
                "partial_rounds": run.partial_rounds, "decode_seconds": run.decode_seconds,
                "surprise": self._nll(prompt.token_ids, tokens[name]),
                "answer": answer, "score": score_answer(prompt.sample, text if answer is None else answer),
                "view": None if view is None else f"{view.size:,} = {view}",
            }  # fmt: skip
            if (reference := self.reference_of(name)) is None:
                runs[name] |= dict.fromkeys(("rouge_l", "same_tokens", "same_share"))
            else:
                runs[name] |= _compare_texts(tokens[reference], tokens[name], runs[reference]["text"], text)
        sample = prompt.sample
        origin = {"dataset": sample.dataset, "origin": sample.origin, "scored": sample.metric or None}
        return {**origin, "context_tokens": len(prompt.token_ids), "runs": runs}

    def _answer(self, name: str, prompt: Sequence[int], thought: Sequence[int]) -> str:
        """Returns the contender's answer after its chain of thought."""
        thought = thought[:-1] if thought[-1] in self._eos else thought
        job = self._bench.make_job([(*prompt, *thought, *self._answer_turn)], self.settings.answer_tokens)
        return self._text(self._contenders[name].decode_warm(replace(job, eos_ids=self._eos)).tokens[0])

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @torch.inference_mode()
    def _nll(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Returns the mean negative log-likelihood (nats) of an output's tokens by the target with the full context."""
        logits_from, nll = len(prompt) - 1, 0.0  # the last token of the prompt predicts the first one of the output
        context, cache = [*prompt, *output[:-1]], self._contenders[REFERENCE].prefill.cache
        for start, chunk, out in forward_in_chunks(self._bench.target, cache, context, prompt, logits_from):
            if start >= logits_from:
                assert out.logits is not None
                index = start - logits_from
                tokens = torch.tensor(output[index : index + len(chunk)], device=out.logits.device)
                nll -= float(out.logits[0].float().log_softmax(-1).gather(1, tokens[:, None]).sum())
        return nll / len(output)

    def report(self, measured: Sequence[Mapping[str, Any]], complete: bool = True) -> Report:
        """Makes the report of measured prompts. docs/figures.md defines its keys."""
        rows = [self._row(name, group) for group in group_by(measured, "dataset") for name in self.names]
        texts = [  # for users who compute other scores, such as BLEURT
            {
                "dataset": prompt["dataset"], "origin": prompt["origin"], "method": name, "text": run["text"],
                "reference": reference,
                "reference_text": None if reference is None else prompt["runs"][reference]["text"],
                "answer": run.get("answer"),
            }
            for prompt in measured
            for name, run in prompt["runs"].items()
            for reference in [self.reference_of(name)]
        ]  # fmt: skip
        document = {"drafter": self.drafter, "rows": rows, "texts": texts, **machine.environment()}
        document["complete"] = complete
        tables = [self._table(group, nonempty_columns(rows, COLUMNS)) for group in group_by(rows, "dataset")]
        return Report(document, tables, definitions=DEFINITIONS)

    def _row(self, name: str, measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        variant = self.settings.variants.get(name)
        speeds = [[run_speed(prompt["runs"][contender]) for prompt in measured] for contender in (name, FULL)]
        return {
            "method": METHOD if variant else name,
            **{option: variant and variant.get(option) for option in VARIANT_DEFAULTS},
            "dataset": measured[0]["dataset"],
            "context_tokens": round(median(prompt["context_tokens"] for prompt in measured)),
            "reference": self.reference_of(name),
            **quality_figures([prompt["runs"][name] for prompt in measured]),
            "speedup_vs_full": median_of(map(ratio, *speeds)),
            "scored": measured[0]["scored"],
        }

    def _table(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> tuple[str, Table]:
        """Makes the title and the table of a data set."""
        samples, length = pluralize(rows[0]["samples"], "sample"), rows[0]["context_tokens"]
        title = f"{rows[0]['dataset']}: {samples}, {length:,} prompt tokens, drafts by {self.drafter}"
        table = new_table(["method", "selector"], ["budget", "margin", *(heading for heading, *_ in columns)])
        for row in rows:
            cells = (("selector", "{}"), ("budget", "{:,}"), ("margin", "{}"), *(column[1:] for column in columns))
            table.add_row(Text(row["method"]), *(format_cell(row, key, pattern) for key, pattern in cells))
        return title, table


def _compare_texts(
    reference: Sequence[int], tokens: Sequence[int], reference_text: str, text: str
) -> dict[str, float]:  # fmt: skip
    """Compares an output with its reference. Returns ROUGE-L, the number of tokens before the first difference, and the
    share of these tokens in the longer output."""
    longer, position = max(len(reference), len(tokens)), first_difference(reference, tokens)
    same = longer if position is None else position
    return {"rouge_l": rouge_l()(reference_text, text), "same_tokens": same, "same_share": same / longer}


def run_speed(run: Mapping[str, Any]) -> float | None:
    """Returns the tokens/s of a run. Files of old versions have tokens/s instead, and count the prefill's token."""
    seconds = run["decode_seconds"] if "decode_seconds" in run else ratio(run["tokens"], run["tokens_per_second"])
    return tokens_per_second(run["tokens"] - 1, seconds or 0.0)


def quality_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a contender's runs. docs/figures.md defines the keys."""
    rounds = sum(run["rounds"] for run in runs)
    rouge_scores = [run["rouge_l"] for run in runs if run["rouge_l"] is not None]
    shares = [run["same_share"] for run in runs if run.get("same_share") is not None]
    return {
        "samples": len(runs),
        "rouge_l_mean": mean_of(rouge_scores),
        "rouge_l_min": min(rouge_scores, default=None),
        "same_tokens": mean_of(run.get("same_tokens") for run in runs),
        "same_share": mean_of(shares),
        "identical": shares.count(1.0) if shares else None,
        "surprise": mean_of(run["surprise"] for run in runs),
        "tokens_per_second": median_of(map(run_speed, runs)),
        **acceptance_stats((run["tokens"] - 1, run["rounds"]) for run in runs),
        "partial_share": sum(run["partial_rounds"] for run in runs) / rounds if rounds else None,
        "score": mean_of(run.get("score") for run in runs),
        "view": runs[0].get("view"),
    }
