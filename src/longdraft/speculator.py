"""Speculator: a method bound to a target. The whole of the public API goes through it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from longdraft.drafts.draft import Draft
from longdraft.engine.loop import Engine
from longdraft.engine.request import Prompt, Request, RequestSettings, make_requests
from longdraft.engine.session import Generation, Session, default_batch_size
from longdraft.engine.stats import Result
from longdraft.engine.text_codec import TextCodec
from longdraft.errors import ArgumentError, RequestError, UnsupportedModelError, memory_checked, values_checked
from longdraft.integration import decoding
from longdraft.integration.generate_arguments import CustomGenerateSignature, GenerateArguments
from longdraft.memory import offload as offloading
from longdraft.memory.prompt_cache import PromptCache
from longdraft.methods import METHODS, Method
from longdraft.model import support
from longdraft.model.checkpoints import Progress
from longdraft.model.execution_model import model_lock
from longdraft.model.runner import TargetRunner
from longdraft.options import whole_number
from longdraft.planning.costs import fraction_reporter
from longdraft.planning.planner import Planner
from longdraft.planning.plans import PlanChoice, check_plan, is_planned, make_planner
from longdraft.recipes import Recipe, recipe_for, resolve
from longdraft.views.view import parse_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

logger = logging.getLogger("longdraft")

# One prompt or several: texts, token ids, requests.
Prompts = Prompt | Request | SequenceOf[Prompt | Request]


class Running(RequestSettings, total=False):
    """Arguments of :meth:`Speculator.stream` beside the prompts."""

    batch: int | None
    cache: PromptCache | None
    cancelled: Callable[[], bool]
    piece: int | None


@dataclass
class _Target:
    """A target as a speculator knows it. ``planner`` is None where rounds are not planned, and if that is not known
    yet, in which case ``weighed`` is False."""

    runner: TargetRunner
    recipe: Recipe | None = None
    planner: Planner | None = None
    weighed: bool = False


def _check_places(of: str, settings: Mapping[str, Any], more: Iterable[str] = ()) -> None:
    """Raises ArgumentError, with the right place, for a setting of another place than ``of``, which takes ``more``."""
    options = {name for method in METHODS.values() for name in method.options}
    places: dict[str, Iterable[str]] = {
        "generate(prompts": Running.__annotations__,
        "Request(prompt": Request.__dataclass_fields__,
        "Speculator(...": {*signature(Speculator).parameters, *options},
    }
    for name in settings.keys() - {*places[of], *more}:
        if (place := next((place for place, names in places.items() if name in names), None)) is not None:
            raise ArgumentError(f"{name} is no setting of {of}): give it to {place}, {name}=...)")


class Speculator:
    """Decodes with a method on a target, exactly as the target alone would.

    Use it directly, or hand it to transformers:

        model, tokenizer = longdraft.load()
        spec = longdraft.Speculator("prompt-lookup", target=model, tokenizer=tokenizer)
        spec.generate("Why is the sky blue?", max_new_tokens=64)
        model.generate(**inputs, custom_generate=spec, max_new_tokens=64)

    Args:
        method: a name of :func:`longdraft.methods`, what :func:`longdraft.compose` made, or a draft folder. Left out:
            ``self`` with lookups on a CPU where our kernels compute the whole model and rounds are planned; else
            ``longspec`` with lookups where a draft for the target comes with the package; else ``prompt-lookup``.
        target: the model. May be left out when only ``custom_generate`` is used.
        tokenizer: needed for text prompts, text results and stop strings; token ids work without.
        offload: ``"host"`` keeps the KV cache of a model on a GPU in the host's memory, but for as many layers as fit;
            ``"host:N"`` keeps N on the GPU. Slower, and the same output.
        kv_dtype: what the KV cache is rounded to, ``"bfloat16"`` or ``"int8"`` (a scale for each row), where the model
            computes in float32 on a CPU; ``"int8"`` on a GPU too. Fewer bytes to hold, and on a CPU to read, whatever
            the method; the text is that of a slightly different model. None: nothing is rounded.
        plan: ``"auto"`` sizes trees by what they cost on this machine and by what is accepted, round by round, and
            decodes plainly where that is faster; the first run with a model measures the costs, for 10 s at
            most, and keeps them. ``"fixed"`` grows the method's own trees. Left out: fixed where the options say what
            tree, else what LONGDRAFT_PLAN says, else auto. The output is the same. A dictionary, rows of a forward to
            its seconds, plans by these costs and by no clock, for the same trees on every machine.
        deterministic: plain decoding and every exact method agree to the bit on a GPU too, near ties included: each
            forward of decoding has 64 rows, whatever is verified, and attention adds up in a fixed order. Slower where
            few rows are verified, most of all plain decoding. On a CPU with our kernels it is so anyway.
        options: the method's own, e.g. ``branches=2`` for prompt-lookup, ``draft=folder`` for longspec.

    Raises:
        UnknownMethodError: no such method.
        RequestError: an option that the method does not have, or a value that cannot be used.
        UnsupportedModelError: the target is no model, or has layers that cannot be hosted exactly.
        CheckpointError: the draft cannot be read, or was made for another target.
        CapabilityError: the method needs a draft, and none comes with the package for this target; or the target's
            device cannot offload that way, or its KV cannot be rounded.
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
        deterministic: bool = False,
        **options: Any,
    ) -> None:
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise RequestError(
                f"tokenizer is a tokenizer of transformers, not {tokenizer!r}: take that of longdraft.load(...), or "
                "AutoTokenizer.from_pretrained(...)"
            )
        _check_places("Speculator(...", options, method.options if isinstance(method, Method) else ())
        with values_checked():
            self._named, self.options = resolve(method, options)  # wrong ones are refused now
            self.offload = offloading.parse(offload)
            self._kv_dtype = None if kv_dtype is None else parse_dtype(kv_dtype, "kv_dtype")
            self._plan = check_plan(plan)
        if not isinstance(deterministic, bool):
            raise RequestError(f"deterministic is True or False, got {deterministic!r}")
        self.deterministic = deterministic
        self.tokenizer = tokenizer
        # Nothing is added in place, so it is read without a lock. Whoever holds the lock waits for none. Models that
        # ``generate`` hands over are not kept alive.
        self._targets: WeakKeyDictionary[PreTrainedModel, _Target] = WeakKeyDictionary()
        self._changing = Lock()
        if target is not None:
            self.use(target, tokenizer)

    @memory_checked()
    def use(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Gives a speculator that was made without a target its target.

        Raises:
            UnsupportedModelError, CheckpointError, CapabilityError: as :class:`Speculator` does.
        """
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
        """A speculator from a draft folder or a method's name; see :class:`Speculator`."""
        return cls(name, target, tokenizer, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RequestError(
            "A Speculator is bound to its model, and is neither copied nor pickled: make another one with "
            "Speculator(name, target=model), in the process that has the model."
        )

    def __repr__(self) -> str:
        targets = list(self._targets.values())
        found = targets[0].recipe if targets else None
        method, options = (self._named, self.options) if found is None else (found.method, found.options)
        plan = "auto" if is_planned(self._plan, options, method is None or method.exact) else "fixed"
        said = [repr(method.name) if method else "method of the target's", f"plan={plan}"]
        said += [f"{name}={value!r}" for name, value in options.items()]
        said += [f"target={type(each.runner.model).__name__}" for each in targets]
        return f"Speculator({', '.join(said)})"

    @property
    def method(self) -> Method:
        """The method that was named, else the one chosen for its (first) target.

        Raises:
            RequestError: no method was named, and which one it will be depends on a target that is not there yet.
        """
        return self._named or self.recipe().method

    def recipe(self, runner: TargetRunner | None = None) -> Recipe:
        """The method and options for a target, by default the first; settled once a target."""
        target = self._target(runner)
        if target.recipe is None:
            with target.runner.lock:
                # Lookups cost nothing where a planner weighs them; fixed trees are the papers'.
                lookup = is_planned(self._plan, self.options, self._named is None or self._named.exact)
                with values_checked(), torch.device("cpu"):  # whatever the user's default device is
                    target.recipe = target.recipe or recipe_for(self._named, self.options, target.runner, lookup)
        return target.recipe

    def _settled(self, runner: TargetRunner) -> Recipe:
        """The recipe for a target as it is now: plain decoding where none was named and its hooks rule drafts out.

        Raises:
            UnsupportedModelError: a named method drafts, and they rule it out.
        """
        chosen = self.recipe(runner)
        if not chosen.drafter().max_nodes or (reason := support.reason_against_drafts(runner)) is None:
            return chosen
        if self._named is not None:
            raise UnsupportedModelError(reason)
        logger.warning("Decoding plainly: %s", reason)
        return recipe_for(METHODS["ar"], {}, runner)

    def record(self, batch: int | None = None, context: int = 0, progress: Progress | None = None) -> int:
        """Records the CUDA graphs of a session's verifications before its first request, where there are graphs.

        Without, each size is recorded when it comes up for the third time, which takes as long as two rounds.

        Args:
            batch: as of :meth:`session`.
            context: as of :meth:`session`.
            progress: called with a line of text now and then.

        Returns:
            The number of graphs; 0 on a CPU, and for models with windows or recurrent layers, which have none.

        Raises:
            MemoryBudgetError: there is no room for one text of ``context`` tokens.
        """
        if not self.runner().graphs.enabled:
            return 0
        done = fraction_reporter("Recording verifications as CUDA graphs", progress)
        return self._engine(batch, None, None, context)[1].capture_graphs(done)

    def planner(self, progress: Progress | None = None, runner: TargetRunner | None = None) -> Planner | None:
        """The planner of its rounds; None with fixed trees. The first call may measure the cost of verifications.

        Args:
            progress: called with a line of text before anything is measured.
            runner: the target, by default the first.
        """
        target = self._target(runner)
        with target.runner.lock:  # also while it is measured what verifications cost: others would be measured too
            if not target.weighed:
                chosen, share = self.recipe(target.runner), target.runner.tp_rank
                if share is not None:
                    share.check_plan(self._plan)
                wanted = is_planned(self._plan, self.options, chosen.method.exact) and chosen.is_plannable
                if wanted and self.offload is None and share is None:
                    target.planner = make_planner(self._plan, target.runner, progress)
                target.weighed = True
            return target.planner

    def runner(self, target: PreTrainedModel | None = None, kept: bool = True) -> TargetRunner:
        """The hosted target, by default the first; made once a model, and anew for one that was moved, cast or given
        other layers since. ``kept``: keep a given one alive from now on."""
        if target is None and not self._targets:
            raise RequestError("This Speculator has no target: Speculator(name, target=model).")
        model = next(self._targets.keys()) if target is None else target
        support.check_model(model)
        if (found := self._known(model)) is None:
            with model_lock(model):
                if (found := self._known(model)) is None:
                    found = TargetRunner(model, self.offload, self._kv_dtype, self.deterministic)
                    found.held_model = before.runner.held_model if (before := self._targets.get(model)) else None
                    with self._changing:
                        self._targets = self._targets | {model: _Target(found)}  # an older one's place stays
        found.held_model = model if kept and target is not None else found.held_model
        return found

    def _known(self, model: PreTrainedModel) -> TargetRunner | None:
        target = self._targets.get(model)
        return None if target is None or target.runner.is_stale else target.runner

    def _target(self, runner: TargetRunner | None = None) -> _Target:
        """The record of a target, by default the first."""
        runner = self.runner() if runner is None else runner
        found = self._targets.get(runner.model)
        return found if found is not None and found.runner is runner else _Target(runner)

    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states its drafter reads; see :class:`~longdraft.memory.prompt_cache.PromptCache`."""
        runner = self.runner()
        return self.recipe(runner).drafter().feature_layers(runner)

    @property
    def exact(self) -> bool:
        """True if its output is that of its (first) target alone."""
        return self.method.exact and not self.runner().kv_is_rounded

    def draft(self) -> Draft[Any] | None:
        """The draft that it decodes its target with; None for a method that needs none."""
        found: Draft[Any] | None = self.recipe().options.get("draft")
        return found

    @property
    def texts(self) -> TextCodec:
        """Encodes prompts and decodes tokens."""
        return TextCodec(self.tokenizer)

    def decode(self, tokens: list[int]) -> str:
        """Token ids to text, without special tokens."""
        return self.texts.decode(tokens)

    def encode(self, prompt: Prompt, chat: bool = True) -> list[int]:
        """A prompt's token ids: as given; or a text's, as the user's turn of a chat if the model has a template."""
        return self.texts.encode(prompt, chat)

    def generate(self, prompts: Prompts, **settings: Unpack[Running]) -> list[Result]:
        """Decodes prompts to the end, a result for each; with the arguments and errors of :meth:`stream`."""
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
        """Starts decoding prompts, step by step. Nothing is computed before the first step is asked for.

        Args:
            prompts: one prompt or several, each a text, a list of token ids, or a :class:`~longdraft.Request` with
                settings of its own; lengths may differ.
            batch: prompts decoded at a time; when one has ended, the next takes its place. None: 8, on a GPU 32. Fewer
                where the memory does not hold the KV of so many, unless there is a ``cache``.
            cache: KV of earlier runs to start from and to keep.
            cancelled: asked between forwards; True ends the run.
            piece: prompt tokens read in one forward, as of :meth:`session`.
            settings: of :class:`~longdraft.Request`, for the prompts that are not requests themselves:
                ``max_new_tokens=64, temperature=0.7, seed=1``. Prompt i samples with seed + i.

        Raises:
            RequestError: a value that cannot be used, such as ``max_new_tokens`` below 1; as ArgumentError, a setting
                that there is not.
            PromptError: no prompt, an empty one, or a token id that the model does not have.
            ContextError: a prompt and its new tokens exceed the model's context.
            MemoryBudgetError: there is no room for even one prompt, before any work.
        """
        _check_places("generate(prompts", settings)
        requests = make_requests(prompts, settings)
        if not callable(cancelled):
            raise RequestError(f"cancelled is a function that is asked between forwards, got {cancelled!r}")
        chosen, engine = self._engine(batch, cache, len(requests), piece=piece)
        return Generation(engine, self.texts, chosen.method.name, chosen.method.exact, requests, cancelled)

    def session(
        self, batch: int | None = None, *, context: int = 0, cache: PromptCache | None = None, piece: int | None = None
    ) -> Session:
        """A session, to which requests are added while others are decoded.

        Args:
            batch: requests decoded at a time; None: 8, on a GPU 32. Fewer where the memory does not hold so many.
            context: tokens of the longest text, prompt and output, that memory is taken for at once; a longer one
                waits until nobody else is decoded, and then has more taken.
            cache: KV of earlier runs to start from and to keep. Without, requests share what whole pieces of prompts
                they have in common.
            piece: prompt tokens that are read between two rounds of the others; None: 1,024, on a GPU
                4,096 unless the model has windows or recurrent layers.

        Raises:
            RequestError: ``batch`` or ``piece`` below 1.
        """
        chosen, engine = self._engine(batch, cache, None, context, piece)
        return Session(engine, self.texts, chosen.method.name, chosen.method.exact)

    @memory_checked()
    def _engine(
        self, batch: int | None, cache: PromptCache | None, most: int | None, context: int = 0, piece: int | None = None
    ) -> tuple[Recipe, Engine]:
        if cache is not None and not isinstance(cache, PromptCache):
            raise RequestError(f"cache takes a longdraft.PromptCache(), got {cache!r}")
        runner = self.runner()
        slots = default_batch_size(runner.device.type) if batch is None else whole_number("batch", batch, 1)
        chosen = self._settled(runner)
        return chosen, Engine(
            runner,
            chosen.drafter(),
            chosen.verifier(),
            cache,
            self.planner(runner=runner),
            slots=slots if most is None else min(slots, most),
            capacity=whole_number("context", context, 0),
            chunk_size=None if piece is None else whole_number("piece", piece, 1),
        )

    # --- transformers: model.generate(**inputs, custom_generate=speculator) ---

    __signature__ = CustomGenerateSignature(decoding.decode, __init__)

    def __call__(
        self, model: PreTrainedModel, input_ids: torch.Tensor, *, given: GenerateArguments | None = None, **call: Any
    ) -> Any:
        """The decoding loop that ``generate`` calls in place of its own. See :mod:`longdraft.integration`.

        Args:
            given: what ``generate`` would keep to itself, such as a streamer.
            call: as of :func:`longdraft.integration.decoding.decode`.
        """
        given = given or GenerateArguments()
        try:
            runner = self.runner(model, kept=False)
            chosen = self._settled(runner)
            return decoding.decode(runner, chosen, lambda: self.planner(runner=runner), input_ids, given, **call)
        finally:
            if given.streamer is not None:
                given.streamer.end()  # also if this fails: its reader in another thread would wait for ever
