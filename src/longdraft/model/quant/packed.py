"""AWQ and GPTQ checkpoints of four bits on a GPU, without another package: their layers become planes (:mod:`.planes`).

A weight is s * (q - z): an integer q of 4 bits, and a scale s and an integer zero point z of each group of inputs. In
planes that is d * 1 * q - e * m, with d = e = s and m = z, so a weight has the checkpoint's bits. Eight integers of an
int32 lie along the outputs (AWQ, in an order of its own) or along the inputs (GPTQ).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from longdraft.attention.transfer import to_device
from longdraft.errors import CheckpointError
from longdraft.model.quant.external import enum_value
from longdraft.model.quant.planes import Planes, PlanesLinear

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose integer lies in each four bits of an int32, low bits first
PLAIN_ORDER = tuple(range(8))
MAX_INTERLEAVE = 64  # most weights that lie in the low or in the high bits side by side


class PackedLinear(nn.Module):
    """Holds the tensors of a layer as a checkpoint has them, until :meth:`to_planes`.

    Args:
        layer: the layer that it replaces, on the meta device.
        method: "awq" or "gptq".
        group_size: number of inputs of a group.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Linear, method: str, group_size: int) -> None:
        super().__init__()
        self.method, self.in_features, self.out_features = method, layer.in_features, layer.out_features
        num_inputs, num_outputs, groups = layer.in_features, layer.out_features, layer.in_features // group_size
        packed = (num_inputs, num_outputs // 8) if method == "awq" else (num_inputs // 8, num_outputs)
        meta: dict[str, Any] = {"device": "meta"}
        self.register_buffer("qweight", torch.empty(packed, dtype=torch.int32, **meta))
        self.register_buffer("qzeros", torch.empty(groups, num_outputs // 8, dtype=torch.int32, **meta))
        self.register_buffer("scales", torch.empty(groups, num_outputs, dtype=torch.float16, **meta))
        if method == "gptq":
            self.register_buffer("g_idx", torch.empty(num_inputs, dtype=torch.int32, **meta))
        bias = None if layer.bias is None else torch.empty(num_outputs, dtype=torch.float16, **meta)
        self.register_buffer("bias", bias)

    def to_planes(self, dtype: torch.dtype) -> PlanesLinear:
        """Returns the layer, with a bias in ``dtype``. Raises CheckpointError if its groups are not in order."""
        is_awq = self.method == "awq"
        order = AWQ_ORDER if is_awq else PLAIN_ORDER
        quants, zeros = _unpack(self.qweight, order, dim=int(is_awq)).T, _unpack(self.qzeros, order, dim=1).T
        if not is_awq:
            zeros = (zeros + 1) & 15  # stored less 1, so 15 stands for 0
            group_size = self.in_features // len(self.scales)
            if not torch.equal(self.g_idx.cpu().long(), torch.arange(self.in_features, device="cpu") // group_size):
                raise CheckpointError(
                    "The checkpoint sorts inputs by importance (desc_act), which is not read here: install gptqmodel, "
                    "and load it with weights='float32'."
                )
        interleave = min(MAX_INTERLEAVE, self.in_features // len(self.scales) // 2)
        halves = quants.unflatten(1, (-1, 2, interleave))
        packed = (halves[:, :, 0] | halves[:, :, 1] << 4).to(torch.uint8).flatten(1).contiguous()
        scales = self.scales.T.half().contiguous().view(torch.int16)
        group_scales = torch.stack([torch.ones_like(zeros), zeros], -1).to(torch.int8).contiguous()
        planes = Planes(packed, torch.stack([scales, scales], -1).contiguous(), group_scales, interleave, zero=0)
        return PlanesLinear(planes, None if self.bias is None else self.bias.to(dtype))


def _unpack(packed: torch.Tensor, order: tuple[int, ...], dim: int) -> torch.Tensor:
    """Returns the integers 0 to 15 of int32 (a, b): (a, 8 b) for ``dim`` 1, (8 a, b) for ``dim`` 0."""
    shifts = to_device([4 * order.index(i) for i in range(8)], packed.device, torch.int32)
    shifts = shifts if dim else shifts[:, None]
    return (packed.unsqueeze(dim + 1) >> shifts & 15).flatten(dim, dim + 1)


class PackedQuantizer(HfQuantizer):
    """Lets transformers read a checkpoint into :class:`PackedLinear`, and converts the layers at the end."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        settings = self.quantization_config.to_dict()
        unpacked = [*(settings.get("modules_to_not_convert") or ()), "lm_head"]
        for path, module in list(model.named_modules()):
            if type(module) is nn.Linear and not any(name in path for name in unpacked):
                method = enum_value(self.quantization_config.quant_method)
                model.set_submodule(path, PackedLinear(module, method, settings["group_size"]))

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
        """Returns None: tensors keep the checkpoint's dtype until all are read, because scales must not be rounded."""

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        dtype = model.config.dtype
        for path, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                model.set_submodule(path, module.to_planes(dtype))
        self.remove_quantization_config(model)
        model.to(dtype)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def is_readable(settings: dict[str, Any]) -> bool:
    """True for the quantization_config of a checkpoint that :class:`PackedQuantizer` reads."""
    method, layout = enum_value(settings.get("quant_method")), settings.get("version") or settings.get("format")
    group_size = settings.get("group_size") or 0
    if settings.get("bits") != 4 or group_size not in (32, 64, 128):
        return False
    if method == "gptq":
        checkpoint_format = settings.get("checkpoint_format") or "gptq"
        return checkpoint_format == "gptq" and not settings.get("desc_act")
    return method == "awq" and enum_value(layout or "gemm").lower() == "gemm"


@contextmanager
def reading_packed_layers() -> Iterator[None]:
    """Makes transformers read AWQ and GPTQ checkpoints by :class:`PackedQuantizer` inside the ``with``."""
    original = dict(auto.AUTO_QUANTIZER_MAPPING)

    def choose(method: str) -> Any:
        def make(config: Any, **kwargs: Any) -> HfQuantizer:
            quantizer_class = PackedQuantizer if is_readable(config.to_dict()) else original[method]
            quantizer: HfQuantizer = quantizer_class(config, **kwargs)
            return quantizer

        return make

    try:
        auto.AUTO_QUANTIZER_MAPPING.update({method: choose(method) for method in ("awq", "gptq")})
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING.update(original)
