"""Tool types of OpenAI's API. Custom tools and the client's shell become functions; unknown types are left out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

logger = logging.getLogger(__name__)

_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object", "required": ["command"],
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "integer"},
        "working_directory": {"type": "string"},
    },
}  # fmt: skip
"""JSON schema of the arguments of the client's shell: the fields of an ``action``."""


def as_functions(tools: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns (a chat's tools as functions, {name: type} of those that had another type)."""
    functions: list[dict[str, Any]] = []
    types: dict[str, str] = {}
    for tool in tools:
        tool_type = get_tool_type(tool)
        function = tool.get(tool_type)
        if tool_type == "custom" and isinstance(function, Mapping):
            # The description shows the grammar of the input to the model; nothing enforces it.
            paragraphs = [function.get("description"), *_grammar_definitions(function.get("format"))]
            description = "\n\n".join(str(paragraph) for paragraph in paragraphs if paragraph)
            function = {"name": function.get("name"), "description": description, "parameters": _CUSTOM_PARAMETERS}
        elif tool_type == "local_shell":
            description = "Runs a command on the user's machine."
            function = {"name": tool_type, "description": description, "parameters": SHELL_PARAMETERS}
        elif tool_type != "function":
            _warn_left_out("tool", tool_type)
            continue
        functions.append(dict(tool) if tool_type == "function" else {"type": "function", "function": function})
        if tool_type != "function" and isinstance(function, Mapping):
            types[str(function["name"])] = tool_type
    return functions, types


def get_tool_type(tool: Mapping[str, Any]) -> str:
    """Returns the ``type`` of a tool or a tool choice; "function" if there is none."""
    tool_type = tool.get("type")
    return tool_type if isinstance(tool_type, str) else "function"


def _grammar_definitions(input_format: Any) -> list[Any]:
    """Returns the grammar in a custom tool's ``format``: its ``definition``, or that of a nested ``grammar``."""
    if not isinstance(input_format, Mapping):
        return []
    return [input_format.get("definition"), *_grammar_definitions(input_format.get("grammar"))]


def typed_call(tool_type: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``type`` and the field of this type, for a call of a custom tool or a shell, which became a function."""
    custom = {"name": name, "input": str(arguments.get("input", ""))}
    return {"type": tool_type, tool_type: custom if tool_type == "custom" else arguments}


def is_unserved_item(item_type: Any) -> bool:
    """True for a call or an output of a tool that is not served. Logs a warning."""
    if not isinstance(item_type, str) or item_type.startswith(("message", "function", "custom", "local_shell")):
        return False  # messages, and calls of the tools that are served
    is_unserved = item_type.startswith("mcp_") or item_type.endswith(("_call", "_output"))
    if is_unserved:
        _warn_left_out("item", item_type)
    return is_unserved


@lru_cache(maxsize=100)  # logs once for each type
def _warn_left_out(noun: str, name: str) -> None:
    logger.warning("The %s of type %r is left out: functions, custom tools and local_shell are served.", noun, name)
