"""The plugin, which vLLM runs at the start of each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import functools
from typing import Any

from longdraft_engines.vllm.proposer import Proposer
from longdraft_engines.vllm.sampling import patch_sampling


def register() -> None:
    """Makes vLLM's model runners set ``Proposer.runner``. A second call has no effect."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # also the base class of the CPU's

    original = GPUModelRunner.__init__
    if hasattr(original, "longdraft"):
        return

    @functools.wraps(original)
    def init(runner: Any, *args: Any, **kwargs: Any) -> None:
        original(runner, *args, **kwargs)
        proposer = getattr(runner, "drafter", None)
        if isinstance(proposer, Proposer):
            proposer.runner = runner
            patch_sampling()

    init.longdraft = True  # type: ignore[attr-defined]  # marks the patch
    GPUModelRunner.__init__ = init
