"""Levels in one call of the kernels against the drafts' modules in torch; and rounded weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longdraft.attention.reference import partial_attention
from longdraft.drafters import eagle3 as eagle3_draft
from longdraft.drafters import longspec as longspec_draft
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.longspec import LongSpecDraft
from longdraft.drafters.shared.levels import Fed, Inputs
from longdraft.memory.store import KVShape
from longdraft.model.runner import TargetRunner
from longdraft.model.stored import light
from longdraft.native import Stored, build, kernels
from longdraft.native.library import kernels_for
from longdraft.views.window import Window
from tests.drafts import random_block, random_draft, random_eagle3, random_eagle3_block
from tests.tiny import tiny_model

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
        found = kernels_for(level)
        if self.longspec:
            self.whole = longspec_draft._whole(found, self.block, self.head)
        else:
            self.whole = eagle3_draft._whole(found, self.block)
        shape = KVShape(1, KV_HEADS, D, torch.float32)
        self.windows = [Window(shape, 3, WINDOW, 16, "cpu") for _ in range(2)]
        self.text = torch.randn(3, KV_HEADS, D, 70).transpose(2, 3), torch.randn(3, KV_HEADS, 70, D), [70, 33]

    def inputs(self, rows: int) -> Inputs:
        joined = None if self.longspec else torch.randn(rows, self.hidden)
        angles = torch.rand(rows, D // 2) * 6
        cos, sin = (torch.cat([x, x], -1) for x in (angles.cos(), angles.sin()))
        return Inputs(torch.randn(rows, self.hidden), joined, cos, sin)

    def plain(self, fed: Fed, rows: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and logits."""
        attend = fed.attend(self.windows[0])
        going = torch.cat([torch.arange(sum(fed.counts)).split(fed.counts)[i][-fed.width :] for i in range(2)])
        x, joined, cos, sin = rows
        if not self.longspec:
            out = self.block(x, joined, cos, sin, attend, going)
            return out, self.block.norm(out) @ self.head.T

        def cross(q):
            keys, values, lengths = self.text
            own = zip(q.split(fed.width, dim=1), fed.slots, lengths, strict=True)
            parts = [partial_attention(x, keys[s, :, :n], values[s, :, :n], D**-0.5)[0] for x, s, n in own]
            return torch.cat(parts, dim=1).to(q.dtype)

        out = self.block(x, cos, sin, attend, cross, going)
        return out, out @ self.head.T

    def compare(self, fed: Fed, best: int) -> None:
        rows = self.inputs(sum(fed.counts))
        near = {"rtol": 1e-4, "atol": 1e-3}
        out, logits = self.plain(fed, rows)
        text = self.text if self.longspec else None
        ends = list(self.windows[1]._ends)
        wanted = self.whole(fed, rows, self.windows[1], text, 0)[1]
        self.windows[1]._ends = ends
        got = self.whole(fed, rows, self.windows[1], text, best)
        if not self.longspec:  # LongSpec's module ends with the norm
            torch.testing.assert_close(got[0], out, **near)
        torch.testing.assert_close(wanted, logits, **near)
        for x, y in ((self.windows[0].keys, self.windows[1].keys), (self.windows[0].values, self.windows[1].values)):
            torch.testing.assert_close(y, x, **near)
        said = torch.log_softmax(wanted, -1).topk(best, dim=-1)
        torch.testing.assert_close(got[2], said.values, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[3], said.indices)


@pytest.mark.usefixtures("float32_weights")
@pytest.mark.parametrize("level", build.levels())
@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_a_level_is_what_the_module_says(kind, level):
    desk = Desk(kind, level)
    # Read first: one more than the window holds, and less; then a few tokens, of which the last is a root.
    desk.compare(Fed((2, 0), (WINDOW, 7), 1, starts=(0, 0)), 3)
    desk.compare(Fed((2, 0), (1, 4), 1, starts=(WINDOW, 7)), 131)
    first = torch.eye(5, dtype=torch.bool).expand(2, -1, -1)
    desk.compare(Fed((2, 0), (5, 5), 5, depth=1, ancestors=first), 1)
    chosen = torch.stack([first[0][[0, 0, 3]], first[1][[4, 1, 1]]])
    second = torch.cat([chosen, torch.eye(3, dtype=torch.bool).expand(2, -1, -1)], dim=2)
    desk.compare(Fed((2, 0), (3, 3), 3, depth=2, ancestors=second), 10)


@pytest.mark.skipif(kernels() is None, reason="no kernels here")
def test_a_drafts_weights_are_rounded(tmp_path):
    """And so is the head, which is the target's or a part of it."""
    model = tiny_model(layers=6, vocab=11, hidden=64, heads=4)
    longspec = LongSpecDraft.load(random_draft(tmp_path / "a", model, kept=[1, 2, 5]))
    eagle3 = Eagle3Draft.load(random_eagle3(tmp_path / "b", model, head_dim=16))
    runner = TargetRunner(model)
    held = [draft.bound(runner).whole._block._products for draft in (longspec, eagle3)]
    assert all(isinstance(w, Stored) and w.int8 for products in held for w, _ in products.values())
    wanted = light(model.get_output_embeddings().weight[[1, 2, 5]])
    assert torch.equal(held[0]["head"][0].data, wanted.data)
