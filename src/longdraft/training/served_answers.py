"""The target's answers as training text, from an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from longdraft.errors import CapabilityError, reason_of
from longdraft.training.answers import AnswerFile, Asks, At, Row, about
from longdraft.training.prompts import Ask

# How often a request is sent again, after 0.5, 1, 2, 4, 8, 8, ... seconds, while a server is away or busy.
RETRIES = 8
# Seconds for an answer, and between two looks at ``stop``.
_TIMEOUT, _LOOK = 3600.0, 0.2


def answer_by_server(
    passages: Asks,
    file: AnswerFile,
    url: str,
    key: str = "",
    model: str | None = None,
    *,
    batch: int,
    max_new_tokens: int,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Lets an OpenAI-compatible server answer prompts; arguments as in :func:`~longdraft.training.answers.answer`.

    Args:
        url: its address, with or without ``/v1``. key: sent as the bearer's token.
        model: which of its models answers; None: the first that it lists.
        batch: requests in flight. stop: asked a few times a second; answers on their way are then lost.

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

    @contextmanager
    def asking() -> Iterator[None]:
        """Says errors of the server with its address."""
        try:
            yield
        except (BadRequestError, UnprocessableEntityError):
            raise
        except (APIError, ValueError) as error:
            why = reason_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            raise CapabilityError(f"{url} cannot be asked any more: {why}. {file.kept}") from error

    async def row(client: AsyncOpenAI, name: str, at: At, ask: Ask) -> Row | str:
        """The row of a prompt's answer; why there is none."""
        turn = {"role": "user", "content": ask.text}
        settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": ask.temperature}
        try:
            with asking():
                reply: Any = await client.chat.completions.create(model=name, messages=[turn], **settings)  # type: ignore[list-item]
        except (BadRequestError, UnprocessableEntityError) as error:
            return reason_of(error)
        if not isinstance(getattr(reply, "choices", None), list) or not reply.choices:
            raise CapabilityError(f"{url} does not answer as OpenAI's API does. {file.kept}")
        choice, usage = reply.choices[0], reply.usage
        said = choice.message.content or ""
        if not said.strip():
            return "no text"
        used = [0, 0] if usage is None else [usage.prompt_tokens, usage.completion_tokens]
        messages = [turn, {"role": "assistant", "content": said}]
        return {"messages": messages, "cut": choice.finish_reason == "length", "usage": used, **about(at, ask)}

    async def run() -> None:
        missing, flying = file.missing(passages), set[asyncio.Task[Row | str]]()
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
                    while len(flying) < min(batch, file.total - file.rows) and (following := next(missing, None)):
                        flying.add(asyncio.create_task(row(client, name, *following)))
                    if not flying:
                        break
                    landed, flying = await asyncio.wait(flying, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                    # What came is kept, whatever else failed meanwhile.
                    for task in sorted(landed, key=lambda task: task.exception() is not None):
                        if isinstance(found := task.result(), str):
                            file.refuse(found)
                        else:
                            file.append(found)
                            progress()
            finally:
                for task in flying:
                    task.cancel()
                await asyncio.gather(*flying, return_exceptions=True)

    asyncio.run(run())
