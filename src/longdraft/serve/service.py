"""The server behind the endpoints: its model and methods, and the engine requests that clients' requests become."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from longdraft.engine.request import Request
from longdraft.engine.sampler import Sampling
from longdraft.engine.session import Session
from longdraft.engine.streaming import BROKEN
from longdraft.memory.prompt_cache import PromptCache
from longdraft.serve import schema
from longdraft.serve.choice import Choice, Speculation
from longdraft.serve.errors import ApiError
from longdraft.serve.metrics import Metrics
from longdraft.serve.openai import PART
from longdraft.serve.prefixes import DiskPrefixes
from longdraft.serve.processors import Bias, NotBefore, Penalties, Processor
from longdraft.serve.settings import Settings
from longdraft.serve.structured import table_of
from longdraft.serve.worker import Worker
from longdraft.speculator import Speculator


class Service:
    """Args:
    speculator: makes the speculator of a method. tokenizer: the model's.
    cache: makes the prompt cache of a speculator; None: one in memory.
    """

    def __init__(
        self,
        settings: Settings,
        speculator: Callable[[str], Speculator],
        tokenizer: PreTrainedTokenizerBase,
        cache: Callable[[Speculator], PromptCache] | None = None,
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self._new_speculator = speculator
        self._new_cache = cache or (lambda spec: PromptCache(spec.feature_layers(), settings.tree_bytes))
        self._speculators: dict[str, Speculator] = {}
        self._caches: dict[str, PromptCache] = {}
        self.worker = Worker(self._session, settings.slots, settings.queue, self._keep_a_prompt)
        self.metrics = Metrics(settings.name, lambda: self.worker.load)
        self._random = random.SystemRandom()

    # --- the engine thread ---

    def speculator(self, method: str) -> Speculator:
        if method not in self._speculators:
            self._speculators[method] = self._new_speculator(method)
        return self._speculators[method]

    def _session(self, method: str) -> Session:
        """A session with a new prompt cache: after a failure, the rows of the old one may be the cause."""
        spec, settings = self.speculator(method), self.settings
        self._caches[method] = self._new_cache(spec)
        spec.planner()  # measures what verifications cost before anybody waits for an answer
        return spec.session(settings.slots, context=settings.context, cache=self._caches[method], piece=settings.piece)

    def _keep_a_prompt(self) -> bool:
        """Writes a prompt to disk, if the server keeps them. Returns whether it wrote one."""
        return any(cache.keep() for cache in self._caches.values() if isinstance(cache, DiskPrefixes))

    # --- from requests to answers ---

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def check_model(self, name: str) -> None:
        if name and name != self.settings.name:
            message = f"There is no model {name!r} here; this is {self.settings.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def piece(self, token: int) -> tuple[str, bytes]:
        """A token's text and its bytes; the text of a part of a character is written as OpenAI does."""
        text = str(self.tokenizer.decode([token]))
        if BROKEN not in text:
            return text, text.encode()
        content = bytes(table_of(self.tokenizer).decode_bytes([token]))
        return PART + "".join(f"\\x{byte:02x}" for byte in content), content

    def choices(
        self,
        prompt: list[int],
        body: schema.Sampled,
        max_tokens: int | None,
        tenant: str | None,
        log_probs: int | None = None,
        constraint: Callable[[], Processor] | None = None,
        ends: Sequence[int] = (),
        echo: str | None = None,
    ) -> list[Choice]:
        """The answers that a request asks for, to be submitted.

        Args:
            log_probs: how many of the most probable tokens to report; None: no log-probabilities.
            constraint: makes the processor that binds the text to a grammar.
            ends: tokens that end the text besides the model's own.
            echo: the prompt as text, which the answer begins with; None: it does not.

        Raises:
            ApiError: a value that cannot be used.
        """
        settings = self.settings
        method = settings.methods[0] if body.method is None else body.method
        if method not in settings.methods:
            message = f"This server decodes with {', '.join(settings.methods)}, not {method!r}."
            raise ApiError(400, message, param="method")
        room = settings.context - len(prompt)
        if room < 1:
            message = (
                f"The prompt has {len(prompt)} tokens; this server's context holds {settings.context}, with the answer."
            )
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        vocabulary = len(self.tokenizer)
        if wrong := [token for token in body.logit_bias if not 0 <= token < vocabulary]:
            raise ApiError(400, f"There is no token {wrong[0]}.", param="logit_bias")

        processors: list[Callable[[], Processor]] = []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(partial(Penalties, len(prompt), body.presence_penalty, body.frequency_penalty))
        if body.logit_bias:
            processors.append(partial(Bias, body.logit_bias))
        ending: list[int] | None = [] if body.ignore_eos else None  # None: the model's own
        if ending is None and (ends or body.min_tokens):
            ending = self._ends(ends)
        if body.min_tokens and ending:
            processors.append(partial(NotBefore, len(prompt) + body.min_tokens, ending))
        if constraint is not None:
            processors.append(constraint)
        greedy = body.temperature == 0
        sampling = Sampling(
            temperature=body.temperature,
            top_k=None if greedy or body.top_k < 1 else body.top_k,
            top_p=None if greedy or body.top_p == 1 else body.top_p,
            min_p=None if greedy or body.min_p == 0 else body.min_p,
            repetition_penalty=None if body.repetition_penalty == 1 else body.repetition_penalty,
            repetition_window=body.repetition_window,
            foresee=settings.foresee,
        )
        # A request that begins again has to repeat its text, so it needs a seed.
        seed = self._random.randrange(2**62) if body.seed is None else body.seed
        predicted: list[int] = []
        if body.prediction is not None and body.prediction.text:
            found = self.tokenizer(body.prediction.text, add_special_tokens=False, verbose=False)["input_ids"]
            predicted = found[: 2 * settings.context]  # an answer can have no more of it
        request = Request(
            prompt,
            min(max_tokens or room, settings.max_tokens or room, room),
            sampling,
            stop=tuple(body.stop),
            eos_token_ids=ending,
            tenant=tenant,
            predicted=predicted,
            reuse=body.cache_prompt,
        )
        requests = [replace(request, seed=(seed + i) % 2**63) for i in range(body.n)]
        traced = body.stream_options.include_trace
        return [Choice(each, method, self.decode, processors, log_probs, traced, echo) for each in requests]

    def _ends(self, more: Sequence[int]) -> list[int]:
        """The tokens that end a text, the model's own and others."""
        spec = self.speculator(self.settings.methods[0])
        return sorted({*spec.runner().eos_token_ids, *spec.texts.eos, *more})

    def submit(self, choices: Sequence[Choice]) -> None:
        """Hands all of them to the worker, or none; from the loop that listens to them.

        Raises:
            QueueFull, Draining: no more requests are taken. RequestError: so many never are.
        """
        for choice in choices:
            choice.loop = asyncio.get_running_loop()
        self.worker.submit(*(choice.ticket for choice in choices))

    def cancel(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self.worker.cancel(choice.ticket)

    def usage(self, choices: Sequence[Choice], thought: int = 0) -> dict[str, Any]:
        """OpenAI's usage object of answers that have ended, with draft statistics; ``thought`` tokens were thoughts."""
        results = [choice.result for choice in choices if choice.result is not None]
        prompt, new = max((r.prompt_tokens for r in results), default=0), sum(r.new_tokens for r in results)
        details: dict[str, Any] = {"reasoning_tokens": thought}
        if predicted := choices[0].request.predicted:
            matched = sum(_matched(predicted, r.token_ids) for r in results)
            details["accepted_prediction_tokens"] = matched
            details["rejected_prediction_tokens"] = len(predicted) * len(results) - matched
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": max((r.cached_tokens for r in results), default=0)},
            "completion_tokens_details": details,
            "speculation": sum((choice.speculation for choice in choices), Speculation()).as_dict(),
        }

    def usage_so_far(self, choices: Sequence[Choice]) -> dict[str, int]:
        """The token counts of answers in progress."""
        prompt, new = max(len(c.request.prompt) for c in choices), sum(c.tokens for c in choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def model_object(self) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it."""
        settings = self.settings
        spec = self._speculators.get(settings.methods[0])
        return {
            "id": settings.name,
            "object": "model",
            "created": 0,
            "owned_by": "longdraft",
            "max_model_len": settings.context,
            "longdraft": {
                "method": settings.methods[0],
                "methods": list(settings.methods),
                "context": settings.context,
                "exact": spec is not None and spec.exact,
            },
        }


def _matched(predicted: Sequence[int], output: Sequence[int]) -> int:
    """Counts the predicted tokens that are in the output, in order. Takes time in proportion to their number.

    Where the two differ, both go on at the next four tokens of the prediction that the output has further on.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(output) - 3):
        places.setdefault(tuple(output[i : i + 4]), []).append(i)
    matched = at = 0
    for i, token in enumerate(predicted):
        if at < len(output) and output[at] == token:
            matched, at = matched + 1, at + 1
        elif found := places.get(tuple(predicted[i : i + 4])):
            next_one = bisect_left(found, at)
            if next_one < len(found):
                matched, at = matched + 1, found[next_one] + 1
    return matched
