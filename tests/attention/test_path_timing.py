"""The measurement that chooses between attention paths: with a stand-in for the clock, and for the GPU."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

from longdraft.attention import dispatch, path_timing, sdpa, tree_part
from longdraft.attention.path_timing import Fastest, Kind
from tests import torch_kernels
from tests.nominal import answer

CUDA = torch.device("cuda", 0)
KIND = Kind("GPU of a test", 128, "torch.bfloat16", ("hybrid", "flash", "triton"), {"torch": "2.13"})


class Measured:
    """Seconds by path: one number for all rows, one for each, or what is raised. The first run of a path takes
    ``cold`` seconds more."""

    def __init__(self, cold: float = 0.0, **seconds) -> None:
        self.asked: list[str] = []
        self._cold, self._seconds = cold, seconds

    def __call__(self, path: str):
        self.asked.append(path)
        found = self._seconds[path]
        if self._cold and self.asked.count(path) == 1:
            return [self._cold + found] * 3
        if isinstance(found, Exception):
            raise found
        return [found] * 3 if isinstance(found, float) else found


def test_the_geometric_mean_counts(tmp_path):
    found = Fastest(tmp_path).find(KIND, Measured(hybrid=[1.0, 2.0, 4.0], flash=3.0, triton=2.5))
    assert found == pytest.approx({"hybrid": 2.0, "flash": 3.0, "triton": 2.5})


def test_a_path_that_does_not_work_is_said_and_not_taken(tmp_path, caplog):
    found = Fastest(tmp_path).find(KIND, Measured(hybrid=1.0, flash=RuntimeError("no kernel image."), triton=2.0))
    assert found["flash"] == math.inf and found["hybrid"] == 1.0
    assert "The flash attention does not work on this machine (no kernel image)." in caplog.text


def test_each_path_is_warmed_up_before_any_is_timed(tmp_path):
    """The first run of a path compiles; a path that is slow to compile is chosen all the same, and so is the last."""
    measured = Measured(cold=20.0, hybrid=1.0, flash=0.5, triton=0.1)
    assert Fastest(tmp_path).find(KIND, measured) == pytest.approx({"hybrid": 1.0, "flash": 0.5, "triton": 0.1})
    assert measured.asked == [*KIND.paths] * 2


def test_an_incomplete_result_is_measured_anew(tmp_path):
    Fastest(tmp_path).find(KIND, Measured(hybrid=1.0, flash=0.5, triton=2.0))
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"choice": {"hybrid": 1.0, "flash": 0.5}}))
    assert Fastest(tmp_path).known(KIND) is None


def test_what_was_measured_is_kept_for_later_processes_and_for_its_kind_alone(tmp_path):
    assert Fastest(tmp_path).known(KIND) is None
    found = Fastest(tmp_path).find(KIND, Measured(hybrid=1.0, flash=0.5, triton=ValueError()))
    assert Fastest(tmp_path).known(KIND) == found == {"hybrid": 1.0, "flash": 0.5, "triton": math.inf}
    for other in ({"device": "another"}, {"head_dim": 64}, {"paths": ("hybrid",)}, {"versions": {"torch": "2.14"}}):
        assert Fastest(tmp_path).known(Kind(**{**vars(KIND), **other})) is None


@pytest.mark.parametrize("choice", [None, {}, [], {"hybrid": "fast"}, {"turbo": 1.0}])
def test_a_damaged_file_is_measured_anew(tmp_path, choice):
    Fastest(tmp_path).find(KIND, Measured(hybrid=1.0, flash=0.5, triton=2.0))
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"choice": choice}))
    assert Fastest(tmp_path).known(KIND) is None


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU with nothing but torch and triton, whose clock is what a test says."""

    def make(full: bool = False, **seconds) -> Measured:
        measured = Measured(**seconds)

        def on_gpu(*about):
            if full:
                raise torch.OutOfMemoryError("no room")
            return measured

        answer(monkeypatch, is_available=True, get_device_name=KIND.device, get_device_capability=(8, 0))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(dispatch, "fastest", Fastest(tmp_path))
        monkeypatch.setattr(path_timing, "on_gpu", on_gpu)
        able = set(seconds)
        plain = dispatch.unavailable
        monkeypatch.setattr(dispatch, "unavailable", lambda name, *a: plain(name, *a) if name in able else "missing")
        return measured

    return make


