"""Drafts of any kinds on the same held-out documents: simulated acceptance, as docs/training.md defines it.

    python benchmarks/held_out.py DATA.jsonl... --drafts FOLDER... [--held-out 0.04] [--max-length 2048] [key=value...]

A training run measures on documents of its own; this sets drafts of different runs and kinds side by side. DATA is what
`longdraft train data` wrote. Which documents are held out depends on how they begin, so a draft that was trained on
DATA with the same share, `--max-length` and more has not seen them. Nothing is trained. key=value are settings of
`longdraft train`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longdraft.drafts.kinds import kind_of
from longdraft.training.ahead import Ahead
from longdraft.training.config import DEPTH
from longdraft.training.measure import by_step, simulate
from longdraft.training.session import Session
from longdraft.training.settings import read_config


def measured(self: Session, trainee: Any, layers: Any, *_: Any, **how: Any) -> Iterator[Any]:
    """In the place of training: what a trainee would have accepted."""
    levels, ranks_of = how.get("measured", DEPTH), how.get("ranks_of", by_step)
    source = self.source(layers, keys=how.get("keys", False))
    assert source is not None
    documents = self.held_out(source.reader, Ahead(self.runner.device, 0), levels)
    with self.accelerator.autocast():
        found = simulate(trainee.eval(), documents, levels, ranks_of=ranks_of)
    agreement = " ".join(f"{x:.3f}" for x in found.agreement)
    print(f"agreement {agreement}, chain {found.chain:.3f}, tree {found.tree:.3f} ({len(documents)} documents)")
    yield from ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--drafts", nargs="+", type=Path, required=True)
    parser.add_argument("--held-out", type=float, default=0.04)
    parser.add_argument("--max-length", type=int, default=2048)
    options, words = parser.parse_known_args()
    Session.train = measured  # type: ignore[method-assign]
    same = [f"held_out={options.held_out}", f"max_length={options.max_length}", "target_dtype=bfloat16", *words]
    for folder in options.drafts:
        training = kind_of(folder).training
        assert training is not None, f"{folder} is of a kind that is not trained"
        with tempfile.TemporaryDirectory() as out:
            of_draft = [f"data=[{','.join(options.data)}]", f"init={folder}", f"out={out}"]
            print(folder, end=": ", flush=True)
            for _ in training.load_run()(read_config(None, [*of_draft, *same], training.load_settings())):
                pass


if __name__ == "__main__":
    main()
