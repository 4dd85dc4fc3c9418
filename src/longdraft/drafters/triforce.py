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

from longdraft.attention.transfer import to_device
from longdraft.drafters.self_drafter import SINK, SelfDrafter, ViewOptions
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.accept import accept_path, sample_target_tokens
from longdraft.engine.drafter import Drafter, delegate_to
from longdraft.engine.method import Method, register
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix_len
from longdraft.model.runner import TargetRunner
from longdraft.options import declared, option, parse, takes
from longdraft.trees.kind import MAX_CHAIN_LENGTH
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
        logprobs: the level's log-probability of each emitted token.
    """

    twin: Sequence
    room: int
    logprobs: list[float] = field(default_factory=list)

    @property
    def emitted(self) -> list[int]:
        return self.twin.output[len(self.twin.output) - len(self.logprobs) :]

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
    forwards, num_prompt_queries, query_layers = (
        delegate_to("level", name) for name in ("forwards", "num_prompt_queries", "query_layers")
    )

    @property
    def views(self) -> tuple[View, ...]:
        return self.small.views + self.level.views

    def use_planner(self) -> None:
        """The level stops where another token does not pay, unless a length was asked for."""
        if not self._asked:
            self.max_nodes = max(self.max_nodes, MAX_CHAIN_LENGTH)
        self.small.use_planner()

    def use_chains(self) -> bool:
        """Returns True: the level emits chains."""
        return True

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        if runner.has_recurrent_layers:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has recurrent layers, so it cannot verify on a part of its KV as "
                "triforce does. Use self or magicdec, which draft on a part of the target's KV, or small-lm."
            )
        self.level.max_verified_tokens = self.max_nodes + self.small.max_nodes
        self.level.bind(runner, store)
        self.small.bind(runner, store)
        self._walks = {}

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        length, price, inner = self.max_nodes, 0.0, None
        if limit is not None:
            inner = NodeLimit(NODES, limit.min_expected_gain)
            if not self._asked:
                length, price = max(1, min(length, limit.max_nodes)), limit.min_expected_gain
        # A path of depth k emits k + 1 tokens.
        drafted = [s for s in sequences if s.remaining > 1]
        self.level.update_views(drafted)
        self._walks |= {s.index: self._begin(s, min(length, s.remaining - 1)) for s in drafted}
        walks = [self._walks[s.index] for s in drafted]
        going = walks
        while going:
            self._step(going, inner)
            going = [w for w in going if w.room and (not price or exp(sum(w.logprobs)) > price)]
        for w in walks:
            self.level.cache.clear_buffer(w.twin.slot)
        return [self._chain(s) for s in sequences]

    def _begin(self, s: Sequence, room: int) -> _Walk:
        twin = s.fork()
        twin.sampler = s.sampler.fork_for_draft()
        return _Walk(twin, room)

    def _step(self, walks: list[_Walk], limit: NodeLimit | None) -> None:
        """The small model proposes, the level verifies, and both go on behind what it emitted."""
        twins = [w.twin for w in walks]
        proposed = self.small.propose(twins, limit)
        trees = [tree.limit_depth(w.room - 1) for w, tree in zip(walks, proposed, strict=True)]
        judged = self.level.verify(twins, trees)
        decided = sample_target_tokens(
            [(tree, logits, t.sampler) for tree, logits, t in zip(trees, judged, twins, strict=True)]
        )
        for w, tree, logits, tokens in zip(walks, trees, judged, decided, strict=True):
            accepted = accept_path(tree, logits, w.twin.sampler, w.twin.input_ids, w.emit, tokens)
            said = torch.log_softmax(logits.index_select(0, to_device(accepted.nodes, logits.device)), -1)
            chosen = said.gather(1, to_device(accepted.token_ids, said.device)[:, None])
            w.logprobs += self.level.calibrator(w.twin).calibrate(chosen)[:, 0].tolist()
            self.level.cache.store.commit(w.twin.slot, accepted.nodes)

    def _chain(self, s: Sequence) -> TokenTree:
        """The tokens that the level emitted, as a chain on the sequence's last token."""
        walk = self._walks.get(s.index) if s.remaining > 1 else None
        tokens, logprobs = (walk.emitted, walk.logprobs) if walk is not None else ([], [])
        return TokenTree((s.output[-1], *tokens), tuple(range(-1, len(tokens))), (0.0, *logprobs))

    def observe(self, round_result: RoundResult) -> None:
        """Passes the target's verification on. The small model goes back to where the target refuted the level."""
        self.level.observe(round_result)
        self.small.observe(replace(round_result, queries={}))
        walk = self._walks.pop(round_result.sequence.index, None)
        if walk is not None and not round_result.is_prefill:
            s = round_result.sequence
            self.small.rewind(s, len(s.prompt) + common_prefix_len(walk.twin.output, s.output))

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
