"""Feeding a tree level by level: into a hosted model, and into the windows of drafters that have one.

In the latter, linear layers run over the rows of all sequences, and so does attention on a GPU, where a level's forward
is recorded and replayed; elsewhere attention goes sequence by sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.layers import SelfAttend
from longdraft.engine.sequence import Sequence as Text
from longdraft.memory.store import KVStore
from longdraft.model.graphs import Graphs, padded
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import Level, Likeliest
from longdraft.trees.masks import Ancestors
from longdraft.views.window import Placed, Window

# (T,) positions -> cos and sin (T, d)
Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def feed_level(
    runner: TargetRunner,
    store: KVStore,
    slots: Sequence[int],
    bases: Sequence[int],
    level: Level,
    ancestors: torch.Tensor,
) -> torch.Tensor:
    """Logits (B', W, vocabulary) of what follows each node; its KV lies behind that of the levels before, uncommitted.

    Args:
        bases: position of each sequence's root; a node's is its root's + its depth.
        ancestors: (B', W, S) bool, as :class:`~longdraft.trees.masks.Ancestors` gives it: S nodes were fed, these W
            the last of them.
    """
    batch, width = level.tokens.shape
    depths = [[level.depth] * width] * batch
    offset = ancestors.shape[2] - width
    block = store.block(slots, level.tokens, bases=bases, depths=depths, mask=ancestors, offset=offset)
    out = runner.forward(block, store, check=False)
    assert out.logits is not None
    return out.logits


class Inputs(NamedTuple):
    """A draft's inputs for T rows.

    Attributes:
        x: (T, hidden) token embeddings.
        joined: (T, hidden) EAGLE-3's projected hidden states; None for other drafts.
        cos, sin: (T, d) rotary embedding at the rows' positions.
    """

    x: torch.Tensor
    joined: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Fed:
    """Rows fed to a draft with a window, sequence by sequence. The last ``width`` rows of each get an output.

    Attributes:
        slots: slot of each sequence.
        counts: rows of each sequence.
        starts: position of each sequence's first row, if the rows are new tokens; empty if they are tree nodes.
        depth, ancestors: for tree nodes: their depth, and (B', W, S) bool, the fed nodes that each of them sees.
        behind: how many of each sequence's last rows stand for tokens not known yet (one-pass drafts). They see each
            other as a chain behind the newest token.
    """

    slots: tuple[int, ...]
    counts: tuple[int, ...]
    width: int
    starts: tuple[int, ...] = ()
    depth: int = 0
    ancestors: torch.Tensor | None = None
    behind: int = 0

    def places(self, window: Window) -> list[tuple[int, int]]:
        """The rows [begin, end) of the window that each sequence sees, its new rows (the last ones) included."""
        if self.ancestors is not None:
            return [window.seen(slot, self.depth, self.ancestors.shape[2]) for slot in self.slots]
        for slot, start, count in zip(self.slots, self.starts, self.counts, strict=True):
            window.make_room(slot, start, count - self.behind)
        return [window.seen(slot, 0, self.behind) for slot in self.slots]

    @property
    def mask(self) -> torch.Tensor | None:
        """(B, W, S) bool: the rows among the last S that each output row sees; None: all."""
        if self.ancestors is not None or not self.behind:
            return self.ancestors
        return torch.ones(self.width, self.width, dtype=torch.bool, device="cpu").tril().expand(len(self.slots), -1, -1)

    def attend(self, window: Window) -> SelfAttend:
        """Attends to the window, nodes to their ancestors and themselves too. All rows enter the window."""
        if window.together:
            places = self.places(window)
            at = window.placed(self.slots, places, self.counts, self.mask)
            return window.attending(at, max(end - begin for begin, end in places))

        def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs, first = [], 0
            for i, (slot, count) in enumerate(zip(self.slots, self.counts, strict=True)):
                own = k[:, first : first + count], v[:, first : first + count]
                going = q[:, i * self.width : (i + 1) * self.width]
                if self.ancestors is None:
                    new = count - self.behind
                    window.append(slot, self.starts[i], *(x[:, :new] for x in own))
                    outputs.append(window.attend_newest(slot, going[:, :1]))
                    if self.behind:
                        chain = torch.ones(self.behind, self.behind, dtype=torch.bool, device=q.device).tril()
                        k_, v_ = (x[:, new:] for x in own)
                        outputs.append(window.attend_level(slot, going[:, 1:], k_, v_, chain, 0))
                else:
                    outputs.append(window.attend_level(slot, going, *own, self.ancestors[i], self.depth))
                first += count
            return torch.cat(outputs, dim=1)

        return one_by_one


class DraftRound(ABC):
    """One round of a batch with a one-layer draft. A subclass defines its rows and its forward.

    Args:
        sequences: of the batch.
        rotary: (T,) positions -> cos and sin (T, d).
        depth: levels of the trees at most.
        device: of the draft.
        whole: a level is computed in one kernel call, which also returns the likeliest tokens. On a GPU they are found
            within the level's recording.

    Attributes:
        records: forwards over nodes may be recorded; they must not choose what they compute by what they read.
    """

    records = True

    def __init__(
        self, sequences: Sequence[Text], rotary: Rotary, depth: int, device: torch.device | str, whole: bool
    ) -> None:
        self.sequences, self._rotary, self._depth, self._device = sequences, rotary, depth, device
        self._finds_likeliest = whole or torch.device(device).type != "cpu"
        self._ancestors = Ancestors()
        # The level of the roots; cos and sin (B, depth - 1, d) of the positions of their trees.
        self._entered: Level | None = None
        self._ahead: tuple[torch.Tensor, ...] = ()

    @property
    def likeliest(self) -> Likeliest | None:
        """Finds the likeliest tokens without showing logits; None if it cannot."""
        # Not kept: a round that refers to itself would keep its memory until the garbage is collected.
        return self._likeliest if self._finds_likeliest else None

    @abstractmethod
    def said(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits (B' * W, draft vocabulary) of what follows each node where ``best`` is 0; else log-probabilities and
        draft ids (B' * W, k) of the ``best`` likeliest."""

    def expand(self, level: Level) -> torch.Tensor:
        """Logits (B', W, draft vocabulary) of what follows each node."""
        return self.said(level, 0)[0].view(*level.tokens.shape, -1)

    def _likeliest(self, level: Level, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, log_probs, ids = self.said(level, count)
        return log_probs.view(*level.tokens.shape, -1), ids.view(*level.tokens.shape, -1)

    def entering(
        self, level: Level, starts: Sequence[int], ends: Sequence[int], rows: int | None = None
    ) -> tuple[Fed, torch.Tensor, torch.Tensor, torch.Tensor]:
        """New tokens at positions [start, end) of each sequence, the last of which is its root.

        Args:
            rows: pad the rows of each sequence to so many.

        Returns:
            The rows, cos and sin (T, d), and (B',) which rows are the roots; of padded rows, which of its sequence's.
        """
        counts = tuple(end - start for start, end in zip(starts, ends, strict=True))
        positions = [p for start, end in zip(starts, ends, strict=True) for p in filled(range(start, end), rows)]
        ahead = [end - 1 + depth for end in ends for depth in range(1, self._depth)]
        lasts = (n - 1 for n in (accumulate(counts) if rows is None else counts))
        numbers = on_device([*positions, *ahead, *lasts], self._device)
        roots = numbers[-len(counts) :]
        cos, sin = self._rotary(numbers[: -len(counts)])
        # None of them where a tree has one level.
        self._entered = level
        self._ahead = tuple(x[len(positions) :].view(len(ends), -1, x.shape[1]) for x in (cos, sin))
        fed = Fed(self._slots(level), counts, 1, starts=tuple(starts))
        return fed, cos[: len(positions)], sin[: len(positions)], roots

    def following(self, level: Level) -> tuple[Fed, torch.Tensor, torch.Tensor]:
        """The nodes of a level, with cos and sin (B', 1, d): a node's position is its root's + its depth."""
        width = level.tokens.shape[1]
        seen = self._ancestors.add(level)
        fed = Fed(self._slots(level), (width,) * len(level.rows), width, depth=level.depth, ancestors=seen)
        assert self._entered is not None
        cos, sin = (self._entered.of(level.rows, x)[:, level.depth - 1, None] for x in self._ahead)
        return fed, cos, sin

    def padded_rows(self, graphs: Graphs, window: Window, lacking: Sequence[Sequence[int]]) -> int | None:
        """The number of rows that those which each window lacks are padded to, the largest; None: not recorded."""
        most = max(map(len, lacking))
        return most if window.together and self.records and graphs.rows(most) is not None else None

    def recorded(
        self,
        graphs: Graphs,
        kind: Hashable,
        fed: Fed,
        window: Window,
        inputs: Sequence[torch.Tensor],
        compute: Callable[..., tuple[torch.Tensor, ...]],
        beside: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...]:
        """The draft's forward over the nodes of a level, replayed from a recorded graph if there is one.

        Args:
            kind: key of the recording, apart from the shapes of the inputs and the window.
            inputs: (B * W, ...) each, of the nodes. beside: (B,) or (B, 1, ...) each, of the sequences.
            compute: takes both, and what attends among the window's rows; gives tensors (B * W, ...).
        """
        width = len(inputs[0]) // len(fed.slots)
        rows = graphs.rows(width) if window.together and self.records else None

        def unrecorded() -> tuple[torch.Tensor, ...]:
            if len(inputs[0]) == sum(fed.counts):
                return compute(*inputs, *beside, fed.attend(window))
            own = fed.places(window)
            at = window.placed(fed.slots, own, fed.counts, fed.mask, width)
            return compute(*inputs, *beside, window.attending(at, max(end - begin for begin, end in own)))

        if rows is None:
            return unrecorded()
        sequences, count = len(fed.slots), len(inputs)
        batch = padded(sequences, window.keys.shape[0])
        places = fed.places(window)
        bound = graphs.bound(max(end - begin for begin, end in places), window.keys.shape[2])

        def given() -> list[torch.Tensor]:
            split = [x.unflatten(0, (sequences, width)) for x in inputs]
            more = batch - sequences  # which are like the first sequence
            rest = [torch.cat([x, x[:1].expand(more, *x.shape[1:])]) for x in beside] if more else beside
            return [*split, *rest, *window.placed(fed.slots, places, fed.counts, fed.mask, rows, batch)]

        memory = copy(window)  # the same tensors; a recording outlives the window itself
        memory.room = None

        def level(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nodes, rest, at = given[:count], given[count : -len(Placed._fields)], Placed(*given[-len(Placed._fields) :])
            out = compute(*(x.flatten(0, 1) for x in nodes), *rest, memory.attending(at, bound))
            return tuple(x.unflatten(0, (batch, -1)) for x in out)

        kind = kind, bound, window.scratch
        found = graphs.level(window.room or window, kind, (batch, rows), given, level)
        if found is None:
            return unrecorded()
        return tuple(x[:, : fed.width].flatten(0, 1) for x in found)

    def _slots(self, level: Level) -> tuple[int, ...]:
        return tuple(self.sequences[row].slot for row in level.rows)


def filled(numbers: Sequence[int], rows: int | None) -> list[int]:
    """Numbers, of which the last one is repeated up to ``rows``."""
    return [*numbers, *[numbers[-1]] * ((rows or 0) - len(numbers))]


def last_rows(count: int, lasts: torch.Tensor) -> torch.Tensor:
    """(B,) each sequence's last row among ``count`` padded ones of B sequences; ``lasts`` counts from its first."""
    return torch.arange(0, count, count // len(lasts), device=lasts.device) + lasts


def each_row(x: torch.Tensor, rows: int) -> torch.Tensor:
    """A rotary embedding (B, 1, d) for all of ``rows`` rows, (rows, d); one that is for each row already stays."""
    return x if x.dim() == 2 else x.expand(-1, rows // len(x), -1).flatten(0, 1)
