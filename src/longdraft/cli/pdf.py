"""The text of PDFs, by pypdf where it is installed."""

from __future__ import annotations

import io
import logging

from longdraft.errors import PromptError, reason_of


def is_pdf(data: bytes) -> bool:
    """True for the bytes of a PDF, some of which begin with a few other bytes."""
    return b"%PDF-" in data[:1024]


def text(data: bytes, name: str) -> str:
    """The text of all pages, with a blank line between two.

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
