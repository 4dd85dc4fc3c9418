"""A drafter that reads its target's rows, driven by hand as an engine would drive it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft import Speculator
from longdraft.engine.sequence import Sequence
from tests.support.definitions import DraftLogprobs, assert_matches_definition
from tests.support.events import prefill_event, rewrite_event
from tests.support.forwards import forward


class Decoding:
    """A speculator's drafter, a store and a sequence.

    Args:
        text: the sequence's first tokens, of which the first ``prompt`` are its prompt.
        says: the drafter's definition; given the rows that it sees of the text, where it does not see all.
    """

    def __init__(self, spec: Speculator, text: list[int], prompt: int, says: Callable[..., DraftLogprobs]) -> None:
        self.says, self.runner = says, spec.runner()
        self.drafter = drafter = spec.recipe().drafter()
        self.store = self.runner.new_store(1, len(text) + 60, drafter.needs(self.runner).feature_layers)
        drafter.bind(self.runner, self.store)
        self.s = Sequence(0, text[:prompt], 80)
        self.read(text[:prompt])
        self.s.append(text[prompt])
        drafter.observe(prefill_event(self.s))
        self.go_on(*text[prompt + 1 :])

    def read(self, tokens: list[int]) -> None:
        forward(self.runner, [tokens], self.store, [0], logits="none")
        self.store.commit(0, range(len(tokens)))

    def go_on(self, *tokens: int) -> None:
        """Reads the last token and appends the next one, for each of them."""
        for token in tokens:
            self.read([self.s.tokens[-1]])
            self.s.append(token)

    def check(self, *seen: list[int]) -> None:
        """What is proposed now is what the definition says."""
        (tree,) = self.drafter.propose([self.s])
        assert tree.num_draft_tokens
        assert_matches_definition(self.says(*seen), self.s.tokens, tree)

    def draft_from_inexact_rows(self, back: int) -> int:
        """Drafts while the last rows are unverified and wrong; returns the first of them."""
        store = self.store
        kept = [x.clone() for x in (store.keys, store.values)]
        features = None if store.features is None else store.features.clone()
        start = store.lengths[0] - back
        store.lengths[0], store.num_unverified[0] = start, back
        self.drafter.observe(rewrite_event(self.s, start))
        for x in (store.keys, store.values):
            x[:, 0, :, start:] = 7.0
        if features is not None:
            store.features[0, start:] = torch.randn_like(store.features[0, start:])
        self.drafter.propose([self.s])
        for x, exact in zip((store.keys, store.values), kept, strict=True):
            x.copy_(exact)
        if features is not None:
            store.features.copy_(features)
        store.num_unverified[0] = 0
        return start
