"""What is decoded with: every method, and those of its options that change what is drafted or verified, as cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RETRIEVAL = {"chunk": 2, "chunks": 3, "every": 2, "sink": 2, "recent": 4}  # soon smaller than the text
TREE = {"widths": (3, 3, 2)}
VIEW = {"budget": 24, "window": 4}
STREAMING = {"view": "streaming", "budget": 24, "sink": 4}
SNAPKV = {"view": "snapkv", **VIEW}
CHUNKS = {"view": "chunks", "chunk": 4, "sink": 4, **VIEW}
TOKENS = {"view": "tokens", "sink": 2, **VIEW}
LEVEL = {f"level_{name}": size for name, size in CHUNKS.items() if name != "view"}
PARTIAL = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
SMALL_RETRIEVAL = {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2}
TRIFORCE = {"chunk": 4, "sink": 4, **VIEW, "streamed": 30}


@dataclass(frozen=True)
class Case:
    """A method with options.

    Attributes:
        draft: which of the drafts of the workshop it takes; None: it needs none.
        alike: a sequence decodes alike, round by round, whoever is beside it in a batch.
        kept_alike: and alike with a prompt that is read from a cache.
    """

    method: str
    draft: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    alike: bool = True
    kept_alike: bool = False


def specpv(draft: str | None, **options: Any) -> Case:
    return Case("specpv-exact", draft, PARTIAL | options)


# The case that meets every situation, method by method.
METHODS = {
    "ar": Case("ar", kept_alike=True),
    "prompt-lookup": Case("prompt-lookup", None, {"branches": 3, "min_n": 1}, kept_alike=True),
    "longspec": Case("longspec", "longspec", {"widths": (3, 4, 4)}, kept_alike=True),
    "longspec retrieval": Case("longspec", "longspec", {"retrieval": True, **RETRIEVAL, **TREE}, kept_alike=True),
    "eagle3": Case("eagle3", "eagle3 window", {"depth": 3, "top_k": 3, "nodes": 8}, kept_alike=True),
    "onepass": Case("onepass", "onepass window", {"depth": 3, "top_k": 3, "nodes": 8}, kept_alike=True),
    "mtp": Case("mtp", "mtp", {"depth": 3, "top_k": 3, "nodes": 8, "window": 20}, kept_alike=True),
    "peagle": Case("peagle", "peagle", {"depth": 4, "top_k": 3, "nodes": 8}, kept_alike=True),
    "dflash": Case("dflash", "dflash", {"depth": 3, "top_k": 3, "nodes": 8}, kept_alike=True),
    "specextend-eagle3": Case("specextend-eagle3", "eagle3", RETRIEVAL | TREE, kept_alike=True),
    "small-lm": Case("small-lm", "small-lm", {"depth": 3, "top_k": 3, "nodes": 8}),
    "specextend": Case("specextend", "small-lm", SMALL_RETRIEVAL | {"threshold": 0.2}),
    "self": Case("self", None, SNAPKV),
    "magicdec": Case("magicdec", None, STREAMING),
    "triforce": Case("triforce", "small-lm", TRIFORCE),
    "nested": Case("nested", None, {"drafter": "prompt-lookup", **LEVEL}),
    "heads": Case("heads", "heads"),
    "tokenswift": Case("tokenswift", "heads", {"reuse_n": 2, "budget": 24, "sink": 4, "window": 8}),
    "specpv-exact": specpv("longspec", drafter="longspec", widths=(3, 4)),
}

# Options that draft otherwise; they meet a ragged batch, greedy and drawn.
VARIANTS = {
    "prompt-lookup chain": Case("prompt-lookup", None, {"branches": 1, "min_n": 1}),
    # What a request meets of others depends on when it came.
    "suffix earlier": Case("suffix", None, {"earlier": 100}, alike=False),
    "longspec defaults": Case("longspec", "longspec"),
    "longspec cut": Case("longspec", "longspec", {"widths": (4, 5, 3), "nodes": 7}),
    "longspec chain": Case("longspec", "longspec", {"widths": (1, 1, 1)}),
    "longspec smaller vocabulary": Case("longspec", "longspec kept", {"widths": (2,)}),
    "longspec opt": Case("longspec", "longspec", {"tree": "opt", "threshold": 0.1, "depth": 5}),
    "longspec dynamic": Case("longspec", "longspec", {"tree": "dynamic", "depth": 4, "top_k": 3}),
    "longspec lookup": Case("longspec", "longspec", {"widths": (2, 2), "lookup": True}),
    "longspec lookup earlier": Case("longspec", "longspec", {"lookup": True, "earlier": 100}, alike=False),
    "longspec retrieval opt": Case(
        "longspec", "longspec",
        {"retrieval": True, **RETRIEVAL, "adaptive": True, "every": 5, "tree": "opt", "depth": 3},
    ),
    "longspec retrieval quest": Case(
        "longspec", "longspec", {"retrieval": True, **RETRIEVAL, **TREE, "scorer": "quest"}, kept_alike=True
    ),
    "specextend snapkv": Case("specextend", "small-lm", SMALL_RETRIEVAL | {"threshold": 0.2, "scorer": "snapkv"}),
    "specextend-eagle3 minmax": Case("specextend-eagle3", "eagle3", RETRIEVAL | TREE | {"scorer": "minmax"}),
    "eagle3 defaults": Case("eagle3", "eagle3"),
    "eagle3 cut": Case("eagle3", "eagle3", {"widths": (4, 5, 3), "nodes": 7}),
    "eagle3 chain": Case("eagle3", "eagle3", {"widths": (1, 1, 1)}),
    "eagle3 smaller vocabulary": Case("eagle3", "eagle3 kept", {"top_k": 2}),
    "eagle3 opt": Case("eagle3", "eagle3", {"tree": "opt", "threshold": 0.1, "nodes": 9}),
    "eagle3 layers": Case("eagle3", "eagle3 layers", {"depth": 3, "top_k": 3}),
    "peagle layers": Case("peagle", "peagle layers", {"tree": "opt", "nodes": 9, "threshold": 0.1}),
    "peagle lookup": Case("peagle", "peagle", {"lookup": True}),
    "dspark": Case("dflash", "dspark", {"top_k": 3, "nodes": 9}),
    "dspark chain": Case("dflash", "dspark", {"tree": "chain"}),
    "specpv-exact dspark": specpv("dspark", drafter="dflash"),
    "dflash2": Case("dflash", "dflash2", {"tree": "opt", "nodes": 9, "threshold": 0.1, "window": 9}),
    "onepass defaults": Case("onepass", "onepass"),
    "onepass chain": Case("onepass", "onepass", {"tree": "chain"}),
    "onepass level": Case("onepass", "onepass window", {"depth": 1}),
    "onepass smaller vocabulary": Case("onepass", "onepass kept", {"top_k": 2}),
    "onepass opt": Case("onepass", "onepass", {"tree": "opt", "threshold": 0.1, "nodes": 9}),
    "onepass lookup": Case("onepass", "onepass", {"widths": (2, 2), "lookup": True}),
    "nested onepass": Case("nested", "onepass", {"depth": 2, "top_k": 2, **LEVEL}),
    "specpv-exact onepass": specpv("onepass", drafter="onepass", widths=(3, 4)),
    "specextend-eagle3 opt": Case(
        "specextend-eagle3", "eagle3", RETRIEVAL | {"adaptive": True, "every": 5, "tree": "opt", "depth": 3}
    ),
    "eagle3 lookup": Case("eagle3", "eagle3", {"widths": (2, 2), "lookup": True}),
    "small-lm lookup": Case("small-lm", "small-lm", {"widths": (2, 2), "lookup": True}),
    "small-lm streaming": Case(
        "small-lm", "small-lm", {"view": "streaming", "sink": 4, "recent": 12, "widths": (3, 4, 4)}
    ),
    "small-lm adaptive": Case("small-lm", "small-lm", SMALL_RETRIEVAL | {"threshold": 0.2, "adaptive": True}),
    "self streaming": Case("self", None, STREAMING),
    "self streaming tree": Case("self", None, STREAMING | {"widths": (3, 4, 4)}),
    "self snapkv tree": Case("self", None, SNAPKV | {"tree": "opt", "nodes": 9, "threshold": 0.2}),
    "self chunks": Case("self", None, CHUNKS | {"refresh": 2}),
    "self chunks tree": Case("self", None, CHUNKS | {"refresh": 2, "widths": (3, 4, 4)}),
    "self tokens": Case("self", None, TOKENS | {"adaptive": True, "refresh": 0}),
    "self tokens tree": Case(
        "self", None, TOKENS | {"adaptive": True, "refresh": 0, "tree": "opt", "nodes": 9, "threshold": 0.2}
    ),
    **{
        f"self {view}": Case("self", None, CHUNKS | {"view": view, "refresh": 2})
        for view in ("minmax", "quest", "attention", "mean-key")
    },
    "quantspec": Case("quantspec"),
    "quantspec bfloat16": Case("quantspec", None, {"view_dtype": "bfloat16", "widths": (3, 2)}),
    "quantspec lookup": Case("quantspec", None, {"lookup": True, "depth": 3}),
    "quantspec under lookups": Case("nested", None, {"drafter": "prompt-lookup", "level_view": "all"}),
    "self bfloat16": Case("self", None, CHUNKS | {"refresh": 2, "view_dtype": "bfloat16"}),
    "self int8 tree": Case("self", None, CHUNKS | {"refresh": 2, "widths": (3, 4, 4), "view_dtype": "int8"}),
    "self as it comes": Case("self", None),
    "self snapkv by chunks": Case("self", None, CHUNKS | {"view": "snapkv", "refresh": 2}),
    "triforce int8": Case("triforce", "small-lm", TRIFORCE | {"view_dtype": "int8"}),
    "magicdec small-lm streaming": Case("magicdec", "small-lm", {"drafter": "small-lm", "depth": 3, **STREAMING}),
    "nested ar": Case("nested", None, {"drafter": "ar", **LEVEL}),
    "nested longspec": Case("nested", "longspec wide", {"widths": (2, 2), **LEVEL}),
    "nested longspec retrieval": Case(
        "nested", "longspec wide", {"widths": (2, 2), "retrieval": True, **RETRIEVAL, **LEVEL}
    ),
    "nested eagle3": Case("nested", "eagle3", {"depth": 2, "top_k": 2, **LEVEL}),
    "nested small-lm": Case("nested", "small-lm", {"depth": 2, "top_k": 2, **LEVEL}),
    "nested specextend": Case("nested", "small-lm", SMALL_RETRIEVAL | {"nodes": 6, **LEVEL}),
    "nested self": Case(
        "nested", None, {"drafter": "self", "view": "streaming", "budget": 12, "sink": 2, "depth": 2, **LEVEL}
    ),
    "nested triforce": Case(
        "nested", "small-lm", {"drafter": "triforce", **TRIFORCE, "budget": 20, "streamed": 20, "depth": 3, **LEVEL}
    ),
    "heads opt": Case("heads", "heads", {"tree": "opt", "nodes": 6}),
    "tokenswift int8": Case("tokenswift", "heads", {"reuse_n": 2, "view_dtype": "int8", **TOKENS}),
    "tokenswift no view": Case("tokenswift", "heads", {"reuse_n": 2, "view": "none"}),
    "tokenswift smaller vocabulary": Case("tokenswift", "heads kept", {}),
    "tokenswift lookup": Case("tokenswift", "heads kept", {"lookup": True}),
    "specpv-exact prompt-lookup": specpv(None, drafter="prompt-lookup"),
    "specpv-exact ar": specpv(None, drafter="ar"),
    "specpv-exact longspec retrieval": specpv(
        "longspec", drafter="longspec", retrieval=True, **TREE, chunk=2, chunks=4, every=2
    ),
    "specpv-exact longspec lookup": specpv("longspec wide", drafter="longspec", lookup=True),
    "specpv-exact eagle3 retrieval": specpv(
        "eagle3", drafter="eagle3", retrieval=True, **TREE, chunk=2, chunks=4, every=2
    ),
    "specpv-exact small-lm": specpv("small-lm"),
    "specpv-exact small-lm retrieval": specpv("small-lm", view="retrieval", chunk=4, chunks=4, every=1),
    "specpv-exact int8": specpv("longspec", drafter="longspec", widths=(3, 4), view_dtype="int8"),
    "specpv-exact self streaming": specpv(None, drafter="self", view="streaming", budget=24),
    "specpv-exact self snapkv": specpv(None, drafter="self", view="snapkv", window=4, budget=24),
    "specpv-exact self chunks": specpv(None, drafter="self", view="chunks", chunk=4, window=4, budget=24),
    "specpv-exact triforce": specpv("small-lm", drafter="triforce", chunk=4, window=4, streamed=30, budget=24),
    "specpv-exact heads": specpv("heads"),
    **{
        f"specpv-exact {selector}": specpv(None, drafter="prompt-lookup", selector=selector, reduction=reduction)
        for selector, reduction in (
            ("quest", "max"), ("mean-key", "last"), ("attention", "mean"), ("snapkv", "max"), ("tokens", "mean"),
            ("streaming", "mean"),
        )
    },
}  # fmt: skip
CASES = METHODS | VARIANTS
