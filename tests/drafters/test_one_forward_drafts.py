"""P-EAGLE, DFlash, DFlash2 and DSpark from published folders: they draft what the formulas say, and decode exactly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from longdraft import Speculator
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.runner import TargetRunner
from tests.drafters.one_forward_folders import (
    LAYER,
    MASK,
    correction,
    dflash_rows,
    dflash_tensors,
    peagle_rows,
    peagle_tensors,
    save,
    speculators,
)
from tests.drafters.test_eagle3_drafter import PROMPTS, six_layers
from tests.drafters.watching import run
from tests.drafts import edit
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("float32_weights")
KEPT = [1, 2, 5, 7, 10]
TREE = {"top_k": 3, "nodes": 14}
AUX = [2, 3, 5]  # what enters the layers that the tests' formulas read


def published(folder, tensors, **config):
    """As the authors of DFlash write theirs; of DSpark, with the names at the top."""
    return save(folder, {"architectures": ["DFlashDraftModel"], **LAYER, "num_target_layers": 6} | config, tensors)


def decoded(folder, model, **options):
    """What is drafted for which text; the output is plain decoding's."""
    watching, sequences = run(Speculator(folder, target=model, **options), PROMPTS)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=14)
    assert [s.output for s in sequences] == [r.token_ids for r in plain]
    return watching.rounds[:6] + watching.rounds[-8:]


def assert_drafted(rounds, tensors, rows_of, corrected=lambda path, rows: 0.0, candidates=11):
    """A tree's log-probabilities are those of the formulas.

    Args:
        rows_of: a text -> rows (slots, ...) that corrections read, and their logits (slots, draft vocabulary).
        corrected: the target ids of a path and its rows -> what is added to the last row's logits.
        candidates: the likeliest tokens, to which corrections are added.
    """
    ids = list(range(11))
    if "d2t" in tensors:
        ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
    deepest = 0
    for text, tree in rounds:
        rows, logits = rows_of(text)
        for node in range(1, tree.size):
            path = [tree.tokens[i] for i in tree.path(tree.parents[node])]
            depth = len(path)
            deepest = max(deepest, depth)
            own = logits[depth - 1]
            added = torch.as_tensor(corrected(path, rows[:depth])).expand_as(own)
            likely = torch.zeros(len(own), dtype=torch.bool)
            likely[own.topk(min(candidates, len(own))).indices] = True
            wanted = torch.log_softmax(own + added.masked_fill(~likely, 0.0), -1)
            assert tree.log_probs[node] == pytest.approx(float(wanted[ids.index(tree.tokens[node])]), abs=3e-4)
    return deepest


# Name -> tensors, the kind of `speculators`, what config.json says beside, and the formulas' settings.
DFLASH = {
    "dflash": ({}, "dflash", {}, {}),
    "dflash kept": ({"kept": KEPT}, "dflash", {}, {}),
    "dflash biases": ({"bias": True}, "dflash", {}, {}),
    "dflash sliding": (
        {}, "dflash", {"layer": LAYER | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
                                         "use_sliding_window": True}},
        {"windows": (5, None), "causal": (True, False)},
    ),
    "dflash sliding, both ways": (
        {}, "dflash", {"layer": LAYER | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5,
                                         "use_sliding_window": True}, "sliding_window_non_causal": True},
        {"windows": (5, 5)},
    ),
    "dspark": ({"rank": 6}, "dspark", {"markov_rank": 6, "sample_from_anchor": True}, {}),
    "dspark kept": ({"rank": 6, "kept": KEPT}, "dspark", {"markov_rank": 6, "sample_from_anchor": True}, {}),
    "dspark gated": (
        {"rank": 6, "head": "gated"}, "dspark",
        {"markov_rank": 6, "markov_head_type": "gated", "sample_from_anchor": False}, {},
    ),
    "dspark rnn": (
        {"rank": 6, "head": "rnn"}, "dspark",
        {"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": True}, {},
    ),
    "dspark without head": ({}, "dspark", {"markov_rank": 0, "sample_from_anchor": True}, {}),
    "dflash2": (
        {"conv": (2, 16), "selector": 6}, "dflash2",
        {"selector_rank": 6, "selector_top_k": 11, "sliding_window_non_causal": True}, {},
    ),
    "dflash2 of few": (
        {"conv": (3, 8), "selector": 6}, "dflash2",
        {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}, {},
    ),
}  # fmt: skip


def assert_dflash(rounds, tensors, model, config, settings):
    first = 0 if config.get("sample_from_anchor") else 1

    def rows_of(text):
        hidden, logits = dflash_rows(model, tensors, text, 4, **settings)
        return hidden[first:], logits[first:]

    head = config.get("markov_head_type", "vanilla")
    deepest = assert_drafted(
        rounds, tensors, rows_of, lambda path, rows: correction(tensors, path, rows, head),
        config.get("selector_top_k", 11),
    )  # fmt: skip
    assert deepest == 4 - first


@pytest.mark.parametrize("case", DFLASH)
def test_dflash_drafts_what_the_formulas_say(tmp_path, case):
    sizes, kind, config, settings = DFLASH[case]
    model, tensors = six_layers(), dflash_tensors(**sizes)
    folder = speculators(tmp_path / "draft", kind, tensors, **config)
    assert kind_of(folder).name == "dflash"
    assert_dflash(decoded(folder, model, **TREE), tensors, model, config, settings)


