"""The target's own answers as training text."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from longdraft.errors import CheckpointError, ContextError
from longdraft.kv.prompt_cache import PromptCache
from longdraft.session import Request, Session
from longdraft.speculator import Speculator
from longdraft.training.prompts import Ask
from longdraft.verify.sampling import Sampling

# Prompts in a row of which none fits the context before we say so.
PATIENCE = 100


@dataclass(frozen=True)
class _Asked:
    """A request in flight: its number, its prompt and its temperature."""

    number: int
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
    """Lets the target answer prompts and appends a row an answer to a JSONL file, in the order of the prompts.

    A row has ``tokens`` (prompt and answer, the answer's end-of-sequence token included), ``start`` (where the answer
    starts), ``temperature`` and ``text`` (the answer). A run that was stopped or killed, given the same arguments, goes
    on with the first answer that is not there, to the same file.

    Args:
        spec: the target with the method that generates; any exact method gives the same text.
        passages: prompts, those of a passage together: they share its KV. Prompts too long for the context are left
            out.
        out: the file; made if it is not there.
        batch: answers at a time: when one has ended, the next prompt takes its place.
        total: rows to have in the end.
        progress: told the rows there are and the tokens answered by this run, whenever rows were written.
        stop: asked between forwards; True ends the run, and answers that are not finished are not written.

    Returns:
        How many rows the file has.

    Raises:
        ContextError: none of the prompts fits the context.
        CheckpointError: the file cannot be written.
    """
    try:
        ends = _line_ends(out)
        rows, answered, end = min(len(ends), total), 0, ends[min(len(ends), total) - 1] if ends and total else 0
        fitting = islice(_fitting(spec, passages, max_new_tokens), rows, total)
        session = spec.session(batch, cache=PromptCache())
        flying: deque[_Asked] = deque()
        try:
            while rows < total and not stop():
                # As many wait as are decoded, so that the batch is always full.
                while len(flying) < 2 * batch and (found := next(fitting, None)):
                    flying.append(_ask(session, *found, max_new_tokens, seed))
                session.step()
                ready = []
                while flying and session.ended(flying[0].number):
                    ready.append(_row(session, flying.popleft()))
                if ready:
                    end = _append(out, end, ready)
                    rows += len(ready)
                    answered += sum(len(row["tokens"]) - row["start"] for row in ready)
                    progress(rows, answered)
        finally:
            session.close()
        return rows
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{out} cannot be written: {error}. What is there is kept.") from error


def _fitting(
    spec: Speculator, passages: Iterator[list[Ask]], max_new_tokens: int
) -> Iterator[tuple[int, list[int], float]]:
    """Place, token ids and temperature of each prompt that fits; places count those left out, and seeds follow them."""
    limit, unfit = spec.runner().context_length, 0
    for place, ask in enumerate(ask for group in passages for ask in group):
        tokens = spec.encode(ask.text)
        if len(tokens) + max_new_tokens <= limit:
            unfit = 0
            yield place, tokens, ask.temperature
        elif (unfit := unfit + 1) == PATIENCE:
            raise ContextError(
                f"No prompt fits the model's context of {limit} tokens with {max_new_tokens} new ones: ask about "
                "shorter passages, or for shorter answers."
            )


def _ask(session: Session, place: int, tokens: list[int], temperature: float, max_new_tokens: int, seed: int) -> _Asked:
    sampling = Sampling(temperature=temperature) if temperature else None
    request = Request(tokens, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed + place)
    return _Asked(session.add(request), tokens, temperature)


def _row(session: Session, asked: _Asked) -> dict[str, Any]:
    result = session.take(asked.number)
    row = {"tokens": asked.tokens + result.token_ids, "start": len(asked.tokens)}
    return row | {"temperature": asked.temperature, "text": result.text}


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
