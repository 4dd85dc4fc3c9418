"""The drafter's rounds against the module's plain definition over the whole text, written again here."""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from longdraft import Speculator
from longdraft.drafters.eagle3 import Eagle3Draft, Eagle3Drafter
from longdraft.model.rotary import Rotary, yarn
from longdraft.views.window import SPARE
from tests.drafters.by_hand import Decoding
from tests.drafters.watching import run
from tests.drafts import random_eagle3
from tests.events import attended, replaced, taken_back
from tests.quick import in_turn
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("float32_weights")
LAYERS = (1, 2, 4)


def six_layers(family="llama", **over):
    return tiny_model(family, layers=6, **{"vocab": 11, **over})


# --- the definition ---


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(d, theta, factor, length):
    """(d / 2,) angles a position, and the factor of cos and sin: plain, or YaRN's."""
    plain = theta ** (-torch.arange(0, d, 2) / d)
    if factor is None:
        return plain, 1.0

    def dimension(rotations):
        return d * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), d - 1)
    ramp = ((torch.arange(d // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1


def rope(x, positions, theta, factor=None, length=None):
    """x (heads, T, d) at positions (T,), half-split."""
    angles, scale = frequencies(x.shape[-1], theta, factor, length)
    angles = positions[:, None] * angles
    cos, sin = angles.cos() * scale, angles.sin() * scale
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain_log_probs(model, draft: Eagle3Draft, text: list[int], path: list[int], window=None, seen=None):
    """The draft's log-probabilities of what follows ``text`` and a path of drafted tokens, nothing cached.

    The target has seen all of the text but its last token.

    Args:
        seen: of the text's rows, these alone are seen, as if they stood together.
    """
    w = {n: t.float() for n, t in draft.weights.items()}
    shape, settings = draft.shape, draft.rope
    rotated = settings["rope_theta"], settings.get("factor"), settings.get("original_max_position_embeddings")
    d, eps = shape.head_dim, shape.rms_norm_eps
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = [states[i + 1][0] for i in LAYERS]
        if shape.fc_norm:
            features = [rms(f, w[f"fc_norm.{i}.weight"], eps) for i, f in enumerate(features)]
        features = torch.cat(features, -1)
        if shape.norm_before_fc:
            features = rms(features, w["input_norm.weight"], eps)
        g = features @ w["fc.weight"].T
        table = w.get("embed_tokens.weight", model.get_input_embeddings().weight)
        tokens = text[1:]
        for following in [*path, None]:
            rows = len(tokens)
            x = table[torch.tensor(tokens)]
            normed = rms(g, w["midlayer.hidden_norm.weight"], eps)
            n = torch.cat([rms(x, w["midlayer.input_layernorm.weight"], eps), normed], -1)

            def heads(part, n, at):
                own = f"{at}.self_attn.{part}"
                out = F.linear(n, w[f"{own}_proj.weight"], w.get(f"{own}_proj.bias")).view(len(n), -1, d)
                return (rms(out, w[f"{own}_norm.weight"], eps) if f"{own}_norm.weight" in w else out).transpose(0, 1)

            positions = torch.arange(rows)
            places, unseen = positions.clone(), torch.zeros(rows, dtype=torch.bool)
            if seen is not None:
                unseen[: len(text) - 1] = True
                unseen[seen] = False
                places[~unseen] = torch.arange(int((~unseen).sum()))
            behind = positions[:, None] - positions
            hidden = (behind < 0) | (behind >= (window or rows)) | unseen
            out = normed if shape.norm_before_residual else g
            for at in ["midlayer", *(f"layers.{i}" for i in range(1, shape.decoder_layers))]:
                if at != "midlayer":
                    n = rms(out, w[f"{at}.input_layernorm.weight"], eps)
                q, k, v = (heads(part, n, at) for part in "qkv")
                q, k = (rope(t, places, *rotated) for t in (q, k))
                k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
                attended = torch.softmax((q @ k.mT / d**0.5).masked_fill(hidden, -math.inf), -1) @ v
                a = out + F.linear(
                    attended.transpose(0, 1).flatten(1),
                    w[f"{at}.self_attn.o_proj.weight"],
                    w.get(f"{at}.self_attn.o_proj.bias"),
                )
                m = rms(a, w[f"{at}.post_attention_layernorm.weight"], eps)
                gate, up = (F.linear(m, w[f"{at}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
                out = a + F.linear(F.silu(gate) * up, w[f"{at}.mlp.down_proj.weight"])
            if following is not None:
                carried = rms(out[-1:], w["norm.weight"], eps) if shape.norm_output else out[-1:]
                tokens, g = [*tokens, following], torch.cat([g, carried])
        return torch.log_softmax(rms(out[-1], w["norm.weight"], eps) @ w["lm_head.weight"].T, -1)


def assert_defined(model, draft, text, tree, window=None, limit=40, seen=None):
    """A tree's log-probabilities are those of the definition; the first ``limit`` nodes are looked at."""
    assert tree.tokens[0] == text[-1]
    ids = None if draft.ids is None else draft.ids.tolist()
    expected: dict[int, torch.Tensor] = {}
    for node in range(1, min(tree.size, limit)):
        parent = tree.parents[node]
        if parent not in expected:
            path = [tree.tokens[i] for i in tree.path(parent)][1:]
            expected[parent] = plain_log_probs(model, draft, text, path, window, seen)
        token = tree.tokens[node] if ids is None else ids.index(tree.tokens[node])
        assert tree.log_probs[node] == pytest.approx(float(expected[parent][token]), abs=3e-4)


# Shorter than the windows, just as long, several times as long: together, so in one ragged batch.
PROMPTS = [[1, 2, 3], list(range(8)), [t % 11 for t in range(0, 60, 2)], [8]]


DRAFTS = [
    ({}, {"depth": 3, "top_k": 3, "nodes": 12}),
    ({"heads": 4, "kv_heads": 4}, {"widths": (3, 4, 4)}),
    ({"window": 8}, {"depth": 3, "top_k": 3, "nodes": 12}),
    ({"heads": 4, "kv_heads": 1, "window": 6}, {"widths": (2, 3, 3)}),
    ({"norm_before_residual": True, "attention_bias": True}, {"depth": 2, "top_k": 3}),
    ({"kept": [1, 2, 5, 7, 10]}, {"depth": 3, "top_k": 2}),
    ({"settings": {"rope_factor": 4.0, "rope_original_length": 16}}, {"depth": 2, "top_k": 3}),
    ({"settings": {"rope_theta": 100.0}}, {"depth": 2, "top_k": 3}),
    ({}, {"window": 9, "depth": 3, "top_k": 2}),
    # EAGLE-3.1
    ({"norm_before_fc": True, "norm_output": True}, {"depth": 3, "top_k": 3}),
    ({"fc_norm": 3, "norm_output": True, "norm_before_residual": True}, {"depth": 3, "top_k": 3}),
    # Qwen3's layer, and an embedding of its own
    ({"qk_norm": True, "output_bias": True, "attention_bias": True}, {"depth": 3, "top_k": 2}),
    ({"embedding": 11}, {"depth": 3, "top_k": 2}),
    # Several layers
    ({"decoder_layers": 2}, {"depth": 3, "top_k": 3}),
    ({"decoder_layers": 3, "window": 6, "norm_output": True}, {"widths": (2, 3, 3)}),
]


# Our kernels compute heads of 16 numbers, torch those of 12.
@pytest.mark.parametrize(("case", "head_dim"), in_turn(DRAFTS, [12, 16]), ids=str)
def test_rounds_are_the_modules_plain_definition(tmp_path, case, head_dim):
    (settings, options), model = case, six_layers()
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model, head_dim=head_dim, **settings))
    watching, sequences = run(Speculator("eagle3", target=model, draft=draft, **options), PROMPTS)
    window = options.get("window", settings.get("window"))
    checked = watching.rounds[:8] + watching.rounds[-8:]
    for text, tree in checked:
        assert_defined(model, draft, text, tree, window, limit=14)
    assert max(max(tree.depths) for _, tree in checked) == options.get("depth", 3)
    assert "kept" in settings or sum(s.accepted for s in sequences) > 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_families(tmp_path, family):
    model = six_layers(family)
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model))
    watching, _ = run(Speculator("eagle3", target=model, draft=draft, depth=2, top_k=3), PROMPTS[:3], 6)
    for text, tree in watching.rounds[-4:]:
        assert_defined(model, draft, text, tree)


@pytest.mark.usefixtures("small_chunks")
def test_long_prompts_are_read_in_chunks(tmp_path):
    model = six_layers()
    for window in (None, 10):
        draft = Eagle3Draft.load(random_eagle3(tmp_path, model, window=window))
        watching, _ = run(Speculator("eagle3", target=model, draft=draft, depth=2, top_k=2), [PROMPTS[2]], 4)
        assert_defined(model, draft, *watching.rounds[0], window)


# --- what the engine may tell it ---


def by_hand(model, draft, text, prompt, **options) -> Decoding:
    drafter = Eagle3Drafter(draft, tree="dynamic", depth=2, top_k=3, **options)
    return Decoding(model, drafter, text, prompt, partial(assert_defined, model, draft))


@pytest.fixture(params=[None, 8, 16, "covering"], ids="window={}".format)
def decoding(request, tmp_path):
    """One with retrieval too, whose working cache always holds the whole text."""
    model, window, options = six_layers(), request.param, {}
    if window == "covering":
        window, options = None, {"retrieval": True, "chunk": 2, "chunks": 30, "sink": 2, "recent": 4}
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model, window=window, head_dim=16))
    return by_hand(model, draft, [i % 11 for i in range(0, 50, 2)], 12, **options)


