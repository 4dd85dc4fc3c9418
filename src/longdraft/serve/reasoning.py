"""Separates what a model thinks, in ``<think>`` tags, from what it says."""

from __future__ import annotations

from typing import Literal

import regex  # type: ignore[import-untyped]

THINK_START, THINK_END = "<think>", "</think>"
_END = regex.compile(rf"\n*{THINK_END}")


class ReasoningParser:
    """Tells the thoughts of an answer from what it says, as its text comes.

    Args:
        inside: the prompt ends within the tags.
    """

    def __init__(self, in_reasoning: bool = False) -> None:
        self._pending = ""
        self._state: Literal["first", "opened", "thought", "closed", "said"] = "opened" if in_reasoning else "first"

    @property
    def in_reasoning(self) -> bool:
        return self._state in ("opened", "thought")

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """The next piece of text: what is thought, and what is said. Line ends beside the tags are left out."""
        self._pending += text
        thought = said = ""
        if self._state == "first":  # the text begins with the tag, or never has it
            begun = self._pending.lstrip()
            if begun.startswith(THINK_START):
                self._pending, self._state = begun[len(THINK_START) :], "opened"
            elif last or not THINK_START.startswith(begun):
                self._state = "said"
        if self._state == "opened":
            self._pending = self._pending.lstrip("\n")
            self._state = "thought" if self._pending else "opened"
        if self._state == "thought":
            end = _END.search(self._pending, partial=True)
            thought = self._pending[: end.start()]
            self._pending = self._pending[end.start() if end.partial else end.end() :]
            if last and end.partial:
                thought, self._pending = thought + self._pending.rstrip("\n"), ""
            self._state = "thought" if end.partial else "closed"
        if self._state == "closed":
            self._pending = self._pending.lstrip("\n")
            self._state = "said" if self._pending else "closed"
        if self._state == "said":
            said, self._pending = self._pending, ""
        return thought, said
