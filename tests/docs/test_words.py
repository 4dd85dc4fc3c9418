"""Names are the field's (CONTRIBUTING.md, "How it is written"): private words do not come back, and docstrings name
what is there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "src" / "longdraft", ROOT / "packages" / "longdraft-engines" / "src"]
FILES = sorted(file for folder in SOURCES for file in folder.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
NATIVE = sorted(file for kind in ("*.cpp", "*.h") for file in (SOURCES[0] / "native").rglob(kind))
# Participles, pronouns and fillers, which say of nothing what it is, and words that only this project used.
_NAMES = """given asked told stated found theirs each going said kept placed known mine ours whole beside wanted shown
own more of at what here there like woven brief lighter quicken few_rows twin hosted unpaid paid avoid_forks rehearsal
likeliest goes begun"""
_NATIVE_NAMES = "woven weave is_brief BriefRows Kept Stored meet soften LEAST MOST LISTED"
NO_NAMES, NO_NATIVE_NAMES = set(_NAMES.split()), _NATIVE_NAMES.split()
# Keys of files and of JSON, which users have.
STAY = {"kernel_report.py": {"whole"}, "acceptance.py": {"asked"}}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a file defines, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def test_private_words_do_not_come_back():
    for file, tree in TREES.items():
        words = NO_NAMES - STAY.get(file.name, set())
        assert not [f"{file}:{line}: {name}" for name, line in names(tree) if name.strip("_").lower() in words]
    words = re.compile(rf"\b({'|'.join(NO_NATIVE_NAMES)})\b")
    assert not {file.name: found for file in NATIVE if (found := words.findall(file.read_text(encoding="utf-8")))}


def documented(node: ast.AST, section: str) -> Iterator[str]:
    """Names that a section of a docstring describes."""
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    found = re.search(rf"^{section}:\n((?:[ ].*\n?|\n)+)", text, re.MULTILINE)
    for line in found[1].splitlines() if found else ():
        if head := re.match(r"    ((?:\*{0,2}\w+, )*\*{0,2}\w+):", line):
            yield from (name.strip("* ") for name in head[1].split(","))


def test_docstrings_describe_what_is_there():
    for file, node in ((file, node) for file, tree in TREES.items() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            there = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            there |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
            assert set(documented(node, "Args")) <= there, f"{file}:{node.lineno}: {node.name}"
        elif isinstance(node, ast.ClassDef):
            there = {name for name, _ in names(node)}
            there |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            described = {*documented(node, "Args"), *documented(node, "Attributes")}
            assert described <= there, f"{file}:{node.lineno}: {node.name}: {described - there}"
