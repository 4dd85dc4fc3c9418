"""The catalogue of kinds of trained drafts. The file with the drafter for a kind registers the kind."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from longdraft.drafts import draft_folder, hub
from longdraft.drafts.draft import Draft
from longdraft.engine import method
from longdraft.engine.method import Method
from longdraft.errors import CheckpointError
from longdraft.files import reports_file_errors


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
class Kind(Method):
    """A kind of trained draft, and the method of the same name, whose drafter takes a ``draft``.

    Attributes:
        load: reads a draft folder of this kind.
        training: how ``longdraft train`` trains a draft of this kind; None: this kind cannot be trained.
        in_checkpoint: tells if a target's checkpoint (folder or GGUF file) contains a draft of this kind; None: targets
            never contain one.
    """

    _: KW_ONLY
    load: Callable[[Path | str], Draft[Any]]
    training: Training | None = None
    in_checkpoint: Callable[[Path], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_kind", self.name)


KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Method:
    """Adds a kind to the catalogue, in place of an earlier kind of the same name."""
    KINDS[kind.name] = kind
    return method.register(kind)


@reports_file_errors("The draft in", "Copy it again.")
def kind_of(folder: Path | str) -> Kind:
    """Returns the kind of the draft in a folder or hub repository.
    Raises CheckpointError if there is no draft, or a draft of an unknown kind."""
    folder = hub.local_folder(folder)
    name = draft_folder.detect_kind(folder)
    if name in KINDS:
        return KINDS[name]
    if not name:
        raise CheckpointError(f"{folder} holds no draft that longdraft knows: see docs/drafts.md for the formats.")
    raise CheckpointError(
        f"{folder} holds a draft for {name!r}, which this version of longdraft does not read: get or train one of "
        "a format of docs/drafts.md, such as EAGLE-3. If a file of yours registers this kind, add --load FILE."
    )


importlib.import_module("longdraft.methods")  # last, as it imports the drafters, which register their kinds
