"""The kernels of every instruction set that this machine executes."""

from __future__ import annotations

import pytest

from tests.native.levels import LEVELS, kernels_of


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request):
    return kernels_of(request.param)
