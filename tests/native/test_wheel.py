"""A wheel carries compiled kernels, so what is installed from it needs no compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from longdraft.native import build
from tests.native.levels import needs_kernels

pytest.importorskip("setuptools", minversion="77")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def wheel(tmp_path: Path, **env: str) -> tuple[Path, str]:
    """Built from a copy of the checkout by what `python -m build` calls; and what it printed."""
    copy, out = tmp_path / "copy", tmp_path / "out"
    # Without the drafts, which take longer to pack than the kernels to compile.
    shutil.copytree(
        ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.safetensors", "*.egg-info", "__pycache__")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    printed = run([sys.executable, "-c", code], copy, **env)
    (file,) = out.iterdir()
    return file, printed


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_kernels
def test_kernels_that_are_carried_are_taken_without_a_compiler(tmp_path):
    file, _ = wheel(tmp_path)
    assert file.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    site, cache = tmp_path / "site", tmp_path / "cache"
    zipfile.ZipFile(file).extractall(site)
    carried = sorted((site / "longdraft/native" / build.CARRIED).iterdir())
    levels = set(build.machine_levels())
    assert {re.fullmatch(r"kernels-(.*)-[0-9a-f]{16}\.so", f.name)[1] for f in carried} == levels
    for kernels in carried:
        # Of the C library no more than torch's own wheels need.
        assert max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", kernels.read_bytes())) <= 28
    code = "from longdraft import native; print(native.__file__, native.kernels().level)"
    env = {"PYTHONPATH": str(site), "LONGDRAFT_CACHE": str(cache), "CXX": "/nonexistent", "LONGDRAFT_NATIVE": "1"}
    place, level = run([sys.executable, "-c", code], tmp_path, **env).split()
    assert Path(place).is_relative_to(site) and level == build.levels()[0]
    assert not cache.exists()


def test_without_a_compiler_a_wheel_carries_none(tmp_path):
    file, printed = wheel(tmp_path, CXX="/nonexistent")
    assert file.name.endswith("-py3-none-any.whl")
    assert "no kernels in this wheel" in printed and "/nonexistent" in printed
    assert not [name for name in zipfile.ZipFile(file).namelist() if name.endswith(".so")]
