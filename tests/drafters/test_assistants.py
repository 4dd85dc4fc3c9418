"""Gemma 4's assistants: folders as transformers writes them draft what transformers' own loop drafts, and exactly."""

from __future__ import annotations

import pytest
import torch

from longdraft import Sampling, Speculator
from longdraft.errors import CheckpointError
from longdraft.registry import kind_of
from tests.support.assistants import SIZES, VOCABULARY, assistant, gemma4
from tests.support.definitions import DraftLogprobs, assert_matches_definition, drafted_rounds
from tests.support.slow_marks import slow_except
from tests.support.tiny import tiny_model

pytest.importorskip("transformers.models.gemma4_assistant")
PROMPTS = [[7, 8, 9, 10] * 8, [5] * 9, [1, 2, 3]]


def by_transformers(model, draft) -> DraftLogprobs:
    """The log-probabilities of transformers' loop (SinglePositionMultiTokenCandidateGenerator), from the tokens before
    the last, along a path. Windows are the target's: transformers' masks let an assistant see two tokens more."""

    @torch.no_grad()
    def logprobs(text: list[int], path: list[int]) -> torch.Tensor:
        out = model(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        shared = {name: out.shared_kv_states[name] for name in draft.config.text_config.layer_types}
        keys, values = shared["sliding_attention"]
        seen = 1 - SIZES["sliding_window"]
        shared["sliding_attention"] = keys[:, :, seen:], values[:, :, seen:]
        hidden = out.hidden_states[-1][:, -1:]
        for token in [text[-1], *path]:
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            found = draft(
                inputs_embeds=torch.cat([embedded, hidden], -1), position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=shared,
            )  # fmt: skip
            hidden = found.last_hidden_state
        return found.logits[0, 0].log_softmax(-1)

    return logprobs


KINDS = {
    "shared KV": {}, "no shared KV": {"shared": 0}, "ordered embeddings": {"ordered": True},
    "unified": {"model_type": "gemma4_unified_assistant"},
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(KINDS, ["shared KV", "ordered embeddings"]))
def test_it_drafts_what_transformers_drafts(name, tmp_path):
    made_with = dict(KINDS[name])
    model = gemma4(made_with.pop("shared", 2))
    folder, draft = assistant(tmp_path / "draft", **made_with)
    spec = Speculator(folder, target=model, plan="fixed", depth=3, top_k=3, nodes=12)
    rounds, results = drafted_rounds(spec, PROMPTS)
    for text, tree in rounds:
        assert_matches_definition(by_transformers(model, draft), text, tree)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=14, eos_token_ids=[])
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert 0 < sum(r.accepted for r in results) < sum(r.drafted for r in results)


def test_it_is_an_mtp_draft_and_knows_its_target(tmp_path):
    folder, _ = assistant(tmp_path / "draft")
    assert kind_of(folder).name == "mtp"
    spec = Speculator("mtp", draft=folder, target=gemma4(), lookup=True)
    alone = Speculator("ar", target=gemma4())
    drawn = {"sampling": Sampling(temperature=1.0), "seed": 3, "max_new_tokens": 12}
    assert spec.generate(PROMPTS, **drawn)[0].token_ids == alone.generate(PROMPTS, **drawn)[0].token_ids
    for other, named in (({"hidden_size": 48}, "hidden_size"), ({"global_head_dim": 16}, "full_attention")):
        with pytest.raises(CheckpointError, match=named):
            Speculator("mtp", draft=folder, target=gemma4(**other)).generate(PROMPTS, max_new_tokens=2)
    with pytest.raises(CheckpointError, match="hidden_size"):
        Speculator("mtp", draft=folder, target=tiny_model(vocab=VOCABULARY)).generate(PROMPTS, max_new_tokens=2)
    with pytest.raises(ValueError, match="window"):
        Speculator("mtp", draft=folder, target=gemma4(), window=4)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model"):
        Speculator("mtp", draft=folder, target=gemma4()).generate(PROMPTS, max_new_tokens=2)
