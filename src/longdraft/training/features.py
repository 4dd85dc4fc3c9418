"""Computes the target's features (a draft's inputs for each token) and the target's argmax tokens.

The features of a LongSpec draft are the last layer's keys and values. The features of an EAGLE-3 draft are the hidden
states of a few layers. A small language model reads token ids alone.

Shapes: a document has L tokens; the target has Hkv KV heads of d numbers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from longdraft.files import atomic_write, open_safetensors
from longdraft.memory.store import KVStore
from longdraft.model.quant.stored import dequantize
from longdraft.model.rope import apply_rotary
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import HeadWeight
from longdraft.training.documents import Document

# Tokens of a prefill chunk, and fewest tokens of the KV store, which a longer document replaces by a larger one.
PREFILL_CHUNK, MIN_STORE_TOKENS = 1024, 2048
# Added to the error about a damaged file of the cache.
ADVICE = "Delete the file: its features are computed again."
# Number of first tokens that keep their positions. LongSpec calls them anchors: they are attention sinks.
NUM_ANCHORS = 4


def anchor_offset_positions(length: int, offset: int) -> torch.Tensor:
    """Returns anchor-offset indices (LongSpec, section 3.2), (length,) int64: 0 .. 3, then 4 + offset, 5 + offset, ...

    With random offsets over the whole context, a draft that is trained on short text sees every position. The target
    runs at the same positions, which hardly changes the target's output.
    """
    positions = torch.arange(length)
    positions[NUM_ANCHORS:] += offset
    return positions


@dataclass
class Features:
    """The features of one document."""

    token_ids: torch.Tensor  # (L,) int64
    start: int  # index of the first token that counts in the loss
    offset: int  # the document's anchor-offset; 0: positions are 0, 1, 2, ...
    # the draft's inputs by name: ``keys`` (after RoPE) and ``values`` (L, Hkv, d) of the last layer, or ``hidden`` (L,
    # layers * hidden size), output states of some layers, or none. For distillation also ``last`` (L, hidden size), the
    # last layer's output before the final norm, unless ``hidden`` ends with it
    tensors: dict[str, torch.Tensor]
    # (L - start,) int64, the target's argmax for each of token_ids[start:]; None: not computed
    target_argmax: torch.Tensor | None
    document_mask: list[bool] | None = None  # ``Document.loss_mask``; None: all from ``start`` on count

    @property
    def loss_mask(self) -> torch.Tensor:
        """(L,) bool, True for tokens that count in the loss."""
        if self.document_mask is not None:
            return torch.tensor(self.document_mask)
        return torch.arange(len(self.token_ids)) >= self.start

    @property
    def keys(self) -> torch.Tensor:
        """(Hkv, L, d), the last layer's keys."""
        return self.tensors["keys"].transpose(0, 1)

    @property
    def values(self) -> torch.Tensor:
        """(Hkv, L, d), the last layer's values."""
        return self.tensors["values"].transpose(0, 1)

    @property
    def hidden(self) -> torch.Tensor:
        """(L, layers * hidden size), output states of some layers."""
        return self.tensors["hidden"]

    @property
    def last(self) -> torch.Tensor:
        """(L, at least hidden size). The last ``hidden size`` columns are the last layer's output states."""
        return self.tensors["last" if "last" in self.tensors else "hidden"]

    @property
    def positions(self) -> torch.Tensor:
        """(L,) int64, the positions at which the target reads the tokens."""
        return anchor_offset_positions(len(self.token_ids), self.offset)


