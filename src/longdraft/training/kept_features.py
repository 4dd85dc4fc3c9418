"""Features that were written while the target answered: a file a passage, with all the answers to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.training.branches import Said, hidden_name
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader, Features

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


def passages(documents: Sequence[Document]) -> list[Document]:
    """The passages that answers with kept features are about, learned from their second token on.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found = []
    for folder, group in sorted({d.kept[:2] for d in documents if d.kept}):
        with _opened(_file(Path(folder), group)) as file:
            tokens = file.get_tensor("passage.tokens").tolist()
        if len(tokens) > 1:
            found.append(Document(tokens, 1, (folder, group, -1)))
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Make the answers again, or leave them out.") from error


class KeptSource:
    """Features of documents that say where theirs are kept (``Document.kept``), read from disk when asked for.

    Args:
        target: what the target's description says.
        reader: says what the draft reads, and how many of the likeliest tokens.

    Raises:
        CheckpointError: a folder is not there, of another target, or lacks what is wanted.
    """

    def __init__(self, documents: Sequence[Document], target: dict[str, Any], reader: FeatureReader) -> None:
        self.documents, self.top = documents, reader.top
        self.names = [hidden_name(layer) for layer in reader.layers] or list(reader.names)
        for folder in sorted({Path(d.kept[0]) for d in documents if d.kept}):
            try:
                said = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{folder} cannot be read: {error}.") from error
            if said["target"] != json.loads(json.dumps(target)):
                raise CheckpointError(f"{folder} holds features of another target.")
            lacking = [layer for layer in reader.layers if layer not in said["layers"]]
            if lacking or said["top"] < reader.top:
                raise CheckpointError(
                    f"{folder} holds hidden states of layers {said['layers']} and {said['top']} likely tokens; layers "
                    f"{list(reader.layers)} and {reader.top} are wanted."
                )

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> Features:
        """Raises CheckpointError where a file is missing or damaged."""
        document = self.documents[i]
        assert document.kept is not None
        folder, group, place = document.kept
        with _opened(_file(Path(folder), group)) as file:
            return self._read(document, file, place)

    def _read(self, document: Document, file: Any, place: int) -> Features:
        lengths = json.loads(file.metadata()["lengths"])
        begin = sum(lengths[:place]) if place >= 0 else 0
        own = slice(begin, begin + lengths[place]) if place >= 0 else slice(0)
        length = len(document.tokens)

        def both(name: str) -> torch.Tensor:
            parts = [file.get_tensor(f"passage.{name}")]
            if place >= 0:
                parts.append(file.get_slice(f"answers.{name}")[own])
            return torch.cat(parts)[:length]

        if both("tokens").tolist() != document.tokens:
            raise KeyError("it is of other text")
        rows = {name: both(name) for name in self.names}
        if "keys" not in rows and rows:
            rows = {"hidden": torch.cat(list(rows.values()), 1)}
        said = slice(document.start - 1, length - 1)
        ids, log_probs = both("ids")[said, : self.top].long(), both("lps")[said, : self.top].float()
        return Features(torch.tensor(document.tokens), document.start, 0, rows, ids, log_probs)
