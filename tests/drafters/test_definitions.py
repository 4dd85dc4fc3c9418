"""Every kind of draft proposes what its definition says, round by round, and the text is plain decoding's.

A new kind is a row of ROWS: how its folder is written, what it is decoded with, and what it should say.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longdraft import Speculator
from longdraft.attention import hybrid
from longdraft.drafters.shared import block_drafter
from longdraft.drafters.shared.single_forward import NUM_CANDIDATES
from longdraft.model.rope import RotaryEmbedding
from longdraft.native import kernels, library
from longdraft.native.build import load_library, supported_levels
from longdraft.views import draft_cache
from tests.support import definitions as said
from tests.support import published, torch_kernels
from tests.support.definitions import MASK, assert_matches_definition, drafted_rounds, weights_of
from tests.support.drafts import random_draft, random_eagle3, random_heads, small_lm
from tests.support.methods import HEADS_ALONE
from tests.support.mtp_models import SPARSE, mtp_definition, save_with_mtp
from tests.support.published import LAYER
from tests.support.recurrent_models import some_prompt
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("float32_weights")
# Shorter than the windows, just as long, several times as long: together, so in one ragged batch.
PROMPTS = [[1, 2, 3], list(range(8)), [t % 11 for t in range(0, 60, 2)], [8]]
KEPT = [1, 2, 5, 7, 10]
NARROW = {"depth": 3, "top_k": 3, "nodes": 12}
target = cache(lambda **sizes: tiny_model(**{"vocab": 11, "layers": 6, **sizes}))


@dataclass(frozen=True)
class Row:
    """A kind of draft, or a setting of one.

    Attributes:
        folder: writes a draft for a target. says: the definition, of target, speculator and folder.
        options: of the speculator. target: of :func:`target`. ids: of a smaller vocabulary.
        near: how far log-probabilities may be off. depth: of the deepest tree; None: is not known.
    """

    folder: Callable[[Path, Any], Path]
    says: Callable[[Any, Speculator, Path], said.DraftLogprobs]
    options: dict[str, Any] = field(default_factory=lambda: dict(NARROW))
    target: dict[str, Any] = field(default_factory=dict)
    ids: list[int] | None = None
    near: float = 3e-4
    depth: int | None = None


def eagle3(options: dict[str, Any] = NARROW, family: str = "llama", **settings: Any) -> Row:
    window = options.get("window", settings.get("window"))
    return Row(
        lambda folder, model: random_eagle3(folder, model, **settings),
        lambda model, spec, folder: said.eagle3(model, spec.draft(), window),
        options, {"family": family}, settings.get("kept"), depth=len(options.get("widths", ())) or options["depth"],
    )  # fmt: skip


def from_speculators(window: int | None = None, **settings: Any) -> Row:
    return Row(
        lambda folder, model: published.eagle3(folder, model, **settings),
        lambda model, spec, folder: said.eagle3(model, spec.draft(), window),
        ids=settings.get("kept"), depth=3,
    )  # fmt: skip


def longspec(family: str = "llama", heads: int = 6, kv_heads: int = 2, kept: Any = None, **settings: Any) -> Row:
    return Row(
        lambda folder, model: random_draft(folder, model, window=8, kept=kept, **settings),
        lambda model, spec, folder: said.longspec(
            copy.deepcopy(model).double(), weights_of(folder, torch.float64), 8, kept
        ),
        {"widths": (3, 4, 4)}, {"family": family, "heads": heads, "kv_heads": kv_heads, "layers": 3}, kept, 1e-4, 3,
    )  # fmt: skip


def eagle(layout: str) -> Row:
    double = {"layers": 8, "dtype": torch.float64}
    return Row(
        lambda folder, model: published.write(folder, layout, rope_theta=500.0),
        lambda model, spec, folder: said.eagle(model, weights_of(folder), 500.0),
        {"depth": 3, "top_k": 2, "nodes": 6}, double, near=1e-3, depth=3,
    )  # fmt: skip


def dflash(
    sizes: Any, kind: str = "dflash", config: Any = None, options: Any = None, authors: bool = False, **settings: Any
) -> Row:
    config = config or {}
    first = 0 if config.get("sample_from_anchor") else 1
    settings = {"first": first, "candidates": config.get("selector_top_k", 11)} | settings

    def write(folder: Path, model: Any) -> Path:
        tensors = published.dflash_tensors(**sizes)
        if not authors:
            return published.speculators(folder, kind, tensors, **config)
        whole = {"architectures": ["DFlashDraftModel"], **LAYER, "num_target_layers": 6, "block_size": 4} | config
        return published.save(folder, whole, tensors)

    return Row(
        write, lambda model, spec, folder: said.dflash(model, weights_of(folder), **settings),
        {"top_k": 3, "nodes": 14, **(options or {})}, ids=sizes.get("kept"), depth=4 - first,
    )  # fmt: skip


def peagle(
    sizes: Any = None, layer: Any = None, slots: int = 5, window: int | None = None, options: Any = None, **config: Any
) -> Row:
    sizes = sizes or {}

    def write(folder: Path, model: Any) -> Path:
        tensors = published.peagle_tensors(model, **sizes)
        if slots == 8:  # as EAGLE-3 is published
            whole = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "model_type": "llama"}
            whole |= {"draft_vocab_size": 11, "ptd_token_id": MASK}
            return published.save(folder, whole | {"eagle_config": AUX}, tensors)
        proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": slots}]}
        said_layer = LAYER | {"model_type": "llama", "num_hidden_layers": 1} | (layer or {})
        return published.speculators(folder, "peagle", tensors, said_layer, speculators_config=proposal, **config)

    return Row(
        write,
        lambda model, spec, folder: said.peagle(model, weights_of(folder), slots, bool(config), window),
        {"top_k": 3, "nodes": 14, "window": window, **(options or {})}, ids=sizes.get("kept"),
    )  # fmt: skip


# A working cache that always holds the whole text.
COVERING = {"retrieval": True, "tree": "dynamic", "chunk": 2, "chunks": 60, "refresh": 2, "sink": 2, "recent": 4}
AUX = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}  # what enters the layers that the definitions read
SLIDING = LAYER | {"sliding_window": 5, "use_sliding_window": True}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 11}
IDS = {"target_layer_ids": [1, 2, 4], "mask_token_id": MASK}
ANCHOR = {"markov_rank": 6, "sample_from_anchor": True}
llama = published.eagle3_layer
ROWS = {
    # Our kernels compute heads of 16 numbers, torch those of 12.
    "eagle3": eagle3(),
    "eagle3 whole heads": eagle3({"widths": (3, 4, 4)}, heads=4, kv_heads=4, head_dim=16),
    "eagle3 window": eagle3(family="mistral", window=8, head_dim=16),
    "eagle3 one head": eagle3({"widths": (2, 3, 3)}, heads=4, kv_heads=1, window=6),
    "eagle3 biases": eagle3(family="qwen2", norm_before_residual=True, attention_bias=True, head_dim=16),
    "eagle3 kept, YaRN": eagle3(
        kept=KEPT, settings={"rope_theta": 100.0, "rope_factor": 4.0, "rope_original_length": 16}
    ),
    "eagle3 window of the user's": eagle3(NARROW | {"window": 9}, head_dim=16),
    "eagle3.1": eagle3(norm_before_fc=True, norm_output=True, embedding=11, head_dim=16),
    "eagle3.1 three norms": eagle3(fc_norm=3, norm_output=True, norm_before_residual=True, head_dim=16),
    "eagle3 for qwen3": eagle3(family="qwen3", qk_norm=True, output_bias=True, attention_bias=True),
    "eagle3 layers": eagle3(decoder_layers=2),
    "eagle3 layers in a window": eagle3({"widths": (2, 3, 3)}, decoder_layers=3, window=6, norm_output=True),
    "speculators": from_speculators(),
    "speculators kept, residual": from_speculators(
        kept=KEPT, norm_before_residual=True, config={"norm_before_residual": True}
    ),
    "speculators before fc": from_speculators(norm_before_fc=True, config={"norm_before_fc": True}),
    "speculators 3.1": from_speculators(fc_norm=3, norm_output=True, config={"fc_norm": True, "norm_output": True}),
    "speculators qwen3": from_speculators(qk_norm=True, layer=llama("qwen3")),
    "speculators biases, layers": from_speculators(
        decoder_layers=2, attention_bias=True, output_bias=True, layer=llama(attention_bias=True, num_hidden_layers=2)
    ),
    "speculators embedding": from_speculators(embedding=11, config={"embed_requires_grad": True}),
    "speculators width": from_speculators(
        hidden_size=32, embedding=11, layer=llama(hidden_size=32), config={"target_hidden_size": 48}
    ),
    "speculators, the target's head": from_speculators(own_head=False),
    "speculators, the target's head in kernels": from_speculators(
        own_head=False, head_dim=16, layer=llama(head_dim=16)
    ),
    "speculators window": from_speculators(
        8, layer=llama(sliding_window=8, layer_types=["sliding_attention"], use_sliding_window=True)
    ),
    "speculators YaRN": from_speculators(layer=llama(
        rope_theta=500.0, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    )),
    "longspec": longspec(),
    "longspec norm": longspec("qwen3", 4, 4, final_norm=True),
    "longspec one head": longspec("llama", 4, 1, final_norm=True),
    "longspec kept": longspec(kept=KEPT),
    "eagle-1": eagle("eagle-1"),
    "eagle-2": eagle("eagle-2"),
    "dflash": dflash({}),
    "dflash kept, biases": dflash({"kept": KEPT, "bias": True}),
    "dflash sliding": dflash(
        {}, config={"layer": SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}},
        windows=(5, None), causal=(True, False),
    ),
    "dflash sliding, both ways": dflash(
        {}, config={"layer": SLIDING | {"layer_types": ["sliding_attention"] * 2}, "sliding_window_non_causal": True},
        windows=(5, 5),
    ),
    "dflash window of the user's": dflash({}, options={"window": 6, "depth": 3}, window=6),
    "dflash window of its training": dflash({}, config={"layer": LAYER | {"max_position_embeddings": 9}}, window=9),
    "dflash with retrieval": dflash({}, options=COVERING),
    "dspark": dflash({"rank": 6, "kept": KEPT}, "dspark", ANCHOR),
    "dspark from the first mask": dflash({"rank": 6}, "dspark", {"markov_rank": 6, "sample_from_anchor": False}),
    "dspark without head": dflash({}, "dspark", {"markov_rank": 0, "sample_from_anchor": True}),
    "dflash2": dflash(
        {"conv": (2, 16), "selector": 6}, "dflash2",
        {"selector_rank": 6, "selector_top_k": 11, "sliding_window_non_causal": True},
    ),
    "dflash2 of few candidates": dflash(
        {"conv": (3, 8), "selector": 6}, "dflash2",
        {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4},
    ),
    "dflash2 of its authors": dflash(
        {"conv": (2, 16), "selector": 6},
        config={"architectures": ["DFlash2DraftModel"], "selector_top_k": 11, "dflash_config": IDS | SELECTOR},
        authors=True,
    ),
    "dflash of its authors": dflash({}, config={"dflash_config": IDS}, authors=True),
    "dflash nested": dflash({}, config={"block_size": "drop", "dflash_config": {"block_size": 4, **IDS}}, authors=True),
    "dflash mask": dflash(
        {"mask": True}, config={"dflash_config": IDS | {"causal": True}}, authors=True, causal=(True, True)
    ),
    "dspark of its authors": dflash(
        {"rank": 6}, config={"architectures": ["Qwen3DSparkModel"], **IDS, **ANCHOR}, authors=True
    ),
    "peagle": peagle(),
    "peagle kept, before fc": peagle({"kept": KEPT, "norm_before_fc": True}, norm_before_fc=True),
    "peagle layers of qwen3": peagle(
        {"decoder_layers": 2, "qk_norm": True}, {"model_type": "qwen3", "num_hidden_layers": 2}
    ),
    "peagle layers with retrieval": peagle({"decoder_layers": 3}, {"num_hidden_layers": 3}, options=COVERING),
    "peagle as eagle3": peagle(slots=8),
    "peagle, the target's head": peagle({"own_head": False}),
    "peagle in a window": peagle(slots=8, window=9),
    "heads": Row(
        random_heads, lambda model, spec, folder: said.heads(model, weights_of(folder)),
        {"widths": (3, 3, 3), **HEADS_ALONE},
        {"layers": 3, "dtype": torch.float64}, near=1e-4, depth=3,
    ),
    **{
        f"small-lm {i}": Row(
            lambda folder, model, family=family, layers=layers: small_lm(folder, family=family, layers=layers),
            lambda model, spec, folder: own_forward(folder), tree, {"layers": 3}, depth=3,
        )
        for i, (family, layers, tree) in enumerate((("mistral", 3, NARROW), ("qwen2", 1, {"widths": (3, 4, 4)})))
    },
}  # fmt: skip


def own_forward(folder: Path) -> said.DraftLogprobs:
    """What a small language model's own forward says."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def says(text: list[int], path: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([text + path]), use_cache=False).logits[0, -1]
        return torch.log_softmax(logits.float(), -1)

    return says


