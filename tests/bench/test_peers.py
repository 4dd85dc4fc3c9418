"""What we are measured against: transformers' own ways of drafting, and llama.cpp by a stand-in."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from longdraft import LoadedModel, Sampling
from longdraft.bench import llama_peer, report
from longdraft.bench.assistant import WideHead, assistant
from longdraft.bench.contenders import Job
from longdraft.bench.data import Sample
from longdraft.bench.hf import AssistantModel, PromptLookup
from longdraft.bench.llama_peer import LlamaCpp
from longdraft.bench.peers import PEERS, Sources
from longdraft.bench.run import Bench, Settings, grid, prepare
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.host.runner import TargetRunner
from tests.drafters.test_small_lm_draft import KEPT, trained
from tests.drafts import small_lm
from tests.tiny import tiny_model, tiny_tokenizer

SAMPLES = [Sample("one two one two " * 4, "", "a", "a:1"), Sample("three four three", "", "a", "a:2")]


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512, layers=2), tiny_tokenizer(chat=True))


def measured(loaded, **wanted):
    settings = Settings(**({"max_tokens": 16, "repeats": 2} | wanted))
    bench = Bench(loaded, settings)
    groups, _ = grid(prepare(SAMPLES, loaded, settings), settings)
    return bench, [bench.measure(group) for group in groups]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.2)])
def test_generate_drafts_as_well_and_agrees_with_ar(loaded, tmp_path, sampling):
    draft = small_lm(tmp_path / "lm", vocab=61)
    bench, found = measured(
        loaded, methods=("hf", "hf-prompt-lookup", "hf-assisted"), sampling=sampling, sources=Sources(draft)
    )
    rows = {row["method"]: row for row in report.rows(bench.names, found)}
    assert set(rows) == {"ar", "hf", "hf-prompt-lookup", "hf-assisted"}
    for row in rows.values():
        assert (row["mismatches"], row["near_ties"]) == (0, 0)
        assert row["tokens_per_second"] > 0
        assert row["speedup_vs_hf"] > 0
    assert [d.dataset for d in found] == ["a", "a"]
    assert bench.notes == {}


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
    peer = AssistantModel(model, other, tmp_path)
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
    run, calls = counted(loaded.model, PromptLookup(loaded.model), job(prompt))
    assert calls == run.rounds[0] + 1
    assert run.tokens_per_second == pytest.approx((17 - run.early) / run.decode_seconds)
    assert run.mean_accepted_length == pytest.approx((16 - run.early) / run.rounds[0])


@pytest.mark.parametrize("kept", [None, KEPT])
def test_a_draft_of_ours_assists_with_the_whole_vocabulary(loaded, tmp_path, kept):
    model = loaded.model
    folder = trained(tmp_path / "draft", model, kept)
    found, where = assistant(TargetRunner(model), folder)
    assert where == folder
    assert found.config.vocab_size == model.config.vocab_size
    logits = found(torch.tensor([[3, 4, 5]])).logits
    assert logits.shape == (1, 3, 61)
    possible = torch.isfinite(logits).all(dim=(0, 1)).nonzero()[:, 0].tolist()
    assert possible == (kept if kept is not None else list(range(61)))
    bench, rounds = measured(loaded, methods=("hf-assisted",), sources=Sources(folder), max_tokens=12)
    assert [row["mismatches"] for row in report.rows(bench.names, rounds)] == [0, 0]


def test_a_wide_head_puts_logits_where_they_belong():
    head = torch.nn.Linear(4, 3, bias=False)
    wide = WideHead(head, torch.tensor([1, 4, 6]), 8)
    x = torch.randn(2, 5, 4)
    assert torch.equal(wide(x)[..., [1, 4, 6]], head(x))
    assert torch.isinf(wide(x)[..., [0, 2, 3, 5, 7]]).all()


def test_no_assistant_for_this_model(loaded):
    with pytest.raises(CapabilityError, match="--assistant DIR"):
        Bench(loaded, Settings(methods=("hf-assisted",)))


def test_settings_of_peers_that_make_no_sense(tmp_path):
    with pytest.raises(ValueError, match="hf-prompt-lookup, hf-assisted can only decode one prompt at a time"):
        Settings(methods=("hf", "hf-prompt-lookup", "hf-assisted"), batches=(1, 2))
    with pytest.raises(ValueError, match="--assistant is for hf-assisted"):
        Settings(methods=("hf",), sources=Sources(assistant="x"))
    assert [name for name, peer in PEERS.items() if peer.batched] == ["hf"]


class Llama:
    """What of llama-cpp-python we use: it counts upwards, and keeps what a prompt shares with the last one."""

    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, n_gpu_layers, verbose):
        if "broken" in model_path:
            raise ValueError("bad magic")
        self.room, self.kept, self.read = n_ctx, [], 0
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
def llama(monkeypatch, tmp_path):
    module = ModuleType("llama_cpp")
    module.Llama = Llama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and so on")
    return file


def test_llama_cpp_beside_the_others(loaded, llama):
    bench, found = measured(loaded, methods=("hf", "llama-cpp"), sources=Sources(llama_cpp_model=llama))
    rows = report.document(bench.names, found, bench.notes)["rows"]
    row = rows[-1]
    assert (row["method"], row["mismatches"], row["mean_accepted_length"]) == ("llama-cpp", None, 1.0)
    assert row["tokens_per_second"] > 0
    assert "Q4_1" in bench.notes["llama-cpp"] and "tiny.gguf" in bench.notes["llama-cpp"]


def test_llama_cpp_reads_a_prompt_once_and_ends_where_it_should(loaded, llama):
    peer = LlamaCpp(llama, 61, torch.device("cpu"))
    cold = peer.cold(job([3, 4, 5]))
    assert cold.tokens == (tuple(range(6, 23)),)
    assert peer.warm(job([3, 4, 5])).tokens == cold.tokens
    assert peer._model.read == 3
    ended = peer.warm(Job(((3, 4, 5),), 17, Sampling(), 0, frozenset({8})))
    assert (ended.tokens, ended.rounds) == (((6, 7, 8),), (2,))
    long = peer.cold(job([1] * 600))
    assert len(long.tokens[0]) == 17


def test_llama_cpp_that_cannot_be_used(llama, tmp_path, monkeypatch):
    with pytest.raises(CapabilityError, match="61 tokens and the model 60"):
        LlamaCpp(llama, 60, torch.device("cpu"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="bad magic"):
        LlamaCpp(broken, 61, torch.device("cpu"))
    text = tmp_path / "text.gguf"
    text.write_text("no")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        Settings(methods=("llama-cpp",), sources=Sources(llama_cpp_model=text))
    monkeypatch.delitem(sys.modules, "llama_cpp")
    monkeypatch.setattr(llama_peer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match="pip install llama-cpp-python"):
        Settings(methods=("llama-cpp",))
