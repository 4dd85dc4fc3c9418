"""Finds tool calls in streamed text."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import regex  # type: ignore[import-untyped]

from longdraft.serve.tool_types import typed_call

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
# Qwen2.5-Coder writes bare calls, without tags. A bare call begins a line, perhaps in a code block or a list of calls.
# Repeats are bounded (16), so that little text is held back while a match is undecided.
_BARE_PREFIX = r"(?<=\n)[ \t]{0,16}(?:```\w{0,16}\s{0,16})?[\[,\s]{0,16}"
_BARE_SUFFIX = regex.compile(r"[\s\]}]{0,16}+(?:```\s{0,16}+)?+(?=[^\s`])")
ARGUMENTS_KEY = r'\s{0,16},\s{0,16}"arguments"\s{0,16}:\s{0,16}(?=\{)'


def call_start_pattern(names: Iterable[str], after: str = "") -> Any:  # after: regex for what follows the name
    """Makes a regex for the start of a tagged call, or of a bare call (groups ``bare`` and ``name``) on a new line."""
    alternatives = "|".join(regex.escape(json.dumps(name, ensure_ascii=False)[1:-1]) for name in names)
    bare = rf'|{_BARE_PREFIX}(?P<bare>\{{\{{?\s{{0,16}}"name"\s{{0,16}}:\s{{0,16}}"(?P<name>{alternatives})"{after})'
    return regex.compile(TOOL_CALL_START + (bare if alternatives else ""))


_DECODER = json.JSONDecoder(strict=False)  # allows line breaks in strings
# The start of a tagged call whose name comes first, so that its arguments can be streamed.
_TAGGED_START = regex.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")' + ARGUMENTS_KEY)


class ToolParser:
    """Separates tool calls from text while it streams.

    Args:
        names: names of the functions, which may be called without tags.
        calls_only: the text has nothing but calls.
        calls_at_start: a text that does not begin with a call has no calls.
        tool_types: {name: type} of tools that are not functions. Their calls are reported when complete, not streamed.
    """

    def __init__(
        self, names: Iterable[str] = (), calls_only: bool = False, calls_at_start: bool = False,
        tool_types: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        self._calls_only, self._calls_at_start = calls_only, calls_at_start
        names, self._tool_types = list(names), tool_types
        self._start_pattern, self._name_pattern = call_start_pattern(names, ARGUMENTS_KEY), call_start_pattern(names)
        self._pending = ""  # text that has not been reported
        self._last_char = "\n"  # the character before the pending text
        self._whitespace = ""  # white space at the start, or after a call; dropped if a call follows
        self._has_text = False  # text other than that white space
        self._state: Literal["text", "tag", "arguments", "end"] = "text"  # tag: before a name; end: after the arguments
        self._is_tagged = True
        self._arguments = ""  # of the call in progress, as JSON
        self._num_calls = 0  # complete calls

    def push(self, text: str) -> list[dict[str, Any]]:
        """Returns OpenAI's message deltas for new text."""
        self._pending += text
        deltas: list[dict[str, Any]] = []
        while self._pending:
            before = self._state, len(self._pending)
            deltas += getattr(self, f"_in_{self._state}")()  # a method for each state
            if (self._state, len(self._pending)) == before:  # more text is needed
                break
        return deltas

    def finish(self, truncated: bool = False) -> tuple[list[dict[str, Any]], str | None]:
        """Returns (the last deltas, "tool_calls" as the finish reason if there were complete calls, else None).

        Args:
            truncated: a limit or stop string ended the text. An incomplete call is then dropped.
        """
        text, self._pending = (TOOL_CALL_START if self._state == "tag" else "") + self._pending, ""
        begins_call = (self._calls_only and text) or text.startswith("<tool")  # TOOL_CALL_START, perhaps incomplete
        is_call = begins_call or self._name_pattern.search(self._last_char + text, 1)  # looks behind at _last_char
        is_text = self._state in ("text", "tag") and not (truncated and is_call)
        deltas = self._text_deltas(text) if is_text else []
        if self._whitespace and not self._num_calls:
            deltas = [{"content": self._whitespace}]
        return deltas, "tool_calls" if self._num_calls and (is_text or self._state == "end") else None

    def _text_deltas(self, text: str) -> list[dict[str, Any]]:
        """Returns the delta for text outside calls. Leading white space is held back."""
        self._last_char = text[-1:] or self._last_char
        self._has_text = self._has_text or bool(text.strip())
        if not self._has_text:
            self._whitespace += text
            return []
        text, self._whitespace = self._whitespace + text, ""
        return [{"content": text}] if text else []

    def _in_text(self) -> list[dict[str, Any]]:
        """Reports text up to the start of a call, complete or partial."""
        search, start = self._start_pattern.search, 1  # position 0 is _last_char
        if self._calls_at_start:  # only white space may come before the call
            search, start = self._start_pattern.match, 1 + len(self._pending) - len(self._pending.lstrip())
        is_answer = self._calls_at_start and self._has_text
        match = None if is_answer else search(self._last_char + self._pending, start, partial=True)
        if match is None:
            text, self._pending = self._pending, ""
            return self._text_deltas(text)
        text, self._pending = self._pending[: match.start() - 1], self._pending[match.start() - 1 :]
        deltas = self._text_deltas(text)
        if match.partial:
            return deltas
        self._pending, self._whitespace, self._has_text = self._pending[match.end() - match.start() :], "", False
        self._is_tagged = not match.groupdict().get("bare")
        if self._is_tagged:
            self._state = "tag"
            return deltas
        return [*deltas, *self._begin_call(json.loads(f'"{match["name"]}"'))]  # the name is in JSON's notation

    def _in_tag(self) -> list[dict[str, Any]]:
        """Reads the name of a tagged call. Tags around anything else are text."""
        if match := _TAGGED_START.match(self._pending):
            self._pending = self._pending[match.end() :]
            return self._begin_call(json.loads(match[1]))
        inside, end_tag, after = self._pending.partition(TOOL_CALL_END)
        if not end_tag:
            return []
        self._pending, self._state = after, "text"
        return self._text_deltas(f"{TOOL_CALL_START}{inside}{TOOL_CALL_END}")

    def _begin_call(self, name: str) -> list[dict[str, Any]]:
        self._state, self._arguments, self._name = "arguments", "", name
        return [] if name in self._tool_types else [_call_delta(self._num_calls, name, "")]

    def _in_arguments(self) -> list[dict[str, Any]]:
        """Streams arguments until they are a complete JSON object."""
        text, self._pending = self._pending, ""
        self._arguments += text
        with contextlib.suppress(ValueError, RecursionError):  # raised while the arguments are incomplete
            if "}" in text:
                values, end = _DECODER.raw_decode(self._arguments)
                end += len(text) - len(self._arguments)  # from a position in _arguments to one in the new text
                text, self._pending = text[:end], text[end:]
                self._state, self._last_char = "end", "\n"
        is_complete, tool_type = self._state == "end", self._tool_types.get(self._name)
        deltas = [_call_delta(self._num_calls, None, text)] if tool_type is None else []
        if tool_type is not None and is_complete:
            call = {"index": self._num_calls, "id": _new_id(), **typed_call(tool_type, self._name, values)}
            deltas = [{"tool_calls": [call]}]
        self._num_calls += is_complete
        return deltas

    def _in_end(self) -> list[dict[str, Any]]:
        """Skips what follows a call's arguments: the end tag, or brackets and a code fence."""
        if self._is_tagged:
            _, end_tag, after = self._pending.partition(TOOL_CALL_END)
            ended = bool(end_tag)
        else:
            match = _BARE_SUFFIX.match(self._pending, partial=True)
            ended = match is None or not match.partial
            after = self._pending[match.end() if match else 0 :]
        if ended:
            self._pending, self._state = after, "text"
        return []


def _call_delta(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    """Returns OpenAI's delta of a tool call. With a name the delta begins the call, without one it adds arguments."""
    if name is None:
        return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "function": function, "id": _new_id(), "type": "function"}]}


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
