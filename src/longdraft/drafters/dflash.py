"""DFlash, DFlash2 and DSpark: a block of tokens from one forward of a few layers, from published drafts.

    c_t = RMSNorm(fc(f_t))                    f_t: hidden states of the target at position t, side by side
    x   = embed(anchor, mask, ..., mask)      the rows of a block; the anchor is the text's last token
    layer: attention of x to [c, x]           the same k and v projections for both; RoPE at absolute positions
           and SwiGLU, both with norms before
    logits_k = head(RMSNorm(x_k))             of the token at x_k's place; DSpark's of the one behind it

Keys and values of the text are projections of c alone, kept in the draft's own cache: no forward reads a prompt. The
rows of a block see each other in both directions, but do not know each other's tokens. What corrects a level's logits
for the token t before it:

    DSpark    W2 W1[t]                        the gated head: W2 (sigmoid(W [x_k, W1[t]]) W1[t]); the recurrent head
                                              has a state along the path
    DFlash2   (A[t] * (H x_k)) . B            among the likeliest tokens alone; convolutions over the block's rows
                                              before and after attention and SwiGLU

DFlash: arXiv:2602.06036; DSpark: arXiv:2607.05147.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from longdraft.attention.transfer import on_device
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.onepass import CANDIDATES, OneForwardRound, OnePassDrafter, Row, rest_of
from longdraft.drafters.shared.dflash_block import DFlashBlock
from longdraft.drafters.shared.eagle3_round import BoundDraft, last_row
from longdraft.drafts import dflash_formats
from longdraft.drafts.dflash_formats import KIND, DFlashShape
from longdraft.drafts.draft_folder import shape_of
from longdraft.drafts.eagle_formats import check_mask
from longdraft.drafts.kinds import Kind, register
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.runner import TargetRunner
from longdraft.model.sharded import product
from longdraft.trees.level import Level, likeliest


class DFlashDraft(Eagle3Draft):
    """A draft in the layout of its authors, or of `speculators`."""

    kind, label = KIND, "DFlash"

    @classmethod
    def load(
        cls,
        folder: Path | str,
        rope_theta: float | None = None,
        head_dim: int | None = None,
        rope_factor: float | None = None,
    ) -> DFlashDraft:
        return cls(folder, *dflash_formats.read(folder, rope_theta, head_dim, rope_factor))

    @cached_property
    def shape(self) -> DFlashShape:  # type: ignore[override]
        shape = shape_of(DFlashShape, self.config, self.folder, self.label)
        if shape.slots < 1 or shape.heads % shape.kv_heads or (shape.group and shape.hidden_size % shape.group):
            raise CheckpointError(f"config.json of {self.folder} has sizes that cannot be right: copy the draft again.")
        return shape

    def module(self) -> DFlashBlock:  # type: ignore[override]
        tokens = self.config.get("target_vocabulary") or self.shape.vocabulary
        return DFlashBlock(self.shape, tokens, self.config["causal"], self.config["windows"])

    def usual_layers(self, count: int) -> tuple[int, ...]:
        """The layers that the authors' code takes: evenly from the second to the fourth from the end."""
        n = self.shape.feature_size // self.made_for["hidden_size"]
        return (count // 2,) if n == 1 else tuple(round(1 + i * (count - 4) / (n - 1)) for i in range(n))

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        if not self.shape.own_mask:
            rows = self.shape.embedding or runner.parts.head.shape[0]
            check_mask(self.shape.mask_token, rows, self.folder)

    def make(self, runner: TargetRunner) -> BoundDraft:
        block, rotary = self.placed(runner), self.rotary(runner.kv_shape.dtype, runner.device)
        embedding = runner.parts.embedding if self.shape.embedding is None else block.embed_tokens
        ids = None if self.ids is None else self.ids.to(runner.device)
        if not self.shape.own_head:
            head, _ = self.head(runner)
            block.borrow(product(head))
        return BoundDraft(block, embedding, rotary, ids, None, None, FewRowsModule(block))

    def trainable(self) -> Any:
        raise CapabilityError(f"{self.folder} holds a DFlash draft, which longdraft does not train.")


class DFlashDrafter(OnePassDrafter):
    """Drafts trees with one forward a round.

    Args:
        draft: a trained draft.
        options: as of the one-pass drafter.
    """

    draft: DFlashDraft  # type: ignore[assignment]

    @property
    def deep(self) -> bool:
        return False  # its layers see projections of the target's states alone

    def inputs(self, slot: int, tokens: Any, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """c (T, hidden) of rows [start, start + T), twice: no token is embedded."""
        assert self._bound is not None and self.store.features is not None
        c = self._bound.block.project(self.store.features[slot, start : start + len(tokens)])
        return c, c

    def round_of(self, bound: BoundDraft, sequences: list[Sequence], depth: int) -> DFlashRound:
        return DFlashRound(self, bound, sequences, depth)


class DFlashRound(OneForwardRound):
    """One round of a batch."""

    def __init__(self, drafter: DFlashDrafter, bound: BoundDraft, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, bound, sequences, depth)
        self._block: Any = bound.block
        self._shape: DFlashShape = drafter.draft.shape
        # Of each sequence, the states (W, rank) of the level's nodes: what the recurrent head knows of their paths.
        self._states: dict[int, torch.Tensor] = {}

    @property
    def candidates(self) -> int:
        if self._shape.top_k is not None:
            return self._shape.top_k
        return CANDIDATES if self._shape.markov_rank is not None else 1

    def ask(self, level: Level, count: int) -> list[Row]:
        """The forward: the text's rows that the cache lacks enter it, then a block of each sequence."""
        block, shape, cache = self._block, self._shape, self._cache
        size = shape.block_size
        ends = []
        for s in (self.sequences[row] for row in level.rows):
            end = last_row(s) + 1
            start = max(cache.end(s.slot), end - cache.window)
            if start < end:
                c, _ = self._drafter.inputs(s.slot, range(start, end), start)
                cos, sin = self._rotary(torch.arange(start, end, device=self._device))
                cache.append(s.slot, start, *block.keys_values(c, c, cos, sin))
            self._drafter.fed(s)
            ends.append(end)
        positions = [end + i for end in ends for i in range(size)]
        cos, sin = self._rotary(on_device(positions, self._device))
        texts = []
        for row in level.rows:
            slot = self.sequences[row].slot
            begin, end = cache.seen(slot)
            texts.append((cache.keys[slot, :, begin:end], cache.values[slot, :, begin:end]))
        hidden = block(self._embedded(level, size), cos, sin, texts)[:, 0 if shape.from_anchor else 1 :][
            :, : self._depth
        ]
        logits = block.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        log_probs, ids = likeliest(logits, count)
        rest = rest_of(log_probs, shape.vocabulary)
        return [
            Row(*each)
            for each in zip(
                *(t[:, :, None].unbind(1) for t in (log_probs, ids, rest)), hidden[:, :, None].unbind(1), strict=True
            )
        ]

    def _embedded(self, level: Level, size: int) -> torch.Tensor:
        """(B, S, hidden) of the anchors, and of the mask in all other rows."""
        shape = self._shape
        masks = torch.full((len(level.rows), size - 1), shape.mask_token, device=level.tokens.device, dtype=torch.long)
        if not shape.own_mask:
            x: torch.Tensor = self._bound.embedding(torch.cat([level.tokens, masks], 1))
        else:
            mask = self._block.mask_embedding.expand(*masks.shape, -1)
            x = torch.cat([self._bound.embedding(level.tokens), mask], 1)
        return x * shape.embedding_scale if shape.embedding_scale != 1 else x

    def corrected(self, level: Level, row: Row) -> torch.Tensor:
        width, shape = level.tokens.shape[1], self._shape
        if shape.selector_rank is not None:
            return row.log_probs + self._selected(level, row)
        if shape.markov_rank is None:
            return row.log_probs.expand(-1, width, -1)
        head, hidden = self._block.markov_head, row.beside.expand(-1, width, -1)
        known = head.markov_w1(level.tokens)
        if shape.gated:
            known = torch.sigmoid(head.gate_proj(torch.cat([hidden, known], -1))) * known
        elif shape.recurrent:
            known = self._recurrent(level, known, hidden)
        successors = head.markov_w2.weight[row.ids[:, 0]]
        return row.log_probs + (known @ successors.mT).float()

    def _recurrent(self, level: Level, known: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Advances the recurrent head to a level: its output (B', W, rank) for each node. Keeps the nodes' states."""
        if level.depth == 0:
            state = torch.zeros_like(known)
        else:
            state = torch.stack([self._states[row][level.parents[i]] for i, row in enumerate(level.rows)])
        joined = self._block.markov_head.joint_proj(torch.cat([state, known, hidden], -1))
        gate, candidate, out = joined.chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        self._states = dict(zip(level.rows, state, strict=True))
        return torch.tanh(out)

    def _selected(self, level: Level, row: Row) -> torch.Tensor:
        """DFlash2's correction (B', W, M)."""
        selector = self._block.candidate_selector
        known = selector.predecessor_codebook[level.tokens] * selector.hidden_projection(row.beside)
        return (known @ selector.successor_codebook[row.ids[:, 0]].mT).float()


register(
    Kind(
        KIND,
        DFlashDraft.load,
        DFlashDrafter,
        "published drafts of DFlash, DFlash2 and DSpark: a block of tokens from one forward",
        "DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147",
        # Its norm of the hidden states is no layer's.
        tensors=lambda names: any(name.removeprefix("model.") == "hidden_norm.weight" for name in names),
    )
)
