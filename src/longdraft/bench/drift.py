"""Drift: how far hidden states that partial verification computed lie from the exact ones (SpecPV, section 3.3).

The states of a run come from its own forwards, so its trees, its chunks and its refreshes are the real ones. The exact
states come from one full forward over the text that the run wrote.
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
from longdraft.model.outputs import NO_TAPS, Taps, TargetOutput
from longdraft.model.runner import TargetRunner
from longdraft.views.view import View


class Listener(TargetRunner):
    """A hosted target that keeps hidden states of its last forward.

    Args:
        runner: the target; everything it has is shared.

    Attributes:
        layers: the layers whose outputs EAGLE-3 reads (1, L/2-1 and L-4), and the last.
    """

    def __init__(self, runner: TargetRunner) -> None:
        vars(self).update(vars(runner))
        depth = self.depth
        self.layers = tuple(sorted({x for x in (1, depth // 2 - 1, depth - 4, depth - 1) if 0 <= x < depth}))
        self._hidden: dict[int, torch.Tensor] = {}

    def forward(self, block: Block, store: KVStore, *, taps: Taps = NO_TAPS, **options: Any) -> TargetOutput:
        taps = replace(taps, hidden=tuple({*taps.hidden, *self.layers}))
        out = super().forward(block, store, taps=taps, **options)
        self._hidden = {layer: out.hidden[layer] for layer in self.layers}
        return out

    def hidden(self, rows: SequenceOf[int]) -> torch.Tensor:
        """(layers, rows, hidden size) float32 of the first sequence of the last forward."""
        return torch.stack([self._hidden[layer][0, list(rows)] for layer in self.layers]).float()


@dataclass(frozen=True)
class Computed:
    """Tokens that a round computed and accepted.

    Attributes:
        position: the first token's, in the text.
        distance: the first token's, from the last full pass; 0 for all of them if a full pass computed them.
        hidden: (layers, tokens, hidden size).
    """

    position: int
    distance: int
    hidden: torch.Tensor


class RecordedSpecPV(SpecPV):
    """SpecPV that keeps the hidden states of the tokens that it accepts. For runs of one sequence.

    Args:
        listener: the runner of the run.
        start: as of SpecPV.
    """

    def __init__(self, view: View, listener: Listener, start: int | None = None) -> None:
        super().__init__(view, start=start)
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
class Exact:
    """An output as the target sees it with all of the KV.

    Attributes:
        hidden: (layers, tokens, hidden size) float32 at the prompt's last token and at all output tokens but the last.
        surprise: mean -log p of the output's tokens, in nats.
    """

    hidden: torch.Tensor
    surprise: float


@torch.inference_mode()
def exact(listener: Listener, cache: PromptCache, prompt: SequenceOf[int], output: SequenceOf[int]) -> Exact:
    """Reads an output in full forwards behind its prompt.

    Args:
        cache: holds the prompt's KV or some of it, with room for the output; the output's stays in it.
    """
    first, hidden, total = len(prompt) - 1, [], 0.0
    for start, piece, out in read(listener, cache, [*prompt, *output[:-1]], prompt, first):
        if start >= first:
            assert out.logits is not None
            hidden.append(listener.hidden(range(len(piece))))
            tokens = torch.tensor(output[start - first : start - first + len(piece)], device=out.logits.device)
            total -= float(out.logits[0].float().log_softmax(-1).gather(1, tokens[:, None]).sum())
    return Exact(torch.cat(hidden, 1), total / len(output))


@dataclass(frozen=True)
class Drift:
    """The drift of one token.

    Attributes:
        distance: tokens since the last full pass, 1 for the first; 0: computed by a full pass.
        cosines: similarity of its hidden state and the exact one, for each layer.
    """

    distance: int
    cosines: tuple[float, ...]


def drift(exact: Exact, prompt_tokens: int, computed: list[Computed]) -> list[Drift]:
    """Compares the states that a run computed with the exact ones of its output."""
    found = []
    for part in computed:
        start = part.position - (prompt_tokens - 1)
        own = exact.hidden[:, start : start + part.hidden.shape[1]]
        cosines = functional.cosine_similarity(part.hidden, own, dim=-1).T.tolist()
        found += [Drift(part.distance and part.distance + i, tuple(row)) for i, row in enumerate(cosines)]
    return found


def bucket(distance: int) -> tuple[int, int]:
    """First and last distance of a distance's bucket: 0, 1, 2, 3-4, 5-8, 9-16, ..."""
    if distance == 0:
        return 0, 0
    last = 1 << (distance - 1).bit_length()
    return last // 2 + 1, last
