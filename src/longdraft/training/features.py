"""What a draft needs of its target, token by token: the last layer's keys and values, and its likeliest next tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from longdraft.kv.prompt_cache import common_prefix
from longdraft.kv.store import KVStore
from longdraft.target.runner import TargetRunner
from longdraft.training.documents import Document
from longdraft.training.positions import anchor_offset

CHUNK = 1024


@dataclass
class Features:
    """One document as a draft trains on it.

    Attributes:
        tokens: (L,) int64. start: the first token that is learned.
        offset: its anchor-offset, 0 for plain positions.
        keys, values: (Hkv, L, d) of the target's last layer, keys after RoPE at the document's positions.
        top_ids, top_log_probs: (L - start, K), what the target says in place of tokens[start:].
    """

    tokens: torch.Tensor
    start: int
    offset: int
    keys: torch.Tensor
    values: torch.Tensor
    top_ids: torch.Tensor
    top_log_probs: torch.Tensor

    def on_host(self) -> Features:
        """The same in the CPU's memory, for features that are kept for long."""
        moved = {name: getattr(self, name).cpu() for name in ("keys", "values", "top_ids", "top_log_probs")}
        return replace(self, **moved)

    @property
    def positions(self) -> torch.Tensor:
        """(L,) int64."""
        return anchor_offset(len(self.tokens), self.offset)


class FeatureReader:
    """Runs documents through the target. Documents that begin alike, one after the other, share what is alike.

    Args:
        top: how many of the target's likeliest tokens are kept.
        dtype: of the keys and values.
    """

    def __init__(self, runner: TargetRunner, top: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.runner, self.top, self.dtype = runner, top, dtype
        self._store: KVStore | None = None
        self._seen: list[int] = []
        self._offset = 0

    def forget(self) -> None:
        """Makes the next document be read from its first token on, whatever was read before.

        Features then depend on the document alone, to the last bit: the same in a run that was resumed.
        """
        self._seen = []

    def read(self, document: Document, offset: int = 0) -> Features:
        """The features of one document whose tokens from the fifth on are shifted by ``offset`` positions.

        Raises:
            MemoryBudgetError: the target's KV of the document does not fit.
            NumericalError: the target returned NaN.
        """
        tokens, start = document.tokens, document.start
        if self._store is None or self._store.capacity < len(tokens):
            self._store = self.runner.new_store(1, max(2048, len(tokens)))
            self._seen = []
        store = self._store
        # The logits from the row before the first learned token on are needed: those rows are always run.
        shared = common_prefix(self._seen, tokens[: start - 1]) if offset == self._offset else 0
        store.truncate(0, min(shared, store.lengths[0]))
        self._seen, self._offset = tokens, offset
        positions = anchor_offset(len(tokens), offset).tolist()
        ids, log_probs = [], []
        done = store.lengths[0]
        while done < len(tokens):
            # The last token's own prediction is nobody's target, but its KV closes the document.
            end = min(done + CHUNK, len(tokens) if done >= start - 1 else start - 1)
            out = self.runner.forward(
                [tokens[done:end]],
                store,
                [0],
                depths=[[p - done for p in positions[done:end]]],
                logits="all" if done >= start - 1 else "none",
            )
            store.commit(0, range(end - done))
            if out.logits is not None:
                top = out.logits[0].topk(self.top)
                ids.append(top.indices)
                log_probs.append(top.values - torch.logsumexp(out.logits[0], -1, keepdim=True))
            done = end
        keys, values = (x[0, :, : len(tokens)].to(self.dtype, copy=True).contiguous() for x in store.layer(-1))
        return Features(
            torch.tensor(tokens), start, offset, keys, values, torch.cat(ids)[:-1], torch.cat(log_probs)[:-1]
        )
