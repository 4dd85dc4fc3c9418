"""The fields and tensors of a GGUF file, checked against one another before anything is built of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.errors import CheckpointError
from longdraft.files import check_numbers
from longdraft.model.gguf.reader import parts_of, reader_of

if TYPE_CHECKING:
    from gguf import ReaderTensor

FACTORS = "rope_freqs.weight"
LAYER = re.compile(r"blk\.(\d+)\.")
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# What a file may hold in place of a model, by its general.type.
_OTHERS = {"adapter": "a LoRA adapter", "mmproj": "what reads images for one", "imatrix": "statistics of one"}


class Header:
    """An open GGUF file of an ``architecture``, named as in the file.

    Raises:
        ValueError, KeyError, OSError, struct.error: the file is damaged or cut short.
        CheckpointError: it holds no model, or a part is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = reader_of(path)
        self.parts = parts_of(path, int(self.whole("split.count") or 1))
        if (kind := self.whole("general.type")) not in (None, "model"):
            raise CheckpointError(
                f"{path} holds no model but {_OTHERS.get(kind, repr(kind))}: give the model's own file, into which an "
                "adapter can be merged with llama-export-lora."
            )
        if (architecture := self.whole("general.architecture")) is None:
            raise ValueError("it names no architecture")
        self.architecture = str(architecture)
        self.tensors: dict[str, ReaderTensor] = {t.name: t for t in self.reader.tensors}

    def whole(self, name: str) -> Any:
        """The value of a field's whole name, or None."""
        field = self.reader.get_field(name)
        return None if field is None else field.contents()

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value of a name behind the architecture's."""
        found = self.whole(f"{self.architecture}.{name}")
        return default if found is None else found

    def check(self) -> None:
        """Checks the file's numbers against its tensors.

        Raises:
            CheckpointError: one does not fit.
        """
        fields = {name: self.whole(name) for name in self.reader.fields if name.startswith(f"{self.architecture}.")}
        check_numbers(fields, self.path, max(int(t.shape.max()) for t in self.tensors.values()))
        layers = {found[1] for name in self.tensors if (found := LAYER.match(name))}
        if layers and layers != {str(i) for i in range(int(self("block_count")))}:
            raise CheckpointError(
                f"{self.path} has tensors of {len(layers)} layers, which are not those that it counts "
                f"(block_count {self('block_count')}): fetch it again."
            )
        embeddings = self.tensors.get("token_embd.weight")
        if embeddings is not None and len(embeddings.shape) > 1 and self.words > embeddings.shape[1]:
            raise CheckpointError(
                f"{self.path} has {self.words} tokens, and embeddings of {embeddings.shape[1]}: fetch it again."
            )

    @property
    def layers(self) -> int:
        """The number of layers, without those that predict further tokens."""
        return int(self("block_count")) - int(self("nextn_predict_layers", 0))

    @property
    def head_dim(self) -> int:
        size = self("attention.key_length")
        return int(self("embedding_length")) // int(self("attention.head_count")) if size is None else int(size)

    @property
    def factors(self) -> np.ndarray[Any, Any] | None:
        """The numbers that divide the rotary frequencies, if the file has any."""
        tensor = self.tensors.get(FACTORS)
        return None if tensor is None else tensor.data

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        field = self.reader.fields.get("tokenizer.ggml.tokens")
        return 0 if field is None else len(field.data)

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, in the order of its ids."""
        return self.strings("ggml.tokens")

    @property
    def ends(self) -> list[int]:
        """The tokens that the file says to end a text, a turn, a message or a part of code."""
        ids = [self.whole(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
        return [int(i) for i in ids if i is not None and 0 <= i < self.words]

    def strings(self, name: str) -> list[str]:
        """The strings of an array behind ``tokenizer.``."""
        return list(self.reader.fields[f"tokenizer.{name}"].contents())
