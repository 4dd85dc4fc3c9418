"""Standard speculative sampling (rejection sampling), as papers measure acceptance: drafts draw independently.

Chains and static trees sample a node's candidates from the draft's distribution, without replacement (Leviathan et al.
2023, section 2.3; Miao et al. 2024, SpecInfer; Li et al. 2024, EAGLE). Dynamic trees and lookups choose candidates by
rank: each counts as drawn with probability 1 (as in the code of EAGLE-2 and 3). Outputs have the target's distribution.
"""

from __future__ import annotations

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
from longdraft.trees.level import DraftLogits, DraftTopk, TreeLevel
from longdraft.trees.tree import TokenTree

# Trees whose shape does not depend on the drafted tokens, so that candidates can be sampled.
SAMPLED_TREES = ("chain", "static")


def acceptance_probs(p: Tensor, tokens: list[int], q: Tensor | None = None) -> tuple[list[float], Tensor]:
    """Acceptance probabilities of a node's candidates, which are tried one after the other.

    Args:
        p: (vocabulary,) the target's distribution.
        tokens: the candidates in the order in which they were drawn, without replacement.
        q: (vocabulary,) the draft's distribution, from which they were drawn; None: each has probability 1.

    Returns:
        Each candidate's probability if the ones before it are rejected; the residual distribution if all are rejected.
    """
    probs, p = list[float](), p.double()
    for token in tokens:
        one_hot = F.one_hot(torch.tensor(token, device=p.device), len(p)).double()
        draft = one_hot if q is None else q.double() / q.double().sum()
        probs.append(float((p[token] / draft[token]).clamp(max=1.0)))
        residual = (p - draft).clamp(min=0.0)
        p = residual / residual.sum() if residual.sum() > 0 else p  # no residual: the token is always accepted
        q = None if q is None else q * (1 - one_hot)
    return probs, p


class RejectionSampler(Sampler):
    """Walks down each round's tree: accepts a candidate, or draws from the residual distribution.

    Attributes:
        candidates_by_path: tokens of a path below the root -> candidates drawn behind it, and their distribution.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator) -> None:
        super().__init__(False, sampling.processors())
        self.generator, self.candidates_by_path = generator, dict[tuple[int, ...], tuple[list[int], torch.Tensor]]()

    def start_round(self, tree: TokenTree) -> None:
        """Sets the tree that the next samples walk down."""
        self._tree, self._path = tree, [0]

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        p = self.probabilities(input_ids, logits)
        # Tokens beyond the target's vocabulary cannot be accepted.
        children = {t: node for t, node in self._tree.children(self._path[-1]).items() if t < len(p)}
        tokens, q = self.candidates_by_path.get(tuple(self._tree.tokens[node] for node in self._path[1:]), ([], p))
        drawn, q = [token for token in tokens if token in children], F.pad(q, (0, len(p) - len(q)))
        for candidates, draft in ((drawn, q), ([t for t in children if t not in drawn], None)):
            probs, p = acceptance_probs(p, candidates, draft)
            for token, prob in zip(candidates, probs, strict=True):
                if float(torch.rand((), generator=self.generator, device=p.device)) < prob:
                    self._path.append(children[token])
                    return token
        return int(p.multinomial(1, generator=self.generator))

    def sampled_children(self, draft_logits: DraftLogits, ids: torch.Tensor | None) -> DraftTopk:
        """A ``draft_topk`` for ``TreeConfig.grow`` that samples. ``ids``: target ids of the draft's vocabulary."""
        paths = list[tuple[int, ...]]()
        self.candidates_by_path.clear()

        def sample_level(level: TreeLevel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            nodes = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
            paths[:] = [(*paths[parent], token) for parent, token in nodes] if level.depth else [()]
            q = torch.stack([self.probabilities(logits[:0].long(), logits) for logits in draft_logits(level)[0]])
            # The top k of q / Exp(1) noise is a sample without replacement (the Gumbel top-k trick).
            drawn = (q / torch.empty_like(q).exponential_(generator=self.generator)).topk(min(count, q.shape[1]))
            for path, q_node, scores, tokens in zip(paths, q, drawn.values, drawn.indices, strict=True):
                tokens = tokens[scores > 0]
                if ids is not None:
                    q_node, tokens = q_node.new_zeros(int(ids.max()) + 1).index_copy(0, ids, q_node), ids[tokens]
                self.candidates_by_path[path] = tokens.tolist(), q_node
            # Scores depend on the rank alone, so that the tree keeps tokens in the order drawn, whatever their q is.
            ranks = -torch.arange(1.0, 1 + drawn.indices.shape[1], device=q.device)
            return ranks.expand(drawn.indices.shape)[None], drawn.indices[None]

        return sample_level


class RejectionSamplingJob(Job):
    """A job of one prompt with rejection sampling in its rounds; the prefill's token is sampled as usual."""

    def start(self, spec: Speculator, cache: PromptCache | None) -> Generation:
        run = super().start(spec, cache)
        drafter: Any = run._engine.drafter
        draft: Any = drafter.draft_model if isinstance(drafter, CombinedDrafter) else drafter
        is_sampled = isinstance(draft, TreeDrafter) and draft.tree.name in SAMPLED_TREES
        propose: Any = drafter.propose
        sampler = RejectionSampler(self.sampling, torch.Generator(run._engine.runner.device).manual_seed(self.seed + 1))

        def propose_and_track(sequences: list[Any], limit: Any = None) -> list[TokenTree]:
            sequences[0].sampler = sampler
            trees: list[TokenTree] = propose(sequences, limit)
            sampler.start_round(trees[0])
            return trees

        drafter.propose = propose_and_track
        if is_sampled:
            grow: Any = draft.grow
            draft.grow = lambda s, draft_logits, ids, *args: grow(
                s, draft_logits, ids, *args[:2], sampler.sampled_children(draft_logits, ids)
            )
        return run
