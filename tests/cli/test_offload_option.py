"""``--offload``: the same answer, and what is refused."""

from __future__ import annotations

import json

import pytest

from longdraft.memory import disk_store, offload


@pytest.fixture
def made(monkeypatch):
    """Folders in which stores were made."""
    folders = []

    class Watched(disk_store.DiskStore):
        def __init__(self, folder, *arguments):
            folders.append(folder)
            super().__init__(folder, *arguments)

    monkeypatch.setattr(offload, "DiskStore", Watched)
    return folders


def last(ended) -> dict:
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


def test_the_answer_is_the_same_and_the_kept_prompt_serves_either_way(generate, made, tmp_path):
    asked = ("-p", "hello hello hello hello", "-n", 30, "--json")
    expected = last(generate(*asked))["token_ids"]
    assert made == []
    first = last(generate(*asked, "--offload", tmp_path, "--kv-cache", tmp_path / "kv", "--compare"))
    assert first["token_ids"] == expected and first["compare"]["tokens_agree"]
    assert set(made) == {tmp_path}
    assert last(generate(*asked, "--offload", "disk", "--kv-cache", tmp_path / "kv"))["token_ids"] == expected
    assert last(generate(*asked, "--kv-cache", tmp_path / "kv"))["token_ids"] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_bench_offloads_our_methods(shell, model_folder, made, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "hello hello hello hello"}) + "\n")
    command = (
        "bench",
        "--model",
        model_folder,
        "--data",
        data,
        "-n",
        8,
        "--repeats",
        1,
        "--offload",
        tmp_path,
        "--json",
    )
    rows = last(shell(*command))["rows"]
    assert set(made) == {tmp_path} and {r["mismatches"] for r in rows} == {0}


@pytest.mark.parametrize(
    ("asked", "said"), [("nowhere-at-all", "no folder nowhere-at-all"), ("host", "offload to disk")]
)
def test_what_cannot_be_is_refused(generate, asked, said):
    ended = generate("-p", "hello", "--device", "cpu", "--offload", asked)
    assert ended.code != 0 and said in " ".join(ended.err.split())
