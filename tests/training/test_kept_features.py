"""Features that were kept while the target answered: as a reader reads them, and what a draft learns from them."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from longdraft.drafts import draft_folder
from longdraft.errors import CheckpointError, PromptError
from longdraft.model.loading import load
from longdraft.model.runner import TargetRunner
from longdraft.training.answer_file import AnswerFile
from longdraft.training.documents import Document, Skipped, documents, features_of
from longdraft.training.features import FeatureReader
from longdraft.training.generations import generate
from longdraft.training.kept_features import KeptFeatures, KeptSource, passages
from longdraft.training.prompts import asks
from longdraft.training.session import Session
from tests.tiny import tiny_model
from tests.training.helpers import begun, steps

LAYERS = (0, 1, 2)
TEXTS = ["the rain in spain stays mainly in the plain. " * 6, "a fish, an old man and the sea. " * 9]


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """Answers with their features: the target, the file, its documents."""
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    model, tokenizer = load(str(target), dtype="float32", device="cpu", progress=lambda line: None)
    runner = TargetRunner(model)
    kept = KeptFeatures(features_of(out), runner.parts.description, LAYERS)
    generate(
        runner, tokenizer, enumerate(asks(TEXTS, (5, 20), 6, (0.0, 1.0), 0)), AnswerFile(out, "tokens"), batch=12,
        places=2, max_new_tokens=24, total=24, features=kept,
    )  # fmt: skip
    found = list(documents([out], tokenizer, Skipped(), runner.vocab_size))
    return SimpleNamespace(runner=runner, tokenizer=tokenizer, out=out, documents=found)


@pytest.fixture
def copied(made, tmp_path):
    """The same, which a test may damage."""
    shutil.copytree(made.out.parent, tmp_path, dirs_exist_ok=True)
    out = tmp_path / made.out.name
    found = list(documents([out], made.tokenizer, Skipped(), made.runner.vocab_size))
    return SimpleNamespace(**(vars(made) | {"out": out, "documents": found, "folder": features_of(out)}))


def source(made, reader=None, found=None):
    reader = reader or FeatureReader(made.runner, torch.float32)
    return KeptSource(found or made.documents, made.runner.parts.description, reader)


@pytest.mark.parametrize("layers", [(), LAYERS, (2,), None])
def test_they_are_what_a_reader_reads(made, layers):
    reader = FeatureReader(made.runner, torch.float32, layers, last=True)
    found = [*made.documents, *passages(made.documents)]
    found.append(Document(found[0].tokens[:-3], found[0].start, found[0].kept))  # cut at its end
    kept = source(made, reader, found)
    assert len(found) > 24
    for i, document in enumerate(found):
        ours, wanted = kept[i], reader.read(document)
        assert torch.equal(ours.tokens, wanted.tokens) and (ours.start, ours.offset) == (document.start, 0)
        assert ours.rows.keys() == wanted.rows.keys() == set(reader.names)
        for name, rows in wanted.rows.items():
            torch.testing.assert_close(ours.rows[name], rows, rtol=1e-3, atol=1e-4)
        assert ours.likeliest.dtype == torch.int64 and ours.likeliest.shape == wanted.likeliest.shape
        assert (ours.likeliest == wanted.likeliest).float().mean() > 0.99


def test_a_text_whose_beginning_was_cut_off(made):
    """Its labels are those of the target, which saw all of it."""
    whole = next(d for d in made.documents if d.start > 3)
    cut = Document(whole.tokens[3:], whole.start - 3, whole.kept, 3)
    reader = FeatureReader(made.runner, torch.float32, None, last=True)
    of_all, ours = (source(made, reader, [d])[0] for d in (whole, cut))
    assert ours.tokens.tolist() == cut.tokens and ours.start == cut.start and ours.rows.keys() == {"last"}
    assert torch.equal(ours.likeliest, of_all.likeliest) and torch.equal(ours.last, of_all.last[3:])


def test_those_of_an_earlier_version_serve(copied):
    """They have several likely tokens, and their probabilities."""
    wanted = source(copied)[0].likeliest
    for path in copied.folder.glob("passage-*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in list(file.keys())}, file.metadata()
        for part in ("passage", "answers"):
            ids = tensors[f"{part}.ids"][:, None]
            tensors |= {f"{part}.ids": torch.cat([ids, ids + 1], 1), f"{part}.lps": torch.zeros(len(ids), 2)}
        save_file(tensors, path, metadata)
    index = json.loads((copied.folder / "index.json").read_text())
    (copied.folder / "index.json").write_text(json.dumps(index | {"top": 2}))
    assert torch.equal(source(copied)[0].likeliest, wanted)


def test_they_come_in_the_dtype_that_the_draft_reads(made):
    assert source(made, FeatureReader(made.runner, torch.bfloat16))[0].keys.dtype == torch.bfloat16


def test_passages_once_each(made):
    found = passages(made.documents)
    assert 1 < len(found) <= len({d.kept[:2] for d in made.documents})  # one of a single token teaches nothing
    assert len({d.kept for d in found}) == len(found)
    assert all(d.start == 1 and d.kept[2] == -1 for d in found)
    for passage in found:
        answers = [d for d in made.documents if d.kept[:2] == passage.kept[:2]]
        assert all(d.tokens[: len(passage.tokens)] == passage.tokens for d in answers)


def test_another_target_or_lacking_features_are_refused(made, copied):
    other = TargetRunner(tiny_model(seed=5)).parts.description
    with pytest.raises(CheckpointError):
        KeptSource(copied.documents, other, FeatureReader(made.runner))
    with pytest.raises(CheckpointError):
        KeptFeatures(copied.folder, other, LAYERS)
    with pytest.raises(CheckpointError):
        KeptFeatures(copied.folder, made.runner.parts.description, LAYERS[1:])
    index = json.loads((copied.folder / "index.json").read_text())
    (copied.folder / "index.json").write_text(json.dumps(index | {"layers": [0, 2]}))
    with pytest.raises(CheckpointError):
        source(copied, FeatureReader(made.runner, layers=(0, 1)))
    (copied.folder / "index.json").write_text(json.dumps(index | {"layers": [0, 1]}))
    source(copied, FeatureReader(made.runner, layers=(0, 1)))
    with pytest.raises(CheckpointError, match=r"\[0, 1, 2\] are wanted"):  # the last layer's, for the distribution
        source(copied, FeatureReader(made.runner, layers=(0, 1), last=True))


@pytest.mark.parametrize("damage", ["missing", "cut", "other text", "no such answer"])
def test_a_damaged_file(copied, damage):
    document = copied.documents[0]
    path = copied.folder / f"passage-{document.kept[1]:06d}.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "other text":
        document = Document([document.tokens[0] + 1, *document.tokens[1:]], document.start, document.kept)
    else:
        document = Document(document.tokens, document.start, (*document.kept[:2], 99))
    with pytest.raises(CheckpointError, match="passage-0000"):
        source(copied, found=[document])[0]
    if damage in ("missing", "cut"):
        with pytest.raises(CheckpointError):
            passages([document])


@pytest.mark.parametrize("text", ["{", "[]", "{}", None])
def test_a_damaged_index(copied, text):
    index = copied.folder / "index.json"
    index.unlink() if text is None else index.write_text(text)
    with pytest.raises(CheckpointError):
        source(copied)
    if text == "{":
        with pytest.raises(CheckpointError):
            KeptFeatures(copied.folder, {}, LAYERS)


# --- training ---


@pytest.fixture
def answers(config, made):
    """Settings of a run on the answers. Nothing is cut: a text that is cut at its beginning has no features."""

    def make(kind="longspec", **over):
        small = {"max_length": 512 if kind == "lm" else 150, "min_length": 8, "rows": 64, "held_out": 0.3}
        return config(kind, **({"data": made.out, "save_every": 0, "vocabulary": None} | small | over))

    return make


@pytest.mark.parametrize(
    ("kind", "with_passages", "precision"),
    [
        ("longspec", False, "no"), ("longspec", True, "no"), ("longspec", False, "bf16"),
        ("eagle3", False, "no"), ("eagle3", True, "bf16"), ("lm", True, "no"),
    ],
)  # fmt: skip
def test_a_draft_learns_from_them(answers, tmp_path, forwards, kind, with_passages, precision):
    reports = steps(answers(kind, passages=with_passages, precision=precision, distill=0.8))
    assert reports[-1].step == reports[-1].steps > 1 and reports[-1].simulated is not None
    assert draft_folder.load(tmp_path / "run" / "best").kind
    assert [f.rows for f in forwards] == [8]  # of all texts none: it is asked for the scale of its logits


def test_a_step_on_them_is_a_step_on_what_the_target_reads(answers, tmp_path, monkeypatch):
    kept = steps(answers(out=tmp_path / "a"))
    monkeypatch.setattr(Session, "_kept", lambda *a: False)
    live = steps(answers(out=tmp_path / "b"))
    for ours, wanted in zip(kept, live, strict=True):
        assert ours.loss == pytest.approx(wanted.loss, rel=2e-3)
    assert kept[-1].simulated.tree == pytest.approx(live[-1].simulated.tree, rel=0.05)


@pytest.mark.parametrize("over", [{"anchor_offset": 50}, {"target_rope_factor": 2.0}])
def test_where_they_do_not_fit_the_target_reads(answers, forwards, over):
    told = []
    forwards.error = AssertionError("the target was run")
    with pytest.raises(AssertionError):
        next(begun(answers(**over), lambda *now: told.append(now[0])))
    assert any("features kept beside answers are not used" in line for line in told)


def test_passages_of_answers_without_features(answers, copied):
    shutil.rmtree(copied.folder)
    with pytest.raises(PromptError):
        steps(answers(data=copied.out, passages=True))
