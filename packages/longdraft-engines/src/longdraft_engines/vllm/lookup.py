"""Suffix lookups in vLLM: drafts what followed earlier matches of a request's last tokens."""

from __future__ import annotations

from typing import Any

from longdraft.drafters.suffix import SuffixDrafter
from longdraft_engines.vllm.proposer import Proposer


class Lookup(Proposer):
    """Drafts from token ids alone. So it works with any model and any attention backend.

    Options: ``min_n`` and ``max_n``, the shortest and longest match; ``earlier``, the number of tokens of ended
    requests that are searched too. Leave ``earlier`` at 0 if tenants must not learn of each other.
    """

    @staticmethod
    def default_options() -> dict[str, Any]:
        return {"min_n": 1, "max_n": 64, "earlier": 0}

    def load_model(self, model: Any) -> None:
        del model
        num_tokens = self.num_speculative_tokens
        # One branch makes a chain.
        self.drafter = SuffixDrafter(max_draft=num_tokens, max_nodes=num_tokens, branches=1, **self.options)