@cache
def plain(model: Any, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    """What plain decoding writes."""
    results = Speculator("ar", target=model).generate([list(p) for p in prompts], max_new_tokens=12, eos_token_ids=[])
    return [r.token_ids for r in results]


def compare(
    spec: Speculator,
    says: said.DraftLogprobs,
    prompts: Any = PROMPTS,
    ids: Any = None,
    near: float = 3e-4,
    least: int = 1,
) -> Any:
    """Rounds of a run, of which the first and the last are compared; the text is plain decoding's.

    Args:
        least: drafted tokens that are right, or nothing would say that those are emitted.
    """
    rounds, results = drafted_rounds(spec, prompts, 12)
    assert [r.token_ids for r in results] == plain(spec.runner().model, tuple(map(tuple, prompts)))
    assert sum(r.drafted for r in results) > sum(r.accepted for r in results) >= (least if ids is None else 0)
    for text, tree in rounds[:2] + rounds[-3:]:
        assert_matches_definition(says, text, tree, ids, 10, near)
    return rounds


@pytest.mark.parametrize("name", ROWS)
def test_rounds_are_those_of_the_definition(tmp_path, name):
    row = ROWS[name]
    model = target(**row.target)
    folder = row.folder(tmp_path / "draft", model)
    spec = Speculator(folder, target=model, **row.options)
    rounds = compare(spec, row.says(model, spec, folder), ids=row.ids, near=row.near)
    assert row.depth is None or max(max(tree.depths) for _, tree in rounds) == row.depth


@pytest.mark.parametrize("level", supported_levels()[1:])  # the first one computes the rows above
@pytest.mark.parametrize("name", ["longspec norm", "eagle3 biases"])
def test_rounds_on_other_instruction_sets(tmp_path, monkeypatch, name, level):
    monkeypatch.setattr(library, "load_result", [(library.Kernels(load_library(level), level), None)])
    test_rounds_are_those_of_the_definition(tmp_path, name)


@pytest.mark.parametrize("name", ["longspec", "eagle3 window", "peagle"])
def test_rounds_on_a_gpus_attention(tmp_path, monkeypatch, name):
    """All sequences of a batch in one call; stand-ins for its kernels. Windows move after a few tokens."""
    for module in (draft_cache, block_drafter):
        monkeypatch.setattr(module, "SPARE_ENTRIES", 5)
    monkeypatch.setattr(hybrid, "why_unavailable", lambda *kind: None)
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "hybrid")
    with torch_kernels.registered():
        test_rounds_are_those_of_the_definition(tmp_path, name)
        assert torch_kernels.counted["efficient"] > 0


