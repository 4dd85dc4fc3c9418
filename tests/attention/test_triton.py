"""The Triton kernels against the definition: on a GPU where there is one, in Triton's interpreter elsewhere."""

from __future__ import annotations

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

DEVICE = "cuda" if CUDA else "cpu"
if not CUDA and isinstance(triton.language.max, triton.JITFunction):
    # A skip would hide it. Triton's own library is decorated at its import, so whoever came first decided.
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it in the shell or conftest.py")

# float32: other summation order, and exp2 for exp. 16-bit: the output's own rounding (2^-8 and 2^-11 of values
# up to about 4) and that of the softmax weights before they meet V.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def random_trees(batch: int, size: int, seed: int = 0) -> torch.Tensor:
    """(B, T, T) ancestor masks: row i sees itself and the path to a random root."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(batch, size, size, dtype=torch.bool)
    for b in range(batch):
        for i in range(size):
            parent = int(torch.randint(-1, i, (), generator=generator)) if i else -1
            if parent >= 0:
                mask[b, i] = mask[b, parent]
            mask[b, i, i] = True
    return mask


def make(
    lengths: list[int],
    size: int,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    behind: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Block]:
    """q, keys, values and block. Slots are out of order with one unused; behind each block the cache is NaN."""
    batch, capacity = len(lengths), max(lengths) + behind + size + 3
    slots = torch.randperm(batch + 1, generator=torch.Generator().manual_seed(seed))[:batch].tolist()
    q = randn(batch, heads[0], size, head_dim, dtype=dtype, seed=seed + 1)
    keys = randn(batch + 1, heads[1], capacity, head_dim, dtype=dtype, seed=seed + 2)
    values = randn(batch + 1, heads[1], capacity, head_dim, dtype=dtype, seed=seed + 3)
    for slot, n in zip(slots, lengths, strict=True):
        keys[slot, :, n + behind + size :] = float("nan")
        values[slot, :, n + behind + size :] = float("nan")
    return q, keys, values, Block.make(slots, lengths, size, mask, DEVICE, behind)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def check_attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block) -> None:
    scale = q.shape[-1] ** -0.5
    out = triton_backend.attend(q, keys, values, block, scale)
    assert out.dtype == q.dtype and out.shape == q.shape
    close(out, reference.attend(q, keys, values, block, scale), TOLERANCE[q.dtype])


def check_prefix(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, splits: int | None) -> None:
    scale = q.shape[-1] ** -0.5
    o, lse = triton_backend.prefix_attention(
        q, keys, values, block.slots_t, block.lengths_t, scale, max(block.lengths), splits
    )
    assert o.dtype == lse.dtype == torch.float32
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        ref_o, ref_lse = reference.partial_attention(q[b], keys[slot, :, :n], values[slot, :, :n], scale)
        close(o[b], ref_o, TOLERANCE[q.dtype])
        close(lse[b], ref_lse, TOLERANCE[q.dtype])


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's part alone: o and lse."""
    o, lse = triton_backend._parts(1, q)
    triton_backend._launch_block(q, keys, values, mask, slots, lengths, scale, o[0], lse[0], offset)
    return o[0], lse[0]


def check_masked(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block) -> None:
    scale = q.shape[-1] ** -0.5
    o, lse = masked_attention(q, keys, values, block.mask, block.slots_t, block.lengths_t, scale, block.offset)
    assert o.dtype == lse.dtype == torch.float32
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        own = slice(n, n + block.width)
        mask = block.block_mask(b, q.device)
        ref_o, ref_lse = reference.partial_attention(q[b], keys[slot, :, own], values[slot, :, own], scale, mask)
        close(o[b], ref_o, TOLERANCE[q.dtype])
        close(lse[b], ref_lse, TOLERANCE[q.dtype])


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 5, 33])
def test_query_groups(group: int, size: int) -> None:
    check_attend(*make([19, 130], size, (2 * group, 2), mask=random_trees(2, size)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 200, 256])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    check_attend(*make([70, 9], 7, (3, 1), head_dim, random_trees(2, 7), dtype))


@pytest.mark.parametrize("size", [1, 17, 64, 65, 200])
def test_causal_chain(size: int) -> None:
    check_attend(*make([50, 0, 3], size, (4, 2)))


def test_prefill_chunk_of_several_hundred() -> None:
    check_attend(*make([100], 300, (3, 1), 64))


@pytest.mark.parametrize("size", [3, 70])
def test_ragged_lengths_with_empty_prefixes(size: int) -> None:
    check_attend(*make([0, 257, 1, 0, 64], size, mask=random_trees(5, size)))


def test_no_prefix_at_all() -> None:
    check_attend(*make([0, 0], 9, mask=random_trees(2, 9)))


