"""Drafts in GGUF files, as llama.cpp's converter makes them: they draft as the folders that they were made from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longdraft import Speculator, load
from longdraft.errors import CheckpointError
from longdraft.registry import kind_of
from tests.support import published
from tests.support.assistants import assistant, gemma4
from tests.support.drafts import published_eagle3, random_eagle3_block
from tests.support.gguf_drafts import FIRST_NAMES, convert, convert_assistant
from tests.support.gguf_files import write_gguf
from tests.support.published import LAYER
from tests.support.tiny import tiny_model

pytest.importorskip("gguf")
PROMPTS = [[1, 2, 3, 4], [5] * 9]
KEPT = [1, 2, 5, 7, 9]


def target():
    return tiny_model(layers=8, vocab=11)


def outcome(draft, model) -> tuple[Any, ...]:
    spec = Speculator(draft, target=model, plan="fixed", top_k=3)
    found = spec.generate(PROMPTS, max_new_tokens=24)
    return spec.feature_layers(), [(r.token_ids, r.rounds, r.accepted, r.drafted) for r in found]


def drafts_alike(folder, file, model) -> None:
    """The file drafts what the folder drafts, from the same weights, and the text is that of plain decoding."""
    layers, found = outcome(file, model)
    assert (layers, found) == outcome(folder, model)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    assert [x[0] for x in found] == [r.token_ids for r in plain]
    assert 0 < sum(x[2] for x in found) < sum(x[3] for x in found)
    theirs, ours = (kind_of(path).load(path) for path in (folder, file))
    assert ours.shape == theirs.shape and ours.rope == pytest.approx(theirs.rope)
    assert ours.weights.keys() == theirs.weights.keys()


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# Name -> tokens of a smaller vocabulary, entries of config.json, and how the file was made.
EAGLE3: dict[str, tuple[list[int] | None, dict[str, Any], dict[str, Any]]] = {
    "today": (None, {}, {}),
    "a smaller vocabulary": (KEPT, {}, {}),
    "layers that are named": (None, {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, {}),
    "norm_before_residual": (KEPT, {"norm_before_residual": True}, {}),
    "Llama 3's RoPE": (None, {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {}),
    "the first files": (
        KEPT, {}, {"offsets": True, "drop": ["target_layers"], "fields": {"extract_layers": [2, 4, 5]},
                   "names": {"attn_norm_2": "hidden_norm", "^d2t": "d2t.weight"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_drafts_as_its_folder(name, tmp_path):
    kept, config, made = EAGLE3[name]
    model, folder = target(), published_eagle3(tmp_path / "draft", target(), kept, num_hidden_layers=1, **config)
    drafts_alike(folder, convert(folder, tmp_path / "a.gguf", 8, **made), model)


# Name -> sizes of the module, entries of config.json, and how the file was made.
SPECULATORS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "norm_before_fc": ({"norm_before_fc": True}, {"norm_before_fc": True}, {}),
    # One tensor with a row for each layer; llama.cpp's own converter writes neither.
    "fc_norm": (
        {"fc_norm": 3, "norm_output": True}, {"fc_norm": True, "norm_output": True},
        {"fields": {"norm_output": True}, "pack": "fc_norm"},
    ),
    "biases": ({"attention_bias": True}, {}, {}),
    "another width": ({"hidden_size": 32, "embedding": 11}, {"target_hidden_size": 48}, {}),
    "an embedding of its own": ({"embedding": 11}, {"embed_requires_grad": True}, {}),
    "the target's head": ({"own_head": False}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECULATORS)
def test_eagle3_of_speculators_drafts_as_its_folder(name, tmp_path):
    sizes, config, made = SPECULATORS[name]
    layer = LAYER | {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": sizes.get("hidden_size", 48)}
    model, config = target(), {"norm_before_residual": False} | config
    folder = published.eagle3(tmp_path / "draft", model, layer, config=config, **sizes)
    drafts_alike(folder, convert(folder, tmp_path / "a.gguf", 8, **made), model)


def test_a_vocabulary_may_be_larger_than_all_tensors(tmp_path):
    folder = published_eagle3(tmp_path / "draft", tiny_model(layers=8, vocab=70_001), KEPT, num_hidden_layers=1)
    file = convert(folder, tmp_path / "a.gguf", 8)
    theirs, ours = (kind_of(path).load(path) for path in (folder, file))
    assert ours.required_target == theirs.required_target
    assert ours.draft_to_target_ids.tolist() == theirs.draft_to_target_ids.tolist() == KEPT


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 4}
DFLASH: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DFlash": ({}, {}, {}),
    "DFlash with a window": ({}, {"use_swa": True, "swa_window_size": 6}, {}),
    "DFlash 2": ({"conv": (2, 16), "selector": 6}, DFLASH2, {}),
    "scales": ({}, {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 1.5}, {}),
    # What the converter writes for a target that scales its embedding by it.
    "Gemma's scale": ({}, {}, {"fields": {"embedding_scale": 48**0.5}}),
    "DSpark": ({"rank": 6}, {"markov_rank": 6}, {}),
    "DSpark of a smaller vocabulary": ({"rank": 6, "kept": KEPT}, {"markov_rank": 6}, {}),
    "the architecture dspark": (
        {"rank": 6}, {"markov_rank": 6},
        {"arch": "dspark", "drop": ["sample_from_anchor"],
         "names": {"^markov_w": "markov.w", "^conf_proj": "confidence.proj"}},
    ),
    "biases": ({"bias": True}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_and_dspark_draft_as_their_folders(name, tmp_path):
    sizes, nested, made = DFLASH[name]
    taps = {"target_layer_ids": [1, 4, 6], "mask_token_id": 9}
    config = {"architectures": ["DFlashDraftModel"], **LAYER, "block_size": 4, "dflash_config": taps | nested}
    config |= {"draft_vocab_size": len(sizes["kept"])} if "kept" in sizes else {}
    folder = published.save(tmp_path / "draft", config, published.dflash_tensors(**sizes))
    drafts_alike(folder, convert(folder, tmp_path / "a.gguf", 8, **made), target())


def test_windows_of_some_layers_and_causal_attention_carry_over(tmp_path):
    for name, more in (("mixed", {}), ("causal", {"is_causal": True}), ("not causal", {"is_causal": False})):
        config = LAYER | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
        config |= {"use_sliding_window": True, "block_size": 4} | more
        config["dflash_config"] = {"target_layer_ids": [1, 4, 6], "mask_token_id": 9}
        folder = published.save(tmp_path / name, config, published.dflash_tensors())
        file = convert(folder, tmp_path / f"{name}.gguf")
        theirs, ours = (kind_of(path).load(path).config for path in (folder, file))
        assert (ours["windows"], ours["causal"]) == (theirs["windows"], theirs["causal"])
        assert ours["windows"] == [5, None]
        drafts_alike(folder, file, target())


def test_quantised_files_draft_exactly_for_a_quantised_target(tmp_path):
    """A target and its draft, both in blocks of eight bits: the draft's weights are those that the blocks stand for."""
    model = write_gguf(tmp_path / "model.gguf", layers=8)
    block = random_eagle3_block(model, head_dim=16)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-6, "vocab_size": 64, "max_position_embeddings": 512, "draft_vocab_size": 64,
    }  # fmt: skip
    folder = published.save(tmp_path / "draft", config, dict(block.state_dict()))
    file = convert(folder, tmp_path / "draft.gguf", 8, kind="Q8_0")
    whole, stored = (kind_of(path).load(path).weights for path in (folder, file))
    for name, weight in whole.items():
        assert weight.dim() == 1 or not torch.equal(stored[name], weight)
        torch.testing.assert_close(stored[name], weight, rtol=0, atol=float(weight.abs().max()) / 100)
    target, tokenizer = load(tmp_path / "model.gguf")
    prompts = [[5, 6, 7, 8] * 3]
    plain, drafted = (
        Speculator(method, target=target, tokenizer=tokenizer, plan="fixed").generate(
            prompts, max_new_tokens=40, eos_token_ids=[]
        )[0]
        for method in ("ar", file)
    )
    assert plain.token_ids == drafted.token_ids and 0 < drafted.accepted < drafted.drafted


