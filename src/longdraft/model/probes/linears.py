"""Probes linear layers with random rows: do a row's result, or its bits, depend on the other rows of the input?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from longdraft.errors import CapabilityError
from longdraft.native.boundary import CPU_FLOAT32

# Number of rows in a block, and larger numbers that are used for many rows if they give the same bits.
_BLOCK_ROWS, _LARGER_BLOCK_ROWS = 8, (16, 32, 64)
MAX_BLOCK_ROWS = _LARGER_BLOCK_ROWS[-1]
# Numbers of rows, smaller than a block, that are probed too: if they give the same bits, no blocks are needed.
_PARTIAL_BLOCK_ROWS = (1, 3, 5)
# Probes multiply all rows but the first by this factor, and look at the first row's result.
_OTHER_ROWS_FACTOR = 100.0
# Largest relative change of that result that counts as rounding, in float32 and in 16 bits: a shared scale exceeds it.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 2e-2
# If a smaller fraction of float32 results is distinct, they were rounded to a smaller dtype.
_MIN_DISTINCT_FRACTION = 0.9


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and modules of a model's linear layers, of torch or of another package, without children."""
    for name, module in model.named_modules():
        is_linear = isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features")
        if is_linear and not any(True for _ in module.children()):
            yield name, module


def kind_of(module: nn.Module) -> tuple[object, ...]:
    """Returns class and sizes of a linear layer. One probe is enough for layers of one kind."""
    weight = getattr(module, "weight", None)
    return type(module), type(weight), getattr(weight, "dtype", None), module.in_features, module.out_features


def random_rows(model: nn.Module, module: nn.Module, num_rows: int) -> torch.Tensor:
    """Returns random inputs (num_rows, in_features) of a layer, in the model's dtype."""
    device = next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
    size = int(module.in_features)  # type: ignore[arg-type]
    rows = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0), **CPU_FLOAT32)
    return rows.to(device, getattr(model, "dtype", torch.float32))


@torch.no_grad()
def check_linears(model: nn.Module, batch_rows: int) -> None:
    """Raises CapabilityError if a row's bits depend on the row's index or on other rows, in inputs of ``batch_rows``
    rows. Tests one layer of each kind: on copies of one row, and on the row followed by larger rows."""
    first_of_kind: dict[tuple[object, ...], tuple[str, nn.Module]] = {}
    for name, module in linear_layers(model):
        first_of_kind.setdefault(kind_of(module), (name, module))
    for name, module in first_of_kind.values():
        row = random_rows(model, module, 1)
        outputs = module.forward(row.expand(1, batch_rows, -1).contiguous())[0]
        with_large_rows = torch.cat([row, _OTHER_ROWS_FACTOR * row.expand(batch_rows - 1, -1)])
        output = module.forward(with_large_rows[None])[0, 0]
        if not bool(((outputs == outputs[:1]).all() & (output == outputs[0]).all()).item()):
            raise CapabilityError(
                f"deterministic=True cannot be kept here: the result of {name} for a row depends on the row's "
                "index or on the other rows. Leave it out."
            )


@torch.no_grad()
def stable_block_sizes(module: nn.Module, rows: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the numbers of rows in a block, ascending, that all give a row the same bits on a CPU.
    (1,) means that only single rows do; () that the layer needs no blocks, or is not on a CPU; None that a row's result
    changes by more than rounding when the other rows become larger. ``rows`` are :data:`MAX_BLOCK_ROWS` random rows.
    Raises what the layer raises."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        # Unlike module(...), module.forward does not run the user's hooks.
        out: torch.Tensor = module.forward(x[None])[0]
        return out

    if _depends_on_other_rows(compute, rows[:_BLOCK_ROWS]):
        return None
    if rows.device.type != "cpu":
        return ()

    def in_blocks(size: int, x: torch.Tensor = rows) -> torch.Tensor:
        return torch.cat([compute(block) for block in x.split(size)])

    expected = in_blocks(_BLOCK_ROWS)
    # roll(3) moves rows within their block and to another block.
    if not torch.equal(in_blocks(_BLOCK_ROWS, rows.roll(3, 0)).roll(-3, 0), expected):
        return (1,)
    if rows.dtype == torch.float32 and len(expected.unique()) < _MIN_DISTINCT_FRACTION * expected.numel():
        return (_BLOCK_ROWS,)  # after rounding, equal bits do not prove that larger blocks sum in the same order
    larger = tuple(size for size in _LARGER_BLOCK_ROWS if torch.equal(in_blocks(size), expected))
    partial_blocks_agree = all(torch.equal(compute(rows[:n]), expected[:n]) for n in _PARTIAL_BLOCK_ROWS)
    return () if partial_blocks_agree and larger == _LARGER_BLOCK_ROWS else (_BLOCK_ROWS, *larger)


def _depends_on_other_rows(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> bool:
    larger = torch.cat([rows[:1], rows[1:] * _OTHER_ROWS_FACTOR])
    expected, beside_larger = (compute(x)[0].double() for x in (rows, larger))
    tolerance = _HALF_TOLERANCE if rows.dtype in (torch.bfloat16, torch.float16) else _TOLERANCE
    return not bool((expected - beside_larger).abs().max() <= tolerance * expected.abs().max())
