"""Decoding with a drafter that is watched: every tree that it proposes, and for which text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from longdraft import Sampling, Speculator
from longdraft.engine.drafter import Drafter
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.trees.tree import NodeLimit, TokenTree
from tests.support.events import run_to_end


@dataclass
class Watching(Drafter):
    """Passes everything on to a drafter, and keeps what it proposes.

    Attributes:
        limit: the node limit of every proposal; None for the engine's.
        text_of: the tokens that are kept with a tree, by default the text.
        proposed: (tokens, tokens that may still come, tree) of every proposal.
        calls: how often trees were proposed, for all sequences of a batch together.
    """

    inner: Drafter
    limit: NodeLimit | None = None
    text_of: Callable[[Sequence], list[int]] = lambda s: s.tokens
    proposed: list[tuple[list[int], int, TokenTree]] = field(default_factory=list)
    calls: int = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def rounds(self) -> list[tuple[list[int], TokenTree]]:
        return [(tokens, tree) for tokens, _, tree in self.proposed]

    def propose(self, sequences, limit=None):
        trees = self.inner.propose(sequences, self.limit or limit)
        self.calls += 1
        self.proposed += [(self.text_of(s), s.remaining, tree) for s, tree in zip(sequences, trees, strict=True)]
        return trees

    def observe(self, round_result):
        self.inner.observe(round_result)

    def release(self, sequence):
        self.inner.release(sequence)

    def bind(self, runner, store):
        self.inner.bind(runner, store)

    def needs(self, runner):
        return self.inner.needs(runner)


for _name in ("max_nodes", "free", "forwards", "self_draft_cost"):
    setattr(Watching, _name, property(lambda self, name=_name: getattr(self.inner, name)))
Watching.__abstractmethods__ = frozenset()


def run(
    spec: Speculator,
    prompts,
    new: int = 14,
    limit: NodeLimit | None = None,
    text_of: Callable[[Drafter, Sequence], list[int]] | None = None,
) -> tuple[Watching, list[Sequence]]:
    """Decodes greedily with a fresh drafter of a speculator's method.

    Args:
        new: tokens that follow each prompt.
        limit: a planner's node limit, the same in every round.
        text_of: the tokens that are kept with a tree, by the drafter and the sequence; None for the text.
    """
    runner = spec.runner()
    recipe = spec.recipe(runner)
    drafter = recipe.drafter()
    if limit is not None:
        drafter.use_planner()
    watching = Watching(drafter, limit)
    if text_of is not None:
        watching.text_of = lambda s: text_of(drafter, s)
    sampler = Sampler(True, Sampling().processors())
    sequences = [Sequence(i, list(p), new, sampler=sampler) for i, p in enumerate(prompts)]
    run_to_end(Engine(runner, watching, recipe.verifier()), sequences)
    return watching, sequences
