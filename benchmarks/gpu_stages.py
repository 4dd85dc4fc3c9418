"""The stages of benchmarks/gpu.py, in an order of worth. Nothing is imported before a stage begins."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A stage.

    Attributes:
        work: "module:function" that measures, called with the :class:`gpu_results.Stage` and the options.
        weight: its share of the time, against that of the stages that are left.
        asks: options that its figures depend on.
        header, healthy: of what the figures are, and whether the device still works after an error.
    """

    work: str
    weight: float
    asks: tuple[str, ...] = ()
    header: str = "gpu_machine:header"
    healthy: str = "gpu_machine:healthy"

    def asked(self, options: argparse.Namespace) -> dict[str, Any]:
        """Options in a form that JSON keeps."""
        return {name: getattr(options, name) for name in ("smallest", *self.asks)}


STAGES = {
    "environment": Part("gpu_machine:environment_stage", 1),
    "probe": Part("gpu_probe:probe", 3),
    "rounds": Part("gpu_round:rounds", 6, ("model", "large")),
    "correctness": Part("gpu_correctness:correctness", 6, ("model",)),
    "kernels": Part("gpu_measures:kernels", 3),
    "steps": Part("gpu_measures:steps", 4),
    "texts": Part("gpu_texts:texts", 4, ("model",)),
    "batches": Part("gpu_texts:batches", 3, ("model",)),
    "training": Part("gpu_texts:training", 2, ("model",)),
    "tables": Part("gpu_tables:tables", 8, ("target", "draft", "data")),
}
