"""Result files of benchmarks/gpu.py, one for each stage, and the process that writes them unit by unit.

A unit is a measurement with a name and a few rows. The file is rewritten before and after each unit. However
the process ends, earlier results stay and the unit under way is known. A stage that is started again keeps the units
that have rows, unless options, GPU or versions have changed since. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMAT = 2
LOST = 70  # exit code of a process whose GPU answers no more
BEGIN_NOTHING_AFTER = 0.85  # of a stage's time: what is under way has the rest to end

Rows = list[dict[str, Any]]
Result = dict[str, Any]


class Skipped(Exception):
    """A measurement is impossible here. The message says why and what to do about it."""


class DeviceLost(Exception):
    """The GPU refuses all further work of this process after an error."""


def file_of(out: Path, stage: str) -> Path:
    """A stage's result file."""
    return out / f"{stage}.json"


def read(file: Path) -> Result | None:
    """A stage's result; None where there is none. A damaged file is put aside, as NAME.damaged, and counts as none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] == FORMAT and isinstance(found["units"], dict) and isinstance(found["header"], dict):
            return dict(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        pass
    print(f"{file} is damaged, or of another version: put aside as {file.name}.damaged", file=sys.stderr)
    file.replace(file.with_name(file.name + ".damaged"))
    return None


def write(file: Path, result: Result) -> None:
    """Writes under a temporary name and renames, so that nobody reads half a file."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def finished(result: Result | None, asked: dict[str, Any]) -> bool:
    """True if nothing is left to measure. A unit that hung is not tried a second time."""
    if result is None or result["header"].get("asked") != asked or result["state"] != "ended" or result["left_out"]:
        return False
    failed = [unit for unit in result["units"].values() if "failed" in unit]
    return result["failed"] is None and all(unit.get("hung") for unit in failed)


def note_start_failed(file: Path, header: dict[str, Any], why: str) -> None:
    """Notes that a stage's process ended before it began; what an earlier one measured stays."""
    found = read(file) or _empty(file.stem, header)
    write(file, found | {"state": "ended", "under_way": None, "failed": why})


def note_end(file: Path, why: str, hung: bool, out_of_time: bool) -> bool:
    """Notes in a stage's file that its process was ended, or died.

    Returns:
        Whether it is worth going on with another process: the unit that was under way is to blame, or the GPU is lost.
    """
    found = read(file)
    if found is None:
        return False
    unit = found["under_way"]
    found |= {"under_way": None, "state": "ended"}
    if out_of_time:
        found["left_out"].append(f"{unit or 'the rest'} ({why})")
    elif unit is not None:
        found["units"][unit] = {"failed": why, "hung": hung}
    else:
        found["failed"] = why
    write(file, found)
    return unit is not None and not out_of_time


class Stage:
    """Records the units of one stage in its result file.

    Args:
        header: device, versions and options that the figures depend on.
        seconds: time that the stage has.
        again: also measure units again that failed before.
        healthy: returns True if the device still works after an error.
    """

    def __init__(
        self,
        file: Path,
        header: dict[str, Any],
        seconds: float,
        again: bool = True,
        healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self.file, self.name, self.out = file, file.stem, file.parent
        self._started, self._seconds, self._healthy = time.monotonic(), seconds, healthy
        units, spent = {}, 0.0
        if (before := read(file)) is not None and _same(before["header"], header):
            units, spent = before["units"], before["seconds"]
            if again:
                units = {n: unit for n, unit in units.items() if "rows" in unit or unit.get("hung")}
        self._spent = spent
        self.result: Result = _empty(self.name, header) | {"units": units}
        self._write()

    @property
    def seconds_left(self) -> float:
        return self._seconds - (time.monotonic() - self._started)

    @property
    def in_time(self) -> bool:
        """True if another unit may begin."""
        return self.seconds_left > (1 - BEGIN_NOTHING_AFTER) * self._seconds

    def measure(self, unit: str, work: Callable[[], Rows]) -> None:
        """Measures a unit unless it was measured before or time is short; records its rows or its error.

        Raises:
            DeviceLost: nothing further can be measured by this process.
        """
        if unit in self.result["units"]:
            return
        if not self.in_time:
            self.result["left_out"].append(unit)
            return
        self.say(unit)
        started = time.monotonic()
        self.result["under_way"] = unit
        self._write()
        found: dict[str, Any]
        try:
            found = {"rows": work()}
        except Skipped as reason:
            found = {"skipped": str(reason)}
        except Exception as error:  # one that breaks must not cost the figures of the others
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
        found |= {"seconds": round(time.monotonic() - started, 2), "commit": self.result["header"].get("commit")}
        self.result["units"][unit] = found
        self.result["under_way"] = None
        self._write()
        if "failed" in found and not self._healthy():
            raise DeviceLost(unit)

    def end(self, failed: str | None = None, skipped: str | None = None) -> None:
        self.result |= {"state": "ended", "failed": failed, "skipped": skipped}
        self._write()

    def say(self, line: str) -> None:
        """Prints a line, and shows the watching process that this stage is alive."""
        self.file.touch()
        print(f"  {self.name}: {line}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        self.result["seconds"] = round(self._spent + time.monotonic() - self._started, 1)
        write(self.file, self.result)


def _empty(stage: str, header: dict[str, Any]) -> Result:
    return {
        "format": FORMAT, "stage": stage, "state": "running", "header": header, "seconds": 0.0,
        "under_way": None, "failed": None, "skipped": None, "left_out": [], "units": {},
    }  # fmt: skip


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(before.get(key) == now.get(key) for key in ("asked", "device", "versions"))


def failed_units(out: Path, stage: str) -> dict[str, str]:
    """The failed units of another stage: name -> reason."""
    found = read(file_of(out, stage))
    return {} if found is None else {n: unit["failed"] for n, unit in found["units"].items() if "failed" in unit}


def run_stage(part: Any, name: str, options: argparse.Namespace, seconds: float, again: bool) -> None:
    """Runs a stage in its own process, which leads a process group that ends together with its parent.

    Args:
        part: the stage, with ``work``, ``header`` and ``healthy`` as "module:function".
    """
    with contextlib.suppress(OSError):  # a new process group already
        os.setsid()
    threading.Thread(target=_follow_parent, daemon=True).start()
    if sys.platform == "linux":  # where Python hangs too: PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    work, header, healthy = (_function(word) for word in (part.work, part.header, part.healthy))
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    told = header(options) | {"asked": part.asked(options), "date": when, "command": options.command}
    stage = Stage(file_of(options.out, name), told, seconds, again, lambda: bool(healthy(options)))
    try:
        work(stage, options)
        stage.end()
    except Skipped as reason:
        stage.end(skipped=str(reason))
    except DeviceLost as unit:
        stage.say(f"the GPU answers no more after {unit}")
        os._exit(LOST)  # an orderly end would wait for the GPU
    except Exception as error:  # named in the summary; the other stages go on
        traceback.print_exc()
        stage.end(failed=f"{type(error).__name__}: {error}")


def _follow_parent() -> None:
    """Ends this process group with the process that started it: a stage left alone would keep the GPU."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


def _function(word: str) -> Callable[..., Any]:
    module, _, name = word.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
