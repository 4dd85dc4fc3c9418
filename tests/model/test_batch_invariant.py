"""What a layer's own code calls of torch: a row has the same bits alone and beside others, however it is called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from longdraft.model.layers.batch_invariant import BatchInvariantMode
from tests.native.levels import needs_kernels

G = torch.Generator().manual_seed(0)
W, EXPERTS = torch.randn(33, 65, generator=G), torch.randn(4, 65, 33, generator=G)
CALLS = {
    "linear": lambda x: F.linear(x, W, torch.ones(33)),
    "linear by name": lambda x: F.linear(x, weight=W, bias=None),
    "a matrix behind": lambda x: x @ W.t().contiguous(),
    "a transposed matrix behind": lambda x: torch.mm(x, W.t()),
    "a matrix before": lambda x: (W @ x.t()[None])[0].t(),
    "a matrix with biases": lambda x: torch.addmm(torch.ones(33), x, W.t().contiguous()),
    "experts": lambda x: torch.bmm(x.expand(4, -1, -1), EXPERTS).transpose(0, 1),
    "silu": F.silu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x, beta=2),
    "exp of a part": lambda x: x[:, ::2].exp(),
    "glu": lambda x: F.glu(x[:, :64]),
    "complex numbers": lambda x: torch.view_as_real(torch.complex(x, x) * torch.complex(x, -x)),
}
# Others are torch's own.
PLAIN = {
    "names": lambda x: torch.matmul(input=x, other=W.t()),
    "a place for the result": lambda x: torch.exp(x, out=torch.empty_like(x)),
    "whole numbers": lambda x: torch.sigmoid(x.long()),
    "no rows": lambda x: x[:0] @ W.t(),
    "one vector": lambda x: W @ x[0],
}


@needs_kernels
@pytest.mark.parametrize("name", CALLS | PLAIN)
def test_a_row_alone_and_beside_others(name):
    call, x = (CALLS | PLAIN)[name], torch.randn(70, 65, generator=torch.Generator().manual_seed(1))
    with BatchInvariantMode():
        found, alone = call(x), [call(x[i : i + 1]) for i in (0, 13, 69)]
    torch.testing.assert_close(found, call(x), rtol=1e-4, atol=1e-4)
    assert name in PLAIN or all(torch.equal(row[0], found[i]) for row, i in zip(alone, (0, 13, 69), strict=True))
