"""benchmarks/gpu_on_paper.py: its formulas against what operators read, write and compute in runs of a tiny model.

The engine runs in bfloat16 on the `sdpa` path, a GPU's default, with torch's own operators alone. Bytes are those of
the arguments that lie in weights or caches, of each operator that is no view; operations are those of matrix products
and attention. Formula and count agree exactly: what the formulas leave out lies in other tensors.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from longdraft import Sampling
from longdraft.drafters.autoregressive import NoDrafter
from longdraft.drafters.eagle3 import Eagle3Draft, Eagle3Drafter
from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.drafters.shared.round import DraftRound
from longdraft.engine.loop import Engine
from longdraft.engine.partial import PartialOptions, SpecPV
from longdraft.engine.sampler import Draws, Sampler
from longdraft.engine.schedule import Schedule
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.views.cache import TrueCache
from tests.support.drafts import random_draft, random_eagle3
from tests.support.events import decoded
from tests.support.quick import slow
from tests.support.tiny import tiny_model

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROMPT = [(7 * i * i + 3 * i) % 61 for i in range(70)]
# Of what they are given, these read what comes out.
CHOOSING = {"embedding", "index", "index_select"}


class Traffic(TorchDispatchMode):
    """Bytes that operators read of some tensors or write into them.

    Args:
        places: name -> tensors; all that shares their memory counts.
    """

    def __init__(self, places: dict[str, list[torch.Tensor]]) -> None:
        super().__init__()
        self._names = {_place(t): name for name, tensors in places.items() for t in tensors}
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, first = func._schema.name.removeprefix("aten::"), func._schema.arguments[:1]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in first)
        for i, x in enumerate(args):
            for t in x if isinstance(x, (list, tuple)) else [x]:
                if not isinstance(t, torch.Tensor) or (place := _place(t)) not in self._names:
                    continue
                if not isinstance(out, torch.Tensor) or _place(out) != place or (writes and i == 0):
                    seen = out if name in CHOOSING else t
                    self.bytes[self._names[place]] += seen.numel() * t.element_size()
        return out


def _place(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _attention(q, k, v, *_, out_shape=None, **__) -> int:
    """torch counts its attention on GPUs alone. Shapes (B, H, T, d) and (B, H, n, d): q . k, and weights times v."""
    return 4 * prod(q) * k[-2]


@dataclass
class Seen:
    """A call. about: its name and sizes. counted: bytes of weights, bytes of caches, operations."""

    about: dict
    counted: tuple[int, int, int]


NOTHING = SimpleNamespace(bytes=0, operations=0)


def says(cost) -> tuple[int, int, int]:
    """What a formula says, in the order of :attr:`Seen.counted`: its first part is that of weights."""
    first = cost[0].bytes
    return first, sum(p.bytes for p in cost) - first, sum(p.operations for p in cost)


class Watch:
    """Counts inside some methods."""

    def __init__(self, monkeypatch) -> None:
        self._patch, self.seen = monkeypatch, []
        self.weights: list[torch.Tensor] = []
        self.caches: list[torch.Tensor] = []

    def on(self, owner, name: str, about) -> None:
        """Watches a method. about: (its object and arguments) -> what to note; None: not this call."""
        original = getattr(owner, name)

        def watched(*args, **options):
            if (noted := about(*args, **options)) is None:
                return original(*args, **options)
            traffic = Traffic({"weights": self.weights, "caches": self.caches})
            mapping = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
            with traffic, FlopCounterMode(display=False, custom_mapping=mapping) as operations:
                out = original(*args, **options)
            counted = traffic.bytes["weights"], traffic.bytes["caches"], operations.get_total_flops()
            self.seen.append(Seen({"name": name} | noted, counted))
            return out

        self._patch.setattr(owner, name, watched)

    def named(self, name: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.about["name"] == name]


@pytest.fixture
def paper(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_on_paper")


@pytest.fixture
def resized(paper, monkeypatch):
    """``resized(WINDOW=8)`` gives the page's formulas other sizes."""
    return lambda **sizes: [monkeypatch.setattr(paper, name, size) for name, size in sizes.items()]


@pytest.fixture
def watch(monkeypatch):
    for name, value in {"ATTENTION": "sdpa", "NATIVE": "0", "PACK": "0"}.items():
        monkeypatch.setenv(f"LONGDRAFT_{name}", value)
    return Watch(monkeypatch)


def target(paper, family="llama", **over):
    model = tiny_model(family, dtype=torch.bfloat16, layers=6, **over)
    return model, paper.Model.from_config(model.config.to_dict())


