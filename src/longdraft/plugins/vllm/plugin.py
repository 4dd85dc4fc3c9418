"""What vLLM runs at the start of each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import functools
from typing import Any

from longdraft.plugins.vllm.mended import mend_sampling
from longdraft.plugins.vllm.proposer import Proposer


def register() -> None:
    """Shows each proposer of ours the model runner that has made it. Running it again changes nothing."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's is made of it

    made = GPUModelRunner.__init__
    if hasattr(made, "longdraft"):
        return

    @functools.wraps(made)
    def making(runner: Any, *arguments: Any, **settings: Any) -> None:
        made(runner, *arguments, **settings)
        proposer = getattr(runner, "drafter", None)
        if isinstance(proposer, Proposer):
            proposer.runner = runner
            mend_sampling()

    making.longdraft = True  # type: ignore[attr-defined]
    GPUModelRunner.__init__ = making
