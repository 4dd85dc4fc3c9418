"""The table of methods for tests: each with its draft and with small options, so that short texts outgrow views.

A new method is a row of METHODS: it is tested in every situation of tests/exact. An option that changes what is drafted
is a row of VARIANTS: it is tested in a batch of different lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from longdraft import Result, Sampling, Speculator
from tests.support.drafts import (
    published_eagle,
    random_draft,
    random_eagle3,
    random_heads,
    random_mtp,
    save_model,
    small_lm,
)
from tests.support.published import small_dflash, small_peagle
from tests.support.tiny import Family, tiny_model

RETRIEVAL = {"chunk": 2, "chunks": 3, "every": 2, "sink": 2, "recent": 4}  # soon smaller than the text
TREE = {"widths": (3, 3, 2)}
NARROW = {"depth": 3, "top_k": 3, "nodes": 8}
VIEW = {"budget": 24, "window": 4}
STREAMING = {"view": "streaming", "budget": 24, "sink": 4}
SNAPKV = {"view": "snapkv", **VIEW}
CHUNKS = {"view": "chunks", "chunk": 4, "sink": 4, "refresh": 2, **VIEW}
TOKENS = {"view": "tokens", "sink": 2, "refresh": 3, **VIEW}
PARTIAL = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
SMALL_RETRIEVAL = {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2}
TRIFORCE = {"chunk": 4, "sink": 4, **VIEW, "streamed": 30}
OPT = {"tree": "opt", "nodes": 9, "threshold": 0.1}
HEADS_ALONE = {"view": "none", "reuse": False}  # of TokenSwift


@dataclass(frozen=True)
class Case:
    """A method with options.

    Attributes:
        draft: its draft, a key of DRAFTS; None: it needs none.
        batch_invariant: a sequence's rounds do not depend on the others in its batch.
        cache_invariant: nor on whether its prompt comes from a cache.
    """

    method: str
    draft: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    batch_invariant: bool = True
    cache_invariant: bool = False

    def with_default_tree(self) -> Case:
        """The case with the method's default tree, and with a draft whose window fits deeper trees."""
        wide = {"longspec": "longspec wide", "eagle3 window": "eagle3"}
        asked = ("widths", "depth", "top_k", "nodes", "tree", "threshold", "branches")
        options = {name: x for name, x in self.options.items() if name not in asked}
        return replace(self, draft=wide.get(self.draft or "", self.draft), options=options)


# The case of each method that is tested in every situation.
METHODS = {
    "ar": Case("ar", cache_invariant=True),
    "prompt-lookup": Case("prompt-lookup", None, {"branches": 3, "min_n": 1}, cache_invariant=True),
    "longspec": Case("longspec", "longspec", {"widths": (3, 4, 4)}, cache_invariant=True),
    "eagle3": Case("eagle3", "eagle3 window", NARROW, cache_invariant=True),
    "eagle": Case("eagle", "eagle", NARROW, cache_invariant=True),
    "mtp": Case("mtp", "mtp", {**NARROW, "window": 20}, cache_invariant=True),
    "peagle": Case("peagle", "peagle", {"depth": 4, "top_k": 3, "nodes": 8}, cache_invariant=True),
    "dflash": Case("dflash", "dflash", NARROW, cache_invariant=True),
    "specextend-eagle3": Case("specextend-eagle3", "eagle3", RETRIEVAL | TREE, cache_invariant=True),
    "small-lm": Case("small-lm", "small-lm", NARROW),
    "specextend": Case("specextend", "small-lm", SMALL_RETRIEVAL | {"threshold": 0.2}),
    "self": Case("self", None, SNAPKV),
    "magicdec": Case("magicdec", None, STREAMING),
    "triforce": Case("triforce", "small-lm", TRIFORCE),
    "tokenswift": Case("tokenswift", "tokenswift", {"reuse_n": 2, "budget": 24, "sink": 4, "window": 8}),
}

