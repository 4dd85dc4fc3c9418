"""Suffix lookups in vLLM: drafts what followed earlier matches of a request's last tokens."""

from __future__ import annotations

from typing import Any

from longdraft.drafters.suffix import SuffixDrafter
from longdraft_engines.vllm.proposer import Proposer


class Lookup(Proposer):
    """Drafts without a draft model and without reading the target, so for any model and attention backend.

    Options: ``min_n``, ``max_n`` (lengths of matches); ``earlier`` (also search this many tokens of all tenants' ended
    requests: leave it at 0 if tenants must not learn of each other).
    """

    @staticmethod
    def default_options() -> dict[str, Any]:
        return {"min_n": 1, "max_n": 64, "earlier": 0}

    def load_model(self, model: Any) -> None:
        del model
        k = self.num_speculative_tokens
        self.drafter = SuffixDrafter(max_draft=k, max_nodes=k, branches=1, **self.options)  # one branch: a chain
