"""Properties of the checkout and of its tests: sizes, that they ask from outside, and that they see no GPU."""

from __future__ import annotations

import os
import re
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


def texts(*folders: str) -> dict[Path, str]:
    """The Python files below some folders."""
    return {file: file.read_text(encoding="utf-8") for each in folders for file in (ROOT / each).rglob("*.py")}


# Where a name with an underscore is defined, and where one is used.
DEFINED = re.compile(r"(?:\bdef |^)(_[a-z]\w*)|\bself\.(_[a-z]\w*)(?=[^=\n(]*?(?:: [^\n]*)? = )", re.MULTILINE)
USED = re.compile(r"(?:\.|^from longdraft\S* import .*?|setattr\(\w+, \")\b(_[a-z]\w*)", re.MULTILINE)
PUBLIC = re.compile(rf"^from longdraft\.\S+ import .*\b({'|'.join(longdraft.__all__)})\b(?! as)", re.MULTILINE)
# Names that torch and transformers have too.
THEIRS = {"_attn_implementation", "_schema", "_subclasses", "_tokenizer", "_tools"}


def test_tests_take_nothing_private_and_import_public_names_as_users_do():
    """Names with an underscore are other packages', or the test file's own."""

    def own(text: str) -> set[str]:
        return {name for pair in DEFINED.findall(text) for name in pair if name}

    private = set().union(*map(own, texts("src", "packages/longdraft-engines/src").values())) - THEIRS
    for file, text in texts("tests", "packages/longdraft-engines/tests").items():
        assert not {*USED.findall(text)} & private - own(text), file
        assert not PUBLIC.findall(text), file


def test_no_gpu_is_to_be_seen():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
