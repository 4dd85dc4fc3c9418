"""Draft folders: all layouts load and draft alike, and what is wrong with one is said."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

from longdraft import Speculator
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafts.speculators import to_speculators
from longdraft.errors import CheckpointError
from longdraft.methods import method_of
from longdraft.model.runner import TargetRunner
from tests.drafts import edit, published_eagle3, random_eagle3
from tests.tiny import tiny_model

LAYERS = (1, 3, 4)  # what EAGLE-3 takes of eight layers
KEPT = [1, 2, 5, 7, 10]


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab=11, layers=8)


@pytest.fixture
def folder(tmp_path, model):
    return random_eagle3(tmp_path / "draft", model, layers=LAYERS)


def outcome(folder, model, **loading):
    """What decoding with a draft gives, and how far its proposals went."""
    spec = Speculator("eagle3", target=model, draft=Eagle3Draft.load(folder, **loading), depth=3, top_k=3)
    return [(r.token_ids, r.rounds, r.accepted) for r in spec.generate([[1, 2, 3, 4], [5] * 9], max_new_tokens=16)]


def pickled(folder, prefix=""):
    """The weights as older releases have them, the target's embedding among them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["embed_tokens.weight"] = torch.zeros(11, 48)
    torch.save({prefix + n: t for n, t in tensors.items()}, folder / "pytorch_model.bin")
    return folder


# --- layouts ---


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "kept"])
def test_all_layouts_draft_alike(tmp_path, model, kept):
    ours = random_eagle3(tmp_path / "ours", model, layers=LAYERS, kept=kept)
    expected = outcome(ours, model)
    assert kept or sum(accepted for _, _, accepted in expected) > 0
    theirs = published_eagle3(tmp_path / "theirs", model, kept)
    assert to_speculators(Eagle3Draft.load(ours), tmp_path / "exported", "some/target") == []
    for folder in (theirs, tmp_path / "exported"):
        assert method_of(folder).name == "eagle3"
        assert outcome(folder, model) == expected
    for prefix in ("", "model.", "draft_model.model."):
        folder = pickled(published_eagle3(tmp_path / f"pickled{prefix}", model, kept), prefix)
        assert outcome(folder, model) == expected


def test_a_published_draft_exported_without_its_layers(tmp_path, model):
    theirs = published_eagle3(tmp_path / "theirs", model, KEPT)
    (sentence,) = to_speculators(Eagle3Draft.load(theirs), tmp_path / "exported", "some/target")
    assert "does not name the layers" in sentence
    assert outcome(tmp_path / "exported", model) == outcome(theirs, model)


def test_settings_survive_the_export(tmp_path, model):
    settings = {"rope_theta": 500.0, "rope_factor": 4.0, "rope_original_length": 64}
    more = {"norm_before_residual": True, "attention_bias": True, "window": 100}
    ours = random_eagle3(tmp_path / "ours", model, layers=LAYERS, settings=settings, **more)
    assert to_speculators(Eagle3Draft.load(ours), tmp_path / "exported", "some/target") == []
    assert outcome(tmp_path / "exported", model) == outcome(ours, model)
    found = Eagle3Draft.load(tmp_path / "exported")
    assert found.reach == 256 and found.window == 100


