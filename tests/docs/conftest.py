"""The running server of tests/serve."""

from __future__ import annotations

from tests.serve.conftest import running

__all__ = ["running"]
