"""What we are measured against: transformers' own ways of drafting."""

from __future__ import annotations

import pytest
import torch

from longdraft import LoadedModel, Sampling
from longdraft.bench import report
from longdraft.bench.contenders import Job
from longdraft.bench.data import Sample
from longdraft.bench.peers import BATCHED, PEERS, Generate, Sources
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.errors import CapabilityError
from longdraft.model.runner import TargetRunner
from tests.bench import measuring
from tests.bench.measuring import settings
from tests.drafters.test_small_lm_draft import KEPT
from tests.drafts import random_lm, small_lm
from tests.tiny import tiny_model

SAMPLES = [Sample("one two one two " * 4, "", "a", "a:1"), Sample("three four three", "", "a", "a:2")]


def measured(loaded, unpacked=None, **wanted):
    wanted = settings(**({"max_tokens": 16, "repeats": 2} | wanted))
    return measuring.measured(loaded, wanted, SAMPLES, unpacked=unpacked)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.2)])
def test_generate_drafts_as_well_and_agrees_with_ar(loaded, tmp_path, sampling):
    draft = small_lm(tmp_path / "lm", vocab=61)
    bench, found = measured(
        loaded, methods=("hf", "hf-eager", "hf-prompt-lookup", "hf-assisted"), sampling=sampling,
        sources=Sources(draft),
    )  # fmt: skip
    rows = {row["method"]: row for row in report.rows(bench.names, found)}
    assert set(rows) == {"ar", "hf", "hf-eager", "hf-prompt-lookup", "hf-assisted"}
    for row in rows.values():
        assert (row["mismatches"], row["near_ties"]) == (0, 0)
        assert row["tokens_per_second"] > 0
        assert row["speedup_vs_hf"] > 0
    assert [d.dataset for d in found] == ["a", "a"]
    assert set(bench.notes.values()) == {"float32 weights"}


def test_generate_can_have_a_model_of_its_own(loaded):
    """As it must where ours holds weights as a file stores them: it is read once, and only for those who run on it."""
    reads = []

    def unpacked():
        reads.append(1)
        return LoadedModel(tiny_model(context=512, layers=2, seed=7).to(torch.bfloat16), loaded.tokenizer)

    bench, found = measured(loaded, unpacked, methods=("hf", "hf-prompt-lookup"), max_tokens=8)
    assert bench.notes == {"ar": "float32 weights", "hf": "bfloat16 weights", "hf-prompt-lookup": "bfloat16 weights"}
    assert len(reads) == 1
    assert found[0].rounds["hf"][0].tokens != found[0].rounds["ar"][0].tokens
    Bench(loaded, Settings(methods=("ar",)), unpacked=unpacked)
    assert len(reads) == 1


def test_drawn_tokens_are_not_compared(loaded):
    bench, found = measured(loaded, methods=("hf-prompt-lookup",), sampling=Sampling(1.0))
    assert [row["mismatches"] for row in report.rows(bench.names, found)] == [0, None]


def counted(model, peer, job):
    """The run, and how many forwards the model made for it."""
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        return peer.cold(job), len(calls)
    finally:
        handle.remove()


def job(prompt, tokens=17):
    return Job((tuple(prompt),), tokens, Sampling(), 0, frozenset())


@pytest.mark.parametrize("good", [True, False])
def test_forwards_and_accepted_tokens_are_counted(loaded, tmp_path, good):
    """The target as its own assistant: all that is drafted is accepted. Another one: next to nothing."""
    model = loaded.model
    other = model if good else tiny_model(layers=1, seed=9)
    peer = Generate(model, drafting={"assistant_model": other})
    run, calls = counted(model, peer, job(range(5, 30)))
    assert len(run.tokens[0]) == 17
    if not good:  # with itself for an assistant, drafting calls it too
        assert calls == run.rounds[0] + 1
    assert len(run.accepted) == run.rounds[0]
    assert 1 + run.early + sum(accepted + 1 for accepted, _ in run.accepted) == 17
    assert all(accepted <= room for accepted, room in run.accepted)
    if good:
        assert run.early > 0
    else:
        assert run.mean_accepted_length == (16 - run.early) / run.rounds[0]


def test_what_comes_with_the_first_token_was_not_timed(loaded):
    """A prompt that repeats itself: the forward that reads it accepts a draft as well."""
    prompt = list(range(5, 25)) * 3
    run, calls = counted(loaded.model, PEERS["hf-prompt-lookup"](TargetRunner(loaded.model), Sources()), job(prompt))
    assert calls == run.rounds[0] + 1
    assert run.tokens_per_second == pytest.approx((17 - run.early) / run.decode_seconds)
    assert run.mean_accepted_length == pytest.approx((16 - run.early) / run.rounds[0])


def test_a_draft_of_ours_assists_if_it_has_the_whole_vocabulary(loaded, tmp_path):
    folder = random_lm(tmp_path / "draft", loaded.model)
    bench, rounds = measured(loaded, methods=("hf-assisted",), sources=Sources(folder), max_tokens=12)
    assert [row["mismatches"] for row in report.rows(bench.names, rounds)] == [0, 0]
    with pytest.raises(CapabilityError, match="--assistant"):
        measured(
            loaded, methods=("hf-assisted",), sources=Sources(random_lm(tmp_path / "cut", loaded.model, kept=KEPT))
        )


def test_no_assistant_for_this_model(loaded):
    with pytest.raises(CapabilityError, match="--assistant"):
        Bench(loaded, Settings(methods=("hf-assisted",)))


def test_settings_of_peers_that_make_no_sense(tmp_path):
    for key, given in (
        ("hf-assisted", {"methods": ("hf", "hf-prompt-lookup", "hf-assisted"), "batches": (1, 2)}),
        ("--assistant", {"methods": ("hf",), "sources": Sources(assistant="x")}),
        ("--gguf", {"methods": ("hf",), "sources": Sources(gguf=tmp_path)}),
    ):
        with pytest.raises(ValueError, match=key):
            Settings(**given)
    assert BATCHED == ("hf", "hf-eager")
