"""Tools of other types than functions. A custom tool and the client's shell are served as functions, the rest is left
out: nobody here searches the web."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

logger = logging.getLogger(__name__)

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object", "required": ["command"],
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "integer"},
        "working_directory": {"type": "string"},
    },
}  # fmt: skip
"""Parameters of the client's shell: the fields of its calls' actions."""


def as_functions(tools: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tools of a chat as functions, and the type of each that is none, by its name."""
    found: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    for tool in tools:
        kind = tool_type(tool)
        function = tool.get(kind)
        if kind == "custom" and isinstance(function, Mapping):
            told = [function.get("description"), *_definitions(function.get("format"))]
            description = "\n\n".join(str(each) for each in told if each)
            function = {"name": function.get("name"), "description": description, "parameters": _INPUT}
        elif kind == "local_shell":
            function = {
                "name": kind,
                "description": "Runs a command on the user's machine.",
                "parameters": SHELL_PARAMETERS,
            }
        elif kind != "function":
            _say("tool", kind)
            continue
        found.append(dict(tool) if kind == "function" else {"type": "function", "function": function})
        if kind != "function" and isinstance(function, Mapping):
            kinds[str(function["name"])] = kind
    return found, kinds


def tool_type(tool: Mapping[str, Any]) -> str:
    """The type that a tool or a choice says, or that of a function."""
    kind = tool.get("type")
    return kind if isinstance(kind, str) else "function"


def _definitions(form: Any) -> list[Any]:
    """The grammar of a custom tool's input, which its model reads and nothing binds."""
    if not isinstance(form, Mapping):
        return []
    return [form.get("definition"), *_definitions(form.get("grammar"))]


def typed_call(tool_type: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a call of a tool that is no function, from the arguments of the function in its place."""
    return {
        "type": tool_type,
        tool_type: {"name": name, "input": str(arguments.get("input", ""))} if tool_type == "custom" else arguments,
    }


def is_unserved_item(item_type: Any) -> bool:
    """True for an item of a response that a tool made which is not served; the log names it."""
    if not isinstance(item_type, str) or item_type.startswith(("message", "function", "custom", "local_shell")):
        return False
    left = item_type.startswith("mcp_") or item_type.endswith(("_call", "_output"))
    if left:
        _say("item", item_type)
    return left


@lru_cache(maxsize=100)
def _say(what: str, kind: str) -> None:
    logger.warning("The %s of type %r is left out: functions, custom tools and a local shell are served.", what, kind)
