"""Turns request bodies into pending responses: the choices to decode, and the builders of their JSON.

The ``create_...`` functions take long for large requests, so they run in the service's executor, not on the event loop.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from longdraft.engine.chat import encode, encode_conversation
from longdraft.errors import CapabilityError
from longdraft.serve import openai, structured, tools
from longdraft.serve.choice import FINISH_REASONS, Choice, Delta
from longdraft.serve.errors import ApiError, ContextOverflow
from longdraft.serve.openai import (
    DONE_EVENT,
    ChatChoiceBuilder,
    ChoiceBuilder,
    CompletionChoiceBuilder,
    ResponseEnvelope,
    sse_event,
)
from longdraft.serve.protocol import (
    ChatCompletionRequest,
    ChatTemplateFields,
    CompletionRequest,
    StreamOptions,
    TokenizeRequest,
)
from longdraft.serve.reasoning import THINK_END, THINK_START, ReasoningParser
from longdraft.serve.service import Service
from longdraft.serve.tool_parser import ToolParser
from longdraft.serve.tool_types import as_functions
from longdraft.serve.worker import Update

KEEP_ALIVE = Delta()  # yielded after sse_ping_interval without a delta
# A chat template may end the prompt with <think>: this many of its last tokens are searched.
_TAIL_TOKENS = 24
# Fill-in-the-middle tokens (prefix, suffix, middle) of Qwen-Coder and CodeGemma, and of StarCoder.
_FIM_TOKENS = (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
# Tokens that begin the next file, and so also end a fill-in-the-middle answer.
_FILE_SEPARATORS = ("<|file_separator|>", "<file_sep>")
# The JSON of this many log-probabilities is built in the executor: it would hold up the event loop.
_MANY_LOGPROBS = 64


class PendingResponse:
    """A request's choices in progress. Call :meth:`submit` first, then :meth:`full_response` or :meth:`events`.

    Args:
        builders: for each choice the builder of its JSON.
    """

    def __init__(
        self, service: Service, choices: list[Choice], builders: Sequence[ChoiceBuilder],
        stream_options: StreamOptions | None = None,
    ) -> None:  # fmt: skip
        self.service, self.choices, self.builders = service, choices, builders
        self._stream_options = stream_options or StreamOptions()
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()  # (choice's index, update) from the worker

    def submit(self) -> None:
        """Hands all choices to the worker, or none. Call it in the event loop that reads the deltas.

        Raises:
            LongdraftError: the worker does not take the requests; see :meth:`Worker.submit`.
        """
        loop = asyncio.get_running_loop()

        def on_update(i: int, update: Update) -> None:
            loop.call_soon_threadsafe(self._updates.put_nowait, (i, update))

        for i, choice in enumerate(self.choices):
            choice.listener = partial(on_update, i)
        if self.choices:
            self.service.worker.submit(*self.choices)

    async def full_response(self) -> dict[str, Any]:
        """Waits for the end of all choices and returns OpenAI's response object. Raises as :meth:`deltas`."""
        async for i, delta in self.deltas():
            await self._build_choice_entries(i, delta)
        envelope, object_type = self._envelope(), self.builders[0].object_type
        return await self.service.executor.run(
            lambda: envelope.wrap(object_type, [b.full_choice() for b in self.builders], **self._final_fields())
        )

    async def events(self) -> AsyncIterator[str]:
        """Yields the server-sent events of the stream: OpenAI's chunks. Raises as :meth:`deltas`."""
        options, builders, envelope = self._stream_options, self.builders, self._envelope()
        object_type = builders[0].chunk_object_type
        usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.include_trace:
            trace = {"phase": "prefill", "read": 0, "of": len(self.choices[0].request.prompt)}
            yield sse_event(envelope.wrap(object_type, [builders[0].empty_chunk()], trace=trace, **usage))
        async for i, delta in self.deltas():
            if delta is KEEP_ALIVE:
                yield self.keep_alive_event()
                continue
            if options.include_usage and options.continuous_usage_stats:
                usage = {"usage": openai.usage_so_far(self.choices)}
            chunks = await self._build_choice_entries(i, delta)
            if delta.trace is not None:
                chunks = chunks or [builders[i].empty_chunk()]
                yield sse_event(envelope.wrap(object_type, chunks, trace=delta.trace, **usage))
                continue
            for chunk in chunks:
                yield sse_event(envelope.wrap(object_type, [chunk], **usage))
        if options.include_usage:
            yield sse_event(envelope.wrap(object_type, [], **await self.service.executor.run(self._final_fields)))
        yield DONE_EVENT

    def keep_alive_event(self) -> str:
        """Returns an SSE comment, which clients ignore. It keeps proxies from closing an idle connection."""
        num_read, num_tokens = self.choices[0].num_prefilled_tokens, len(self.choices[0].request.prompt)
        return f": {num_read} of {num_tokens} tokens of the prompt have been read\n\n"

    def error_event(self, error: ApiError) -> str:
        """Returns the last event of a stream that ends with an error."""
        return sse_event(error.body)

    def _envelope(self) -> ResponseEnvelope:
        """Makes a new response id, with the other fields that all chunks share."""
        return ResponseEnvelope(self.builders[0].id_prefix, self.service.settings.name)

    def _final_fields(self) -> dict[str, Any]:
        """Returns the last fields of the response object: usage, and for a single choice timings and metrics."""
        timings = openai.timings_and_metrics(self.choices[0]) if len(self.choices) == 1 else {}
        return {"usage": self.usage(), **timings}

    @property
    def num_new_tokens(self) -> int:
        return sum(choice.num_reported_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        reasoning_tokens = sum(b.reasoning_tokens for b in self.builders if isinstance(b, ChatChoiceBuilder))
        return openai.usage(self.choices, reasoning_tokens)

    def matched_stop(self) -> str | None:
        """Returns the stop string that ended the first choice; None if the choice ended for another reason."""
        result, stop_strings = self.choices[0].result, self.choices[0].request.stop or ()
        if result is None or result.finish_reason != "stop":
            return None
        spec = self.service.speculator(self.service.settings.methods[0])
        text = spec.texts.decoder_for_stops(stop_strings)(result.token_ids)
        # The stop string that comes first in the text. Of several that begin at one position, the shortest.
        return min((stop for stop in sorted(stop_strings, key=len) if stop in text), key=text.find, default=None)

    async def _build_choice_entries(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the ``choices`` entry of each chunk for a delta of choice ``i``."""
        if len(delta.logprobs) < _MANY_LOGPROBS:
            return self.builders[i].build_choice_entries(delta)
        return await self.service.executor.run(lambda: self.builders[i].build_choice_entries(delta))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yields (choice's index, delta) when a delta comes, and KEEP_ALIVE after ``sse_ping_interval`` without one.

        The request's timeout ends all choices. The text so far is then the answer.

        Raises:
            TimeoutError: no token came before the timeout.
            Exception: the error with which the engine failed.
        """
        settings, worker = self.service.settings, self.service.worker
        deadline, num_running = time.monotonic() + settings.timeout, len(self.choices)
        next_update = asyncio.ensure_future(self._updates.get())
        try:
            while num_running:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    if not any(choice.num_reported_tokens for choice in self.choices):
                        raise TimeoutError
                    for choice in self.choices:
                        worker.cancel(choice)  # the queue still receives the choice's result
                    deadline = seconds_left = math.inf  # the results come within one round
                # asyncio.wait_for of Python 3.10 and 3.11 may lose a cancellation that comes with a result.
                await asyncio.wait((next_update,), timeout=min(seconds_left, settings.sse_ping_interval))
                if not next_update.done():
                    yield 0, KEEP_ALIVE
                    continue
                i, update = next_update.result()
                next_update = asyncio.ensure_future(self._updates.get())
                for delta in self.choices[i].process_update(update):
                    if delta.finish_reason is not None:
                        num_running -= 1
                        self.service.metrics.observe_choice(self.choices[i], FINISH_REASONS[delta.finish_reason])
                    yield i, delta
        finally:
            next_update.cancel()
            for choice in self.choices:
                worker.cancel(choice)


def constraint_factory(constraint: structured.Constraint) -> Callable[[], structured.Constraint]:
    """Returns a function that copies a constraint. The first copy is made now, where it does not delay the engine."""
    first_copy = [copy.deepcopy(constraint)]
    return lambda: first_copy.pop() if first_copy else copy.deepcopy(constraint)


def create_chat_completion(service: Service, body: ChatCompletionRequest, tenant: str | None = None) -> PendingResponse:
    """Makes the pending response of ``/v1/chat/completions``. Raises LongdraftError or ApiError if it is not served."""
    service.check_model(body.model)
    functions, tool_types = as_functions(body.tools)
    tool_choice, allowed_tools = tools.resolve_tool_choice(functions, body.tool_choice)
    schema = structured.response_schema(body.response_format) if body.response_format else None
    prompt, in_reasoning = render_chat_prompt(service, body, functions if allowed_tools else [])
    constraint = tools.tool_constraint(
        service.tokenizer, allowed_tools, tool_choice, body.parallel_tool_calls, len(prompt), in_reasoning, schema
    )
    make_constraint = None if constraint is None else constraint_factory(constraint)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    num_logprobs = body.top_logprobs if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    choices = service.make_choices(prompt, body, max_tokens, tenant, num_logprobs, make_constraint)
    names = [tool["function"]["name"] for tool in allowed_tools]
    return PendingResponse(service, choices, [
        ChatChoiceBuilder(
            i, service.token_to_piece, body.logprobs, body.return_token_ids,
            # A named or required tool: nothing but calls. With a schema: calls or an answer.
            tool_parser=ToolParser(names, tool_choice != "auto", schema is not None, tool_types)
            if allowed_tools else None,
            reasoning_parser=ReasoningParser(in_reasoning) if body.reasoning_format != "none" else None,
            include_reasoning=body.include_reasoning,
        )
        for i in range(body.n)
    ], body.stream_options)  # fmt: skip


def render_chat_prompt(
    service: Service, body: ChatCompletionRequest | TokenizeRequest, tools_offered: Sequence[dict[str, Any]] = ()
) -> tuple[list[int], bool]:
    """Returns (the prompt's token ids, up to the start of the model's answer; True if they end inside ``<think>``)."""
    messages, answer_start = [message.for_template() for message in body.messages or ()], ""
    must_continue, last_message = body.continue_final_message, messages[-1]  # None: continue if possible
    can_continue = last_message["role"] == "assistant" and "tool_calls" not in last_message
    if must_continue and (body.add_generation_prompt or not can_continue):
        message = "continue_final_message needs a last message of the assistant, and no add_generation_prompt."
        raise ApiError(400, message, param="continue_final_message")
    if can_continue and must_continue is not False and not body.add_generation_prompt:
        answer_start = messages.pop()["content"]
    messages, tool_kwargs = tools.messages_with_tools(service.tokenizer, messages, tools_offered)
    kwargs = _template_kwargs(service, body)
    prompt = encode_conversation(service.tokenizer, messages, answer_start, **kwargs, **tool_kwargs)
    tail = str(service.tokenizer.decode(prompt[-_TAIL_TOKENS:])).rstrip()
    return prompt, tail.endswith(THINK_START) or answer_start.rfind(THINK_START) > answer_start.rfind(THINK_END)


def _template_kwargs(service: Service, body: ChatTemplateFields) -> dict[str, Any]:
    """Returns variables of the chat template. Raises ApiError for a variable that apply_chat_template takes itself."""
    kwargs: dict[str, Any] = {} if service.settings.think else {"enable_thinking": False}
    if body.reasoning_effort == "none":
        kwargs["enable_thinking"] = False
    elif body.reasoning_effort and "reasoning_effort" in str(service.tokenizer.chat_template):
        kwargs["reasoning_effort"] = body.reasoning_effort
    # A request must not set the arguments of apply_chat_template itself: chat_template would replace the template.
    parameters = inspect.signature(service.tokenizer.apply_chat_template).parameters
    reserved = {*parameters, "messages"} - {"documents", "kwargs"}
    if wrong := sorted(reserved & body.chat_template_kwargs.keys()):
        param = f"chat_template_kwargs.{wrong[0]}"
        raise ApiError(400, f"{param} cannot be set by a request: leave it out.", param=param)
    return kwargs | body.chat_template_kwargs


class AdaptedResponse(PendingResponse, ABC):
    """The response of another API: a chat completion, whose chunks are converted to the API's events and response.

    Attributes:
        response: the response object, complete once :meth:`finish` has run.
        overflow: raised in the stream, not before it: Codex looks for this error only there.
    """

    response: dict[str, Any]
    overflow: ContextOverflow | None = None

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """Yields the first events."""

    @abstractmethod
    def push(self, chunk_choice: Mapping[str, Any]) -> Iterator[str]:
        """Yields the events for an entry of ``choices`` in a chat completion's chunk."""

    @abstractmethod
    def finish(self, truncated: bool, usage: Mapping[str, Any]) -> Iterator[str]:
        """Yields the last events."""

    async def full_response(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        return self.response

    async def events(self) -> AsyncIterator[str]:
        for event in self.begin():
            yield event
        if self.overflow is not None:
            raise self.overflow
        truncated = False
        async for _, delta in self.deltas():
            if delta is KEEP_ALIVE:
                yield self.keep_alive_event()
                continue
            truncated = FINISH_REASONS.get(delta.finish_reason) == "length"
            for chunk_choice in await self._build_choice_entries(0, delta):
                for event in self.push(chunk_choice):
                    yield event
        usage = await self.service.executor.run(self.usage)
        for event in self.finish(truncated, usage):
            yield event


def create_completion(service: Service, body: CompletionRequest, tenant: str | None = None) -> PendingResponse:
    """Makes the pending response of ``/v1/completions``. Raises as :func:`create_chat_completion`."""
    service.check_model(body.model)
    prompts: Any = body.prompt
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    if len(prompts) > 16:
        raise ApiError(400, "A request may have at most 16 prompts: send several requests.", param="prompt")
    choices: list[Choice] = []
    for prompt in prompts:
        token_ids, stop_token_ids = _encode_prompt(service, prompt, body.suffix)
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else str(service.tokenizer.decode(token_ids))
        choices += service.make_choices(
            token_ids, body, body.max_tokens, tenant, body.logprobs, stop_token_ids=stop_token_ids, echo=echo
        )
    options = service.token_to_piece, body.logprobs is not None, body.return_token_ids
    builders = [CompletionChoiceBuilder(i, *options) for i in range(len(choices))]
    return PendingResponse(service, choices, builders, body.stream_options)


def _encode_prompt(service: Service, prompt: str | list[int], suffix: str) -> tuple[list[int], list[int]]:
    """Returns (token ids of a prompt of ``/v1/completions``, stop token ids that fill-in-the-middle adds)."""
    if not isinstance(prompt, str):
        if suffix:
            raise ApiError(400, "suffix needs a prompt that is text, not token ids.", param="suffix")
        return list(prompt), []
    if not suffix:
        return encode(service.tokenizer, prompt), []
    vocab = service.tokenizer.get_vocab()
    fim_tokens = next((tokens for tokens in _FIM_TOKENS if all(token in vocab for token in tokens)), None)
    if fim_tokens is None:
        raise CapabilityError(
            "This model has no fill-in-the-middle tokens (such as <|fim_prefix|>), so suffix cannot be served: "
            "leave it out, or serve a code model that has these tokens, such as Qwen2.5-Coder."
        )
    fim_prefix, fim_suffix, fim_middle = fim_tokens
    token_ids = encode(service.tokenizer, f"{fim_prefix}{prompt}{fim_suffix}{suffix}{fim_middle}")
    return token_ids, [vocab[token] for token in (*fim_tokens, *_FILE_SEPARATORS) if token in vocab]


def tokenize(service: Service, body: TokenizeRequest, tenant: str | None = None) -> dict[str, Any]:
    """Returns the response of ``/tokenize``: the token ids of a text or a chat."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        token_ids = render_chat_prompt(service, body, as_functions(body.tools)[0])[0]
    else:
        encoded = service.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens, verbose=False)
        token_ids = list(encoded["input_ids"])
    return {"count": len(token_ids), "max_model_len": service.settings.context, "tokens": token_ids}
