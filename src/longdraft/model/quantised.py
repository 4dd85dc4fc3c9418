"""Linear layers that another package computes: quantised ones (torchao, bitsandbytes, GPTQ ...) and the like.

Two questions are put to them before a model is hosted, on made-up rows. Does a row's result depend on the numbers in
the rows beside it? Then the model is refused. Do its last bits depend on how many rows there are? Many kernels add up
in another order for one row than for eight. On a CPU such a layer gets its rows in blocks of a fixed size while text
is decoded, or one by one, so that a drafted token gets the bits that it would get alone.
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
from longdraft.model.skinny_gemm import is_dtensor, is_plain_tensor
from longdraft.native import kernels
from longdraft.native.boundary import CPU_FLOAT32

# Rows of a block, and of larger blocks that are used if they give the same bits.
BLOCK_ROWS, LARGER_BLOCK_ROWS = 8, (16, 32, 64)
# Other numbers of rows that are tried.
_FEWER = (1, 3, 5)
# The rows beside a row are made larger by this factor. By how much its result may then differ, of its largest number:
# rounding is less, and a scale that depends on them is more.
_LARGER_ROWS = 100.0
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-3, 2e-2
# Smallest share of different numbers among results in float32 that are not rounded to fewer bits afterwards.
_DIFFERENT = 0.9
# Methods whose weights transformers unpacks while it loads them where it has no kernels for them.
_UNPACKED = ("fp8", "mxfp4", "mxfp8")


def is_externally_quantized(config: Any) -> bool:
    """True if the configuration is of a checkpoint that another package quantised and whose layers it computes."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return enum_value(method) not in _UNPACKED


def decompress(model: nn.Module) -> None:
    """Lets compressed-tensors unpack a model's weights, which it would do in the model's first forward.

    In the first forward of a copy it would unpack the copy's, and never the model's.
    """
    hook = getattr(model, "ct_decompress_hook", None)
    registered = model._forward_pre_hooks.get(getattr(hook, "id", -1))
    if registered is not None:
        registered(model, ())


def decompress_to(model: nn.Module, dtype: torch.dtype) -> None:
    """:func:`decompress` for a model that was just loaded: it computes in ``dtype``, whatever its weights came out in.

    compressed-tensors unpacks floats of four bits into bfloat16, whatever the model's dtype is.
    """
    decompress(model)
    for module in model.modules():
        if enum_value(getattr(module, "quantization_status", None)) == "decompressed":
            for parameter in module.parameters(recurse=False):
                if parameter.dtype in (torch.bfloat16, torch.float16, torch.float32):
                    parameter.data = parameter.data.to(dtype)


def remove_wrappers(model: nn.Module) -> None:
    """Makes layers that compressed-tensors has unpacked plain ones again, if they do no more than those.

    It leaves wrappers around every module, which would move tensors between devices, and a rounding of activations that
    may be of none. The model must be a copy of our own.
    """
    for module in model.modules():
        own = vars(module)
        tables = [own["_parameters"], own["_buffers"]]  # of compressed-tensors, which may move tensors
        places = {getattr(table, f"{kind}_device", None) for table in tables for kind in ("onload", "offload")}
        if "_original_forward_func" in own and len(places - {None}) == len(places) == 1:
            own["_parameters"], own["_buffers"] = (dict(table.offloaded_values) for table in tables)
            own["forward"] = MethodType(own.pop("_original_forward_func"), module)
        scheme = own.get("quantization_scheme")
        # One that was unpacked into another dtype stays what it is: it is refused when it is tried.
        other = any(weight.dtype != model.dtype for weight in module.parameters(recurse=False))
        rounded = scheme is None or scheme.input_activations or scheme.output_activations
        if not (rounded or other) and enum_value(own.get("quantization_status")) == "decompressed":
            own.pop("forward", None)
            del own["quantization_scheme"]
        if getattr(own.get("forward"), "__func__", None) is type(module).forward:
            del own["forward"]


def external_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of a model that are no plain ones of torch, by name."""
    for name, module in model.named_modules():
        sizes = isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features")
        # Adapters are layers around layers, of which each is looked at by itself.
        if not sizes or any(True for _ in module.children()) or hasattr(module, "kernel_weights"):
            continue
        weight = getattr(module, "weight", None)
        # A model's own kinds of linear layers, such as routers, do more than a product.
        known = type(module) is nn.Linear or type(module).__module__.startswith("transformers.models.")
        plain = known and is_plain_tensor(weight) and not hasattr(module, "quantization_scheme")
        if not plain and not is_dtensor(weight):
            yield name, module


def check(model: nn.Module) -> None:
    """Raises UnsupportedModelError, with the layer's name, for layers whose settings say that they depend on all rows.

    :func:`make_batch_invariant` tries those of other packages.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if ".quantized.dynamic." in f"{kind.__module__}.":  # torch.ao.quantization.quantize_dynamic
            raise _refusal(model, name, module, "scales all rows of its input together")
        if kind.__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0.0) > 0:
            why = "finds outliers in all rows of its input together (load it with llm_int8_threshold=0)"
            raise _refusal(model, name, module, why)


def make_batch_invariant(model: nn.Module) -> None:
    """Tries the layers, and gives those that need it their rows in blocks while text is decoded. The model must be a
    copy of our own.

    Raises:
        UnsupportedModelError: a row's result depends on the rows beside it, or a layer cannot compute here.
    """
    for module, sizes in _all_tried(model):
        forward = vars(module)["forward"] = _outside(module.forward)
        # Without kernels, other products do not give a row the same bits either.
        if sizes and kernels() is not None:
            vars(module)["forward"] = _in_blocks(forward, sizes)


