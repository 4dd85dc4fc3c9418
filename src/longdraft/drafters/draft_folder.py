"""Draft folders: ``config.json`` and ``model.safetensors``, written and read, and the check of whose they are."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.errors import CheckpointError

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"

logger = logging.getLogger("longdraft")


@dataclass(frozen=True)
class DraftFolder:
    """What a draft folder holds.

    Attributes:
        kind: the drafter that reads it, e.g. "longspec".
        config: sizes and settings, JSON.
        tensors: name -> tensor, on the CPU.
        target: what the draft was made for, as :func:`longdraft.target.parts.describe` gives it; empty if unknown.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    target: dict[str, Any] = field(default_factory=dict)


def save(folder: Path | str, draft: DraftFolder) -> None:
    """Writes a draft folder; each file appears whole or not at all.

    Raises:
        CheckpointError: when it cannot be written (no space, no permission).
    """
    folder = Path(folder)
    config = {"longdraft_format": FORMAT, "drafter": draft.kind, "target": draft.target} | draft.config
    tensors = {name: t.detach().cpu().contiguous() for name, t in draft.tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{WEIGHTS}.part"
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(folder / WEIGHTS)
        part = folder / f".{CONFIG}.part"
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        part.replace(folder / CONFIG)
    except (OSError, SafetensorError) as error:
        for name in (WEIGHTS, CONFIG):
            (folder / f".{name}.part").unlink(missing_ok=True)
        raise CheckpointError(f"Could not write the draft to {folder}: {error}") from error


def is_draft_folder(path: Path | str) -> bool:
    """Whether a folder with a config.json is there."""
    return (Path(path) / CONFIG).is_file()


def kind(folder: Path | str) -> str:
    """Which drafter reads a folder; empty where its config.json does not say, as in published LongSpec drafts.

    Raises:
        CheckpointError: no such folder, no or broken config.json.
    """
    return str(_config(Path(folder)).get("drafter", ""))


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"There is no draft folder {folder}.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG}: is it a draft folder?") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}. Copy the draft again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} holds no JSON object: is it a draft folder?")
    return config


def load(folder: Path | str) -> DraftFolder:
    """Reads a draft folder.

    Raises:
        CheckpointError: no such folder, no or broken config.json, missing or truncated weights.
    """
    folder = Path(folder)
    config = _config(folder)
    path = folder / WEIGHTS
    if not path.exists():
        raise CheckpointError(f"{folder} has no {WEIGHTS}: copy the draft again.")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {error}. It is truncated or damaged: copy the "
            "draft again."
        ) from error
    return DraftFolder(str(config.pop("drafter", "")), config, tensors, dict(config.pop("target", None) or {}))


def check_target(draft: DraftFolder, target: Mapping[str, Any], folder: Path | str) -> None:
    """Refuses a draft that was made for another target.

    A target of the same shape and vocabulary with other weights (another fine-tune, another quantisation) is
    allowed: output stays exact whatever a draft proposes. It is logged, for acceptance may suffer.

    Raises:
        CheckpointError: saying what differs.
    """
    differing = [
        f"{key} {draft.target[key]} (this target: {target.get(key)})"
        for key in draft.target
        if key != "weights" and draft.target[key] != target.get(key)
    ]
    if differing:
        raise CheckpointError(
            f"The draft in {folder} was made for another target: {', '.join(differing)}. "
            "Load the target it was trained with, or train one for this target: longdraft train."
        )
    if "weights" in draft.target and draft.target["weights"] != target.get("weights"):
        logger.warning(
            "The draft in %s was trained with other weights of this architecture: output stays exact, acceptance may "
            "be lower.",
            folder,
        )
