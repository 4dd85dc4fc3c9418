"""The settings of longdraft's own tests."""

from tests.conftest import *  # noqa: F403
from tests.conftest import _fixed_start  # noqa: F401
