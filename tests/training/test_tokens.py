"""Text encoded once into shards: found again, continued, refused, in no memory; corpora by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longdraft.errors import CheckpointError, PromptError
from longdraft.training import corpus
from longdraft.training.config import RunConfig
from longdraft.training.corpus import collect
from longdraft.training.documents import Skipped, documents
from tests.support.tiny import tiny_tokenizer
from tests.training.helpers import in_memory

TOKENIZER = tiny_tokenizer(chat=True)


def write(folder: Path, *files: Path | str, stop=lambda: False) -> int:
    rows = documents(files, TOKENIZER, Skipped(), 61, corpus.rows_done(folder))
    return corpus.write(folder, rows, TOKENIZER, stop=stop)


def test_shards_hold_what_the_files_do_and_go_on_after_a_stop(text, tmp_path, monkeypatch):
    many = tmp_path / "many.jsonl"
    many.write_text('not json\n{"x": 1}\n' + 6 * text.read_text())
    whole = [d for d in documents([many], TOKENIZER, Skipped(), 61) if d]
    monkeypatch.setattr(corpus, "SHARD", 3000)
    calls = []
    folder = tmp_path / "shards"
    write(folder, many, stop=lambda: calls.append(0) or len(calls) == 2)
    assert 0 < corpus.rows_done(folder) < 200
    with pytest.raises(CheckpointError, match="not finished"):
        corpus.read([str(folder)], TOKENIZER, Skipped(), 61)
    write(folder, many)
    shards = corpus.read([str(folder)], TOKENIZER, Skipped(), 61)
    assert len(shards.sources) > 3 and list(shards) == whole
    assert write(folder, many) == 0 and corpus.rows_done(folder) == len(whole) + 2
    config = RunConfig(max_length=50, min_length=9, held_out=0.2)
    one, two = (collect(found, Skipped(), config, 3) for found in (in_memory(whole), shards))
    for sides in zip(one, two, strict=True):
        there, here = (sorted(d.tokens for d in side) for side in sides)
        assert there == here and there
    other = collect(shards, Skipped(), replace(config, max_length=49), 3)
    assert two[0].digest() != other[0].digest()


def test_shards_that_do_not_serve(text, tmp_path):
    folder = tmp_path / "shards"
    write(folder, text)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        corpus.read([str(folder)], lambda text: {"input_ids": [1, 2]}, Skipped(), 61)
    path = folder / "tokens-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        corpus.read([str(folder)], TOKENIZER, Skipped(), 61)
    with pytest.raises(PromptError, match="nothing to write"):
        corpus.write(tmp_path / "empty", [None], TOKENIZER)


CORPORA = {
    "sharegpt": ("a.json", [{"conversations": [{"from": "gpt", "value": "no"}, {"from": "human", "value": "hi"},
                                               {"from": "gpt", "value": "yes"}]}]),
    "ultrachat": ("deep/train_0.jsonl", [{"data": ["hi", "yes"]}]),
    "slimpajama": ("chunk1/example.jsonl.zst", [{"text": "abc", "meta": {}}]),
    "long-data-collections": ("train/rp_sub.jsonl.zst", [{"text": "abc"}]),
    "pg19": ("train/1.txt", "abc"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_its_folder(tmp_path, name):
    place, rows = CORPORA[name]
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "README.md").write_text("not read")
    if place.endswith(".zst"):
        arrow = pytest.importorskip("pyarrow")
        with arrow.output_stream(path, compression="zstd") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    else:
        whole = json.dumps(rows) if place.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(rows if isinstance(rows, str) else whole)
    (found,) = documents([tmp_path], TOKENIZER, Skipped(), 61)
    chat = name in ("sharegpt", "ultrachat")
    assert TOKENIZER.decode(found.tokens) == ("<user>hi<eos><assistant>yes<eos>" if chat else "abc<eos>")
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", f"{name}:{tmp_path}"):
        with pytest.raises(PromptError, match="by its folder"):
            list(documents([wrong], TOKENIZER, Skipped(), 61))