@pytest.mark.usefixtures("small_chunks")
def test_many_rows_at_once(decoding):
    decoding.check_many_rows_at_once()


def test_refreshed_rows_are_read_again(decoding):
    """The last rows were inexact when the drafter read them, as after a partial verification."""
    decoding.check()
    start = decoding.store.lengths[0] - 5
    decoding.draft_from_inexact_rows(5)
    decoding.store.lengths[0] = start + 5
    decoding.drafter.observe(replaced(decoding.s, start))
    decoding.check()


@pytest.mark.parametrize("back", [1, 9])
def test_rewound_text(decoding, back):
    decoding.check_rewound_text(back)


# --- retrieval ---


@pytest.mark.parametrize(
    "settings", [{}, {"rope_factor": 4.0, "rope_original_length": 16}, {"window": 24}, {"window": 40}], ids=str
)
def test_retrieved_rows_are_seen_as_if_they_stood_together(tmp_path, settings):
    """Gathered with an offset, turned by a wrong angle, or one row off, a key would show."""
    model, options = six_layers(), {"chunk": 2, "chunks": 4, "every": 2, "sink": 2, "recent": 4}
    settings = dict(settings)
    draft = Eagle3Draft.load(
        random_eagle3(tmp_path, model, window=settings.pop("window", None), settings=settings or None)
    )
    text = [i % 11 for i in range(0, 120, 2)]
    decoding = by_hand(model, draft, text, 40, retrieval=True, **options)
    s, retrieval = decoding.s, decoding.drafter.retrieval
    decoding.check(retrieval.rows(0, len(s.tokens) - 1).tolist())  # nothing scored: the latest chunks
    chosen = []
    for _ in range(3):
        for _ in range(options["every"]):
            decoding.drafter.observe(attended(s, {5: 9 * torch.randn(6, 16)}))
        chosen.append(retrieval.chosen(0))
        seen = retrieval.rows(0, len(s.tokens) - 1).tolist()
        assert len(seen) < len(s.tokens) - 10
        for token in (3, 1, 4):
            decoding.check(seen)
            seen.append(len(s.tokens) - 1)
            decoding.go_on(token)
    assert chosen[0] != chosen[1] != chosen[2]
    # Tokens are taken back, some of them chosen ones.
    back = 12
    decoding.store.truncate(0, decoding.store.lengths[0] - back)
    del s.output[-back:]
    decoding.drafter.observe(taken_back(s))
    decoding.check(retrieval.rows(0, len(s.tokens) - 1).tolist())


