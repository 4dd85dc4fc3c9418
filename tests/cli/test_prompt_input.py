"""Reading of prompts: files, standard input, their order, and refusals."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from longdraft.cli import prompt_input
from longdraft.errors import CapabilityError, PromptError


@pytest.fixture(autouse=True)
def _no_input(stdin):
    stdin(b"")


FILES = {"a.txt": b" one\n", "b.txt": b"two\n", "marked.txt": "\ufeffone".encode()}
BOTH = "File: a.txt\n\none\n\nFile: b.txt\n\ntwo"


@pytest.mark.parametrize(
    ("prompt", "files", "piped", "expected"),
    [
        ("why?", [], b"", ("", "why?")),
        ("why?", ["a.txt"], b"", (" one\n", "why?")),  # one file is the document as it is
        ("why?", ["a.txt", "b.txt"], b"", (BOTH, "why?")),  # several have their names
        (None, [], b"why?", ("", "why?")),  # what is piped in is the instruction where there is none
        ("why?", [], b"the report", ("the report", "why?")),  # and else a document
        ("why?", ["a.txt"], b"it", ("File: a.txt\n\none\n\nFile: standard input\n\nit", "why?")),
        ("why?", ["-"], b"the report", ("the report", "why?")),
        (None, ["marked.txt"], b"", ("one", "")),
    ],
)
def test_files_then_what_is_piped_in_then_the_instruction(stdin, tmp_path, prompt, files, piped, expected):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    stdin(piped)
    assert (
        prompt_input.read_prompt(prompt, [name if name == "-" else str(tmp_path / name) for name in files]) == expected
    )


def test_an_idle_device_on_standard_input_is_left_alone(stdin):
    with Path(os.devnull).open() as device:
        stdin(device)
        assert prompt_input.read_prompt("why?", []) == ("", "why?")


def test_a_real_pipe_is_read(stdin):
    out, into = os.pipe()
    os.write(into, "café".encode())
    os.close(into)
    with os.fdopen(out, encoding="utf-8") as end:
        stdin(end)
        assert prompt_input.read_prompt(None, []).instruction == "café"


@pytest.mark.parametrize(("prompt", "piped"), [(None, b""), ("  \n", b""), (None, b"\x89PNG\0")])
def test_nothing_to_read(stdin, prompt, piped):
    stdin(piped)
    with pytest.raises(PromptError):
        prompt_input.read_prompt(prompt, [])


@pytest.mark.parametrize(
    "content", [None, b"abc\0def", b"caf\xe9", b" \n", b"PK\x03\x04\x14\0", b"%PDF-1.4\n\0", "folder"]
)
def test_files_that_cannot_be_used(tmp_path, content):
    path = tmp_path / "a.txt"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptError, match=re.escape(str(path))):
        prompt_input.read_prompt("why?", [str(path)])


def pdf(text: str) -> bytes:
    """The smallest PDF with a line of text."""
    page = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(page), page),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    data, places = b"%PDF-1.4\n", []
    for i, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj%s endobj\n" % (i, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % len(data)
    return data + b"xref\n0 6\n0000000000 65535 f \n" + table + end


def test_a_pdf_is_read(tmp_path, monkeypatch):
    pytest.importorskip("pypdf")
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf("one two"))
    assert prompt_input.read_prompt("why?", [str(path)]).document.strip() == "one two"
    path.write_bytes(pdf(""))  # scanned pages
    with pytest.raises(PromptError):
        prompt_input.read_prompt("why?", [str(path)])
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(CapabilityError, match=r"longdraft\[pdf\]"):
        prompt_input.read_prompt("why?", [str(path)])
