"""Tools: what a model is told of them, how its text is bound to call them, and its calls as OpenAI writes them.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen's and Hermes' models write it. Templates
that know tools say so themselves; others get a system message.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from longdraft.errors import RequestError
from longdraft.serve.structured import checked

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TOLD = f"""You may call these functions:
{{functions}}
To call one, answer with {OPEN}{{{{"name": NAME, "arguments": {{{{...}}}}}}}}{CLOSE} and nothing else."""


def checked_choice(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> str:
    """ "none", "auto", "required" or the name of the one function that is to be called.

    Raises:
        RequestError: tools that are no functions with names, or a choice that is none of these.
    """
    names = []
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise RequestError(
                "tools are functions: {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
        names.append(str(function["name"]))
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, Mapping):
        choice = str(choice.get("function", {}).get("name"))
        if choice not in names:
            raise RequestError(f"tool_choice names {choice!r}, and tools has {', '.join(names) or 'none'}")
        return choice
    if choice not in ("none", "auto", "required"):
        raise RequestError(f"tool_choice is none, auto, required or a function, not {choice!r}")
    if choice == "required" and not tools:
        raise RequestError("tool_choice is required, and there are no tools")
    return choice


def grammar_for_tools(tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool = True) -> str:
    """What the text may be: calls of these functions, or with "auto" any text instead.

    Raises:
        RequestError: a function's parameters are no schema.
    """
    schemas = []
    for function in (tool["function"] for tool in tools):
        if choice in ("auto", "required") or function["name"] == choice:
            own = function.get("parameters") or {"type": "object"}
            schemas.append({
                "type": "object", "properties": {"name": {"const": function["name"]}, "arguments": own},
                "required": ["name", "arguments"], "additionalProperties": False,
            })  # fmt: skip
    call = json.dumps({"anyOf": schemas, "x-guidance": {"whitespace_flexible": False}})
    calls = "call+" if parallel and choice in ("auto", "required") else "call"
    start = f"TEXT | {calls}" if choice == "auto" else calls
    lark = f'start: {start}\ncall: "{OPEN}" answer "{CLOSE}"\nanswer: %json {call}\n'
    lark += "TEXT: /[^<](.|\\n)*/\n" if choice == "auto" else ""
    return checked(str(LLMatcher.grammar_from_lark(lark)))


def with_tools(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages as the model's template takes them, and what else it takes."""
    asked = [{"role": "user", "content": "-"}]
    knows = bool(tools) and tokenizer.chat_template is not None
    if knows:
        try:
            plain, told = (
                tokenizer.apply_chat_template(asked, tokenize=False, tools=given) for given in (None, list(tools))
            )
            knows = plain != told
        except Exception:  # a template's own mistake: it does not know them then
            knows = False
    if knows:
        return messages, {"tools": list(tools)}
    written = [_written(message) for message in messages]
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        told = _TOLD.format(functions=functions)
        if written and written[0]["role"] == "system":
            written[0] = written[0] | {"content": f"{written[0]['content']}\n\n{told}"}
        else:
            written.insert(0, {"role": "system", "content": told})
    return written, {}


def _written(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a template that knows no tools: calls and answers as text."""
    content = message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"] or "{}"
        content += f'{OPEN}{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}{CLOSE}'
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    return {"role": message["role"], "content": content}


# How a call begins that a grammar has bound: its name first, so that its arguments can be told as they come.
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\\]|\\\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_LAST = re.compile(r"\}?\s*$")


class ToolParser:
    """Tells calls from text, as it streams."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = 0
        self._within = False  # the arguments of a call whose name was told

    def push(self, text: str) -> list[dict[str, Any]]:
        """What a piece of text adds to the answer: OpenAI's deltas."""
        self._held += text
        found: list[dict[str, Any]] = []
        while True:
            before = len(self._held)
            step = self._arguments() if self._within else self._text_or_call()
            found += step
            if len(self._held) == before:
                return found

    def finish(self) -> tuple[list[dict[str, Any]], str | None]:
        """What was held, as text, and the reason to end where there were calls."""
        rest, self._held = self._held, ""
        said = [{"content": rest}] if rest.strip() and not self._within else []
        return said, "tool_calls" if self._calls else None

    def _text_or_call(self) -> list[dict[str, Any]]:
        said, opened, rest = self._held.partition(OPEN)
        if not opened:
            said, self._held = _until(self._held, OPEN)
            return [{"content": said}] if said else []
        found = [{"content": said}] if said.strip() else []
        self._held = opened + rest
        if begun := _BEGUN.match(rest):
            self._held, self._within = rest[begun.end() :], True
            return [*found, self._delta(id=f"call_{secrets.token_hex(12)}", name=json.loads(begun[1]), arguments="")]
        inside, closed, behind = rest.partition(CLOSE)
        if not closed:
            return found
        self._held = behind
        try:
            call = json.loads(inside)
            name, arguments = str(call["name"]), json.dumps(call.get("arguments", {}), ensure_ascii=False)
        except (ValueError, TypeError, KeyError):  # not bound by a grammar, and wrong
            return [*found, {"content": f"{OPEN}{inside}{CLOSE}"}]
        found.append(self._delta(id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments))
        self._calls += 1
        return found

    def _arguments(self) -> list[dict[str, Any]]:
        inside, closed, behind = self._held.partition(CLOSE)
        if closed:
            self._held, self._within = behind, False
            found = [self._delta(arguments=_LAST.sub("", inside))]
            self._calls += 1
            return found
        # The brace that ends the call is none of the arguments'.
        said = _LAST.sub("", _until(self._held, CLOSE)[0])
        if not said:
            return []
        self._held = self._held[len(said) :]
        return [self._delta(arguments=said)]

    def _delta(self, id: str | None = None, name: str | None = None, arguments: str = "") -> dict[str, Any]:
        """A piece of the present call."""
        function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
        call: dict[str, Any] = {"index": self._calls, "function": function}
        return {"tool_calls": [call if id is None else call | {"id": id, "type": "function"}]}


def _until(text: str, mark: str) -> tuple[str, str]:
    """A text in two: what surely is no part of the mark, and what may be its beginning."""
    kept = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - kept], text[len(text) - kept :]
