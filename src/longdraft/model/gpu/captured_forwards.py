"""Forwards captured as graphs, each with the buffers that it reads: a call fills the buffers, and replays the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.transfer import copy_to_buffer
from longdraft.memory.store import KVStore

# Logits (batch_size, query_len, vocabulary); by layer, hidden states (batch_size, query_len, hidden_size) and queries
# (batch_size, heads, query_len, head_dim).
ForwardResults = tuple[torch.Tensor | None, dict[int, torch.Tensor], dict[int, torch.Tensor]]
# A forward of the target.
ForwardFn = Callable[[KVStore, ForwardBatch], ForwardResults]
# A forward of a draft: takes input tensors and returns output tensors.
DraftForwardFn = Callable[..., tuple[torch.Tensor, ...]]
# Inputs of a round: a row of integers for each sequence, and vectors of noise of equal length, or none.
RoundInputs = tuple[Sequence[Sequence[int]], list[torch.Tensor]]
# Maps the rows, int64 (B, integers), and the noise, or None, to the results of the round.
RoundFn = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
Output = TypeVar("Output")


class GraphBackend(Protocol):
    """Captures graphs. Tests replace the backend."""

    def capture(self, forward: Callable[[], Output]) -> Callable[[], Output]:
        """Runs ``forward`` once as a warm-up, and captures a second run. Returns a function that replays the capture on
        the input tensors' current contents. Every replay overwrites the same output tensors, and returns them."""


class DraftGraph:
    """A draft's forward of one size as a graph, with the buffers that it reads."""

    output_bytes = 0

    def __init__(
        self, backend: GraphBackend, size: tuple[int, int], inputs: Sequence[torch.Tensor], forward: DraftForwardFn
    ) -> None:
        batch_size, padded_len = size
        query_len = inputs[0].shape[1]
        shapes = [
            (padded_len, *x.shape[2:]) if x.dim() > 1 and x.shape[1] == query_len else x.shape[1:] for x in inputs
        ]
        self._inputs = [x.new_zeros(batch_size, *shape) for x, shape in zip(inputs, shapes, strict=True)]
        self._fill(inputs)  # the warm-up writes KV at the positions in the buffers

        def run() -> tuple[torch.Tensor, ...]:
            out = forward(*self._inputs)
            self.output_bytes = _total_bytes(out)
            return out

        self._replay = backend.capture(run)

    def _fill(self, inputs: Sequence[torch.Tensor]) -> None:
        for buffer, x in zip(self._inputs, inputs, strict=True):
            unpadded = buffer[: x.shape[0]]
            (unpadded if x.dim() == 1 else unpadded[:, : x.shape[1]]).copy_(x)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self._fill(inputs)
        batch_size, query_len = inputs[0].shape[:2]
        # Copies, because the next replay overwrites the outputs.
        return tuple(x[:batch_size, :query_len].clone() for x in self._replay())


class RoundGraph:
    """A whole round as a graph, with the buffers that it reads."""

    output_bytes = 0  # some hundred bytes

    def __init__(
        self,
        backend: GraphBackend,
        inputs: RoundInputs,
        compute: RoundFn,
        device: torch.device,
    ) -> None:
        rows, noise = inputs
        self._rows = torch.zeros(len(rows), len(rows[0]), dtype=torch.long, device=device)
        self._noise = torch.stack(noise) if noise else None
        copy_to_buffer(self._rows, rows)  # the warm-up writes KV at the positions in the buffer
        self._replay = backend.capture(lambda: compute(self._rows, self._noise))

    def __call__(self, inputs: RoundInputs) -> torch.Tensor:
        rows, noise = inputs
        copy_to_buffer(self._rows, rows)
        if self._noise is not None:
            torch.stack(noise, out=self._noise)
        return self._replay()


class TargetGraph:
    """The target's forward of one size as a graph, with the buffers that it reads."""

    output_bytes = 0

    def __init__(
        self,
        backend: GraphBackend,
        store: KVStore,
        size: tuple[int, int, int],
        batch: ForwardBatch,
        forward: ForwardFn,
    ) -> None:
        (batch_size, query_len, kv_bound), device = size, store.device
        self._token_ids, self._positions = torch.zeros(2, batch_size, query_len, dtype=torch.long, device=device)
        diagonal = torch.eye(query_len, dtype=torch.bool, device=device)
        self._padding_mask = torch.nn.functional.pad(diagonal, (batch.tree_offset, 0))  # i sees i
        self._mask = self._padding_mask.repeat(batch_size, 1, 1)
        self._slots_and_lens = torch.zeros(3, batch_size, dtype=torch.int32, device=device)
        self._scratch_start = store.capacity - query_len
        slots_t, prefix_lens_t, write_starts_t = self._slots_and_lens.unbind()
        self._batch = ForwardBatch(
            # Invalid slots, so that an attention path that wrongly reads them on the host fails.
            slots=(-1,) * batch_size,
            prefix_lens=(min(kv_bound, store.capacity - batch.tree_offset - query_len),) * batch_size,
            query_len=query_len,
            mask=self._mask,
            slots_t=slots_t,
            prefix_lens_t=prefix_lens_t,
            token_ids=self._token_ids,
            positions=self._positions,
            tree_offset=batch.tree_offset,
            is_captured=True,
            write_starts_t=write_starts_t,
        )
        self._fill(batch)  # the warm-up writes KV at the positions in the buffers

        store_view = store.for_graph()

        def run() -> ForwardResults:
            logits, hidden, queries = out = forward(store_view, self._batch)
            self.output_bytes = _total_bytes(x for x in (logits, *hidden.values(), *queries.values()) if x is not None)
            return out

        self._replay = backend.capture(run)

    def _fill(self, batch: ForwardBatch) -> None:
        batch_size, query_len = batch.batch_size, batch.query_len
        assert batch.token_ids is not None and batch.positions is not None
        # Padding may have any token ids and positions.
        self._token_ids[:batch_size, :query_len] = batch.token_ids
        self._positions[:batch_size, :query_len] = batch.positions
        self._mask.copy_(self._padding_mask)
        mask = batch.tree_mask(0, self._mask.device) if batch.mask is None else batch.mask
        self._mask[:batch_size, :query_len, : batch.tree_len] = mask
        # Padding sequences have an empty prefix. They read finite entries at the start of the first sequence's slot.
        num_padding = len(self._token_ids) - batch_size
        slots, prefix_lens = [*batch.slots, *batch.slots[:1] * num_padding], [*batch.prefix_lens, *(0,) * num_padding]
        write_starts = [*(n + batch.tree_offset for n in batch.prefix_lens), *(self._scratch_start,) * num_padding]
        copy_to_buffer(self._slots_and_lens, [slots, prefix_lens, write_starts])

    def __call__(self, batch: ForwardBatch) -> ForwardResults:
        self._fill(batch)
        logits, hidden, queries = self._replay()
        batch_size, query_len = batch.batch_size, batch.query_len
        # Copies, because the next replay overwrites the outputs.
        return (
            None if logits is None else logits[:batch_size, :query_len].to(torch.float32, copy=True),
            _clone_layers({layer: h[:batch_size, :query_len] for layer, h in hidden.items()}),
            _clone_layers({layer: q[:batch_size, :, :query_len] for layer, q in queries.items()}),
        )


def _clone_layers(outputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies the layers' outputs, in one launch if all outputs have the same shape."""
    if len({x.shape for x in outputs.values()}) != 1:
        return {layer: x.clone() for layer, x in outputs.items()}
    return dict(zip(outputs, torch.stack(list(outputs.values())).unbind(), strict=True))


def _total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
