"""Retrieval for drafters: its options, and the base of drafters that see retrieved chunks (SpecExtend, section 2.2)."""

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
    """The chunks of a text that a draft sees. None: not given."""

    chunk: int | None = option(min=1, help="tokens that are chosen together", usual="32")
    chunks: int | None = option(
        min=1, help="chunks that the draft sees", usual="64, of a small model 32, or as many as it was trained for"
    )
    refresh: int | None = option(
        min=1, aliases=("every",), help="verifications from one choice to the next", usual="8, of a small model 4"
    )
    sink: int = option(32, min=0, help="first tokens, always seen")
    recent: int | None = option(min=1, help="last tokens, always seen", usual="128")
    layer: int | None = option(
        min=0, help="the target's layer whose attention ranks the chunks", usual="the draft's, or the last"
    )
    scorer: str | None = option(choices=tuple(SCORERS), help="how chunks are ranked", usual="attention")

    def retrieval_sizes(self, is_enabled: bool, remedy: str) -> dict[str, Any]:
        """The options that only retrieval has and that were given.

        ``sink`` and ``recent`` are not among them: schedules have options of these names too.

        Raises:
            ValueError: some are given, and there is no retrieval, which ``remedy`` would switch on.
        """
        own = declared(ChunkOptions).keys() - {"sink", "recent"}
        found = {name: value for name, value in self.given().items() if name in own}
        if found and not is_enabled:
            raise ValueError(f"{', '.join(found)} shape the retrieval of chunks: give {remedy} too")
        return found


@dataclass(frozen=True)
class RetrievalOptions(ChunkOptions):
    """Retrieval for a draft with an architecture of its own."""

    retrieval: bool = option(False, help="see the chunks of the text that the target attends to, not all of it")

    def build(self, draft: Draft[Any], max_tokens: int | None = None) -> Retrieval | None:
        """The retrieval; None without.

        Args:
            draft: its folder may name the layer.
            room: rows that the draft can see at all; None: any number.

        Raises:
            ValueError: as :meth:`retrieval_sizes` and :func:`make_retrieval` do.
        """
        sizes = self.retrieval_sizes(self.retrieval, "retrieval=True")
        if not self.retrieval:
            return None
        # 64 chunks every 8 verifications: SpecExtend's best for EAGLE (appendix E.1), and for LongSpec's
        # cross-attention. One chunk of room is spared, or every new token would gather all of them again.
        defaults = {"refresh": 8, "layer": draft.retrieval_layer}
        recent = 128 if self.recent is None else self.recent
        return make_retrieval(
            **defaults | sizes, sink=self.sink, recent=recent, default_chunks=64, max_tokens=max_tokens, spare_chunks=1
        )


class RetrievalDrafter(TreeDrafter):
    """Base of drafters that can see only the chunks of a text that the target attends to.

    Attributes:
        retrieval: chooses the rows it sees; None: it sees all.
    """

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
        """Passes an event on to the retrieval: queries."""
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
    """A retrieval from its sizes.

    Args:
        chunk, refresh, sink, recent, layer, scorer: of :class:`ChunkOptions`.
        chunks: how many are retrieved (the paper's k); None: the ``default_chunks`` number, or as many as fit the room.
        max_tokens: rows that the draft can see at all; None: any number.
        spare_chunks: chunks to leave free if the room decides how many fit.
        new_tokens: room for new rows beside the others; None: as many as ``recent``, or what the room leaves.

    Raises:
        ValueError: sizes that make no working cache, or one larger than the room.
    """
    count = default_chunks if chunks is None else chunks
    check_multiples("chunk", chunk, sink=sink, recent=recent)
    ends = sink + recent + chunk - 1  # the recent window starts up to a chunk early
    if max_tokens is not None and ends + count * chunk > max_tokens:
        fit = (max_tokens - ends) // chunk - spare_chunks
        fits = fit * chunk >= sink + recent
        if chunks is not None or not fits:
            raise ValueError(
                f"a working cache of up to {ends + count * chunk} tokens does not fit the {max_tokens} that the draft was "
                f"trained for, or its window has, beside those of a round: "
                f"{f'give at most {fit} chunks, or' if fits else 'give'} a smaller sink and recent window"
            )
        count = fit
    if count * chunk < sink + recent:
        raise ValueError(
            f"the retrieved chunks (chunks x chunk = {count * chunk} tokens) must be at least sink + recent "
            f"({sink + recent} tokens): give more chunks, or a smaller sink and recent window"
        )
    if new_tokens is None:
        new_tokens = recent if max_tokens is None else max_tokens - ends - count * chunk
    view = View(scorer, chunk * count, sink, recent, chunk, new_tokens, shared_by_heads=True)
    return Retrieval(view, refresh, layer)
