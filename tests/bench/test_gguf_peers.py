"""Peers that decode a GGUF file's own weights, by stand-ins for their packages."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from longdraft import Sampling
from longdraft.bench import report
from longdraft.bench.contenders import Job
from longdraft.bench.data import Sample
from longdraft.bench.peers import LlamaCpp, Sources
from longdraft.bench.settings import Settings
from longdraft.errors import CapabilityError, CheckpointError
from tests.bench.measuring import measured, settings


class Llama:
    """What of llama-cpp-python we use: it counts upwards, and keeps what a prompt shares with the last one."""

    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, n_gpu_layers, verbose):
        if "broken" in model_path:
            raise ValueError("bad magic")
        assert n_threads == n_threads_batch == torch.get_num_threads()
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


def job(prompt, tokens=17, eos=(), **sampling):
    return Job((tuple(prompt),), tokens, Sampling(**sampling), 3, frozenset(eos))


def peer_of(file, tokens=61) -> LlamaCpp:
    return LlamaCpp(file, tokens, torch.device("cpu"))


def test_beside_the_others(loaded, file):
    wanted = settings(methods=("hf", "llama-cpp"), max_tokens=16, repeats=2, sources=Sources(gguf=file))
    bench, found = measured(loaded, wanted, [Sample("one two one two " * 4, "", "a", "a:1")])
    rows = report.rows(bench.names, found)
    accepted = {row["method"]: row["mean_accepted_length"] for row in rows if row["mismatches"] is None}
    assert accepted == {"llama-cpp": 1.0}
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert "tiny.gguf" in bench.notes["llama-cpp"]


def test_a_run_ends_at_the_limit_or_at_eos(file):
    peer = peer_of(file)
    cold = peer.cold(job([3, 4, 5]))
    assert cold.tokens == (tuple(range(6, 23)),)
    assert peer.warm(job([3, 4, 5])).tokens == cold.tokens
    assert sum(accepted + 1 for accepted, _ in cold.accepted) == 16
    assert len(cold.accepted) == cold.rounds[0] == 16
    ended = peer.warm(job([3, 4, 5], eos=[8]))
    assert ended.tokens == ((6, 7, 8),)
    assert len(peer.cold(job([1] * 600)).tokens[0]) == 17


def test_llama_cpp_reads_a_prompt_once(file):
    peer = peer_of(file)
    peer.cold(job([3, 4, 5]))
    peer.warm(job([3, 4, 5]))
    assert peer._model.read == 3


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
