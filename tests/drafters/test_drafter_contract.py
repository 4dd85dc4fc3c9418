"""The contract that every drafter keeps, whatever it drafts with. That the output is the target's: tests/exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longdraft import Speculator
from longdraft.options import declared
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit
from tests.drafters.watching import run
from tests.support.methods import METHODS, PARTIAL, Case, target
from tests.support.tiny import tiny_model

CASES = {name: case for name, case in METHODS.items() if name != "ar"}
each_drafter = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
PROMPTS = ([3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(70)])
NEW = 14


@each_drafter
def test_trees_are_rooted_at_the_last_token_and_within_the_drafters_bound(spec_factory, case):
    watching, _ = run(spec_factory.spec(case), PROMPTS)
    assert watching.proposed and (watching.inner.forwards > 0) == (case.method != "prompt-lookup")
    if case.method in ("peagle", "dflash"):  # one forward, whatever the depth and however many texts
        assert watching.inner.forwards <= watching.calls
    for text, _, tree in watching.proposed:
        assert tree.tokens[0] == text[-1]
        assert tree.num_draft_tokens <= watching.inner.max_nodes
        assert all(0 <= token < target().config.vocab_size for token in tree.tokens)


@pytest.mark.parametrize("name", ["longspec", "eagle3", "peagle", "dflash", "small-lm"])
def test_a_text_is_drafted_alike_whatever_is_decoded_beside_it(spec_factory, name):
    """Texts that have accepted fewer tokens feed earlier ones once more; one is shorter than what others accept."""
    prompts = (*PROMPTS, [8])
    trees = [run(spec_factory.spec(METHODS[name]), texts)[0].rounds for texts in (prompts, *([p] for p in prompts))]
    together = {tuple(text): tree.tokens for text, tree in trees[0]}
    assert together == {tuple(text): tree.tokens for rounds in trees[1:] for text, tree in rounds}


@each_drafter
def test_a_planners_limit_is_kept(spec_factory, case):
    sizes = {name: value for name, value in case.options.items() if name not in declared(TreeOptions)}
    draft = case.draft and case.draft.removesuffix(" window")  # the method's own tree is deeper than that window
    watching, sequences = run(
        spec_factory.spec(replace(case, draft=draft, options=sizes)), PROMPTS, limit=NodeLimit(2, 0.0)
    )
    free = watching.inner.free  # lookups cost nothing: the planner cuts them itself
    for _, _, tree in watching.proposed:
        assert tree.num_draft_tokens <= (watching.inner.max_nodes if free else 2)
    assert [s.output for s in sequences] == spec_factory.plain(prompts=tuple(map(tuple, PROMPTS)), n=NEW)


VIEW_TOO = {"budget": 16, "window": 4}  # a budget for both, the verifier and TokenSwift's own view


@pytest.mark.parametrize(
    ("method", "options", "offload"),
    [("longspec", {}, "host:1"), ("eagle3", {}, None), ("tokenswift", VIEW_TOO, None), ("eagle", {}, "host:1")],
)
def test_it_drafts_for_partial_verification(spec_factory, cpu_offloads, method, options, offload):
    spec = spec_factory.spec(Case("specpv", method, PARTIAL | {"drafter": method} | options), offload=offload)
    results = spec.generate(list(PROMPTS), max_new_tokens=NEW)
    assert sum(r.partial_rounds for r in results) > 0 and sum(r.accepted for r in results) > 0


@pytest.mark.parametrize(
    ("method", "dtype"), [("longspec", torch.bfloat16), ("eagle3", torch.float16), ("eagle3", torch.float64)]
)
def test_a_draft_takes_the_targets_dtype(spec_factory, method, dtype):
    model = tiny_model(vocab=11, layers=6, dtype=dtype)
    spec = Speculator(method, target=model, draft=spec_factory.draft(method, model))
    bound = spec.options["draft"].bind(spec.runner())
    assert {p.dtype for p in bound.block.parameters()} == {dtype}
    result = spec.generate([[1, 2, 3]], max_new_tokens=8)[0]
    assert result.new_tokens == 8 and result.drafted > 0
