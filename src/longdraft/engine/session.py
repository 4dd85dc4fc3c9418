"""Sessions, in which requests come and go, and generations, which decode a list of them."""

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

# Sequences decoded at a time by default: each more makes a step a little slower, and its KV takes memory.
DEFAULT_BATCH, DEFAULT_BATCH_ON_GPU = 8, 32


@dataclass
class _Entry:
    """A request's sequence, with its text and times.

    Attributes:
        text: turns its tokens into text; None without a tokenizer.
        from_draft: for each token, whether it was drafted.
        pieces: the text so far.
        prefill_seconds, decode_seconds: of its prefill, and of the rounds that it took part in.
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
        pieces = self.text.push(step.token_ids, step.from_draft, step.finish_reason is not None)
        self.pieces += pieces
        return replace(step, pieces=tuple(pieces))


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
        self._engine, self._texts, self._method, self._exact = engine, codec, method, exact
        self._entries: dict[int, _Entry] = {}
        self._next = 0
        self.prefill_seconds = self.decode_seconds = 0.0

    def __repr__(self) -> str:
        ended = sum(map(self.ended, self._entries))
        return f"{type(self).__name__}({self._method}, {len(self._entries)} requests, {ended} ended)"

    def add(self, request: Request | Prompt) -> int:
        """Queues a request, which joins as soon as a slot is free.

        Returns:
            Its number, which its steps carry as ``sequence``.

        Raises:
            RequestError: a setting that cannot be used, such as ``max_new_tokens`` below 1.
            PromptError: no prompt, an empty one, or a token id that the model does not have.
            ContextError: prompt and new tokens exceed the model's context.
            CapabilityError: a text or stop strings without a tokenizer.
        """
        index = self._next
        request = (request if isinstance(request, Request) else Request(request)).checked()
        sequence = _sequence(self._engine, self._texts, index, request)
        self._engine.add(sequence)
        self._next += 1
        text = None if self._texts.tokenizer is None else TextStream(self._texts.decode, normalize_stop(request.stop))
        self._entries[index] = _Entry(sequence, text)
        return index

    def step(self) -> list[Step]:
        """Reads prompts for a while, or makes a round of all requests that are decoded.

        Returns:
            A step for each request concerned.

        Raises:
            MemoryBudgetError: there is no room for even one request, before any work on it.
            CapabilityError: another run has taken the cache; torch.autocast is on.
            NumericalError: the target's logits are NaN.
        """
        steps = self._engine.step()
        decoding = sum(step.seconds for step in steps if step.mode != "prefill")
        self.decode_seconds += decoding
        for step in steps:
            if step.mode == "prefill":
                self.prefill_seconds += step.seconds
                self._entries[step.sequence].prefill_seconds += step.seconds
            else:
                self._entries[step.sequence].decode_seconds += decoding
        return [self._entries[step.sequence].with_text(step) for step in steps]

    @property
    def views(self) -> tuple[View, ...]:
        """Views of longer texts: those of drafts, then of partial verifications; known after the first step."""
        return self._engine.drafter.views + self._engine.verifier.views

    def abort(self, number: int) -> None:
        """Ends a request where it is, with the finish reason "cancelled". Has no effect on one that has ended."""
        self._engine.abort(number)

    @property
    def busy(self) -> bool:
        return bool(self._engine.unfinished)

    def close(self) -> None:
        """Ends all requests where they are."""
        self._engine.close()

    def result(self, number: int) -> Result:
        """Returns a request's result so far, with the finish reason "cancelled" if it has not ended.

        Raises:
            RequestError: the session has no such request (any more).
        """
        if number not in self._entries:
            raise RequestError(f"this session has no request {number}, or its result was taken")
        entry = self._entries[number]
        return self._result(number, entry.prefill_seconds, entry.decode_seconds)

    def ended(self, number: int) -> bool:
        """True if a request has ended, with no step still to come."""
        return number not in self._engine.unfinished

    def take(self, number: int) -> Result:
        """Returns the result of a request that has ended, and forgets it.

        Raises:
            RequestError: it is still decoded, or the session has no such request.
        """
        result = self.result(number)
        if not self.ended(number):
            raise RequestError(f"request {number} is still decoded: take it when its last step has come, or abort it")
        del self._entries[number]
        return result

    def _result(self, number: int, prefill_seconds: float, decode_seconds: float) -> Result:
        entry, runner = self._entries[number], self._engine.runner
        s = entry.sequence
        return Result(
            text=self._text(entry),
            token_ids=list(s.output),
            prompt_tokens=len(s.prompt),
            method=self._method,
            exact=self._exact and not runner.kv_is_rounded,
            finish_reason=s.finish_reason or "cancelled",
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            peak_memory_bytes=memory_info.peak_bytes(runner.device),
            from_draft=list(entry.from_draft),
            pieces=list(entry.pieces),
            arithmetic=runner.arithmetic,
            **vars(s.stats),
        )

    def _text(self, entry: _Entry) -> str:
        if self._texts.tokenizer is None:
            return ""
        whole = entry.sequence.finish_reason not in (None, "cancelled")
        return "".join(p.text for p in entry.pieces) if whole else self._texts.decode(entry.sequence.output)


class Generation(Session):
    """A list of requests in progress: iterate over its :class:`Step` s, or call :meth:`results`."""

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
        return [len(entry.sequence.prompt) for entry in self._entries.values()]

    def _run(self) -> Iterator[Step]:
        while self.busy:
            if self._cancelled():
                for number in self._entries:
                    self.abort(number)
            yield from self.step()

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def results(self) -> list[Result]:
        """Runs to the end and returns one result a prompt. Seconds are those of the whole list."""
        for _ in self._steps:
            pass
        return [self._result(number, self.prefill_seconds, self.decode_seconds) for number in self._entries]


def eos_rule(eos: frozenset[int]) -> StopRule:
    """Finishes at any of several end-of-sequence tokens."""

    def rule(s: Sequence) -> FinishReason | None:
        return "eos" if s.output[-1] in eos else None

    return rule


def stop_string_rule(stops: tuple[str, ...], decode: Callable[[list[int]], str]) -> StopRule:
    """Finishes when a stop string appears in the output's text, wherever token borders fall.

    Args:
        decode: token ids to text, with special tokens if a stop string names one.
    """
    # A stop string of k bytes spans at most k tokens, and k UTF-8 characters are at most 4k bytes.
    window = 4 * max(map(len, stops)) + 8

    def rule(s: Sequence) -> FinishReason | None:
        tail = decode(s.output[-window:])
        return "stop" if any(stop in tail for stop in stops) else None

    return rule


def _sequence(engine: Engine, texts: TextCodec, index: int, request: Request) -> Sequence:
    """Makes the sequence of a checked request; raises what :meth:`Session.add` raises."""
    runner, sampling = engine.runner, request.sampling or Sampling()
    ids = texts.encode(request.prompt, request.chat)
    support.check_tokens(runner.model, ids)
    support.check_length(runner.model, len(ids) + request.max_new_tokens, engine.drafter.max_nodes)
    generator = None
    if not sampling.greedy:
        generator = torch.Generator(runner.device)
        seed = runner.tp_rank.shared_seed() if request.seed is None and runner.tp_rank is not None else request.seed
        generator.manual_seed(seed) if seed is not None else generator.seed()
    ends = request.eos_token_ids
    eos = (
        runner.eos_token_ids | texts.eos_token_ids
        if ends is None
        else frozenset([ends] if isinstance(ends, int) else ends)
    )
    stops, rules = normalize_stop(request.stop), list[StopRule]()
    if stops:
        rules.append(stop_string_rule(stops, texts.decoder_for_stops(stops)))
    if eos:
        rules.append(eos_rule(eos))
    return Sequence(
        index,
        ids,
        request.max_new_tokens,
        runner.device,
        greedy=sampling.greedy,
        sampler=Sampler(
            sampling.greedy, sampling.processors(request.processors), SampleNoise(generator, sampling.foresee)
        ),
        stop_rules=rules,
        tenant=request.tenant,
        predicted=request.predicted,
        reuse=request.reuse,
    )


def default_batch_size(device_type: str) -> int:
    """Sequences decoded at a time by default."""
    return DEFAULT_BATCH if device_type == "cpu" else DEFAULT_BATCH_ON_GPU
