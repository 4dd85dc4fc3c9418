"""The training-time test's attention against full masks, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longdraft.training import drafted_attention, noisy_attention
from longdraft.training.drafted_attention import drafted
from longdraft.training.flash_attention import FLASH, Kernels, serves
from longdraft.training.noisy_attention import noisy, windowed
from tests import torch_kernels
from tests.training.helpers import masked_attention

HQ, HKV, DIM = 6, 2, 8


def plain(q, k, v, later, window):
    """Row by row: the keys that a row sees, laid out one after the other."""
    rows, queries = k.shape[1], q.shape[1]
    shift = 0 if later is None else later[0].shape[2]
    out = []
    for j in range(queries):
        at = rows - queries + j
        low = 0 if window is None else max(0, at - window + 1)
        seen = [x[:, low : at - shift + 1] for x in (k, v)]
        if later is not None:
            seen = [torch.cat([s, x[:, j]], 1) for s, x in zip(seen, later, strict=True)]
        out.append(masked_attention(q[:, j : j + 1], *seen, torch.ones(1, seen[0].shape[1], dtype=torch.bool)))
    return torch.cat(out, 1)


def _seen(q, k, window):
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    return (behind >= 0) & (behind < (window or len(k)))


def _of_heads(q, x):
    """(S, Hkv, d) -> (Hq, S, d)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1)


def dense_forward(q, k, v, window, scale):
    scores = (q.transpose(0, 1) @ _of_heads(q, k).transpose(1, 2) * scale).masked_fill(~_seen(q, k, window), -torch.inf)
    return (scores.softmax(-1) @ _of_heads(q, v)).transpose(0, 1), scores.logsumexp(-1), ()


def dense_backward(gradient, q, k, v, out, lse, state, window, scale):
    """A flash kernel's backward pass as its paper writes it (FlashAttention-2, algorithm 2), without blocks."""
    scores = (q.transpose(0, 1) @ _of_heads(q, k).transpose(1, 2) * scale).masked_fill(~_seen(q, k, window), -torch.inf)
    p, up = (scores - lse[..., None]).exp(), gradient.transpose(0, 1)
    ds = p * (up @ _of_heads(q, v).transpose(1, 2) - (gradient * out).sum(-1).T[..., None]) * scale
    dk, dv = (
        x.view(k.shape[1], -1, *x.shape[1:]).sum(1).transpose(0, 1)
        for x in (ds.transpose(1, 2) @ q.transpose(0, 1), p.transpose(1, 2) @ up)
    )
    return (ds @ _of_heads(q, k)).transpose(0, 1), dk, dv


DENSE = Kernels(dense_forward, dense_backward)


@pytest.mark.parametrize("kernels", [None, DENSE])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("rows", "queries", "shift"), [(9, 9, 0), (11, 4, 0), (9, 6, 3), (6, 1, 5)])
def test_gradients_in_float64(rows, queries, shift, window, kernels):
    """The merge with a flash kernel's part, forward and backward, and the blocks."""
    g = torch.Generator().manual_seed(rows)
    sizes = ((4, queries), (2, rows), (2, rows), *[(2, queries, shift)] * (2 if shift else 0))
    inputs = [torch.randn(*size, 3, generator=g, dtype=torch.float64, requires_grad=True) for size in sizes]

    def attention(q, k, v, *later):
        return drafted(q, k, v, later or None, window, kernels)

    torch.testing.assert_close(attention(*inputs), plain(*inputs[:3], inputs[3:] or None, window), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(attention, inputs)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operation returns, and the names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name)
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.numbers = max([self.numbers, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
        return out


def eagle3_step(q, k, v, later):
    return drafted(q, k, v, (later, later))


def eagle3_step_by_flash(q, k, v, later):
    return drafted(q, k, v, (later, later), None, FLASH)


def longspec_window(q, k, v, later):
    return windowed(q, k, v, 64)


def longspec_window_by_flash(q, k, v, later):
    return drafted(q, k, v, None, 64, FLASH)


def longspec_cross(q, k, v, later):
    return noisy(q, k, v, 3)


def made_by(attention, rows):
    """Of a text of ``rows`` rows in bfloat16, forward and backward: results, the largest tensor, the operations."""
    g = torch.Generator().manual_seed(0)
    sizes = (4, rows - 8), (2, rows), (2, rows), (2, rows - 8, 2)
    inputs = [torch.randn(*size, 8, generator=g).bfloat16().requires_grad_() for size in sizes]
    with Largest() as made:
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs, allow_unused=True)], made