@pytest.mark.parametrize("name", ["dflash with retrieval", "peagle layers with retrieval"])
def test_chosen_chunks_of_a_text_that_outgrows_the_working_cache(tmp_path, name):
    row, prompts = ROWS[name], [[i * i % 11 for i in range(60)], [3, 9, 4, 7, 2, 5] * 15]
    model = target(**row.target)
    folder = row.folder(tmp_path / "draft", model)
    whole, few = (
        drafted_rounds(Speculator(folder, target=model, **row.options | sizes), prompts, 12)
        for sizes in ({}, {"chunks": 3})
    )
    for _rounds, results in (whole, few):
        assert [r.token_ids for r in results] == plain(model, tuple(map(tuple, prompts)))
        assert sum(r.drafted for r in results) > sum(r.accepted for r in results) > 0
    assert [tree.tokens for _, tree in whole[0]] != [tree.tokens for _, tree in few[0]]


@pytest.mark.parametrize("kind", SPARSE)
def test_a_layer_that_predicts_further_tokens(tmp_path, kind):
    options = {"depth": 3, "window": 6, "tree": "chain"} if "moe" in kind else NARROW
    model, layer = save_with_mtp(tmp_path / "model", kind)
    spec = Speculator("mtp", target=model, **options)
    prompts = [*PROMPTS[:2], some_prompt(40), PROMPTS[3]]
    compare(spec, said.mtp(model, layer, options.get("window")), prompts, near=2e-3, least=0 if "moe" in kind else 1)