# Options that change what is drafted. One drafter has all kinds of trees, the others those that they grow themselves.
VARIANTS = {
    "prompt-lookup chain": Case("prompt-lookup", None, {"branches": 1, "min_n": 1}),
    # With `earlier` a request's drafts depend on the requests before it.
    "suffix earlier": Case("suffix", None, {"earlier": 100}, batch_invariant=False),
    "longspec defaults": Case("longspec", "longspec"),
    "longspec cut": Case("longspec", "longspec", {"widths": (4, 5, 3), "nodes": 7}),
    "longspec chain": Case("longspec", "longspec", {"widths": (1, 1, 1)}),
    "longspec smaller vocabulary": Case("longspec", "longspec kept", {"widths": (2,)}),
    "longspec opt": Case("longspec", "longspec", OPT | {"depth": 5}),
    "longspec dynamic": Case("longspec", "longspec", {"tree": "dynamic", "depth": 4, "top_k": 3}),
    "longspec lookup earlier": Case("longspec", "longspec", {"lookup": True, "earlier": 100}, batch_invariant=False),
    "specextend snapkv": Case("specextend", "small-lm", SMALL_RETRIEVAL | {"threshold": 0.2, "scorer": "snapkv"}),
    "specextend-eagle3 minmax": Case("specextend-eagle3", "eagle3", RETRIEVAL | TREE | {"scorer": "minmax"}),
    "specextend-eagle3 opt": Case(
        "specextend-eagle3", "eagle3", RETRIEVAL | {"every": 5, "tree": "opt", "depth": 3}
    ),
    "eagle3 defaults": Case("eagle3", "eagle3"),
    "eagle3 smaller vocabulary": Case("eagle3", "eagle3 kept", {"top_k": 2}),
    "eagle3 opt": Case("eagle3", "eagle3", OPT),
    "eagle3 layers": Case("eagle3", "eagle3 layers", {"depth": 3, "top_k": 3}),
    "eagle3 lookup": Case("eagle3", "eagle3", {"widths": (2, 2), "lookup": True}),
    "peagle layers": Case("peagle", "peagle layers", OPT),
    "peagle retrieval": Case("peagle", "peagle", {"retrieval": True, **RETRIEVAL, **OPT}),
    "dflash2": Case("dflash", "dflash2", OPT | {"window": 9}),
    "dspark": Case("dflash", "dspark", {"top_k": 3, "nodes": 9}),
    "dspark retrieval": Case("dflash", "dspark", {"retrieval": True, **RETRIEVAL, **OPT}),
    "small-lm lookup": Case("small-lm", "small-lm", {"widths": (2, 2), "lookup": True}),
    "small-lm streaming": Case(
        "small-lm", "small-lm", {"view": "streaming", "sink": 4, "recent": 12, "widths": (3, 4, 4)}
    ),
    "small-lm threshold": Case("small-lm", "small-lm", SMALL_RETRIEVAL | {"threshold": 0.2}),
    "self as it comes": Case("self"),
    "self streaming": Case("self", None, STREAMING),
    "self streaming tree": Case("self", None, STREAMING | {"widths": (3, 4, 4)}),
    "self chunks": Case("self", None, CHUNKS),
    "self chunks tree": Case("self", None, CHUNKS | {"widths": (3, 4, 4), "view_dtype": "int8"}),
    "self tokens": Case("self", None, TOKENS),
    "self tokens tree": Case("self", None, TOKENS | OPT),
    **{
        f"self {view}": Case("self", None, CHUNKS | {"view": view, "view_dtype": dtype})
        for view, dtype in (
            ("minmax", None), ("quest", None), ("attention", None), ("mean-key", "bfloat16"), ("snapkv", None),
        )
    },
    "quantspec": Case("quantspec"),
    "quantspec lookup": Case("quantspec", None, {"lookup": True, "view_dtype": "bfloat16", "widths": (3, 2)}),
    "quantspec int4": Case("quantspec", None, {"view_dtype": "int4"}),
    "triforce int8": Case("triforce", "small-lm", TRIFORCE | {"view_dtype": "int8"}),
    "tokenswift heads": Case("tokenswift", "tokenswift", HEADS_ALONE),
    "tokenswift heads opt": Case("tokenswift", "tokenswift", {**HEADS_ALONE, "tree": "opt", "nodes": 6}),
    "tokenswift int8": Case(
        "tokenswift", "tokenswift", {"reuse_n": 2, "view_dtype": "int8", "view": "tokens", "sink": 2, **VIEW}
    ),
    "tokenswift no view": Case("tokenswift", "tokenswift", {"reuse_n": 2, "view": "none"}),
    "tokenswift lookup": Case("tokenswift", "tokenswift kept", {"lookup": True}),
}  # fmt: skip
CASES = METHODS | VARIANTS
FEW = [1, 2, 3, 4, 7]  # a smaller draft vocabulary
DRAFTS = {
    "longspec": random_draft,
    "longspec wide": lambda folder, model: random_draft(folder, model, window=16),
    "longspec kept": lambda folder, model: random_draft(folder, model, kept=FEW),
    "eagle": published_eagle,
    "eagle3": lambda folder, model: random_eagle3(folder, model, layers=(0, 1, 2), head_dim=24),
    "eagle3 window": lambda folder, model: random_eagle3(folder, model, layers=(0, 1, 2), window=7, head_dim=24),
    "eagle3 kept": lambda folder, model: random_eagle3(folder, model, layers=(0, 1, 2), kept=FEW),
    "eagle3 layers": lambda folder, model: random_eagle3(
        folder, model, layers=(0, 1, 2), window=9, decoder_layers=2, norm_output=True
    ),
    "peagle": small_peagle,
    "peagle layers": lambda folder, model: small_peagle(folder, model, layers=2, kept=FEW),
    "dflash": small_dflash,
    "dflash2": lambda folder, model: small_dflash(
        folder, model, "dflash2", {"selector_rank": 6, "selector_top_k": 4}, conv=(2, 16), selector=6
    ),
    "dspark": lambda folder, model: small_dflash(
        folder, model, "dspark",
        {"markov_rank": 6, "sample_from_anchor": True}, rank=6, kept=FEW,
    ),
    "small-lm": lambda folder, model: small_lm(
        folder, model.config.vocab_size, context=max(512, model.config.max_position_embeddings)
    ),
    "target": save_model,
    "tokenswift": random_heads,
    "tokenswift kept": lambda folder, model: random_heads(folder, model, kept=[0, 2, 3, 5, 7]),
    "mtp": random_mtp,
}  # fmt: skip

