"""Features that were written while the target answered: a file a passage, with all the answers to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.training.branches import Said, hidden_name
from longdraft.training.documents import Document
from longdraft.training.features import Features

INDEX = "index.json"


class KeptFeatures:
    """A folder of them, for writing.

    Args:
        folder: made if it is not there.
        target: what the target's description says.
        layers: decoder layers whose output hidden states are kept. top: likeliest tokens that are kept.

    Raises:
        CheckpointError: the folder holds those of another target, other layers or another ``top``.
    """

    def __init__(self, folder: Path, target: dict[str, Any], layers: Sequence[int], top: int) -> None:
        self.folder, self.layers, self.top = folder, tuple(layers), top
        said = json.loads(json.dumps({"target": target, "layers": list(layers), "top": top}))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / INDEX
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) != said:
            raise CheckpointError(
                f"{folder} holds features of another target or of other layers. Delete it, or name another folder."
            )
        path.write_text(json.dumps(said), encoding="utf-8")

    def write(self, group: int, passage: Said | None, answers: Sequence[Said | None]) -> None:
        """The file of a passage; it appears whole or not at all."""
        assert passage is not None
        tensors = {f"passage.{name}": t for name, t in _tensors(passage).items()}
        kept = [_tensors(a) for a in answers if a is not None]
        if kept:
            tensors |= {f"answers.{name}": torch.cat([each[name] for each in kept]) for name in kept[0]}
        path = _file(self.folder, group)
        part = path.with_name(f".{path.name}.part")
        lengths = [len(each["tokens"]) for each in kept]
        save_file({n: t.contiguous().cpu() for n, t in tensors.items()}, part, {"lengths": json.dumps(lengths)})
        part.replace(path)


def _tensors(said: Said) -> dict[str, torch.Tensor]:
    ids, log_probs = said.top_ids.int(), said.top_log_probs.half()
    return {"tokens": said.tokens.int(), "ids": ids, "lps": log_probs} | said.rows


def _file(folder: Path, group: int) -> Path:
    return folder / f"passage-{group:06d}.safetensors"


class KeptSource:
    """Features of documents that say where theirs are kept (``Document.kept``), read from disk when asked for.

    Args:
        layers: decoder layers whose hidden states are wanted; none: the last layer's keys and values; None: nothing.

    Raises:
        CheckpointError: a folder is not there, of another target, or lacks a layer.
    """

    def __init__(self, documents: Sequence[Document], target: dict[str, Any], layers: Sequence[int] | None) -> None:
        self.documents, self.layers = documents, layers
        for folder in sorted({Path(d.kept[0]) for d in documents if d.kept}):
            try:
                said = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{folder} cannot be read: {error}.") from error
            if said["target"] != json.loads(json.dumps(target)):
                raise CheckpointError(f"{folder} holds features of another target.")
            lacking = [layer for layer in layers or () if layer not in said["layers"]]
            if lacking:
                raise CheckpointError(f"{folder} holds no hidden states of layers {lacking}, only {said['layers']}.")

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> Features:
        """Raises CheckpointError where a file is missing or damaged."""
        document = self.documents[i]
        assert document.kept is not None
        folder, group, place = Path(document.kept[0]), *document.kept[1:]
        path = _file(folder, group)
        try:
            with safe_open(path, framework="pt") as file:
                return self._read(document, file, place)
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error

    def _read(self, document: Document, file: Any, place: int) -> Features:
        lengths = json.loads(file.metadata()["lengths"])
        begin = sum(lengths[:place]) if place >= 0 else 0
        own = slice(begin, begin + (lengths[place] if place >= 0 else 0))
        length = len(document.tokens)

        def both(name: str) -> torch.Tensor:
            parts = [file.get_slice(f"passage.{name}")[:]]
            if place >= 0:
                parts.append(file.get_slice(f"answers.{name}")[own])
            return torch.cat(parts)[:length]

        if both("tokens").tolist() != document.tokens:
            raise KeyError("it is of other text")
        rows: dict[str, torch.Tensor] = {}
        if self.layers:
            rows["hidden"] = torch.cat([both(hidden_name(layer)) for layer in self.layers], 1)
        elif self.layers is not None:
            rows = {name: both(name) for name in ("keys", "values")}
        said = slice(document.start - 1, length - 1)
        return Features(
            torch.tensor(document.tokens),
            document.start,
            0,
            rows,
            both("ids")[said].long(),
            both("lps")[said].float(),
        )
