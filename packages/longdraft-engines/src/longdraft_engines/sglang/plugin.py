"""SGLang runs this at the start of each of its processes (entry point ``sglang.srt.plugins``)."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from longdraft.drafts import draft_folder
from longdraft.errors import CheckpointError
from longdraft_engines.sglang.arguments import settle

NAME = "LONGSPEC"
CONFIG = "sglang.srt.utils.hf_transformers.config.get_config"
ROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"


def register() -> None:
    """Registers LONGSPEC. Calling it again changes nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(NAME) is not None:
        return

    HookRegistry.register(CONFIG, config, HookType.AROUND)
    HookRegistry.register(ROOM, room, HookType.AROUND)

    class LongSpecAlgorithm(CustomSpecAlgo):
        """SGLang's scheduler, relays and CUDA graphs treat it as NGRAM: the same verify input, and no KV of its own."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

    # The scheduler calls methods that SGLang's class for plugins lacks; those of the built-in algorithms work here.
    for name, method in vars(SpeculativeAlgorithm).items():
        if isfunction(method) and not hasattr(LongSpecAlgorithm, name):
            setattr(LongSpecAlgorithm, name, method)

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=settle, spec_class=LongSpecAlgorithm
    )
    def factory(server_args: Any) -> type:
        """The worker's class; SGLang's workers are imported only now."""
        del server_args
        from longdraft_engines.sglang.worker import LongSpecWorker

        return LongSpecWorker


def config(read: Callable[..., Any], model: Any, *others: Any, **settings: Any) -> Any:
    """Wraps SGLang's ``get_config``, which reads each draft's folder as a model of transformers and fails at ours."""
    try:
        ours = "longdraft_format" in draft_folder.read_config(Path(model))
    except CheckpointError:  # SGLang reports it
        ours = False
    return PretrainedConfig() if ours else read(model, *others, **settings)


def room(read: Callable[[], int]) -> int:
    """Wraps the number of columns beyond the context in SGLang's table of places. Each step reserves places for two
    trees, but the table has columns for one: near the context's end the others go into the next request's row."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    columns = read()
    return max(columns, get_alloc_reserve_per_decode()) if get_spec().speculative_algorithm == NAME else columns
