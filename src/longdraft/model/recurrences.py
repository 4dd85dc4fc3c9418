"""Recurrences: how the recurrent layers of transformers' models go from one token's state to the next.

A mixer of transformers calls a function of its module for many tokens at once. Here the arguments of the known ones are
brought to one form: a state (heads, keys, values) that decays, and gains the product of a key and a value in each row.
Our kernel computes rows of this form one after another, and :func:`step_function` where the kernel does not serve.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from longdraft.model.batch_invariant import in_full_vectors
from longdraft.native.recurrent import LinearRecurrence, RecurrentInputs

Arguments = Mapping[str, Any]
TokenInputs = tuple[torch.Tensor, ...]

# Tokens whose decays are computed together, which are as large as states.
_PIECE = 64


@dataclass(frozen=True)
class Recurrence:
    """A kind of recurrence. B sequences of T rows.

    Attributes:
        token_args: arguments of the function for many tokens that differ from row to row.
        initial_state_arg: name of its argument that is the state to begin with; None if it has none.
        return_state_arg: name of its argument that asks for the last state; None if that is always returned.
        dt_bias_arg: of Mamba, the name of its argument that is added to step sizes; None for the gated delta rule.
        is_transposed: transformers keeps a head's state as (values, keys), and we as (keys, values).
        per_channel: each channel is a head of one value, and rows are the last dimension of most arguments.
    """

    token_args: tuple[str, ...]
    initial_state_arg: str | None = None
    return_state_arg: str | None = None
    dt_bias_arg: str | None = None
    is_transposed: bool = False
    per_channel: bool = False

    def token_inputs(self, arguments: Arguments) -> TokenInputs:
        """The arguments that differ from row to row, (B, T, ...)."""
        found = tuple(arguments[name] for name in self.token_args)
        return tuple(x.transpose(1, 2) for x in found) if self.per_channel else found

    def linear_recurrence(self, arguments: Arguments) -> LinearRecurrence:
        """The recurrence in the common form."""
        if self.dt_bias_arg is None:
            scale = float(arguments["key"].shape[-1] ** -0.5)
            return LinearRecurrence(True, bool(arguments.get("use_qk_l2norm_in_kernel")), scale)
        own = (arguments.get(name) for name in ("A", self.dt_bias_arg, "D"))
        a, bias, skip = (None if x is None else x.float().contiguous() for x in own)
        return LinearRecurrence(False, a=a, dt_bias=bias, d_skip=skip)

    def kernel_inputs(self, rows: TokenInputs) -> RecurrentInputs:
        """Some rows in the common form."""
        if self.dt_bias_arg is None:
            return RecurrentInputs(*rows)
        x, dt, b, c = rows
        if self.per_channel:
            x, b, c = x[..., None], b[:, None], c[:, None]
        return RecurrentInputs(c, b, x, dt, None)

    def original_result(self, arguments: Arguments, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        """Returns what the function for many tokens would: outputs (B, T, heads, values) and, if wanted, a state."""
        if self.per_channel:
            outputs, gate = outputs[..., 0].transpose(1, 2), arguments.get("z")
            outputs = outputs if gate is None else outputs * in_full_vectors(F.silu, gate)
        state = state.transpose(1, 2)[None] if self.is_transposed else state[None]
        return (outputs, state) if self.return_state_arg is None or arguments.get(self.return_state_arg) else outputs

    def run(
        self, arguments: Arguments, rows: TokenInputs, state: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Outputs (heads, values) of rows (T, ...) one behind the other, and the state after the last one."""
        outputs: list[torch.Tensor] = []
        for piece in zip(*(x.split(_PIECE) for x in rows), strict=True):
            step = step_function(self.linear_recurrence(arguments), self.kernel_inputs(piece))
            for row in range(len(piece[0])):
                out, state = step(row, state)
                outputs.append(out)
        return outputs, state


# The gated delta rule (gated DeltaNet, Kimi's delta attention): state (heads, key size, value size).
_DELTA = Recurrence(("query", "key", "value", "g", "beta"), initial_state_arg="initial_state")
# Selective scans: of Mamba-2, state (heads, state size, head size), and of Mamba, state (channels, state size).
_MAMBA = ("hidden_states", "dt", "B", "C")
_MAMBA2 = Recurrence(_MAMBA, "initial_states", "return_final_states", "dt_bias", is_transposed=True)
_MAMBA1 = Recurrence(_MAMBA, None, "return_last_state", "delta_bias", per_channel=True)
# The function for many tokens -> its recurrence.
RECURRENCES: dict[str, Recurrence] = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": _MAMBA2,
    "mamba_selective_scan": _MAMBA1,
}
Step = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def step_function(form: LinearRecurrence, inputs: RecurrentInputs) -> Step:
    """A function from a row's number and its parent's state, float32, to its output (heads, values) and its state.

    It is the definition of what recurrent.cpp computes. A row's bits do not depend on the rows beside it.
    """
    heads, dtype = inputs.v.shape[1], inputs.v.dtype
    q, k = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (inputs.q, inputs.k))
    v, g = inputs.v.float(), inputs.g.float()
    if form.qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if form.a is None:
        assert inputs.beta is not None
        beta, logarithm = inputs.beta.float(), g
    else:  # Mamba: the step size makes both the decay and the weight of the input
        beta = in_full_vectors(F.softplus, g if form.dt_bias is None else g + form.dt_bias)
        logarithm = beta.view(*beta.shape, *[1] * (form.a.dim() - 1)) * form.a
    decay = in_full_vectors(torch.exp, logarithm).view(*g.shape[:2], -1, 1)
    q, k = (form.scale * q)[..., None], k[..., None]
    gain = None if form.delta_rule else k * (v * beta[..., None])[:, :, None]

    def step(row: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = state.reshape(*state.shape[:2], -1) * decay[row]
        new = gain[row] if gain is not None else None
        if new is None:
            new = k[row] * ((v[row] - (s * k[row]).sum(1)) * beta[row, :, None])[:, None]
        s = s + new
        out = (s * q[row]).sum(1)
        out = out if form.d_skip is None else out + v[row] * form.d_skip[:, None]
        return out.to(dtype), s.view(state.shape)

    return step


_signature = cache(inspect.signature)


def bind_arguments(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, with defaults; those that the function has no name for are dropped."""
    signature = _signature(function)
    known = {name: value for name, value in named.items() if name in signature.parameters}
    given = signature.bind(*args, **known)
    given.apply_defaults()
    variadic = [p.name for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {name: value for name, value in given.arguments.items() if name not in variadic}
