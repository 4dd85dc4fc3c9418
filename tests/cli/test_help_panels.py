"""What ``--help`` shows first, and what shells complete."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

from longdraft.cli.completion import bash, verbs_of

VERBS = ("generate", "chat", "serve", "batch", "bench", "methods", "doctor", "export", "completion")


def panels(text: str) -> dict[str, list[str]]:
    """Panel -> the long flags, or commands, that stand in it."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.match(r"^╭─ (.+?) ─+╮", line):
            found[title[1]] = own = []
        elif flag := re.match(r"^│ (--[\w-]+|[a-z]+( [a-z]+)?)  ", line):
            own.append(flag[1])
    return found


@pytest.mark.parametrize("width", ["80", "120"])
def test_what_matters_stands_first(shell, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("TERMINAL_WIDTH", width)
    found = panels(shell("generate", "--help").out)
    first = next(iter(found))
    assert first == "Options" and len(found[first]) <= 12
    assert {"--prompt", "--file", "--model", "--method", "--max-tokens", "--temperature", "--compare"} <= set(
        found[first]
    )
    assert {"Sampling", "Draft and tree", "Model and memory"} <= found.keys()


def test_verbs_stand_in_groups(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = panels(shell("--help").out)
    assert found["Write"] == ["generate", "chat", "serve", "batch"]
    assert {"Write", "Look around", "Measure", "Train and export"} <= found.keys()


def verbs():
    import typer

    from longdraft.cli.main import app

    return verbs_of(typer.main.get_command(app))


def test_all_verbs_and_flags_are_completed():
    found = verbs()
    assert {*VERBS, "bench quality", "train eagle3", "train data"} <= found.keys()
    assert {"--method", "--file", "-o", "--help"} <= found["generate"].keys()
    assert "specpv" in found["generate"]["--method"] and found["generate"]["--weights"] == ["stored", "float32"]
    assert found["generate"]["--compare"] is None and found["generate"]["--file"] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gen"], ["generate"]),
        (["bench", "qu"], ["quality"]),
        (["generate", "--method", "specp"], ["specpv", "specpv-exact"]),
        (["bench", "needle", "--needle-d"], ["--needle-depths"]),
        (["train", "eag"], ["eagle3", "eagle"]),
        (["generate", "--weights", ""], ["stored", "float32"]),
        (["generate", "--file", "REA"], ["README.md"]),
    ],
)
def test_bash_completes(words, expected, tmp_path):
    (tmp_path / "README.md").touch()
    script = (
        bash(verbs())
        + f"\nCOMP_WORDS=(longdraft {' '.join(w or chr(34) * 2 for w in words)}); COMP_CWORD={len(words)}\n"
    )
    script += '_longdraft; printf "%s\\n" "${COMPREPLY[@]}"'
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert run.stdout.split() == expected and not run.stderr


def test_fish_is_told_every_verb_and_what_follows_a_flag(shell, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    told = [shlex.split(line)[1:] for line in shell("completion").out.splitlines()]
    assert all(words[:2] == ["-c", "longdraft"] for words in told)
    rules = [words[3:] for words in told if words[2] == "-n"]
    assert {rule[2] for rule in rules if rule[0] == "__fish_use_subcommand"} >= {"generate", "bench", "train"}
    generate = [rule[1:] for rule in rules if rule[0] == "__fish_seen_subcommand_from generate"]
    assert ["-l", "weights", "-x", "-a", "stored float32"] in generate  # one of these
    assert ["-l", "file", "-r", "-F"] in generate and ["-l", "compare"] in generate  # a file, and nothing
    assert ["__fish_seen_subcommand_from bench", "-a", "quality"] in rules
    needle = "__fish_seen_subcommand_from bench ; and __fish_seen_subcommand_from needle"
    assert [needle, "-l", "needle-depths", "-r", "-F"] in rules


def test_scripts_are_printed(shell, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/bash")
    bash = shell("completion").out
    assert shell("completion", "bash").out == bash and shell("completion", "zsh").out.endswith(bash)
    assert shell("completion", "zsh").out.startswith("autoload -U +X compinit")
    assert shell("completion", "csh").code == 2
