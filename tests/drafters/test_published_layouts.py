"""Drafts as LongSpec, EAGLE-1, EAGLE-2 and EAGLE-3 are published: names, shapes, files, configurations."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from longdraft import Speculator
from longdraft.drafts import tensor_files
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.runner import TargetRunner
from tests.drafters.watching import run
from tests.tiny import tiny_model

KEPT = [1, 2, 5, 7, 9]
PROMPTS = [[1, 2, 3, 4], [5] * 9]
# Sizes of a configuration, by short names: tiny ones, and those of a Llama of 8B.
TINY = {"d": 48, "f": 96, "q": 6 * 16, "kv": 2 * 16, "v": 11, "kept": 5}
LARGE = {"d": 4096, "f": 14336, "q": 4096, "kv": 1024, "v": 128256, "kept": 32000}
SIZES = {
    "TINY": {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
             "head_dim": 16, "vocab_size": 11, "rms_norm_eps": 1e-6},
    "LARGE": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
              "vocab_size": 128256, "rms_norm_eps": 1e-5},
}  # fmt: skip
# What all of them say, whole Llamas that they pretend to be.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
    "max_position_embeddings": 2048, "torch_dtype": "float16", "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip


def mlp(d, f, **_):
    return {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f)}


def attention(d, q, kv, reads, **_):
    sizes = {"q": (q, reads), "k": (kv, reads), "v": (kv, reads), "o": (d, q)}
    return {f"self_attn.{part}_proj.weight": size for part, size in sizes.items()}


def longspec(d, q, kv, **sizes):
    shapes = mlp(d, **sizes)
    for part in ("self_attn", "cross_attn"):
        shapes |= {f"{part}.o_proj.weight": (d, q)}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes |= {f"{part}.{name}_proj.weight": (rows, d), f"{part}.{name}_proj.bias": (rows,)}
    norms = ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm")
    return shapes | {f"{norm}.weight": (d,) for norm in norms}


def eagle(d, v, bias=False, **sizes):
    layer = mlp(d, **sizes) | attention(d, reads=d, **sizes) | {"post_attention_layernorm.weight": (d,)}
    if bias:
        layer |= {
            f"self_attn.{part}_proj.bias": (sizes[rows],) for part, rows in (("q", "q"), ("k", "kv"), ("v", "kv"))
        }
    rest = {"embed_tokens.weight": (v, d), "fc.weight": (d, 2 * d)} | ({"fc.bias": (d,)} if bias else {})
    return rest | {f"layers.0.{name}": shape for name, shape in layer.items()}


def eagle3(d, v, kept, **sizes):
    layer = mlp(d, **sizes) | attention(d, reads=2 * d, **sizes)
    layer |= {f"{norm}.weight": (d,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    rest = {"fc.weight": (d, 3 * d), "norm.weight": (d,), "lm_head.weight": (kept, d), "d2t": (kept,), "t2d": (v,)}
    return rest | {f"midlayer.{name}": shape for name, shape in layer.items()}


def eagle_biased(**sizes):
    return eagle(bias=True, **sizes)


EAGLE3 = LLAMA | {"draft_vocab_size": None}
# Layout -> shapes by name, what its config.json says beside the sizes, and the method that drafts with it.
LAYOUTS = {
    "longspec": (longspec, LLAMA | {"num_hidden_layers": 3, "rope_theta": 1e4}, "longspec"),
    "eagle-1": (eagle, LLAMA | {"bias": False, "rope_theta": 1e4}, "eagle"),
    "eagle-2": (eagle_biased, {**LLAMA, "rope_scaling": None, "pretraining_tp": 1}, "eagle"),
    "eagle-3": (eagle3, EAGLE3, "eagle3"),
    "eagle-3 named": (eagle3, EAGLE3 | {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
}  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def numbers(shapes, kept=KEPT, vocabulary=11):
    """Random tensors of these shapes, in float16 as most are published, in which every part matters."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = (1 + 0.2 * noise if "norm" in name else 0.25 * noise).half()
    if "d2t" in shapes:
        found["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
        found["t2d"] = torch.isin(torch.arange(vocabulary), torch.tensor(kept))
    return found


def write(folder, layout, pickled=False, tensors=lambda t: t, **over):
    """A folder of the layout for a tiny target, as one file of either format."""
    shapes, config, _ = LAYOUTS[layout]
    config = config | SIZES["TINY"] | ({"draft_vocab_size": 5} if "draft_vocab_size" in config else {}) | over
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x != "drop"}))
    found = tensors(numbers(shapes(**TINY)))
    if pickled:
        torch.save(found, folder / "pytorch_model.bin")
    else:
        save_file(found, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab=11, layers=8)


