"""Tuning: the fastest choice is found with a clock, kept, and found again."""

from __future__ import annotations

import json

import pytest
import torch

from longdraft.attention import triton_tuning
from longdraft.attention.triton_tuning import Choice, Kind, Tuning, candidates
from tests.attention.cases import case

KIND = Kind("GPU of a test", 128, 16, "torch.bfloat16", "3.9")
DEFAULT = Choice(64)


class Clock:
    """Seconds by choice; what is not named takes one."""

    def __init__(self, **seconds: float) -> None:
        self.asked: list[Choice] = []
        self._seconds = seconds

    def __call__(self, choice: Choice) -> float:
        self.asked.append(choice)
        if choice.block_n == 128:
            raise RuntimeError("out of resource: shared memory")
        named = f"n{choice.block_n}w{choice.warps}s{choice.stages}x{choice.waves}"
        return self._seconds.get(named, 1.0)


def test_the_fastest_tiles_and_then_the_fastest_waves_are_taken(tmp_path):
    clock = Clock(n64w8s2x2=0.5, n64w8s2x4=0.4, n64w4s3x2=0.6, n64w4s3x1=0.1)
    found = Tuning(tmp_path).find(KIND, DEFAULT, clock)
    assert found == Choice(64, 8, 2, 4)
    assert len(clock.asked) == len(set(clock.asked)) == len(candidates(KIND, DEFAULT)) + 2


def test_no_tile_is_tried_that_cannot_be_fast():
    def tried(head_dim: int, rows: int) -> set[tuple[int, int, int]]:
        kind = Kind("GPU of a test", head_dim, rows, "torch.bfloat16", "3.9")
        return {(c.block_n, c.warps, c.stages) for c in candidates(kind, DEFAULT)} - {(64, 4, 2)}

    most = {(32, 4, 3), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 3)}
    assert tried(64, 16) == tried(40, 32) == most
    assert tried(128, 16) == tried(80, 16) == most - {(128, 8, 3)}  # too much under way
    assert tried(64, 64) == tried(128, 64) == {(32, 4, 3), (64, 4, 3), (64, 8, 2)}  # 64 x 128 scores spill
    assert tried(128, 32) == {(32, 4, 3), (64, 8, 2), (128, 4, 2)}
    assert tried(256, 16) == tried(256, 32) == {(32, 4, 3), (64, 8, 2)}  # shared memory


def test_what_was_found_is_kept_for_later_processes_and_for_its_kind_alone(tmp_path):
    tuning = Tuning(tmp_path)
    assert tuning.known(KIND) is None
    found = tuning.find(KIND, DEFAULT, Clock(n32w4s3x2=0.5))
    assert found == Choice(32, 4, 3) and tuning.known(KIND) == found
    assert Tuning(tmp_path).known(KIND) == found
    for other in ({"device": "another"}, {"head_dim": 64}, {"rows": 64}, {"dtype": "torch.float16"}, {"triton": "4"}):
        assert Tuning(tmp_path).known(Kind(**{**vars(KIND), **other})) is None


WRONG = [{"block_n": 48}, {"warps": 3}, {"stages": 0}, {"waves": 1.5}, {"colour": 1}]


@pytest.mark.parametrize("damage", ["", "[1]", '{"format": 1, "kind": {}, "choice": {}}', "no json", *WRONG], ids=str)
def test_a_damaged_file_or_a_choice_that_launches_nothing_is_found_anew(tmp_path, damage):
    Tuning(tmp_path).find(KIND, DEFAULT, Clock())
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    file.write_text(damage if isinstance(damage, str) else json.dumps(content | {"choice": content["choice"] | damage}))
    assert Tuning(tmp_path).known(KIND) is None


def test_where_nothing_can_be_measured_the_default_serves_and_nothing_is_kept(tmp_path):
    def fail(choice: Choice) -> float:
        raise torch.OutOfMemoryError("no room")

    tuning = Tuning(tmp_path)
    assert tuning.find(KIND, DEFAULT, fail) == DEFAULT == tuning.known(KIND)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_next_tuning(tmp_path):
    (tmp_path / "file").write_text("")
    tuning = Tuning(tmp_path / "file" / "folder")
    assert tuning.find(KIND, DEFAULT, Clock(n32w4s3x2=0.5)) == Choice(32, 4, 3) == tuning.known(KIND)


def test_it_is_kept_in_the_cache_and_can_be_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_CACHE", str(tmp_path))
    Tuning().find(KIND, DEFAULT, Clock())
    assert [f.parent for f in tmp_path.rglob("*.json")] == [tmp_path / "triton"]
    assert triton_tuning.wanted()
    monkeypatch.setenv("LONGDRAFT_TUNE", "0")
    assert not triton_tuning.wanted()


def test_the_interpreter_measures_nothing_and_any_choice_gives_the_same(monkeypatch):
    pytest.importorskip("triton")
    from longdraft.attention import triton_backend

    if torch.cuda.is_available():
        pytest.skip("the interpreter is not in use")
    monkeypatch.setattr(triton_backend.tuning, "find", lambda *a: pytest.fail("nothing is measured here"))
    q, keys, values, block, scale = case([150], 5)
    given = q, keys, values, block.slots_t, block.lengths_t, scale, 150
    expected = triton_backend.prefix_attention(*given)
    for splits, choice in ((1, Choice(16, waves=1)), (2, Choice(32, 8, 3, 2)), (3, Choice(128, waves=4))):
        for found, wanted in zip(triton_backend.prefix_attention(*given, splits, choice), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
