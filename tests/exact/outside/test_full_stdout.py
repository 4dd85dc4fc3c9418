"""Commands whose output nobody takes: a pipe that is closed, a disk that is full, a stdout that is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FULL = pytest.param("> /dev/full", marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux"))  # noqa: PTH110


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--version", "serve --help", "methods"])
@pytest.mark.parametrize("to", [FULL, ">&-", "| (exec 0<&-)"])
def test_a_command_ends_quietly_with_an_exit_code(words, to, unbuffered):
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
