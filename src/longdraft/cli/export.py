"""``longdraft export``: a draft in the layout that another program reads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from longdraft.cli import console, options
from longdraft.drafters.eagle3_export import MAX_POSITION, SPECULATIVE_TOKENS
from longdraft.drafters.kinds import KINDS, kind_of
from longdraft.errors import CapabilityError
from longdraft.host.parts import architecture


class Layout(str, Enum):
    """What ``export`` writes."""

    speculators = "speculators"


def export(
    draft: Annotated[Path, typer.Argument(help="Draft folder of an EAGLE-3 draft.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; what is there already is overwritten.")],
    verifier: Annotated[
        str, typer.Option("--verifier", help="The target, as it will be served: a Hugging Face id or a folder.")
    ],
    to: Annotated[
        Layout, typer.Option("--to", help="The layout: speculators, which vLLM serves.")
    ] = Layout.speculators,
    max_position: Annotated[
        int, typer.Option("--max-position", help="Longest text that will be served, in tokens.")
    ] = MAX_POSITION,
    speculative_tokens: Annotated[
        int, typer.Option("--speculative-tokens", help="Drafted tokens of a round that the folder proposes.")
    ] = SPECULATIVE_TOKENS,
    composed: options.Load = None,
    debug: options.Debug = False,
) -> None:
    """Write a draft for another program to serve."""
    kind = kind_of(draft)
    write = kind.layouts.get(to.value)
    if write is None:
        able = ", ".join(each.name for each in KINDS.values() if to.value in each.layouts)
        raise CapabilityError(
            f"{draft} holds a draft for {kind.name}; only {able} drafts have a layout that others read."
        )
    loaded = kind.load(draft)
    model_type = loaded.made_for.get("model_type")
    with options.settings_checked():
        lost = write(
            loaded, out, verifier, architecture(model_type) if model_type else None, max_position, speculative_tokens
        )
    for sentence in lost:
        console.note(sentence)
    console.note(f"{out} is written in the layout of {to.value}.")
