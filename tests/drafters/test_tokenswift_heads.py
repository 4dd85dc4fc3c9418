"""Heads as TokenSwift publishes them, within their model's folder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longdraft import Speculator
from longdraft.drafters.heads import HeadsDraft
from longdraft.errors import CheckpointError
from tests.drafters.watching import run
from tests.recurrent_models import some_prompt
from tests.tiny import tiny_model

PROMPTS = [[1, 2, 3], list(range(8)), some_prompt(40), [8]]
HEADS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The model of a folder with heads, and the heads' tensors."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    heads = {}
    for i in range(HEADS):
        begin = f"model.medusa_layers.{i}"
        heads[f"{begin}.linear.weight"] = 0.1 * torch.randn(48, 48, generator=generator)
        for norm in ("input_layernorm", "post_layernorm"):
            heads[f"{begin}.{norm}.weight"] = 1 + 0.2 * torch.randn(48, generator=generator)
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | heads, file, metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder).eval(), heads


@torch.no_grad()
def plain_log_probs(model, heads, text, level):
    """What head ``level`` says behind a text whose last token has not been read."""
    last = []
    hook = model.model.layers[-1].register_forward_hook(lambda m, i, out: last.append(out))
    model(torch.tensor([text[:-1]]))
    hook.remove()
    h = (last[0][0] if isinstance(last[0], tuple) else last[0]).reshape(-1, 48)[-1]
    for i in range(level + 1):
        weights = {part: heads[f"model.medusa_layers.{i}.{part}.weight"] for part in
                   ("linear", "input_layernorm", "post_layernorm")}  # fmt: skip
        h = h + weights["linear"] @ F.rms_norm(h, (48,), weights["input_layernorm"], model.config.rms_norm_eps)
    said = F.rms_norm(h, (48,), weights["post_layernorm"], model.config.rms_norm_eps)
    return torch.log_softmax(model.lm_head(said), -1)


def test_proposals_are_those_of_the_definition(made):
    model = AutoModelForCausalLM.from_pretrained(made[0].name_or_path, dtype=torch.float64).eval()
    heads = {name: t.double() for name, t in made[1].items()}
    watching, _ = run(Speculator("heads", target=model, widths=(3, 2, 2)), PROMPTS)
    for text, tree in watching.rounds[:5] + watching.rounds[-5:]:
        for node in range(1, tree.size):
            expected = plain_log_probs(model, heads, text, tree.depths[node] - 1)[tree.tokens[node]]
            assert tree.log_probs[node] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("method", ["heads", "tokenswift"])
def test_greedy_text_is_the_models_own(made, method):
    model, _ = made
    draft = HeadsDraft.load(model.name_or_path)
    assert draft.shape.heads == HEADS
    found = Speculator(method, target=model, draft=draft, plan="fixed").generate(PROMPTS, max_new_tokens=24)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert sum(r.drafted for r in found) > 0


def test_they_are_saved_as_a_draft_folder_of_ours(made, tmp_path):
    model, _ = made
    HeadsDraft.load(model.name_or_path).save(tmp_path / "heads")
    found = Speculator(tmp_path / "heads", target=model, plan="fixed").generate(PROMPTS, max_new_tokens=12)
    own = Speculator(model.name_or_path, target=model, plan="fixed").generate(PROMPTS, max_new_tokens=12)
    assert [(r.token_ids, r.accepted) for r in found] == [(r.token_ids, r.accepted) for r in own]


def test_an_incomplete_folder_is_named(made, tmp_path):
    model, heads = made
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    some = {name: t for name, t in heads.items() if "1.post_layernorm" not in name}
    save_file(load_file(file) | some, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: norms\.1"):
        HeadsDraft.load(tmp_path)
