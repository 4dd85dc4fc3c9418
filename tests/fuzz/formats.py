"""Tiny files of each format, how they are damaged, and how they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import longdraft
from longdraft import Speculator
from longdraft.batch.output import OutputFile
from longdraft.bench.contenders import Run
from longdraft.bench.records import RecordFile
from longdraft.bench.run import BatchResult
from tests.fuzz import damage
from tests.support import drafts
from tests.support.assistants import assistant, gemma4
from tests.support.gguf_drafts import convert, convert_assistant
from tests.support.gguf_files import write_gguf
from tests.support.published import small_dflash, small_peagle, with_heads
from tests.support.recurrent_models import recurrent_model
from tests.support.tiny import tiny_folder, tiny_model, tiny_tokenizer

IDS = [[4, 5, 6, 4, 5, 6, 4, 5, 6, 4]]
Change = Callable[[Random, Path], None]


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        make: writes the file or folder at a path.
        changes: ways to damage it, by a file's name in the folder (empty: the path itself).
        use: uses it as a user does; returns an output that must equal ``right()``, or None.
    """

    make: Callable[[Path], object]
    changes: dict[str, tuple[Change, ...]]
    use: Callable[[Path], object]
    right: Callable[[], object] = lambda: None


@cache
def target() -> Any:
    return tiny_model(layers=6)


@cache
def plain() -> list[int]:
    return _text(Speculator("ar", target=target()))


_gemma4 = cache(gemma4)


@cache
def _gemma4_plain() -> list[int]:
    return _text(Speculator("ar", target=_gemma4()))


def _with_assistant(path: Path) -> list[int]:
    return _text(Speculator(path, target=_gemma4()))


def _text(spec: Speculator, cache: longdraft.PromptCache | None = None) -> list[int]:
    (result,) = spec.generate(IDS, max_new_tokens=8, eos_token_ids=[], cache=cache)
    return list(result.token_ids)


def _as_target(path: Path) -> None:
    model, tokenizer = longdraft.load(path, device="cpu")
    spec = Speculator("prompt-lookup", target=model, tokenizer=tokenizer, min_n=1, plan="fixed")
    spec.encode("a b")
    _text(spec)


def _as_draft(path: Path, *method: str) -> list[int]:
    if method:
        return _text(Speculator(*method, draft=str(path), target=target()))
    return _text(Speculator(str(path), target=target(), tokenizer=tiny_tokenizer()))


_JSON, _BYTES = damage.in_place(damage.damage_json), damage.in_place(damage.damage_bytes)
_CONFIG = (*(_JSON,) * 5, _BYTES, damage.replace_file)
_TENSORS = (*(damage.damage_tensors,) * 6, damage.replace_file)
_FOLDER: dict[str, tuple[Change, ...]] = {"config.json": _CONFIG, "model.safetensors": _TENSORS}


def _draft(make: Callable[[Path], object], **more: tuple[Change, ...]) -> Format:
    return Format(make, _FOLDER | more, _as_draft, plain)


_OF_GGUF = (*(damage.damage_gguf,) * 5, _BYTES, _BYTES, damage.replace_file)


def _gguf(family: Any, **over: Any) -> Format:
    return Format(lambda path: write_gguf(path, family, **over), {"": _OF_GGUF}, _as_target)


_SHARD = "model-00001-of-00002.safetensors"


def _gguf_draft(make: Callable[[Path], Path]) -> Format:
    """A GGUF file that is made from a published folder."""
    return Format(lambda path: convert(make(path.with_suffix(".folder")), path, 6), {"": _OF_GGUF}, _as_draft, plain)


def _model(path: Path) -> None:
    tiny_folder(path, layers=2)


def _sharded(path: Path) -> None:
    tiny_model(layers=2).save_pretrained(path, max_shard_size="120KB")
    tiny_tokenizer().save_pretrained(path)


def _report(path: Path) -> None:
    """Continues a run."""
    RecordFile(path, _HEADER, BatchResult)


def _results(path: Path) -> None:
    file, runs = RecordFile(path, _HEADER, BatchResult), {"ar": Run(((1,) * 64,), 2.0, 4.0, (63,), ((0, 60),) * 63)}
    for i in range(3):
        file.append(BatchResult("news", 1024, 1, (f"a:{i}",), (1024,), runs, {"ar": [runs["ar"]] * 2}, [], ("ar",)))


