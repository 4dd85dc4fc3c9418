"""Methods and kinds of trained drafts of one's own; the kind is the one in ``examples/recurrent_drafter.py``."""

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
from longdraft.drafters.tokenswift import ReuseDrafter
from longdraft.drafts.kinds import Kind
from longdraft.engine.specpv import SpecPV, SpecPVOptions
from longdraft.errors import CheckpointError
from longdraft.registry import KINDS, METHODS
from longdraft.registry import methods as listed
from longdraft.training.config import RunConfig
from tests.support.drafts import edit, random_heads, small_lm
from tests.support.tiny import tiny_folder, tiny_model

pytestmark = pytest.mark.usefixtures("restored_registries")
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)]]
EXAMPLES = Path(__file__).parents[2] / "examples"
EVERYTHING, RECURRENT = EXAMPLES / "everything.py", EXAMPLES / "recurrent_drafter.py"


def decodes_as_the_target_does(spec, model):
    results = spec.generate(PROMPTS, max_new_tokens=24)
    plain = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert sum(r.drafted for r in results) > sum(r.accepted for r in results)
    return results


# --- methods ---


def lookups(n: int = 3):
    return CombinedDrafter(SuffixDrafter(), ReuseDrafter(n))


def test_what_is_composed_is_a_method_with_its_parameters_as_options():
    model = tiny_model(vocab=11)
    made = compose("mine", lookups)
    assert made.exact and METHODS["mine"] is made
    for name in ("mine", made):
        results = decodes_as_the_target_does(Speculator(name, target=model), model)
        assert sum(r.accepted for r in results) > 0 and {r.method for r in results} == {"mine"}
    view = SpecPVOptions(16, margin=6, sink=4, recent=4, block=4).view()
    made = compose("mine", lookups, schedule=lambda budget=16: SpecPV(view))
    assert set(made.options) == {"n", "budget"} and not made.exact
    assert next(m for m in listed() if m["name"] == "mine")["exact"] is False
    with pytest.raises(ValueError, match="option m"):
        Speculator("mine", m=3)
    with pytest.raises(ValueError, match="reuse_n"):
        Speculator("mine", n=1)


def test_one_with_a_draft(tmp_path):
    model = tiny_model(vocab=11)
    runpy.run_path(str(EVERYTHING))
    decodes_as_the_target_does(Speculator("everything", target=model, draft=small_lm(tmp_path, 11)), model)
    with pytest.raises(RuntimeError, match="everything"):
        Speculator("everything", target=model)


def test_from_the_command_line(tmp_path, capsys):
    assert main(["methods", "--load", str(EVERYTHING)]) == 0
    assert "everything" in capsys.readouterr().out
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n", encoding="utf-8")
    for path, said in ((tmp_path / "none.py", "No such file"), (broken, "ZeroDivisionError")):
        assert main(["methods", "--load", str(path)]) != 0
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err


# --- a kind of draft ---


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
    example = runpy.run_path(str(RECURRENT))
    del METHODS["recurrent"], KINDS["recurrent"]  # every test says anew what it knows
    settings = {
        "data": (str(folder / "text.jsonl"),), "target": str(folder / "target"), "out": str(folder / "run"),
        "rows": 256, "max_length": 64, "min_length": 16, "epochs": 3.0, "lr": 2e-2, "precision": "no", "held_out": 0.1,
        "vocabulary": 40, "device": "cpu", "threads": 1,
    }  # fmt: skip
    return folder, example, list(example["train"](RunConfig(**settings)))


def test_a_kind_is_trained_saved_loaded_composed_and_decoded_with(place, tmp_path):
    folder, example, reports = place
    assert reports[-1].loss < 0.8 * reports[0].loss and set(reports[-1].agreement) == {1, 2, 3, 4}
    assert reports[-1].simulated.chain > 1.2
    runpy.run_path(str(RECURRENT))
    draft = example["RecurrentDraft"].load(folder / "run" / "best")
    assert (draft.kind, draft.vocabulary, draft.trained_length) == ("recurrent", 40, 64)
    draft.save(tmp_path / "copy")
    again = example["RecurrentDraft"].load(tmp_path / "copy")
    assert all(torch.equal(draft.weights[name], again.weights[name]) for name in draft.weights | again.weights)

    model = load(str(folder / "target")).model
    compose(
        "both", lambda draft: CombinedDrafter(SuffixDrafter(), example["RecurrentDrafter"](draft)), draft="recurrent"
    )
    for spec in (
        Speculator(tmp_path / "copy", target=model),
        Speculator("recurrent", target=model, draft=draft, depth=2),
        Speculator("recurrent", target=model, draft=tmp_path / "copy", lookup=True),
        Speculator("both", target=model, draft=folder / "run" / "last"),
    ):
        decodes_as_the_target_does(spec, model)
    assert Speculator(tmp_path / "copy", target=model).method.name == "recurrent"


def test_what_is_refused_of_a_kind(place, tmp_path):
    folder, example, _ = place
    best, broken = folder / "run" / "best", tmp_path / "broken"

    def refused(*method, **options):
        with pytest.raises(CheckpointError):
            Speculator(*method, **options)

    refused(best)
    runpy.run_path(str(RECURRENT))
    for over in ({"hidden": 96}, {"vocab": 70}, {"layers": 2}):
        refused(best, target=tiny_model(**over))
    refused("recurrent", draft=random_heads(tmp_path / "heads", tiny_model()))
    draft = example["RecurrentDraft"].load(best)
    for size in ("drop", 40):
        draft.save(broken)
        refused(edit(broken, hidden_size=size))
    draft.save(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(broken)
    with pytest.raises(ValueError, match="longspec"):
        register(Kind("longspec", lambda draft: SuffixDrafter(), "mine", load=str))
    with pytest.raises(ValueError, match="draft"):
        register(Kind("mine", SuffixDrafter, "mine", load=str))


def test_a_kind_on_the_command_line(place, capsys):
    folder, _, _ = place
    loading = ["--load", str(RECURRENT)]
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
