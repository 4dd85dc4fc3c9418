"""Stands in for what SGLang's CPU engine has compiled (`sgl_kernel`), so that it runs where that is not installed.

Both attentions and the move of accepted KV are written here; what finds and fills places in tables, reads trees and
verifies them greedily is SGLang's own Triton kernels, interpreted. Where SGLang finds no AMX operators it takes its own
torch code for norms, activations, rotary embeddings and storing KV.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
import types

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
import transformers.image_utils  # noqa: F401  # before the stubs, which it would take for torchvision
from torch.nn.functional import scaled_dot_product_attention

STUBBED = ("sgl_kernel", "torchvision")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules in which every name exists; names without a stand-in raise when they are called."""

    def find_spec(self, name, path, target=None):
        del path, target
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STUBBED else None

    def create_module(self, spec):
        class Stub(types.ModuleType):
            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return STAND_INS.get(name) or Missing(f"{self.__name__}.{name}")

        return Stub(spec.name)

    def exec_module(self, module):
        pass


class Missing:
    """A name without a stand-in, which is imported and never called here."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args, **settings):
        raise NotImplementedError(f"{self._name} has no stand-in")


def assign_req_to_token_pool(rows, table, start, end, places, width):
    from sglang.srt.mem_cache.allocation import assign_req_to_token_pool as kernel

    kernel[(len(rows),)](rows, table, start, end, places, width, upper(rows))


def assign_extend_cache_locs(rows, table, start, end, places, width):
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs as kernel

    kernel[(len(rows),)](rows, table, start, end, places, width, upper(rows))


def fill_accept_out_cache_loc(accepted, places, found):
    from sglang.kernels.ops.speculative.eagle import fill_accept_out_cache_loc as kernel

    kernel[(accepted.numel(),)](accepted, places, found, upper(accepted))


def copy_all_layer_kv_cache(pointers, strides, to, source):
    """SGLang hands over addresses; its kernel, interpreted, takes most of a second."""
    to, source = to.numpy(), source.numpy()
    last = max(*to, *source) + 1
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = np.ctypeslib.as_array((ctypes.c_uint8 * (last * stride)).from_address(pointer)).reshape(last, stride)
        rows[to] = rows[source]


def reconstruct_indices_from_tree_mask(*arguments):
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_triton

    reconstruct_indices_from_tree_mask_triton(*arguments)


def verify_tree_greedy(**arguments):
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(**{name.replace("retrive", "retrieve"): value for name, value in arguments.items()})


def upper(values):
    return 1 << (values.numel() - 1).bit_length()


def decode_attention(
    q, keys, values, key_scale, value_scale, out, k, v, places, logits, table, rows, lengths, scale, *rest
):
    """One query of each request. Its key and value are stored here."""
    if k is not None:
        keys[places], values[places] = k.view(-1, *keys.shape[1:]), v.view(-1, *values.shape[1:])
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        attend(q[i : i + 1], keys, values, table[row, :length], None, scale, out[i : i + 1])


def extend_attention(
    q, k, v, out, keys, values, key_scale, value_scale, table, rows, lengths, new, start, longest, scale, cap, cross,
    window, encoder_lengths, sinks, tree_mask, causal,
):  # fmt: skip
    """The newest queries of each request, whose keys and values are stored already: in a row, or a tree's nodes."""
    for i, (row, length, count, first) in enumerate(torch.stack([rows, lengths, new, start], 1).tolist()):
        seen = torch.ones(count, length, dtype=torch.bool)
        if tree_mask is None:
            seen = seen.tril(length - count)
        else:
            seen[:, length - count :] = tree_mask[i * count * count : (i + 1) * count * count].view(count, count)
        chosen = slice(first, first + count)
        attend(q[chosen], keys, values, table[row, :length], seen, scale, out[chosen])


def attend(q, keys, values, places, seen, scale, out):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, keys[places], values[places]))
    found = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    out.copy_(found[0].transpose(0, 1))


STAND_INS = {
    "assign_req_to_token_pool_cpu": assign_req_to_token_pool,
    "assign_extend_cache_locs_cpu": assign_extend_cache_locs,
    "fill_accept_out_cache_loc_cpu": fill_accept_out_cache_loc,
    "copy_all_layer_kv_cache_cpu": copy_all_layer_kv_cache,
    "reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask,
    "verify_tree_greedy_cpu": verify_tree_greedy,
}
sys.meta_path.append(Stubs())
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention


def scheduler(*arguments, **settings):
    """A scheduler's process: with the stand-ins, as this module is imported there."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.managers.scheduler import run_scheduler_process

    # Where SGLang finds no AMX it takes its backend without masks for trees; the other one's Python has them.
    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]
    run_scheduler_process(*arguments, **settings)


def detokenizer(*arguments, **settings):
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **settings)


def engine(**settings):
    """SGLang's engine in float32, whose processes have the stand-ins."""
    from sglang.srt.entrypoints.engine import Engine

    class OnCPU(Engine):
        run_scheduler_process_func = staticmethod(scheduler)
        run_detokenizer_process_func = staticmethod(detokenizer)

    return OnCPU(device="cpu", dtype="float32", **settings)
