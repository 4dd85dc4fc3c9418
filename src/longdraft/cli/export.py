"""``longdraft export``: a draft in the layout that another program reads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.cli import console, options
from longdraft.errors import ArgumentError, CapabilityError


class Layout(str, Enum):
    """Layouts that ``export`` writes."""

    speculators = "speculators"
    longdraft = "longdraft"
    # Of earlier versions: refused.
    gguf = "gguf"
    custom_generate = "custom-generate"


class Bits(str, Enum):
    """Bits of a packed weight."""

    eight = "8"
    four = "4"


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
        Layout,
        typer.Option(
            "--to",
            help="The layout: speculators, which vLLM serves; longdraft, our own, smaller with --bits.",
            metavar="[speculators|longdraft]",
        ),
    ] = Layout.speculators,
    max_position: Annotated[
        int, typer.Option("--max-position", help="speculators: longest text that will be served, in tokens.")
    ] = 131_072,
    speculative_tokens: Annotated[
        int,
        typer.Option("--speculative-tokens", help="speculators: drafted tokens of a round that the folder proposes."),
    ] = 5,
    bits: Annotated[
        Bits, typer.Option("--bits", help="longdraft: bits of a weight, with a scale for each row (8) or each 32 (4).")
    ] = Bits.eight,
    debug: options.Debug = False,
) -> None:
    """Write a draft for another program to serve."""
    if to is Layout.gguf:
        raise ArgumentError(
            "--to gguf is no longer written: take --to speculators, and llama.cpp's own convert_hf_to_gguf.py."
        )
    if to is Layout.custom_generate:
        raise ArgumentError(
            "--to custom-generate is no longer written: hand generate(custom_generate=Speculator(DRAFT)), or take "
            "`longdraft serve` in place of `transformers serve`."
        )
    if to is Layout.longdraft:
        remarks = _packed(draft, out, int(bits.value))
    elif verifier is None:
        raise ArgumentError("--verifier names the target, which this layout needs.")
    else:
        remarks = _draft(draft, out, verifier, max_position, speculative_tokens)
    for sentence in remarks:
        console.note(sentence)
    console.note(f"{out} is written in the layout of {to.value}.")


def _packed(draft: Path, out: Path, bits: int) -> list[str]:
    """A draft in our own layout, with packed matrices."""
    from longdraft.drafts.draft import TrainedDraft
    from longdraft.drafts.kinds import kind_of

    loaded = kind_of(draft).load(draft)
    if not isinstance(loaded, TrainedDraft):
        raise CapabilityError(f"{draft} is a language model as it is: only drafts that were trained here are packed.")
    if out.resolve() == draft.resolve():
        raise CapabilityError(f"{out} is the draft itself: name another folder to write to.")
    loaded.save(out, bits)
    return []


def _draft(draft: Path, out: Path, verifier: str, max_position: int, speculative_tokens: int) -> list[str]:
    """A draft alone, as its kind writes it for vLLM."""
    from longdraft.drafts.kinds import kind_of
    from longdraft.drafts.speculators import to_speculators
    from longdraft.model.shared_parts import architecture

    kind = kind_of(draft)
    if kind.name != "eagle3":
        raise CapabilityError(f"{draft} holds a draft for {kind.name}; eagle3's alone have a layout that others read.")
    loaded: Any = kind.load(draft)
    model_type = loaded.made_for.get("model_type")
    named = architecture(model_type) if model_type else None
    with options.settings_checked():
        return to_speculators(loaded, out, verifier, named, max_position, speculative_tokens)
