"""The endpoints: OpenAI's, and those that operators want."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from longdraft.errors import LongdraftError
from longdraft.serve import schema, structured, tools
from longdraft.serve.choice import Choice, Delta
from longdraft.serve.errors import ApiError, api_error
from longdraft.serve.guards import Guards
from longdraft.serve.openai import DONE, Answer, ChatAnswer, Head, TextAnswer, event, response_object
from longdraft.serve.service import Service


def make_app(service: Service) -> FastAPI:
    """The application of a service, whose worker runs."""
    app = FastAPI(title="longdraft", docs_url="/docs", redoc_url=None)
    endpoints = Endpoints(service)
    own = service.settings
    app.add_middleware(Guards, keys=own.keys, max_body=own.max_body, body_seconds=own.body_seconds)
    for path, answer in (
        ("/v1/chat/completions", endpoints.chat), ("/v1/completions", endpoints.complete),
        ("/v1/responses", endpoints.respond), ("/tokenize", endpoints.tokenize),
    ):  # fmt: skip
        app.post(path, response_model=None)(answer)
    for path, say in (
        ("/v1/models", endpoints.models), ("/v1/models/{name:path}", endpoints.model), ("/health", endpoints.health),
        ("/ready", endpoints.ready), ("/metrics", endpoints.metrics), ("/version", endpoints.version),
        ("/", endpoints.page),
    ):  # fmt: skip
        app.get(path, response_model=None)(say)

    async def refused(_: Request, error: Exception) -> Response:
        return endpoints.refused(error)

    for kind in (ApiError, LongdraftError, TimeoutError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)
    return app


class Endpoints:
    """One method an endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def refused(self, error: Exception) -> Response:
        """An error as OpenAI's object."""
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            place = ".".join(str(x) for x in first["loc"] if x != "body") if first["type"] != "json_invalid" else ""
            said = "is not served" if first["type"] == "extra_forbidden" else f"cannot be used: {first['msg']}"
            found = ApiError(400, f"{place or 'The body'} {said}.", param=place or None)
        elif isinstance(error, HTTPException):
            found = ApiError(
                error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None
            )
        else:
            found = api_error(error)
        self._service.metrics.failed(found.status)
        return JSONResponse(found.body, found.status, found.headers)

    # --- answers ---

    async def chat(self, asked: schema.Chat, request: Request) -> Response:
        service, piece = self._service, self._piece
        service.check_model(asked.model)
        messages = [message.plain() for message in asked.messages]
        choice = tools.checked_choice(asked.tools, asked.tool_choice)
        template: dict[str, Any] = {}
        grammar = structured.grammar_for(asked.response_format) if asked.response_format else None
        if asked.tools and choice != "none":
            if grammar is not None:
                raise ApiError(400, "response_format and tools are not served together.", param="response_format")
            grammar = tools.grammar_for_tools(asked.tools, choice, asked.parallel_tool_calls)
        messages, template = tools.with_tools(service.tokenizer, messages, asked.tools if choice != "none" else [])
        prompt = await asyncio.to_thread(partial(service.chat_prompt, messages, **template))
        made = None
        if grammar is not None:
            made = partial(structured.Constraint, service.tokenizer, grammar, len(prompt))
            made()  # what cannot be followed is said now
        choices = service.choices(
            prompt, asked, asked.max_completion_tokens or asked.max_tokens, request.scope["state"]["tenant"],
            asked.top_logprobs if asked.logprobs else None, made, asked.stream_options.include_trace,
        )  # fmt: skip
        called = bool(asked.tools) and choice != "none"
        answers = [ChatAnswer(i, piece, asked.logprobs, tools.ToolParser() if called else None) for i in range(asked.n)]
        return await self._answer(asked, choices, answers, request)

    async def complete(self, asked: schema.Completion, request: Request) -> Response:
        service = self._service
        service.check_model(asked.model)
        given: Any = asked.prompt
        prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(prompts) > 16:
            raise ApiError(400, "At most 16 prompts a request here.", param="prompt")
        choices: list[Choice] = []
        try:
            for prompt in prompts:
                ids = await asyncio.to_thread(service.text_prompt, prompt) if isinstance(prompt, str) else list(prompt)
                choices += service.choices(
                    ids, asked, asked.max_tokens, request.scope["state"]["tenant"], asked.logprobs,
                    trace=asked.stream_options.include_trace,
                )  # fmt: skip
        except BaseException:
            for choice in choices:
                service.worker.cancel(choice.ticket)
            raise
        answers = [TextAnswer(i, self._piece, asked.logprobs is not None) for i in range(len(choices))]
        return await self._answer(asked, choices, answers, request)

    async def _answer(
        self, asked: schema.Sampled, choices: list[Choice], answers: Sequence[Answer], request: Request
    ) -> Response:
        kind, head = answers[0].kind, Head(answers[0].prefix, self._service.settings.name)
        if asked.stream:
            return self._streamed(self._chunks(asked, choices, answers, head))
        try:
            async for i, delta in _unless_gone(request, self._together(choices)):
                for _ in answers[i].chunks(delta):
                    pass
        finally:
            self._drop(choices)
        found = [answer.whole() for answer in answers]
        return JSONResponse(head.made(kind, found, usage=self._service.usage(asked, choices)))

    async def _chunks(
        self, asked: schema.Sampled, choices: list[Choice], answers: Sequence[Answer], head: Head
    ) -> AsyncIterator[str]:
        kind = answers[0].kind + (".chunk" if isinstance(answers[0], ChatAnswer) else "")
        options, last = asked.stream_options, dict[str, Any]()
        if options.include_usage:
            last = {"usage": None}
        async for i, delta in self._together(choices):
            if options.include_usage and options.continuous_usage_stats:
                last = {"usage": self._service.usage_so_far(choices)}
            made = list(answers[i].chunks(delta))
            if delta.trace is not None:
                trace = delta.trace | ({"of": len(choices[i].prompt)} if delta.trace["phase"] == "prefill" else {})
                nothing: dict[str, Any] = {"delta": {}} if isinstance(answers[i], ChatAnswer) else {"text": ""}
                empty = {"index": answers[i].index, "finish_reason": None} | nothing
                yield event(head.made(kind, made or [empty], trace=trace, **last))
                continue
            for chunk in made:
                yield event(head.made(kind, [chunk], **last))
        if options.include_usage:
            yield event(head.made(kind, [], usage=self._service.usage(asked, choices)))
        yield DONE

    async def respond(self, asked: schema.Responses, request: Request) -> Response:
        service = self._service
        service.check_model(asked.model)
        if asked.text and asked.text.get("format", {}).get("type", "text") != "text":
            raise ApiError(400, "Text alone is served here; /v1/chat/completions has response_format.", param="text")
        said = [schema.Input(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
        messages = [schema.Message(role=m.role, content=m.content).plain() for m in said]
        if asked.instructions:
            messages = [{"role": "system", "content": asked.instructions}, *messages]
        prompt = await asyncio.to_thread(service.chat_prompt, messages)
        sampled = schema.Sampled(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed, method=asked.method)
        choices = service.choices(prompt, sampled, asked.max_output_tokens, request.scope["state"]["tenant"])
        head = Head("resp", service.settings.name)
        made = partial(response_object, head.id.replace("-", "_"), head.model, head.created, asked)
        if asked.stream:
            return self._streamed(self._response_events(sampled, choices, made))
        try:
            async for _ in _unless_gone(request, self._together(choices)):
                pass
        finally:
            self._drop(choices)
        return JSONResponse(made(_status(choices[0]), choices[0].text, service.usage(sampled, choices)))

    async def _response_events(
        self, sampled: schema.Sampled, choices: list[Choice], made: Callable[..., dict[str, Any]]
    ) -> AsyncIterator[str]:
        number = 0

        def said(name: str, **content: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": name, "sequence_number": number - 1, **content}, name)

        empty = made("in_progress", "", None)
        yield said("response.created", response=empty)
        yield said("response.in_progress", response=empty)
        item = made("completed", "", None)["output"][0]
        where = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        part = item["content"][0]
        yield said("response.output_item.added", output_index=0, item=item | {"status": "in_progress", "content": []})
        yield said("response.content_part.added", **where, part=part)
        async for _, delta in self._together(choices):
            if delta.text:
                yield said("response.output_text.delta", **where, delta=delta.text, logprobs=[])
        whole = made(_status(choices[0]), choices[0].text, self._service.usage(sampled, choices))
        item = whole["output"][0]
        yield said("response.output_text.done", **where, text=choices[0].text, logprobs=[])
        yield said("response.content_part.done", **where, part=item["content"][0])
        yield said("response.output_item.done", output_index=0, item=item)
        yield said(f"response.{whole['status']}", response=whole)

    def _streamed(self, chunks: AsyncIterator[str]) -> StreamingResponse:
        async def safely() -> AsyncIterator[str]:
            try:
                async for chunk in chunks:
                    yield chunk
            except Exception as error:  # the status has been sent: the error is an event
                found = api_error(error)
                self._service.metrics.failed(found.status)
                yield event(found.body)

        return StreamingResponse(safely(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _together(self, choices: list[Choice]) -> AsyncIterator[tuple[int, Delta]]:
        """The deltas of all answers, as they come, each with the answer's number."""
        deadline = time.monotonic() + self._service.settings.timeout
        queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()

        async def listen(i: int) -> None:
            try:
                async for delta in choices[i].deltas(self._service.worker, deadline):
                    queue.put_nowait((i, delta))
            except Exception as error:
                queue.put_nowait((i, error))

        tasks = [asyncio.create_task(listen(i)) for i in range(len(choices))]
        going = len(tasks)
        try:
            while going:
                i, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found.finish is not None:
                    going -= 1
                    self._service.metrics.ended(choices[i], found.finish)
                yield i, found
        finally:
            for task in tasks:
                task.cancel()
            self._drop(choices)

    def _drop(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._service.worker.cancel(choice.ticket)

    def _piece(self, token: int) -> str:
        return str(self._service.tokenizer.decode([token]))

    # --- about the server ---

    async def tokenize(self, asked: schema.Tokenize) -> Response:
        service = self._service
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "Give a prompt, or messages.", param="prompt")
        if asked.messages is not None:
            tokens = service.chat_prompt([message.plain() for message in asked.messages])
        else:
            tokens = service.tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens, verbose=False)[
                "input_ids"
            ]
        return JSONResponse({"count": len(tokens), "max_model_len": service.settings.context, "tokens": tokens})

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._service.described()]})

    async def model(self, name: str) -> Response:
        self._service.check_model(name)
        return JSONResponse(self._service.described())

    async def health(self) -> Response:
        alive = self._service.worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine thread has ended"}, 200 if alive else 503)

    async def ready(self) -> Response:
        running, waiting = self._service.worker.load
        ready = self._service.worker.alive and not self._service.worker.draining
        return JSONResponse({"ready": ready, "running": running, "waiting": waiting}, 200 if ready else 503)

    async def metrics(self) -> Response:
        return Response(self._service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self) -> Response:
        from longdraft import __version__

        return JSONResponse({"version": __version__})

    async def page(self) -> Response:
        return HTMLResponse(files("longdraft.serve").joinpath("page.html").read_text(encoding="utf-8"))


def _status(choice: Choice) -> str:
    assert choice.result is not None
    return "incomplete" if choice.result.finish_reason == "length" else "completed"


async def _unless_gone(request: Request, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """The same, until the client goes away: nobody would read the answer.

    Raises:
        ApiError: it has.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    left = asyncio.create_task(gone())
    try:
        while True:
            following = asyncio.ensure_future(anext(deltas))
            await asyncio.wait({following, left}, return_when=asyncio.FIRST_COMPLETED)
            if left.done() and not following.done():
                following.cancel()
                raise ApiError(499, "The client went away.")
            try:
                yield await following
            except StopAsyncIteration:
                return
    finally:
        left.cancel()