TAPS = {"target_layer_ids": [1, 4, 6], "mask_token_id": 9}
# What is wrong with a file -> the kind of draft, how the file was made, and what the error names.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layers": ("dflash", {"drop": ["target_layers"]}, r"dflash\.target_layers.*convert_hf_to_gguf"),
    "no layers of EAGLE-3": ("eagle3", {"drop": ["target_layers"]}, r"eagle3\.target_layers"),
    "layers that are none": ("eagle3", {"fields": {"target_layers": 3}}, r"eagle3\.target_layers"),
    "fewer layers": ("dflash", {"fields": {"target_layers": [2, 5]}}, r"dflash\.target_layers.*fc\.weight"),
    "no hidden size": ("eagle3", {"drop": ["target_hidden_size"]}, r"eagle3\.target_hidden_size"),
    "another hidden size": ("eagle3", {"fields": {"target_hidden_size": 64}}, r"eagle3\.target_hidden_size 64"),
    "no block size": ("dflash", {"drop": ["block_size"]}, r"dflash\.block_size"),
    "no mask token": ("dflash", {"drop": ["tokenizer.ggml.mask_token_id"]}, r"tokenizer\.ggml\.mask_token_id"),
    "no vocabulary": ("dflash", {"drop": ["tokenizer.ggml.tokens"]}, r"tokenizer\.ggml\.tokens"),
    "no heads": ("eagle3", {"drop": ["attention.head_count"]}, r"eagle3\.attention\.head_count"),
    "other heads": ("eagle3", {"fields": {"attention.head_count": 8}}, r"q_proj.*metadata"),
    "no such heads": ("dflash", {"fields": {"attention.head_count": 0}}, r"dflash\.attention\.head_count"),
    "another MLP": ("dflash", {"fields": {"feed_forward_length": 97}}, r"mlp\..*metadata"),
    "no layer count": ("dflash", {"drop": ["block_count"]}, r"dflash\.block_count"),
    "values that are scaled": ("dflash", {"fields": {"attention.value_scale": 0.7}}, "attention_value_scale"),
    "an activation": ("dflash", {"fields": {"hidden_activation": "gelu"}}, "gelu"),
    "sinks": ("dflash", {"names": {r"blk\.0\.attn_norm": "blk.0.attn_sinks"}}, "attention_sink_bias"),
    "an early converter": ("dflash", {"arch": "dflash-draft"}, "dflash-draft.*convert_hf_to_gguf"),
    "another assistant": ("dflash", {"arch": "gemma4_mtp"}, "gemma4_mtp.*convert_hf_to_gguf"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("drafts"), LAYER | {"block_size": 4, "dflash_config": TAPS}
    return {
        "dflash": published.save(folder / "dflash", config, published.dflash_tensors()),
        "eagle3": published_eagle3(folder / "eagle3", target(), num_hidden_layers=1),
    }


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_are_wrong_are_named(name, tmp_path, folders):
    kind, made, message = WRONG[name]
    file = convert(folders[kind], tmp_path / "a.gguf", 8, **made)
    with pytest.raises(CheckpointError, match=f"(?s)a.gguf.*{message}"):
        Speculator(file, target=target())


def test_a_draft_is_no_model_and_no_other_draft(tmp_path, folders):
    file = convert(folders["eagle3"], tmp_path / "a.gguf", 8)
    for use in (lambda: load(file), lambda: Speculator("small-lm", draft=file, target=target())):
        with pytest.raises(CheckpointError, match="draft"):
            use()
    with pytest.raises(CheckpointError, match=r"eagle3.*dflash"):
        Speculator("dflash", draft=file, target=target())
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="language model"):
        Speculator("eagle3", draft=tmp_path / "model.gguf", target=target())
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"a\.gguf"):
        Speculator(file, target=target())


