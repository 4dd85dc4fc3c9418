"""flash-attn's two packages, as stand-ins with the entry points that they document."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch
from test_attention import case, flash_attn_func

from longdraft.attention import dispatch, flash, prefix, reference
from longdraft.errors import CapabilityError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def three(q, k, v, softmax_scale=None, causal=False, num_splits=1, pack_gqa=None, return_attn_probs=False):
    """Version 3 of late: the log-sum-exp on request."""
    assert num_splits == 0, "it may split the keys"
    o, lse, _ = flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)
    return (o, lse) if return_attn_probs else o


def early_three(q, k, v, softmax_scale=None, causal=False):
    """An early release of version 3: always the log-sum-exp."""
    return flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)[:2]


def middle_three(q, k, v, softmax_scale=None, causal=False, num_splits=1):
    """A release of version 3 between these: never."""
    return flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal)


@pytest.fixture
def installed(monkeypatch):
    """Installs entry points by package, on a GPU that is a Hopper or not."""

    def install(hopper: bool = True, **functions) -> None:
        for name, function in functions.items():
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
            module.flash_attn_func = function
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(flash, "_hopper", lambda device: hopper)
        flash._chosen.clear()

    return install


@pytest.mark.parametrize("function", [three, early_three])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_version_3_is_like_the_reference(installed, function, tree):
    installed(flash_attn_interface=function)
    q, keys, values, block, scale = case([0, 5, 13], 6, tree=tree)
    got, expected = (path.attend(q, keys, values, block, scale) for path in (flash, reference))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    slot = block.slots[2]
    rows = q[2], keys[slot, :, :13], values[slot, :, :13], scale
    got, expected = prefix.flash(*rows), prefix.reference(*rows)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_version_without_log_sum_exp_says_what_to_do(installed):
    installed(flash_attn_interface=middle_three)
    q, keys, values, block, scale = case([5], 6, tree=True)
    with pytest.raises(CapabilityError, match=r"flash_attn_interface gives no log-sum-exp.*flash-attn 2"):
        flash.attend(q, keys, values, block, scale)
    chain = case([5], 6, tree=False)
    torch.testing.assert_close(flash.attend(*chain), reference.attend(*chain), atol=1e-5, rtol=1e-5)


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
    assert dispatch.choose(CUDA, torch.bfloat16, 128) == ("flash" if expected else "sdpa")


def test_no_package_says_so():
    flash._chosen.clear()
    with pytest.raises(CapabilityError, match="LONGDRAFT_ATTENTION=sdpa"):
        flash.attend(*case([5], 2))
