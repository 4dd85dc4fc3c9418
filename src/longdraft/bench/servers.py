"""Other engines as contenders, through their OpenAI-compatible servers: vLLM, SGLang, llama.cpp, longdraft.

Tokens/s are taken from the times of a streamed answer, and how many drafted tokens were accepted from what it says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from longdraft.bench.acceptance import Accepted, Asked
from longdraft.bench.data import Sample
from longdraft.bench.experiment import Step, Tick, in_turn
from longdraft.bench.settings import REFERENCE
from longdraft.errors import CapabilityError, reason_of

# Drafted tokens that were accepted, as answers name them: vLLM, longdraft, llama.cpp.
_ACCEPTED = ("num_accepted_draft_tokens", "num_accepted_tokens", "draft_n_accepted")
_SECONDS = 600.0
# Characters of a token, until a server has counted a prompt's.
CHARACTERS = 3.5


class Server:
    """A server.

    Args:
        name: of the contender; ``ar`` is the server that decodes plainly.
        url: its address, with or without ``/v1``. key: sent as the bearer's token, where it asks for one.

    Raises:
        CapabilityError: it cannot be reached, or serves no model; the package openai is missing.
    """

    def __init__(self, name: str, url: str, key: str = "") -> None:
        try:
            from openai import OpenAI, OpenAIError
        except ImportError:
            raise CapabilityError('--url needs the package openai: pip install "longdraft[bench]".') from None
        self.name, self.url = name, url.rstrip("/").removesuffix("/v1")
        self._failure = OpenAIError
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", timeout=_SECONDS, max_retries=0)
        try:
            self.model = str(next(iter(self._client.models.list())).id)
        except (self._failure, StopIteration, AttributeError, TypeError, ValueError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> CapabilityError:
        return CapabilityError(
            f"{self.url} cannot be reached, or serves no model ({reason_of(error)}): name the address of an "
            "OpenAI-compatible server."
        )

    def answer(self, asked: Asked, prompt: Sample, max_tokens: int, ignore_eos: bool = False) -> Accepted:
        """A greedy answer to a prompt.

        Args:
            ignore_eos: ask for ``max_tokens`` whatever the model ends; not every server takes it.

        Raises:
            CapabilityError: it breaks off, or answers without text.
        """
        start = time.perf_counter()
        times: list[float] = []
        accepted, usage = None, {"prompt_tokens": 0, "completion_tokens": 0}
        messages: Any = [_sent(message) for message in prompt.messages]
        extra: dict[str, Any] = {"tools": json.loads(prompt.tools)} if prompt.tools else {}
        extra |= {"ignore_eos": True} if ignore_eos else {}
        try:
            stream: Any = self._client.chat.completions.create(
                model=self.model, messages=messages, max_tokens=max_tokens, temperature=0,
                stream=True, stream_options={"include_usage": True}, extra_body=extra,
            )  # fmt: skip
            for event in stream:
                chunk: dict[str, Any] = event.to_dict()
                deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
                if any(delta.get("content") or delta.get("tool_calls") for delta in deltas):
                    times.append(time.perf_counter())
                usage = chunk.get("usage") or usage
                found = next((n for name in _ACCEPTED if (n := _found(chunk, name)) is not None), None)
                accepted = accepted if found is None else int(found)
        except (self._failure, OSError, ValueError) as error:
            raise self._unreachable(error) from error
        if not times:
            raise CapabilityError(f"{self.url} answered without text: ask for more tokens, or look at its log.")
        new = (int(usage["completion_tokens"]) or len(times)) - 1
        forwards = new if self.name == REFERENCE else None if accepted is None else new - accepted
        first, last = times[0], times[-1]
        return Accepted(asked, int(usage["prompt_tokens"]), new, forwards, (), last - first, first - start)


def steps(
    servers: Sequence[Server],
    samples: Sequence[Sample],
    lengths: Sequence[int],
    max_tokens: int,
    repeats: int = 1,
    ignore_eos: bool = False,
) -> list[Step[Asked, Accepted]]:
    """Servers against the length of the text: the same texts, cut to each length, answered by every server in turn.

    Args:
        lengths: tokens of the prompts, as nearly as characters tell; the servers' own counts are reported.
        repeats: answers to each prompt, of which the fastest counts.
    """
    by_name = {server.name: server for server in servers}
    densities = [CHARACTERS]  # characters of a token, the latest last

    def measure(sample: Sample, length: int, missing: Collection[Asked], tick: Tick) -> Iterator[Accepted]:
        prompt = cut(sample, length, densities[-1])
        runs: dict[Asked, list[Accepted]] = {}
        for _, asked in in_turn(list(missing), repeats):
            tick(asked.method)
            run = by_name[asked.method].answer(asked, prompt, max_tokens, ignore_eos)
            runs.setdefault(asked, []).append(run)
            if run.prompt_tokens:
                densities.append(len(prompt.text) / run.prompt_tokens)
            if len(runs[asked]) == repeats:
                yield min(runs[asked], key=lambda run: (run.seconds or 0.0) / max(1, run.new_tokens))

    def asked(server: Server, sample: Sample, length: int) -> Asked:
        return Asked(server.name, server.url, server.model, 0.0, length, None, sample.dataset, sample.origin, "")

    return [
        Step(
            f"{sample.origin}, {length:,} tokens",
            [asked(server, sample, length) for server in servers],
            partial(measure, sample, length),
            repeats,
        )
        for length in sorted(lengths)
        for sample in samples
    ]


def cut(sample: Sample, length: int, characters: float) -> Sample:
    """The sample with a prompt of about so many tokens."""
    rest = [part for part in (sample.preface, sample.instruction) if part]
    room = max(1, round(length * characters) - sum(map(len, rest)))
    return sample.cut(room)


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as requests have it: the arguments of calls are JSON in a text."""
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return message


def _found(content: Any, name: str) -> Any:
    """The value of a key, at any depth."""
    if isinstance(content, dict):
        if name in content:
            return content[name]
        content = list(content.values())
    if isinstance(content, list):
        return next((found for each in content if (found := _found(each, name)) is not None), None)
    return None
