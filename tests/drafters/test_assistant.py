"""Gemma 4's assistants: against transformers' own class on the target's shared keys and values, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longdraft import Speculator
from longdraft.errors import CheckpointError
from tests.drafters.watching import run
from tests.support.recurrent_models import some_prompt
from tests.support.tiny import tiny_model

WINDOW = 16
PROMPTS = [[1, 2, 3], list(range(8)), some_prompt(60), [8]]
_TEXT: dict[str, Any] = {
    "vocab_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": WINDOW,
    "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared layers": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
}


def made(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.add_(0.2 * torch.randn_like(weight))
                elif "projection" in name or "centroids" in name:
                    weight.normal_(0.0, 0.2)
    return model.eval()


def target(kind: str = "plain") -> Any:
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    return made(AutoConfig.for_model("gemma4_text", **{**_TEXT, "hidden_size": 48, **own, **_KINDS[kind]}), 0)


def assistant(folder: Any, groups: bool = False, **over: Any) -> Any:
    own = {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text = {**_TEXT, "hidden_size": 32, "model_type": "gemma4_text", **own, **over}
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config=text, backbone_hidden_size=48, use_ordered_embeddings=groups, num_centroids=8,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    model = made(config, 1)
    if groups:
        model.masked_embedding.token_ordering.copy_(torch.randperm(64, generator=torch.Generator().manual_seed(2)))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def plain_logits(model: Any, own: Any, text: list[int], path: list[int]) -> torch.Tensor:
    """What transformers' class says behind a text and a path of drafted tokens."""
    out = model.model(torch.tensor([text[:-1]]), return_shared_kv_states=True)
    shared = {kind: tuple(x for x in pair) for kind, pair in out.shared_kv_states.items()}
    # The root sees as far back as a row of the target.
    shared["sliding_attention"] = tuple(x[:, :, -(WINDOW - 1) :] for x in shared["sliding_attention"])
    hidden, position = out.last_hidden_state[:, -1:], torch.tensor([[len(text) - 1]])
    for token in [text[-1], *path]:
        x = torch.cat([model.get_input_embeddings()(torch.tensor([[token]])), hidden], -1)
        said = own(inputs_embeds=x, position_ids=position, shared_kv_states=shared)
        hidden = said.last_hidden_state
    return said.logits[0, -1]


@pytest.mark.parametrize(("kind", "groups"), zip(_KINDS, [True, False], strict=True))
def test_proposals_are_those_of_transformers(tmp_path, kind, groups):
    model, own = target(kind), assistant(tmp_path, groups)
    spec = Speculator(tmp_path, target=model, tree="dynamic", depth=3, top_k=2, nodes=8)
    assert spec.method.name == "assistant"
    watching, _ = run(spec, PROMPTS)
    for text, tree in watching.rounds[:6] + watching.rounds[-6:]:
        for node in range(1, tree.size):
            path = [tree.tokens[i] for i in tree.path(tree.parents[node])][1:]
            logits = plain_logits(model, own, text, path)
            if groups:  # the others are told apart from them by one number, which we make as low as can be
                logits = logits.masked_fill(logits == logits.min(), torch.finfo(torch.float32).min)
            expected = torch.log_softmax(logits, -1)[tree.tokens[node]]
            assert tree.log_probs[node] == pytest.approx(float(expected), abs=2e-3)


@pytest.mark.parametrize(("kind", "tree"), zip(_KINDS, [{}, {"tree": "chain", "depth": 4}], strict=True))
def test_greedy_text_is_the_models_own(tmp_path, kind, tree):
    model = target(kind)
    assistant(tmp_path)
    found = Speculator(tmp_path, target=model, plan="fixed", **tree).generate(PROMPTS, max_new_tokens=20)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=20)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert sum(r.drafted for r in found) > sum(r.accepted for r in found)


def test_other_targets_are_refused(tmp_path):
    assistant(tmp_path)
    with pytest.raises(CheckpointError, match="made for a Gemma 4"):
        Speculator(tmp_path, target=tiny_model(vocab=64)).generate([[1, 2]], max_new_tokens=4)
    assistant(tmp_path / "heads", num_key_value_heads=4)
    with pytest.raises(CheckpointError, match="KV heads"):
        Speculator(tmp_path / "heads", target=target()).generate([[1, 2]], max_new_tokens=4)
