"""Peers that decode a GGUF file's own weights, one prompt at a time: what they have in common."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from pathlib import Path

from longdraft.bench.contenders import Job, Run
from longdraft.errors import CapabilityError
from longdraft.model.checkpoints import check_gguf
from longdraft.model.embedded import packaged_file


def check(package: str, missing: str, file: Path | None) -> None:
    """Refuses what cannot run, before anything is loaded.

    Args:
        package: that it needs. missing: what to say where that is not there.

    Raises:
        CapabilityError: it is not installed.
        CheckpointError: no such file, or not a GGUF file.
    """
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a specification, as a test puts one in
        found = True
    if not found:
        raise CapabilityError(missing)
    check_gguf(file or packaged_file())


class GGUFPeer(ABC):
    """A contender on a GGUF file.

    Args:
        file: None: that of the embedded model.
    """

    name = ""
    note = ""

    def __init__(self, file: Path | None) -> None:
        self.file = file or packaged_file()
        self.draft: Path | None = self.file

    def check_tokens(self, own: int, wanted: int) -> None:
        """Raises CapabilityError for a file with another number of tokens than the target has."""
        if own != wanted:
            raise CapabilityError(
                f"{self.file} has {own} tokens and the model {wanted}: name a GGUF file of the same model with --gguf."
            )

    def comparable(self, greedy: bool, batch: int) -> bool:
        return False  # its weights and what it computes with are rounded

    def cold(self, job: Job) -> Run:
        self.release()
        return self.warm(job)

    @abstractmethod
    def warm(self, job: Job) -> Run: ...

    @abstractmethod
    def release(self) -> None: ...
