"""DFlash and DSpark: a block of tokens from one forward of a few layers, from published drafts.

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

DFlash: arXiv:2602.06036; DSpark: arXiv:2607.05147.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from longdraft.attention.sdpa import attend_sequence
from longdraft.attention.transfer import to_device
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.onepass import CANDIDATES, DepthTopk, OnePassDrafter, SingleForwardRound
from longdraft.drafters.shared.draft_block import DraftLayer
from longdraft.drafts.dflash_formats import KIND, DFlashShape
from longdraft.drafts.formats import check_mask_token
from longdraft.drafts.kinds import Kind, register
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import parallel_linear
from longdraft.trees.level import TreeLevel, topk_logprobs


class MarkovHead(nn.Module):
    """DSpark's correction of a level's logits for the token before."""

    def __init__(self, shape: DFlashShape, rank: int, tokens: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, shape.vocabulary, bias=False)
        if shape.gated:
            self.gate_proj = nn.Linear(shape.hidden_size + rank, rank)
        elif shape.recurrent:
            self.joint_proj = nn.Linear(2 * rank + shape.hidden_size, 3 * rank)


class DFlashBlock(nn.Module):
    """The module. Its state dict is the published layout.

    Args:
        tokens: the target's vocabulary.
        causal: for each layer, whether the rows of a block see only those before them.
        windows: for each layer, rows of the text that it sees; None: all.
    """

    has_fused_kernel = False

    def __init__(self, shape: DFlashShape, tokens: int, causal: list[bool], windows: list[int | None]) -> None:
        super().__init__()
        self.shape, self.causal, self.windows = shape, causal, windows
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(shape.feature_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(DraftLayer(shape, size, "input_layernorm") for _ in range(shape.decoder_layers))
        self.norm = nn.RMSNorm(size, eps)
        if shape.own_head:
            self.lm_head = nn.Linear(size, shape.vocabulary, bias=False)
        if shape.embedding is not None:
            self.embed_tokens = nn.Embedding(shape.embedding, size)
        if shape.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size, dtype=torch.float32))
        if shape.markov_rank is not None:
            self.markov_head = MarkovHead(shape, shape.markov_rank, tokens)

    def borrow_head(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Borrows the target's head, (T, hidden) -> (T, vocabulary), for a draft without one of its own."""
        self._head = head

    @property
    def _decoder(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features (T, feature_size) -> c (T, hidden)."""
        out: torch.Tensor = self.hidden_norm(self.fc(features))
        return out

    def keys_values(
        self, x: torch.Tensor, g: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (after RoPE) and values (layers, Hkv, T, d) of rows c (T, hidden) of the text, which ``g`` holds."""
        each = [layer.self_attn.keys_values(g, cos, sin) for layer in self._decoder]
        return torch.stack([k for k, _ in each]), torch.stack([v for _, v in each])

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        texts: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Blocks (B, S, hidden) of embeddings -> their rows behind the last norm (B, S, hidden).

        Args:
            cos, sin: (B * S, d) rotary embedding at the rows' positions.
            texts: each sequence's keys and values (layers, Hkv, n, d) of its text, as :meth:`keys_values` gives them.
        """
        rows = x.flatten(0, 1)
        for i, layer in enumerate(self._decoder):
            rows = layer.run_layer(layer.input_layernorm(rows), rows, cos, sin, partial(self._attend, i, texts))
        found: torch.Tensor = self.norm(rows)
        return found.view(x.shape)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Rows (T, hidden) behind the last norm -> (T, vocabulary)."""
        shape = self.shape
        logits: torch.Tensor = (self.lm_head if shape.own_head else self._head)(out) * shape.logit_scale
        return logits if shape.softcap is None else torch.tanh(logits / shape.softcap) * shape.softcap

    def _attend(
        self,
        index: int,
        texts: list[tuple[torch.Tensor, torch.Tensor]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Attends from the rows of the blocks to their texts, and to each other."""
        window, rows = self.windows[index], q.shape[1] // len(texts)
        seen = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril() if self.causal[index] else None
        outputs = []
        for text, q_, *own in zip(texts, *(x.split(rows, 1) for x in (q, k, v)), strict=True):
            first = 0 if window is None else max(0, text[0].shape[2] - window)
            keys, values = (torch.cat([t[index, :, first:], x], 1) for t, x in zip(text, own, strict=True))
            mask = None if seen is None else F.pad(seen, (keys.shape[1] - rows, 0), value=True)
            outputs.append(attend_sequence(q_, keys, values, mask))
        return torch.cat(outputs, 1)


class DFlashDraft(Eagle3Draft):
    """A draft in the layout of its authors, or of `speculators`."""

    kind, label = KIND, "DFlash"
    shape_type = DFlashShape

    @cached_property
    def shape(self) -> DFlashShape:
        shape: DFlashShape = super().shape
        if shape.slots < 1:
            raise CheckpointError(f"config.json of {self.folder} has sizes that cannot be right: copy the draft again.")
        return shape

    def module(self) -> DFlashBlock:
        tokens = self.config.get("target_vocabulary") or self.shape.vocabulary
        return DFlashBlock(self.shape, tokens, self.config["causal"], self.config["windows"])

    def default_feature_layers(self, count: int) -> tuple[int, ...]:
        """The layers that the authors' code takes, evenly from the second to the fourth from the end, or EAGLE-3's."""
        n = self.shape.feature_size // self.required_target["hidden_size"]
        evenly = (count // 2,) if n == 1 else tuple(round(1 + i * (count - 4) / (n - 1)) for i in range(n))
        return super().default_feature_layers(count) if self.layout == "speculators" else evenly

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        if not self.shape.own_mask:
            check_mask_token(self.shape, runner.shared_parts.head.shape[0], self.folder)

    def load_module(self, runner: TargetRunner) -> DFlashBlock:
        block: DFlashBlock = super().load_module(runner)
        if not self.shape.own_head:
            block.borrow_head(parallel_linear(self.head(runner)[0]))
        return block

    @property
    def is_multi_layer(self) -> bool:
        return False  # its layers see projections of the target's states alone

    def trainable_module(self) -> Any:
        raise CapabilityError(f"{self.folder} holds a DFlash draft, which longdraft does not train.")


class DFlashRound(SingleForwardRound):
    """One round of a batch."""

    def __init__(self, drafter: DFlashDrafter, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, sequences, depth)
        self._shape: DFlashShape = drafter.draft.shape
        # Of each sequence, the states (W, rank) of the level's nodes: what the recurrent head knows of their paths.
        self._states: dict[int, torch.Tensor] = {}

    @property
    def candidates(self) -> int:
        return CANDIDATES if self._shape.markov_rank is not None else 1

    def ask(self, level: TreeLevel, count: int) -> tuple[torch.Tensor, ...]:
        """The forward: the text's rows that the cache lacks enter it, then a block of each sequence."""
        block, shape, cache = self._bound.block, self._shape, self._cache
        slots, places, texts = self.slots(level), [], []
        for slot, s in ((slot, self.sequences[row]) for slot, row in zip(slots, level.sequence_indices, strict=True)):
            self._owner.read(s, self._owner.known(s))
            cache.make_room(slot, 0)
            places += [cache.next_position(slot) + i for i in range(shape.block_size)]
            seen = slice(cache.window_start(slot), cache.store.lengths[slot])
            texts.append((cache.store.keys[:, slot, :, seen], cache.store.values[:, slot, :, seen]))
        cos, sin = self._bound.rotary(to_device(places, self._device))
        first = 0 if shape.from_anchor else 1
        out = block(self._embedded(level, shape.block_size), cos, sin, texts)[:, first : first + self._depth]
        return *topk_logprobs(block.logits(out.flatten(0, 1)).unflatten(0, out.shape[:2]), count), out

    def _embedded(self, level: TreeLevel, size: int) -> torch.Tensor:
        """(B, S, hidden) of the anchors, and of the mask in all other rows."""
        shape = self._shape
        masks = torch.full(
            (len(level.sequence_indices), size - 1), shape.mask_token, device=level.tokens.device, dtype=torch.long
        )
        if not shape.own_mask:
            x: torch.Tensor = self._bound.embedding(torch.cat([level.tokens, masks], 1))
        else:
            mask = self._bound.block.mask_embedding.expand(*masks.shape, -1)
            x = torch.cat([self._bound.embedding(level.tokens), mask], 1)
        return x * shape.embedding_scale if shape.embedding_scale != 1 else x

    def corrected(self, level: TreeLevel, row: DepthTopk) -> torch.Tensor:
        width, shape = level.tokens.shape[1], self._shape
        if shape.markov_rank is None:
            return row.logprobs.expand(-1, width, -1)
        head, hidden = self._bound.block.markov_head, row.correction_inputs.expand(-1, width, -1)
        known = head.markov_w1(level.tokens)
        if shape.gated:
            known = torch.sigmoid(head.gate_proj(torch.cat([hidden, known], -1))) * known
        elif shape.recurrent:
            known = self._recurrent(level, known, hidden)
        successors = head.markov_w2.weight[row.ids[:, 0]]
        return row.logprobs + (known @ successors.mT).float()

    def _recurrent(self, level: TreeLevel, known: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Advances the recurrent head to a level: its output (B', W, rank) for each node. Keeps the nodes' states."""
        if level.depth == 0:
            state = torch.zeros_like(known)
        else:
            state = torch.stack([self._states[row][level.parents[i]] for i, row in enumerate(level.sequence_indices)])
        joined = self._bound.block.markov_head.joint_proj(torch.cat([state, known, hidden], -1))
        gate, candidate, out = joined.chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        self._states = dict(zip(level.sequence_indices, state, strict=True))
        return torch.tanh(out)


class DFlashDrafter(OnePassDrafter):
    """Drafts trees with one forward a round."""

    round_type = DFlashRound
    draft: DFlashDraft  # type: ignore[assignment]

    def keys_values(self, sequence: Sequence, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes keys and values of c alone: no token is embedded."""
        c = self.bound.block.project_features(self.features(sequence.slot, start, end))
        cos, sin = self.bound.rotary(self.cache.append_positions(sequence.slot, end - start))
        found: tuple[torch.Tensor, torch.Tensor] = self.bound.block.keys_values(c, c, cos, sin)
        return found


register(
    Kind(
        KIND,
        DFlashDrafter,
        "published drafts of DFlash and DSpark: a block of tokens from one forward",
        "DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147",
        load=DFlashDraft.load,
    )
)
