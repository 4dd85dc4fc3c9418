"""longdraft: speculative decoding for long contexts, on Hugging Face models as they are."""

from longdraft.model.collector import paused

with paused():
    from longdraft import errors
    from longdraft.engine.request import Request
    from longdraft.engine.sampler import Sampling
    from longdraft.engine.session import Generation, Session
    from longdraft.engine.stats import Result, Step
    from longdraft.errors import LongdraftError
    from longdraft.memory.prompt_cache import PromptCache
    from longdraft.methods import compose, load_entry_points, methods, register
    from longdraft.model.checkpoints import LoadedModel
    from longdraft.model.loading import load
    from longdraft.speculator import Speculator

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

load_entry_points()  # last: what they import is this package
