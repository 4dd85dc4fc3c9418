"""From a request to the answers that it asks for, and to the end of these.

Making them takes as long as the request's texts are.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from longdraft.errors import CapabilityError
from longdraft.model.chat import encode, encode_conversation
from longdraft.serve import protocol, structured, tools
from longdraft.serve.choice import FINISH_REASONS, Choice, Delta
from longdraft.serve.errors import ApiError, ContextOverflow
from longdraft.serve.openai import (
    ChatChoiceBuilder,
    ChoiceBuilder,
    CompletionChoiceBuilder,
    ResponseEnvelope,
    timings_and_metrics,
    usage,
)
from longdraft.serve.reasoning import THINK_END, THINK_START, ReasoningParser
from longdraft.serve.responses import ResponsesAdapter
from longdraft.serve.responses_request import ResponsesRequest
from longdraft.serve.service import Service
from longdraft.serve.tool_parser import ToolParser
from longdraft.serve.tool_types import as_functions as kinds_of
from longdraft.serve.worker import Update

# The prompt's last tokens, which may open the model's thoughts.
_TAIL = 24


KEEP_ALIVE = Delta()
# Tokens before the prompt, before the suffix, and before the model's answer, where it fills in the middle: Qwen-Coder's
# and CodeGemma's form, and StarCoder's. The others end such an answer too: another file would begin.
_FILLING = (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
_NEXT_FILES = ("<|file_separator|>", "<file_sep>")
# So many tokens with log-probabilities take long enough to write to do it beside the event loop.
_MANY = 64


@dataclass(frozen=True)
class PendingResponse:
    """The answers to a request: its choices, and the builder of each one's answer. First :meth:`submit` them.

    Attributes:
        updates: what the worker tells of the choices, each with the choice's index.
    """

    service: Service
    choices: list[Choice]
    builders: Sequence[ChoiceBuilder]
    updates: asyncio.Queue[tuple[int, Update]] = field(default_factory=asyncio.Queue)

    def submit(self) -> None:
        """Hands all choices to the worker, or none; from the loop that listens to them.

        Raises:
            QueueFull, Draining: no more requests are taken. RequestError: so many never are.
        """
        loop = asyncio.get_running_loop()

        def hear(i: int, update: Update) -> None:
            loop.call_soon_threadsafe(self.updates.put_nowait, (i, update))

        for i, choice in enumerate(self.choices):
            choice.listener = partial(hear, i)
        if self.choices:
            self.service.worker.submit(*self.choices)

    async def full_response(self) -> dict[str, Any]:
        """OpenAI's object of the answers once they have ended; raises as :meth:`deltas`."""
        async for i, delta in self.deltas():
            await self.chunks(i, delta)
        head, kind = self.envelope(), self.builders[0].object_type
        return await self.service.executor(
            lambda: head.wrap(kind, [answer.full_choice() for answer in self.builders], **self.final_fields())
        )

    def envelope(self) -> ResponseEnvelope:
        return ResponseEnvelope(self.builders[0].id_prefix, self.service.settings.name)

    def final_fields(self) -> dict[str, Any]:
        """The fields that tell of the answers: usage, and for a single one those of other servers."""
        return {"usage": self.usage(), **(timings_and_metrics(self.choices[0]) if len(self.choices) == 1 else {})}

    @property
    def num_new_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        return usage(self.choices, sum(a.reasoning_tokens for a in self.builders if isinstance(a, ChatChoiceBuilder)))

    def matched_stop(self) -> str | None:
        """The stop string that ended the first answer; None: none did."""
        result, stops = self.choices[0].result, self.choices[0].request.stop or ()
        if result is None or result.finish_reason != "stop":
            return None
        spec = self.service.speculator(self.service.settings.methods[0])
        text = spec.texts.decoder_for_stops(stops)(result.token_ids)
        return min((stop for stop in sorted(stops, key=len) if stop in text), key=text.find, default=None)

    async def chunks(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of OpenAI's chunks for what a step adds to an answer."""
        if len(delta.logprobs) < _MANY:
            return self.builders[i].chunks(delta)
        return await self.service.executor(lambda: self.builders[i].chunks(delta))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yields the deltas of all choices as they come, each with the index of its choice; SILENCE after a while
        without any. Answers end where they are once the request has taken as long as it may.

        Raises:
            TimeoutError: no token came in time. What the engine failed with.
        """
        settings, worker = self.service.settings, self.service.worker
        until, running = time.monotonic() + settings.timeout, len(self.choices)
        coming = asyncio.ensure_future(self.updates.get())
        try:
            while running:
                left = until - time.monotonic()
                if left <= 0:
                    if not any(choice.num_tokens for choice in self.choices):
                        raise TimeoutError
                    for choice in self.choices:
                        worker.cancel(choice)  # it still tells its end
                    until = left = math.inf
                # asyncio.wait_for of Python 3.10 and 3.11 may lose a cancellation that comes with a result.
                await asyncio.wait((coming,), timeout=min(left, settings.sse_ping_interval))
                if not coming.done():
                    yield 0, KEEP_ALIVE
                    continue
                i, update = coming.result()
                coming = asyncio.ensure_future(self.updates.get())
                for delta in self.choices[i].process_update(update):
                    if delta.finish_reason is not None:
                        running -= 1
                        self.service.metrics.observe_choice(self.choices[i], FINISH_REASONS[delta.finish_reason])
                    yield i, delta
        finally:
            coming.cancel()
            for choice in self.choices:
                worker.cancel(choice)


def constraint_factory(constraint: structured.Constraint) -> Callable[[], structured.Constraint]:
    """Makes constraints; the first one is made here already, as a large one keeps the engine waiting."""
    ready = [copy.deepcopy(constraint)]
    return lambda: ready.pop() if ready else copy.deepcopy(constraint)


def create_chat_completion(
    service: Service, body: protocol.ChatCompletionRequest, tenant: str | None = None
) -> PendingResponse:
    """Raises longdraft's errors and ApiError for what cannot be served."""
    service.check_model(body.model)
    functions, kinds = kinds_of(body.tools)
    choice, offered = tools.resolve_tool_choice(functions, body.tool_choice)
    answer = structured.response_schema(body.response_format) if body.response_format else None
    prompt, thinking = render_chat_prompt(service, body, functions if offered else [])
    parallel = body.parallel_tool_calls
    constraint = tools.tool_constraint(service.tokenizer, offered, choice, parallel, len(prompt), thinking, answer)
    bound = None if constraint is None else constraint_factory(constraint)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs: true.", param="top_logprobs")
    logprobs = body.top_logprobs if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    choices = service.make_choices(prompt, body, limit, tenant, logprobs, bound)
    names = [tool["function"]["name"] for tool in offered]
    return PendingResponse(service, choices, [
        ChatChoiceBuilder(
            i, service.token_to_piece, body.logprobs, body.return_token_ids,
            ToolParser(names, choice != "auto", answer is not None, kinds) if offered else None,
            ReasoningParser(thinking) if body.reasoning_format != "none" else None, body.include_reasoning,
        )
        for i in range(body.n)
    ])  # fmt: skip


def render_chat_prompt(
    service: Service,
    body: protocol.ChatCompletionRequest | protocol.TokenizeRequest,
    tools_offered: Sequence[dict[str, Any]] = (),
) -> tuple[list[int], bool]:
    """Token ids of a chat, ready for the model's answer, and whether they end within its thoughts."""
    messages, begun = [message.for_template() for message in body.messages or ()], ""
    wanted, last = body.continue_final_message, messages[-1]
    mine = last["role"] == "assistant" and "tool_calls" not in last
    if wanted and (body.add_generation_prompt or not mine):
        message = "continue_final_message goes with a last message of the assistant's, without add_generation_prompt."
        raise ApiError(400, message, param="continue_final_message")
    if mine and wanted is not False and not body.add_generation_prompt:
        begun = messages.pop()["content"]
    messages, template = tools.messages_with_tools(service.tokenizer, messages, tools_offered)
    prompt = encode_conversation(service.tokenizer, messages, begun, **_template(service, body), **template)
    tail = str(service.tokenizer.decode(prompt[-_TAIL:])).rstrip()
    return prompt, tail.endswith(THINK_START) or begun.rfind(THINK_START) > begun.rfind(THINK_END)


def _template(service: Service, body: protocol.ChatCompletionRequest | protocol.TokenizeRequest) -> dict[str, Any]:
    """Further arguments of the chat template."""
    asked: dict[str, Any] = {} if service.settings.think else {"enable_thinking": False}
    if body.reasoning_effort == "none":
        asked["enable_thinking"] = False
    elif body.reasoning_effort and "reasoning_effort" in str(service.tokenizer.chat_template):
        asked["reasoning_effort"] = body.reasoning_effort
    # What the method takes itself is the server's to say: another template among it.
    taken = {*inspect.signature(service.tokenizer.apply_chat_template).parameters, "messages"} - {"documents", "kwargs"}
    if wrong := sorted(taken & body.chat_template_kwargs.keys()):
        raise ApiError(400, f"{wrong[0]} is not for chat_template_kwargs.", param=f"chat_template_kwargs.{wrong[0]}")
    return asked | body.chat_template_kwargs


class ApiAdapter(Protocol):
    """Builds the answer of another API of a chat's chunks.

    Attributes:
        ping: the event where nothing else comes; "" for a comment. whole: the answer once it has ended.
    """

    ping: str
    full_response: dict[str, Any]

    def begin(self) -> Iterator[str]: ...
    def push(self, chunk: Mapping[str, Any]) -> Iterator[str]: ...
    def finish(self, cut: bool, usage: Mapping[str, Any]) -> Iterator[str]: ...
    def error_event(self, error: ApiError) -> str: ...


@dataclass(frozen=True)
class AdaptedResponse(PendingResponse):
    """The answer to a request of ``/v1/responses`` or ``/v1/messages``: a chat's, told as items or blocks."""

    adapter: ApiAdapter = field(kw_only=True)
    overflow: ContextOverflow | None = None  # is raised in the stream, as OpenAI does: Codex looks for it there alone

    async def full_response(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        return self.adapter.full_response

    async def events(self) -> AsyncIterator[str | None]:
        """Yields the API's events; None after a while without any. Raises as :meth:`deltas`."""
        for begun in self.adapter.begin():
            yield begun
        if self.overflow is not None:
            raise self.overflow
        cut = False
        async for _, delta in self.deltas():
            if delta is KEEP_ALIVE:
                yield None
                continue
            cut = FINISH_REASONS.get(delta.finish_reason) == "length"
            for chunk in await self.chunks(0, delta):
                for told in self.adapter.push(chunk):
                    yield told
        total = await self.service.executor(self.usage)
        for told in self.adapter.finish(cut, total):
            yield told


def create_response(service: Service, body: ResponsesRequest, tenant: str | None = None) -> AdaptedResponse:
    """Raises longdraft's errors and ApiError for what cannot be served."""
    teller = ResponsesAdapter(
        ResponseEnvelope("resp", service.settings.name), body, partial(service.response_store.put, tenant)
    )
    try:
        found = create_chat_completion(service, body.as_chat(partial(service.response_store.resolve, tenant)), tenant)
    except ContextOverflow as error:
        if not body.stream:
            raise
        return AdaptedResponse(service, [], [], adapter=teller, overflow=error)
    return AdaptedResponse(service, found.choices, found.builders, adapter=teller)


def create_completion(service: Service, body: protocol.CompletionRequest, tenant: str | None = None) -> PendingResponse:
    """Raises longdraft's errors and ApiError for what cannot be served."""
    service.check_model(body.model)
    prompts: Any = body.prompt
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    if len(prompts) > 16:
        raise ApiError(400, "At most 16 prompts a request here.", param="prompt")
    choices: list[Choice] = []
    for prompt in prompts:
        ids, ends = _completed(service, prompt, body.suffix)
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else str(service.tokenizer.decode(ids))
        choices += service.make_choices(
            ids, body, body.max_tokens, tenant, body.logprobs, stop_token_ids=ends, echo=echo
        )
    scored = body.logprobs is not None
    return PendingResponse(
        service,
        choices,
        [
            CompletionChoiceBuilder(i, service.token_to_piece, scored, body.return_token_ids)
            for i in range(len(choices))
        ],
    )


def _completed(service: Service, prompt: str | list[int], suffix: str) -> tuple[list[int], list[int]]:
    """Token ids of a prompt of ``/v1/completions``, and those that end its answer besides the known ends."""
    if not isinstance(prompt, str):
        if suffix:
            raise ApiError(400, "suffix needs a prompt that is a text.", param="suffix")
        return list(prompt), []
    if not suffix:
        return encode(service.tokenizer, prompt), []
    known = service.tokenizer.get_vocab()
    form = next((form for form in _FILLING if all(token in known for token in form)), None)
    if form is None:
        raise CapabilityError(
            "This model has no tokens for text in the middle (such as <|fim_prefix|>), so suffix cannot be served: "
            "leave it out, or serve a model of code that was trained for it, such as Qwen2.5-Coder."
        )
    before, between, answer = form
    ids = encode(service.tokenizer, f"{before}{prompt}{between}{suffix}{answer}")
    return ids, [known[token] for token in (*form, *_NEXT_FILES) if token in known]


def tokenize(service: Service, body: protocol.TokenizeRequest) -> list[int]:
    """The tokens of a text or a chat."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give a prompt, or messages.", param="prompt")
    if body.messages is not None:
        return render_chat_prompt(service, body, kinds_of(body.tools)[0])[0]
    encoded = service.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens, verbose=False)
    return list(encoded["input_ids"])