def run(watch, model, drafter, schedule, texts=1, tokens=24) -> None:
    """Decodes equal texts, so that their lengths stay equal, and notes every forward behind a text."""

    def forward(runner, block, store, logits="all", **_):
        watch.caches += [store.keys, store.values]
        waiting = block.size - logits if isinstance(logits, int) else 0
        noted = {"partial": store is not engine.cache.store, "waiting": waiting}
        return None if block.prompt else {"rows": block.size, "lengths": block.lengths, **noted}

    watch.on(TargetRunner, "forward", forward)
    watch.weights += list(model.parameters())
    sampler = Sampling()
    sequences = [Sequence(i, list(PROMPT), tokens) for i in range(texts)]
    for s in sequences:
        s.sampler = Sampler(sampler.greedy, sampler.processors(), Draws(torch.Generator()))
    engine = Engine(TargetRunner(model), drafter, schedule)
    decoded(engine, sequences)


@pytest.mark.parametrize(("family", "texts"), [("llama", 1), ("llama", 3), ("qwen3", 1)])
def test_plain_steps(paper, watch, family, texts):
    model, m = target(paper, family)
    run(watch, model, NoDrafter(), Schedule(), texts, tokens=4)
    assert len(watch.seen) == 3
    for step in watch.seen:
        assert step.counted == says(paper.forward(m, texts, 1, step.about["lengths"][0]))


def level(watch, drafter) -> None:
    """Watches a draft's levels: how many rows are fed, how many go on, and what they see."""

    def about(round_, level, best):
        bound, cache = drafter.draft.bound(drafter.runner), drafter.cache
        borrowed = getattr(bound.block, "head", None)
        head = drafter.runner.parts.head if borrowed is None else borrowed.keywords["weight"]
        watch.weights += [*bound.block.parameters(), head]
        watch.caches += [cache.store.keys, cache.store.values]
        s = round_.sequences[0]
        fed = level.tokens.shape[1] if level.depth else drafter.known(s) - cache.end(s.slot)
        return {"depth": level.depth, "fed": fed, "going": level.tokens.shape[1], "prefix": drafter.store.lengths[0]}

    watch.on(DraftRound, "said", about)


@pytest.mark.parametrize(("texts", "kept"), [slow(1, None), (2, [1, 5, 8, 13, 40])])
def test_longspec(paper, watch, tmp_path, resized, texts, kept):
    """Each level, and a whole round as the tables have it, with a tree of 3, 4 and 2 nodes and a window of 8 tokens."""
    model, m = target(paper)
    m = replace(m, intermediate=3 * m.hidden)  # the draft's own
    drafter = LongSpecDrafter(LongSpecDraft.load(random_draft(tmp_path, model, kept=kept)), widths=(3, 4, 2))
    level(watch, drafter)
    run(watch, model, drafter, Schedule(), texts)
    rounds: dict[int, list[Seen]] = defaultdict(list)
    for seen in watch.named("said"):
        rounds[seen.about["prefix"]].append(seen)
        at = seen.about
        window = 8 if at["depth"] == 0 else 8 - at["depth"] + (3, 7)[at["depth"] - 1]
        cost = paper.longspec_level(m, texts, at["fed"], at["going"], window, at["prefix"], len(kept or []))
        assert seen.counted == says(cost), at
    resized(WIDTHS=(3, 4, 2), WINDOW=8)
    whole = {n: levels for n, levels in rounds.items() if len(levels) == 3}  # the last rounds' trees are smaller
    assert len(whole) > 3
    for n, levels in whole.items():
        ((_, cost),) = paper.longspec(m, texts, n, levels[0].about["fed"], vocabulary=len(kept or []))
        draft = cost[: -len(paper.forward(m, texts, 10, n))]
        _, _, operations = says(draft)
        assert sum(seen.counted[0] + seen.counted[1] for seen in levels) == sum(part.bytes for part in draft)
        assert sum(seen.counted[2] for seen in levels) == operations


def test_eagle3_and_its_verification(paper, watch, tmp_path):
    """A dynamic tree of 3 levels, 2 nodes of each of which go on. The hidden states that it reads are in no formula."""
    model, m = target(paper)
    shape = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim, "intermediate_size": m.intermediate}
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model, kept=list(range(0, 60, 3)), **shape))
    drafter = Eagle3Drafter(draft, depth=3, top_k=2, nodes=7)
    level(watch, drafter)
    run(watch, model, drafter, Schedule())
    for seen in watch.named("said"):
        at = seen.about
        rows = at["prefix"] + 2 * at["depth"]
        cost = paper.eagle3_level(m, 1, at["fed"], at["going"], rows, at["depth"] == 0, vocabulary=20)
        assert seen.counted == says(cost), at
    verifications = watch.named("forward")
    assert max(seen.about["rows"] for seen in verifications) == 8
    for seen in verifications:
        assert seen.counted == says(paper.forward(m, 1, seen.about["rows"], seen.about["lengths"][0]))


