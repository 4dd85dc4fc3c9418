"""A tiny model in a folder, and a way to run a command line as a shell would."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest

from longdraft.cli import options
from longdraft.cli.main import main
from tests.bench.conftest import no_collections
from tests.support.tiny import tiny_model, tiny_tokenizer

__all__ = ["no_collections"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Shell = Callable[..., Ended]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(context=512).save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes | TextIO], None]:
    """``stdin(b"...")`` puts these bytes, or an open file, in the place of standard input."""

    def put(source: bytes | TextIO) -> None:
        stream = io.TextIOWrapper(io.BytesIO(source)) if isinstance(source, bytes) else source
        monkeypatch.setattr(sys, "stdin", stream)

    return put


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], stdin: Callable[[bytes | TextIO], None]) -> Shell:
    """``shell("generate", "-p", "hi", stdin=b"...")``: exit code, stdout and stderr."""

    put = stdin

    def run(*arguments: object, stdin: bytes = b"") -> Ended:
        put(stdin)
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        return Ended(code, *capsys.readouterr())

    yield run
    options.reset_debug()


@pytest.fixture
def generate(shell: Shell, model_folder: Path) -> Shell:
    """``longdraft generate`` on the tiny model."""

    def run(*arguments: object, stdin: bytes = b"") -> Ended:
        return shell("generate", "--model", model_folder, *arguments, stdin=stdin)

    return run
