"""The target's features: what a draft reads of the target for each token, and what the target says comes next.

A LongSpec draft reads the last layer's keys and values, an EAGLE-3 draft the hidden states of a few layers, a language
model only the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix
from longdraft.model.runner import TargetRunner
from longdraft.training.documents import Document
from longdraft.training.in_step import InStepRunner

# Tokens that the target reads in one forward.
CHUNK = 1024
# The same where each layer is gathered first: an H100 computes a layer of 32B for 10 ms, and gathers it in 3.
GATHERED = 4 * CHUNK
# Tokens, padding included, of short documents that it reads together; GATHERED where that counts.
TOGETHER = 2 * CHUNK
# The first tokens attract attention whatever they are, so they keep their positions.
ANCHORS = 4


def anchor_offset(length: int, offset: int) -> torch.Tensor:
    """Anchor-offset indices (LongSpec, section 3.2): 0 .. 3 stay, every later token is shifted by one offset.

    With offsets sampled over the whole context, a draft that is trained on short text meets every position, and the
    target loses next to nothing when it is given the same indices.

    Returns:
        (length,) int64.
    """
    positions = torch.arange(length)
    positions[ANCHORS:] += offset
    return positions


@dataclass
class Features:
    """The features of one document.

    Attributes:
        tokens: (L,) int64. start: the first token that is learned.
        offset: its anchor-offset, 0 for plain positions.
        rows: what the draft reads, by name, (L, ...) each: ``keys`` and ``values`` (L, Hkv, d) of the target's last
            layer, keys after RoPE; or ``hidden`` (L, layers * hidden size), output hidden states of some layers side by
            side; or both; or nothing. And ``last`` (L, hidden size), the last layer's output, before the final norm,
            where the loss follows the target's distribution and ``hidden`` does not end with it.
        likeliest: (L - start,) int64, the target's likeliest tokens in place of tokens[start:].
    """

    tokens: torch.Tensor
    start: int
    offset: int
    rows: dict[str, torch.Tensor]
    likeliest: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that the target has computed."""
        return *self.rows.values(), self.likeliest

    def on_host(self) -> Features:
        """A copy in the CPU's memory, for features that are kept for long."""
        rows = {name: t.cpu() for name, t in self.rows.items()}
        return replace(self, rows=rows, likeliest=self.likeliest.cpu())

    @property
    def keys(self) -> torch.Tensor:
        """(Hkv, L, d)."""
        return self.rows["keys"].transpose(0, 1)

    @property
    def values(self) -> torch.Tensor:
        """(Hkv, L, d)."""
        return self.rows["values"].transpose(0, 1)

    @property
    def hidden(self) -> torch.Tensor:
        """(L, layers * hidden size)."""
        return self.rows["hidden"]

    @property
    def last(self) -> torch.Tensor:
        """Hidden states whose last part is the last layer's output (L, at least hidden size)."""
        return self.rows["last" if "last" in self.rows else "hidden"]

    @property
    def positions(self) -> torch.Tensor:
        """(L,) int64."""
        return anchor_offset(len(self.tokens), self.offset)


