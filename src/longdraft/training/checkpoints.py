"""Checkpoints of a run: a folder for each, which appears whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import CheckpointError
from longdraft.files import read_json, reads

if TYPE_CHECKING:
    from accelerate import Accelerator

STATE = "state.json"
_readable = reads("The checkpoint", "Delete it: the run then continues from the one before.")


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
    return path, _state(path)


@_readable
def _state(path: Path) -> dict[str, Any]:
    state = read_json(path / STATE)
    if not {"step", "best"} <= state.keys() or not isinstance(state.get("config", {}), dict):
        raise ValueError(f"its {STATE} lacks what a run goes on from")
    return state


@_readable
def restore(path: Path, accelerator: Accelerator) -> None:
    """Reads a checkpoint into the accelerator's modules and optimizers. Called by every process."""
    accelerator.load_state(str(path))
