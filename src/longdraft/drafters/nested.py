"""Drafting in levels: what one drafter proposes is verified by another before the target sees it (TriForce, section 4).

A level is the target on a part of its KV: cheaper than the target on all of it, surer than the drafter under it. A
round: the level walks down the drafter's tree as the target will down its own, sampling from its own distribution; what
it emits goes on in the next tree, until there are enough tokens; these are the chain that the target verifies. Each
level's tokens follow that level's distribution, and since the target decides every token that is emitted, the output is
the target's whatever the levels did: a level only has to be right.

Where tokens are sampled, a level uses the random numbers that the target's next samples will use (Sampler.rehearsal):
from two similar distributions, both then mostly choose the same token.

What a level computes for tokens that it emitted is shown to the drafter as unverified rows of the target's store, as
in partial verification; the target's verification overwrites them. Nothing of it is committed there. When the target
refutes one, level and drafter go back to where it did.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp
from typing import Any

import torch

from longdraft.attention.transfer import on_device
from longdraft.drafters.self_drafter import SINK, VIEWS, SelfDrafter, ViewOptions
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.accept import accept, decide
from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.method import Method, register
from longdraft.engine.sequence import Sequence
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, declared, option, parse, takes
from longdraft.trees.kind import LONGEST
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree
from longdraft.views.view import DTYPES, View

# TriForce, section 5.1: tokens that the level emits before the target verifies them (gamma_2), tokens that the small
# model drafts for the level (gamma_1), and the rows that it sees.
LENGTH, DRAFTED, STREAMED = 6, 1, 256
_PAPER = "Sun et al. 2024, TriForce, arXiv:2404.11912"
# Nodes of the drafter's trees where a planner decides the rest: a level verifies a few rows for little more than one.
NODES = 5


@dataclass
class _Walk:
    """One sequence's round.

    Attributes:
        twin: the sequence with the tokens that the level emitted; its sampler is the level's.
        start: tokens of the sequence before the round. room: tokens that may still be emitted.
        log_probs: the level's log-probability of each emitted token.
    """

    twin: Sequence
    start: int
    room: int
    log_probs: list[float] = field(default_factory=list)

    @property
    def emitted(self) -> list[int]:
        return self.twin.output[len(self.twin.output) - len(self.log_probs) :] if self.log_probs else []

    def emit(self, token: int) -> bool:
        """Appends a token. True if there is no room for another."""
        self.twin.append(token)
        self.room -= 1
        return self.room == 0


class NestedDrafter(Drafter):
    """A drafter whose proposals another one verifies first.

    Args:
        inner: drafts for the level: any drafter, a nested one too.
        level: verifies: the target on a sparse view.
        depth: tokens that the level emits before the target verifies them; None: 6, and with a planner as many as pay.

    Raises:
        ValueError: a level that cannot verify or sees no more than the drafter under it, or no tokens.
    """

    def __init__(self, inner: Drafter, level: Drafter, depth: int | None = None) -> None:
        if not isinstance(level, SelfDrafter):
            raise ValueError(
                f"{type(level).__name__} cannot verify what another one drafts: a level is the target on a sparse view "
                "(SelfDrafter)"
            )
        under = inner.level if isinstance(inner, NestedDrafter) else inner
        if type(under) is type(level) is SelfDrafter and under.view.budget >= level.view.budget:
            raise ValueError(
                f"a level must see more than the one under it: give it a budget above {under.view.budget} rows, not "
                f"{level.view.budget}"
            )
        if depth is not None and (type(depth) is not int or depth < 1):
            raise ValueError(f"depth must be a whole number of at least 1, got {depth!r}")
        self.inner = inner
        self.level: SelfDrafter = level
        self.max_nodes, self._asked = depth or LENGTH, depth is not None
        self._walks: dict[int, _Walk] = {}
        # Layers whose queries drafter and level want.
        self._layers: list[tuple[Drafter, tuple[int, ...]]] = [(inner, ()), (level, ())]

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Forwards of the level. The drafter under it is cheaper: its forwards count as part of these."""
        return self.level.forwards

    @property
    def views(self) -> tuple[View, ...]:
        return self.inner.views + self.level.views

    @property
    def query_window(self) -> int:  # type: ignore[override]
        return max(self.inner.query_window, self.level.query_window)

    def use_planner(self) -> None:
        """The level stops where another token does not pay, unless a length was asked for."""
        if not self._asked:
            self.max_nodes = max(self.max_nodes, LONGEST)
        self.inner.use_planner()

    def avoid_forks(self) -> bool:
        """Returns True: the level emits chains. The trees below it are its own affair."""
        return True

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        return self.inner.feature_layers(runner)

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        self._layers = [(each, each.query_layers(runner)) for each in (self.inner, self.level)]
        return tuple(sorted({layer for _, layers in self._layers for layer in layers}))

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Binds drafter and level.

        Raises:
            MemoryBudgetError, CheckpointError, UnsupportedModelError: as these do.
        """
        self.level.judged = self.max_nodes + self.inner.max_nodes
        self.level.bind(runner, store)
        if self.level.runner.recurrent:
            raise UnsupportedModelError(
                f"{type(self.level.runner.model).__name__} has recurrent layers, so it cannot verify on a part of its "
                "KV as a level of nested drafting does. Use self or magicdec, which draft on a part of the target's "
                "KV, or small-lm."
            )
        self.inner.bind(runner, store)
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
        return _Walk(twin, len(s.prompt) + len(s.output), room)

    def _step(self, walks: list[_Walk], limit: NodeLimit | None) -> None:
        """The drafter proposes, the level verifies, and both go on behind what it emitted."""
        twins = [w.twin for w in walks]
        proposed = self.inner.propose(twins, limit)
        trees = [tree.limited(w.room - 1) for w, tree in zip(walks, proposed, strict=True)]
        judged = self.level.judge(twins, trees)
        decided = decide([(tree, logits, t.sampler) for tree, logits, t in zip(trees, judged, twins, strict=True)])
        for w, tree, logits, tokens in zip(walks, trees, judged, decided, strict=True):
            accepted = accept(tree, logits, w.twin.sampler, w.twin.ids, w.emit, tokens)
            said = torch.log_softmax(logits.index_select(0, on_device(accepted.path, logits.device)), -1)
            chosen = said.gather(1, on_device(accepted.tokens, said.device)[:, None])
            w.log_probs += self.level.agreement(w.twin).lifted(chosen)[:, 0].tolist()
            self.level.cache.keep(w.twin.slot, accepted.path)
            self.inner.observe(Event(w.twin, tree, len(accepted.path) - 1, accepted.path, accepted.tokens))

    def _chain(self, s: Sequence) -> TokenTree:
        """The tokens that the level emitted, as a chain on the sequence's last token."""
        walk = self._walks.get(s.index) if s.remaining > 1 else None
        tokens, log_probs = (walk.emitted, walk.log_probs) if walk is not None else ([], [])
        return TokenTree((s.output[-1], *tokens), tuple(range(-1, len(tokens))), (0.0, *log_probs))

    def observe(self, event: Event) -> None:
        """Passes the target's verification on to drafter and level.

        Only the target's queries are passed on: a level's belong to tokens that may be taken back.
        """
        s = event.sequence
        inner, level = (
            replace(event, queries={layer: event.queries[layer][:, -each.query_window :] for layer in layers})
            if event.queries
            else event
            for each, layers in self._layers
        )
        self.level.observe(level)
        walk = self._walks.pop(s.index, None)
        if walk is not None and not event.begins and not event.taken_back:
            # What it saw of the level's rows is exact now; where all was right, it knows all but the last token.
            before, now = walk.twin.tokens, s.tokens
            inner = replace(
                inner,
                tree=TokenTree(event.tree.tokens[:1], (-1,)),
                accepted=0,
                replaced=walk.start - 1 if event.replaced is None else min(event.replaced, walk.start - 1),
                taken_back=0 if now[: len(before)] == before else len(before) - common_prefix(before, now),
            )
        self.inner.observe(inner)

    def release(self, sequence: Sequence) -> None:
        self._walks.pop(sequence.index, None)
        self.level.release(sequence)
        self.inner.release(sequence)


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
def triforce(draft: SmallLMDraft, **options: Any) -> NestedDrafter:
    """A small language model on the first and last tokens drafts for the target on the chunks that it retrieves.

    Raises:
        ValueError: sizes that make no view, or more than the small model was trained for.
    """
    (own,) = parse("triforce", options, TriForceOptions)
    streaming = {"view": "streaming", "sink": SINK, "recent": own.streamed - SINK}
    small = SmallLMDrafter(draft, tree="chain", depth=own.drafted, **streaming)
    sizes = {name: getattr(own, name) for name in declared(ViewOptions)}
    return NestedDrafter(small, SelfDrafter(view="chunks", **sizes), own.depth)


