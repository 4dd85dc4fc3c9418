"""The server behind the endpoints: its model and methods, and the engine requests that clients' requests become."""

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
from longdraft.methods import get_method
from longdraft.model.checkpoints import LoadedModel, Progress
from longdraft.model.runner import TargetRunner
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
    """A model with the engine thread that decodes all requests for it.

    Args:
        speculator: makes the speculator of a method.
        tokenizer: the model's.

    Attributes:
        executor: does what takes long beside the event loop. recent: outputs that clients may refer to.
    """

    def __init__(
        self,
        settings: ServerSettings,
        new_speculator: Callable[[str], Speculator],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self._new_speculator = new_speculator
        self._speculators: dict[str, Speculator] = {}
        self._disk: DiskPromptCache | None = None
        self.executor = RequestExecutor(settings.queue + settings.slots, settings.prepare_timeout)
        # What is idle writes a prompt to disk, if the server keeps them.
        self.worker = Worker(
            self.new_session, settings.slots, settings.queue, lambda: self._disk is not None and self._disk.save_next()
        )
        self.metrics = Metrics(settings.name, lambda: self.worker.load)
        self._random, self._created = random.SystemRandom(), int(time.time())
        self.response_store = ResponseStore()

    # --- the engine thread ---

    def speculator(self, method: str) -> Speculator:
        if method not in self._speculators:
            self._speculators[method] = self._new_speculator(method)
        return self._speculators[method]

    def new_session(self, method: str) -> Session:
        """A session with a new prompt cache: after a failure, the rows of the old one may be the cause."""
        spec, settings = self.speculator(method), self.settings
        layers, tree = spec.feature_layers(), settings.prefix_cache_bytes
        if method != settings.methods[0]:
            cache = PromptCache(layers)
        elif settings.snapshots is None:
            cache = PromptCache(layers, tree)
        else:
            cache = self._disk = DiskPromptCache(
                settings.snapshots, spec.runner().fingerprint, settings.snapshot_bytes,
                feature_layers=layers, tree_bytes=tree,
            )  # fmt: skip
        spec.planner()  # measures what verifications cost before anybody waits for an answer
        return spec.session(settings.slots, context=settings.context, cache=cache, piece=settings.prefill_chunk)

    # --- from requests to answers ---

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def check_model(self, name: str) -> None:
        if name and name != self.settings.name:
            message = f"There is no model {name!r} here; this is {self.settings.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def token_to_piece(self, token: int) -> tuple[str, bytes]:
        """A token's text and its bytes; the text of a part of a character is written as OpenAI does."""
        text = str(self.tokenizer.decode([token]))
        if REPLACEMENT_CHARACTER not in text:
            return text, text.encode()
        content = bytes(ll_tokenizer(self.tokenizer).decode_bytes([token]))
        return PARTIAL_CHAR_PREFIX + "".join(f"\\x{byte:02x}" for byte in content), content

    def make_choices(
        self,
        prompt: list[int],
        body: protocol.SampledRequest,
        max_tokens: int | None,
        tenant: str | None,
        num_logprobs: int | None = None,
        constraint_factory: Callable[[], Processor] | None = None,
        stop_token_ids: Sequence[int] = (),
        echo: str | None = None,
    ) -> list[Choice]:
        """The answers that a request asks for, to be submitted.

        Args:
            num_logprobs: how many of the most probable tokens to report; None: no log-probabilities.
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
        runner = self.speculator(settings.methods[0]).runner()
        longest = min(settings.context, runner.max_context_length(len(prompt)))
        room = longest - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), max_tokens or 1, longest, body.prompt_field)
        vocabulary = len(self.tokenizer)
        if wrong := [token for token in body.logit_bias if not 0 <= token < vocabulary]:
            raise ApiError(400, f"There is no token {wrong[0]}.", param="logit_bias")

        processors: list[Callable[[], Processor]] = []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(partial(Penalties, len(prompt), body.presence_penalty, body.frequency_penalty))
        if body.logit_bias:
            processors.append(partial(SequenceBiasLogitsProcessor, {(t,): bias for t, bias in body.logit_bias.items()}))
        ending: list[int] | None = [] if body.ignore_eos else None  # None: the model's own
        if ending is None and (stop_token_ids or body.min_tokens):
            ending = self._ends(stop_token_ids)
        if body.min_tokens and ending:
            bounds = len(prompt), body.min_tokens, ending, runner.device
            processors.append(partial(MinNewTokensLengthLogitsProcessor, *bounds))
        if constraint_factory is not None:
            processors.append(constraint_factory)
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
        request = Request(
            prompt,
            min(max_tokens or room, settings.max_tokens or room, room),
            sampling,
            stop=tuple(body.stop),
            eos_token_ids=ending,
            tenant=tenant,
            reuse=body.cache_prompt,
        )
        requests = [replace(request, seed=(seed + i) % 2**63) for i in range(body.n)]
        traced = body.stream_options.include_trace
        return [Choice(each, method, self.decode, processors, num_logprobs, traced, echo) for each in requests]

    def _ends(self, more: Sequence[int]) -> list[int]:
        """The tokens that end a text, the model's own and others."""
        spec = self.speculator(self.settings.methods[0])
        return sorted({*spec.runner().eos_token_ids, *spec.texts.eos_token_ids, *more})

    def model_object(self) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it."""
        settings = self.settings
        spec = self._speculators.get(settings.methods[0])
        return {
            "id": settings.name,
            "object": "model",
            "type": "model",  # Anthropic's names of the same, too
            "display_name": settings.name,
            "created": self._created,
            "created_at": f"{datetime.fromtimestamp(self._created, timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            "max_input_tokens": settings.context,
            "owned_by": "longdraft",
            "max_model_len": settings.context,
            "longdraft": {
                "method": settings.methods[0],
                "methods": list(settings.methods),
                "context": settings.context,
                "exact": spec is not None and spec.exact,
            },
        }


def make_service(
    loaded: LoadedModel,
    settings: ServerSettings,
    speculator_options: Mapping[str, Any],
    first_method_options: Mapping[str, Any],
    num_services: int = 1,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Service:
    """The service of a model, ready to answer.

    Args:
        settings: without ``methods``, the one that suits the model, and ar; with a ``context`` of 0, the model's, or
            what the memory holds.
        arguments: of all speculators. first: further ones of the first method's.
        sharing: how many services share the memory. note: gets sentences for the one who starts the server.

    Raises:
        RequestError, MemoryBudgetError: the context is longer than the model's, or than fits the memory.
        CheckpointError: prompts cannot be kept in the folder.
    """

    def speculator(method: str | None) -> Speculator:
        given = dict(speculator_options)
        if method is None or method in settings.methods[:1]:
            given |= first_method_options
        if settings.earlier and (method is None or "earlier" in get_method(method).options):
            given |= {"earlier": settings.earlier}
            if method not in (None, "suffix", "prompt-lookup"):
                given["lookup"] = True
        return Speculator(method, loaded.model, loaded.tokenizer, **given)

    if settings.snapshots is not None:
        create_snapshot_folder(settings.snapshots)
    chosen = speculator(settings.methods[0] if settings.methods else None)
    chosen.planner(progress)
    methods = settings.methods or tuple(dict.fromkeys((chosen.method.name, "ar")))
    context = _context(chosen.runner(), settings, len(methods), num_services, note)
    made = replace(settings, methods=methods, context=context)
    service = Service(made, lambda method: chosen if method == methods[0] else speculator(method), loaded.tokenizer)
    service.speculator(methods[0])
    chosen.record(settings.slots, context, progress)
    return service


def _context(
    runner: TargetRunner, settings: ServerSettings, methods: int, sharing: int, note: Callable[[str], None]
) -> int:
    """Tokens of the longest text: as asked for, or as the model and four fifths of the free memory allow."""
    context, limit, slots = settings.context, runner.context_length, settings.slots
    if context > limit:
        raise RequestError(f"--context {context}: the model's context holds {limit} (--rope-factor stretches it).")
    row = runner.kv_shape.bytes_per_token * runner.kv_dtype.itemsize // runner.kv_shape.dtype.itemsize
    free = memory_info.available_bytes(runner.device)
    if free is None or runner.offload is not None:
        room = limit
    else:
        kept = settings.prefix_cache_bytes * sharing if runner.device.type == "cpu" else 0
        room = int(0.8 * max(0, free - kept) / (row * slots * methods * sharing))
    if context > room:
        raise MemoryBudgetError(
            f"--context {context}: the free memory holds {room} tokens for each of {slots} slots. Ask for less, for "
            "fewer --slots or, on a CPU, for a smaller --prefix-gib."
        )
    if not context and limit > room:
        note(
            f"The memory that is free holds texts of {room:,} of the model's {limit:,} tokens in {slots} slots. Fewer "
            "--slots or, on a CPU, a smaller --prefix-gib leave room for longer ones."
        )
    context = context or min(limit, room)
    if runner.offload is None:
        most = row * context * slots * methods
        note(
            f"{slots} slot{'s' * (slots > 1)} of {context:,} tokens: the KV takes {most / 2**30:.1f} GiB at most, "
            f"and the beginnings of other texts {settings.prefix_cache_bytes / 2**30:.1f}."
        )
    return context
