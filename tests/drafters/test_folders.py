"""Draft folders of every kind and layout: what is wrong with one is refused by name; what was written comes back.

A new kind is a row of OURS or THEIRS and meets every fault of FAULTS; values of its own that cannot be right are rows
of WRONG.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from longdraft import Speculator
from longdraft.drafts import draft_folder, packing, tensor_files
from longdraft.drafts.speculators import to_speculators
from longdraft.errors import CapabilityError, CheckpointError, UnsupportedModelError
from longdraft.model.runner import TargetRunner
from longdraft.registry import kind_of
from tests.support import published
from tests.support.drafts import (
    edit,
    published_eagle3,
    random_draft,
    random_eagle3,
    random_heads,
    random_lm,
    random_mtp,
    save_model,
)
from tests.support.mtp_models import save_with_mtp
from tests.support.published import KEPT, LAYER, LAYOUTS
from tests.support.tiny import tiny_model

Make = Callable[[Path, Any], Path]
OURS: dict[str, Make] = {
    "longspec": random_draft, "eagle3": random_eagle3, "small-lm": random_lm,
    "tokenswift": random_heads,
}  # fmt: skip
THEIRS: dict[str, Make] = {
    **{f"published {name}": lambda folder, model, name=name: published.write(folder, name) for name in LAYOUTS},
    "eagle-1 pickled": lambda folder, model: published.write(folder, "eagle-1", True),
    "eagle-3 pickled": lambda folder, model: published.write(folder, "eagle-3", True),
    "speculators": published.eagle3,
    "peagle": lambda folder, model: published.speculators(
        folder, "peagle", published.peagle_tensors(model), LAYER | {"model_type": "llama", "num_hidden_layers": 1}
    ),
    "peagle by its tensors": lambda folder, model: published.save(
        folder, LAYER | {"num_hidden_layers": 1, "mask_token_id": 9}, published.peagle_tensors(model)
    ),
    "dflash": lambda folder, model: published.speculators(folder, "dflash", published.dflash_tensors()),
    "dspark": lambda folder, model: published.speculators(
        folder, "dspark", published.dflash_tensors(rank=6), markov_rank=6
    ),
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", OURS)
every_layout = pytest.mark.parametrize("layout", [*OURS, *THEIRS])
PROMPTS = [[1, 2, 3, 4], [5] * 9]
target = cache(lambda **over: tiny_model(**{"layers": 8, "vocab": 11} | over))


def refused(folder: Any, *parts: str, error: type[Exception] = CheckpointError, **over: Any) -> None:
    """Loading and binding the draft fails with an error that has these parts."""
    with pytest.raises(error) as caught:
        Speculator(folder, target=target(**over))
    assert all(part in str(caught.value) for part in parts), caught.value


def outcome(folder: Any, model: Any, new: int = 12, **options: Any) -> list[tuple[list[int], int, int]]:
    """What decoding with a draft gives, and how far its proposals went."""
    results = Speculator(folder, target=model, **options).generate(PROMPTS, max_new_tokens=new)
    return [(r.token_ids, r.rounds, r.accepted) for r in results]


# --- faults of every folder ---


def file_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.name not in ("config.json", "README.md"))


def without_weights(folder: Path) -> str:
    file_of(folder).unlink()
    return ""


def without_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return str(folder)


def config_of_a_list(folder: Path) -> str:
    (folder / "config.json").write_text("[]")
    return "config.json"


def rewritten(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], folder: Path) -> None:
    if file_of(folder).suffix == ".bin":
        torch.save(change(torch.load(file_of(folder))), file_of(folder))
    else:
        save_file(change(load_file(file_of(folder))), file_of(folder))


def another_tensor(folder: Path) -> str:
    rewritten(lambda tensors: tensors | {"extra": torch.zeros(1)}, folder)
    return "extra"


def a_tensor_of_another_shape(folder: Path) -> str:
    def cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(n for n in tensors if "mlp.up_proj" in n or "heads.1.proj" in n)
        return tensors | {name: tensors[name][:-1].contiguous()}

    rewritten(cut, folder)
    return "up_proj" if "up_proj" in " ".join(tensor_files.read(folder)) else "heads.1.proj"


def a_tensor_less(folder: Path) -> str:
    left = next(n for n in tensor_files.read(folder) if "mlp.down_proj" in n or "heads.1.proj" in n)
    rewritten(lambda tensors: {n: t for n, t in tensors.items() if n != left}, folder)
    return left.removeprefix("layers.0.").removesuffix(".weight")


# Damaged bytes and configurations: tests/exact/outside/test_damaged_files.py.
FAULTS = [
    without_weights, without_config, config_of_a_list, another_tensor, a_tensor_of_another_shape, a_tensor_less,
]  # fmt: skip
# What another target is, and the name of the setting that says so; drafts of others know only the first two.
OTHERS = [
    ({"hidden": 96}, "hidden_size"), ({"vocab": 12}, "vocab"), ({"layers": 9}, "layers"), ({"kv_heads": 3}, "kv_heads"),
    ({"head_dim": 8}, "head_dim"), ({"family": "qwen2"}, "model_type"),
]  # fmt: skip


@every_layout
def test_a_folder_with_a_fault_is_refused_by_name(tmp_path, layout):
    make = (OURS | THEIRS)[layout]
    for i, fault in enumerate(FAULTS):
        folder = make(tmp_path / str(i), target())
        name = fault(folder)
        refused(folder, name)
    folder = make(tmp_path / "sound", target())
    for other, name in OTHERS if layout in OURS else OTHERS[:2]:
        refused(folder, name if layout in OURS else "", **other)
    (result,) = Speculator(folder, target=target(), plan="fixed").generate(PROMPTS[:1], max_new_tokens=8)
    assert result.drafted > result.accepted  # and without a fault it drafts
    refused(folder.parent / "none")


@every_kind
def test_a_vocabulary_of_its_own(kind, tmp_path):
    folder = OURS[kind](tmp_path / "draft", target(), kept=KEPT)
    assert kind_of(folder).load(folder).vocabulary == len(KEPT)
    for table in (torch.arange(5) * 50, torch.arange(4)):
        refused(edit(folder, lambda t, table=table: t | {"d2t": table}))
    refused(edit(folder, lambda t: {name: x for name, x in t.items() if name != "d2t"}), "d2t")


NO_TABLE = ({"draft_vocab_size": 9}, "d2t")
BOTH = [
    ({"heads": "drop"}, "heads"), ({"heads": 3}, ""), ({"hidden_size": "six"}, "hidden_size"),
    ({"feature_layers": "drop"}, "feature_layers"), ({"feature_layers": [1, 2.5]}, "feature_layers"),
    ({"feature_layers": [1, 3, 9]}, ""), ({"feature_layers": [3, 1, 4]}, ""), ({"feature_layers": [-1, 1, 4]}, ""),
    ({"feature_layers": [1, 3]}, ""), ({"window": 0}, "window"), ({"window": "all"}, "window"),
    ({"trained_length": -1}, "trained_length"), ({"rope_theta": "big"}, ""), ({"rope_factor": [2]}, ""),
    ({"rope_factor": 4, "rope_original_length": None, "trained_length": None}, "rope_original_length"),
]  # fmt: skip
# Values of config.json that cannot be right, and the name that the refusal has.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "longspec": [({"heads": "drop"}, "heads"), ({"heads": "six"}, "heads"), ({"window": 0}, "window"), NO_TABLE],
    "eagle3": BOTH,
    "small-lm": [({"model": "drop"}, "model"), ({"trained_length": 0}, "trained_length"), NO_TABLE],
    "tokenswift": [
        ({"heads": -3}, "heads"), ({"heads": 2}, "heads.2"), ({"heads": 4}, "heads.3"),
        ({"hidden_size": 0}, "hidden_size"), ({"hidden_size": 40}, ""), ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        NO_TABLE,
    ],
    "published longspec": [({"num_attention_heads": "drop"}, "")],
    "published eagle-1": [({"vocab_size": "drop"}, "vocab_size"), ({"hidden_act": "gelu"}, "hidden_act"),
                ({"layernorms": True}, "layernorms")],
    "published eagle-3": [
        ({"norm_before_fc": True}, "input_norm"), ({"hidden_act": "gelu"}, "gelu"),
        ({"num_attention_heads": "drop"}, "num_attention_heads"), ({"intermediate_size": 97}, "up_proj"),
        ({"hidden_size": "six", "head_dim": "drop"}, ""), ({"num_attention_heads": 2, "head_dim": "drop"}, ""),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["x"]}}, ""),
        ({"rope_scaling": {"rope_type": "magic"}}, "RoPE"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, ""),
    ],
    "speculators": [({"speculators_model_type": "hass"}, "hass"), ({"transformer_layer_config": None}, "layer_config")],
    "dflash": [
        ({"mask_token_id": "drop"}, "mask_token_id"), ({"block_size": "drop"}, "block_size"),
        ({"is_neox_style": False}, "is_neox_style"), ({"mask_token_id": 11}, "mask_token_id"),
        ({"markov_rank": 6, "markov_head_type": "rnn"}, "markov_head_type=rnn"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", WRONG)
def test_a_configuration_that_cannot_be_right(tmp_path, layout):
    folder = (THEIRS | OURS)[layout](tmp_path / "draft", target())
    right = (folder / "config.json").read_text()
    for change, name in WRONG[layout]:
        refused(edit(folder, **change), name)
        (folder / "config.json").write_text(right)


@every_kind
def test_another_kind(kind, tmp_path):
    folder = OURS[kind](tmp_path / "draft", target())
    load, other = kind_of(folder).load, next(each for each in OURS if each != kind)
    with pytest.raises(CheckpointError, match=other):
        load(edit(folder, drafter=other))
    with pytest.raises(CheckpointError, match=other):
        Speculator(kind, target=target(), draft=OURS[other](tmp_path / "other", target()))


@every_kind
def test_other_weights_of_the_same_architecture_are_allowed(kind, tmp_path, caplog):
    folder, model = OURS[kind](tmp_path / "draft", target()), target(seed=1)
    got = Speculator(folder, target=model).generate([[1, 2, 3]], max_new_tokens=10)[0].token_ids
    assert got == Speculator("ar", target=model).generate([[1, 2, 3]], max_new_tokens=10)[0].token_ids
    assert [r.message.count("acceptance may be lower") for r in caplog.records] == [1]


# --- layers and heads within a model's folder ---


def test_checkpoints_without_a_further_layer_or_with_a_damaged_one(tmp_path):
    model, _ = save_with_mtp(tmp_path / "model", "glm4_moe")
    save_model(tmp_path / "bare", model)
    (file,) = (tmp_path / "model").glob("*.safetensors")
    whole = load_file(file)
    for change, name in (
        (lambda t: {n: x for n, x in t.items() if not n.endswith("3.enorm.weight")}, "enorm"),
        (lambda t: t | {"model.layers.3.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1)}, "weight_scale_inv"),
    ):
        save_file(change(whole), file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=name):
            Speculator("mtp", target=model, draft=tmp_path / "model").generate([[1, 2]], max_new_tokens=4)
    with pytest.raises(CheckpointError):
        Speculator("mtp", target=model, draft=tmp_path / "bare").generate([[1, 2]], max_new_tokens=4)
    with pytest.raises(CheckpointError):
        folder = random_mtp(tmp_path / "mtp", tiny_model())
        Speculator("mtp", target=tiny_model(hidden=96), draft=folder).generate([[1, 2]], max_new_tokens=4)
    other, _ = save_with_mtp(tmp_path / "qwen", "qwen3_5_text", shards=2)
    assert len(list((tmp_path / "qwen").glob("*.safetensors"))) > 1
    assert kind_of(tmp_path / "qwen").name == "small-lm"  # where it drafts for another model
    (found,) = Speculator("mtp", target=other, plan="fixed").generate([[1, 2, 3] * 9], max_new_tokens=8)
    other.config._name_or_path = other.name_or_path = ""
    with pytest.raises(CapabilityError, match="mtp"):
        Speculator("mtp", target=other).generate([[1, 2]], max_new_tokens=4)
    given = Speculator("mtp", target=other, draft=tmp_path / "qwen", plan="fixed")
    (again,) = given.generate([[1, 2, 3] * 9], max_new_tokens=8)
    assert (again.token_ids, again.accepted) == (found.token_ids, found.accepted)


def test_heads_of_which_one_is_incomplete_or_whose_target_nobody_says(tmp_path):
    folder = published.with_heads(tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    save_file({n: t for n, t in load_file(file).items() if "1.post_layernorm" not in n}, file)
    with pytest.raises(CheckpointError, match=r"norms\.1"):
        Speculator("tokenswift", target=tiny_model(), draft=folder)
    ours = edit(random_heads(tmp_path / "heads", target()), target={})
    Speculator("tokenswift", target=target(), draft=ours)
    with pytest.raises(CheckpointError, match="hidden_size"):
        Speculator("tokenswift", target=target(hidden=96), draft=ours)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=48, n_layer=2, n_head=3)), "rotary"),
        (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=11, rotary_pct=0.5, hidden_size=48, intermediate_size=96,
                                                  num_hidden_layers=2, num_attention_heads=3)), "dimensions"),
        (lambda: with_a_bias(), "bias"),
    ],
    ids=["gpt2", "gpt_neox", "bias"],
)  # fmt: skip
def test_a_target_that_takes_no_drafts_says_why(tmp_path, model, name):
    # A draft that names no target, so that nothing else can stand in the way.
    folder = edit(random_draft(tmp_path / "draft", tiny_model(heads=3, kv_heads=3, vocab=11)), target={})
    made = model().eval()
    with pytest.raises((UnsupportedModelError, CheckpointError), match=name):
        Speculator(folder, target=made)
    assert Speculator(target=made).method.name == "prompt-lookup"


def with_a_bias() -> Any:
    model = tiny_model(vocab=11)
    model.lm_head = torch.nn.Linear(48, 11)
    return model


# --- what was written comes back ---


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "kept"])
def test_all_layouts_draft_alike(tmp_path, kept):
    model, narrow = target(), {"depth": 3, "top_k": 3}
    ours = random_eagle3(tmp_path / "ours", model, layers=(1, 3, 4), kept=kept)
    expected = outcome(ours, model, **narrow)
    assert kept or sum(accepted for _, _, accepted in expected) > 0
    theirs = published_eagle3(tmp_path / "theirs", model, kept)
    assert to_speculators(kind_of(ours).load(ours), tmp_path / "exported", "some/target") == []
    for folder in (theirs, tmp_path / "exported"):
        assert outcome(folder, model, **narrow) == expected
    (said,) = to_speculators(kind_of(theirs).load(theirs), tmp_path / "again", "some/target")
    assert "layers" in said and outcome(tmp_path / "again", model, **narrow) == expected
    for prefix in ("", "draft_model.model."):  # as older releases have them, the target's embedding too
        folder = published_eagle3(tmp_path / f"pickled{prefix}", model, kept)
        tensors = load_file(folder / "model.safetensors") | {"embed_tokens.weight": torch.zeros(11, 48)}
        (folder / "model.safetensors").unlink()
        torch.save({prefix + n: t for n, t in tensors.items()}, folder / "pytorch_model.bin")
        assert outcome(folder, model, **narrow) == expected
    longspec = random_draft(tmp_path / "longspec", model, window=512)
    tensors = load_file(longspec / "model.safetensors")
    tensors |= {f"cross_attn.{p}_proj.weight": torch.zeros(32, 48) for p in "kv"}
    tensors |= {f"cross_attn.{p}_proj.bias": torch.zeros(32) for p in "kv"}
    config = published.config_of("longspec", intermediate_size=144)
    assert outcome(published.save(tmp_path / "published", config, tensors), model) == outcome(longspec, model)


def test_eagle_1_as_speculators_wrote_it_first(tmp_path):
    model = target()
    theirs = published.write(tmp_path / "theirs", "eagle-1")
    tensors = load_file(theirs / "model.safetensors")
    del tensors["embed_tokens.weight"]
    for old, new in {"fc.": "fusion_fc.", "layers.0.": "transformer."}.items():
        tensors = {name.replace(old, new): t for name, t in tensors.items()}
    layer = published.eagle3_layer(
        num_attention_heads=6, head_dim=16, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=1e4
    )
    said = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "fusion_bias": False}
    folder = published.save(tmp_path / "draft", said | {"layernorms": False}, tensors)
    assert kind_of(folder).name == "eagle" and outcome(folder, model) == outcome(theirs, model)
    refused(edit(folder, layernorms=True), "layernorms")
    # Frequencies that old transformers saved, and a prefix of the model around, change nothing.
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    added = published.write(
        tmp_path / "added", "eagle-1", tensors=lambda t: {f"model.{n}": x for n, x in t.items()} | more
    )
    assert outcome(added, model) == outcome(theirs, model)


def test_a_draft_in_several_files(tmp_path):
    model = target()
    folder = published.write(tmp_path / "draft", "eagle-3")
    whole = outcome(folder, model)
    tensors, names = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for number, each in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        names |= dict.fromkeys(each, f"model-{number}.safetensors")
        save_file({name: tensors[name] for name in each}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert outcome(folder, model) == whole
    (folder / "model-1.safetensors").unlink()
    refused(folder, "model-1.safetensors")


EXPORTED = {
    "plain": {}, "kept": {"kept": KEPT}, "before fc": {"norm_before_fc": True, "config": {"norm_before_fc": True}},
    "3.1": {"fc_norm": 3, "norm_output": True, "config": {"fc_norm": True, "norm_output": True}},
    "qwen3": {"qk_norm": True, "layer": published.eagle3_layer("qwen3")},
    "layers": {"decoder_layers": 2, "layer": published.eagle3_layer(num_hidden_layers=2)},
}  # fmt: skip


@pytest.mark.parametrize("case", EXPORTED)
def test_what_speculators_wrote_is_written_as_it_was(tmp_path, case):
    folder = published.eagle3(tmp_path / "draft", target(), **EXPORTED[case])
    draft = kind_of(folder).load(folder)
    assert draft.layout == "speculators"
    assert to_speculators(draft, tmp_path / "out", "some/target") == []
    again = kind_of(tmp_path / "out").load(tmp_path / "out")
    assert again.shape == draft.shape and again.weights.keys() == draft.weights.keys()
    assert all(torch.equal(t, again.weights[name]) for name, t in draft.weights.items())


def test_settings_survive_an_export_and_some_cannot_be(tmp_path):
    settings = {"rope_theta": 500.0, "rope_factor": 4.0, "rope_original_length": 64}
    more = {"norm_before_residual": True, "attention_bias": True, "window": 100}
    ours = random_eagle3(tmp_path / "ours", target(), settings=settings, **more)
    draft = kind_of(ours).load(ours)
    assert to_speculators(draft, tmp_path / "exported", "some/target") == []
    assert outcome(tmp_path / "exported", target()) == outcome(ours, target())
    found = kind_of(tmp_path / "exported").load(tmp_path / "exported")
    assert found.max_context == 256 and found.window == 100
    with pytest.raises(CheckpointError):
        to_speculators(draft, ours, "some/target")
    with pytest.raises(ValueError, match="max_position"):
        to_speculators(draft, tmp_path / "out", "some/target", max_position=0)


def test_the_exported_layout_key_by_key(tmp_path):
    ours = random_eagle3(tmp_path / "ours", target(), layers=(1, 3, 4), kept=KEPT)
    to_speculators(kind_of(ours).load(ours), tmp_path / "out", "some/target", "LlamaForCausalLM", 9000, 4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layer, way = config.pop("transformer_layer_config"), config.pop("speculators_config")
    assert config == {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 5,
        "target_hidden_size": 48, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "embed_requires_grad": False, "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }  # fmt: skip
    assert way["verifier"] == {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    assert (way["algorithm"], way["default_proposal_method"]) == ("eagle3", "greedy")
    assert way["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    assert layer.items() >= {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 11,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 9000, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
    }.items()  # fmt: skip
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    names = {f"layers.0.{x}.weight" for x in parts + norms} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert tensors.keys() == names | {"d2t", "t2d"} and len(tensors["t2d"]) == 11
    assert tensors["d2t"].dtype == torch.int64 and (tensors["d2t"] + torch.arange(5)).tolist() == KEPT
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == KEPT


def test_a_folder_that_does_not_say_what_its_residual_is_is_read_as_vllm_does(tmp_path):
    model = target()
    folders = {
        "speculators": (published.eagle3(tmp_path / "a", model, config={"norm_before_residual": "drop"}), True),
        "peagle": (THEIRS["peagle"](tmp_path / "b", model), False),
        "authors": (published_eagle3(tmp_path / "c", model), False),
    }
    assert all(kind_of(folder).load(folder).shape.norm_before_residual is said for folder, said in folders.values())


def test_what_published_drafts_leave_out_or_state_oddly(tmp_path):
    model, runner = target(), TargetRunner(target())
    folder = published_eagle3(tmp_path / "a", model)
    load = kind_of(folder).load
    draft = load(folder)
    assert (draft.rope["rope_theta"], draft.trained_length, draft.window) == (1e4, 2048, None)
    assert draft.feature_layers(runner) == (1, 3, 4)
    assert load(published_eagle3(tmp_path / "b", model, rope_theta=5e5)).rope["rope_theta"] == 5e5
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    assert load(published_eagle3(tmp_path / "d", model, rope_scaling=scaling)).max_context == 4096
    # A layer of exactly the default sizes of Qwen3 says next to nothing.
    said = {"model_type": "qwen3", "num_hidden_layers": 1, "num_key_value_heads": 8, "intermediate_size": 12288}
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": said, "draft_vocab_size": 32000}
    refused(published.save(tmp_path / "f", config, {"fc.weight": torch.zeros(1, 3 * 4096)}), "fc.weight (1, 12288)")
    small = published.random(LAYOUTS["longspec"][0](**published.TINY | {"q": 48, "kv": 48}))
    config = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 3}
    shape = kind_of(published.save(tmp_path / "g", config, small)).load(tmp_path / "g").shape
    assert (shape.kv_heads, shape.head_dim, shape.window) == (3, 16, 512)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_and_shapes_of_a_draft_for_a_model_of_8b(tmp_path, monkeypatch, layout):
    shapes, _, method = LAYOUTS[layout]
    (tmp_path / "config.json").write_text(json.dumps(published.config_of(layout, large=True)))
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes(**published.LARGE).items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(32000) * 3
    monkeypatch.setattr(tensor_files, "names", lambda folder: list(tensors))
    monkeypatch.setattr(tensor_files, "read", lambda folder: dict(tensors))
    draft = kind_of(tmp_path).load(tmp_path)
    assert draft.kind == method and draft.required_target["vocab_size"] == 128256
    dead = [f"cross_attn.{part}_proj.{x}" for part in "kv" for x in ("weight", "bias")]
    left = {"embed_tokens.weight", "d2t", "t2d", *(dead if method == "longspec" else [])}
    assert draft.parameters == sum(t.numel() for name, t in tensors.items() if name not in left)
    assert draft.vocabulary == (32000 if method == "eagle3" else None)


def test_language_models_are_told_from_drafts(tmp_path):
    for name, sizes in (("whole", {}), ("files", {"max_shard_size": "20KB"})):
        tiny_model(vocab=11).save_pretrained(tmp_path / name, **sizes)
        assert kind_of(tmp_path / name).name == "small-lm"
    assert (tmp_path / "files" / "model.safetensors.index.json").exists()
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    for zipped in (True, False):
        state = tiny_model(vocab=11).state_dict()
        torch.save(state, old / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        assert kind_of(old).name == "small-lm"
    (old / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        kind_of(old)


class Dangerous:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_pickle_runs_no_code(tmp_path, capsys):
    folder = published.write(tmp_path / "draft", "eagle-3", True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Dangerous()}))
    refused(folder)
    for content in ({"fc.weight": Dangerous()}, [torch.zeros(1)]):
        torch.save(content, folder / "pytorch_model.bin")
        refused(folder)
    assert capsys.readouterr().out == ""


def test_remarks_and_what_cannot_be_saved(tmp_path):
    runner = TargetRunner(target())
    sound = random_eagle3(tmp_path / "a", target(), layers=(1, 3, 4), head_dim=16)
    load = kind_of(sound).load
    assert load(sound).remarks(runner) == []
    settings = {"rope_theta": 5e5, "trained_length": 100, "window": None}
    found = " | ".join(load(random_eagle3(tmp_path / "b", target(), kept=[5, 2, 7], settings=settings)).remarks(runner))
    for part in ("rope_theta", "head size", "layers 1, 2, 4", "100 tokens", "d2t"):
        assert part in found
    eagle = published.write(tmp_path / "d", "eagle-1", max_position_embeddings=100)
    draft = kind_of(eagle).load(eagle)
    assert draft.feature_layers(runner) == (7,) and "100 tokens" in " ".join(draft.remarks(runner))
    for folder in (eagle, THEIRS["dflash"](tmp_path / "e", target())):
        with pytest.raises(CapabilityError):
            kind_of(folder).load(folder).save(tmp_path / "copy")


# --- drafts in 8 and 4 bits ---


@pytest.mark.parametrize("bits", [None, *packing.BITS])
@every_kind
def test_every_kind_is_packed_and_read(kind, bits, tmp_path):
    model, out = target(), tmp_path / "packed"
    folder = OURS[kind](tmp_path / "whole", model)
    whole = kind_of(folder).load(folder)
    whole.save(out, bits=bits)
    found = kind_of(out).load(out)
    assert found.config == whole.config and found.required_target == whole.required_target
    for name, weight in whole.weights.items():
        near = weight.abs().max() / {None: torch.inf, 8: 150, 4: 8}[bits]
        assert (found.weights[name].float() - weight.float()).abs().max() <= near
    if bits is not None:
        assert any(t.dtype in (torch.int8, torch.uint8) for t in load_file(out / "model.safetensors").values())
        assert (out / "model.safetensors").stat().st_size < (folder / "model.safetensors").stat().st_size
    if bits == 4:
        plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=8)
        assert [tokens for tokens, _, _ in outcome(out, model, 8)] == [r.token_ids for r in plain]


def test_what_bits_are(tmp_path):
    weight = torch.randn(50, 96).bfloat16()
    tensors = packing.pack({"a.weight": weight}, 8)
    back = packing.unpack(tensors, tmp_path)["a.weight"]
    assert (tensors["a.weight"].dtype, tensors["a.weight.scales"].shape) == (torch.int8, (50, 1))
    assert bool(((back - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all())
    # Four bits have a scale for 32 columns.
    weight = torch.arange(-8.0, 8.0).repeat(3, 6) * torch.tensor([0.5, 0.25, 2.0]).repeat_interleave(32)
    tensors = packing.pack({"a.weight": weight, "b.weight": torch.zeros(4, 64), "c.weight": torch.ones(2, 33)}, 4)
    assert (tensors["a.weight"].shape, tensors["a.weight.scales"].shape) == ((3, 48), (3, 3))
    assert tensors["a.weight"][0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert tensors["c.weight"].dtype == torch.int8  # no whole number of blocks
    back = packing.unpack(tensors, tmp_path)
    assert torch.equal(back["a.weight"], weight) and torch.equal(back["b.weight"], torch.zeros(4, 64))
    with pytest.raises(ValueError, match="5"):
        packing.pack(tensors, 5)


UP, SCALES = "mlp.up_proj.weight", "mlp.up_proj.weight.scales"
DAMAGE = {
    "no scales": lambda t: {n: x for n, x in t.items() if n != SCALES},
    "no numbers": lambda t: {n: x for n, x in t.items() if n != UP},
    "scales of another matrix": lambda t: t | {SCALES: torch.ones(3, 1)},
    "numbers of other bits": lambda t: t | {UP: t[UP].view(torch.uint8)},
    "scales of another dtype": lambda t: t | {SCALES: t[SCALES].half()},
    "scales that are not finite": lambda t: t | {SCALES: t[SCALES] / 0},
    "fewer rows": lambda t: {n: x[:-1].contiguous() if n.startswith("mlp.up_proj") else x for n, x in t.items()},
}


def test_damaged_packed_files_are_refused_by_name(tmp_path):
    folder, out = random_draft(tmp_path / "whole", target()), tmp_path / "packed"
    kind_of(folder).load(folder).save(out, bits=8)
    sound = load_file(out / "model.safetensors")
    for damage in DAMAGE.values():
        save_file(damage(sound), out / "model.safetensors")
        refused(out, UP)
    # Folders of others are left as they are.
    edit(folder, lambda t: t | {"odd": torch.zeros(2, dtype=torch.int8)}, longdraft_format="drop")
    assert draft_folder.load(folder).tensors["odd"].dtype == torch.int8