# Name -> how the assistant and its file were made.
FIRST = {
    "arch": "gemma4_assistant", "names": FIRST_NAMES, "drop": ["embedding_length_out", "nextn_predict_layers"],
    "fields": {"n_embd_backbone": 64},
}  # fmt: skip
ASSISTANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "today": ({}, {}),
    "clusters": ({"ordered": True}, {"clusters": True}),
    "unified": ({"model_type": "gemma4_unified_assistant"}, {}),
    "the first files": ({"ordered": True}, {"clusters": True, **FIRST}),
}


def assistant_outcome(draft, model) -> list[tuple[Any, ...]]:
    spec = Speculator(draft, target=model, plan="fixed", depth=3, top_k=3, nodes=12)
    found = spec.generate(PROMPTS, max_new_tokens=24, eos_token_ids=[])
    return [(r.token_ids, r.rounds, r.accepted, r.drafted) for r in found]


@pytest.mark.parametrize("name", ASSISTANTS)
def test_an_assistant_of_gemma4_drafts_as_its_folder(name, tmp_path):
    sizes, made = ASSISTANTS[name]
    model, (folder, _) = gemma4(), assistant(tmp_path / "draft", **sizes)
    file = convert_assistant(folder, tmp_path / "a.gguf", **made)
    assert kind_of(file).name == "mtp"
    assert repr(kind_of(file).load(file)) == repr(kind_of(folder).load(folder)).replace(str(folder), str(file))
    found = assistant_outcome(file, model)
    assert found == assistant_outcome(folder, model)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24, eos_token_ids=[])
    assert [x[0] for x in found] == [r.token_ids for r in plain]
    assert 0 < sum(x[2] for x in found) < sum(x[3] for x in found)


