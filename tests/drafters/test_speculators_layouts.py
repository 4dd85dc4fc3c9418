"""Folders of `speculators`, written here in its names: they draft what the formulas say, and decode exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longdraft import Speculator
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafts.kinds import kind_of
from longdraft.drafts.speculators import to_speculators
from longdraft.errors import CheckpointError
from longdraft.model.runner import TargetRunner
from tests.drafters.test_eagle3_drafter import PROMPTS, assert_defined, six_layers
from tests.drafters.watching import run
from tests.drafts import published_eagle, random_eagle3_block
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("float32_weights")
KEPT = [1, 2, 5, 7, 10]


def layer_config(model_type="llama", **over):
    """A layer's configuration without what transformers has as its defaults, as to_diff_dict leaves it."""
    sizes = {
        "model_type": model_type, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 11,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return sizes | over


def write(folder: Path, kind: str, tensors, layer, **config) -> Path:
    folder.mkdir()
    whole = {"speculators_model_type": kind, "transformer_layer_config": layer} | config
    (folder / "config.json").write_text(json.dumps(whole))
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle3(folder, model, layer=None, kept=None, config=None, **sizes):
    block = random_eagle3_block(model, kept, **sizes)
    tensors = {name.replace("midlayer", "layers.0"): t for name, t in block.state_dict().items()}
    tensors["verifier_norm.weight"] = torch.ones(48)
    if kept is not None:
        tensors["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
        tensors["t2d"] = torch.isin(torch.arange(11), torch.tensor(kept))
    said = {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": block.shape.vocabulary,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
    }  # fmt: skip
    return write(folder, "eagle3", tensors, layer or layer_config(), **said | (config or {}))


CASES = {
    "plain": {},
    "kept": {"kept": KEPT},
    "norm_before_residual": {"norm_before_residual": True, "config": {"norm_before_residual": True}},
    "norm_before_fc": {"norm_before_fc": True, "config": {"norm_before_fc": True}},
    "EAGLE-3.1": {"fc_norm": 3, "norm_output": True, "config": {"fc_norm": True, "norm_output": True}},
    "qwen3": {"qk_norm": True, "layer": layer_config("qwen3")},
    "biases": {"attention_bias": True, "output_bias": True, "layer": layer_config(attention_bias=True)},
    "own embedding": {"embedding": 11, "config": {"embed_requires_grad": True}},
    "other width": {
        "hidden_size": 32, "embedding": 11, "layer": layer_config(hidden_size=32),
        "config": {"target_hidden_size": 48},
    },
    "layers": {"decoder_layers": 2, "layer": layer_config(num_hidden_layers=2)},
    "window": {"layer": layer_config(sliding_window=8, layer_types=["sliding_attention"], use_sliding_window=True)},
    "yarn": {
        "layer": layer_config(
            rope_theta=500.0,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_eagle3_drafts_what_the_formulas_say(tmp_path, case):
    model = six_layers()
    draft = Eagle3Draft.load(eagle3(tmp_path / "draft", model, **CASES[case]))
    assert draft.layout == "speculators" and draft.feature_layers(TargetRunner(model)) == (1, 2, 4)
    spec = Speculator("eagle3", target=model, draft=draft, depth=3, top_k=3, nodes=12)
    watching, sequences = run(spec, PROMPTS)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=14)
    assert [s.output for s in sequences] == [r.token_ids for r in plain]
    window = 8 if case == "window" else None
    assert draft.window == window
    for text, tree in watching.rounds[:4] + watching.rounds[-8:]:
        assert_defined(model, draft, text, tree, window, limit=14)


@pytest.mark.parametrize("case", CASES)
def test_what_was_read_is_written_as_it_was(tmp_path, case):
    model = six_layers()
    folder = eagle3(tmp_path / "draft", model, **CASES[case])
    draft = Eagle3Draft.load(folder)
    assert to_speculators(draft, tmp_path / "out", "some/target") == []
    again = Eagle3Draft.load(tmp_path / "out")
    assert again.shape == draft.shape and again.weights.keys() == draft.weights.keys()
    assert all(torch.equal(t, again.weights[name]) for name, t in draft.weights.items())


def test_sizes_that_are_transformers_own_are_left_out(tmp_path):
    """A layer of exactly the default sizes of Qwen3 says next to nothing."""
    folder = tmp_path / "draft"
    folder.mkdir()
    said = {"model_type": "qwen3", "num_hidden_layers": 1, "num_key_value_heads": 8, "intermediate_size": 12288}
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": said, "draft_vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(1, 3 * 4096)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Eagle3Draft.load(folder)
    assert "fc.weight (1, 12288) where config.json asks for (4096, 12288)" in str(caught.value)
    (folder / "config.json").write_text(json.dumps(config | {"transformer_layer_config": None}))
    with pytest.raises(CheckpointError, match="transformer_layer_config"):
        Eagle3Draft.load(folder)


def test_eagle_1_as_its_first_versions_wrote_it(tmp_path):
    model = tiny_model(vocab=11, layers=8)
    published = published_eagle(tmp_path / "published", model)
    tensors = torch.load(published / "pytorch_model.bin")
    del tensors["embed_tokens.weight"]
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    for old, new in names.items():
        tensors = {name.replace(old, new): t for name, t in tensors.items()}
    layer = layer_config(head_dim=24, max_position_embeddings=2048)
    said = {"architectures": ["EagleSpeculator"], "layernorms": False, "fusion_bias": False}
    folder = write(tmp_path / "speculators", "eagle", tensors, layer, **said)
    assert kind_of(folder).name == "eagle"
    found = []
    for each in (published, folder):
        spec = Speculator(each, target=model, plan="fixed")
        found.append([(r.token_ids, r.rounds, r.accepted) for r in spec.generate(PROMPTS, max_new_tokens=12)])
    assert found[0] == found[1]
    with pytest.raises(CheckpointError, match="layernorms"):
        write(tmp_path / "normed", "eagle", tensors, layer, layernorms=True)
        kind_of(tmp_path / "normed").load(tmp_path / "normed")
