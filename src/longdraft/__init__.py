"""longdraft: speculative decoding for long contexts, on Hugging Face models as they are."""

from longdraft.collector import paused

with paused():
    from longdraft import errors
    from longdraft.composing import compose, register
    from longdraft.engine import Result, Step
    from longdraft.errors import LongdraftError
    from longdraft.host.checkpoints import LoadedModel
    from longdraft.host.loading import load
    from longdraft.kv.prompt_cache import PromptCache
    from longdraft.methods import methods
    from longdraft.request import Request
    from longdraft.session import Generation, Session
    from longdraft.speculator import Speculator
    from longdraft.verify.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "Generation",
    "LoadedModel",
    "LongdraftError",
    "PromptCache",
    "Request",
    "Result",
    "Sampling",
    "Session",
    "Speculator",
    "Step",
    "compose",
    "errors",
    "load",
    "methods",
    "register",
]
