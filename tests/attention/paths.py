"""The attention paths as tests run them: on this machine, with stand-ins for GPU kernels if there is no GPU."""

from __future__ import annotations

import importlib
import importlib.machinery
import math
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from longdraft.attention import dispatch, flash
from longdraft.attention.reference import partial_attention
from tests.attention.cases import TOLERANCE

ALL = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Path:
    """A path and what it supports.

    Attributes:
        name: as in :data:`dispatch.PATHS`.
        few_rows, long_prefix: thresholds of the CPU path, which force its regimes.
        native: the CPU path uses our kernels.
        flash_attn: the package that stands in for flash-attn.
        head_unit: head sizes are multiples of it.
        columns: keys may be stored column-wise.
        float32: tolerance of float32 outputs.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    few_rows: int = 10**6
    long_prefix: int = 10**6
    native: bool = False
    flash_attn: str = ""
    head_unit: int = 1
    columns: bool = True
    float32: float = 2e-6

    @property
    def device(self) -> str:
        return "cuda" if self.name == "triton" and torch.cuda.is_available() else "cpu"

    @property
    def attend(self):
        return importlib.import_module(dispatch.PATHS[self.name]).attend

    @property
    def layouts(self) -> tuple[bool, ...]:
        """Whether keys may be stored by row (False) and by column (True)."""
        return (False, True) if self.columns else (False,)

    def tolerance(self, dtype: torch.dtype) -> float:
        return self.float32 if dtype == torch.float32 else TOLERANCE[dtype]


PATHS = {
    "cpu kernels": Path("cpu", native=True),
    "cpu kernels, many rows": Path("cpu", native=True, few_rows=0),
    "cpu few rows": Path("cpu"),
    "cpu few rows, long prefix": Path("cpu", long_prefix=0),
    "cpu many rows": Path("cpu", few_rows=0),
    "sdpa": Path("sdpa"),
    "hybrid": Path("hybrid", ALL, head_unit=8, columns=False),
    "flash 2": Path("flash", (torch.bfloat16,), flash_attn="flash_attn", head_unit=8, columns=False),
    "flash 3": Path("flash", (torch.bfloat16,), flash_attn="flash_attn_interface", head_unit=8, columns=False),
    # Interpreted, float16 is converted as bfloat16 is.
    "triton": Path("triton", ALL if torch.cuda.is_available() else (torch.float32, torch.bfloat16), float32=1e-5),
}


def two(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, cache_batch_idx=None, softmax_scale=None, causal=False,
    num_splits=0, return_softmax_lse=False, **unknown,
):  # fmt: skip
    """flash-attn 2: (B, T, H, d) on caches (slots, n, Hkv, d), causal masks aligned to the lower right.

    The log-sum-exp is float32, and infinite without keys.
    """
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
            output, lse[b] = partial_attention(*rows, softmax_scale, mask)
            o[b] = output.transpose(0, 1)
    return o, lse


def three(
    q, k_cache, v_cache, k=None, v=None, qv=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
    page_table=None, softmax_scale=None, causal=False, num_splits=0, pack_gqa=None, return_softmax_lse=False,
):  # fmt: skip
    """flash-attn 3: other options, and one more result."""
    return *two(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        softmax_scale=softmax_scale, causal=causal, return_softmax_lse=return_softmax_lse,
    ), None  # fmt: skip


def forget_package() -> None:
    """flash-attn's package is looked for anew."""
    flash._chosen.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, hopper: bool = True, **functions) -> None:
    """Installs stand-ins for flash-attn, package=function, on a GPU that is a Hopper or not."""
    for name, function in functions.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        module.flash_attn_with_kvcache = function
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash, "_hopper", lambda device: hopper)
    forget_package()
