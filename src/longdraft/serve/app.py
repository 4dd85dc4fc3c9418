"""The HTTP endpoints: OpenAI's API, Anthropic's, the page, and health, readiness and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from longdraft.errors import LongdraftError
from longdraft.serve.anthropic import CountTokensRequest, MessagesRequest, count_tokens, create_message
from longdraft.serve.errors import ApiError, to_api_error
from longdraft.serve.middleware import GuardMiddleware
from longdraft.serve.page import render_page
from longdraft.serve.protocol import ApiModel, ChatCompletionRequest, CompletionRequest, TokenizeRequest, parse_body
from longdraft.serve.responses import create_response
from longdraft.serve.responses_request import ResponsesRequest
from longdraft.serve.service import Service
from longdraft.serve.serving import PendingResponse, create_chat_completion, create_completion, tokenize

T = TypeVar("T")
# (path, class of the body, function that makes the response)
POST_ENDPOINTS: tuple[tuple[str, type[ApiModel], Callable[..., Any]], ...] = (
    ("/v1/chat/completions", ChatCompletionRequest, create_chat_completion),
    ("/v1/completions", CompletionRequest, create_completion),
    ("/v1/responses", ResponsesRequest, create_response),
    ("/v1/messages", MessagesRequest, create_message),
    ("/v1/messages/count_tokens", CountTokensRequest, count_tokens),
    ("/tokenize", TokenizeRequest, tokenize),
)
_PROMPT_FIELDS = {path: body_class.prompt_field for path, body_class, _ in POST_ENDPOINTS}


def make_app(service: Service) -> FastAPI:
    """Makes the web application of a service whose worker is running."""
    app = FastAPI(title="longdraft", docs_url=None, redoc_url=None)  # FastAPI's docs load scripts from other hosts
    endpoints, settings = Endpoints(service), service.settings
    app.add_middleware(GuardMiddleware, settings=settings, is_draining=lambda: service.worker.draining)
    for path, body_class, create in POST_ENDPOINTS:
        request_body = {"content": {"application/json": {"schema": body_class.model_json_schema()}}, "required": True}
        handler, options = endpoints.post(body_class, create), {"requestBody": request_body}
        app.post(path, name=create.__name__, response_model=None, openapi_extra=options)(handler)
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

    def post(self, body_class: type[ApiModel], create: Callable[..., Any]) -> Callable[[Request], Awaitable[Response]]:
        """Makes the handler of a path. ``create(service, body, tenant)``: the pending response, or its JSON object."""
        executor = self._service.executor

        async def handler(request: Request) -> Response:
            raw_body, tenant = await request.body(), request.state.tenant
            content_type = request.headers.get("content-type", "")

            def work() -> tuple[Any, Any]:
                body = parse_body(body_class, raw_body, content_type)
                return body, create(self._service, body, tenant)

            body, content = await executor.run(work, len(raw_body) + 1)  # + 1: size 0 would mean no limits
            if isinstance(content, PendingResponse):
                content.submit()
                if body.stream:
                    return self._stream(content)
                content = await _unless_disconnected(request, content.full_response())
            return await executor.run(lambda: JSONResponse(content))

        return handler

    def _stream(self, pending: PendingResponse) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            try:
                async for event in pending.events():
                    yield event
            except (GeneratorExit, asyncio.CancelledError):
                self._service.metrics.count_failure(499)  # nginx's status: the client disconnected
                raise
            except Exception as error:  # the HTTP status has been sent, so the error is an event
                api_error = to_api_error(error)
                self._service.metrics.count_failure(api_error.status)
                yield pending.error_event(api_error)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

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
