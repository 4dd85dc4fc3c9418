"""Requests to a Speculator: sessions, in which they come and go, and generations, which are a list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longdraft.engine import Engine, Result, Step
from longdraft.errors import RequestError
from longdraft.kv import memory
from longdraft.verify.sampling import Sampling

if TYPE_CHECKING:
    from longdraft.methods import Method
    from longdraft.sequence import Sequence
    from longdraft.speculator import Speculator

Prompt = str | list[int]
# Sequences decoded at a time where nobody says how many: each more makes a step a little slower and its KV is memory.
BATCH, BATCH_ON_GPU = 8, 32


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is to be continued.

    Attributes:
        prompt: a text, or token ids.
        max_new_tokens: emitted at most.
        sampling: temperature and filters; None is greedy.
        seed: the same seed gives the same text, whatever the method and whoever else is decoded (but see
            :attr:`Speculator.draws_anew`); None: another text each time.
        processors: logits processors of transformers' interface, applied before those of ``sampling``. One with a state
            belongs to one request.
        eos_token_ids: where to end; None takes the model's own, an empty list none.
        stop: strings that end the output; they are cut from the text.
        chat: wrap a text prompt in the tokenizer's chat template, where it has one.
    """

    prompt: Prompt
    max_new_tokens: int = 256
    sampling: Sampling | None = None
    seed: int | None = None
    processors: SequenceOf[Any] = ()
    eos_token_ids: SequenceOf[int] | None = None
    stop: SequenceOf[str] = ()
    chat: bool = True


class Session:
    """Decodes requests that come and go (continuous batching). Made by :meth:`Speculator.session`::

    session = spec.session(batch=8)
    first = session.add("Why is the sky blue?")
    while session.busy:
        for step in session.step():
            ...  # step.sequence, step.token_ids, step.finish_reason
        # others may be added at any time
    print(session.result(first).text)
    """

    def __init__(self, spec: Speculator, method: Method, engine: Engine) -> None:
        self._spec, self._method, self._engine = spec, method, engine
        self._sequences: dict[int, Sequence] = {}
        self._stops: dict[int, tuple[str, ...]] = {}
        self._flags: dict[int, list[bool]] = {}
        # Seconds of each request's prefill, and of the rounds that it took part in.
        self._seconds: dict[int, list[float]] = {}
        self._next = 0

    def add(self, request: Request | Prompt) -> int:
        """A request joins as soon as a slot is free.

        Returns:
            Its number, which its steps carry as ``sequence``.

        Raises:
            RequestError: ``max_new_tokens`` below 1.
            PromptError: an empty prompt, or a token id that the model does not have.
            ContextError: prompt and new tokens exceed the model's context.
            CapabilityError: a text or stop strings without a tokenizer.
        """
        index = self._next
        if not isinstance(request, Request):
            request = Request(request)
        sequence = self._spec.sequence(index, request, self._engine.drafter.max_nodes)
        self._engine.add(sequence)
        self._next += 1
        self._sequences[index], self._stops[index] = sequence, tuple(request.stop)
        self._flags[index], self._seconds[index] = [], [0.0, 0.0]
        return index

    def step(self) -> list[Step]:
        """Reads prompts for a while, or makes a round of all requests that are decoded.

        Returns:
            What came of it: a step for each request concerned.

        Raises:
            MemoryBudgetError: there is no room for even one request, before any work on it.
            CapabilityError: another run has taken the cache.
            NumericalError: the target's logits are NaN.
        """
        steps = self._engine.step()
        decoding = sum(step.seconds for step in steps if step.mode != "prefill")
        for step in steps:
            seconds = self._seconds[step.sequence]
            if step.mode == "prefill":
                seconds[0] += step.seconds
            else:
                seconds[1] += decoding
            self._flags[step.sequence] += [i < step.from_draft for i in range(len(step.token_ids))]
        return steps

    def abort(self, number: int) -> None:
        """Ends a request where it is; its last step says "cancelled". One that has ended is left as it is."""
        self._engine.abort(number)

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet."""
        return self._engine.busy

    def close(self) -> None:
        """Ends all requests where they are."""
        self._engine.close()

    def result(self, number: int) -> Result:
        """What there is of a request, marked cancelled where it has not ended.

        Raises:
            RequestError: the session has no such request, or not any more.
        """
        if number not in self._sequences:
            raise RequestError(f"this session has no request {number}, or its result was taken")
        return self._result(number, *self._seconds[number])

    def ended(self, number: int) -> bool:
        """Whether a request has ended, and no step of it will follow."""
        return not self._engine.holds(number)

    def take(self, number: int) -> Result:
        """The result of a request that has ended; the session forgets it.

        Raises:
            RequestError: it is still decoded, or the session has no such request.
        """
        found = self.result(number)
        if not self.ended(number):
            raise RequestError(f"request {number} is still decoded: take it when its last step has come, or abort it")
        for kept in (self._sequences, self._stops, self._flags, self._seconds, self._engine.stats):
            del kept[number]
        return found

    def _result(self, number: int, prefill_seconds: float, decode_seconds: float) -> Result:
        s, stats = self._sequences[number], self._engine.stats[number]
        return Result(
            text=self._text(s),
            token_ids=list(s.output),
            prompt_tokens=len(s.prompt),
            method=self._method.name,
            exact=self._method.exact and not self._engine.runner.rounds,
            finish_reason=s.finish_reason or "cancelled",
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            partial_rounds=stats.rounds_by_mode["partial"],
            partial_tokens=stats.unconfirmed,
            rolled_back=stats.taken_back,
            peak_memory_bytes=memory.peak_bytes(self._engine.runner.device),
            from_draft=self._flags[number],
        )

    def _text(self, s: Sequence) -> str:
        if self._spec.tokenizer is None:
            return ""
        text: str = self._spec.decode(s.output)
        # The earliest stop string ends the text.
        ends = [text.find(stop) for stop in self._stops[s.index] if s.finish_reason == "stop" and stop in text]
        return text[: min(ends)] if ends else text


class Generation(Session):
    """A list of requests in progress: iterate over its :class:`Step` s, or ask for its results at once."""

    def __init__(
        self,
        spec: Speculator,
        method: Method,
        engine: Engine,
        requests: Iterable[Request],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(spec, method, engine)
        for request in requests:
            self.add(request)
        self._cancelled = cancelled
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._steps = self._run()

    @property
    def prompt_tokens(self) -> list[int]:
        """Prompt length of each sequence, in tokens."""
        return [len(s.prompt) for s in self._sequences.values()]

    def _run(self) -> Iterator[Step]:
        while self.busy:
            if self._cancelled():
                for number in self._sequences:
                    self.abort(number)
            for step in self.step():
                if step.mode == "prefill":
                    self.prefill_seconds += step.seconds
                else:
                    self.decode_seconds += step.seconds
                yield step

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def results(self) -> list[Result]:
        """Runs whatever is left and returns one result a prompt. Seconds are those of the whole list."""
        for _ in self._steps:
            pass
        return [self._result(number, self.prefill_seconds, self.decode_seconds) for number in self._sequences]


def batch_for(device_type: str) -> int:
    """Sequences decoded at a time on a device."""
    return BATCH if device_type == "cpu" else BATCH_ON_GPU
