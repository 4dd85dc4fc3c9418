"""Sessions decode requests with continuous batching; generations decode a fixed list of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from longdraft.engine.loop import Engine
from longdraft.engine.request import Prompt, Request, normalize_stop
from longdraft.engine.sampler import SampleNoise, Sampler, Sampling
from longdraft.engine.sequence import FinishReason, Sequence, StopRule
from longdraft.engine.stats import Result, Step
from longdraft.engine.streaming import TextDelta, TextStream
from longdraft.engine.text_codec import TextCodec
from longdraft.errors import RequestError
from longdraft.memory import memory_info
from longdraft.model import support
from longdraft.views.view import View

# Sequences decoded at a time by default. Each sequence makes every step a little slower, and needs memory for its KV.
DEFAULT_BATCH, DEFAULT_BATCH_ON_GPU = 8, 32


@dataclass
class _RequestState:
    """The sequence, the text and the times of a request.

    Attributes:
        sequence: the request's sequence in the engine.
        text_stream: detokenizes the output; None without a tokenizer.
        is_drafted: for each output token, whether it was drafted.
        deltas: the output's text so far.
        prefill_seconds: wall time of prefilling this request.
        decode_seconds: wall time of all rounds that decoded this request.
    """

    sequence: Sequence
    text_stream: TextStream | None
    is_drafted: list[bool] = field(default_factory=list)
    deltas: list[TextDelta] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def with_text(self, step: Step) -> Step:
        """Adds the step's tokens to the state, and returns the step with its text."""
        self.is_drafted += [i < step.from_draft for i in range(len(step.token_ids))]
        if self.text_stream is None:
            return step
        deltas = self.text_stream.push(step.token_ids, step.from_draft, step.finish_reason is not None)
        self.deltas += deltas
        return replace(step, pieces=tuple(deltas))


class Session:
    """Decodes requests that may be added at any time (continuous batching). :meth:`Speculator.session` makes one:

    session = spec.session(batch=8)
    first = session.add("Why is the sky blue?")
    while session.busy:
        for step in session.step():
            ...  # step.sequence, step.text, step.token_ids, step.finish_reason
        # session.add(...) is allowed here
    print(session.result(first).text)
    """

    def __init__(self, engine: Engine, codec: TextCodec, method: str, exact: bool) -> None:
        self._engine, self._codec, self._method, self._exact = engine, codec, method, exact
        self._states: dict[int, _RequestState] = {}
        self._next_number = 0
        self.prefill_seconds = self.decode_seconds = 0.0

    def __repr__(self) -> str:
        ended = sum(map(self.ended, self._states))
        return f"{type(self).__name__}({self._method}, {len(self._states)} requests, {ended} ended)"

    def add(self, request: Request | Prompt) -> int:
        """Queues a request, which starts when a slot is free. Returns the request's number: ``sequence`` in its steps.

        Raises:
            RequestError: a setting has a wrong value, such as ``max_new_tokens`` below 1.
            PromptError: the prompt is missing or empty, or has a token id that the model does not have.
            ContextError: prompt and new tokens exceed the model's context.
            CapabilityError: the prompt is a string, or there are stop strings, and there is no tokenizer.
        """
        number = self._next_number
        request = (request if isinstance(request, Request) else Request(request)).checked()
        sequence = _make_sequence(self._engine, self._codec, number, request)
        self._engine.add(sequence)
        self._next_number += 1
        stream = None if self._codec.tokenizer is None else TextStream(self._codec.decode, normalize_stop(request.stop))
        self._states[number] = _RequestState(sequence, stream)
        return number

    def step(self) -> list[Step]:
        """Runs either prefill chunks or a decoding round, by turns. Returns a step for each request that took part.

        Raises:
            MemoryBudgetError: the memory does not hold the KV of even one request; nothing was decoded.
            CapabilityError: another run has opened the prompt cache, or torch.autocast is on.
            NumericalError: the target's logits are NaN.
        """
        steps = self._engine.step()
        # A round decodes all of its requests together, so each request takes the whole round. Prefills run one by one.
        decode_seconds = sum(step.seconds for step in steps if step.mode != "prefill")
        self.decode_seconds += decode_seconds
        for step in steps:
            if step.mode == "prefill":
                self.prefill_seconds += step.seconds
                self._states[step.sequence].prefill_seconds += step.seconds
            else:
                self._states[step.sequence].decode_seconds += decode_seconds
        return [self._states[step.sequence].with_text(step) for step in steps]

    @property
    def views(self) -> tuple[View, ...]:
        """The views of the drafter's KV caches, then of partial verification; known after the first step."""
        return self._engine.drafter.needs(self._engine.runner).views + self._engine.verifier.views

    def abort(self, number: int) -> None:
        """Cancels a request that has not ended; its finish reason is "cancelled"."""
        self._engine.abort(number)

    @property
    def busy(self) -> bool:
        """True until all requests have ended, and all their steps were returned."""
        return bool(self._engine.unfinished)

    def close(self) -> None:
        """Cancels all requests."""
        self._engine.close()

    def result(self, number: int) -> Result:
        """Returns a request's result so far. The finish reason is "cancelled" if the request has not ended.

        Raises:
            RequestError: the session has no such request, or :meth:`take` has removed it.
        """
        if number not in self._states:
            raise RequestError(f"this session has no request {number}: add did not return it, or its result was taken")
        state = self._states[number]
        return self._result(number, state.prefill_seconds, state.decode_seconds)

    def ended(self, number: int) -> bool:
        """True if a request has ended, and all its steps were returned."""
        return number not in self._engine.unfinished

    def take(self, number: int) -> Result:
        """Returns the result of a request that has ended, and removes it from the session.

        Raises:
            RequestError: the request is still being decoded, or the session has no such request.
        """
        result = self.result(number)
        if not self.ended(number):
            raise RequestError(f"request {number} is still being decoded: take its result after its end, or abort it")
        del self._states[number]
        return result

    def _result(self, number: int, prefill_seconds: float, decode_seconds: float) -> Result:
        state, runner = self._states[number], self._engine.runner
        s = state.sequence
        return Result(
            text=self._text(state),
            token_ids=list(s.output),
            prompt_tokens=len(s.prompt),
            method=self._method,
            exact=self._exact and not runner.is_approximate,
            finish_reason=s.finish_reason or "cancelled",
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            peak_memory_bytes=memory_info.peak_bytes(runner.device),
            from_draft=list(state.is_drafted),
            pieces=list(state.deltas),
            arithmetic=runner.arithmetic,
            **vars(s.stats),  # rounds, drafted, accepted, ...: SequenceStats
        )

    def _text(self, state: _RequestState) -> str:
        if self._codec.tokenizer is None:
            return ""
        if state.sequence.finish_reason in (None, "cancelled"):  # the text stream still holds the last characters back
            return self._codec.decode(state.sequence.output)
        return "".join(delta.text for delta in state.deltas)


