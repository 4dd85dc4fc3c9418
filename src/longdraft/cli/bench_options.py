"""Options that several verbs of ``longdraft bench`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.bench.data import Short
from longdraft.cli import options
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
