"""Tool calls: the prompt that lists the tools, the grammar of calls, and the parser that finds them in the text.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the form of Qwen's and Hermes' models. The tools
go through the chat template if it supports them, else into a system message.
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
from longdraft.serve.structured import checked, in_grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_INSTRUCTIONS = f"""You may call these functions:
{{functions}}
To call one, answer with {OPEN}{{{{"name": NAME, "arguments": {{{{...}}}}}}}}{CLOSE} and nothing else."""


def checked_choice(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> str:
    """The choice as "none", "auto", "required" or the name of the function to call.

    Raises:
        RequestError: a tool is not a named function, or the choice is unknown.
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


def grammar_for_tools(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool = True
) -> str:
    """llguidance's grammar of calls to these functions; with "auto" also of any other text.

    Raises:
        RequestError: a function's parameters are not a valid schema.
    """
    schemas = []
    for function in (tool["function"] for tool in tools):
        if choice in ("auto", "required") or function["name"] == choice:
            arguments = function.get("parameters") or {"type": "object"}
            schemas.append({
                "type": "object", "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"], "additionalProperties": False,
            })  # fmt: skip
    call = json.dumps({"anyOf": schemas, "x-guidance": {"whitespace_flexible": False}})
    calls = "call+" if parallel and choice in ("auto", "required") else "call"
    start = f"TEXT | {calls}" if choice == "auto" else calls
    opened, closed = (in_grammar(tokenizer, tag) for tag in (OPEN, CLOSE))
    lark = f"start: {start}\ncall: {opened} answer {closed}\nanswer: %json {call}\n"
    lark += "TEXT: /[^<](.|\\n)*/\n" if choice == "auto" else ""
    return checked(str(LLMatcher.grammar_from_lark(lark)))


def with_tools(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages for the model's chat template, and its further arguments."""
    if tools and _supports_tools(tokenizer, list(tools)):
        return messages, {"tools": list(tools)}
    messages = [_as_text(message) for message in messages]
    if tools:
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(functions=functions)
        if messages and messages[0]["role"] == "system":
            messages[0] = messages[0] | {"content": f"{messages[0]['content']}\n\n{instructions}"}
        else:
            messages.insert(0, {"role": "system", "content": instructions})
    return messages, {}


def _supports_tools(tokenizer: PreTrainedTokenizerBase, tools: list[Mapping[str, Any]]) -> bool:
    """True if the chat template writes the tools into the prompt."""
    if tokenizer.chat_template is None:
        return False
    turn = [{"role": "user", "content": "-"}]
    try:
        plain, with_tools = (tokenizer.apply_chat_template(turn, tokenize=False, tools=each) for each in (None, tools))
    except Exception:  # a mistake in the template
        return False
    return bool(plain != with_tools)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its tool calls, or their results, as text."""
    content = message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"] or "{}"
        content += f'{OPEN}{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}{CLOSE}'
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{content}</tool_response>"}
    return {"role": message["role"], "content": content}


# The beginning of a call that follows the grammar: the name comes first, so that its arguments can be streamed.
_CALL_START = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\\]|\\\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_CALL_END = re.compile(r"\}?\s*$")


class ToolParser:
    """Separates calls from text while it streams."""

    def __init__(self) -> None:
        self._pending = ""  # text that has not been reported
        self._calls = 0
        self._in_arguments = False  # of a call whose name has been reported

    def push(self, text: str) -> list[dict[str, Any]]:
        """OpenAI's deltas for the next piece of text."""
        self._pending += text
        deltas: list[dict[str, Any]] = []
        while True:
            before = len(self._pending)
            deltas += self._arguments() if self._in_arguments else self._text_or_call()
            if len(self._pending) == before:
                return deltas

    def finish(self) -> tuple[list[dict[str, Any]], str | None]:
        """The deltas of what is left, and the finish reason if there were calls."""
        rest, self._pending = self._pending, ""
        deltas = [{"content": rest}] if rest.strip() and not self._in_arguments else []
        return deltas, "tool_calls" if self._calls else None

    def _text_or_call(self) -> list[dict[str, Any]]:
        text, tag, rest = self._pending.partition(OPEN)
        if not tag:
            text, self._pending = _split_before(self._pending, OPEN)
            return [{"content": text}] if text else []
        deltas = [{"content": text}] if text.strip() else []
        self._pending = tag + rest
        if start := _CALL_START.match(rest):
            self._pending, self._in_arguments = rest[start.end() :], True
            return [*deltas, self._new_call(json.loads(start[1]), "")]
        inside, closed, after = rest.partition(CLOSE)
        if not closed:
            return deltas
        self._pending = after
        try:
            call = json.loads(inside)
            name, arguments = str(call["name"]), json.dumps(call.get("arguments", {}), ensure_ascii=False)
        except (ValueError, TypeError, KeyError):  # not bound by a grammar, and malformed
            return [*deltas, {"content": f"{OPEN}{inside}{CLOSE}"}]
        deltas.append(self._new_call(name, arguments))
        self._calls += 1
        return deltas

    def _arguments(self) -> list[dict[str, Any]]:
        inside, closed, after = self._pending.partition(CLOSE)
        if closed:
            self._pending, self._in_arguments = after, False
            self._calls += 1
            return [_call(self._calls - 1, {"arguments": _CALL_END.sub("", inside)})]
        # The brace that ends the call does not belong to the arguments.
        text = _CALL_END.sub("", _split_before(self._pending, CLOSE)[0])
        self._pending = self._pending[len(text) :]
        return [_call(self._calls, {"arguments": text})] if text else []

    def _new_call(self, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return _call(self._calls, function, id=f"call_{secrets.token_hex(12)}", type="function")


def _call(index: int, function: dict[str, str], **more: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": function, **more}]}


def _split_before(text: str, tag: str) -> tuple[str, str]:
    """Splits a text before an end that may be the beginning of the tag."""
    kept = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return text[: len(text) - kept], text[len(text) - kept :]