def replace_by_random_products(model: nn.Module) -> None:
    """Gives the layers of a copy that is compared with the model's own forward a product of made-up weights.

    Two ways to attend differ in last bits, which decide now and then how a number is rounded: a layer that rounds its
    rows to eight bits makes a percent of that, which hides what is compared.
    """
    for _, module in external_linears(model):
        vars(module)["forward"] = _made_up_product(module)


def _all_tried(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
    """The layers that are not torch's own, with what :func:`_try` found of their kind and size."""
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    for name, module in list(external_linears(model)):
        like = (type(module), type(getattr(module, "weight", None)), module.in_features, module.out_features)
        if like in known:
            with torch.no_grad():  # it may do something once, such as packing its weights in another way
                module.forward(random_rows(model, module, 1)[None])
        yield module, known[like] if like in known else known.setdefault(like, _try(model, name, module))


def _made_up_product(module: nn.Module) -> Callable[..., torch.Tensor]:
    """A forward whose results are some numbers of the row, with made-up signs: a product that needs no weights."""
    size, count = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(size)
    places = torch.randint(2 * size, (count,), generator=generator, device="cpu").tolist()

    def product(x: torch.Tensor, *_more: Any, **_named: Any) -> torch.Tensor:
        return torch.cat([x, -x], dim=-1)[..., to_device(places, x.device)]

    return product


def random_rows(model: nn.Module, module: nn.Module, count: int) -> torch.Tensor:
    """Rows (count, in) for a layer, in the model's dtype."""
    device = next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
    size = int(module.in_features)  # type: ignore[arg-type]
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(0), **CPU_FLOAT32)
    return rows.to(device, getattr(model, "dtype", torch.float32))


def _try(model: nn.Module, name: str, module: nn.Module) -> tuple[int, ...]:
    """Sizes of blocks that give the same bits; (1,) if only rows one by one do, empty if any number of rows does."""
    rows = random_rows(model, module, LARGER_BLOCK_ROWS[-1])

    def compute(x: torch.Tensor) -> torch.Tensor:
        # module.forward, so that the user's hooks do not see made-up rows.
        out: torch.Tensor = module.forward(x[None])[0]
        return out

    try:
        with torch.no_grad():
            depends = _depends(compute, rows[:BLOCK_ROWS])
            sizes = _steady_sizes(compute, rows) if rows.device.type == "cpu" and not depends else ()
    except Exception as error:  # another package may raise anything
        raise UnsupportedModelError(
            f"{type(model).__name__} has {name} ({_kind(module)}), which cannot compute on {rows.device} in "
            f"{rows.dtype}: {reason_of(error)}. Load the model on another device, in another dtype, or not quantised."
        ) from error
    if depends:
        raise _refusal(model, name, module, "computes another result for a row beside larger ones")
    return sizes


def _depends(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> bool:
    """True if a row's result changes by more than rounding when the rows beside it become larger."""
    larger = torch.cat([rows[:1], rows[1:] * _LARGER_ROWS])
    alone, beside = (compute(x)[0].double() for x in (rows, larger))
    tolerance = _TOLERANCE_OF_HALVES if rows.dtype in (torch.bfloat16, torch.float16) else _TOLERANCE
    return not bool((alone - beside).abs().max() <= tolerance * alone.abs().max())


def _steady_sizes(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> tuple[int, ...]:
    """The sizes that :func:`_try` returns."""

    def by(size: int, x: torch.Tensor = rows) -> torch.Tensor:
        return torch.cat([compute(part) for part in x.split(size)])

    expected = by(BLOCK_ROWS)
    # Another place in the block, and other rows in it.
    if not torch.equal(by(BLOCK_ROWS, rows.roll(3, 0)).roll(-3, 0), expected):
        return (1,)
    if rows.dtype == torch.float32 and len(expected.unique()) < _DIFFERENT * expected.numel():
        return (BLOCK_ROWS,)  # rounded results would hide that other blocks add up in another order
    larger = tuple(size for size in LARGER_BLOCK_ROWS if torch.equal(by(size), expected))
    fewer = all(torch.equal(compute(rows[:n]), expected[:n]) for n in _FEWER)
    return () if fewer and larger == LARGER_BLOCK_ROWS else (BLOCK_ROWS, *larger)


def _outside(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Computes outside of torch's inference mode, in which some layers do not, as quanto's in four bits."""

    def outside(*inputs: Any, **named: Any) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return forward(*inputs, **named)

    return outside


def _in_blocks(forward: Callable[..., torch.Tensor], sizes: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    def in_blocks(x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        if not in_decode():
            return forward(x, *more, **named)
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        size = next((n for n in sizes if n >= count), sizes[-1])
        if missing := -count % size:
            rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
        out = [forward(part[None], *more, **named)[0] for part in rows.split(size)]
        return torch.cat(out)[:count].view(*x.shape[:-1], -1)

    return in_blocks


def _refusal(model: nn.Module, name: str, module: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is quantised so that {name} ({_kind(module)}) {why}. What it computes for a token "
        "then depends on the tokens beside it, so drafted tokens would change the text. Use a quantisation of "
        "weights alone, or one that scales each row by itself."
    )


def _kind(module: nn.Module) -> str:
    """A layer's class, with that of a weight that is no plain tensor."""
    weight = getattr(module, "weight", None)
    kind = type(module).__name__
    return kind if weight is None or is_plain_tensor(weight) else f"{kind}, {type(weight).__name__}"


def enum_value(value: Any) -> str:
    """A string or the value of an enum's member."""
    return str(getattr(value, "value", value))
