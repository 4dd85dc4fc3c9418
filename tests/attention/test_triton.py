"""The Triton kernels beyond the contract: their parts and launches, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, so before the import
triton = pytest.importorskip("triton")

from longdraft.attention import reference, triton_backend  # noqa: E402
from longdraft.attention.block import Block  # noqa: E402
from longdraft.errors import CapabilityError  # noqa: E402
from tests.attention.cases import TOLERANCE, assert_like_reference, case, random_tree  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []  # one is to be seen with `-m gpu` alone
if not CUDA and isinstance(triton.language.max, triton.JITFunction):
    # A skip would hide it. Triton's own library is decorated at its import, so whoever came first decided.
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it in the shell or conftest.py")

TOLERANCE_OF = TOLERANCE | {torch.float32: 1e-5}  # float32: exp2 for exp, and another order of summation
make = functools.partial(case, device=DEVICE)


def trees(batch: int, size: int) -> torch.Tensor:
    """(B, T, T) masks of random trees."""
    generator = torch.Generator().manual_seed(size)
    return torch.stack([random_tree(size, generator) for _ in range(batch)])


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def check_attend(*arguments) -> None:
    assert_like_reference(triton_backend.attend, *arguments, tolerance=TOLERANCE_OF[arguments[0].dtype])


def check_parts(o, lse, q, keys, values, block, scale, of_tree: bool) -> None:
    """Output and log-sum-exp of one part, the tree's or the prefix's."""
    assert o.dtype == lse.dtype == torch.float32
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        rows = slice(n, n + block.width) if of_tree else slice(n)
        mask = block.block_mask(b, q.device) if of_tree else None
        expected = reference.partial_attention(q[b], keys[slot, :, rows], values[slot, :, rows], scale, mask)
        for found, wanted in zip((o[b], lse[b]), expected, strict=True):
            close(found, wanted, TOLERANCE_OF[q.dtype])


def check_prefix(q, keys, values, block, scale, splits: int | None) -> None:
    longest = max(block.lengths)
    o, lse = triton_backend.prefix_attention(q, keys, values, block.slots_t, block.lengths_t, scale, longest, splits)
    check_parts(o, lse, q, keys, values, block, scale, of_tree=False)


def tree_part(q, keys, values, block, scale) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = triton_backend._parts(1, q)
    inputs = triton_backend.Inputs(q, keys, values, block.slots_t, block.lengths_t, scale)
    triton_backend._launch_block(inputs, block.mask, block.offset, o[0], lse[0])
    return o[0], lse[0]


def check_masked(*arguments) -> None:
    check_parts(*tree_part(*arguments), *arguments, of_tree=True)


@pytest.mark.parametrize("splits", [None, 1, 3, 63])
def test_prefix_splits(splits: int | None) -> None:
    check_prefix(*make([300, 0, 65], 3, heads=(4, 2), head_dim=32), splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prefix_in_16_bits(dtype: torch.dtype) -> None:
    check_prefix(*make([300, 20], 4, heads=(8, 2), head_dim=64, dtype=dtype), 3)


def test_prefix_result_does_not_depend_on_max_length() -> None:
    q, keys, values, block, _ = make([400, 30], 2)
    args = (q, keys, values, block.slots_t, block.lengths_t, 0.25)
    for max_length in (1, 400, 100_000):
        o, lse = triton_backend.prefix_attention(*args, max_length)
        close(o, triton_backend.prefix_attention(*args, 400, 1)[0], 1e-5)
        close(lse, triton_backend.prefix_attention(*args, 400, 1)[1], 1e-5)


def test_empty_prefix_gives_zero_and_minus_infinity() -> None:
    q, keys, values, block, _ = make([0, 40], 2)
    for splits in (1, 4):
        o, lse = triton_backend.prefix_attention(q, keys, values, block.slots_t, block.lengths_t, 0.25, 40, splits)
        assert (o[0] == 0).all() and (lse[0] == float("-inf")).all()
        assert (lse[1] > float("-inf")).all()


@pytest.mark.parametrize(
    ("lengths", "size", "settings"),
    [
        *(([5, 0], size, {"heads": (4, 2), "head_dim": 32}) for size in (1, 6, 150)),
        *(([5, 70], 40, {"heads": (8, 2), "head_dim": 64, "dtype": x}) for x in (torch.float16, torch.bfloat16)),
        *(([5, 0], size, {"head_dim": 32, "behind": behind}) for size, behind in ((1, 70), (64, 64), (70, 150))),
        ([5, 0], 64, {"head_dim": 32, "behind": 64, "tree": False}),
    ],
    ids=str,
)
def test_the_part_of_a_tree(lengths, size, settings) -> None:
    check_masked(*make(lengths, size, **settings))


def test_arbitrary_mask_that_is_no_tree() -> None:
    mask = torch.rand(2, 90, 90, generator=torch.Generator().manual_seed(3)) < 0.3
    check_masked(*make([5, 70], 90, mask=mask))


def test_first_key_tile_wholly_masked() -> None:
    """140 rows are three key tiles: rows 70 on see only keys of the second and third."""
    mask = trees(1, 140)
    mask[:, 70:, :70] = False
    check_masked(*make([11], 140, mask=mask))


def test_row_that_sees_nothing() -> None:
    mask = trees(2, 80)
    mask[0, 3], mask[1, 79] = False, False
    arguments = make([0, 6], 80, mask=mask)
    o, lse = tree_part(*arguments)
    for b, i in ((0, 3), (1, 79)):
        assert (o[b, :, i] == 0).all() and (lse[b, :, i] == float("-inf")).all()
    check_masked(*arguments)
    check_attend(*arguments)  # sequence 0 has no prefix either: its row comes out as zeros


def test_strided_tensors() -> None:
    """Keys stored (slots, Hkv, d, capacity), values and q with heads inside rows, the mask a slice."""
    mask = trees(2, 6)
    q, keys, values, block, scale = make([21, 90], 6, head_dim=40, mask=mask)
    wide = torch.ones(2, 8, 9, dtype=torch.bool, device=DEVICE)
    wide[:, :6, :6] = mask.to(DEVICE)
    block = Block.make(block.slots, block.lengths, 6, wide[:, :6, :6], DEVICE)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    keys = keys.transpose(2, 3).contiguous().transpose(2, 3)
    values = values.transpose(1, 2).contiguous().transpose(1, 2)
    assert keys.stride(2) == 1 and keys.stride(3) > 1
    check_attend(q, keys, values, block, scale)
    assert triton_backend.attend(q, keys, values, block, 1.0).stride() == q.stride()


def test_mask_shared_by_the_batch() -> None:
    check_attend(*make([9, 30, 2], 12, mask=trees(1, 12).expand(3, -1, -1)))


def test_large_scores_do_not_overflow() -> None:
    """Scores of thousands, whose rounding the exponential enlarges: the inputs are fixed, and so the bound holds."""
    shapes = {1: (1, 4, 4, 16), 2: (2, 2, 107, 16), 3: (2, 2, 107, 16)}
    q, keys, values = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed, shape in shapes.items()
    )
    block = Block.make([0], [100], 4, trees(1, 4), DEVICE)
    check_attend(q * 40, keys * 40, values, block, 0.25)


def test_offsets_beyond_two_to_the_31() -> None:
    """Slot 2 starts 2^31 + 192 elements in, at a stride that fits int32. Untouched pages cost a CPU no memory."""
    stride = 2**30 + 96
    try:
        store = torch.empty(2 * stride + 4096, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    keys = store.as_strided((3, 1, 64, 16), (stride, 0, 16, 1))
    values = store[1024:].as_strided((3, 1, 64, 16), (stride, 0, 16, 1))
    generator = torch.Generator().manual_seed(0)
    for x in (keys, values):
        x[2] = torch.randn(1, 64, 16, generator=generator)
    q = torch.randn(1, 2, 3, 16, generator=generator).to(DEVICE, torch.float16)
    check_attend(q, keys, values, Block.make([2], [40], 3, device=DEVICE), 0.25)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    size=st.integers(1, 20),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    head_dim=st.integers(1, 48),
    splits=st.integers(1, 5),
    density=st.floats(0, 1),
    behind=st.integers(0, 20),
    seed=st.integers(0, 2**16),
)
def test_any_shape(
    lengths: list[int],
    size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    splits: int,
    density: float,
    behind: int,
    seed: int,
) -> None:
    mask = torch.rand(len(lengths), size, behind + size, generator=torch.Generator().manual_seed(seed)) < density
    heads = kv_heads * group, kv_heads
    arguments = make(lengths, size, heads=heads, head_dim=head_dim, mask=mask, seed=seed, behind=behind)
    check_prefix(*arguments, splits)
    check_masked(*arguments)
    check_attend(*arguments)


def test_empty_batch() -> None:
    q, keys, values, _, _ = make([4], 2)
    assert triton_backend.attend(q[:0], keys, values, Block.make([], [], 2, device=DEVICE), 1.0).shape[0] == 0


def test_errors_say_what_to_do() -> None:
    q, keys, values, block, _ = make([4], 2, head_dim=257)
    with pytest.raises(CapabilityError, match="257"):
        triton_backend.attend(q, keys, values, block, 1.0)
    q, keys, values, block, _ = make([4], 2)
    with pytest.raises(CapabilityError, match="float64"):
        triton_backend.attend(q.double(), keys.double(), values.double(), block, 1.0)
    with pytest.raises(CapabilityError, match="cast them"):
        triton_backend.attend(q.half(), keys, values, block, 1.0)
    with pytest.raises(ValueError, match="does not fit"):
        triton_backend.attend(q[:, :3], keys, values, block, 1.0)
    for splits in (0, 64):
        with pytest.raises(ValueError, match="num_splits"):
            triton_backend.prefix_attention(q, keys, values, block.slots_t, block.lengths_t, 1.0, 4, num_splits=splits)
    with pytest.raises(ValueError, match="mask"):
        wrong = dataclasses.replace(block, mask=torch.ones(1, 3, 3, dtype=torch.bool))
        tree_part(q, keys, values, wrong, 1.0)


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    q, keys, values, block, _ = make([4], 2)
    block = Block.make(block.slots, block.lengths, 2)
    with pytest.raises(CapabilityError, match="TRITON_INTERPRET=1"):
        triton_backend.attend(q.cpu(), keys.cpu(), values.cpu(), block, 1.0)


@pytest.mark.gpu
def test_captured_graph_follows_lengths_and_slots() -> None:
    """One capture, then other lengths and slots in the same device tensors: no synchronisation, no recapture."""
    q, keys, values, block, _ = make([900, 30], 8, heads=(8, 2), head_dim=64, dtype=torch.bfloat16)
    keys, values = keys.nan_to_num(), values.nan_to_num()
    triton_backend.attend(q, keys, values, block, 0.125)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_backend.attend(q, keys, values, block, 0.125)
    for slots, lengths in (((2, 0), (1, 700)), ((1, 2), (900, 0))):
        other = Block.make(slots, lengths, 8, block.mask, DEVICE)
        block.slots_t.copy_(other.slots_t)
        block.lengths_t.copy_(other.lengths_t)
        graph.replay()
        close(out, reference.attend(q, keys, values, other, 0.125), TOLERANCE[torch.bfloat16])
