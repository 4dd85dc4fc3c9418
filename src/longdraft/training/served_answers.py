"""The target's answers as training text, written by an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longdraft.errors import CapabilityError, reason_of
from longdraft.training.answers import AnswerFile, Asks, Refused, Row, kept
from longdraft.training.prompts import Ask

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# How often a request is sent again, after 0.5, 1, 2, 4, 8, 8, ... seconds, while a server is away or busy.
RETRIES = 8
# Seconds for an answer of a server, and between two looks at ``stop``.
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


def answer_by_server(
    server: Server,
    passages: Asks,
    file: AnswerFile,
    *,
    batch: int,
    max_new_tokens: int,
    total: int,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Lets a server answer prompts; arguments as in :func:`~longdraft.training.answers.answer`.

    A row has ``messages``, ``cut`` (the last answer was longer than ``max_new_tokens``), ``usage`` (tokens that the
    server reports to have read and written), and ``temperature``, ``source``, ``kind`` and ``at``.

    Args:
        batch: requests in flight. stop: asked a few times a second; answers on their way are then lost.

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
    address, refused = server.url.rstrip("/").removesuffix("/v1") + "/v1", Refused(file, server.url)

    async def run() -> None:
        async with AsyncOpenAI(
            base_url=address, api_key=server.key or "none", max_retries=RETRIES, timeout=_TIMEOUT
        ) as client:
            conversations = _Served(client, server, file, max_new_tokens)
            await conversations.choose_model()
            missing, flying = file.missing(passages), set[asyncio.Task[Row | None]]()
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
                            refused.add(conversations.last)
                            continue
                        refused.answered()
                        file.append(row)
                        progress()
            finally:
                for task in flying:
                    task.cancel()
                await asyncio.gather(*flying, return_exceptions=True)

    asyncio.run(run())
    return refused.count


class _Served:
    """Conversations with a server about prompts. ``last``: why it did not answer, the last time."""

    def __init__(self, client: AsyncOpenAI, server: Server, file: AnswerFile, max_new_tokens: int) -> None:
        self.client, self.file, self.max_new_tokens = client, file, max_new_tokens
        self.url, self.model, self.last = server.url, server.model, "no text"

    async def choose_model(self) -> None:
        if self.model is None:
            models = await self._asked(self.client.models.list)
            if not models.data:
                raise CapabilityError(f"{self.url} lists no model: name one with --target.")
            self.model = models.data[0].id

    async def row(self, at: list[int], ask: Ask) -> Row | None:
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
            if reply.usage is not None:
                read, written = read + reply.usage.prompt_tokens, written + reply.usage.completion_tokens
            if cut := choice.finish_reason == "length":
                break
        own = {"cut": cut, "temperature": ask.temperature, "usage": [read, written]}
        return {"messages": messages, **own, "source": ask.source, "kind": ask.kind, "at": at} if messages else None

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
            raise CapabilityError(f"{self.url} does not answer as OpenAI's API does. {kept(self.file)}")
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
            raise CapabilityError(f"{self.url} cannot be asked any more: {why}. {kept(self.file)}") from error
