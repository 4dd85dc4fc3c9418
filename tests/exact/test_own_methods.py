"""Methods of one's own."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from longdraft import Speculator, compose
from longdraft.cli.main import main
from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.tokenswift import ReuseDrafter
from longdraft.engine.specpv import SpecPV, SpecPVOptions
from longdraft.registry import METHODS
from longdraft.registry import methods as listed
from longdraft.views.view import View
from tests.support.drafts import small_lm
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("restored_registries")
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)]]
EVERYTHING = Path(__file__).parents[2] / "examples" / "everything.py"


def lookups(n: int = 3):
    return CombinedDrafter(SuffixDrafter(), ReuseDrafter(n))


def view() -> View:
    return SpecPVOptions(16, margin=6, sink=4, recent=4, block=4).view()


def test_what_is_composed_decodes_as_the_target_does():
    model = tiny_model(vocab=11, dtype=torch.float64)
    made = compose("mine", lookups)
    assert made.exact and METHODS["mine"] is made
    for name in ("mine", made):
        results = Speculator(name, target=model).generate(PROMPTS, max_new_tokens=24)
        want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
        assert [r.token_ids for r in results] == [r.token_ids for r in want]
        assert sum(r.accepted for r in results) > 0 and {r.method for r in results} == {"mine"}


def test_its_options_are_its_parameters():
    made = compose("mine", lookups, schedule=lambda budget=16: SpecPV(view()))
    assert set(made.options) == {"n", "budget"} and not made.exact
    assert next(m for m in listed() if m["name"] == "mine")["exact"] is False
    with pytest.raises(ValueError, match="option m"):
        Speculator("mine", m=3)
    with pytest.raises(ValueError, match="reuse_n"):
        Speculator("mine", n=1)


def test_one_with_a_draft(tmp_path):
    model = tiny_model(vocab=11, dtype=torch.float64)
    runpy.run_path(str(EVERYTHING))
    spec = Speculator("everything", target=model, draft=small_lm(tmp_path, 11))
    want = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
    assert [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=24)] == [r.token_ids for r in want]
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
