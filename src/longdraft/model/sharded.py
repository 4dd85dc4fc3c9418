"""A target whose weights are shared out by transformers' tensor parallelism, one process a share.

Each process runs the same program on the same requests. transformers' hooks sum and gather what its layers compute, so
embeddings, hidden states and logits are whole and the same everywhere; a process has the queries, keys and values of
its own heads alone, and its store holds these. What is left to do: to gather what a draft computes with them, and to
see to it that all processes take the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.attention.prefix import PrefixAttend
from longdraft.errors import CapabilityError, MemoryBudgetError
from longdraft.memory.store import KVShape
from longdraft.model.few_rows import FewRowsLinear, is_shared_out
from longdraft.native import Stored
from longdraft.native.rounded import Rounded

_LOAD = 'AutoModelForCausalLM.from_pretrained(..., distributed_config=DistributedConfig(tp_plan="auto"))'
# Whose output, shared out, is a share of the attention heads.
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_DIGEST = 2**61 - 1


@dataclass(frozen=True)
class Share:
    """One process's share of a target.

    Attributes:
        rank, size: which share, of how many. group: the processes that have one. device: where they exchange tensors.
        heads: attention heads are shared out too; else each process has all of them.
    """

    rank: int
    size: int
    group: Any
    device: torch.device
    heads: bool

    def of_heads(self, whole: KVShape) -> KVShape:
        """The shape of this process's KV.

        Raises:
            CapabilityError: the heads cannot be shared out evenly.
        """
        if not self.heads:
            return whole
        if whole.kv_heads % self.size:
            raise CapabilityError(
                f"The model has {whole.kv_heads} KV heads, which {self.size} processes cannot share out evenly: start "
                "as many as divide them."
            )
        return replace(whole, kv_heads=whole.kv_heads // self.size)

    def attending(self, attend: PrefixAttend) -> PrefixAttend:
        """Prefix attention of the queries of all heads, each process computing its own heads'."""
        if not self.heads:
            return attend

        def shared(
            q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float
        ) -> torch.Tensor:
            own = q.chunk(self.size, dim=1)[self.rank]
            return self._gathered(attend(own, keys, values, block, scale), dim=1)

        return shared

    def first(self, own: torch.Tensor) -> torch.Tensor:
        """The first process's tensor, of everybody's shape and dtype."""
        found = own.to(self.device, copy=True).contiguous()
        torch.distributed.broadcast(found, torch.distributed.get_global_rank(self.group, 0), self.group)
        return found.to(own.device)

    def check_same(self, block: Block) -> None:
        """Looks whether all processes are about to compute the same block: waits for the device.

        Raises:
            CapabilityError: in all of them, where they are not.
        """
        digest = torch.tensor(hash((block.slots, block.lengths, block.size, block.offset)), device=self.device)
        for part in (block.tokens, block.positions, block.mask):
            if part is not None:
                places = torch.arange(1, 2 * part.numel(), 2, device=part.device)
                digest = 31 * digest + ((part.flatten().long() + 1) * places * places).sum()
        if not self._agree(digest % _DIGEST):
            raise CapabilityError(
                "The processes that share the model no longer decode the same. Give all of them the same requests, in "
                "the same order, with the same options, and start them on machines and devices of one kind."
            )

    @staticmethod
    def check_looks(looks: bool) -> None:
        """Refuses a run that chooses rows of the KV by what heads look at.

        Args:
            looks: whether it does.

        Raises:
            CapabilityError: naming what does without.
        """
        if looks:
            raise CapabilityError(
                "This method drafts or verifies on a part of the KV cache, and each process of a sharded model would "
                "choose another: take ar, prompt-lookup, longspec or eagle3, without retrieval."
            )

    @staticmethod
    def check_plan(plan: str | None) -> None:
        """Raises CapabilityError where rounds were asked to be planned: they never are."""
        if plan == "auto":
            raise CapabilityError(
                "Rounds are planned by a clock, and each process of a sharded model has another: leave plan out, or "
                'give plan="fixed".'
            )

    @contextmanager
    def room(self) -> Iterator[None]:
        """Memory that is taken inside is taken in all processes, or in none.

        Raises:
            MemoryBudgetError: in all of them, where it does not fit one.
        """
        failed: MemoryBudgetError | None = None
        try:
            yield
        except MemoryBudgetError as error:
            failed = error
        fits = self._agree(torch.tensor(0 if failed is None else 1 + self.rank, device=self.device))
        if failed is not None:
            raise failed
        if not fits:
            raise MemoryBudgetError("Another of the processes that share the model has no memory for this KV cache.")

    def _agree(self, number: torch.Tensor) -> bool:
        """Whether all processes have the same number."""
        both = torch.stack([number, -number])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, self.group)
        return not bool(both.sum())

    def _gathered(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        own = own.contiguous()
        shares = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(shares, own, self.group)
        return torch.cat(shares, dim)


def share_of(model: PreTrainedModel) -> Share | None:
    """This process's share of a model; None: it has all of it.

    Raises:
        CapabilityError: it was shared out in a way that is not hosted.
    """
    found = {p.device_mesh for p in model.parameters() if is_shared_out(p)}
    if not found:
        return None
    name = type(model).__name__
    mesh, *others = found
    if (getattr(model, "_tp_size", None) or 1) < 2 or others or mesh.ndim != 1:
        raise CapabilityError(
            f"{name} was shared out to several processes, and longdraft hosts tensor parallelism by transformers "
            f"alone: load it with {_LOAD}."
        )
    plan = model.tp_plan
    if "sequence_parallel" in plan.values():
        raise CapabilityError(f"{name} shares out the tokens of a text, which longdraft does not host: {_LOAD}.")
    heads = any(layer.rsplit(".", 1)[-1] in _KEYS and style == "colwise" for layer, style in plan.items())
    return Share(mesh.get_local_rank(), mesh.size(), mesh.get_group(), model.device, heads)


class GatheredLinear:
    """A product with a matrix whose rows are shared out, as ``F.linear``.

    Args:
        weight: (out, in), a DTensor.
    """

    def __init__(self, weight: Any) -> None:
        self._weight, self._own = weight, weight.to_local()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), the same in all processes."""
        from torch.distributed.tensor import DTensor, Shard

        own = F.linear(x, self._own)
        shape = torch.Size((*own.shape[:-1], self._weight.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        # Shares may be of several sizes.
        shared = DTensor.from_local(
            own, self._weight.device_mesh, [Shard(own.dim() - 1)], run_check=False, shape=shape, stride=stride
        )
        return shared.full_tensor()


def product(weight: torch.Tensor | Stored | Rounded) -> Callable[[torch.Tensor], torch.Tensor]:
    """What multiplies with a matrix (out, in) for few rows, wherever its rows are."""
    return GatheredLinear(weight) if is_shared_out(weight) else FewRowsLinear(weight)


def whole(weight: torch.Tensor) -> torch.Tensor:
    """All of a matrix, gathered where it was shared out: all processes ask for it."""
    found: torch.Tensor = weight.full_tensor() if is_shared_out(weight) else weight  # type: ignore[attr-defined]
    return found


def local(weight: torch.Tensor) -> torch.Tensor:
    """This process's share of a matrix, where it lies."""
    found: torch.Tensor = weight.to_local() if is_shared_out(weight) else weight  # type: ignore[attr-defined]
    return found
