"""Our drafters inside vLLM: ``speculative_config={"method": "custom_class", "model": "longdraft_engines.vllm.Lookup",
"num_speculative_tokens": 7}``.

vLLM takes chains (no trees) from a proposer of this method, and passes token ids to it. longdraft's plugin
(:mod:`~longdraft_engines.vllm.plugin`) also gives it vLLM's model runner. The drafters' options go in
``additional_config={"longdraft": {...}}``.
"""

from longdraft_engines.vllm.lookup import Lookup
from longdraft_engines.vllm.trained import LongSpec, SpecExtend

__all__ = ["LongSpec", "Lookup", "SpecExtend"]
