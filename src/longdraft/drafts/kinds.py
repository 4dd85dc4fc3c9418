"""Describes a kind of trained draft; :mod:`longdraft.registry` holds the table of kinds."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from longdraft.drafts.draft import Draft
from longdraft.engine.drafter import Drafter


@dataclass(frozen=True)
class Training:
    """The training of a kind of draft by ``longdraft train``.

    ``settings`` and ``run`` may be "module:name" strings, as importing the training code takes seconds.
    """

    settings: str | type[Any]  # class of the run's settings, a :class:`longdraft.training.config.RunConfig`
    # The training function: (settings, progress, stop) -> reports; see :mod:`longdraft.training.session`.
    run: str | Callable[..., Iterator[Any]]
    summary: str  # help text of the command
    command: str = ""  # name of the command; "": the kind's name

    def load_settings(self) -> type[Any]:
        """Returns the class of the settings."""
        return self.settings if isinstance(self.settings, type) else pkgutil.resolve_name(self.settings)

    def load_run(self) -> Callable[..., Iterator[Any]]:
        """Returns the training function."""
        return pkgutil.resolve_name(self.run) if isinstance(self.run, str) else self.run


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of trained draft. The registry makes a method of the same name from it.

    Attributes:
        name: the kind's name, which drafts have in config.json and by which users choose the method.
        drafter: function that builds the method's drafter from a loaded ``draft`` and keyword options.
        summary: what the method does, in the list of methods.
        paper: the paper's citation, in the list of methods.
        load: reads a draft folder of this kind.
        training: how ``longdraft train`` trains a draft of this kind; None: this kind cannot be trained.
        in_checkpoint: tells if a target's checkpoint (folder or GGUF file) contains a draft of this kind; None: targets
            never contain one.
    """

    name: str
    drafter: Callable[..., Drafter]
    summary: str
    paper: str = ""
    _: KW_ONLY
    load: Callable[[Path | str], Draft[Any]]
    training: Training | None = None
    in_checkpoint: Callable[[Path], bool] | None = None
