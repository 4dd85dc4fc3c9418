"""Other engines as contenders, through their OpenAI-compatible servers: vLLM, SGLang, llama.cpp, longdraft.

Tokens/s are taken from the times of a streamed answer. How many drafted tokens were accepted is read from the answer,
where it says so, and else from the difference of the server's counters at ``/metrics``, which must then serve nobody
else.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from longdraft.errors import CapabilityError, reason_of

# Drafted tokens that were accepted, as answers name them: vLLM, longdraft, llama.cpp.
_ACCEPTED = ("num_accepted_draft_tokens", "num_accepted_tokens", "draft_n_accepted")
# The same as counters (vLLM, longdraft, llama.cpp), and verifications (SGLang).
_COUNTER = re.compile(r"^\w+:(spec_decode_num_accepted_tokens|spec_verify_calls)(?:_total)?(?:\{[^}]*\})? (\S+)", re.M)
_SECONDS = 600.0


@dataclass(frozen=True)
class Answer:
    """A streamed answer.

    Attributes:
        prompt_tokens, new_tokens: as the server counts them.
        first_token_seconds: from the request to the first text. decode_seconds: from there to the last.
        forwards: verifications after the prefill; None where the server does not say.
    """

    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_seconds: float
    forwards: int | None

    @property
    def tokens_per_second(self) -> float | None:
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 and self.new_tokens > 1 else None

    @property
    def mean_accepted_length(self) -> float | None:
        return (self.new_tokens - 1) / self.forwards if self.forwards else None


class Server:
    """A server.

    Args:
        url: its address, with or without ``/v1``. key: sent as the bearer's token, where it asks for one.

    Raises:
        CapabilityError: it cannot be reached, or serves no model.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            models = json.loads(self._read("/v1/models"))["data"]
        except (ValueError, LookupError, TypeError):
            raise CapabilityError(
                f"{self.url}/v1/models lists no models: name the address of an OpenAI-compatible server."
            ) from None
        if not models:
            raise CapabilityError(f"{self.url} serves no model: start one, then ask again.")
        self.model = str(models[0]["id"])

    def answer(self, prompt: str, max_tokens: int, ignore_eos: bool = False) -> Answer:
        """Asks for a greedy answer to one user's turn.

        Args:
            ignore_eos: ask for ``max_tokens`` whatever the model ends; not every server takes it.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        before, start = self._counters(), time.perf_counter()
        times, accepted, usage = [], None, {"prompt_tokens": 0, "completion_tokens": 0}
        for chunk in self._chunks(body | ({"ignore_eos": True} if ignore_eos else {})):
            if any(choice.get("delta", {}).get("content") for choice in chunk.get("choices") or ()):
                times.append(time.perf_counter())
            usage = chunk.get("usage") or usage
            found = next((n for name in _ACCEPTED if (n := _found(chunk, name)) is not None), None)
            accepted = accepted if found is None else int(found)
        if not times:
            raise CapabilityError(f"{self.url} answered without text: ask for more tokens, or look at its log.")
        new = int(usage["completion_tokens"]) or len(times)
        forwards = None if accepted is None else new - 1 - accepted
        if forwards is None:
            forwards = _forwards(before, self._counters(), new)
        return Answer(int(usage["prompt_tokens"]), new, times[0] - start, times[-1] - times[0], forwards)

    def _chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), self._headers, method="POST"
        )
        with self._opened(request) as response:
            for line in response:
                text = line.decode(errors="replace").strip()
                if text.startswith("data:") and (content := text[5:].strip()) not in ("", "[DONE]"):
                    yield json.loads(content)

    def _counters(self) -> dict[str, float]:
        """Sums of the counters that count speculation; empty where the server has none."""
        found: dict[str, float] = {}
        try:
            page = self._read("/metrics")
        except CapabilityError:
            return found
        for name, value in _COUNTER.findall(page):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def _read(self, path: str) -> str:
        with self._opened(urllib.request.Request(self.url + path, headers=self._headers)) as response:
            return str(response.read().decode())

    @contextmanager
    def _opened(self, request: urllib.request.Request) -> Iterator[Any]:
        """An open answer. What goes wrong until it is read to its end is told with the address."""
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:
                yield response
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise CapabilityError(f"{request.full_url} answered {error.code}: {said or error.reason}.") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CapabilityError(f"{request.full_url} cannot be reached or read: {reason_of(error)}.") from error


def _found(content: Any, name: str) -> Any:
    """The value of a key, at any depth."""
    if isinstance(content, dict):
        if name in content:
            return content[name]
        content = list(content.values())
    if isinstance(content, list):
        return next((found for each in content if (found := _found(each, name)) is not None), None)
    return None


def _forwards(before: Mapping[str, float], after: Mapping[str, float], new: int) -> int | None:
    """Verifications of an answer, from the counters before and after it."""
    calls = after.get("spec_verify_calls", 0.0) - before.get("spec_verify_calls", 0.0)
    if calls > 0:
        return int(calls)
    name = "spec_decode_num_accepted_tokens"
    return new - 1 - int(after[name] - before.get(name, 0.0)) if name in after else None
