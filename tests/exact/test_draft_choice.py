"""Which method decodes, and with which draft: named, from a folder, shipped, or by default."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import longdraft
from longdraft import Speculator
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.registry import METHODS
from tests.support.drafts import random_draft, random_eagle3
from tests.support.tiny import tiny_model


@pytest.fixture
def model():
    return tiny_model(vocab=11)


@pytest.fixture
def shipped(tmp_path, shipped_in):
    """An empty place for shipped drafts."""
    shipped_in(tmp_path / "shipped")
    return tmp_path / "shipped"


def listed(name):
    return next(m for m in longdraft.methods() if m["name"] == name)


def test_a_folder_is_a_method_with_its_draft(model, tmp_path):
    folder = random_draft(tmp_path, model)
    for spec in (
        Speculator(folder, target=model),
        Speculator(str(folder), target=model),
        Speculator("longspec", target=model, draft=folder),
        Speculator(target=model, draft=str(folder)),
    ):
        assert spec.method.name == "longspec"
        assert spec.generate([[1, 2]], max_new_tokens=8)[0].method == "longspec"


def test_without_a_shipped_draft_the_default_is_prompt_lookup(model, shipped):
    assert Speculator(target=model).generate([[1, 2]], max_new_tokens=4)[0].method == "prompt-lookup"
    assert listed("longspec") == {
        "name": "longspec", "exact": True, "needs_draft": True,
        "paper": "Yang et al. 2025, LongSpec, arXiv:2502.17421", "available": False,
    }  # fmt: skip


def test_with_a_shipped_draft_the_default_is_longspec(model, shipped):
    random_draft(shipped / "tiny", model)
    assert Speculator(target=model).generate([[1, 2]], max_new_tokens=4)[0].method == "longspec"
    assert Speculator("longspec", target=model).generate([[1, 2]], max_new_tokens=4)[0].new_tokens == 4
    assert Speculator("prompt-lookup", target=model).method.name == "prompt-lookup"
    assert Speculator(target=tiny_model(vocab=12)).method.name == "prompt-lookup"
    assert listed("longspec")["available"] is True


@pytest.mark.parametrize(("worthwhile", "alone"), [(False, "LongSpecDrafter"), (True, "SelfDrafter")])
def test_where_all_is_left_to_us_repeats_are_proposed_too(model, shipped, monkeypatch, worthwhile, alone):
    random_draft(shipped / "tiny", model)
    monkeypatch.setitem(METHODS, "self", replace(METHODS["self"], is_worthwhile=lambda runner: worthwhile))

    def drafter(*method, **options):
        spec = Speculator(*method, target=model, **options)
        return type(spec.recipe().drafter()).__name__

    assert drafter(plan="auto") == "CombinedDrafter"
    assert drafter(plan="auto", lookup=False) == alone
    assert drafter(plan="fixed") == "LongSpecDrafter"  # the paper's
    assert drafter(plan=None, widths=(2, 2)) == "LongSpecDrafter"
    assert drafter("longspec", plan="auto") == "LongSpecDrafter"


def test_shipped_drafts_of_several_kinds(shipped):
    model = tiny_model(vocab=11, layers=6)
    random_eagle3(shipped / "a-eagle3", model)
    assert Speculator(target=model).method.name == "prompt-lookup"
    assert Speculator("eagle3", target=model).generate([[1, 2]], max_new_tokens=3)[0].method == "eagle3"
    with pytest.raises(CapabilityError):
        Speculator("longspec", target=model)
    random_draft(shipped / "b-longspec", model)
    assert Speculator(target=model).method.name == "longspec"
    for name, folder in (("eagle3", "a-eagle3"), ("longspec", "b-longspec")):
        assert Speculator(name, target=model).generate([[1, 2]], max_new_tokens=3)[0].method == name
        assert listed(name)["available"] is True
        assert Speculator(name, target=model).draft().folder == shipped / folder


def test_options_narrow_the_default(model, shipped):
    random_draft(shipped / "tiny", model)
    assert Speculator(target=model, widths=(2, 2)).method.name == "longspec"
    assert Speculator(target=model, branches=2).method.name == "prompt-lookup"


def test_the_default_waits_for_the_target(model, shipped):
    spec = Speculator()
    ids = torch.tensor([[1, 2, 3]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, custom_generate=spec, **settings), model.generate(ids, **settings))
    assert spec.method.name == "prompt-lookup"


def test_the_shipped_draft_of_these_weights_comes_first(model, shipped):
    def chosen(**over):
        spec = Speculator(target=tiny_model(**{"vocab": 11} | over))
        return spec.method.name == "longspec" and spec.draft().folder.name

    random_draft(shipped / "a", tiny_model(vocab=11, seed=1))
    assert chosen() == "a"  # of another fine-tune: it fits all the same
    random_draft(shipped / "b", model)
    random_draft(shipped / "c", tiny_model(vocab=11, seed=2))
    assert chosen() == "b"
    assert not chosen(rope_parameters={"rope_type": "default", "rope_theta": 5e5}) and not chosen(vocab=12)


def test_a_damaged_shipped_draft_is_named(model, shipped):
    folder = random_draft(shipped / "a", model)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(folder)):
        Speculator(target=model)


def test_a_draft_for_a_method_that_is_not_known(model, tmp_path):
    folder = random_draft(tmp_path, model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"drafter": "oracle"}))
    with pytest.raises(CheckpointError):
        Speculator(folder)


def test_a_draft_that_has_been_read_names_its_method(tmp_path):
    model = tiny_model(vocab=11, layers=6)
    draft = Speculator(random_eagle3(tmp_path, model), target=model).draft()
    assert Speculator(target=model, draft=draft).method.name == "eagle3"
    with pytest.raises(CheckpointError):
        Speculator("longspec", target=model, draft=draft)
