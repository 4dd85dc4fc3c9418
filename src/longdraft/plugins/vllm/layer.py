"""One attention layer of vLLM's target."""

from __future__ import annotations

from typing import Any

from longdraft.errors import CapabilityError


class Layer:
    """A layer as vLLM keeps it: its cache, what computes it, and where a step's tokens lie.

    Args:
        config: vLLM's ``VllmConfig``. index: of the decoder layer.

    Attributes:
        name: vLLM's. attention: its module.

    Raises:
        CapabilityError: the model has no such layer.
    """

    def __init__(self, config: Any, index: int) -> None:
        self.config = config
        context = config.compilation_config.static_forward_context
        found = [name for name in context if f".layers.{index}." in f".{name}."]
        if len(found) != 1:
            raise CapabilityError(
                f"Layer {index} of {config.model_config.model} has {len(found)} caches in vLLM where a draft reads "
                "one: use longdraft.plugins.vllm.Lookup."
            )
        self.name = found[0]
        self.attention = context[self.name]
