"""flash-attn beyond the contract: which package is used, and long chains."""

from __future__ import annotations

import functools

import pytest
import torch

from longdraft.attention import dispatch, flash, hybrid
from longdraft.errors import CapabilityError
from tests.attention.cases import HEADS, assert_like_reference, case
from tests.attention.paths import forget_package, install, three, two

CUDA = torch.device("cuda", 0)


def old(q, k_cache, v_cache, cache_seqlens=None, cache_batch_idx=None, softmax_scale=None, causal=False):
    """A release that does not return the log-sum-exp."""


@pytest.fixture
def installed(monkeypatch):
    yield functools.partial(install, monkeypatch)
    forget_package()


@pytest.mark.parametrize("package", [{"flash_attn": two}, {"flash_attn_interface": three}], ids=["2", "3"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_long_chain_is_one_causal_call(installed, package, heads):
    installed(**package)
    chain = case([11, 0, 130, 1], hybrid.CAUSAL_ROWS, heads=heads, tree=False, dtype=torch.bfloat16)
    assert_like_reference(flash.attend, *chain)


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
    forget_package()
    with pytest.raises(CapabilityError, match="LONGDRAFT_ATTENTION=hybrid"):
        flash.attend(*case([5], 2))
