"""External linear layers: layers that other packages compute, mostly quantised (torchao, bitsandbytes, GPTQ, ...).

Before a model is hosted, each layer is probed (:mod:`longdraft.model.probes.linears`) with one row for each token. If a
row's result depends on the values of other rows, the model is refused. If the last bits of a row's result depend on the
number of rows, the layer decodes on a CPU in blocks of a fixed number of rows, or row by row. A drafted token then has
the same bits as in a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from longdraft.attention.transfer import to_device
from longdraft.errors import UnsupportedModelError, reason_of
from longdraft.model.hosting import in_decode
from longdraft.model.layers.skinny_gemm import is_dtensor, is_plain_tensor
from longdraft.model.probes import linears
from longdraft.native import kernels

# Quantisation methods whose weights transformers dequantises at loading if it has no kernels for them.
_DEQUANTIZED_METHODS = ("fp8", "mxfp4", "mxfp8")


def is_externally_quantized(config: Any) -> bool:
    """True if another package quantised the checkpoint and computes its layers."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return enum_value(method) not in _DEQUANTIZED_METHODS


def decompress(model: nn.Module) -> None:
    """Lets compressed-tensors unpack a model's weights now, rather than in the first forward.
    Our copy would run that forward, and the weights of the user's model would stay packed."""
    hook = getattr(model, "ct_decompress_hook", None)
    hook_function = model._forward_pre_hooks.get(getattr(hook, "id", -1))
    if hook_function is not None:
        hook_function(model, ())


def decompress_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Unpacks weights (:func:`decompress`) and casts them: compressed-tensors unpacks 4-bit floats to bfloat16 only."""
    decompress(model)
    for module in model.modules():
        if enum_value(getattr(module, "quantization_status", None)) == "decompressed":
            for parameter in module.parameters(recurse=False):
                if parameter.dtype in (torch.bfloat16, torch.float16, torch.float32):
                    parameter.data = parameter.data.to(dtype)


def remove_wrappers(model: nn.Module) -> None:
    """Turns layers that compressed-tensors has unpacked into plain linear layers, if they do not round activations.
    compressed-tensors leaves wrappers around the layers' forwards and dicts of parameters, to move tensors between
    devices. The model must be our own copy."""
    for module in model.modules():
        attrs = vars(module)
        dicts = [attrs["_parameters"], attrs["_buffers"]]  # may be compressed-tensors' offloading dicts
        devices = {getattr(tensors, f"{kind}_device", None) for tensors in dicts for kind in ("onload", "offload")}
        # If all dicts state one and the same device, no tensor is offloaded.
        if "_original_forward_func" in attrs and len(devices - {None}) == len(devices) == 1:
            attrs["_parameters"], attrs["_buffers"] = (dict(tensors.offloaded_values) for tensors in dicts)
            attrs["forward"] = MethodType(attrs.pop("_original_forward_func"), module)
        scheme = attrs.get("quantization_scheme")
        # A layer in another dtype is left for the probe to refuse.
        wrong_dtype = any(weight.dtype != model.dtype for weight in module.parameters(recurse=False))
        rounds_activations = scheme is None or scheme.input_activations or scheme.output_activations
        if not (rounds_activations or wrong_dtype) and enum_value(attrs.get("quantization_status")) == "decompressed":
            attrs.pop("forward", None)
            del attrs["quantization_scheme"]
        if getattr(attrs.get("forward"), "__func__", None) is type(module).forward:
            del attrs["forward"]


def external_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and modules of a model's external linear layers."""
    for name, module in linears.linear_layers(model):
        if type(module).__module__.startswith("longdraft."):
            continue
        weight = getattr(module, "weight", None)
        # Linear layers that transformers' models define themselves, such as routers, are not external.
        has_known_class = type(module) is nn.Linear or type(module).__module__.startswith("transformers.models.")
        is_plain = has_known_class and is_plain_tensor(weight) and not hasattr(module, "quantization_scheme")
        if not is_plain and not is_dtensor(weight):
            yield name, module


def check(model: nn.Module) -> None:
    """Raises UnsupportedModelError for layers whose class or settings show that they quantise all rows together.
    :func:`make_batch_invariant` finds further layers by probing."""
    for name, module in model.named_modules():
        cls = type(module)
        if ".quantized.dynamic." in f"{cls.__module__}.":  # torch.ao.quantization.quantize_dynamic
            raise _unsupported_layer(model, name, module, "scales all rows of its input together")
        if cls.__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0.0) > 0:
            why = "finds outliers in all rows of its input together (load it with llm_int8_threshold=0)"
            raise _unsupported_layer(model, name, module, why)


