"""llama-benchy: a short measurement, on a text of our own instead of its download."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

home = Path(tempfile.mkdtemp())
book = "http://127.0.0.1/book.txt"
kept = home / ".cache" / "llama-benchy" / f"{hashlib.md5(book.encode()).hexdigest()}.txt"
kept.parent.mkdir(parents=True)
kept.write_text((Path(subprocess.__file__).read_text() + "\n") * 4)
command = [
    str(Path(sys.executable).with_name("llama-benchy")), "--base-url", os.environ["BASE_URL"], "--model",
    os.environ["MODEL"], "--tokenizer", os.environ["TOKENIZER"], "--book-url", book, "--pp", "256", "--tg", "32",
    "--runs", "2", "--depth", "0", "512", "--exact-tg", "--exit-on-first-fail", "--skip-coherence",
]  # fmt: skip
done = subprocess.run(command, env=os.environ | {"HOME": str(home)}, text=True, capture_output=True)
print(done.stdout, done.stderr)
done.check_returncode()
assert "tg32" in done.stdout
