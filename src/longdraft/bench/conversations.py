"""Makes samples of conversations: of agents' trajectories one for each turn of the assistant, and of OpenAI's MRCR.

The prompt of a sample is the messages before the turn. Cutting a prompt drops whole messages before the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from longdraft.bench.data import Sample
from longdraft.bench.examples import Example
from longdraft.errors import PromptError

# Columns that hold the messages in data of OpenAI's format, of NVIDIA's agentic SPEED-Bench and of SWE-rebench.
_MESSAGE_COLUMNS = ("messages", "turns", "trajectory")


def turn_samples(example: Example) -> Iterator[Sample]:
    """Yields a sample for each message of the assistant that follows another message."""
    raw_messages = next((example.columns[c] for c in _MESSAGE_COLUMNS if example.columns.get(c)), None)
    messages, tools, turn = _messages(example, "trajectories", raw_messages), _tools(example), 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            turn += 1
            yield Sample(
                "", "", "trajectories", f"{example.origin}.{turn}", messages=messages[:i], tools=tools,
                continues_previous=turn > 1,
            )  # fmt: skip
    if not turn:
        raise PromptError(f"{example.origin}: no message of an assistant follows another message: give other rows.")


def mrcr_samples(example: Example) -> Iterator[Sample]:
    """Yields the sample of a row of OpenAI's MRCR: the last message asks for a random string, followed by the text of
    an earlier message."""
    columns = example.columns
    messages = _messages(example, "mrcr", columns.get("prompt"))
    answer, prefix = columns.get("answer"), columns.get("random_string_to_prepend")
    if not isinstance(answer, str) or not isinstance(prefix, str):
        raise PromptError(f"{example.origin} is no row of mrcr: it lacks answer or random_string_to_prepend.")
    num_needles = columns.get("n_needles")
    dataset = "mrcr" if num_needles is None else f"mrcr/{num_needles}needle"
    yield Sample(
        "", "", dataset, example.origin, messages=messages, answers=(answer.removeprefix(prefix),),
        metric="similarity", answer_prefix=prefix,
    )  # fmt: skip


def _tools(example: Example) -> Any:
    """Returns the functions that the assistant may call; None if there are none."""
    extras = _parse(example.columns.get("extras"))
    tools = _parse(example.columns.get("tools") or (extras.get("tools") if isinstance(extras, dict) else None))
    return _without_nulls(tools) if tools else None


def _messages(example: Example, task: str, raw_messages: Any) -> tuple[dict[str, Any], ...]:
    """Returns the messages of a row, normalised for chat templates. Raises PromptError if there are none."""
    messages = _parse(raw_messages)
    valid = isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    if not messages or not valid:
        raise PromptError(
            f"{example.origin} is no row of {task}: it has no list of messages with roles; it has "
            f"{', '.join(example.columns)}."
        )
    return tuple(_normalize_message(message) for message in messages)


def _normalize_message(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the content of a message a string, and the arguments of each tool call an object."""
    message: dict[str, Any] = _without_nulls(raw)
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
    message["content"] = str(content)
    for call in message.get("tool_calls", ()):
        function = call.get("function") or {}
        function["arguments"] = _parse(function.get("arguments"))
    return message


def _without_nulls(value: Any) -> Any:
    """Removes nulls from a value. Parquet files store null for a missing field."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _parse(value: Any) -> Any:
    """Parses a string that holds JSON; returns any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
