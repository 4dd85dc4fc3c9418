"""Suffix lookups in vLLM: proposes what followed earlier matches of a request's end, in its own text."""

from __future__ import annotations

from typing import Any

from longdraft.drafters.suffix import SuffixDrafter
from longdraft_engines.vllm.proposer import Proposer


class Lookup(Proposer):
    """Needs no draft and reads nothing of the target, so any model and attention backend will do.

    Options: ``min_n``, ``max_n`` (lengths of matches); ``earlier`` (how many tokens of ended requests to search too:
    of all tenants, so leave it at 0 if these must not know of each other).
    """

    @staticmethod
    def default_options() -> dict[str, Any]:
        return {"min_n": 1, "max_n": 64, "earlier": 0}

    def load_model(self, model: Any) -> None:
        del model
        self.drafter = SuffixDrafter(
            max_draft=self.num_speculative_tokens, max_nodes=self.num_speculative_tokens, branches=1, **self.options
        )
