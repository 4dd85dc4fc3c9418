"""The drafter's rounds against the block's plain definition over the whole text, written again here."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from longdraft import Speculator
from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVShape
from longdraft.model.runner import TargetRunner
from longdraft.views.window import SPARE, Window
from tests.drafters.watching import run
from tests.drafts import random_draft
from tests.events import attended, begun, replaced, taken_back
from tests.forwards import forward
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("float32_weights")
WINDOW = 8


# --- the definition ---


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x, theta):
    """x (heads, T, d) at positions 0 .. T-1, half-split."""
    d = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def softmax_attention(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def plain_log_probs(model, weights, text: list[int], seen: int, window: int, rows=None) -> torch.Tensor:
    """The draft's log-probabilities (vocabulary,) of the token after ``text``, in the model's dtype.

    Args:
        weights: the block's, of the model's dtype.
        seen: the target has verified this many of the text's tokens: cross-attention sees their KV.
        rows: of these, it sees these alone.
    """
    config = model.config
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    w = weights
    with torch.no_grad():
        cache = model(torch.tensor([text[:seen]]), use_cache=True).past_key_values.layers[-1]
        x = model.get_input_embeddings()(torch.tensor(text))

        def project(part, n, count):
            return F.linear(n, w[f"{part}.weight"], w[f"{part}.bias"]).view(-1, count, d).transpose(0, 1)

        def output(part, o):
            return F.linear(o.transpose(0, 1).flatten(1), w[f"{part}.o_proj.weight"])

        n = rms(x, w["input_layernorm.weight"], eps)
        q, k = (rope(project(f"self_attn.{p}_proj", n, c), theta) for p, c in (("q", heads), ("k", kv_heads)))
        behind = torch.arange(len(text))[:, None] - torch.arange(len(text))
        v = project("self_attn.v_proj", n, kv_heads)
        h = x + output("self_attn", softmax_attention(q, k, v, (behind >= 0) & (behind < window)))
        n = rms(h, w["post_self_attention_layernorm.weight"], eps)
        q = rope(project("cross_attn.q_proj", n, heads), theta)
        seeing = torch.zeros(len(text), seen, dtype=torch.bool)
        seeing[:, slice(None) if rows is None else rows] = True
        h = h + output("cross_attn", softmax_attention(q, cache.keys[0], cache.values[0], seeing))
        n = rms(h, w["post_cross_attention_layernorm.weight"], eps)
        gate, up = (F.linear(n, w[f"mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        h = h + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])
        if "norm.weight" in w:
            h = rms(h, w["norm.weight"], eps)
        return torch.log_softmax(F.linear(h[-1], model.get_output_embeddings().weight), -1)


def tolerance(model, logits: float) -> float:
    """How far a log-probability in float32 may be from the exact one.

    A sum of n terms is off by at most n/2 units in the last place of the terms' sizes added up (Higham 2002, section
    4.2; errors in both directions mostly cancel, so a part of that is seen). Every number passes through a handful of
    sums; the longest has as many terms as the MLP is wide, and the largest numbers are the logits.

    Args:
        logits: the largest of them, by size.
    """
    longest = 3 * model.config.hidden_size  # random_draft's MLP
    return float(torch.finfo(torch.float32).eps) / 2 * longest * max(1.0, logits)


@pytest.mark.parametrize(
    ("family", "heads", "final_norm"),
    [("llama", (6, 2), False), ("qwen3", (4, 4), True), ("llama", (4, 1), True), ("qwen3", (6, 2), False)],
)
def test_rounds_are_the_blocks_plain_definition(tmp_path, family, heads, final_norm):
    model = tiny_model(family, vocab=11, heads=heads[0], kv_heads=heads[1])
    draft = LongSpecDraft.load(random_draft(tmp_path, model, window=WINDOW, final_norm=final_norm))
    spec = Speculator("longspec", target=model, draft=draft, widths=(3, 4, 4))
    # Shorter than the window, just as long, several times as long: together, so in one ragged batch.
    prompts = [[1, 2, 3], list(range(8)), [t % 11 for t in range(0, 60, 2)]]
    watching, sequences = run(spec, prompts, 16)
    rounds = watching.rounds
    assert sum(s.accepted for s in sequences) > 0
    exact, weights = copy.deepcopy(model).double(), {n: t.double() for n, t in draft.weights.items()}
    checked, deepest = 0, 0
    for text, tree in rounds[:9] + rounds[-9:]:
        assert tree.tokens[0] == text[-1]
        expected: dict[int, torch.Tensor] = {}
        for node in range(1, tree.size):
            parent = tree.parents[node]
            if parent not in expected:
                path = [tree.tokens[i] for i in tree.path(parent)][1:]
                expected[parent] = plain_log_probs(exact, weights, text + path, len(text) - 1, WINDOW)
            wanted, spread = float(expected[parent][tree.tokens[node]]), float(expected[parent].abs().max())
            assert tree.log_probs[node] == pytest.approx(wanted, abs=tolerance(model, spread))
            checked, deepest = checked + 1, max(deepest, tree.depths[node])
    assert checked > 80 and deepest == 3
    assert max(len(text) for text, _ in rounds) > 4 * WINDOW


def test_a_smaller_vocabulary_takes_the_rows_of_the_head_that_it_needs(tmp_path):
    model = tiny_model(vocab=11)
    kept = [1, 2, 5, 7, 10]
    draft = LongSpecDraft.load(random_draft(tmp_path, model, kept=kept))
    spec = Speculator("longspec", target=model, draft=draft, widths=(2, 3))
    watching, _ = run(spec, [[1, 2, 3]], 8)
    exact, weights = copy.deepcopy(model).double(), {n: t.double() for n, t in draft.weights.items()}
    for text, tree in watching.rounds:
        assert set(tree.tokens[1:]) <= set(kept)
        if tree.drafted:
            full = plain_log_probs(exact, weights, text, len(text) - 1, WINDOW)
            own = full[kept] - full[kept].logsumexp(0)
            allowed = tolerance(model, float(full.abs().max()))
            assert tree.log_probs[1] == pytest.approx(float(own[kept.index(tree.tokens[1])]), abs=allowed)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_cross_attention_sees_retrieved_rows_alone(tmp_path, family):
    model, options = tiny_model(family, vocab=11), {"chunk": 2, "chunks": 4, "every": 2, "sink": 2, "recent": 4}
    draft = LongSpecDraft.load(random_draft(tmp_path, model, window=WINDOW))
    exact, weights = copy.deepcopy(model).double(), {n: t.double() for n, t in draft.weights.items()}
    drafter = LongSpecDrafter(draft, widths=(2, 3), retrieval=True, **options)
    runner, s = TargetRunner(model), Sequence(0, [t % 11 for t in range(0, 100, 2)], 60)
    store = runner.new_store(1, 120)
    drafter.bind(runner, store)

    def read(tokens):
        forward(runner, [tokens], store, [0], logits="none")
        store.commit(0, range(len(tokens)))

    def check(rows):
        (tree,) = drafter.propose([s])
        for node in range(1, tree.size):
            path = [tree.tokens[i] for i in tree.path(tree.parents[node])][1:]
            expected = plain_log_probs(exact, weights, s.tokens + path, len(s.tokens) - 1, WINDOW, rows)
            allowed = tolerance(model, float(expected.abs().max()))
            assert tree.log_probs[node] == pytest.approx(float(expected[tree.tokens[node]]), abs=allowed)

    read(s.prompt)
    s.append(5)
    drafter.observe(begun(s))
    chosen = []
    for _ in range(3):
        for _ in range(options["every"]):
            drafter.observe(attended(s, {2: 9 * torch.randn(6, 16)}))
        chosen.append(drafter.retrieval.chosen(0))
        rows = drafter.retrieval.rows(0, len(s.tokens) - 1).tolist()
        assert len(rows) < len(s.tokens) - 10
        for token in (3, 1, 4):
            check(rows)
            rows.append(len(s.tokens) - 1)
            read([s.tokens[-1]])
            s.append(token)
    assert chosen[0] != chosen[1] != chosen[2]
    # What was gathered from inexact rows is gathered again.
    keys = store.keys[-1, 0].clone()
    start = len(s.tokens) - 6
    store.keys[-1, 0, :, start:] = 7.0
    drafter.observe(replaced(s, start))
    drafter.propose([s])
    store.keys[-1, 0] = keys
    read([s.tokens[-1]])
    s.append(2)
    drafter.observe(replaced(s, start))
    check(drafter.retrieval.rows(0, len(s.tokens) - 1).tolist())
    # And after tokens were taken back, the rest alone.
    store.truncate(0, store.lengths[0] - 8)
    del s.output[-8:]
    drafter.observe(taken_back(s))
    check(drafter.retrieval.rows(0, len(s.tokens) - 1).tolist())


# --- memory and work ---


def drafter_after(model, folder, prompt: list[int]) -> LongSpecDrafter:
    """A drafter that has read a prompt and drafted once."""
    runner = TargetRunner(model)
    drafter = LongSpecDrafter(LongSpecDraft.load(folder), widths=(2, 4, 4))
    s = Sequence(0, prompt, 20)
    store = runner.new_store(1, len(prompt) + 20 + drafter.max_nodes)
    drafter.bind(runner, store)
    forward(runner, [prompt], store, [0], logits="none")
    store.commit(0, range(len(prompt)))
    s.append(5)
    drafter.observe(begun(s))
    drafter.propose([s])
    return drafter


def test_memory_does_not_grow_with_the_context(tmp_path):
    model = tiny_model(context=1024)
    folder = random_draft(tmp_path, model, window=16)
    short, long = (drafter_after(model, folder, [i % 61 for i in range(n)]).window for n in (20, 900))
    for window in (short, long):
        # slots, KV heads, window, the tree without its last level and nobody's row, head size
        assert window.keys.shape == window.values.shape == (1, 2, 16 + SPARE + 6 + 1, 16)


def test_prefill_reads_the_last_window_alone(tmp_path):
    model = tiny_model(context=1024)
    folder = random_draft(tmp_path, model, window=16)
    rows: list[int] = []

    def count(module, inputs, output):
        if inputs[0].dim() == 1:  # the target embeds (B, T) ids, the draft a flat list
            rows.append(len(inputs[0]))

    model.get_input_embeddings().register_forward_hook(count)
    drafter_after(model, folder, [i % 61 for i in range(900)])
    assert rows == [16, 1, 2, 4]  # the window; then the root and each level that is expanded


def test_the_targets_parts_are_shared_and_kept_between_runs(tmp_path):
    model = tiny_model()
    spec = Speculator("longspec", target=model, draft=random_draft(tmp_path, model))
    draft = spec.options["draft"]
    first = draft.bound(spec.runner())
    assert first.head.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert first.parts.embedding.weight is model.get_input_embeddings().weight
    spec.generate([[1, 2, 3]], max_new_tokens=4)
    assert draft.bound(spec.runner()) is first


@given(st.integers(2, 9), st.lists(st.integers(1, 9), min_size=1, max_size=99))
def test_the_window_holds_the_last_tokens(size, pieces):
    shape = KVShape(1, 1, 4, torch.float32)
    window = Window(shape, 1, size, 0, "cpu")
    position = 0
    for n in pieces:
        n = min(n, size)
        k = torch.arange(position, position + n).float().view(1, n, 1).expand(1, n, 4)
        window.append(0, position, k, -k)
        position += n
    assert window.end(0) == position
    begin, end = window.seen(0)
    last = list(range(max(0, position - size), position))
    assert window.keys[0, 0, begin:end].tolist() == [[p] * 4 for p in last]
    assert window.values[0, 0, begin:end].tolist() == [[-p] * 4 for p in last]
    assert window.seen(0, depth=1, nodes=3) == (max(begin, end - size + 1), end + 3)


def test_a_tree_deeper_than_the_window_is_refused(tmp_path):
    draft = LongSpecDraft.load(random_draft(tmp_path, tiny_model(), window=8))
    with pytest.raises(ValueError, match="window"):
        LongSpecDrafter(draft, widths=(2,) * 8)
