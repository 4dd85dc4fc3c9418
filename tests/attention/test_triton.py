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
from tests.attention.cases import TOLERANCE, assert_like_reference, case, random_tree, scored  # noqa: E402

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


def check_prefix(q, keys, values, block, scale) -> None:
    found = triton_backend.attend_prefix(q, keys, values, block, scale)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):  # 0 where there is none
        expected, _ = reference.partial_attention(q[b], keys[slot, :, :n], values[slot, :, :n], scale)
        close(found[b], expected, TOLERANCE_OF[q.dtype])


def odd_masks() -> dict[str, tuple[list[int], torch.Tensor]]:
    """Prefixes, and masks (B, T, T): one that is no tree; one whose rows 70 on see nothing of the first of three key
    tiles; rows that see nothing; one for the whole batch."""
    third, blind = trees(1, 140), trees(2, 80)
    third[:, 70:, :70] = False
    blind[0, 3], blind[1, 79] = False, False
    random = torch.rand(2, 90, 90, generator=torch.Generator().manual_seed(3)) < 0.3
    shared = trees(1, 12).expand(3, -1, -1)
    return {
        "no tree": ([5, 7], random),
        "third tile": ([1], third),
        "blind": ([0, 6], blind),
        "one": ([9, 3, 2], shared),
    }


@pytest.mark.parametrize("name", odd_masks())
def test_masks_that_are_no_usual_ones(name: str) -> None:
    lengths, mask = odd_masks()[name]
    check_attend(*make(lengths, mask.shape[1], heads=(2, 1), mask=mask))


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


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=2),
    size=st.sampled_from([1, 5, 20, 66]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([1, 5, 16, 33, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tree=st.booleans(),
    transposed=st.booleans(),
    behind=st.sampled_from([0, 1, 20]),
    window=st.sampled_from([None, 1, 20]),
    scoring=st.sampled_from([(None, False), (2.0, False), (30.0, True)]),
    splits=st.sampled_from([None, 1, 3, 63 if CUDA else 4]),
)
def test_any_shape(
    lengths, size, kv_heads, group, head_dim, dtype, tree, transposed, behind, window, scoring, splits
) -> None:
    """The contract of every path, the prefix cut into splits too; the larger shapes where there is a GPU."""
    heads = kv_heads * group, kv_heads
    arguments = make(
        [n * (30 if CUDA else 1) for n in lengths], size, heads=heads, head_dim=head_dim, dtype=dtype, tree=tree,
        transposed=transposed, behind=behind, window=window,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if splits is not None:  # the result depends neither on them nor on the lengths that the host knows
            patch.setattr(triton_backend, "_choose_splits", lambda *_: splits)
        assert_like_reference(
            triton_backend.attend, *arguments, scored(*scoring, heads[0], DEVICE), tolerance=TOLERANCE_OF[dtype]
        )
        check_prefix(*arguments)


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
    wrong = dataclasses.replace(block, mask=torch.ones(1, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask"):
        triton_backend.attend(q, keys, values, wrong, 1.0)


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