@dataclass(frozen=True)
class LevelOptions(Options):
    """The level between a drafter and the target: the target on a part of its KV, with the options of ``self``."""

    level_view: str = option("chunks", choices=tuple(VIEWS), help="what the level sees, as view of self")
    level_budget: int | None = option(min=1, help="KV rows that the level sees", usual="512; 2048 of attention")
    level_sink: int | None = option(min=0, help="first rows, always seen", usual="16")
    level_window: int | None = option(min=1, help="last rows, always seen", usual="32")
    level_chunk: int | None = option(min=1, help="rows that are chosen together", usual="8")
    level_refresh: int | None = option(min=0, help="verifications from one choice to the next", usual="8")
    level_depth: int | None = option(
        min=1, help="tokens that the level emits before the target verifies them", usual="6, planned: as many as pay"
    )
    level_dtype: str | None = option(
        choices=tuple(DTYPES), help="what the level's view is rounded to", usual="not rounded"
    )


@takes(LevelOptions)
def nested(inner: Drafter, **options: Any) -> NestedDrafter:
    """A drafter with the target on a part of its KV over it.

    Raises:
        ValueError: as :class:`NestedDrafter` and :class:`SelfDrafter` do.
    """
    (own,) = parse("nested", options, LevelOptions)
    level = SelfDrafter(
        view=own.level_view, budget=own.level_budget, sink=own.level_sink, window=own.level_window,
        chunk=own.level_chunk, refresh=own.level_refresh, view_dtype=own.level_dtype,
    )  # fmt: skip
    return NestedDrafter(inner, level, own.level_depth)


register(
    Method(
        "triforce",
        True,
        _PAPER,
        "a small language model drafts for the model on a part of its KV cache, which drafts for it on all of it",
        triforce,
        "small-lm",
    )
)
register(
    Method(
        "nested",
        True,
        f"ours, after {_PAPER}",
        "any drafter, whose proposals the model verifies on a part of its KV cache before it does on all of it",
        wraps=nested,
    )
)
