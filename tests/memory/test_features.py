"""Hidden states in a ring: memory for what a drafter sees of a text, and the same drafts as with those of all of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from longdraft import Speculator
from longdraft.drafters.eagle3 import Eagle3Draft, Eagle3Drafter
from longdraft.engine import loop
from longdraft.engine.request import Request
from longdraft.memory import snapshot
from longdraft.memory.features import SPARE, Features, KeptRows
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.runner import TargetRunner
from tests.drafts import published_eagle, random_eagle3, random_heads, random_mtp, random_onepass
from tests.quick import few
from tests.tiny import tiny_model


def test_memory_follows_what_the_draft_sees_and_not_the_text(tmp_path):
    """Llama-3.1-8B's shape at 60,000 tokens, without memory: 1.5 GB of three layers' states become 77 MB."""
    model = tiny_model(layers=8)
    folder = random_eagle3(tmp_path, model, settings={"trained_length": 2048})
    back = Eagle3Drafter(Eagle3Draft.load(folder)).feature_rows(TargetRunner(model))
    assert back == 2048

    def size(tokens: int, kept: KeptRows | None) -> int:
        shape = KVShape(32, 8, 128, torch.bfloat16)
        store = KVStore(shape, 1, tokens + 64, "meta", False, (2, 16, 29), 4096, kept=kept)
        return store.features.states.nbytes

    kept = KeptRows(back, back + 64 + SPARE)
    assert size(60_000, None) == 60_064 * 3 * 4096 * 2 > 1.4e9
    assert size(60_000, kept) == size(120_000, kept) == 3136 * 3 * 4096 * 2 < 78e6


def test_a_row_that_is_gone_is_read_again_with_those_behind_it():
    features = Features(torch.zeros(2, 10, 1), back=4)
    features.write(0, 0, torch.arange(30.0)[:, None])
    assert features.first(0) == 20 and features.read(0, 20, 30).flatten().tolist() == [*range(20, 30)]
    assert features.reusable(0, 30, 30) == 30
    assert features.reusable(0, 25, 24) == 25  # reads rows 20 to 24
    assert features.reusable(0, 25, 23) == 19
    features.truncate(0, 22)
    features.copy(0, 1, 5, 22)
    assert features.first(1) == 20 and features.row(1, 21) == 21
    assert features.reusable(1, 22, 30) == 22  # what it reads comes behind these


def test_a_snapshot_has_the_rows_of_the_ring(tmp_path):
    shape, layers = KVShape(1, 1, 4, torch.float32), {"feature_layers": (0,), "feature_size": 1}
    stores = [KVStore(shape, 1, 100, kept=kept, **layers) for kept in (KeptRows(4, 10), KeptRows(3, 6), None)]
    rows = torch.zeros(1, 1, 30, 4)
    stores[0].put_rows(0, 0, rows, rows, torch.arange(30.0)[:, None])
    stores[0].lengths[0] = 30
    snapshot.save(stores[0], 0, range(30), "target", tmp_path / "kv")
    for store in stores[1:]:
        for most, first in ((None, 30 - min(10, store.features.size)), (22, 20), (15, 15)):
            assert snapshot.load(store, 0, "target", tmp_path / "kv", most) == [*range(most or 30)]
            assert store.features.first(0) == first
            assert store.features.read(0, first, most or 30).flatten().tolist() == [*range(first, most or 30)]


TREE = {"depth": 2, "top_k": 4}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", TREE),
    "eagle3, specpv": ("specpv", {}),
    "eagle3, specpv-exact": ("specpv-exact", {}),
    "eagle3, nested": ("nested", {}),
    "eagle": ("eagle", TREE),
    "onepass": ("onepass", {"depth": 3, "top_k": 3}),
    "heads": ("heads", {"nodes": 8}),
    "mtp": ("mtp", {**TREE, "window": 6}),
}


def settings_of(name: str, folder, model) -> dict[str, Any]:
    """A method and its options, with a draft that sees a few tokens."""
    method, options = METHODS[name]
    bounded = {"trained_length": 6, "rope_original_length": 6}
    if method in ("specpv", "specpv-exact"):
        options = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 4}
    if name.startswith("eagle3"):
        draft = random_eagle3(folder, model, settings=bounded)
    elif name == "eagle":
        draft, options = published_eagle(folder, model), {**options, "window": 6}
    elif name == "onepass":
        draft, options = random_onepass(folder, model, layers=(0, 1, 2)), {**options, "window": 6}
    else:
        draft = {"heads": random_heads, "mtp": random_mtp}[name](folder, model)
    if method in ("specpv", "specpv-exact", "nested"):
        options = {**options, "drafter": "eagle3", **TREE}
    return {"method": method, "draft": draft, **options}


def decoded(spec: Speculator, folder, batch: int) -> dict[tuple[str, int], list[tuple]]:
    """The drafts and tokens of texts that join and leave a batch, share prefixes, begin anew and come from a file."""
    text = torch.randint(61, (120,), generator=torch.Generator().manual_seed(3)).tolist()
    other = [(7 * i * i + 3 * i) % 11 for i in range(70)]
    found = defaultdict(list)

    def note(run: str, step) -> None:
        if step.tree is not None and step.mode != "prefill":
            drafted = step.tree.tokens, step.tree.parents
            found[run, step.sequence].append((drafted, step.accepted, step.mode, step.token_ids))

    cache = PromptCache(spec.feature_layers())
    for prompts in ([text[:90], other], [text[:60] + other[:30], text[:25]]):
        for step in spec.stream(prompts, max_new_tokens=8, eos_token_ids=[], cache=cache):
            note(f"{len(prompts[0])} tokens", step)
    cache.save(folder / "kv", spec.runner().fingerprint)
    restored = PromptCache.restored(folder / "kv", spec.runner().fingerprint, spec.feature_layers())
    for step in spec.stream([text[:60] + other[:20]], max_new_tokens=6, eos_token_ids=[], cache=restored):
        note("restored", step)
    session = spec.session(batch, context=150, piece=16)
    for prompt, tokens in ((text, 3), (other, 8), (other[:20] + text, 3), (text[:34], 6)):
        session.add(Request(prompt, max_new_tokens=tokens, eos_token_ids=[]))
    while session.busy:
        for step in session.step():
            note("session", step)
    return found


@pytest.mark.parametrize("name", few(METHODS, ("eagle3", "heads")))
def test_drafts_are_those_of_all_rows(name, tmp_path, monkeypatch):
    model = tiny_model(layers=6, hidden=32, heads=4, dtype=torch.float64)
    monkeypatch.setattr(loop, "SPARE", 2)
    sizes: list[int] = []
    write = Features.write
    monkeypatch.setattr(
        Features, "write", lambda self, slot, *rest: (sizes.append(self.size), write(self, slot, *rest))[1]
    )
    settings = settings_of(name, tmp_path / "draft", model)
    # A refresh of SpecPV is one for the whole batch, and texts may join a round later.
    batch = 1 if "specpv" in name else 2
    in_a_ring = decoded(Speculator(target=model, plan="fixed", **settings), tmp_path, batch)
    ring = min(sizes)
    assert ring < 60  # of texts of up to 128 tokens
    monkeypatch.setattr(loop, "KeptRows", lambda back, size: KeptRows(back, 1 << 30))
    sizes.clear()
    assert decoded(Speculator(target=model, plan="fixed", **settings), tmp_path, batch) == in_a_ring
    assert min(sizes) > ring and max(sizes) > 100
