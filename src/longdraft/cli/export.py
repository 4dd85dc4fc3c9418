"""``longdraft export``: a draft in the layout that another program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from longdraft.cli import console, options
from longdraft.errors import ArgumentError, CapabilityError


def export(
    draft: Annotated[Path, typer.Argument(help="Draft folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; what is there already is overwritten.")],
    verifier: Annotated[
        str | None,
        typer.Option(
            "--verifier",
            help="The target, as it will be served: a Hugging Face id or a folder.",
            show_default="needed, but for longdraft",
        ),
    ] = None,
    to: Annotated[
        Literal["speculators", "longdraft"],
        typer.Option("--to", help="speculators: what vLLM serves; longdraft: our own layout, smaller with --bits."),
    ] = "speculators",
    max_position: Annotated[
        int, typer.Option("--max-position", help="speculators: longest text that will be served, in tokens.")
    ] = 131_072,
    speculative_tokens: Annotated[
        int,
        typer.Option("--speculative-tokens", help="speculators: drafted tokens of a round that the folder proposes."),
    ] = 5,
    bits: Annotated[
        Literal["8", "4"],
        typer.Option("--bits", help="longdraft: bits of a weight, with a scale for each row (8) or each 32 (4)."),
    ] = "8",
    debug: options.Debug = False,
) -> None:
    """Write a draft for another program to serve."""
    if to == "longdraft":
        _packed(draft, out, int(bits))
    elif verifier is None:
        raise ArgumentError("--verifier names the target, which this layout needs.")
    else:
        for sentence in _draft(draft, out, verifier, max_position, speculative_tokens):
            console.note(sentence)
    console.note(f"{out} is written in the layout of {to}.")


def _packed(draft: Path, out: Path, bits: int) -> None:
    """A draft in our own layout, with packed matrices."""
    from longdraft.drafts.draft import TrainedDraft
    from longdraft.drafts.kinds import kind_of

    loaded = kind_of(draft).load(draft)
    if not isinstance(loaded, TrainedDraft):
        raise CapabilityError(f"{draft} is a language model as it is: only drafts that were trained here are packed.")
    if out.resolve() == draft.resolve():
        raise CapabilityError(f"{out} is the draft itself: name another folder to write to.")
    loaded.save(out, bits)


def _draft(draft: Path, out: Path, verifier: str, max_position: int, speculative_tokens: int) -> list[str]:
    """A draft alone, as its kind writes it for vLLM."""
    from longdraft.drafts.kinds import kind_of
    from longdraft.drafts.speculators import to_speculators
    from longdraft.model.shared_parts import causal_lm_class_name

    kind = kind_of(draft)
    if kind.name != "eagle3":
        raise CapabilityError(f"{draft} holds a draft for {kind.name}; eagle3's alone have a layout that others read.")
    loaded: Any = kind.load(draft)
    model_type = loaded.required_target.get("model_type")
    named = causal_lm_class_name(model_type) if model_type else None
    with options.settings_checked():
        return to_speculators(loaded, out, verifier, named, max_position, speculative_tokens)
