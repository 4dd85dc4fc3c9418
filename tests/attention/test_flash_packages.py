"""flash-attn's two packages, as stand-ins with the entry point that they document."""

from __future__ import annotations

import importlib.machinery
import math
import sys
import types

import pytest
import torch
from test_attention import GQA, assert_like_reference, case

from longdraft.attention import dispatch, flash, hybrid
from longdraft.attention.reference import partial_attention
from longdraft.errors import CapabilityError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def two(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, cache_batch_idx=None, softmax_scale=None, causal=False,
    num_splits=0, return_softmax_lse=False, **unknown,
):  # fmt: skip
    """(B, T, H, d) on caches (slots, n, Hkv, d): grouped heads, causal aligned to the lower right, float32 LSE, which
    is infinite where there are no keys."""
    assert not unknown and k is None and v is None and num_splits == 0 and return_softmax_lse
    assert q.shape[2] % k_cache.shape[2] == 0 and k_cache.shape == v_cache.shape and k_cache.stride(-1) == 1
    o, lse = torch.zeros_like(q), torch.full((q.shape[0], q.shape[2], q.shape[1]), math.inf)
    for x in (cache_seqlens, cache_batch_idx):
        assert x.dtype == torch.int32 and x.shape == q.shape[:1]
    for b, (n, slot) in enumerate(zip(cache_seqlens.tolist(), cache_batch_idx.tolist(), strict=True)):
        assert n <= k_cache.shape[1]
        mask = torch.ones(q.shape[1], n, dtype=torch.bool).tril(n - q.shape[1]) if causal else None
        rows = (x.transpose(0, 1) for x in (q[b], k_cache[slot, :n], v_cache[slot, :n]))
        if n:
            found, lse[b] = partial_attention(*rows, softmax_scale, mask)
            o[b] = found.transpose(0, 1)
    return o, lse


def three(
    q, k_cache, v_cache, k=None, v=None, qv=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
    page_table=None, softmax_scale=None, causal=False, num_splits=0, pack_gqa=None, return_softmax_lse=False,
):  # fmt: skip
    """Version 3: other options, and something more behind the log-sum-exp."""
    return *two(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        softmax_scale=softmax_scale, causal=causal, return_softmax_lse=return_softmax_lse,
    ), None  # fmt: skip


def old(q, k_cache, v_cache, cache_seqlens=None, cache_batch_idx=None, softmax_scale=None, causal=False):
    """A release that does not return the log-sum-exp."""


@pytest.fixture
def installed(monkeypatch):
    """Installs entry points by package, on a GPU that is a Hopper or not."""

    def install(hopper: bool = True, **functions) -> None:
        for name, function in functions.items():
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
            module.flash_attn_with_kvcache = function
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(flash, "_hopper", lambda device: hopper)
        flash._chosen.cache_clear()

    yield install
    flash._chosen.cache_clear()


@pytest.mark.parametrize("package", [{"flash_attn": two}, {"flash_attn_interface": three}], ids=["2", "3"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("heads", GQA, ids=str)
def test_it_is_like_the_reference(installed, monkeypatch, package, tree, heads):
    installed(**package)
    for size, behind in ((1, 0), (6, 0), (5, 30), (1, 9)):
        arguments = case([11, 0, 130, 1], size, heads=heads, tree=tree, dtype=torch.bfloat16, behind=behind)
        assert_like_reference(flash.attend, *arguments)
    monkeypatch.setattr(hybrid, "CAUSAL_ROWS", 6)
    assert_like_reference(flash.attend, *case([11, 0, 130, 1], 6, heads=heads, tree=tree, dtype=torch.bfloat16))


def test_a_version_without_log_sum_exp_says_what_to_do(installed):
    installed(flash_attn=old)
    assert "install a newer one" in (dispatch.unavailable("flash", CUDA, torch.bfloat16, 128) or "")


@pytest.mark.parametrize(
    ("hopper", "names", "expected"),
    [
        (True, ["flash_attn", "flash_attn_interface"], "flash_attn_interface"),
        (False, ["flash_attn", "flash_attn_interface"], "flash_attn"),
        (True, ["flash_attn"], "flash_attn"),
        (True, ["flash_attn_interface"], "flash_attn_interface"),
        (False, ["flash_attn_interface"], None),
    ],
)
def test_version_3_is_for_hopper_gpus(installed, hopper, names, expected):
    installed(hopper, **dict.fromkeys(names, three))
    assert flash.package(CUDA) == expected
    reason = dispatch.unavailable("flash", CUDA, torch.bfloat16, 128)
    assert (reason is None) == (expected is not None)


def test_no_package_says_so():
    flash._chosen.cache_clear()
    with pytest.raises(CapabilityError, match="LONGDRAFT_ATTENTION=hybrid"):
        flash.attend(*case([5], 2))
