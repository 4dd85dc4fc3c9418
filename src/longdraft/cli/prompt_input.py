"""Reads a prompt: documents from files or standard input, and an instruction, which follows them in the prompt."""

from __future__ import annotations

import io
import logging
import select
import stat
import sys
from collections.abc import Sequence
from os import fstat
from pathlib import Path
from typing import NamedTuple

from longdraft.cli import console
from longdraft.errors import PromptError, needs_extra, reason_of
from longdraft.files import file_errors, require_regular

STDIN = "-"
# After this many seconds without input, a note says that standard input is read.
STDIN_WAIT = 2.0


class PromptParts(NamedTuple):
    """The two parts of a prompt. One of them may be empty."""

    document: str
    instruction: str


def read_prompt(prompt: str | None, files: Sequence[str]) -> PromptParts:
    """Reads files, then standard input if it is piped, then the instruction.

    Piped text is a document if there is an instruction; otherwise, it is the instruction.

    Raises:
        PromptError: the prompt is empty, or a file is missing, a folder, binary or empty.
    """
    documents = [(name, _read_stdin() if name == STDIN else _read_file(name)) for name in files]
    piped = _read_stdin() if STDIN not in files and _piped(needed=prompt is None and not files) else ""
    instruction = prompt or ""
    if piped.strip():
        if instruction.strip():
            documents.append((STDIN, piped))
        else:
            instruction = piped
    if not documents and not instruction.strip():
        raise PromptError("The prompt is empty: use -p TEXT, --file PATH, or pipe text into the command.")
    return PromptParts(_join(documents), instruction)


def read_document(name: str) -> str:
    """Returns a file's text below its name. Raises as :func:`read_prompt`."""
    return f"File: {Path(name).name}\n\n{_read_file(name).strip()}"


def _join(documents: Sequence[tuple[str, str]]) -> str:
    """Joins (name, text) documents. Names are written above the texts if there are several documents."""
    if len(documents) < 2:
        return "".join(text for _, text in documents)
    names = ["standard input" if name == STDIN else Path(name).name for name, _ in documents]
    return "\n\n".join(f"File: {name}\n\n{text.strip()}" for name, (_, text) in zip(names, documents, strict=True))


def _read_file(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        raise PromptError(f"{name} is a folder: --file takes a text file; repeat --file for several files.")
    with file_errors(name, f"{name} cannot be read", "Check the path.", PromptError):
        # /dev/fd/N, a shell's <(...), is not a regular file, but may be read.
        data = (path if path.parent.name == "fd" else require_regular(path)).read_bytes()
    return _decode(data, name)


def _decode(data: bytes, name: str) -> str:
    """Returns the text of a UTF-8 file or a PDF. Raises PromptError for other formats and empty files."""
    if b"%PDF-" in data[:1024]:  # the format allows a few other bytes before
        return _decode_pdf(data, name)
    if data.startswith(b"PK\x03\x04"):
        raise PromptError(f"{name} is a zip archive, as Word, EPUB and ODT files are: save it as plain text in UTF-8.")
    if b"\0" in data:
        raise PromptError(f"{name} is a binary file: give plain text in UTF-8.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is binary or not in UTF-8 (byte {error.start}): use `iconv -t UTF-8`.") from None
    if not text.strip():
        raise PromptError(f"{name} is empty.")
    return text


def _piped(needed: bool) -> bool:
    """True if standard input is a pipe or a file. ``needed``: also True for any other input but a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return False
    try:
        mode = fstat(sys.stdin.fileno()).st_mode
    except (OSError, io.UnsupportedOperation):  # closed, or replaced by an object without a file
        return True
    return needed or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
    try:
        if sys.stdin.isatty() or not select.select([sys.stdin], [], [], STDIN_WAIT)[0]:
            console.note("Waiting for standard input; it ends with Ctrl-D.")
    except (OSError, ValueError, io.UnsupportedOperation):
        pass  # select does not support this kind of input
    try:
        data = sys.stdin.buffer.read()
    except (OSError, ValueError):
        return ""
    return _decode(data, "standard input") if data.strip() else ""


def _decode_pdf(data: bytes, name: str) -> str:
    """Returns the text of a PDF's pages, separated by blank lines. Raises PromptError if there is none."""
    with needs_extra("pdf", f"{name} is a PDF: convert it with `pdftotext FILE.pdf`, or install pypdf"):
        from pypdf import PdfReader
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # hides warnings about odd but readable files
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise PromptError(f"{name} is a PDF with a password: remove it, for example with `qpdf --decrypt`.")
        text = "\n\n".join(page.extract_text() for page in reader.pages)
    except PromptError:
        raise
    except Exception as error:  # pypdf raises many types of errors for broken files
        raise PromptError(f"{name} is a PDF that cannot be read: {reason_of(error)}. Convert it to text.") from error
    if not text.strip():
        raise PromptError(f"{name} is a PDF without text, like scanned pages: run text recognition (OCR) on it first.")
    return text
