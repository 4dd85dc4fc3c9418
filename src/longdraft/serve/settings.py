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
    """Settings of a server."""

    name: str  # the model's name for clients
    methods: tuple[str, ...]  # the methods that a request may name; the first is the default
    slots: int = 4  # number of requests that one method decodes at a time
    context: int = 8192  # limit of a prompt's and its output's tokens together
    queue: int = 64  # number of requests that may wait; more are refused with 429
    max_tokens: int | None = None  # limit of new tokens; None: what the context leaves
    timeout: float = 600.0  # seconds for a request, waiting included
    prepare_timeout: float = 60.0  # seconds to tokenize a request and to build its grammars
    sse_ping_interval: float = 5.0  # a stream sends a keep-alive after this many seconds without an event
    think: bool = True  # chat templates enable thinking, unless the request says otherwise
    foresee: bool = True  # drafts may use the random numbers with which the target will be sampled
    max_body_bytes: int = 8 << 20  # limit of a request's body, before and after decompression
    body_timeout: float = 30.0  # seconds in which a request's headers must arrive, and as many for its body
    connections: int | None = None  # limit of open connections; None: half of the process's file descriptors
    keys: dict[str, str] = field(default_factory=dict, repr=False)  # {tenant: API key}; empty: no key is needed
    hosts: tuple[str, ...] = ("*",)  # accepted Host headers; * matches any part, 0.0.0.0 any IP address
    origins: tuple[str, ...] = ()  # web pages of these origins may call the server (CORS); * for all
    prefill_chunk: int = 512  # prompt tokens that are prefilled between two rounds of the other requests
    earlier: int = 0  # lookups also search this many tokens of a tenant's earlier requests
    snapshots: Path | None = None  # folder in which cached prompts survive restarts; None: they do not survive
    snapshot_bytes: int = 4 << 30  # limit of all snapshots together
    prefix_cache_bytes: int = 2 << 30  # limit of cached prefixes that are no longer in a slot


def normalize_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Converts origins to the form that browsers send: lower case, no slash at the end.

    Raises:
        RequestError: a value is not an origin, for example an address with a path.
    """
    normalized = tuple(origin.lower().removesuffix("/") for origin in origins)
    for origin in normalized:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            raise RequestError(f"--allow-origin takes an origin such as http://localhost:3000, or *, not {origin!r}.")
    return normalized


def read_api_keys(file: Path) -> dict[str, str]:
    """Reads {tenant: API key}. A line of the file has a key, or a tenant's name and a key; # begins a comment.

    Raises:
        RequestError: the file cannot be read, has no key, or names a tenant or key twice.
    """
    with file_errors(file, f"--api-key-file {file} cannot be read", error_type=RequestError):
        lines = [line.split("#")[0].split() for line in require_regular(file).read_text(encoding="utf-8").splitlines()]
    keys: dict[str, str] = {}
    for number, words in enumerate(lines, 1):
        if not words:
            continue
        if len(words) > 2:
            raise RequestError(f"--api-key-file {file}, line {number}: a line is a key, or a name and a key.")
        name = words[0] if len(words) == 2 else f"key {number}"
        if name in keys or words[-1] in keys.values():
            raise RequestError(f"--api-key-file {file}, line {number}: the name or the key is there twice.")
        keys[name] = words[-1]
    if not keys:
        raise RequestError(f"--api-key-file {file} has no key.")
    return keys