def test_a_working_cache_that_grows_out_of_its_room_is_gathered_anew(tmp_path):
    model = six_layers()
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model, window=22))
    options = {"chunk": 2, "chunks": 3, "sink": 2, "recent": 4}
    decoding = by_hand(model, draft, [i % 11 for i in range(0, 80, 2)], 30, retrieval=True, **options)
    near, sizes = decoding.drafter.cache.near, []
    for token in [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]:
        decoding.drafter.propose([decoding.s])
        sizes.append(near.end(0))
        decoding.go_on(token)
    assert max(sizes) == 22 - 2 and any(b < a for a, b in itertools.pairwise(sizes))


def test_the_room_of_a_window_decides_how_much_is_retrieved(tmp_path):
    draft = Eagle3Draft.load(random_eagle3(tmp_path, six_layers(), window=512))
    assert Eagle3Drafter(draft, retrieval=True).retrieval.view.chunks == 8
    assert Eagle3Drafter(draft, retrieval=True, depth=2, sink=0, recent=32, chunk=16).retrieval.view.chunks == 27
    with pytest.raises(ValueError, match="chunks"):
        Eagle3Drafter(draft, retrieval=True, chunks=64)
    with pytest.raises(ValueError, match="sink"):
        Eagle3Drafter(draft, retrieval=True, recent=512)
    unbounded = Eagle3Draft.load(random_eagle3(tmp_path, six_layers()))
    assert Eagle3Drafter(unbounded, retrieval=True).retrieval.view.chunks == 64
    with pytest.raises(ValueError, match="give one of them"):
        Eagle3Drafter(unbounded, retrieval=True, window=64)


