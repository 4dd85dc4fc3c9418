"""Commands whose output nobody takes: a pipe that is closed, a disk that is full, a stdout that is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cli.conftest import model_folder

__all__ = ["model_folder"]  # a fixture

FULL = pytest.param("> /dev/full", marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux"))  # noqa: PTH110


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("to", [FULL, ">&-", "| (exec 0<&-)"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_ends_quietly_with_an_exit_code(to, unbuffered):
    words = "--version" if unbuffered else "serve --help"
    run = f"{sys.executable} -m longdraft {words}; echo exit $? >&2"
    script = f"({run}) {to}"
    ended = subprocess.run(
        ["sh", "-c", script],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        check=False,
    )
    *said, code = ended.stderr.splitlines()
    assert code.startswith("exit ") and code != "exit 0"
    assert len(said) <= 1 and not any("Traceback" in line or "Exception" in line for line in said)
    assert all("stdout" in line for line in said)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("to", [FULL])
def test_a_chat_ends_where_nobody_takes_its_answers(model_folder, to):
    script = (
        f"(printf 'a\\nb\\nc\\n' | {sys.executable} -m longdraft chat -m {model_folder} --max-tokens 3; "
        f"echo exit $? >&2) {to}"
    )
    ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    *said, code = ended.stderr.splitlines()
    assert code == "exit 1" and ended.stderr.count("Reading the prompt") <= 1
    assert all("stdout" in line for line in said if line.startswith("error"))
