"""Features that were written while the target answered: a file a passage, with all the answers to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from longdraft.errors import CheckpointError
from longdraft.training import feature_files
from longdraft.training.branches import Said, hidden_name
from longdraft.training.documents import Document
from longdraft.training.feature_files import INDEX
from longdraft.training.features import FeatureReader, Features

# What to do where features are not what they should be.
ADVICE = "Delete the folder of features: the target then reads the answers again."


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
        index = _as_json({"target": target, "layers": list(layers), "top": top})
        feature_files.check_index(folder, index, "another target, other layers or another number of likely tokens")
        feature_files.write_index(folder, index)

    def lacking(self, passages: Iterable[int]) -> list[int]:
        """Those of some passages that have no file."""
        return [number for number in passages if not _file(self.folder, number).exists()]

    def write(self, number: int, passage: Said, answers: Sequence[Said]) -> None:
        """The file of a passage with one answer at least; it appears whole or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        parts = {"passage": [passage], "answers": answers}
        laid_out = {part: feature_files.laid_out(said) for part, said in parts.items()}
        tensors = {f"{part}.{name}": t for part, found in laid_out.items() for name, t in found.items()}
        lengths = json.dumps([len(answer.tokens) for answer in answers])
        feature_files.write(_file(self.folder, number), tensors, {"lengths": lengths})


def passages(documents: Iterable[Document]) -> list[Document]:
    """The passages that answers with kept features are about, learned from their second token on.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found = []
    for folder, number in sorted({d.kept[:2] for d in documents if d.kept}):
        with _opened(_file(Path(folder), number)) as file:
            tokens = file.get_tensor("passage.tokens").tolist()
        if len(tokens) > 1:
            found.append(Document(tokens, 1, (folder, number, -1)))
    return found


class KeptSource:
    """Features of documents that say where theirs are kept (``Document.kept``), read from disk when asked for.

    Args:
        target: what the target's description says.
        reader: says what the draft reads, in which dtype, and how many of the likeliest tokens.

    Raises:
        CheckpointError: a folder is not there, of another target, or lacks what is wanted.
    """

    def __init__(self, documents: Sequence[Document], target: dict[str, Any], reader: FeatureReader) -> None:
        self.documents, self.reader = documents, reader
        self.names = [hidden_name(layer) for layer in reader.layers] or list(reader.names)
        for folder in sorted({Path(d.kept[0]) for d in documents if d.kept}):
            with feature_files.readable(folder / INDEX, ADVICE):
                index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
                of, layers, top = index["target"], index["layers"], int(index["top"])
                lacking = not set(layers).issuperset(reader.layers) or top < reader.top
            if of != _as_json(target):
                raise CheckpointError(f"{folder} holds features of another target. {ADVICE}")
            if lacking:
                raise CheckpointError(
                    f"{folder} holds hidden states of layers {layers} and {top} likely tokens; layers "
                    f"{list(reader.layers)} and {reader.top} are wanted. {ADVICE}"
                )

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> Features:
        """Raises CheckpointError where a file is missing, damaged or of other text.

        A document whose beginning was cut off stands at positions from 0 on: nothing but its text can be read then.
        """
        document = self.documents[i]
        assert not (document.cut and self.names), "what the draft reads stands at other positions"
        assert document.kept is not None
        folder, number, place = document.kept
        with _opened(_file(Path(folder), number)) as file:
            return self._read(document, file, place)

    def _read(self, document: Document, file: Any, place: int) -> Features:
        answer: slice | None = None
        if place >= 0:
            lengths = json.loads(file.metadata()["lengths"])
            answer = slice(begin := sum(lengths[:place]), begin + lengths[place])
        length = len(document.tokens)

        def text(name: str) -> torch.Tensor:
            """The passage's rows, and the answer's behind them."""
            rows: torch.Tensor = file.get_tensor(f"passage.{name}")
            if answer is not None:
                rows = torch.cat([rows, file.get_slice(f"answers.{name}")[answer]])
            return rows[document.cut : document.cut + length]

        tokens = text("tokens").long()
        if tokens.tolist() != document.tokens:
            raise ValueError("it is of other text")
        rows = {name: text(name).to(self.reader.dtype) for name in self.names}
        if self.reader.layers:
            rows = {"hidden": torch.cat(list(rows.values()), 1)}
        said = slice(document.start - 1, length - 1), slice(self.reader.top)
        return Features(tokens, document.start, 0, rows, text("ids")[said].long(), text("lps")[said].float())


def _as_json(index: dict[str, Any]) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(index))


def _file(folder: Path, number: int) -> Path:
    return folder / f"passage-{number:06d}.safetensors"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with feature_files.readable(path, ADVICE), safe_open(path, framework="pt") as file:
        yield file
