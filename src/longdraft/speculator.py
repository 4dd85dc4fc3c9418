"""Speculator: a method bound to a target. The whole of the public API goes through it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch

from longdraft import integration
from longdraft.drafters.draft import Draft
from longdraft.engine import Engine, Result, eos_rule, stop_string_rule
from longdraft.errors import CapabilityError, PromptError, RequestError
from longdraft.host import support
from longdraft.host.chat import chat_prompt, encode
from longdraft.host.checkpoints import Progress
from longdraft.host.lock import lock_of
from longdraft.host.runner import TargetRunner
from longdraft.kv import offload as offloading
from longdraft.kv.prompt_cache import PromptCache
from longdraft.methods import Method
from longdraft.planning.choice import checked, planned, planner_for
from longdraft.planning.planner import Planner
from longdraft.recipes import Recipe, asked_for, recipe
from longdraft.sequence import Sequence, StopRule
from longdraft.session import Generation, Prompt, Request, Session, batch_for
from longdraft.verify.draws import OwnDraws
from longdraft.verify.sampling import Sampler, Sampling
from longdraft.views.view import dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Speculator:
    """Decodes with a method on a target, exactly as the target alone would.

    Use it directly, or hand it to transformers::

        model, tokenizer = longdraft.load()
        spec = longdraft.Speculator("prompt-lookup", target=model, tokenizer=tokenizer)
        spec.generate("Why is the sky blue?", max_new_tokens=64)
        model.generate(**inputs, custom_generate=spec, max_new_tokens=64)

    Args:
        method: a name of :func:`longdraft.methods`, what :func:`longdraft.compose` made, or a draft folder. Left out:
            ``longspec`` where a draft for the target comes with the package, else ``prompt-lookup``.
        target: the model. May be left out when only ``custom_generate`` is used.
        tokenizer: needed for text prompts, text results and stop strings; token ids work without.
        offload: where the KV cache is kept when the device is not to hold it: ``"host"`` (memory of the host, for a
            GPU), ``"disk"`` (a temporary file, for a CPU) or a folder for that file. Slower, and the same output.
        kv_dtype: what the KV cache is rounded to, ``"bfloat16"`` or ``"int8"`` (a scale for each row), where the model
            computes in float32 on a CPU. Fewer bytes to read and to hold, whatever the method; the text is that of a
            slightly different model. None: nothing is rounded.
        plan: ``"auto"`` sizes trees by what they cost on this machine and by what is accepted, round by round, and
            decodes plainly where that is faster; the first run with a model measures the costs, for up to half a
            minute, and keeps them. ``"fixed"`` grows the method's own trees. Left out: fixed where the options say what
            tree, else what LONGDRAFT_PLAN says, else auto. The output is the same.
        options: the method's own, e.g. ``branches=2`` for prompt-lookup, ``draft=folder`` for longspec.

    Raises:
        UnknownMethodError: no such method.
        UnsupportedModelError: the target has layers that cannot be hosted exactly.
        CheckpointError: the draft cannot be read, or was made for another target; no such folder to offload to.
        CapabilityError: the method needs a draft, and none comes with the package for this target; or the target's
            device cannot offload that way, or its KV cannot be rounded.
    """

    def __init__(
        self,
        method: str | Path | Method | None = None,
        target: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        offload: str | Path | None = None,
        plan: str | None = None,
        kv_dtype: str | None = None,
        **options: Any,
    ) -> None:
        self._named, self.options = asked_for(method, options)  # a wrong option is refused now
        self.offload = offloading.parse(offload)
        self._kv_dtype = None if kv_dtype is None else dtype_of(kv_dtype, "kv_dtype")
        self._plan = checked(plan)
        self.tokenizer = tokenizer
        # Never changed in place, so it can be read without a lock. Whoever holds the second waits for no other lock.
        self._runners: list[TargetRunner] = []
        self._changing = Lock()
        self._recipes: WeakKeyDictionary[TargetRunner, Recipe] = WeakKeyDictionary()
        self._planners: WeakKeyDictionary[TargetRunner, Planner | None] = WeakKeyDictionary()
        if target is not None:
            self._recipe(self.runner(target))  # and so is a draft that does not fit

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

    @property
    def method(self) -> Method:
        """How it decodes: the method that was named, else the one chosen for its (first) target.

        Raises:
            ValueError: no method was named, and which one it will be depends on a target that is not there yet.
        """
        return self._named or self._recipe(self.runner()).method

    def _recipe(self, runner: TargetRunner) -> Recipe:
        """Method and options for a target; found once a target."""
        found = self._recipes.get(runner)
        if found is None:
            with runner.lock:
                found = self._recipes.get(runner)
                if found is None:
                    # Lookups cost nothing where a planner weighs them; fixed trees are the papers'.
                    lookup = planned(self._plan, self.options)
                    self._recipes[runner] = found = recipe(self._named, self.options, runner, lookup)
        return found

    def planner(self, progress: Progress | None = None) -> Planner | None:
        """What plans the rounds; None with fixed trees. The first call may measure what verifications cost.

        Args:
            progress: called with a line of text before anything is measured.
        """
        return self._planner(self.runner(), progress)

    def _planner(self, runner: TargetRunner, progress: Progress | None = None) -> Planner | None:
        with runner.lock:  # also while it is measured what verifications cost: others would be measured with them
            if runner not in self._planners:
                chosen = self._recipe(runner)
                wanted = planned(self._plan, self.options) and self.offload is None and chosen.can_be_planned
                self._planners[runner] = planner_for(runner, progress) if wanted else None
            return self._planners[runner]

    def runner(self, target: PreTrainedModel | None = None) -> TargetRunner:
        """The hosted target; made once a model."""
        if target is None:
            if not self._runners:
                raise ValueError("This Speculator has no target: Speculator(name, target=model).")
            target = self._runners[0].model
        found = self._known(target)
        if found is None:
            support.check_model(target)
            with lock_of(target):
                found = self._known(target)
                if found is None:
                    found = TargetRunner(target, self.offload, self._kv_dtype)
                    self._keep(found)
        return found

    def _known(self, target: PreTrainedModel) -> TargetRunner | None:
        """The runner of a model; none of one that was moved or cast since."""
        return next((r for r in self._runners if r.model is target and not r.outdated), None)

    def _keep(self, runner: TargetRunner) -> None:
        """In the place of the model's last one."""
        with self._changing:
            runners = list(self._runners)
            place = next((i for i, r in enumerate(runners) if r.model is runner.model), len(runners))
            runners[place : place + 1] = [runner]
            self._runners = runners

    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states its drafter reads; see :class:`~longdraft.kv.prompt_cache.PromptCache`."""
        runner = self.runner()
        return self._recipe(runner).drafter().feature_layers(runner)

    @property
    def draws_anew(self) -> bool:
        """Whether text that it samples is not plain decoding's with the same seed: with ``acceptance="residual"``."""
        return self.options.get("acceptance") == "residual"

    @property
    def exact(self) -> bool:
        """Whether what it emits is what its (first) target alone would."""
        return self.method.exact and not self.runner().rounds

    def draft(self) -> Draft[Any] | None:
        """The draft that it decodes its target with; None for a method that needs none."""
        found: Draft[Any] | None = self._recipe(self.runner()).options.get("draft")
        return found

    def decode(self, tokens: list[int]) -> str:
        """Token ids to text, special tokens left out."""
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def encode(self, prompt: Prompt, chat: bool = True) -> list[int]:
        """Token ids of a prompt: as they are; or text, as the user's turn of a chat if the model is instructed."""
        if not isinstance(prompt, str):
            return [int(t) for t in prompt]
        if self.tokenizer is None:
            raise CapabilityError("A text prompt needs a tokenizer: Speculator(..., tokenizer=tokenizer).")
        return chat_prompt(self.tokenizer, prompt) if chat else encode(self.tokenizer, prompt)

    def generate(self, prompts: Prompt | Request | SequenceOf[Prompt | Request], **settings: Any) -> list[Result]:
        """Decodes to the end: :meth:`stream` and its results."""
        return self.stream(prompts, **settings).results()

    def stream(
        self,
        prompts: Prompt | Request | SequenceOf[Prompt | Request],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int | None = None,
        eos_token_ids: SequenceOf[int] | None = None,
        stop: SequenceOf[str] = (),
        chat: bool = True,
        batch: int | None = None,
        cache: PromptCache | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Starts decoding prompts; nothing is computed before the first step is asked for.

        Args:
            prompts: one prompt or several, each a text, a list of token ids, or a :class:`~longdraft.Request` with
                settings of its own; lengths may differ.
            max_new_tokens: emitted at most, a prompt.
            sampling: temperature and filters; None is greedy.
            seed: the same seed gives the same text, whatever the method (but see :attr:`draws_anew`); prompt i samples
                with seed + i.
            eos_token_ids: where to end; None takes the model's own, an empty list none.
            stop: strings that end the output; they are cut from the text.
            chat: wrap text prompts in the tokenizer's chat template, where it has one.
            batch: prompts decoded at a time; when one has ended, the next takes its place. None: 8, on a GPU 32. Fewer
                where the memory does not hold the KV of so many, unless there is a ``cache``.
            cache: KV of earlier runs to start from and to keep.
            cancelled: asked between forwards; True ends the run.

        Raises:
            RequestError: ``max_new_tokens`` or ``batch`` below 1.
            PromptError: no prompt, an empty one, or a token id that the model does not have.
            ContextError: a prompt and its new tokens exceed the model's context.
            MemoryBudgetError: when asked for the first step, before any work.
        """
        alone = isinstance(prompts, (str, Request)) or (len(prompts) > 0 and isinstance(prompts[0], int))
        each = cast("list[Prompt | Request]", [prompts] if alone else list(prompts))  # type: ignore[arg-type]
        if not each:
            raise PromptError("There is no prompt. Give a text or token ids, or a list with at least one of them.")
        requests = [
            p
            if isinstance(p, Request)
            else Request(
                p, max_new_tokens, sampling, None if seed is None else seed + i, (), eos_token_ids, tuple(stop), chat
            )
            for i, p in enumerate(each)
        ]
        chosen, engine = self._engine(batch, cache, len(requests))
        return Generation(self, chosen.method, engine, requests, cancelled)

    def session(self, batch: int | None = None, *, context: int = 0, cache: PromptCache | None = None) -> Session:
        """A session, to which requests are added while others are decoded.

        Args:
            batch: requests decoded at a time; None: 8, on a GPU 32. Fewer where the memory does not hold so many.
            context: tokens of the longest text, prompt and output, that memory is taken for at once; a longer one
                waits until nobody else is decoded, and then has more taken.
            cache: KV of earlier runs to start from and to keep. Without, requests share what whole pieces of 1,024
                prompt tokens they have in common.

        Raises:
            RequestError: ``batch`` below 1.
        """
        chosen, engine = self._engine(batch, cache, None, context)
        return Session(self, chosen.method, engine)

    def _engine(
        self, batch: int | None, cache: PromptCache | None, most: int | None, context: int = 0
    ) -> tuple[Recipe, Engine]:
        if batch is not None and batch < 1:
            raise RequestError(f"batch must be at least 1, got {batch}")
        runner = self.runner()
        slots = batch or batch_for(runner.device.type)
        chosen = self._recipe(runner)
        return chosen, Engine(
            runner,
            chosen.drafter(),
            chosen.schedule(),
            cache,
            self._planner(runner),
            slots=slots if most is None else min(slots, most),
            capacity=context,
        )

    def sequence(self, index: int, request: Request, max_nodes: int) -> Sequence:
        """A request as the engine decodes it; for errors, see :meth:`Session.add`."""
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        runner = self.runner()
        ids = self.encode(request.prompt, request.chat)
        support.check_tokens(runner.model, ids)
        support.check_length(runner.model, len(ids) + request.max_new_tokens, max_nodes)
        sampling = request.sampling or Sampling()
        generator = None
        if not sampling.greedy:
            generator = torch.Generator(runner.device)
            generator.manual_seed(request.seed) if request.seed is not None else generator.seed()
        eos = self._model_eos(runner) if request.eos_token_ids is None else frozenset(request.eos_token_ids)
        rules: list[StopRule] = [eos_rule(eos)] if eos else []
        if request.stop:
            if self.tokenizer is None:
                raise CapabilityError("Stop strings need a tokenizer: Speculator(..., tokenizer=tokenizer).")
            rules.append(stop_string_rule(tuple(request.stop), self.decode))
        return Sequence(
            index,
            ids,
            request.max_new_tokens,
            runner.device,
            greedy=sampling.greedy,
            sampler=Sampler(sampling.greedy, sampling.processors(request.processors), OwnDraws(generator)),
            rules=rules,
        )

    def _model_eos(self, runner: TargetRunner) -> frozenset[int]:
        """The generation config's EOS ids, and the tokenizer's (a chat model's end of turn)."""
        found = runner.eos_token_ids
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            found |= {int(self.tokenizer.eos_token_id)}
        return found

    # --- transformers: model.generate(**inputs, custom_generate=speculator) ---

    __signature__ = integration.HandedOver()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        given: integration.Given | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding loop that ``generate`` calls in place of its own. See :mod:`longdraft.integration`.

        Args:
            tokenizer: named so that ``generate`` finds it for its stop strings.
            given: what ``generate`` would keep to itself, such as a streamer.
        """
        given = given or integration.Given()
        with integration.streaming(given.streamer):
            runner = self.runner(model)
            chosen = self._recipe(runner)
            return integration.decode(
                runner,
                chosen.drafter(),
                chosen.schedule(),
                lambda: self._planner(runner),
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                given,
                model_kwargs,
            )
