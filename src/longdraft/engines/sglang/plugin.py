"""What SGLang runs at the start of each of its processes (entry point ``sglang.srt.plugins``)."""

from __future__ import annotations

from typing import Any

from longdraft.engines.sglang.arguments import settle

NAME = "LONGSPEC"


def register() -> None:
    """Registers LONGSPEC. Running it again changes nothing."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(NAME) is not None:
        return

    class LongSpecAlgorithm(CustomSpecAlgo):
        """To SGLang's scheduler, relays and CUDA graphs it is NGRAM: the same verify input, and no KV of its own."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=settle, spec_class=LongSpecAlgorithm
    )
    def factory(server_args: Any) -> type:
        """The worker's class; only now are SGLang's workers imported."""
        del server_args
        from longdraft.engines.sglang.worker import LongSpecWorker

        return LongSpecWorker
