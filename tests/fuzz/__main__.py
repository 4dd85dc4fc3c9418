"""``python -m tests.fuzz FIRST LAST [FORMAT...]``: damages files by these seeds, says what went wrong."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

from tests.fuzz.case import verdict
from tests.fuzz.formats import FORMATS


def main(first: int, last: int, names: list[str]) -> int:
    """Returns how many cases are wrong."""
    logging.disable(logging.CRITICAL)
    wrong = 0
    for name in names or FORMATS:
        with tempfile.TemporaryDirectory() as place:
            whole = Path(place) / f"a-{name.replace(' ', '-')}"
            FORMATS[name].make(whole)
            (Path(place) / "damaged").mkdir()
            for seed in range(first, last):
                if said := verdict(name, FORMATS[name], seed, whole, Path(place) / "damaged"):
                    print(said, flush=True)
                    wrong += 1
        print(f"{name}: {last - first} cases", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(100, main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
