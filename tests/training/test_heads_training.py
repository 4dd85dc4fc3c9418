"""The heads' training step against the heads as they draft; a whole run, killed and resumed; the command."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longdraft import Speculator
from longdraft.cli.main import main
from longdraft.drafters.heads_block import HeadsBlock, HeadsShape
from longdraft.drafters.heads_draft import HeadsDraft
from longdraft.drafts import draft_folder
from longdraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from longdraft.model.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import final_norm
from longdraft.training.config import HeadsConfig
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader
from longdraft.training.heads import HeadsTrainee, train_heads
from longdraft.training.measure import by_step, simulate
from longdraft.training.settings import read_config
from tests.drafts import random_draft, random_heads
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import ROOT, checkpoint_tensors, losses_of, run_elsewhere

KEPT = torch.arange(0, 61, 2)


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return TargetRunner(tiny_model(context=512))


@pytest.fixture(scope="module")
def documents(runner):
    """Features of texts that are learned from their beginning and of others from further on."""
    reader = FeatureReader(runner, 4, torch.float32, (2,))
    g = torch.Generator().manual_seed(0)
    made = [(30, 1), (19, 8), (25, 20), (6, 1), (40, 35), (7, 4)]
    return [reader.read(Document(torch.randint(0, 61, (n,), generator=g).tolist(), s)) for n, s in made]


def block(runner, tmp_path, heads=3):
    """Heads in which every part matters."""
    found = HeadsBlock(HeadsShape(48, heads, runner.parts.rms_norm_eps))
    found.load_state_dict(HeadsDraft.load(random_heads(tmp_path, runner.model, heads=heads)).weights)
    return found


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize(("distill", "decay"), [(0.0, 1.0), (0.7, 0.8)])
def test_the_loss_is_that_of_the_heads_as_they_draft(runner, documents, tmp_path, kept, distill, decay):
    own = block(runner, tmp_path)
    trainee = HeadsTrainee(own, runner.parts, kept, decay, distill)
    ids = torch.arange(61) if kept is None else kept
    for document in documents:
        loss, ranks, depths = torch.zeros(()), [], []
        for head in range(3):
            rows = torch.arange(document.start - 1, len(document.tokens) - 2 - head)
            with torch.no_grad():
                logits = own(document.hidden[rows])[head] @ runner.parts.head[ids].T
            log_p = torch.full((len(rows), 61), -1e9)
            log_p[:, ids] = logits.log_softmax(-1)
            truth = document.tokens[rows + 2 + head]
            said = rows + 2 + head - document.start  # the target's word on these tokens
            inside = torch.isin(truth, ids)
            hard = -log_p.gather(1, truth[:, None])[:, 0][inside].sum() * (1 - distill)
            weights = document.top_log_probs[said].exp() * torch.isin(document.top_ids[said], ids)
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)
            soft = -(weights * log_p.gather(1, document.top_ids[said])).sum() * distill
            loss = loss + (hard + soft) * decay**head
            ranks.append((log_p > log_p.gather(1, truth[:, None])).sum(-1).where(inside, torch.tensor(len(ids))))
            depths += [head + 1] * len(rows)
        out = trainee([document])
        torch.testing.assert_close(out.loss, loss, rtol=1e-4, atol=1e-3)
        assert torch.equal(out.ranks, torch.cat(ranks)) and out.depths.tolist() == depths


def test_a_pack_is_its_documents_one_by_one(runner, documents, tmp_path):
    found = []
    for number, groups in enumerate(([documents], [[d] for d in documents])):
        trainee = HeadsTrainee(block(runner, tmp_path / str(number)), runner.parts, KEPT, 0.9, 0.6)
        loss = sum(trainee(group).loss for group in groups)
        loss.backward()
        found.append([loss.detach()] + [p.grad for p in trainee.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_fresh_heads_repeat_what_the_target_says(runner, documents):
    """Each says, less surely, the token that the target says by the same state: the one before its own."""
    fresh = HeadsBlock(HeadsShape(48, 2, runner.parts.rms_norm_eps))
    fresh.initialise(final_norm(runner.model), 7.0)
    document = documents[0]
    with torch.no_grad():
        want = runner.model(document.tokens[None]).logits[0]
        for said in fresh(document.hidden):
            torch.testing.assert_close(said @ runner.parts.head.T, 0.3 * want, rtol=1e-3, atol=1e-3)


def test_only_the_heads_are_trained_and_saved(runner, tmp_path):
    trainee = HeadsTrainee(block(runner, tmp_path), runner.parts)
    assert set(trainee.state_dict()) == {f"block.{name}" for name in trainee.block.state_dict()}


def test_agreement_is_measured_head_by_head(runner, documents, tmp_path):
    trainee = HeadsTrainee(block(runner, tmp_path), runner.parts)
    found = simulate(trainee, documents, 3, ranks_of=by_step)
    out = trainee(documents)
    wanted = [float((out.ranks[out.depths == i] == 0).float().mean()) for i in (1, 2, 3)]
    assert found.agreement == pytest.approx(wanted)


def test_a_target_without_an_rms_norm(runner):
    model = tiny_model()
    model.model.norm = torch.nn.LayerNorm(48)
    with pytest.raises(UnsupportedModelError, match="has no RMSNorm before its head"):
        final_norm(model)
    assert torch.allclose(final_norm(runner.model), runner.model.model.norm.weight, atol=1e-5)


# --- runs ---


@pytest.fixture
def config(target: Path, text: Path, tmp_path: Path) -> Callable[..., HeadsConfig]:
    """Settings of a run of two dozen steps in float32 on the CPU."""

    def make(**over: object) -> HeadsConfig:
        settings: dict[str, object] = {
            "data": (str(text),), "target": str(target), "out": str(tmp_path / "run"), "max_length": 64,
            "min_length": 16, "rows": 256, "epochs": 1.0, "precision": "no", "held_out": 0.1, "save_every": 3,
            "measure_every": 5, "device": "cpu", "threads": 1,
        }  # fmt: skip
        return HeadsConfig(**(settings | over))  # type: ignore[arg-type]

    return make


def steps(config):
    return list(train_heads(config))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_heads_that_draft(config, target, tmp_path):
    reports = steps(
        config(epochs=3.0, lr=2e-2, precision="bf16", vocabulary=40, heads=2, cache=str(tmp_path / "cache"))
    )
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert set(reports[-1].agreement) == {1, 2} and reports[-1].agreement[1] > reports[0].agreement[1]
    found = reports[-1].simulated
    assert found is not None and len(found.agreement) == 2 and found.tree >= found.chain > 1
    model = load(str(target)).model
    for name in ("best", "last"):
        contents = draft_folder.load(tmp_path / "run" / name)
        assert (contents.kind, contents.config["heads"]) == ("heads", 2)
        assert {t.dtype for n, t in contents.tensors.items() if n != "d2t"} == {torch.bfloat16}
        draft = HeadsDraft.load(tmp_path / "run" / name)
        assert (draft.vocabulary, draft.trained_length) == (40, 64)
        spec = Speculator("tokenswift", target=model, draft=draft)
        want = Speculator("ar", target=model).generate([[7, 8, 9]], max_new_tokens=20)[0]
        assert spec.generate([[7, 8, 9]], max_new_tokens=20)[0].token_ids == want.token_ids
    sizes = json.loads((tmp_path / "cache" / "index.json").read_text())
    assert sizes["layers"] == [2]


def test_killed_and_resumed_is_uninterrupted_to_the_bit(config, tmp_path):
    whole = config(out=str(tmp_path / "whole"), cache=str(tmp_path / "cache"))
    last = steps(whole)[-1].step
    cut = replace(whole, out=str(tmp_path / "cut"), cache=str(tmp_path / "cache2"))
    killed = run_elsewhere(cut, "checkpoint", "6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps(cut)[0].step == 4
    assert same(checkpoint_tensors(tmp_path / "whole", last), checkpoint_tensors(tmp_path / "cut", last))
    there, here = (draft_folder.load(tmp_path / run / "last").tensors for run in ("whole", "cut"))
    assert same(there, here) and "d2t" not in here
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "cut")


def test_trained_further(config, tmp_path, target):
    steps(config(vocabulary=40, heads=2))
    first = tmp_path / "run" / "last"
    further = config(init=str(first), out=str(tmp_path / "b"), max_length=128, lr=1e-5)
    assert next(train_heads(further)).loss < 1.2 * losses_of(tmp_path / "run")[-1]
    steps(further)
    here = draft_folder.load(tmp_path / "b" / "last").config
    assert (here["heads"], here["draft_vocab_size"], here["trained_length"]) == (2, 40, 128)
    wide = tmp_path / "wide"
    tiny_model(hidden=96).save_pretrained(wide)
    tiny_tokenizer(chat=True).save_pretrained(wide)
    with pytest.raises(CheckpointError, match="made for another target: hidden_size 48"):
        steps(config(target=str(wide), init=str(first), out=str(tmp_path / "c")))
    other = random_draft(tmp_path / "other", tiny_model())
    with pytest.raises(CheckpointError, match="holds a draft for longspec"):
        steps(config(init=str(other), out=str(tmp_path / "c")))


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"heads": 0}, "heads must be positive"),
        ({"heads": -2}, "heads must be positive"),
        ({"decay": 0.0}, "decay is a share above 0"),
        ({"anchor_offset": 5}, "anchor_offset is for drafts with positions"),
        ({"intermediate_size": 64}, "intermediate_size is of an MLP"),
    ],
)
def test_settings_that_cannot_be(config, over, said):
    with pytest.raises(ConfigError, match=said):
        config(**over)


def test_the_command(target, text, tmp_path, capsys):
    words = ["max_length=64", "min_length=16", "rows=256", "precision=no", "heads=2", "device=cpu", "threads=1",
             "held_out=0.2", "epochs=0.5"]  # fmt: skip
    out = tmp_path / "run"
    assert main(["train", "heads", *words, f"data={text}", f"target={target}", f"out={out}", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["draft"] == str(out / "best")
    for said in ("documents", "loss", "agreement", "tokens/s", "simulated acceptance"):
        assert said in printed.err
    assert main(["train", "heads"]) == 2
    assert "No data" in capsys.readouterr().err
    assert main(["train", "heads", "head=2", f"data={text}"]) == 2
    assert "Settings:" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "heads").glob("**/*.yaml")), ids=lambda p: p.parent.name)
def test_configurations_are_complete(path):
    found = read_config(path, ["data=x.jsonl"], HeadsConfig)
    assert found.out.startswith("drafts/") and (found.heads, found.distill, found.max_length) == (3, 0.8, 2048)
