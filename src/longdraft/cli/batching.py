"""What the batch's verb makes of its options: an engine, in this process or in an actor elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.batch.local import Local
from longdraft.batch.rows import Defaults
from longdraft.cli import options
from longdraft.engine.session import batch_for
from longdraft.model.checkpoints import Progress
from longdraft.speculator import Speculator


@dataclass(frozen=True)
class Batching:
    """Attributes:
    given: arguments of Speculator. files: the user's own Python files, which an actor runs first.
    slots: rows decoded at a time; None: what suits the device. context: tokens that memory is taken for at once.
    """

    loading: options.ModelOptions
    method: str | None
    given: dict[str, Any]
    files: tuple[Path, ...]
    defaults: Defaults
    slots: int | None
    context: int

    def elsewhere(self) -> Local:
        """The engine in a process that has seen no command line."""
        options.load_file(list(self.files))
        return self.decoder(lambda _: None)

    def decoder(self, progress: Progress) -> Local:
        """Loads the model."""
        loaded = self.loading.load(progress)
        with options.settings_checked():
            spec = Speculator(self.method, loaded.model, loaded.tokenizer, **self.given)
        return Local(spec, self.defaults, self.slots or batch_for(spec.runner().device.type), self.context)
