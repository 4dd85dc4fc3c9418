"""A drafter that reads its target's features, driven by hand as an engine would drive it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from tests.events import begun, replaced, taken_back
from tests.forwards import forward


class Decoding:
    """A drafter, a store and a sequence.

    Args:
        text: the sequence's first tokens, of which the first ``prompt`` are its prompt.
        defined: asserts that a tree drafted behind a text is the one of the definition.
    """

    def __init__(self, model, drafter, text: list[int], prompt: int, defined: Callable[..., None]) -> None:
        self.drafter, self.defined = drafter, defined
        self.runner = TargetRunner(model)
        self.store = self.runner.new_store(1, len(text) + 40, drafter.feature_layers(self.runner))
        drafter.bind(self.runner, self.store)
        self.s = Sequence(0, text[:prompt], 60)
        self._read(text[:prompt])
        self.s.append(text[prompt])
        drafter.observe(begun(self.s))
        self.go_on(*text[prompt + 1 :])

    def _read(self, tokens: list[int]) -> None:
        forward(self.runner, [tokens], self.store, [0], logits="none")
        self.store.commit(0, range(len(tokens)))

    def go_on(self, *tokens: int) -> None:
        """Reads the last token and appends the next one, for each of them."""
        for token in tokens:
            self._read([self.s.tokens[-1]])
            self.s.append(token)

    def check(self, seen: list[int] | None = None) -> None:
        (tree,) = self.drafter.propose([self.s])
        more = {} if seen is None else {"seen": seen}
        self.defined(self.s.tokens, tree, self.drafter.window, **more)

    def check_many_rows_at_once(self) -> None:
        self.check()
        self.go_on(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)
        self.check()

    def draft_from_inexact_rows(self, back: int) -> None:
        """Drafts while the last rows are unverified and wrong."""
        store = self.store
        exact, start = store.features.clone(), store.lengths[0] - back
        store.lengths[0], store.unverified[0] = start, back
        self.drafter.observe(replaced(self.s, start))
        store.features[0, start:] = torch.randn_like(store.features[0, start:])
        self.drafter.propose([self.s])
        store.features.copy_(exact)
        store.unverified[0] = 0

    def check_rewound_text(self, back: int) -> None:
        """Takes back tokens of which the drafter has read inexact rows; others stand in their place."""
        self.check()
        self.draft_from_inexact_rows(back)
        del self.s.output[-back:]
        self.s.output[-1] = (self.s.output[-1] + 5) % 11
        self.drafter.observe(taken_back(self.s))
        self.check()
        self.go_on(4)
        self.check()
