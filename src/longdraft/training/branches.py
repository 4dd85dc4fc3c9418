"""Many answers to one passage, decoded together: a step reads the passage's KV once for all of them.

Speculation reads the weights less often at the price of arithmetic. Where hundreds of answers are wanted that is not
needed: dozens of rows share one reading of the weights, and share the KV of their passage too. A step computes one row
for each answer. Its attention has two parts: the passage's keys, in one product for all its answers, and the keys of
each answer's own tokens.

Meanwhile the features that a draft learns from are kept: the last layer's keys and values, hidden states, and the
likeliest tokens. So the target need not read the answers again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from longdraft import native
from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.errors import UnsupportedModelError
from longdraft.memory import sizes
from longdraft.memory.states import LayerStates
from longdraft.memory.store import KVShape, turned_rows
from longdraft.model.hosting import Hosted
from longdraft.model.outputs import not_a_number
from longdraft.model.runner import TargetRunner


@dataclass
class TokenFeatures:
    """Features of T consecutive tokens.

    Attributes:
        tokens: (T,) int64.
        rows: by name, ``keys`` and ``values`` (T, Hkv, d) of the last layer, and :func:`hidden_name` (T, hidden size).
        likeliest: (T,) the target's likeliest token after each token.
    """

    tokens: torch.Tensor
    rows: dict[str, torch.Tensor]
    likeliest: torch.Tensor


def hidden_name(layer: int) -> str:
    """The name of a decoder layer's output hidden states."""
    return f"hidden.{layer}"


