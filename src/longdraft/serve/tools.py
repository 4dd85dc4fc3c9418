"""Tools: what a model is told of them, how its text is bound to call them, and its calls as OpenAI writes them.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen's and Hermes' models write it. Templates
that know tools say so themselves; others get a system message.
"""

from __future__ import annotations

import json
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


class ToolParser:
    """Tells calls from text, as it streams."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = 0

    def push(self, text: str) -> list[dict[str, Any]]:
        """What a piece of text adds to the answer: OpenAI's deltas."""
        self._held += text
        found: list[dict[str, Any]] = []
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                # What may be the beginning of a call is held.
                kept = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
                said, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
                return found + ([{"content": said}] if said else [])
            if before.strip():
                found.append({"content": before})
            inside, closed, behind = rest.partition(CLOSE)
            if not closed:
                self._held = opened + rest
                return found
            found.append(self._call(inside))
            self._held = behind

    def finish(self) -> tuple[list[dict[str, Any]], str | None]:
        """What was held, as text, and the reason to end where there were calls."""
        rest, self._held = self._held, ""
        return ([{"content": rest}] if rest.strip() else []), "tool_calls" if self._calls else None

    def _call(self, text: str) -> dict[str, Any]:
        try:
            said = json.loads(text)
            name, arguments = str(said["name"]), json.dumps(said.get("arguments", {}), ensure_ascii=False)
        except (ValueError, TypeError, KeyError):  # not bound by a grammar, and wrong
            return {"content": f"{OPEN}{text}{CLOSE}"}
        self._calls += 1
        function = {"name": name, "arguments": arguments}
        call = {
            "index": self._calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        }
        return {"tool_calls": [call]}