def test_a_further_layer_in_bfloat16_stays_as_it_is_stored(tmp_path):
    model, layer = save_with_mtp(tmp_path / "model", "qwen3_5_text", dtype=torch.bfloat16)
    spec = Speculator("mtp", target=model.float(), tree="chain", depth=3)
    compare(spec, said.mtp(model, layer.float()), near=2e-3, least=0)


def test_a_further_layer_past_what_it_was_trained_for_gets_a_window(tmp_path):
    save_with_mtp(tmp_path / "model", "glm4_moe")
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", rope_parameters=rope).eval()
    spec = Speculator("mtp", target=model, tree="chain", depth=2)
    compare(spec, said.mtp(model, mtp_definition(model), 16), [some_prompt(40)], near=2e-3, least=0)


def test_heads_that_lie_in_their_models_folder(tmp_path):
    folder = published.with_heads(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    says, options = said.heads(model, weights_of(folder), published=True), {"widths": (3, 2, 2), **HEADS_ALONE}
    compare(Speculator("tokenswift", target=model, **options), says, near=1e-4)
    # And saved as a folder of ours they are the same.
    Speculator(folder, target=model).draft().save(tmp_path / "ours")
    rounds, found = drafted_rounds(Speculator(tmp_path / "ours", target=model, **options), PROMPTS)
    again, results = drafted_rounds(Speculator(folder, target=model, **options), PROMPTS)
    assert rounds == again and [r.accepted for r in found] == [r.accepted for r in results]


def test_a_window_is_the_same_as_positions_moved_back(tmp_path, caplog):
    """Past the trained length EAGLE-3 sees as many tokens as it knows, as if they began at position 0."""
    model = target()
    folder = random_eagle3(tmp_path / "draft", model, settings={"trained_length": 12})
    spec = Speculator(folder, target=model, **NARROW)
    rounds, _ = drafted_rounds(spec, PROMPTS)
    assert "sees the last 12 tokens" in caplog.text and max(len(text) for text, _ in rounds) > 40
    for text, tree in rounds[-6:]:
        rows = len(text) - 1
        seen = list(range(max(0, rows - 12), rows))
        assert_matches_definition(said.eagle3(model, spec.draft(), 12, seen), text, tree, limit=14)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 10])
