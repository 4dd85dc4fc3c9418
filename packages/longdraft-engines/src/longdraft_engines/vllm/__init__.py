"""Our drafters inside vLLM: ``speculative_config={"method": "custom_class", "model": "longdraft_engines.vllm.Lookup",
"num_speculative_tokens": 7}``.

vLLM takes chains from such a proposer, and passes it token ids only. So our plugin
(:mod:`~longdraft_engines.vllm.plugin`) gives it the model runner. Options go in
``additional_config={"longdraft": {...}}``.
"""

from longdraft_engines.vllm.lookup import Lookup
from longdraft_engines.vllm.trained import LongSpec, SpecExtend

__all__ = ["LongSpec", "Lookup", "SpecExtend"]
