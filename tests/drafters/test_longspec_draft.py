"""Draft folders: both layouts load, and what is wrong with one is said."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from longdraft import Speculator
from longdraft.drafters.longspec import LongSpecDraft
from longdraft.errors import CheckpointError, UnsupportedModelError
from tests.drafts import edit, random_block, random_draft
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path):
    return random_draft(tmp_path / "draft", tiny_model())


def published(folder, model, drop=(), **over):
    """As LongSpec's authors publish drafts: 20 tensors and a configuration of transformers."""
    folder.mkdir()
    tensors = dict(random_block(model).state_dict())
    for part in "kv":
        tensors[f"cross_attn.{part}_proj.weight"] = torch.zeros(32, 48)
        tensors[f"cross_attn.{part}_proj.bias"] = torch.zeros(32)
    assert len(tensors) == 20
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 144, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 61, "rope_theta": 1e4,
    }  # fmt: skip
    config = {k: x for k, x in (config | over).items() if k not in drop}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_published_layout_drafts_as_ours_does(tmp_path):
    model = tiny_model()
    runs = []
    for folder in (random_draft(tmp_path / "ours", model, window=512), published(tmp_path / "theirs", model)):
        spec = Speculator(folder, target=model, widths=(3, 4))
        assert spec.method.name == "longspec"
        result = spec.generate([[1, 2, 3, 4]], max_new_tokens=12)[0]
        runs.append((result.token_ids, result.rounds, result.accepted))
    assert runs[0] == runs[1]


def test_sizes_that_transformers_leaves_out(tmp_path):
    model = tiny_model(heads=3, kv_heads=3)
    folder = tmp_path / "draft"
    folder.mkdir()
    save_file({n: t.clone() for n, t in random_block(model).state_dict().items()}, folder / "model.safetensors")
    config = {"hidden_size": 48, "intermediate_size": 144, "num_attention_heads": 3}
    (folder / "config.json").write_text(json.dumps(config))
    shape = LongSpecDraft.load(folder).shape
    assert (shape.kv_heads, shape.head_dim, shape.window) == (3, 16, 512)


def test_many_missing_tensors_are_counted(folder):
    with pytest.raises(CheckpointError, match=r"missing: (\S+ ){6}and 9 more"):
        LongSpecDraft.load(edit(folder, lambda t: {n: x for n, x in t.items() if n == "input_layernorm.weight"}))


def test_a_published_draft_names_its_sizes_as_transformers_does(tmp_path):
    folder = published(tmp_path / "draft", tiny_model(), drop=["num_attention_heads"])
    with pytest.raises(CheckpointError):
        Speculator(folder)


def gpt_neox():
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=61, rotary_pct=0.5, **sizes))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=48, n_layer=2, n_head=3))


def head_with_a_bias():
    model = tiny_model()
    model.lm_head = torch.nn.Linear(48, 61)
    return model


@pytest.mark.parametrize(
    ("build", "message"), [(gpt2, "no rotary"), (head_with_a_bias, "head with a bias"), (gpt_neox, "dimensions")]
)
def test_a_target_that_takes_no_drafts_says_why(tmp_path, build, message):
    # A draft that names no target, so that nothing else can stand in the way.
    folder = random_draft(tmp_path / "draft", tiny_model(heads=3, kv_heads=3))
    edit(folder, target={})
    model = build().eval()
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        Speculator(folder, target=model)
    assert Speculator(target=model).method.name == "prompt-lookup"