class Generation(Session):
    """Decodes a fixed list of requests. Iterate to get each :class:`Step`, or call :meth:`results`.

    ``cancelled`` is called before each step; if it returns True, all requests are cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        method: str,
        exact: bool,
        requests: Iterable[Request],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(engine, codec, method, exact)
        for request in requests:
            self.add(request)
        self._cancelled = cancelled
        self._steps = self._run()

    @property
    def prompt_tokens(self) -> list[int]:
        """Number of prompt tokens of each request."""
        return [len(state.sequence.prompt) for state in self._states.values()]

    def _run(self) -> Iterator[Step]:
        while self.busy:
            if self._cancelled():
                for number in self._states:
                    self.abort(number)
            yield from self.step()

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def results(self) -> list[Result]:
        """Decodes to the end, and returns a result for each request. Each result has the seconds of all requests."""
        for _ in self._steps:
            pass
        return [self._result(number, self.prefill_seconds, self.decode_seconds) for number in self._states]


def eos_rule(eos: frozenset[int]) -> StopRule:
    """Makes the stop rule that ends a sequence at any token of ``eos``."""

    def rule(s: Sequence) -> FinishReason | None:
        return "eos" if s.output[-1] in eos else None

    return rule


def stop_string_rule(stops: tuple[str, ...], decode: Callable[[list[int]], str]) -> StopRule:
    """Makes the stop rule that ends a sequence when the output's text contains a stop string, even inside a token.
    :meth:`TextCodec.decoder_for_stops` returns ``decode``."""
    # A character has at most 4 bytes, a token at least one. 8 more, because the tail may begin inside a character.
    max_stop_tokens = 4 * max(map(len, stops)) + 8

    def rule(s: Sequence) -> FinishReason | None:
        tail = decode(s.output[-max_stop_tokens:])
        return "stop" if any(stop in tail for stop in stops) else None

    return rule


def _make_sequence(engine: Engine, codec: TextCodec, number: int, request: Request) -> Sequence:
    """Makes the sequence of a checked request, as request ``number``. Raises the errors of :meth:`Session.add`."""
    runner, sampling = engine.runner, request.sampling or Sampling()
    prompt = codec.encode(request.prompt, request.chat)
    support.check_tokens(runner.model, prompt)
    support.check_length(runner.model, len(prompt) + request.max_new_tokens, engine.drafter.max_nodes)
    generator = None
    if not sampling.greedy:
        generator = torch.Generator(runner.device)
        seed = runner.tp_rank.shared_seed() if request.seed is None and runner.tp_rank is not None else request.seed
        generator.manual_seed(seed) if seed is not None else generator.seed()
    request_eos = request.eos_token_ids
    eos = frozenset([request_eos] if isinstance(request_eos, int) else request_eos or ())
    if request_eos is None:
        eos = runner.eos_token_ids | codec.eos_token_ids
    stops, rules = normalize_stop(request.stop), list[StopRule]()
    if stops:
        rules.append(stop_string_rule(stops, codec.decoder_for_stops(stops)))
    if eos:
        rules.append(eos_rule(eos))
    noise = SampleNoise(generator, sampling.foresee)
    return Sequence(
        number,
        prompt,
        request.max_new_tokens,
        runner.device,
        greedy=sampling.greedy,
        sampler=Sampler(sampling.greedy, sampling.processors(request.processors), noise),
        stop_rules=rules,
        tenant=request.tenant,
        predicted=request.predicted,
        reuse=request.reuse,
    )


def default_batch_size(device_type: str) -> int:
    """Returns the default number of sequences decoded at a time on a device of this type."""
    return DEFAULT_BATCH if device_type == "cpu" else DEFAULT_BATCH_ON_GPU
