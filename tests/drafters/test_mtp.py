"""Drafts inside checkpoints: against the layer's definition over the whole text, and exact as a method."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longdraft import Speculator
from longdraft.drafters.mtp import MtpDraft
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CapabilityError, CheckpointError
from tests.drafters.watching import run
from tests.drafts import random_mtp
from tests.mtp_models import SPARSE, definition, target, with_further
from tests.quick import in_turn
from tests.recurrent_models import some_prompt
from tests.tiny import tiny_model

PROMPTS = [[1, 2, 3], list(range(8)), some_prompt(40), [8]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model and the definition of its further layer, by kind."""
    folder, found = tmp_path_factory.mktemp("mtp"), {}

    def make(kind):
        if kind not in found:
            found[kind] = with_further(folder / kind, kind)
        return found[kind]

    return make


@torch.no_grad()
def plain_log_probs(model, further, text, path, window=None):
    """The log-probabilities of what follows ``text`` and a path of drafted tokens, nothing cached."""
    f = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    tokens = text[1:]
    for following in [*path, None]:
        x = model.get_input_embeddings()(torch.tensor(tokens))
        rows = torch.arange(len(tokens))
        behind = rows[:, None] - rows
        hidden = (behind < 0) | (behind >= (window or len(tokens)))
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
        # Positions are those of the tokens: only differences count.
        places = (rows + 1)[None]
        if hasattr(model.model.rotary_emb, "mrope_section"):
            places = places.expand(3, 1, -1)
        out = further(x, f, model.model.rotary_emb(x[None], places), mask)
        if following is not None:
            tokens, f = [*tokens, following], torch.cat([f, out[-1:]])
    return torch.log_softmax(model.lm_head(out[-1]), -1)


def assert_defined(model, further, text, tree, window=None, limit=20):
    assert tree.tokens[0] == text[-1]
    expected = {}
    for node in range(1, min(tree.size, limit)):
        parent = tree.parents[node]
        if parent not in expected:
            path = [tree.tokens[i] for i in tree.path(parent)][1:]
            expected[parent] = plain_log_probs(model, further, text, path, window)
        assert tree.log_probs[node] == pytest.approx(float(expected[parent][tree.tokens[node]]), abs=2e-3)


TREES = [{"depth": 3, "top_k": 2, "nodes": 8, "tree": "dynamic"}, {"depth": 3, "window": 6, "tree": "chain"}]


@pytest.mark.parametrize(("kind", "options"), in_turn(SPARSE, TREES))
def test_proposals_are_those_of_the_definition(made, kind, options):
    model, further = made(kind)
    watching, sequences = run(Speculator("mtp", target=model, **options), PROMPTS)
    for text, tree in watching.rounds[:4] + watching.rounds[-4:]:
        assert_defined(model, further, text, tree, options.get("window"))
    assert sum(s.accepted for s in sequences) > 0


@pytest.mark.parametrize(
    ("kind", "tree"),
    in_turn(SPARSE, [{}, {"tree": "dynamic", "depth": 3, "top_k": 3}, {"tree": "chain", "depth": 5}]),
)
def test_greedy_text_is_the_models_own(made, kind, tree):
    model, _ = made(kind)
    spec = Speculator("mtp", target=model, plan="fixed", **tree)
    found = spec.generate(PROMPTS, max_new_tokens=24)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert sum(r.drafted for r in found) > sum(r.accepted for r in found) > 0


def test_it_is_read_from_files_of_any_number_and_for_a_model_from_elsewhere(tmp_path):
    model, _ = with_further(tmp_path / "model", "qwen3_5_text", shards=2)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    spec = Speculator("mtp", target=target("qwen3_5_text"), draft=tmp_path / "model", plan="fixed")
    (found,) = spec.generate([PROMPTS[2]], max_new_tokens=8)
    (own,) = Speculator("mtp", target=model, plan="fixed").generate([PROMPTS[2]], max_new_tokens=8)
    assert (found.token_ids, found.accepted) == (own.token_ids, own.accepted)


def test_a_bfloat16_layer_stays_as_it_is_stored(tmp_path):
    model, further = with_further(tmp_path / "model", "qwen3_5_text", dtype=torch.bfloat16)
    spec = Speculator("mtp", target=model.float(), plan="fixed", depth=3, tree="chain")
    found = spec.generate(PROMPTS, max_new_tokens=12)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=12)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    for text, tree in run(spec, PROMPTS)[0].rounds[-6:]:
        assert_defined(model, further.float(), text, tree)


def test_checkpoints_without_one_say_so(tmp_path, made):
    model = target("qwen3_5_text")
    model.save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="no layer that predicts"):
        MtpDraft.load(tmp_path / "bare")
    with pytest.raises(CapabilityError, match="mtp"):
        Speculator("mtp", target=model).generate([[1, 2]], max_new_tokens=4)
    other = tiny_model(hidden=96)
    with pytest.raises(CheckpointError, match="another target"):
        Speculator("mtp", target=other, draft=made("qwen3_5_text")[0].name_or_path).generate([[1, 2]], max_new_tokens=4)


def test_a_damaged_layer_is_named(tmp_path, made):
    model, _ = made("glm4_moe")
    folder = shutil.copytree(model.name_or_path, tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if not n.endswith("3.enorm.weight")}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing: enorm"):
        Speculator("mtp", target=model, draft=folder).generate([[1, 2]], max_new_tokens=4)


def test_a_quantised_layer_is_refused_by_name(tmp_path):
    folder = random_mtp(tmp_path, tiny_model())
    (file,) = folder.glob("*.safetensors")
    name = "mtp.layers.0.self_attn.q_proj.weight_scale_inv"
    save_file(load_file(file) | {name: torch.ones(1, 1)}, file)
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        MtpDraft.load(folder)


def test_a_model_with_one_is_a_small_language_model_where_it_drafts_for_another(made):
    assert kind_of(made("qwen3_5_text")[0].name_or_path).name == "small-lm"


def test_a_text_past_what_it_was_trained_for_gets_a_window(tmp_path):
    folder = tmp_path / "model"
    with_further(folder, "glm4_moe")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    further = definition(model)
    watching, _ = run(Speculator("mtp", target=model, tree="chain", depth=2), [PROMPTS[2]], 6)
    for text, tree in watching.rounds:
        assert_defined(model, further, text, tree, window=16)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_sampled_text_with_a_seed_is_plain_decodings(made, kind):
    model, _ = made(kind)
    how = {"max_new_tokens": 16, "temperature": 1.0, "seed": 5}
    found = Speculator("mtp", target=model, plan="fixed").generate(PROMPTS, **how)
    plain = Speculator("ar", target=model).generate(PROMPTS, **how)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
