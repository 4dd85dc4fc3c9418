"""Exact forwards of the target over a text that is already written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from longdraft.engine.prompts import prefill_chunk
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.outputs import TargetOutput
from longdraft.model.runner import TargetRunner

# Rows of an answer whose logits are held at a time.
ROWS = 128


def read(
    runner: TargetRunner,
    cache: PromptCache,
    text: Sequence[int],
    known: Sequence[int],
    logits_from: int | None = None,
) -> Iterator[tuple[int, Sequence[int], TargetOutput]]:
    """Reads a text piece by piece. Yields each piece's position, its tokens and the forward's output.

    Args:
        cache: keeps the text's KV afterwards.
        known: the beginning of the text whose KV is taken from the cache, as far as it is there.
        logits_from: position of the first row whose logits are computed; None: only those of the text's last row.
    """
    store = cache.open(runner.new_store, 1, len(text))
    cache.begin(0, known, kind=runner.rows_kind(len(text)))
    try:
        while (done := store.lengths[0]) < len(text):
            answer = logits_from is not None and done >= logits_from
            end = done + ROWS if answer else min(done + prefill_chunk(runner), logits_from or len(text))
            piece = text[done:end]
            logits: Literal["all", "last", "none"] = "all" if answer else "last" if end >= len(text) else "none"
            block = store.block([0], [piece], prompt=not answer, text=len(text))
            out = runner.forward(block, store, logits=logits)
            store.commit(0, range(len(piece)))
            yield done, piece, out
    finally:
        cache.remember(0, text)
