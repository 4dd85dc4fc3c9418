"""One answer in the making: from the engine's steps to text, log-probabilities, why it ended, and what was drafted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from longdraft.engine.request import Request
from longdraft.engine.stats import Result, Step
from longdraft.engine.streaming import Detokenizer
from longdraft.serve.processors import LogProbs, Processor
from longdraft.serve.worker import Again, Ticket, Told, Worker

Decode = Callable[[list[int]], str]
# Why an answer ended, as OpenAI says it.
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}


@dataclass
class Speculation:
    """What was drafted, counted as vLLM counts it: a draft is a verification that had drafted tokens.

    Attributes:
        accepted_at: how many drafts had their first, second, ... token accepted.
        rounds: verifications. emitted: tokens that came of these.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    emitted: int = 0

    def count(self, step: Step) -> None:
        if step.mode == "prefill":
            return
        self.rounds += 1
        self.emitted += len(step.token_ids)
        if step.drafted:
            self.drafts += 1
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.accepted_at.update(range(step.accepted))

    def __add__(self, other: Speculation) -> Speculation:
        return Speculation(
            self.drafts + other.drafts, self.drafted + other.drafted, self.accepted + other.accepted,
            self.accepted_at + other.accepted_at, self.rounds + other.rounds, self.emitted + other.emitted,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """``mean_acceptance_length``: 1 + accepted / drafts; ``mean_accepted_length``: longdraft's, over all
        verifications."""
        return {
            "mean_acceptance_length": round(1 + self.accepted / self.drafts, 4) if self.drafts else 1.0,
            "num_drafts": self.drafts,
            "num_draft_tokens": self.drafted,
            "num_accepted_tokens": self.accepted,
            "accepted_tokens_per_pos": [self.accepted_at[i] for i in range(max(self.accepted_at, default=-1) + 1)],
            "mean_accepted_length": round(self.emitted / self.rounds, 4) if self.rounds else 1.0,
        }


@dataclass(frozen=True)
class Said:
    """A token that was emitted: its log-probability, and the likeliest ones with theirs."""

    token: int
    log_prob: float
    best: list[tuple[int, float]]


@dataclass(frozen=True)
class Delta:
    """What a step adds to an answer.

    Attributes:
        finish: why it has ended, as OpenAI says it. result: then.
    """

    text: str = ""
    said: tuple[Said, ...] = ()
    trace: dict[str, Any] | None = None
    finish: str | None = None
    result: Result | None = None


class Choice:
    """One answer to a request.

    Args:
        request: with all but its processors.
        method: that decodes it.
        processors: makes them anew each time the request begins, told how many tokens the prompt has.
        log_probs: likeliest tokens to report of each position; None: no log-probabilities.
        trace: say what each round drafted.
    """

    def __init__(
        self,
        request: Request,
        method: str,
        decode: Decode,
        processors: Callable[[], list[Processor]] = list,
        log_probs: int | None = None,
        trace: bool = False,
    ) -> None:
        self._request, self._processors, self._decode = request, processors, decode
        self.prompt = request.prompt
        self._most, self._traced = log_probs, trace
        self._events: asyncio.Queue[Told] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.ticket = Ticket(self._begin, method, self._hear)
        self.text, self.tokens = "", 0
        self.speculation = Speculation()
        self.result: Result | None = None
        self.first_token = 0.0  # time.monotonic()
        self._known: LogProbs | None = None

    def _begin(self) -> Request:
        self._known = None if self._most is None else LogProbs(self._most)
        first: list[Processor] = [] if self._known is None else [self._known]
        return replace(self._request, processors=[*first, *self._processors()])

    def _hear(self, told: Told) -> None:
        """From the engine thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, told)

    async def deltas(self, worker: Worker, deadline: float) -> AsyncIterator[Delta]:
        """What comes, until it has ended. Whoever stops listening ends the request.

        Args:
            deadline: ``time.monotonic()``.

        Raises:
            TimeoutError: it has not ended by then. LongdraftError and others: what the engine failed with.
        """
        try:
            told_text, told_tokens = "", 0  # of this beginning
            text, tokens = "", 0
            start, detokenizer = 0.0, Detokenizer(self._decode)
            while True:
                try:
                    told = await asyncio.wait_for(self._events.get(), max(0.0, deadline - time.monotonic()))
                except asyncio.TimeoutError:
                    raise TimeoutError from None
                if isinstance(told, Exception):
                    raise told
                if isinstance(told, Again):
                    told_text, told_tokens = self.text, tokens
                    text, tokens, self.speculation, detokenizer = "", 0, Speculation(), Detokenizer(self._decode)
                    continue
                if isinstance(told, Result):
                    self.result = told
                    yield Delta(finish=REASONS[told.finish_reason], result=told)
                    return
                if told.token_ids and not self.first_token:
                    self.first_token = time.monotonic()
                start = start or (time.monotonic() if told.token_ids else 0.0)
                self.speculation.count(told)
                text += told.text
                said = [self._say(token) for token in told.token_ids]
                new = said[max(0, told_tokens - tokens) :]
                tokens += len(said)
                self.tokens = max(self.tokens, tokens)
                trace = self._trace(told, tokens, start, detokenizer) if self._traced else None
                if len(text) > len(told_text) or new or trace:
                    added = text[len(told_text) :]
                    told_text = max(told_text, text, key=len)
                    self.text += added
                    yield Delta(added, tuple(s for s in new if s is not None), trace)
        finally:
            worker.cancel(self.ticket)

    def _say(self, token: int) -> Said | None:
        return None if self._known is None else Said(token, *self._known.take(token))

    def _trace(self, step: Step, tokens: int, start: float, detokenizer: Detokenizer) -> dict[str, Any]:
        if step.mode == "prefill" and not step.token_ids:
            return {"phase": "prefill", "read": step.prefilled}
        tree, decode = step.tree, self._decode
        sources = ["target"] * len(step.token_ids)
        found: dict[str, Any] = {"phase": "round", "round": self.speculation.rounds, "tree": None}
        if tree is not None:
            by = ["target", *("lookup" if i in tree.looked_up else "draft" for i in range(1, tree.size))]
            for i, node in enumerate(step.path[1:][: step.from_draft]):
                sources[i] = by[node]
            found["tree"] = {
                "tokens": [decode([token]) for token in tree.tokens], "parents": tree.parents, "sources": by,
                "accepted": step.path, "log_probs": [round(x, 3) for x in tree.log_probs],
            }  # fmt: skip
        pieces = [[detokenizer.push(token), source] for token, source in zip(step.token_ids, sources, strict=True)]
        seconds = time.monotonic() - start
        found["pieces"] = [piece for piece in pieces if piece[0]]
        found["tokens_per_second"] = round((tokens - 1) / seconds, 2) if seconds > 0 and tokens > 1 else 0.0
        found["mean_accepted_length"] = self.speculation.as_dict()["mean_accepted_length"]
        return found
