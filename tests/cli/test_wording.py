"""Errors of the command line: in its own words, and before anything is loaded."""

from __future__ import annotations

import shutil

import pytest

from longdraft.cli.console import in_flags


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
    assert in_flags(message) == expected


BEFORE = [
    (["--rope-factor", "0.5"], "--rope-factor is 0.5"),
    (["--device", "gpu"], "No device is called 'gpu'"),
    (["--dtype", "int3"], "dtype 'int3' is not supported"),
    (["--kv-dtype", "fp8"], "--kv-dtype must be one of"),
    (["--plan", "x"], "--plan must be auto or fixed"),
    (["--offload", "nowhere"], "--offload takes host"),
    (["-t", "-1"], "--temperature must not be negative"),
    (["-t", "0.5", "--top-p", "0"], "--top-p must lie above 0"),
    (["--repetition-penalty", "0"], "--repetition-penalty must lie above 0"),
    (["--repetition-window", "5"], "--repetition-window says where"),
    (["-n", "0"], "--max-tokens must be at least 1"),
    (["--stop", ""], "--stop has an empty string"),
    (["-o", "branches=0"], "branches must be a whole number of at least 1"),
    (["-o", "branchs=2"], "did you mean branches?"),
    (["-o", "reduction=max"], "There is no option reduction: it is one of "),
    (["-o", "branches=2", "-o", "widths=2,2"], "has branches and widths together"),
    (["--method", "longspec", "--widths", "0"], "--widths must be whole numbers"),
    (["--method", "eagle3", "--tree-top-k", "0"], "--tree-top-k must be a whole number of at least 1"),
    (["--widths", "0"], "--widths must be"),
    (["--method", "longspce"], "did you mean longspec?"),
]


@pytest.mark.parametrize(("arguments", "said"), BEFORE, ids=[" ".join(a) for a, _ in BEFORE])
def test_wrong_options_are_said_before_anything_loads(shell, model_folder, tmp_path, arguments, said):
    (tmp_path / "model").mkdir()
    shutil.copy(model_folder / "config.json", tmp_path / "model")  # neither weights nor tokenizer
    ended = shell("generate", "--model", tmp_path / "model", "-p", "hi", *arguments)
    assert ended.code in (1, 2) and said in ended.err
    assert ended.err.startswith("error: ") and len(ended.err.splitlines()) == 1


def test_a_draft_in_the_place_of_a_model(shell, tmp_path):
    (tmp_path / "config.json").write_text('{"longdraft_format": 1, "drafter": "longspec"}')
    ended = shell("generate", "--model", tmp_path, "-p", "hi")
    assert ended.code == 1 and "holds a draft, which drafts for a model: give it as the draft" in ended.err


def test_a_text_that_is_too_long(generate):
    assert "with a rope_factor (YaRN)" in generate("-p", "hi", "-n", "9999").err


def test_an_option_without_a_method_says_which_was_chosen(generate):
    ended = generate("-p", "hi", "-n", "4", "-o", "branches=2")
    assert ended.code == 0
    assert "No --method: decoding with prompt-lookup, which has the option branches." in ended.err
    assert "No --method" not in generate("-p", "hi", "-n", "4").err


def test_filters_at_temperature_0_are_not_silent(generate):
    assert "--top-p: of no effect at temperature 0" in generate("-p", "hi", "-n", "4", "--top-p", "0.9").err


def test_a_prompt_that_leaves_no_room_in_the_bench(shell, model_folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}')
    ended = shell("bench", "--model", model_folder, "--data", tmp_path / "a.jsonl", "-n", 600)
    assert ended.code == 2 and "Ask for fewer with --max-tokens." in ended.err
