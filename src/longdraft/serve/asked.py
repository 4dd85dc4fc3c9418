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
from longdraft.model.chat import conversation, encode
from longdraft.serve import schema, structured, tools
from longdraft.serve.calls import ToolParser
from longdraft.serve.choice import REASONS, Choice, Delta
from longdraft.serve.errors import ApiError, ContextOverflow
from longdraft.serve.items import Responses
from longdraft.serve.kinds import functions as kinds_of
from longdraft.serve.openai import Answer, ChatAnswer, Head, TextAnswer, as_others, usage
from longdraft.serve.responses import ResponseAnswer
from longdraft.serve.service import Service
from longdraft.serve.thinking import THINK, UNTHINK, Thinking
from longdraft.serve.worker import Update

# The prompt's last tokens, which may open the model's thoughts.
_TAIL = 24


SILENCE = Delta()
# Tokens before the prompt, before the suffix, and before the model's answer, where it fills in the middle: Qwen-Coder's
# and CodeGemma's form, and StarCoder's. The others end such an answer too: another file would begin.
_FILLING = (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
_NEXT_FILES = ("<|file_separator|>", "<file_sep>")
# So many tokens with log-probabilities take long enough to write to do it beside the event loop.
_MANY = 64


@dataclass(frozen=True)
class Asked:
    """The answers to a request: its choices, and the builder of each one's answer. First :meth:`submit` them.

    Attributes:
        updates: what the worker tells of the choices, each with the choice's index.
    """

    service: Service
    choices: list[Choice]
    answers: Sequence[Answer]
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

    async def whole(self) -> dict[str, Any]:
        """OpenAI's object of the answers once they have ended; raises as :meth:`deltas`."""
        async for i, delta in self.deltas():
            await self.chunks(i, delta)
        head, kind = self.head(), self.answers[0].kind
        return await self.service.aside(
            lambda: head.object(kind, [answer.whole() for answer in self.answers], **self.figures())
        )

    def head(self) -> Head:
        return Head(self.answers[0].prefix, self.service.settings.name)

    def figures(self) -> dict[str, Any]:
        """The fields that tell of the answers: usage, and for a single one those of other servers."""
        return {"usage": self.usage(), **(as_others(self.choices[0]) if len(self.choices) == 1 else {})}

    @property
    def new_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        return usage(self.choices, sum(a.thought_tokens for a in self.answers if isinstance(a, ChatAnswer)))

    def stopped_by(self) -> str | None:
        """The stop string that ended the first answer; None: none did."""
        result, stops = self.choices[0].result, self.choices[0].request.stop or ()
        if result is None or result.finish_reason != "stop":
            return None
        spec = self.service.speculator(self.service.settings.methods[0])
        text = spec.texts.spelled(stops)(result.token_ids)
        return min((stop for stop in sorted(stops, key=len) if stop in text), key=text.find, default=None)

    async def chunks(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of OpenAI's chunks for what a step adds to an answer."""
        if len(delta.scored) < _MANY:
            return self.answers[i].chunks(delta)
        return await self.service.aside(lambda: self.answers[i].chunks(delta))

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
                    if not any(choice.tokens for choice in self.choices):
                        raise TimeoutError
                    for choice in self.choices:
                        worker.cancel(choice)  # it still tells its end
                    until = left = math.inf
                # asyncio.wait_for of Python 3.10 and 3.11 may lose a cancellation that comes with a result.
                await asyncio.wait((coming,), timeout=min(left, settings.keep_alive))
                if not coming.done():
                    yield 0, SILENCE
                    continue
                i, update = coming.result()
                coming = asyncio.ensure_future(self.updates.get())
                for delta in self.choices[i].take(update):
                    if delta.finish is not None:
                        running -= 1
                        self.service.metrics.ended(self.choices[i], REASONS[delta.finish])
                    yield i, delta
        finally:
            coming.cancel()
            for choice in self.choices:
                worker.cancel(choice)


def copies(constraint: structured.Constraint) -> Callable[[], structured.Constraint]:
    """Makes constraints; the first one is made here already, as a large one keeps the engine waiting."""
    ready = [copy.deepcopy(constraint)]
    return lambda: ready.pop() if ready else copy.deepcopy(constraint)


def chat(service: Service, body: schema.Chat, tenant: str | None = None) -> Asked:
    """Raises longdraft's errors and ApiError for what cannot be served."""
    service.check_model(body.model)
    functions, kinds = kinds_of(body.tools)
    choice, offered = tools.checked_choice(functions, body.tool_choice)
    answer = structured.schema_of(body.response_format) if body.response_format else None
    prompt, thinking = chat_prompt(service, body, functions if offered else [])
    parallel = body.parallel_tool_calls
    constraint = tools.bound(service.tokenizer, offered, choice, parallel, len(prompt), thinking, answer)
    bound = None if constraint is None else copies(constraint)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs: true.", param="top_logprobs")
    log_probs = body.top_logprobs if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    choices = service.choices(prompt, body, limit, tenant, log_probs, bound)
    names = [tool["function"]["name"] for tool in offered]
    return Asked(service, choices, [
        ChatAnswer(
            i, service.piece, body.logprobs, body.return_token_ids,
            ToolParser(names, choice != "auto", answer is not None, kinds) if offered else None,
            Thinking(thinking) if body.reasoning_format != "none" else None, body.include_reasoning,
        )
        for i in range(body.n)
    ])  # fmt: skip


def chat_prompt(
    service: Service, body: schema.Chat | schema.Tokenize, offered: Sequence[dict[str, Any]] = ()
) -> tuple[list[int], bool]:
    """Token ids of a chat, ready for the model's answer, and whether they end within its thoughts."""
    messages, begun = [message.plain() for message in body.messages or ()], ""
    wanted, last = body.continue_final_message, messages[-1]
    mine = last["role"] == "assistant" and "tool_calls" not in last
    if wanted and (body.add_generation_prompt or not mine):
        message = "continue_final_message goes with a last message of the assistant's, without add_generation_prompt."
        raise ApiError(400, message, param="continue_final_message")
    if mine and wanted is not False and not body.add_generation_prompt:
        begun = messages.pop()["content"]
    messages, template = tools.with_tools(service.tokenizer, messages, offered)
    prompt = conversation(service.tokenizer, messages, begun, **_template(service, body), **template)
    tail = str(service.tokenizer.decode(prompt[-_TAIL:])).rstrip()
    return prompt, tail.endswith(THINK) or begun.rfind(THINK) > begun.rfind(UNTHINK)


def _template(service: Service, body: schema.Chat | schema.Tokenize) -> dict[str, Any]:
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


class Teller(Protocol):
    """Builds the answer of another API of a chat's chunks.

    Attributes:
        ping: the event where nothing else comes; "" for a comment. whole: the answer once it has ended.
    """

    ping: str
    whole: dict[str, Any]

    def begin(self) -> Iterator[str]: ...
    def push(self, chunk: Mapping[str, Any]) -> Iterator[str]: ...
    def finish(self, cut: bool, usage: Mapping[str, Any]) -> Iterator[str]: ...
    def failed(self, error: ApiError) -> str: ...


@dataclass(frozen=True)
class Told(Asked):
    """The answer to a request of ``/v1/responses`` or ``/v1/messages``: a chat's, told as items or blocks."""

    teller: Teller = field(kw_only=True)
    overflow: ContextOverflow | None = None  # is raised in the stream, as OpenAI does: Codex looks for it there alone

    async def whole(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        return self.teller.whole

    async def events(self) -> AsyncIterator[str | None]:
        """Yields the API's events; None after a while without any. Raises as :meth:`deltas`."""
        for begun in self.teller.begin():
            yield begun
        if self.overflow is not None:
            raise self.overflow
        cut = False
        async for _, delta in self.deltas():
            if delta is SILENCE:
                yield None
                continue
            cut = REASONS.get(delta.finish) == "length"
            for chunk in await self.chunks(0, delta):
                for told in self.teller.push(chunk):
                    yield told
        total = await self.service.aside(self.usage)
        for told in self.teller.finish(cut, total):
            yield told


def respond(service: Service, body: Responses, tenant: str | None = None) -> Told:
    """Raises longdraft's errors and ApiError for what cannot be served."""
    teller = ResponseAnswer(Head("resp", service.settings.name), body, partial(service.recent.keep, tenant))
    try:
        found = chat(service, body.as_chat(partial(service.recent.found, tenant)), tenant)
    except ContextOverflow as error:
        if not body.stream:
            raise
        return Told(service, [], [], teller=teller, overflow=error)
    return Told(service, found.choices, found.answers, teller=teller)


def complete(service: Service, body: schema.Completion, tenant: str | None = None) -> Asked:
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
        choices += service.choices(ids, body, body.max_tokens, tenant, body.logprobs, ends=ends, echo=echo)
    scored = body.logprobs is not None
    return Asked(
        service, choices, [TextAnswer(i, service.piece, scored, body.return_token_ids) for i in range(len(choices))]
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


def tokens_of(service: Service, body: schema.Tokenize) -> list[int]:
    """The tokens of a text or a chat."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give a prompt, or messages.", param="prompt")
    if body.messages is not None:
        return chat_prompt(service, body, kinds_of(body.tools)[0])[0]
    encoded = service.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens, verbose=False)
    return list(encoded["input_ids"])
