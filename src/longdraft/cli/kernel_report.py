"""Reports which kernels compute a target on this machine, as ``longdraft doctor`` and ``generate`` print it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from longdraft import native
from longdraft.memory.memory_info import format_bytes
from longdraft.model.layers.skinny_gemm import kernel_weights_of
from longdraft.model.quant.stored_model import has_stored_weights
from longdraft.model.runner import TargetRunner
from longdraft.native.build import LEVELS
from longdraft.native.library import HEAD_DIM_MULTIPLE, NO_KERNELS_COST

_HALF_NAMES = {"BF16": "bfloat16", "F16": "float16"}  # GGUF's name of a dtype -> torch's


@dataclass(frozen=True)
class KernelReport:
    """The kernels that compute a target.

    Attributes:
        level: instruction set of longdraft's kernels, one of :data:`native.build.LEVELS`; None if torch computes.
        weights: formats of the weights that the kernels read (GGUF's names, or dtypes), the most frequent first.
        kv: dtype of the KV cache if longdraft's kernels compute attention; None if torch computes it.
        whole: True if one kernel call computes the whole forward of a few tokens.
        reason: why longdraft's kernels are not used; None if they are used.
        cost: how much slower or larger the model is without the kernels; None if no loss is known.
        arithmetic: arithmetic of the matrix products, "int8" or a dtype; None without kernels."""

    level: str | None
    weights: tuple[str, ...] = ()
    kv: str | None = None
    whole: bool = False
    reason: str | None = None
    cost: str | None = None
    arithmetic: str | None = None

    @property
    def line(self) -> str:
        """The report in one line, as commands print it."""
        if self.level is None:
            return f"torch's, not longdraft's own: {self.reason}" + (f". {self.cost}" if self.cost else "")
        name = f"longdraft's own for {LEVELS[self.level].title}"
        if not self.weights:
            return name
        formats = f"weights in {' and '.join(self.weights)}, {self.arithmetic} arithmetic"
        formats += f", keys and values in {self.kv}" if self.kv else "; torch does the rest"
        calls = "a forward in one call" if self.whole else "call by call"
        return f"{name}, {calls}: {formats}"


def kernel_report(runner: TargetRunner | None) -> KernelReport:
    """Reports the kernels that decode a target; without a runner, the kernels for this machine's processor."""
    if runner is not None and runner.device.type != "cpu":  # avoids compiling kernels
        path = runner.attention_path
        return KernelReport(None, reason=f"the model is on {runner.device}, where {path} computes attention")
    cpu_kernels = native.kernels()
    if cpu_kernels is None:
        cost = NO_KERNELS_COST
        if runner is not None and has_stored_weights(model := runner.model):
            cost = "Decoding is several times slower: each product unpacks its weights (--weights float32 unpacks once)"
        elif runner is not None:
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            cost += f"; weights take {format_bytes(size)}, in {_dtype_name(runner.kv_shape.dtype)}"
        return KernelReport(None, reason=native.unavailable_reason(), cost=cost)
    if runner is None:
        return KernelReport(cpu_kernels.level)
    weight_counts: Counter[str] = Counter()
    execution_model = runner.execution_model
    for layer in execution_model.model.modules():
        weights = kernel_weights_of(layer)
        if weights is not None:
            matrix = weights[0]
            name = _dtype_name(matrix.dtype) if isinstance(matrix, torch.Tensor) else matrix.format
            weight_counts[_HALF_NAMES.get(name, name)] += matrix.shape[0] * matrix.shape[1]
    if not weight_counts:
        reason = f"they support none of this model's layers ({_dtype_name(runner.kv_shape.dtype)} on a CPU)"
        return KernelReport(None, reason=reason)
    kernels_attend = runner.can_round_kv and runner.kv_shape.head_dim % HEAD_DIM_MULTIPLE == 0
    kv_dtype_name = _dtype_name(runner.kv_dtype) if kernels_attend else None
    one_call = runner.allows_fusion and execution_model.fused.stack is not None and kernels_attend
    one_call = one_call and runner.offload is None
    formats = tuple(name for name, _ in weight_counts.most_common())
    return KernelReport(cpu_kernels.level, formats, kv_dtype_name, one_call, arithmetic=runner.arithmetic)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
