"""Features on disk: the target runs once, and the draft trains on its features for any number of epochs.

A cache is a folder of shards, a safetensors file for each 128 documents laid end to end, and an ``index.json`` that
says what they were computed from. A shard appears whole or not at all, so a killed run continues with the next one.
Several processes fill shards side by side.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from longdraft.errors import CheckpointError
from longdraft.files import opened
from longdraft.training import feature_files
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader, Features

SHARD = 128
# Share of the free bytes that a cache may take.
USABLE = 0.95
# What to do about a damaged shard.
ADVICE = "Delete the file and run again: the cache fills what is missing."
OTHER = "other documents, settings, another target or an earlier version"


def bytes_needed(documents: Sequence[Document], bytes_per_token: int) -> int:
    """Bytes of a cache: for each token ``bytes_per_token`` and 4 more, for each learned one another 4."""
    return sum(len(d.tokens) * (bytes_per_token + 4) + (len(d.tokens) - d.start) * 4 for d in documents)


class FeatureCache:
    """The features of a list of documents: checked, computed, then read from disk.

    Args:
        folder: folder of the shards.
        documents, offsets: the documents and their anchor-offsets.
        identity: what else the features depend on: the target, the dtype.
        reader: computes them.
    """

    def __init__(
        self,
        folder: Path,
        documents: Sequence[Document],
        offsets: Sequence[int],
        identity: dict[str, Any],
        reader: FeatureReader,
    ) -> None:
        self.folder, self.documents, self.offsets, self.reader = folder, documents, offsets, reader
        self.index = identity | {
            "lengths": [len(d.tokens) for d in documents],
            "starts": [d.start for d in documents],
            "offsets": list(offsets),
            "names": list(reader.names),
        }

    @property
    def shards(self) -> range:
        return range(-(-len(self.documents) // SHARD))

    def _documents_of(self, shard: int) -> Sequence[Document]:
        return self.documents[shard * SHARD : (shard + 1) * SHARD]

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def __getitem__(self, i: int) -> Features:
        """Raises CheckpointError if a shard is missing or damaged."""
        shard, document = i // SHARD, self.documents[i]
        before = slice(shard * SHARD, i)
        row = sum(self.index["lengths"][before])
        learned_row = row - sum(self.index["starts"][before])
        rows = slice(row, row + len(document.tokens))
        learned = slice(learned_row, learned_row + len(document.tokens) - document.start)
        with opened(self.path(shard), ADVICE) as file:
            return Features(
                tokens=torch.tensor(document.tokens),
                start=document.start,
                offset=self.offsets[i],
                rows={name: file.get_slice(name)[rows] for name in self.reader.names},
                likeliest=file.get_slice("ids")[learned].long(),
            )

    def prepare(self) -> None:
        """Raises CheckpointError if the folder holds others' features or a damaged shard, or the disk is too full."""
        feature_files.check_index(self.folder, self.index, OTHER)
        missing: list[Document] = []
        for shard in self.shards:
            if not self.path(shard).exists():
                missing += self._documents_of(shard)
                continue
            # The index has the documents' lengths only.
            with opened(self.path(shard), ADVICE) as file:
                if file.get_tensor("tokens").tolist() != [t for d in self._documents_of(shard) for t in d.tokens]:
                    raise feature_files.refused(self.folder, OTHER)
        needed = bytes_needed(missing, self.reader.bytes_per_token)
        free = shutil.disk_usage(self.folder).free
        if needed > USABLE * free:
            raise CheckpointError(
                f"The features of {len(missing)} documents need {needed / 1e9:.2f} GB in {self.folder}, and "
                f"{free / 1e9:.2f} GB are free there. Free some, give fewer documents (`sample`), name a folder on "
                "another disk, or leave `cache` out: the target then runs in every epoch."
            )
        feature_files.write_index(self.folder, self.index)

    def fill(
        self,
        progress: Callable[[int, int], None] = lambda done, total: None,
        share: tuple[int, int] = (0, 1),
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Computes the missing shards, after :meth:`prepare`; returns whether the share is complete.

        Args:
            progress: called with the tokens done and all tokens of this share.
            share: (i, n): fill every n-th shard from the i-th on.
            stop: called after each document; True ends the work, and whole shards are kept.
        """
        shards = self.shards[share[0] :: share[1]]
        total = sum(len(d.tokens) for shard in shards for d in self._documents_of(shard))
        done = 0
        for shard in shards:
            documents = self._documents_of(shard)
            if self.path(shard).exists():
                done += sum(len(d.tokens) for d in documents)
                continue
            self.reader.forget()  # so that a shard is the same to the bit, whoever fills it and when
            features = []
            for document, offset in zip(documents, self.offsets[shard * SHARD :], strict=False):
                features.append(self.reader.read(document, offset))
                done += len(document.tokens)
                progress(done, total)
                if stop():
                    return False
            feature_files.write(self.path(shard), feature_files.joined(features))
        return True