PUBLISHED = {
    "dflash": ({}, {"block_size": 4, "dflash_config": {"target_layer_ids": [1, 2, 4], "mask_token_id": MASK}}),
    "nested": ({}, {"dflash_config": {"block_size": 4, "target_layer_ids": [1, 2, 4], "mask_token_id": MASK}}),
    "mask": (
        {"mask": True},
        {"block_size": 4, "dflash_config": {"target_layer_ids": [1, 2, 4], "mask_token_id": MASK, "causal": True}},
    ),
    "dflash2": (
        {"conv": (2, 16), "selector": 6},
        {"block_size": 4, "selector_top_k": 11, "dflash_config": {
            "target_layer_ids": [1, 2, 4], "mask_token_id": MASK, "conv_kernel_size": 2, "conv_group_size": 16,
            "selector_rank": 6, "selector_top_k": 11}},
    ),
    "dspark": (
        {"rank": 6},
        {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "target_layer_ids": [1, 2, 4],
         "mask_token_id": MASK, "markov_rank": 6, "sample_from_anchor": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_folders_of_the_authors(tmp_path, case):
    sizes, config = PUBLISHED[case]
    model, tensors = six_layers(), dflash_tensors(**sizes)
    folder = published(tmp_path / "draft", tensors, **config)
    settings = {"causal": (True, True)} if case == "mask" else {}
    assert_dflash(decoded(folder, model, **TREE), tensors, model, config, settings)


def test_a_window_of_dflash(tmp_path):
    """The user's, and the one that a text longer than the trained length gets by itself."""
    model, tensors = six_layers(), dflash_tensors()
    folder = speculators(tmp_path / "draft", "dflash", tensors)
    assert_dflash(decoded(folder, model, window=6, depth=3, **TREE), tensors, model, {}, {"window": 6})
    short = speculators(tmp_path / "short", "dflash", tensors, LAYER | {"max_position_embeddings": 9})
    assert_dflash(decoded(short, model, **TREE), tensors, model, {}, {"window": 9})


PEAGLE = {
    "plain": ({}, {}, {}),
    "kept": ({"kept": KEPT}, {}, {}),
    "norm_before_fc": ({"norm_before_fc": True}, {"norm_before_fc": True}, {"norms": ("norm_before_fc",)}),
    "qwen3": ({"qk_norm": True}, {"layer": {"model_type": "qwen3"}}, {}),
    "layers": ({"decoder_layers": 3}, {"layer": {"num_hidden_layers": 3}}, {}),
    "layers of qwen3": (
        {"decoder_layers": 2, "qk_norm": True},
        {"layer": {"model_type": "qwen3", "num_hidden_layers": 2}},
        {},
    ),
}


@pytest.mark.parametrize("case", PEAGLE)
def test_peagle_drafts_what_the_formulas_say(tmp_path, case):
    sizes, config, settings = PEAGLE[case]
    model = six_layers()
    tensors = peagle_tensors(model, **sizes)
    layer = LAYER | {"model_type": "llama", "num_hidden_layers": 1} | config.get("layer", {})
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}
    said = {"speculators_config": proposal} | config | {"layer": layer}
    folder = speculators(tmp_path / "draft", "peagle", tensors, **said)
    assert kind_of(folder).name == "peagle"
    rounds = decoded(folder, model, **TREE)

    def rows_of(text):
        return (logits := peagle_rows(model, tensors, text, 5, **settings)), logits

    assert assert_drafted(rounds, tensors, rows_of) >= 4


def test_peagle_in_a_window_and_as_eagle_3_is_published(tmp_path):
    model = six_layers()
    tensors = peagle_tensors(model)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "model_type": "llama", "draft_vocab_size": 11}
    config |= {"ptd_token_id": MASK, "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX}}
    folder = save(tmp_path / "draft", config, tensors)
    for window in (None, 9):

        def rows_of(text, window=window):
            return (logits := peagle_rows(model, tensors, text, 8, window=window)), logits

        assert_drafted(decoded(folder, model, window=window, **TREE), tensors, rows_of)


def test_what_is_refused(tmp_path):
    model = six_layers()
    sound = speculators(tmp_path / "a", "dflash", dflash_tensors())
    draft = kind_of(sound).load(sound)
    with pytest.raises(CapabilityError):
        draft.save(tmp_path / "copy")
    with pytest.raises(CheckpointError):
        Speculator(sound, target=tiny_model(hidden=96, vocab=11, layers=6))
    with pytest.raises(ValueError, match="depth"):
        Speculator(sound, target=model, depth=4)
    for name, value in (("mask_token_id", "drop"), ("block_size", "drop"), ("is_neox_style", False)):
        with pytest.raises(CheckpointError, match=name):
            Speculator(edit(speculators(tmp_path / name, "dflash", dflash_tensors()), **{name: value}))
    beyond = edit(speculators(tmp_path / "beyond", "dflash", dflash_tensors()), mask_token_id=11)
    with pytest.raises(CheckpointError, match="mask_token_id"):
        kind_of(beyond).load(beyond).check(TargetRunner(model))

    def spoiled(tensors):
        return tensors | {"extra": torch.zeros(1)}

    with pytest.raises(CheckpointError, match="unexpected: extra"):
        Speculator(edit(speculators(tmp_path / "extra", "dflash", dflash_tensors()), spoiled))
    assert load_file(sound / "model.safetensors")["fc.weight"].shape == (48, 144)
