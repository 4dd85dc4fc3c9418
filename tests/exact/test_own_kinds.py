"""A kind of trained draft that the package has never heard of: the one in ``examples/recurrent_drafter.py``."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from longdraft import Speculator, compose, load, register
from longdraft.cli.main import main
from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafts.kinds import Kind
from longdraft.errors import CheckpointError
from longdraft.registry import KINDS, METHODS
from longdraft.registry import methods as listed
from longdraft.training.config import RunConfig
from tests.support.drafts import random_heads
from tests.support.tiny import tiny_folder, tiny_model

pytestmark = pytest.mark.usefixtures("restored_registries")
EXAMPLE = Path(__file__).parents[2] / "examples" / "recurrent_drafter.py"
PROMPTS = [[7, 8, 9] * 6, [11, 5]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model's folder, texts, and a run of some steps, with what the example defines."""
    folder = tmp_path_factory.mktemp("recurrent")
    tiny_folder(folder / "target", context=512)
    rng = random.Random(0)
    rows = [{"text": " ".join(rng.choices(["rain", "in", "spain", "the", "plain"], k=30))} for _ in range(30)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for state, arguments in ((AcceleratorState, {"reset_partial_state": True}), (GradientState, {})):
        state._reset_state(**arguments)
    example = runpy.run_path(str(EXAMPLE))
    del METHODS["recurrent"], KINDS["recurrent"]  # every test says anew what it knows
    settings = {
        "data": (str(folder / "text.jsonl"),), "target": str(folder / "target"), "out": str(folder / "run"),
        "rows": 256, "max_length": 64, "min_length": 16, "epochs": 3.0, "lr": 2e-2, "precision": "no", "held_out": 0.1,
        "vocabulary": 40, "device": "cpu", "threads": 1,
    }  # fmt: skip
    reports = list(example["train"](RunConfig(**settings)))
    return folder, example, reports


def test_trained_saved_loaded_and_decoded_with(place, tmp_path):
    folder, example, reports = place
    assert reports[-1].loss < 0.8 * reports[0].loss and set(reports[-1].agreement) == {1, 2, 3, 4}
    assert reports[-1].simulated.chain > 1.2
    runpy.run_path(str(EXAMPLE))
    draft = example["RecurrentDraft"].load(folder / "run" / "best")
    assert (draft.kind, draft.vocabulary, draft.trained_length) == ("recurrent", 40, 64)
    draft.save(tmp_path / "copy")
    again = example["RecurrentDraft"].load(tmp_path / "copy")
    assert all(torch.equal(draft.weights[name], again.weights[name]) for name in draft.weights | again.weights)

    model = load(str(folder / "target")).model
    want = [r.token_ids for r in Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=40)]
    for spec in (
        Speculator(tmp_path / "copy", target=model),
        Speculator("recurrent", target=model, draft=draft, depth=2),
        Speculator("recurrent", target=model, draft=tmp_path / "copy", lookup=True, plan="auto"),
    ):
        found = spec.generate(PROMPTS, max_new_tokens=40)
        assert [r.token_ids for r in found] == want
    assert Speculator(tmp_path / "copy", target=model).method.name == "recurrent"
    assert sum(r.drafted for r in Speculator(tmp_path / "copy", target=model).generate(PROMPTS, max_new_tokens=20)) > 0


def test_composed_with_lookups(place):
    folder, example, _ = place
    runpy.run_path(str(EXAMPLE))
    compose(
        "both", lambda draft: CombinedDrafter(SuffixDrafter(), example["RecurrentDrafter"](draft)), draft="recurrent"
    )
    model = load(str(folder / "target")).model
    found = Speculator("both", target=model, draft=folder / "run" / "last").generate(PROMPTS, max_new_tokens=30)
    want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=30)
    assert [r.token_ids for r in found] == [r.token_ids for r in want]


def test_what_is_refused(place, tmp_path):
    folder, example, _ = place
    best = folder / "run" / "best"
    with pytest.raises(CheckpointError):
        Speculator(best)
    runpy.run_path(str(EXAMPLE))
    for over in ({"hidden": 96}, {"vocab": 70}, {"layers": 2}):
        with pytest.raises(CheckpointError):
            Speculator(best, target=tiny_model(**over))
    with pytest.raises(CheckpointError):
        Speculator("recurrent", draft=random_heads(tmp_path / "heads", tiny_model()))
    broken = tmp_path / "broken"
    draft = example["RecurrentDraft"].load(best)
    for change in ({"hidden_size": None}, {"hidden_size": 40}):
        draft.save(broken)
        config = json.loads((broken / "config.json").read_text()) | change
        (broken / "config.json").write_text(json.dumps({k: x for k, x in config.items() if x is not None}))
        with pytest.raises(CheckpointError):
            Speculator(broken)
    draft.save(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        Speculator(broken)


def test_what_cannot_be_registered():
    with pytest.raises(ValueError, match="longspec"):
        register(Kind("longspec", lambda draft: SuffixDrafter(), "mine", load=str))
    with pytest.raises(ValueError, match="draft"):
        register(Kind("mine", SuffixDrafter, "mine", load=str))


def test_on_the_command_line(place, capsys):
    folder, _, _ = place
    loading = ["--load", str(EXAMPLE)]
    assert main(["methods", *loading]) == 0
    assert "recurrent" in capsys.readouterr().out
    assert next(m for m in listed() if m["name"] == "recurrent")["available"] is False
    assert main(["train", *loading, "--help"]) == 0 and "Train a recurrent drafter" in capsys.readouterr().out
    assert main(["train", *loading, "recurrent", "depth=3"]) == 2 and "No setting depth" in capsys.readouterr().err
    arguments = ["--model", str(folder / "target"), "--draft", str(folder / "run" / "best"), "--json"]
    assert main(["doctor", *loading, *arguments]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["drafts"][-1]
    assert (found["method"], found["fits"], found["vocabulary"]) == ("recurrent", True, 40)
    assert main(["generate", *loading, *arguments, "-p", "hello", "-n", "8"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["method"] == "recurrent"
