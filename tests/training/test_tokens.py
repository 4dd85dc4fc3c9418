"""Text encoded once into shards: read, continued, refused, without memory; folders of corpora."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from longdraft.errors import CheckpointError, PromptError
from longdraft.training import dataset
from longdraft.training.config import RunConfig
from longdraft.training.dataset import split_dataset
from longdraft.training.documents import Document, SkipCounts, encode_documents
from tests.support import elsewhere
from tests.support.tiny import tiny_tokenizer
from tests.training.helpers import in_memory

TOKENIZER = tiny_tokenizer(chat=True)


def write(folder: Path, *files: Path | str, stop=lambda: False) -> int:
    rows = encode_documents(files, TOKENIZER, SkipCounts(), 61, dataset.num_examples_done(folder))
    return dataset.write_shards(folder, rows, TOKENIZER, stop=stop)


def test_shards_hold_what_the_files_do_and_go_on_after_a_stop(text, tmp_path, monkeypatch):
    many = tmp_path / "many.jsonl"
    many.write_text('not json\n{"x": 1}\n' + 6 * text.read_text())
    whole = [d for d in encode_documents([many], TOKENIZER, SkipCounts(), 61) if d]
    monkeypatch.setattr(dataset, "MIN_SHARD_TOKENS", 3000)
    calls = []
    folder = tmp_path / "shards"
    write(folder, many, stop=lambda: calls.append(0) or len(calls) == 2)
    assert 0 < dataset.num_examples_done(folder) < 200
    with pytest.raises(CheckpointError, match="not finished"):
        dataset.read_dataset([str(folder)], TOKENIZER, SkipCounts(), 61)
    write(folder, many)
    shards = dataset.read_dataset([str(folder)], TOKENIZER, SkipCounts(), 61)
    assert len(shards.shards) > 3 and list(shards) == whole
    assert write(folder, many) == 0 and dataset.num_examples_done(folder) == len(whole) + 2
    config = RunConfig(max_length=50, min_length=9, held_out=0.2)
    one, two = (split_dataset(found, SkipCounts(), config, 3) for found in (in_memory(whole), shards))
    for sides in zip(one, two, strict=True):
        there, here = (sorted(d.token_ids for d in side) for side in sides)
        assert there == here and there
    other = split_dataset(shards, SkipCounts(), replace(config, max_length=49), 3)
    assert two[0].digest() != other[0].digest()


def test_shards_that_do_not_serve(text, tmp_path):
    folder = tmp_path / "shards"
    write(folder, text)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        dataset.read_dataset([str(folder)], lambda text: {"input_ids": [1, 2]}, SkipCounts(), 61)
    path = folder / "tokens-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        dataset.read_dataset([str(folder)], TOKENIZER, SkipCounts(), 61)
    with pytest.raises(PromptError, match="nothing to write"):
        dataset.write_shards(tmp_path / "empty", [None], TOKENIZER)


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
    (found,) = encode_documents([tmp_path], TOKENIZER, SkipCounts(), 61)
    chat = name in ("sharegpt", "ultrachat")
    assert TOKENIZER.decode(found.token_ids) == ("<user>hi<eos><assistant>yes<eos>" if chat else "abc<eos>")
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", f"{name}:{tmp_path}"):
        with pytest.raises(PromptError, match="Name a file or a folder"):
            list(encode_documents([wrong], TOKENIZER, SkipCounts(), 61))


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": ["abc", "de"]}), tmp_path / "a.parquet")
    assert len(list(encode_documents([tmp_path], TOKENIZER, SkipCounts(), 61))) == 2


def _used(folder: str, out: str) -> None:
    """Reads documents of shards and writes the growth of this process's private memory."""
    before = _private()
    learned, _ = split_dataset(
        dataset.read_dataset([folder], TOKENIZER, SkipCounts(), 61), SkipCounts(), RunConfig(), 5
    )
    for i in range(0, len(learned), 7):
        assert learned[i].token_ids
    Path(out).write_text(f"{_private() - before} {sum(learned.lengths)}")


def _private() -> int:
    """Private memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tokens_on_disk_take_no_memory(tmp_path):
    rng = random.Random(0)
    text = [rng.randrange(61) for _ in range(4094)]
    dataset.write_shards(tmp_path / "shards", (Document([i % 61, i // 61, *text]) for i in range(3000)), TOKENIZER)
    process = elsewhere.start(tmp_path / "log", _used, str(tmp_path / "shards"), str(tmp_path / "out"))
    assert elsewhere.wait_for_exit(process, 120) == 0, (tmp_path / "log").read_text()
    used, count = map(int, (tmp_path / "out").read_text().split())
    assert count > 12e6 * 0.9 and used < 0.5 * count  # as lists they took 40 bytes a token
