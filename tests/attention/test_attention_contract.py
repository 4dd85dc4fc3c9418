"""Every attention path computes what the reference computes: hybrid tree attention, and prefix attention."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from longdraft.attention import dispatch, prefix
from longdraft.model.runner import TargetRunner
from tests.attention.cases import HEADS, assert_like_reference, case, scored
from tests.attention.paths import Path
from tests.quick import in_turn
from tests.tiny import tiny_model

TREE = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


@pytest.fixture
def serving(path):
    """Each path that computes windows, soft caps and sinks."""
    if path.name not in dispatch.SERVE_WINDOWS:
        pytest.skip("dispatch sends such layers to another path")
    return path


def check(path: Path, lengths: list[int], size: int, softcap=None, sinks=False, **settings) -> None:
    """In every dtype that the path supports."""
    for dtype in path.dtypes:
        arguments = case(lengths, size, device=path.device, dtype=dtype, **settings)
        scoring = scored(softcap, sinks, arguments[0].shape[1], path.device)
        assert_like_reference(path.attend, *arguments, scoring, tolerance=path.tolerance(dtype))


@pytest.mark.parametrize(("heads", "tree"), in_turn(HEADS, [False, True]), ids=str)
def test_ragged_shuffled_sequences(path, heads, tree):
    for transposed in path.layouts:
        check(path, [11, 0, 130, 1], 7, heads=heads, tree=tree, transposed=transposed)


def test_head_sizes(path):
    for head_dim in (1, 5, 8, 33, 64, 80, 100, 256):
        if head_dim % path.head_unit == 0:
            check(path, [0, 19], 5, head_dim=head_dim)


@TREE
@pytest.mark.parametrize("size", [1, 2, 65, pytest.param(200, marks=pytest.mark.slow)])
def test_block_sizes(path, size, tree):
    check(path, [0, 40] if size < 65 else [9], size, tree=tree)


@TREE
@pytest.mark.parametrize(("size", "behind"), [(1, 1), (1, 9), (4, 1), (5, 30), (70, 65)])
def test_behind_earlier_levels(path, size, behind, tree):
    transposed = behind % 2 == 1 and path.columns
    lengths = [11, 0, 130, 1] if size < 65 else [70]
    check(path, lengths, size, heads=HEADS[size % 4], tree=tree, transposed=transposed, behind=behind)


@TREE
@pytest.mark.parametrize(("size", "behind", "window"), [(1, 0, 1), (1, 9, 20), (7, 0, 3), (5, 30, 16), (65, 8, 100)])
def test_rows_that_see_a_window(serving, size, behind, window, tree):
    transposed = behind % 2 == 0 and serving.columns
    settings = {"heads": HEADS[size % 4], "tree": tree, "transposed": transposed, "behind": behind}
    check(serving, [11, 0, 130, 1] if size < 65 else [70], size, window=window, **settings)


@TREE
def test_a_prompt_with_windows_caps_and_sinks(serving, tree):
    check(serving, [90], 100, tree=tree, window=64, softcap=5.0, sinks=True)


@pytest.mark.parametrize(
    ("scores", "tree"), in_turn([(2.0, False), (None, True), (30.0, True)], [True, False]), ids=str
)
def test_soft_caps_and_sinks(serving, scores, tree):
    softcap, sinks = scores
    for size, heads in ((1, (6, 2)), (5, (4, 4))):
        check(serving, [11, 0, 130, 1], size, heads=heads, tree=tree, softcap=softcap, sinks=sinks)


def test_the_cache_is_left_alone(path):
    q, keys, values, block, scale = case([3, 0], 4, device=path.device, dtype=path.dtypes[0])
    before = keys.nan_to_num(9), values.nan_to_num(9)
    path.attend(q, keys, values, block, scale)
    assert torch.equal(keys.nan_to_num(9), before[0]) and torch.equal(values.nan_to_num(9), before[1])


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_prefix_attention(path, heads):
    few = [(1, [1]), (5, [33, 2])]
    more = few if path.name == "triton" else [*few, (1, [40, 7, 41]), (16, [300])]
    for (rows, lengths), dtype, transposed in product(more, path.dtypes, path.layouts):
        q, keys, values, block, scale = case(
            lengths, rows, heads=heads, tree=False, transposed=transposed, dtype=dtype, device=path.device
        )
        for slot, n in zip(block.slots, block.lengths, strict=True):
            keys[slot, :, n:], values[slot, :, n:] = torch.nan, torch.nan
        output, expected = (prefix.PATHS[p](q, keys, values, block, scale) for p in (path.name, "reference"))
        assert output.shape == expected.shape and output.dtype == dtype
        tolerance = path.tolerance(dtype)
        torch.testing.assert_close(output.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_every_attention_path_has_prefix_attention(monkeypatch):
    assert set(prefix.PATHS) == set(dispatch.PATHS)
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "reference")
    assert TargetRunner(tiny_model()).prefix_attend is prefix.PATHS["reference"]
