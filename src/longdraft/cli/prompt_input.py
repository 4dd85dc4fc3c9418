"""Reads the prompt: files, standard input, and the instruction that follows them."""

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
from longdraft.errors import PromptError, reason_of
from longdraft.files import file_errors, require_regular

STDIN = "-"
# Seconds without a byte on standard input before we say that we are waiting for it.
STDIN_WAIT = 2.0


class PromptParts(NamedTuple):
    """Attributes:
    document: long text, may be empty.
    instruction: what to do with it, may be empty; not both.
    """

    document: str
    instruction: str


def read_prompt(prompt: str | None, files: Sequence[str]) -> PromptParts:
    """Files, then standard input if something is piped into it, then the instruction.

    What is piped in is a document where there is an instruction, and the instruction where there is none.

    Raises:
        PromptError: nothing to read, or a file that is missing, a folder, binary or empty.
    """
    documents = [(name, _stdin_text() if name == STDIN else _file_text(name)) for name in files]
    piped = _stdin_text() if STDIN not in files and _piped(needed=prompt is None and not files) else ""
    instruction = prompt or ""
    if piped.strip():
        if instruction.strip():
            documents.append((STDIN, piped))
        else:
            instruction = piped
    if not documents and not instruction.strip():
        raise PromptError(
            "The prompt is empty: give one with -p TEXT, a document with --file PATH, or pipe text into it."
        )
    return PromptParts(_joined(documents), instruction)


def read_document(name: str) -> str:
    """A file's text, with its name before it; for errors, see :func:`read_prompt`."""
    return f"File: {Path(name).name}\n\n{_file_text(name).strip()}"


def _joined(documents: Sequence[tuple[str, str]]) -> str:
    if len(documents) < 2:
        return "".join(text for _, text in documents)
    names = ["standard input" if name == STDIN else Path(name).name for name, _ in documents]
    return "\n\n".join(f"File: {name}\n\n{text.strip()}" for name, (_, text) in zip(names, documents, strict=True))


def _file_text(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        raise PromptError(f"{name} is a folder: --file takes a text file; give the option once for each file.")
    with file_errors(name, f"{name} cannot be read", "Check the path.", PromptError):
        data = (path if path.parent.name == "fd" else require_regular(path)).read_bytes()  # <(...) of a shell
    return _text(data, name)


def _text(data: bytes, name: str) -> str:
    if b"%PDF-" in data[:1024]:  # some begin with a few other bytes
        return _pdf_text(data, name)
    if data.startswith(b"PK\x03\x04"):
        raise PromptError(f"{name} is a zip archive, as Word, EPUB and ODT files are: save it as plain text in UTF-8.")
    if b"\0" in data:
        raise PromptError(f"{name} is a binary file: give plain text in UTF-8.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is binary or not in UTF-8 (byte {error.start}): convert it, as with `iconv -t UTF-8`."
        ) from None
    if not text.strip():
        raise PromptError(f"{name} is empty.")
    return text


def _piped(needed: bool) -> bool:
    """True if standard input is a pipe or a file.

    A socket or device, which a parent process may have left there without a thought, only where nothing else is.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return False
    try:
        mode = fstat(sys.stdin.fileno()).st_mode
    except (OSError, io.UnsupportedOperation):  # closed, or replaced by an object without a file
        return True
    return needed or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _stdin_text() -> str:
    try:
        if sys.stdin.isatty() or not select.select([sys.stdin], [], [], STDIN_WAIT)[0]:
            console.note("Waiting for standard input; it ends with Ctrl-D.")
    except (OSError, ValueError, io.UnsupportedOperation):
        pass  # not something that can be waited for
    try:
        data = sys.stdin.buffer.read()
    except (OSError, ValueError):
        return ""
    return _text(data, "standard input") if data.strip() else ""


def _pdf_text(data: bytes, name: str) -> str:
    """The text of a PDF's pages, with a blank line between two, by pypdf where it is installed.

    Raises:
        PromptError: there is no pypdf, or nothing that it can read.
    """
    try:
        from pypdf import PdfReader
    except ImportError:
        raise PromptError(
            f'{name} is a PDF: pip install "longdraft[pdf]" and it is read, or make text of it, as with '
            "`pdftotext FILE.pdf FILE.txt`."
        ) from None
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # what is odd about a file that can be read
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise PromptError(f"{name} is a PDF with a password: take it off first, as with `qpdf --decrypt`.")
        found = "\n\n".join(page.extract_text() for page in reader.pages)
    except PromptError:
        raise
    except Exception as error:  # what a broken file leads to is beyond listing
        raise PromptError(f"{name} is a PDF that cannot be read: {reason_of(error)}. Make text of it.") from error
    if not found.strip():
        raise PromptError(f"{name} is a PDF without text, as of scanned pages: run text recognition (OCR) on it first.")
    return found
