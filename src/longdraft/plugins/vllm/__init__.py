"""Our drafters inside vLLM: ``speculative_config={"method": "custom_class", "model": "longdraft.plugins.vllm.Lookup",
"num_speculative_tokens": 7}``.

vLLM takes chains from such a proposer, and passes it nothing but token ids. So our plugin entry point
(:mod:`~longdraft.plugins.vllm.plugin`) gives it the model runner that it works for. Options go in
``additional_config={"longdraft": {...}}``.
"""

from longdraft.plugins.vllm.lookup import Lookup
from longdraft.plugins.vllm.trained import LongSpec, SpecExtend

__all__ = ["LongSpec", "Lookup", "SpecExtend"]
