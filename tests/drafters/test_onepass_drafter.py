"""A one-pass drafter's rounds against its plain definition over the whole text, written again here."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from longdraft import Speculator
from longdraft.drafters import onepass
from longdraft.drafters.onepass import CANDIDATES, LEVEL, OnePassDraft, OnePassDrafter
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.native import kernels
from longdraft.trees.node_limit import LARGEST, NodeLimit
from longdraft.views.window import SPARE
from tests.drafters.by_hand import Decoding
from tests.drafters.test_eagle3_drafter import PROMPTS, rms, rope, six_layers
from tests.drafters.watching import run
from tests.drafts import random_onepass
from tests.events import begun
from tests.forwards import forward
from tests.quick import in_turn

LAYERS = (1, 2, 4)


def plain_rows(model, draft: OnePassDraft, text: list[int], window: int | None = None) -> torch.Tensor:
    """Logits (slots, draft vocabulary) of the draft's rows, the bigram left out; nothing is cached.

    The target has seen all of the text but its last token, the anchor.
    """
    w = {n: t.float() for n, t in draft.weights.items()}
    shape, settings = draft.shape, draft.rope
    d, eps, ahead = shape.head_dim, shape.rms_norm_eps, shape.slots - 1
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        g = torch.cat([states[i + 1][0] for i in LAYERS], -1) @ w["fc.weight"].T
        x = model.get_input_embeddings()(torch.tensor(text[1:]))
        x = torch.cat([x, x[-1] + w["slot_embedding"]])
        g = torch.cat([g, g[-1] + w["slot_state"]])
        normed = rms(g, w["midlayer.hidden_norm.weight"], eps)
        n = torch.cat([rms(x, w["midlayer.input_layernorm.weight"], eps), normed], -1)
        q, k, v = (
            F.linear(n, w[f"midlayer.self_attn.{p}_proj.weight"], w.get(f"midlayer.self_attn.{p}_proj.bias"))
            .view(len(n), -1, d)
            .transpose(0, 1)
            for p in "qkv"
        )
        at = torch.arange(len(n))
        q, k = (rope(t, at, settings["rope_theta"]) for t in (q, k))
        k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
        # Of the text, a row further on sees what its anchor sees.
        anchors = at.clamp(max=len(n) - 1 - ahead)
        hidden = (at > at[:, None]) | (anchors[:, None] - at >= (window or len(n)))
        attended = torch.softmax((q @ k.mT / d**0.5).masked_fill(hidden, -math.inf), -1) @ v
        a = (normed if shape.norm_before_residual else g) + F.linear(
            attended.transpose(0, 1).flatten(1), w["midlayer.self_attn.o_proj.weight"]
        )
        m = rms(a, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(m, w[f"midlayer.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        out = a + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])
        return rms(out[-shape.slots :], w["norm.weight"], eps) @ w["lm_head.weight"].T


def plain_log_probs(draft: OnePassDraft, rows: torch.Tensor, k: int, before: int, candidates: int) -> torch.Tensor:
    """(draft vocabulary,) of what follows a node k deep that carries the target's token ``before``.

    Tokens that the bigram does not choose among get none.
    """
    ids = list(range(rows.shape[1])) if draft.ids is None else draft.ids.tolist()
    w = {n: t.float() for n, t in draft.weights.items()}
    logits = rows[k]
    if before in ids:
        bigram = w["bigram_out.weight"] @ w["bigram_in.weight"][ids.index(before)]
        likely = torch.zeros(len(ids), dtype=torch.bool)
        likely[logits.topk(min(candidates, len(ids))).indices] = True
        logits = logits + bigram.masked_fill(~likely, 0.0)
    return torch.log_softmax(logits, -1)


def assert_defined(model, draft, text, tree, window=None, candidates=CANDIDATES, near=3e-4):
    assert tree.tokens[0] == text[-1]
    rows = plain_rows(model, draft, text, window)
    ids = list(range(rows.shape[1])) if draft.ids is None else draft.ids.tolist()
    for node in range(1, tree.size):
        parent = tree.parents[node]
        wanted = plain_log_probs(draft, rows, tree.depths[parent], tree.tokens[parent], candidates)
        assert tree.log_probs[node] == pytest.approx(float(wanted[ids.index(tree.tokens[node])]), abs=near)


DRAFTS = [
    ({}, {"depth": 4, "top_k": 3, "nodes": 12}),
    ({"heads": 4, "kv_heads": 4, "slots": 3}, {"widths": (3, 4, 4)}),
    ({"window": 8}, {"depth": 4, "top_k": 3}),
    ({"heads": 4, "kv_heads": 1, "window": 9, "slots": 7}, {"widths": (2, 3, 3)}),
    ({"norm_before_residual": True, "attention_bias": True}, {"depth": 2, "top_k": 3}),
    ({"kept": [1, 2, 5, 7, 10]}, {"depth": 3, "top_k": 2}),
    ({"slots": 1}, {"top_k": 4}),
    ({"slots": 6}, {"tree": "opt", "threshold": 0.05}),
    ({}, {"tree": "chain"}),
]


# Our kernels compute heads of 16 numbers, torch those of 12.
@pytest.mark.usefixtures("float32_weights")
@pytest.mark.parametrize(("case", "head_dim"), in_turn(DRAFTS, [12, 16]), ids=str)
def test_rounds_are_the_modules_plain_definition(tmp_path, case, head_dim):
    (settings, options), model = case, six_layers()
    draft = OnePassDraft.load(random_onepass(tmp_path, model, head_dim=head_dim, **settings))
    spec = Speculator("onepass", target=model, draft=draft, **options)
    watching, sequences = run(spec, PROMPTS)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=14)
    assert [s.output for s in sequences] == [r.token_ids for r in plain]
    checked = watching.rounds[:8] + watching.rounds[-8:]
    for text, tree in checked:
        assert_defined(model, draft, text, tree, settings.get("window"))
    if "tree" not in options:
        deepest = len(options.get("widths", ())) or options.get("depth", settings.get("slots", 4))
        assert max(max(tree.depths) for _, tree in checked) == deepest
    assert "kept" in settings or sum(s.accepted for s in sequences) > 0


@pytest.mark.usefixtures("float32_weights")
@pytest.mark.parametrize(("candidates", "head_dim"), in_turn([CANDIDATES, 7, 61, 100], [12, 16]))
def test_the_bigram_chooses_among_the_likely(tmp_path, head_dim, candidates, monkeypatch):
    """Of a larger vocabulary; the rest keeps its share, so the likely get no more than theirs."""
    monkeypatch.setattr(onepass, "CANDIDATES", candidates)
    model = six_layers(vocab=61)
    draft = OnePassDraft.load(random_onepass(tmp_path, model, head_dim=head_dim))
    spec = Speculator("onepass", target=model, draft=draft, depth=3, top_k=3, nodes=12)
    watching, _ = run(spec, PROMPTS[:2], 6)
    for text, tree in watching.rounds:
        assert_defined(model, draft, text, tree, candidates=candidates)


def test_a_tree_wider_than_there_are_candidates(tmp_path):
    model = six_layers(vocab=61)
    draft = OnePassDraft.load(random_onepass(tmp_path, model))
    watching, _ = run(Speculator("onepass", target=model, draft=draft, widths=(2, 60, 9)), PROMPTS[:1], 6)
    tree = watching.rounds[0][1]
    assert [sum(depth == k for depth in tree.depths) for k in (1, 2, 3)] == [2, 2 * CANDIDATES, 9]


@pytest.mark.skipif(kernels() is None, reason="no kernels here")
def test_rounded_weights_say_nearly_the_same(tmp_path):
    """The kernels hold a draft's weights in eight bits."""
    model = six_layers()
    draft = OnePassDraft.load(random_onepass(tmp_path, model, head_dim=16))
    spec = Speculator("onepass", target=model, draft=draft, depth=4, top_k=3, nodes=12)
    for text, tree in run(spec, PROMPTS, 6)[0].rounds[:8]:
        assert_defined(model, draft, text, tree, near=0.4)


