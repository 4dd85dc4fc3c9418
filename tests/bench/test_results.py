"""Results files: what is read back, and which runs may continue them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from longdraft import LoadedModel
from longdraft.bench.data import Sample
from longdraft.bench.experiment import Experiment, no_bar
from longdraft.bench.prompts import encode_prompts, make_batches
from longdraft.bench.records import RecordFile
from longdraft.bench.results import bench_header
from longdraft.bench.run import BatchResult, Bench, SampleDifference
from longdraft.bench.settings import Settings
from longdraft.errors import CheckpointError, ConfigError
from tests.support.drafts import small_lm
from tests.support.tiny import tiny_model

SAMPLES = [Sample(f"one two {i} " * 8, "why?", "a", f"a:{i}") for i in range(4)]


class Session:
    """A run of the bench up to its results file."""

    def __init__(self, loaded, samples=SAMPLES, data=("a.jsonl",), **wanted):
        made = {"methods": ("prompt-lookup",), "max_tokens": 6, "repeats": 1, "contexts": (40,), "batches": (1, 2)}
        self.settings = Settings(**(made | wanted))
        self.bench = Bench(loaded, self.settings)
        prompts = encode_prompts(samples, loaded, self.settings)
        self.groups, _ = make_batches(prompts, self.settings.batches)
        self.header = bench_header(self.bench, prompts, "tiny", list(data), None)

    def open(self, path):
        return RecordFile(path, self.header, BatchResult)


@pytest.fixture
def session(loaded):
    return Session(loaded)


def test_a_run_comes_back_and_goes_on_where_it_ended(session, tmp_path):
    path = tmp_path / "r.jsonl"
    first, last = (session.bench.measure(group) for group in (session.groups[0], session.groups[-1]))
    differences = [
        SampleDifference("prompt-lookup", "a", "a:0", 3, 5, 6, 0.25, True),
        SampleDifference("prompt-lookup", "a", "a:0", 1, None, 6, None, False),
    ]
    file = session.open(path)
    for one in (replace(first, differences=differences), last):
        file.append(one)
    assert session.open(path).records == file.records and file.records[0].differences == differences
    again = Experiment(session.bench.steps(session.groups), lambda measured: measured.key, session.open(path))
    assert again.records == file.records and [record.key for record in again.records] == [again.keys[0], again.keys[-1]]
    made = [record.key for record in again.run(lambda what: no_bar)]
    assert made == again.keys[1:-1] and len(session.open(path).records) == len(session.groups)


def test_another_run_is_refused(session, loaded, tmp_path, monkeypatch):
    """With other settings or prompts, another model, draft, machine or switch; the file stays as it is."""
    path = tmp_path / "r.jsonl"
    session.open(path)
    before = path.read_bytes()
    for over, said in (
        ({"max_tokens": 7}, "settings.max_tokens: 6 there, 7 here"),
        ({"methods": ("prompt-lookup", "hf")}, "settings.contenders"),
        ({"data": ["b.jsonl"]}, "settings.data"),
        ({"samples": SAMPLES[:3]}, "prompts: "),
    ):
        with pytest.raises(ConfigError, match=said):
            Session(loaded, **over).open(path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError):
        Session(LoadedModel(tiny_model(context=512, layers=2, seed=5), loaded.tokenizer)).open(path)
    with pytest.raises(ConfigError, match="4096 here"):
        RecordFile(path, {**session.header, "hardware": {**session.header["hardware"], "cores": 4096}}, BatchResult)
    free = {**session.header["hardware"], "memory_available_bytes": 1}
    RecordFile(path, {**session.header, "hardware": free}, BatchResult)  # free memory changes by itself
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    with pytest.raises(ConfigError):
        Session(loaded).open(path)
    folder, other = small_lm(tmp_path / "lm", vocab=61), tmp_path / "draft.jsonl"
    wanted = {"methods": ("small-lm",), "draft_options": {"draft": folder, "depth": 2}}
    for _ in range(2):
        Session(loaded, **wanted).open(other)
    small_lm(folder, vocab=61, seed=7)  # another draft in the same folder
    with pytest.raises(ConfigError):
        Session(loaded, **wanted).open(other)


def test_rows_of_another_form_are_refused_by_line(session, tmp_path):
    """And a header of another version; files of other things: tests/exact/outside/test_files_of_rows.py."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**session.header, "version": 99}) + "\n")
    with pytest.raises(CheckpointError):
        session.open(path)
    right = asdict(session.bench.measure(session.groups[0]))
    wrong = (
        {"context": "x"}, {"batch": True}, {"scores": {"ar": [float("nan")]}}, {"samples": None}, {"cold": {"ar": 1}},
    )  # fmt: skip
    for row in ({"dataset": "a"}, *(right | each for each in wrong)):
        path.write_text("".join(json.dumps(each) + "\n" for each in (session.header, row)))
        with pytest.raises(CheckpointError, match=r"r\.jsonl:2"):
            session.open(path)
    path.write_text("".join(json.dumps(each) + "\n" for each in (session.header, right | {"earlier": 1})))
    assert session.open(path).records[0].batch == 1  # of an earlier version
