"""Draft folders in the layouts of other projects, with random weights: names, shapes, files and configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.definitions import MASK
from tests.support.drafts import noise, random_eagle3_block, vocab_tables
from tests.support.tiny import tiny_model

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]
HIDDEN, INNER, HEADS, KV, D = 48, 96, 4, 2, 12
KEPT = [1, 2, 5, 7, 9]
LAYER = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "vocab_size": 11,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4,
}  # fmt: skip


def random(shapes: Shapes, half: bool = False) -> Tensors:
    return {name: t.half() if half else t for name, t in noise(shapes, 3).items()}


def save(folder: Path, config: dict[str, Any], tensors: Tensors, pickled: bool = False) -> Path:
    """Writes a folder; the value "drop" leaves an entry of config.json out."""
    folder.mkdir(parents=True)
    written = {name: value for name, value in config.items() if value != "drop"}
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {name: t.clone().contiguous() for name, t in tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def with_vocabulary(tensors: Tensors, kept: list[int] | None, vocabulary: int = 11) -> Tensors:
    """Adds the tables of a smaller vocabulary."""
    return tensors | vocab_tables(kept, vocabulary)


# --- LongSpec, EAGLE-1, EAGLE-2 and EAGLE-3, by their authors ---

# Sizes by short names, and by their names in a configuration: tiny ones, and those of Llama-3.1-8B.
TINY = {"d": 48, "f": 96, "q": 6 * 16, "kv": 2 * 16, "v": 11, "kept": 5}
LARGE = {"d": 4096, "f": 14336, "q": 4096, "kv": 1024, "v": 128256, "kept": 32000}
SIZES = {
    "TINY": {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
             "head_dim": 16, "vocab_size": 11, "rms_norm_eps": 1e-6},
    "LARGE": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
              "vocab_size": 128256, "rms_norm_eps": 1e-5},
}  # fmt: skip
# Entries that all of them have, as if they were full Llama models.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1,
    "max_position_embeddings": 2048, "torch_dtype": "float16", "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip


def _mlp(d: int, f: int, **_: int) -> Shapes:
    return {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f)}


def _attention(d: int, q: int, kv: int, reads: int, **_: int) -> Shapes:
    sizes = {"q": (q, reads), "k": (kv, reads), "v": (kv, reads), "o": (d, q)}
    return {f"self_attn.{part}_proj.weight": size for part, size in sizes.items()}


def _longspec(d: int, q: int, kv: int, **sizes: int) -> Shapes:
    shapes = _mlp(d, **sizes)
    for part in ("self_attn", "cross_attn"):
        shapes |= {f"{part}.o_proj.weight": (d, q)}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes |= {f"{part}.{name}_proj.weight": (rows, d), f"{part}.{name}_proj.bias": (rows,)}
    norms = ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm")
    return shapes | {f"{norm}.weight": (d,) for norm in norms}


def _eagle(d: int, v: int, bias: bool = False, **sizes: int) -> Shapes:
    layer = _mlp(d, **sizes) | _attention(d, reads=d, **sizes) | {"post_attention_layernorm.weight": (d,)}
    if bias:
        layer |= {f"self_attn.{p}_proj.bias": (sizes[rows],) for p, rows in (("q", "q"), ("k", "kv"), ("v", "kv"))}
    rest: Shapes = {"embed_tokens.weight": (v, d), "fc.weight": (d, 2 * d)} | ({"fc.bias": (d,)} if bias else {})
    return rest | {f"layers.0.{name}": shape for name, shape in layer.items()}


def _eagle3(d: int, v: int, kept: int, **sizes: int) -> Shapes:
    layer = _mlp(d, **sizes) | _attention(d, reads=2 * d, **sizes)
    layer |= {f"{norm}.weight": (d,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    rest = {"fc.weight": (d, 3 * d), "norm.weight": (d,), "lm_head.weight": (kept, d), "d2t": (kept,), "t2d": (v,)}
    return rest | {f"midlayer.{name}": shape for name, shape in layer.items()}


# Layout -> shapes by tensor name, entries of config.json besides the sizes, and the method that uses the draft.
LAYOUTS: dict[str, tuple[Callable[..., Shapes], dict[str, Any], str]] = {
    "longspec": (_longspec, LLAMA | {"num_hidden_layers": 3, "rope_theta": 1e4}, "longspec"),
    "eagle-1": (_eagle, LLAMA | {"bias": False, "rope_theta": 1e4}, "eagle"),
    "eagle-2": (lambda **s: _eagle(bias=True, **s), LLAMA | {"rope_scaling": None, "pretraining_tp": 1}, "eagle"),
    "eagle-3": (_eagle3, LLAMA | {"draft_vocab_size": None}, "eagle3"),
    "eagle-3 named": (
        _eagle3, LLAMA | {"draft_vocab_size": None, "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"
    ),
}  # fmt: skip


def config_of(layout: str, large: bool = False, **over: Any) -> dict[str, Any]:
    """The config.json of a layout."""
    config, sizes = LAYOUTS[layout][1], SIZES["LARGE" if large else "TINY"]
    own = {"draft_vocab_size": (LARGE if large else TINY)["kept"]} if "draft_vocab_size" in config else {}
    return config | sizes | own | over


def write(
    folder: Path, layout: str, pickled: bool = False, tensors: Callable[[Tensors], Tensors] = lambda t: t, **over: Any
) -> Path:
    """A folder of a layout for a tiny target of 8 layers, in float16 as most published ones."""
    shapes = LAYOUTS[layout][0](**TINY)
    found = random(shapes, half=True)
    found = with_vocabulary(found, KEPT if "d2t" in shapes else None)
    return save(folder, config_of(layout, **over), tensors(found), pickled)


# --- `speculators` ---


def speculators(
    folder: Path, kind: str, tensors: Tensors, layer: dict[str, Any] = LAYER, entering: tuple[int, ...] = (2, 3, 5),
    **config: Any,
) -> Path:  # fmt: skip
    """A folder of `speculators`. ``entering``: layers of the target whose inputs the draft reads."""
    vocabulary = len(tensors["d2t"]) if "d2t" in tensors else layer["vocab_size"]
    config_entries = {
        "speculators_model_type": kind, "transformer_layer_config": layer, "block_size": 4,
        "mask_token_id": min(MASK, layer["vocab_size"] - 1), "draft_vocab_size": vocabulary,
    }  # fmt: skip
    name = "aux_hidden_state_layer_ids" if "flash" in kind or kind == "dspark" else "eagle_aux_hidden_state_layer_ids"
    return save(folder, config_entries | {name: list(entering)} | config, tensors)


def eagle3_layer(model_type: str = "llama", **over: Any) -> dict[str, Any]:
    """A layer's configuration as to_diff_dict writes it: without transformers' defaults."""
    left = {"rms_norm_eps", "hidden_act", "rope_theta"}
    return {n: x for n, x in LAYER.items() if n not in left} | {"model_type": model_type, "num_hidden_layers": 1} | over


def eagle3(folder: Path, model: PreTrainedModel, layer: Any = None, kept: Any = None, config: Any = None, **sizes: Any):
    """EAGLE-3 of `speculators`."""
    block = random_eagle3_block(model, kept, **sizes)
    tensors = {name.replace("midlayer", "layers.0"): t for name, t in block.state_dict().items()}
    tensors = with_vocabulary(tensors | {"verifier_norm.weight": torch.ones(HIDDEN)}, kept)
    config_entries = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": block.shape.vocabulary}
    config_entries |= {"norm_before_residual": block.shape.norm_before_residual} | (config or {})
    return speculators(folder, "eagle3", tensors, layer or eagle3_layer(), **config_entries)


# --- P-EAGLE, DFlash and DSpark ---


def peagle_tensors(model: PreTrainedModel, *, kept: Any = None, embedding: int = 11, **sizes: Any) -> Tensors:
    block = random_eagle3_block(model, kept, embedding=embedding, **sizes)
    tensors = {name.replace("midlayer", "layers.0"): t for name, t in block.state_dict().items()}
    size = block.shape.feature_size
    tensors["mask_hidden"] = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(5))
    return with_vocabulary(tensors, kept)


def dflash_tensors(
    *, vocab: int = 11, layers: int = 2, kept: Any = None, bias: bool = False, rank: int | None = None,
    conv: tuple[int, int] | None = None, selector: int | None = None, mask: bool = False,
) -> Tensors:  # fmt: skip
    """Random tensors of DFlash and its variants.

    Args:
        rank: rank of DSpark's Markov head.
        conv: taps and group size of DFlash 2's convolutions. selector: rank of its selector.
        mask: with an embedding of the mask token.
    """
    shapes: Shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    rows = {"q": HEADS * D, "k": KV * D, "v": KV * D}
    for i in range(layers):
        own: Shapes = {f"self_attn.{p}_proj.weight": (n, HIDDEN) for p, n in rows.items()}
        own |= {"self_attn.o_proj.weight": (HIDDEN, HEADS * D)} | _mlp(HIDDEN, INNER)
        if bias:
            own |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (rows | {"o": HIDDEN}).items()}
        own |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
        own |= {f"{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if conv:
            for part in ("attention_conv", "mlp_conv"):
                own[f"{part}.base_kernel"] = (2, conv[0], HIDDEN)
                own[f"{part}.kernel_projection.weight"] = (2 * conv[0] * HIDDEN // conv[1], HIDDEN)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    vocabulary = vocab if kept is None else len(kept)
    if kept is not None:
        shapes["lm_head.weight"] = (vocabulary, HIDDEN)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocabulary, rank)}
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + rank), "confidence_head.proj.bias": (1,)}
    if selector:
        codebooks = ("predecessor_codebook", "successor_codebook")
        shapes |= {f"candidate_selector.{name}": (vocab, selector) for name in codebooks}
        shapes["candidate_selector.hidden_projection.weight"] = (selector, HIDDEN)
    if mask:
        shapes["mask_embedding"] = (HIDDEN,)
    return with_vocabulary(random(shapes), kept)


def small_dflash(folder: Path, model: PreTrainedModel, kind: str = "dflash", config: Any = None, **sizes: Any) -> Path:
    """DFlash or a variant for a target of three layers."""
    vocab = model.config.vocab_size
    tensors, layer = dflash_tensors(vocab=vocab, **sizes), LAYER | {"vocab_size": vocab}
    return speculators(folder, kind, tensors, layer, (1, 2, 3), **config or {})


def small_peagle(folder: Path, model: PreTrainedModel, layers: int = 1, **sizes: Any) -> Path:
    """P-EAGLE for a target of three layers."""
    vocab = model.config.vocab_size
    layer = LAYER | {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": vocab}
    tensors = peagle_tensors(model, embedding=vocab, decoder_layers=layers, **sizes)
    return speculators(folder, "peagle", tensors, layer, (1, 2, 3))


# --- heads in their model's folder ---


def with_heads(folder: Path, count: int = 3) -> Path:
    """A tiny model's folder with heads in TokenSwift's layout."""
    tiny_model().save_pretrained(folder)
    shapes: Shapes = {}
    for i in range(count):
        at = f"model.medusa_layers.{i}."
        shapes |= {f"{at}linear.weight": (48, 48)}
        shapes |= {f"{at}{norm}.weight": (48,) for norm in ("input_layernorm", "post_layernorm")}
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | random(shapes), file, metadata={"format": "pt"})
    return folder