class FeatureReader:
    """Computes the features of documents, one document at a time.

    Args:
        layers: decoder layers, from 0, whose output states the draft reads; (): the last layer's keys and values; None:
            token ids alone.
        with_last: add the last layer's output, for distillation.
        cache: a folder with a file of features for each document. Runs may share the folder, because a file's name is
            a hash of everything that the features depend on. None: features are not stored.
        identity: the target and the dtypes, as a value whose ``repr`` goes into the hash.
        with_argmax: compute the target's argmax too, which takes logits over the target's vocabulary.

    Attributes:
        tensor_names: the keys of :attr:`Features.tensors`.
        taps: decoder layers whose output states the KV store records.
    """

    def __init__(
        self, runner: TargetRunner, dtype: torch.dtype = torch.bfloat16, layers: tuple[int, ...] | None = (),
        with_last: bool = False, cache: Path | None = None, identity: Any = None, with_argmax: bool = True,
    ) -> None:  # fmt: skip
        self.runner, self.dtype, self.layers, self.with_argmax = runner, dtype, layers or (), with_argmax
        add_last = with_last and runner.num_layers - 1 not in self.layers
        self.taps = self.layers + (runner.num_layers - 1,) * add_last
        reads_kv = layers == ()
        is_needed = {"hidden": bool(layers), "keys": reads_kv, "values": reads_kv, "last": add_last}
        self.tensor_names = tuple(name for name, needed in is_needed.items() if needed)
        self.cache, self._identity = cache, repr((identity, self.tensor_names, self.layers))
        self._store: KVStore | None = None

    def read(self, document: Document, offset: int = 0) -> Features:
        """Returns the features of a document with an anchor-offset, from the cache if there is one. Raises
        CheckpointError if a cache file is damaged or cannot be written, MemoryBudgetError if the KV does not fit.

        The cache has features without an offset, for runs of every offset and seed. Keys are rotated to the offset;
        values and states stay, because the offset hardly changes them (LongSpec, section 3.2).
        """
        if self.cache is None:
            return self.compute(document, offset)
        features = self._read_cached(document)
        if offset and "keys" in self.tensor_names:
            positions, keys = torch.tensor([0, offset]), features.tensors["keys"]
            cos, sin = (t.to(keys.device) for t in self.runner.shared_parts.rotary(positions.to(self.runner.device)))
            # cos at position 0 is YaRN's attention factor (1 without YaRN), which the keys have already.
            keys[NUM_ANCHORS:] = apply_rotary(keys[NUM_ANCHORS:], cos[1:] / cos[:1], sin[1:] / cos[:1])
        features.offset = offset
        return features

    def _read_cached(self, document: Document) -> Features:
        """Reads features from the cache, or computes and stores them. The loss mask is not stored."""
        assert self.cache is not None
        # The 0 is the anchor-offset, which names of earlier versions contain: their files without one stay valid.
        hashed = hashlib.sha256(f"{self._identity}/{document.start}/0/".encode())
        hashed.update(array("q", document.token_ids).tobytes())
        digest = hashed.hexdigest()[:32]
        path = self.cache / digest[:2] / f"{digest}.safetensors"
        names = {*self.tensor_names} | ({"likeliest"} if self.with_argmax else set())
        if path.exists():
            with open_safetensors(path, ADVICE) as file:
                # The run of another kind of draft may have stored the same tensors without the argmax.
                tensors = {name: file.get_tensor(name) for name in names & {*file.keys()}}
            if tensors.keys() == names:
                argmax = tensors.pop("likeliest").long() if self.with_argmax else None
                ids = torch.tensor(document.token_ids)
                return Features(ids, document.start, 0, tensors, argmax, document.loss_mask)
        features = self.compute(document, 0)
        argmax = features.target_argmax
        tensors = features.tensors | ({} if argmax is None else {"likeliest": argmax.int()})
        with atomic_write(path) as part:
            save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, part)
        return features

    def compute(self, document: Document, offset: int) -> Features:
        """Computes the features of a document with an anchor-offset, in prefill chunks, without the cache."""
        ids, length = document.token_ids, len(document.token_ids)
        argmax = [logits.argmax(-1) for logits in self._forward(document, offset, self.with_argmax)]
        store = self._store
        assert store is not None
        # Copies, because the next document overwrites the store.
        tensors: dict[str, torch.Tensor] = {}
        if store.features is not None:
            tensors |= self.split_states(store.features[0, :length].to(self.dtype, copy=True))
        if "keys" in self.tensor_names:
            for name, kv in zip(("keys", "values"), store.layer(-1), strict=True):
                tensors[name] = kv[0, :, :length].transpose(0, 1).to(self.dtype, copy=True).contiguous()
        target_argmax = torch.cat(argmax)[:-1] if argmax else None
        return Features(torch.tensor(ids), document.start, offset, tensors, target_argmax, document.loss_mask)

    def target_loss(self, document: Document, offset: int) -> float:
        """Returns the target's mean loss (nats a token) from the document's ``start`` on, at an anchor-offset."""
        logits = torch.cat(list(self._forward(document, offset, True)))[:-1]
        labels = torch.tensor(document.token_ids[document.start :], device=logits.device)
        return float(cross_entropy(logits.float(), labels))

    def _forward(self, document: Document, offset: int, with_logits: bool) -> Iterator[torch.Tensor]:
        """Runs the target over a document, whose KV and states are in ``_store`` afterwards. Yields the logits
        (n, vocabulary) of pieces, from the token before ``start`` on; nothing without ``with_logits``."""
        ids, start, length = document.token_ids, document.start, len(document.token_ids)
        if self._store is None or self._store.capacity < length:
            self._store = self.runner.new_store(1, max(MIN_STORE_TOKENS, length), self.taps)
        store, positions = self._store, anchor_offset_positions(length, offset).tolist()
        store.truncate(0, 0)
        begin = 0
        while begin < length:
            # The last token is computed too, for its KV.
            needs_logits = with_logits and begin >= start - 1
            end = min(begin + PREFILL_CHUNK, length if needs_logits or not with_logits else start - 1)
            depths = [[p - begin for p in positions[begin:end]]]  # positions, counted from the end of the store
            batch = store.make_forward_batch([0], [ids[begin:end]], depths=depths, is_prefill=True, prompt_len=length)
            out = self.runner.forward(batch, store, logits="all" if needs_logits else "none")
            store.commit(0, range(end - begin))
            if out.logits is not None:
                yield out.logits[0]
            begin = end

    def split_states(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Splits the states of all taps (L, taps * hidden size) into the tensors ``hidden`` and ``last``."""
        width = len(self.layers) * self.runner.shared_parts.hidden_size
        parts = {"hidden": states[:, :width], "last": states[:, width:]}
        return {name: part for name, part in parts.items() if name in self.tensor_names}


def head_rows(head: HeadWeight, token_ids: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows of an LM head for some target ids (None: all), dequantized."""
    if token_ids is not None:
        token_ids = token_ids.to(head.device)
        head = head[token_ids] if isinstance(head, torch.Tensor) else head.select_rows(token_ids)
    return head if isinstance(head, torch.Tensor) else dequantize(head)
