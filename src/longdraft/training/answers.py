"""A target's answers as training text, from an OpenAI-compatible server: vLLM, SGLang, llama.cpp, longdraft serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longdraft.errors import CapabilityError, PromptError, reason_of
from longdraft.json_lines import JsonLines
from longdraft.training.prompts import Ask

# After so many prompts in a row without an answer, nothing more is asked.
PATIENCE = 32
# How often a request is sent again, after 0.5, 1, 2, 4, 8, 8, ... seconds, while a server is away or busy.
RETRIES = 8
# Seconds for an answer, and between two looks at ``stop``.
_TIMEOUT, _LOOK = 3600.0, 0.2

Row = dict[str, Any]


class AnswerFile:
    """A JSONL file of answers, to which rows are appended as they come. What an earlier run has written is kept.

    A row holds ``messages``, ``cut`` (the answer was longer than allowed), ``usage`` (tokens that the server reports to
    have read and written), ``temperature``, ``source``, ``kind`` (of the prompt), and ``at`` (its passage, its number
    there, and how many prompts the passage has).

    Attributes:
        done: (passage, number) of each row.
        usage: tokens that the server reports to have read and written, for all answers.
        added: tokens of the answers that this run has added. refused: prompts without an answer.

    Raises:
        CheckpointError: the file cannot be read, or holds something else, so it must not be cut.
    """

    def __init__(self, path: Path) -> None:
        self.done, self.usage, self.added, self.refused = set[tuple[int, int]](), [0, 0], 0, 0
        self.path, self._file = path, JsonLines(path, lambda number, row: self._count(row))

    def append(self, row: Row) -> None:
        """Writes a row at the end, where a torn one may have been. Raises CheckpointError if that fails."""
        self._file.append(row)
        self._count(row)
        self.added += row["usage"][1]

    def _count(self, row: Row) -> None:
        number, place, _ = row["at"]
        self.done.add((number, place))
        self.usage = [a + b for a, b in zip(self.usage, row["usage"], strict=True)]

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return self._file.count


def answer(
    passages: Iterator[list[Ask]],
    file: AnswerFile,
    url: str,
    key: str = "",
    model: str | None = None,
    *,
    rows: int,
    batch: int,
    max_new_tokens: int,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Lets a server answer prompts, and appends a row for each answer as it comes.

    A killed run continues with the missing ones.

    Args:
        passages: the prompts about each passage.
        url: the server's address, with or without ``/v1``. key: sent as the bearer's token.
        model: which of its models answers; None: the first that it lists.
        rows: of the file in the end. batch: requests in flight.
        progress: called whenever a row is written.
        stop: asked a few times a second; True ends the run, and answers on their way are lost.

    Raises:
        CapabilityError: the package openai is missing; the server cannot be reached, breaks off, or is another kind of
            server.
        PromptError: it refuses prompt after prompt.
        CheckpointError: the file cannot be written.
    """
    try:
        from openai import APIError, AsyncOpenAI, BadRequestError, UnprocessableEntityError
    except ImportError:
        raise CapabilityError('--url needs the package openai: pip install "longdraft[train]".') from None
    address = url.rstrip("/").removesuffix("/v1") + "/v1"
    kept = f"The answers in {file.path} are kept; the same command continues from there."
    # The prompts that have no row, each with its place.
    missing = (
        ([number, place, len(asks)], ask)
        for number, asks in enumerate(passages)
        for place, ask in enumerate(asks)
        if (number, place) not in file.done
    )

    @contextmanager
    def asking() -> Iterator[None]:
        """Says errors of the server with its address."""
        try:
            yield
        except (BadRequestError, UnprocessableEntityError):
            raise
        except (APIError, ValueError) as error:
            why = reason_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            raise CapabilityError(f"{url} cannot be asked any more: {why}. {kept}") from error

    async def row(client: AsyncOpenAI, name: str, at: list[int], ask: Ask) -> Row | str:
        """The row of a prompt's answer; why there is none."""
        turn = {"role": "user", "content": ask.text}
        settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": ask.temperature}
        try:
            with asking():
                reply: Any = await client.chat.completions.create(model=name, messages=[turn], **settings)  # type: ignore[list-item]
        except (BadRequestError, UnprocessableEntityError) as error:
            return reason_of(error)
        if not isinstance(getattr(reply, "choices", None), list) or not reply.choices:
            raise CapabilityError(f"{url} does not answer as OpenAI's API does. {kept}")
        choice, usage = reply.choices[0], reply.usage
        said = choice.message.content or ""
        if not said.strip():
            return "no text"
        return {
            "messages": [turn, {"role": "assistant", "content": said}],
            "cut": choice.finish_reason == "length",
            "usage": [0, 0] if usage is None else [usage.prompt_tokens, usage.completion_tokens],
            "temperature": ask.temperature,
            "source": ask.source,
            "kind": ask.kind,
            "at": at,
        }

    async def run() -> None:
        flying, unanswered = set[asyncio.Task[Row | str]](), 0
        async with AsyncOpenAI(
            base_url=address, api_key=key or "none", max_retries=RETRIES, timeout=_TIMEOUT
        ) as client:
            name = model
            if name is None:
                with asking():
                    models = await client.models.list()
                if not models.data:
                    raise CapabilityError(f"{url} lists no model: name one with --target.")
                name = models.data[0].id
            try:
                while not stop():
                    while len(flying) < min(batch, rows - file.rows) and (following := next(missing, None)):
                        flying.add(asyncio.create_task(row(client, name, *following)))
                    if not flying:
                        break
                    landed, flying = await asyncio.wait(flying, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                    # What came is kept, whatever else failed meanwhile.
                    for task in sorted(landed, key=lambda task: task.exception() is not None):
                        if not isinstance(found := task.result(), str):
                            file.append(found)
                            unanswered = 0
                            progress()
                            continue
                        file.refused, unanswered = file.refused + 1, unanswered + 1
                        if unanswered == PATIENCE:
                            raise PromptError(
                                f"{PATIENCE} prompts in a row got no answer ({found}): shorten passages. {kept}"
                            )
            finally:
                for task in flying:
                    task.cancel()
                await asyncio.gather(*flying, return_exceptions=True)

    asyncio.run(run())
