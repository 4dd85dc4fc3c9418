"""Keys and values in eight bits on a GPU's path: attention to the rows that they are unpacked to."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from longdraft.attention import dispatch, prefix
from longdraft.attention.scaled import or_scaled
from longdraft.native.scaled import Scaled
from tests.attention.cases import case
from tests.support import torch_kernels


@pytest.mark.parametrize("path", ["hybrid", "sdpa"])
@pytest.mark.parametrize("lengths", [[20, 3], [70]])
def test_rows_are_unpacked_as_far_as_a_text_goes_and_others_take_the_path_as_they_are(path, lengths):
    with torch_kernels.registered() if path == "hybrid" else nullcontext():
        q, keys, values, block, scale = case(lengths, 4)
        small, behind = (Scaled.of(keys), Scaled.of(values)), max(lengths) + 4
        for x in small:  # rows behind the texts may hold anything
            x.scales[:, :, behind:] = torch.nan
        for attend in (dispatch.PATHS[path], prefix.PATHS[path]):
            either, unpacked = or_scaled(attend), (x.to(q.dtype)[:, :, :behind] for x in small)
            found = either(q, *small, block, scale)
            assert torch.equal(found, attend(q, *unpacked, block, scale))
            own = either(q, keys, values, block, scale)
            assert torch.equal(own, attend(q, keys, values, block, scale)) and not torch.equal(own, found)
