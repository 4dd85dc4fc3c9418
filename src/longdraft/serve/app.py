"""The HTTP endpoints: OpenAI's API, Anthropic's, the page, and health, readiness and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from longdraft.errors import LongdraftError
from longdraft.serve import protocol, serving
from longdraft.serve.anthropic import CountTokensRequest, MessagesRequest, create_message
from longdraft.serve.choice import Choice
from longdraft.serve.errors import ApiError, to_api_error
from longdraft.serve.middleware import GuardMiddleware
from longdraft.serve.openai import DONE_EVENT, sse_event, usage_so_far
from longdraft.serve.page import render_page
from longdraft.serve.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest, parse_body
from longdraft.serve.responses_request import ResponsesRequest
from longdraft.serve.service import Service
from longdraft.serve.serving import KEEP_ALIVE, AdaptedResponse, PendingResponse, create_response

T = TypeVar("T")
Body = TypeVar("Body", bound=protocol.ApiModel)
# Path -> the field that has the prompt, if that is not "messages".
_PROMPT_FIELDS = {"/v1/completions": "prompt", "/tokenize": "prompt", "/v1/responses": "input"}


def make_app(service: Service) -> FastAPI:
    """Makes the web application of a service whose worker is running."""
    app = FastAPI(title="longdraft", docs_url=None, redoc_url=None)  # FastAPI's docs load scripts from other hosts
    endpoints, settings = Endpoints(service), service.settings
    app.add_middleware(GuardMiddleware, settings=settings, is_draining=lambda: service.worker.draining)
    for path, post, body_class in (
        ("/v1/chat/completions", endpoints.chat, ChatCompletionRequest),
        ("/v1/completions", endpoints.complete, CompletionRequest),
        ("/v1/responses", endpoints.respond, ResponsesRequest), ("/v1/messages", endpoints.message, MessagesRequest),
        ("/v1/messages/count_tokens", endpoints.count, CountTokensRequest),
        ("/tokenize", endpoints.tokenize, TokenizeRequest),
    ):  # fmt: skip
        request_body = {"content": {"application/json": {"schema": body_class.model_json_schema()}}, "required": True}
        app.post(path, response_model=None, openapi_extra={"requestBody": request_body})(post)
    for path, get in (
        ("/v1/models", endpoints.models), ("/v1/models/{name:path}", endpoints.model), ("/health", endpoints.health),
        ("/ready", endpoints.ready), ("/metrics", endpoints.metrics), ("/version", endpoints.version),
        ("/", endpoints.page),
    ):  # fmt: skip
        app.get(path, response_model=None)(get)
    app.head("/v1/messages", response_model=None)(lambda: Response())  # clients probe for the server with HEAD
    for error in (ApiError, LongdraftError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(error, endpoints.on_error)
    return app


def _keep_alive_comment(choices: Sequence[Choice]) -> str:
    """Returns an SSE comment, which clients ignore. It keeps proxies from closing an idle connection."""
    choice = choices[0]
    return f": {choice.num_prefilled_tokens} of {len(choice.request.prompt)} tokens of the prompt have been read\n\n"


class Endpoints:
    """The handlers of the endpoints, a method for each path of :func:`make_app`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_error(self, request: Request, error: Exception) -> Response:
        """Returns the response to a request that raised an error."""
        if isinstance(error, HTTPException):
            message, code, headers = f"{error.detail}: {request.method} {request.url.path}.", None, error.headers
            if error.status_code == 405:  # the router's Allow header has the methods of one route only
                allowed = {m for r in request.app.routes if r.matches(request.scope)[0].value for m in r.methods}
                headers = {"Allow": ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))}
            if error.status_code == 404:
                paths = [route.path for route in request.app.routes if route.path.startswith("/v1/")]
                message, code = f"There is no {request.url.path} here: use {', '.join(paths)}.", "not_found"
            error = ApiError(error.status_code, message, code=code, headers=dict(headers or {}))
        api_error = to_api_error(error, _PROMPT_FIELDS.get(request.scope["path"], "messages"))
        self._service.metrics.count_failure(api_error.status)
        return api_error.response(request.scope)

    async def _parse(
        self, request: Request, body_class: type[Body], create: Callable[[Service, Body, str | None], T]
    ) -> tuple[Body, T]:
        """Returns the request's parsed body and what ``create`` makes of it. Both are made in the executor."""
        raw_body, tenant = await request.body(), request.state.tenant
        content_type = request.headers.get("content-type", "")

        def work() -> tuple[Body, T]:
            body = parse_body(body_class, raw_body, content_type)
            return body, create(self._service, body, tenant)

        return await self._service.executor.run(work, len(raw_body) + 1)  # + 1: size 0 would mean no limits

    async def chat(self, request: Request) -> Response:
        parsed = await self._parse(request, ChatCompletionRequest, serving.create_chat_completion)
        return await self._answer(*parsed, request)

    async def complete(self, request: Request) -> Response:
        return await self._answer(*await self._parse(request, CompletionRequest, serving.create_completion), request)

    async def _answer(self, body: protocol.SampledRequest, pending: PendingResponse, request: Request) -> Response:
        pending.submit()
        if body.stream:
            return self._stream(self._chunk_events(body.stream_options, pending))
        return await self._full_response(pending, request)

    async def _full_response(self, pending: PendingResponse, request: Request) -> Response:
        content = await _unless_disconnected(request, pending.full_response())
        return await self._service.executor.run(lambda: JSONResponse(content))

    async def _chunk_events(self, options: protocol.StreamOptions, pending: PendingResponse) -> AsyncIterator[str]:
        """Yields OpenAI's chunks as server-sent events."""
        choices, builders, envelope = pending.choices, pending.builders, pending.envelope()
        object_type = builders[0].chunk_object_type
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.include_trace:
            trace = {"phase": "prefill", "read": 0, "of": len(choices[0].request.prompt)}
            yield sse_event(envelope.wrap(object_type, [builders[0].empty_chunk()], trace=trace, **usage))
        async for i, delta in pending.deltas():
            if delta is KEEP_ALIVE:
                yield _keep_alive_comment(choices)
                continue
            if options.include_usage and options.continuous_usage_stats:
                usage = {"usage": usage_so_far(choices)}
            chunks = await pending.build_choice_entries(i, delta)
            if delta.trace is not None:
                chunks = chunks or [builders[i].empty_chunk()]
                yield sse_event(envelope.wrap(object_type, chunks, trace=delta.trace, **usage))
                continue
            for chunk in chunks:
                yield sse_event(envelope.wrap(object_type, [chunk], **usage))
        if options.include_usage:
            yield sse_event(envelope.wrap(object_type, [], **await self._service.executor.run(pending.final_fields)))
        yield DONE_EVENT

    async def respond(self, request: Request) -> Response:
        return await self._adapt(*await self._parse(request, ResponsesRequest, create_response), request)

    async def message(self, request: Request) -> Response:
        return await self._adapt(*await self._parse(request, MessagesRequest, create_message), request)

    async def _adapt(self, body: protocol.GenerationRequest, pending: AdaptedResponse, request: Request) -> Response:
        pending.submit()
        if not body.stream:
            return await self._full_response(pending, request)
        return self._stream(self._adapted_events(pending), pending.adapter.error_event)

    async def _adapted_events(self, pending: AdaptedResponse) -> AsyncIterator[str]:
        async for event in pending.events():
            yield event or pending.adapter.keep_alive_event or _keep_alive_comment(pending.choices)

    def _stream(
        self, events: AsyncIterator[str], error_event: Callable[[ApiError], str] = lambda error: sse_event(error.body)
    ) -> StreamingResponse:
        """Returns a response that streams ``events``. ``error_event`` makes the last event of a stream that fails."""

        async def with_errors() -> AsyncIterator[str]:
            try:
                async for event in events:
                    yield event
            except (GeneratorExit, asyncio.CancelledError):
                self._service.metrics.count_failure(499)  # nginx's status: the client disconnected
                raise
            except Exception as error:  # the HTTP status has been sent, so the error is an event
                api_error = to_api_error(error)
                self._service.metrics.count_failure(api_error.status)
                yield error_event(api_error)

        return StreamingResponse(with_errors(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def tokenize(self, request: Request) -> Response:
        def create(service: Service, body: TokenizeRequest, tenant: str | None) -> Response:
            tokens = serving.tokenize(service, body)
            return JSONResponse({"count": len(tokens), "max_model_len": service.settings.context, "tokens": tokens})

        return (await self._parse(request, TokenizeRequest, create))[1]

    async def count(self, request: Request) -> Response:
        def create(service: Service, body: CountTokensRequest, tenant: str | None) -> Response:
            service.check_model(body.model)
            chat = body.as_chat()
            return JSONResponse({"input_tokens": len(serving.render_chat_prompt(service, chat, chat.tools)[0])})

        return (await self._parse(request, CountTokensRequest, create))[1]

    async def models(self) -> Response:
        name = self._service.settings.name
        pagination = {"has_more": False, "first_id": name, "last_id": name}  # fields of Anthropic's list
        return JSONResponse({"object": "list", "data": [self._service.model_object()], **pagination})

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
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self) -> Response:
        from longdraft import __version__

        return JSONResponse({"version": __version__})

    async def page(self) -> Response:
        return HTMLResponse(render_page())


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. If the client disconnects first, cancels the work and raises ApiError."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "The client disconnected.")
        return await task
    finally:
        task.cancel()
        disconnect.cancel()
