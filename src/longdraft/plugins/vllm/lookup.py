"""Suffix lookups in vLLM: what followed earlier matches of a text's end, in the request's own text."""

from __future__ import annotations

from typing import Any

from longdraft.drafters.suffix import SuffixDrafter
from longdraft.plugins.vllm.proposer import Proposer


class Lookup(Proposer):
    """Nothing is trained, and nothing of the target read: any model, any attention backend.

    Options: ``min_n``, ``max_n`` (lengths of matches), ``earlier`` (tokens of requests that have ended, which are
    looked up too: all tenants', so leave it at 0 where these must not know of each other).
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"min_n": 1, "max_n": 64, "earlier": 0}

    def load_model(self, model: Any) -> None:
        del model
        self.drafter = SuffixDrafter(max_draft=self.tokens, max_nodes=self.tokens, branches=1, **self.options)
