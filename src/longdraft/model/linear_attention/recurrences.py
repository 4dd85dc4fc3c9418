"""Describes the recurrences of transformers' recurrent layers in one common form, that of our kernel.

A mixer (the token mixer of a recurrent layer) calls a chunked function on many tokens. The functions in
:data:`RECURRENCES` are linear recurrences. At each token a state (heads, key size, value size) decays, and the product
of a key and a value is added. Our kernel computes this form token by token. :func:`step_function` is the reference for
the kernel, and computes where the kernel cannot run. Shapes: B sequences of T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from longdraft.model.layers.batch_invariant import in_full_vectors
from longdraft.native.recurrent import LinearRecurrence, RecurrentInputs

Arguments = Mapping[str, Any]  # a chunked function's arguments, by name
TokenInputs = tuple[torch.Tensor, ...]  # arguments with a value for each token, in the order of Recurrence.token_args

# Number of tokens whose decays are computed together. It limits memory, as a decay may be as large as a state.
_CHUNK_LEN = 64


@dataclass(frozen=True)
class Recurrence:
    """Describes a chunked function of transformers.

    Attributes:
        token_args: names of the arguments that have a value for each token.
        initial_state_arg: name of the argument for the initial state; None if there is none.
        return_state_arg: name of the flag for returning the final state; None if the state is always returned.
        dt_bias_arg: name of the argument for Mamba's bias of the step sizes; None for the gated delta rule.
        is_transposed: True if transformers stores a head's state as (value size, key size), the transpose of ours.
        per_channel: True for Mamba-1, where each channel is a head with one value, and the arguments in ``token_args``
            have tokens in the last dimension."""

    token_args: tuple[str, ...]
    initial_state_arg: str | None = None
    return_state_arg: str | None = None
    dt_bias_arg: str | None = None
    is_transposed: bool = False
    per_channel: bool = False

    def token_inputs(self, arguments: Arguments) -> TokenInputs:
        """Returns the arguments that have a value for each token, (B, T, ...)."""
        inputs = tuple(arguments[name] for name in self.token_args)
        return tuple(x.transpose(1, 2) for x in inputs) if self.per_channel else inputs

    def linear_recurrence(self, arguments: Arguments) -> LinearRecurrence:
        """Returns the parameters of the common form, which all tokens share."""
        if self.dt_bias_arg is None:
            scale = float(arguments["key"].shape[-1] ** -0.5)
            return LinearRecurrence(True, bool(arguments.get("use_qk_l2norm_in_kernel")), scale)
        parameters = (arguments.get(name) for name in ("A", self.dt_bias_arg, "D"))
        a, dt_bias, d_skip = (None if x is None else x.float().contiguous() for x in parameters)
        return LinearRecurrence(False, a=a, dt_bias=dt_bias, d_skip=d_skip)

    def kernel_inputs(self, inputs: TokenInputs) -> RecurrentInputs:
        """Converts the tokens' inputs to the common form. Mamba's B becomes the keys, its C the queries."""
        if self.dt_bias_arg is None:
            return RecurrentInputs(*inputs)
        x, dt, b, c = inputs
        if self.per_channel:
            x, b, c = x[..., None], b[:, None], c[:, None]
        return RecurrentInputs(c, b, x, dt, None)

    def original_result(self, arguments: Arguments, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        """Converts outputs (B, T, heads, value size), and the state if requested, to the chunked function's result."""
        if self.per_channel:
            outputs, gate = outputs[..., 0].transpose(1, 2), arguments.get("z")
            outputs = outputs if gate is None else outputs * in_full_vectors(F.silu, gate)
        state = state.transpose(1, 2)[None] if self.is_transposed else state[None]
        return (outputs, state) if self.return_state_arg is None or arguments.get(self.return_state_arg) else outputs

    def run(
        self, arguments: Arguments, inputs: TokenInputs, state: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Runs one sequence from ``state``. Returns the tokens' outputs (heads, value size) and the last state."""
        outputs: list[torch.Tensor] = []
        for chunk in zip(*(x.split(_CHUNK_LEN) for x in inputs), strict=True):
            step = step_function(self.linear_recurrence(arguments), self.kernel_inputs(chunk))
            for i in range(len(chunk[0])):
                out, state = step(i, state)
                outputs.append(out)
        return outputs, state


# Gated delta rule (gated DeltaNet, Kimi's delta attention): state (heads, key size, value size), log decay g, and beta,
# the weight of a value.
_DELTA = Recurrence(("query", "key", "value", "g", "beta"), initial_state_arg="initial_state")
# Selective scans: Mamba-2's state is (heads, state size, head size), Mamba's is (channels, state size).
_MAMBA_ARGS = ("hidden_states", "dt", "B", "C")
_MAMBA2 = Recurrence(_MAMBA_ARGS, "initial_states", "return_final_states", "dt_bias", is_transposed=True)
_MAMBA1 = Recurrence(_MAMBA_ARGS, None, "return_last_state", "delta_bias", per_channel=True)
# Name of transformers' chunked function -> its recurrence.
RECURRENCES: dict[str, Recurrence] = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": _MAMBA2,
    "mamba_selective_scan": _MAMBA1,
}
# (token index, state of the token's parent) -> (the token's output, the token's state).
StepFunction = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def step_function(recurrence: LinearRecurrence, inputs: RecurrentInputs) -> StepFunction:
    """Returns a function for one step of a sequence. A token's output is (heads, value size), its state float32.
    The function is the reference for the kernel in recurrent.cpp, and is batch invariant."""
    heads, dtype = inputs.v.shape[1], inputs.v.dtype
    q, k = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (inputs.q, inputs.k))
    v, g = inputs.v.float(), inputs.g.float()
    if recurrence.qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))  # transformers' epsilon
    if recurrence.a is None:
        assert inputs.beta is not None
        beta, log_decay = inputs.beta.float(), g
    else:  # Mamba: the step size sets both the decay and the value's weight
        beta = in_full_vectors(F.softplus, g if recurrence.dt_bias is None else g + recurrence.dt_bias)
        log_decay = beta.view(*beta.shape, *[1] * (recurrence.a.dim() - 1)) * recurrence.a
    decay = in_full_vectors(torch.exp, log_decay).view(*g.shape[:2], -1, 1)
    q, k = (recurrence.scale * q)[..., None], k[..., None]
    update = None if recurrence.delta_rule else k * (v * beta[..., None])[:, :, None]

    def step(token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = state.reshape(*state.shape[:2], -1) * decay[token]
        if update is None:  # the delta rule replaces the value that the state has for this key
            s = s + k[token] * ((v[token] - (s * k[token]).sum(1)) * beta[token, :, None])[:, None]
        else:
            s = s + update[token]
        out = (s * q[token]).sum(1)
        out = out if recurrence.d_skip is None else out + v[token] * recurrence.d_skip[:, None]
        return out.to(dtype), s.view(state.shape)

    return step


_signature = cache(inspect.signature)


def bind_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's arguments by name, with defaults. Drops those that only go into ``*args`` or ``**kwargs``."""
    signature = _signature(function)
    known_kwargs = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind(*args, **known_kwargs)
    bound.apply_defaults()
    variadic = [p.name for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {name: value for name, value in bound.arguments.items() if name not in variadic}
