"""Tensor parallelism: transformers shards a target's weights over several processes.

All processes run one program on the same requests. transformers' hooks all-reduce and gather the results of layers, so
embeddings, hidden states and logits are complete and equal in all processes. Each process computes attention and keeps
KV for some of the heads. Drafts need all heads, so their attention to the target's prefix is gathered here.
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
from longdraft.model.layers.skinny_gemm import is_dtensor, skinny_gemm
from longdraft.model.quant.planes import Planes, PlanesLinear
from longdraft.native.boundary import CPU_INT64

# The call that loads a sharded model, for messages.
_LOAD_CALL = 'AutoModelForCausalLM.from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))'
# Attention heads are sharded if transformers' plan shards one of these projections by columns.
_HEAD_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_ranks: WeakKeyDictionary[PreTrainedModel, TPRank] = WeakKeyDictionary()


@dataclass
class TPRank:
    """This process's rank in a tensor parallel target.

    Attributes:
        rank: this process's rank in the group.
        world_size: the number of processes.
        group: the process group of torch.distributed.
        device: the device on which the processes exchange tensors.
        shards_heads: True if attention heads are sharded; False if each process has all heads."""

    rank: int
    world_size: int
    group: Any
    device: torch.device
    shards_heads: bool
    # Gives the same numbers in all processes, as tp_rank_of seeds it equally.
    _random: Random = field(default_factory=Random, init=False, repr=False, compare=False)

    def local_kv_shape(self, shape: KVShape) -> KVShape:
        """Returns the shape of this process's KV, from the shape of all heads' KV.
        Raises CapabilityError if the KV heads are not divisible by the number of processes."""
        if not self.shards_heads:
            return shape
        if shape.kv_heads % self.world_size:
            raise CapabilityError(
                f"The model has {shape.kv_heads} KV heads, which {self.world_size} processes cannot share out evenly: "
                "start as many as divide them."
            )
        return replace(shape, kv_heads=shape.kv_heads // self.world_size)

    def gathered_attention(self, attend: PrefixAttentionFunction) -> PrefixAttentionFunction:
        """Wraps prefix attention to take and return all heads: each process computes its heads, then all-gather."""
        if not self.shards_heads:
            return attend

        def gathered(
            q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: ForwardBatch, scale: float
        ) -> torch.Tensor:
            out = attend(q.chunk(self.world_size, dim=1)[self.rank], keys, values, batch, scale).contiguous()
            parts = [torch.empty_like(out) for _ in range(self.world_size)]
            torch.distributed.all_gather(parts, out, self.group)
            return torch.cat(parts, dim=1)

        return gathered

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's tensor in all processes. The others pass a tensor of the same shape and dtype."""
        buffer = tensor.to(self.device, copy=True).contiguous()
        torch.distributed.broadcast(buffer, torch.distributed.get_global_rank(self.group, 0), self.group)
        return buffer.to(tensor.device)

    def shared_seed(self) -> int:
        """Returns a seed for a request without one. All processes get the same seed, without communication."""
        return self._random.getrandbits(32)

    @staticmethod
    def check_views(scores_attention: bool) -> None:
        """Raises CapabilityError if a run chooses KV entries by attention scores (``scores_attention``)."""
        if scores_attention:
            raise CapabilityError(
                "This method drafts or verifies on a part of the KV cache, and each process of a sharded model would "
                "choose another part: take ar, prompt-lookup, longspec or eagle3, without retrieval."
            )

    @staticmethod
    def check_plan(plan: object) -> None:
        """Raises CapabilityError for a run whose option ``plan`` lets a planner size the trees."""
        if plan not in (None, "fixed"):
            raise CapabilityError(
                "A planner measures times, which differ between the processes of a sharded model: leave plan out, or "
                'give plan="fixed".'
            )


def tp_rank_of(model: PreTrainedModel) -> TPRank | None:
    """Returns this process's rank, one object for each model; None if the model is not sharded.
    Raises CapabilityError if the model is sharded in a way that is not supported."""
    meshes = {p.device_mesh for p in model.parameters() if is_dtensor(p)}
    if not meshes:
        return None
    if model in _ranks:
        return _ranks[model]
    name = type(model).__name__
    mesh, *others = meshes
    if (getattr(model, "_tp_size", None) or 1) < 2 or others or mesh.ndim != 1:
        raise CapabilityError(
            f"{name} is sharded over several processes in a way that longdraft does not host. Tensor parallelism by "
            f"transformers is: load the model with {_LOAD_CALL}."
        )
    tp_plan = model.tp_plan  # name of a module -> how transformers shards it
    if "sequence_parallel" in tp_plan.values():
        raise CapabilityError(f"{name} has a plan with sequence_parallel, which longdraft does not host: {_LOAD_CALL}.")
    shards_heads = any(n.rsplit(".", 1)[-1] in _HEAD_PROJECTIONS and style == "colwise" for n, style in tp_plan.items())
    tp_rank = TPRank(mesh.get_local_rank(), mesh.size(), mesh.get_group(), model.device, shards_heads)
    tp_rank._random.seed(int(tp_rank.broadcast(torch.tensor(tp_rank.shared_seed(), **CPU_INT64))))
    _ranks[model] = tp_rank
    return tp_rank


def parallel_linear(weight: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns ``F.linear`` for a few tokens with ``weight`` (out, in). All processes get the complete result.
    ``weight`` may be a DTensor that is sharded by rows, or a quantised matrix's planes on a GPU."""
    if isinstance(weight, Planes):
        return PlanesLinear(weight).forward
    if not is_dtensor(weight):
        return partial(skinny_gemm, weight=weight)
    from torch.distributed.tensor import DTensor, Shard

    def linear(x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, weight.to_local())
        shape = torch.Size((*out.shape[:-1], weight.shape[0]))
        # Shape and strides of the complete tensor are passed because shards may differ in size.
        stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
        placements = [Shard(out.dim() - 1)]
        sharded = DTensor.from_local(out, weight.device_mesh, placements, run_check=False, shape=shape, stride=stride)
        return sharded.full_tensor()

    return linear


def full_tensor(weight: Any) -> torch.Tensor:
    """Returns the complete matrix. If it is sharded, it is gathered, so all processes have to call this."""
    gathered: torch.Tensor = weight.full_tensor() if is_dtensor(weight) else weight
    return gathered


def local_tensor(weight: Any) -> torch.Tensor:
    """Returns this process's shard of a matrix, without a copy, or the matrix if it is not sharded."""
    shard: torch.Tensor = weight.to_local() if is_dtensor(weight) else weight
    return shard
