"""A hub id is read out of the hub's local cache, without a network: what is decoded is the folder's own text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longdraft import Speculator, load
from tests.support.tiny import tiny_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "made-up/tiny-model"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out, with one model."""
    snapshot = tmp_path / f"models--{ID.replace('/', '--')}" / "snapshots" / COMMIT
    tiny_folder(snapshot, context=512)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return tmp_path


@pytest.mark.slow  # a process of its own: the cache's place is read when huggingface_hub is imported
@pytest.mark.parametrize("kept", [True, False])
def test_a_hub_id_out_of_the_local_cache(cache, tmp_path_factory, kept):
    elsewhere = tmp_path_factory.mktemp("empty")
    environment = os.environ | {"HF_HUB_CACHE": str(cache if kept else elsewhere), "HF_HUB_OFFLINE": "1"}
    words = ["generate", "--model", ID, "--method", "prompt-lookup", "-p", "ship, ship, ship", "-n", "24", "--json"]
    command = [sys.executable, "-m", "longdraft", *words, "--plan", "fixed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=elsewhere, check=False)
    if not kept:
        assert done.returncode != 0 and ID in done.stderr and "Traceback" not in done.stderr
        return
    found = json.loads(done.stdout.splitlines()[-1])
    model, tokenizer = load(next(cache.glob(f"*/snapshots/{COMMIT}")), device="cpu")
    (expected,) = Speculator("ar", model, tokenizer).generate("ship, ship, ship", max_new_tokens=24)
    assert found["token_ids"] == expected.token_ids and found["rounds"] > 0
