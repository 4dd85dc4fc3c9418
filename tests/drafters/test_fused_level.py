"""Levels in one call of the kernels against the drafts' modules in torch; and rounded weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longdraft.attention.reference import partial_attention
from longdraft.drafters.shared.draft_batch import DraftBatch
from longdraft.drafters.shared.fused_level import FusedLevel
from longdraft.memory.store import KVShape, KVStore
from longdraft.native import build
from longdraft.views.draft_cache import SPARE_ENTRIES, DraftCache
from tests.native.levels import kernels_of
from tests.support.drafts import random_block, random_eagle3_block
from tests.support.tiny import tiny_model

HEADS, KV_HEADS, D, WINDOW = 4, 2, 16, 40


class Desk:
    """A draft's module and its kernel, each with a window of its own, for two sequences that have read some tokens."""

    def __init__(self, kind: str, level: str) -> None:
        model = tiny_model(heads=HEADS, kv_heads=KV_HEADS, hidden=64, vocab=131)
        self.longspec = kind == "longspec"
        if self.longspec:
            self.block: nn.Module = random_block(model, WINDOW, final_norm=True)
            self.head = 0.25 * torch.randn(131, model.config.hidden_size)
        else:
            self.block = random_eagle3_block(model, head_dim=D, heads=HEADS, kv_heads=KV_HEADS, attention_bias=True)
            self.head = self.block.lm_head.weight.detach()
        self.hidden = model.config.hidden_size
        self.block.requires_grad_(False)
        self.fused_level = FusedLevel(kernels_of(level), self.block, self.head)
        shape = KVShape(1, KV_HEADS, D, torch.float32, padded=True)
        self.caches = [DraftCache(KVStore(shape, 3, WINDOW + SPARE_ENTRIES + 17), 16, WINDOW) for _ in range(2)]
        self.target_kv = torch.randn(3, KV_HEADS, D, 70).transpose(2, 3), torch.randn(3, KV_HEADS, 70, D), [70, 33]

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor | None, ...]:
        features = None if self.longspec else torch.randn(num_tokens, self.hidden)
        angles = torch.rand(num_tokens, D // 2) * 6
        cos, sin = (torch.cat([x, x], -1) for x in (angles.cos(), angles.sin()))
        return torch.randn(num_tokens, self.hidden), features, cos, sin

    def by_torch(self, batch: DraftBatch, inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and logits."""
        attend_fns, output_rows = batch.attend_fns(self.caches[0]), batch.output_rows("cpu")

        def cross(q):
            keys, values, lengths = self.target_kv
            sequence_queries = zip(q.split(batch.num_outputs, dim=1), batch.slots, lengths, strict=False)
            parts = [partial_attention(x, keys[s, :, :n], values[s, :, :n], D**-0.5)[0] for x, s, n in sequence_queries]
            return torch.cat(parts, dim=1).to(q.dtype)

        out = self.block(*inputs, attend_fns, output_rows, cross)
        return out, self.block.norm(out) @ self.head.T

    def read(self, slots: tuple[int, ...], width: int, k: int) -> None:
        for cache in self.caches:
            for slot in slots:
                cache.make_room(slot, width)
                cache.commit(slot, width)
        self.compare(DraftBatch.from_new_tokens(self.caches[0], slots, width), k)

    def compare(self, batch: DraftBatch, k: int) -> None:
        inputs = self.inputs(batch.query_len * len(batch.slots))
        near = {"rtol": 1e-4, "atol": 1e-3}
        out, logits = self.by_torch(batch, inputs)
        target_kv = self.target_kv if self.longspec else None
        logits_alone = self.fused_level(batch, inputs, self.caches[1], target_kv, 0)[1]
        with_topk = self.fused_level(batch, inputs, self.caches[1], target_kv, k)
        torch.testing.assert_close(with_topk[0], out, **near)
        torch.testing.assert_close(logits_alone, logits, **near)
        for x, y in zip(*((c.store.keys, c.store.values) for c in self.caches), strict=True):
            torch.testing.assert_close(y, x, **near)
        expected = torch.log_softmax(logits_alone, -1).topk(k, dim=-1)
        torch.testing.assert_close(with_topk[1], expected.values, rtol=1e-5, atol=1e-5)
        assert torch.equal(with_topk[2], expected.indices)


@pytest.mark.usefixtures("float32_weights")
@pytest.mark.parametrize("level", build.supported_levels())
@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_a_level_is_what_the_module_says(kind, level):
    desk = Desk(kind, level)
    # Read first: all that the window holds, and less; then a few tokens, of which the last is a root.
    desk.read((2,), WINDOW, 3)
    desk.read((0,), 7, 3)
    desk.read((2, 0), 4, 131)
    first = torch.eye(5, dtype=torch.bool).expand(2, -1, -1)
    desk.compare(DraftBatch.from_level(desk.caches[0], (2, 0), 1, first), 1)
    chosen = torch.stack([first[0][[0, 0, 3]], first[1][[4, 1, 1]]])
    second = torch.cat([chosen, torch.eye(3, dtype=torch.bool).expand(2, -1, -1)], dim=2)
    desk.compare(DraftBatch.from_level(desk.caches[0], (2, 0), 2, second), 10)
