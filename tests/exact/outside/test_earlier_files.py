"""Drafts, snapshots and results files that earlier commits wrote (folders of earlier/) are read, with equal results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from longdraft import PromptCache, Speculator, load
from longdraft.cli.main import main
from tests.exact.outside.earlier.write import BENCH, KINDS, OPTIONS, PROMPT

COMMITS = sorted(path.parent for path in Path(__file__).with_name("earlier").glob("*/expected.json"))
pytestmark = pytest.mark.parametrize("folder", COMMITS, ids=lambda path: path.name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_proposes_what_it_proposed(folder, kind):
    expected = json.loads((folder / "expected.json").read_text())
    model, tokenizer = load(folder / "target", device="cpu")
    speculator = Speculator(target=model, draft=folder / kind, plan="fixed", **OPTIONS.get(kind, {}))
    result = speculator.generate([tokenizer.encode(PROMPT)], max_new_tokens=24)[0]
    assert [result.token_ids, result.rounds, result.drafted, result.accepted] == expected[kind]
    assert 0 < result.accepted < result.drafted


def test_a_snapshot_is_continued(folder):
    model, tokenizer = load(folder / "target", device="cpu")
    prompt, speculator = tokenizer.encode(PROMPT), Speculator("ar", target=model)
    cache = PromptCache.restored(folder / "prompt.safetensors", speculator.runner().fingerprint)
    result = speculator.generate([prompt], max_new_tokens=8, cache=cache)[0]
    assert [result.token_ids] == json.loads((folder / "expected.json").read_text())["snapshot"]
    assert result.cached_tokens == len(prompt) - 1


def test_a_results_file_needs_no_second_measurement(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder, tmp_path / "then")
    monkeypatch.chdir(tmp_path / "then")
    header, *rows = Path("results.jsonl").read_text().splitlines()
    settings = json.loads(header)
    assert main([*BENCH, "--results", "here.jsonl"]) == 0
    # A file is continued on the machine and with the libraries that began it.
    here = json.loads(Path("here.jsonl").read_text().splitlines()[0])
    settings |= {name: here[name] for name in ("hardware", "versions")}
    settings["settings"]["environment"] = here["settings"]["environment"]
    Path("results.jsonl").write_text("\n".join([json.dumps(settings), *rows]) + "\n")
    capsys.readouterr()
    assert main([*BENCH, "--results", "results.jsonl"]) == 0
    assert Path("results.jsonl").read_text().splitlines()[1:] == rows
    assert "0 are left" in capsys.readouterr().err
