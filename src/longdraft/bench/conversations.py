"""Rows that hold what agents did, turn by turn.

A sample of a conversation holds its messages as JSON, one a line, so that a prompt that is too long loses whole
messages: the last ones before the message that is answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from longdraft.bench.data import Sample
from longdraft.bench.examples import Example
from longdraft.errors import PromptError

# Where rows of trajectories have their messages: OpenAI's, NVIDIA's agentic SPEED-Bench's, SWE-rebench's.
_MESSAGES = ("messages", "turns", "trajectory")


def turn_samples(row: Example) -> Iterator[Sample]:
    """Every answer of an assistant that messages stand before: the prompt grows with what was said and called."""
    messages, number = _messages(row), 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            number += 1
            *earlier, last = messages[:i]
            yield Sample(
                "\n".join(map(json.dumps, earlier)), last["content"], "trajectories", f"{row.origin}.{number}",
                last_message=json.dumps({key: x for key, x in last.items() if key != "content"}),
                tools=_tools(row), continues_previous=number > 1,
            )  # fmt: skip
    if not number:
        raise PromptError(f"{row.origin}: no message of an assistant follows another message, so nothing is asked.")


def _tools(row: Example) -> str:
    """The functions that the assistant might call, as JSON; empty if there are none."""
    extras = _read(row.columns.get("extras"))
    found = _read(row.columns.get("tools") or (extras.get("tools") if isinstance(extras, dict) else None))
    return json.dumps(_plain(found)) if found else ""


def _messages(row: Example) -> list[dict[str, Any]]:
    """The messages of a row, as chat templates take them.

    Raises:
        PromptError: there are none.
    """
    found = _read(next((row.columns[c] for c in _MESSAGES if row.columns.get(c)), None))
    named = isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found)
    if not found or not named:
        raise PromptError(
            f"{row.origin} is no row of trajectories: it has no list of messages with roles; it has "
            f"{', '.join(row.columns)}."
        )
    return [_message(message) for message in found]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is text, and whose calls' arguments are objects."""
    message: dict[str, Any] = _plain(given)
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
    message["content"] = str(content)
    for call in message.get("tool_calls", ()):
        function = call.get("function") or {}
        function["arguments"] = _read(function.get("arguments"))
    return message


def _plain(value: Any) -> Any:
    """A value without the nulls that parquet files have where a field is missing."""
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items() if x is not None}
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    """The value of a text of JSON; any other value, and text that is none, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
