"""Defines Speculator, the public class, which decodes prompts with a method on a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longdraft.attention.prefill_window import check_prefill_window
from longdraft.drafts.draft import Draft
from longdraft.engine.loop import Engine
from longdraft.engine.planner import Planner
from longdraft.engine.request import Prompt, Request, RequestSettings, make_requests
from longdraft.engine.session import Generation, Session, default_batch_size
from longdraft.engine.stats import Result
from longdraft.engine.text_codec import TextCodec
from longdraft.errors import ArgumentError, RequestError, memory_checked, values_checked
from longdraft.integration import decoding
from longdraft.integration.generate_arguments import CustomGenerateSignature, GenerateArguments
from longdraft.memory import offload as offloading
from longdraft.memory.prompt_cache import PromptCache
from longdraft.method import Method
from longdraft.model.load.checkpoints import Progress
from longdraft.model.runner import TargetRunner
from longdraft.options import whole_number
from longdraft.planning.costs import fraction_reporter
from longdraft.planning.plans import PlanChoice, check_plan
from longdraft.recipes import Recipe, resolve
from longdraft.registry import METHODS
from longdraft.targets import Targets
from longdraft.views.view import parse_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

# One prompt or several; a prompt is a string, a list of token ids or a request.
Prompts = Prompt | Request | Sequence[Prompt | Request]


class StreamSettings(RequestSettings, total=False):
    """Keyword arguments of :meth:`Speculator.stream`, which describes them."""

    batch: int | None
    cache: PromptCache | None
    cancelled: Callable[[], bool]
    piece: int | None


def _check_keywords(call: str, settings: Mapping[str, Any], method_options: Iterable[str] = ()) -> None:
    """Raises ArgumentError if ``call`` (a key below, which the message completes) has a keyword of another call."""
    if not settings:
        return  # the methods' options, which are needed below, import all methods
    options = {name for method in METHODS.values() for name in method.options}
    keywords_by_call: dict[str, Iterable[str]] = {
        "generate(prompts": StreamSettings.__annotations__,
        "Request(prompt": Request.__dataclass_fields__,
        "Speculator(...": {*signature(Speculator).parameters, *options},
    }
    for name in settings.keys() - {*keywords_by_call[call], *method_options}:
        if right_call := next((other for other, names in keywords_by_call.items() if name in names), None):
            raise ArgumentError(f"{name} is no setting of {call}): give it to {right_call}, {name}=...)")


class Speculator:
    """Decodes with a method on a target, exactly as the target alone would.

    Use it directly, or hand it to transformers:

        model, tokenizer = longdraft.load()
        spec = longdraft.Speculator("prompt-lookup", target=model, tokenizer=tokenizer)
        spec.generate("Why is the sky blue?", max_new_tokens=64)
        model.generate(**inputs, custom_generate=spec, max_new_tokens=64)

    Args:
        method: a name of :func:`longdraft.methods`, a result of :func:`longdraft.compose`, or a draft folder. Default:
            ``self`` with lookups if our CPU kernels compute the full model and trees are planned; else ``longspec``
            with lookups if longdraft contains a draft for the target; else ``prompt-lookup``.
        target: the model. Only ``generate(..., custom_generate=...)`` of transformers works without one.
        tokenizer: needed for text prompts, text results and stop strings, not for token ids.
        offload: for a model on a GPU. ``"host"`` stores the KV cache in host memory, except for the layers that fit on
            the GPU; ``"host:N"`` keeps N layers on the GPU. The output is the same; decoding is slower.
        kv_dtype: rounds the KV cache of a float32 model on a CPU to ``"bfloat16"``, ``"int8"`` (a scale for each
            entry) or ``"int4"`` (keys' 32 slowest dimensions in eight bits); on a GPU, ``"int8"`` or ``"int4"``. The
            cache takes fewer bytes. The output is that of a slightly different model. None: no rounding.
        prefill_window: on a CPU, reads long prompts faster and approximately: a prompt's tokens attend to its first 128
            tokens and to the last ``prefill_window`` before them (at least 128), its last 512 tokens and all new tokens
            to everything. None: all tokens attend to everything.
        plan: ``"auto"`` sizes the trees of each round by the costs on this machine and by earlier acceptance, and
            decodes plainly if that is faster. The first run with a model measures the costs (10 s at most) and saves
            them. A dictionary {tokens of a forward: seconds} replaces measured costs, so that trees are the same on
            every machine. ``"fixed"`` grows the method's own trees. Default: fixed if options shape the tree, else
            LONGDRAFT_PLAN if it is set, else auto. The output is the same with any plan.
        deterministic: True: on a GPU, logits of every exact method equal those of plain decoding to the bit, so that
            near ties are decided alike. Each decoding forward then has 64 tokens, and attention adds in a fixed order,
            which makes small trees and plain decoding slower. On a CPU with our kernels, bits are always equal.
        options: options of the method, e.g. ``branches=2`` for prompt-lookup, ``draft=folder`` for longspec.

    Raises:
        UnknownMethodError: the method is unknown.
        RequestError: the method does not have an option, or an argument has an unusable value.
        UnsupportedModelError: the target is no model, or has layers that longdraft cannot compute exactly.
        CheckpointError: the draft cannot be read, or was made for another target.
        CapabilityError: the method needs a draft and none comes with the package for this target; or the target's
            device cannot offload, or its KV cannot be rounded.
    """

    @memory_checked()
    def __init__(
        self,
        method: str | Path | Method | None = None,
        target: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        offload: str | None = None,
        plan: PlanChoice = None,
        kv_dtype: str | None = None,
        prefill_window: int | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> None:
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise RequestError(
                f"tokenizer is a tokenizer of transformers, not {tokenizer!r}: take that of longdraft.load(...), or "
                "AutoTokenizer.from_pretrained(...)"
            )
        _check_keywords("Speculator(...", options, method.options if isinstance(method, Method) else ())
        with values_checked():
            self._method, self.options = resolve(method, options)  # so wrong options fail before a target is loaded
            self.offload = offloading.parse(offload)
            rounded_dtype = None if kv_dtype is None else parse_dtype(kv_dtype, "kv_dtype")
            check_plan(plan)
            check_prefill_window(prefill_window)
        if not isinstance(deterministic, bool):
            raise RequestError(f"deterministic is True or False, got {deterministic!r}")
        self.deterministic = deterministic
        self.tokenizer = tokenizer
        make_runner = partial(
            TargetRunner, offload=self.offload, kv_dtype=rounded_dtype, deterministic=deterministic,
            prefill_window=prefill_window,
        )  # fmt: skip
        self._targets = Targets(self._method, self.options, plan, make_runner)
        if target is not None:
            self.use(target, tokenizer)

    @memory_checked()
    def use(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Sets the target of a speculator that was made without one. Raises the errors of :class:`Speculator`."""
        self.tokenizer = self.tokenizer if tokenizer is None else tokenizer
        self.recipe(self.runner(target))

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        target: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> Speculator:
        """Makes a speculator from a draft folder or a method's name; see :class:`Speculator`."""
        return cls(name, target, tokenizer, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RequestError(
            "A Speculator is bound to its model, and is neither copied nor pickled: make another one with "
            "Speculator(name, target=model), in the process that has the model."
        )

    def __repr__(self) -> str:
        targets = self._targets.all
        recipe = targets[0].recipe if targets else None
        method, options = (self._method, self.options) if recipe is None else (recipe.method, recipe.options)
        plan = "auto" if self._targets.is_planned(method is None or method.exact) else "fixed"
        parts = [repr(method.name) if method else "method chosen by target", f"plan={plan}"]
        parts += [f"{name}={value!r}" for name, value in options.items()]
        parts += [f"target={type(target.runner.model).__name__}" for target in targets]
        return f"Speculator({', '.join(parts)})"

    @property
    def method(self) -> Method:
        """The method that the user named, else the method chosen for the first target.

        Raises:
            RequestError: the user named no method, and there is no target yet.
        """
        return self._method or self.recipe().method

    def recipe(self, runner: TargetRunner | None = None) -> Recipe:
        """Returns the method and options for a target, by default the first. They are chosen once for each target."""
        return self._targets.recipe(runner)

    def record(self, batch: int | None = None, context: int = 0, progress: Progress | None = None) -> int:
        """Captures the CUDA graphs of a session's verifications before its first request.

        Without this call, each batch shape is captured at its third use, which takes as long as two rounds.

        Args:
            batch: as for :meth:`session`.
            context: as for :meth:`session`.
            progress: called with a line of text now and then.

        Returns:
            The number of graphs; 0 on a CPU, and for models with windows or recurrent layers.

        Raises:
            MemoryBudgetError: the KV cache of ``context`` tokens does not fit.
        """
        if not self.runner().graphs.enabled:
            return 0
        report = fraction_reporter("Recording verifications as CUDA graphs", progress)
        return self._engine(batch, None, None, context)[1].capture_graphs(report)

    def planner(self, progress: Progress | None = None, runner: TargetRunner | None = None) -> Planner | None:
        """Returns the planner that sizes trees; None if trees are fixed. The first call may measure verification costs.

        Args:
            progress: called with a line of text before anything is measured.
            runner: the target; None: the first.
        """
        return self._targets.planner(progress, runner)

    def runner(self, target: PreTrainedModel | None = None, keep_alive: bool = True) -> TargetRunner:
        """Returns the runner of a target, by default the first. A model that was moved, cast or given other layers gets
        a new runner. With ``keep_alive``, the runner holds a reference to ``target`` from now on."""
        return self._targets.runner(target, keep_alive)

    def feature_layers(self) -> tuple[int, ...]:
        """Returns layers whose hidden states drafters read; see :class:`~longdraft.memory.prompt_cache.PromptCache`."""
        runner = self.runner()
        return self.recipe(runner).drafter().needs(runner).feature_layers

    @property
    def exact(self) -> bool:
        """True if the output equals the output of plain decoding with the first target."""
        return self.method.exact and not self.runner().is_approximate

    def draft(self) -> Draft[Any] | None:
        """Returns the trained draft for the first target; None if the method uses none."""
        draft: Draft[Any] | None = self.recipe().options.get("draft")
        return draft

    @property
    def texts(self) -> TextCodec:
        """The codec that encodes prompts and decodes tokens."""
        return TextCodec(self.tokenizer)

    def decode(self, tokens: list[int]) -> str:
        """Decodes token ids to text, without special tokens."""
        return self.texts.decode(tokens)

    def encode(self, prompt: Prompt, chat: bool = True) -> list[int]:
        """Returns a prompt's token ids. With ``chat``, a string becomes a user turn if there is a chat template."""
        return self.texts.encode(prompt, chat)

    def generate(self, prompts: Prompts, **settings: Unpack[StreamSettings]) -> list[Result]:
        """Decodes prompts to the end and returns a result for each; arguments and errors as for :meth:`stream`."""
        return self.stream(prompts, **settings).results()

    def stream(
        self,
        prompts: Prompts,
        *,
        batch: int | None = None,
        cache: PromptCache | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        piece: int | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Generation:
        """Starts decoding prompts, step by step. Nothing is computed before the caller requests the first step.

        Args:
            prompts: one prompt or several, each a string, a list of token ids, or a :class:`~longdraft.Request` with
                its own settings. Lengths may differ.
            batch: prompts decoded at a time; the next prompt takes the slot of a prompt that has ended. None: 8, on a
                GPU 32, and fewer if the prompts' KV does not fit the memory and there is no ``cache``.
            cache: KV of earlier runs, which this run reuses and extends.
            cancelled: called between forwards; True ends the run.
            piece: number of prompt tokens in one prefill forward, as for :meth:`session`.
            settings: settings of :class:`~longdraft.Request` for prompts that are not requests, such as
                ``max_new_tokens=64, temperature=0.7, seed=1``. Prompt i samples with seed + i.

        Raises:
            RequestError: an unusable value, such as ``max_new_tokens`` below 1.
            ArgumentError: an unknown setting.
            PromptError: there is no prompt, a prompt is empty, or a token id is outside the model's vocabulary.
            ContextError: a prompt and its new tokens exceed the model's context.
            MemoryBudgetError: not even one prompt fits the memory; raised before any work.
        """
        _check_keywords("generate(prompts", settings)
        requests = make_requests(prompts, settings)
        if not callable(cancelled):
            raise RequestError(f"cancelled is a function that is called between forwards, got {cancelled!r}")
        recipe, engine = self._engine(batch, cache, len(requests), piece=piece)
        return Generation(engine, self.texts, recipe.method.name, recipe.method.exact, requests, cancelled)

    def session(
        self, batch: int | None = None, *, context: int = 0, cache: PromptCache | None = None, piece: int | None = None
    ) -> Session:
        """Opens a session, which accepts requests while it decodes earlier ones (continuous batching).

        Args:
            batch: requests decoded at a time (slots). None: 8, on a GPU 32, and fewer if KV does not fit the memory.
            context: tokens (prompt and output) for which each slot has memory from the start. A longer request waits
                until no other request is decoded, and then gets memory.
            cache: KV of earlier runs, which this session reuses and extends. Without a cache, requests share the full
                chunks that their prompts have in common.
            piece: number of prompt tokens in a prefill chunk, which runs between two decoding rounds of the other
                requests; None: 1,024, on a GPU 4,096 unless the model has windows or recurrent layers.

        Raises:
            RequestError: ``batch`` or ``piece`` below 1.
        """
        recipe, engine = self._engine(batch, cache, None, context, piece)
        return Session(engine, self.texts, recipe.method.name, recipe.method.exact)

    @memory_checked()
    def _engine(
        self, batch: int | None, cache: PromptCache | None, cap: int | None, context: int = 0, piece: int | None = None
    ) -> tuple[Recipe, Engine]:
        """Returns the recipe for the first target, and an engine of at most ``cap`` slots; see :meth:`session`."""
        if cache is not None and not isinstance(cache, PromptCache):
            raise RequestError(f"cache takes a longdraft.PromptCache(), got {cache!r}")
        runner = self.runner()
        slots = default_batch_size(runner.device.type) if batch is None else whole_number("batch", batch, 1)
        recipe = self._targets.usable_recipe(runner)
        return recipe, Engine(
            runner,
            recipe.drafter(),
            recipe.verifier(),
            cache,
            self.planner(runner=runner),
            slots=slots if cap is None else min(slots, cap),
            capacity=whole_number("context", context, 0),
            chunk_size=None if piece is None else whole_number("piece", piece, 1),
        )

    # --- transformers: model.generate(**inputs, custom_generate=speculator) ---

    __signature__ = CustomGenerateSignature(decoding.decode, __init__)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        generate_args: GenerateArguments | None = None,
        **call: Any,
    ) -> Any:
        """Runs the decoding loop in place of that of transformers' ``generate``; see :mod:`longdraft.integration`.

        Args:
            generate_args: arguments of ``generate`` that transformers does not pass on, such as a streamer.
            call: arguments of :func:`longdraft.integration.decoding.decode`.
        """
        generate_args = generate_args or GenerateArguments()
        try:
            runner = self.runner(model, keep_alive=False)
            recipe = self._targets.usable_recipe(runner)
            return decoding.decode(
                runner, recipe, lambda: self.planner(runner=runner), input_ids, generate_args, **call
            )
        finally:
            if generate_args.streamer is not None:
                generate_args.streamer.end()  # also after an error, as a reader in another thread waits for the end
