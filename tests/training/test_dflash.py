"""DFlash runs: anchors that a step draws, published drafts that are trained further, and drafts that are not."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from longdraft import Speculator
from longdraft.drafters.dflash import DFlashDraft
from longdraft.errors import CapabilityError
from longdraft.model.runner import TargetRunner
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader
from tests.support.published import small_dflash
from tests.support.tiny import tiny_model
from tests.training.helpers import begun, steps
from tests.training.trainers import READS, make_trainer


def test_drawn_anchors_have_the_loss_of_all_on_average():
    runner = TargetRunner(tiny_model())
    trainer = make_trainer("dflash", runner)
    ids = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    document = FeatureReader(runner, torch.float32, READS["dflash"]).read(Document(ids, 9))
    with torch.no_grad():
        whole, trainer.num_anchors = trainer([document], [1]).loss, 6
        drawn = [trainer([document], [seed]).loss for seed in range(1, 61)]
        assert len({float(loss) for loss in drawn}) > 50 and trainer([document], [1]).loss == drawn[0]
        assert float(torch.stack(drawn).mean()) == pytest.approx(float(whole), rel=0.05)
        together = trainer([document, document], [3, 7]).loss
        torch.testing.assert_close(together, drawn[2] + drawn[6])
        trainer.eval()  # a measurement takes all
        assert trainer([document], [2]).loss == pytest.approx(float(whole), rel=1e-5)


def test_a_published_draft_is_trained_further(config, target, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target)
    init = small_dflash(tmp_path / "theirs", model)
    brought = {"feature_layers": (), "max_steps": 2, "init": str(init)}
    reports = steps(config("dflash", lr=1e-3, **brought))
    before, after = DFlashDraft.load(init), DFlashDraft.load(tmp_path / "run" / "last")
    assert after.shape == before.shape and after.rope == before.rope and len(reports) == 2
    moved = [float((after.weights[name].float() - t.float()).abs().max()) for name, t in before.weights.items()]
    assert 0 < max(moved) < 0.1
    prompts = [[7, 8, 9] * 10, [11, 5]]
    plain, found = (
        Speculator(method, target=model, **draft).generate(prompts, max_new_tokens=24)
        for method, draft in (("ar", {}), ("dflash", {"draft": after, "plan": "fixed"}))
    )
    assert [r.token_ids for r in plain] == [r.token_ids for r in found] and all(r.drafted for r in found)
    dspark = small_dflash(tmp_path / "dspark", model, "dspark", {"markov_rank": 4}, rank=4)
    with pytest.raises(CapabilityError, match="markov_rank"):
        next(begun(config("dflash", out=tmp_path / "b", **brought | {"init": str(dspark)})))
