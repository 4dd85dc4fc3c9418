"""The panels of ``--help``, and shell completion."""

from __future__ import annotations

import re

import pytest


def panels(text: str) -> dict[str, list[str]]:
    """Panel -> its long flags, or commands."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.match(r"^╭─ (.+?) ─+╮", line):
            found[title[1]] = own = []
        elif flag := re.match(r"^│ (--[\w-]+|[a-z]+( [a-z]+)?)  ", line):
            own.append(flag[1])
    return found


def test_what_matters_stands_first_and_verbs_in_groups(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    found = panels(shell("generate", "--help").out)
    wanted = {"--prompt", "--file", "--model", "--method", "--max-tokens", "--temperature", "--compare"}
    assert next(iter(found)) == "Options" and len(found["Options"]) <= 12 and wanted <= {*found["Options"]}
    assert {"Sampling", "Draft and tree", "Model and memory"} <= found.keys()
    found = panels(shell("--help").out)
    assert found["Write"] == ["generate", "chat", "serve", "batch"]
    assert {"Write", "Look around", "Measure", "Train and export"} <= found.keys()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gen"], ["generate"]),
        (["bench", "qu"], ["quality"]),
        (["generate", "--method", "specp"], ["specpv"]),
        (["train", "eag"], ["eagle", "eagle3"]),
        (["generate", "--weights", ""], ["float32", "stored"]),
        (["generate", "--file", "REA"], []),  # the shell's own files
    ],
)
def test_shells_complete(shell, monkeypatch, words, expected):
    for name, value in {
        "_LONGDRAFT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["longdraft", *words]), "COMP_CWORD": len(words)
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    assert sorted(shell().out.split()) == expected
