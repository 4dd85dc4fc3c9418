"""Settings: files, overrides, and errors in one line."""

from __future__ import annotations

import pytest

from longdraft.errors import ConfigError
from longdraft.training.config import PRESETS as SHIPPED
from longdraft.training.config import preset_path, preset_paths, read_config
from tests.training.helpers import SMALL, TRAININGS

SETTINGS = {kind: training.load_settings() for kind, training in TRAININGS.items() if kind in SMALL}
PAPERS = SHIPPED / "papers"
# Preset -> its kind of draft, the GPUs it is for, and texts a step.
PRESETS = {
    "longspec/1-short": ("longspec", 8, 2048), "longspec/2-long": ("longspec", 8, 256),
    "longspec/3-answers": ("longspec", 8, 256), "eagle3": ("eagle3", 8, 16), "specpv": ("eagle3", 4, 16),
    "specextend": ("eagle", 4, 16), "tokenswift": ("tokenswift", 4, 120),
}  # fmt: skip
FILES = [(kind, path) for kind in sorted(SETTINGS) for path in sorted((SHIPPED / kind).glob("**/*.yaml"))]


def test_words_override_the_file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("lr: 1e-3\ndata: [a.jsonl, b.jsonl]\nprecision: no\nthreads: 2\n")
    found = read_config(path, ["rows=100", "data=c.jsonl", "cache=x:y", "threads="], SETTINGS["longspec"])
    assert (found.lr, found.rows, found.data, found.cache) == (1e-3, 100, ("c.jsonl",), "x:y")
    assert (found.precision, found.threads) == ("no", None)
    assert read_config(None, ["precision=bf16", "betas=[0.8,0.9]"], SETTINGS["longspec"]).betas == (0.8, 0.9)
    found = read_config(None, ["feature_layers=[1, 5]", "window=", "ttt=7", "rope_factor=16"], SETTINGS["eagle3"])
    assert (found.feature_layers, found.window, found.ttt, found.rope_factor) == ((1, 5), None, 7, 16.0)
    assert "window" in found.fields_set and found.distill == 1.0
    found = read_config(None, ["start_from=[0, 1, 29]", "learn_prompts=false"], SETTINGS["lm"])
    assert (found.start_from, found.learn_prompts, found.layers) == ((0, 1, 29), False, 3)
    assert read_config(None, ["start_from="], SETTINGS["lm"]).start_from is None


@pytest.mark.parametrize(
    ("kind", "words", "key"),
    [
        ("longspec", "rows", "not of the form key=value"),
        ("longspec", "quick=3", r"No setting quick\. Settings: accumulate, anchor_offset"),
        ("longspec", "speed=3", r"Did you mean seed\? Settings: accumulate, anchor_offset"),
        ("longspec", "rows=1.5", "rows must be a whole number"),
        ("longspec", "rows=0", "rows must be a whole number of at least 1, got 0"),
        ("longspec", "lr=.nan", "lr must be a number"),
        ("longspec", "recompute=1", "recompute must be True or False"),
        ("longspec", "sample=2", "sample must be a number of at least 0 and up to 1"),
        ("longspec", "precision=fp8", "precision must be bf16 or no"),
        ("longspec", "betas=[0.9]", "betas must be 2 numbers"),
        ("longspec", "data={a: b}", "data must be a list"),
        ("eagle3", "noise=3", r"No setting noise\. Settings: .*ttt"),
        ("eagle3", "decay=0", "decay must be a number above 0"),
        ("eagle3", "rope_factor_inference=8", "needs rope_factor"),
        ("eagle3", "window=5", "window 5"),
        ("eagle3", "feature_layers=a", "feature_layers must be whole numbers"),
        ("lm", "anchor_offset=5", "anchor_offset"),
        ("lm", "start_from=[0]", "start_from names 1 layers"),
        ("lm", "layers=1 start_from=[0] init=x", "start_from .* init"),
        ("tokenswift", "anchor_offset=5", "anchor_offset"),
        ("eagle", "vocabulary=40", "vocabulary"),
        ("tokenswift", "intermediate_size=64", "intermediate_size"),
    ],
)
def test_wrong_settings(kind, words, key):
    with pytest.raises(ConfigError, match=key) as caught:
        read_config(None, words.split() if "init" in words else [words], SETTINGS[kind])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["rows: [", "- a", None])
def test_files_that_hold_no_settings(tmp_path, text):
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        read_config(path, (), SETTINGS["longspec"])


@pytest.mark.parametrize(
    ("kind", "path"), FILES, ids=lambda x: x if isinstance(x, str) else f"{x.parent.name}-{x.stem}"
)
def test_configurations_are_complete(kind, path):
    found = read_config(path, ["data=x.jsonl"], SETTINGS[kind])
    assert found.out.startswith("drafts/") and found.target is None  # the embedded model
    wanted = {
        "eagle3": {"decay": 0.8}, "lm": {"max_length": 1024, "distill": 0.8}, "longspec": {"noise": 5},
        "tokenswift": {"heads": 3, "distill": 0.8, "max_length": 2048},
    }[kind]  # fmt: skip
    assert found.as_dict().items() >= wanted.items()


def test_presets_go_by_name():
    """Also by the paths that they had in older versions."""
    names = {"longspec/1-short", "eagle3/8b/1-answers", "papers/longspec/1-short", "accelerate/ddp"}
    assert names <= preset_paths().keys()
    for name in ("longspec/1-short", "longspec/1-short.yaml", "configs/longspec/1-short.yaml"):
        assert preset_path(name) == SHIPPED / "longspec" / "1-short.yaml"
    with pytest.raises(ConfigError, match="did you mean the preset longspec/1-short"):
        preset_path("longspec/1-shrt")


def test_the_three_stages_follow_each_other():
    paths = sorted((SHIPPED / "longspec").glob("*.yaml"))
    stages = [read_config(path, ["data=text.jsonl"], SETTINGS["longspec"]) for path in paths]
    assert [path.stem for path in paths] == ["1-short", "2-long", "3-answers"]
    assert [s.init for s in stages] == [None, f"{stages[0].out}/best", f"{stages[1].out}/best"]
    assert (stages[0].max_length, stages[0].lr) == (1024, 5e-4) and stages[0].anchor_offset
    assert not stages[1].anchor_offset and not stages[2].anchor_offset


def test_the_papers_presets_are_read_and_say_where_each_value_comes_from():
    for path in PAPERS.glob("**/*.yaml"):
        kind, gpus, texts = PRESETS[path.relative_to(PAPERS).with_suffix("").as_posix()]
        found = read_config(path, ["data=x.jsonl"], SETTINGS[kind])
        assert found.rows // found.max_length * found.accumulate * gpus == texts
        for line in path.read_text().splitlines():
            if line and not line.startswith(("#", "out:", "init:")):
                assert " # " in line, line