class FeatureReader:
    """Computes features. Consecutive documents that begin alike share the forwards of their beginning.

    Args:
        dtype: of what the draft reads.
        layers: decoder layers whose output hidden states the draft reads (0 is the first); empty: it reads the last
            layer's keys and values; None: it reads nothing of the target.
        keys: beside hidden states, it reads the last layer's keys and values.
        last: the last layer's output is kept too, from which the target's distribution is computed.

    Attributes:
        names: the keys of :attr:`Features.rows`.
        taps: decoder layers whose output hidden states are kept.
    """

    def __init__(
        self,
        runner: TargetRunner,
        dtype: torch.dtype = torch.bfloat16,
        layers: tuple[int, ...] | None = (),
        keys: bool = False,
        last: bool = False,
    ) -> None:
        self.runner, self.dtype, self.layers = runner, dtype, layers or ()
        more = () if not last or runner.depth - 1 in self.layers else (runner.depth - 1,)
        self.taps = self.layers + more
        both = keys or layers == ()
        kept = {"hidden": bool(layers), "keys": both, "values": both, "last": bool(more)}
        self.names: tuple[str, ...] = tuple(name for name, wanted in kept.items() if wanted)
        self._chunk = GATHERED if isinstance(runner, InStepRunner) else CHUNK
        self._store: KVStore | None = None
        self._last_tokens: list[int] = []
        self._last_offset = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of :attr:`Features.rows` for one token."""
        kv = self.runner.kv_shape
        numbers = len(self.taps) * self.runner.parts.hidden_size
        numbers += 2 * kv.kv_heads * kv.head_dim if "keys" in self.names else 0
        return numbers * self.dtype.itemsize

    def forget(self) -> None:
        """Makes the next document's features depend on it alone, to the last bit, as a resumed run needs them."""
        self._last_tokens = []

    def finish(self) -> None:
        """Waits until all processes have read what they wanted, if they read in step."""
        if isinstance(self.runner, InStepRunner):
            self.runner.finish()

    def read(self, document: Document, offset: int = 0) -> Features:
        """The features of a document with an anchor-offset. Raises MemoryBudgetError if its KV does not fit."""
        tokens, start = document.tokens, document.start
        if self._store is None or self._store.capacity < len(tokens):
            self._store = self.runner.new_store(1, max(2048, len(tokens)), self.taps)
            self._last_tokens = []
        store = self._store
        # Logits are needed from the row before the first learned token on, so these rows are always computed.
        shared = common_prefix(self._last_tokens, tokens[: start - 1]) if offset == self._last_offset else 0
        store.truncate(0, store.restorable(0, shared))
        self._last_tokens, self._last_offset = tokens, offset
        positions = anchor_offset(len(tokens), offset).tolist()
        likeliest = []
        done = store.lengths[0]
        while done < len(tokens):
            # Nothing is learned from the last token's logits, but its KV completes the document.
            end = min(done + self._chunk, len(tokens) if done >= start - 1 else start - 1)
            depths = [[p - done for p in positions[done:end]]]
            block = store.block([0], [tokens[done:end]], depths=depths, prompt=True, text=len(tokens))
            out = self.runner.forward(block, store, logits="all" if done >= start - 1 else "none")
            store.commit(0, range(end - done))
            if out.logits is not None:
                likeliest.append(out.logits[0].argmax(-1))
            done = end
        rows = self._rows(store, 0, len(tokens))
        return Features(torch.tensor(tokens), start, offset, rows, torch.cat(likeliest)[:-1])

    def read_together(self, documents: Sequence[Document], offsets: Sequence[int]) -> list[Features]:
        """The features of each document; short ones share forwards. They depend on these documents alone."""
        self.forget()
        found: dict[int, Features] = {}
        groups: list[list[int]] = [[]]
        kind = ""
        # By length, so that little is padded.
        for i in sorted(range(len(documents)), key=lambda i: len(documents[i].tokens)):
            size = len(documents[i].tokens)
            if size > self._chunk:
                self.forget()
                found[i] = self.read(documents[i], offsets[i])
                continue
            before, kind = kind, self.runner.rows_kind(size)
            if (len(groups[-1]) + 1) * size > max(TOGETHER, self._chunk) or kind != before:
                groups.append([])
            groups[-1].append(i)
        for group in filter(None, groups):
            found |= self._forward(group, documents, offsets)
        return [found[i] for i in range(len(documents))]

    def _forward(
        self, group: Sequence[int], documents: Sequence[Document], offsets: Sequence[int]
    ) -> dict[int, Features]:
        """The features of a few documents, read in one forward."""
        size = max(len(documents[i].tokens) for i in group)
        store = self.runner.new_store(len(group), size, self.taps)
        # Padding comes last, so no row of the text sees it. Nothing is committed, because nothing follows.
        padded, positions = [], []
        for i in group:
            own = documents[i].tokens
            places = anchor_offset(len(own), offsets[i]).tolist()
            padded.append([*own, *own[-1:] * (size - len(own))])
            positions.append([*places, *places[-1:] * (size - len(own))])
        block = store.block(range(len(group)), padded, depths=positions, prompt=True, text=size)
        logits = self.runner.forward(block, store, logits="all").logits
        assert logits is not None
        found = {}
        for slot, i in enumerate(group):
            document, length = documents[i], len(documents[i].tokens)
            likeliest = logits[slot, document.start - 1 : length - 1].argmax(-1)
            rows = self._rows(store, slot, length)
            found[i] = Features(torch.tensor(document.tokens), document.start, offsets[i], rows, likeliest)
        return found

    def _rows(self, store: KVStore, slot: int, length: int) -> dict[str, torch.Tensor]:
        """Copies, because the next document overwrites the store."""
        rows: dict[str, torch.Tensor] = {}
        if store.features is not None:
            states = store.features[slot, :length].to(self.dtype, copy=True)
            width = len(self.layers) * self.runner.parts.hidden_size
            parts = {"hidden": states[:, :width], "last": states[:, width:]}
            rows |= {name: part for name, part in parts.items() if name in self.names}
        if "keys" in self.names:
            keys, values = (x[slot, :, :length].transpose(0, 1).to(self.dtype, copy=True) for x in store.layer(-1))
            rows |= {"keys": keys.contiguous(), "values": values.contiguous()}
        return rows


class LiveFeatures:
    """Features that are computed when they are asked for, and not kept."""

    from_disk = False

    def __init__(self, reader: FeatureReader, documents: Sequence[Document], offsets: Sequence[int]) -> None:
        self.reader, self.documents, self.offsets = reader, documents, offsets

    def __getitem__(self, i: int) -> Features:
        self.reader.forget()
        return self.reader.read(self.documents[i], self.offsets[i])

    def batch(self, documents: Sequence[int]) -> list[Features]:
        """A GPU reads short documents together. A CPU is as busy with one, and spares the head for its prompt."""
        if self.reader.runner.device.type == "cpu":
            return [self[i] for i in documents]
        return self.reader.read_together([self.documents[i] for i in documents], [self.offsets[i] for i in documents])
