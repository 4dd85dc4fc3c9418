"""Properties of the checkout and of its tests: sizes, that they ask from outside, and that they see no GPU."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
import torch

import longdraft

ROOT = Path(__file__).parents[2]
MOST = 40 * 2**20


def test_the_tracked_tree_stays_small():
    """It travels to GPU machines whole; drafts that ship are stored in 8 bits or fewer."""
    try:
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    files = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    sizes = {file: file.lstat().st_size for file in files if os.path.lexists(file)}
    largest = ", ".join(f"{file.relative_to(ROOT)} {size / 2**20:.1f}" for file, size in _largest(sizes))
    assert sum(sizes.values()) < MOST, f"the largest, in MiB: {largest}"


def _largest(sizes: dict[Path, int]) -> list[tuple[Path, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])[:5]


CORE, LINES = ("engine", "drafters", "trees", "views", "planning"), 10_770


def test_the_algorithm_stays_readable():
    """These five rooms are the algorithm; the aim is 7,000 lines."""
    files = [file for room in CORE for file in (ROOT / "src" / "longdraft" / room).rglob("*.py")]
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    longest = sorted(lines, key=lines.__getitem__)[-5:]
    assert sum(lines.values()) <= LINES, [str(file) for file in longest]


def parsed(*folders: str) -> dict[str, ast.Module]:
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if ".venv" not in str(file)]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def own(tree: ast.Module) -> set[str]:
    """Names with an underscore that a file defines: functions, and attributes of ``self``."""
    nodes = list(ast.walk(tree))
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


# Names that torch and transformers have too.
THEIRS = {"_attn_implementation", "_schema"}


def test_tests_take_nothing_that_is_private():
    """Names with an underscore are other packages', or the test file's own."""
    private, found = set().union(*map(own, parsed("src", "packages/longdraft-engines/src").values())), []
    for file, tree in parsed("tests", "packages/longdraft-engines/tests").items():
        hidden = private - own(tree)
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longdraft"):
                names = [alias.name for alias in node.names]
            found += [f"{file}:{node.lineno} {name}" for name in names if name in hidden and name not in THEIRS]
    assert found == []


def test_tests_import_public_names_as_users_do():
    found = [
        f"{file}: {node.module}.{alias.name}"
        for file, tree in parsed("tests", "packages/longdraft-engines/tests").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longdraft.")
        for alias in node.names
        if alias.name in {*longdraft.__all__} - {"methods"}  # a module too
    ]
    assert found == []


def test_no_gpu_is_to_be_seen():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
