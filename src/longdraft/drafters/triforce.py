"""TriForce: a small language model drafts for the target on a part of its KV, which drafts for it on all of it.

A level is the target on a view of its KV: cheaper than the target on all of it, surer than the draft under it. A round:
the level walks down the draft's chains as the target will down its own, sampling from its own distribution; what it
emits goes on in the next chain, until there are enough tokens; these are the chain that the target verifies (Sun et al.
2024, section 4). Each level's tokens follow that level's distribution, and since the target decides every token that is
emitted, the output is the target's whatever the levels did.

Where tokens are sampled, the level uses the random numbers that the target's next samples will use (Sampler.rehearsal):
from two similar distributions, both then mostly choose the same token. What it computes for its tokens waits behind its
view until the round ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp
from typing import Any

import torch

from longdraft.attention.transfer import on_device
from longdraft.drafters.self_drafter import SINK, SelfDrafter, ViewOptions
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.accept import accept, decide
from longdraft.engine.drafter import Drafter, of_part
from longdraft.engine.event import Event
from longdraft.engine.method import Method, register
from longdraft.engine.sequence import Sequence
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix
from longdraft.model.runner import TargetRunner
from longdraft.options import declared, option, parse, takes
from longdraft.trees.kind import LONGEST
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.view import View

# Section 5.1: tokens that the level emits before the target verifies them (gamma_2), tokens that the small model drafts
# for the level (gamma_1), and the rows that it sees.
LENGTH, DRAFTED, STREAMED = 6, 1, 256
# Nodes of the small model's trees where a planner decides the rest: a level verifies a few rows for little more than
# one.
NODES = 5


@dataclass
class _Walk:
    """One sequence's round.

    Attributes:
        twin: the sequence with the tokens that the level emitted; its sampler is the level's.
        room: tokens that may still be emitted.
        log_probs: the level's log-probability of each emitted token.
    """

    twin: Sequence
    room: int
    log_probs: list[float] = field(default_factory=list)

    @property
    def emitted(self) -> list[int]:
        return self.twin.output[len(self.twin.output) - len(self.log_probs) :]

    def emit(self, token: int) -> bool:
        """Appends a token. True if there is no room for another."""
        self.twin.append(token)
        self.room -= 1
        return self.room == 0


class TriForceDrafter(Drafter):
    """Drafts chains with the target on a view, which a small language model drafts for.

    Args:
        small: sees the first and the last tokens.
        level: the target on a view.
        depth: tokens that the level emits before the target verifies them; None: 6, and with a planner as many as pay.
    """

    def __init__(self, small: SmallLMDrafter, level: SelfDrafter, depth: int | None = None) -> None:
        self.small, self.level = small, level
        self.max_nodes, self._asked = depth or LENGTH, depth is not None
        self._walks: dict[int, _Walk] = {}

    # The small model is cheaper than the level: its forwards count as part of the level's.
    forwards, query_window, query_layers = (
        of_part("level", name) for name in ("forwards", "query_window", "query_layers")
    )

    @property
    def views(self) -> tuple[View, ...]:
        return self.small.views + self.level.views

    def use_planner(self) -> None:
        """The level stops where another token does not pay, unless a length was asked for."""
        if not self._asked:
            self.max_nodes = max(self.max_nodes, LONGEST)
        self.small.use_planner()

    def avoid_forks(self) -> bool:
        """Returns True: the level emits chains."""
        return True

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        if runner.recurrent:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has recurrent layers, so it cannot verify on a part of its KV as "
                "triforce does. Use self or magicdec, which draft on a part of the target's KV, or small-lm."
            )
        self.level.judged = self.max_nodes + self.small.max_nodes
        self.level.bind(runner, store)
        self.small.bind(runner, store)
        self._walks = {}

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        length, price, inner = self.max_nodes, 0.0, None
        if limit is not None:
            inner = NodeLimit(NODES, limit.price)
            if not self._asked:
                length, price = max(1, min(length, limit.nodes)), limit.price
        # A path of depth k emits k + 1 tokens.
        drafted = [s for s in sequences if s.remaining > 1]
        self.level.follow(drafted)
        self._walks |= {s.index: self._begin(s, min(length, s.remaining - 1)) for s in drafted}
        walks = [self._walks[s.index] for s in drafted]
        going = walks
        while going:
            self._step(going, inner)
            going = [w for w in going if w.room and (not price or exp(sum(w.log_probs)) > price)]
        for w in walks:
            self.level.cache.drop(w.twin.slot)
        return [self._chain(s) for s in sequences]

    def _begin(self, s: Sequence, room: int) -> _Walk:
        twin = s.fork()
        twin.sampler = s.sampler.rehearsal()
        return _Walk(twin, room)

    def _step(self, walks: list[_Walk], limit: NodeLimit | None) -> None:
        """The small model proposes, the level verifies, and both go on behind what it emitted."""
        twins = [w.twin for w in walks]
        proposed = self.small.propose(twins, limit)
        trees = [tree.limited(w.room - 1) for w, tree in zip(walks, proposed, strict=True)]
        judged = self.level.judge(twins, trees)
        decided = decide([(tree, logits, t.sampler) for tree, logits, t in zip(trees, judged, twins, strict=True)])
        for w, tree, logits, tokens in zip(walks, trees, judged, decided, strict=True):
            accepted = accept(tree, logits, w.twin.sampler, w.twin.ids, w.emit, tokens)
            said = torch.log_softmax(logits.index_select(0, on_device(accepted.path, logits.device)), -1)
            chosen = said.gather(1, on_device(accepted.tokens, said.device)[:, None])
            w.log_probs += self.level.agreement(w.twin).lifted(chosen)[:, 0].tolist()
            self.level.cache.store.commit(w.twin.slot, accepted.path)

    def _chain(self, s: Sequence) -> TokenTree:
        """The tokens that the level emitted, as a chain on the sequence's last token."""
        walk = self._walks.get(s.index) if s.remaining > 1 else None
        tokens, log_probs = (walk.emitted, walk.log_probs) if walk is not None else ([], [])
        return TokenTree((s.output[-1], *tokens), tuple(range(-1, len(tokens))), (0.0, *log_probs))

    def observe(self, event: Event) -> None:
        """Passes the target's verification on. The small model goes back to where the target refuted the level."""
        self.level.observe(event)
        self.small.observe(replace(event, queries={}))
        walk = self._walks.pop(event.sequence.index, None)
        if walk is not None and not event.begins:
            s = event.sequence
            self.small.go_back(s, len(s.prompt) + common_prefix(walk.twin.output, s.output))

    def release(self, sequence: Sequence) -> None:
        self._walks.pop(sequence.index, None)
        self.level.release(sequence)
        self.small.release(sequence)


