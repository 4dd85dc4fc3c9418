"""``python -m tests.fuzz FIRST LAST [FORMAT...]``: damages files with these seeds, and prints what went wrong."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

from tests.fuzz.case import verdict
from tests.fuzz.formats import FORMATS


def main(first: int, last: int, names: list[str]) -> int:
    """Returns the number of wrong cases."""
    logging.disable(logging.CRITICAL)
    wrong = 0
    for name in names or FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            original = Path(folder) / f"a-{name.replace(' ', '-')}"
            FORMATS[name].make(original)
            (Path(folder) / "damaged").mkdir()
            for seed in range(first, last):
                if message := verdict(name, FORMATS[name], seed, original, Path(folder) / "damaged"):
                    print(message, flush=True)
                    wrong += 1
        print(f"{name}: {last - first} cases", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(100, main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
