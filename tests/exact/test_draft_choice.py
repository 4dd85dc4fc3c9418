"""Which draft and which method are used: from a folder, shipped, or by default."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import longdraft
from longdraft import Speculator
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.registry import METHODS
from tests.support.drafts import edit, random_draft, random_eagle3
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


def used(*method, target, **options):
    """The method by which a result was made."""
    spec = Speculator(*method, target=target, **options)
    (result,) = spec.generate([[1, 2]], max_new_tokens=4)
    assert result.method == spec.method.name
    return result.method


def test_a_folder_is_a_method_with_its_draft(model, tmp_path):
    folder = random_draft(tmp_path / "draft", model)
    for method in ((folder,), (str(folder),)):
        assert used(*method, target=model) == "longspec"
    assert used("longspec", target=model, draft=folder) == used(target=model, draft=str(folder)) == "longspec"
    edit(folder, drafter="oracle")
    with pytest.raises(CheckpointError):
        Speculator(folder)
    # A draft that has been read names its method.
    model = tiny_model(vocab=11, layers=6)
    draft = Speculator(random_eagle3(tmp_path / "eagle3", model), target=model).draft()
    assert used(target=model, draft=draft) == "eagle3"
    with pytest.raises(CheckpointError):
        Speculator("longspec", target=model, draft=draft)


def test_the_default_is_the_shipped_longspec_draft_or_prompt_lookup(model, shipped):
    assert used(target=model) == "prompt-lookup"
    assert listed("longspec") == {
        "name": "longspec", "exact": True, "needs_draft": True,
        "paper": "Yang et al. 2025, LongSpec, arXiv:2502.17421", "available": False,
    }  # fmt: skip
    random_draft(shipped / "tiny", model)
    assert used(target=model) == used("longspec", target=model) == used(target=model, widths=(2, 2)) == "longspec"
    assert used("prompt-lookup", target=model) == used(target=model, branches=2) == "prompt-lookup"
    assert used(target=tiny_model(vocab=12)) == "prompt-lookup"
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
    assert used(target=model) == "prompt-lookup"
    assert used("eagle3", target=model) == "eagle3"
    with pytest.raises(CapabilityError):
        Speculator("longspec", target=model)
    random_draft(shipped / "b-longspec", model)
    assert used(target=model) == "longspec"
    for name, folder in (("eagle3", "a-eagle3"), ("longspec", "b-longspec")):
        assert used(name, target=model) == name and listed(name)["available"] is True
        assert Speculator(name, target=model).draft().folder == shipped / folder


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
    (shipped / "b" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(shipped / "b")):
        Speculator(target=model)
