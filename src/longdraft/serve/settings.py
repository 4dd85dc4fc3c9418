"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from longdraft.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """Attributes:
    name: the model's, as clients name it.
    methods: those that a request may name, the first where it names none.
    slots: requests decoded at a time, for each method. context: tokens of the longest text, prompt and output.
    queue: requests that wait at most; more are refused with 429.
    max_tokens: emitted at most, a request; and where a request says nothing.
    timeout: seconds that a request may take, waiting included.
    max_body: bytes of a request. body_seconds: that it may take to arrive.
    keys: API keys, by the name that each tenant has; empty: none is asked for.
    piece: prompt tokens that are read between two rounds of the others.
    earlier: so many tokens of a tenant's earlier requests are looked up too.
    snapshots: folder for the prompts of slots; None: they do not survive a restart. snapshot_bytes: of all of them.
    """

    name: str
    methods: tuple[str, ...]
    slots: int = 4
    context: int = 8192
    queue: int = 64
    max_tokens: int = 4096
    default_tokens: int = 512
    timeout: float = 600.0
    max_body: int = 8 << 20
    body_seconds: float = 30.0
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    piece: int = 512
    earlier: int = 0
    snapshots: Path | None = None
    snapshot_bytes: int = 4 << 30


def read_keys(file: Path) -> dict[str, str]:
    """API keys of a file: a key a line, or a tenant's name, a space and the key; # begins a comment.

    Raises:
        RequestError: it cannot be read, has no key, or two tenants of one name.
    """
    try:
        lines = [line.split("#")[0].split() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--api-key-file {file}: {error}.") from error
    found: dict[str, str] = {}
    for number, words in enumerate(lines, 1):
        if not words:
            continue
        if len(words) > 2:
            raise RequestError(
                f"--api-key-file {file}, line {number}: a name and a key, or a key, not {len(words)} words."
            )
        name = words[0] if len(words) == 2 else f"key {number}"
        if name in found or words[-1] in found.values():
            raise RequestError(f"--api-key-file {file}, line {number}: this name or key is there twice.")
        found[name] = words[-1]
    if not found:
        raise RequestError(f"--api-key-file {file} has no key.")
    return found
