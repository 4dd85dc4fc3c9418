"""Settings of a server, and its file of API keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from longdraft.errors import RequestError
from longdraft.files import file_errors, require_regular

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServerSettings:
    """Attributes:
    name: the model's name for clients.
    methods: the methods that a request may name; the first is the default.
    slots: requests decoded at a time, for each method. context: tokens of the longest text, prompt and output.
    queue: requests that may wait; more are refused with 429.
    max_tokens: the most new tokens of an answer; None: as many as there is room for.
    timeout: seconds that a request may take, waiting included. preparing: those of its texts and grammars.
    sse_ping_interval: seconds after which a stream without news has a comment.
    think: whether templates that know it let the model think, unless the request says.
    max_body_bytes: bytes of a request. body_timeout: seconds that it may take to arrive, as its headers may.
    connections: that may be open; None: half of the files that the process may have.
    keys: tenant -> API key; empty: no key is needed.
    hosts: names that requests may call the server by, with * for any part; 0.0.0.0: also any address.
    origins: pages of these origins may read answers, with * for all.
    piece: prompt tokens that are read between two rounds of the other requests.
    foresee: whether drafts may know the coming random numbers.
    earlier: tokens of a tenant's earlier requests that lookups search too.
    prefix_cache_bytes: limit of the texts that are kept in memory when others take their slots.
    snapshots: folder for prompts; None: they do not survive a restart. snapshot_bytes: limit of all files together.
    """

    name: str
    methods: tuple[str, ...]
    slots: int = 4
    context: int = 8192
    queue: int = 64
    max_tokens: int | None = None
    timeout: float = 600.0
    prepare_timeout: float = 60.0
    sse_ping_interval: float = 5.0
    think: bool = True
    foresee: bool = True
    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0
    connections: int | None = None
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = ("*",)
    origins: tuple[str, ...] = ()
    prefill_chunk: int = 512
    earlier: int = 0
    snapshots: Path | None = None
    snapshot_bytes: int = 4 << 30
    prefix_cache_bytes: int = 2 << 30


def normalize_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Origins as browsers write them.

    Raises:
        RequestError: one that is none, such as an address with a path.
    """
    found = tuple(origin.lower().removesuffix("/") for origin in origins)
    for origin in found:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            raise RequestError(f"--allow-origin takes an origin such as http://localhost:3000, or *, not {origin!r}.")
    return found


def read_api_keys(file: Path) -> dict[str, str]:
    """The API keys in a file. A line has a key, or a tenant's name and a key; # begins a comment.

    Raises:
        RequestError: the file cannot be read, has no key, or names a tenant or key twice.
    """
    with file_errors(file, f"--api-key-file {file} cannot be read", kind=RequestError):
        lines = [line.split("#")[0].split() for line in require_regular(file).read_text(encoding="utf-8").splitlines()]
    keys: dict[str, str] = {}
    for number, words in enumerate(lines, 1):
        if not words:
            continue
        if len(words) > 2:
            raise RequestError(
                f"--api-key-file {file}, line {number}: a name and a key, or a key, not {len(words)} words."
            )
        name = words[0] if len(words) == 2 else f"key {number}"
        if name in keys or words[-1] in keys.values():
            raise RequestError(f"--api-key-file {file}, line {number}: this name or key is there twice.")
        keys[name] = words[-1]
    if not keys:
        raise RequestError(f"--api-key-file {file} has no key.")
    return keys
