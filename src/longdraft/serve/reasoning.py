"""Separates reasoning, in ``<think>`` tags, from the answer."""

from __future__ import annotations

from typing import Literal

import regex  # type: ignore[import-untyped]

THINK_START, THINK_END = "<think>", "</think>"
_THINK_END_PATTERN = regex.compile(rf"\n*{THINK_END}")


class ReasoningParser:
    """Separates reasoning from the answer while text streams.

    Args:
        in_reasoning: the prompt ends inside ``<think>``, so the text begins with reasoning.
    """

    def __init__(self, in_reasoning: bool = False) -> None:
        self._pending = ""  # text that has not been returned
        # "opened" and "closed" are the states just after a tag, in which line breaks are skipped.
        self._state: Literal["start", "opened", "reasoning", "closed", "answer"] = "opened" if in_reasoning else "start"

    @property
    def in_reasoning(self) -> bool:
        return self._state in ("opened", "reasoning")

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """Splits new text into (reasoning, answer), without line breaks next to tags. ``last``: no text follows."""
        self._pending += text
        reasoning = answer = ""
        if self._state == "start":  # only a tag at the very start opens reasoning
            stripped = self._pending.lstrip()
            if stripped.startswith(THINK_START):
                self._pending, self._state = stripped[len(THINK_START) :], "opened"
            elif last or not THINK_START.startswith(stripped):
                self._state = "answer"
        if self._state == "opened":
            self._pending = self._pending.lstrip("\n")
            self._state = "reasoning" if self._pending else "opened"
        if self._state == "reasoning":
            match = _THINK_END_PATTERN.search(self._pending, partial=True)  # a partial </think> stays pending
            reasoning = self._pending[: match.start()]
            self._pending = self._pending[match.start() if match.partial else match.end() :]
            if last and match.partial:
                reasoning, self._pending = reasoning + self._pending.rstrip("\n"), ""
            self._state = "reasoning" if match.partial else "closed"
        if self._state == "closed":
            self._pending = self._pending.lstrip("\n")
            self._state = "answer" if self._pending else "closed"
        if self._state == "answer":
            answer, self._pending = self._pending, ""
        return reasoning, answer
