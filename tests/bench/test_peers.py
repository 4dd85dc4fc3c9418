"""What we are measured against: transformers' own generate."""

from __future__ import annotations

import pytest
import torch

from longdraft import LoadedModel, Sampling
from longdraft.bench import report
from longdraft.bench.contenders import Job
from longdraft.bench.data import Sample
from longdraft.bench.peers import Generate
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from tests.bench import measuring
from tests.bench.measuring import settings
from tests.support.tiny import tiny_model

SAMPLES = [Sample("one two one two " * 4, "", "a", "a:1"), Sample("three four three", "", "a", "a:2")]


def measured(loaded, unpacked=None, **wanted):
    wanted = settings(**({"max_tokens": 16, "repeats": 2} | wanted))
    return measuring.measured(loaded, wanted, SAMPLES, unpacked=unpacked)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.2), Sampling(1.0)])
def test_generate_agrees_with_ar(loaded, sampling):
    bench, found = measured(loaded, methods=("hf", "hf-eager"), sampling=sampling)
    rows = {row["method"]: row for row in report.rows(bench.names, found)}
    assert set(rows) == {"ar", "hf", "hf-eager"}
    for row in rows.values():
        assert (row["mismatches"], row["near_ties"]) == (0, 0)
        assert row["tokens_per_second"] > 0 and row["speedup_vs_hf"] > 0 and row["mean_accepted_length"] == 1.0
    assert [d.dataset for d in found] == ["a", "a"]
    assert set(bench.notes.values()) == {"float32 weights"}


def test_generate_can_have_a_model_of_its_own(loaded):
    """As it must where ours holds weights as a file stores them: it is read once, and only for those who run on it."""
    reads = []

    def unpacked():
        reads.append(1)
        return LoadedModel(tiny_model(context=512, layers=2, seed=7).to(torch.bfloat16), loaded.tokenizer)

    bench, found = measured(loaded, unpacked, methods=("hf", "hf-eager"), max_tokens=8)
    assert bench.notes == {"ar": "float32 weights", "hf": "bfloat16 weights", "hf-eager": "bfloat16 weights"}
    assert len(reads) == 1
    assert found[0].rounds["hf"][0].tokens != found[0].rounds["ar"][0].tokens
    Bench(loaded, Settings(methods=("ar",)), unpacked=unpacked)
    assert len(reads) == 1


def test_a_prompt_is_read_once_and_each_token_is_a_forward(loaded):
    peer, rows = Generate(loaded.model), []
    job = Job((tuple(range(5, 30)),), 9, Sampling(), 0, frozenset())
    handle = loaded.model.register_forward_hook(lambda *given: rows.append(given[-1].logits.shape))
    try:
        cold = peer.cold(job)
        first, again = len(rows), peer.warm(job)
    finally:
        handle.remove()
    assert cold.tokens == again.tokens and cold.rounds == again.rounds == (8,) and first == len(rows) - first == 9
