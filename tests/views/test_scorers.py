"""Scores against their definitions as plain loops, for any chunk size, from summaries and from keys."""

from __future__ import annotations

import pytest
import torch

from longdraft.memory.store import KVShape, KVStore
from longdraft.views.scorers import REDUCTIONS, SCORERS, SNAPKV_POOL_SIZE, CandidateChunks, score_chunks
from longdraft.views.summaries import ChunkSummaries, summarize

CHOOSING = [name for name, each in SCORERS.items() if each is not None]
every_scorer = pytest.mark.parametrize("name", CHOOSING)
REDUCE = {"mean": lambda x: x.mean(1), "max": lambda x: x.amax(1), "last": lambda x: x[:, -1]}


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def single(name: str, q: torch.Tensor, keys: torch.Tensor, start: int, end: int, behind: int) -> float:
    """Score of entries [start, end) for one query (d,) and keys (n, d) of one head; candidates end at ``behind``."""
    rows = keys[start:end]
    high, low = rows.max(0).values, rows.min(0).values
    if name == "attention":
        return float(torch.softmax(keys @ q * len(q) ** -0.5, -1)[start:end].sum())
    if name == "snapkv":
        mass = torch.softmax(keys[:behind] @ q * len(q) ** -0.5, -1).tolist()
        near = [
            range(max(0, i - SNAPKV_POOL_SIZE // 2), min(behind, i + SNAPKV_POOL_SIZE // 2 + 1))
            for i in range(start, end)
        ]
        return sum(sum(mass[j] for j in positions) / SNAPKV_POOL_SIZE for positions in near)
    return {
        "minmax": max(float(q @ high), float(q @ low)),
        "quest": float(sum(max(x * u, x * v) for x, u, v in zip(q, high, low, strict=True))),
        "mean-key": float(q @ rows.mean(0)),
        "tokens": max(float(q @ k) for k in rows),
    }[name]


@every_scorer
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_scores_are_what_their_definitions_say(name, chunk):
    """With every reduction over queries; with keys contiguous and transposed."""
    keys, queries = random(2, 31, 4), random(4, 3, 4, seed=1)
    first, behind = 4 // chunk, 24 // chunk
    each = [
        [[[single(name, q, keys[h], c * chunk, (c + 1) * chunk, behind * chunk) for q in group] for group in grouped]
        for c in range(first, behind)]
        for h, grouped in enumerate(queries.view(2, 2, 3, 4))
    ]  # fmt: skip
    for reduction in REDUCTIONS:
        if (name, reduction) == ("snapkv", "max"):  # a maximum of means is no mean of maxima
            continue
        wanted = torch.stack([torch.stack([REDUCE[reduction](torch.tensor(x)).mean() for x in row]) for row in each])
        for laid in (keys, keys.transpose(1, 2).contiguous().transpose(1, 2)):
            got = score_chunks(name, reduction, queries, CandidateChunks(laid, first, behind, chunk))
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", [name for name in CHOOSING if SCORERS[name].summary_kinds])
def test_scores_from_summaries_need_no_keys(name):
    keys, queries = random(2, 40, 4), random(6, 2, 4, seed=1)
    for chunk in (1, 4):
        summaries = {kind: summarize(kind, keys.unflatten(1, (-1, chunk))) for kind in SCORERS[name].summary_kinds}
        first, behind = 4 // chunk, 32 // chunk
        wanted = score_chunks(name, "mean", queries, CandidateChunks(keys, first, behind, chunk))
        unread = CandidateChunks(torch.full_like(keys, float("nan")), first, behind, chunk, summaries)
        torch.testing.assert_close(score_chunks(name, "mean", queries, unread), wanted)


@every_scorer
def test_small_attention_weights_of_a_long_context_do_not_vanish(name):
    """Two chunks differ even if 1 / n is too small for sums in half precision."""
    keys = torch.zeros(1, 32768, 8, dtype=torch.float16)
    keys[:, 320:352] = 0.01
    (scores,) = score_chunks(name, "mean", torch.ones(2, 1, 8, dtype=torch.float16), CandidateChunks(keys, 0, 1000, 32))
    assert scores.argmax() == 10 and scores[10] > scores[12]


def test_summaries_follow_a_context_that_grows_and_changes():
    store = KVStore(KVShape(2, 2, 4, torch.float32), 2, 40)
    store.keys.copy_(random(*store.keys.shape))
    found = ChunkSummaries(store, 4, ("largest", "smallest", "mean"))
    found.update(0, 30)
    store.keys[:, 0, :, 9:] += 1
    found.invalidate(0, 9)
    found.update(0, 29)
    for kind, summary in found.for_slot(0).items():
        wanted = summarize(kind, store.keys[:, 0, :, :28].unflatten(2, (-1, 4)))
        assert torch.equal(summary[:, :, :7], wanted)
