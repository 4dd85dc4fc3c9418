"""The HTTP endpoints: OpenAI's API, and what operators and the page need."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from longdraft.errors import LongdraftError
from longdraft.serve import asked, schema
from longdraft.serve.aside import Aside
from longdraft.serve.asked import Asked
from longdraft.serve.body import read
from longdraft.serve.choice import REASONS, Choice, Delta
from longdraft.serve.errors import ApiError, api_error
from longdraft.serve.guards import Guards
from longdraft.serve.openai import DONE, Answer, ChatAnswer, Head, event
from longdraft.serve.page import page
from longdraft.serve.responses import ResponseAnswer
from longdraft.serve.service import Service

T = TypeVar("T")
Body = TypeVar("Body", bound=schema.Strict)
# So many tokens with log-probabilities take long enough to write to do it beside the event loop.
_MANY = 64


def make_app(service: Service) -> FastAPI:
    """The web application of a service whose worker is running."""
    app = FastAPI(title="longdraft", docs_url=None, redoc_url=None)  # FastAPI's pages load scripts from elsewhere
    endpoints, settings = Endpoints(service), service.settings
    app.add_middleware(Guards, settings=settings, leaving=lambda: service.worker.draining)
    for path, post, kind in (
        ("/v1/chat/completions", endpoints.chat, schema.Chat),
        ("/v1/completions", endpoints.complete, schema.Completion),
        ("/v1/responses", endpoints.respond, schema.Responses), ("/tokenize", endpoints.tokenize, schema.Tokenize),
    ):  # fmt: skip
        described = {"content": {"application/json": {"schema": kind.model_json_schema()}}, "required": True}
        app.post(path, response_model=None, openapi_extra={"requestBody": described})(post)
    for path, get in (
        ("/v1/models", endpoints.models), ("/v1/models/{name:path}", endpoints.model), ("/health", endpoints.health),
        ("/ready", endpoints.ready), ("/metrics", endpoints.metrics), ("/version", endpoints.version),
        ("/", endpoints.page),
    ):  # fmt: skip
        app.get(path, response_model=None)(get)
    for error in (ApiError, LongdraftError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(error, endpoints.refused)
    return app


_SILENCE = Delta()


def _comment(choices: Sequence[Choice]) -> str:
    """An SSE comment, which clients pass over: proxies end connections on which nothing comes."""
    read, of = choices[0].read, len(choices[0].request.prompt)
    return f": {read} of {of} tokens of the prompt have been read\n\n"


class Endpoints:
    """One method for each endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._aside = Aside(service.settings.queue + service.settings.slots, service.settings.preparing)

    async def refused(self, request: Request, error: Exception) -> Response:
        """The response to a request that raised an error."""
        if isinstance(error, HTTPException):
            message, code = f"{error.detail}: {request.method} {request.url.path}.", None
            if error.status_code == 404:
                known = [route.path for route in request.app.routes if route.path.startswith("/v1/")]
                message, code = f"There is no {request.url.path} here, but {', '.join(known)}.", "not_found"
            error = ApiError(error.status_code, message, code=code)
        refusal = api_error(error)
        self._service.metrics.failed(refusal.status)
        return JSONResponse(refusal.body, refusal.status, refusal.headers)

    # --- answers ---

    async def _read(
        self, request: Request, kind: type[Body], ask: Callable[[Service, Body, str | None], T]
    ) -> tuple[Body, T]:
        """The request's body, and what is made of it, beside the event loop."""
        raw, tenant = await request.body(), request.state.tenant
        content_type = request.headers.get("content-type", "")

        def work() -> tuple[Body, T]:
            body = read(kind, raw, content_type)
            return body, ask(self._service, body, tenant)

        return await self._aside(work, len(raw) + 1)

    async def chat(self, request: Request) -> Response:
        return await self._answer(*await self._read(request, schema.Chat, asked.chat), request)

    async def complete(self, request: Request) -> Response:
        return await self._answer(*await self._read(request, schema.Completion, asked.complete), request)

    async def _answer(self, body: schema.Sampled, asked: Asked, request: Request) -> Response:
        choices, answers = asked.choices, asked.answers
        self._service.submit(choices)
        head = Head(answers[0].prefix, self._service.settings.name)
        if body.stream:
            return self._streamed(self._chunks(body.stream_options, choices, answers, head))
        async for i, delta in self._deltas(choices, request):
            if delta is not _SILENCE:
                await self._parts(answers[i], delta)

        def whole() -> Response:
            said = [answer.whole() for answer in answers]
            return JSONResponse(head.object(answers[0].kind, said, usage=self._usage(choices, answers)))

        return await self._aside(whole)

    async def _parts(self, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        if len(delta.scored) < _MANY:
            return answer.chunks(delta)
        return await self._aside(lambda: answer.chunks(delta))

    def _usage(self, choices: Sequence[Choice], answers: Sequence[Answer]) -> dict[str, Any]:
        return self._service.usage(choices, sum(a.thought_tokens for a in answers if isinstance(a, ChatAnswer)))

    async def _chunks(
        self, options: schema.StreamOptions, choices: list[Choice], answers: Sequence[Answer], head: Head
    ) -> AsyncIterator[str]:
        kind = answers[0].chunk_kind
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.include_trace:
            trace = {"phase": "prefill", "read": 0, "of": len(choices[0].request.prompt)}
            yield event(head.object(kind, [answers[0].empty_chunk()], trace=trace, **usage))
        async for i, delta in self._deltas(choices):
            if delta is _SILENCE:
                yield _comment(choices)
                continue
            if options.include_usage and options.continuous_usage_stats:
                usage = {"usage": self._service.usage_so_far(choices)}
            chunks = await self._parts(answers[i], delta)
            if delta.trace is not None:
                yield event(head.object(kind, chunks or [answers[i].empty_chunk()], trace=delta.trace, **usage))
                continue
            for chunk in chunks:
                yield event(head.object(kind, [chunk], **usage))
        if options.include_usage:
            total = await self._aside(lambda: self._usage(choices, answers))
            yield event(head.object(kind, [], usage=total))
        yield DONE

    async def respond(self, request: Request) -> Response:
        def ask(service: Service, body: schema.Responses, tenant: str | None) -> Asked:
            return asked.chat(service, body.as_chat(), tenant)

        body, found = await self._read(request, schema.Responses, ask)
        self._service.submit(found.choices)
        answer = ResponseAnswer(Head("resp", self._service.settings.name), body)
        if body.stream:
            return self._streamed(self._response_events(answer, found))
        async for _ in self._response_events(answer, found, request):
            pass
        return JSONResponse(answer.whole)

    async def _response_events(
        self, answer: ResponseAnswer, asked: Asked, request: Request | None = None
    ) -> AsyncIterator[str]:
        """The events of a response; ``request``: as :meth:`_deltas` takes it."""
        for begun in answer.begin():
            yield begun
        cut = False
        async for _, delta in self._deltas(asked.choices, request):
            if delta is _SILENCE:
                yield _comment(asked.choices)
                continue
            cut = REASONS.get(delta.finish) == "length"
            for chunk in asked.answers[0].chunks(delta):
                for told in answer.push(chunk["delta"]):
                    yield told
        usage = await self._aside(lambda: self._usage(asked.choices, asked.answers))
        for told in answer.finish(cut, usage):
            yield told

    def _streamed(self, chunks: AsyncIterator[str]) -> StreamingResponse:
        async def with_errors() -> AsyncIterator[str]:
            try:
                async for chunk in chunks:
                    yield chunk
            except Exception as error:  # the status has been sent: the error is an event
                refusal = api_error(error)
                self._service.metrics.failed(refusal.status)
                yield event(refusal.body)

        return StreamingResponse(with_errors(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _deltas(self, choices: list[Choice], request: Request | None = None) -> AsyncIterator[tuple[int, Delta]]:
        """Yields the deltas of all choices as they come, each with the index of its choice; _SILENCE after a while
        without any. Answers end where they are once the request has taken as long as it may.

        Args:
            request: end when its client disconnects; None where the response itself listens for that.

        Raises:
            ApiError: the client has disconnected. TimeoutError: no token came in time. What the engine failed with.
        """
        settings = self._service.settings
        until = time.monotonic() + settings.timeout
        queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()

        async def listen(i: int) -> None:
            try:
                async for delta in choices[i].deltas(self._service.worker):
                    queue.put_nowait((i, delta))
            except Exception as error:
                queue.put_nowait((i, error))

        async def watch(request: Request) -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait((0, ApiError(499, "The client went away.")))

        running = len(choices)
        tasks = [asyncio.create_task(listen(i)) for i in range(running)]
        if request is not None:
            tasks.append(asyncio.create_task(watch(request)))
        try:
            while running:
                left = until - time.monotonic()
                if left <= 0:
                    if not any(choice.tokens for choice in choices):
                        raise TimeoutError
                    self._service.cancel(choices)  # each still tells its end
                    until = left = math.inf
                try:
                    i, delta = await asyncio.wait_for(queue.get(), min(left, settings.keep_alive))
                except asyncio.TimeoutError:
                    i, delta = 0, _SILENCE
                if isinstance(delta, Exception):
                    raise delta
                if delta.finish is not None:
                    running -= 1
                    self._service.metrics.ended(choices[i], REASONS[delta.finish])
                yield i, delta
        except (GeneratorExit, asyncio.CancelledError):  # of a stream
            self._service.metrics.failed(499)
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._service.cancel(choices)

    # --- about the server ---

    async def tokenize(self, request: Request) -> Response:
        def answer(service: Service, body: schema.Tokenize, tenant: str | None) -> Response:
            tokens = asked.tokens_of(service, body)
            return JSONResponse({"count": len(tokens), "max_model_len": service.settings.context, "tokens": tokens})

        return (await self._read(request, schema.Tokenize, answer))[1]

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._service.model_object()]})

    async def model(self, name: str) -> Response:
        if not name:
            return await self.models()
        self._service.check_model(name)
        return JSONResponse(self._service.model_object())

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
        return HTMLResponse(page())
