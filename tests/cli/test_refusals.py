"""Refusals of the command line: one line that names the fault, an exit code, and nothing on stdout."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

from longdraft.cli.console import with_flag_names
from tests.support.drafts import random_draft, random_eagle3
from tests.support.tiny import tiny_model

# Behind `generate -p hi --model BARE`, a folder with a configuration alone: said before anything is loaded.
BEFORE = [
    ("--rope-factor 0.5", 2, "--rope-factor is 0.5"),
    ("--device gpu", 2, "'gpu'"),
    ("--dtype int3", 2, "--dtype 'int3'"),
    ("--kv-dtype fp8", 2, "--kv-dtype"),
    ("--plan x", 2, "--plan"),
    ("-t -1", 2, "--temperature"),
    ("-n 0", 2, "--max-tokens"),
    ("--stop ''", 2, "--stop"),
    ("-o branches=0", 2, "branches must be a whole number of at least 1"),
    ("--method prompt-lookup -o branches=many", 2, "branches"),
    ("-o =1", 2, "name=value"),
    ("-o branches=2 -o widths=2,2", 2, "branches and widths together"),
    ("--widths 0", 2, "--widths must be"),
    ("--method longspce", 2, "did you mean longspec?"),
    ("--draft none", 1, "none"),
    ("--draft DRAFT --method prompt-lookup", 2, "draft"),
    ("-f 'no such file'", 2, "no such file"),
    ("--kv-cache BARE", 1, "BARE"),
]
# Behind `generate -p hi --model MODEL`: the model has to be there for it.
LOADED = [
    ("-n 1000", 2, "512"),
    ("--weights stored --dtype bfloat16", 2, "float32"),
    ("--device abacus", 2, "abacus"),
    ("--offload host --device cpu", 2, "NVIDIA"),
    ("--method longspec", 2, "longspec"),
    ("--draft OTHER", 1, "kv_heads 3 (this target: 2)"),
    ("--kv-cache ROWS", 1, "ROWS"),
]
COMMANDS = [
    ("generate --model MODEL", 2, "prompt"),
    ("generate -p x --model NOWHERE", 1, "NOWHERE"),
    ("generate -p x --model DRAFT", 1, "DRAFT"),
    ("bench --model MODEL --data ROWS -n 6 --methods ar,prompt-lookup --draft DRAFT", 2, "draft"),
    ("bench --model MODEL --data ROWS -n 6 --methods longspec --draft OTHER", 1, "another target"),
    ("export DRAFT OUT --verifier some/target", 2, "eagle3"),
    ("export EAGLE3 EAGLE3 --verifier some/target", 1, "EAGLE3"),
    ("export DRAFT DRAFT --to longdraft", 2, "DRAFT"),
]
USAGE = [
    ("sing", "sing"),
    ("generate -p x --max-tokens many", "--max-tokens"),
    ("generate -p x --weights int4", "--weights"),
    ("generate hi", "-p"),
    ("generate -p x --top-p 2", "--top-p"),
]


@pytest.fixture(scope="session")
def places(tmp_path_factory, model_folder):
    """The values of words in capitals."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "bare").mkdir()
    shutil.copy(model_folder / "config.json", folder / "bare")
    (folder / "rows.jsonl").write_text(json.dumps({"text": "one two one two"}))
    return {
        "MODEL": model_folder, "BARE": folder / "bare", "ROWS": folder / "rows.jsonl", "NOWHERE": folder / "nowhere",
        "OUT": folder / "out", "DRAFT": random_draft(folder / "draft", tiny_model(context=512)),
        "OTHER": random_draft(folder / "other", tiny_model(kv_heads=3)),
        "EAGLE3": random_eagle3(folder / "eagle3", tiny_model(context=512), layers=(0, 1, 2), kept=list(range(5, 50))),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        *((f"generate -p hi --model BARE {words}", *rest) for words, *rest in BEFORE),
        *((f"generate -p hi --model MODEL {words}", *rest) for words, *rest in LOADED),
        *COMMANDS,
    ],
)
def test_refused_in_one_line(shell, places, words, code, name):
    ended = shell(*(places.get(word, word) for word in shlex.split(words)))
    *before, last = ended.err.splitlines()
    assert (ended.code, ended.out) == (code, "") and last.startswith("error: ")
    assert str(places.get(name, name)) in last
    assert not before or "BARE" not in words  # nothing was begun


@pytest.mark.parametrize(("words", "name"), USAGE)
def test_words_that_are_no_command_line(shell, words, name):
    ended = shell(*shlex.split(words))
    assert (ended.code, ended.out) == (2, "") and name in ended.err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("rope_factor is 0.5: give more", "--rope-factor is 0.5: give more"),
        ("max_new_tokens must be at least 1", "--max-tokens must be at least 1"),
        ("top_k must be 1", "--tree-top-k must be 1"),
        ("dtype 'int3' is not supported", "--dtype 'int3' is not supported"),
        *((text, text) for text in ("the tree has depth", "stop the server first", "draft folder x is no folder", "")),
    ],
)
def test_a_message_about_an_argument_names_its_flag(message, expected):
    assert with_flag_names(message) == expected
