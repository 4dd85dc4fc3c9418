"""Checkpoints of a run: a folder for each, which appears whole or not at all."""

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
    """Writes a checkpoint and removes all but the last ``keep``. Called by every process; all must see the same disk.

    Raises CheckpointError if it cannot be written; earlier checkpoints are kept.
    """
    final = folder / f"step-{step:08d}"
    part = folder / f".{final.name}.part"
    try:
        if accelerator.is_main_process:
            for unfinished in folder.glob(".step-*.part"):  # left by a killed run
                shutil.rmtree(unfinished, ignore_errors=True)
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
    """Steps of the whole checkpoints in a folder, ascending."""
    names = [path.parent.name for path in folder.glob(f"step-*/{STATE}")]
    return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint and the state that :func:`save` was given; None if there is none."""
    saved = steps(folder)
    if not saved:
        return None
    path = folder / f"step-{saved[-1]:08d}"
    try:
        return path, json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def restore(accelerator: Accelerator, path: Path) -> None:
    """Reads a checkpoint into the accelerator's modules and optimizers. Called by every process."""
    try:
        accelerator.load_state(str(path))
    except Exception as error:  # safetensors and pickle have errors of their own
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be read: {error}. Delete it: the run then continues from the one before."
    )
