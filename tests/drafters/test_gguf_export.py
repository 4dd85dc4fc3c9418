"""Drafts as GGUF files: every tensor and setting of the draft, where llama.cpp looks for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longdraft.cli.main import main
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafts import draft_folder
from longdraft.drafts.eagle3_gguf import to_gguf as eagle3_to_gguf
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.drafts.small_lm_gguf import to_gguf as small_lm_to_gguf
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model import small_models
from longdraft.model.loading import load
from longdraft.model.rotary import Rotary, yarn
from longdraft.model.shared_parts import describe
from tests.drafts import random_eagle3, small_lm
from tests.gguf_files import write_gguf
from tests.tiny import tiny_model

gguf = pytest.importorskip("gguf")
KEPT = [1, 2, 5, 7, 10, 63]
LAYERS = (0, 1, 3)


@pytest.fixture(scope="module")
def model():
    """Of the sizes of the target in the file."""
    return tiny_model(hidden=64, heads=4, vocab=64, layers=5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    write_gguf(file, kind="F32", words="Q8_0", tie=False)
    return file


def read(file):
    """Settings and tensors of a file, matrices as (out, in)."""
    reader = gguf.GGUFReader(file)
    settings = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return settings, {t.name: (t.tensor_type.name, np.array(t.data)) for t in reader.tensors}


def unpaired(rows, heads):
    """What rows of queries or keys were before they were laid in pairs."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def trained_lm(folder, model, kept=None):
    """A small language model for a target, of weights that all matter."""
    sizes = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": False,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    weights = {
        n: torch.randn(t.shape, generator=generator) for n, t in small_models.decoder(sizes).state_dict().items()
    }
    config = {"model": sizes, "trained_length": 256}
    draft_folder.save(folder, draft_folder.trained("small-lm", config, weights, kept, describe(model)))
    return folder


def test_eagle3_tensor_by_tensor(tmp_path, model, target):
    folder = random_eagle3(tmp_path / "d", model, layers=LAYERS, kept=KEPT, window=100, norm_before_residual=True)
    draft = Eagle3Draft.load(folder)
    (sentence,) = eagle3_to_gguf(draft, tmp_path / "out.gguf", str(target))
    assert "no window (100 tokens)" in sentence
    settings, tensors = read(tmp_path / "out.gguf")
    assert settings.items() >= {
        "general.architecture": "eagle3", "eagle3.norm_before_residual": True, "eagle3.target_hidden_size": 64,
        "eagle3.block_count": 1, "eagle3.embedding_length": 64, "eagle3.feed_forward_length": 128,
        "eagle3.attention.head_count": 4, "eagle3.attention.head_count_kv": 2, "eagle3.attention.key_length": 12,
        "eagle3.attention.value_length": 12, "eagle3.rope.dimension_count": 12, "eagle3.rope.freq_base": 1e4,
        "eagle3.rope.scaling.type": "none", "eagle3.context_length": 512, "eagle3.vocab_size": 64,
    }.items()  # fmt: skip
    assert settings["eagle3.target_layers"] == [1, 2, 4]
    assert settings["eagle3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    theirs, _ = read(target)
    words = {n: x for n, x in theirs.items() if n.startswith("tokenizer.")}
    assert words and {n: x for n, x in settings.items() if n.startswith("tokenizer.")} == words
    names = {
        "fc": "fc", "norm": "output_norm", "lm_head": "output", "midlayer.input_layernorm": "blk.0.attn_norm",
        "midlayer.hidden_norm": "blk.0.attn_norm_2", "midlayer.self_attn.q_proj": "blk.0.attn_q",
        "midlayer.self_attn.k_proj": "blk.0.attn_k", "midlayer.self_attn.v_proj": "blk.0.attn_v",
        "midlayer.self_attn.o_proj": "blk.0.attn_output", "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
        "midlayer.mlp.gate_proj": "blk.0.ffn_gate", "midlayer.mlp.up_proj": "blk.0.ffn_up",
        "midlayer.mlp.down_proj": "blk.0.ffn_down",
    }  # fmt: skip
    assert tensors.keys() == {f"{name}.weight" for name in names.values()} | {"d2t"}
    for ours, name in names.items():
        kind, found = tensors[f"{name}.weight"]
        weight = draft.weights[f"{ours}.weight"].numpy()
        assert kind == ("F32" if weight.ndim == 1 else "F16")
        if name.endswith(("_q", "_k")):
            found = unpaired(found, 4 if name.endswith("_q") else 2)
        assert np.array_equal(found, weight.astype(found.dtype))
    kind, table = tensors["d2t"]
    assert (kind, table.tolist()) == ("I64", KEPT)


def test_stretched_rope_is_plain_rope_with_divisors(tmp_path, model, target):
    settings = {"rope_theta": 500.0, "rope_factor": 4.0, "rope_original_length": 64}
    draft = Eagle3Draft.load(random_eagle3(tmp_path / "d", model, layers=LAYERS, settings=settings))
    assert eagle3_to_gguf(draft, tmp_path / "out.gguf", str(target)) == []
    settings, tensors = read(tmp_path / "out.gguf")
    assert "d2t" not in tensors and settings["eagle3.rope.scaling.type"] == "none"
    angles = 9 * 500.0 ** -(np.arange(6) / 6) / tensors["rope_freqs.weight"][1]
    cos, _ = Rotary(12, yarn(500.0, 4.0, 64))(torch.tensor([9]))
    factor = settings["eagle3.rope.scaling.attn_factor"]
    assert factor > 1 and np.allclose(factor * np.cos(angles), cos[0, :6].numpy(), atol=1e-5)


def test_matrices_that_float16_does_not_hold_stay_float32(tmp_path, model, target):
    draft = Eagle3Draft.load(random_eagle3(tmp_path / "d", model, layers=LAYERS))
    draft.weights["fc.weight"][0, 0] = 1e5
    eagle3_to_gguf(draft, tmp_path / "out.gguf", str(target))
    kind, found = read(tmp_path / "out.gguf")[1]["fc.weight"]
    assert kind == "F32" and found[0, 0] == 1e5


@pytest.mark.parametrize("tie", [False, True])
def test_a_small_lm_with_the_targets_embedding_and_head(tmp_path, model, tie):
    target = tmp_path / "target.gguf"
    write_gguf(target, kind="F32", words="Q8_0", tie=tie)
    folder = trained_lm(tmp_path / "d", model, torch.tensor(KEPT))
    out = tmp_path / "out" / "lm.gguf"
    lost = small_lm_to_gguf(SmallLMDraft.load(folder), out, str(target))
    assert "256 tokens" in lost[0] and "6 tokens" in lost[1] and "64" in lost[1]
    theirs, tensors = read(target)[1], read(out)[1]
    for name in ("token_embd.weight", "output.weight"):
        assert (name in tensors) == (name in theirs)
        if name in theirs:
            assert tensors[name][0] == "Q8_0" and np.array_equal(tensors[name][1], theirs[name][1])
    # The whole of it, read as any model of llama.cpp is: the draft's layers between the target's embedding and head.
    found, whole = load(out, weights="float32").model, load(target, weights="float32").model
    draft = SmallLMDraft.load(folder)
    weights = {n: t.half().float() if t.dim() > 1 else t.float() for n, t in draft.weights.items()}
    expected = small_models.around(draft.sizes, weights, whole.get_input_embeddings(), whole.lm_head.weight)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, expected(ids).logits, atol=1e-4)
    assert found.config.max_position_embeddings == 256


