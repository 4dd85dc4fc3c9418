"""Tiny targets, drafts for them, and what plain decoding writes: each made once a test process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from longdraft import Sampling, Speculator
from longdraft.engine.stats import Result
from tests.drafters.one_forward_folders import small_dflash, small_peagle
from tests.drafts import random_draft, random_eagle3, random_heads, random_mtp, random_onepass, small_lm
from tests.exactness.cases import Case
from tests.tiny import Family, tiny_model

VOCABULARY = 11
# A text that repeats; one shorter than any window; one that outgrows every view; a single token.
PROMPTS = ((3, 9, 4, 7, 2, 5) * 8, (1, 2, 3), tuple(i * i % VOCABULARY for i in range(130)), (8,))
GREEDY = Sampling()
DRAWN = Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)
PENALISED = Sampling(repetition_penalty=1.4, repetition_window=5)
SEED = 5
NEW = 16
FEW = [1, 2, 3, 4, 7]  # tokens of a draft that knows no more

_DRAFTS = {
    "longspec": lambda folder, model: random_draft(folder, model),
    "longspec wide": lambda folder, model: random_draft(folder, model, window=16),
    "longspec kept": lambda folder, model: random_draft(folder, model, kept=FEW),
    "eagle3": lambda folder, model: random_eagle3(folder, model, layers=(0, 1, 2)),
    "eagle3 window": lambda folder, model: random_eagle3(folder, model, layers=(0, 1, 2), window=7),
    "eagle3 kept": lambda folder, model: random_eagle3(folder, model, layers=(0, 1, 2), kept=FEW),
    "onepass": lambda folder, model: random_onepass(folder, model, layers=(0, 1, 2)),
    "onepass window": lambda folder, model: random_onepass(folder, model, layers=(0, 1, 2), window=7, head_dim=16),
    "onepass kept": lambda folder, model: random_onepass(folder, model, layers=(0, 1, 2), kept=FEW, slots=7),
    "peagle": lambda folder, model: small_peagle(folder, model),
    "peagle layers": lambda folder, model: small_peagle(folder, model, layers=2, kept=FEW),
    "eagle3 layers": lambda folder, model: random_eagle3(
        folder, model, layers=(0, 1, 2), window=9, decoder_layers=2, norm_output=True
    ),
    "dflash": lambda folder, model: small_dflash(folder, model),
    "dspark": lambda folder, model: small_dflash(
        folder,
        model,
        "dspark",
        {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True},
        rank=6,
        head="rnn",
        kept=FEW,
    ),
    "dflash2": lambda folder, model: small_dflash(
        folder, model, "dflash2", {"selector_rank": 6, "selector_top_k": 4}, conv=(2, 16), selector=6
    ),
    "small-lm": lambda folder, model: small_lm(
        folder, model.config.vocab_size, context=model.config.max_position_embeddings
    ),
    "heads": lambda folder, model: random_heads(folder, model),
    "mtp": lambda folder, model: random_mtp(folder, model),
    "heads kept": lambda folder, model: random_heads(folder, model, kept=[0, 2, 3, 5, 7]),
}


@cache
def target(family: Family = "llama", dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """Three layers, 11 tokens; every test shares it, so none may change it."""
    return tiny_model(family, dtype=dtype, **{"vocab": VOCABULARY, **sizes})


class Workshop:
    """Makes speculators.

    Args:
        folder: for drafts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drafts: dict[tuple[str, int], Path] = {}
        self._written: dict[tuple[Any, ...], list[list[int]]] = {}

    def draft(self, kind: str, model: PreTrainedModel) -> Path:
        """A folder with a random draft of a kind for a shared target."""
        known = (kind, id(model))
        if known not in self._drafts:
            self._drafts[known] = _DRAFTS[kind](self._folder / f"{len(self._drafts)}", model)
        return self._drafts[known]

    def spec(self, case: Case, model: PreTrainedModel | None = None, **over: Any) -> Speculator:
        """A case's method on a target, with a runner of its own.

        Args:
            over: further options, and ``tokenizer``, ``offload`` and ``plan``.
        """
        model = target() if model is None else model
        draft = {} if case.draft is None else {"draft": self.draft(case.draft, model)}
        return Speculator(case.method, target=model, **draft, **case.options | over)

    def plain(
        self,
        model: PreTrainedModel | None = None,
        prompts: tuple[tuple[int, ...], ...] = PROMPTS,
        n: int = NEW,
        sampling: Sampling = GREEDY,
        seed: int = SEED,
    ) -> list[list[int]]:
        """What plain decoding of a shared target writes; computed once."""
        model = target() if model is None else model
        known = (id(model), prompts, n, sampling, seed)
        if known not in self._written:
            results = generate(Speculator("ar", target=model), prompts, n, sampling, seed)
            self._written[known] = tokens(results)
        return self._written[known]


def generate(
    spec: Speculator,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    n: int = NEW,
    sampling: Sampling = GREEDY,
    seed: int = SEED,
    **settings: Any,
) -> list[Result]:
    """One batch."""
    return spec.generate([list(p) for p in prompts], max_new_tokens=n, sampling=sampling, seed=seed, **settings)


def tokens(results: list[Result]) -> list[list[int]]:
    return [r.token_ids for r in results]


def rounds(results: list[Result]) -> list[tuple[list[int], int, int]]:
    """Text, and how it came about."""
    return [(r.token_ids, r.rounds, r.accepted) for r in results]