def test_compact_positions_within_the_trained_length_need_no_word(tmp_path, caplog):
    model = six_layers()
    folder = random_eagle3(tmp_path, model, settings={"trained_length": 30, "rope_original_length": 30})
    small = {"retrieval": True, "chunk": 2, "chunks": 4, "sink": 2, "recent": 4, "depth": 2}
    with caplog.at_level(logging.WARNING, "longdraft"):
        Speculator(folder, target=model, **small).generate([[1, 2, 3]], max_new_tokens=40)
        assert caplog.text == ""
        Speculator(folder, target=model, **small | {"chunks": 12}).generate([[1, 2, 3]], max_new_tokens=40)
    assert caplog.text.count("give fewer chunks") == 1


# --- memory, options ---


def test_a_window_bounds_the_memory(tmp_path):
    model = six_layers(context=1024)
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model, window=16))
    for length in (20, 200):
        cache = by_hand(model, draft, [i % 11 for i in range(length)], length - 1).drafter.cache
        # slots, KV heads, window, the nodes that the draft is shown and nobody's row, head size
        assert cache.keys.shape == (1, 2, 16 + SPARE + 3 + 1, 12)


def test_texts_beyond_the_trained_length_are_mentioned_once(tmp_path, caplog):
    model = six_layers()
    folder = random_eagle3(tmp_path, model, settings={"trained_length": 20, "rope_original_length": 20})
    with caplog.at_level(logging.WARNING, "longdraft"):
        short = Speculator(folder, target=model)
        short.generate([[1, 2, 3]], max_new_tokens=17)
        Speculator(folder, target=model, window=12).generate([[1, 2, 3]], max_new_tokens=18)
        stretched = Eagle3Draft.load(folder, rope_factor=2.0)
        Speculator("eagle3", target=model, draft=stretched).generate([[1, 2, 3]], max_new_tokens=37)
        assert caplog.text == ""
        Speculator(folder, target=model).generate([[1, 2, 3], [4] * 5], max_new_tokens=18)
    assert caplog.text.count("was trained for texts of 20 tokens") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"widths": (2,) * 8}, {"depth": 8}, 
        {"window": 3, "depth": 3}, {"tree": "beam", "depth": 3},
        {"tree": "dynamic", "widths": (2,)},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    draft = Eagle3Draft.load(random_eagle3(tmp_path, six_layers(), window=8))
    with pytest.raises(ValueError, match=r"widths|nodes|window|depth|top_k|tree"):
        Eagle3Drafter(draft, **options)


def test_the_papers_tree_is_the_default(tmp_path):
    draft = Eagle3Draft.load(random_eagle3(tmp_path, six_layers()))
    assert (Eagle3Drafter(draft).max_nodes, Eagle3Drafter(draft, widths=(3, 2)).max_nodes) == (59, 5)


def test_a_rotary_embedding_of_its_own():
    positions = torch.tensor([0, 1, 7, 500])
    for factor in (None, 8.0):
        cos, sin = Rotary(16, yarn(5e3, factor, 128))(positions)
        angles, scale = frequencies(16, 5e3, factor, 128)
        angles = (positions[:, None] * angles).repeat(1, 2)
        assert torch.allclose(cos, angles.cos() * scale, atol=1e-4) and torch.allclose(
            sin, angles.sin() * scale, atol=1e-4
        )


def test_a_window_is_the_same_as_positions_moved_back(tmp_path, caplog):
    """Past the trained length the draft sees as many tokens as it knows, as if they began at position 0."""
    model = six_layers()
    draft = Eagle3Draft.load(random_eagle3(tmp_path, model, settings={"trained_length": 12}))
    spec = Speculator("eagle3", target=model, draft=draft, depth=3, top_k=3, nodes=12)
    with caplog.at_level(logging.WARNING, "longdraft"):
        watching, _ = run(spec, PROMPTS)
    assert "sees the last 12 tokens" in caplog.text
    assert max(len(text) for text, _ in watching.rounds) > 40
    for text, tree in watching.rounds[-6:]:
        rows = len(text) - 1
        assert_defined(model, draft, text, tree, 12, limit=14, seen=list(range(max(0, rows - 12), rows)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_frequencies_stay_those_of_the_trained_length(rope):
    """A draft sees a window of that length, wherever it lies."""
    rotary = Rotary(16, rope)
    near, far = rotary(torch.tensor([0, 5])), rotary(torch.tensor([1000, 1005]))
    first = frequencies(16, 1e4, None, None)[0]
    for cos, sin in (near, far):
        turned = torch.complex(cos[1, :8], sin[1, :8]) * torch.complex(cos[0, :8], -sin[0, :8]) / rotary.scale**2
        assert torch.allclose(turned, torch.polar(torch.ones(8), 5 * first), atol=1e-3)
