"""LONGSPEC against SGLang's own modules: run where sglang is installed, on any machine. No server is started.

pip install --no-deps sglang==0.5.23    # and the few packages that its modules ask for
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

import transformers.image_utils  # noqa: F401  # before the stubs, which it would take for torchvision
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from longdraft.errors import CapabilityError, RequestError
from longdraft.plugins.sglang.plugin import NAME, register
from longdraft.plugins.sglang.trees import tree_arrays
from longdraft.trees.tree import TokenTree
from tests.drafts import random_draft
from tests.plugins.stubs import Stubs
from tests.plugins.test_sglang_trees import links
from tests.tiny import tiny_model

NODES = 6


@pytest.fixture(scope="module")
def worker_class():
    sys.meta_path.append(finder := Stubs(lambda *_: MagicMock()))
    try:
        register()
        yield get_spec(NAME).factory(None)
    finally:
        sys.meta_path.remove(finder)


def test_the_entry_point_registers():
    (point,) = (p for p in entry_points(group="sglang.srt.plugins") if p.name == "longdraft")
    point.load()()
    point.load()()  # every process of a server does so
    found = SpeculativeAlgorithm.from_string("longspec")
    assert isinstance(found, CustomSpecAlgo) and found.is_ngram() and found.is_speculative()
    assert found.supports_overlap and not found.has_draft_kv() and not found.is_eagle()
    asked = {name for name, method in vars(SpeculativeAlgorithm).items() if inspect.isfunction(method)}
    assert asked and not asked - set(dir(found))  # SGLang checks a few of them alone
    assert not found.carries_draft_hidden_states() and not found.need_topk()


def test_the_hooks_are_put_where_sglang_reads(worker_class, tmp_path, monkeypatch):
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.utils import hf_transformers

    HookRegistry.apply_hooks()
    draft = random_draft(tmp_path, tiny_model())
    assert hf_transformers.get_config(str(draft), trust_remote_code=False).architectures is None
    monkeypatch.setattr(allocation_sizing, "max_speculative_num_draft_tokens", lambda: 8)
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: 1)
    for algorithm, columns in ((NAME, 16), ("NGRAM", 12)):
        names = {"algorithm": algorithm, "num_steps": 4, "eagle_topk": 2}
        spec = SimpleNamespace(**{f"speculative_{name}": value for name, value in names.items()})
        for module in (runtime_context, allocation_sizing):
            monkeypatch.setattr(module, "get_spec", lambda spec=spec: spec)
        assert allocation_sizing.get_req_to_token_extra_context_len() == columns
        assert allocation_sizing.get_alloc_reserve_per_decode() == 16


def test_the_validator_refuses_and_fills_in(tmp_path):
    from sglang.srt.server_args import ServerArgs

    register()
    plain = {name: p.default for name, p in inspect.signature(ServerArgs).parameters.items()}
    names = set(plain)
    draft = str(random_draft(tmp_path, tiny_model()))
    validate = get_spec(NAME).validate_server_args
    with pytest.raises(RequestError, match="needs a draft"):
        validate(SimpleNamespace(**plain))
    args = SimpleNamespace(**plain | {"speculative_draft_model_path": draft, "device": "cuda"})
    validate(args)
    assert set(vars(args)) == names and args.speculative_num_draft_tokens  # nothing is written that SGLang lacks
    with pytest.raises(CapabilityError, match="--tp-size 2"):
        validate(SimpleNamespace(**plain | {"speculative_draft_model_path": draft, "tp_size": 2}))


def made(worker_class, monkeypatch, overlap, trees=None):
    """A worker as SGLang's scheduler makes it."""
    module = sys.modules[worker_class.__module__]
    spec = SimpleNamespace(speculative_num_draft_tokens=NODES, speculative_eagle_topk=2, speculative_num_steps=3)
    schedule = SimpleNamespace(disable_overlap_schedule=not overlap, page_size=1)
    monkeypatch.setattr(module, "get_spec", lambda: spec)
    monkeypatch.setattr(module, "get_schedule", lambda: schedule)
    monkeypatch.setattr(module, "get_device", lambda: SimpleNamespace(device="cpu"))
    asked = []

    def drafting(*arguments):
        asked.append(arguments)
        return SimpleNamespace(trees=trees, forget=lambda: asked.append("forget"))

    monkeypatch.setattr(module, "Drafting", drafting)
    runner = SimpleNamespace(max_running_requests=3)
    target = SimpleNamespace(model_runner=runner, get_memory_pool=lambda: ("table", "allocator"))
    args = SimpleNamespace(speculative_draft_model_path="draft")
    return worker_class(server_args=args, gpu_id=0, nccl_port=1, target_worker=target), runner, asked


def test_the_worker_has_what_ngrams_methods_read(worker_class, monkeypatch):
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    worker, runner, asked = made(worker_class, monkeypatch, overlap=True)
    assert isinstance(worker, NGRAMWorker) and not worker_class.__abstractmethods__
    worker.alloc_memory_pool()
    assert asked == [(runner, "draft", NODES, 3)]
    assert worker.draft_worker is None and worker.target_worker.model_runner is runner
    worker.clear_cache_pool()
    assert asked[-1] == "forget"
    ours = {name for name in vars(worker_class) if callable(getattr(worker_class, name))}
    for name, method in vars(NGRAMWorker).items():
        if inspect.isfunction(method) and name not in ours and "corp" not in name:
            for node in ast.walk(ast.parse(inspect.getsource(method).lstrip().replace("\n    ", "\n"))):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self":
                    assert hasattr(worker, node.attr) or isinstance(node.ctx, ast.Store), f"{name}: {node.attr}"


@pytest.mark.parametrize("overlap", [False, True])
def test_the_worker_hands_over_trees_as_sglang_reads_them(worker_class, monkeypatch, overlap):
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    batch_trees = [TokenTree((7, 1, 2, 1, 3), (-1, 0, 0, 1, 2)), TokenTree((9,), (-1,))]
    seen = []

    def trees(requests, rows, late):
        seen.append((requests, rows, late))
        return batch_trees

    worker, *_ = made(worker_class, monkeypatch, overlap, trees)
    worker.alloc_memory_pool()
    accepted = SimpleNamespace(accept_lens=torch.tensor([2, 1]), accept_tokens=torch.arange(2 * NODES))
    batch = SimpleNamespace(
        reqs=["a", "b"], req_pool_indices=torch.tensor([4, 2]), spec_info=accepted, grammar_needs_sync=lambda: False
    )
    tokens, mask = worker._prepare_draft_tokens(batch)
    assert seen[0][2] == ([[0, 1], [NODES]] if overlap else [[], []])
    assert np.array_equal(mask, tree_arrays(batch_trees, NODES)[1]) and tokens[:5].tolist() == [7, 1, 2, 1, 3]
    first, siblings = _derive_tree_links(mask, 2, NODES)
    for i, seen_by in enumerate(mask.reshape(2, NODES, NODES).tolist()):
        assert (first[i].tolist(), siblings[i].tolist()) == links(seen_by)[2:]