def test_long_prompts_are_read_in_chunks(tmp_path, window):
    model = target()
    spec = Speculator(random_eagle3(tmp_path / "draft", model, window=window), target=model, depth=2, top_k=2)
    compare(spec, said.eagle3(model, spec.draft(), window), [PROMPTS[2]])


@pytest.mark.skipif(kernels() is None, reason="no kernels here")
def test_rounded_weights_say_nearly_the_same(tmp_path, monkeypatch):
    """The kernels hold a draft's weights in eight bits."""
    monkeypatch.undo()
    folder = random_eagle3(tmp_path / "draft", target(), head_dim=16)
    spec = Speculator(folder, target=target(), plan="fixed", **NARROW)
    compare(spec, said.eagle3(target(), spec.draft()), near=0.4)


def test_a_tree_wider_than_there_are_candidates(tmp_path):
    model = target(vocab=61)
    spec = Speculator(published.small_peagle(tmp_path / "draft", model), target=model, widths=(2, 60, 9))
    tree = drafted_rounds(spec, PROMPTS[:1], 6)[0][0][1]
    assert [sum(depth == k for depth in tree.depths) for k in (1, 2, 3)] == [2, 2 * NUM_CANDIDATES, 9]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_stay_those_of_the_trained_length(kind):
    """A draft sees a window of that length, wherever it lies."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, **factors}
    rotary = RotaryEmbedding(16, rope)
    first = said.frequencies(16, 1e4)[0]
    for places in ([0, 5], [1000, 1005]):
        cos, sin = rotary(torch.tensor(places))
        turned = (
            torch.complex(cos[1, :8], sin[1, :8]) * torch.complex(cos[0, :8], -sin[0, :8]) / rotary.attention_scaling**2
        )
        assert torch.allclose(turned, torch.polar(torch.ones(8), 5 * first), atol=1e-3)
