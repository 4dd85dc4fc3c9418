"""Our drafters inside vLLM: ``speculative_config={"method": "custom_class", "model": "longdraft.plugins.vllm.Lookup",
"num_speculative_tokens": 7}``.

That door takes chains. It hands over token ids alone, so vLLM's plugin entry point
(:mod:`~longdraft.plugins.vllm.plugin`) shows a proposer the model runner that it works for. Options go in
``additional_config={"longdraft": {...}}``.
"""

from longdraft.plugins.vllm.longspec import LongSpec
from longdraft.plugins.vllm.lookup import Lookup
from longdraft.plugins.vllm.specextend import SpecExtend

__all__ = ["LongSpec", "Lookup", "SpecExtend"]
