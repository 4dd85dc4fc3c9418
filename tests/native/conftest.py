"""The kernels of every instruction set that this machine executes."""

from __future__ import annotations

import pytest

from longdraft import native
from tests.native.levels import LEVELS, kernels_of


@pytest.fixture(
    scope="module", params=LEVELS or [pytest.param(None, marks=pytest.mark.skip(reason=native.unavailable_reason()))]
)
def kernels(request):
    return kernels_of(request.param)
