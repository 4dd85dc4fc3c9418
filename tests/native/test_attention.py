"""One contract of attention, for rows of every dtype and all instruction sets: its definition, and a row's bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longdraft import native
from longdraft.attention import cpu, prefix, reference
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.native.quantized_kv import INT4
from tests.native.cases import PREFIXES, attention, generator, keys_and_values, random_tree, rows_of, transposed
from tests.native.levels import LEVELS, TILES, kernels_of, needs_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.int8, INT4]
WINDOWS = st.one_of(
    st.none(), st.integers(1, 40), st.sampled_from([127, 128, 129, 511, 512, 513]), st.integers(200, 2000)
)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    before=PREFIXES,
    size=st.one_of(st.integers(1, 24), st.integers(100, 150)),
    deep=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    window=WINDOWS,
    group=st.integers(1, 3),
    d=st.sampled_from([16, 32, 48, 64, 80, 128]),
    by_row=st.booleans(),
    sharp=st.sampled_from([0.3, 3.0, 30.0]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    sinks=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@example(torch.float32, 500, 150, 1.0, None, 2, 32, False, 3.0, None, False, 2, 0)
@example(torch.float32, 600, 150, 1.0, 100, 2, 32, False, 3.0, None, False, 2, 0)  # the window slides into the tree
@example(torch.bfloat16, 1100, 5, 0.5, 20, 1, 32, True, 3.0, 30.0, True, 1, 1)
@example(torch.int8, 512, 9, 0.5, None, 1, 64, False, 3.0, None, False, 3, 0)
@example(INT4, 600, 20, 0.5, 300, 3, 128, False, 3.0, None, False, 2, 0)
def test_a_tree_and_a_chunk_of_a_prompt(
    kernels, dtype, before, size, deep, window, group, d, by_row, sharp, softcap, sinks, threads, seed
):
    """Matches the definition; a token has the bits that it has alone, where its window may begin later."""
    tiles = dtype == torch.bfloat16 and kernels.level.endswith("amx")  # whose products are of numbers in bfloat16
    _, tree = random_tree(size, seed, deep)
    k, v = keys_and_values(dtype, 2, before + size, d, by_row=by_row and dtype == torch.float32, seed=seed)
    q = sharp * torch.randn(2 * group, size, d, generator=generator(seed + 1))
    q = q.bfloat16().float() if tiles else q
    more = {"softcap": softcap, "sinks": 2 * torch.randn(2 * group, generator=generator(seed)) if sinks else None}
    for mask, prefill in ((tree, False), (torch.ones(size, size, dtype=torch.bool).tril(), True)):
        window_start = None if window is None else (before + mask.sum(1) - window).clamp(min=0).int()
        torch.set_num_threads(threads)
        if prefill:
            found = kernels.attend(q, k, v, None, 0.25, prefill=True, window_start=window_start, **more)
        else:
            found = kernels.attend(q.view(2, -1, d), k, v, mask, 0.25, window_start=window_start, **more).view_as(q)
        torch.set_num_threads(1)
        seen = torch.cat([torch.ones(size, before, dtype=torch.bool), mask], 1)
        if window_start is not None:
            seen &= seen.cumsum(1) > window_start[:, None]
        wanted = attention(q, k, v, seen, 0.25, **more)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=0.02 if tiles else 2e-5 * max(1, sharp))
        for node in {0, 1 % size, size // 2, size - 1}:
            rows = torch.cat([torch.arange(before), before + mask[node].nonzero()[:, 0]])
            own = q[:, node].reshape(2, group, d), rows_of(k, rows, keys=True), rows_of(v, rows)
            first = None if window_start is None else window_start[node : node + 1]
            alone = kernels.attend(*own, None, 0.25, window_start=first, **more)
            assert torch.equal(found[:, node], alone.view(-1, d))


# --- numbers and keys at the edges ---


def test_scores_far_apart_and_a_nan(kernels):
    """A running maximum that rises late, and weights that vanish; a NaN is not lost."""
    k, v = (x.clone() for x in keys_and_values(torch.float32, 1, 700, 16))
    k, seen = k.transpose(1, 2).contiguous().transpose(1, 2), torch.ones(4, 700, dtype=torch.bool)
    k[0, 650] *= 50
    q = 20 * torch.randn(1, 4, 16)
    torch.testing.assert_close(kernels.attend(q, k, v, None, 1.0), attention(q, k, v, seen, 1.0), rtol=1e-4, atol=1e-4)
    k[0, 200, 3] = math.nan
    for softcap in (None, 1.0):
        assert kernels.attend(q, k, v, None, 1.0, softcap=softcap).isnan().all()


@pytest.mark.parametrize("sink", [-math.inf, -200.0, 0.0, 90.0, 1e4])
def test_sinks_of_any_size(kernels, sink):
    k, v = keys_and_values(torch.float32, 1, 300, 16)
    q, sinks = torch.randn(2, 1, 16), torch.tensor([sink, 0.0])
    found = kernels.attend(q.view(1, 2, 16), k, v, None, 0.2, sinks=sinks).view(q.shape)
    seen = torch.ones(1, 300, dtype=torch.bool)
    torch.testing.assert_close(found, attention(q, k, v, seen, 0.2, sinks=sinks), **CLOSE)


@pytest.mark.parametrize("cap", [0.01, 1.0, 50.0])
def test_capped_scores_of_any_size(kernels, cap):
    """Scores far below the cap, and far above it."""
    k = torch.zeros(1, 80, 16)
    k[0, :, 0] = torch.logspace(-6, 6, 40).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(40)
    v, q, seen = torch.randn(1, 80, 16), torch.ones(1, 1, 16), torch.ones(1, 80, dtype=torch.bool)
    found = kernels.attend(q, k, v, None, cap, softcap=cap)
    torch.testing.assert_close(found, attention(q, k, v, seen, cap, softcap=cap), **CLOSE)


def test_keys_before_all_windows_are_not_read_and_segments_of_them_may_be_missing(kernels):
    """A sliding buffer: bits stay the same without leading segments of 512 keys that no token sees."""
    k, v = keys_and_values(torch.float32, 2, 2000, 16)
    q, tree = 3 * torch.randn(2, 3, 16), torch.ones(3, 3, dtype=torch.bool).tril()
    for begin in (1, 130, 515, 1600, 1990, 1998):
        window_start = torch.tensor([begin, begin + 1, begin], dtype=torch.int32).clamp(max=1997)
        found = kernels.attend(q, k, v, tree, 0.2, window_start=window_start)
        assert found.isfinite().all() and torch.equal(
            kernels.attend(q, k, v, None, 0.2, prefill=True, window_start=window_start), found
        )
        missing = begin // 512 * 512
        rest = kernels.attend(q, k[:, missing:], v[:, missing:], tree, 0.2, window_start=window_start - missing)
        assert torch.equal(rest, found)
        k[:, : min(begin, 1997)], v[:, : min(begin, 1997)] = math.nan, math.nan
        assert torch.equal(kernels.attend(q, k, v, tree, 0.2, window_start=window_start), found)
        assert torch.equal(kernels.attend(q, k, v, None, 0.2, prefill=True, window_start=window_start), found)


@pytest.mark.parametrize("d", [16, 80, 128])
def test_keys_and_values_in_int4_have_the_bits_of_floats(kernels, d):
    k, v = keys_and_values(INT4, 2, 300, d)
    floats = transposed(k.to(torch.float32)), v.to(torch.float32)
    for size in (1, 5):
        q = torch.randn(2, 3 * size, d, generator=generator(size))
        assert torch.equal(kernels.attend(q, k, v, None, 0.2), kernels.attend(q, *floats, None, 0.2))


# --- who takes what ---


@needs_kernels
@pytest.mark.parametrize(
    ("change", "dtype", "taken"),
    [
        (lambda q, k, v: (q, k, v), torch.float32, True),
        (lambda q, k, v: (q, k, v), torch.bfloat16, True),
        (lambda q, k, v: (q, k.contiguous(), v), torch.float32, True),
        (lambda q, k, v: (q, k.contiguous(), v), torch.bfloat16, False),
        (lambda q, k, v: (q, k, v.float()), torch.bfloat16, False),
        (lambda q, k, v: (q.double(), k, v), torch.float32, False),
        (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), torch.float32, False),
        (lambda q, k, v: (q, k[..., ::2].repeat(1, 1, 2)[..., ::2], v), torch.float32, False),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), torch.float32, False),
    ],
)
def test_supported_tensors(change, dtype, taken):
    assert native.supports_attention(*change(torch.randn(2, 3, 16), *keys_and_values(dtype, 2, 20, 16))) == taken


@pytest.mark.parametrize("native_kernels", ["1", "0"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_cpu_path_reads_quantized_kv_with_and_without_kernels(dtype, native_kernels, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", native_kernels)
    k, v = keys_and_values(dtype, 2, 2, 300, 32)
    floats, most = [x.to(torch.float32) for x in (k, v)], 1e-4
    if TILES and dtype == torch.bfloat16 and native_kernels == "1":
        most = 0.02
    for size in (1, 5, 100):
        q, block = torch.randn(2, 4, size, 32), ForwardBatch.make([1, 0], [200, 150], size, None)
        pair = cpu.attend, reference.attend
        for found, wanted in (pair, map(prefix.make_prefix_attention, pair)):
            torch.testing.assert_close(found(q, k, v, block, 0.2), wanted(q, *floats, block, 0.2), rtol=1e-4, atol=most)


@needs_kernels
def test_a_profiler_sees_the_kernels_by_name():
    own, w, x = kernels_of(LEVELS[0]), torch.randn(24, 32), torch.randn(2, 32)
    expected = own.linear(x, [(w, None)])[0]
    with torch.profiler.profile() as profile:
        found = own.linear(x, [(w, None)])[0]
    assert torch.equal(found, expected)
    assert "longdraft::linear" in {event.key for event in profile.key_averages()}
