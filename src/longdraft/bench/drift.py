"""Drift: how far hidden states that partial verification computed lie from the exact ones (SpecPV, section 3.3).

A run's own forwards are listened to, so its trees, its blocks and its refreshes are the real ones. The exact states
come from one full forward over the text that the run wrote.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from longdraft.attention.block import Block
from longdraft.bench.exact_forwards import read
from longdraft.engine.accept import Accepted
from longdraft.engine.event import Event
from longdraft.engine.partial import SpecPV
from longdraft.engine.schedule import Verified
from longdraft.memory.prompt_cache import PromptCache
from longdraft.memory.store import KVStore
from longdraft.model.runner import NO_TAPS, Taps, TargetOutput, TargetRunner
from longdraft.views.view import View


class Listener(TargetRunner):
    """A hosted target that remembers hidden states of its last forward.

    Args:
        runner: the target; everything it has is shared.
        layers: the layers listened to; None: those that EAGLE-3 reads (outputs of 1, L/2-1 and L-4), and the last.

    Attributes:
        heard: layer -> (B, T, hidden size).
    """

    def __init__(self, runner: TargetRunner, layers: tuple[int, ...] | None = None) -> None:
        vars(self).update(vars(runner))
        depth = self.kv_shape.layers
        wanted = (1, depth // 2 - 1, depth - 4, depth - 1) if layers is None else layers
        self.layers = tuple(sorted({layer for layer in wanted if 0 <= layer < depth}))
        self.heard: dict[int, torch.Tensor] = {}

    def forward(self, block: Block, store: KVStore, *, taps: Taps = NO_TAPS, **options: Any) -> TargetOutput:
        taps = replace(taps, hidden=tuple({*taps.hidden, *self.layers}))
        out = super().forward(block, store, taps=taps, **options)
        self.heard = {layer: out.hidden[layer] for layer in self.layers}
        return out

    def hidden(self, rows: SequenceOf[int]) -> torch.Tensor:
        """(layers, rows, hidden size) float32 of the first sequence of the last forward."""
        return torch.stack([self.heard[layer][0, list(rows)] for layer in self.layers]).float()


@dataclass(frozen=True)
class Computed:
    """Tokens that a round computed and accepted.

    Attributes:
        position: of the first of them in the text.
        distance: of the first of them from the last full pass; 0 for all of them where a full pass computed them.
        hidden: (layers, tokens, hidden size).
    """

    position: int
    distance: int
    hidden: torch.Tensor


class RecordedSpecPV(SpecPV):
    """SpecPV that keeps the hidden states of the tokens that it accepts. For runs of one sequence.

    Args:
        listener: the runner of the run.
    """

    def __init__(self, view: View, listener: Listener) -> None:
        super().__init__(view)
        self._listener = listener
        self.computed: list[Computed] = []

    def commit(self, verified: Verified, accepted: Accepted) -> Event:
        slot = verified.sequence.slot
        waiting = self.partial.waiting(slot)
        partial = verified.mode == "partial"
        # A full pass has what waits before the tree.
        rows = [node + (0 if partial else waiting) for node in accepted.path]
        position = self.store.lengths[slot] + waiting
        self.computed.append(Computed(position, waiting + 1 if partial else 0, self._listener.hidden(rows)))
        return super().commit(verified, accepted)


@dataclass(frozen=True)
class Drift:
    """One token's.

    Attributes:
        distance: tokens since the last full pass, 1 for the first; 0: computed by a full pass.
        cosines: one a layer, of its hidden state to the exact one.
    """

    distance: int
    cosines: tuple[float, ...]


def drift(
    listener: Listener, cache: PromptCache, prompt: SequenceOf[int], output: SequenceOf[int], computed: list[Computed]
) -> list[Drift]:
    """Compares what a run computed with one full forward over its text.

    Args:
        cache: holds the prompt's KV, with room for the output.
        output: what the run wrote.
    """
    exact, first = exact_hidden(listener, cache, prompt, output), len(prompt) - 1
    found = []
    for part in computed:
        own = exact[:, part.position - first : part.position - first + part.hidden.shape[1]]
        cosines = functional.cosine_similarity(part.hidden, own, dim=-1).T.tolist()
        found += [Drift(part.distance and part.distance + i, tuple(row)) for i, row in enumerate(cosines)]
    return found


def exact_hidden(
    listener: Listener, cache: PromptCache, prompt: SequenceOf[int], output: SequenceOf[int]
) -> torch.Tensor:
    """(layers, len(output), hidden size) float32 at the prompt's last token and all output tokens but the last."""
    pieces = read(listener, cache, [*prompt, *output[:-1]], prompt)
    found = [listener.hidden(range(len(piece))) for _, piece, _ in pieces]
    return torch.cat(found, 1)[:, -len(output) :]


def bucket(distance: int) -> tuple[int, int]:
    """First and last distance of the bucket that one falls in: 0, 1, 2, 3-4, 5-8, 9-16, ..."""
    if distance == 0:
        return 0, 0
    last = 1 << (distance - 1).bit_length()
    return last // 2 + 1, last
