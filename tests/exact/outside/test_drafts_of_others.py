"""Folders as other projects write them: the layers they mean, settings they nest, and formats that are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft import Speculator
from longdraft.errors import CheckpointError
from longdraft.registry import kind_of
from tests.support import published
from tests.support.drafts import edit, published_eagle3
from tests.support.mtp_models import save_with_mtp
from tests.support.published import LAYER
from tests.support.tiny import tiny_model

IDS = "eagle_aux_hidden_state_layer_ids"
PROMPTS = [[1, 2, 3, 4], [5] * 9]


def target():
    return tiny_model(layers=8, vocab=11)


# What a config.json says, the layers whose outputs are read of a target of 8 (by the sources that formats.LAYER_IDS
# names), and whether that cannot be told.
MODELOPT = {"use_aux_hidden_state": True, "use_last_layernorm": True, "next_layer_regular": True}
EAGLE3 = {
    # EAGLE reads what enters layers 2, L // 2 and L - 3, and names none.
    "EAGLE": ({}, (1, 3, 4), False),
    "SpecForge": ({"eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True}}, (1, 3, 4), False),
    "SpecForge, 9 layers": ({"eagle_config": {IDS: [1, 3, 5]}}, (1, 3, 5), False),
    "SpecForge, others": ({"eagle_config": {IDS: [1, 5, 6]}}, (1, 5, 6), True),
    "the first layer": ({"eagle_config": {IDS: [0, 4, 6]}}, (0, 4, 6), False),
    "Model-Optimizer": ({"eagle_config": {IDS: [1, 3, 4], **MODELOPT}}, (1, 3, 4), False),
    "Model-Optimizer's Megatron": ({"eagle_config": {IDS: [4, 1, 3], **MODELOPT}}, (1, 3, 4), False),
    "TorchSpec": ({"eagle_config": {IDS: [2, 4, 5]}}, (1, 3, 4), False),
    "NVIDIA, the last layer": ({"eagle_config": {IDS: [4, 6, 8], **MODELOPT}}, (3, 5, 7), True),
    "vLLM": ({IDS: [2, 4, 5]}, (1, 3, 4), False),
    "vLLM, others": ({IDS: [3, 5, 8]}, (2, 4, 7), False),
    "lifted to where vLLM looks": ({IDS: [1, 3, 4]}, (0, 2, 3), True),
    "AngelSlim": ({"aux_hidden_states_layer_ids": [1, 3, 6]}, (1, 3, 6), False),
    "DeepSpec": ({"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 6]}, (1, 3, 6), False),
    "settled": ({"feature_layers": [0, 4, 6], "eagle_config": {IDS: [2, 4, 5]}}, (0, 4, 6), False),
    "settled otherwise": ({"feature_layers": [1, 3, 4], IDS: [1, 3, 4]}, (1, 3, 4), False),
}  # fmt: skip
DFLASH = {
    # Without ids: evenly from 1 to L - 3.
    "z-lab, none named": ({"dflash_config": {"mask_token_id": 9}}, (1, 3, 5)),
    "z-lab": ({"dflash_config": {"target_layer_ids": [1, 4, 6], "mask_token_id": 9}}, (1, 4, 6)),
    "DeepSpec": ({"target_layer_ids": [1, 4, 6], "mask_token_id": 9}, (1, 4, 6)),
    "sglang": ({"dspark_config": {"target_layer_ids": [1, 4, 6], "mask_token_id": 9}}, (1, 4, 6)),
    "official": ({"dspark_target_layer_ids": [1, 4, 6], "dspark_noise_token_id": 9}, (1, 4, 6)),
}


def warned(caplog: Any) -> bool:
    found = [r.getMessage() for r in caplog.records if "feature_layers" in r.getMessage()]
    assert all("bench acceptance" in message for message in found)
    return bool(found)


@pytest.mark.parametrize("project", EAGLE3)
def test_layers_are_those_that_their_project_means(project, tmp_path, caplog):
    config, layers, unsure = EAGLE3[project]
    folder, model = published_eagle3(tmp_path / "draft", target(), **config), target()
    spec = Speculator(folder, target=model, plan="fixed")
    assert spec.feature_layers() == layers and warned(caplog) is unsure
    if project == "SpecForge, others":
        found = spec.generate(PROMPTS, max_new_tokens=24)
        plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
        assert [r.token_ids for r in found] == [r.token_ids for r in plain]
        assert 0 < sum(r.accepted for r in found) < sum(r.drafted for r in found)
        # The layers that the warning names are the other reading.
        assert "[0, 4, 5]" in caplog.text
        caplog.clear()
        assert Speculator(edit(folder, feature_layers=[0, 4, 5]), target=model).feature_layers() == (0, 4, 5)
        assert not warned(caplog)


def test_layers_of_dflash_of_speculators_and_of_p_eagle(tmp_path, caplog):
    model, folders = target(), {}
    dflash, peagle = published.dflash_tensors(), published.peagle_tensors(model)
    for project, (config, layers) in DFLASH.items():
        whole = {"architectures": ["DFlashDraftModel"], **LAYER, "block_size": 4} | config
        folders[published.save(tmp_path / project, whole, dflash)] = layers
    whole = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "model_type": "llama", "draft_vocab_size": 11}
    llama = LAYER | {"model_type": "llama", "num_hidden_layers": 1}
    speculators = published.speculators
    folders |= {
        published.eagle3(tmp_path / "a", model): (1, 2, 4),  # named: [2, 3, 5]
        published.eagle3(tmp_path / "f", model, config={IDS: "drop"}): (1, 3, 4),
        speculators(tmp_path / "g", "dflash", dflash, aux_hidden_state_layer_ids="drop"): (1, 3, 4),
        speculators(tmp_path / "b", "dflash", dflash, entering=(1, 2, 3)): (0, 1, 2),
        speculators(tmp_path / "c", "peagle", peagle, llama): (1, 2, 4),
        published.save(tmp_path / "d", whole | {"ptd_token_id": 9, "eagle_config": {IDS: [3, 4, 6]}}, peagle): (
            2, 3, 5),
        published.save(tmp_path / "e", whole | {"mask_token_id": 9, "architectures": ["PEagleDraftModel"],
                                                "eagle_config": {IDS: [1, 3, 4]}}, peagle): (1, 3, 4),
    }  # fmt: skip
    for folder, layers in folders.items():
        assert Speculator(folder, target=model).feature_layers() == layers, folder
    assert not warned(caplog)


@pytest.mark.parametrize("config", [{"target_layer_ids": [-1, 3, 4]}, {IDS: [0, 3, 4]}, {IDS: "1,3,4"}, {IDS: [1.5]}])
def test_ids_that_are_no_layers_are_refused_by_name(config, tmp_path):
    folder = published_eagle3(tmp_path / "draft", target(), **config)
    with pytest.raises(CheckpointError, match=next(iter(config))):
        Speculator(folder, target=target())


# --- DSpark, as its settings and tensors are nested ---

MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla"}
IN_MODULE = {"markov_head.": "logit_head.markov_head.", "confidence_head.": "logit_head.confidence_head."}
OUTSIDE = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
TAPS = {"target_layer_ids": [1, 2, 4], "mask_token_id": 9}
DSPARK: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "SpecForge": (
        {"architectures": ["DSparkDraftModel"], "block_size": 4, "dflash_config": {
            "attention_mode": "gqa", "projector_type": "dspark", "confidence_head_alpha": 1.0,
            "enable_confidence_head": True, **MARKOV, **TAPS}}, {},
    ),
    "SpecForge, early": ({"block_size": 4, "dflash_config": MARKOV | TAPS}, IN_MODULE),
    "Model-Optimizer": (
        {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": {
            "projector_type": "dspark", "shift_label": True, "use_confidence_head": True, **MARKOV, **TAPS}}, OUTSIDE,
    ),
    "sglang": ({"block_size": 4, "dspark_config": MARKOV | TAPS}, {}),
    "prefixed": (
        {"dspark_block_size": 4, "dspark_markov_rank": 6, "dspark_markov_head_type": "vanilla",
         "dspark_target_layer_ids": [1, 2, 4], "dspark_noise_token_id": 9}, {},
    ),
}  # fmt: skip


def outcome(folder, model) -> list[Any]:
    spec = Speculator(folder, target=model, plan="fixed", top_k=3)
    return [(r.token_ids, r.rounds, r.accepted, r.drafted) for r in spec.generate(PROMPTS, max_new_tokens=24)]


@pytest.mark.parametrize("project", DSPARK)
def test_dspark_drafts_alike_however_it_is_nested(project, tmp_path):
    model, tensors = target(), published.dflash_tensors(rank=6)
    flat = {"architectures": ["Qwen3DSparkModel"], **LAYER, "block_size": 4, **MARKOV, **TAPS}
    expected = outcome(published.save(tmp_path / "deepspec", flat, tensors), model)
    config, renamed = DSPARK[project]
    for ours, theirs in renamed.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    assert outcome(published.save(tmp_path / "draft", LAYER | config, tensors), model) == expected
    assert 0 < sum(found[2] for found in expected) < sum(found[3] for found in expected)


def test_whether_the_anchor_proposes_is_told(tmp_path):
    tensors = published.dflash_tensors(rank=6)
    for name, tokens, config, slots in (
        ("before the setting", 3, {}, 3), ("block", 4, {}, 4), ("said", 3, {"sample_from_anchor": True}, 4),
        ("said not", 4, {"sample_from_anchor": False}, 3), ("nothing", None, {}, 4),
    ):  # fmt: skip
        methods = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}
        said = {"markov_rank": 6, "speculators_config": methods if tokens else {}} | config
        folder = published.speculators(tmp_path / name, "dspark", tensors, **said)
        assert kind_of(folder).load(folder).shape.slots == slots, name
    for name, config, slots in (("deepspec", {"markov_rank": 0}, 4), ("z-lab", {}, 3)):  # trained as DSpark, and not
        whole = {**LAYER, "block_size": 4, **TAPS} | config
        folder = published.save(tmp_path / name, whole, published.dflash_tensors())
        assert kind_of(folder).load(folder).shape.slots == slots, name


# --- what is not read says what it is ---

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
UNREAD = {
    "medusa": (MEDUSA, "medusa"),
    "medusa with its model's configuration": (LLAMA | MEDUSA, "medusa"),
    "vLLM's medusa": ({"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3}, "medusa"),
    "hydra": ({"hydra_num_heads": 4, "hydra_num_layers": 1, "grounded_heads": True}, "hydra"),
    "domino": (LAYER | {"architectures": ["DominoDraftModel"], "dflash_config": TAPS}, "domino"),
    "domino by its projector": (LAYER | {"dflash_config": {"projector_type": "domino", **TAPS}}, "domino"),
    "mlp": ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "speculator"),
}  # fmt: skip


@pytest.mark.parametrize("project", UNREAD)
def test_formats_that_are_not_read_are_named(project, tmp_path):
    config, name = UNREAD[project]
    published.save(tmp_path / "draft", config, {"0.linear.weight": torch.zeros(2, 2)})
    if "medusa" in project and "vLLM" not in project:  # published beside its model, as torch files of other names
        (tmp_path / "draft" / "model.safetensors").rename(tmp_path / "draft" / "medusa_lm_head.safetensors")
    for method in ((), ("eagle3",), ("tokenswift",)):
        with pytest.raises(CheckpointError, match=name):
            Speculator(*method, draft=tmp_path / "draft", target=target())
    with pytest.raises(CheckpointError, match=r"drafts\.md"):
        kind_of(tmp_path / "draft")


def mixture(tensors):
    parts = {n.replace("mlp.", "mlp.experts.0."): t for n, t in tensors.items() if ".mlp." in n}
    return {n: t for n, t in tensors.items() if ".mlp." not in n} | parts


PARTS = {
    "mixture of experts": (mixture, {}),
    "MLA": (lambda t: t | {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2, 2)}, {}),
    "quantised": (lambda t: t | {"midlayer.mlp.up_proj.weight_scale": torch.zeros(1)}, {}),
    "use_aux_hidden_state": (
        lambda t: {n: x for n, x in t.items() if n != "fc.weight"}, {"eagle_config": {"use_aux_hidden_state": False}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_no_draft_of_ours_has_are_named(part, tmp_path):
    change, config = PARTS[part]
    folder = edit(published_eagle3(tmp_path / "draft", target(), **config), change)
    with pytest.raises(CheckpointError, match=part):
        Speculator(folder, target=target())


def test_heads_of_a_whole_model_are_read_though_its_settings_say_medusa(tmp_path):
    folder = edit(published.with_heads(tmp_path / "model"), medusa_num_heads=3)
    (found,) = Speculator("tokenswift", target=tiny_model(), draft=folder).generate(
        [[7, 8, 9, 7, 8, 9]], max_new_tokens=12
    )
    assert found.drafted > found.accepted


def test_an_mtp_layer_of_speculators_drafts_as_it_does_in_its_model(tmp_path):
    model, _ = save_with_mtp(tmp_path / "model", "qwen3_5_text")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    names = {"mtp.fc.": "input_proj.", "mtp.norm.": "final_layernorm.", "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
             "mtp.pre_fc_norm_embedding.": "token_layernorm.", "mtp.layers.0.": ""}  # fmt: skip
    tensors = {
        name.replace(theirs, f"mtp_layers.0.{other}"): tensor
        for name, tensor in load_file(file).items()
        for theirs, other in names.items()
        if name.startswith(theirs)
    }
    out = tmp_path / "draft"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"speculators_model_type": "mtp", "transformer_layer_config": {}}))
    save_file(tensors, out / "model.safetensors")
    inside, outside = (
        Speculator("mtp", target=model, plan="fixed", **draft).generate([[1, 2, 3] * 9], max_new_tokens=16)[0]
        for draft in ({}, {"draft": out})
    )
    assert (inside.token_ids, inside.accepted) == (outside.token_ids, outside.accepted)
    assert outside.drafted > outside.accepted and kind_of(out).name == "mtp"


def headless(folder: Path, **made: Any) -> Path:
    return edit(
        published_eagle3(folder, target(), **made), lambda t: {n: x for n, x in t.items() if "lm_head" not in n}
    )


@pytest.mark.parametrize("config", [{}, {"draft_vocab_size": None}], ids=["of all tokens", "no size named"])
def test_eagle3_without_a_head_drafts_with_the_targets(config, tmp_path):
    """As vLLM, sglang and llama.cpp do. The draft with a copy of the target's head drafts the same."""
    model = target()
    folder = headless(tmp_path / "draft", **config)
    copied = edit(
        headless(tmp_path / "copied"), lambda t: t | {"lm_head.weight": model.get_output_embeddings().weight.detach()}
    )
    found = outcome(folder, model)
    assert found == outcome(copied, model)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    assert [x[0] for x in found] == [r.token_ids for r in plain]
    assert 0 < sum(x[2] for x in found) < sum(x[3] for x in found)


def test_a_head_that_cannot_be_the_targets_is_missed_by_name(tmp_path):
    kept = headless(tmp_path / "kept", kept=[1, 2, 5, 7, 9])
    layer = published.eagle3_layer(hidden_size=32)
    narrow = published.eagle3(
        tmp_path / "narrow", target(), layer, config={"target_hidden_size": 48}, hidden_size=32, embedding=11,
        own_head=False,
    )  # fmt: skip
    for folder in (kept, narrow):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            Speculator(folder, target=target())
