"""What is drafted for targets to which a branch costs more than its rows: chains, unless the user shapes a tree."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from longdraft import Speculator
from longdraft.errors import UnsupportedModelError
from tests.support.methods import Case, target
from tests.support.recurrent_models import recurrent_model

NEW = 12
# Each token twice, before two others: lookups see two continuations.
PROMPT = [7 * i % 61 for i in range(61)] + [11 * i % 61 for i in range(61)]


MODELS = {
    "qwen3_5": lambda: recurrent_model("qwen3_5_text"),
    "qwen3_next": lambda: recurrent_model("qwen3_next"),
}


@cache
def whole_heads() -> PreTrainedModel:
    """A recurrent model whose rotary embedding LongSpec drafts can share."""
    return recurrent_model("olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": 1e4})


@cache
def plain(model: PreTrainedModel) -> list[int]:
    return Speculator("ar", target=model).generate(PROMPT, max_new_tokens=NEW)[0].token_ids


def chains(spec: Speculator) -> list[bool]:
    """Whether each verified tree that was drafted is a chain. Checks the text."""
    steps = list(spec.stream(PROMPT, max_new_tokens=NEW))
    assert [token for step in steps for token in step.token_ids] == plain(spec.runner().model)
    found = [step.tree.is_chain for step in steps if step.tree is not None and step.tree.num_draft_tokens]
    assert found, "nothing was drafted"
    return found


@pytest.mark.parametrize(("model", "plan"), zip(MODELS, [{1: 1e-3, 64: 1.1e-3}, "fixed"], strict=True))
def test_the_default_method_drafts_chains(model, plan):
    spec = Speculator(target=MODELS[model](), plan=plan)
    assert all(chains(spec))


CHAINS = {
    "prompt-lookup": Case("prompt-lookup", None, {"min_n": 1}), "longspec": Case("longspec", "longspec"),
    "small-lm": Case("small-lm", "small-lm", {"lookup": True}), "tokenswift": Case("tokenswift", "tokenswift"),
}  # fmt: skip
# Of each method, options that shape its trees.
SHAPES: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"branches": 4}, "longspec": {"tree": "beam", "widths": (3, 2)}, "small-lm": {"tree": "opt"},
    "tokenswift": {"tree": "static"},
}  # fmt: skip


@pytest.mark.parametrize("method", CHAINS)
def test_a_method_drafts_chains_where_forks_cost_and_trees_where_they_do_not(spec_factory, method):
    recurrent, case = whole_heads(), CHAINS[method]
    assert all(chains(spec_factory.spec(case, recurrent, plan="fixed")))
    assert not all(chains(spec_factory.spec(case, recurrent, plan="fixed", **SHAPES[method])))
    assert not all(chains(spec_factory.spec(case, target(vocab=61, layers=4), plan="fixed")))


def test_methods_that_keep_rows_verified_in_part_name_another_one():
    with pytest.raises(UnsupportedModelError, match=r"recurrent layers.*\bprompt-lookup\b"):
        Speculator("specpv", target=whole_heads(), drafter="prompt-lookup").generate(PROMPT, max_new_tokens=4)
