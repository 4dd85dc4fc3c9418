"""What the server's verb makes of its options: a service, in this process or in a replica elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.cli import console, options
from longdraft.errors import MemoryBudgetError, RequestError
from longdraft.memory import sizes
from longdraft.memory.prompt_cache import PromptCache
from longdraft.methods import method_named
from longdraft.model.checkpoints import Progress
from longdraft.model.runner import TargetRunner
from longdraft.speculator import Speculator

if TYPE_CHECKING:
    from longdraft.serve.service import Service
    from longdraft.serve.settings import Settings


@dataclass(frozen=True)
class Serving:
    """Attributes:
    named: methods that were asked for; none: the one that suits the model, and ar.
    own: options of the first method. shared: of all speculators.
    files: the user's own Python files, which a replica runs first.
    settings: the server's; its name, methods and context are found with the model where they are not asked for.
    beside: services that share the memory of a machine.
    """

    loading: options.ModelOptions
    named: tuple[str, ...]
    own: dict[str, Any]
    shared: dict[str, Any]
    files: tuple[Path, ...]
    context: int | None
    settings: Settings
    beside: int = 1

    def check(self) -> None:
        """Refuses what can be refused before a model is loaded. Raises errors of Speculator's."""
        for each in self.named or (None,):
            Speculator(each, **self.shared, **(self.own if each is None or each == self.named[0] else {}))

    def among(self, replicas: int, threads: int) -> Serving:
        """The same as one of so many replicas, which share a machine where Ray is not told of a cluster."""
        beside = 1 if os.environ.get("RAY_ADDRESS") else replicas
        return replace(self, beside=beside, loading=replace(self.loading, threads=self.loading.threads or threads))

    def elsewhere(self) -> Service:
        """The service in a process that has seen no command line."""
        options.load_file(list(self.files))
        return self.service(lambda _: None)

    def service(self, progress: Progress, told: Callable[[str], None] = console.note) -> Service:
        """Loads the model.

        Raises:
            RequestError, MemoryBudgetError: a context that the model, or the memory, does not hold.
        """
        from longdraft.serve.prefixes import DiskPrefixes
        from longdraft.serve.service import Service

        loaded, asked, settings = self.loading.load(progress), self.context, self.settings

        def speculator(chosen: str | None) -> Speculator:
            made = dict(self.own) if chosen is None or chosen in self.named[:1] else {}
            if settings.earlier and (chosen is None or "earlier" in method_named(chosen).options):
                lookup = {} if chosen in (None, "suffix", "prompt-lookup") else {"lookup": True}
                made |= {"earlier": settings.earlier} | lookup
            return Speculator(chosen, loaded.model, loaded.tokenizer, **self.shared, **made)

        first = speculator(self.named[0] if self.named else None)
        first.planner(progress)
        methods = self.named or tuple(dict.fromkeys((first.method.name, "ar")))
        limit, slots = first.runner().context_length, settings.slots
        if asked is not None and asked > limit:
            raise RequestError(f"--context {asked}: the model's context holds {limit} (--rope-factor stretches it).")
        holds = _room(first.runner(), slots * len(methods) * self.beside)
        if asked is not None and asked > holds:
            raise MemoryBudgetError(
                f"--context {asked}: the free memory holds {holds} tokens for each of {slots} slots."
            )
        if asked is None and limit > holds:
            told(f"The memory that is free holds texts of {holds:,} of the model's {limit:,} tokens in {slots} slots.")
        name = settings.name or Path(self.loading.model or "SmolLM2-135M-Instruct").name
        settings = replace(settings, name=name, methods=methods, context=asked or min(limit, holds))

        def cache(spec: Speculator) -> PromptCache:
            if settings.snapshots is None or spec is not first:
                return PromptCache(spec.feature_layers())
            fingerprint = spec.runner().fingerprint
            return DiskPrefixes(
                settings.snapshots, fingerprint, settings.snapshot_bytes, feature_layers=spec.feature_layers()
            )

        made = Service(
            settings, lambda chosen: first if chosen == methods[0] else speculator(chosen), loaded.tokenizer, cache
        )
        made.speculator(methods[0])
        return made


def _room(runner: TargetRunner, slots: int) -> int:
    """Tokens of context for each of so many slots that the memory holds, with some of it left for all else."""
    free = sizes.available_bytes(runner.device)
    each = runner.kv_shape.bytes_per_token * runner.kv_dtype.itemsize // runner.kv_shape.dtype.itemsize
    return 1 << 40 if free is None or runner.offload is not None else int(0.8 * free / (each * slots))
