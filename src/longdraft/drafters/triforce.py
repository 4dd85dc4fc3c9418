"""TriForce: hierarchical speculation. A small language model drafts for the self-drafter, which drafts for the target.

The self-drafter is the target on a view of its KV. It is cheaper than the target on all of the KV, and better than the
small model. In a round, the self-drafter verifies several trees of the small model, and emits tokens of its own
distribution. Then the target verifies these tokens as one chain (Sun et al. 2024, section 4). The output is the
target's, because the target decides every token.

Sampling: the self-drafter samples with the same noise as the target will (``Sampler.fork_for_draft``), so that both
mostly sample the same token. The KV of the self-drafter's tokens is dropped when the round ends.
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
from longdraft.engine.drafter import Drafter, DraftNeeds, delegate_to
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix_len
from longdraft.model.runner import TargetRunner
from longdraft.options import declared, option, parse, takes
from longdraft.trees.tree import NodeLimit, TokenTree, chain_tree
from longdraft.trees.tree_config import MAX_CHAIN_LENGTH

# From section 5.1.
CHAIN_LENGTH = 6  # gamma_2: tokens that the self-drafter emits before the target verifies them
INNER_CHAIN_LENGTH, STREAMING_TOKENS = 1, 256  # tokens that the small model drafts (gamma_1), and that it attends to
INNER_NODES = 5  # maximum nodes of the small model's trees with a planner: five cost little more to verify than one


@dataclass
class _SelfDraft:
    """The tokens that the self-drafter emits for a sequence in one round.

    Attributes:
        fork: copy of the sequence, to which the self-drafter's tokens are appended. The copy has a separate sampler.
        tokens_left: number of tokens that the self-drafter may still emit.
        logprobs: calibrated log-probability of each emitted token.
    """

    fork: Sequence
    tokens_left: int
    logprobs: list[float] = field(default_factory=list)

    @property
    def emitted(self) -> list[int]:
        """The tokens that the self-drafter emitted in this round."""
        return self.fork.output[len(self.fork.output) - len(self.logprobs) :]

    def emit(self, token: int) -> bool:
        """Appends a token; returns True if it is the last token that may be emitted."""
        self.fork.append(token)
        self.tokens_left -= 1
        return self.tokens_left == 0


class TriForceDrafter(Drafter):
    """Drafts chains with a self-drafter. A small language model drafts for the self-drafter.

    Args:
        small_lm: the small model, which attends to the first and the last tokens.
        self_drafter: the target on a view.
        depth: number of tokens that the self-drafter emits before the target verifies them; None: 6, or as many as a
            planner finds worthwhile.
    """

    def __init__(self, small_lm: SmallLMDrafter, self_drafter: SelfDrafter, depth: int | None = None) -> None:
        self.small_lm, self.self_drafter = small_lm, self_drafter
        self.max_nodes, self._has_user_length = depth or CHAIN_LENGTH, depth is not None
        self._drafts: dict[int, _SelfDraft] = {}  # by sequence index

    # The small model's forwards are not counted: a planner adds their time to that of the self-drafter's forwards.
    forwards = delegate_to("self_drafter", "forwards")

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        needs = self.self_drafter.needs(runner)
        return replace(needs, views=self.small_lm.needs(runner).views + needs.views)

    def use_planner(self) -> None:
        """Allows longer chains, which end when one more token is not worthwhile, unless the user chose the length."""
        if not self._has_user_length:
            self.max_nodes = max(self.max_nodes, MAX_CHAIN_LENGTH)
        self.small_lm.use_planner()

    def use_chains(self) -> bool:
        """Returns True: all drafts are chains."""
        return True

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        if runner.has_recurrent_layers:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has recurrent layers, so it cannot verify on a part of its KV, as "
                "triforce needs. Use self or magicdec, which draft on a part of the target's KV, or small-lm."
            )
        self.self_drafter.max_verified_tokens = self.max_nodes + self.small_lm.max_nodes
        self.self_drafter.bind(runner, store)
        self.small_lm.bind(runner, store)
        self._drafts = {}

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        length, min_gain, inner_limit = self.max_nodes, 0.0, None
        if limit is not None:
            inner_limit = NodeLimit(INNER_NODES, limit.min_expected_gain)
            if not self._has_user_length:
                length, min_gain = max(1, min(length, limit.max_nodes)), limit.min_expected_gain
        unfinished = [s for s in sequences if s.max_draft_depth > 0]
        self.self_drafter.update_views(unfinished)
        self._drafts |= {s.index: self._start_draft(s, min(length, s.max_draft_depth)) for s in unfinished}
        drafts = [self._drafts[s.index] for s in unfinished]
        growing = drafts
        while growing:
            self._extend(growing, inner_limit)
            # A draft continues while the probability that all its tokens are accepted exceeds the planner's minimum.
            growing = [d for d in growing if d.tokens_left and (not min_gain or exp(sum(d.logprobs)) > min_gain)]
        for draft in drafts:
            self.self_drafter.cache.clear_buffer(draft.fork.slot)
        return [self._chain(s) for s in sequences]

    def _start_draft(self, s: Sequence, tokens_left: int) -> _SelfDraft:
        fork = s.fork()
        fork.sampler = s.sampler.fork_for_draft()
        return _SelfDraft(fork, tokens_left)

    def _extend(self, drafts: list[_SelfDraft], limit: NodeLimit | None) -> None:
        """Extends drafts: the small model proposes trees, the self-drafter verifies them and emits tokens."""
        forks = [draft.fork for draft in drafts]
        proposed = self.small_lm.propose(forks, limit)
        trees = [tree.limit_depth(d.tokens_left - 1) for d, tree in zip(drafts, proposed, strict=True)]
        all_logits = self.self_drafter.verify(forks, trees)
        samplers = [fork.sampler for fork in forks]
        sampled = sample_target_tokens(list(zip(trees, all_logits, samplers, strict=True)))
        for draft, tree, logits, tokens in zip(drafts, trees, all_logits, sampled, strict=True):
            fork = draft.fork
            accepted = accept_path(tree, logits, fork.sampler, fork.input_ids, draft.emit, tokens)
            logprobs = torch.log_softmax(logits.index_select(0, to_device(accepted.nodes, logits.device)), -1)
            emitted_logprobs = logprobs.gather(1, to_device(accepted.token_ids, logprobs.device)[:, None])
            draft.logprobs += self.self_drafter.calibrator(fork).calibrate(emitted_logprobs)[:, 0].tolist()
            self.self_drafter.cache.store.commit(fork.slot, accepted.nodes)

    def _chain(self, s: Sequence) -> TokenTree:
        """Returns the self-drafter's tokens as a chain after the sequence's last token."""
        draft = self._drafts.get(s.index) if s.max_draft_depth > 0 else None
        tokens, logprobs = (draft.emitted, draft.logprobs) if draft is not None else ([], [])
        return chain_tree(s.output[-1], tokens, logprobs)

    def observe(self, round_result: RoundResult) -> None:
        """Passes the target's result on. The small model's KV is dropped from the first rejected token on."""
        self.self_drafter.observe(round_result)
        self.small_lm.observe(replace(round_result, queries={}))
        draft, s = self._drafts.pop(round_result.sequence.index, None), round_result.sequence
        if draft is not None and not round_result.is_prefill:
            self.small_lm.rewind(s, len(s.prompt) + common_prefix_len(draft.fork.output, s.output))

    def release(self, sequence: Sequence) -> None:
        self._drafts.pop(sequence.index, None)
        self.self_drafter.release(sequence)
        self.small_lm.release(sequence)


@dataclass(frozen=True)
class TriForceOptions(ViewOptions):
    """The view of the target, and the small model's view (TriForce, section 5.1)."""

    depth: int | None = option(
        min=1,
        help="tokens that the target emits on its view before it verifies them (gamma_2)",
        usual="6; planned: as many as pay",
    )
    drafted: int = option(INNER_CHAIN_LENGTH, min=1, help="tokens that the small model drafts at a time (gamma_1)")
    streamed: int = option(
        STREAMING_TOKENS, min=SINK + 1, help="tokens that the small model attends to, the first and the last"
    )


@takes(TriForceOptions)
def triforce(draft: SmallLMDraft, **options: Any) -> TriForceDrafter:
    """Makes TriForce's drafter, with a small model on the first and last tokens and the target on retrieved chunks."""
    (config,) = parse("triforce", options, TriForceOptions)
    small_view = {"view": "streaming", "sink": SINK, "recent": config.streamed - SINK}
    small_lm = SmallLMDrafter(draft, tree="chain", depth=config.drafted, **small_view)
    view_options = {name: getattr(config, name) for name in declared(ViewOptions)}
    return TriForceDrafter(small_lm, SelfDrafter(view="chunks", **view_options), config.depth)
