"""Options that several verbs of ``longdraft bench`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import CheckpointError

Limit = Annotated[int | None, typer.Option(min=1, help="Rows of each file.", show_default="all")]
Raw = Annotated[bool, typer.Option("--raw", help="Prompts as they are; no chat template.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Decode on to --max-tokens, so that all do the same work.")
]
Seed = Annotated[int, typer.Option(help="Seed of sampling.")]
NeedleDepths = Annotated[str, typer.Option(help="Where needles lie; 0: beginning, 1: end.")]
DEPTHS = "0.1,0.3,0.5,0.7,0.9"


def check_writable(paths: dict[str, Path | None]) -> None:
    """Refuses files that cannot be written, by option.

    Raises:
        CheckpointError: a folder that does not exist, or a file's name that is a folder.
    """
    for option, path in paths.items():
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise CheckpointError(f"{option} {path}: its folder does not exist, or it is a folder itself.")
