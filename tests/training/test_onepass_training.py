"""One-pass training against drafting, one anchor at a time; a whole run from nothing, from EAGLE-3, and further."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from longdraft.cli.main import main
from longdraft.drafters.onepass import OnePassBlock, OnePassDraft, OnePassShape
from longdraft.drafts import draft_folder
from longdraft.errors import CheckpointError, ConfigError
from longdraft.model.rotary import Rotary, yarn
from longdraft.model.runner import TargetRunner
from longdraft.speculator import Speculator
from longdraft.training.config import Eagle3Config, OnePassConfig
from longdraft.training.documents import Document
from longdraft.training.eagle3 import Plan, train_eagle3
from longdraft.training.features import FeatureReader, Features
from longdraft.training.measure import UNSEEN, by_step, simulate
from longdraft.training.onepass import OnePassTrainee, train_onepass
from longdraft.training.settings import read_config
from tests.drafts import random_draft
from tests.tiny import tiny_model
from tests.training.helpers import masked_attention
from tests.training.test_eagle3_run import same
from tests.training.test_eagle3_training import LAYERS, assert_says, documents, random_eagle3, runner  # noqa: F401

SLOTS, DECAY, ROPE = 4, 0.7, yarn(1000.0)


def random_onepass(model, vocabulary: int = 61, before: bool = False, slots: int = SLOTS) -> OnePassBlock:
    plain = random_eagle3(model, vocabulary, before=before)
    block = OnePassBlock(OnePassShape(**asdict(plain.shape), slots=slots, rank=5))
    generator = torch.Generator().manual_seed(1)
    own = {n: 0.5 * torch.randn(t.shape, generator=generator) for n, t in block.state_dict().items()}
    block.load_state_dict(own | plain.state_dict())
    return block


def rows_of(trainee: OnePassTrainee, document: Features, root: int, depth: int) -> list[torch.Tensor]:
    """Logits of a root row and of the ``depth`` rows behind it, as decoding makes them; the path is the text's.

    The rows up to the root have the target's features. Those behind know the root alone, and see what it sees and each
    other; the bigram knows the token before.
    """
    block, window = trainee.block, trainee.window
    first = 0 if window is None else max(0, root + 1 - window)
    keys, values, logits = [], [], []
    for row in range(first, root + depth + 1):
        own, k = min(row, root), max(0, row - root)
        x = trainee._parts.embedding(document.tokens[own + 1][None])
        g = block.project(document.hidden[own][None])
        if k:
            x, g = x + block.slot_embedding[k - 1], g + block.slot_state[k - 1]
        cos, sin = trainee._rotary(document.positions[row][None])

        def attend(q, k, v):
            keys.append(k)
            values.append(v)
            return masked_attention(
                q, torch.cat(keys, 1), torch.cat(values, 1), torch.ones(1, len(keys), dtype=torch.bool)
            )

        out = block(x, g, cos, sin, attend)
        if row >= root:
            z = block.logits(out)[0]
            if (before := int(trainee._to_draft[document.tokens[row + 1]])) >= 0:
                z = z + block.bigram_out.weight @ block.bigram_in.weight[before]
            logits.append(z)
    return logits


def plain_loss(trainee: OnePassTrainee, document: Features) -> tuple[torch.Tensor, dict]:
    """The loss as its definition says, and (step, row) -> logits."""
    last = len(document.tokens) - 3  # this row says the last token
    loss, logits = torch.zeros(()), {}
    for root in range(document.start - 1, last + 1):
        for i, z in enumerate(rows_of(trainee, document, root, min(SLOTS - 1, last - root))):
            row = root + i
            logits[i, row] = z
            k = row + 2 - document.start
            ids, p = trainee._to_draft[document.top_ids[k]], document.top_log_probs[k].exp()
            if ids[0] < 0:
                continue
            wanted, inside = torch.zeros_like(z), ids >= 0
            wanted[ids[inside]] = trainee.distill * p[inside] / p[inside].sum()
            if (token := trainee._to_draft[document.tokens[row + 2]]) >= 0:
                wanted[token] += 1 - trainee.distill
            loss = loss + trainee.decay**i * F.cross_entropy(z, wanted)
    return loss, logits


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("kept", "distill", "before"), [(None, 1.0, False), (list(range(0, 61, 2)), 0.6, True)])
def test_the_training_forward_is_drafting(runner, documents, window, kept, distill, before):  # noqa: F811
    block = random_onepass(runner.model, 61 if kept is None else len(kept), before)
    ids = None if kept is None else torch.tensor(kept)
    trainee = OnePassTrainee(block, runner.parts, Rotary(8, ROPE), ids, SLOTS, DECAY, window, distill)
    for document in documents[1:4]:
        loss, logits = plain_loss(trainee, document)
        assert_says(trainee, document, loss, logits)


def test_a_pack_is_its_documents_one_by_one(runner, documents):  # noqa: F811
    found = []
    for together in (True, False):
        trainee = OnePassTrainee(random_onepass(runner.model), runner.parts, Rotary(8, ROPE), None, SLOTS, window=7)
        groups = [documents] if together else [[d] for d in documents]
        loss = sum(trainee(group, [1] * len(group)).loss for group in groups)
        loss.backward()
        found.append([loss.detach()] + [p.grad for p in trainee.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_levels_beyond_the_rows_are_told_by_none(runner, documents):  # noqa: F811
    trainee = OnePassTrainee(random_onepass(runner.model, slots=2), runner.parts, Rotary(8, ROPE)).eval()
    ranks = by_step(trainee, documents[1], 5)
    assert [(r < UNSEEN).sum().item() for r in ranks] == [10, 9, 0, 0, 0]
    assert len(simulate(trainee, documents, 5, ranks_of=by_step).agreement) == 5


@pytest.mark.parametrize("window", [None, 9])
def test_a_chain_decoded_by_the_engine(window, tmp_path):
    """Text that the target wrote: what training simulates is what decoding does."""
    model, prompt = tiny_model(context=512), 12
    g = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 61, (3, prompt), generator=g).tolist()
    answers = Speculator("ar", target=model).generate(prompts, max_new_tokens=40)
    own = TargetRunner(model)
    reader = FeatureReader(own, 4, torch.float32, LAYERS)
    texts = [reader.read(Document(p + r.token_ids, prompt)) for p, r in zip(prompts, answers, strict=True)]
    block = random_onepass(model)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    trainee = OnePassTrainee(block, own.parts, Rotary(8, ROPE), None, SLOTS, DECAY, window, distill=0.0)
    for _ in range(40):
        trainee(texts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # as a folder holds it
        for weight in block.parameters():
            weight.copy_(weight.bfloat16())
    plan = Plan(block, None, LAYERS, window, yarn(1000.0))
    described = plan.described(Eagle3Config(window=window, max_length=64))
    draft_folder.save(
        tmp_path, draft_folder.trained("onepass", described, block.state_dict(), None, own.parts.description)
    )
    spec = Speculator("onepass", target=model, draft=tmp_path, widths=(1,) * SLOTS)
    results = [spec.generate(p, max_new_tokens=40)[0] for p in prompts]
    assert [r.token_ids for r in results] == [r.token_ids for r in answers]
    decoded = sum(r.new_tokens - 1 for r in results) / sum(r.rounds for r in results)
    found = simulate(trainee.eval(), texts, SLOTS, ranks_of=by_step)
    assert found.chain == pytest.approx(decoded) and found.chain > 1.5


# --- runs ---


@pytest.fixture
def config(target: Path, text: Path, tmp_path: Path):
    """Settings of a short run in float32 on the CPU."""

    def make(kind=OnePassConfig, **over: object):
        settings: dict[str, object] = {
            "data": (str(text),), "target": str(target), "out": str(tmp_path / "run"), "max_length": 64,
            "min_length": 16, "rows": 256, "epochs": 0.4, "lr": 3e-3, "ttt": 3, "feature_layers": (0, 1, 2),
            "precision": "no", "held_out": 0.1, "save_every": 3, "vocabulary": 40, "warmup": 0.1,
            "measure_every": 5, "window": 12, "intermediate_size": 64, "device": "cpu", "threads": 1,
        }  # fmt: skip
        return kind(**(settings | ({"rank": 8} if kind is OnePassConfig else {}) | over))

    return make


def test_a_run_learns_and_leaves_a_draft(config, tmp_path):
    reports = list(train_onepass(config(epochs=0.8)))
    assert reports[-1].loss < 0.97 * reports[0].loss
    assert set(reports[-1].agreement) == {1, 2, 3}
    found = reports[-1].simulated
    assert found is not None and len(found.agreement) == 5 and found.agreement[3:] == (0.0, 0.0)
    for name in ("best", "last"):
        draft = OnePassDraft.load(tmp_path / "run" / name)
        assert (draft.shape.slots, draft.shape.rank, draft.window, len(draft.ids)) == (3, 8, 12, 40)
    assert draft.weights["bigram_out.weight"].abs().sum() > 0


def test_from_eagle3_and_further(config, tmp_path):
    list(train_eagle3(config(Eagle3Config, out=str(tmp_path / "eagle3"), epochs=0.2)))
    brought = {"vocabulary": None, "intermediate_size": None, "feature_layers": (), "epochs": 0.2}
    begun = config(init=str(tmp_path / "eagle3" / "last"), **brought)
    first = next(train_onepass(begun)).loss  # its rows say what the anchor's does, or so
    fresh = next(train_onepass(config(out=str(tmp_path / "fresh")))).loss
    assert first < fresh
    list(train_onepass(begun))
    found = OnePassDraft.load(tmp_path / "run" / "last")
    assert (found.shape.slots, found.shape.rank, len(found.ids), found.layers) == (3, 8, 40, (0, 1, 2))
    # A one-pass draft brings its rows and its rank.
    more = config(init=str(tmp_path / "run" / "last"), out=str(tmp_path / "more"), **brought)
    list(train_onepass(replace(more, ttt=6, rank=128)))
    again = OnePassDraft.load(tmp_path / "more" / "last")
    assert again.shape == found.shape
    for name, value in (("ttt", 4), ("rank", 9)):
        with pytest.raises(ConfigError, match=f"{name} {value}: the draft in init has .* leave it out"):
            list(train_onepass(replace(more, **{name: value}, fields_set=(name,))))
    with pytest.raises(CheckpointError, match="holds a draft for onepass, not for eagle3"):
        list(train_eagle3(config(Eagle3Config, init=str(tmp_path / "run" / "last"), out=str(tmp_path / "no"))))
    random_draft(tmp_path / "longspec", tiny_model())
    with pytest.raises(CheckpointError, match="holds a draft for longspec, not for onepass"):
        list(train_onepass(config(init=str(tmp_path / "longspec"), out=str(tmp_path / "no"))))


def test_stopped_and_resumed_is_uninterrupted_to_the_bit(config, tmp_path):
    list(train_onepass(config(out=str(tmp_path / "whole"))))
    stopped: list[int] = []
    for report in train_onepass(config(), stop=lambda: bool(stopped)):
        if report.step == 4:
            stopped.append(1)
    assert next(train_onepass(config())).step > 1
    list(train_onepass(config()))
    there, here = (draft_folder.load(tmp_path / run / "last").tensors for run in ("whole", "run"))
    assert same(there, here)


def test_the_command(target, text, tmp_path, capsys):
    words = ["max_length=64", "min_length=16", "rows=256", "precision=no", "window=12", "intermediate_size=64",
             "device=cpu", "threads=1", "held_out=0.2", "ttt=2", "rank=4", "feature_layers=[0,1,2]",
             "epochs=0.3"]  # fmt: skip
    out = tmp_path / "run"
    assert main(["train", "onepass", *words, f"data={text}", f"target={target}", f"out={out}", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["draft"] == str(out / "best")
    for said in ("documents", "loss", "agreement", "simulated acceptance"):
        assert said in printed.err


def test_settings():
    (path,) = (Path(__file__).parents[2] / "configs" / "onepass").glob("*.yaml")
    found = read_config(path, ["data=x.jsonl"], OnePassConfig)
    assert found.out.startswith("drafts/") and (found.ttt, found.rank) == (6, 128)
    with pytest.raises(ConfigError, match="rank must be positive"):
        read_config(None, ["rank=0"], OnePassConfig)
    with pytest.raises(ConfigError, match="No setting rank"):
        read_config(path, ["data=x.jsonl"], Eagle3Config)
