"""Hybrid tree attention: the reference against torch, every other path against the reference."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from longdraft.attention import cpu, reference, sdpa
from longdraft.attention.block import Block
from longdraft.attention.reference import merge, partial_attention

# float32: another order of summation. bfloat16: the output's own rounding (2^-9 of values up to about 4) and,
# in paths that leave the work to a 16-bit kernel, that of the softmax weights before they meet V.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
GQA = [(4, 4), (6, 2), (4, 1), (8, 1)]


# --- cases ---


def random_tree(size: int, generator: torch.Generator) -> torch.Tensor:
    """(T, T) ancestor mask of a tree whose every parent is drawn from the nodes before."""
    mask = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        mask[node] |= mask[int(torch.randint(node, (), generator=generator))]
    return mask


def case(
    lengths: list[int],
    size: int,
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    tree: bool = True,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    behind: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block, float]:
    """Arguments of an attend function. Slots are shuffled, and everything that no row may see is NaN."""
    generator = torch.Generator().manual_seed(len(lengths) + 7 * size + head_dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slots = (torch.randperm(len(lengths) + 1, generator=generator) + 1)[: len(lengths)].tolist()
    width = behind + size
    capacity = max(lengths) + width + 3
    q = randn(len(lengths), heads[0], size, head_dim)
    keys, values = (torch.full((len(lengths) + 2, heads[1], capacity, head_dim), math.nan) for _ in range(2))
    for slot, n in zip(slots, lengths, strict=True):
        keys[slot, :, : n + width] = randn(heads[1], n + width, head_dim)
        values[slot, :, : n + width] = randn(heads[1], n + width, head_dim)
    q, keys, values = (t.to(dtype) for t in (q, keys, values))
    if transposed:
        keys = keys.transpose(-1, -2).contiguous().transpose(-1, -2)
    mask = torch.stack([random_tree(width, generator)[behind:] for _ in lengths]) if tree else None
    return q, keys, values, Block.make(slots, lengths, size, mask, offset=behind), 1.3 * head_dim**-0.5


def assert_like_reference(attend, q, keys, values, block, scale):
    expected = reference.attend(q, keys, values, block, scale)
    got = attend(q, keys, values, block, scale)
    assert got.shape == q.shape and got.dtype == q.dtype
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.fixture(
    params=[
        "cpu kernels",
        "cpu kernels, many rows",
        "cpu few rows",
        "cpu few rows, long prefix",
        "cpu many rows",
        "sdpa",
    ]
)
def path(request, monkeypatch):
    """Each path's attend; the regimes of the CPU's are forced by its thresholds and by our kernels' switch."""
    if request.param == "sdpa":
        return sdpa.attend
    monkeypatch.setenv("LONGDRAFT_NATIVE", "1" if "kernels" in request.param else "0")
    monkeypatch.setattr(cpu, "FEW_ROWS", 0 if "many rows" in request.param else 10**6)
    monkeypatch.setattr(cpu, "LONG_PREFIX", 0 if request.param == "cpu few rows, long prefix" else 10**6)
    return cpu.attend


# --- the reference ---


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_the_reference_is_attention_under_an_explicit_mask(tree):
    q, keys, values, block, scale = case([0, 5, 13], 6, tree=tree)
    got = reference.attend(q, keys, values, block, scale)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        own = block.mask[b] if tree else torch.ones(6, 6, dtype=torch.bool).tril()
        mask = torch.cat([torch.ones(6, n, dtype=torch.bool), own], dim=1)
        k, v = (t[slot, :, : n + 6].repeat_interleave(3, dim=0) for t in (keys, values))
        expected = F.scaled_dot_product_attention(q[b], k, v, attn_mask=mask, scale=scale)
        torch.testing.assert_close(got[b], expected, atol=2e-6, rtol=2e-6)


