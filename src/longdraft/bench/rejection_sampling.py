"""Standard speculative sampling, whose acceptance papers publish: a draft has random numbers of its own.

Chains and static trees draw from the draft's distribution, the candidates of a node without replacement (Leviathan et
al. 2023, section 2.3; Miao et al. 2024, SpecInfer; Li et al. 2024, EAGLE). Trees that rank candidates, and lookups,
choose theirs: each counts as drawn with certainty (the code of EAGLE-2 and 3). Text is the target's either way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from longdraft.bench.contenders import Job
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.session import Generation
from longdraft.memory.prompt_cache import PromptCache
from longdraft.speculator import Speculator
from longdraft.trees.level import DraftLogits, DraftTopk, TreeLevel
from longdraft.trees.tree import TokenTree

# Trees whose shape does not depend on what is drafted: their candidates can be drawn.
SAMPLED_TREES = ("chain", "static")


def acceptance_probs(
    p: torch.Tensor, tokens: list[int], q: torch.Tensor | None = None
) -> tuple[list[float], torch.Tensor]:
    """Judges the candidates of a node, one after the other.

    Args:
        p, q: (vocabulary,) the target's distribution and the draft's, from which the tokens were drawn in this order
            without replacement; None: they were chosen.

    Returns:
        Each token's chance to be accepted once those before were not, and what is sampled from if none is.
    """
    chances, p = list[float](), p.double()
    for token in tokens:
        one = F.one_hot(torch.tensor(token, device=p.device), len(p)).double()
        drawn = one if q is None else q.double() / q.double().sum()
        chances.append(float((p[token] / drawn[token]).clamp(max=1.0)))
        left = (p - drawn).clamp(min=0.0)
        p = left / left.sum() if left.sum() > 0 else p  # nothing is left where the token is accepted for certain
        q = None if q is None else q * (1 - one)
    return chances, p


class RejectionSampler(Sampler):
    """Accepts, rejects and draws anew, down the tree of each round.

    Attributes:
        drawn: by path from the root, the tokens that were drawn behind it, in their order, and their distribution.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator) -> None:
        super().__init__(False, sampling.processors())
        self.generator, self.candidates_by_path = generator, dict[tuple[int, ...], tuple[list[int], torch.Tensor]]()

    def start_round(self, tree: TokenTree) -> None:
        """Takes a round's tree."""
        self._tree, self._path = tree, [0]

    def sample(self, input_ids: torch.Tensor, logits: torch.Tensor) -> int:
        left = self.probabilities(input_ids, logits)
        children = {t: node for t, node in self._tree.children(self._path[-1]).items() if t < len(left)}
        tokens, q = self.candidates_by_path.get(tuple(self._tree.tokens[node] for node in self._path[1:]), ([], left))
        drawn, q = [token for token in tokens if token in children], F.pad(q, (0, len(left) - len(q)))
        for candidates, source in ((drawn, q), ([t for t in children if t not in drawn], None)):
            chances, left = acceptance_probs(left, candidates, source)
            for token, chance in zip(candidates, chances, strict=True):
                if float(torch.rand((), generator=self.generator, device=left.device)) < chance:
                    self._path.append(children[token])
                    return token
        return int(left.multinomial(1, generator=self.generator))

    def sampled_children(self, expand: DraftLogits, ids: torch.Tensor | None) -> DraftTopk:
        """Draws the children of a text's nodes, in place of the likeliest; arguments as of ``TreeConfig.grow``."""
        paths = list[tuple[int, ...]]()
        self.candidates_by_path.clear()

        def draw(level: TreeLevel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            nodes = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
            paths[:] = [(*paths[parent], token) for parent, token in nodes] if level.depth else [()]
            q = torch.stack([self.probabilities(row[:0].long(), row) for row in expand(level)[0]])
            drawn = (q / torch.empty_like(q).exponential_(generator=self.generator)).topk(min(count, q.shape[1]))
            for path, row, values, tokens in zip(paths, q, drawn.values, drawn.indices, strict=True):
                tokens = tokens[values > 0]
                if ids is not None:
                    row, tokens = row.new_zeros(int(ids.max()) + 1).index_copy(0, ids, row), ids[tokens]
                self.candidates_by_path[path] = tokens.tolist(), row
            # By rank alone: trees must not prefer some of the drawn tokens to others.
            ranks = -torch.arange(1.0, 1 + drawn.indices.shape[1], device=q.device)
            return ranks.expand(drawn.indices.shape)[None], drawn.indices[None]

        return draw


class RejectionSamplingJob(Job):
    """A job of one prompt that is sampled so, but for the prompt's own token."""

    def start(self, spec: Speculator, cache: PromptCache | None) -> Generation:
        run = super().start(spec, cache)
        drafter: Any = run._engine.drafter
        own: Any = getattr(drafter, "paid", drafter)
        propose: Any = drafter.propose
        draws = isinstance(own, TreeDrafter) and own.tree.name in SAMPLED_TREES
        sampler = RejectionSampler(self.sampling, torch.Generator(run._engine.runner.device).manual_seed(self.seed + 1))

        def proposed(sequences: list[Any], limit: Any = None) -> list[TokenTree]:
            sequences[0].sampler = sampler
            trees: list[TokenTree] = propose(sequences, limit)
            sampler.start_round(trees[0])
            return trees

        drafter.propose = proposed
        if draws:
            grow: Any = own.grow
            own.grow = lambda s, expand, ids, *more: grow(
                s, expand, ids, *more[:2], sampler.sampled_children(expand, ids)
            )
        return run