@dataclass(frozen=True)
class TriForceOptions(ViewOptions):
    """The target's view, and the small model under it (TriForce, section 5.1)."""

    depth: int | None = option(
        min=1,
        help="tokens that the target emits on its view before it verifies them (gamma_2)",
        usual="6, planned: as many as pay",
    )
    drafted: int = option(DRAFTED, min=1, help="tokens that the small model drafts at a time (gamma_1)")
    streamed: int = option(STREAMED, min=SINK + 1, help="tokens that the small model sees, the first and the last")


@takes(TriForceOptions)
def triforce(draft: SmallLMDraft, **options: Any) -> TriForceDrafter:
    """A small language model on the first and last tokens drafts for the target on the chunks that it retrieves."""
    (own,) = parse("triforce", options, TriForceOptions)
    streaming = {"view": "streaming", "sink": SINK, "recent": own.streamed - SINK}
    small = SmallLMDrafter(draft, tree="chain", depth=own.drafted, **streaming)
    sizes = {name: getattr(own, name) for name in declared(ViewOptions)}
    return TriForceDrafter(small, SelfDrafter(view="chunks", **sizes), own.depth)


register(
    Method(
        "triforce",
        triforce,
        "a small language model drafts for the model on a part of its KV cache, which drafts for it on all of it",
        "Sun et al. 2024, TriForce, arXiv:2404.11912",
        draft_kind="small-lm",
    )
)
