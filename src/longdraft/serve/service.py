"""The server behind its endpoints: models and methods, prompts, and answers in the making."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from transformers import PreTrainedTokenizerBase

from longdraft.engine.request import Request
from longdraft.engine.sampler import Sampling
from longdraft.engine.session import Session
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.chat import conversation, encode
from longdraft.serve import schema
from longdraft.serve.choice import Choice
from longdraft.serve.errors import ApiError
from longdraft.serve.metrics import Metrics
from longdraft.serve.processors import Bias, Penalties, Processor
from longdraft.serve.settings import Settings
from longdraft.serve.worker import Worker
from longdraft.speculator import Speculator


class Service:
    """Args:
    speculator: makes one of a method. tokenizer: the model's.
    context: tokens that the model's context holds.
    cache: makes what keeps a method's prompts; None: they are kept in memory alone.
    """

    def __init__(
        self,
        settings: Settings,
        speculator: Callable[[str], Speculator],
        tokenizer: PreTrainedTokenizerBase,
        cache: Callable[[Speculator], PromptCache] | None = None,
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self._make, self._cache = speculator, cache or (lambda spec: PromptCache(spec.feature_layers()))
        self._speculators: dict[str, Speculator] = {}
        self._caches: dict[str, PromptCache] = {}
        self.worker = Worker(self._session, settings.slots, settings.queue, self._idle)
        self.metrics = Metrics(settings.name, lambda: self.worker.load)
        self._random = random.SystemRandom()

    # --- the engine thread ---

    def speculator(self, method: str) -> Speculator:
        if method not in self._speculators:
            self._speculators[method] = self._make(method)
        return self._speculators[method]

    def _session(self, method: str) -> Session:
        """Of a method. One that has failed leaves what it kept behind: its rows may be what failed."""
        spec, settings = self.speculator(method), self.settings
        self._caches[method] = self._cache(spec)
        spec.planner()  # what verifications cost is measured before anybody waits for an answer
        return spec.session(settings.slots, context=settings.context, cache=self._caches[method], piece=settings.piece)

    def _idle(self) -> bool:
        """Keeps a prompt on disk, where that is asked for."""
        return any(cache.keep() for cache in self._caches.values() if hasattr(cache, "keep"))

    # --- from requests to answers ---

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def method(self, asked: str | None) -> str:
        if asked is None:
            return self.settings.methods[0]
        if asked not in self.settings.methods:
            raise ApiError(
                400, f"This server decodes with {', '.join(self.settings.methods)}, not {asked!r}.", param="method"
            )
        return asked

    def check_model(self, name: str) -> None:
        if name and name != self.settings.name:
            raise ApiError(
                404,
                f"There is no model {name!r} here; this is {self.settings.name!r}.",
                param="model",
                code="model_not_found",
            )

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of a chat, ready for the model's answer.

        Raises:
            PromptError: the model's template refuses it.
        """
        return conversation(self.tokenizer, messages, **template)

    def text_prompt(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def choices(
        self,
        prompt: list[int],
        asked: schema.Sampled,
        max_tokens: int | None,
        tenant: str | None,
        log_probs: int | None = None,
        constraint: Callable[[], Processor] | None = None,
        trace: bool = False,
    ) -> list[Choice]:
        """The answers that a request asks for, handed in.

        Args:
            log_probs: likeliest tokens to report; None: none. constraint: makes what bounds the text.

        Raises:
            ApiError: a value that cannot be used. Full, Draining: no more are taken.
        """
        method = self.method(asked.method)
        room = self.settings.context - len(prompt)
        if room < 1 or (max_tokens or 1) > room:
            raise ApiError(
                400,
                f"The prompt has {len(prompt)} tokens and {max_tokens or 'at least 1'} new ones are asked for; this "
                f"server's context holds {self.settings.context}.",
                param="messages",
                code="context_length_exceeded",
            )
        if max_tokens is not None and max_tokens > self.settings.max_tokens:
            raise ApiError(400, f"At most {self.settings.max_tokens} new tokens a request here.", param="max_tokens")
        vocabulary = len(self.tokenizer)
        if wrong := [token for token in asked.logit_bias if not 0 <= token < vocabulary]:
            raise ApiError(400, f"There is no token {wrong[0]}.", param="logit_bias")

        def processors() -> list[Processor]:
            found: list[Processor] = []
            if asked.presence_penalty or asked.frequency_penalty:
                found.append(Penalties(len(prompt), asked.presence_penalty, asked.frequency_penalty))
            if asked.logit_bias:
                found.append(Bias(asked.logit_bias))
            return [*found, *([] if constraint is None else [constraint()])]

        greedy = asked.temperature == 0
        sampling = Sampling(
            temperature=asked.temperature,
            top_k=None if greedy or asked.top_k < 1 else asked.top_k,
            top_p=None if greedy or asked.top_p == 1 else asked.top_p,
            min_p=None if greedy or asked.min_p == 0 else asked.min_p,
            repetition_penalty=None if asked.repetition_penalty == 1 else asked.repetition_penalty,
        )
        # Without a seed one is made up, so that a request that begins again says the same.
        seed = self._random.randrange(2**62) if asked.seed is None else asked.seed
        predicted = self.predicted(asked)
        made = []
        for i in range(asked.n):
            request = Request(
                prompt,
                min(max_tokens or self.settings.default_tokens, room),
                sampling,
                seed=(seed + i) % 2**63,
                stop=tuple(asked.stop),
                eos_token_ids=[] if asked.ignore_eos else None,
                tenant=tenant,
                predicted=predicted,
            )
            made.append(Choice(request, method, self.decode, processors, log_probs, trace))
        for i, choice in enumerate(made):
            try:
                self.worker.submit(choice.ticket)
            except BaseException:
                for handed in made[:i]:
                    self.worker.cancel(handed.ticket)
                raise
        return made

    def predicted(self, asked: schema.Sampled) -> list[int]:
        if asked.prediction is None or not asked.prediction.text:
            return []
        ids: list[int] = self.tokenizer(asked.prediction.text, add_special_tokens=False)["input_ids"]
        return ids

    def usage(self, asked: schema.Sampled, choices: Sequence[Choice]) -> dict[str, Any]:
        """OpenAI's usage object, of answers that have ended, with what was drafted beside it."""
        results = [c.result for c in choices if c.result is not None]
        prompt, new = max((r.prompt_tokens for r in results), default=0), sum(r.new_tokens for r in results)
        spec = sum((c.speculation for c in choices[1:]), choices[0].speculation)
        details: dict[str, Any] = {"reasoning_tokens": 0}
        if predicted := self.predicted(asked):
            kept = [
                sum(block.size for block in SequenceMatcher(None, predicted, r.token_ids, False).get_matching_blocks())
                for r in results
            ]
            details["accepted_prediction_tokens"] = sum(kept)
            details["rejected_prediction_tokens"] = len(predicted) * len(results) - sum(kept)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": max((r.cached_tokens for r in results), default=0)},
            "completion_tokens_details": details,
            "speculation": spec.as_dict(),
        }

    def usage_so_far(self, choices: Sequence[Choice]) -> dict[str, int]:
        """The counts alone, of answers in the making."""
        prompt, new = max(len(c.prompt) for c in choices), sum(c.tokens for c in choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def described(self) -> dict[str, Any]:
        """The model, as ``/v1/models`` has it."""
        spec = self._speculators.get(self.settings.methods[0])
        return {
            "id": self.settings.name,
            "object": "model",
            "created": 0,
            "owned_by": "longdraft",
            "max_model_len": self.settings.context,
            "longdraft": {
                "method": self.settings.methods[0],
                "methods": list(self.settings.methods),
                "context": self.settings.context,
                "exact": spec is not None and spec.exact,
            },
        }
