"""Retrieval as drafters have it: their options, and what it is told of a round."""

from __future__ import annotations

from typing import Any

from longdraft.drafters.draft import Draft
from longdraft.events import Event
from longdraft.kv.store import KVStore
from longdraft.views.refresh import Refresh
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View, check_multiples, check_sizes

# What SpecExtend's paper found best for EAGLE (appendix E.1), which LongSpec's cross-attention takes over.
RETRIEVED = {"chunks": 64, "every": 8}


def retrieval_of(
    chunk: int = 32,
    chunks: int = 32,
    every: int = 4,
    adaptive: bool = False,
    sink: int = 32,
    recent: int = 128,
    layer: int | None = None,
    scorer: str = "attention",
    fresh: int | None = None,
) -> Retrieval:
    """A retrieval from its options.

    Args:
        chunk: positions that are retrieved together.
        chunks: how many are retrieved (the paper's k).
        every: verifications from one scoring to the next.
        adaptive: score earlier when acceptance falls.
        sink, recent: the first and the last rows, always there; multiples of ``chunk``.
        layer: of the target, from 0, whose attention ranks the chunks; None: the last.
        scorer: how it ranks them, of :data:`~longdraft.views.scorers.SCORERS`.
        fresh: new rows that there is room for; None: as many as ``recent``.

    Raises:
        ValueError: sizes that make no working cache.
    """
    check_sizes(1, chunk=chunk, chunks=chunks, every=every, recent=recent)
    check_sizes(0, sink=sink, **({} if layer is None else {"layer": layer}))
    check_multiples("chunk", chunk, sink=sink, recent=recent)
    if chunk * chunks < sink + recent:
        raise ValueError(
            f"the retrieved chunks (chunks x chunk = {chunk * chunks} tokens) must be at least sink + recent "
            f"({sink + recent} tokens): give more chunks, or a smaller sink and recent window"
        )
    room = recent if fresh is None else fresh
    view = View(scorer, chunk * chunks, sink, recent, chunk, room, shared=True)
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


def fitted(
    given: dict[str, Any], defaults: dict[str, Any], room: int, leaves: str, spare: int = 0, fresh: int | None = None
) -> Retrieval:
    """A retrieval of which a draft can see ``room`` rows: unless they were asked for, no more chunks than fit.

    Args:
        given, defaults: options of :func:`retrieval_of`.
        leaves: what the room is, for the error. spare: chunks less than would fit just so.
        fresh: new rows that there is room for beside; None: what the room leaves.

    Raises:
        ValueError: sizes that make no working cache, or one larger than the room.
    """
    sizes = defaults | given
    view = retrieval_of(**sizes).view
    if view.most > room:
        fit = view.chunks - -(-(view.most - room) // view.chunk) - spare
        fits = fit * view.chunk >= view.sink + view.window
        if "chunks" in given or not fits:
            raise ValueError(
                f"a working cache of up to {view.most} tokens does not fit the {room} that {leaves}: "
                f"{f'give at most {fit} chunks, or' if fits else 'give'} a smaller sink and recent window"
            )
        sizes |= {"chunks": fit}
        view = retrieval_of(**sizes).view
    return retrieval_of(**sizes, fresh=room - view.most if fresh is None else fresh)


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
        ValueError: as :func:`given_sizes` and :func:`fitted` do.
    """
    if type(retrieval) is not bool:
        raise ValueError(f"retrieval must be True or False, got {retrieval!r}")
    given = given_sizes(retrieval, "retrieval=True", **sizes)
    if not retrieval:
        return None
    defaults = {**RETRIEVED, "layer": draft.retrieval_layer, "sink": sink, "recent": recent}
    if room is None:
        return retrieval_of(**defaults | given)
    # A chunk's room to spare, or every new token would have the working set gathered again.
    return fitted(given, defaults, room, "the draft's window and the tree leave", spare=1)


def tell(retrieval: Retrieval, store: KVStore, event: Event) -> None:
    """Tells a retrieval of a round: the text's queries, how drafts fared, and what was taken back."""
    slot = event.sequence.slot
    if event.begins:
        retrieval.reset(slot)
    if event.queries:
        retrieval.look(store, slot, event.queries, event.accepted)
    if event.taken_back:
        retrieval.truncate(slot, store.readable(slot))
