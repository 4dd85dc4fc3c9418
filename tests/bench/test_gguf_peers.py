"""Peers that decode a GGUF file's own weights, by stand-ins for their packages."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from longdraft import LoadedModel, Sampling
from longdraft.bench import openvino_peer, report
from longdraft.bench.contenders import Job
from longdraft.bench.data import Sample
from longdraft.bench.llama_peer import LlamaCpp
from longdraft.bench.openvino_peer import OpenVINO, OpenVINOLookup
from longdraft.bench.peers import Sources
from longdraft.bench.prompts import grid, prepare
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from longdraft.errors import CapabilityError, CheckpointError
from tests.tiny import tiny_model, tiny_tokenizer


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


class Pipeline:
    """What of OpenVINO GenAI we use: it counts upwards, with a lookup in forwards of two tokens."""

    def __init__(self, path, device, INFERENCE_NUM_THREADS, scheduler_config, prompt_lookup=False):
        if "broken" in path:
            raise RuntimeError("Check 'ctx' failed at gguf.cpp:317:\nFailed to open it with gguf_open")
        assert (device, INFERENCE_NUM_THREADS) == ("CPU", torch.get_num_threads())
        assert scheduler_config.enable_prefix_caching is False
        self.step, self.configs = 2 if prompt_lookup else 1, []

    def get_tokenizer(self):
        return SimpleNamespace(get_vocab=lambda: dict.fromkeys(range(61)))

    def generate(self, ids, config, streamer):
        self.configs.append(vars(config))
        (row,) = ids.tolist()
        tokens = []
        while len(tokens) < config.max_new_tokens and not set(tokens) & config.stop_token_ids:
            count = min(self.step if tokens else 1, config.max_new_tokens - len(tokens))
            new = [(row[-1] + len(tokens) + 1 + i) % 61 for i in range(count)]
            streamer.write(new if count > 1 else new[0])
            tokens += new
        streamer.end()


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512, layers=2), tiny_tokenizer(chat=True))


@pytest.fixture
def file(monkeypatch, tmp_path):
    """A GGUF file, in a place where both packages are installed."""

    class Core:
        def get_property(self, device, name):
            assert device == "CPU"
            return SimpleNamespace(get_type_name=lambda: {"I": "f32", "K": "u8"}[name[0]])

    modules = {
        "llama_cpp": {"Llama": Llama},
        "openvino": {"Tensor": lambda array: array, "Core": Core},
        "openvino_genai": {
            "LLMPipeline": Pipeline,
            "StreamerBase": object,
            "StreamingStatus": SimpleNamespace(RUNNING=0),
            "SchedulerConfig": SimpleNamespace,
            "GenerationConfig": SimpleNamespace,
        },
    }
    for name, own in modules.items():
        module = ModuleType(name)
        vars(module).update(own)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(openvino_peer, "_weights", lambda file: "Q4_1")
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and so on")
    return file


def job(prompt, tokens=17, eos=(), **sampling):
    return Job((tuple(prompt),), tokens, Sampling(**sampling), 3, frozenset(eos))


MAKE = {
    "llama-cpp": lambda file, tokens: LlamaCpp(file, tokens, torch.device("cpu")),
    "openvino": OpenVINO,
    "openvino-lookup": OpenVINOLookup,
}
NAMES = tuple(MAKE)


def test_beside_the_others(loaded, file):
    settings = Settings(methods=("hf", *NAMES), max_tokens=16, repeats=2, sources=Sources(gguf=file))
    bench = Bench(loaded, settings)
    groups, _ = grid(prepare([Sample("one two one two " * 4, "", "a", "a:1")], loaded, settings), settings)
    rows = report.document(bench.names, [bench.measure(group) for group in groups], bench.notes)["rows"]
    accepted = {row["method"]: row["mean_accepted_length"] for row in rows if row["mismatches"] is None}
    assert accepted == {"llama-cpp": 1.0, "openvino": 1.0, "openvino-lookup": 15 / 8}
    assert all(row["tokens_per_second"] > 0 for row in rows)
    for name in NAMES:
        assert "tiny.gguf, Q4_1 weights" in bench.notes[name]
    assert "computed in f32, KV in u8" in bench.notes["openvino"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_ends_where_it_should(file, name):
    peer = MAKE[name](file, 61)
    cold = peer.cold(job([3, 4, 5]))
    assert cold.tokens == (tuple(range(6, 23)),)
    assert peer.warm(job([3, 4, 5])).tokens == cold.tokens
    assert sum(accepted + 1 for accepted, _ in cold.accepted) == 16
    assert len(cold.accepted) == cold.rounds[0] == (8 if name == "openvino-lookup" else 16)
    ended = peer.warm(job([3, 4, 5], eos=[8]))
    assert ended.tokens == ((6, 7, 8),)
    assert len(peer.cold(job([1] * 600)).tokens[0]) == 17


def test_llama_cpp_reads_a_prompt_once(file):
    peer = MAKE["llama-cpp"](file, 61)
    peer.cold(job([3, 4, 5]))
    peer.warm(job([3, 4, 5]))
    assert peer._model.read == 3


def test_openvino_is_told_what_is_asked_for(file):
    peer = MAKE["openvino-lookup"](file, 61)
    peer.warm(job([3]))
    peer.warm(job([3], eos=[9], temperature=0.5, top_k=7))
    greedy, sampled = peer._pipeline.configs
    lookup = {"num_assistant_tokens": 5, "max_ngram_size": 3, "max_new_tokens": 17, "repetition_penalty": 1.0}
    assert greedy == {**lookup, "ignore_eos": True, "stop_token_ids": set(), "do_sample": False}
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 7, "rng_seed": 3}
    assert sampled == {**lookup, "ignore_eos": False, "stop_token_ids": {9}, **sampling}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_cannot_be_used(file, tmp_path, name):
    with pytest.raises(CapabilityError, match="61 tokens and the model 60"):
        MAKE[name](file, 60)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"bad magic|Failed to open it"):
        MAKE[name](broken, 61)
    text = tmp_path / "text.gguf"
    text.write_text("no")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        Settings(methods=(name,), sources=Sources(gguf=text))


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_missing(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        CapabilityError, match="pip install " + {"l": "llama-cpp-python", "o": "openvino-genai"}[name[0]]
    ):
        Settings(methods=(name,))


def test_the_precision_of_a_real_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert openvino_peer._weights(tmp_path / "a.gguf") == "Q4_1"
