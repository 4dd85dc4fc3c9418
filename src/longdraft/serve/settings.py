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
    slots: requests decoded at a time, for each method. context: most tokens of a prompt and its output together.
    queue: requests that may wait; more are refused with 429.
    max_tokens: limit of new tokens; None: what the context leaves.
    timeout: seconds for a request, waiting included. prepare_timeout: seconds for tokenizing it and its grammars.
    sse_ping_interval: a stream sends a keep-alive after this many seconds without an event.
    think: whether chat templates that support it enable thinking, unless the request says.
    max_body_bytes: of a request. body_timeout: seconds until it has arrived; its headers have as many.
    connections: limit of open ones; None: half of the process's file descriptors.
    keys: tenant -> API key; empty: no key is needed.
    hosts: accepted values of the Host header, where * matches any part; 0.0.0.0: also any IP address.
    origins: pages of these origins may read answers (CORS); * for all.
    prefill_chunk: prompt tokens that are read between two rounds of the other requests.
    foresee: whether drafts may use the random numbers that the target will be sampled with.
    earlier: lookups also search this many tokens of a tenant's earlier requests.
    prefix_cache_bytes: limit of the tree of prefixes that lost their slot.
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
    """Origins as browsers send them.

    Raises:
        RequestError: one is not an origin, such as an address with a path.
    """
    normalized = tuple(origin.lower().removesuffix("/") for origin in origins)
    for origin in normalized:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            raise RequestError(f"--allow-origin takes an origin such as http://localhost:3000, or *, not {origin!r}.")
    return normalized


def read_api_keys(file: Path) -> dict[str, str]:
    """{tenant: API key} from a file. A line has a key, or a tenant's name and a key; # begins a comment.

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
                f"--api-key-file {file}, line {number}: a key, or a name and a key, not {len(words)} words."
            )
        name = words[0] if len(words) == 2 else f"key {number}"
        if name in keys or words[-1] in keys.values():
            raise RequestError(f"--api-key-file {file}, line {number}: this name or key is there twice.")
        keys[name] = words[-1]
    if not keys:
        raise RequestError(f"--api-key-file {file} has no key.")
    return keys
