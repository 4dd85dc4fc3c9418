"""Incremental detokenization: no incomplete characters, no parts of stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Decoders write this for bytes that are not, or not yet, a character.
REPLACEMENT_CHARACTER = "\ufffd"


class TextDelta(NamedTuple):
    """New text, and whether the token that completed it was drafted."""

    text: str
    drafted: bool


class Detokenizer:
    """Incremental detokenizer of one sequence.

    New text is the difference of decoding the last tokens with and without the new one. So it has the spaces that a
    tokenizer writes between tokens, but not before the first.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tail: list[int] = []
        self._shown = 0  # tokens of the tail whose text was returned

    def push(self, token: int) -> str:
        """Returns the new text; empty while a character lacks bytes."""
        self._tail.append(token)
        text = self._decode(self._tail)
        shown_text = self._decode(self._tail[: self._shown])
        if len(text) <= len(shown_text) or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._tail = self._tail[self._shown :]
        self._shown = len(self._tail)
        return text[len(shown_text) :]

    def finish(self) -> str:
        """Returns the remaining text, broken characters included."""
        text, shown_text = self._decode(self._tail), self._decode(self._tail[: self._shown])
        if not text.startswith(shown_text):  # an incomplete character has changed the text before it
            text, shown_text = self._decode(self._tail[self._shown :]), ""
        self._tail, self._shown = [], 0
        return text[len(shown_text) :]


class TextStream:
    """The text of one sequence as deltas.

    Args:
        decode: token ids to text.
        stops: strings that end the text, and are cut from it. Text that may begin one is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._tokens = Detokenizer(decode)
        self._stops = [stop for stop in stops if stop]
        self._pending: list[TextDelta] = []
        self._stopped = False

    def push(self, tokens: Sequence[int], from_draft: int, last: bool = False) -> list[TextDelta]:
        """Returns the deltas of a step, whose first ``from_draft`` tokens were drafted; the last holds nothing back."""
        for i, token in enumerate(tokens):
            self._append_pending(self._tokens.push(token), i < from_draft)
        if last:
            self._append_pending(self._tokens.finish(), False)
        return self._release(last)

    def _append_pending(self, text: str, drafted: bool) -> None:
        if text and not self._stopped:
            self._pending.append(TextDelta(text, drafted))

    def _release(self, last: bool) -> list[TextDelta]:
        text = "".join(delta.text for delta in self._pending)
        stops = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        end = min(stops) if stops else len(text) if last else len(text) - self._stop_prefix_len(text)
        released = list[TextDelta]()
        while end > 0:
            delta, drafted = self._pending.pop(0)
            released.append(TextDelta(delta[:end], drafted))
            if delta[end:]:
                self._pending.insert(0, TextDelta(delta[end:], drafted))
            end -= len(delta)
        if stops:
            self._stopped, self._pending = True, []
        return released

    def _stop_prefix_len(self, text: str) -> int:
        """Returns the number of last characters that may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
