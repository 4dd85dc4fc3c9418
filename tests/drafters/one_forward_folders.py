"""Folders of drafts that say all levels in one forward, in the names that others publish, and their formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.drafters.test_eagle3_drafter import rms, rope
from tests.drafts import random_eagle3_block

MASK, D, HEADS, KV, HIDDEN, INNER = 7, 12, 4, 2, 48, 96
LAYERS = (1, 2, 4)
EPS = 1e-6
LAYER = {
    "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "vocab_size": 11,
    "max_position_embeddings": 512, "rms_norm_eps": EPS, "hidden_act": "silu", "rope_theta": 1e4,
}  # fmt: skip


def random(shapes):
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.2 * noise if "norm" in name else 0.25 * noise
    return found


def save(folder: Path, config, tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def with_vocabulary(tensors, kept):
    if kept is None:
        return tensors
    tables = {"d2t": torch.tensor(kept) - torch.arange(len(kept))}
    return tensors | tables | {"t2d": torch.isin(torch.arange(11), torch.tensor(kept))}


def dflash_tensors(
    *, vocab=11, layers=2, kept=None, bias=False, rank=None, head="vanilla", conv=None, selector=None, mask=False
):
    """Random tensors of DFlash and its variants.

    Args:
        rank, head: DSpark's rank and kind of head. conv: taps and group of DFlash2's convolutions. selector: its rank.
        mask: an embedding of the mask token.
    """
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    rows = {"q": HEADS * D, "k": KV * D, "v": KV * D}
    for i in range(layers):
        own = {f"self_attn.{p}_proj.weight": (n, HIDDEN) for p, n in rows.items()}
        own |= {"self_attn.o_proj.weight": (HIDDEN, HEADS * D)}
        if bias:
            own |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (rows | {"o": HIDDEN}).items()}
        own |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
        own |= {"mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN)}
        own |= {"mlp.down_proj.weight": (HIDDEN, INNER)}
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
        part, size = {"vanilla": ("", 0), "gated": ("gate", rank), "rnn": ("joint", 3 * rank)}[head]
        if part:
            inputs = HIDDEN + (rank if head == "gated" else 2 * rank)
            shapes |= {f"markov_head.{part}_proj.weight": (size, inputs), f"markov_head.{part}_proj.bias": (size,)}
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + rank), "confidence_head.proj.bias": (1,)}
    if selector:
        names = ("predecessor_codebook", "successor_codebook")
        shapes |= {f"candidate_selector.{name}": (vocab, selector) for name in names}
        shapes["candidate_selector.hidden_projection.weight"] = (selector, HIDDEN)
    if mask:
        shapes["mask_embedding"] = (HIDDEN,)
    return with_vocabulary(random(shapes), kept)


def attended(w, at, x, context, places, seen, window=None):
    """Attention of rows x, the last of ``places``, to context and themselves. ``seen``: (S, S) among them."""

    def heads(rows, p):
        out = F.linear(rows, w[f"{at}.{p}_proj.weight"], w.get(f"{at}.{p}_proj.bias")).view(len(rows), -1, D)
        return (rms(out, w[f"{at}.{p}_norm.weight"], EPS) if f"{at}.{p}_norm.weight" in w else out).transpose(0, 1)

    both = torch.cat([context, x])
    q, k, v = rope(heads(x, "q"), places[len(context) :], 1e4), rope(heads(both, "k"), places, 1e4), heads(both, "v")
    k, v = (t.repeat_interleave(HEADS // KV, 0) for t in (k, v))
    text = torch.arange(len(context)) >= len(context) - (window or len(context))
    mask = torch.cat([text.expand(len(x), -1), seen], 1)
    out = torch.softmax((q @ k.mT / D**0.5).masked_fill(~mask, -math.inf), -1) @ v
    return F.linear(out.transpose(0, 1).flatten(1), w[f"{at}.o_proj.weight"], w.get(f"{at}.o_proj.bias"))


def convolved(w, at, x, side, chosen_by):
    base, out = w[f"{at}.base_kernel"][side], torch.zeros_like(x)
    taps = len(base)
    deltas = (chosen_by @ w[f"{at}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)[:, side]
    group = HIDDEN // deltas.shape[-1]
    for row in range(len(x)):
        for tap in range(min(taps, row + 1)):
            out[row] += (base[tap] + deltas[row, tap].repeat_interleave(group)) * x[row - tap]
    return out


def dflash_rows(model, w, text, block, *, windows=(None, None), causal=(False, False), window=None):
    """Rows (block, hidden) behind the last norm, and their logits, for a text whose last token is the anchor."""
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        c = torch.cat([states[i + 1][0] for i in LAYERS], -1) @ w["fc.weight"].T
        c = rms(c, w["hidden_norm.weight"], EPS)
        x = model.get_input_embeddings()(torch.tensor([text[-1]] + [MASK] * (block - 1)))
        if "mask_embedding" in w:
            x = torch.cat([x[:1], w["mask_embedding"].expand(block - 1, -1)])
        places = torch.arange(len(c) + block)
        for i in range(len(windows)):
            at, n = f"layers.{i}", rms(x, w[f"layers.{i}.input_layernorm.weight"], EPS)
            conv = f"{at}.attention_conv.base_kernel" in w
            fed = convolved(w, f"{at}.attention_conv", n, 0, n) if conv else n
            seen = torch.ones(block, block, dtype=torch.bool)
            seen = seen.tril() if causal[i] else seen
            limit = min(windows[i] or len(c), window or len(c))
            out = attended(w, f"{at}.self_attn", fed, c, places, seen, limit)
            x = x + (convolved(w, f"{at}.attention_conv", out, 1, n) if conv else out)
            n = rms(x, w[f"{at}.post_attention_layernorm.weight"], EPS)
            fed = convolved(w, f"{at}.mlp_conv", n, 0, n) if conv else n
            inner = F.silu(fed @ w[f"{at}.mlp.gate_proj.weight"].T) * (fed @ w[f"{at}.mlp.up_proj.weight"].T)
            out = inner @ w[f"{at}.mlp.down_proj.weight"].T
            x = x + (convolved(w, f"{at}.mlp_conv", out, 1, n) if conv else out)
        hidden = rms(x, w["norm.weight"], EPS)
        return hidden, hidden @ w.get("lm_head.weight", model.get_output_embeddings().weight).T


def correction(w, path, hidden, head="vanilla"):
    """(draft vocabulary,) added to a row's logits behind a path of target ids, the anchor's first.

    Args:
        hidden: the rows (len(path), hidden) that predict what follows each token of the path.
    """
    with torch.no_grad():
        if "candidate_selector.hidden_projection.weight" in w:
            known = w["candidate_selector.predecessor_codebook"][path[-1]]
            known = known * (w["candidate_selector.hidden_projection.weight"] @ hidden[-1])
            return w["candidate_selector.successor_codebook"] @ known
        if "markov_head.markov_w1.weight" not in w:
            return 0.0
        table = w["markov_head.markov_w1.weight"]
        known = table[path[-1]]
        if head == "gated":
            gate = F.linear(
                torch.cat([hidden[-1], known]), w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"]
            )
            known = gate.sigmoid() * known
        if head == "rnn":
            state = torch.zeros_like(known)
            for token, row in zip(path, hidden, strict=True):
                z = torch.cat([state, table[token], row])
                joint = F.linear(z, w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"])
                gate, candidate, out = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            known = out.tanh()
        return w["markov_head.markov_w2.weight"] @ known


def peagle_tensors(model, *, kept=None, embedding=11, **sizes):
    block = random_eagle3_block(model, kept, embedding=embedding, **sizes)
    tensors = {name.replace("midlayer", "layers.0"): t for name, t in block.state_dict().items()}
    size = block.shape.feature_size
    tensors["mask_hidden"] = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(5))
    return with_vocabulary(tensors, kept)


def peagle_rows(model, w, text, slots, norms=(), window=None):
    """Logits (slots, draft vocabulary) of the rows behind a text whose last token is the root."""
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in LAYERS], -1)
        features = torch.cat([features, w["mask_hidden"][0].expand(slots - 1, -1)])
        if "norm_before_fc" in norms:
            features = rms(features, w["input_norm.weight"], EPS)
        g = features @ w["fc.weight"].T
        x = w["embed_tokens.weight"][torch.tensor(text[1:] + [MASK] * (slots - 1))]
        n = torch.cat(
            [rms(x, w["layers.0.input_layernorm.weight"], EPS), rms(g, w["layers.0.hidden_norm.weight"], EPS)], -1
        )
        at = torch.arange(len(n))
        # Of the text, a row further on sees what the root's row sees.
        seen = (at <= at[:, None]) & (at.clamp(max=len(text) - 2)[:, None] - at < (window or len(n)))
        layer, out = 0, g
        while f"layers.{layer}.mlp.up_proj.weight" in w:
            name = f"layers.{layer}"
            if layer:
                g = out  # the output of the layer before
                n = rms(g, w[f"{name}.input_layernorm.weight"], EPS)
            a = g + attended(w, f"{name}.self_attn", n, n[:0], at, seen)
            m = rms(a, w[f"{name}.post_attention_layernorm.weight"], EPS)
            inner = F.silu(m @ w[f"{name}.mlp.gate_proj.weight"].T) * (m @ w[f"{name}.mlp.up_proj.weight"].T)
            out = a + inner @ w[f"{name}.mlp.down_proj.weight"].T
            layer += 1
        return rms(out[-slots:], w["norm.weight"], EPS) @ w["lm_head.weight"].T


def speculators(folder: Path, kind: str, tensors, layer=LAYER, entering=(2, 3, 5), **config) -> Path:
    """A folder of `speculators`. ``entering``: what enters these layers of the target is read."""
    said = {
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "mask_token_id": min(MASK, layer["vocab_size"] - 1),
    }
    vocabulary = len(tensors["d2t"]) if "d2t" in tensors else layer["vocab_size"]
    said |= {"draft_vocab_size": vocabulary, "block_size": 4}
    name = "eagle_aux_hidden_state_layer_ids" if kind == "peagle" else "aux_hidden_state_layer_ids"
    return save(folder, said | {name: list(entering)} | config, tensors)


def small_dflash(folder: Path, model, kind: str = "dflash", config=None, **sizes) -> Path:
    """DFlash or a variant for a target of three layers."""
    vocab = model.config.vocab_size
    tensors, layer = dflash_tensors(vocab=vocab, **sizes), LAYER | {"vocab_size": vocab}
    return speculators(folder, kind, tensors, layer, (1, 2, 3), **config or {})


def small_peagle(folder: Path, model, layers: int = 1, **sizes) -> Path:
    """P-EAGLE for a target of three layers."""
    vocab = model.config.vocab_size
    layer = LAYER | {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": vocab}
    tensors = peagle_tensors(model, embedding=vocab, decoder_layers=layers, **sizes)
    return speculators(folder, "peagle", tensors, layer, (1, 2, 3))
