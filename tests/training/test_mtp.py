"""MTP layers of a model's own checkpoint, trained further: dense, with experts, with latent attention."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator, load
from longdraft.drafters.mtp import MtpDraft
from longdraft.drafts import draft_folder, mtp_formats
from tests.support.mtp_models import save_with_mtp
from tests.support.tiny import tiny_tokenizer
from tests.training.helpers import begun, steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "deepseek_v3"])
def test_a_models_own_layer_is_trained_further(config, tmp_path, kind):
    save_with_mtp(tmp_path / "model", kind)
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    run = config("mtp", target=tmp_path / "model", lr=1e-3, max_steps=6, distill=0.2, ttt=2)
    told: list[str] = []
    reports = list(begun(run, told.append))
    assert any(str(tmp_path / "model") in line for line in told) and reports[-1].loss < reports[0].loss
    own, trained = (mtp_formats.read(tmp_path / "model"), draft_folder.load(tmp_path / "run" / "last").tensors)
    assert own.keys() == trained.keys()
    moved = [float((own[name] - trained[name].float()).abs().max()) for name in own]
    assert 0 < max(moved) < 0.1
    model = load(tmp_path / "model", device="cpu").model
    draft = MtpDraft.load(tmp_path / "run" / "last")
    assert draft.trained_length is None  # the checkpoint's was trained for all of the target's context
    (plain,) = Speculator("ar", target=model).generate([[7, 8, 9]], max_new_tokens=16)
    (result,) = Speculator("mtp", target=model, draft=draft, plan="fixed").generate([[7, 8, 9]], max_new_tokens=16)
    assert result.token_ids == plain.token_ids and result.drafted > 0


def test_a_new_layer_is_trained_further(config, tmp_path):
    steps(config("mtp", max_steps=3))
    first = tmp_path / "run" / "last"
    (report,) = steps(config("mtp", out=tmp_path / "next", init=str(first), max_steps=1, lr=1e-6))
    there, here = (draft_folder.load(folder) for folder in (first, tmp_path / "next" / "last"))
    assert there.config["trained_length"] == here.config["trained_length"] == 64 and report.loss > 0
    for name, tensor in there.tensors.items():
        torch.testing.assert_close(here.tensors[name].float(), tensor.float(), rtol=1e-2, atol=1e-3)
