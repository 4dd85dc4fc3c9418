"""The target's features: what a draft reads of the target for each token, and what the target says comes next.

A LongSpec draft reads the last layer's keys and values, an EAGLE-3 draft the hidden states of a few layers, a language
model only the text.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longdraft.files import atomic_write, open_safetensors
from longdraft.memory.store import KVStore
from longdraft.model.key_rotation import apply_rotary
from longdraft.model.runner import TargetRunner
from longdraft.model.stored import dequantize
from longdraft.native import QuantizedMatrix
from longdraft.training.documents import Document

# Tokens that the target reads in one forward.
CHUNK = 1024
# What to do about a damaged file of a cache.
ADVICE = "Delete the file: it is computed again."
# The first tokens attract attention whatever they are, so they keep their positions.
NUM_ANCHORS = 4


def anchor_offset_positions(length: int, offset: int) -> torch.Tensor:
    """Anchor-offset indices (LongSpec, section 3.2): 0 .. 3 stay, every later token is shifted by one offset.

    With offsets sampled over the whole context, a draft that is trained on short text meets every position, and the
    target loses next to nothing when it is given the same indices.

    Returns:
        (length,) int64.
    """
    positions = torch.arange(length)
    positions[NUM_ANCHORS:] += offset
    return positions


@dataclass
class Features:
    """The features of one document.

    Attributes:
        token_ids: (L,) int64. start: the first token that is learned.
        offset: its anchor-offset, 0 for plain positions.
        tensors: what the draft reads, by name, (L, ...) each: ``keys`` and ``values`` (L, Hkv, d) of the target's last
            layer, keys after RoPE; or ``hidden`` (L, layers * hidden size), output hidden states of some layers side by
            side; or nothing. And ``last`` (L, hidden size), the last layer's output, before the final norm,
            where the loss follows the target's distribution and ``hidden`` does not end with it.
        target_argmax: (L - start,) int64, the target's likeliest tokens in place of tokens[start:]; None: not asked for.
        document_mask: of each token, whether it is learned; None: all are from ``start`` on.
    """

    token_ids: torch.Tensor
    start: int
    offset: int
    tensors: dict[str, torch.Tensor]
    target_argmax: torch.Tensor | None
    document_mask: list[bool] | None = None

    @property
    def loss_mask(self) -> torch.Tensor:
        """(L,) bool, which tokens are learned."""
        if self.document_mask is not None:
            return torch.tensor(self.document_mask)
        return torch.arange(len(self.token_ids)) >= self.start

    @property
    def keys(self) -> torch.Tensor:
        """(Hkv, L, d)."""
        return self.tensors["keys"].transpose(0, 1)

    @property
    def values(self) -> torch.Tensor:
        """(Hkv, L, d)."""
        return self.tensors["values"].transpose(0, 1)

    @property
    def hidden(self) -> torch.Tensor:
        """(L, layers * hidden size)."""
        return self.tensors["hidden"]

    @property
    def last(self) -> torch.Tensor:
        """Hidden states whose last part is the last layer's output (L, at least hidden size)."""
        return self.tensors["last" if "last" in self.tensors else "hidden"]

    @property
    def positions(self) -> torch.Tensor:
        """(L,) int64."""
        return anchor_offset_positions(len(self.token_ids), self.offset)


