"""Retrieval for drafters: a draft attends only to retrieved chunks of the context (SpecExtend, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.draft import Draft
from longdraft.engine.drafter import DraftNeeds
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
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

    def user_chunk_options(self, is_enabled: bool, remedy: str) -> dict[str, Any]:
        """Returns the options that the user set, without ``sink`` and ``recent``, which a verifier's view has too.

        Raises:
            ValueError: the user set such options while retrieval is off. ``remedy``: the option that turns it on.
        """
        names = declared(ChunkOptions).keys() - {"sink", "recent"}
        user_options = {name: value for name, value in self.non_none().items() if name in names}
        if user_options and not is_enabled:
            raise ValueError(f"{', '.join(user_options)} shape the retrieval of chunks, which is off: give {remedy}")
        return user_options


@dataclass(frozen=True)
class RetrievalOptions(ChunkOptions):
    """Retrieval for EAGLE's drafts. (A small language model has the option ``view`` instead of ``retrieval``.)"""

    retrieval: bool = option(False, help="attend to the chunks that the target attends to, not to all of the context")

    def build(self, draft: Draft[Any], max_tokens: int | None = None) -> Retrieval | None:
        """Makes the retrieval; returns None if retrieval is not enabled.

        Args:
            draft: its folder may name the layer whose attention ranks the chunks.
            max_tokens: maximum number of tokens that the draft can attend to; None: no limit.

        Raises:
            ValueError: see :meth:`user_chunk_options` and :func:`make_retrieval`.
        """
        user_options = self.user_chunk_options(self.retrieval, "retrieval=True")
        if not self.retrieval:
            return None
        # 64 chunks every 8 verifications are SpecExtend's best for EAGLE (appendix E.1). One chunk is left free for new
        # tokens: in a full working cache, each new token would make all chunks be gathered again.
        defaults = {"refresh": 8, "layer": draft.retrieval_layer}
        recent = 128 if self.recent is None else self.recent
        options = defaults | user_options | {"sink": self.sink, "recent": recent}
        return make_retrieval(**options, default_chunks=64, max_tokens=max_tokens, spare_chunks=1)


class RetrievalDrafter(TreeDrafter):
    """Base of drafters whose draft may attend to retrieved chunks instead of all of the context.
    ``retrieval`` chooses the chunks; None: the draft attends to all of the context."""

    retrieval: Retrieval | None = None

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        """Returns the layer whose attention ranks the chunks, and the view. Without retrieval, nothing is needed."""
        if self.retrieval is None:
            return DraftNeeds()
        view, layers = self.retrieval.view, self.retrieval.scoring_layers(runner.kv_shape.layers)
        return DraftNeeds(query_layers=layers, num_prompt_queries=max(1, view.num_queries), views=(view,))

    def needs_queries(self, sequences: list[Sequence], has_drafted: bool) -> bool:
        return has_drafted

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
    """Makes a retrieval. For the arguments that are not listed see :class:`ChunkOptions`.

    Args:
        chunks: number of retrieved chunks (the paper's k), which may exceed ``max_tokens``: the drafter warns; None:
            ``default_chunks``, or fewer to fit ``max_tokens``.
        default_chunks: see ``chunks``.
        max_tokens: maximum number of tokens that the draft can attend to; None: no limit.
        spare_chunks: number of chunks to leave free if ``max_tokens`` determines how many fit.
        new_tokens: number of new tokens to leave space for; None: ``recent``, or all that ``max_tokens`` leaves.

    Raises:
        ValueError: the sizes do not fit each other, or need more than ``max_tokens``.
    """
    num_chunks = default_chunks if chunks is None else chunks
    check_multiples("chunk", chunk, sink=sink, recent=recent)
    max_unretrieved = sink + recent + chunk - 1  # the recent window may start up to chunk - 1 tokens early
    if chunks is None and max_tokens is not None and max_unretrieved + num_chunks * chunk > max_tokens:
        num_chunks = (max_tokens - max_unretrieved) // chunk - spare_chunks
        if num_chunks * chunk < sink + recent:
            raise ValueError(
                f"a working cache of up to {max_unretrieved + default_chunks * chunk} tokens is too large: the draft's "
                f"trained length or window leaves {max_tokens} tokens, without those of a round. Give a smaller sink "
                "and recent window, or a number of chunks"
            )
    if num_chunks * chunk < sink + recent:
        raise ValueError(
            f"the retrieved chunks (chunks x chunk = {num_chunks * chunk} tokens) must be at least sink + recent "
            f"({sink + recent} tokens): give more chunks, or a smaller sink and recent window"
        )
    if new_tokens is None:
        free = recent if max_tokens is None else max_tokens - max_unretrieved - num_chunks * chunk
        new_tokens = free if free >= 0 else recent
    view = View(scorer, chunk * num_chunks, sink, recent, chunk, new_tokens, shared_by_heads=True)
    return Retrieval(view, refresh, layer)