_HEADER = {
    "format": "longdraft-bench", "version": 1, "settings": {"contenders": ["ar"], "max_tokens": 64, "seed": 0},
    "model": {"name": "some/Model-1B", "weights": "x"}, "hardware": {"cpu": "A Processor", "cores": 2, "gpus": []},
    "versions": {"torch": "2.11"}, "notes": {}, "created": "2026-01-02T03:04:05+00:00", "command": "longdraft bench",
}  # fmt: skip
_ORIGIN = {"input": "x", "rows": 5, "settings": {"seed": 0}}


def _output(path: Path) -> None:
    """A folder with a file of answers and the record of its run."""
    path.mkdir()
    with OutputFile(path / "out.jsonl", _ORIGIN) as file:
        for i in range(4):
            file.write({"line": i + 1, "id": i, "text": "a b"}, False)


def _go_on(path: Path) -> None:
    with OutputFile(path / "out.jsonl", _ORIGIN) as file:
        file.write({"line": file.num_rows + 1, "text": "c"}, False)


def _snapshot(model: Callable[[], Any]) -> Format:
    """A saved prompt cache, from which decoding must continue as without it."""
    plain = cache(lambda: _text(Speculator("ar", target=model())))

    def keep(path: Path) -> None:
        spec, kept = Speculator("ar", target=model()), longdraft.PromptCache()
        spec.generate(IDS, max_new_tokens=1, cache=kept)
        kept.save(path, spec.runner().fingerprint)

    def restored(path: Path) -> list[int]:
        spec = Speculator("ar", target=model())
        return _text(spec, longdraft.PromptCache.restored(path, spec.runner().fingerprint))

    return Format(keep, {"": _TENSORS}, restored, plain)


FORMATS: dict[str, Format] = {
    "llama.gguf": _gguf("llama"),
    "qwen3.gguf": _gguf("qwen3", kind="Q4_K", hidden=256),
    "gemma3.gguf": _gguf("gemma3"),
    "model": Format(
        _model,
        _FOLDER
        | dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "generation_config.json"), _CONFIG)
        | {"chat_template.jinja": (_BYTES, damage.replace_file)},
        _as_target,
    ),
    "sharded": Format(_sharded, {"model.safetensors.index.json": _CONFIG, _SHARD: _TENSORS}, _as_target),
    "snapshot": _snapshot(target),
    "recurrent snapshot": _snapshot(cache(recurrent_model)),
    "longspec": _draft(lambda path: drafts.random_draft(path, target(), kept=[1, 4, 5, 6, 9])),
    "eagle3": _draft(lambda path: drafts.random_eagle3(path, target(), kept=[1, 4, 5, 6, 9])),
    "published eagle3": _draft(
        lambda path: drafts.published_eagle3(
            path, target(), eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
        )
    ),
    "heads": _draft(lambda path: drafts.random_heads(path, target())),
    "lm": _draft(lambda path: drafts.random_lm(path, target())),
    "small-lm": _draft(lambda path: drafts.small_lm(path, vocab=61)),
    "eagle": Format(
        lambda path: drafts.published_eagle(path, target()),
        {"config.json": _CONFIG, "pytorch_model.bin": (_BYTES, _BYTES, damage.replace_file)},
        _as_draft,
        plain,
    ),
    "dflash": _draft(lambda path: small_dflash(path, target())),
    "eagle3.gguf": _gguf_draft(
        lambda path: drafts.published_eagle3(
            path, target(), [1, 4, 5, 6, 9], num_hidden_layers=1, eagle_aux_hidden_state_layer_ids=[2, 3, 5]
        )
    ),
    "dflash.gguf": _gguf_draft(lambda path: small_dflash(path, target())),
    "peagle": _draft(lambda path: small_peagle(path, target())),
    "tokenswift": Format(with_heads, _FOLDER, lambda path: _as_draft(path, "tokenswift"), plain),
    "small-lm.gguf": Format(
        lambda path: write_gguf(path, vocab=61, tokens=[]),
        {"": _OF_GGUF},
        lambda path: _as_draft(path, "small-lm"),
        plain,
    ),
    "bench.jsonl": Format(_results, {"": (damage.in_place(damage.damage_lines),)}, _report),
    "batch": Format(
        _output,
        {"out.jsonl": (damage.in_place(damage.damage_lines),), "out.jsonl.run": (_JSON, _BYTES)},
        _go_on,
    ),
    "assistant": Format(assistant, _FOLDER, _with_assistant, _gemma4_plain),
    "assistant.gguf": Format(
        lambda path: convert_assistant(assistant(path.with_suffix(".folder"), ordered=True)[0], path, clusters=True),
        {"": _OF_GGUF},
        _with_assistant,
        _gemma4_plain,
    ),
    "mtp": Format(lambda path: drafts.random_mtp(path, target()), _FOLDER, lambda path: _as_draft(path, "mtp"), plain),
}
