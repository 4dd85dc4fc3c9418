"""Options that several verbs of ``longdraft bench`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.bench import charts
from longdraft.bench.data import Short
from longdraft.cli import console, options
from longdraft.errors import CheckpointError
from longdraft.planning import plans


def _plan(given: str | None) -> str | None:
    with options.settings_checked():
        plans.checked(given)
    return given


Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="JSONL, or a data set by name, as for bench; repeatable.",
        show_default="long modules of Python's standard library",
    ),
]
ShortTexts = Annotated[
    Short, typer.Option(help="Texts shorter than a length: leave them out, join the next rows' texts, or keep them.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Rows of each file.", show_default="all")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="New tokens at most.")]
Plan = Annotated[
    str,
    typer.Option(
        "--plan", callback=_plan, help="fixed: trees as the papers have them; auto: trees that pay here, or none."
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Prompts as they are; no chat template.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Decode on to --max-tokens, so that all do the same work.")
]
Seed = Annotated[int, typer.Option(help="Seed of sampling.")]
Results = Annotated[
    Path | None,
    typer.Option(help="Append each run to this file (JSONL); what is there already is not measured again."),
]
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


def draw(figure: Any, path: Path) -> None:
    """Writes a chart as SVG, and says so.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        path.write_bytes(charts.image(figure, "svg"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error
    console.note(f"The figure is in {path}.")