def test_exports_that_cannot_be(tmp_path, model, target, capsys):
    biased = Eagle3Draft.load(random_eagle3(tmp_path / "biased", model, layers=LAYERS, attention_bias=True))
    two = Eagle3Draft.load(random_eagle3(tmp_path / "two", model, layers=(1, 2), feature_size=128))
    other = Eagle3Draft.load(random_eagle3(tmp_path / "other", tiny_model(layers=5), layers=LAYERS))
    draft = Eagle3Draft.load(random_eagle3(tmp_path / "draft", model, layers=LAYERS))
    newer = Eagle3Draft.load(random_eagle3(tmp_path / "newer", model, layers=LAYERS, norm_output=True))
    for each, error, message in (
        (biased, CapabilityError, "biases"),
        (newer, CapabilityError, "norms"),
        (two, CapabilityError, "reads 2 of"),
        (other, CheckpointError, r"hidden_size 48 \(.*: 64\)"),
    ):
        with pytest.raises(error, match=message):
            eagle3_to_gguf(each, tmp_path / "out.gguf", str(target))
    with pytest.raises(CheckpointError):
        eagle3_to_gguf(draft, tmp_path, str(target))
    with pytest.raises(CapabilityError):
        small_lm_to_gguf(SmallLMDraft.load(small_lm(tmp_path / "lm")), tmp_path / "out.gguf", str(target))
    gemma = tmp_path / "gemma.gguf"  # whose embedding is scaled
    gemma.write_bytes(target.read_bytes().replace(b"llama", b"gemma"))
    with pytest.raises(CapabilityError, match="gemma"):
        small_lm_to_gguf(SmallLMDraft.load(trained_lm(tmp_path / "own", model)), tmp_path / "out.gguf", str(gemma))
    (tmp_path / "cut.gguf").write_bytes(target.read_bytes()[:200])
    for verifier, code, message in (
        (tmp_path / "draft", 2, "is not a file"),
        (tmp_path / "draft" / "config.json", 1, "not a GGUF file"),
        (tmp_path / "cut.gguf", 1, "cannot be read as the GGUF file"),
    ):
        given = ["export", tmp_path / "draft", tmp_path / "out.gguf", "--to", "gguf", "--verifier", verifier]
        assert main([str(a) for a in given]) == code
        assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("*out.gguf*"))


def test_the_command(tmp_path, model, target, capsys):
    folder = random_eagle3(tmp_path / "draft", model, layers=LAYERS, window=8)
    given = ["export", folder, tmp_path / "out.gguf", "--to", "gguf", "--verifier", target]
    assert main([str(a) for a in given]) == 0
    said = capsys.readouterr().err
    assert "no window" in said and "out.gguf is written" in said
    assert read(tmp_path / "out.gguf")[0]["general.name"] == "draft"
    assert list(tmp_path.glob(".*")) == []
