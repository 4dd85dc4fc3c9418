"""What is said twice is said alike: the README's counts of models, and the command of `make demo`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longdraft.cli.main import app
from tests.support.tiny import tiny_folder
from tests.zoo.table import PAGE, rows

ROOT = Path(__file__).parents[2]


def test_the_readme_counts_the_models_of_the_table():
    hosted = sum(row.split("|")[2].strip() == "yes" for row in rows().values())
    said = re.findall(r"(\d+)\s+of\s+the\s+(\d+)\s+causal", (ROOT / "README.md").read_text(encoding="utf-8"))
    said += re.findall(r"(\d+) of the (\d+) causal", PAGE.read_text(encoding="utf-8"))
    assert said == [(str(hosted), str(len(rows())))] * 2


def demo() -> list[str]:
    """The words of ``make demo``, with what the shell would put into them."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    line = recipe[1].replace("\\\n", " ").replace("$$(", "$(").strip().lstrip("@")
    return shlex.split(re.sub(r"\$\(\$\(BIN\)/python -c '.*?'\)", "textwrap.py", line))


@pytest.mark.parametrize("width", ["60", "200"])
def test_make_demo_is_a_command_that_runs(tmp_path, monkeypatch, width):
    words = demo()
    assert words[:2] == ["$(BIN)/longdraft", "generate"] and {"--compare", "--file", "--prompt"} <= set(words)
    tiny_folder(tmp_path, context=1024)
    (tmp_path / "textwrap.py").write_text("def wrap(text):\n    return text\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", width)
    ran = CliRunner().invoke(app, [*words[1:], "--model", str(tmp_path)])
    assert ran.exit_code == 0 and "ar" in ran.output, ran.output
