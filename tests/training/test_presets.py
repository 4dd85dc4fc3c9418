"""The presets of the papers, value by value."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from longdraft.training.config import read_config
from tests.training.helpers import ROOT, TRAININGS

FOLDER = ROOT / "configs" / "papers"


class Preset(NamedTuple):
    """A preset, its kind of draft, the GPUs it is for, texts a step, and what the paper or its code says."""

    path: str
    kind: str
    gpus: int
    texts: int
    values: dict[str, Any]


_LONGSPEC = {
    "noise": 4, "distill": 0.0, "warmup": 0.1, "min_lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1,
    "clip": 1.0, "epochs": 1.0, "vocabulary": None,
}  # fmt: skip
_LONG = _LONGSPEC | {"max_length": 32768, "anchor_offset": 0, "lr": 5e-6}
PRESETS = [
    Preset(
        "longspec/1-short", "longspec", 8, 2048,
        _LONGSPEC | {"max_length": 1024, "anchor_offset": 30000, "lr": 5e-4, "window": 512, "final_norm": False,
                     "init": None},
    ),
    Preset("longspec/2-long", "longspec", 8, 256, _LONG | {"init": "drafts/longspec-short/best"}),
    Preset("longspec/3-answers", "longspec", 8, 256, _LONG | {"init": "drafts/longspec-long/best"}),
    Preset(
        "eagle3", "eagle3", 8, 16,
        {"max_length": 2048, "ttt": 7, "decay": 0.8, "window": None, "vocabulary": 32000, "distill": 1.0, "lr": 5e-5,
         "betas": (0.9, 0.95), "clip": 0.5, "weight_decay": 0.0, "warmup": 0.015, "epochs": 40.0, "retain": 1.0},
    ),
    Preset(
        "specpv", "eagle3", 4, 16,
        {"max_length": 32768, "min_length": 32768, "ttt": 4, "decay": 0.8, "rope_factor": 16.0,
         "rope_factor_inference": 32.0, "rope_original_length": 2048, "lr": 2e-5, "warmup": 0.05, "epochs": 1.0,
         "max_steps": 400, "distill": 1.0, "window": None},
    ),
    Preset(
        "specextend", "eagle", 4, 16,
        {"max_length": 2048, "classification": 0.1, "feature_noise": 0.1, "distill": 1.0, "lr": 3e-5, "clip": 0.5,
         "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01, "warmup": 0.0025, "epochs": 20.0},
    ),
    Preset(
        "tokenswift", "heads", 4, 120,
        {"max_length": 8192, "min_length": 8192, "heads": 3, "decay": 1.0, "distill": 0.0, "vocabulary": None,
         "lr": 5e-3, "warmup": 0.25, "max_steps": 200, "weight_decay": 0.1, "betas": (0.9, 0.999)},
    ),
]  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.path)
def test_a_preset_is_its_papers(preset):
    path = FOLDER / f"{preset.path}.yaml"
    found = read_config(path, ["data=x.jsonl"], TRAININGS[preset.kind].load_settings())
    assert found.as_dict().items() >= preset.values.items()
    assert found.rows // found.max_length * found.accumulate * preset.gpus == preset.texts
    for line in path.read_text().splitlines():  # every value says where it comes from
        if line and not line.startswith(("#", "out:", "init:")):
            assert " # " in line, line


def test_no_preset_is_unread():
    assert sorted(f"{preset.path}.yaml" for preset in PRESETS) == sorted(
        path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("**/*.yaml")
    )
