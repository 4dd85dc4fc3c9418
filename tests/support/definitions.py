"""Definitions of drafts, written plainly from their papers: on the full context, without caches, in torch's operations.

A definition is a function ``logprobs(text, path)``: the draft's log-probabilities of the next token after a context,
whose last token has not been through the target yet, and a path of drafted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from longdraft import Result, Speculator, Step

Weights = dict[str, torch.Tensor]
DraftLogprobs = Callable[[list[int], list[int]], torch.Tensor]
EPS = 1e-6
# Layers whose hidden states the drafts of these tests read, and the mask token.
LAYERS, MASK = (1, 2, 4), 7


def weights_of(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    """A folder's tensors."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in load_file(_file(folder)).items()}


def _file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


# --- parts ---


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(d: int, theta: float, factor: float | None = None, length: int = 0) -> tuple[torch.Tensor, float]:
    """(d / 2,) angles a position, and the factor of cos and sin: plain, or YaRN's."""
    plain = theta ** (-torch.arange(0, d, 2) / d)
    if factor is None:
        return plain, 1.0

    def dimension(rotations: float) -> float:
        return d * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), d - 1)
    ramp = ((torch.arange(d // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1


def rope(x: torch.Tensor, positions: torch.Tensor, *rotated: Any) -> torch.Tensor:
    """x (heads, T, d) at positions (T,), half-split. ``rotated``: theta, then YaRN's factor and length."""
    angles, scale = frequencies(x.shape[-1], *(rotated or (1e4,)))
    angles = positions[:, None] * angles
    cos, sin = (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention output (heads, T, d) of queries with a boolean mask (T, keys) of visible keys."""
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf)
    return torch.softmax(scores, -1) @ v


def projected(w: Weights, at: str, part: str, x: torch.Tensor, d: int) -> torch.Tensor:
    """Queries, keys or values (heads, T, d), normed if there is a norm."""
    out = F.linear(x, w[f"{at}{part}_proj.weight"], w.get(f"{at}{part}_proj.bias")).view(len(x), -1, d)
    norm = f"{at}{part}_norm.weight"
    return (rms(out, w[norm]) if norm in w else out).transpose(0, 1)


def attention(
    w: Weights, at: str, x: torch.Tensor, d: int, places: torch.Tensor, seen: torch.Tensor, *rotated: Any,
    context: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of tokens ``x`` at the last of ``places`` to the context and themselves, by the mask ``seen``."""
    both = x if context is None else torch.cat([context, x])
    q = rope(projected(w, at, "q", x, d), places[len(both) - len(x) :], *rotated)
    k, v = rope(projected(w, at, "k", both, d), places, *rotated), projected(w, at, "v", both, d)
    out = softmax_attention(q, k, v, seen).transpose(0, 1).flatten(1)
    return F.linear(out, w[f"{at}o_proj.weight"], w.get(f"{at}o_proj.bias"))


def mlp(w: Weights, at: str, x: torch.Tensor) -> torch.Tensor:
    inner = F.silu(x @ w[f"{at}gate_proj.weight"].T) * (x @ w[f"{at}up_proj.weight"].T)
    return inner @ w[f"{at}down_proj.weight"].T


def fused_layers(
    w: Weights, first: str, x: torch.Tensor, g: torch.Tensor, d: int, places: torch.Tensor, seen: torch.Tensor,
    *rotated: Any, before_residual: bool = False,
) -> torch.Tensor:  # fmt: skip
    """EAGLE-3's layers: the first reads [embeddings, features], the others the output of the one before."""
    at, layer, out = first, 0, rms(g, w[f"{first}hidden_norm.weight"])
    n = torch.cat([rms(x, w[f"{at}input_layernorm.weight"]), out], -1)
    out = out if before_residual else g
    while True:
        a = out + attention(w, f"{at}self_attn.", n, d, places, seen, *rotated)
        out = a + mlp(w, f"{at}mlp.", rms(a, w[f"{at}post_attention_layernorm.weight"]))
        layer += 1
        at = f"layers.{layer}."
        if f"{at}input_layernorm.weight" not in w:
            return out
        n = rms(out, w[f"{at}input_layernorm.weight"])


@torch.no_grad()
def features(model: Any, text: list[int], layers: Sequence[int] = LAYERS) -> list[torch.Tensor]:
    """The target's hidden states after some layers, of all tokens of a text but the last."""
    states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    return [states[i + 1][0] for i in layers]


def last_state(model: Any, text: list[int]) -> torch.Tensor:
    """(hidden,) after the last layer and before the final norm, of the last token but one."""
    last: list[Any] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, given, out: last.append(out))
    with torch.no_grad():
        model(torch.tensor([text[:-1]]))
    hook.remove()
    return (last[0][0] if isinstance(last[0], tuple) else last[0]).reshape(-1, model.config.hidden_size)[-1]


# --- drafts that feed their own output ---


def eagle3(model: Any, draft: Any, window: int | None = None, seen: list[int] | None = None) -> DraftLogprobs:
    """EAGLE-3 and 3.1, by the settings of a loaded draft.

    Args:
        seen: if given, only these tokens of the text are visible, at adjacent positions.
    """
    w = {n: t.float() for n, t in draft.weights.items()}
    shape, settings = draft.shape, draft.rope
    rotated = settings["rope_theta"], settings.get("factor"), settings.get("original_max_position_embeddings")
    table = w.get("embed_tokens.weight", model.get_input_embeddings().weight)

    @torch.no_grad()
    def logprobs(text: list[int], path: list[int]) -> torch.Tensor:
        given = features(model, text)
        if shape.fc_norm:
            given = [rms(f, w[f"fc_norm.{i}.weight"]) for i, f in enumerate(given)]
        joined = torch.cat(given, -1)
        g = (rms(joined, w["input_norm.weight"]) if shape.norm_before_fc else joined) @ w["fc.weight"].T
        tokens = text[1:]
        for next_token in [*path, None]:
            rows = torch.arange(len(tokens))
            places, unseen = rows.clone(), torch.zeros(len(rows), dtype=torch.bool)
            if seen is not None:
                unseen[: len(text) - 1] = True
                unseen[seen] = False
                places[~unseen] = torch.arange(int((~unseen).sum()))
            behind = rows[:, None] - rows
            mask = (behind >= 0) & (behind < (window or len(rows))) & ~unseen
            mask |= torch.eye(len(rows), dtype=torch.bool)  # hidden tokens see themselves; their output is unused
            out = fused_layers(
                w, "midlayer.", table[torch.tensor(tokens)], g, shape.head_dim, places, mask, *rotated,
                before_residual=shape.norm_before_residual,
            )  # fmt: skip
            normed = rms(out[-1], w["norm.weight"])
            if next_token is not None:
                tokens, g = [*tokens, next_token], torch.cat([g, (normed if shape.norm_output else out[-1])[None]])
        head = w.get("lm_head.weight", model.get_output_embeddings().weight)
        return torch.log_softmax(normed @ head.T, -1)

    return logprobs


def eagle(model: Any, w: Weights, theta: float) -> DraftLogprobs:
    """EAGLE-1 and 2: the layer reads embeddings and the target's hidden states after the final norm."""
    w = {name.removeprefix("layers.0."): t.to(model.dtype) for name, t in w.items()}

    @torch.no_grad()
    def logprobs(text: list[int], path: list[int]) -> torch.Tensor:
        f = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        tokens = text[1:]
        for next_token in [*path, None]:
            n = torch.cat([model.get_input_embeddings()(torch.tensor(tokens)), f], -1)
            n = F.linear(n, w["fc.weight"], w.get("fc.bias"))
            rows = torch.arange(len(n))
            a = n + attention(w, "self_attn.", n, 16, rows, rows[:, None] >= rows, theta)
            out = a + mlp(w, "mlp.", rms(a, w["post_attention_layernorm.weight"]))
            if next_token is not None:
                tokens, f = [*tokens, next_token], torch.cat([f, out[-1:]])
        return model.lm_head(out[-1]).log_softmax(-1)

    return logprobs


def longspec(
    model: Any, w: Weights, window: int, vocab_ids: list[int] | None = None, rows: Any = None
) -> DraftLogprobs:
    """LongSpec: sliding self-attention, then cross-attention to the KV of the target's last layer.

    Args:
        rows: if given, cross-attention sees only these tokens of the text.
    """
    d, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    w = {name: t.to(model.dtype) for name, t in w.items()}

    @torch.no_grad()
    def logprobs(text: list[int], path: list[int]) -> torch.Tensor:
        read, places = len(text) - 1, torch.arange(len(text) + len(path))
        cache = model(torch.tensor([text[:read]]), use_cache=True).past_key_values.layers[-1]
        x = model.get_input_embeddings()(torch.tensor(text + path))
        behind = places[:, None] - places
        n = rms(x, w["input_layernorm.weight"])
        h = x + attention(w, "self_attn.", n, d, places, (behind >= 0) & (behind < window), theta)
        n = rms(h, w["post_self_attention_layernorm.weight"])
        seen = torch.zeros(len(places), read, dtype=torch.bool)
        seen[:, slice(None) if rows is None else rows] = True
        q = rope(projected(w, "cross_attn.", "q", n, d), places, theta)
        out = softmax_attention(q, cache.keys[0], cache.values[0], seen).transpose(0, 1).flatten(1)
        h = h + out @ w["cross_attn.o_proj.weight"].T
        h = h + mlp(w, "mlp.", rms(h, w["post_cross_attention_layernorm.weight"]))
        last = rms(h[-1], w["norm.weight"]) if "norm.weight" in w else h[-1]
        logits = model.get_output_embeddings()(last)
        return torch.log_softmax(logits if vocab_ids is None else logits[vocab_ids], -1)

    return logprobs


def heads(model: Any, w: Weights, published: bool = False) -> DraftLogprobs:
    """Chained heads, ours or TokenSwift's: the prediction of a level does not depend on the path."""
    w, eps = {name: t.to(model.dtype) for name, t in w.items()}, model.config.rms_norm_eps

    def logprobs(text: list[int], path: list[int]) -> torch.Tensor:
        h = last_state(model, text)
        for i in range(len(path) + 1):
            at = f"model.medusa_layers.{i}." if published else f"heads.{i}."
            before, after = ("input_layernorm", f"{at}post_layernorm") if published else ("norm", "norm")
            h = h + w[f"{at}{'linear' if published else 'proj'}.weight"] @ rms(h, w[f"{at}{before}.weight"], eps)
        return torch.log_softmax(model.lm_head(rms(h, w[f"{after}.weight"], eps)), -1).detach()

    return logprobs


def mtp(model: Any, layer: Any, window: int | None = None) -> DraftLogprobs:
    """A checkpoint's MTP layer, by transformers' own class of layer."""

    @torch.no_grad()
    def logprobs(text: list[int], path: list[int]) -> torch.Tensor:
        f, tokens = model.model(torch.tensor([text[:-1]])).last_hidden_state[0], text[1:]
        for next_token in [*path, None]:
            rows = torch.arange(len(tokens))
            behind = rows[:, None] - rows
            hidden = (behind < 0) | (behind >= (window or len(tokens)))
            mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
            # Positions of the tokens, not of the features; RoPE depends on differences only.
            places = (rows + 1)[None]
            if hasattr(model.model.rotary_emb, "mrope_section"):
                places = places.expand(3, 1, -1)
            x = model.get_input_embeddings()(torch.tensor(tokens))
            out = layer(x, f, model.model.rotary_emb(x[None], places), mask)
            if next_token is not None:
                tokens, f = [*tokens, next_token], torch.cat([f, out[-1:]])
        return torch.log_softmax(model.lm_head(out[-1]), -1)

    return logprobs


# --- drafts that predict all levels in one forward ---


def parallel_draft(
    rows_of: Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]],
    corrected: Callable[[list[int], torch.Tensor], Any] = lambda path, rows: 0.0,
    candidates: int = 10**6,
) -> DraftLogprobs:
    """A draft with a slot for each level. A correction by the path is added to the top ``candidates`` logits of a slot.

    Args:
        rows_of: a text -> hidden states of the slots (slots, ...), and their logits (slots, draft vocabulary).
        corrected: target ids of a path from the root on, and its slots -> the correction of the last slot's logits.
    """
    known = lru_cache(4)(lambda text: rows_of(list(text)))

    @torch.no_grad()
    def logprobs(text: list[int], path: list[int]) -> torch.Tensor:
        rows, logits = known(tuple(text))
        own, path = logits[len(path)], [text[-1], *path]
        likely = torch.zeros(len(own), dtype=torch.bool)
        likely[own.topk(min(candidates, len(own))).indices] = True
        added = torch.as_tensor(corrected(path, rows[: len(path)])).expand_as(own)
        return torch.log_softmax(own + added.masked_fill(~likely, 0.0), -1)

    return logprobs


def slot_mask(rows: int, ahead: int, window: int | None = None) -> torch.Tensor:
    """The attention mask of tokens followed by ``ahead`` slots, which see what the last token sees, and themselves."""
    at = torch.arange(rows)
    anchors = at.clamp(max=rows - 1 - ahead)
    return (at <= at[:, None]) & (anchors[:, None] - at < (window or rows))


def peagle(
    model: Any, w: Weights, slots: int, norm_before_fc: bool = False, window: int | None = None
) -> DraftLogprobs:
    """P-EAGLE: EAGLE-3's layers over mask tokens after the root."""

    @torch.no_grad()
    def rows_of(text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.cat(features(model, text), -1)
        joined = torch.cat([joined, w["mask_hidden"][0].expand(slots - 1, -1)])
        g = (rms(joined, w["input_norm.weight"]) if norm_before_fc else joined) @ w["fc.weight"].T
        x = w["embed_tokens.weight"][torch.tensor(text[1:] + [MASK] * (slots - 1))]
        out = fused_layers(w, "layers.0.", x, g, 12, torch.arange(len(x)), slot_mask(len(x), slots - 1, window))
        head = w.get("lm_head.weight", model.get_output_embeddings().weight)
        logits = rms(out[-slots:], w["norm.weight"]) @ head.T
        return logits, logits

    return parallel_draft(rows_of)


def _convolved(w: Weights, at: str, x: torch.Tensor, side: int, chosen_by: torch.Tensor) -> torch.Tensor:
    """DFlash 2's convolution over a block, whose kernel depends on each token."""
    if f"{at}.base_kernel" not in w:
        return x
    base, out = w[f"{at}.base_kernel"][side], torch.zeros_like(x)
    deltas = (chosen_by @ w[f"{at}.kernel_projection.weight"].T).view(len(x), 2, len(base), -1)[:, side]
    for row in range(len(x)):
        for tap in range(min(len(base), row + 1)):
            delta = deltas[row, tap].repeat_interleave(x.shape[1] // deltas.shape[-1])
            out[row] += (base[tap] + delta) * x[row - tap]
    return out


def dflash(
    model: Any, w: Weights, block: int = 4, first: int = 1, candidates: int = 11,
    windows: tuple[Any, ...] = (None, None), causal: tuple[bool, ...] = (False, False), window: int | None = None,
) -> DraftLogprobs:  # fmt: skip
    """DFlash: a block of mask tokens that attends to itself in both directions, and to the features of the text.
    DFlash 2 convolves the block; its selector and DSpark's head correct the logits.

    Args:
        first: index of the token that predicts the first level.
        windows, causal: for each layer. window: for all layers.
    """

    @torch.no_grad()
    def rows_of(text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        c = rms(torch.cat(features(model, text), -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = model.get_input_embeddings()(torch.tensor([text[-1]] + [MASK] * (block - 1)))
        if "mask_embedding" in w:
            x = torch.cat([x[:1], w["mask_embedding"].expand(block - 1, -1)])
        places = torch.arange(len(c) + block)
        for i in range(len(windows)):
            at = f"layers.{i}."
            n = rms(x, w[f"{at}input_layernorm.weight"])
            seen = torch.ones(block, block, dtype=torch.bool)
            near = torch.arange(len(c)) >= len(c) - min(windows[i] or len(c), window or len(c))
            seen = torch.cat([near.expand(block, -1), seen.tril() if causal[i] else seen], 1)
            convolved = _convolved(w, f"{at}attention_conv", n, 0, n)
            out = attention(w, f"{at}self_attn.", convolved, 12, places, seen, context=c)
            x = x + _convolved(w, f"{at}attention_conv", out, 1, n)
            n = rms(x, w[f"{at}post_attention_layernorm.weight"])
            out = mlp(w, f"{at}mlp.", _convolved(w, f"{at}mlp_conv", n, 0, n))
            x = x + _convolved(w, f"{at}mlp_conv", out, 1, n)
        hidden = rms(x, w["norm.weight"])
        logits = hidden @ w.get("lm_head.weight", model.get_output_embeddings().weight).T
        return hidden[first:], logits[first:]

    return parallel_draft(rows_of, lambda path, rows: _correction(w, path, rows), candidates)


def _correction(w: Weights, path: list[int], hidden: torch.Tensor) -> Any:
    """The correction of DSpark's Markov head, or of DFlash 2's selector, after a path with the outputs ``hidden``."""
    if "candidate_selector.hidden_projection.weight" in w:
        predecessor = w["candidate_selector.predecessor_codebook"][path[-1]]
        predecessor = predecessor * (w["candidate_selector.hidden_projection.weight"] @ hidden[-1])
        return w["candidate_selector.successor_codebook"] @ predecessor
    if "markov_head.markov_w1.weight" not in w:
        return 0.0
    return w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][path[-1]]


# --- comparing ---


def drafted_rounds(spec: Speculator, prompts: Sequence[list[int]], new: int = 14) -> tuple[list[Any], list[Result]]:
    """The rounds of a greedy run, as (text, tree verified after it), and the run's results."""
    run, texts = spec.stream([list(p) for p in prompts], max_new_tokens=new, eos_token_ids=[]), list(map(list, prompts))
    rounds = []
    for step in run:
        if isinstance(step, Step) and step.mode != "prefill" and step.tree is not None:
            rounds.append((list(texts[step.sequence]), step.tree))
        texts[step.sequence] += step.token_ids
    return rounds, run.results()


def assert_matches_definition(
    logprobs: DraftLogprobs,
    text: list[int],
    tree: Any,
    ids: list[int] | None = None,
    limit: int = 20,
    near: float = 3e-4,
) -> None:
    """Asserts that a tree's log-probabilities are those of a definition; checks the first ``limit`` nodes.

    Args:
        ids: target ids of the draft's smaller vocabulary.
    """
    assert tree.tokens[0] == text[-1]
    expected: dict[int, torch.Tensor] = {}
    for node in range(1, min(tree.size, limit)):
        parent = tree.parents[node]
        if parent not in expected:
            expected[parent] = logprobs(text, [tree.tokens[i] for i in tree.path(parent)][1:])
        token = tree.tokens[node] if ids is None else ids.index(tree.tokens[node])
        assert tree.logprobs[node] == pytest.approx(float(expected[parent][token]), abs=near)
