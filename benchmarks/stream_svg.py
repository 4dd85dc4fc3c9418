"""Writes a picture (SVG) of `longdraft generate` in a terminal: drafted tokens green, the target's own tokens white.

    python benchmarks/stream_svg.py docs/stream.svg --file report.txt -p "Summarise this." -n 128

The arguments after the picture's name go to `longdraft generate`. The figures in the picture are those of that run.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 100
# Progress bars and spinners begin with an erased line or a hidden cursor.
MOVES = re.compile(r"\x1b\[(?:2K|1A|\?25l)")
# The picture loads no fonts from a server.
SVG = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, ", "")


def shown(output: str) -> str:
    """A terminal's output without progress bars and spinners."""
    lines = [line.rstrip() for line in output.splitlines() if not MOVES.search(line)]
    return "\n".join(lines).replace("\x1b[?25h", "").strip("\n")


def main(picture: Path, arguments: list[str]) -> None:
    """Runs the command and writes the picture."""
    command = [sys.executable, "-m", "longdraft", "generate", *arguments]
    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    names = [Path(word).name if Path(word).is_file() else word for word in arguments]
    console.print(Text(f"$ longdraft generate {shlex.join(names)}", style="bold"))
    # Adjacent drafted tokens become one green span.
    console.print(Text.from_ansi(re.sub(r"\x1b\[0m\x1b\[32m", "", done.stdout).strip("\n")))
    console.print()
    console.print(Text.from_ansi(shown(done.stderr)))
    picture.write_text(console.export_svg(title="longdraft", theme=MONOKAI, code_format=SVG, unique_id="stream"))
    print(f"{picture}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
