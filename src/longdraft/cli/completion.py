"""``longdraft completion``: typer's script for the shell, for lines of a shell's own files."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from typer import completion as typers

from longdraft.cli import console


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell | None, typer.Argument(help="For which shell.", show_default="that of $SHELL")] = None,
) -> None:
    """Print a completion script: eval "$(longdraft completion)" in ~/.bashrc or ~/.zshrc; for fish, | source."""
    own = Path(os.environ.get("SHELL", "bash")).name
    name = shell.value if shell else own if own in Shell.__members__ else "bash"
    script = typers.get_completion_script(  # type: ignore[attr-defined]
        prog_name="longdraft", complete_var="_LONGDRAFT_COMPLETE", shell=name
    )
    # Where a line evaluates it, nothing has loaded zsh's completion yet.
    console.line(f"autoload -Uz compinit && compinit -u\n{script}" if name == "zsh" else script)
