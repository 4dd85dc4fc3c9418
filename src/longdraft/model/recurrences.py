"""Recurrences: how the recurrent layers of transformers' models go from one token's state to the next.

A mixer of transformers calls one of two functions of its module: a rule for many tokens at once, and a step for one.
Here the arguments of the first are divided into rows, which are computed by the second one after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import torch

from longdraft.native.recurrent import LinearRecurrence, RecurrentInputs

Arguments = Mapping[str, Any]
Rows = tuple[torch.Tensor, ...]

# Tokens of a prompt whose states are computed together where a rule takes no state to begin with.
_PIECE = 64


class Recurrence(Protocol):
    """A kind of recurrence. B sequences of T rows.

    Attributes:
        step: name of the function that computes one token.
        turned: transformers keeps a head's state as (values, keys), and we as (keys, values).
        begins: name of the argument of the function for many tokens that is the state to begin with; None if it has
            none.
    """

    @property
    def step(self) -> str: ...

    @property
    def begins(self) -> str | None: ...

    @property
    def turned(self) -> bool: ...

    def rows(self, arguments: Arguments) -> Rows:
        """The arguments that differ from row to row, (B, T, ...)."""

    def linear(self, arguments: Arguments) -> LinearRecurrence | None:
        """The recurrence for our kernel; None if that does not compute this kind."""

    def inputs(self, rows: Rows) -> RecurrentInputs:
        """Some rows for our kernel."""

    def advance(
        self, step: Callable[..., Any], arguments: Arguments, state: torch.Tensor, row: Rows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a row (each tensor without B and T) from its parent's state; returns its output and its state."""

    def result(self, arguments: Arguments, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        """Returns what the function for many tokens would: outputs (B, T, ...) and, if wanted, a last state."""

    def scan(self, arguments: Arguments, state: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Computes a piece of a prompt (B is 1) from a state, where the function does not carry one."""


class _Delta:
    """The gated delta rule (gated DeltaNet, Kimi's delta attention): state (heads, key size, value size)."""

    begins, turned = "initial_state", False
    _names = ("query", "key", "value", "g", "beta")
    _left_out = frozenset({*_names, "initial_state", "output_final_state", "chunk_size", "cu_seqlens"})

    def __init__(self, step: str) -> None:
        self.step = step

    def rows(self, arguments: Arguments) -> Rows:
        return tuple(arguments[name] for name in self._names)

    def linear(self, arguments: Arguments) -> LinearRecurrence | None:
        scale = float(arguments["key"].shape[-1] ** -0.5)
        return LinearRecurrence(True, bool(arguments.get("use_qk_l2norm_in_kernel")), scale)

    def inputs(self, rows: Rows) -> RecurrentInputs:
        return RecurrentInputs(*rows)

    def advance(
        self, step: Callable[..., Any], arguments: Arguments, state: torch.Tensor, row: Rows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        more = {name: value for name, value in arguments.items() if name not in self._left_out}
        named = {name: x[None, None] for name, x in zip(self._names, row, strict=True)}
        out, after = step(**named, initial_state=state[None], output_final_state=True, **more)
        return out[0, 0], after[0]

    def result(self, arguments: Arguments, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        return outputs, state[None]

    def scan(self, arguments: Arguments, state: torch.Tensor) -> tuple[Any, torch.Tensor]:
        raise NotImplementedError


class _Mamba2:
    """Mamba-2's selective scan: state (heads, state size, head size)."""

    step, begins, turned = "mamba2_selective_state_update", "initial_states", True

    def rows(self, arguments: Arguments) -> Rows:
        return tuple(arguments[name] for name in ("hidden_states", "dt", "B", "C"))

    def linear(self, arguments: Arguments) -> LinearRecurrence | None:
        if not arguments.get("dt_softplus"):
            return None
        bias, skip = (None if x is None else x.float().contiguous() for x in map(arguments.get, ("dt_bias", "D")))
        return LinearRecurrence(False, a=arguments["A"].float().contiguous(), bias=bias, skip=skip)

    def inputs(self, rows: Rows) -> RecurrentInputs:
        x, dt, b, c = rows
        return RecurrentInputs(c, b, x, dt, None)

    def advance(
        self, step: Callable[..., Any], arguments: Arguments, state: torch.Tensor, row: Rows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = row
        heads, width, size = state.shape
        bias, skip = (None if y is None else y[:, None].expand(-1, size) for y in map(arguments.get, ("dt_bias", "D")))
        after = state.transpose(1, 2)[None].clone(memory_format=torch.contiguous_format)  # written to
        out = step(
            after,
            x[None],
            dt[None, :, None].expand(-1, -1, size),
            arguments["A"].float()[:, None, None].expand(heads, size, width),
            b[None],
            c[None],
            skip,
            z=None,
            dt_bias=bias,
            dt_softplus=arguments.get("dt_softplus", False),
        )
        return out[0], after[0].transpose(1, 2)

    def result(self, arguments: Arguments, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        return (outputs, state.transpose(1, 2)[None]) if arguments.get("return_final_states") else outputs

    def scan(self, arguments: Arguments, state: torch.Tensor) -> tuple[Any, torch.Tensor]:
        raise NotImplementedError


class _Mamba1:
    """Mamba's selective scan: state (channels, state size). Its rows are the last dimension of most arguments."""

    step, begins, turned = "mamba_selective_state_update", None, False

    def rows(self, arguments: Arguments) -> Rows:
        names = ("hidden_states", "dt", "B", "C", "z")
        return tuple(arguments[name].transpose(1, 2) for name in names if arguments.get(name) is not None)

    def linear(self, arguments: Arguments) -> LinearRecurrence | None:
        return None

    def inputs(self, rows: Rows) -> RecurrentInputs:
        raise NotImplementedError

    def advance(
        self, step: Callable[..., Any], arguments: Arguments, state: torch.Tensor, row: Rows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c, *gate = (y[None] for y in row)
        after = state[None].clone()
        out = step(
            after,
            x,
            dt,
            arguments["A"],
            b,
            c,
            arguments.get("D"),
            z=gate[0] if gate else None,
            dt_bias=arguments.get("delta_bias"),
            dt_softplus=arguments.get("delta_softplus", False),
        )
        return out[0], after[0]

    def result(self, arguments: Arguments, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        outputs = outputs.transpose(1, 2)
        return (outputs, state[None]) if arguments.get("return_last_state") else outputs

    def scan(self, arguments: Arguments, state: torch.Tensor) -> tuple[Any, torch.Tensor]:
        x, dt, a, b, c = (arguments[name] for name in ("hidden_states", "dt", "A", "B", "C"))
        if (bias := arguments.get("delta_bias")) is not None:
            dt = dt + bias.to(dt.dtype)[..., None]
        if arguments.get("delta_softplus"):
            dt = torch.nn.functional.softplus(dt)
        outputs, now = [], state[None]
        for first in range(0, x.shape[2], _PIECE):
            piece = slice(first, first + _PIECE)
            step = dt[:, :, piece, None]
            decays = torch.exp(a[None, :, None, :] * step)
            inputs = step * b.transpose(1, 2)[:, None, piece].float() * x[:, :, piece, None].float()
            for i in range(decays.shape[2]):
                now = decays[:, :, i] * now + inputs[:, :, i]
                outputs.append(now.to(x.dtype) @ c[:, :, first + i, None])
        out = torch.cat(outputs, dim=-1)
        if (skip := arguments.get("D")) is not None:
            out = out + x * skip[None, :, None]
        if (gate := arguments.get("z")) is not None:
            out = out * torch.nn.functional.silu(gate)
        result = (out, now) if arguments.get("return_last_state") else out
        return result, now[0]


# The function for many tokens -> its recurrence.
RECURRENCES: dict[str, Recurrence] = {
    "torch_chunk_gated_delta_rule": _Delta("torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": _Delta("recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": _Mamba2(),
    "mamba_selective_scan": _Mamba1(),
}


_signature = cache(inspect.signature)


def bound(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, with defaults; those that the function has no name for are dropped."""
    signature = _signature(function)
    known = {name: value for name, value in named.items() if name in signature.parameters}
    given = signature.bind(*args, **known)
    given.apply_defaults()
    variadic = [p.name for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {name: value for name, value in given.arguments.items() if name not in variadic}
