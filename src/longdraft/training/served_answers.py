"""Answers of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, longdraft) as training text, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longdraft.errors import CapabilityError, PromptError, reason_of
from longdraft.training.answer_file import AnswerFile
from longdraft.training.prompts import Ask

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# How often a request is sent again, after 0.5, 1, 2, 4, 8, 8, ... seconds, while the server is away or busy.
RETRIES = 8
# After so many answers in a row that cannot be used, the server is not asked any more.
PATIENCE = 32
# Seconds for an answer, and between two looks at ``stop``.
_TIMEOUT, _LOOK = 3600.0, 0.2


@dataclass(frozen=True)
class Server:
    """A server.

    Attributes:
        url: its address, with or without ``/v1``. key: sent as the bearer's token.
        model: which of its models answers; None: the first that it lists.
    """

    url: str
    key: str = ""
    model: str | None = None


def answer(
    server: Server,
    passages: Iterator[tuple[int, list[Ask]]],
    file: AnswerFile,
    *,
    batch: int,
    max_new_tokens: int,
    total: int,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Lets a server answer prompts, and appends a row for each answer as it comes.

    A row has ``messages``, ``cut`` (the last answer was longer than ``max_new_tokens``), ``temperature``, ``usage``
    (tokens that the server reports to have read and written), ``source`` and ``kind`` (of its prompt) and ``at`` (its
    passage, its number there, and how many prompts the passage has). A killed run continues with the missing ones.

    Args:
        passages: numbers of passages, and the prompts about each.
        batch: requests in flight.
        max_new_tokens: tokens of a turn.
        total: rows that the file has in the end.
        progress: called whenever a row is written.
        stop: asked a few times a second; True ends the run, and answers on their way are lost.

    Returns:
        How many prompts the server refused, or answered without text.

    Raises:
        CapabilityError: the package openai is missing; the server cannot be reached, breaks off, or is another kind of
            server.
        PromptError: it refuses prompt after prompt.
        CheckpointError: the file cannot be written.
    """
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise CapabilityError('--url needs the package openai: pip install "longdraft[train]".') from None

    async def run() -> int:
        address = server.url.rstrip("/").removesuffix("/v1") + "/v1"
        async with AsyncOpenAI(
            base_url=address, api_key=server.key or "none", max_retries=RETRIES, timeout=_TIMEOUT
        ) as client:
            conversation = _Conversations(client, server, file, max_new_tokens)
            await conversation.choose_model()
            return await _write(conversation, _missing(passages, file.done), batch, total, progress, stop)

    return asyncio.run(run())


def _missing(passages: Iterator[tuple[int, list[Ask]]], done: set[tuple[int, int]]) -> Iterator[tuple[list[int], Ask]]:
    """The prompts that are not answered yet, each with its place."""
    for number, asks in passages:
        for place, ask in enumerate(asks):
            if (number, place) not in done:
                yield [number, place, len(asks)], ask


async def _write(
    conversations: _Conversations,
    missing: Iterator[tuple[list[int], Ask]],
    batch: int,
    total: int,
    progress: Callable[[], None],
    stop: Callable[[], bool],
) -> int:
    file, unusable, in_a_row = conversations.file, 0, 0
    flying: set[asyncio.Task[dict[str, Any] | None]] = set()
    try:
        while not stop():
            while len(flying) < min(batch, total - file.rows) and (ask := next(missing, None)):
                flying.add(asyncio.create_task(conversations.row(*ask)))
            if not flying:
                break
            landed, flying = await asyncio.wait(flying, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
            # What came is kept, whatever else failed meanwhile.
            for task in sorted(landed, key=lambda task: task.exception() is not None):
                if (row := task.result()) is None:
                    unusable, in_a_row = unusable + 1, in_a_row + 1
                    if in_a_row == PATIENCE:
                        raise PromptError(conversations.refusal())
                else:
                    in_a_row = 0
                    file.append([row])
                    progress()
    finally:
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)
    return unusable


class _Conversations:
    """Conversations with a server about prompts."""

    def __init__(self, client: AsyncOpenAI, server: Server, file: AnswerFile, max_new_tokens: int) -> None:
        self.client, self.file, self.max_new_tokens = client, file, max_new_tokens
        self.url, self.model, self.last = server.url, server.model, "no text"

    def refusal(self) -> str:
        return (
            f"{PATIENCE} prompts in a row got no answer from {self.url} ({self.last}): ask about shorter passages, or "
            f"look at its log. {self._kept()}"
        )

    def _kept(self) -> str:
        return f"The answers in {self.file.path} are kept; the same command continues from there."

    async def choose_model(self) -> None:
        if self.model is None:
            models = await self._asked(self.client.models.list)
            if not models.data:
                raise CapabilityError(f"{self.url} lists no model: name one with --target.")
            self.model = models.data[0].id

    async def row(self, at: list[int], ask: Ask) -> dict[str, Any] | None:
        """The row of a prompt's answers; None if there is no answer with text."""
        messages: list[dict[str, str]] = []
        read = written = 0
        cut = False
        for text in (ask.text, *ask.then):
            turn = {"role": "user", "content": text}
            reply = await self._reply([*messages, turn], ask.temperature)
            if reply is None:
                break
            choice = reply.choices[0]
            messages += [turn, {"role": "assistant", "content": choice.message.content}]
            cut = choice.finish_reason == "length"
            if reply.usage is not None:
                read, written = read + reply.usage.prompt_tokens, written + reply.usage.completion_tokens
            if cut:
                break
        if not messages:
            return None
        return {
            "messages": messages,
            "cut": cut,
            "temperature": ask.temperature,
            "usage": [read, written],
            "source": ask.source,
            "kind": ask.kind,
            "at": at,
        }

    async def _reply(self, messages: list[dict[str, str]], temperature: float) -> Any:
        """The answer to messages; None if the server refuses them or says nothing."""
        from openai import BadRequestError, UnprocessableEntityError

        assert self.model is not None
        try:
            reply = await self._asked(
                self.client.chat.completions.create,
                model=self.model,
                messages=messages,
                max_tokens=self.max_new_tokens,
                temperature=temperature,
            )
        except (BadRequestError, UnprocessableEntityError) as error:
            self.last = reason_of(error)
            return None
        if not isinstance(getattr(reply, "choices", None), list) or not reply.choices:
            raise CapabilityError(f"{self.url} does not answer as OpenAI's API does. {self._kept()}")
        return reply if (reply.choices[0].message.content or "").strip() else None

    async def _asked(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """The result of a method of the client. What is wrong with the server is said with its address."""
        from openai import APIError, BadRequestError, UnprocessableEntityError

        try:
            return await method(**arguments)
        except (BadRequestError, UnprocessableEntityError):
            raise
        except (APIError, ValueError) as error:
            why = reason_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            raise CapabilityError(f"{self.url} cannot be asked any more: {why}. {self._kept()}") from error