VOCABULARY = 11
# A repetitive prompt; one shorter than any window; one that outgrows every view; a single token.
PROMPTS = ((3, 9, 4, 7, 2, 5) * 8, (1, 2, 3), tuple(i * i % VOCABULARY for i in range(130)), (8,))
GREEDY = Sampling()
DRAWN = Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)
PENALISED = Sampling(repetition_penalty=1.4, repetition_window=5)
SEED = 5
NEW = 16


@cache
def target(family: Family = "llama", dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """A target of three layers and 11 tokens. Tests share it, so they must not change it."""
    return tiny_model(family, dtype=dtype, **{"vocab": VOCABULARY, **sizes})


class SpeculatorFactory:
    """Makes speculators of the table's cases.

    Args:
        folder: where drafts are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drafts: dict[tuple[str, int], Path] = {}
        self._known: list[PreTrainedModel] = []  # keeps models alive, as their ids are keys
        self._written: dict[tuple[Any, ...], list[list[int]]] = {}

    def draft(self, kind: str, model: PreTrainedModel) -> Path:
        """A folder with a random draft for a shared target; ``kind``: a key of DRAFTS."""
        known = (kind, id(model))
        if known not in self._drafts:
            self._drafts[known] = DRAFTS[kind](self._folder / f"{len(self._drafts)}", model)
            self._known.append(model)
        return self._drafts[known]

    def given(self, case: Case, model: PreTrainedModel | None = None) -> dict[str, Any]:
        """A case's options, with its draft."""
        draft = {} if case.draft is None else {"draft": self.draft(case.draft, target() if model is None else model)}
        return draft | case.options

    def spec(self, case: Case, model: PreTrainedModel | None = None, **over: Any) -> Speculator:
        """A case's method on a target, with a runner of its own.

        Args:
            over: further options, and ``tokenizer``, ``offload`` and ``plan``.
        """
        model = target() if model is None else model
        return Speculator(case.method, target=model, **self.given(case, model) | over)

    def plain(
        self,
        model: PreTrainedModel | None = None,
        prompts: tuple[tuple[int, ...], ...] = PROMPTS,
        n: int = NEW,
        sampling: Sampling = GREEDY,
        seed: int = SEED,
    ) -> list[list[int]]:
        """The output of plain decoding of a shared target; computed once."""
        model = target() if model is None else model
        known = (id(model), prompts, n, sampling, seed)
        if known not in self._written:
            results = generate(Speculator("ar", target=model), prompts, n, sampling, seed)
            self._written[known] = tokens(results)
            self._known.append(model)
        return self._written[known]


def generate(
    spec: Speculator,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    n: int = NEW,
    sampling: Sampling = GREEDY,
    seed: int = SEED,
    **settings: Any,
) -> list[Result]:
    """Decodes the prompts in one batch."""
    return spec.generate([list(p) for p in prompts], max_new_tokens=n, sampling=sampling, seed=seed, **settings)


def tokens(results: list[Result]) -> list[list[int]]:
    return [r.token_ids for r in results]


def rounds(results: list[Result]) -> list[tuple[list[int], int, int]]:
    """Output, rounds and accepted tokens of each result."""
    return [(r.token_ids, r.rounds, r.accepted) for r in results]


# --- the table on a model of 61 tokens that is its own small-lm draft: its drafts are right without processors ---

# Cases named like their methods, without two kinds of drafts that fit one hidden size only.
EXACT = tuple(n for n, case in METHODS.items() if n == case.method and n not in ("peagle", "dflash"))
# Methods whose draft is the target itself, or whose last level has been verified before.
ALWAYS_RIGHT = ("small-lm", "triforce")


class SpeculatorsByMethod(SpeculatorFactory):
    """Speculators by method on one target, each made once. In float64, so that rounding decides no token."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(folder)
        self.model: PreTrainedModel = tiny_model(layers=4, hidden=32, heads=4, dtype=dtype)
        self.get = cache(lambda method: Speculator(method, target=self.model, plan="fixed", **self.options(method)))

    def options(self, method: str) -> dict[str, Any]:
        """A method's options, with its draft for this target."""
        case = METHODS[method] if method in METHODS else Case(method)
        return self.given(Case(method, "target", case.options) if method == "small-lm" else case, self.model)
