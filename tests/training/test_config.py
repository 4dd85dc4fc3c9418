"""Settings: files, overrides, and everything that is wrong with them in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from longdraft.errors import ConfigError
from longdraft.training.config import Eagle3Config, LmConfig, TrainConfig
from longdraft.training.settings import read_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "longspec").glob("*.yaml"))
EAGLE3_CONFIGS = sorted((ROOT / "configs" / "eagle3").glob("**/*.yaml"))
LM_CONFIGS = sorted((ROOT / "configs" / "lm").glob("**/*.yaml"))


def test_words_override_the_file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("lr: 1e-3\ndata: [a.jsonl, b.jsonl]\nprecision: no\nthreads: 2\n")
    found = read_config(path, ["rows=100", "data=c.jsonl", "cache=x:y", "threads="], TrainConfig)
    assert (found.lr, found.rows, found.data, found.cache) == (1e-3, 100, ("c.jsonl",), "x:y")
    assert (found.precision, found.threads) == ("no", None)
    assert read_config(None, ["precision=bf16", "betas=[0.8,0.9]"], TrainConfig).betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rows", "not of the form key=value"),
        ("quick=3", r"No setting quick\. Settings: accumulate, anchor_offset"),
        ("speed=3", r"Did you mean seed\? Settings: accumulate, anchor_offset"),
        ("rows=many", "rows takes a whole number, got 'many'"),
        ("rows=1.5", "rows takes a whole number"),
        ("rows=true", "rows takes a whole number"),
        ("rows=.inf", "rows takes a whole number"),
        ("rows=0", "rows must be positive"),
        ("rows=", "rows needs a value"),
        ("lr=.nan", "lr takes a number"),
        ("tensorboard=1", "tensorboard takes true or false"),
        ("sample=2", "sample is a share between 0 and 1"),
        ("anchor_offset=-1", "anchor_offset must not be negative"),
        ("precision=fp8", "precision is bf16 or no"),
        ("betas=[0.9]", "betas are two numbers"),
        ("data={a: b}", "data takes a list of values"),
    ],
)
def test_what_is_wrong_is_said(word, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_config(None, [word], TrainConfig)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "said"), [("rows: [", "as YAML"), ("- a", "no settings"), (None, "no configuration")])
def test_files_that_are_no_settings(tmp_path, text, said):
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(path, (), TrainConfig)


def test_the_three_stages_follow_each_other():
    stages = [read_config(path, ["data=text.jsonl"], TrainConfig) for path in CONFIGS]
    assert [path.stem for path in CONFIGS] == ["1-short", "2-long", "3-answers"]
    assert [s.init for s in stages] == [None, f"{stages[0].out}/best", f"{stages[1].out}/best"]
    assert (stages[0].max_length, stages[0].lr) == (1024, 5e-4) and stages[0].anchor_offset
    assert not stages[1].anchor_offset and not stages[2].anchor_offset
    assert all(s.target is None for s in stages)  # the embedded model


@pytest.mark.parametrize("path", EAGLE3_CONFIGS, ids=lambda p: p.stem)
def test_eagle3_configurations_are_complete(path):
    found = read_config(path, ["data=x.jsonl"], Eagle3Config)
    assert found.out.startswith("drafts/") and found.decay == 0.8
    with pytest.raises(ConfigError, match="No setting"):
        read_config(path, (), TrainConfig)  # LongSpec has no training-time test


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("noise=3", r"No setting noise\. Settings: .*ttt"),
        ("ttt=0", "ttt must be positive"),
        ("decay=0", "decay is a share above 0"),
        ("rope_factor=0.5", "rope_factor stretches, so it is at least 1"),
        ("rope_factor_inference=8", "goes with rope_factor"),
        ("window=5", "window 5 leaves nothing"),
        ("feature_layers=a", "feature_layers takes a list of values"),
    ],
)
def test_what_is_wrong_with_eagle3_settings(word, said):
    with pytest.raises(ConfigError, match=said):
        read_config(None, [word], Eagle3Config)


def test_eagle3_settings():
    found = read_config(None, ["feature_layers=[1, 5]", "window=", "ttt=7", "rope_factor=16"], Eagle3Config)
    assert (found.feature_layers, found.window, found.ttt, found.rope_factor) == ((1, 5), None, 7, 16.0)
    assert "window" in found.fields_set and found.distill == 1.0


@pytest.mark.parametrize("path", LM_CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_lm_configurations_are_complete(path):
    found = read_config(path, ["data=x.jsonl"], LmConfig)
    assert found.out.startswith("drafts/") and (found.max_length, found.distill) == (1024, 0.8)


def test_lm_settings():
    found = read_config(None, ["start_from=[0, 1, 29]", "learn_prompts=false"], LmConfig)
    assert (found.start_from, found.learn_prompts, found.layers) == ((0, 1, 29), False, 3)
    assert read_config(None, ["start_from="], LmConfig).start_from is None
    for word, said in (("noise=3", r"No setting noise\. Settings: .*learn_prompts"), ("layers=0", "must be positive")):
        with pytest.raises(ConfigError, match=said):
            read_config(None, [word], LmConfig)
