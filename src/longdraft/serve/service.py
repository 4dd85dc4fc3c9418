"""The service behind the endpoints: has the model, its methods and engine thread, and makes engine requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

from transformers import MinNewTokensLengthLogitsProcessor, PreTrainedTokenizerBase, SequenceBiasLogitsProcessor

from longdraft.engine.request import Request
from longdraft.engine.sampler import Sampling
from longdraft.engine.session import Session
from longdraft.engine.streaming import REPLACEMENT_CHARACTER
from longdraft.errors import MemoryBudgetError, RequestError
from longdraft.memory import memory_info
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.load.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner
from longdraft.registry import get_method
from longdraft.serve import protocol
from longdraft.serve.choice import Choice
from longdraft.serve.disk_prompt_cache import DiskPromptCache, create_snapshot_folder
from longdraft.serve.errors import ApiError, ContextOverflow
from longdraft.serve.executor import RequestExecutor
from longdraft.serve.metrics import Metrics
from longdraft.serve.openai import PARTIAL_CHAR_PREFIX
from longdraft.serve.processors import Penalties, Processor
from longdraft.serve.responses_request import ResponseStore
from longdraft.serve.settings import ServerSettings
from longdraft.serve.structured import ll_tokenizer
from longdraft.serve.worker import Worker
from longdraft.speculator import Speculator


class Service:
    """A model with the engine thread that decodes all its requests.

    Args:
        new_speculator: makes the speculator of a method.

    Attributes:
        worker: the engine thread.
        executor: runs long work outside the event loop.
        response_store: output items of ``/v1/responses``, which later requests may refer to.
    """

    def __init__(
        self, settings: ServerSettings, new_speculator: Callable[[str], Speculator], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self._new_speculator = new_speculator
        self._speculators: dict[str, Speculator] = {}
        self._disk_cache: DiskPromptCache | None = None
        self.executor = RequestExecutor(settings.queue + settings.slots, settings.prepare_timeout)
        self.worker = Worker(self.new_session, settings.slots, settings.queue, self._save_snapshot)
        self.metrics = Metrics(settings.name, lambda: self.worker.load)
        self._random, self._start_time = random.SystemRandom(), int(time.time())
        self.response_store = ResponseStore()

    # --- called in the engine thread ---

    def _save_snapshot(self) -> bool:
        """Saves a slot to disk. Returns False if there is nothing to save."""
        return self._disk_cache is not None and self._disk_cache.save_next()

    def speculator(self, method: str) -> Speculator:
        """Returns the speculator of a method. The first call makes it."""
        if method not in self._speculators:
            self._speculators[method] = self._new_speculator(method)
        return self._speculators[method]

    def new_session(self, method: str) -> Session:
        """Makes a session with a new prompt cache: if an old session failed, the old KV may be the cause."""
        spec, settings = self.speculator(method), self.settings
        feature_layers, tree_bytes = spec.feature_layers(), settings.prefix_cache_bytes
        if method != settings.methods[0]:  # only the default method keeps prefixes that lost their slot
            cache = PromptCache(feature_layers)
        elif settings.snapshots is None:
            cache = PromptCache(feature_layers, tree_bytes)
        else:
            cache = self._disk_cache = DiskPromptCache(
                settings.snapshots, spec.runner().fingerprint, settings.snapshot_bytes,
                feature_layers=feature_layers, tree_bytes=tree_bytes,
            )  # fmt: skip
        spec.planner()  # measures the cost of verifications now, not during the first request
        return spec.session(settings.slots, context=settings.context, cache=cache, piece=settings.prefill_chunk)

    # --- requests ---

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def check_model(self, name: str) -> None:
        """Raises ApiError if a request names another model."""
        if name and name != self.settings.name:
            message = f"There is no model {name!r} here: use {self.settings.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def token_to_piece(self, token: int) -> tuple[str, bytes]:
        """Returns a token's text and bytes. The text of a partial UTF-8 character is OpenAI's ``bytes:\\xe2\\x80``."""
        text = str(self.tokenizer.decode([token]))
        if REPLACEMENT_CHARACTER not in text:
            return text, text.encode()
        content = bytes(ll_tokenizer(self.tokenizer).decode_bytes([token]))
        return PARTIAL_CHAR_PREFIX + "".join(f"\\x{byte:02x}" for byte in content), content

    def make_choices(
        self, prompt: list[int], body: protocol.SampledRequest, max_tokens: int | None, tenant: str | None,
        num_logprobs: int | None = None, constraint_factory: Callable[[], Processor] | None = None,
        stop_token_ids: Sequence[int] = (), echo: str | None = None,
    ) -> list[Choice]:  # fmt: skip
        """Makes the ``n`` choices of a request, to be submitted. Raises ApiError if a value cannot be used.

        Args:
            max_tokens: limit of new tokens; None: what the context leaves.
            tenant: owner of the request's API key; None if no key is needed.
            num_logprobs: how many of the most probable tokens to report; None: no log-probabilities.
            constraint_factory: makes the logits processor that follows the request's grammar.
            stop_token_ids: further tokens that end the answer, besides the model's own.
            echo: the prompt as text, to put before the answer; None: no echo.
        """
        settings = self.settings
        method = settings.methods[0] if body.method is None else body.method
        if method not in settings.methods:
            message = f"This server decodes with {', '.join(settings.methods)}, not {method!r}."
            raise ApiError(400, message, param="method")
        runner = self.speculator(settings.methods[0]).runner()
        max_model_len = min(settings.context, runner.max_context_length(len(prompt)))
        tokens_left = max_model_len - len(prompt)
        if tokens_left < 1:
            raise ContextOverflow(len(prompt), max_tokens or 1, max_model_len, body.prompt_field)
        vocab_size = len(self.tokenizer)
        if wrong := [token for token in body.logit_bias if not 0 <= token < vocab_size]:
            raise ApiError(400, f"There is no token {wrong[0]}.", param="logit_bias")

        factories: list[Callable[[], Processor]] = []
        if body.presence_penalty or body.frequency_penalty:
            factories.append(partial(Penalties, len(prompt), body.presence_penalty, body.frequency_penalty))
        if body.logit_bias:
            factories.append(partial(SequenceBiasLogitsProcessor, {(t,): bias for t, bias in body.logit_bias.items()}))
        eos_ids: list[int] | None = [] if body.ignore_eos else None  # None: the model's own end tokens
        if eos_ids is None and (stop_token_ids or body.min_tokens):
            model_eos_ids = {*runner.eos_token_ids, *self.speculator(settings.methods[0]).texts.eos_token_ids}
            eos_ids = sorted(model_eos_ids | {*stop_token_ids})
        if body.min_tokens and eos_ids:
            min_length_args = len(prompt), body.min_tokens, eos_ids, runner.device
            factories.append(partial(MinNewTokensLengthLogitsProcessor, *min_length_args))
        if constraint_factory is not None:
            factories.append(constraint_factory)
        greedy = body.temperature == 0
        sampling = Sampling(
            temperature=body.temperature,
            top_k=None if greedy or body.top_k < 1 else body.top_k,
            top_p=None if greedy or body.top_p == 1 else body.top_p,
            min_p=None if greedy or body.min_p == 0 else body.min_p,
            repetition_penalty=None if body.repetition_penalty == 1 else body.repetition_penalty,
            repetition_window=body.repetition_window, foresee=settings.foresee,
        )  # fmt: skip
        # A restarted request must repeat its tokens, so it needs a seed, below 2^63 like all seeds.
        seed = self._random.randrange(2**62) if body.seed is None else body.seed
        max_new_tokens = min(max_tokens or tokens_left, settings.max_tokens or tokens_left, tokens_left)
        request = Request(
            prompt, max_new_tokens, sampling, stop=tuple(body.stop), eos_token_ids=eos_ids, tenant=tenant,
            reuse=body.cache_prompt,
        )  # fmt: skip
        requests = [replace(request, seed=(seed + i) % 2**63) for i in range(body.n)]
        choice_args = factories, num_logprobs, body.stream_options.include_trace, echo
        return [Choice(request, method, self.decode, *choice_args) for request in requests]

    def model_object(self) -> dict[str, Any]:
        """Returns the model as ``/v1/models`` lists it."""
        settings = self.settings
        spec = self._speculators.get(settings.methods[0])
        return {
            "id": settings.name, "object": "model",
            "type": "model", "display_name": settings.name,  # Anthropic's fields, like created_at, max_input_tokens
            "created": self._start_time,
            "created_at": f"{datetime.fromtimestamp(self._start_time, timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            "max_input_tokens": settings.context, "owned_by": "longdraft", "max_model_len": settings.context,
            "longdraft": {
                "method": settings.methods[0], "methods": list(settings.methods), "context": settings.context,
                "exact": spec is not None and spec.exact,
            },
        }  # fmt: skip


def make_service(
    loaded: LoadedModel, settings: ServerSettings, speculator_options: Mapping[str, Any],
    first_method_options: Mapping[str, Any], num_services: int = 1, progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Service:  # fmt: skip
    """Makes a service that is ready to answer.

    Args:
        settings: the settings. Empty ``methods`` select the best method for the model, and ar. ``context`` 0 selects
            the model's context, or as much of it as the memory holds.
        speculator_options: options of all methods.
        first_method_options: further options of the first method.
        num_services: number of services that share this machine's memory.
        note: called with messages for the user.

    Raises:
        RequestError: the context is longer than the model's.
        MemoryBudgetError: the context does not fit the memory.
        CheckpointError: the snapshot folder cannot be written.
    """

    def new_speculator(method: str | None) -> Speculator:
        options = dict(speculator_options)
        if method is None or method in settings.methods[:1]:
            options |= first_method_options
        if settings.earlier and (method is None or "earlier" in get_method(method).options):
            options |= {"earlier": settings.earlier}
            if method not in (None, "suffix", "prompt-lookup"):  # these two are lookups already
                options["lookup"] = True
        return Speculator(method, loaded.model, loaded.tokenizer, **options)

    if settings.snapshots is not None:
        create_snapshot_folder(settings.snapshots)
    default = new_speculator(settings.methods[0] if settings.methods else None)
    default.planner(progress)
    methods = settings.methods or tuple(dict.fromkeys((default.method.name, "ar")))
    context = _resolve_context(default.runner(), settings, len(methods), num_services, note)
    resolved = replace(settings, methods=methods, context=context)
    service = Service(resolved, lambda name: default if name == methods[0] else new_speculator(name), loaded.tokenizer)
    service.speculator(methods[0])
    default.record(settings.slots, context, progress)  # captures CUDA graphs
    return service


def _resolve_context(
    runner: TargetRunner, settings: ServerSettings, num_methods: int, num_services: int, note: Callable[[str], None]
) -> int:
    """Returns the tokens of a slot: ``settings.context``, or if it is 0, what the model and the free memory allow."""
    context, model_context, slots = settings.context, runner.context_length, settings.slots
    if context > model_context:
        raise RequestError(f"--context {context}: the model's context holds {model_context} (--rope-factor: more).")
    # kv_dtype, in which the KV is stored, may be smaller than the dtype of kv_shape.
    bytes_per_token = replace(runner.kv_shape, dtype=runner.kv_dtype).bytes_per_token
    free_bytes = memory_info.available_bytes(runner.device)
    if free_bytes is None or runner.offload is not None:  # the limit is unknown, or the KV is not on the device
        max_tokens = model_context
    else:
        # The prefix cache is in host memory. A fifth of the rest is left for activations.
        reserved = settings.prefix_cache_bytes * num_services if runner.device.type == "cpu" else 0
        max_tokens = int(0.8 * max(0, free_bytes - reserved) / (bytes_per_token * slots * num_methods * num_services))
    if context > max_tokens:
        raise MemoryBudgetError(
            f"--context {context}: the free memory holds {max_tokens} tokens in each of {slots} slots. Choose a "
            "shorter context, fewer --slots or, on a CPU, a smaller --prefix-gib."
        )
    if not context and model_context > max_tokens:
        note(
            f"The free memory holds {max_tokens:,} of the model's {model_context:,} tokens in each of {slots} slots. "
            "Fewer --slots or, on a CPU, a smaller --prefix-gib allow longer contexts."
        )
    context = context or min(model_context, max_tokens)
    if runner.offload is None:
        kv_bytes = bytes_per_token * context * slots * num_methods
        note(
            f"{slots} slot{'s' * (slots > 1)} of {context:,} tokens: the KV takes {kv_bytes / 2**30:.1f} GiB at most, "
            f"the prefix cache {settings.prefix_cache_bytes / 2**30:.1f}."
        )
    return context
