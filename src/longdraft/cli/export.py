"""``longdraft export``: writes a draft in the layout of vLLM (speculators), or with quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from longdraft.cli import console, options
from longdraft.errors import ArgumentError, CapabilityError


def export(
    draft: Annotated[Path, typer.Argument(help="Draft folder to export.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; existing files are overwritten.")],
    verifier: Annotated[
        str | None,
        typer.Option(
            help="For speculators: the target that vLLM will serve, a Hugging Face id or a folder.",
            show_default="required for speculators",
        ),
    ] = None,
    to: Annotated[
        Literal["speculators", "longdraft"],
        typer.Option("--to", help="Layout: speculators (for vLLM), or longdraft (with weights of --bits)."),
    ] = "speculators",
    max_position: Annotated[
        int, typer.Option("--max-position", help="For speculators: longest context that vLLM will serve, in tokens.")
    ] = 131_072,
    speculative_tokens: Annotated[
        int, typer.Option("--speculative-tokens", help="For speculators: number of drafted tokens of a round.")
    ] = 5,
    bits: Annotated[
        Literal["8", "4"],
        typer.Option("--bits", help="For longdraft: bits of a weight. A row (8) or 32 weights (4) share a scale."),
    ] = "8",
    debug: options.Debug = False,
) -> None:
    """Write a draft in the layout of another program, or with quantized weights."""
    if to == "longdraft":
        _export_quantized(draft, out, int(bits))
    elif verifier is None:
        raise ArgumentError("--to speculators needs the target: name it with --verifier.")
    else:
        for note in _export_speculators(draft, out, verifier, max_position, speculative_tokens):
            console.note(note)
    console.note(f"{out} is written in the layout of {to}.")


def _export_quantized(draft: Path, out: Path, bits: int) -> None:
    """Writes a draft folder with quantized matrices."""
    from longdraft.drafts.draft import TrainedDraft
    from longdraft.registry import kind_of

    loaded = kind_of(draft).load(draft)
    if not isinstance(loaded, TrainedDraft):
        raise CapabilityError(f"{draft} is a language model: only drafts that longdraft trained can be quantized.")
    if out.resolve() == draft.resolve():
        raise CapabilityError(f"{out} is the draft itself: name another folder to write.")
    loaded.save(out, bits)


def _export_speculators(draft: Path, out: Path, verifier: str, max_position: int, speculative_tokens: int) -> list[str]:
    """Writes a draft in the layout of speculators, for vLLM. Returns notes for the user."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from longdraft.drafts.speculators import to_speculators
    from longdraft.registry import kind_of

    kind = kind_of(draft)
    if kind.name != "eagle3":
        raise CapabilityError(f"{draft} holds a draft for {kind.name}; only drafts for eagle3 can be exported to vLLM.")
    loaded: Any = kind.load(draft)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(loaded.required_target.get("model_type"))
    with options.settings_checked():
        return to_speculators(loaded, out, verifier, architecture, max_position, speculative_tokens)
