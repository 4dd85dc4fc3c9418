"""Measurements in a file: what comes back from it, and when a run may go on with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from longdraft import LoadedModel
from longdraft.bench import report
from longdraft.bench.data import Sample
from longdraft.bench.experiment import Experiment
from longdraft.bench.prompts import grid, prepare
from longdraft.bench.results import header, opened, read
from longdraft.bench.run import Bench, Disagreement
from longdraft.bench.settings import Settings
from longdraft.errors import CheckpointError, ConfigError
from tests.drafts import small_lm
from tests.tiny import tiny_model

SAMPLES = [Sample(f"one two {i} " * 8, "why?", "a", f"a:{i}") for i in range(4)]


class Session:
    """A run of the bench up to the file."""

    def __init__(self, loaded, samples=SAMPLES, data=("a.jsonl",), **wanted):
        made = {"methods": ("prompt-lookup",), "max_tokens": 6, "repeats": 1, "contexts": (40, 30), "batches": (1, 2)}
        self.settings = Settings(**(made | wanted))
        self.bench = Bench(loaded, self.settings)
        self.prompts = prepare(samples, loaded, self.settings)
        self.groups, _ = grid(self.prompts, self.settings)
        self.header = header(self.bench, self.prompts, "tiny", list(data), None)

    def open(self, path):
        return opened(path, self.header)


@pytest.fixture
def session(loaded):
    return Session(loaded)


def test_what_was_written_comes_back(session, tmp_path):
    path = tmp_path / "r.jsonl"
    file = session.open(path)
    measured = [session.bench.measure(group) for group in session.groups[:3]]
    for one in measured:
        file.append(one)
    found, again = read(path)
    assert found == session.header
    assert again == measured == file.records
    assert report.rows(session.bench.names, again) == report.rows(session.bench.names, measured)
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert set(json.loads(lines[0])) >= {
        "format", "version", "settings", "model", "drafts", "prompts", "hardware", "versions", "notes",
    }  # fmt: skip
    assert set(json.loads(lines[1])) >= {
        "dataset", "context", "batch", "samples", "prompt_tokens", "cold", "rounds", "comparable", "differences",
        "peak_memory_bytes",
    }  # fmt: skip


def test_differences_come_back(session, tmp_path):
    file = session.open(tmp_path / "r.jsonl")
    differences = [
        Disagreement("prompt-lookup", "a", "a:0", 3, 5, 6, 0.25, True),
        Disagreement("prompt-lookup", "a", "a:0", 1, None, 6, None, False),
    ]
    measured = replace(session.bench.measure(session.groups[0]), differences=differences)
    file.append(measured)
    assert read(tmp_path / "r.jsonl")[1] == [measured]


def test_a_run_goes_on_where_it_ended(session, tmp_path):
    path = tmp_path / "r.jsonl"
    file = session.open(path)
    for group in (session.groups[0], session.groups[-1]):
        file.append(session.bench.measure(group))
    with path.open("ab") as torn:
        torn.write(b'{"dataset": "a", "conte')  # as a power cut leaves it
    assert len(read(path)[1]) == 2
    again = Experiment(session.bench.steps(session.groups), lambda measured: measured.key, session.open(path))
    assert again.keys[0] == again.found[0].key and again.keys[-1] == again.found[1].key and len(again.found) == 2
    made = [record.key for record in again.run(lambda what: lambda name: None)]
    assert made == again.keys[1:-1] and len(read(path)[1]) == len(session.groups)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"max_tokens": 7}, "settings.max_tokens: 6 there, 7 here"),
        ({"contexts": (40,)}, "settings.contexts"),
        ({"methods": ("prompt-lookup", "hf")}, "settings.contenders"),
        ({"seed": 1}, "settings.seed"),
        ({"data": ["b.jsonl"]}, "settings.data"),
        ({"samples": SAMPLES[:3]}, "prompts: "),
    ],
)
def test_another_run_is_refused(session, loaded, tmp_path, over, said):
    path = tmp_path / "r.jsonl"
    session.open(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=said):
        Session(loaded, **over).open(path)
    assert path.read_bytes() == before


def test_another_model_draft_machine_or_switch_is_refused(session, loaded, tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    session.open(path)
    other = LoadedModel(tiny_model(context=512, layers=2, seed=5), loaded.tokenizer)
    with pytest.raises(ConfigError):
        Session(other).open(path)
    for change in ({"hardware": {"cores": 4096}}, {"versions": {"torch": "0.1"}}):
        with pytest.raises(ConfigError, match=r"4096 here|0\.1"):
            opened(path, {**session.header, **{k: {**session.header[k], **v} for k, v in change.items()}})
    free = {**session.header["hardware"], "memory_available_bytes": 1}
    opened(path, {**session.header, "hardware": free})  # free memory changes by itself
    monkeypatch.setenv("LONGDRAFT_PACK", "0")
    with pytest.raises(ConfigError):
        Session(loaded).open(path)


def test_another_draft_in_the_same_folder_is_refused(loaded, tmp_path):
    folder = small_lm(tmp_path / "lm", vocab=61)
    wanted = {"methods": ("small-lm",), "draft_options": {"draft": folder, "depth": 2}}
    path = tmp_path / "r.jsonl"
    first = Session(loaded, **wanted)
    assert first.header["settings"]["options"]["small-lm"] == {"draft": str(folder), "depth": 2}
    first.open(path)
    Session(loaded, **wanted).open(path)
    small_lm(folder, vocab=61, seed=7)
    with pytest.raises(ConfigError):
        Session(loaded, **wanted).open(path)


def test_files_that_are_none(session, tmp_path):
    path = tmp_path / "r.jsonl"
    for content in (b"{}\n", b"hello\n", b'{"text": "a row of data"}\n', b"[1]\n", b'{"format": "longdraft-bench"'):
        path.write_bytes(content)
        for use in (read, session.open):
            with pytest.raises(CheckpointError):
                use(path)
        assert path.read_bytes() == content
    path.write_text(json.dumps({**session.header, "version": 99}) + "\n")
    with pytest.raises(CheckpointError):
        read(path)
    path.write_text(json.dumps(session.header) + '\n{"dataset": "a"}\n')
    with pytest.raises(CheckpointError, match=r"r\.jsonl:2"):
        read(path)
    with pytest.raises(CheckpointError):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert session.open(tmp_path / "empty.jsonl").records == []
