"""Sessions (continuous batching), and generations, which decode a list of requests."""

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

# Sequences decoded at a time by default. Each additional one slows a step a little, and its KV takes memory.
DEFAULT_BATCH, DEFAULT_BATCH_ON_GPU = 8, 32


@dataclass
class _RequestState:
    """A request's sequence, with its text and times.

    Attributes:
        text: detokenizes its output; None without a tokenizer.
        from_draft: for each output token, whether it was drafted.
        pieces: the text so far, in deltas.
        prefill_seconds, decode_seconds: time of its prefill, and of its rounds.
    """

    sequence: Sequence
    text: TextStream | None
    from_draft: list[bool] = field(default_factory=list)
    pieces: list[TextDelta] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def with_text(self, step: Step) -> Step:
        self.from_draft += [i < step.from_draft for i in range(len(step.token_ids))]
        if self.text is None:
            return step
        deltas = self.text.push(step.token_ids, step.from_draft, step.finish_reason is not None)
        self.pieces += deltas
        return replace(step, pieces=tuple(deltas))


class Session:
    """Decodes requests that come and go (continuous batching). Made by :meth:`Speculator.session`:

    session = spec.session(batch=8)
    first = session.add("Why is the sky blue?")
    while session.busy:
        for step in session.step():
            ...  # step.sequence, step.text, step.token_ids, step.finish_reason
        # others may be added at any time
    print(session.result(first).text)
    """

    def __init__(self, engine: Engine, codec: TextCodec, method: str, exact: bool) -> None:
        self._engine, self._codec, self._method, self._exact = engine, codec, method, exact
        self._states: dict[int, _RequestState] = {}
        self._next = 0
        self.prefill_seconds = self.decode_seconds = 0.0

    def __repr__(self) -> str:
        ended = sum(map(self.ended, self._states))
        return f"{type(self).__name__}({self._method}, {len(self._states)} requests, {ended} ended)"

    def add(self, request: Request | Prompt) -> int:
        """Queues a request. It starts when a slot is free.

        Returns:
            Its number, which its steps have as ``sequence``.

        Raises:
            RequestError: a wrong value of a setting, such as ``max_new_tokens`` below 1.
            PromptError: no prompt, an empty one, or a token id that the model does not have.
            ContextError: prompt and new tokens exceed the model's context.
            CapabilityError: a string as prompt, or stop strings, without a tokenizer.
        """
        index = self._next
        request = (request if isinstance(request, Request) else Request(request)).checked()
        sequence = _make_sequence(self._engine, self._codec, index, request)
        self._engine.add(sequence)
        self._next += 1
        text = None if self._codec.tokenizer is None else TextStream(self._codec.decode, normalize_stop(request.stop))
        self._states[index] = _RequestState(sequence, text)
        return index

    def step(self) -> list[Step]:
        """Runs either prefill chunks or a decoding round, in alternation.

        Returns:
            A step for each request involved.

        Raises:
            MemoryBudgetError: not even one request fits the memory. No work has begun then.
            CapabilityError: another run has opened the cache; torch.autocast is on.
            NumericalError: the target's logits are NaN.
        """
        steps = self._engine.step()
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
        """The views of the drafter, then those of partial verification; known after the first step."""
        return self._engine.drafter.views + self._engine.verifier.views

    def abort(self, number: int) -> None:
        """Cancels a request; its finish reason is "cancelled". Does nothing if it has ended."""
        self._engine.abort(number)

    @property
    def busy(self) -> bool:
        return bool(self._engine.unfinished)

    def close(self) -> None:
        """Cancels all requests."""
        self._engine.close()

    def result(self, number: int) -> Result:
        """Returns a request's result so far; its finish reason is "cancelled" if it has not ended.

        Raises:
            RequestError: the session has no such request (any more).
        """
        if number not in self._states:
            raise RequestError(f"this session has no request {number}, or its result was taken")
        state = self._states[number]
        return self._result(number, state.prefill_seconds, state.decode_seconds)

    def ended(self, number: int) -> bool:
        """True if a request has ended and all its steps were returned."""
        return number not in self._engine.unfinished

    def take(self, number: int) -> Result:
        """Returns the result of a request that has ended, and removes it from the session.

        Raises:
            RequestError: it is still decoded, or the session has no such request.
        """
        result = self.result(number)
        if not self.ended(number):
            raise RequestError(f"request {number} is still decoded: take it when its last step has come, or abort it")
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
            exact=self._exact and not runner.kv_is_rounded,
            finish_reason=s.finish_reason or "cancelled",
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            peak_memory_bytes=memory_info.peak_bytes(runner.device),
            from_draft=list(state.from_draft),
            pieces=list(state.pieces),
            arithmetic=runner.arithmetic,
            **vars(s.stats),
        )

    def _text(self, state: _RequestState) -> str:
        if self._codec.tokenizer is None:
            return ""
        is_finished = state.sequence.finish_reason not in (None, "cancelled")
        return "".join(p.text for p in state.pieces) if is_finished else self._codec.decode(state.sequence.output)


class Generation(Session):
    """A list of requests in progress. Iterate over its :class:`Step` s, or call :meth:`results`."""

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
        """Prompt length of each sequence, in tokens."""
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
        """Runs to the end, and returns a result for each prompt. Seconds are those of the whole list."""
        for _ in self._steps:
            pass
        return [self._result(number, self.prefill_seconds, self.decode_seconds) for number in self._states]


def eos_rule(eos: frozenset[int]) -> StopRule:
    """Makes a stop rule: any of several EOS tokens."""

    def rule(s: Sequence) -> FinishReason | None:
        return "eos" if s.output[-1] in eos else None

    return rule


def stop_string_rule(stops: tuple[str, ...], decode: Callable[[list[int]], str]) -> StopRule:
    """Makes a stop rule: a stop string appears in the output's text, at any token boundaries.

    Args:
        decode: token ids to text, see :meth:`TextCodec.decoder_for_stops`.
    """
    # A stop string of k bytes spans at most k tokens, and k UTF-8 characters are at most 4k bytes.
    window = 4 * max(map(len, stops)) + 8

    def rule(s: Sequence) -> FinishReason | None:
        tail = decode(s.output[-window:])
        return "stop" if any(stop in tail for stop in stops) else None

    return rule


def _make_sequence(engine: Engine, codec: TextCodec, index: int, request: Request) -> Sequence:
    """Makes the sequence of a checked request. Raises the errors of :meth:`Session.add`."""
    runner, sampling = engine.runner, request.sampling or Sampling()
    prompt = codec.encode(request.prompt, request.chat)
    support.check_tokens(runner.model, prompt)
    support.check_length(runner.model, len(prompt) + request.max_new_tokens, engine.drafter.max_nodes)
    generator = None
    if not sampling.greedy:
        generator = torch.Generator(runner.device)
        seed = runner.tp_rank.shared_seed() if request.seed is None and runner.tp_rank is not None else request.seed
        generator.manual_seed(seed) if seed is not None else generator.seed()
    ids = request.eos_token_ids
    eos = frozenset([ids] if isinstance(ids, int) else ids or ())
    if ids is None:
        eos = runner.eos_token_ids | codec.eos_token_ids
    stops, rules = normalize_stop(request.stop), list[StopRule]()
    if stops:
        rules.append(stop_string_rule(stops, codec.decoder_for_stops(stops)))
    if eos:
        rules.append(eos_rule(eos))
    noise = SampleNoise(generator, sampling.foresee)
    return Sequence(
        index,
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
    """Returns the default number of sequences decoded at a time."""
    return DEFAULT_BATCH if device_type == "cpu" else DEFAULT_BATCH_ON_GPU
