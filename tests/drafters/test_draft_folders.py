"""The contract of draft folders of every kind: what is wrong with one is refused, and the error names it."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CheckpointError
from tests.drafts import edit, random_draft, random_eagle3, random_heads, random_lm, random_onepass
from tests.tiny import tiny_model

MAKE = {
    "longspec": random_draft, "eagle3": random_eagle3, "onepass": random_onepass, "small-lm": random_lm,
    "heads": random_heads,
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", MAKE)
KEPT = [0, 3, 7, 20, 41, 60]


def target(**over):
    return tiny_model(**{"layers": 6} | over)


@pytest.fixture
def folder(kind, tmp_path):
    return MAKE[kind](tmp_path / "draft", target())


def refused(folder, *parts, **over):
    """Loading and binding the draft fails with an error that has these parts."""
    with pytest.raises(CheckpointError) as caught:
        Speculator(folder, target=target(**over))
    assert all(part in str(caught.value) for part in parts), caught.value


@every_kind
def test_files_that_are_damaged_or_missing(folder, kind):
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:-1000])
    refused(folder, "model.safetensors")
    weights.unlink()
    refused(folder, "model.safetensors")
    weights.write_bytes(whole)
    for broken in ("{", "[]", '"text"'):
        config.write_text(broken)
        refused(folder, "config.json")
    config.unlink()
    refused(folder, str(folder))
    config.write_text(text)
    assert kind_of(folder).load(folder).kind == kind
    with pytest.raises(CheckpointError):
        Speculator(folder.parent / "none")


@every_kind
def test_tensors_that_are_not_the_kinds(folder):
    def spoiled(tensors):
        nonlocal first, last
        first, *_, last = tensors
        del tensors[first]
        return tensors | {last: tensors[last][:-1].contiguous(), "extra": torch.zeros(1)}

    first = last = ""
    edit(folder, spoiled)
    refused(folder, f"missing: {first}", "unexpected: extra", last)


@every_kind
def test_a_vocabulary_of_its_own(kind, tmp_path):
    folder = MAKE[kind](tmp_path / "draft", target(), kept=KEPT)
    assert kind_of(folder).load(folder).vocabulary == len(KEPT)
    edit(folder, lambda t: t | {"d2t": torch.arange(6) * 50})
    refused(folder, "d2t" if kind == "longspec" else "")
    edit(folder, lambda t: t | {"d2t": torch.arange(4)})
    refused(folder, "d2t")
    edit(folder, lambda t: {name: x for name, x in t.items() if name != "d2t"})
    refused(folder, "d2t")


@every_kind
def test_another_target(kind, folder):
    for over, name in (
        ({"hidden": 96}, "hidden_size 48 (this target: 96)"), ({"vocab": 60}, "vocab_size 61"),
        ({"layers": 9}, "layers 6"), ({"kv_heads": 3}, "kv_heads 2"), ({"head_dim": 8}, "head_dim 16"),
        ({"family": "qwen2"}, "model_type llama"),
    ):  # fmt: skip
        refused(folder, name, **over)


@every_kind
def test_other_weights_of_the_same_architecture_are_allowed(kind, folder, caplog):
    model = target(seed=1)
    got = Speculator(folder, target=model).generate([[1, 2, 3]], max_new_tokens=10)[0].token_ids
    assert got == Speculator("ar", target=model).generate([[1, 2, 3]], max_new_tokens=10)[0].token_ids
    assert [r.message.count("acceptance may be lower") for r in caplog.records] == [1]


NO_TABLE = ({"draft_vocab_size": 9}, "d2t")
BOTH = [
    ({"heads": "drop"}, "heads"), ({"hidden_size": "six"}, "hidden_size"),
    ({"feature_layers": "drop"}, "feature_layers"), ({"feature_layers": [1, 2.5]}, "feature_layers"),
    ({"feature_layers": [1, 3, 6]}, "increase"), ({"feature_layers": [3, 1, 4]}, "increase"),
    ({"feature_layers": [-1, 1, 4]}, "increase"), ({"feature_layers": [1, 1, 4]}, "increase"),
    ({"feature_layers": [1, 3]}, "144"), ({"window": 0}, "window"), ({"window": "all"}, "window"),
    ({"trained_length": -1}, "trained_length"), ({"rope_theta": "big"}, "right"), ({"rope_factor": [2]}, "right"),
    ({"rope_factor": 4, "rope_original_length": None, "trained_length": None}, "rope_original_length"),
]  # fmt: skip
WRONG = {
    "longspec": [({"heads": "drop"}, "heads"), ({"heads": "six"}, "heads"), ({"window": 0}, "window"), NO_TABLE],
    "eagle3": [*BOTH, ({"heads": 3}, "no multiple")],
    "onepass": [
        *BOTH, ({"slots": "drop"}, "slots"), ({"rank": "drop"}, "rank"), ({"slots": 0}, "slots"),
        ({"slots": 6}, "slot_embedding (3, 48) where config.json asks for (5, 48)"), ({"rank": 5}, "bigram_in"),
        ({"longdraft_format": "drop"}, ""),
    ],
    "small-lm": [({"model": "drop"}, "model"), ({"trained_length": 0}, "trained_length"), NO_TABLE],
    "heads": [
        ({"heads": -3}, "heads"), ({"heads": 2}, "unexpected: heads.2"), ({"heads": 4}, "missing: heads.3"),
        ({"hidden_size": 0}, "hidden_size"), ({"hidden_size": 40}, "shape"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"), NO_TABLE,
    ],
}  # fmt: skip


@every_kind
def test_a_configuration_that_cannot_be_right(kind, folder):
    config = folder / "config.json"
    right = config.read_text()
    for change, part in WRONG[kind]:
        refused(edit(folder, **change), part)
        config.write_text(right)


@every_kind
def test_another_kind(kind, folder):
    load, other = kind_of(folder).load, next(each for each in MAKE if each != kind)
    with pytest.raises(CheckpointError, match=f"for {other}"):
        load(edit(folder, drafter=other))
