"""What is drafted for targets to which a branch costs more than its rows: chains, unless the user shapes a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.exact_methods import SMALL_VIEW
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from longdraft import Speculator
from longdraft.errors import UnsupportedModelError
from tests.drafts import random_draft, random_eagle3, random_heads, small_lm
from tests.quick import in_turn
from tests.recurrent_models import recurrent_model
from tests.tiny import tiny_model

# Each token twice, before two others: lookups see two continuations.
PROMPT = [7 * i % 61 for i in range(61)] + [11 * i % 61 for i in range(61)]


def own_code_model() -> PreTrainedModel:
    config = BloomConfig(
        vocab_size=61, hidden_size=48, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=None, eos_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BloomForCausalLM(config).eval()


MODELS = {
    "qwen3_5": lambda: recurrent_model("qwen3_5_text"),
    "qwen3_next": lambda: recurrent_model("qwen3_next"),
    "bloom": own_code_model,
}


def whole_heads() -> PreTrainedModel:
    """A recurrent model whose rotary embedding LongSpec drafts can share."""
    return recurrent_model("olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def chains(spec: Speculator) -> list[bool]:
    """Whether each verified tree that was drafted is a chain. Checks the text."""
    steps = list(spec.stream(PROMPT, max_new_tokens=16))
    text = [token for step in steps for token in step.token_ids]
    (plain,) = Speculator("ar", target=spec.runner().model).generate(PROMPT, max_new_tokens=16)
    assert text == plain.token_ids
    found = [step.tree.is_chain for step in steps if step.tree is not None and step.tree.drafted]
    assert found, "nothing was drafted"
    return found


@pytest.mark.parametrize(("model", "plan"), in_turn(MODELS, ["auto", "fixed"]))
def test_the_default_method_drafts_chains(model, plan):
    spec = Speculator(target=MODELS[model](), plan=plan)
    assert all(chains(spec))


def drafted(method: str, model: PreTrainedModel, folder: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "prompt-lookup": lambda: {"min_n": 1},
        "longspec": lambda: {"draft": random_draft(folder, model)},
        "eagle3": lambda: {"draft": random_eagle3(folder, model, layers=(0, 1, 2), head_dim=24), "lookup": True},
        "small-lm": lambda: {"draft": small_lm(folder, vocab=61), "lookup": True},
        "heads": lambda: {"draft": random_heads(folder, model)},
        "tokenswift": lambda: {"draft": random_heads(folder, model), "reuse_n": 2, **SMALL_VIEW},
    }
    return options[method]()


METHODS = ("prompt-lookup", "longspec", "eagle3", "small-lm", "heads", "tokenswift")
# Of each method, options that shape its trees.
SHAPES: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"branches": 4}, "longspec": {"tree": "beam", "widths": (3, 2)}, "eagle3": {"tree": "dynamic"},
    "small-lm": {"tree": "opt"}, "heads": {"tree": "static"}, "tokenswift": {"tree": "static"},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_method_drafts_chains_where_forks_cost_and_trees_where_they_do_not(method, tmp_path):
    model = whole_heads()
    options = drafted(method, model, tmp_path / "recurrent")
    found = chains(Speculator(method, target=model, plan="fixed", **options))
    assert all(found)
    found = chains(Speculator(method, target=model, plan="fixed", **options | SHAPES[method]))
    assert not all(found)
    model = tiny_model(layers=4)
    found = chains(Speculator(method, target=model, plan="fixed", **drafted(method, model, tmp_path / "full")))
    assert not all(found)


@pytest.mark.parametrize("method", ["heads", "longspec", "eagle3"])
def test_a_planner_makes_no_chain_longer_than_the_tree_was_deep(method, tmp_path):
    model = whole_heads()
    spec = Speculator(method, target=model, **drafted(method, model, tmp_path), plan="auto")
    assert all(chains(spec))
    drafter = spec.recipe().drafter()
    drafter = getattr(drafter, "paid", drafter)
    depth = drafter.tree.depth
    drafter.use_planner()
    assert drafter.tree.depth == depth


@pytest.mark.parametrize(
    ("method", "instead"), [("specpv", "prompt-lookup"), ("specpv-exact", "self"), ("nested", "self")]
)
def test_methods_that_keep_rows_verified_in_part_name_another_one(method, instead):
    model = recurrent_model("qwen3_5_text")
    with pytest.raises(UnsupportedModelError, match=rf"recurrent layers.*\b{instead}\b"):
        Speculator(method, target=model, drafter="prompt-lookup").generate(PROMPT, max_new_tokens=4)
    assert chains(Speculator(instead, target=model))