def test_partial_attention_returns_the_log_sum_exp_of_the_scores():
    q, k, v = torch.randn(4, 3, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    _, lse = partial_attention(q, k, v, 0.5)
    scores = 0.5 * torch.einsum("htd,hnd->htn", q.double(), k.double().repeat_interleave(2, 0))
    torch.testing.assert_close(lse.double(), scores.exp().sum(-1).log(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_rows_behind_which_a_block_lies_are_part_of_its_tree(tree):
    """The last rows of one block are a block behind the others."""
    q, keys, values, block, scale = case([0, 5, 13], 9, tree=tree)
    last = Block.make(block.slots, block.lengths, 4, None if block.mask is None else block.mask[:, 5:], offset=5)
    got = reference.attend(q[:, :, 5:].contiguous(), keys, values, last, scale)
    assert torch.equal(got, reference.attend(q, keys, values, block, scale)[:, :, 5:])


# --- every path ---


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["keys by row", "keys by column"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("heads", GQA, ids=lambda h: f"{h[0]} over {h[1]} heads")
def test_path_equals_the_reference_on_ragged_shuffled_sequences(path, heads, tree, transposed, dtype):
    assert_like_reference(path, *case([11, 0, 130, 1], 7, heads=heads, tree=tree, transposed=transposed, dtype=dtype))


@pytest.mark.parametrize("head_dim", [1, 5, 33, 64, 100, 256])
def test_path_equals_the_reference_for_any_head_size(path, head_dim):
    assert_like_reference(path, *case([0, 19], 5, head_dim=head_dim))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("size", [1, 2, 65])
def test_path_equals_the_reference_for_any_block_size(path, size, tree):
    assert_like_reference(path, *case([0, 40], size, tree=tree))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("size", "behind"), [(1, 1), (1, 9), (4, 1), (5, 30), (70, 65)])
def test_path_equals_the_reference_behind_earlier_levels(path, size, behind, tree, dtype):
    heads, transposed = GQA[size % 4], behind % 2 == 1
    lengths = [11, 0, 130, 1]
    assert_like_reference(
        path, *case(lengths, size, heads=heads, tree=tree, transposed=transposed, dtype=dtype, behind=behind)
    )


def test_path_leaves_the_cache_alone(path):
    q, keys, values, block, scale = case([3, 0], 4)
    before = keys.clone(), values.clone()
    path(q, keys, values, block, scale)
    assert torch.equal(keys.nan_to_num(9), before[0].nan_to_num(9))
    assert torch.equal(values.nan_to_num(9), before[1].nan_to_num(9))


@pytest.mark.parametrize("behind", [0, 6])
@pytest.mark.parametrize("lengths", [[1000], [1100], [1018]], ids=["below", "above", "at the border"])
@pytest.mark.parametrize("size", [6, 64, 65])
def test_cpu_path_equals_the_reference_around_its_real_thresholds(lengths, size, behind):
    assert_like_reference(cpu.attend, *case(lengths, size, transposed=True, behind=behind))


# --- merging by log-sum-exp ---


def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity():
    mask = torch.tensor([[True, False], [False, False]])
    o, lse = partial_attention(torch.randn(1, 2, 4), torch.randn(1, 2, 4), torch.randn(1, 2, 4), 1.0, mask)
    assert torch.equal(o[0, 1], torch.zeros(4)) and lse[0, 1] == -math.inf
    assert torch.isfinite(o[0, 0]).all() and torch.isfinite(lse[0, 0])


def test_a_part_without_keys_gives_zero_and_minus_infinity():
    o, lse = partial_attention(torch.randn(2, 3, 4), torch.randn(1, 0, 4), torch.randn(1, 0, 4), 1.0)
    assert torch.equal(o, torch.zeros(2, 3, 4)) and (lse == -math.inf).all()


def test_merging_with_a_part_that_saw_nothing_changes_nothing():
    o, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    merged, total = merge([torch.zeros_like(o), o], [torch.full_like(lse, -math.inf), lse])
    torch.testing.assert_close(merged, o)
    torch.testing.assert_close(total, lse)


def test_merging_parts_that_all_saw_nothing_gives_zero_and_minus_infinity():
    nothing = torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf)
    merged, total = merge([nothing[0]] * 2, [nothing[1]] * 2)
    assert torch.equal(merged, nothing[0]) and torch.equal(total, nothing[1])


@st.composite
def parts_of_a_whole(draw):
    """q, k, v, a random mask, and the keys' indices cut into parts, in any order, some of them empty."""
    keys, parts = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    spread = draw(st.sampled_from([0.1, 1.0, 30.0]))  # scores from nearly equal to nearly one-hot
    q = spread * torch.randn(4, 3, 8, generator=generator)
    k, v = (torch.randn(2, keys, 8, generator=generator) for _ in range(2))
    mask = torch.rand(3, keys, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    owner = torch.randint(parts, (keys,), generator=generator)
    return q, k, v, mask, [(owner == i).nonzero().flatten() for i in range(parts)]


@given(parts_of_a_whole())
def test_merging_any_split_of_the_keys_gives_the_whole(case):
    q, k, v, mask, split = case
    parts = [partial_attention(q, k[:, i], v[:, i], 0.4, mask[:, i]) for i in split]
    merged = merge([o for o, _ in parts], [lse for _, lse in parts])
    for got, expected in zip(merged, partial_attention(q, k, v, 0.4, mask), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@given(parts_of_a_whole())
def test_merge_is_associative(case):
    q, k, v, mask, split = case
    parts = [partial_attention(q, k[:, i], v[:, i], 0.4, mask[:, i]) for i in split]

    def pair(a, b):
        return merge([a[0], b[0]], [a[1], b[1]])

    left, right = parts[0], parts[-1]
    for part in parts[1:]:
        left = pair(left, part)
    for part in reversed(parts[:-1]):
        right = pair(part, right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


# --- the block ---


def test_a_block_without_a_mask_is_a_causal_chain():
    block = Block.make([0], [4], 3)
    assert torch.equal(block.block_mask(0, torch.device("cpu")), torch.ones(3, 3, dtype=torch.bool).tril())
    block = Block.make([0], [4], 2, offset=1)
    assert block.block_mask(0, torch.device("cpu")).tolist() == [[True, True, False], [True, True, True]]


def test_a_block_carries_its_numbers_as_device_tensors_too():
    block = Block.make([2, 0], [4, 9], 3)
    assert block.slots_t.tolist() == list(block.slots) == [2, 0]
    assert block.lengths_t.tolist() == list(block.lengths) == [4, 9]
    assert block.batch == 2


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(1, 3, 3\)"):
        Block.make([0], [4], 3, torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(1, 3, 5\)"):
        Block.make([0], [4], 3, torch.ones(1, 3, 3, dtype=torch.bool), offset=2)
