"""Suffix lookups in vLLM: drafts what followed earlier matches of a request's last tokens."""

from __future__ import annotations

from typing import Any

from longdraft.drafters.suffix import SuffixDrafter
from longdraft_engines.vllm.proposer import Proposer


class Lookup(Proposer):
    """Needs no draft and reads nothing of the target, so it works with any model and attention backend.

    Options: ``min_n``, ``max_n`` (lengths of matches); ``earlier`` (also search this many tokens of ended requests, of
    all tenants: leave it at 0 if they must not learn of each other).
    """

    @staticmethod
    def default_options() -> dict[str, Any]:
        return {"min_n": 1, "max_n": 64, "earlier": 0}

    def load_model(self, model: Any) -> None:
        del model
        k = self.num_speculative_tokens
        self.drafter = SuffixDrafter(max_draft=k, max_nodes=k, branches=1, **self.options)
