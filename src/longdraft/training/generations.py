"""The target's own answers as training text, generated in batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from longdraft.errors import CheckpointError, ContextError
from longdraft.kv.prompt_cache import PromptCache
from longdraft.speculator import Speculator
from longdraft.training.prompts import Ask
from longdraft.verify.sampling import Sampling

# Groups of passages in a row of which none fits the context before we say so.
PATIENCE = 20


@dataclass(frozen=True)
class _Prompt:
    tokens: list[int]
    temperature: float


def generate(
    spec: Speculator,
    passages: Iterator[list[Ask]],
    out: Path,
    *,
    batch: int,
    max_new_tokens: int,
    total: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Lets the target answer prompts and appends a row an answer to a JSONL file.

    A row has ``tokens`` (prompt and answer, the answer's end-of-sequence token included), ``start`` (where the answer
    starts), ``temperature`` and ``text`` (the answer). The rows of a group of passages are written together. A run
    that was stopped or killed, given the same arguments, goes on with the first group that is not all there, to the
    same file.

    Args:
        spec: the target with the method that generates; any exact method gives the same text.
        passages: prompts, those of a passage together: they share its KV. Prompts too long for the context are left
            out.
        out: the file; made if it is not there.
        batch: passages at a time.
        total: rows to have in the end; the last group may bring a few more.
        progress: told the rows there are and the tokens answered by this run, after every group.
        stop: asked between forwards; True ends the run, and the group it was at is not written.

    Returns:
        How many rows the file has.

    Raises:
        ContextError: none of the prompts fits the context.
        CheckpointError: the file cannot be written.
    """
    room = spec.runner().context_length - max_new_tokens
    try:
        ends = _line_ends(out)
        # `asked` counts prompts, the ones left out too: seeds depend on it, whatever the file has.
        rows, asked, answered, unfit, end = 0, 0, 0, 0, 0
        while rows < total and (group := list(islice(passages, batch))):
            turns = _turns(spec, group, room)
            size = sum(map(len, turns))
            unfit = 0 if size else unfit + 1
            if unfit == PATIENCE:
                raise ContextError(
                    f"No prompt fits the model's context of {spec.runner().context_length} tokens with "
                    f"{max_new_tokens} new ones: ask about shorter passages, or for shorter answers."
                )
            if rows + size <= len(ends):
                end = ends[rows + size - 1] if size else end
            else:
                found = _answers(spec, turns, max_new_tokens, seed + asked, stop)
                if found is None:
                    break
                end = _append(out, end, found)
                ends = []  # whatever followed is gone
                answered += sum(len(row["tokens"]) - row["start"] for row in found)
                progress(rows + size, answered)
            rows += size
            asked += sum(map(len, group))
        return rows
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{out} cannot be written: {error}. What is there is kept.") from error


def _turns(spec: Speculator, group: list[list[Ask]], room: int) -> list[list[_Prompt]]:
    """The prompts of a group that fit: first one of every passage, then the next, and each turn by temperature."""
    turns: list[list[_Prompt]] = []
    for turn in range(max(map(len, group))):
        asks = [a[turn] for a in group if turn < len(a)]
        for temperature in sorted({ask.temperature for ask in asks}):
            encoded = [spec.encode(ask.text) for ask in asks if ask.temperature == temperature]
            turns.append([_Prompt(ids, temperature) for ids in encoded if len(ids) <= room])
    return turns


def _answers(
    spec: Speculator, turns: list[list[_Prompt]], max_new_tokens: int, seed: int, stop: Callable[[], bool]
) -> list[dict[str, Any]] | None:
    """The rows of a group; None where ``stop`` ended it."""
    cache = PromptCache()
    rows: list[dict[str, Any]] = []
    for turn, prompts in enumerate(turns):
        if not prompts:
            continue
        temperature = prompts[0].temperature
        results = spec.generate(
            [p.tokens for p in prompts],
            max_new_tokens=max_new_tokens,
            sampling=None if temperature == 0 else Sampling(temperature=temperature),
            seed=seed + turn,
            cache=cache,
            cancelled=stop,
        )
        if stop():
            return None
        for prompt, result in zip(prompts, results, strict=True):
            row = {"tokens": prompt.tokens + result.token_ids, "start": len(prompt.tokens)}
            rows.append(row | {"temperature": temperature, "text": result.text})
    return rows


def _append(path: Path, end: int, rows: list[dict[str, Any]]) -> int:
    """Cuts a file to its first ``end`` bytes, writes rows behind them, and returns how long it is then."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(end)
        file.seek(end)
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _line_ends(path: Path) -> list[int]:
    """Where each whole line of a file ends, in bytes; a last line that a kill cut off is none."""
    ends: list[int] = []
    if path.exists():
        with path.open("rb") as file:
            at = 0
            for line in file:
                at += len(line)
                if line.endswith(b"\n"):
                    ends.append(at)
    return ends
