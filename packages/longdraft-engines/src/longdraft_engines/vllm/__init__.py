"""Our drafters inside vLLM: ``speculative_config={"method": "custom_class", "model": "longdraft_engines.vllm.Lookup",
"num_speculative_tokens": 7}``.

vLLM takes chains (no trees) from a proposer of this method, and passes token ids to the proposer. longdraft's plugin
(:mod:`~longdraft_engines.vllm.plugin`) also gives vLLM's model runner to the proposer. The drafters' options go in
``additional_config={"longdraft": {...}}``.
"""

from longdraft_engines.vllm.lookup import Lookup
from longdraft_engines.vllm.trained import LongSpec, SpecExtend

__all__ = ["LongSpec", "Lookup", "SpecExtend"]
