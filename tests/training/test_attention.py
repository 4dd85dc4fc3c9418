"""Training's attention, its gradients and its memory, against attention with full masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.training import attention
from longdraft.training.attention import attend

D = 8


def defined(q, k, v, shift, window, own):
    """The keys of a query are written out: those of the text within its mask, then its own."""
    rows, keys = q.shape[1], k.shape[1]
    out, group = [], q.shape[0] // k.shape[0]
    for i in range(rows):
        at = keys - rows + i
        seen = slice(0 if window is None else max(0, at - window + 1), at - shift + 1)
        its_k, its_v = (
            x[:, seen] if own is None else torch.cat([x[:, seen], own[j][:, i]], 1) for j, x in enumerate((k, v))
        )
        its_k, its_v = (x.repeat_interleave(group, 0) for x in (its_k, its_v))
        weights = (q[:, i, None] @ its_k.transpose(1, 2) / D**0.5).softmax(-1)
        out.append(weights @ its_v)
    return torch.cat(out, 1)


@settings(max_examples=40)
@given(
    st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    st.integers(1, 40),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(5, 20)),
    st.booleans(),
    st.data(),
)
def test_values_and_gradients_are_those_of_the_definition(heads, length, shift, window, drafted, data):
    if length <= shift:
        return
    rows = data.draw(st.integers(1, length - shift))
    g = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(heads[0], rows, D, generator=g), torch.randn(2, heads[1], length, D, generator=g)
    own = torch.randn(2, heads[1], rows, shift, D, generator=g) if drafted and shift else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *(() if own is None else own))]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK", 16)
        for function in (attend, defined):
            out = function(*leaves[:3], shift, window, tuple(leaves[3:]) or None)
            found.append([out, *torch.autograd.grad((out * torch.linspace(-1, 1, D)).sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "shift"), [(None, 2), (64, 0), (64, 2)])
def test_memory_grows_with_the_length_of_the_text(window, shift):
    """Memory for the backward pass: twice as much for twice the text, not four times."""
    kept = []
    for length in (1024, 2048):
        q, k, v = (torch.randn(2, length, D, requires_grad=True) for _ in range(3))
        own = tuple(torch.randn(2, length - 2, shift, D) for _ in range(2)) if shift else None
        saved: dict[int, int] = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attend(q[:, 2:], k, v, shift, window, own)
        kept.append(sum(saved.values()))
    assert kept[1] < (2.2 if window else 3) * kept[0]