class FeatureReader:
    """Computes features, of each document by itself.

    Args:
        dtype: of what the draft reads.
        layers: decoder layers whose output hidden states the draft reads (0 is the first); empty: it reads the last
            layer's keys and values; None: it reads nothing of the target.
        last: the last layer's output is kept too, from which the target's distribution is computed.
        cache: a folder that keeps features, a file for each document, whose name says what they were computed from.
            Those of other documents, offsets and targets may lie beside them.
        identity: what they depend on besides: the target, the dtype.
        with_argmax: the target's likeliest tokens are read too, from logits of all its vocabulary.

    Attributes:
        tensor_names: the keys of :attr:`Features.tensors`.
        taps: decoder layers whose output hidden states are kept.
    """

    def __init__(
        self,
        runner: TargetRunner,
        dtype: torch.dtype = torch.bfloat16,
        layers: tuple[int, ...] | None = (),
        last: bool = False,
        cache: Path | None = None,
        identity: Any = None,
        with_argmax: bool = True,
    ) -> None:
        self.runner, self.dtype, self.layers, self.with_argmax = runner, dtype, layers or (), with_argmax
        more = last and runner.num_layers - 1 not in self.layers
        self.taps = self.layers + (runner.num_layers - 1,) * more
        kv = layers == ()
        kept = {"hidden": bool(layers), "keys": kv, "values": kv, "last": more}
        self.tensor_names = tuple(name for name, wanted in kept.items() if wanted)
        self.cache, self._identity = cache, repr((identity, self.tensor_names, self.layers))
        self._store: KVStore | None = None

    def read(self, document: Document, offset: int = 0, cached_offset: int | None = None) -> Features:
        """The features of a document with an anchor-offset.

        Args:
            cached_offset: the offset with which a cache keeps the document; None: this one. Its keys are rotated from there;
                values and states stay, as the target says about the same with either (LongSpec, section 3.2).

        Raises:
            CheckpointError: a file of the cache is damaged, or cannot be written.
            MemoryBudgetError: the document's KV does not fit.
        """
        if self.cache is None:
            return self.compute(document, offset)
        cached_offset = offset if cached_offset is None else cached_offset
        found = self._cached(document, cached_offset)
        if offset != cached_offset and "keys" in self.tensor_names:
            moved, keys = torch.tensor([0, abs(offset - cached_offset)]), found.tensors["keys"]
            cos, sin = (t.to(keys.device) for t in self.runner.shared_parts.rotary(moved.to(self.runner.device)))
            # At position 0 all cosines are 1, but for YaRN's factor, which stays on the keys.
            sin = sin if offset > cached_offset else -sin
            keys[NUM_ANCHORS:] = apply_rotary(keys[NUM_ANCHORS:], cos[1:] / cos[:1], sin[1:] / cos[:1])
        found.offset = offset
        return found

    def _cached(self, document: Document, offset: int) -> Features:
        """The features out of the cache, where they are put if they are missing; what is learned is no part of them."""
        assert self.cache is not None
        hashed = hashlib.sha256(f"{self._identity}/{document.start}/{offset}/".encode())
        hashed.update(array("q", document.token_ids).tobytes())
        name = hashed.hexdigest()[:32]
        path = self.cache / name[:2] / f"{name}.safetensors"
        names = {*self.tensor_names} | ({"likeliest"} if self.with_argmax else set())
        if path.exists():
            with open_safetensors(path, ADVICE) as file:
                # Another kind may have kept the same rows without the likeliest tokens.
                rows = {name: file.get_tensor(name) for name in names & {*file.keys()}}
            if rows.keys() == names:
                likeliest = rows.pop("likeliest").long() if self.with_argmax else None
                return Features(
                    torch.tensor(document.token_ids), document.start, offset, rows, likeliest, document.loss_mask
                )
        found = self.compute(document, offset)
        tensors = found.tensors | ({} if found.target_argmax is None else {"likeliest": found.target_argmax.int()})
        with atomic_write(path) as part:
            save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, part)
        return found

    def compute(self, document: Document, offset: int) -> Features:
        """The same, of the target itself."""
        tokens, start, length = document.token_ids, document.start, len(document.token_ids)
        if self._store is None or self._store.capacity < length:
            self._store = self.runner.new_store(1, max(2048, length), self.taps)
        store, positions = self._store, anchor_offset_positions(length, offset).tolist()
        store.truncate(0, 0)
        likeliest, done = [], 0
        while done < length:
            # Logits are wanted from the row before the first learned token on. Nothing is learned from the last
            # token's, but its KV completes the document.
            wanted = self.with_argmax and done >= start - 1
            end = min(done + CHUNK, length if wanted or not self.with_argmax else start - 1)
            depths = [[p - done for p in positions[done:end]]]
            block = store.make_forward_batch([0], [tokens[done:end]], depths=depths, is_prefill=True, prompt_len=length)
            out = self.runner.forward(block, store, logits="all" if wanted else "none")
            store.commit(0, range(end - done))
            if out.logits is not None:
                likeliest.append(out.logits[0].argmax(-1))
            done = end
        # Copies, because the next document overwrites the store.
        rows: dict[str, torch.Tensor] = {}
        if store.features is not None:
            rows |= self.split_states(store.features[0, :length].to(self.dtype, copy=True))
        if "keys" in self.tensor_names:
            for name, kept in zip(("keys", "values"), store.layer(-1), strict=True):
                rows[name] = kept[0, :, :length].transpose(0, 1).to(self.dtype, copy=True).contiguous()
        said = torch.cat(likeliest)[:-1] if likeliest else None
        return Features(torch.tensor(tokens), start, offset, rows, said, document.loss_mask)

    def split_states(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """The taps' states (L, taps * hidden size), by name."""
        width = len(self.layers) * self.runner.shared_parts.hidden_size
        parts = {"hidden": states[:, :width], "last": states[:, width:]}
        return {name: part for name, part in parts.items() if name in self.tensor_names}


def head_rows(head: torch.Tensor | QuantizedMatrix, token_ids: torch.Tensor | None) -> torch.Tensor:
    """The rows of a head for the target ids ``cached_offset`` (None: all), as floats."""
    if token_ids is not None:
        token_ids = token_ids.to(head.device)
        head = head.select_rows(token_ids) if isinstance(head, QuantizedMatrix) else head[token_ids]
    return dequantize(head) if isinstance(head, QuantizedMatrix) else head