def make_batch_invariant(model: nn.Module) -> None:
    """Probes external layers, and makes those that need it decode in blocks of rows. The model must be our own copy.
    Raises UnsupportedModelError if a row's result depends on other rows, or a layer's forward fails on its device."""
    block_sizes_by_kind: dict[tuple[object, ...], tuple[int, ...]] = {}
    for name, module in list(external_linears(model)):
        kind = linears.kind_of(module)
        if kind not in block_sizes_by_kind:
            block_sizes_by_kind[kind] = _block_sizes(model, name, module)
        else:
            with torch.no_grad():  # the first forward may repack the weights
                module.forward(linears.random_rows(model, module, 1)[None])
        block_sizes = block_sizes_by_kind[kind]
        forward = vars(module)["forward"] = _outside_inference_mode(module.forward)
        # Without our kernels the model's other layers are not batch invariant either.
        if block_sizes and kernels() is not None:
            vars(module)["forward"] = _in_blocks(forward, block_sizes)


def replace_by_random_products(model: nn.Module) -> None:
    """Replaces external layers by random matrices, in a copy that only compares our attention with the model's own.
    Layers that round inputs to 8 bits can turn a last bit into a difference of a percent, which hides real errors."""
    for _, module in external_linears(model):
        vars(module)["forward"] = _random_product(module)


def _block_sizes(model: nn.Module, name: str, module: nn.Module) -> tuple[int, ...]:
    """Returns :func:`.linears.stable_block_sizes` of a layer. Raises UnsupportedModelError if the layer fails."""
    rows = linears.random_rows(model, module, linears.MAX_BLOCK_ROWS)
    try:
        sizes = linears.stable_block_sizes(module, rows)
    except Exception as error:  # another package can raise any type
        raise UnsupportedModelError(
            f"{type(model).__name__} has {name} ({_describe_layer(module)}), which cannot compute on {rows.device} in "
            f"{rows.dtype}: {reason_of(error)}. Load the model on another device, in another dtype, or not quantised."
        ) from error
    if sizes is None:
        raise _unsupported_layer(model, name, module, "computes another result for a row beside larger ones")
    return sizes


def _random_product(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Returns a forward whose outputs are randomly chosen inputs with random signs, which needs no stored weights."""
    in_size, out_size = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(in_size)
    columns = torch.randint(2 * in_size, (out_size,), generator=generator, device="cpu").tolist()

    def product(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.cat([x, -x], dim=-1)[..., to_device(columns, x.device)]

    return product


def _outside_inference_mode(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Runs a forward outside of torch's inference mode, in which some layers fail (such as quanto's 4-bit layers)."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return forward(*args, **kwargs)

    return wrapped


def _in_blocks(forward: Callable[..., torch.Tensor], block_sizes: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """Makes a forward decode in blocks: of the smallest size that holds all rows, or else of the largest size."""

    def wrapped(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not in_decode():
            return forward(x, *args, **kwargs)
        rows = x.reshape(-1, x.shape[-1])
        num_rows = len(rows)
        size = next((n for n in block_sizes if n >= num_rows), block_sizes[-1])
        if padding := -num_rows % size:  # repeats the last row
            rows = torch.cat([rows, rows[-1:].expand(padding, -1)])
        out = [forward(block[None], *args, **kwargs)[0] for block in rows.split(size)]
        return torch.cat(out)[:num_rows].view(*x.shape[:-1], -1)

    return wrapped


def _unsupported_layer(model: nn.Module, name: str, module: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is quantised so that {name} ({_describe_layer(module)}) {why}. A token's result then "
        "depends on the other tokens of a forward, so drafts would change the output. Use a quantisation of the "
        "weights alone, or one with a scale for each token."
    )


def _describe_layer(module: nn.Module) -> str:
    """Returns a layer's class name, and the class name of its weight if that is a tensor subclass."""
    weight = getattr(module, "weight", None)
    name = type(module).__name__
    return name if weight is None or is_plain_tensor(weight) else f"{name}, {type(weight).__name__}"


def enum_value(value: Any) -> str:
    """Returns the value of an enum member, or the string itself."""
    return str(getattr(value, "value", value))
