"""Standard speculative sampling, whose acceptance papers publish: a draft has random numbers of its own.

Chains and static trees draw from the draft's distribution, the candidates of a node without replacement (Leviathan et
al. 2023, section 2.3; Miao et al. 2024, SpecInfer; Li et al. 2024, EAGLE). Trees that rank candidates, and lookups,
choose theirs: each counts as drawn with certainty (the code of EAGLE-2 and 3). Text is the target's either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from longdraft.bench.contenders import Job
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.engine.sampler import Sampler
from longdraft.engine.session import Generation
from longdraft.memory.prompt_cache import PromptCache
from longdraft.speculator import Speculator
from longdraft.trees.kind import TreeKind
from longdraft.trees.level import Expand, Level
from longdraft.trees.tree import TokenTree

DRAWN = ("chain", "static")
"""Kinds of trees whose shape does not depend on what is drafted, so that candidates can be drawn."""


def rejection(
    p: torch.Tensor, tokens: Sequence[int], q: torch.Tensor | None = None
) -> tuple[list[float], torch.Tensor]:
    """Judges the candidates of a node, one after the other.

    Args:
        p: (vocabulary,) the target's distribution.
        tokens: different ones, in the order in which they were drawn without replacement from q.
        q: (vocabulary,) the draft's weights; None: the tokens were chosen, not drawn.

    Returns:
        The chance of each token to be accepted once those before were not, and the distribution (vocabulary,) of what
        is emitted if none is.
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


class Standard(Sampler):
    """Accepts, rejects and draws anew, down the tree of each round.

    Attributes:
        tree: the round's.
        drawn: by path from its root, the tokens that were drawn behind it, in their order, and their distribution.
    """

    def __init__(self, of: Sampler, generator: torch.Generator) -> None:
        super().__init__(False, of.processors)
        self.generator, self.drawn = generator, dict[tuple[int, ...], tuple[list[int], torch.Tensor]]()
        self.begin(TokenTree((0,), (-1,)))

    def begin(self, tree: TokenTree) -> None:
        self.tree, self._path = tree, [0]

    def sample(self, text: torch.Tensor, logits: torch.Tensor) -> int:
        left = self.distribution(text, logits)
        children = {t: node for t, node in self.tree.children(self._path[-1]).items() if t < len(left)}
        tokens, q = self.drawn.get(tuple(self.tree.tokens[node] for node in self._path[1:]), ([], left))
        drawn, q = [token for token in tokens if token in children], F.pad(q, (0, len(left) - len(q)))
        for candidates, source in ((drawn, q), ([t for t in children if t not in drawn], None)):
            chances, left = rejection(left, candidates, source)
            for token, chance in zip(candidates, chances, strict=True):
                if float(torch.rand((), generator=self.generator, device=left.device)) < chance:
                    self._path.append(children[token])
                    return token
        return int(left.multinomial(1, generator=self.generator))


@dataclass(frozen=True, kw_only=True)
class Drawing(TreeKind):
    """A kind of tree whose candidates are drawn; ``sampler`` is told which, for one sequence."""

    sampler: Standard

    def grow(
        self, roots: Sequence[int], expand: Expand, depths: Any = None, ids: Any = None, device: Any = "cpu", **_: Any
    ) -> list[TokenTree]:
        sampler, paths = self.sampler, list[tuple[int, ...]]()
        sampler.drawn.clear()

        def draw(level: Level, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            nodes = zip(level.parents[0].tolist(), level.tokens[0].tolist(), strict=True)
            paths[:] = [(*paths[parent], token) for parent, token in nodes] if level.depth else [()]
            q = torch.stack([sampler.distribution(row[:0].long(), row) for row in expand(level)[0]])
            drawn = (q / torch.empty_like(q).exponential_(generator=sampler.generator)).topk(min(count, q.shape[1]))
            for path, row, values, tokens in zip(paths, q, drawn.values, drawn.indices, strict=True):
                tokens = tokens[values > 0]
                if ids is not None:
                    row, tokens = row.new_zeros(int(ids.max()) + 1).index_copy(0, ids, row), ids[tokens]
                sampler.drawn[path] = tokens.tolist(), row
            # By rank alone: trees must not prefer some of the drawn tokens to others.
            ranks = -torch.arange(1.0, 1 + drawn.indices.shape[1], device=q.device)
            return ranks.expand(drawn.indices.shape)[None], drawn.indices[None]

        return super().grow(roots, expand, depths, ids, device, likeliest=draw)


class StandardJob(Job):
    """A job of one prompt that is sampled so, but for the prompt's own token."""

    def started(self, spec: Speculator, cache: PromptCache | None) -> Generation:
        run = super().started(spec, cache)
        propose = run._engine.drafter.propose
        own = getattr(run._engine.drafter, "paid", run._engine.drafter)

        def proposed(sequences: list[Any], limit: Any = None) -> list[TokenTree]:
            (s,) = sequences
            if not isinstance(s.sampler, Standard):
                s.sampler = Standard(s.sampler, torch.Generator(s.device).manual_seed(self.seed + 1))
                if isinstance(own, TreeDrafter) and own.tree.name in DRAWN:
                    own.tree = Drawing(**vars(own.tree), sampler=s.sampler)
            trees = propose(sequences, limit)
            s.sampler.begin(trees[0])
            return trees

        run._engine.drafter.propose = proposed  # type: ignore[method-assign]
        return run