def test_without_the_clusters_of_its_head_an_assistant_computes_all_logits(tmp_path):
    """What today's converter writes of an assistant of E2B or E4B."""
    model, (folder, _) = gemma4(), assistant(tmp_path / "draft", ordered=True)
    found = assistant_outcome(convert_assistant(folder, tmp_path / "a.gguf"), model)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24, eos_token_ids=[])
    assert [x[0] for x in found] == [r.token_ids for r in plain]
    assert 0 < sum(x[2] for x in found) < sum(x[3] for x in found)


# What is wrong with an assistant's file -> how it was made, and what the error names.
WRONG_ASSISTANTS: dict[str, tuple[dict[str, Any], str]] = {
    "no target's size": ({"drop": ["embedding_length_out"]}, r"gemma4-assistant\.embedding_length_out"),
    "another target's size": ({"fields": {"embedding_length_out": 48}}, r"post_projection\.weight.*metadata"),
    "no such size": ({"fields": {"embedding_length_out": 0}}, r"gemma4-assistant\.embedding_length_out 0"),
    "no head size": ({"drop": ["attention.key_length"]}, r"attention\.key_length"),
    "another head size": ({"fields": {"attention.key_length_swa": 32}}, r"q_proj\.weight.*metadata"),
    "no window": ({"drop": ["attention.sliding_window"]}, r"attention\.sliding_window"),
    "no pattern": ({"drop": ["attention.sliding_window_pattern"]}, r"attention\.sliding_window_pattern"),
    "a short pattern": ({"fields": {"attention.sliding_window_pattern": [True]}}, r"attention\.sliding_window_pattern"),
    "no KV heads": ({"fields": {"attention.head_count_kv": [2, 0, 2, 1]}}, r"attention\.head_count_kv"),
    "no layer count": ({"drop": ["block_count"]}, r"gemma4-assistant\.block_count"),
    "no clusters to read": ({"clusters": True, "drop": ["centroid_top_k"]}, r"gemma4-assistant\.centroid_top_k"),
    "more clusters": ({"clusters": True, "fields": {"centroid_top_k": 9}}, "centroid_intermediate_top_k 9"),
    "no order": ({"clusters": True, "drop": ["masked_embd_ordering"]}, r"masked_embedding\.token_ordering"),
    "no projection": ({"drop": ["nextn.pre_projection.weight"]}, r"pre_projection\.weight"),
    "another tensor": ({"names": {"attn_q_norm": "attn_k_norm"}}, r"attn_k_norm|k_norm"),
    "no embedding": ({"drop": ["token_embd.weight"]}, r"embed_tokens"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ordered_assistant(tmp_path_factory):
    return assistant(tmp_path_factory.mktemp("assistant") / "draft", ordered=True)[0]


@pytest.mark.parametrize("name", WRONG_ASSISTANTS)
def test_metadata_of_an_assistant_that_are_wrong_are_named(name, tmp_path, ordered_assistant):
    made, message = WRONG_ASSISTANTS[name]
    file = convert_assistant(ordered_assistant, tmp_path / "a.gguf", **made)
    with pytest.raises(CheckpointError, match=f"(?s)a.gguf.*{message}"):
        Speculator(file, target=gemma4())
