"""Kinds of trained drafts. A kind registers itself in the file of its drafter; everything else looks it up here."""

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
from longdraft.files import reads


@dataclass(frozen=True)
class Training:
    """Training of a kind of draft, for ``longdraft train``.

    Training is an extra that takes seconds to load, so both parts may be given as "module:name".

    Attributes:
        settings: class of the run's settings, a :class:`longdraft.training.config.RunConfig`.
        run: (settings, progress, stop) -> a report a step; see :mod:`longdraft.training.session`.
        summary: help of the command.
        command: name of the command; empty: the kind's name.
    """

    settings: str | type[Any]
    run: str | Callable[..., Iterator[Any]]
    summary: str
    command: str = ""

    def load_settings(self) -> type[Any]:
        """The class of the settings."""
        return self.settings if isinstance(self.settings, type) else pkgutil.resolve_name(self.settings)

    def load_run(self) -> Callable[..., Iterator[Any]]:
        """The training function."""
        return pkgutil.resolve_name(self.run) if isinstance(self.run, str) else self.run


@dataclass(frozen=True, eq=False)
class Kind(Method):
    """A kind of trained draft: a method whose name draft folders carry, and whose drafter takes a ``draft``.

    Attributes:
        load: reads a folder of it.
        training: how one is trained; None if ``longdraft train`` cannot.
        in_checkpoint: whether a target's own checkpoint, a folder or a GGUF file, holds such a draft.
    """

    _: KW_ONLY
    load: Callable[[Path | str], Draft[Any]]
    training: Training | None = None
    in_checkpoint: Callable[[Path], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_kind", self.name)


KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Method:
    """Adds a kind to the catalogue. One of the same name is replaced."""
    KINDS[kind.name] = kind
    return method.register(kind)


@reads("The draft in", "Copy it again.")
def kind_of(folder: Path | str) -> Kind:
    """The kind of draft that a folder holds, or a repository on the hub.

    Raises:
        CheckpointError: not a draft folder, or one of a kind that is not known.
    """
    folder = hub.local_folder(folder)
    name = draft_folder.detect_kind(folder)
    if name in KINDS:
        return KINDS[name]
    if not name:
        raise CheckpointError(f"{folder} holds no draft that longdraft knows: see docs/drafts.md for the formats.")
    raise CheckpointError(
        f"{folder} holds a draft for {name!r}, which this version of longdraft does not read: get or train one of "
        "a format of docs/drafts.md, such as EAGLE-3. Where a file of yours registers it, run that first (--load FILE)."
    )


importlib.import_module("longdraft.methods")  # last: it imports the drafters, which register their kinds
