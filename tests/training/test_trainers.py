"""Training steps of all kinds: the loss against drafting token by token, packing, and simulated acceptance."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

from longdraft import Speculator
from longdraft.drafts import draft_folder, small_llama
from longdraft.model.rope import make_rope_parameters
from longdraft.model.runner import TargetRunner
from longdraft.training.config import EVAL_DEPTH, LmConfig
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader, Features
from longdraft.training.lm import LmTrainer
from longdraft.training.simulated_acceptance import simulate
from tests.support.slow_marks import rotate_pairs
from tests.support.tiny import FAMILIES, tiny_model
from tests.training.helpers import same
from tests.training.trainers import KINDS, READS, make_trainer, predictions

KEPT = torch.arange(0, 61, 2)
SHIFTS = [2, 1, 3, 5, 4, 1]


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return TargetRunner(tiny_model(context=512))


@pytest.fixture(scope="module")
def features(runner):
    """Features of texts with an early and with a late start, as a kind reads them."""

    def read(kind: str) -> list[Features]:
        reader = FeatureReader(runner, torch.float32, READS[kind], with_last=True)
        g = torch.Generator().manual_seed(0)
        made = [(20, 1, 0), (19, 8, 0), (25, 15, 90), (9, 1, 7), (30, 23, 0), (9, 6, 0)]
        texts = [(Document(torch.randint(0, 61, (n,), generator=g).tolist(), s), offset) for n, s, offset in made]
        return [reader.read(document, 0 if kind == "lm" else offset) for document, offset in texts]

    return read


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        *((kind, {}) for kind in KINDS),
        *((kind, {"kept": KEPT, "distill": 0.6}) for kind in ("longspec", "tokenswift", "lm")),
        ("eagle3", {"window": 6, "distill": 1.0}),
        ("eagle3", {"norm_output": True, "distill": 0.6}),
        ("eagle3", {"kept": KEPT, "distill": 0.6, "before": True, "rope": make_rope_parameters(1000.0, 8.0, 16)}),
        ("eagle3", {"kept": KEPT, "window": 6, "distill": 0.6, "rope": make_rope_parameters(1000.0, 8.0, 16)}),
    ],
)
def test_a_step_learns_what_drafting_predicts(runner, features, kind, over):
    """Loss, gradients, ranks and depths are those of the draft as it decodes, one row at a time."""
    trainer = make_trainer(kind, runner, **over)
    for document, shift in list(zip(features(kind), SHIFTS, strict=True))[1:5]:
        loss, ranks, depths = torch.zeros(()), [], []
        with torch.no_grad():
            said = runner.model(document.token_ids[None], position_ids=document.positions[None]).logits[0]
        for depth, at, logits in predictions(kind, trainer, document, shift):
            token = int(trainer.target_to_draft[document.token_ids[at]])
            wanted = trainer.distill * said[at - 1, over.get("kept", slice(None))].softmax(-1)
            if token >= 0:
                wanted[token] += 1 - trainer.distill
            weight = getattr(trainer, "decay", 1.0) ** (depth - 1)
            if kind == "eagle3" and trainer.target_to_draft[said[at - 1].argmax()] < 0:
                weight = 0.0
            loss = loss - weight * (wanted * logits.log_softmax(-1)).sum()
            ranks.append(len(logits) if token < 0 else int((logits > logits[token]).sum()))
            depths.append(depth)
        out = trainer([document], [shift])
        torch.testing.assert_close(out.loss, loss, rtol=1e-4, atol=1e-3)
        assert out.ranks.tolist() == ranks and out.depths.tolist() == depths
        if kind != "lm":  # transformers computes its reference without gradients
            weights = list(trainer.parameters())
            found, expected = (torch.autograd.grad(x, weights, allow_unused=True) for x in (out.loss, loss))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_speaker_says_is_not_learned(runner, features, kind):
    """With two complementary loss masks, the losses add up to the loss without a mask, and so do the counts."""
    trainer = make_trainer(kind, runner)
    documents, halves = features(kind), ([], [])
    for document in documents:
        said = [i >= document.start and i % 3 > 0 for i in range(len(document.token_ids))]
        halves[0].append(replace(document, document_mask=said))
        halves[1].append(replace(document, document_mask=[not is_learned for is_learned in said]))
    whole, *parts = (trainer(batch, SHIFTS) for batch in (documents, *halves))
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, rtol=1e-4, atol=1e-3)
    assert torch.equal(parts[0].loss_mask, ~parts[1].loss_mask) and whole.loss_mask.all()
    assert 0 < parts[0].loss_mask.sum() < len(whole.loss_mask)
    trainer.eval()
    measured = [simulate(trainer, batch, level_mode=trainer.level_mode) for batch in (documents, *halves)]
    assert measured[0] != measured[1] != measured[2]


def test_a_cached_text_moves_with_its_offset():
    """Keys of a model of one layer depend on their own position alone, so rotated keys equal computed ones."""
    runner = TargetRunner(tiny_model(context=512, layers=1))
    document = Document([(5 * i) % 61 for i in range(40)], 3)
    with tempfile.TemporaryDirectory() as folder:
        cached = FeatureReader(runner, torch.float32, (), cache=Path(folder))
        for offset in (0, 90, 7, 300):
            found, wanted = (
                cached.read(document, offset),
                FeatureReader(runner, torch.float32).read(document, offset),
            )
            assert found.offset == offset and torch.equal(found.positions, wanted.positions)
            torch.testing.assert_close(found.keys, wanted.keys, rtol=1e-4, atol=1e-4)
            assert torch.equal(found.values, wanted.values)
        assert len(list(Path(folder).rglob("*.safetensors"))) == 1


def scaled(kind: str):
    """A model whose logits are the head's product up to a factor or a softcap."""
    if kind in FAMILIES:
        return tiny_model(kind)
    if kind == "gemma2":
        return tiny_model(kind, final_logit_softcapping=1.5)
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": None, "eos_token_id": None}
    config = {
        "granite": lambda: GraniteConfig(**sizes, **heads, bos_token_id=None, logits_scaling=0.05),
        "cohere": lambda: CohereConfig(**sizes, **heads, bos_token_id=None, logit_scale=30.0),
    }[kind]()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "kept"), zip([*FAMILIES, "gemma2", "granite", "cohere"], cycle([None, KEPT]), strict=False)
)
def test_the_targets_distribution_is_its_own_heads(kind, kept):
    runner = TargetRunner(scaled(kind))
    trainer = LmTrainer(nn.Identity(), runner.shared_parts, kept, LmConfig(distill=1.0, precision="no"))
    trainer.measure_logit_scale(runner)
    assert (trainer.logit_scale == 1.0) == (kind not in ("granite", "cohere"))
    document = FeatureReader(runner, torch.float32, None, with_last=True).read(Document([*range(40, 7, -1)], 5))
    labels = trainer.make_labels(trainer.pack([document]))
    size = len(labels.token_ids), len(trainer.target_head)
    found = labels.target_distribution.write_probabilities(slice(None), torch.empty(size), torch.empty(size))
    with torch.no_grad():
        logits = runner.model(document.token_ids[None]).logits[0, 4:-1]
    wanted = (logits if kept is None else logits[:, kept]).softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)
    assert wanted.max() > 3 * wanted.median()  # not flat, so that a factor shows


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_is_its_documents_one_by_one(runner, features, kind):
    found, documents = [], features(kind)
    for groups in ([(documents, SHIFTS)], [([d], [j]) for d, j in zip(documents, SHIFTS, strict=True)]):
        trainer = make_trainer(kind, runner, KEPT, 0.6, window=7)
        loss = sum(trainer(*group).loss for group in groups)
        loss.backward()
        found.append([loss.detach()] + [p.grad for p in trainer.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tokenswift"])
def test_layers_computed_again_keep_less_and_learn_the_same(runner, features, kind):
    found, kept = [], []
    for recompute in (False, True):
        trainer = make_trainer(kind, runner)
        trainer.recompute = recompute
        saved: dict[int, int] = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = trainer(features(kind)[:4], SHIFTS[:4])
        kept.append(sum(saved.values()))
        out.loss.backward()
        found.append({"loss": out.loss.detach()} | {n: p.grad for n, p in trainer.named_parameters()})
    assert same(*found)
    assert kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize(("kind", "window"), rotate_pairs(["longspec", "eagle3"], [9, None]))
def test_simulated_acceptance_is_a_chain_decoded_by_the_engine(kind, window, tmp_path):
    """On text that the target wrote, with a draft that was trained until it is sometimes right."""
    model, levels, prompt = tiny_model(context=512), EVAL_DEPTH, 12
    g = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 61, (3, prompt), generator=g).tolist()
    answers = Speculator("ar", target=model).generate(prompts, max_new_tokens=40)
    runner = TargetRunner(model)
    reader = FeatureReader(runner, torch.float32, READS[kind])
    texts = [reader.read(Document(p + r.token_ids, prompt)) for p, r in zip(prompts, answers, strict=True)]
    trainer = make_trainer(kind, runner, window=window)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for step in range(60):
        trainer(texts, [1 + (step + i) % levels for i in range(3)]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # as a folder holds them
        for weight in trainer.parameters():
            weight.copy_(weight.bfloat16())
    described = asdict(trainer.block.shape)
    if kind != "longspec":
        described |= {"feature_layers": list(READS[kind]), "window": window, "rope_theta": 1000.0, "trained_length": 64}
    weights = trainer.block.state_dict()
    draft_folder.save(
        tmp_path, draft_folder.from_training(kind, described, weights, None, runner.shared_parts.description)
    )
    spec = Speculator(kind, target=model, draft=tmp_path, widths=(1,) * levels)
    results = [spec.generate(p, max_new_tokens=40)[0] for p in prompts]
    assert [r.token_ids for r in results] == [r.token_ids for r in answers]
    decoded = sum(r.new_tokens - 1 for r in results) / sum(r.rounds for r in results)
    found = simulate(trainer.eval(), texts, levels, "shift" if kind == "longspec" else "step")
    assert found.chain == pytest.approx(decoded) and found.tree >= found.chain > 1.5


# --- new drafts ---


def decoder(runner, layers: int, intermediate_size: int | None = None, theta: float = 1e4):
    return small_llama.build_decoder(small_llama.small_llama_config(runner, layers, intermediate_size, theta, 512))


def test_starting_from_the_targets_own_layers(runner, features):
    """A draft with all of the target's layers and its rotary base is the target."""
    copy = decoder(runner, 3, theta=runner.model.config.rope_parameters["rope_theta"])
    small_llama.copy_target_layers(copy, runner, (0, 1, 2))
    text = features("lm")[0]
    with torch.no_grad():
        logits = runner.model(text.token_ids[None]).logits[0, :-1]
    truth = text.token_ids[1:]
    ranks = LmTrainer(copy, runner.shared_parts)([text]).ranks
    assert torch.equal(ranks, (logits > logits.gather(1, truth[:, None])).sum(-1))
    small_llama.copy_target_layers(copy, runner, (2, 2, 0))
    assert torch.equal(copy.layers[0].mlp.up_proj.weight, runner.model.model.layers[2].mlp.up_proj.weight)