class BranchStore:
    """Keys and values of a few passages and of the answers to them, and the attention that reads both.

    Every answer has a row; any row may hold an answer to any passage. ``capacity`` counts the tokens of a row without
    the passage's. Raises MemoryBudgetError if the rows do not fit the free memory.
    """

    states: tuple[LayerStates, ...] = ()

    def __init__(self, shape: KVShape, rows: int, capacity: int, device: torch.device) -> None:
        self.shape = shape
        sizes.require(shape.bytes_per_token * rows * capacity, device, f"The KV of {rows} answers")
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        self.keys = turned_rows(size, shape.dtype, device)
        # Zeros, because :func:`continued` multiplies unwritten rows by 0, and 0 * NaN is NaN.
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        self.lengths = [0] * rows
        # For each passage and layer: keys (Hkv, d, L), transposed for the product, and values (Hkv, L, d).
        self.prefixes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._reading: int | None = None
        self._layer = 0
        # Each passage of a step, and its rows among the rows of the step.
        self._parts: list[tuple[int, slice]] = []
        self._rows = self._ends = torch.zeros(0, dtype=torch.long)
        self._longest = 0

    def read_into(self, passage: int) -> None:
        """Announces a forward that reads the passage of this number."""
        self._reading, self.prefixes[passage] = passage, []

    def step(self, rows: Sequence[int], passages: Sequence[int]) -> torch.Tensor:
        """Announces a forward that appends one token to each of these rows.

        Lengths are kept on the host, which waits for the device in no layer.

        Args:
            passages: the passage of each row; the rows of a passage follow each other.

        Returns:
            The rows as a tensor on the device.
        """
        ends = [self.lengths[row] + 1 for row in rows]
        self._reading, self._parts, self._longest = None, [], max(ends)
        self._rows, self._ends = torch.tensor([rows, ends], device=self.keys.device)
        start = 0
        for passage, count in Counter(passages).items():
            self._parts.append((passage, slice(start, start + count)))
            start += count
        return self._rows

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, block: Block) -> None:
        """Stores a layer's keys and values (B, Hkv, T, d)."""
        self._layer = layer
        if self._reading is not None:
            self.prefixes[self._reading].append((keys[0].transpose(1, 2).contiguous(), values[0].contiguous()))
            return
        at = self._ends - 1
        self.keys[layer, self._rows, :, at] = keys[:, :, 0]
        self.values[layer, self._rows, :, at] = values[:, :, 0]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the rows (rows, Hkv, capacity, d), without the passages'."""
        return self.keys[index], self.values[index]

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block: Block,
        scale: float,
        scoring: Scoring = PLAIN,
        /,
    ) -> torch.Tensor:
        """Attention of the forward that :meth:`read_into` or :meth:`step` announced; q (B, Hq, T, d) -> the same.

        Raises:
            UnsupportedModelError: the layer caps its scores or has sinks.
        """
        if scoring is not PLAIN:
            raise UnsupportedModelError("Branches are written by models whose scores have no soft cap and no sinks.")
        if self._reading is not None:
            turned, v = self.prefixes[self._reading][self._layer]
            # Repeated, because for grouped heads torch computes all scores, three times slower on a CPU.
            times = q.shape[1] // len(v)
            k, v = (x.repeat_interleave(times, 0)[None] for x in (turned.transpose(1, 2), v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        batch, heads, _, d = q.shape
        grouped = q.view(batch, self.shape.kv_heads, -1, d)
        part = self._of_passages(grouped * scale)
        grouped = grouped.float()
        kernels = native.kernels()
        fits = kernels is not None and native.fits(grouped, keys[0], values[0])
        attend = kernels.attend_on if kernels and fits else partial(continued, longest=self._longest)
        out = attend(grouped, keys, values, self._rows, self._ends, scale, part)
        return out.to(q.dtype).view(batch, heads, 1, d)

    def _of_passages(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention of the scaled queries q (B, Hkv, G, d) to the passages, before it is divided by the weights' sum.

        Products have the model's dtype, as in its own attention; sums and results are float32.

        Returns:
            Mixed values (B, Hkv, G, d), the largest score and the sum of the weights (B, Hkv, G).
        """
        out = torch.empty(q.shape, device=q.device)
        high, total = torch.empty(2, *q.shape[:3], device=q.device)
        kv_heads, group, d = q.shape[1:]
        for passage, part in self._parts:
            keys, values = self.prefixes[passage][self._layer]
            together = q[part].transpose(0, 1).reshape(kv_heads, -1, d)
            scores = together @ keys
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            shape = (kv_heads, part.stop - part.start, group, -1)
            out[part] = (weights @ values).view(shape).transpose(0, 1)
            high[part] = largest.view(shape)[..., 0].transpose(0, 1)
            total[part] = weights.sum(-1, dtype=torch.float32).view(shape[:3]).transpose(0, 1)
        return out, high, total


def continued(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    part: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    longest: int,
) -> torch.Tensor:
    """:meth:`longdraft.native.Kernels.attend_on` in torch. ``longest``: the largest of ``ends``."""
    out, high, total = part
    scores = q @ k[slots, :, :longest].float().transpose(2, 3) * scale
    behind = torch.arange(longest, device=q.device) >= ends[:, None]
    scores = scores.masked_fill_(behind[:, None, None], float("-inf"))
    largest = torch.maximum(scores.amax(-1), high)
    weights, kept = (scores - largest[..., None]).exp_(), (high - largest).exp_()
    mixed = weights @ v[slots, :, :longest].float() + out * kept[..., None]
    return mixed / (total * kept + weights.sum(-1))[..., None]


class Branches:
    """Decodes answers to passages, one token of each at a step.

    Args:
        rows, capacity: see :class:`BranchStore`.
        layers: decoder layers whose output hidden states are kept (0 is the first); None keeps no features.
    """

    def __init__(self, runner: TargetRunner, rows: int, capacity: int, layers: Sequence[int] | None = None) -> None:
        self.runner, self.layers, self.keeps = runner, tuple(layers or ()), layers is not None
        if runner.twin.layout.windows:
            raise UnsupportedModelError("Branches are written by models whose layers all see the whole text.")
        device = runner.device
        self.store = BranchStore(runner.kv_shape, rows, capacity, device)
        self._prefix_lengths: dict[int, int] = {}
        if self.keeps:
            width = len(self.layers) * runner.parts.hidden_size
            self._hidden = torch.zeros(rows, capacity, width, dtype=runner.kv_shape.dtype, device=device)
            self._likeliest = torch.zeros(rows, capacity, dtype=torch.long, device=device)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, head: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Logits (B, T, vocabulary), or None without ``head``, and hidden states of ``layers`` side by side."""
        count, size = tokens.shape
        device = tokens.device
        block = Block.make(
            range(count), [0] * count, size, device=device, prompt=True, tokens=tokens, positions=positions
        )
        layout = self.runner.twin.layout
        hosted = Hosted(self.store, block, self.store.attend, layout, hidden_layers=frozenset(self.layers))
        with self.runner.lock:
            out = self.runner.run(hosted, head)
        none = torch.empty(count, size, 0, dtype=self.runner.kv_shape.dtype, device=device)
        hidden = torch.cat([none, *(hosted.hidden[layer] for layer in self.layers)], -1)
        return out.logits if head else None, hidden

    @torch.inference_mode()
    def read(self, passage: int, tokens: Sequence[int]) -> TokenFeatures | None:
        """Reads the passage of this number; returns its features, if kept."""
        self._prefix_lengths[passage] = len(tokens)
        ids = torch.tensor(tokens, device=self.runner.device)
        self.store.read_into(passage)
        logits, hidden = self._forward(ids[None], torch.arange(len(ids), device=ids.device)[None], head=self.keeps)
        if logits is None:
            return None
        keys, values = self.store.prefixes[passage][-1]
        kept = {"keys": keys.permute(2, 0, 1).contiguous(), "values": values.transpose(0, 1).contiguous()}
        return TokenFeatures(ids, kept | self._by_layer(hidden[0]), logits[0].argmax(-1))

    def _by_layer(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = hidden.chunk(len(self.layers), -1) if self.layers else ()
        return {hidden_name(layer): part.clone() for layer, part in zip(self.layers, parts, strict=True)}

    def forget(self, passage: int) -> None:
        """Frees the memory of a passage."""
        del self.store.prefixes[passage], self._prefix_lengths[passage]

    def clear(self, row: int) -> None:
        self.store.lengths[row] = 0

    @torch.inference_mode()
    def step(self, rows: Sequence[int], passages: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Appends a token to each of these rows; returns logits (rows, vocabulary).

        Args:
            passages: the passage of each row; the rows of a passage follow each other.

        Raises:
            NumericalError: a logit is NaN.
        """
        at = self.store.step(rows, passages)
        lengths = [self.store.lengths[row] for row in rows]
        starts = [self._prefix_lengths[passage] for passage in passages]
        positions = [start + length for start, length in zip(starts, lengths, strict=True)]
        ids, positions_t, places = torch.tensor([tokens, positions, lengths], device=self.runner.device)
        every, hidden = self._forward(ids[:, None], positions_t[:, None], head=True)
        assert every is not None
        logits = every[:, 0]
        if bool(torch.isnan(logits.amax())):
            raise not_a_number(self.runner.model)
        if self.keeps:
            self._hidden[at, places] = hidden[:, 0]
            self._likeliest[at, places] = top_of(logits, 1).indices[:, 0]
        for row in rows:
            self.store.lengths[row] += 1
        return logits

    def features(self, row: int, tokens: Sequence[int]) -> TokenFeatures:
        """A row's tokens with their features."""
        size = len(tokens)
        keys, values = (x[-1, row, :, :size].transpose(0, 1).contiguous() for x in (self.store.keys, self.store.values))
        rows = {"keys": keys, "values": values} | self._by_layer(self._hidden[row, :size])
        return TokenFeatures(torch.tensor(tokens), rows, self._likeliest[row, :size].clone())


def top_of(logits: torch.Tensor, count: int, width: int = 256) -> torch.return_types.topk:
    """``logits.topk(count)``, faster for long rows: it searches only the ``count`` pieces with the largest maxima."""
    rows, size = logits.shape
    if size % width or size // width < 2 * count:
        return logits.topk(count)
    pieces = logits.view(rows, -1, width)
    chosen = pieces.amax(-1).topk(count).indices
    top = pieces.gather(1, chosen[..., None].expand(-1, -1, width)).flatten(1).topk(count)
    at = chosen.gather(1, top.indices // width) * width + top.indices % width
    return torch.return_types.topk((top.values, at))


def sample(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """A token for each row: the likeliest at temperature 0, else sampled by inverting the distribution at ``uniform``.

    Args:
        logits: (rows, vocabulary). temperatures: (rows,).
        uniform: (rows,) in [0, 1), float64, because in float32 a number may round to 1.
    """
    tokens = top_of(logits, 1).indices[:, 0]
    warm = (temperatures > 0).nonzero()[:, 0]
    if len(warm):
        p = torch.softmax(logits[warm] / temperatures[warm, None].float(), -1)
        mass = p.cumsum(-1, dtype=torch.float64)
        sampled = torch.searchsorted(mass, uniform[warm, None] * mass[:, -1:], right=True)
        tokens[warm] = sampled[:, 0].clamp_max(logits.shape[-1] - 1)
    return tokens
