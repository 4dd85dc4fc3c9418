"""The docs name only things that exist: links, files and names of the code, signatures, flags of commands."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import runpy
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

import longdraft
from longdraft import errors
from longdraft.bench.papers import PAPERS, get_table
from longdraft.cli.main import app
from longdraft.options import declared
from longdraft.registry import KINDS
from tests import options_page
from tests.support.tiny import tiny_model
from tests.zoo.table import PAGE as MODELS
from tests.zoo.table import rows

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "longdraft"
PAGES = [
    ROOT / "README.md", ROOT / "benchmarks" / "records.md", SOURCE / "PAPERS.md", *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip
API = (ROOT / "docs" / "api.md").read_text()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head) for head in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def names_in(path: Path) -> set[str]:
    """The names that a file defines: `name`, and `Class.name`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@each_page
def test_files_and_names_of_the_code_exist(page):
    """Tables of a paper beside the code name `file.py` `Name.method`, `other`."""
    for name, symbols in re.findall(r"`([\w/]+\.py)`((?:(?: |, | and )`[A-Z][\w.]*`| `[a-z_]\w*`)*)", prose(page)):
        file = next((p for p in (SOURCE / name, ROOT / name) if p.is_file()), None)
        if file is None:
            assert "/" not in name, name
            continue
        if file.is_relative_to(SOURCE):
            for symbol in re.findall(r"`([\w.]+)`", symbols):
                assert symbol in names_in(file), f"{name}: {symbol}"


def signature(name: str) -> str:
    """Returns a signature as the page shows it: no annotations, no self, functions and classes as dots."""
    function = pkgutil.resolve_name(name)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    words, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else "=..." if callable(p.default) else f"={p.default!r}"
        words.append(f"{stars}{p.name}{default}")
    return f"{name}({', '.join(words)})"


CALLS = [
    " ".join(call.split())
    for block in re.findall(r"```text\n(.*?)```", API, re.DOTALL)
    for call in re.findall(r"^longdraft\.[\w.]+\(.*?\)$", block, re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.partition("(")[0])
def test_signatures_of_the_api_are_the_codes(call):
    assert call == signature(call.partition("(")[0])


def test_the_api_page_names_all_there_is():
    for name in longdraft.__all__:
        assert re.search(rf"\b{name}\b", API), name
    exceptions = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert exceptions <= set(re.findall(r"`(\w+Error)`", API))
    assert set(re.findall(r"`(\w+Error)`", API)) - exceptions <= set(dir(__import__("builtins")))


@pytest.mark.parametrize("name", ["Step", "Result"])
def test_attributes_of_the_api_exist(name):
    kind = getattr(longdraft, name)
    table = API.split(f"| `{name}` | |")[1].split("\n\n")[0]
    listed = {word for row in table.splitlines()[2:] for word in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert is_dataclass(kind)
    assert {f.name for f in fields(kind)} <= listed
    assert all(hasattr(kind, word) or word in {f.name for f in fields(kind)} for word in listed)
    for owner, attribute in re.findall(r"`(Speculator|Session)\.(\w+)`", API):
        assert hasattr(getattr(longdraft, owner), attribute)


def commands() -> list[str]:
    """Each `longdraft` command of the pages: the lines of blocks, and code inside of sentences and tables; and of the
    notes on papers' tables. The records' sentences name what was run then."""
    texts = [page.read_text() for page in (*PAGES, SOURCE / "bench" / "papers" / "published.md")]
    records = (ROOT / "benchmarks" / "records.md").read_text()
    blocks = [block for text in texts for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    lines = [line for block in blocks for line in re.sub(r"\s*\\?\n    +", " ", block).splitlines()]
    notes = [text for paper in PAPERS.values() for table in paper.tables for text in table.remarks]
    notes += [line.note for paper in PAPERS.values() for table in paper.tables for line in table.lines]
    prose_texts = [
        re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for text in (*texts, *notes)
        if text != records
    ]
    lines += [" ".join(code.split()) for text in prose_texts for code in re.findall(r"`(longdraft [^`]*)`", text)]
    return [line for line in lines if re.match(r"longdraft [a-z]", line) and "..." not in line]


def test_commands_flags_tables_and_settings_exist():
    """Placeholders in capitals are not read."""
    whole: Any = typer.main.get_command(app)
    lines = commands()
    assert len(lines) > 100
    for line in lines:
        command, words = whole, shlex.split(line, comments=True)[1:]
        path: list[str] = []
        while words and hasattr(command, "get_command"):
            if words[0] == "--load":  # of `longdraft train`, before the kind's name
                words = words[2:]
            elif " ".join(words[:2]) in getattr(command, "commands", ()):  # `bench quality` is a verb of its own
                command, path, words = command.commands[" ".join(words[:2])], [*path, *words[:2]], words[2:]
            elif (inner := command.get_command(click.Context(command), words[0])) is None:
                assert words[0].startswith("-") or words[0].isupper() or "--load" in line, line
                break
            else:
                command, path, words = inner, [*path, words[0]], words[1:]
        known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert flags <= known, f"{line}: {sorted(flags - known)}"
        arguments = [word for word in words if not word.startswith("-") and not word.isupper()]
        if path == ["reproduce"] and len(arguments) > 1 and arguments[0] in PAPERS:
            get_table(PAPERS[arguments[0]], arguments[1])
        if path[:1] == ["train"] and path[1:2] and path[1] in KINDS:
            config = KINDS[path[1]].training.load_settings()
            settings = {word.partition("=")[0] for word in arguments if re.match(r"[a-z_]+=", word)}
            assert settings <= {*declared(config)}, f"{line}: {sorted(settings - {*declared(config)})}"


def test_the_readme_counts_the_models_of_the_table():
    hosted = sum(row.split("|")[2].strip() == "yes" for row in rows().values())
    said = re.findall(r"(\d+)\s+of\s+the\s+(\d+)\s+causal", (ROOT / "README.md").read_text(encoding="utf-8"))
    said += re.findall(r"(\d+) of the (\d+) causal", MODELS.read_text(encoding="utf-8"))
    assert said == [(str(hosted), str(len(rows())))] * 2


def test_the_table_of_options_is_the_catalogue():
    text = options_page.PAGE.read_text(encoding="utf-8")
    assert text == options_page.HEAD + options_page.table(), "run: python -m tests.options_page"


@pytest.mark.usefixtures("restored_registries")
def test_the_drafter_of_your_own_decodes_as_the_target_does():
    runpy.run_path(str(ROOT / "examples" / "last_seen.py"))
    model, prompts = tiny_model(vocab=11), [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3]]
    want = longdraft.Speculator("ar", target=model).generate(prompts, max_new_tokens=30)
    found = longdraft.Speculator("last-seen", target=model, depth=3).generate(prompts, max_new_tokens=30)
    assert [r.token_ids for r in found] == [r.token_ids for r in want]
    assert sum(r.accepted for r in found) > 0
