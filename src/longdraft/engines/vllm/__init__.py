"""Our drafters inside vLLM: ``speculative_config={"method": "custom_class", "model": "longdraft.engines.vllm.Lookup",
"num_speculative_tokens": 7}``.

That door takes chains. It hands over token ids alone, so vLLM's plugin entry point
(:mod:`~longdraft.engines.vllm.plugin`) shows a proposer the model runner that it works for. Options go in
``additional_config={"longdraft": {...}}``.
"""

from longdraft.engines.vllm.longspec import LongSpec
from longdraft.engines.vllm.lookup import Lookup
from longdraft.engines.vllm.specextend import SpecExtend

__all__ = ["LongSpec", "Lookup", "SpecExtend"]