def test_one_forward_a_round(tmp_path):
    """Whatever the depth, and however many texts."""
    model = six_layers()
    runner = TargetRunner(model)
    drafter = OnePassDrafter(OnePassDraft.load(random_onepass(tmp_path, model)), widths=(2, 2, 2, 2))
    store = runner.new_store(2, 40, drafter.feature_layers(runner))
    drafter.bind(runner, store)
    sequences = [Sequence(i, [1, 2, 3], 60) for i in range(2)]
    forward(runner, [[1, 2, 3]] * 2, store, [0, 1], logits="none")
    for s in sequences:
        s.slot = s.index
        store.commit(s.slot, range(3))
        s.append(4)
        drafter.observe(begun(s))
    trees = drafter.propose(sequences)
    assert drafter.forwards == 1 and [max(tree.depths) for tree in trees] == [4, 4]
    assert trees[0] == trees[1]


# --- what the engine may tell it ---


def by_hand(model, draft, text, prompt) -> Decoding:
    drafter = OnePassDrafter(draft, tree="dynamic", depth=3, top_k=3)
    return Decoding(model, drafter, text, prompt, partial(assert_defined, model, draft))


@pytest.fixture(params=[None, 8, 16], ids="window={}".format)
def decoding(request, tmp_path, float32_weights):
    model = six_layers()
    draft = OnePassDraft.load(random_onepass(tmp_path, model, window=request.param, head_dim=16))
    return by_hand(model, draft, [i % 11 for i in range(0, 50, 2)], 12)


