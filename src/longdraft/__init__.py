"""longdraft: speculative decoding for long contexts, on unchanged Hugging Face models.

A name is imported at its first use, so ``import longdraft`` alone loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longdraft import errors
from longdraft.errors import LongdraftError
from longdraft.model.load.gc_pause import gc_paused

if TYPE_CHECKING:
    from longdraft.engine.request import Request
    from longdraft.engine.sampler import Sampling
    from longdraft.engine.session import Generation, Session
    from longdraft.engine.stats import Result, Step
    from longdraft.memory.prompt_cache import PromptCache
    from longdraft.model.load.checkpoints import LoadedModel
    from longdraft.model.load.loading import load
    from longdraft.registry import compose, methods, register
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

_NAMES_BY_MODULE = {
    "engine.request": "Request", "engine.sampler": "Sampling", "engine.session": "Generation Session",
    "engine.stats": "Result Step", "memory.prompt_cache": "PromptCache", "model.load.checkpoints": "LoadedModel",
    "model.load.loading": "load", "registry": "compose methods register", "speculator": "Speculator",
}  # fmt: skip
_MODULES_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with gc_paused():  # imports are faster without garbage collection
        module = import_module(f"longdraft.{_MODULES_BY_NAME[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES_BY_NAME]
