"""The closed form for the number of drafted tokens, and the command that holds it against decoding."""

from __future__ import annotations

import json

import pytest
import torch

from longdraft import LoadedModel
from longdraft.bench.contenders import Run
from longdraft.bench.data import Sample
from longdraft.bench.gamma import Gamma, alpha_of, medians, omega
from longdraft.bench.prompts import Prompt
from longdraft.bench.settings import Settings
from longdraft.cli.main import main
from longdraft.planning.costs import CostTable
from tests.planned import use_costs
from tests.tiny import tiny_model, tiny_tokenizer

COSTS = CostTable((0,), (1, 64), ((1e-3, 3e-3),))


def test_omega_counts_the_bonus():
    assert omega(1, 0.0) == 1.0 and omega(3, 1.0) == 4.0
    assert omega(2, 0.5) == pytest.approx(1 + 0.5 + 0.25)


def test_alpha_is_of_those_whose_predecessors_were_right():
    # Chains of 3, of which 3, 1 and 0 tokens were right; and one that had room for a single token, which was right.
    run = Run(((1,),), 0.0, 1.0, (4,), accepted=((3, 9), (1, 9), (0, 9), (1, 1)))
    assert alpha_of(run, 3) == pytest.approx(5 / 7)
    assert alpha_of(Run(((1,),), 0.0, 1.0, (0,)), 3) == 0.0


def test_a_target_that_sees_all_of_its_kv_is_always_right(monkeypatch):
    use_costs(monkeypatch, COSTS)
    loaded = LoadedModel(tiny_model(context=256, dtype=torch.float64), tiny_tokenizer())
    sample = Sample("", "", "x", "x:1")
    prompt = Prompt(sample, tuple((7 * i * i) % 11 for i in range(80)))
    names = ("self:view=streaming:budget=200",)
    own = {names[0]: {"view": "streaming", "budget": 200}}
    measuring = Gamma(loaded, Settings(names, 40, cold=False, own_options=own), (1, 2, 4), 4)
    seen: list[str] = []
    (found,) = measuring.measure(prompt, seen.append)
    assert seen == measuring.names
    assert found.alpha == 1.0 and [c.gamma for c in found.chains] == [1, 2, 4]
    assert [c.accepted for c in found.chains] == pytest.approx([2, 3, 5], rel=0.1)
    # Drafting takes no time on this clock: the more the better, by the closed form and by decoding.
    assert found.draft == pytest.approx(0.0, abs=0.05)
    assert found.best(lambda c: c.predicted) == found.best(lambda c: c.speedup) == 4
    for chain in found.chains:
        assert chain.predicted == pytest.approx(chain.speedup, rel=0.15)
    assert [row[:2] for row in medians([found])] == [(names[0], 1), (names[0], 2), (names[0], 4)]
    with pytest.raises(ValueError, match="with the reference 3 among them"):
        Gamma(loaded, Settings(names, 40, cold=False, own_options=own), (1, 2), 3)


def test_bench_gamma(tmp_path, capsys, monkeypatch):
    use_costs(monkeypatch, COSTS)
    tiny_model(context=512).save_pretrained(tmp_path)
    tiny_tokenizer(chat=True).save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the cat sat on the mat. " * 8}) + "\n")
    words = ["bench", "gamma", "--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), "-n", "8", "--json"]
    assert main([*words, "--methods", "self:view=streaming:budget=60", "--gammas", "1,2", "--reference", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [chain["gamma"] for chain in found["rows"][0]["chains"]] == [1, 2]
    assert main([*words, "--gammas", "0,4"]) == 2
    assert "gammas must be 1 at least" in capsys.readouterr().err
