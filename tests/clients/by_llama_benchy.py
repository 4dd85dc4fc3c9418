"""llama-benchy: a short measurement, on a text of our own instead of its download."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from program import MODEL, TOKENIZER, URL, folder, run

book = "http://127.0.0.1/book.txt"
kept = folder / ".cache" / "llama-benchy" / f"{hashlib.md5(book.encode()).hexdigest()}.txt"
kept.parent.mkdir(parents=True)
kept.write_text((Path(subprocess.__file__).read_text() + "\n") * 4)
said = run(
    "llama-benchy", "--base-url", URL, "--model", MODEL, "--tokenizer", TOKENIZER, "--book-url", book,
    "--pp", "256", "--tg", "32", "--runs", "2", "--depth", "0", "512", "--exact-tg", "--exit-on-first-fail",
    "--skip-coherence",
)  # fmt: skip
assert "tg32" in said
