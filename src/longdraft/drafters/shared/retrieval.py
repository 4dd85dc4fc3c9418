"""Retrieval for drafters: a draft attends to retrieved chunks of the context only (SpecExtend, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.draft import Draft
from longdraft.engine.round_result import RoundResult
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, declared, option
from longdraft.views.retrieval import Retrieval
from longdraft.views.scorers import SCORERS
from longdraft.views.view import View, check_multiples


@dataclass(frozen=True)
class ChunkOptions(Options):
    """The chunks of the context that a draft attends to. None: the default."""

    chunk: int | None = option(min=1, help="tokens of a chunk", usual="32")
    chunks: int | None = option(
        min=1, help="number of retrieved chunks", usual="64, of a small model 32, or as many as it was trained for"
    )
    refresh: int | None = option(
        min=1, aliases=("every",), help="verifications from one selection to the next", usual="8, of a small model 4"
    )
    sink: int = option(32, min=0, help="first tokens, always in the view")
    recent: int | None = option(min=1, help="last tokens, always in the view", usual="128")
    layer: int | None = option(
        min=0, help="the target's layer whose attention ranks the chunks", usual="the draft's, or the last"
    )
    scorer: str | None = option(choices=tuple(SCORERS), help="how chunks are ranked", usual="attention")

    def retrieval_sizes(self, is_enabled: bool, remedy: str) -> dict[str, Any]:
        """Returns the options that were set, but for ``sink`` and ``recent``, which verifiers have too.

        Raises:
            ValueError: some are set, but retrieval is not enabled. ``remedy``: the option that enables it.
        """
        names = declared(ChunkOptions).keys() - {"sink", "recent"}
        sizes = {name: value for name, value in self.non_none().items() if name in names}
        if sizes and not is_enabled:
            raise ValueError(f"{', '.join(sizes)} shape the retrieval of chunks: give {remedy} too")
        return sizes


@dataclass(frozen=True)
class RetrievalOptions(ChunkOptions):
    """Retrieval for drafts that are a block, not a language model."""

    retrieval: bool = option(False, help="attend to the chunks that the target attends to, not to all of the context")

    def build(self, draft: Draft[Any], max_tokens: int | None = None) -> Retrieval | None:
        """Makes the retrieval; returns None if it is not enabled.

        Args:
            draft: its folder may name the scoring layer.
            max_tokens: maximum number of tokens that the draft can attend to; None: no limit.

        Raises:
            ValueError: as :meth:`retrieval_sizes` and :func:`make_retrieval`.
        """
        sizes = self.retrieval_sizes(self.retrieval, "retrieval=True")
        if not self.retrieval:
            return None
        # 64 chunks every 8 verifications: SpecExtend's best for EAGLE (appendix E.1), and for LongSpec's
        # cross-attention. Space for one chunk is left free, or every new token would gather all of them again.
        defaults = {"refresh": 8, "layer": draft.retrieval_layer}
        recent = 128 if self.recent is None else self.recent
        return make_retrieval(
            **defaults | sizes, sink=self.sink, recent=recent, default_chunks=64, max_tokens=max_tokens, spare_chunks=1
        )


class RetrievalDrafter(TreeDrafter):
    """Base of drafters that can attend to retrieved chunks of the context only.
    ``retrieval`` chooses the chunks; None: the draft attends to all of the context."""

    retrieval: Retrieval | None = None

    @property
    def views(self) -> tuple[View, ...]:
        return () if self.retrieval is None else (self.retrieval.view,)

    @property
    def num_prompt_queries(self) -> int:  # type: ignore[override]
        return 1 if self.retrieval is None else max(1, self.retrieval.view.num_queries)

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The layer whose attention ranks the chunks."""
        return () if self.retrieval is None else self.retrieval.scoring_layers(runner.kv_shape.layers)

    def update_retrieval(self, store: KVStore, round_result: RoundResult) -> None:
        """Passes a round's queries on to the retrieval."""
        slot = round_result.sequence.slot
        if self.retrieval is None:
            return
        if round_result.is_prefill:
            self.retrieval.reset(slot)
        if round_result.queries:
            self.retrieval.observe(store, slot, round_result.queries)


def make_retrieval(
    chunk: int = 32,
    chunks: int | None = None,
    refresh: int = 4,
    sink: int = 32,
    recent: int = 128,
    layer: int | None = None,
    scorer: str = "attention",
    default_chunks: int = 32,
    max_tokens: int | None = None,
    spare_chunks: int = 0,
    new_tokens: int | None = None,
) -> Retrieval:
    """Makes a retrieval.

    Args:
        chunk, refresh, sink, recent, layer, scorer: of :class:`ChunkOptions`.
        chunks: number of retrieved chunks (the paper's k); None: ``default_chunks``, or as many as fit ``max_tokens``.
        max_tokens: maximum number of tokens that the draft can attend to; None: no limit.
        spare_chunks: number of chunks to leave free if ``max_tokens`` determines how many fit.
        new_tokens: space for new tokens; None: ``recent``, or what ``max_tokens`` leaves.

    Raises:
        ValueError: sizes that make no working cache, or one larger than ``max_tokens``.
    """
    count = default_chunks if chunks is None else chunks
    check_multiples("chunk", chunk, sink=sink, recent=recent)
    sink_and_recent = sink + recent + chunk - 1  # the recent window starts up to a chunk early
    if max_tokens is not None and sink_and_recent + count * chunk > max_tokens:
        fit = (max_tokens - sink_and_recent) // chunk - spare_chunks
        fits = fit * chunk >= sink + recent
        if chunks is not None or not fits:
            raise ValueError(
                f"a working cache of up to {sink_and_recent + count * chunk} tokens does not fit the {max_tokens} that "
                f"the draft was trained for, or its window has, beside those of a round: "
                f"{f'give at most {fit} chunks, or' if fits else 'give'} a smaller sink and recent window"
            )
        count = fit
    if count * chunk < sink + recent:
        raise ValueError(
            f"the retrieved chunks (chunks x chunk = {count * chunk} tokens) must be at least sink + recent "
            f"({sink + recent} tokens): give more chunks, or a smaller sink and recent window"
        )
    if new_tokens is None:
        new_tokens = recent if max_tokens is None else max_tokens - sink_and_recent - count * chunk
    view = View(scorer, chunk * count, sink, recent, chunk, new_tokens, shared_by_heads=True)
    return Retrieval(view, refresh, layer)