@pytest.mark.parametrize(
    ("attention", "same"),
    [
        (eagle3_step, eagle3_step_by_flash),
        (eagle3_step_by_flash, None),
        (longspec_window, longspec_window_by_flash),
        (longspec_window_by_flash, None),
        (longspec_cross, None),
    ],
)
def test_memory_grows_with_the_text_not_its_square(attention, same, monkeypatch):
    """No tensor is larger than a few vectors for each row, and both ways agree. The flash kernel is a stand-in."""
    monkeypatch.setattr(drafted_attention, "BLOCK", 32)
    monkeypatch.setattr(noisy_attention, "FEW_ROWS", 0)
    with torch_kernels.registered():
        (results, twice), some = made_by(attention, 1024), made_by(attention, 512)[1]
        assert twice.numbers <= 2.1 * some.numbers and twice.numbers <= 32 * 4 * 1024
        flash = {"aten::_flash_attention_forward", "aten::_flash_attention_backward"} & twice.names
        assert len(flash) == (2 if attention.__name__.endswith("flash") else 0)
        for one, other in zip(results, made_by(same, 1024)[0] if same else [], strict=False):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.03)


def test_where_a_flash_kernel_serves():
    def made(device, *dtypes, size=64):
        with FakeTensorMode():
            return [torch.empty(2, 4, size, device=device, dtype=dtype) for dtype in dtypes]

    half = [torch.bfloat16] * 3
    assert serves(*made("cuda", *half))
    on_cpu = torch.empty(2, 4, 64, dtype=torch.bfloat16)
    assert not serves(on_cpu, on_cpu, on_cpu) and not serves(*made("cuda", *half, size=20))
    assert not serves(*made("cuda", *[torch.float32] * 3)) and not serves(*made("cuda", *half[:2], torch.float16))


@pytest.mark.parametrize("block", [5, 256])
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(("rows", "queries", "shift"), [(23, 23, 0), (30, 12, 0), (23, 20, 3), (30, 9, 5), (6, 1, 5)])
def test_forward_and_backward(rows, queries, shift, window, block, monkeypatch):
    monkeypatch.setattr(drafted_attention, "BLOCK", block)
    monkeypatch.setattr(drafted_attention, "WEIGHTS", 1)  # as small as blocks get
    g = torch.Generator().manual_seed(rows + shift)

    def made(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).float().requires_grad_()

    q, k, v = made(HQ, queries, DIM), made(HKV, rows, DIM), made(HKV, rows, DIM)
    later = (made(HKV, queries, shift, DIM), made(HKV, queries, shift, DIM)) if shift else None
    inputs = [q, k, v, *(later or ())]
    direction = torch.randn(HQ, queries, DIM, generator=g)
    found = []
    for attention in (drafted, plain):
        out = attention(q, k, v, later, window)
        found.append([out, *torch.autograd.grad((out * direction).sum(), inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_close():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 40, DIM, generator=g) for n in (HQ, HKV, HKV))
    half = drafted(*(x.bfloat16() for x in (q, k, v)), None, 16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), drafted(q, k, v, None, 16), rtol=0.05, atol=0.05)


def test_what_cannot_be():
    q, k = torch.zeros(HQ, 5, DIM), torch.zeros(HKV, 6, DIM)
    later = torch.zeros(HKV, 5, 2, DIM)
    with pytest.raises(ValueError, match="too few"):
        drafted(q, k, k, (later, later))
    with pytest.raises(ValueError, match="window of 2"):
        drafted(q[:, :4], k, k, (later[:, :4], later[:, :4]), 2)