@pytest.mark.parametrize("splits", [None, 1, 2, 3, 7, 63])
def test_prefix_splits(splits: int | None) -> None:
    check_prefix(*make([700, 0, 65, 1], 3, (6, 2), 32), splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prefix_in_16_bits(dtype: torch.dtype) -> None:
    check_prefix(*make([300, 20], 4, (8, 2), 64, dtype=dtype), 3)


def test_prefix_result_does_not_depend_on_max_length() -> None:
    q, keys, values, block = make([400, 30], 2)
    args = (q, keys, values, block.slots_t, block.lengths_t, 0.25)
    for max_length in (1, 400, 100_000):
        o, lse = triton_backend.prefix_attention(*args, max_length)
        close(o, triton_backend.prefix_attention(*args, 400, 1)[0], 1e-5)
        close(lse, triton_backend.prefix_attention(*args, 400, 1)[1], 1e-5)


def test_empty_prefix_gives_zero_and_minus_infinity() -> None:
    q, keys, values, block = make([0, 40], 2)
    for splits in (1, 4):
        o, lse = triton_backend.prefix_attention(q, keys, values, block.slots_t, block.lengths_t, 0.25, 40, splits)
        assert (o[0] == 0).all() and (lse[0] == float("-inf")).all()
        assert (lse[1] > float("-inf")).all()


@pytest.mark.parametrize("size", [1, 6, 64, 150])
def test_masked_trees(size: int) -> None:
    check_masked(*make([5, 0], size, (4, 2), 32, random_trees(2, size)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masked_in_16_bits(dtype: torch.dtype) -> None:
    check_masked(*make([5, 70], 40, (8, 2), 64, random_trees(2, 40), dtype))


@pytest.mark.parametrize(("size", "behind"), [(1, 1), (1, 70), (6, 3), (64, 64), (70, 150)])
@pytest.mark.parametrize("tree", [False, True])
def test_behind_earlier_levels(size: int, behind: int, tree: bool) -> None:
    mask = random_trees(2, behind + size)[:, behind:] if tree else None
    case = make([5, 0], size, (4, 2), 32, mask, behind=behind)
    check_masked(*case)
    check_attend(*case)


def test_arbitrary_mask_that_is_no_tree() -> None:
    mask = torch.rand(2, 90, 90, generator=torch.Generator().manual_seed(3)) < 0.3
    check_masked(*make([5, 70], 90, mask=mask))


def test_first_key_tile_wholly_masked() -> None:
    """140 rows are three key tiles: rows 70 on see only keys of the second and third."""
    mask = random_trees(1, 140)
    mask[:, 70:, :70] = False
    check_masked(*make([11], 140, mask=mask))


def test_row_that_sees_nothing() -> None:
    mask = random_trees(2, 80)
    mask[0, 3], mask[1, 79] = False, False
    q, keys, values, block = make([0, 6], 80, mask=mask)
    o, lse = masked_attention(q, keys, values, block.mask, block.slots_t, block.lengths_t, 0.25)
    for b, i in ((0, 3), (1, 79)):
        assert (o[b, :, i] == 0).all() and (lse[b, :, i] == float("-inf")).all()
    check_masked(q, keys, values, block)
    check_attend(q, keys, values, block)  # sequence 0 has no prefix either: its row comes out as zeros


def test_strided_tensors() -> None:
    """Keys stored (slots, Hkv, d, capacity), values and q with heads inside rows, the mask a slice."""
    mask = random_trees(2, 6)
    q, keys, values, block = make([21, 90], 6, (6, 2), 40, mask)
    wide = torch.ones(2, 8, 9, dtype=torch.bool, device=DEVICE)
    wide[:, :6, :6] = mask.to(DEVICE)
    block = Block.make(block.slots, block.lengths, 6, wide[:, :6, :6], DEVICE)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    keys = keys.transpose(2, 3).contiguous().transpose(2, 3)
    values = values.transpose(1, 2).contiguous().transpose(1, 2)
    assert keys.stride(2) == 1 and keys.stride(3) > 1
    check_attend(q, keys, values, block)
    assert triton_backend.attend(q, keys, values, block, 1.0).stride() == q.stride()


def test_mask_shared_by_the_batch() -> None:
    check_attend(*make([9, 30, 2], 12, mask=random_trees(1, 12).expand(3, -1, -1)))


def test_large_scores_do_not_overflow() -> None:
    q, keys, values, block = make([100], 4, mask=random_trees(1, 4))
    check_attend(q * 40, keys * 40, values, block)


def test_offsets_beyond_two_to_the_31() -> None:
    """Slot 2 starts 2^31 + 192 elements in, at a stride that fits int32. Untouched pages cost a CPU no memory."""
    stride = 2**30 + 96
    try:
        store = torch.empty(2 * stride + 4096, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    keys = store.as_strided((3, 1, 64, 16), (stride, 0, 16, 1))
    values = store[1024:].as_strided((3, 1, 64, 16), (stride, 0, 16, 1))
    keys[2], values[2] = randn(1, 64, 16, seed=1).half(), randn(1, 64, 16, seed=2).half()
    q = randn(1, 2, 3, 16, dtype=torch.float16)
    check_attend(q, keys, values, Block.make([2], [40], 3, device=DEVICE))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
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
    case = make(lengths, size, (kv_heads * group, kv_heads), head_dim, mask, seed=seed, behind=behind)
    check_prefix(*case, splits)
    check_masked(*case)
    check_attend(*case)


def test_empty_batch() -> None:
    q, keys, values, _ = make([4], 2)
    assert triton_backend.attend(q[:0], keys, values, Block.make([], [], 2, device=DEVICE), 1.0).shape[0] == 0


def test_errors_say_what_to_do() -> None:
    q, keys, values, block = make([4], 2, head_dim=257)
    with pytest.raises(CapabilityError, match="257"):
        triton_backend.attend(q, keys, values, block, 1.0)
    q, keys, values, block = make([4], 2)
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
        masked_attention(q, keys, values, torch.ones(1, 3, 3, dtype=torch.bool), block.slots_t, block.lengths_t, 1.0)


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    q, keys, values, block = make([4], 2)
    block = Block.make(block.slots, block.lengths, 2)
    with pytest.raises(CapabilityError, match="TRITON_INTERPRET=1"):
        triton_backend.attend(q.cpu(), keys.cpu(), values.cpu(), block, 1.0)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_captured_graph_follows_lengths_and_slots() -> None:
    """One capture, then other lengths and slots in the same device tensors: no synchronisation, no recapture."""
    q, keys, values, block = make([900, 30], 8, (8, 2), 64, random_trees(2, 8), torch.bfloat16)
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
