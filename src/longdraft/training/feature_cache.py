"""Features on disk: the target runs once, the draft trains on them for as many epochs as it likes.

A cache is a folder of shards, each a safetensors file of a few hundred documents laid end to end, and an
``index.json`` that says what they were made from. A shard appears whole or not at all, so a run that was killed
goes on with the next one; several processes fill shards side by side.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from longdraft.errors import CheckpointError
from longdraft.training import feature_files
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader, Features

SHARD = 128
# Of the free bytes: what a cache may take.
USABLE = 0.95


def bytes_needed(documents: Sequence[Document], bytes_per_token: int, top: int) -> int:
    """Bytes of a cache of these documents.

    Args:
        bytes_per_token: of what the draft reads. A token takes 4 more, and 6 for each of ``top`` predictions.
    """
    return sum(len(d.tokens) * (bytes_per_token + 4) + (len(d.tokens) - d.start) * top * 6 for d in documents)


class FeatureCache:
    """The features of a list of documents: checked, filled, then read from disk where they lie.

    Args:
        folder: of the shards.
        documents, offsets: whose features; ``offsets`` as :class:`FeatureReader` takes them.
        identity: what the features depend on beside the documents: the target, the dtype.
        top: how many predictions a token has.
        names: of what the draft reads, as :class:`Features` names it.
    """

    def __init__(
        self,
        folder: Path,
        documents: Sequence[Document],
        offsets: Sequence[int],
        identity: dict[str, Any],
        top: int,
        names: Sequence[str] = ("keys", "values"),
    ) -> None:
        self.folder, self.documents, self.offsets, self.top, self.names = folder, documents, offsets, top, names
        self.index = json.loads(json.dumps(identity)) | {
            "lengths": [len(d.tokens) for d in documents],
            "starts": [d.start for d in documents],
            "offsets": list(offsets),
            "top": top,
        }
        # Where each document begins within its shard: rows of tokens, rows of predictions.
        self._rows: list[tuple[int, int]] = []
        for s in self.shards:
            part = self._of_shard(s)
            tokens = accumulate((len(d.tokens) for d in part), initial=0)
            learned = accumulate((len(d.tokens) - d.start for d in part), initial=0)
            self._rows += list(zip(tokens, learned, strict=True))[:-1]
        self._files: dict[int, Any] = {}

    @property
    def shards(self) -> range:
        return range(-(-len(self.documents) // SHARD))

    def _of_shard(self, shard: int) -> Sequence[Document]:
        return self.documents[shard * SHARD : (shard + 1) * SHARD]

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> Features:
        """Raises CheckpointError where a shard is missing or damaged."""
        shard = i // SHARD
        document, (a, c) = self.documents[i], self._rows[i]
        b, d = a + len(document.tokens), c + len(document.tokens) - document.start
        with self._readable(shard):
            if shard not in self._files:
                self._files[shard] = safe_open(self.path(shard), framework="pt").__enter__()
            part = {name: self._files[shard].get_slice(name) for name in (*self.names, "ids", "lps")}
            return Features(
                tokens=torch.tensor(document.tokens),
                start=document.start,
                offset=self.offsets[i],
                rows={name: part[name][a:b] for name in self.names},
                top_ids=part["ids"][c:d].long(),
                top_log_probs=part["lps"][c:d].float(),
            )

    def _readable(self, shard: int) -> AbstractContextManager[None]:
        advice = "Delete the file and run again: the cache fills what is missing."
        return feature_files.readable(self.path(shard), advice)

    def prepare(self, bytes_per_token: int) -> None:
        """Checks what is there and what room there is, before the target runs.

        Args:
            bytes_per_token: of what the draft reads.

        Raises:
            CheckpointError: the folder holds other documents' features, a damaged shard, or the disk has no room:
                said with the bytes that are needed and those that are free.
        """
        of = "other documents, settings or another target"
        feature_files.check_index(self.folder, self.index, of)
        missing: list[Document] = []
        for shard in self.shards:
            if not self.path(shard).exists():
                missing += self._of_shard(shard)
                continue
            # Lengths alone do not tell documents apart.
            with self._readable(shard), safe_open(self.path(shard), framework="pt") as file:
                if file.get_tensor("tokens").tolist() != [t for d in self._of_shard(shard) for t in d.tokens]:
                    raise feature_files.foreign(self.folder, of)
        needed = bytes_needed(missing, bytes_per_token, self.top)
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
        reader: FeatureReader,
        progress: Callable[[int, int], None] = lambda done, total: None,
        share: tuple[int, int] = (0, 1),
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Computes what is missing, after :meth:`prepare`.

        Args:
            progress: told tokens done and all tokens, of this share.
            share: (i, n): fill every n-th shard from the i-th on.
            stop: asked after each document; True ends it, and whole shards are kept.

        Returns:
            Whether the share is complete.

        Raises:
            CheckpointError: a shard cannot be written; those before it are kept.
        """
        mine = self.shards[share[0] :: share[1]]
        total = sum(len(d.tokens) for s in mine for d in self._of_shard(s))
        done = 0
        for shard in mine:
            part = self._of_shard(shard)
            if self.path(shard).exists():
                done += sum(len(d.tokens) for d in part)
                continue
            reader.forget()  # a shard is the same to the bit, whoever fills it and when
            found = []
            for document, offset in zip(part, self.offsets[shard * SHARD :], strict=False):
                found.append(reader.read(document, offset))
                done += len(document.tokens)
                progress(done, total)
                if stop():
                    return False
            feature_files.write(self.path(shard), feature_files.laid_out(found))
        return True
