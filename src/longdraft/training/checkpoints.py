"""Checkpoints of a run: a folder each, which appears whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate import Accelerator

STATE = "state.json"


def save(accelerator: Accelerator, folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Writes a checkpoint and removes all but the last ``keep``. Called by every process.

    Under FSDP every process writes its shards into the same folder, which they all must see.

    Raises:
        CheckpointError: no space, no permission; earlier checkpoints are kept.
    """
    final = folder / f"step-{step:08d}"
    part = folder / f".{final.name}.part"
    try:
        if accelerator.is_main_process:
            for left in folder.glob(".step-*.part"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            part.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(part))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (part / STATE).write_text(json.dumps(state | {"step": step}), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            part.replace(final)
            for old in steps(folder)[:-keep]:
                shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(f"Could not write the checkpoint {final}: {error}. Earlier ones are kept.") from error
    accelerator.wait_for_everyone()


def steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints there are, ascending."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step-(\d+)", p.name) for p in folder.iterdir() if (p / STATE).exists())
    return sorted(int(m[1]) for m in found if m)


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint and the state that :func:`save` was given; None where there is none.

    Raises:
        CheckpointError: its state cannot be read.
    """
    found = steps(folder)
    if not found:
        return None
    path = folder / f"step-{found[-1]:08d}"
    try:
        return path, json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def restore(accelerator: Accelerator, path: Path) -> None:
    """Reads a checkpoint into what the accelerator has prepared. Called by every process.

    Raises:
        CheckpointError: when it is damaged.
    """
    try:
        accelerator.load_state(str(path))
    except Exception as error:  # safetensors and pickle each have their own
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be read: {error}. Delete it: the run goes on from the one before."
    )
