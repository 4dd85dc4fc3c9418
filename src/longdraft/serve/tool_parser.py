"""Finds the calls of functions in an answer while its text comes."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import regex  # type: ignore[import-untyped]

from longdraft.serve.tool_types import typed_call

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
# What stands before a call without tags, as Qwen2.5-Coder writes it: a block of code perhaps, other calls, or its
# template's second brace. And what may stand behind one.
_BEFORE = r"(?<=\n)[ \t]{0,16}(?:```\w{0,16}\s{0,16})?[\[,\s]{0,16}"
_BEHIND = regex.compile(r"[\s\]}]{0,16}+(?:```\s{0,16}+)?+(?=[^\s`])")
ARGUMENTS_KEY = r'\s{0,16},\s{0,16}"arguments"\s{0,16}:\s{0,16}(?=\{)'


def call_start_pattern(names: Iterable[str], suffix: str = "") -> Any:
    """The pattern of what begins a call of the functions, in a text that has a line's end before it."""
    known = "|".join(regex.escape(json.dumps(name, ensure_ascii=False)[1:-1]) for name in names)
    bare = rf'|{_BEFORE}(?P<bare>\{{\{{?\s{{0,16}}"name"\s{{0,16}}:\s{{0,16}}"(?P<name>{known})"{suffix})'
    return regex.compile(TOOL_CALL_START + (bare if known else ""))


_JSON = json.JSONDecoder(strict=False)
# The beginning of a call in tags: the name comes first, so that its arguments can be streamed.
_HEAD = regex.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")' + ARGUMENTS_KEY)


class ToolParser:
    """Separates calls from text while it streams.

    Args:
        names: functions of which a call may come without tags. only: all of the text is calls.
        answers: what does not begin as a call is none to its end.
        kinds: the type of each tool that is no function, by its name; its calls come whole.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        calls_only: bool = False,
        calls_at_start: bool = False,
        tool_types: Mapping[str, str] = {},
    ) -> None:
        names, self._only, self._answers, self._kinds = list(names), calls_only, calls_at_start, tool_types
        self._starts, self._named = call_start_pattern(names, ARGUMENTS_KEY), call_start_pattern(names)
        self._pending = ""  # text that has not been reported
        self._before = "\n"  # the character before it
        self._blank, self._said = "", False  # white space that is not reported before a call; whether text was
        self._state: Literal["text", "tag", "arguments", "end"] = "text"
        self._tagged = True
        self._arguments = ""  # of the call that has begun
        self._calls = 0

    def push(self, text: str) -> list[dict[str, Any]]:
        """OpenAI's deltas for the next piece of text."""
        self._pending += text
        deltas: list[dict[str, Any]] = []
        while self._pending:
            before = self._state, len(self._pending)
            deltas += getattr(self, f"_in_{self._state}")()
            if (self._state, len(self._pending)) == before:
                break
        return deltas

    def finish(self, cut: bool = False) -> tuple[list[dict[str, Any]], str | None]:
        """The deltas of what is left, and the finish reason if there were calls.

        Args:
            cut: the text was ended at a limit or a stop, where a call that has begun is no text.
        """
        rest, self._pending = (TOOL_CALL_START if self._state == "tag" else "") + self._pending, ""
        begun = (
            (self._only and rest) or rest.startswith(TOOL_CALL_START[:5]) or self._named.search(self._before + rest, 1)
        )
        whole = self._state in ("text", "tag") and not (cut and begun)
        deltas = self._content(rest) if whole else []
        if self._blank and not self._calls:
            deltas = [{"content": self._blank}]
        return deltas, "tool_calls" if self._calls and (whole or self._state == "end") else None

    def _content(self, text: str) -> list[dict[str, Any]]:
        self._before = text[-1:] or self._before
        self._said = self._said or bool(text.strip())
        if not self._said:
            self._blank += text
            return []
        text, self._blank = self._blank + text, ""
        return [{"content": text}] if text else []

    def _in_text(self) -> list[dict[str, Any]]:
        find, at = self._starts.search, 1
        if self._answers:
            find, at = self._starts.match, 1 + len(self._pending) - len(self._pending.lstrip())
        found = None if self._answers and self._said else find(self._before + self._pending, at, partial=True)
        if found is None:
            text, self._pending = self._pending, ""
            return self._content(text)
        text, self._pending = self._pending[: found.start() - 1], self._pending[found.start() - 1 :]
        deltas = self._content(text)
        if found.partial:
            return deltas
        self._pending, self._blank, self._said = self._pending[found.end() - found.start() :], "", False
        self._tagged = not found.groupdict().get("bare")
        if self._tagged:
            self._state = "tag"
            return deltas
        return [*deltas, *self._begin(json.loads(f'"{found["name"]}"'))]

    def _in_tag(self) -> list[dict[str, Any]]:
        if head := _HEAD.match(self._pending):
            self._pending = self._pending[head.end() :]
            return self._begin(json.loads(head[1]))
        inside, closed, after = self._pending.partition(TOOL_CALL_END)
        if not closed:
            return []
        self._pending, self._state = after, "text"  # no grammar bound it
        return self._content(f"{TOOL_CALL_START}{inside}{TOOL_CALL_END}")

    def _begin(self, name: str) -> list[dict[str, Any]]:
        self._state, self._arguments, self._name = "arguments", "", name
        return [] if name in self._kinds else [_call(self._calls, name, "")]

    def _in_arguments(self) -> list[dict[str, Any]]:
        text, self._pending = self._pending, ""
        self._arguments += text
        with contextlib.suppress(ValueError, RecursionError):  # while their end has not come
            if "}" in text:
                values, end = _JSON.raw_decode(self._arguments)
                end += len(text) - len(self._arguments)
                text, self._pending = text[:end], text[end:]
                self._state, self._before = "end", "\n"
        ended, kind = self._state == "end", self._kinds.get(self._name)
        deltas = [_call(self._calls, None, text)] if kind is None else []
        if kind is not None and ended:
            deltas = [{"tool_calls": [{"index": self._calls, "id": _new_id(), **typed_call(kind, self._name, values)}]}]
        self._calls += ended
        return deltas

    def _in_end(self) -> list[dict[str, Any]]:
        """Leaves out what ends a call: its tag, or brackets and a fence."""
        if self._tagged:
            before, _, after = self._pending.partition(TOOL_CALL_END)
            ended = before != self._pending
        else:
            found = _BEHIND.match(self._pending, partial=True)
            ended = found is None or not found.partial
            after = self._pending[found.end() if found else 0 :]
        if ended:
            self._pending, self._state = after, "text"
        return []


def _call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    """OpenAI's delta of a call; a name begins it."""
    if name is None:
        return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "function": function, "id": _new_id(), "type": "function"}]}


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
