"""The HTTP endpoints: OpenAI's API, and what operators and the page need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from longdraft.errors import LongdraftError
from longdraft.model.chat import encode
from longdraft.serve import schema, structured, tools
from longdraft.serve.choice import Choice, Delta
from longdraft.serve.errors import ApiError, api_error
from longdraft.serve.filling import filling_ends, filling_prompt
from longdraft.serve.guards import Guards
from longdraft.serve.openai import DONE, Answer, ChatAnswer, Head, TextAnswer, event, response_object
from longdraft.serve.page import page
from longdraft.serve.service import Service


def make_app(service: Service) -> FastAPI:
    """The web application of a service whose worker is running."""
    app = FastAPI(title="longdraft", docs_url=None, redoc_url=None)  # FastAPI's pages load scripts from elsewhere
    endpoints, settings = Endpoints(service), service.settings
    app.add_middleware(Guards, settings=settings, leaving=lambda: service.worker.draining)
    for path, post in (
        ("/v1/chat/completions", endpoints.chat), ("/v1/completions", endpoints.complete),
        ("/v1/responses", endpoints.respond), ("/tokenize", endpoints.tokenize),
    ):  # fmt: skip
        app.post(path, response_model=None)(post)
    for path, get in (
        ("/v1/models", endpoints.models), ("/v1/models/{name:path}", endpoints.model), ("/health", endpoints.health),
        ("/ready", endpoints.ready), ("/metrics", endpoints.metrics), ("/version", endpoints.version),
        ("/", endpoints.page),
    ):  # fmt: skip
        app.get(path, response_model=None)(get)
    for kind in (ApiError, LongdraftError, TimeoutError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, endpoints.refused)
    return app


class Endpoints:
    """One method for each endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def refused(self, _: Request, error: Exception) -> Response:
        """The response to a request that raised an error."""
        if isinstance(error, RequestValidationError):
            # The deepest one is what is wrong with the kind of value that was meant, where a field takes several kinds.
            first = max(error.errors(), key=lambda each: len(each["loc"]))
            names = [str(x) for x in first["loc"] if x not in ("body", "str") and "[" not in str(x)]
            field = ".".join(names) if first["type"] != "json_invalid" else ""
            problem = "is not served" if first["type"] == "extra_forbidden" else f"cannot be used: {first['msg']}"
            error = ApiError(400, f"{field or 'The body'} {problem}.", param=field or None)
        elif isinstance(error, HTTPException):
            code = "not_found" if error.status_code == 404 else None
            error = ApiError(error.status_code, str(error.detail), code=code)
        refusal = api_error(error)
        self._service.metrics.failed(refusal.status)
        return JSONResponse(refusal.body, refusal.status, refusal.headers)

    # --- answers ---

    async def chat(self, body: schema.Chat, request: Request) -> Response:
        service = self._service
        service.check_model(body.model)
        messages = [message.plain() for message in body.messages]
        choice = tools.checked_choice(body.tools, body.tool_choice)
        offered = body.tools if choice != "none" else []
        grammar = structured.grammar_for(body.response_format) if body.response_format else None
        if offered:
            if grammar is not None:
                raise ApiError(400, "response_format and tools are not served together.", param="response_format")
            grammar = tools.grammar_for_tools(service.tokenizer, offered, choice, body.parallel_tool_calls)
        messages, template = tools.with_tools(service.tokenizer, messages, offered)
        prompt = await asyncio.to_thread(service.chat_prompt, messages, **template)
        constraint = None
        if grammar is not None:
            constraint = partial(structured.Constraint, service.tokenizer, grammar, len(prompt))
            constraint()  # raises now if the tokenizer cannot follow a grammar
        choices = service.choices(
            prompt, body, body.max_completion_tokens or body.max_tokens, request.state.tenant,
            body.top_logprobs if body.logprobs else None, constraint,
        )  # fmt: skip
        names = [tool["function"]["name"] for tool in offered]
        answers = [
            ChatAnswer(
                i, self._piece, body.logprobs, body.return_token_ids, tools.ToolParser(names) if offered else None
            )
            for i in range(body.n)
        ]
        return await self._answer(body, choices, answers, request)

    async def complete(self, body: schema.Completion, request: Request) -> Response:
        service = self._service
        service.check_model(body.model)
        prompts: Any = body.prompt
        if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        if len(prompts) > 16:
            raise ApiError(400, "At most 16 prompts a request here.", param="prompt")
        choices: list[Choice] = []
        for prompt in prompts:
            ids = await asyncio.to_thread(self._completed, prompt, body.suffix)
            ends = filling_ends(service.tokenizer) if body.suffix else ()
            echo = None
            if body.echo:
                echo = prompt if isinstance(prompt, str) else str(service.tokenizer.decode(ids))
            choices += service.choices(
                ids, body, body.max_tokens, request.state.tenant, body.logprobs, ends=ends, echo=echo
            )
        answers = [
            TextAnswer(i, self._piece, body.logprobs is not None, body.return_token_ids) for i in range(len(choices))
        ]
        return await self._answer(body, choices, answers, request)

    def _completed(self, prompt: str | list[int], suffix: str) -> list[int]:
        """Token ids of a prompt of ``/v1/completions``."""
        if suffix and not isinstance(prompt, str):
            raise ApiError(400, "suffix needs a prompt that is a text.", param="suffix")
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self._service.tokenizer
        return filling_prompt(tokenizer, prompt, suffix) if suffix else encode(tokenizer, prompt)

    async def _answer(
        self, body: schema.Sampled, choices: list[Choice], answers: Sequence[Answer], request: Request
    ) -> Response:
        self._service.submit(choices)
        head = Head(answers[0].prefix, self._service.settings.name)
        if body.stream:
            return self._streamed(self._chunks(body.stream_options, choices, answers, head))
        async for i, delta in self._deltas(choices, request):
            answers[i].chunks(delta)
        whole = [answer.whole() for answer in answers]
        return JSONResponse(head.object(answers[0].kind, whole, usage=self._service.usage(choices)))

    async def _chunks(
        self, options: schema.StreamOptions, choices: list[Choice], answers: Sequence[Answer], head: Head
    ) -> AsyncIterator[str]:
        kind = answers[0].chunk_kind
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        async for i, delta in self._deltas(choices):
            if options.include_usage and options.continuous_usage_stats:
                usage = {"usage": self._service.usage_so_far(choices)}
            chunks = answers[i].chunks(delta)
            if delta.trace is not None:
                yield event(head.object(kind, chunks or [answers[i].empty_chunk()], trace=delta.trace, **usage))
                continue
            for chunk in chunks:
                yield event(head.object(kind, [chunk], **usage))
        if options.include_usage:
            yield event(head.object(kind, [], usage=self._service.usage(choices)))
        yield DONE

    async def respond(self, body: schema.Responses, request: Request) -> Response:
        service = self._service
        service.check_model(body.model)
        if body.text and body.text.get("format", {}).get("type", "text") != "text":
            raise ApiError(400, "Text alone is served here; /v1/chat/completions has response_format.", param="text")
        turns = [schema.Input(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        messages = [schema.Message(role=turn.role, content=turn.content).plain() for turn in turns]
        if body.instructions:
            messages = [{"role": "system", "content": body.instructions}, *messages]
        prompt = await asyncio.to_thread(service.chat_prompt, messages)
        sampled = schema.Sampled(temperature=body.temperature, top_p=body.top_p, seed=body.seed, method=body.method)
        (choice,) = service.choices(prompt, sampled, body.max_output_tokens, request.state.tenant)
        service.submit([choice])
        head = Head("resp", service.settings.name)
        if body.stream:
            return self._streamed(self._response_events(body, choice, head))
        async for _ in self._deltas([choice], request):
            pass
        return JSONResponse(self._response(body, choice, head))

    def _response(self, body: schema.Responses, choice: Choice, head: Head) -> dict[str, Any]:
        """The object of a response that has ended."""
        assert choice.result is not None
        status = "incomplete" if choice.result.finish_reason == "length" else "completed"
        return response_object(head, body, status, choice.text, self._service.usage([choice]))

    async def _response_events(self, body: schema.Responses, choice: Choice, head: Head) -> AsyncIterator[str]:
        number = 0

        def numbered(name: str, **content: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": name, "sequence_number": number - 1, **content}, name)

        empty = response_object(head, body, "in_progress", "", None)
        yield numbered("response.created", response=empty)
        yield numbered("response.in_progress", response=empty)
        item = response_object(head, body, "completed", "", None)["output"][0]
        where = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        part = item["content"][0]
        item |= {"status": "in_progress", "content": []}
        yield numbered("response.output_item.added", output_index=0, item=item)
        yield numbered("response.content_part.added", **where, part=part)
        async for _, delta in self._deltas([choice]):
            if delta.text:
                yield numbered("response.output_text.delta", **where, delta=delta.text, logprobs=[])
        whole = self._response(body, choice, head)
        item = whole["output"][0]
        yield numbered("response.output_text.done", **where, text=choice.text, logprobs=[])
        yield numbered("response.content_part.done", **where, part=item["content"][0])
        yield numbered("response.output_item.done", output_index=0, item=item)
        yield numbered(f"response.{whole['status']}", response=whole)

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
        """Yields the deltas of all choices as they come, each with the index of its choice.

        Args:
            request: end when its client disconnects; None where the response itself listens for that.

        Raises:
            ApiError: the client has disconnected. What the engine failed with.
        """
        deadline = time.monotonic() + self._service.settings.timeout
        queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()

        async def listen(i: int) -> None:
            try:
                async for delta in choices[i].deltas(self._service.worker, deadline):
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
                i, delta = await queue.get()
                if isinstance(delta, Exception):
                    raise delta
                if delta.finish is not None:
                    running -= 1
                    self._service.metrics.ended(choices[i], delta.finish)
                yield i, delta
        except (GeneratorExit, asyncio.CancelledError):  # of a stream
            self._service.metrics.failed(499)
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._service.cancel(choices)

    def _piece(self, token: int) -> str:
        return str(self._service.tokenizer.decode([token]))

    # --- about the server ---

    async def tokenize(self, body: schema.Tokenize) -> Response:
        service = self._service
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "Give a prompt, or messages.", param="prompt")
        if body.messages is not None:
            tokens = service.chat_prompt([message.plain() for message in body.messages])
        else:
            encoded = service.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens, verbose=False)
            tokens = encoded["input_ids"]
        return JSONResponse({"count": len(tokens), "max_model_len": service.settings.context, "tokens": tokens})

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._service.model_object()]})

    async def model(self, name: str) -> Response:
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
