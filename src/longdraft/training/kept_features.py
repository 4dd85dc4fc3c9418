"""Features that were kept while the target answered: a file for each passage, with all answers to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from longdraft.errors import CheckpointError
from longdraft.training import feature_files
from longdraft.training.branches import TokenFeatures, hidden_name
from longdraft.training.documents import Document
from longdraft.training.feature_files import INDEX
from longdraft.training.features import FeatureReader, Features

# What to do about damaged or unsuitable features.
ADVICE = "Delete the folder of features: the target then reads the answers again."


def _file(folder: Path | str, number: int) -> Path:
    return Path(folder) / f"passage-{number:06d}.safetensors"


class KeptFeatures:
    """A folder of kept features, for writing. Raises CheckpointError if it holds features of another kind.

    Args:
        target: the target's description.
        layers: decoder layers whose output hidden states are kept.
    """

    def __init__(self, folder: Path, target: dict[str, Any], layers: Sequence[int]) -> None:
        self.folder, self.layers = folder, tuple(layers)
        index = {"target": target, "layers": list(layers)}
        feature_files.check_index(folder, index, "another target, other layers or an earlier version")
        feature_files.write_index(folder, index)

    def lacking(self, passages: Iterable[int]) -> list[int]:
        """The passages, of these, that have no file."""
        return [number for number in passages if not _file(self.folder, number).exists()]

    def write(self, number: int, passage: TokenFeatures, answers: Sequence[TokenFeatures]) -> None:
        """Writes the file of a passage and its answers, at least one. Raises CheckpointError if that fails."""
        parts = {"passage": feature_files.joined([passage]), "answers": feature_files.joined(answers)}
        tensors = {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}
        lengths = json.dumps([len(answer.tokens) for answer in answers])
        feature_files.write(_file(self.folder, number), tensors, {"lengths": lengths})


def passages(documents: Iterable[Document]) -> list[Document]:
    """The passages that answers with kept features are about, learned from their second token on."""
    texts = []
    for folder, number in sorted({d.kept[:2] for d in documents if d.kept}):
        with feature_files.opened(_file(folder, number), ADVICE) as file:
            tokens = file.get_tensor("passage.tokens").tolist()
        if len(tokens) > 1:
            texts.append(Document(tokens, 1, (folder, number, -1)))
    return texts


class KeptSource:
    """Features of documents with kept features (``Document.kept``), read from disk when they are asked for.

    Args:
        target: the target's description.
        reader: tells what is read, in which dtype.

    Raises:
        CheckpointError: a folder is missing, of another target, or lacks what the draft reads.
    """

    from_disk = True

    def __init__(self, documents: Sequence[Document], target: dict[str, Any], reader: FeatureReader) -> None:
        self.documents, self.reader = documents, reader
        states = {"hidden": reader.layers, "last": reader.taps[-1:]}
        # Of each name, the names in the files of what is laid side by side.
        self.names = {name: [*map(hidden_name, states[name])] if name in states else [name] for name in reader.names}
        for folder in sorted({Path(d.kept[0]) for d in documents if d.kept}):
            with feature_files.readable(folder / INDEX, ADVICE):
                index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
                kept_for, layers = index["target"], index["layers"]
                lacking = not set(layers).issuperset(reader.taps)
            if kept_for != feature_files.as_json(target):
                raise CheckpointError(f"{folder} holds features of another target. {ADVICE}")
            if lacking:
                raise CheckpointError(
                    f"{folder} holds hidden states of layers {layers}; {list(reader.taps)} are wanted. {ADVICE}"
                )

    def batch(self, documents: Sequence[int]) -> list[Features]:
        return [self[i] for i in documents]

    def __getitem__(self, i: int) -> Features:
        """Raises CheckpointError if a file is missing, damaged or of other text."""
        document = self.documents[i]
        # A document whose beginning was cut off has positions from 0 on, where the kept keys do not stand.
        assert not document.cut or not {*self.names} - {"last"}, "a document cut at its beginning has only its text"
        assert document.kept is not None
        folder, number, answer = document.kept
        length = len(document.tokens)
        with feature_files.opened(_file(folder, number), ADVICE) as file:
            begin = end = 0
            if answer >= 0:
                lengths = json.loads(file.metadata()["lengths"])
                begin = sum(lengths[:answer])
                end = begin + lengths[answer]

            def read(name: str) -> torch.Tensor:
                """The document's rows: the passage's, then the answer's."""
                parts = [file.get_tensor(f"passage.{name}"), file.get_slice(f"answers.{name}")[begin:end]]
                return torch.cat(parts)[document.cut : document.cut + length]

            tokens = read("tokens").long()
            if tokens.tolist() != document.tokens:
                raise ValueError("it is of other text")
            dtype = self.reader.dtype
            rows = {name: torch.cat([read(x).to(dtype) for x in parts], 1) for name, parts in self.names.items()}
            # Earlier versions kept several likely tokens.
            likeliest = read("ids").view(length, -1)[document.start - 1 : length - 1, 0].long()
            return Features(tokens, document.start, 0, rows, likeliest)
