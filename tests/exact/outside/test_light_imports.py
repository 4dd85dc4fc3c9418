"""Help, the version and errors of words load neither torch nor transformers; names are there all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy", "fastapi"}
LOADED = f"import sys; print(*sorted(set(sys.modules) & {HEAVY!r}), file=sys.__stderr__)"
VERBS = (
    "batch", "bench", "bench acceptance", "bench length", "bench quality", "chat",
    "doctor", "export", "generate", "methods", "reproduce", "serve", "train", "train data",
)  # fmt: skip
WRONG = (
    "genrate", "generate --promt x", "generate --max-tokens many", "serve --port 99999", "bench --data",
    "chat --top-p 7", "train eagle4", "train data text.jsonl --out x --method longspec", "chat --method longspce",
    "batch a b --method longspce", "serve -o branchs=2", "generate -p x --method longspce", "generate -p x -o branches",
    "generate -p x -o branchs=2", "generate -p x -o reduction=max",
    "generate -p x --method prompt-lookup -o branches=many", "generate -p x --method eagle3 --tree-top-k 0",
)  # fmt: skip


def run(code: str) -> tuple[str, list[str]]:
    """What a program prints, and the heavy packages that it has loaded."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{LOADED}"], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr.splitlines()[-1].split()


def test_help_the_version_and_errors_of_words():
    fine = ("--version", "--help", *(f"{verb} --help" for verb in VERBS))
    code = f"""
import io
from contextlib import redirect_stderr, redirect_stdout
from longdraft.cli.main import main
with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
    codes = [main(line.split()) for line in {fine + WRONG!r}]
print(*codes)"""
    printed, heavy = run(code)
    assert [*map(int, printed.split())] == [0] * len(fine) + [2] * len(WRONG) and heavy == []


def test_the_package_is_imported_when_it_is_used():
    printed, heavy = run("import longdraft; print(longdraft.__version__, 'Speculator' in dir(longdraft))")
    assert printed.split()[1] == "True" and heavy == []
    # A name loads what it needs; all names and the list of methods are there, whatever came first.
    printed, _ = run(
        "import longdraft.speculator, longdraft\n"
        "print(*(getattr(longdraft, name) is not None for name in longdraft.__all__))\n"
        "from longdraft import methods\nprint(len(methods()) == len(longdraft.methods()) > 10)"
    )
    assert set(printed.split()) == {"True"}
    with pytest.raises(AttributeError, match="nothing_like_it"):
        import longdraft

        longdraft.nothing_like_it  # noqa: B018