@every_layout
def test_names_and_shapes_of_a_draft_for_a_model_of_8b(tmp_path, monkeypatch, layout):
    shapes, config, method = LAYOUTS[layout]
    config = config | SIZES["LARGE"] | ({"draft_vocab_size": 32000} if "draft_vocab_size" in config else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes(**LARGE).items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(32000) * 3
    monkeypatch.setattr(tensor_files, "names", lambda folder: list(tensors))
    monkeypatch.setattr(tensor_files, "read", lambda folder: dict(tensors))
    draft = kind_of(tmp_path).load(tmp_path)
    assert draft.kind == method and draft.made_for["vocab_size"] == 128256
    dead = [f"cross_attn.{part}_proj.{x}" for part in "kv" for x in ("weight", "bias")]
    left = {"embed_tokens.weight", "d2t", "t2d", *(dead if method == "longspec" else [])}
    assert draft.parameters == sum(t.numel() for name, t in tensors.items() if name not in left)
    assert draft.vocabulary == (32000 if method == "eagle3" else None)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@every_layout
def test_a_folder_decodes_exactly(tmp_path, model, layout, pickled):
    folder = write(tmp_path / "draft", layout, pickled)
    spec = Speculator(folder, target=model, plan="fixed")
    assert spec.method.name == LAYOUTS[layout][2]
    found = spec.generate(PROMPTS, max_new_tokens=16)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=16)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert sum(r.drafted for r in found) > 0 and sum(r.accepted for r in found) > 0


@every_layout
def test_damaged_folders_are_told(tmp_path, layout):
    for pickled, name in ((False, "model.safetensors"), (True, "pytorch_model.bin")):
        folder = write(tmp_path / name, layout, pickled)
        path = folder / name
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(CheckpointError):
            Speculator(folder)
        path.unlink()
        with pytest.raises(CheckpointError):
            Speculator(folder)


@every_layout
def test_a_folder_whose_tensors_are_not_the_layouts(tmp_path, layout):
    def spoiled(tensors):
        wrong = next(name for name in tensors if "mlp.up_proj" in name)
        return tensors | {wrong: tensors[wrong][:-1].contiguous(), "extra": torch.zeros(1)}

    with pytest.raises(CheckpointError) as caught:
        Speculator(write(tmp_path / "draft", layout, tensors=spoiled))
    assert "unexpected: extra" in str(caught.value) and "(95, 48) where config.json asks for (96, 48)" in str(
        caught.value
    )


@every_layout
def test_a_folder_for_another_target(tmp_path, layout):
    folder = write(tmp_path / "draft", layout)
    for other in ({"hidden": 96}, {"vocab": 12}):
        with pytest.raises(CheckpointError):
            Speculator(folder, target=tiny_model(**({"vocab": 11, "layers": 8} | other)))


# --- EAGLE-1 and EAGLE-2 ---


