"""Tensor parallelism: processes that share a target decode what one process decodes alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longdraft.errors import CapabilityError
from longdraft.model.tensor_parallel import tp_rank_of
from tests.exact.tensor_parallel_cases import (
    FAMILIES,
    METHODS,
    NEW,
    PROMPTS,
    REFUSED,
    cases,
    make,
    speculator,
)
from tests.support.tiny import tiny_model

slow = pytest.mark.slow
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shared")
    make(made)
    return made


@pytest.fixture(scope="module")
def shared(folder: Path) -> list[Found]:
    """What each of two processes under torchrun found."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "-m", "tests.exact.tensor_parallel_cases", str(folder)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@slow
def test_tokens_and_drafts_are_those_of_one_process(folder, shared, monkeypatch):
    # Our kernels round a draft's weights, and step aside where the target is shared out.
    monkeypatch.setattr("longdraft.drafters.shared.fused_level.kernels", lambda: None)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    alone = {name: decode(model) for name, decode in cases(folder).items()}
    for name, own in alone.items():
        if name.startswith("quantspec"):  # drafts with rounded weights of the target
            own = [row[0] for row in own]
            assert [[row[0] for row in found[name]] for found in shared] == [own, own], name
        else:
            assert [found[name] for found in shared] == [own, own], name
    for method in METHODS:
        accepted = sum(row[3] for kind in ("greedy", "sampled") for row in alone[f"{method}, {kind}"])
        assert accepted or method == "ar", method


@slow
def test_other_families_and_what_each_process_has(folder, shared):
    for name in FAMILIES:
        spec = speculator(AutoModelForCausalLM.from_pretrained(folder / name), folder, METHODS["ar"])
        own = [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=NEW)]
        assert [[row[0] for row in found[name]] for found in shared] == [own, own], name
    assert [found["kv heads"] for found in shared] == [1, 1]
    for name in ("unseeded", "unseeded, custom_generate"):  # all take the first one's samples
        assert shared[0][name] == shared[1][name]


@slow
def test_what_cannot_be_shared_is_refused_by_all(shared):
    for name in (*REFUSED, "odd"):
        said = {"planned": "leave plan out", "odd": "3 KV heads, which 2 processes cannot share out evenly"}
        for found in shared:
            assert found["refused"][name].startswith("CapabilityError: "), name
            assert said.get(name, "on a part of the KV cache") in found["refused"][name], name


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_other_ways_to_share_out_are_refused(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = tiny_model()
    assert tp_rank_of(model) is None
    weight = distribute_tensor(model.lm_head.weight.detach(), init_device_mesh("cpu", (1,)))
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(CapabilityError):
        tp_rank_of(model)
