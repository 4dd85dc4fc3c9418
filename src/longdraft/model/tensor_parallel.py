"""A target whose weights are shared out to several processes by transformers' tensor parallelism.

Each process runs the same program on the same requests. transformers' hooks sum and gather the results of its layers,
so embeddings, hidden states and logits are complete and equal in all processes. A process computes and stores the
queries, keys and values of its own heads only. This file gathers what a draft computes with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.prefix import PrefixAttentionFunction
from longdraft.errors import CapabilityError
from longdraft.memory.store import KVShape
from longdraft.model.skinny_gemm import is_dtensor, skinny_gemm
from longdraft.native.boundary import CPU_INT64

_LOAD = 'AutoModelForCausalLM.from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))'
# Layers whose output, if it is shared out, is a share of the attention heads.
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_shares: WeakKeyDictionary[PreTrainedModel, TPRank] = WeakKeyDictionary()


@dataclass
class TPRank:
    """One process's share of a target.

    Attributes:
        rank, size: number of this share, and number of shares.
        group: the processes with a share.
        device: device on which they exchange tensors.
        heads: True if attention heads are shared out too; otherwise each process has all of them.
    """

    rank: int
    world_size: int
    group: Any
    device: torch.device
    shards_heads: bool
    _random: Random = field(default_factory=Random, init=False, repr=False, compare=False)  # the same in all

    def local_kv_shape(self, shape: KVShape) -> KVShape:
        """The shape of this process's KV.

        Raises:
            CapabilityError: the heads cannot be shared out evenly.
        """
        if not self.shards_heads:
            return shape
        if shape.kv_heads % self.world_size:
            raise CapabilityError(
                f"The model has {shape.kv_heads} KV heads, which {self.world_size} processes cannot share out evenly: start "
                "as many as divide them."
            )
        return replace(shape, kv_heads=shape.kv_heads // self.world_size)

    def gathered_attention(self, attend: PrefixAttentionFunction) -> PrefixAttentionFunction:
        """Prefix attention for queries of all heads, of which each process computes its share."""
        if not self.shards_heads:
            return attend

        def shared(
            q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: ForwardBatch, scale: float
        ) -> torch.Tensor:
            out = attend(q.chunk(self.world_size, dim=1)[self.rank], keys, values, block, scale).contiguous()
            shares = [torch.empty_like(out) for _ in range(self.world_size)]
            torch.distributed.all_gather(shares, out, self.group)
            return torch.cat(shares, dim=1)

        return shared

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first process's tensor; all processes give one of the same shape and dtype."""
        sent = tensor.to(self.device, copy=True).contiguous()
        torch.distributed.broadcast(sent, torch.distributed.get_global_rank(self.group, 0), self.group)
        return sent.to(tensor.device)

    def shared_seed(self) -> int:
        """A seed for a request without one. Nothing is exchanged, as others may have been asked for something else."""
        return self._random.getrandbits(32)

    @staticmethod
    def check_views(scores_attention: bool) -> None:
        """Raises CapabilityError if a run chooses rows of the KV by attention scores (``scores_attention``)."""
        if scores_attention:
            raise CapabilityError(
                "This method drafts or verifies on a part of the KV cache, and each process of a sharded model would "
                "choose another: take ar, prompt-lookup, longspec or eagle3, without retrieval."
            )

    @staticmethod
    def check_plan(plan: object) -> None:
        """Raises CapabilityError for a run with a planner, which a sharded model never has."""
        if plan not in (None, "fixed"):
            raise CapabilityError(
                "Rounds are planned by a clock, and each process of a sharded model has another: leave plan out, or "
                'give plan="fixed".'
            )


def tp_rank_of(model: PreTrainedModel) -> TPRank | None:
    """This process's share of a model, the same for all who ask; None if the process has all of it.

    Raises:
        CapabilityError: the model was shared out in a way that is not supported.
    """
    meshes = {p.device_mesh for p in model.parameters() if is_dtensor(p)}
    if not meshes:
        return None
    if model in _shares:
        return _shares[model]
    name = type(model).__name__
    mesh, *others = meshes
    if (getattr(model, "_tp_size", None) or 1) < 2 or others or mesh.ndim != 1:
        raise CapabilityError(
            f"{name} was shared out to several processes, and longdraft hosts tensor parallelism by transformers "
            f"alone: load it with {_LOAD}."
        )
    plan = model.tp_plan
    if "sequence_parallel" in plan.values():
        raise CapabilityError(f"{name} shares out the tokens of a text, which longdraft does not host: {_LOAD}.")
    heads = any(layer.rsplit(".", 1)[-1] in _KEYS and style == "colwise" for layer, style in plan.items())
    share = TPRank(mesh.get_local_rank(), mesh.size(), mesh.get_group(), model.device, heads)
    share._random.seed(int(share.broadcast(torch.tensor(share.shared_seed(), **CPU_INT64))))
    _shares[model] = share
    return share


def parallel_linear(weight: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that multiplies few rows with a matrix (out, in), as ``F.linear``.

    Rows of the matrix may be shared out (a DTensor): the result is the same in all processes.
    """
    if not is_dtensor(weight):
        return partial(skinny_gemm, weight=weight)
    from torch.distributed.tensor import DTensor, Shard

    def gathered(x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, weight.to_local())
        shape = torch.Size((*out.shape[:-1], weight.shape[0]))
        stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
        # With shape and stride, as shares may differ in size.
        places = [Shard(out.dim() - 1)]
        shared = DTensor.from_local(out, weight.device_mesh, places, run_check=False, shape=shape, stride=stride)
        return shared.full_tensor()

    return gathered


def full_tensor(weight: Any) -> torch.Tensor:
    """A complete matrix, gathered if it is shared out; all processes call this together."""
    gathered: torch.Tensor = weight.full_tensor() if is_dtensor(weight) else weight
    return gathered


def local_tensor(weight: Any) -> torch.Tensor:
    """This process's share of a matrix, without a copy."""
    share: torch.Tensor = weight.to_local() if is_dtensor(weight) else weight
    return share
