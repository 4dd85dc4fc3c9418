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
from statistics import median
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from longdraft.bench.experiment import Tick
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
    environment_info,
    format_cell,
    group_by,
    mean_of,
    median_of,
    new_table,
    nonempty_columns,
    pluralize,
    ratio,
)
from longdraft.bench.ties import first_difference, forward_in_chunks
from longdraft.engine.sampler import Sampling
from longdraft.engine.specpv import SpecPV
from longdraft.methods import get_method
from longdraft.metrics import tokens_per_second
from longdraft.model.checkpoints import LoadedModel
from longdraft.recipes import resolve
from longdraft.speculator import Speculator
from longdraft.views.scorers import SCORERS
from longdraft.views.view import View, parse_dtype

METHOD, FULL = "specpv", "full"
VARIANT_DEFAULTS = {"selector": "minmax", "budget": 1024, "margin": 20}
"""Options that variants of specpv differ in."""
Variants = dict[str, dict[str, Any]]
"""Options of variants by name, as the bench writes contenders."""
DEFINITIONS = (
    "full: full verification with the same drafter. Its likeness to ar is the noise floor; a variant's is to full, and "
    "that of rounded KV to ar.",
    "ROUGE-L: F1, words stemmed, of a text against its reference; mean and least of the samples.",
    "same: tokens before the first difference, the mean; and their share of the text. equal: identical samples.",
    "nats: mean -log p of the text's tokens by the exact target, means of the samples; ar's own beside it.",
    f"{SPEED_DEFINITION}; vs full: over those of full on the same sample; medians of the samples, one run each.",
    ACCEPTED_DEFINITION,
    "score: of the answers against the references, by data set (docs/figures.md); the mean of the samples.",
    "view: rows of the partial cache: first rows + chunks x rows of each + last rows.",
    "partial: target forwards on the partial cache / all of them, after the prefill.",
)
COLUMNS = (
    ("ROUGE-L", "rouge_l_mean", "{:.3f}"),
    ("least", "rouge_l_min", "{:.3f}"),
    ("same", "same_tokens", "{:.1f}"),
    ("share", "same_share", "{:.0%}"),
    ("equal", "identical", "{}"),
    ("nats", "surprise", "{:.3f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("vs full", "speedup_vs_full", "{:.2f}x"),
    ("accepted", "mean_accepted_length", "{:.2f}"),
    ("partial", "partial_share", "{:.0%}"),
    ("score", "score", "{:.3f}"),
    ("view", "view", "{}"),
)


def make_variants(budgets: Sequence[int], margins: Sequence[int], selectors: Sequence[str]) -> Variants:
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
        found[contender_name(METHOD, options)] = options
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

    def __post_init__(self) -> None:
        Sampling(self.temperature)
        if self.max_tokens < 2:
            raise ValueError(f"max-tokens must be at least 2, got {self.max_tokens}")
        if twice := sorted(VARIANT_DEFAULTS.keys() & self.options):
            raise ValueError(f"{', '.join(twice)}: give it as --{twice[0]}, which takes several")
        for name in self.kv_dtypes:
            parse_dtype(name, "kv-dtype")
        resolve(METHOD, self.options)
        known = get_method(METHOD)
        for options in self.variants.values():
            given = {**self.options, **options}
            known.check_options(given)
            known.verifier(**{name: given[name] for name in known.verifier_options if name in given})

    def header(self) -> dict[str, Any]:
        """The settings as a file of records holds them."""
        draft = self.options.get("draft")
        drafts = {} if draft is None else {"draft": fingerprint(Path(draft))}
        return {"settings": {**vars(self), "answer_tokens": 0, "options": jsonable({**self.options, **drafts})}}


class QualityBench:
    """The comparison on one loaded model.

    Attributes:
        drafter: name of the method whose drafter all but ``ar`` use.
        names: contenders, in the order in which they decode a prompt.

    Raises:
        CapabilityError: the drafter's draft is missing; when texts are compared, rouge-score is not installed.
    """

    def __init__(self, loaded: LoadedModel, settings: QualitySettings) -> None:
        self.settings, self._tokenizer = settings, loaded.tokenizer
        first = {**settings.options, **next(iter(settings.variants.values()))}
        recipe = Speculator(METHOD, loaded.model, loaded.tokenizer, plan="fixed", **first).recipe()
        self.drafter = recipe.drafting_method.name
        # A draft that has been read is not read again.
        drafting = {
            name: recipe.options[name] for name in recipe.drafting_method.drafter_options if name in recipe.options
        }
        shared = {**settings.options, **drafting, "drafter": self.drafter}
        own: dict[str, dict[str, Any]] = {self.drafter: drafting}
        own |= {name: {**shared, **each} for name, each in settings.variants.items()}
        own |= {contender_name(REFERENCE, {"kv_dtype": dtype}): {"kv_dtype": dtype} for dtype in settings.kv_dtypes}
        wanted = Settings(
            tuple(own), settings.max_tokens, sampling=Sampling(settings.temperature), ignore_eos=settings.ignore_eos,
            contender_options=own, plan="fixed",
        )  # fmt: skip
        self._bench = Bench(loaded, wanted)
        self._contenders = {FULL if name == self.drafter else name: c for name, c in self._bench.methods.items()}
        self.names = tuple(self._contenders)

    def reference_of(self, name: str) -> str | None:
        """The contender whose text is the reference of another's."""
        return None if name == REFERENCE else FULL if name in self.settings.variants else REFERENCE

    def view_of(self, name: str) -> View:
        """The view of a variant's partial verification."""
        schedule = self._contenders[name].spec.recipe().verifier()
        assert isinstance(schedule, SpecPV)
        return schedule.view

    def notes_on_short_prompts(self, lengths: Sequence[int]) -> list[str]:
        """Notes on variants whose partial cache holds some of the texts of these lengths whole."""
        whole = {name: sum(n <= self.view_of(name).size for n in lengths) for name in self.settings.variants}
        return [
            f"{name}: {count} of {len(lengths)} prompts fit its partial cache whole: full rounds alone."
            for name, count in whole.items()
            if count
        ]

    def measure(self, prompt: Prompt, tick: Tick = lambda name: None) -> dict[str, Any]:
        """Decodes a prompt with everything.

        Args:
            tick: called before each run with the contender's name.

        Returns:
            An object for JSON: the prompt's data set, origin and length, and ``runs`` by contender, with each run's
            text, likeness to its reference, figures and score.
        """
        self._bench.warm_up(prompt)
        for each in self._contenders.values():
            each.release()
        tokens: dict[str, tuple[int, ...]] = {}
        runs: dict[str, dict[str, Any]] = {}
        for name in self.names:
            tick(name)
            gc.collect()  # or a collection falls due inside somebody's turn
            run = self._contenders[name].decode_warm(self._bench.make_job([prompt.token_ids], self.settings.max_tokens))
            (tokens[name],) = run.tokens
            text = str(self._tokenizer.decode(list(tokens[name]), skip_special_tokens=True))
            runs[name] = {
                "text": text,
                "tokens": run.new_tokens,
                "rounds": sum(run.rounds),
                "partial_rounds": run.partial_rounds,
                "decode_seconds": run.decode_seconds,
                "surprise": self._surprise(prompt.token_ids, tokens[name]),
                "score": score_answer(prompt.sample, text),
                "view": f"{self.view_of(name).size:,} = {self.view_of(name)}"
                if name in self.settings.variants
                else None,
            }
            of = self.reference_of(name)
            like = dict.fromkeys(("rouge_l", "same_tokens", "same_share"))
            runs[name] |= like if of is None else _likeness(tokens[of], tokens[name], runs[of]["text"], text)
        sample = prompt.sample
        about = {"dataset": sample.dataset, "origin": sample.origin, "scored": sample.metric or None}
        return {**about, "context_tokens": len(prompt.token_ids), "runs": runs}

    @torch.inference_mode()
    def _surprise(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Mean -log p of an output's tokens by the target with all of the KV, in nats."""
        first, total = len(prompt) - 1, 0.0
        text = [*prompt, *output[:-1]]
        for start, piece, out in forward_in_chunks(
            self._bench.target, self._contenders[REFERENCE].prefill.cache, text, prompt, first
        ):
            if start >= first:
                assert out.logits is not None
                tokens = torch.tensor(output[start - first : start - first + len(piece)], device=out.logits.device)
                total -= float(out.logits[0].float().log_softmax(-1).gather(1, tokens[:, None]).sum())
        return total / len(output)

    def report(self, compared: Sequence[Mapping[str, Any]], complete: bool = True) -> Report:
        """The report of prompts that were compared; keys are those that docs/figures.md defines."""
        by_dataset = group_by(compared, "dataset")
        rows = [self._row(name, own) for own in by_dataset for name in self.names]
        texts = [
            {
                "dataset": each["dataset"],
                "origin": each["origin"],
                "method": name,
                "text": run["text"],
                "reference": of,
                "reference_text": None if of is None else each["runs"][of]["text"],
                "answer": None,
            }
            for each in compared
            for name, run in each["runs"].items()
            for of in [self.reference_of(name)]
        ]  # for scores that are made elsewhere
        document = {"drafter": self.drafter, "rows": rows, "texts": texts, **environment_info(), "complete": complete}
        tables = [self._table(own, nonempty_columns(rows, COLUMNS)) for own in group_by(rows, "dataset")]
        return Report(document, tables, definitions=DEFINITIONS)

    def _row(self, name: str, own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        variant = self.settings.variants.get(name)
        rates = [[_rate(each["runs"][one]) for each in own] for one in (name, FULL)]
        return {
            "method": METHOD if variant else name,
            **{each: variant and variant.get(each) for each in VARIANT_DEFAULTS},
            "dataset": own[0]["dataset"],
            "context_tokens": round(median(each["context_tokens"] for each in own)),
            "reference": self.reference_of(name),
            **quality_figures([each["runs"][name] for each in own]),
            "speedup_vs_full": median_of(map(ratio, *rates)),
            "scored": own[0]["scored"],
        }

    def _table(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> tuple[str, Table]:
        """A title and a table for a data set."""
        of = f"{rows[0]['dataset']}: {pluralize(rows[0]['samples'], 'sample')}, {rows[0]['context_tokens']:,} prompt tokens"
        made = new_table(["method", "selector"], ["budget", "margin", *(head for head, *_ in columns)])
        for row in rows:
            shown = (("selector", "{}"), ("budget", "{:,}"), ("margin", "{}"), *(column[1:] for column in columns))
            made.add_row(Text(row["method"]), *(format_cell(row, key, form) for key, form in shown))
        return f"{of}, drafts by {self.drafter}", made


def _likeness(of: Sequence[int], own: Sequence[int], reference: str, text: str) -> dict[str, float | None]:
    """ROUGE-L of a text and its reference, tokens before the first difference, and their share of the longer."""
    longer, same = max(len(of), len(own)), first_difference(of, own)
    same = longer if same is None else same
    return {"rouge_l": rouge_l()(reference, text), "same_tokens": same, "same_share": same / longer}


def _rate(run: Mapping[str, Any]) -> float | None:
    # Files of earlier versions have a rate that counts the prefill's token.
    seconds = run["decode_seconds"] if "decode_seconds" in run else ratio(run["tokens"], run["tokens_per_second"])
    return tokens_per_second(run["tokens"] - 1, seconds or 0.0)


def quality_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
        "tokens_per_second": median_of(map(_rate, runs)),
        **acceptance_stats((run["tokens"] - 1, run["rounds"]) for run in runs),
        "partial_share": sum(run["partial_rounds"] for run in runs) / rounds if rounds else None,
        "score": mean_of(run.get("score") for run in runs),
        "view": runs[0].get("view"),
    }
