"""MTP drafts around the target's own last layer: against their definition, in training and in drafting."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from longdraft import Speculator, load
from longdraft.drafters.mtp import TrainedMtp
from longdraft.model.runner import TargetRunner
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader
from longdraft.training.mtp import BorrowingBlock, MtpTrainee
from tests.drafters.watching import run
from tests.training.helpers import steps
from tests.training.trainees import filled

PROMPT = [5, 9, 11, 5, 9, 7, 3, 8]


@torch.no_grad()
def defined(model, block, text, path, left_out=()):
    """Outputs of the block (1 + len(path), hidden) for a text's last token and a path behind it.

    The target's last layer runs over its own inputs, and behind them over what the projection makes of the tokens.

    Args:
        left_out: positions of the text that the layer does not see.
    """
    out = model.model(torch.tensor([text[:-1]]), output_hidden_states=True)
    f, inputs, layer = out.last_hidden_state[0, -1:], out.hidden_states[-2][0], model.model.layers[-1]
    seen = [i for i in range(len(inputs)) if i not in left_out]
    rows, outputs = inputs[seen], []
    for i, token in enumerate([text[-1], *path]):
        x = model.get_input_embeddings()(torch.tensor([token]))
        rows = torch.cat([rows, block.eh_proj(torch.cat([block.enorm(x), block.hnorm(f)], -1))])
        places = torch.tensor([[*seen, *range(len(inputs), len(inputs) + i + 1)]])
        mask = torch.full((len(rows), len(rows)), float("-inf")).triu(1)[None, None]
        cos_sin = model.model.rotary_emb(rows[None], places)
        o = layer(rows[None], attention_mask=mask, position_embeddings=cos_sin)
        f = block.norm((o[0] if isinstance(o, tuple) else o).view(rows.shape)[-1:])
        outputs.append(f)
    return torch.cat(outputs)


@pytest.fixture
def plain(target):
    """The tiny target, with eager attention."""
    model, _ = load(target, weights="float32")
    model.set_attn_implementation("eager")
    return model


def test_a_step_is_the_definition(target, plain):
    runner = TargetRunner(load(target).model)
    block = filled(BorrowingBlock(runner, torch.float32))
    kept = torch.arange(0, 61, 2)
    trainee = MtpTrainee(block, runner.parts, kept, 3, 0.8, 1.0, torch.float32)
    documents = [Document([*PROMPT, *range(20, 29)], 4), Document([*PROMPT[3:], *range(30, 37)], 1)]
    reader = FeatureReader(runner, torch.float32, (runner.depth - 2, runner.depth - 1), keys=True)
    features = [reader.read(document) for document in documents]
    out = trainee(features)
    expected = []
    for step in range(3):
        for document in documents:
            tokens = document.tokens
            for row in range(max(0, document.start - 2) + step, len(tokens) - 2):
                if row - step >= 0 and row >= document.start - 1 + step:
                    path = tokens[row - step + 2 : row + 2]
                    hidden = defined(plain, block, tokens[: row - step + 2], path)[-1]
                    logits = trainee.target_head @ hidden
                    wanted = trainee.to_draft[tokens[row + 2]]
                    expected.append(int((logits > logits[wanted]).sum()) if wanted >= 0 else len(kept))
    assert out.ranks.tolist() == expected
    out.loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in block.parameters())


def test_the_fitted_projection_is_least_squares(target):
    runner = TargetRunner(load(target).model)
    block = BorrowingBlock(runner, torch.float32)
    tokens = torch.randint(0, 61, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    reader = FeatureReader(runner, torch.float32, (runner.depth - 2, runner.depth - 1), keys=True)
    document = reader.read(Document(tokens))
    trainee = MtpTrainee(block, runner.parts, None, 3, 0.8, 1.0, torch.float32)

    @torch.no_grad()
    def error() -> float:
        before, last = document.hidden.chunk(2, -1)
        found = block.joined(trainee.embed(document.tokens[1:]), block.project(last[:-1]))[0]
        wanted = before[1:]
        return float(((found - wanted).square().sum(-1) / wanted.square().sum(-1))[1:].mean())

    assert error() == pytest.approx(1)  # it begins as zeros
    block.fit([document], trainee.embed, 1000)
    assert error() < 0.7


def test_a_run_and_its_draft(config, target, plain, tmp_path):
    losses = [report.loss for report in steps(config("mtp", epochs=1.5))]
    assert sum(losses[-8:]) < sum(losses[:8])
    folder = tmp_path / "run" / "last"
    # Nothing of the target's is saved.
    assert set(load_file(folder / "model.safetensors")) == {
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight", "d2t",
    }  # fmt: skip
    model, _ = load(target)
    spec = Speculator("mtp", target=model, draft=folder, plan="fixed", depth=3, top_k=2, nodes=6, tree="dynamic")
    watching, (sequence,) = run(spec, [PROMPT])
    assert sequence.output == plain_output(model, len(sequence.output))
    draft = TrainedMtp.load(folder)
    block = draft.bound(TargetRunner(model)).block
    for text, tree in watching.rounds:
        for node in range(1, tree.size):
            path = [tree.tokens[i] for i in tree.path(tree.parents[node])][1:]
            hidden = defined(plain, block, text, path, left_out=(1,))[-1]
            log_probs = torch.log_softmax(block.logits(hidden[None])[0], -1)
            found = log_probs[draft.ids.tolist().index(tree.tokens[node])]
            assert tree.log_probs[node] == pytest.approx(float(found), abs=2e-3)


def plain_output(model, count):
    (found,) = Speculator("ar", target=model).generate([PROMPT], max_new_tokens=count)
    return found.token_ids


def test_four_bits(config, target, tmp_path):
    steps(config("mtp", epochs=0.2))
    draft = TrainedMtp.load(tmp_path / "run" / "last")
    draft.save(tmp_path / "small", bits=4)
    small = TrainedMtp.load(tmp_path / "small")
    assert torch.equal(small.ids, draft.ids) and small.parameters == draft.parameters
    model, _ = load(target)
    (found,) = Speculator("mtp", target=model, draft=tmp_path / "small").generate([PROMPT], max_new_tokens=8)
    assert len(found.token_ids) == 8
