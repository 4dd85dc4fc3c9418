"""Accepts drafted tokens by rejection sampling (standard speculative sampling), as papers do to measure acceptance.

A drafted token that may follow a node of the tree is a candidate of the node. Chains and static trees sample a node's
candidates from the draft's distribution, without replacement (Leviathan et al. 2023, section 2.3; Miao et al. 2024,
SpecInfer; Li et al. 2024, EAGLE). Dynamic trees and lookups choose candidates by rank: each candidate is treated as if
the draft had drawn it with probability 1 (as in the code of EAGLE-2 and 3). Outputs have the target's distribution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longdraft.bench.contenders import Job
from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.session import Generation
from longdraft.memory.prompt_cache import PromptCache
from longdraft.speculator import Speculator
from longdraft.trees.level import LevelExpander, TreeLevel
from longdraft.trees.tree import TokenTree

# Trees whose shape does not depend on the drafted tokens, so that candidates can be sampled.
SAMPLED_TREES = ("chain", "static")


def acceptance_probs(p: Tensor, tokens: list[int], q: Tensor | None = None) -> tuple[list[float], Tensor]:
    """Returns the acceptance probabilities of a node's candidates, which are tried one after the other.

    Args:
        p: (vocabulary,) the target's distribution.
        tokens: the candidates in the order in which they were drawn, without replacement.
        q: (vocabulary,) the draft's distribution; None: each candidate was drawn with probability 1.

    Returns:
        For each candidate the probability that it is accepted if all candidates before it were rejected, and the
        (vocabulary,) residual distribution, from which the token is drawn if all candidates are rejected.
    """
    probs, p = list[float](), p.double()
    for token in tokens:
        one_hot = F.one_hot(torch.tensor(token, device=p.device), len(p)).double()
        draft_probs = one_hot if q is None else q.double() / q.double().sum()
        probs.append(float((p[token] / draft_probs[token]).clamp(max=1.0)))
        residual = (p - draft_probs).clamp(min=0.0)
        p = residual / residual.sum() if residual.sum() > 0 else p  # without a residual the token is always accepted
        q = None if q is None else q * (1 - one_hot)  # the next candidate was drawn without replacement
    return probs, p


class RejectionSampler(Sampler):
    """Walks down the tree of each round. At each node, accepts a candidate or draws from the residual distribution.

    Attributes:
        candidates_by_path: by the tokens from the root (exclusive) to a node: the node's sampled candidates, and the
            distribution (vocabulary,) from which they were drawn.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator) -> None:
        super().__init__(greedy=False, processors=sampling.processors())
        self.generator, self.candidates_by_path = generator, dict[tuple[int, ...], tuple[list[int], torch.Tensor]]()

    def start_round(self, tree: TokenTree) -> None:
        """Sets the tree of this round. The walk begins at the root, which is node 0."""
        self._tree, self._path = tree, [0]

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        p = self.probabilities(input_ids, logits)
        # By token, the child node. Tokens beyond the target's vocabulary cannot be accepted.
        children = {t: node for t, node in self._tree.children(self._path[-1]).items() if t < len(p)}
        # Without sampled candidates the distribution is not used: any (p) will do.
        tokens, q = self.candidates_by_path.get(tuple(self._tree.tokens[node] for node in self._path[1:]), ([], p))
        sampled, q = [token for token in tokens if token in children], F.pad(q, (0, len(p) - len(q)))
        chosen_by_rank = [token for token in children if token not in sampled]
        for candidates, draft_probs in ((sampled, q), (chosen_by_rank, None)):
            probs, p = acceptance_probs(p, candidates, draft_probs)
            for token, prob in zip(candidates, probs, strict=True):
                if float(torch.rand((), generator=self.generator, device=p.device)) < prob:
                    self._path.append(children[token])
                    return token
        return int(p.multinomial(1, generator=self.generator))

    def sampling_expander(self, expander: LevelExpander) -> LevelExpander:
        """Returns an expander that samples candidates instead of choosing the top k, without calibration."""
        target_ids = expander.draft_to_target_ids
        paths = list[tuple[int, ...]]()  # for each node of the level: the tokens from the root to the node
        self.candidates_by_path.clear()

        def sample_level(level: TreeLevel, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
            nodes = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
            paths[:] = [(*paths[parent], token) for parent, token in nodes] if level.depth else [()]
            # q: (nodes, draft vocabulary). Without earlier tokens (an empty ``logits[:0]``) there are no penalties.
            (all_logits,) = expander.logits_or_topk(level, 0)
            q = torch.stack([self.probabilities(logits[:0].long(), logits) for logits in all_logits[0]])
            # The top k of q / Exp(1) noise is a sample without replacement (the Gumbel top-k trick).
            noisy = q / torch.empty_like(q).exponential_(generator=self.generator)
            drawn = noisy.topk(min(num_candidates, q.shape[1]))
            for path, node_q, scores, tokens in zip(paths, q, drawn.values, drawn.indices, strict=True):
                tokens = tokens[scores > 0]
                if target_ids is not None:
                    target_q = node_q.new_zeros(int(target_ids.max()) + 1)
                    node_q, tokens = target_q.index_copy(0, target_ids, node_q), target_ids[tokens]
                self.candidates_by_path[path] = tokens.tolist(), node_q
            # A score tells only the rank: the tree keeps candidates in the order drawn, not in the order of q.
            ranks = -torch.arange(1.0, 1 + drawn.indices.shape[1], device=q.device)
            return ranks.expand(drawn.indices.shape)[None], drawn.indices[None]

        return replace(expander, logits_or_topk=sample_level, calibrate=None)


class RejectionSamplingJob(Job):
    """A job of one prompt whose rounds use rejection sampling. The token of the prefill is sampled as usual."""

    def start(self, spec: Speculator, cache: PromptCache | None) -> Generation:
        generation = super().start(spec, cache)
        drafter: Any = generation._engine.drafter
        draft: Any = drafter.draft_model if isinstance(drafter, CombinedDrafter) else drafter
        is_sampled = isinstance(draft, TreeDrafter) and draft.tree.name in SAMPLED_TREES
        propose: Any = drafter.propose
        generator = torch.Generator(generation._engine.runner.device).manual_seed(self.seed + 1)
        sampler = RejectionSampler(self.sampling, generator)

        def propose_and_track(sequences: list[Any], limit: Any = None) -> list[TokenTree]:
            sequences[0].sampler = sampler
            trees: list[TokenTree] = propose(sequences, limit)
            sampler.start_round(trees[0])
            return trees

        drafter.propose = propose_and_track
        if is_sampled:
            grow: Any = draft.grow
            draft.grow = lambda sequences, expander, limit: grow(sequences, sampler.sampling_expander(expander), limit)
        return generation
