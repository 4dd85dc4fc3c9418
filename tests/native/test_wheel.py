"""Where there is no compiler, a wheel carries no kernels. One that does is installed by tests/docs/test_install.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_without_a_compiler_a_wheel_carries_none(tmp_path):
    """Built from a copy of the checkout by what `python -m build` calls."""
    copy, out = tmp_path / "copy", tmp_path / "out"
    # Without the drafts, which take long to pack.
    shutil.copytree(
        ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.safetensors", "*.egg-info", "__pycache__")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    env = {**os.environ, "CXX": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    assert file.name.endswith("-py3-none-any.whl")
    assert "no kernels in this wheel" in done.stdout and "/nonexistent" in done.stdout
    assert not [name for name in zipfile.ZipFile(file).namelist() if name.endswith(".so")]
