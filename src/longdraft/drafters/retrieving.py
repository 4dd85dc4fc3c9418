"""Retrieval as drafters have it: their options, and what it is told of a round."""

from __future__ import annotations

from typing import Any

from longdraft.drafters.tree_drafter import TreeDrafter
from longdraft.drafts.draft import Draft
from longdraft.engine.event import Event
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.views.refresh import Refresh
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View, check_multiples, check_sizes


class RetrievingDrafter(TreeDrafter):
    """A drafter that may see the chunks of a text which the target looks at.

    Attributes:
        retrieval: which rows it sees; None: all.
    """

    retrieval: Retrieval | None = None

    @property
    def views(self) -> tuple[View, ...]:
        return () if self.retrieval is None else (self.retrieval.view,)

    @property
    def query_window(self) -> int:  # type: ignore[override]
        return 1 if self.retrieval is None else max(1, self.retrieval.view.query_count)

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The one whose attention ranks chunks, for the retrieval."""
        return () if self.retrieval is None else self.retrieval.layers(runner.kv_shape.layers)

    def tell(self, store: KVStore, event: Event) -> None:
        """Tells the retrieval of a round: the text's queries, how drafts fared, and what was taken back."""
        slot = event.sequence.slot
        if self.retrieval is None:
            return
        if event.begins:
            self.retrieval.reset(slot)
        if event.queries:
            self.retrieval.observe(store, slot, event.queries, event.accepted)
        if event.taken_back:
            self.retrieval.truncate(slot, store.readable(slot))


def retrieval_of(
    chunk: int = 32,
    chunks: int | None = None,
    every: int = 4,
    adaptive: bool = False,
    sink: int = 32,
    recent: int = 128,
    layer: int | None = None,
    scorer: str = "attention",
    usual: int = 32,
    room: int | None = None,
    spare: int = 0,
    fresh: int | None = None,
) -> Retrieval:
    """A retrieval from a drafter's options.

    Args:
        chunk: positions that are retrieved together.
        chunks: how many are retrieved (the paper's k); None: the ``usual`` number, or as many as fit the room.
        every: verifications from one scoring to the next.
        adaptive: score earlier when acceptance falls.
        sink, recent: the first and the last rows, always there; multiples of ``chunk``.
        layer: of the target, from 0, whose attention ranks the chunks; None: the last.
        scorer: how it ranks them, of :data:`~longdraft.views.scorers.SCORERS`.
        room: rows that the draft can see; None: any number. spare: where they decide, so many chunks less than fit.
        fresh: new rows that there is room for besides; None: as many as ``recent``, or what the room leaves.

    Raises:
        ValueError: sizes that make no working cache, or one larger than the room.
    """
    count = usual if chunks is None else chunks
    check_sizes(1, chunk=chunk, chunks=count, every=every, recent=recent)
    check_sizes(0, sink=sink, **({} if layer is None else {"layer": layer}))
    check_multiples("chunk", chunk, sink=sink, recent=recent)
    ends = sink + recent + chunk - 1  # the recent window starts up to a chunk early
    if room is not None and ends + count * chunk > room:
        fit = (room - ends) // chunk - spare
        fits = fit * chunk >= sink + recent
        if chunks is not None or not fits:
            raise ValueError(
                f"a working cache of up to {ends + count * chunk} tokens does not fit the {room} that the draft was "
                f"trained for, or its window has, beside those of a round: "
                f"{f'give at most {fit} chunks, or' if fits else 'give'} a smaller sink and recent window"
            )
        count = fit
    if count * chunk < sink + recent:
        raise ValueError(
            f"the retrieved chunks (chunks x chunk = {count * chunk} tokens) must be at least sink + recent "
            f"({sink + recent} tokens): give more chunks, or a smaller sink and recent window"
        )
    if fresh is None:
        fresh = recent if room is None else room - ends - count * chunk
    view = View(scorer, chunk * count, sink, recent, chunk, fresh, shared=True)
    return Retrieval(view, Refresh(every, adaptive), layer)


def given_sizes(asked: bool, remedy: str, **sizes: Any) -> dict[str, Any]:
    """Those of a retrieval's options that are not None.

    Raises:
        ValueError: some are given, and no retrieval is asked for, which the option ``remedy`` does.
    """
    given = {name: value for name, value in sizes.items() if value is not None}
    if given and not asked:
        raise ValueError(f"{', '.join(given)} shape the retrieval of chunks: give {remedy} too")
    return given


def retrieval_options(
    retrieval: bool, draft: Draft[Any], sink: int, recent: int, room: int | None = None, **sizes: Any
) -> Retrieval | None:
    """The retrieval of a draft of its own architecture from its options; None where it has none.

    Args:
        draft: whose folder may name the layer.
        sink, recent: mean nothing without retrieval, since schedules have options of these names too.
        room: rows that the draft can see at all; None: any number.
        sizes: options of :func:`retrieval_of`, None for those that were not given.

    Raises:
        ValueError: as :func:`given_sizes` and :func:`retrieval_of` do.
    """
    if type(retrieval) is not bool:
        raise ValueError(f"retrieval must be True or False, got {retrieval!r}")
    given = given_sizes(retrieval, "retrieval=True", **sizes)
    if not retrieval:
        return None
    # 64 chunks every 8 verifications: what SpecExtend found best for EAGLE (appendix E.1), which LongSpec's
    # cross-attention takes over. A chunk's room to spare, or every new token would have all of them gathered again.
    defaults = {"every": 8, "layer": draft.retrieval_layer}
    return retrieval_of(**defaults | given, sink=sink, recent=recent, usual=64, room=room, spare=1)
