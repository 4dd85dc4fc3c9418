"""The training-time test against drafting, one row at a time; a pack against its documents one by one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from longdraft.drafters.eagle3 import Eagle3Block
from longdraft.drafts import draft_folder
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.model.rotary import Rotary, yarn
from longdraft.model.runner import TargetRunner
from longdraft.speculator import Speculator
from longdraft.training.config import Eagle3Config
from longdraft.training.documents import Document
from longdraft.training.eagle3 import Eagle3Trainee, Plan
from longdraft.training.features import FeatureReader, Features
from longdraft.training.measure import UNSEEN, by_step, simulate
from tests.tiny import tiny_model
from tests.training.helpers import masked_attention

LAYERS, STEPS, DECAY = (0, 1, 2), 4, 0.7
ROPES = {"plain": yarn(1000.0), "yarn": yarn(1000.0, 8.0, 16)}


def random_eagle3(model, vocabulary: int = 61, seed: int = 0, before: bool = False) -> Eagle3Block:
    """A block in which every part matters, with head counts of its own."""
    shape = Eagle3Shape(48, 64, 4, 2, 8, 48 * len(LAYERS), vocabulary, 1e-5, before, True)
    block = Eagle3Block(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in block.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return block


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return TargetRunner(tiny_model(context=512))


@pytest.fixture(scope="module")
def documents(runner) -> list[Features]:
    """Features of texts that are learned from their beginning and of others from further on."""
    reader = FeatureReader(runner, 4, torch.float32, LAYERS)
    g = torch.Generator().manual_seed(0)
    made = [(20, 1, 0), (19, 8, 0), (25, 15, 90), (9, 1, 7), (30, 23, 0), (9, 6, 0)]
    return [reader.read(Document(torch.randint(0, 61, (n,), generator=g).tolist(), s), offset) for n, s, offset in made]


def unrolled(trainee: Eagle3Trainee, document: Features, root: int, depth: int) -> list[torch.Tensor]:
    """Outputs o (1, hidden) of a root row and the ``depth`` rows drafted behind it, as decoding makes them.

    The rows up to the root have the target's features; those behind have the draft's own last output. Tokens are the
    text's. Everything is computed anew for the root, row after row, with a cache of keys that only grows.
    """
    block, window = trainee.block, trainee.window
    keys, values, outputs = [], [], []
    for row in range(root + depth + 1):
        x = trainee._parts.embedding(document.tokens[row + 1][None])
        cos, sin = trainee._rotary(document.positions[row][None])
        g = block.project(document.hidden[row][None]) if row <= root else outputs[-1]

        def attend(q, k, v):
            keys.append(k)
            values.append(v)
            seen = slice(None) if window is None else slice(-window, None)
            every = torch.cat(keys[seen], 1), torch.cat(values[seen], 1)
            return masked_attention(q, *every, torch.ones(1, every[0].shape[1], dtype=torch.bool))

        out = block(x, g, cos, sin, attend)
        if row >= root:
            outputs.append(out)
    return outputs


def plain_loss(trainee: Eagle3Trainee, document: Features, steps: int) -> tuple[torch.Tensor, dict]:
    """The loss as its definition says, and (step, row) -> logits."""
    last = len(document.tokens) - 3  # this row says the last token
    loss, logits = torch.zeros(()), {}
    for root in range(document.start - 1, last + 1):
        for i, o in enumerate(unrolled(trainee, document, root, min(steps - 1, last - root))):
            row = root + i
            z = logits[i, row] = trainee.block.logits(o)[0]
            k = row + 2 - document.start
            ids, p = trainee._to_draft[document.top_ids[k]], document.top_log_probs[k].exp()
            if ids[0] < 0:
                continue
            wanted = torch.zeros_like(z)
            inside = ids >= 0
            wanted[ids[inside]] = trainee.distill * p[inside] / p[inside].sum()
            if (token := trainee._to_draft[document.tokens[row + 2]]) >= 0:
                wanted[token] += 1 - trainee.distill
            loss = loss + trainee.decay**i * F.cross_entropy(z, wanted)
    return loss, logits


def assert_says(trainee, document, loss, logits):
    """Loss, gradients and ranks of a document are those of what was drafted by hand: (step, row) -> logits."""
    block = trainee.block
    out = trainee([document], [1])
    torch.testing.assert_close(out.loss, loss, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(out.loss, list(block.parameters()))
    for one, other in zip(found, torch.autograd.grad(loss, list(block.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    n = 0
    for i in range(trainee.steps):
        for row in range(document.start - 1 + i, len(document.tokens) - 2):
            z, token = logits[i, row], int(trainee._to_draft[document.tokens[row + 2]])
            assert int(out.depths[n]) == i + 1
            assert int(out.ranks[n]) == (len(z) if token < 0 else int((z > z[token]).sum()))
            n += 1
    assert n == len(out.ranks)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("rope", ["plain", "yarn"])
@pytest.mark.parametrize(("kept", "distill", "before"), [(None, 1.0, False), (list(range(0, 61, 2)), 0.6, True)])
def test_the_training_forward_is_drafting(runner, documents, window, rope, kept, distill, before):
    block = random_eagle3(runner.model, 61 if kept is None else len(kept), before=before)
    ids = None if kept is None else torch.tensor(kept)
    trainee = Eagle3Trainee(block, runner.parts, Rotary(8, ROPES[rope]), ids, STEPS, DECAY, window, distill)
    for document in documents[1:5]:
        loss, logits = plain_loss(trainee, document, STEPS)
        assert_says(trainee, document, loss, logits)


def test_a_pack_is_its_documents_one_by_one(runner, documents):
    found = []
    for together in (True, False):
        trainee = Eagle3Trainee(random_eagle3(runner.model), runner.parts, Rotary(8, ROPES["plain"]), None, STEPS)
        groups = [documents] if together else [[d] for d in documents]
        loss = sum(trainee(group, [1] * len(group)).loss for group in groups)
        loss.backward()
        found.append([loss.detach()] + [p.grad for p in trainee.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_only_the_block_is_trained_and_saved(runner):
    trainee = Eagle3Trainee(random_eagle3(runner.model), runner.parts, Rotary(8, ROPES["plain"]))
    assert set(trainee.state_dict()) == {f"block.{name}" for name in trainee.block.state_dict()}


def test_a_document_without_a_row(runner, documents):
    trainee = Eagle3Trainee(random_eagle3(runner.model), runner.parts, Rotary(8, ROPES["plain"]))
    tokens = documents[0].tokens[:5]
    short = Features(tokens, 4, 0, {"hidden": documents[0].hidden[:5]}, torch.zeros(1, 4).long(), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="none to learn from 4 on"):
        trainee([short], [1])


@torch.no_grad()
def test_simulated_acceptance_is_drafting_with_a_chain(runner, documents):
    """Rounds by hand: the draft's own tokens are fed, and the text decides how far they were right."""
    block = random_eagle3(runner.model)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    trainee = Eagle3Trainee(block, runner.parts, Rotary(8, ROPES["plain"]), None, STEPS, DECAY, 8, distill=0.0)
    with torch.enable_grad():
        for _ in range(40):
            trainee(documents, [1] * len(documents)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    levels, tokens, rounds = 5, 0, 0
    for d in documents:
        at, end = d.start, len(d.tokens) - 1  # the token at ``at`` is known
        while at < end:
            accepted = 0
            for i, o in enumerate(unrolled(trainee, d, at - 1, min(levels, end - at) - 1)):
                if int(block.logits(o).argmax()) != int(d.tokens[at + i + 1]):
                    break
                accepted += 1
            emitted = min(accepted + 1, end - at)
            tokens, rounds, at = tokens + emitted, rounds + 1, at + emitted
    found = simulate(trainee.eval(), documents, levels, ranks_of=by_step)
    assert found.chain == pytest.approx(tokens / rounds)
    assert 1.3 < found.chain <= found.tree
    ranks = by_step(trainee, documents[1], levels)
    assert [(r < UNSEEN).sum().item() for r in ranks] == [10, 9, 8, 7, 6]


@pytest.mark.parametrize("window", [None, 9])
def test_a_chain_decoded_by_the_engine(window, tmp_path):
    """Text that the target wrote: what training simulates is what decoding does."""
    model, levels, prompt = tiny_model(context=512), 5, 12
    g = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 61, (3, prompt), generator=g).tolist()
    answers = Speculator("ar", target=model).generate(prompts, max_new_tokens=40)
    runner = TargetRunner(model)
    reader = FeatureReader(runner, 4, torch.float32, LAYERS)
    texts = [reader.read(Document(p + r.token_ids, prompt)) for p, r in zip(prompts, answers, strict=True)]
    block = random_eagle3(model)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    trainee = Eagle3Trainee(block, runner.parts, Rotary(8, ROPES["plain"]), None, levels, DECAY, window, distill=0.0)
    for _ in range(40):
        trainee(texts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # as a folder holds it
        for weight in block.parameters():
            weight.copy_(weight.bfloat16())
    config = Eagle3Config(window=window, max_length=64)
    plan = Plan(block, None, LAYERS, window, yarn(1000.0))
    draft_folder.save(
        tmp_path,
        draft_folder.trained("eagle3", plan.described(config), block.state_dict(), None, runner.parts.description),
    )
    spec = Speculator("eagle3", target=model, draft=tmp_path, widths=(1,) * levels)
    results = [spec.generate(p, max_new_tokens=40)[0] for p in prompts]
    assert [r.token_ids for r in results] == [r.token_ids for r in answers]
    decoded = sum(r.new_tokens - 1 for r in results) / sum(r.rounds for r in results)
    found = simulate(trainee.eval(), texts, levels, ranks_of=by_step)
    assert found.chain == pytest.approx(decoded) and found.chain > 1.5
