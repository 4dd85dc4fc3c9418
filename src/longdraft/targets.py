"""The targets of a speculator: for each model its runner, recipe and planner, made at first use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from longdraft.engine.planner import Planner, make_planner
from longdraft.errors import RequestError, UnsupportedModelError, values_checked
from longdraft.method import Method
from longdraft.model import support
from longdraft.model.execution_model import model_lock
from longdraft.model.load.checkpoints import Progress
from longdraft.model.probes.user_code import reason_against_drafts
from longdraft.model.runner import TargetRunner
from longdraft.planning.plans import PlanChoice, is_planned
from longdraft.recipes import Recipe, recipe_for
from longdraft.registry import METHODS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("longdraft")


@dataclass
class Target:
    """A target's runner, and what was made for it at first use. ``planner_decided`` tells whether ``planner`` is final:
    None then means that trees are fixed."""

    runner: TargetRunner
    recipe: Recipe | None = None
    planner: Planner | None = None
    planner_decided: bool = False


class Targets:
    """The targets of a speculator, in the order of their first use.

    Args:
        method: the method that the user named; None: a method is chosen for each target.
        options: the method's options.
        plan: the speculator's option ``plan``.
        make_runner: makes the runner of a model.
    """

    def __init__(
        self,
        method: Method | None,
        options: Mapping[str, Any],
        plan: PlanChoice,
        make_runner: Callable[[PreTrainedModel], TargetRunner],
    ) -> None:
        self._method, self._options, self._plan, self._make_runner = method, options, plan, make_runner
        # The dictionary is replaced, never changed, so reads need no lock. Code with the lock acquires no other lock.
        # Keys are weak, so models from transformers' ``generate`` are not kept alive.
        self._by_model: WeakKeyDictionary[PreTrainedModel, Target] = WeakKeyDictionary()
        self._lock = Lock()

    @property
    def all(self) -> list[Target]:
        """All targets, the first one first."""
        return list(self._by_model.values())

    def is_planned(self, exact: bool) -> bool:
        """Returns whether the user wants a method to be planned. ``exact``: the method is exact."""
        return is_planned(self._plan, self._options, exact)

    def runner(self, model: PreTrainedModel | None = None, keep_alive: bool = True) -> TargetRunner:
        """Returns the runner of a model, by default of the first target. A model that was moved, cast or given other
        layers gets a new runner. With ``keep_alive``, the runner holds a reference to ``model`` from now on."""
        if model is None and not self._by_model:
            raise RequestError("This Speculator has no target: Speculator(name, target=model).")
        target_model = next(self._by_model.keys()) if model is None else model
        support.check_model(target_model)
        if (runner := self._current_runner(target_model)) is None:
            with model_lock(target_model):
                if (runner := self._current_runner(target_model)) is None:
                    runner, old = self._make_runner(target_model), self._by_model.get(target_model)
                    runner.held_model = None if old is None else old.runner.held_model
                    with self._lock:
                        self._by_model = self._by_model | {target_model: Target(runner)}  # keeps the order of targets
        runner.held_model = model if keep_alive and model is not None else runner.held_model
        return runner

    def _current_runner(self, model: PreTrainedModel) -> TargetRunner | None:
        target = self._by_model.get(model)
        return None if target is None or target.runner.is_stale else target.runner

    def _target(self, runner: TargetRunner | None) -> Target:
        """Returns the entry of a target, by default of the first. A replaced runner gets an entry of its own."""
        runner = self.runner() if runner is None else runner
        target = self._by_model.get(runner.model)
        return target if target is not None and target.runner is runner else Target(runner)

    def recipe(self, runner: TargetRunner | None = None) -> Recipe:
        """Returns the method and options for a target, by default the first. They are chosen once for each target."""
        target = self._target(runner)
        if target.recipe is None:
            with target.runner.lock:
                # Lookups cost nothing if a planner limits the trees. Without a planner, drafts are those of the papers.
                lookup = self.is_planned(self._method is None or self._method.exact)
                with values_checked(), torch.device("cpu"):  # whatever the user's default device is
                    target.recipe = target.recipe or recipe_for(self._method, self._options, target.runner, lookup)
        return target.recipe

    def usable_recipe(self, runner: TargetRunner) -> Recipe:
        """Returns the recipe for a target; plain decoding if the model's hooks rule out drafts that longdraft chose.

        Raises:
            UnsupportedModelError: hooks rule out drafts, and the user named a method that drafts.
        """
        recipe = self.recipe(runner)
        if not recipe.is_plannable or (reason := reason_against_drafts(runner)) is None:
            return recipe
        if self._method is not None:
            raise UnsupportedModelError(reason)
        logger.warning("Decoding plainly: %s", reason)
        return recipe_for(METHODS["ar"], {}, runner)

    def planner(self, progress: Progress | None = None, runner: TargetRunner | None = None) -> Planner | None:
        """Returns the planner of a target, by default of the first; None if trees are fixed. The first call may measure
        verification costs; before that, ``progress`` gets a line of text."""
        target = self._target(runner)
        with target.runner.lock:  # other forwards would disturb the measurement
            if not target.planner_decided:
                recipe, tp_rank = self.recipe(target.runner), target.runner.tp_rank
                if tp_rank is not None:
                    tp_rank.check_plan(self._plan)
                planned = self.is_planned(recipe.method.exact) and recipe.is_plannable
                if planned and target.runner.offload is None and tp_rank is None:
                    target.planner = make_planner(self._plan, target.runner, progress)
                target.planner_decided = True
            return target.planner