def test_the_fastest_path_is_chosen_and_measured_once(gpu, caplog):
    pytest.importorskip("triton")
    measured = gpu(hybrid=2e-4, triton=1e-4)
    with caplog.at_level(logging.INFO, logger="longdraft"):
        assert dispatch.choose(CUDA, torch.bfloat16, 128) == dispatch.choose(CUDA, torch.bfloat16, 128) == "triton"
    assert measured.asked == ["hybrid", "triton"] * 2
    assert "GPU of a test (head size 128, torch.bfloat16): hybrid 200 us, triton 100 us" in caplog.text
    assert dispatch.measured(CUDA, torch.bfloat16, 128) == pytest.approx({"hybrid": 2e-4, "triton": 1e-4})


def test_where_no_path_works_the_masked_one_is_taken_and_it_is_said(gpu, caplog, tmp_path):
    gpu(hybrid=RuntimeError("off"))
    assert dispatch.choose(CUDA, torch.bfloat16, 128) == "sdpa"
    assert "no other path works on this machine" in caplog.text
    assert not list(tmp_path.iterdir())  # perhaps another time


def test_the_switch_leaves_the_first_path(gpu, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_TUNE", "0")
    assert gpu(hybrid=2e-4, triton=1e-4).asked == []
    assert dispatch.choose(CUDA, torch.bfloat16, 128) == "hybrid"
    assert dispatch.measured(CUDA, torch.bfloat16, 128) == {}


def test_without_memory_to_measure_with_the_first_path_is_taken_and_nothing_kept(gpu, monkeypatch, tmp_path):
    for full in (False, True):
        gpu(full, hybrid=2e-4, triton=torch.OutOfMemoryError("no room"))
        assert dispatch.choose(CUDA, torch.bfloat16, 128) == "hybrid" and not list(tmp_path.iterdir())


def test_a_path_whose_output_is_off_is_not_timed(monkeypatch):
    """The measurement itself, on a CPU with a clock of its own."""
    monkeypatch.setattr(path_timing, "CASES", ((1, 300), (16, 300), (64, 700)))
    monkeypatch.setattr(path_timing, "_seconds", lambda call, device: float(call().shape[2]))
    modules = {name: f"longdraft.attention.{name}" for name in ("hybrid", "sdpa")}
    with torch_kernels.registered():
        measure = path_timing.on_gpu(torch.device("cpu"), torch.bfloat16, 64, modules)
        assert measure("hybrid") == [1, 16, 64]
        monkeypatch.setattr(tree_part, "attend", lambda q, *rest: torch.zeros_like(q))
        with pytest.raises(ArithmeticError, match=r"with 16 rows its output is off by 100\.0%"):
            measure("hybrid")
        monkeypatch.setattr(sdpa, "attend", lambda q, *rest: torch.full_like(q, math.nan))
        with pytest.raises(ArithmeticError):
            measure("sdpa")


def test_other_kernels_in_the_place_of_torchs_are_measured_anew(gpu, monkeypatch):
    """A user may swap torch's flash attention for FA3 or FA4, which hybrid attention then runs on."""
    measured = gpu(hybrid=2e-4)
    for swapped in (None, "FA3", "FA3"):
        monkeypatch.setattr(
            torch.nn.attention, "current_flash_attention_impl", lambda name=swapped: name, raising=False
        )
        dispatch.measured(CUDA, torch.bfloat16, 128, ("hybrid",))
    assert measured.asked == ["hybrid"] * 4
