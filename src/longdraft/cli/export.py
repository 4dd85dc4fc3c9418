"""``longdraft export``: a draft in the layout that another program reads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from longdraft.cli import console, options
from longdraft.drafters.eagle3_draft import Eagle3Draft
from longdraft.drafters.eagle3_export import MAX_POSITION, SPECULATIVE_TOKENS, to_speculators
from longdraft.errors import CapabilityError
from longdraft.methods import method_of
from longdraft.target.parts import architecture


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
    debug: options.Debug = False,
) -> None:
    """Write a draft for another program to serve."""
    if (kind := method_of(draft).draft_kind) != "eagle3":
        raise CapabilityError(f"{draft} holds a draft for {kind}; only eagle3 drafts have a layout that others read.")
    loaded = Eagle3Draft.load(draft)
    model_type = loaded.contents.target.get("model_type")
    with options.settings_checked():
        lost = to_speculators(
            loaded, out, verifier, architecture(model_type) if model_type else None, max_position, speculative_tokens
        )
    for sentence in lost:
        console.note(sentence)
    console.note(f"{out} is written in the layout of {to.value}.")