@pytest.mark.usefixtures("small_chunks")
def test_many_rows_at_once(decoding):
    decoding.check_many_rows_at_once()


@pytest.mark.usefixtures("float32_weights", "small_chunks")
def test_long_prompts_are_read_in_chunks(tmp_path):
    model = six_layers()
    for window in (None, 10):
        draft = OnePassDraft.load(random_onepass(tmp_path, model, window=window))
        watching, _ = run(Speculator("onepass", target=model, draft=draft, depth=2, top_k=2), [PROMPTS[2]], 4)
        assert_defined(model, draft, *watching.rounds[0], window)


@pytest.mark.parametrize("back", [1, 9])
def test_rewound_text(decoding, back):
    decoding.check_rewound_text(back)


def test_a_window_bounds_the_memory(tmp_path):
    model = six_layers(context=1024)
    draft = OnePassDraft.load(random_onepass(tmp_path, model, window=16))
    for length in (20, 200):
        cache = by_hand(model, draft, [i % 11 for i in range(length)], length - 1).drafter.cache
        # slots, KV heads, window and the rows behind the text's, head size
        assert cache.keys.shape == (1, 2, 16 + SPARE + 3 + 1, 12)


# --- trees ---


@pytest.fixture
def draft(tmp_path):
    return OnePassDraft.load(random_onepass(tmp_path, six_layers(), slots=3, window=16))


def test_no_tree_is_deeper_than_the_rows(draft):
    for options in ({}, {"tree": "opt"}, {"tree": "beam"}, {"tree": "chain"}, {"top_k": 2}, {"threshold": 0.1}):
        drafter = OnePassDrafter(draft, **options)
        assert drafter.tree.depth == 3
    for wrong in ({"widths": (2,) * 4}, {"depth": 4}, {"depth": 4, "tree": "opt"}, {"window": 3, "depth": 3}):
        with pytest.raises(ValueError, match=r"levels|window"):
            OnePassDrafter(draft, **wrong)


def test_a_planner_pays_for_the_forward_once(draft, monkeypatch):
    drafter = OnePassDrafter(draft)
    drafter.use_planner()
    assert drafter.tree.fit(LARGEST).depth == 3
    found = []
    monkeypatch.setattr(OnePassDrafter.__mro__[1], "propose", lambda self, sequences, budget: found.append(budget))
    drafter.propose([], NodeLimit(5, 0.6))
    drafter.propose([])
    assert found[0] == NodeLimit(5, LEVEL * 0.6) and found[1] is None


# --- folders ---


def test_a_folder_is_read_as_it_was_written(tmp_path):
    model = six_layers()
    first = OnePassDraft.load(random_onepass(tmp_path / "a", model, kept=[1, 2, 5], window=9))
    first.save(tmp_path / "b")
    again = OnePassDraft.load(tmp_path / "b")
    assert (again.shape, again.window, again.layers, again.kind) == (first.shape, 9, LAYERS, "onepass")
    assert all(torch.equal(again.weights[n], t) for n, t in first.weights.items())
    assert Speculator(tmp_path / "b", target=model).method.name == "onepass"
