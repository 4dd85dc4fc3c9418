"""What we are measured against: transformers' own ways of drafting, and llama.cpp."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from longdraft import LoadedModel, Sampling
from longdraft.bench import report
from longdraft.bench.contenders import Job
from longdraft.bench.data import Sample
from longdraft.bench.peers import BATCHED, PEERS, Generate, LlamaCpp, Sources
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.runner import TargetRunner
from tests.bench import measuring
from tests.bench.measuring import settings
from tests.drafters.test_small_lm_draft import KEPT
from tests.support.drafts import random_lm, small_lm
from tests.support.tiny import tiny_model

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


def job(prompt, tokens=17, eos=()):
    return Job((tuple(prompt),), tokens, Sampling(), 0, frozenset(eos))


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


# --- llama.cpp, by a stand-in for its package ---


class Llama:
    """What of llama-cpp-python we use: it counts upwards, and keeps what a prompt shares with the last one."""

    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, n_gpu_layers, verbose):
        if "broken" in model_path:
            raise ValueError("bad magic")
        assert n_threads == n_threads_batch == torch.get_num_threads()
        self.room, self.kept, self.read = n_ctx, [], 0
        Llama.last = self
        self.metadata = {"general.file_type": "3"}

    def n_vocab(self):
        return 61

    def set_seed(self, seed):
        self.seed = seed

    def reset(self):
        self.kept = []

    def generate(self, tokens, temp, top_k, top_p, min_p, repeat_penalty):
        assert (temp, top_k, top_p, min_p, repeat_penalty) == (0.0, 0, 1.0, 0.0, 1.0)
        self.read += 0 if self.kept == tokens else len(tokens)
        self.kept = tokens
        token = tokens[-1]
        while True:
            assert len(tokens) < self.room
            token = (token + 1) % 61
            yield token


@pytest.fixture
def file(monkeypatch, tmp_path):
    """A GGUF file, where llama-cpp-python is installed."""
    module = ModuleType("llama_cpp")
    module.__spec__ = ModuleSpec("llama_cpp", None)
    module.Llama = Llama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and so on")
    return file


def test_the_stand_in_takes_what_the_package_takes():
    real = pytest.importorskip("llama_cpp").Llama
    for name in ("__init__", "n_vocab", "set_seed", "reset", "generate"):
        own, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (Llama, real))
        assert own.keys() <= theirs.keys(), name


def peer_of(file, tokens=61) -> LlamaCpp:
    return LlamaCpp(file, tokens, torch.device("cpu"))


def test_beside_the_others(loaded, file):
    wanted = settings(methods=("hf", "llama-cpp"), max_tokens=16, repeats=2, sources=Sources(gguf=file))
    bench, found = measuring.measured(loaded, wanted, SAMPLES[:1])
    rows = report.rows(bench.names, found)
    accepted = {row["method"]: row["mean_accepted_length"] for row in rows if row["mismatches"] is None}
    assert accepted == {"llama-cpp": 1.0}
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "tiny.gguf" in bench.notes["llama-cpp"]


def test_a_run_ends_at_the_limit_or_at_eos(file):
    peer = peer_of(file)
    cold = peer.cold(job([3, 4, 5]))
    assert cold.tokens == (tuple(range(6, 23)),)
    assert peer.warm(job([3, 4, 5])).tokens == cold.tokens and Llama.last.read == 3  # once
    assert sum(accepted + 1 for accepted, _ in cold.accepted) == 16
    assert len(cold.accepted) == cold.rounds[0] == 16
    ended = peer.warm(job([3, 4, 5], eos=[8]))
    assert ended.tokens == ((6, 7, 8),)
    assert len(peer.cold(job([1] * 600)).tokens[0]) == 17


def test_a_file_that_cannot_be_used(file, tmp_path):
    with pytest.raises(CapabilityError):
        peer_of(file, 60)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError):
        peer_of(broken)
    text = tmp_path / "text.gguf"
    text.write_text("no")
    with pytest.raises(CheckpointError):
        Settings(methods=("llama-cpp",), sources=Sources(gguf=text))


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match="llama-cpp-python"):
        Settings(methods=("llama-cpp",))