@pytest.mark.slow
def test_specpv(paper, watch, tmp_path, resized):
    """Partial rounds and refreshes. What the formulas leave out of a refresh: summaries of blocks that are new, and up
    to a block's rows more, for the window starts at a block's border."""
    model, m = target(paper)
    drafter = LongSpecDrafter(LongSpecDraft.load(random_draft(tmp_path, model)), widths=(3, 2))
    schedule = SpecPV(PartialOptions(12, sink=4, recent=8, block=4, margin=6).view())
    resized(SINK=4, RECENT=8, BLOCK=4, PARTIAL=24)

    def choose(cache, slot, queries):
        cache.summaries.update(slot, cache.full.readable(slot))
        watch.caches += [cache.store.keys, cache.store.values, *cache.summaries.of(slot).values()]
        return {"prefix": cache.full.readable(slot), "queries": queries[0].shape[1]}

    watch.on(TrueCache, "choose", choose)
    run(watch, model, drafter, schedule)
    rounds, choices = watch.named("forward"), watch.named("choose")
    for seen in rounds:
        (n,) = seen.about["lengths"]
        assert seen.counted == says(paper.forward(m, 1, seen.about["rows"], n, seen.about["waiting"]))
        # Partial rounds: 24 to 27 rows that were copied, and those that wait.
        assert not seen.about["partial"] or 24 <= n <= 24 + 3 + 6
    assert 1 < sum(seen.about["partial"] for seen in rounds) < len(rounds) and len(choices) > 1
    assert any(seen.about["waiting"] for seen in rounds)
    for seen in choices:
        n, nodes = seen.about["prefix"], seen.about["queries"]
        whole = paper.refresh(m, 1, nodes, 0, n)
        choosing = whole[len(paper.forward(m, 1, nodes, n)) :]
        assert seen.counted == says([NOTHING, *choosing, paper.gather(m, 1, (n - 8) % 4, m.layers)])


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-8B"])
def test_sizes_are_those_of_transformers(paper, name):
    m = paper.MODELS[name]
    config = (Qwen3Config if m.qk_norm else LlamaConfig)(
        hidden_size=m.hidden, intermediate_size=m.intermediate, num_hidden_layers=m.layers, vocab_size=m.vocabulary,
        num_attention_heads=m.heads, num_key_value_heads=m.kv_heads, head_dim=m.head_dim, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert paper.parameters(m) == sum(p.numel() for p in model.parameters())
    assert paper.Model.from_config(config.to_dict()) == m
    with pytest.raises(ValueError, match="qwen2"):
        paper.Model.from_config(config.to_dict() | {"model_type": "qwen2"})


def test_a_part_takes_its_bytes_or_its_operations(paper):
    card = paper.Card(bandwidth=10.0, speed=100.0)
    assert paper.seconds([paper.Part(20, 100), paper.Part(20, 500)], card) == 2 + 5


def test_a_cycle_of_specpv(paper):
    """With 4 tokens a round 20 wait after five partial rounds, so a sixth follows, then the refresh."""
    m = paper.MODELS["Qwen3-8B"]
    (draft, _), *rounds = paper.specpv(m, 1, 32768, 4.0)
    assert draft == 1 and [often for often, _ in rounds] == [1 / 7] * 7
    assert rounds[5][1] == paper.forward(m, 1, 60, 4256 + 20) and rounds[6][1] == paper.refresh(m, 1, 60, 24, 32768)
    assert paper.specpv(m, 1, 4096, 4.0) == paper.eagle3(m, 1, 4096, 4.0)  # the partial cache would hold all of it


def test_tables(paper, capsys, tmp_path):
    paper.main([])
    out = capsys.readouterr().out
    assert "Llama-3.1-8B: 8,030,261,248 parameters, 131,072 bytes" in out
    assert "Qwen3-8B: 8,190,735,360 parameters, 147,456 bytes" in out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| SpecPV-4K on EAGLE-3 | 8 ")]
    assert len(rows) == 2 and all(row[-1] == "-, - |" and "x" in row[-2] for row in rows)  # 64K in 8 texts do not fit
    file = tmp_path / "tiny" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(tiny_model().config.to_dict()))
    options = ["--config", str(file), "--bandwidth", "1000", "--tflops", "100", "--context", "512", "--batch", "1"]
    paper.main(options)
    out = capsys.readouterr().out
    assert out.strip().startswith("tiny: ") and "| plain step | 1 |" in out and "512 tokens" in out