def test_the_exported_layout_key_by_key(tmp_path, model):
    ours = random_eagle3(tmp_path / "ours", model, layers=LAYERS, kept=KEPT)
    to_speculators(Eagle3Draft.load(ours), tmp_path / "out", "some/target", "LlamaForCausalLM", 9000, 4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 5,
        "target_hidden_size": 48,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert layer.items() >= {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 11,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 9000, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
    }.items()  # fmt: skip
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    names = {f"layers.0.{x}.weight" for x in parts + norms} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert tensors.keys() == names | {"d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64 and (tensors["d2t"] + torch.arange(5)).tolist() == KEPT
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == KEPT
    assert len(tensors["t2d"]) == 11


def test_an_export_that_cannot_be(folder):
    draft = Eagle3Draft.load(folder)
    with pytest.raises(CheckpointError):
        to_speculators(draft, folder, "some/target")
    with pytest.raises(ValueError, match="max_position"):
        to_speculators(draft, folder.parent / "out", "some/target", max_position=0)


def test_what_published_drafts_leave_out_or_state_oddly(tmp_path, model):
    folder = published_eagle3(tmp_path / "a", model)
    draft = Eagle3Draft.load(folder)
    assert (draft.rope["rope_theta"], draft.trained_length, draft.window) == (1e4, 2048, None)
    assert draft.feature_layers(TargetRunner(model)) == LAYERS
    assert Eagle3Draft.load(folder, rope_theta=77.0).rope["rope_theta"] == 77.0
    stretched = Eagle3Draft.load(folder, rope_factor=4.0)
    assert stretched.rope["rope_type"] == "yarn" and stretched.reach == 4 * 2048
    folder = published_eagle3(tmp_path / "b", model, head_dim=None, rope_theta=5e5)
    assert Eagle3Draft.load(folder, head_dim=12).rope["rope_theta"] == 5e5
    with pytest.raises(CheckpointError):  # heads of a share of the hidden size are no match
        Eagle3Draft.load(published_eagle3(tmp_path / "c", model, head_dim=None, num_attention_heads=2))
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    assert Eagle3Draft.load(published_eagle3(tmp_path / "d", model, rope_scaling=scaling)).reach == 4096
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    found = Eagle3Draft.load(published_eagle3(tmp_path / "e", model, eagle_config=nested))
    assert found.feature_layers(TargetRunner(model)) == (0, 1, 2)


# --- what is wrong ---


class Dangerous:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_pickle_runs_no_code(tmp_path, model, capsys):
    folder = published_eagle3(tmp_path / "draft", model)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Dangerous()}))
    with pytest.raises(CheckpointError):
        Eagle3Draft.load(folder)
    torch.save({"fc.weight": Dangerous()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        Eagle3Draft.load(folder)
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError):
        Eagle3Draft.load(folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"norm_before_fc": True}, "input_norm"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"intermediate_size": 97}, "wrong shape"),
        ({"hidden_size": "six", "head_dim": None}, "cannot be right"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["x"]}}, "cannot be right"),
        ({"rope_scaling": {"rope_type": "magic"}}, "RoPE parameters"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "part of a head"),
    ],
    ids=str,
)
def test_a_published_draft_that_is_another_kind(tmp_path, model, over, message):
    folder = published_eagle3(tmp_path / "draft", model, **over)
    with pytest.raises(CheckpointError, match=message):
        Eagle3Draft.load(folder).check(TargetRunner(model))


def test_a_kind_of_speculators_that_is_not_known(tmp_path, folder):
    to_speculators(Eagle3Draft.load(folder), tmp_path / "out", "some/target")
    other = edit(tmp_path / "out", speculators_model_type="hass")
    with pytest.raises(CheckpointError):
        Speculator(other)


def test_remarks(tmp_path, model):
    runner = TargetRunner(model)
    sound = Eagle3Draft.load(random_eagle3(tmp_path / "a", model, layers=LAYERS, head_dim=16))
    assert sound.remarks(runner) == []
    odd = random_eagle3(
        tmp_path / "b", model, kept=[5, 2, 7], settings={"rope_theta": 5e5, "trained_length": 100, "window": None}
    )
    found = " | ".join(Eagle3Draft.load(odd).remarks(runner))
    for part in (
        "rope_theta is 500000, the target's 10000", "head size is 12, the target's 16", "layers 1, 2, 4; usual",
        "texts of 100 tokens, the target reads 512", "d2t does not name increasing tokens",
    ):  # fmt: skip
        assert part in found
    flagged = published_eagle3(tmp_path / "c", model, norm_before_residual=True)
    assert "norm_before_residual" in " | ".join(Eagle3Draft.load(flagged).remarks(runner))
