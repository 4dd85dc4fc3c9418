"""Measurements whose records are plain objects, a unit each: a paper's table, quality of texts, and needles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.bench import machine
from longdraft.bench.experiment import Experiment, Step, Tick
from longdraft.bench.json_lines import JsonLines, signed
from longdraft.bench.results import model_of
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

VERSION = 1
Record = dict[str, Any]
"""``unit``: its name; ``measured``: an object for JSON."""
Measure = Callable[[Tick], Any]


def header(form: str, content: Mapping[str, Any], loaded: LoadedModel, name: str, tokens: Any) -> dict[str, Any]:
    """All that records depend on.

    Args:
        form: the format's name. content: settings. name: the model's. tokens: of the prompts, as JSON can hold them.
    """
    prompts = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    model = {"model": model_of(TargetRunner(loaded.model), name), "prompts": prompts}
    return signed(form, VERSION, {**content, **model, "hardware": machine.hardware(), "versions": machine.versions()})


def experiment(
    units: Mapping[str, tuple[int, Measure]], path: Path | None, header: Mapping[str, Any]
) -> Experiment[str, Record]:
    """The measurement of units, with what a file of records has already.

    Args:
        units: by name, how often each calls its ``tick``, and what measures it.

    Raises:
        ConfigError: the file holds a run with other settings. CheckpointError: it cannot be used.
    """

    def measured(unit: str, missing: Collection[str], tick: Tick) -> Iterator[Record]:
        yield {"unit": unit, "measured": units[unit][1](tick)}

    steps = [Step(unit, (unit,), partial(measured, unit), ticks) for unit, (ticks, _) in units.items()]
    file = None if path is None else JsonLines[Record](path, header, dict)
    return Experiment(steps, lambda record: str(record["unit"]), file)