def rms(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x, theta):
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, x.shape[2], 2) / x.shape[2])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def log_probs(model, tensors, text, path, theta):
    """EAGLE's log-probabilities of what follows a text and a path of drafted tokens, by its formulas."""
    w = {name.removeprefix("layers.0."): t.double() for name, t in tensors.items()}
    with torch.no_grad():
        f = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]  # behind the final norm
        tokens = text[1:]
        for following in [*path, None]:
            n = torch.cat([model.get_input_embeddings()(torch.tensor(tokens)), f], -1)
            n = F.linear(n, w["fc.weight"], w.get("fc.bias"))
            q, k, v = (
                F.linear(n, w[f"self_attn.{p}_proj.weight"], w.get(f"self_attn.{p}_proj.bias"))
                .view(len(n), -1, 16)
                .transpose(0, 1)
                for p in "qkv"
            )
            k, v = (t.repeat_interleave(3, 0) for t in (rope(k, theta), v))
            seen = torch.ones(len(n), len(n), dtype=torch.bool).tril()
            attended = F.scaled_dot_product_attention(rope(q, theta), k, v, seen)
            a = n + attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
            m = rms(a, w["post_attention_layernorm.weight"])
            inner = F.silu(m @ w["mlp.gate_proj.weight"].T) * (m @ w["mlp.up_proj.weight"].T)
            out = a + inner @ w["mlp.down_proj.weight"].T
            if following is not None:
                tokens, f = [*tokens, following], torch.cat([f, out[-1:]])
        return model.lm_head(out[-1]).log_softmax(-1)


@pytest.mark.parametrize("layout", ["eagle-1", "eagle-2"])
def test_eagle_proposes_what_its_formulas_say(tmp_path, layout):
    model = tiny_model(vocab=11, layers=8, dtype=torch.float64)
    folder = write(tmp_path / "draft", layout, rope_theta=500.0)
    tensors = tensor_files.read(folder)
    spec = Speculator(folder, target=model, plan="fixed", depth=3, top_k=2, nodes=6)
    rounds = run(spec, PROMPTS, 8)[0].rounds
    assert len(rounds) > 4
    for text, tree in rounds:
        for node in range(1, tree.size):
            path = [tree.tokens[i] for i in tree.path(tree.parents[node])][1:]
            said = log_probs(model, tensors, text, path, 500.0)[tree.tokens[node]]
            assert tree.log_probs[node] == pytest.approx(float(said), abs=2e-4)


def test_eagle_in_a_window_and_with_retrieval(tmp_path, model):
    folder = write(tmp_path / "draft", "eagle-1")
    prompts = [[i % 11 for i in range(60)], PROMPTS[0]]
    plain = [r.token_ids for r in Speculator("ar", target=model).generate(prompts, max_new_tokens=12)]
    sizes = {"chunk": 4, "chunks": 3, "sink": 4, "recent": 8}
    for options in ({"window": 16}, {"retrieval": True, **sizes}, {"lookup": True, "plan": "auto"}):
        spec = Speculator("eagle", draft=folder, target=model, depth=2, top_k=2, **options)
        assert [r.token_ids for r in spec.generate(prompts, max_new_tokens=12)] == plain


def test_what_eagle_remarks_and_refuses(tmp_path, model):
    folder = write(tmp_path / "draft", "eagle-1", max_position_embeddings=100)
    draft = kind_of(folder).load(folder)
    assert draft.feature_layers(TargetRunner(model)) == (7,)
    (said,) = draft.remarks(TargetRunner(model))
    assert "texts of 100 tokens" in said
    with pytest.raises(CapabilityError):
        draft.save(tmp_path / "copy")
    with pytest.raises(CheckpointError):
        Speculator("eagle3", draft=folder)
    for name, value in (("vocab_size", "drop"), ("hidden_act", "gelu"), ("layernorms", True)):
        with pytest.raises(CheckpointError, match=name):
            Speculator(write(tmp_path / name, "eagle-1", **{name: value}))


def test_what_the_files_add(tmp_path, model):
    """Frequencies that old transformers saved, and a prefix of the model around."""

    def added(tensors):
        found = {f"model.{name}": t for name, t in tensors.items()}
        return found | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}

    plain, more = write(tmp_path / "plain", "eagle-1"), write(tmp_path / "more", "eagle-1", tensors=added)
    one, two = (Speculator(f, target=model, plan="fixed").generate(PROMPTS, max_new_tokens=12) for f in (plain, more))
    assert [(r.token_ids, r.rounds) for r in one] == [(r.token_ids, r.rounds) for r in two]


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
