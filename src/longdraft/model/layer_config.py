"""Configurations of decoder layers as transformers writes them, without what is its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig


def completed(stated: Mapping[str, Any], usual: str = "llama") -> dict[str, Any]:
    """The configuration with the defaults of its model type.

    Args:
        usual: the type where none is stated.

    Raises:
        ValueError: a type that transformers does not know, or a value that it refuses.
    """
    rest = {name: value for name, value in stated.items() if name != "model_type"}
    found: dict[str, Any] = AutoConfig.for_model(str(stated.get("model_type") or usual), **rest).to_dict()
    return found
