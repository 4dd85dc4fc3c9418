"""One training run on a CPU, with the CPU seconds of its parts and the memory of its process.

    python benchmarks/training_parts.py longspec --config configs/longspec/1-short.yaml data=text.jsonl [key=value...]

It trains as `longdraft train` does; a run that was stopped goes on. CPU seconds are those of all threads together, so
other work on the machine hardly counts. Each step's are kept in `parts.jsonl` in the run's folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from longdraft.drafts.kinds import KINDS
from longdraft.training.features import FeatureReader
from longdraft.training.settings import read_config
from longdraft.training.trainer import Trainer

spent: Counter[str] = Counter()  # in this step: CPU seconds of each part, and tokens that the target read


def timed(owner: Any, name: str, part: str) -> None:
    """Adds the CPU seconds in a method to those of a part."""
    method: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        started = time.process_time()
        out = method(*arguments, **named)
        spent[part] += time.process_time() - started
        spent["read"] += len(out.tokens) if part == "target" else 0
        return out

    setattr(owner, name, wrapped)


def whole_steps() -> None:
    """Times each step, and forgets what was timed before it, as on held-out documents."""
    step = Trainer._step

    def wrapped(*arguments: Any) -> Any:
        spent.clear()
        started, clock = time.process_time(), time.perf_counter()
        out = step(*arguments)
        used, passed = time.process_time() - started, time.perf_counter() - clock
        now.update(spent | {"cpu_seconds": used, "seconds": passed, "learned": out[2]})
        return out

    Trainer._step = wrapped  # type: ignore[method-assign]


now: dict[str, float] = {}


def peak() -> float:
    """The largest resident memory of this process so far, in GB; pages of mapped files count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind")
    parser.add_argument("--config", type=Path)
    options, words = parser.parse_known_args()
    training = next(t for k in KINDS.values() if (t := k.training) and options.kind in (t.command, k.name))
    config = read_config(options.config, words, training.load_settings())
    timed(FeatureReader, "read", "target")
    timed(Accelerator, "backward", "backward")
    timed(torch.optim.AdamW, "step", "optimizer")
    whole_steps()
    parts = Path(config.out) / "parts.jsonl"

    def progress(what: str, done: int, total: int) -> None:
        if not total:
            print(f"{what}  ({peak():.2f} GB)", flush=True)

    for report in training.load_run()(config, progress):
        row = {"step": report.step, "loss": report.loss, "peak_gb": peak(), **now}
        with parts.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"step {report.step}/{report.steps}  loss {report.loss:.3f}  {row['seconds']:.1f} s", flush=True)
    print(f"peak {peak():.2f} GB")
    table(parts)


def table(log: Path) -> None:
    """Prints tokens a second by part. Steps that a resumed run computed again count once."""
    rows = list({row["step"]: row for row in map(json.loads, log.read_text().splitlines())}.values())
    total = {name: sum(row[name] for row in rows) for name in rows[-1]}
    parts = {name: total[name] for name in ("target", "backward", "optimizer")}
    for part, took in {"forward": total["cpu_seconds"] - sum(parts.values()), **parts}.items():
        tokens = total["read" if part == "target" else "learned"]
        name = part if part == "target" else f"draft, {part}"
        print(f"{name:18} {took:8.1f} CPU s  {took / total['cpu_seconds']:6.1%}  {tokens / took:8.1f} tokens a CPU s")
    print(
        f"{len(rows)} steps, {total['learned']:,.0f} learned tokens: {total['cpu_seconds']:,.0f} CPU s in "
        f"{total['seconds']:,.0f} s"
    )


if __name__ == "__main__":
    main()
